"""Build: objects from a definition and a state, new ones or existing ones filled in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MethodType
from typing import Any

from linnet.errors import StateMismatchError, compare_entries, misfit_text
from linnet.nnx.graphlib.walk import Definition
from linnet.nnx.pytreelib.attributes import keep_equal_statics
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    REFERENCE,
    STATIC,
    VARIABLE,
    holds_data,
)
from linnet.nnx.pytreelib.objects import Pytree, new_object
from linnet.nnx.pytreelib.statics import pack_statics
from linnet.nnx.pytreelib.tracing import current_trace
from linnet.nnx.statelib import iter_down_to, restore_int_paths
from linnet.nnx.variablelib.variable import Variable, copy_of, rebuild_variable

VariableMaker = Callable[[Any, type, Any], Any]


class Misfit(Exception):
    """Internal: the state lacks or exceeds what the definition asks for."""


def use_variable(leaf: Any, cls: type, metadata: Any) -> Any:
    """The Variable of a state becomes the object's own; a plain value gets a new Variable."""
    return leaf if isinstance(leaf, Variable) else rebuild_variable(cls, leaf, metadata)


def copy_variable(leaf: Any, cls: type, metadata: Any) -> Any:
    """A new Variable each time."""
    return copy_of(leaf) if isinstance(leaf, Variable) else rebuild_variable(cls, leaf, metadata)


def _keep_leaf(leaf: Any, cls: type, metadata: Any) -> Any:
    return leaf


def variable_maker(copy: bool, recreate: bool) -> VariableMaker:
    """How leaves of a state become Variables: copied, taken as they are, or left unwrapped."""
    return copy_variable if copy else use_variable if recreate else _keep_leaf


