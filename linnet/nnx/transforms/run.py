"""One call of a transform: the arguments opened, the function run inside, the results closed.

``transform`` makes a function that opens its arguments as a ``Call`` and hands it to the transform.
``Call.run`` enters, runs and leaves (see ``engine``); the transform calls it inside the function
that it gives to JAX. The ``Run`` that comes back says which slots changed, which arrays are fresh
and what was returned. A transform that treats all arrays alike returns ``Call.outcome`` through
JAX, and gives it to ``Call.close``; one that knows an axis for each slot puts the final values
together itself, and gives them to ``Run.close``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from linnet.nnx.graphlib.explain import refuse_abstract
from linnet.nnx.graphlib.graphdef import graph_modes
from linnet.nnx.graphlib.walk import ARRAY_LEAF, Definition
from linnet.nnx.pytreelib.kinds import Path, is_node
from linnet.nnx.transforms.arguments import as_tuple, refuse_bound_method
from linnet.nnx.transforms.axes import ArgumentAxes
from linnet.nnx.transforms.effects import Effects, GraphUpdates, Origin, Outcome, sown_only
from linnet.nnx.transforms.engine import (
    Inside,
    Opened,
    Structure,
    close,
    leaves_with_paths,
    open_tree,
    output_place,
)
from linnet.nnx.transforms.errors import is_about, name_arguments, named_after
from linnet.nnx.transforms.retrace import ArgumentNames, difference


def transform(
    api: str,
    lifted: Callable[[Call], Any],
    f: Any,
    graph: bool | None,
    graph_updates: bool | None = None,
    *,
    static_argnums: int | tuple[int, ...] = (),
    own_specs: int | None = 0,
    by_position: bool = False,
    around: Callable[[Any], Any] = lambda made: made,
) -> Any:
    """Makes the function that a user calls; without ``f``, a decorator.

    It opens its arguments, hands them to ``lifted`` as a ``Call``, and is wrapped by ``around``.

    ``own_specs`` is how many of the first parameters have an axis or spec of their own: None if one
    is for all (``count_specs``), ``ALL_PARAMETERS`` if each has one. Arguments for these that are
    given by name are put in their positions; with ``by_position`` all arguments given by name are.
    Without graph updates (``as_jax``) None and ``ALL_PARAMETERS`` count as 0: like ``jax.vmap``,
    arguments given by name are mapped along axis 0.
    """
    static = as_tuple(static_argnums)

    def make(f: Any) -> Any:
        refuse_bound_method(f, api)

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                as_jax = not graph_modes(graph, graph_updates)[1]
                count = 0 if as_jax and own_specs in (None, ALL_PARAMETERS) else own_specs
                given, named = in_positions(f, args, kwargs, count)
                if by_position:
                    given, named = positional(f, given, named, api), {}
                fun, moving = without_static(f, given, static, api) if static else (f, given)
                call = Call(fun, moving, named, api, graph, graph_updates, named_by=f)
                with call.naming_arguments():
                    return lifted(call)
            except TypeError as error:
                refuse_abstract((args, kwargs), error)
                raise

        return around(wrapper)

    return make if f is None else make(f)


def without_static(
    f: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], api: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Binds static arguments to the function; returns it and the arguments with None for them."""
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


ALL_PARAMETERS = sys.maxsize  # as a number of specs: one for each parameter of the function


def count_specs(prefix: Any) -> int | None:
    """How many arguments have an axis or spec of their own in a prefix; None if one is for all."""
    return len(prefix) if isinstance(prefix, (list, tuple)) else None


