"""The axis of each array that a transform maps or scans over, from prefixes and filters.

``StateAxes`` and ``StateSharding`` are what users give for an object; ``ArgumentAxes`` finds the
axis of every slot of a call from them. Shardings of ``nnx.jit`` and specs of ``nnx.shard_map`` are
found in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import AxisError, SharedReferenceError, misfit_text, path_string, type_text
from linnet.nnx import filterlib
from linnet.nnx.pytreelib.kinds import Path, is_node, key_name
from linnet.nnx.pytreelib.watch import home_of
from linnet.nnx.rnglib.streams import RngState
from linnet.nnx.statelib import State, create_path_filters
from linnet.nnx.transforms.engine import Opened, leaves_by_path, leaves_with_paths, variables_in
from linnet.nnx.variablelib.variable import Variable


class Carry:
    """Marks what ``nnx.scan`` hands from step to step."""


class FilterMap:
    """Values by filter; the first filter that selects a Variable decides.

    Made of a mapping or pairs from filter to value, or of a State with the value of each path.
    """

    def __init__(self, by_filter: Any, /):
        pairs = create_path_filters(by_filter) if isinstance(by_filter, State) else by_filter
        pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
        self._pairs = tuple((key, value) for key, value in pairs)
        self._predicates = tuple(filterlib.to_predicate(key) for key, _ in self._pairs)

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters."""
        return tuple(key for key, _ in self._pairs)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The filters and their values."""
        return iter(self._pairs)

    def __getitem__(self, key: Any) -> Any:
        return dict(self._pairs)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.filters)

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._pairs == other._pairs  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash((type(self), self._predicates))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._pairs)!r})"

    def map_prefix(self, path: Any, variable: Any) -> Any:
        """The value for one Variable; raises ``ValueError`` if no filter selects it."""
        for predicate, (_, value) in zip(self._predicates, self._pairs, strict=True):
            if predicate(path, variable):
                return value
        raise ValueError(
            f"{self!r} has no filter for {path_string(path)} ({type(variable).__name__}).\n"
            "Fix: add `...: value` for everything that is left."
        )


class StateAxes(FilterMap):
    """Axes for the Variables of an object, by filter.

    Args:
      filter_axes: a mapping or pairs from filter to axis, or a State with an axis at each path;
        ``None`` broadcasts, and in ``nnx.scan`` ``nnx.Carry`` carries.

    Example:
      >>> from linnet import nnx
      >>> axes = nnx.StateAxes({nnx.Param: 0, ...: None})
      >>> axes.axes
      (0, None)
      >>> axes = nnx.StateAxes(nnx.State({"kernel": 1, "bias": 0}))
      >>> axes.map_prefix(("kernel",), nnx.Param(2.0))
      1
    """

    def __init__(self, filter_axes: Any, /):
        super().__init__(filter_axes)

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes, in the order of the filters."""
        return tuple(value for _, value in self._pairs)


class StateSharding(FilterMap):
    """Shardings for the Variables of an object, by filter.

    Args:
      filter_sharding: a mapping or pairs from filter to sharding, or a State with one at each path.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> spec = jax.sharding.PartitionSpec("data")
      >>> nnx.StateSharding(nnx.State({"kernel": spec})).shardings == (spec,)
      True
    """

    def __init__(self, filter_sharding: Any, /):
        super().__init__(filter_sharding)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the order of the filters."""
        return tuple(value for _, value in self._pairs)


def is_axis(x: Any) -> bool:
    """Whether a value is the number of an axis, which a bool is not."""
    return isinstance(x, int) and not isinstance(x, bool)


def is_prefix_leaf(x: Any) -> bool:
    """Whether a node of a prefix is a value for the whole subtree below it."""
    return x is None or x is Carry or isinstance(x, FilterMap) or is_node(x)


def refuse_objects(prefix: Any, graph: bool, api: str, what: str) -> None:
    """Raises for a Variable in a prefix, and in graph mode a module, not made by ``nnx.prefix``."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(prefix, is_leaf=is_prefix_leaf):
        is_variable = isinstance(leaf, Variable)
        refused = is_variable or (graph and is_node(leaf))
        if refused and not home_of(leaf).is_prefix:
            type_name, place = type(leaf).__name__, path_string(map(key_name, keys))
            why = "a Variable is no" if is_variable else "in graph mode a module is no"
            by_filter = "nnx.StateAxes" if what.endswith("_axes") else "nnx.StateSharding"
            raise AxisError(
                f"nnx.{api}: {what}{place} is a {type_name}, and {why} prefix.\n"
                f"Fix: give one value for the whole {type_name}, {by_filter}({{filter: value}}), "
                "or nnx.prefix(model, {filter: value})."
            )


