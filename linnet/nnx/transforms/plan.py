"""Plans: what ``nnx.jit`` remembers about its arguments, so that a call costs no walk.

A plan belongs to one jitted function and one set of objects. It holds the flat list of their
Variables and the compiled entry for their structure, and stays good until one of the objects
changes its structure. The objects announce that themselves (``linnet.nnx.watch``); plain lists and
other things that cannot announce anything are guarded by a snapshot. The objects are held weakly:
when one of them is dropped, so is the plan.

With ``LINNET_CHECK_PLANS=1`` in the environment every call walks anyway and compares.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from linnet.nnx import statics, watch
from linnet.nnx.attributes import sort_attributes
from linnet.nnx.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    STATIC,
    TUPLE,
    VARIABLE,
    kind_of,
    one_level,
)
from linnet.nnx.transforms.lift import Opened
from linnet.nnx.var_storage import from_refs

CHECK_PLANS = os.environ.get("LINNET_CHECK_PLANS", "") not in ("", "0")


class Guard:
    """A snapshot of something inside an object that changes without a word."""

    __slots__ = ("holder", "key", "name")

    def __init__(self, holder: Any, name: Any):
        self.holder = weakref.ref(holder)
        self.name = name
        self.key = self._snapshot()

    def _snapshot(self) -> Any:
        holder = self.holder()
        return None if holder is None else _identity_key(holder._pytree_items().get(self.name))

    def holds(self) -> bool:
        """Whether the thing is as it was."""
        return self._snapshot() == self.key


def _identity_key(value: Any) -> Any:
    """A key of a container by the identity of what it holds, and of a static value by itself."""
    kind = kind_of(value)
    if kind == DICT:
        return (dict, tuple([(key, _identity_key(item)) for key, item in value.items()]))
    if kind in (LIST, TUPLE):
        return (kind, tuple([_identity_key(item) for item in value]))
    if kind == PYTREE:
        items, treedef = one_level(value)
        return (treedef, tuple([(key, _identity_key(item)) for key, item in items]))
    if kind == METHOD:
        return (METHOD, value.__func__, id(value.__self__))
    if kind in (VARIABLE, OBJECT):
        return id(value)
    return ARRAY if kind == ARRAY else statics.fingerprint(value)


def _needs_guard(value: Any) -> bool:
    kind = kind_of(value)
    if kind in (LIST, DICT, PYTREE):
        return True
    if kind == TUPLE:
        return any(map(_needs_guard, value))
    return kind == STATIC and statics.can_change(value)


class _Record(NamedTuple):
    """What a plan knows of one object: its place, and what must not have changed."""

    position: int
    cls: type
    names: Any
    children: Any


def _child_ids(values: Any, value_kinds: Any) -> tuple[Any, ...]:
    pairs = zip(values, value_kinds, strict=True)
    return tuple([ARRAY if kind == ARRAY else id(value) for value, kind in pairs])


def _gone() -> None:
    """Stands for a weak reference to an object that is no more."""


class Plan:
    """The arguments of one jitted function, known beforehand.

    Args:
      roots: the objects among the arguments.
      opened: the same, taken apart.
      entry: what is compiled for their structure.
      forget: called when one of the roots is gone.
    """

    def __init__(
        self,
        roots: list[Any],
        opened: Opened,
        entry: Any,
        forget: Callable[[], Any],
    ):
        self.entry = entry
        self.size = len(opened.seen)
        self.ids = {id(thing) for thing in opened.seen}
        self.variables = opened.variables
        self._targets: dict[int, Any] = {}
        self.dirty: list[Any] = []
        self.roots = [weakref.ref(root, lambda _: forget()) for root in roots]
        self.uses_refs = any(v._metadata.stored_as_ref for v in self.variables)
        self.guards: list[Guard] = []
        self.array_slots: list[tuple[weakref.ref[Any], Any]] = []
        self.usable = not any(v._metadata.has_containers for v in self.variables)
        self._records: dict[int, _Record] = {}
        self._static_parts: list[Any] = []
        self._variants: dict[Any, Any] = {}
        for thing in opened.seen:
            self._learn(thing)
        self._variants[tuple(self._static_parts)] = entry
        self.usable = self.usable and len(self.array_slots) == len(opened.arrays)

    def _learn(self, thing: Any) -> None:
        kind = kind_of(thing)
        if kind in (OBJECT, VARIABLE):
            watch.watch(thing, self)
        if kind != OBJECT:
            return
        names, values, value_kinds, part = sort_attributes(thing)
        place, children = len(self._static_parts), _child_ids(values, value_kinds)
        self._records[id(thing)] = _Record(place, type(thing), names, children)
        self._static_parts.append(part)
        for name, kind in zip(names, value_kinds, strict=True):
            if kind == ARRAY:
                self.array_slots.append((weakref.ref(thing), name))
            elif kind in (METHOD, STATIC):
                self.usable = False
        items = thing._pytree_items()
        settled = thing._pytree_settled
        self.guards += [
            Guard(thing, name)
            for name, value in items.items()
            if name not in settled and _needs_guard(value)
        ]

    def structure_changed(self, thing: Any) -> None:
        """Takes note that one of the objects changed; the next call looks what it was.

        ``thing`` is None for an object that is gone: another one may get its id.
        """
        self.dirty.append(_gone if thing is None else weakref.ref(thing))

    def holds(self, roots: list[Any]) -> bool:
        """Whether the plan is good for these objects as they are now."""
        for ref, root in zip(self.roots, roots, strict=True):
            if ref() is not root:
                return False
        if self.dirty and not self._refresh():
            return False
        return all(guard.holds() for guard in self.guards)

    def _refresh(self) -> bool:
        """After structural writes: whether only static values changed, to a known combination."""
        dirty = list(self.dirty)
        for ref in dirty:
            thing = ref()
            record = self._records.get(id(thing))
            if thing is None or record is None:
                return False
            names, values, value_kinds, part = sort_attributes(thing)
            if names != record.names or _child_ids(values, value_kinds) != record.children:
                return False
            self._static_parts[record.position] = part
        entry = self._variants.get(tuple(self._static_parts))
        if entry is None:
            return False
        self.entry = entry
        del self.dirty[: len(dirty)]  # last, so that an interrupt cannot lose a change
        return True

    def adopt(self, older: Plan) -> None:
        """Keeps the combinations of static values that an earlier plan of the objects knew."""
        if older._frame() == self._frame():
            self._variants = {**older._variants, **self._variants}

    def _frame(self) -> Any:
        """All that the structure of the objects depends on, except their static values."""
        ids, guards = [*map(id, self.variables)], [guard.key for guard in self.guards]
        return self._records, ids, self.entry.structure.variable_kinds, guards

    def targets_of(self, effects: Any) -> list[Any]:
        """The Variables that a run with these effects changes."""
        known = self._targets.get(id(effects))
        if known is None or known[0] is not effects:
            chosen = [self.variables[number] for number in effects.changed]
            known = self._targets[id(effects)] = (effects, chosen)
        return known[1]

    def values(self) -> list[Any]:
        """The Variables' values, as they are now."""
        if self.uses_refs:
            return [from_refs(variable._raw) for variable in self.variables]
        return [variable._raw for variable in self.variables]

    def arrays(self) -> list[Any]:
        """The arrays that stand directly in objects, as they are now."""
        if not self.array_slots:
            return []
        holders = ((ref(), name) for ref, name in self.array_slots)
        return [holder._pytree_items()[name] for holder, name in holders if holder is not None]

    def check(self, opened: Opened) -> None:
        """Compares with what a walk gives; for tests."""
        same = opened.structure == self.entry.structure and len(opened.variables) == len(
            self.variables
        )
        same = same and all(a is b for a, b in zip(opened.variables, self.variables, strict=True))
        same = same and all(a is b for a, b in zip(opened.arrays, self.arrays(), strict=True))
        if not same:
            raise AssertionError(
                "a plan of nnx.jit does not fit its objects: something changed unannounced"
            )