def in_positions(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own_specs: int | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts arguments given by name in the positions of their parameters, up to ``own_specs``.

    Parameters among these that were left out get their defaults. Without ``own_specs`` the names
    follow the positions as long as there is no gap.
    """
    if not kwargs if own_specs is None else len(args) >= own_specs:
        return args, kwargs
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # some functions in C have none
        return args, kwargs
    bound = signature.bind(*args, **kwargs).arguments
    by_position, by_name = list(args), dict(kwargs)
    for parameter in list(signature.parameters.values())[len(args) : own_specs]:
        has_default = own_specs is not None and parameter.default is not parameter.empty
        is_given = parameter.name in bound
        if parameter.kind not in _BY_POSITION or not (is_given or has_default):
            break
        by_position.append(bound.get(parameter.name, parameter.default))
        by_name.pop(parameter.name, None)
    return tuple(by_position), by_name


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], api: str
) -> tuple[Any, ...]:
    """All arguments by position; raises ``TypeError`` for one that has no position."""
    given, unplaced = in_positions(f, args, kwargs, None)
    if unplaced:
        raise TypeError(
            f"nnx.{api} takes arguments by position, and {sorted(unplaced)} cannot be given one.\n"
            "Fix: pass them by position, or bind them first with functools.partial."
        )
    return given


# What JAX calls the transforms, where it is not the same.
_JAX_NAMES = {
    "remat": ("checkpoint / remat",),
    "while_loop": ("while_cond", "while_body"),
    "eval_shape": ("jit",),
    "make_jaxpr": ("jit", "make_jaxpr"),
}


class Call:
    """One call of a transform: the opened arguments, by slot, and the function to run on them.

    ``named_by`` is the function whose parameters name the arguments in errors, by default ``f``.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        api: str,
        graph: bool | None,
        updates: bool | None,
        named_by: Callable[..., Any] | None = None,
    ):
        self.f = f
        self.api = api
        self.graph, self.updates = graph_modes(graph, updates)
        self.brings_structure_out: GraphUpdates = self.updates or sown_only()
        self._named_by = f if named_by is None else named_by
        self.opened: Opened = open_tree((args, kwargs), self.graph, api, where=self.where)
        self.variable_count = len(self.opened.variables)
        self.plain = self.opened.plain
        self._given_to_jax: list[Any] = []  # the functions of the user that JAX traces
        self._gives_views = False  # of NumPy arrays, which cannot be written
        # Called before and after the function runs; the latter with its output too.
        self.before: Callable[[Inside], None] | None = None
        self.after: list[Callable[[Inside, Any], Any]] = []

    @functools.cached_property
    def slot_values(self) -> list[Any]:
        """The value of each slot."""
        return self.opened.slot_values

    @property
    def paths(self) -> list[Path]:
        """The path of each slot."""
        return self.opened.slot_paths

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """The value of each slot, and after them the plain leaves."""
        return [*self.slot_values, *self.plain]

    @functools.cached_property
    def input_paths(self) -> list[Path]:
        """The path of each of ``inputs``."""
        return [*self.paths, *self.opened.plain_paths]

    def fill(
        self, *given: tuple[list[int], list[Any]], runs_once: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Values for slots and plain leaves: ``inputs`` with some, by number, replaced.

        The others do not pass through JAX, so the function gets its own containers. Unless it
        ``runs_once``, and not several times or once for many steps, it gets views of NumPy arrays
        that cannot be written.
        """
        replaced = {
            number: value
            for numbers, values in given
            for number, value in zip(numbers, values, strict=True)
        }
        self._gives_views = not runs_once
        inputs = [
            replaced[number] if number in replaced else _kept_apart(value, runs_once)
            for number, value in enumerate(self.inputs)
        ]
        return inputs[: len(self.slot_values)], inputs[len(self.slot_values) :]

    @functools.cached_property
    def argument_names(self) -> dict[str, list[Path]]:
        """The paths of the arguments of the function that is given to JAX, by parameter."""
        return {"values": self.paths, "plain": self.opened.plain_paths}

    def for_function(self, f: Callable[..., Any], named_by: Callable[..., Any]) -> Call:
        """A call of another function with the same arguments."""
        other = copy.copy(self)
        other.f, other._named_by, other._given_to_jax = f, named_by, []
        other.__dict__.pop("_names", None)
        return other

    @functools.cached_property
    def _names(self) -> ArgumentNames:
        return ArgumentNames(self._named_by)

    def where(self, path: Any) -> str:
        """A path in the arguments, as the parameters of the user's function name it."""
        return self._names.where(tuple(path)) if len(path) > 1 else "of all arguments"

    def slot_name(self, number: int) -> str:
        """The path of a slot as text."""
        return self.where(self.paths[number])

    def axes(self, prefix: Any, what: str = "in_axes", by_name: Any = 0) -> ArgumentAxes:
        """The axis of every slot and plain leaf, from the prefix that the user gave."""
        return ArgumentAxes(self.opened, prefix, self.api, what, by_name, self.where, self.graph)

    def difference(self, now: Structure) -> str:
        """The first difference between the structure of the arguments and another one."""
        return difference(self._names, self.opened.structure, now)

    def run(self, values: list[Any], plain: Any, as_values: Any = frozenset()) -> Run:
        """Runs the function inside the transform, with one value for each slot.

        Variables in ``as_values`` are not expected to change; inside they hold a value, no refs.
        """
        inside = self.opened.structure.enter(values, plain, as_values)
        if self.before is not None:
            self.before(inside)
        refs = [v for n in as_values if (v := inside.variables[n])._metadata.stored_as_ref]
        with _without_refs(refs), self._explaining_unwritable():
            out = inside.run(self.f, self.opened.things)
        for last in self.after:
            last(inside, out)
        updates = self.brings_structure_out
        effects, new, plain = inside.leave(out, self.graph, updates, self.api, self.where)
        return Run(self, inside, effects, new, plain, out)

    @contextlib.contextmanager
    def _explaining_unwritable(self) -> Iterator[None]:
        """Adds to NumPy's error for a write to a view that ``fill`` gave."""
        try:
            yield
        except ValueError as error:
            is_known = any(_UNWRITABLE in note for note in getattr(error, "__notes__", ()))
            if self._gives_views and str(error).endswith("is read-only") and not is_known:
                error.add_note(
                    f"nnx.{self.api} may run its function several times, or once for many steps, "
                    f"so a NumPy array {_UNWRITABLE} in it.\n"
                    "Fix: put a new array in its place, or keep an array of JAX in a Variable."
                )
            raise

    @property
    def outcome(self) -> Callable[[list[Any], Any], Outcome]:
        """Runs the function on a value for each slot, and plain leaves, for ``close``."""
        return self.named(lambda values, plain: self.run(values, plain).outcome())

    def named(self, flat: Callable[..., Any], function: Any = None) -> Callable[..., Any]:
        """A function that is given to JAX, with the name, file and line of the user's."""
        function = self._named_by if function is None else function
        self._given_to_jax.append(function)
        return named_after(flat, function)

    @contextlib.contextmanager
    def naming_arguments(self) -> Iterator[None]:
        """Puts paths into messages of JAX, in place of ``argument_names`` and numbers."""
        try:
            yield
        except Exception as error:
            names = _JAX_NAMES.get(self.api, (self.api,))
            if any(is_about(error, f, name) for f in self._given_to_jax for name in names):
                name_arguments(error, self.argument_names, self.where, self.api)
            raise

    def close(self, outcome: Outcome) -> Any:
        """Writes an outcome into the arguments, and returns the output."""
        return close(self.opened, outcome)


def _kept_apart(value: Any, with_arrays: bool) -> Any:
    """A value in containers of its own; without ``with_arrays`` NumPy's cannot be written."""
    if isinstance(value, jax.Array):
        return value
    return jax.tree_util.tree_map(lambda x: x if with_arrays else _unwritable(x), value)


def _unwritable(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf = leaf.view()
        leaf.flags.writeable = False
    return leaf


_UNWRITABLE = "from outside cannot be changed in place"


@contextlib.contextmanager
def _without_refs(variables: list[Any]) -> Iterator[None]:
    """Makes Variables hold plain values, whatever is written to them, while the block lasts."""
    settings = [{name: v._metadata[name] for name in ("hijax", "ref")} for v in variables]
    for variable in variables:
        object.__setattr__(variable, "_metadata", variable._metadata.stored_plainly())
    yield
    for variable, setting in zip(variables, settings, strict=True):
        object.__setattr__(variable, "_metadata", variable._metadata.replaced(setting))


@dataclasses.dataclass(eq=False, repr=False)
class Run:
    """One run of the user's function: what it did to the slots, and what it made and returned."""

    call: Call
    inside: Inside
    effects: Effects
    new: list[Any]  # the arrays of new Variables and objects
    plain: Any  # the plain leaves of the output
    out: Any

    def __post_init__(self) -> None:
        self._new_count = len(self.new)

    def outcome(self) -> Outcome:
        """The outcome, for ``Call.close``."""
        return self.inside.outcome(self.effects, self.new, self.plain)

    @functools.cached_property
    def now(self) -> list[Any]:
        """The value of each slot after the run."""
        values = self.inside.slot_values()
        for number, slot in self._slots_replaced.items():
            values[slot] = self.new[number]
        return values

    @functools.cached_property
    def changed(self) -> set[int]:
        """The slots that were written to."""
        before = self.inside.values_before
        arrays = {n for n in self._slots_replaced.values() if self.now[n] is not before[n]}
        return set(self.effects.changed) | arrays

    @functools.cached_property
    def writable(self) -> set[int]:
        """The slots that can be given a value: not arrays in tuples, or of a changed structure."""
        structure, count = self.inside.structure, self.call.variable_count
        in_place = self.effects.argument_nodes is None
        arrays = range(len(self.inside.arrays_after or ())) if in_place else ()
        return {*range(count), *(count + n for n in arrays if n not in structure.fixed_arrays)}

    @functools.cached_property
    def fresh(self) -> list[Any]:
        """The arrays of new Variables and objects that are in no slot."""
        return [x for number, x in enumerate(self.new) if number not in self._slots_replaced]

    @functools.cached_property
    def _slots_replaced(self) -> dict[int, int]:
        """Maps the number of a new array to the slot of the input array whose path it has."""
        if self.effects.argument_nodes is None:
            return {}
        paths, count = self.call.paths, self.call.variable_count
        slots = {path: count + n for n, path in enumerate(paths[count:])}
        return {
            number: slots[path]
            for path, number, definition in self._new_in_arguments()
            if definition == ARRAY_LEAF and path in slots
        }

    @functools.cached_property
    def _fresh_numbers(self) -> dict[int, int]:
        """Maps the number of a new array to its position in ``fresh``."""
        numbers = [n for n in range(self._new_count) if n not in self._slots_replaced]
        return {number: position for position, number in enumerate(numbers)}

    def _new_in_arguments(self) -> Iterator[tuple[Path, int, Definition]]:
        """Yields path, number and definition of each new array in the arguments."""
        prefixes = self.call.opened.node_paths
        for prefix, node in zip(prefixes, self.effects.argument_nodes or (), strict=False):
            for path, (came_in, number) in node.leaves:
                if not came_in:
                    yield (*prefix, *path), number, node.definition.at(path)

    def fresh_places(self) -> Iterator[tuple[int, Path]]:
        """Yields number and path of those of ``fresh`` that became part of an argument."""
        for path, number, _ in self._new_in_arguments():
            if number in self._fresh_numbers:
                yield self._fresh_numbers[number], path

    def fresh_outputs(self) -> Iterator[tuple[int, int, Path]]:
        """Yields, for those of ``fresh`` in the output, number, leaf of the output, path in it."""
        for leaf, node in enumerate(self.effects.output_nodes):
            for path, (came_in, number) in node.leaves if node is not None else ():
                if not came_in:
                    yield self._fresh_numbers[number], leaf, path

    def fresh_names(self) -> list[str]:
        """The place of each of ``fresh`` as text."""
        leaves = leaves_with_paths(self.out)
        names = [""] * len(self.fresh)
        for number, path in self.fresh_places():
            names[number] = self.call.where(path)
        for number, position, path in self.fresh_outputs():
            names[number] = output_place((*leaves[position][0], *path))
        return names

    def plain_names(self) -> list[str]:
        """The place of each plain leaf of the output as text."""
        return [output_place(path) for path, x in leaves_with_paths(self.out) if not is_node(x)]

    def structure_change(self) -> Any:
        """What the run did to the structure of the arguments, comparable; None if nothing."""
        effects, inside = self.effects, self.inside
        if effects.argument_nodes is None:
            return None
        reused = effects.reused[: len(inside.things)]
        nodes = tuple(
            (node.definition, tuple((path, self._slot_of(origin)) for path, origin in node.leaves))
            for node in effects.argument_nodes
        )
        slots = {path: number for number, path in enumerate(self.call.paths)}
        same = all(
            slot == slots.get((*prefix, *path))
            for prefix, (_, leaves) in zip(self.call.opened.node_paths, nodes, strict=True)
            for path, slot in leaves
        )
        definitions = [definition for definition, _ in nodes]
        unmoved = reused == tuple(range(len(inside.things)))
        if same and unmoved and definitions == inside.structure.node_definitions:
            return None
        return nodes, reused

    def _slot_of(self, origin: Origin) -> int | str:
        return origin.number if origin.came_in else self._slots_replaced.get(origin.number, "new")

    def difference(self) -> str:
        """The change of the structure of the arguments, in words."""
        return self.call.difference(open_tree(self.inside.tree, True, self.call.api).structure)

    def forget(self) -> None:
        """Drops all tracers, for a run that outlives its trace."""
        for name in ("inside", "now", "fresh", "plain", "out", "new"):
            self.__dict__.pop(name, None)

    def close(self, final: dict[int, Any], fresh: list[Any], leaves: Any) -> Any:
        """Writes final values of slots, fresh arrays and plain leaves out; returns the output."""
        call, fresh_numbers = self.call, self._fresh_numbers
        new = [
            fresh[fresh_numbers[number]]
            if number in fresh_numbers
            else final.get(
                self._slots_replaced[number], call.slot_values[self._slots_replaced[number]]
            )
            for number in range(self._new_count)
        ]
        in_place = self.effects.argument_nodes is None  # otherwise arrays go out with the structure
        changed = tuple(n for n in sorted(final) if in_place or n < call.variable_count)
        effects = dataclasses.replace(self.effects, changed=changed, kept=())
        return call.close(Outcome(effects, ([final[n] for n in changed], new, leaves)))
