"""Mapping functions of objects over an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from linnet.errors import AxisError
from linnet.nnx.tracing import mapped_tracer
from linnet.nnx.transforms import partition
from linnet.nnx.transforms.axes import Axes, FilterMap, broadcast_prefix, move_from_front
from linnet.nnx.transforms.lift import is_node, open_tree
from linnet.nnx.transforms.run import Call, transform


class OutputAxes:
    """The axes of what leaves a mapped function: arrays of new objects, and plain leaves."""

    def __init__(self, call: Call, out: Any, out_axes: Any, news: int):
        specs = broadcast_prefix(out_axes, out, call.api, "out_axes")
        leaves = jax.tree_util.tree_leaves(out, is_leaf=is_node)
        effects = call.effects
        assert effects is not None
        self.plain = [s for s, leaf in zip(specs, leaves, strict=True) if not is_node(leaf)]
        self.news: list[Any] = [0] * news
        for spec, leaf, part in zip(specs, leaves, effects.out_parts, strict=True):
            if part is None:
                continue
            is_map = isinstance(spec, FilterMap)
            alone = open_tree(leaf, True, call.api) if is_map else None
            places = dict(zip(alone.variable_paths, alone.variables, strict=True)) if alone else {}
            for path, slot in part.leaves:
                if not slot.old:
                    axis = spec.map_prefix(path, places.get(path)) if is_map else spec
                    self.news[slot.number] = axis

    def place(self, news: list[Any], plain: list[Any]) -> tuple[list[Any], list[Any]]:
        """Moves the mapped axis, which comes first, to where it was asked for."""
        return (
            [
                x if a is None else move_from_front(x, a)
                for x, a in zip(news, self.news, strict=True)
            ],
            [
                x if a is None else move_from_front(x, a)
                for x, a in zip(plain, self.plain, strict=True)
            ],
        )


def divide(values: list[Any], axes: list[Any]) -> tuple[list[Any], list[Any]]:
    """Mapped values and broadcast ones, with None where the other has something."""
    mapped = [None if axis is None else value for value, axis in zip(values, axes, strict=True)]
    fixed = [value if axis is None else None for value, axis in zip(values, axes, strict=True)]
    return mapped, fixed


def join(divided: tuple[list[Any], list[Any]], axes: list[Any]) -> list[Any]:
    """The reverse of ``divide``."""
    mapped, fixed = divided
    return [f if a is None else m for m, f, a in zip(mapped, fixed, axes, strict=True)]


def _refuse_mapped(call: Call, inside: Any, axes: Axes) -> None:
    """Raises for a broadcast Variable that was given a different value for each example."""
    for number in inside.changed():
        if axes.variables[number] is None:
            leaves = jax.tree_util.tree_leaves(inside.raw(number))
            if any(isinstance(leaf, mapped_tracer()) for leaf in leaves):
                raise AxisError(
                    f"nnx.{call.api}: {call.opened.path_of(number)} "
                    f"({type(inside.variables[number]).__name__}) is broadcast, but was given a "
                    "value that differs along the mapped axis.\n"
                    "Fix: map it too, with nnx.StateAxes({...: axis}) in in_axes, or reduce the "
                    "value over the axis first (jax.lax.pmean with an axis_name)."
                )


def _lifted_vmap(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    partition_name: str | None,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    call = Call(f, args, kwargs, "vmap", graph, graph_updates)
    opened = call.opened
    axes = Axes(opened, in_axes, "vmap")
    size = axes.size(options["axis_size"])
    if size is None:
        raise AxisError(
            "nnx.vmap has nothing to map over: every argument is broadcast.\n"
            "Fix: give one an axis in in_axes, or pass axis_size."
        )
    placed: list[OutputAxes] = []
    broadcast = {number for number, axis in enumerate(axes.variables) if axis is None}

    def mapped(values: Any, arrays: Any, plain: Any) -> Any:
        with partition.removed(call, axes.variables, partition_name):
            inside, news, leaves, out = call.run(values, arrays, plain, broadcast)
        _refuse_mapped(call, inside, axes)
        out_specs = OutputAxes(call, out, out_axes, len(news))
        placed.append(out_specs)
        kept = [inside.raw(number) for number in range(len(inside.variables))]
        return kept, divide(news, out_specs.news), divide(leaves, out_specs.plain)

    run = jax.vmap(
        mapped,
        in_axes=(axes.variables, axes.arrays, axes.plain),
        out_axes=(axes.variables, (0, None), (0, None)),
        **{**options, "axis_size": size},
    )
    kept, news, leaves = run(opened.values, opened.arrays, opened.plain)
    where = placed[-1]
    news, leaves = where.place(join(news, where.news), join(leaves, where.plain))
    assert call.effects is not None
    out = call.close([kept[number] for number in call.effects.changed], news, leaves)
    partition.added(out, partition_name)
    return out


def vmap(
    f: Any = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    transform_metadata: dict[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Maps a function of objects over an axis of their arrays.

    Args:
      f: the function; left out, the call is a decorator.
      in_axes: an axis, ``None`` to broadcast, or ``StateAxes``, for all arguments or for each.
      out_axes: likewise for the output.
      axis_name: a name for the axis, for collectives.
      axis_size: the size, where no argument tells.
      spmd_axis_name: as for ``jax.vmap``.
      transform_metadata: ``{nnx.PARTITION_NAME: name}`` names the axis in the sharding metadata.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The mapped function. New objects in its output are stacked; Variables are updated along their
      own axes.

    Raises:
      AxisError: an axis out of range, different sizes, or a broadcast Variable given a value that
        differs between examples.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Noise(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.w = nnx.Param(rngs.normal((3,)))
      >>> make = nnx.vmap(lambda key: Noise(nnx.Rngs(key)))
      >>> stack = make(jax.random.split(jax.random.key(0), 5))
      >>> stack.w.shape
      (5, 3)
    """
    options = {
        "axis_name": axis_name,
        "axis_size": axis_size,
        "spmd_axis_name": spmd_axis_name,
    }
    return transform(
        "vmap",
        _lifted_vmap,
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        options=options,
        partition_name=partition.name_in(transform_metadata),
        graph=graph,
        graph_updates=graph_updates,
    )
