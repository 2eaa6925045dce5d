"""The name of a mapped axis in the sharding metadata of Variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from linnet.nnx.graphlib.traverse import flat_variables
from linnet.nnx.transforms.axes import Axes, FilterMap, broadcast_prefix
from linnet.nnx.transforms.lift import is_node, open_tree
from linnet.nnx.transforms.run import Call, transform
from linnet.nnx.variablelib import Variable

PARTITION_NAME = "partition_name"


def name_in(metadata: dict[str, Any] | None) -> str | None:
    """The name of the axis in the older ``transform_metadata`` argument."""
    return (metadata or {}).get(PARTITION_NAME)


def add_name(variable: Variable[Any], axis: int, name: str | None) -> None:
    """Puts the name of a new axis into the sharding metadata of a Variable."""
    _change_names(variable, lambda names: names.insert(axis, name))
    variable.add_axis(axis, name)


def remove_name(variable: Variable[Any], axis: int, name: str | None) -> None:
    """Takes the name of an axis out of the sharding metadata of a Variable."""
    _change_names(variable, lambda names: names.pop(axis))
    variable.remove_axis(axis, name)


def _change_names(variable: Variable[Any], change: Callable[[list[Any]], Any]) -> None:
    for key in ("out_sharding", "sharding_names", "sharding"):
        names = variable.get_metadata(key, None)
        if isinstance(names, (tuple, list, jax.sharding.PartitionSpec)) and names:
            changed = list(names)
            change(changed)
            same = isinstance(names, jax.sharding.PartitionSpec)
            variable.set_metadata(key, type(names)(*changed) if same else type(names)(changed))


@contextlib.contextmanager
def removed(call: Call, axes: list[Any], name: str | None) -> Iterator[None]:
    """Inside a mapped function the axis is gone, and so is its name."""
    if name is None:
        yield
        return

    def each(change: Any, inside: Any) -> None:
        for variable, axis in zip(inside.variables, axes, strict=True):
            if isinstance(axis, int):
                change(variable, axis, name)

    call.before = lambda inside: each(remove_name, inside)
    call.after = lambda inside: each(add_name, inside)
    yield


def added(out: Any, name: str | None) -> None:
    """New objects that come out of a mapped function have the axis, and its name."""
    if name is None:
        return
    for _, variable in flat_variables(out, True, "vmap"):
        add_name(variable, 0, name)


def _lifted_metadata(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    partition: str | None,
    graph: bool | None,
) -> Any:
    opened = open_tree((args, kwargs), True if graph is None else graph, "transform_metadata")
    axes = Axes(opened, in_axes, "transform_metadata")
    pairs = [(v, a) for v, a in zip(opened.variables, axes.variables, strict=True) if a is not None]
    pairs = [(v, a) for v, a in pairs if isinstance(a, int)]
    for variable, axis in pairs:
        remove_name(variable, axis, partition)
    try:
        out = f(*args, **kwargs)
    finally:
        for variable, axis in pairs:
            add_name(variable, axis, partition)
    mine = {id(variable) for variable in opened.variables}
    specs = broadcast_prefix(out_axes, out, "transform_metadata", "out_axes")
    leaves = jax.tree_util.tree_leaves(out, is_leaf=is_node)
    for spec, leaf in zip(specs, leaves, strict=True):
        for path, variable in flat_variables(leaf, True, "transform_metadata") if is_node(leaf) else ():  # fmt: skip # noqa: E501
            axis = spec.map_prefix(path, variable) if isinstance(spec, FilterMap) else spec
            if isinstance(axis, int) and id(variable) not in mine:
                add_name(variable, axis, partition)
    return out


def transform_metadata(
    f: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    partition: str | None,
    graph: bool | None = None,
) -> Any:
    """Names a mapped axis in the sharding metadata around ``nnx.vmap`` or ``nnx.scan``.

    Put it directly under the transform, with the same axes: inside the function the axis and its
    name are gone, outside they are there.

    Args:
      f: the function; left out, the call is a decorator.
      in_axes: as for the transform.
      out_axes: as for the transform.
      partition: the name of the axis.
      graph: allow shared references; by default they are.

    Returns:
      The function.
    """
    return transform(
        "transform_metadata",
        _lifted_metadata,
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        partition=partition,
        graph=graph,
    )
