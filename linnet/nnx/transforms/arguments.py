"""The arguments of a compiled function: static ones, donated ones, and their shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from operator import not_
from types import MethodType
from typing import Any, NamedTuple

import jax

from linnet.errors import SharedReferenceError
from linnet.nnx.graphlib.walk import Definition
from linnet.nnx.pytreelib import statics
from linnet.nnx.pytreelib.kinds import ARRAY, KINDS, OBJECT, VARIABLE, is_node
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.tracing import constants, note_writes
from linnet.nnx.transforms.axes import (
    ArgumentAxes,
    FilterMap,
    axis_for,
    broadcast_prefix,
    refuse_objects,
    variables_with_axes,
)
from linnet.nnx.transforms.effects import Effects, Outcome
from linnet.nnx.transforms.engine import Inside, Opened, leaves_with_paths, output_place
from linnet.nnx.variablelib.storage import set_cells
from linnet.nnx.variablelib.variable import rebuild_variable


def refuse_bound_method(fun: Any, api: str) -> None:
    """Raises for ``nnx.jit(model.method)``, whose module would be a constant."""
    if isinstance(fun, MethodType) and isinstance(fun.__self__, Pytree):
        cls, name = type(fun.__self__).__name__, fun.__name__
        fix = (
            f"decorate the method with @nnx.{api}, or call nnx.{api}({cls}.{name})(instance, ...) "
            "with the unbound method"
        )
        if api in ("eval_shape", "vjp"):
            fix = f"nnx.{api}({cls}.{name}, instance, ...) with the unbound method"
        raise ValueError(
            f"nnx.{api} does not support bound methods: {cls}.{name} would take the module as a "
            f"constant.\nFix: {fix}."
        )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Numbers or names of arguments, given as none, one or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)


def after_module(options: dict[str, Any]) -> dict[str, Any]:
    """Shifts the options of ``nnx.jit`` by one argument: a method gets its module first."""
    shifted = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        shifted[name] = tuple(n + 1 if n >= 0 else n for n in as_tuple(shifted[name]))
    if isinstance(shifted["in_shardings"], (list, tuple)):
        shifted["in_shardings"] = (None, *shifted["in_shardings"])
    return shifted


class StaticArguments(NamedTuple):
    """The static arguments of a call, by number and by name, and their types (``exact_type``),
    because ``1 == True`` but the two must not share a compiled function.

    For ``compiled_outside`` ``leaves`` has the value of each static leaf, and None for the others.
    """

    args: tuple[tuple[int, Any], ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    types: tuple[Any, ...] = ()
    leaves: statics.StaticValue | None = None

    def put_back(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Puts the static arguments in the places where the others have None."""
        if self.leaves is not None:
            found, treedef = flatten_with_gaps((args, kwargs))
            pairs = zip(found, self.leaves.value, strict=True)
            return treedef.unflatten([fixed if leaf is None else leaf for leaf, fixed in pairs])
        args = list(args)
        for number, value in self.args:
            args[number] = value
        return args, {**kwargs, **dict(self.kwargs)}


def exact_type(value: Any) -> Any:
    """What tells equal static arguments apart: 1 and True, (1,) and (1.0,), 0.0 and -0.0."""
    return statics.key_of(value) if isinstance(value, _EQUAL_TO_OTHERS) else type(value)


_EQUAL_TO_OTHERS = (float, complex, tuple, frozenset)


def flatten_with_gaps(tree: Any) -> tuple[list[Any], Any]:
    """Flattens arguments, objects and None being leaves."""
    return jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is None or is_node(x))


class Given(NamedTuple):
    """The arguments of one call, flat."""

    leaves: Sequence[Any]  # objects of the model among them
    treedef: Any
    static: StaticArguments
    are_nodes: tuple[bool, ...]  # for each leaf, whether it is an object or a Variable

    def tree(self) -> Any:
        """The positional and the named arguments."""
        return self.treedef.unflatten(self.leaves)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], static: StaticArguments) -> Given:
    """Flattens the arguments of a call, objects and Variables being leaves."""
    if not kwargs:
        common = _objects_and_arrays(tuple(map(KINDS.get, map(type, args))))
        if common is not None:
            # By tuple's own constructor, which runs no Python code.
            return tuple.__new__(Given, (args, common[0], static, common[1]))
    leaves, treedef = jax.tree_util.tree_flatten((args, kwargs), is_leaf=is_node)
    return Given(leaves, treedef, static, tuple(map(is_node, leaves)))


