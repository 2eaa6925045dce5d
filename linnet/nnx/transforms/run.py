"""Running the user's function inside a transform, and the loop that finds out what it changes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from linnet.errors import path_string
from linnet.nnx.graphlib.graphdef import graph_mode, graph_updates
from linnet.nnx.graphlib.traverse import refuse_abstract
from linnet.nnx.graphlib.walk import LEAF, Definition
from linnet.nnx.pytreelib import locate
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    STATIC,
    VARIABLE,
    container_items,
    key_name,
    kind_of,
    one_level,
)
from linnet.nnx.pytreelib.tracing import naming
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.engine import (
    Effects,
    Inside,
    Opened,
    Structure,
    close,
    is_node,
    open_tree,
)
from linnet.nnx.transforms.retrace import TraceLog, difference


class Call:
    """One call of a transform: the arguments opened, and what the run inside did.

    Args:
      f: the user's function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      api: the name of the transform.
      graph: as the user said.
      updates: as the user said.
      named: the function whose parameters name the arguments in errors, where ``f`` is a wrapper.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        api: str,
        graph: bool | None,
        updates: bool | None,
        named: Callable[..., Any] | None = None,
    ):
        self.f = f
        self._named = f if named is None else named
        self.api = api
        self.graph = graph_mode(graph)
        self.updates = graph_updates(updates)
        self.opened: Opened = open_tree((args, kwargs), self.graph, api, where=self.where)
        self.effects: Effects | None = None
        self.before: Callable[[Any], None] | None = None  # run on the objects inside, first
        self.after: list[Callable[[Any, Any], None]] = []  # and last, with the output

    @functools.cached_property
    def _names(self) -> TraceLog:
        return TraceLog(self._named)

    def where(self, path: Any) -> str:
        """A place in the arguments, as the parameters of the user's function name it."""
        return self._names.where(tuple(path)) if len(path) > 1 else "of all arguments"

    def difference(self, now: Structure) -> str:
        """The first difference between the arguments as they came and as they are now."""
        return difference(self._names, self.opened.structure, now)

    def run(
        self, values: Any, arrays: Any, plain: Any, as_values: Any = frozenset()
    ) -> tuple[Any, list[Any], list[Any], Any]:
        """Runs the function on tracers, inside the transform.

        Variables in ``as_values`` are no refs inside, however they are stored.

        Returns:
          The objects inside, the arrays of new things, the plain leaves, and the raw output.
        """
        inside = self.opened.structure.enter(values, arrays, plain, as_values)
        args, kwargs = inside.tree
        if self.before is not None:
            self.before(inside)
        refs = [v for n in as_values if (v := inside.variables[n])._metadata.stored_as_ref]
        copies = locate.standing_for(inside.objects, self.opened.seen)
        with naming(inside.nodes), copies, _without_refs(refs):
            out = self.f(*args, **kwargs)
        for last in self.after:
            last(inside, out)
        self.effects, news, leaves = inside.leave(
            out, self.graph, self.updates, self.api, self.where
        )
        return inside, news, leaves, out

    def run_changed(self, values: Any, arrays: Any, plain: Any) -> tuple[Any, Any, Any]:
        """The same; gives the changed values, the arrays of new things, and the plain leaves."""
        inside, news, leaves, _ = self.run(values, arrays, plain)
        assert self.effects is not None
        return [inside.raw(number) for number in self.effects.changed], news, leaves

    def close(self, changed: Any, news: Any, leaves: Any) -> Any:
        """Writes the changes out and gives the output."""
        assert self.effects is not None
        return close(self.opened, self.effects, changed, news, leaves)


@contextlib.contextmanager
def _without_refs(variables: list[Any]) -> Iterator[None]:
    """Has Variables hold plain values for a while, whatever is written to them."""
    settings = [{name: v._metadata[name] for name in ("hijax", "ref")} for v in variables]
    for variable in variables:
        plain = variable._metadata.replaced({"hijax": False, "ref": False})
        object.__setattr__(variable, "_metadata", plain)
    yield
    for variable, setting in zip(variables, settings, strict=True):
        object.__setattr__(variable, "_metadata", variable._metadata.replaced(setting))