def broadcast_prefix(prefix: Any, tree: Any, api: str, what: str) -> list[Any]:
    """The value of a tree prefix for each leaf of ``tree``, objects being leaves."""
    found: list[Any] = []

    def fill(value: Any, part: Any) -> Any:
        found.extend([value] * len(jax.tree_util.tree_leaves(part, is_leaf=is_node)))

    try:
        jax.tree_util.tree_map(fill, prefix, tree, is_leaf=is_prefix_leaf)
    except ValueError as error:
        fits = "the function returned" if what.startswith("out_") else "the arguments are"
        shown = repr(prefix).replace(repr(Carry), "nnx.Carry")
        raise AxisError(
            f"nnx.{api}: {what}={shown} does not fit the structure of what it is for: {fits} "
            f"{_structure_text(tree)}.\n"
            "Fix: give one value for each argument or output, or one for all."
        ) from error
    return found


def _structure_text(tree: Any) -> str:
    """The containers, shapes and dtypes of a value as text."""
    if isinstance(tree, tuple | list):
        parts = ", ".join(map(_structure_text, tree))
        return f"[{parts}]" if isinstance(tree, list) else f"({parts}{',' * (len(tree) == 1)})"
    if isinstance(tree, dict):
        parts = ", ".join(f"{key!r}: {_structure_text(x)}" for key, x in tree.items())
        return f"{{{parts}}}"
    return type_text(tree) if hasattr(tree, "dtype") else type(tree).__name__