@dataclasses.dataclass(eq=False)
class Build:
    """The state of one construction, or of several whose objects are numbered together.

    ``make`` gives the Variable for a leaf, ``things`` is what was built before, by number, and
    ``reuse`` has objects to fill in place of new ones, by the number they will have. ``statics``
    are the static values that were put in so far, in the order of ``Walk.statics``; ``own_statics``
    has for each, or None, the value to put in, if it is still equal, in place of a copy.
    """

    make: VariableMaker = use_variable
    things: list[Any] = dataclasses.field(default_factory=list)
    reuse: dict[int, Any] = dataclasses.field(default_factory=dict)
    statics: list[Any] = dataclasses.field(default_factory=list)
    own_statics: list[Any] | None = None

    def __post_init__(self) -> None:
        self.takes_variables = self.make is use_variable and not self.reuse
        self.trace = current_trace()
        # Objects and names: what the definition has as data may be sorted as static now.
        self.now_static: list[tuple[Any, Any]] = []
        self.first_static = 0  # of the object that is being built

    def unflatten(self, definition: Definition, state: Any) -> Any:
        """The object that ``definition`` describes, with the leaves of ``state``.

        Raises:
          StateMismatchError: leaves are missing or left over; all their paths are listed.
        """
        self.first_static = len(self.statics)
        try:
            if definition.kind == VARIABLE:
                if type(state) is dict:
                    raise Misfit
                return self._variable(definition, state)
            if definition.kind == ARRAY:
                return state
            if definition.kind in (STATIC, REFERENCE) and state:
                raise Misfit
            made = self._node(definition, state)
        except Misfit:
            raise _misfit_error(definition, state) from None
        if self.now_static:
            self._mark_as_data()
        return made

    def _mark_as_data(self) -> None:
        """Marks what the definition has as data, and would be sorted as static, as data.

        This comes last: a container may refer back to one that is not filled yet.
        """
        for obj, name in self.now_static:
            if not holds_data(obj._pytree_items()[name]):
                obj._pytree_mark(name, True)
        self.now_static.clear()

    def _variable(self, definition: Definition, leaf: Any) -> Any:
        variable = self.reuse.get(len(self.things))
        if variable is None:
            variable = self.make(leaf, definition.payload, definition.static)
        else:
            variable.update_from_state(use_variable(leaf, definition.payload, definition.static))
        self.things.append(variable)
        return variable

    def _node(self, definition: Definition, state: Any) -> Any:
        kind = definition.kind
        if kind == OBJECT:
            return self._object(definition, state)
        if kind == REFERENCE:
            return self.things[definition.payload]
        if kind == STATIC:
            return definition.payload.thaw()
        if kind == METHOD:
            items: dict[Any, Any] = {}
            self._children(definition.names, definition.children, state, items)
            return MethodType(definition.payload.value, items["__self__"])
        return self._container(definition, state)

    def _object(self, definition: Definition, state: Any) -> Any:
        _, cls, names, definitions, static_part, _, kept_marks, shared = definition
        marks = dict(kept_marks) if kept_marks else None
        obj = self.reuse.get(len(self.things))
        is_new = obj is None
        if is_new:
            obj = new_object(cls, marks, self.trace)
        self.things.append(obj)
        # Most new objects keep their attributes in __dict__, which is filled without a copy.
        in_place = is_new and cls._pytree_restore is Pytree._pytree_restore
        items = obj.__dict__ if in_place else {}
        now_static = self._children(names, definitions, state, items)
        static_part.apply(items, obj)
        if not is_new:
            keep_equal_statics(
                items, static_part, obj._pytree_items(), copied=self.own_statics is None
            )
            if type(obj) is not cls:
                obj.__class__ = cls
            if not obj._pytree_ordered:  # an object that is filled prints as before
                in_order = [*obj._pytree_items(), *items]
                items = {name: items[name] for name in in_order if name in items}
            obj._pytree_clear(marks)
        if static_part.special:
            self._put_statics(static_part, dict(shared), items)
        if not in_place:
            obj._pytree_restore(items)
        if now_static:
            unmarked = (name for name in now_static if marks is None or name not in marks)
            self.now_static += [(obj, name) for name in unmarked]
        return obj

    def _put_statics(self, static_part: Any, shared: dict[Any, int], items: Any) -> None:
        """Puts in what stands there outside, if it is equal; one value wherever one stood."""
        for name, packed in static_part.copied_values:
            if name in shared:
                items[name] = self.statics[self.first_static + shared[name]]
                continue
            own = None if self.own_statics is None else self.own_statics[len(self.statics)]
            if own is not None and pack_statics([own])[0] == (packed,):
                items[name] = own
            self.statics.append(items[name])

    def _children(
        self, names: Any, definitions: Any, state: Any, items: dict[Any, Any]
    ) -> list[Any]:
        """Fills ``items``.

        Returns the names that the definition has as data and whose new value would be sorted as
        static (a sharding, None); of a list or dict met before, which may not be filled yet, too.
        """
        if type(state) is not dict:
            raise Misfit
        used = 0
        now_static: list[Any] = []
        for name, definition in zip(names, definitions, strict=True):
            kind = definition.kind
            if kind == VARIABLE:
                if name not in state:
                    raise Misfit
                leaf = state[name]
                used += 1
                if self.takes_variables and isinstance(leaf, Variable):
                    self.things.append(leaf)
                    items[name] = leaf
                else:
                    items[name] = self._variable(definition, leaf)
            elif kind == ARRAY:
                if name not in state:
                    raise Misfit
                items[name] = leaf = state[name]
                used += 1
                if not holds_data(leaf):
                    now_static.append(name)
            elif kind == REFERENCE:
                items[name] = value = self.things[definition.payload]
                if type(value) in (list, dict):
                    now_static.append(name)
            else:
                inner = state.get(name)
                used += inner is not None
                build = self._object if kind == OBJECT else self._node
                items[name] = value = build(definition, {} if inner is None else inner)
                if kind not in (OBJECT, METHOD) and not holds_data(value):
                    now_static.append(name)
        if used != len(state):
            raise Misfit
        return now_static

    def _container(self, definition: Definition, state: Any) -> Any:
        kind, payload, names, definitions, static_part, all_keys, _, _ = definition
        # Lists and dicts have an identity: they are numbered before what is in them.
        shell: Any = self.reuse.get(len(self.things))
        if kind in (LIST, DICT):
            shell = payload() if shell is None else shell
            self.things.append(shell)
        own = dict(enumerate(shell) if kind == LIST else shell) if kind in (LIST, DICT) else {}
        items: dict[Any, Any] = {}
        self._children(names, definitions, state, items)
        static_part.apply(items, None)
        keep_equal_statics(items, static_part, own)
        if kind == PYTREE:
            return payload.unflatten([items[key] for key in all_keys])
        if kind == DICT:
            shell.clear()
            shell.update((key, items[key]) for key in all_keys)
            return shell
        if kind == LIST:
            shell[:] = [items[key] for key in all_keys]
            return shell
        if hasattr(payload, "_fields"):
            return payload(**items)
        return payload(items[key] for key in all_keys)


def _misfit_error(definition: Definition, state: Any) -> StateMismatchError:
    wanted = dict.fromkeys(path for path, _ in definition.leaves())
    given = dict(iter_down_to(wanted, state))
    found = compare_entries(wanted, given)
    fix = "merge with the states that nnx.split gave, all of them and no others."
    whole = restore_int_paths(state) if type(state) is dict else state
    if found.extra and {path for path, _ in iter_down_to(wanted, whole)} == set(wanted):
        fix = "nnx.restore_int_paths(state): some keys are the text of integers."
    text = misfit_text(
        found.under("Missing", "Not in the graphdef"),
        fix=fix,
        summary=f"Incorrect number of leaves, expected {len(wanted)} leaves, but got {len(given)}: "
        "the state does not fit the graphdef.",
    )
    return StateMismatchError(text)
