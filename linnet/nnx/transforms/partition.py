"""The name of a mapped axis in the sharding metadata of Variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from linnet.errors import AxisError
from linnet.nnx.transforms.axes import (
    ArgumentAxes,
    Carry,
    broadcast_prefix,
    is_axis,
    variables_with_axes,
)
from linnet.nnx.transforms.engine import leaves_with_paths
from linnet.nnx.transforms.run import Call, transform
from linnet.nnx.variablelib.variable import Variable

PARTITION_NAME = "partition_name"
ANY_NAME: Any = object()  # as a name: whatever the metadata has, for each Variable


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
      in_axes, out_axes: as for the transform.
      partition: the name of the axis.
      graph: allow shared references; by default they are.

    Returns:
      The function.

    Raises:
      AxisError: the metadata of a Variable has another name for the axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> @nnx.vmap
      ... @nnx.transform_metadata(partition="layers")
      ... def make(key):
      ...     return nnx.Param(jax.random.normal(key, (2,)), out_sharding=("embed",))
      >>> with nnx.use_eager_sharding(False):
      ...     stacked = make(jax.random.split(jax.random.key(0), 3))
      >>> stacked.shape, stacked.out_sharding
      ((3, 2), ('layers', 'embed'))
    """
    api = "transform_metadata"

    def lifted(call: Call) -> Any:
        axes = call.axes(in_axes)
        args, kwargs = call.opened.tree
        variables = call.opened.variables
        taken = _take_away(axes, variables, partition)
        try:
            out = call.f(*args, **kwargs)
        finally:
            _put_back(axes, variables, taken)
        _name_output(out, out_axes, {id(variable) for variable in variables}, partition, api)
        return out

    return transform(api, lifted, f, True if graph is None else graph)


def add_name(variable: Variable[Any], axis: int, name: str | None, is_named: bool = False) -> None:
    """Inserts the name of an axis that the value is about to get, if the metadata has names, or
    had some before (``is_named``)."""
    names = _names(variable)
    if names is None and is_named:
        names = []
    if names is not None:
        place = _place(variable, axis, len(names) + 1)
        names += [None] * (place - len(names))
        names.insert(place, name)
        _set_names(variable, names)
    variable.add_axis(axis, name)


class Removed(NamedTuple):
    """The name that was removed, and whether the Variable had names before."""

    name: str | None
    is_named: bool


def remove_name(variable: Variable[Any], axis: int, name: str | None, where: str) -> Removed:
    """Removes the name of an axis that the value has lost; raises if it has another name."""
    names = _names(variable)
    place = _place(variable, axis, len(names or ()))
    found = names[place] if names is not None and place < len(names) else None
    name = found if name is ANY_NAME else name
    if names is not None:
        if found != name:
            raise AxisError(
                f"transform_metadata: axis {axis} of {where} should be named {name!r}, but "
                f"out_sharding={tuple(names)!r} has {found!r} there.\n"
                f"Fix: put {name!r} into the Variable's out_sharding at axis {axis}, or give the "
                "name that is there."
            )
        del names[place : place + 1]
        _set_names(variable, names)
    variable.remove_axis(axis, name)
    return Removed(name, names is not None)


def _place(variable: Variable[Any], axis: int, count: int) -> int:
    """The index of ``axis`` in ``out_sharding``, counted with that axis present."""
    leaves = jax.tree_util.tree_leaves(variable.get_value())
    rank = max([count, *(jnp.ndim(leaf) + 1 for leaf in leaves)])
    return axis if axis >= 0 else rank + axis


def _names(variable: Variable[Any]) -> list[Any] | None:
    names = variable.get_metadata("out_sharding", None)
    has_names = isinstance(names, (tuple, list, jax.sharding.PartitionSpec)) and len(names) > 0
    return list(names) if has_names else None


def _set_names(variable: Variable[Any], names: list[Any]) -> None:
    cls = type(variable.get_metadata("out_sharding"))
    made = cls(*names) if cls is jax.sharding.PartitionSpec else cls(names)
    variable.set_metadata("out_sharding", made)


def name_axes(
    call: Call, axes: ArgumentAxes, out_axes: Any, metadata: dict[str, Any] | None
) -> None:
    """Removes the name of the axis, if there is one in ``metadata``, inside a call.

    After the call it is added again, and to new Variables that are stacked.
    """
    if metadata is None or PARTITION_NAME not in metadata:
        return
    name = metadata[PARTITION_NAME]
    taken: dict[int, Removed] = {}

    def before(inside: Any) -> None:
        taken.update(_take_away(axes, inside.variables, name))

    def after(inside: Any, out: Any) -> None:
        _put_back(axes, inside.variables, taken)
        named = {id(variable) for variable in inside.variables}
        stacked = [0 if spec is Carry else spec for spec in axes.node_specs]
        new = None if name is ANY_NAME else name
        nodes = zip(call.opened.node_paths, inside.nodes, strict=True)
        _name_new(variables_with_axes(stacked, nodes, skip=2), named, new)
        _name_output(out, out_axes, named, new, call.api)

    call.before = before
    call.after.append(after)


def _take_away(axes: ArgumentAxes, variables: list[Any], name: str | None) -> dict[int, Removed]:
    """Removes the name of the axis from Variables; returns what was removed, by slot."""
    taken: dict[int, Removed] = {}
    try:
        for number, axis in enumerate(axes.variables):
            if is_axis(axis):
                where = axes.where(axes.opened.variable_paths[number])
                taken[number] = remove_name(variables[number], axis, name, where)
    except AxisError:
        _put_back(axes, variables, taken)
        raise
    return taken


def _put_back(axes: ArgumentAxes, variables: list[Any], taken: dict[int, Removed]) -> None:
    for number, removed in taken.items():
        add_name(variables[number], axes.variables[number], *removed)


def _name_output(out: Any, out_axes: Any, named: set[int], name: str | None, api: str) -> None:
    specs = broadcast_prefix(out_axes, out, api, "out_axes")
    _name_new(variables_with_axes(specs, leaves_with_paths(out)), named, name)


def _name_new(found: Iterable[Any], named: set[int], name: str | None) -> None:
    for _, variable, axis in found:
        if is_axis(axis) and id(variable) not in named:
            named.add(id(variable))
            add_name(variable, axis, name)