class ArgumentAxes:
    """The axis (or sharding) of every slot and plain leaf of opened arguments.

    ``in_axes`` is the user's prefix of the positional arguments, and ``what`` its name in errors;
    ``by_name`` is the axis of arguments that are passed by name.
    """

    def __init__(
        self,
        opened: Opened,
        in_axes: Any,
        api: str,
        what: str = "in_axes",
        by_name: Any = 0,
        where: Callable[[Any], str] = path_string,
        graph: bool = True,
    ):
        args, _ = opened.tree
        if isinstance(in_axes, (list, tuple)) and len(in_axes) != len(args):
            raise AxisError(
                f"nnx.{api}: {what} has {len(in_axes)} entries for {len(args)} positional "
                f"arguments: {in_axes!r}.\nFix: give one entry for each argument."
            )
        prefix = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        refuse_objects(prefix, graph, api, what)
        self.api = api
        self.opened = opened
        self.where = where
        specs = broadcast_prefix(prefix, args, api, what)
        specs += [by_name] * (len(opened.leaf_paths) - len(specs))
        self.specs = specs  # one for each leaf of the arguments
        self.node_specs, self.plain = opened.at_nodes(specs), opened.at_plain(specs)
        self.slots = [
            axis_for(specs[owner], path[len(opened.leaf_paths[owner]) :] or path[2:], leaf)
            for (owner, path), leaf in zip(opened.slot_owners, opened.slot_leaves, strict=True)
        ]
        self.variables = self.slots[: len(opened.variables)]
        self.arrays = self.slots[len(opened.variables) :]
        self._check_sharing()

    def _check_sharing(self) -> None:
        """Raises for a Variable that has different axes in two arguments."""
        specs = self.node_specs
        if all(spec is specs[0] or spec == specs[0] for spec in specs):
            return
        numbers = {id(v): n for n, v in enumerate(self.opened.variables)}
        nodes = zip(self.opened.node_paths, self.opened.nodes, strict=True)
        for path, variable, axis in variables_with_axes(specs, nodes, skip=2):
            number = numbers[id(variable)]
            if axis != self.variables[number]:
                raise SharedReferenceError(
                    f"{type(variable).__name__} at {self.where(path)} was already seen at "
                    f"{self.where(self.opened.variable_paths[number])}, and nnx.{self.api} is "
                    f"asked to treat it in two ways: {self.variables[number]!r} and {axis!r}.\n"
                    "Fix: give both places the same axis, or pass a copy (nnx.clone)."
                )

    def size(self, given: int | None, what: str = "axis_size") -> int | None:
        """The size of the mapped axis; raises for an axis out of range, or different sizes."""
        sizes: dict[str, int] = {} if given is None else {what: given}
        for path, value, axis in self._mapped():
            for inner, leaf in leaves_with_paths(value):
                place = self.where(path) + path_string(inner)
                shape = jnp.shape(leaf)
                if not -len(shape) <= axis < len(shape):
                    self._refuse_axis(axis, path, place, leaf)
                sizes[place] = shape[axis]
        if len(set(sizes.values())) > 1:
            counts = Counter(sizes.values())
            rare_first = sorted(sizes.items(), key=lambda item: counts[item[1]])
            what = f"nnx.{self.api}: the mapped axes have different sizes"
            text = misfit_text(
                {what: (f"{path}: {size}" for path, size in rare_first)},
                fix="make them equal, or broadcast the others with None, such as "
                "in_axes=(None, 0) for a model that is not stacked.",
            )
            raise AxisError(text)
        return next(iter(sizes.values()), None)

    def _refuse_axis(self, axis: int, path: Any, place: str, leaf: Any) -> None:
        shown = type_text(leaf) if hasattr(leaf, "dtype") else repr(leaf)
        fix = "choose an axis that the array has, or None to broadcast it."
        variables = dict(zip(self.opened.variable_paths, self.opened.variables, strict=True))
        if isinstance(variables.get(path), RngState):
            fix = (
                f"decorate with @nnx.split_rngs(splits=...) above nnx.{self.api}, so that there is "
                "a key for each step along the axis; or None to use one key for all."
            )
            if self.api in ("vmap", "pmap"):
                fix += (
                    " A model that is not stacked is broadcast whole, beside mapped inputs: "
                    "in_axes=(None, 0)."
                )
        raise AxisError(
            f"nnx.{self.api}: axis {axis} is out of range for {place}: {shown}.\nFix: {fix}"
        )

    def _mapped(self) -> Iterator[tuple[Any, Any, int]]:
        opened = self.opened
        groups = (
            (opened.slot_paths, opened.slot_values, self.slots),
            (opened.plain_paths, opened.plain, self.plain),
        )
        for paths, values, axes in groups:
            for path, value, axis in zip(paths, values, axes, strict=True):
                if is_axis(axis):
                    yield path, value, axis
                elif axis is not None and (axis is not Carry or self.api != "scan"):
                    raise AxisError(
                        f"nnx.{self.api}: {axis!r} is not an axis for {self.where(path)}.\n"
                        "Fix: give an integer, or None to broadcast; nnx.StateAxes is for objects, "
                        "and nnx.Carry for nnx.scan."
                    )


def axis_for(spec: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    """The axis of one Variable or array of an object, from the spec of the object."""
    if isinstance(spec, FilterMap):
        return spec.map_prefix(path, leaf)
    if not is_node(spec):
        return spec
    if isinstance(spec, Variable):
        return spec.raw_value
    found = leaves_by_path(spec)  # of an object that nnx.prefix made
    if path not in found:
        raise AxisError(
            f"The axes given as {type(spec).__name__} have nothing at {path_string(path)}.\n"
            "Fix: make them with nnx.prefix from an object of the same structure."
        )
    axis = found[path]
    return axis.raw_value if isinstance(axis, Variable) else axis


def variables_with_axes(
    specs: Iterable[Any], leaves: Iterable[tuple[Path, Any]], skip: int = 0
) -> Iterator[tuple[Path, Variable[Any], Any]]:
    """Yields path, Variable and axis for the Variables in leaves with paths, from their specs.

    For filters the path of a Variable that stands by itself is that of the leaf, as in a State,
    without the first ``skip`` steps.
    """
    for spec, (place, leaf) in zip(specs, leaves, strict=True):
        for path, variable in variables_in(leaf):
            yield (*place, *path), variable, axis_for(spec, path or place[skip:], variable)


def move_to_front(value: Any, axis: int) -> Any:
    """Moves ``axis`` to the front in each array of a pytree."""
    return value if axis == 0 else jax.tree_util.tree_map(lambda x: jnp.moveaxis(x, axis, 0), value)


def move_from_front(value: Any, axis: int) -> Any:
    """Moves the first axis to ``axis`` in each array of a pytree."""
    return value if axis == 0 else jax.tree_util.tree_map(lambda x: jnp.moveaxis(x, 0, axis), value)
