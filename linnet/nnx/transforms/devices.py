"""Functions of objects over several devices: shard_map, pmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from linnet.nnx.transforms import partition
from linnet.nnx.transforms.axes import Axes
from linnet.nnx.transforms.mapping import OutputAxes, divide, join
from linnet.nnx.transforms.run import Call, transform


def _lifted_shard_map(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_specs: Any,
    out_specs: Any,
    options: dict[str, Any],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    call = Call(f, args, kwargs, "shard_map", graph, graph_updates)
    opened = call.opened
    specs = Axes(opened, in_specs, "shard_map", "in_specs")
    found: list[OutputAxes] = []

    def record(values: Any, arrays: Any, plain: Any) -> Any:
        inside, news, leaves, out = call.run(values, arrays, plain)
        found.append(OutputAxes(call, out, out_specs, len(news)))
        kept = [inside.raw(number) for number in range(len(inside.variables))]
        return kept, news, leaves

    inputs = (opened.values, opened.arrays, opened.plain)
    sharded = {**options, "in_specs": (specs.variables, specs.arrays, specs.plain)}
    # The specs of the output depend on its form, so it is traced once without knowing them.
    probe = jax.shard_map(lambda *xs: (record(*xs), None)[1], out_specs=None, **sharded)
    jax.eval_shape(probe, *inputs)
    places = found[-1]
    run = jax.shard_map(record, out_specs=(specs.variables, places.news, places.plain), **sharded)
    kept, news, leaves = run(*inputs)
    assert call.effects is not None
    return call.close([kept[number] for number in call.effects.changed], news, leaves)


def shard_map(
    f: Any = None,
    *,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.shard_map`` for functions of objects.

    Args:
      f: the function; left out, the call is a decorator.
      mesh: the devices.
      in_specs: a ``PartitionSpec``, or ``StateSharding`` of them for an object, for each argument.
      out_specs: likewise for the output.
      axis_names: as for ``jax.shard_map``.
      check_vma: as for ``jax.shard_map``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The function; Variables keep their specs.
    """
    options = {"mesh": mesh, "axis_names": set(axis_names), "check_vma": check_vma}
    return transform(
        "shard_map",
        _lifted_shard_map,
        f,
        in_specs=in_specs,
        out_specs=out_specs,
        options=options,
        graph=graph,
        graph_updates=graph_updates,
    )


def _lifted_pmap(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    static: tuple[int, ...],
    options: dict[str, Any],
    partition_name: str | None,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    fixed = {n % len(args): args[n] for n in static}
    moving = tuple(None if n in fixed else arg for n, arg in enumerate(args))

    def with_fixed(*inner: Any, **named: Any) -> Any:
        return f(*(fixed.get(n, arg) for n, arg in enumerate(inner)), **named)

    call = Call(with_fixed, moving, kwargs, "pmap", graph, graph_updates)
    opened = call.opened
    axes = Axes(opened, in_axes, "pmap")
    axes.size(options.get("axis_size"))
    placed: list[OutputAxes] = []

    def mapped(values: Any, arrays: Any, plain: Any) -> Any:
        with partition.removed(call, axes.variables, partition_name):
            inside, news, leaves, out = call.run(values, arrays, plain)
        where = OutputAxes(call, out, out_axes, len(news))
        placed.append(where)
        kept = [inside.raw(number) for number in range(len(inside.variables))]
        return kept, divide(news, where.news), divide(leaves, where.plain)

    run = jax.pmap(
        mapped,
        in_axes=(axes.variables, axes.arrays, axes.plain),
        out_axes=(axes.variables, (0, None), (0, None)),
        **options,
    )
    kept, news, leaves = run(opened.values, opened.arrays, opened.plain)
    where = placed[-1]
    news, leaves = where.place(join(news, where.news), join(leaves, where.plain))
    assert call.effects is not None
    out = call.close([kept[number] for number in call.effects.changed], news, leaves)
    partition.added(out, partition_name)
    return out


def pmap(
    f: Any = None,
    *,
    axis_name: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | tuple[int, ...] = (),
    devices: Any = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    transform_metadata: dict[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.pmap`` for functions of objects: one copy of the function on each device.

    Args:
      f: the function; left out, the call is a decorator.
      axis_name: a name for the axis, for collectives.
      in_axes: as for ``vmap``.
      out_axes: as for ``vmap``.
      static_broadcasted_argnums: positional arguments that are not traced.
      devices: as for ``jax.pmap``.
      backend: as for ``jax.pmap``.
      axis_size: as for ``jax.pmap``.
      donate_argnums: accepted; buffers are not donated.
      transform_metadata: as for ``vmap``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The mapped function.
    """
    del donate_argnums
    static = static_broadcasted_argnums
    given = {"axis_name": axis_name, "devices": devices, "backend": backend}
    given["axis_size"] = axis_size
    return transform(
        "pmap",
        _lifted_pmap,
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        static=(static,) if isinstance(static, int) else tuple(static),
        options={name: value for name, value in given.items() if value is not None},
        partition_name=partition.name_in(transform_metadata),
        graph=graph,
        graph_updates=graph_updates,
    )