@functools.lru_cache(maxsize=256)
def _objects_and_arrays(kinds: tuple[int | None, ...]) -> tuple[Any, tuple[bool, ...]] | None:
    """For objects and arrays by position: the treedef, and which are objects; otherwise None.

    The kind of a type that was not met yet is None.
    """
    if not {OBJECT, ARRAY}.issuperset(kinds):
        return None
    treedef = jax.tree_util.tree_structure(((0,) * len(kinds), {}))
    return treedef, tuple([kind == OBJECT for kind in kinds])


class Donated(NamedTuple):
    """For each Variable, and for each plain leaf, whether it is in a donated argument."""

    variables: tuple[bool, ...] = ()
    plain: tuple[bool, ...] = ()

    @property
    def any(self) -> bool:
        """Whether the options donate arguments, even if this call has none of them."""
        return bool(self.variables or self.plain)

    @property
    def numbers(self) -> Iterator[int]:
        """The slots of the donated Variables."""
        return compress(count(), self.variables)

    def divide(self, values: Any, arrays: Any, plain: Any) -> tuple[Any, Any, Any, Any]:
        """The arguments of the compiled function; the second holds all that is donated."""
        if not any(self):
            return values, (), arrays, plain
        kept, donated = _divide(values, self.variables)
        kept_plain, donated_plain = _divide(plain, self.plain)
        return kept, (donated, donated_plain), arrays, kept_plain

    def join(self, values: Any, donated: Any, plain: Any) -> tuple[Any, Any]:
        """The reverse of ``divide``: the values and the plain leaves."""
        if not any(self):
            return values, plain
        return _join(values, donated[0], self.variables), _join(plain, donated[1], self.plain)


NO_STATIC = StaticArguments()
NOTHING_DONATED = Donated()


class VariableList:
    """The Variables of a call in the order of their slots, and the cells that hold their values.

    It is made of lists with those of each object. A call without a plan makes a new one, and most
    calls need the cells alone.
    """

    def __init__(self, variables: list[list[Any]], cells: list[list[Any]]):
        self._variables = variables
        self.cells = _joined(cells)
        self._divided: tuple[Donated | None, Any] = (None, None)
        self.remembered: Any = None  # what ``packing`` remembers of the values

    @functools.cached_property
    def variables(self) -> list[Any]:
        """The Variables."""
        return _joined(self._variables)

    def divided(self, donated: Donated) -> tuple[VariableList, ...]:
        """The Variables that are kept and those that are donated; the division is remembered."""
        known, parts = self._divided
        if known is not donated:
            variables = _divide(self.variables, donated.variables)
            cells = _divide(self.cells, donated.variables)
            parts = tuple([VariableList([v], [c]) for v, c in zip(variables, cells, strict=True)])
            self._divided = (donated, parts)
        return parts

    def write(self, effects: Effects, values: Any) -> None:
        """Stores the new values of the Variables that changed."""
        if constants:
            note_writes(effects.pick(self.variables))
        set_cells(effects.pick(self.cells), values)


def _joined(parts: list[list[Any]]) -> list[Any]:
    joined: list[Any] = []
    for part in parts:
        joined += part
    return joined


