"""Functions of objects over several devices: shard_map, pmap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import AxisError
from linnet.nnx.transforms import partition
from linnet.nnx.transforms.axes import Axes
from linnet.nnx.transforms.jit_function import JitFunction
from linnet.nnx.transforms.mapping import Mapped, OutputAxes
from linnet.nnx.transforms.run import Call, transform, without_static
from linnet.nnx.transforms.slots import Slots


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
    slots = Slots(call)
    specs = Axes(call.opened, in_specs, "shard_map", "in_specs", where=call.where)
    _check_sizes(slots, specs, options["mesh"])
    found: list[Any] = []

    def record(values: Any, plain: Any) -> Any:
        run = slots.run(values, plain)
        changed = sorted(run.changed)
        found.append((run, OutputAxes(run, out_specs, specs), changed))
        return [run.now[n] for n in changed], run.fresh, run.leaves

    inputs = (slots.values, slots.plain)
    sharded = {**options, "in_specs": (specs.slots, specs.plain)}
    # The specs of the output depend on its form, so it is traced once without knowing them.
    probe = jax.shard_map(lambda *xs: (record(*xs), None)[1], out_specs=None, **sharded)
    jax.eval_shape(probe, *inputs)
    _, places, changed = found[-1]
    kept = [specs.slots[n] for n in changed]
    run_all = jax.shard_map(record, out_specs=(kept, places.fresh, places.plain), **sharded)
    values, fresh, leaves = run_all(*inputs)
    return found[-1][0].close(dict(zip(changed, values, strict=True)), fresh, leaves)


def _check_sizes(slots: Slots, specs: Axes, mesh: Any) -> None:
    """Raises for an axis that cannot be cut into equal parts, one for each device."""
    paths = [*slots.paths, *slots.plain_paths]
    values = [*slots.values, *slots.plain]
    for path, value, spec in zip(paths, values, [*specs.slots, *specs.plain], strict=True):
        parts = spec if isinstance(spec, jax.sharding.PartitionSpec) else ()
        for axis, names in enumerate(parts):
            names = (names,) if isinstance(names, str) else names or ()
            devices = math.prod(mesh.shape.get(name, 1) for name in names)
            for leaf in jax.tree_util.tree_leaves(value):
                size = jnp.shape(leaf)[axis] if axis < jnp.ndim(leaf) else 0
                if size % devices:
                    raise AxisError(
                        f"nnx.shard_map: axis {axis} of {slots.call.where(path)} has size {size}, "
                        f"which does not go into equal parts on the {devices} devices of "
                        f"{', '.join(names)}.\nFix: pad it, or choose another spec in in_specs."
                    )


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
      The function; Variables keep their specs. New attributes of an argument get its spec.

    Raises:
      AxisError: an axis cannot be cut into equal parts.
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
    axis: partition.AxisName | None,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    with_static, moving = without_static(f, args, static, "pmap")
    call = Call(with_static, moving, kwargs, "pmap", graph, graph_updates, named=f)
    axes = Axes(call.opened, in_axes, "pmap", where=call.where)
    size = axes.size(options.get("axis_size"))
    partition.name_axes(call, axes, out_axes, axis)
    mapped = Mapped(call, axes, out_axes)
    if size is not None:  # what differs between devices is told by the rules of vmap
        name = options.get("axis_name")
        check = jax.vmap(
            mapped.run, (*mapped.in_axes, 0), ((0, None),) * 3, axis_name=name, axis_size=size
        )
        jax.eval_shape(check, *mapped.inputs, jnp.arange(size))
    run = jax.pmap(mapped.run, in_axes=mapped.in_axes, out_axes=((0, None),) * 3, **options)
    return mapped.finish(*run(*mapped.inputs))


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
      donate_argnums: positional arguments whose buffers may be reused; Variables in them get
        new ones.
      transform_metadata: as for ``vmap``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The mapped function, compiled once for each structure as by ``nnx.jit``.

    Raises:
      AxisError: an axis does not fit, or what is broadcast differs between devices.
    """
    static = static_broadcasted_argnums
    given = {"axis_name": axis_name, "devices": devices, "backend": backend}
    given["axis_size"] = axis_size
    jit_options = {"static_argnums": static, "donate_argnums": donate_argnums}

    def make(f: Callable[..., Any]) -> JitFunction:
        lifted = transform(
            "pmap",
            _lifted_pmap,
            f,
            in_axes=in_axes,
            out_axes=out_axes,
            static=(static,) if isinstance(static, int) else tuple(static),
            options={name: value for name, value in given.items() if value is not None},
            axis=partition.name_in(transform_metadata),
            graph=graph,
            graph_updates=graph_updates,
        )
        return JitFunction(lifted, "pmap", graph, graph_updates, dict(jit_options))

    return make if f is None else make(f)