def without_static(
    f: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], api: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that knows its static arguments, and the arguments without them.

    Raises:
      ValueError: there is no such argument.
    """
    count = len(args)
    beyond = [n for n in static if not -count <= n < count]
    if beyond:
        raise ValueError(
            f"nnx.{api}: static argument {beyond[0]} is out of range for a call with {count} "
            "positional arguments.\nFix: pass it by position, or name another one."
        )
    fixed = {n % count: args[n] for n in static}

    def with_static(*inner: Any, **named: Any) -> Any:
        return f(*(fixed.get(n, arg) for n, arg in enumerate(inner)), **named)

    return with_static, tuple(None if n in fixed else arg for n, arg in enumerate(args))


def positional(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], api: str
) -> tuple[Any, ...]:
    """Arguments that were given by name put where they stand by position.

    Raises:
      TypeError: one of them has no position.
    """
    if not kwargs:
        return args
    bound = inspect.signature(f).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"nnx.{api} takes arguments by position, and {sorted(bound.kwargs)} cannot be given "
            "one.\nFix: pass them by position, or bind them first with functools.partial."
        )
    return bound.args


def transform(
    api: str, lifted: Callable[..., Any], f: Any, /, *, finish: Any = None, **options: Any
) -> Any:
    """A function that runs ``lifted(f, args, kwargs, **options)``, or a decorator that makes one;
    ``finish`` has the last word on it."""

    def make(f: Any) -> Any:
        refuse_bound_method(f, api)

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return lifted(f, args, kwargs, **options)
            except TypeError as error:
                refuse_abstract((args, kwargs), error)
                raise

        return wrapper if finish is None else finish(wrapper)

    return make if f is None else make(f)


Path = tuple[Any, ...]


class Slots:
    """The slots of one call.

    Args:
      call: the call.
    """

    def __init__(self, call: Call):
        opened = call.opened
        self.call = call
        self.values: list[Any] = opened.values + opened.arrays
        self.paths: list[Path] = opened.variable_paths + opened.array_paths
        self.variables = len(opened.variables)
        self.plain: list[Any] = opened.plain
        leaves = jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node)
        paths = [(tuple(key_name(key) for key in path), leaf) for path, leaf in leaves]
        self.node_paths: list[Path] = [path for path, leaf in paths if is_node(leaf)]
        self.plain_paths: list[Path] = [path for path, leaf in paths if not is_node(leaf)]

    def where(self, number: int) -> str:
        """Where a slot stands, for a message."""
        return self.call.where(self.paths[number])

    def run(self, values: list[Any], plain: Any, fixed: Any = frozenset()) -> Run:
        """Runs the function with these values, inside the transform.

        Args:
          values: one for each slot.
          plain: the other leaves of the arguments.
          fixed: slots that are not expected to change; refs among them are not made anew.

        Returns:
          What the run did.
        """
        count = self.variables
        inside, news, leaves, out = self.call.run(values[:count], values[count:], plain, fixed)
        return Run(self, inside, news, leaves, out)


class Run:
    """What one run did: to the slots, and what it made and returned.

    Attributes:
      now: the value of each slot after the run.
      changed: the slots that were written to.
      fresh: the arrays of new Variables and objects.
      leaves: the plain leaves of the output.
      out: the output.
    """

    def __init__(self, slots: Slots, inside: Inside, news: list[Any], leaves: Any, out: Any):
        effects = slots.call.effects
        assert effects is not None
        self.slots = slots
        self.inside = inside
        self.effects = effects
        self.leaves = leaves
        self.out = out
        self._made = len(news)
        self._moved = self._moved_arrays()
        before = inside.arrays
        self.now = inside.slot_values()
        for made, number in self._moved.items():
            self.now[number] = news[made]
        arrays = {n for n in self._moved.values() if self.now[n] is not before[n - slots.variables]}
        self.changed: set[int] = set(effects.changed) | arrays
        self.fresh = [x for made, x in enumerate(news) if made not in self._moved]

    def _moved_arrays(self) -> dict[int, int]:
        """For what goes out in place of an array that came in, the slot of that array."""
        slots = self.slots
        count = slots.variables
        numbers = {path: count + n for n, path in enumerate(slots.paths[count:])}
        return {
            made: numbers[path]
            for path, made, definition in self._parts()
            if definition == LEAF and path in numbers
        }

    def _parts(self) -> Iterator[tuple[Path, int, Definition]]:
        """What goes out as part of the arguments: path, number, and what it is."""
        for prefix, part in zip(self.slots.node_paths, self.effects.parts or (), strict=False):
            for path, slot in part.leaves:
                if not slot.old:
                    yield (*prefix, *path), slot.number, part.definition.at(path)

    def fresh_places(self) -> Iterator[tuple[int, Path]]:
        """For each of ``fresh`` that became part of an argument, its number there and its path."""
        order = self._order()
        for path, made, _ in self._parts():
            if made in order:
                yield order[made], path

    def fresh_outputs(self) -> Iterator[tuple[int, int, Path]]:
        """For each of ``fresh`` in the output, its number, that of the leaf, and its path there."""
        order = self._order()
        for leaf, part in enumerate(self.effects.out_parts):
            for path, slot in part.leaves if part is not None else ():
                if not slot.old:
                    yield order[slot.number], leaf, path

    def fresh_names(self) -> list[str]:
        """Where each of ``fresh`` stands, for messages."""
        leaves = jax.tree_util.tree_leaves_with_path(self.out, is_leaf=is_node)
        names = [""] * len(self.fresh)
        for number, path in self.fresh_places():
            names[number] = self.slots.call.where(path)
        for number, position, path in self.fresh_outputs():
            names[number] = output_text(leaves[position][0], path)
        return names

    def _order(self) -> dict[int, int]:
        made = [n for n in range(self._made) if n not in self._moved]
        return {number: position for position, number in enumerate(made)}

    def form(self) -> Any:
        """What the run did to the structure of the arguments, comparable; None if nothing."""
        effects, inside = self.effects, self.inside
        if effects.parts is None:
            return None
        kept = effects.reused[: len(inside.objects)]
        parts = tuple(
            (part.definition, tuple((path, self._content(slot)) for path, slot in part.leaves))
            for part in effects.parts
        )
        same = all(
            content == self._came(prefix + path)
            for prefix, (_, leaves) in zip(self.slots.node_paths, parts, strict=True)
            for path, content in leaves
        )
        before = [d for d in inside.structure.definitions if d is not None]
        if same and [d for d, _ in parts] == before and kept == tuple(range(len(inside.objects))):
            return None
        return parts, kept

    def _content(self, slot: Any) -> Any:
        if slot.old:
            return slot.number
        return self._moved.get(slot.number, "new")

    def _came(self, path: Path) -> Any:
        """The slot that had this path when it came in."""
        return self.slots.paths.index(path) if path in self.slots.paths else None

    def difference(self) -> str:
        """How the structure of the arguments changed, in words."""
        call = self.slots.call
        now = open_tree(self.inside.tree, True, call.api).structure
        return call.difference(now)

    def forget(self) -> None:
        """Lets go of tracers: what outlives the trace must not hold on to them."""
        del self.inside, self.now, self.fresh, self.leaves, self.out

    def close(self, final: dict[int, Any], fresh: list[Any], leaves: Any) -> Any:
        """Writes the run out.

        Args:
          final: the values of the slots that changed.
          fresh: as ``fresh``.
          leaves: as ``leaves``.

        Returns:
          The output.
        """
        slots = self.slots
        order = self._order()
        news = [
            fresh[order[made]]
            if made in order
            else final.get(self._moved[made], slots.values[self._moved[made]])
            for made in range(self._made)
        ]
        in_place = self.effects.parts is None  # otherwise arrays go out with the structure
        changed = tuple(n for n in sorted(final) if in_place or n < slots.variables)
        slots.call.effects = dataclasses.replace(self.effects, changed=changed, kept=())
        return slots.call.close([final[n] for n in changed], news, leaves)


def output_text(keys: Any, path: Path = ()) -> str:
    """A place in the output, for a message."""
    return "the output" + path_string((*(key_name(key) for key in keys), *path))


MISSING = object()


class Places:
    """The places of the slots of one run.

    Args:
      slots: the slots of the call.
      inside: the objects of the run.
    """

    def __init__(self, slots: Slots, inside: Inside):
        self._paths = slots.paths
        self._roots = list(zip(slots.node_paths, inside.nodes, strict=True))

    def _way_to(self, number: int) -> tuple[Any, tuple[Any, ...]]:
        path = self._paths[number]
        prefix, node = next((p, node) for p, node in self._roots if path[: len(p)] == p)
        return node, path[len(prefix) :]

    def found(self, number: int) -> Any:
        """What stands in the place of a slot, ``MISSING`` if there is no such place any more."""
        thing, path = self._way_to(number)
        for name in path:
            thing = _child(thing, name)
        return thing

    def put(self, number: int, thing: Any) -> None:
        """Puts something in the place of a slot, where something stands."""
        _with_thing(*self._way_to(number), thing)


def _child(holder: Any, name: Any) -> Any:
    kind = kind_of(holder)
    if kind in (STATIC, VARIABLE, ARRAY):
        return MISSING
    if kind == METHOD:
        return getattr(holder, name, MISSING)
    items = holder._pytree_items() if kind == OBJECT else dict(container_items(holder, kind))
    return items.get(name, MISSING)


def _with_thing(holder: Any, path: tuple[Any, ...], thing: Any) -> Any:
    """The holder itself with something else at a path, or a copy of one that cannot change."""
    if not path:
        return thing
    name, child = path[0], _child(holder, path[0])
    changed = _with_thing(child, path[1:], thing)
    if changed is child:
        return holder
    kind = kind_of(holder)
    if kind == OBJECT:
        holder._pytree_restore({**holder._pytree_items(), name: changed})
        return holder
    if kind in (LIST, DICT):
        holder[name] = changed
        return holder
    if kind == PYTREE:
        items, treedef = one_level(holder)
        return treedef.unflatten([changed if key == name else item for key, item in items])
    items = {**dict(container_items(holder, kind)), name: changed}
    is_named = hasattr(holder, "_fields")
    return type(holder)(**items) if is_named else type(holder)(items.values())