def _divide(items: Any, chosen: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
    return list(compress(items, map(not_, chosen))), list(compress(items, chosen))


def _join(others: Any, found: Any, chosen: tuple[bool, ...]) -> list[Any]:
    rest, donated = iter(others), iter(found)
    return [next(donated) if is_donated else next(rest) for is_donated in chosen]


class Shardings:
    """The shardings of the arguments and outputs of one entry of ``nnx.jit``.

    ``placed`` are the slots that with graph updates come back, changed or not: in the sharding that
    the user gave for them, or in the one that the compiler chose.
    """

    def __init__(
        self,
        opened: Opened,
        in_shardings: Any,
        out_shardings: Any,
        graph: bool,
        where: Callable[[Any], str],
    ):
        axes = ArgumentAxes(opened, in_shardings, "jit", "in_shardings", None, where, graph)
        refuse_objects(out_shardings, graph, "jit", "out_shardings")
        # The compiled function keeps this, so nothing of the arguments may be kept here.
        self._variables, self._arrays, self._plain = axes.variables, axes.arrays, axes.plain
        self._slots, self._out = axes.slots, out_shardings
        self._names = [where(path) for path in opened.variable_paths]
        fixed = {len(opened.variables) + n for n in opened.structure.fixed_arrays}
        self.placed = frozenset(range(len(self._slots))) - fixed

    def jit_options(
        self, opened: Opened, donated: Donated, pure: Callable[..., Any]
    ) -> dict[str, Any]:
        """The shardings for ``jax.jit``; ``pure`` is traced to learn what it does and returns."""
        options: dict[str, Any] = {
            "in_shardings": donated.divide(self._variables, self._arrays, self._plain)
        }
        if self._out is None and all(sharding is None for sharding in self._slots):
            return options
        inputs = donated.divide(opened.variable_values, opened.arrays, opened.plain)
        outcome = jax.eval_shape(pure, *inputs)
        changed = [self._slots[n] for n in outcome.effects.changed]
        new, plain = self._of_output(outcome)
        options["out_shardings"] = Outcome(outcome.effects, (changed, new, plain))
        return options

    def _of_output(self, outcome: Outcome) -> tuple[Any, Any]:
        """The shardings of new arrays and of the plain leaves of the output."""
        effects = outcome.effects
        if effects.out_treedef is None:
            specs = broadcast_prefix(self._out, outcome.plain, "jit", "out_shardings")
            tree = jax.tree_util.tree_structure(outcome.plain, is_leaf=is_node)
            return [None] * len(outcome.new), tree.unflatten(specs)
        skeleton = effects.out_treedef.unflatten(range(effects.out_treedef.num_leaves))
        specs = broadcast_prefix(self._out, skeleton, "jit", "out_shardings")
        new: list[Any] = [None] * len(outcome.new)
        plain = []
        found = zip(specs, leaves_with_paths(skeleton), effects.output_nodes, strict=True)
        for spec, (place, _), node in found:
            if node is None:
                plain.append(spec)
                continue
            for path, (came_in, number) in node.leaves:
                if not came_in:
                    is_map = isinstance(spec, FilterMap)
                    variable = _variable_at(node.definition, path) if is_map else None
                    new[number] = axis_for(spec, path or place, variable)
        return new, plain

    def refuse_two_ways(self, inside: Inside, out: Any) -> None:
        """Raises for a Variable that comes in and goes out with another sharding."""
        if self._out is None:
            return
        numbers = {id(v): n for n, v in enumerate(inside.variables)}
        specs = broadcast_prefix(self._out, out, "jit", "out_shardings")
        for path, variable, goes in variables_with_axes(specs, leaves_with_paths(out)):
            number = numbers.get(id(variable))
            if number is None or goes is None or goes == self._slots[number]:
                continue
            raise SharedReferenceError(
                f"{type(variable).__name__} comes into nnx.jit at {self._names[number]} with the "
                f"sharding {self._slots[number]!r} and goes out at {output_place(path)} with "
                f"{goes!r}.\nFix: give the same sharding in in_shardings and out_shardings, or "
                "return nnx.clone(...) of it."
            )


def with_gaps(in_shardings: Any, static: StaticArguments) -> Any:
    """The shardings of the arguments that are not static, with None put in for the static ones."""
    if not isinstance(in_shardings, (list, tuple)):
        return in_shardings
    shardings = list(in_shardings)
    for number, _ in static.args:
        shardings.insert(number, None)
    return tuple(shardings)


def _variable_at(definition: Definition, path: tuple[Any, ...]) -> Any:
    """A Variable like the one at a path, without a value, for filters; None for an array."""
    found = definition.at(path)
    return rebuild_variable(found.payload, None, found.static) if found.kind == VARIABLE else None
