"""Mapping functions of objects over an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from linnet.errors import AxisError, SharedReferenceError
from linnet.nnx.transforms import partition
from linnet.nnx.transforms.axes import Axes, FilterMap, axis_for, broadcast_prefix, move_from_front
from linnet.nnx.transforms.engine import is_node, open_tree
from linnet.nnx.transforms.jit import JitFunction
from linnet.nnx.transforms.run import Call, Run, Slots, output_text, transform, without_static
from linnet.nnx.variablelib.variable import type_text

Path = tuple[Any, ...]


class OutputAxes:
    """The axes of what leaves a mapped function: the arrays of new things, and plain leaves.

    Args:
      run: what the function did.
      out_axes: as the user gave them.
      axes: the axes of the arguments; new attributes of an object go along its axis.
    """

    def __init__(self, run: Run, out_axes: Any, axes: Axes):
        self.api = run.slots.call.api
        self._specs = broadcast_prefix(out_axes, run.out, self.api, "out_axes")
        self._leaves = jax.tree_util.tree_leaves_with_path(run.out, is_leaf=is_node)
        pairs = list(zip(self._specs, self._leaves, strict=True))
        self.plain: list[Any] = [spec for spec, (_, leaf) in pairs if not is_node(leaf)]
        self.fresh: list[Any] = [None] * len(run.fresh)
        self._run = run
        self.attributes: set[int] = set()  # those of ``fresh`` that belong to arguments
        self._refuse_two_ways(run, axes)
        self._place_attributes(run, axes)
        content: dict[int, dict[Path, Any]] = {}
        for number, position, path in run.fresh_outputs():
            spec = self._specs[position]
            if isinstance(spec, FilterMap) and position not in content:
                content[position] = _content(self._leaves[position][1])
            self.fresh[number] = axis_for(spec, path, content.get(position, {}).get(path))

    def fresh_name(self, number: int) -> str:
        """Where one of ``fresh`` stands, for a message."""
        return self._run.fresh_names()[number]

    def plain_name(self, number: int) -> str:
        """Where a plain leaf stands, for a message."""
        paths = [path for path, leaf in self._leaves if not is_node(leaf)]
        return output_text(paths[number])

    def _place_attributes(self, run: Run, axes: Axes) -> None:
        content = _content(run.inside.tree) if run.effects.parts else {}
        for number, path in run.fresh_places():
            owner = next(n for n, p in enumerate(axes.node_paths) if path[: len(p)] == p)
            inner = path[len(axes.node_paths[owner]) :]
            self.fresh[number] = axis_for(axes.specs[owner], inner, content.get(path))
            self.attributes.add(number)

    def _refuse_two_ways(self, run: Run, axes: Axes) -> None:
        """A Variable that comes in along one axis cannot go out along another."""
        numbers = {id(v): n for n, v in enumerate(run.inside.variables)}
        for spec, (where, leaf) in zip(self._specs, self._leaves, strict=True):
            alone = open_tree(leaf, True, self.api) if is_node(leaf) else None
            pairs = zip(alone.variable_paths, alone.variables, strict=True) if alone else ()
            for path, variable in pairs:
                number = numbers.get(id(variable))
                axis = axis_for(spec, path, variable)
                if number is None or _same_axis(axis, axes.variables[number], run.now[number]):
                    continue
                raise SharedReferenceError(
                    f"{type(variable).__name__} comes into nnx.{self.api} at "
                    f"{run.slots.where(number)} along {axes.variables[number]!r} and goes out at "
                    f"{output_text(where, path)} along {axis!r}.\n"
                    "Fix: give out_axes the same axis, return nnx.clone(...) of it, or do not "
                    "return it: its update reaches the caller anyway."
                )


def _same_axis(goes: Any, came: Any, value: Any) -> bool:
    if goes == came:
        return True
    if not (isinstance(goes, int) and isinstance(came, int)):
        return False
    return all((goes - came) % (jnp.ndim(x) + 1) == 0 for x in jax.tree_util.tree_leaves(value))


def _content(tree: Any) -> dict[Path, Any]:
    """The Variables and arrays in the objects of a tree, by path."""
    opened = open_tree(tree, True, "vmap")
    paths = [*opened.variable_paths, *opened.array_paths]
    return dict(zip(paths, [*opened.variables, *opened.arrays], strict=True))


class Mapped:
    """The flat function that JAX maps, and the way back from its results.

    Args:
      call: the call.
      axes: the axes of its arguments.
      out_axes: as the user gave them.
    """

    def __init__(self, call: Call, axes: Axes, out_axes: Any):
        self.slots = Slots(call)
        self.axes = axes
        self.out_axes = out_axes
        self._last: Any = None
        count = self.slots.variables
        self._broadcast = {n for n, axis in enumerate(axes.slots[:count]) if axis is None}

    @property
    def in_axes(self) -> tuple[Any, Any]:
        """The axes of the inputs."""
        return self.axes.slots, self.axes.plain

    @property
    def inputs(self) -> tuple[Any, Any]:
        """The inputs."""
        return self.slots.values, self.slots.plain

    def run(self, values: Any, plain: Any, index: Any = None) -> Any:
        """Runs the function on one example; ``index`` differs from example to example."""
        run = self.slots.run(values, plain, self._broadcast)
        places = OutputAxes(run, self.out_axes, self.axes)
        changed = sorted(run.changed)
        if index is not None:
            self._check(run, places, index)
        self._last = run, places, changed
        return (
            divide([run.now[n] for n in changed], [self.axes.slots[n] for n in changed]),
            divide(run.fresh, places.fresh),
            divide(run.leaves, places.plain),
        )

    def finish(self, kept: Any, fresh: Any, leaves: Any) -> Any:
        """Writes the results out."""
        run, places, changed = self._last
        values = join(kept, [self.axes.slots[n] for n in changed])
        final = dict(zip(changed, values, strict=True))
        return run.close(final, join(fresh, places.fresh), join(leaves, places.plain))

    def _check(self, run: Run, places: OutputAxes, index: Any) -> None:
        """Raises for what differs between examples but has no axis, or has one out of range."""
        api = self.slots.call.api
        for number in sorted(run.changed):
            if self.axes.slots[number] is None and differs(run.now[number], index):
                raise AxisError(
                    f"nnx.{api}: {self.slots.where(number)} is broadcast, but was given a value "
                    "that differs along the mapped axis.\n"
                    "Fix: map it too, with nnx.StateAxes({...: axis}) in in_axes, or reduce the "
                    "value over the axis first (jax.lax.pmean with an axis_name)."
                )
        for number, value in enumerate(run.fresh):
            if number in places.attributes and places.fresh[number] is None:
                places.fresh[number] = 0 if differs(value, index) else None
            _check_place(value, places.fresh[number], places.fresh_name, number, index, api)
        for number, value in enumerate(run.leaves):
            _check_place(value, places.plain[number], places.plain_name, number, index, api)


def _check_place(
    value: Any, axis: Any, name: Callable[[int], str], number: int, index: Any, api: str
) -> None:
    if axis is None:
        if differs(value, index):
            raise AxisError(
                f"nnx.{api}: {name(number)} differs along the mapped axis, but its out_axes is "
                "None.\nFix: give it an axis, or reduce it over the axis first."
            )
        return
    for leaf in jax.tree_util.tree_leaves(value):
        if not -jnp.ndim(leaf) - 1 <= axis <= jnp.ndim(leaf):
            raise AxisError(
                f"nnx.{api}: out_axes {axis} is out of range for {name(number)}, which is "
                f"{type_text(jnp.asarray(leaf))} for each example.\n"
                "Fix: choose an axis that the stacked array has."
            )


def differs(value: Any, index: Any) -> bool:
    """Whether a value depends on the axis that is being mapped, as ``index`` does."""
    tracers = [x for x in jax.tree_util.tree_leaves(value) if isinstance(x, Tracer)]
    found: list[bool] = []

    @custom_vmap
    def look(index: Any, tracers: Any) -> Any:
        return index

    @look.def_vmap
    def rule(axis_size: int, in_batched: Any, index: Any, tracers: Any) -> Any:
        found.append(any(in_batched[1]))
        return index, in_batched[0]

    if tracers:
        look(index, tracers)
    return any(found)


def divide(values: list[Any], axes: list[Any]) -> tuple[list[Any], list[Any]]:
    """Mapped values and broadcast ones, with None where the other has something."""
    mapped = [None if axis is None else value for value, axis in zip(values, axes, strict=True)]
    fixed = [value if axis is None else None for value, axis in zip(values, axes, strict=True)]
    return mapped, fixed


def join(divided: tuple[list[Any], list[Any]], axes: list[Any]) -> list[Any]:
    """The reverse of ``divide``, with the mapped axis, which comes first, where it belongs."""
    return [
        fixed if axis is None else move_from_front(mapped, axis)
        for mapped, fixed, axis in zip(*divided, axes, strict=True)
    ]


def _lifted_vmap(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    axis: partition.AxisName | None,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    call = Call(f, args, kwargs, "vmap", graph, graph_updates)
    axes = Axes(call.opened, in_axes, "vmap", where=call.where)
    size = axes.size(options["axis_size"])
    if size is None:
        raise AxisError(
            "nnx.vmap has nothing to map over: every argument is broadcast.\n"
            "Fix: give one an axis in in_axes, or pass axis_size."
        )
    partition.name_axes(call, axes, out_axes, axis)
    mapped = Mapped(call, axes, out_axes)
    run = jax.vmap(
        mapped.run,
        in_axes=(*mapped.in_axes, 0),
        out_axes=((0, None),) * 3,
        **{**options, "axis_size": size},
    )
    return mapped.finish(*run(*mapped.inputs, jnp.arange(size)))


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
      own axes. New attributes of an argument go along its axis; on a broadcast one they are stacked
      if they differ from example to example.

    Raises:
      AxisError: an axis out of range, different sizes, or a broadcast Variable or output given a
        value that differs between examples.
      SharedReferenceError: one Variable is to be treated in two ways.

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
        axis=partition.name_in(transform_metadata),
        graph=graph,
        graph_updates=graph_updates,
    )


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
