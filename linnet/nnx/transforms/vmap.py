"""Functions of objects mapped over an axis: ``vmap``, ``pmap`` and ``shard_map``.

The flat function that JAX maps is ``Mapped.run``: it runs the user's function on one example, and
returns the slots that it changed, fresh arrays and plain leaves, each as mapped or as broadcast.
``OutputAxes`` finds the axes of what is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from linnet.errors import AxisError, SharedReferenceError, type_text
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.transforms import partition
from linnet.nnx.transforms.axes import (
    ArgumentAxes,
    FilterMap,
    axis_for,
    broadcast_prefix,
    move_from_front,
    refuse_objects,
    variables_with_axes,
)
from linnet.nnx.transforms.engine import leaves_by_path, leaves_with_paths, output_place
from linnet.nnx.transforms.jit import JitFunction
from linnet.nnx.transforms.option_types import (
    Decorator,
    P,
    PmapOptions,
    R,
    ShardMapOptions,
    VmapOptions,
)
from linnet.nnx.transforms.run import Call, Run, count_specs, transform


@overload
def vmap(f: Callable[P, R], **options: Unpack[VmapOptions]) -> Callable[P, R]: ...
@overload
def vmap(f: None = None, **options: Unpack[VmapOptions]) -> Decorator: ...
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
      in_axes: an axis, ``None`` to broadcast, or ``StateAxes``, for all arguments or for each. An
        argument given by name takes the entry of its parameter, and one without an entry axis 0.
      out_axes: likewise for the output.
      axis_name: a name for the axis, for collectives.
      axis_size: the size, where no argument tells.
      spmd_axis_name: as for ``jax.vmap``.
      transform_metadata: ``{nnx.PARTITION_NAME: name}`` names the axis in the sharding metadata.
      graph, graph_updates: as for ``jit``.

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

    def lifted(call: Call) -> Any:
        mapped = Mapped(call, in_axes, out_axes, transform_metadata, axis_size)
        size = mapped.size
        if size is None:
            raise AxisError(
                "nnx.vmap has nothing to map over: every argument is broadcast.\n"
                "Fix: give one an axis in in_axes, or pass axis_size."
            )
        options = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
        return mapped.finish(*mapped.by_vmap(size, **options)(*mapped.inputs, jnp.arange(size)))

    return transform("vmap", lifted, f, graph, graph_updates, own_specs=count_specs(in_axes))


@overload
def pmap(f: Callable[P, R], **options: Unpack[PmapOptions]) -> Callable[P, R]: ...
@overload
def pmap(f: None = None, **options: Unpack[PmapOptions]) -> Decorator: ...
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
      in_axes, out_axes, transform_metadata: as for ``vmap``.
      static_broadcasted_argnums: positional arguments that are not traced.
      devices, backend, axis_size: as for ``jax.pmap``.
      donate_argnums: positional arguments whose buffers may be reused; Variables in them get
        new ones.
      graph, graph_updates: as for ``jit``.

    Returns:
      The mapped function, compiled once for each structure as by ``nnx.jit``.

    Raises:
      AxisError: an axis does not fit, or what is broadcast differs between devices.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> forward = nnx.pmap(lambda model, x: model(x), in_axes=(None, 0), axis_size=1)
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> forward(model, jnp.ones((1, 4, 2))).shape
      (1, 4, 3)
    """
    given = {
        "axis_name": axis_name,
        "devices": devices,
        "backend": backend,
        "axis_size": axis_size,
    }
    options = {name: value for name, value in given.items() if value is not None}
    static = static_broadcasted_argnums
    jit_options = {"static_argnums": static, "donate_argnums": donate_argnums}

    def lifted(call: Call) -> Any:
        mapped = Mapped(call, in_axes, out_axes, transform_metadata, axis_size)
        if mapped.size is not None:  # jax.vmap finds out what differs between devices
            check = mapped.by_vmap(mapped.size, axis_name=axis_name)
            jax.eval_shape(check, *mapped.inputs, jnp.arange(mapped.size))
        named = call.named(lambda values, plain: mapped.run(values, plain, None))
        run = jax.pmap(named, in_axes=mapped.in_axes, out_axes=((0, None),) * 3, **options)
        return mapped.finish(*run(*mapped.inputs))

    return transform(
        "pmap",
        lifted,
        f,
        graph,
        graph_updates,
        static_argnums=static,
        own_specs=count_specs(in_axes),
        around=lambda made: JitFunction(made, "pmap", graph, graph_updates, dict(jit_options)),
    )


@overload
def shard_map(f: Callable[P, R], **options: Unpack[ShardMapOptions]) -> Callable[P, R]: ...
@overload
def shard_map(f: None = None, **options: Unpack[ShardMapOptions]) -> Decorator: ...
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
      axis_names, check_vma: as for ``jax.shard_map``.
      graph, graph_updates: as for ``jit``.

    Returns:
      The function; Variables keep their specs, and with graph updates the objects outside are left
      in them. New attributes of an argument get its spec.

    Raises:
      AxisError: an axis cannot be cut into equal parts.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from linnet import nnx
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
      >>> forward = nnx.shard_map(
      ...     lambda model, x: model(x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
      >>> forward(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((4, 2))).shape
      (4, 3)
    """
    options = {"mesh": mesh, "axis_names": set(axis_names), "check_vma": check_vma}

    def lifted(call: Call) -> Any:
        specs = call.axes(in_specs, "in_specs")
        _check_sizes(call, specs, mesh)
        found: list[_FinishedRun] = []

        def run_once(values: Any, plain: Any) -> Any:
            run = call.run(values, plain)
            changed = sorted(run.changed | (run.writable if call.updates else set()))
            found.append(_FinishedRun(run, OutputAxes(run, out_specs, specs), changed))
            return [run.now[n] for n in changed], run.fresh, run.plain

        inputs = (call.slot_values, call.plain)
        sharded = {**options, "in_specs": (specs.slots, specs.plain)}

        # The specs of the output depend on its structure, so the function is traced once for it.
        def probe(values: Any, plain: Any) -> None:
            run_once(values, plain)

        jax.eval_shape(jax.shard_map(call.named(probe), out_specs=None, **sharded), *inputs)
        run, places, changed = found[-1]
        kept = [specs.slots[n] for n in changed]
        run_all = jax.shard_map(
            call.named(run_once), out_specs=(kept, places.fresh, places.plain), **sharded
        )
        values, fresh, leaves = run_all(*inputs)
        return run.close(dict(zip(changed, values, strict=True)), fresh, leaves)

    return transform("shard_map", lifted, f, graph, graph_updates, own_specs=count_specs(in_specs))


def _check_sizes(call: Call, specs: ArgumentAxes, mesh: Any) -> None:
    """Raises for an axis that cannot be cut into equal parts, one for each device."""
    all_specs = [*specs.slots, *specs.plain]
    for path, value, spec in zip(call.input_paths, call.inputs, all_specs, strict=True):
        parts = spec if isinstance(spec, jax.sharding.PartitionSpec) else ()
        for axis, names in enumerate(parts):
            names = (names,) if isinstance(names, str) else names or ()
            devices = math.prod(mesh.shape.get(name, 1) for name in names)
            for leaf in jax.tree_util.tree_leaves(value):
                size = jnp.shape(leaf)[axis] if axis < jnp.ndim(leaf) else 0
                if size % devices:
                    raise AxisError(
                        f"nnx.shard_map: axis {axis} of {call.where(path)} has size {size}, "
                        f"which does not go into equal parts on the {devices} devices of "
                        f"{', '.join(names)}.\nFix: pad it, or choose another spec in in_specs."
                    )


class OutputAxes:
    """The axes of the plain leaves that a mapped function returns, and of fresh arrays: new
    attributes of an argument get the axis of the argument."""

    def __init__(self, run: Run, out_axes: Any, axes: ArgumentAxes):
        self.api = run.call.api
        what = "out_specs" if self.api == "shard_map" else "out_axes"
        refuse_objects(out_axes, run.call.graph, self.api, what)
        self._specs = broadcast_prefix(out_axes, run.out, self.api, what)
        self._leaves = leaves_with_paths(run.out)
        pairs = list(zip(self._specs, self._leaves, strict=True))
        self.plain: list[Any] = [spec for spec, (_, leaf) in pairs if not is_node(leaf)]
        self.fresh: list[Any] = [None] * len(run.fresh)
        self.attributes: set[int] = set()  # those of ``fresh`` that belong to arguments
        self._refuse_two_ways(run, axes)
        self._place_attributes(run, axes)
        filters = any(isinstance(spec, FilterMap) for spec in self._specs)
        content = leaves_by_path(run.out) if filters else {}
        for number, position, path in run.fresh_outputs():
            place = self._leaves[position][0]
            found = content.get((*place, *path))
            self.fresh[number] = axis_for(self._specs[position], path or place, found)

    def _place_attributes(self, run: Run, axes: ArgumentAxes) -> None:
        content = leaves_by_path(run.inside.tree) if run.effects.argument_nodes else {}
        leaf_paths = axes.opened.leaf_paths
        for number, path in run.fresh_places():
            owner = next(n for n, p in enumerate(leaf_paths) if path[: len(p)] == p)
            inner = path[len(leaf_paths[owner]) :]
            self.fresh[number] = axis_for(axes.specs[owner], inner, content.get(path))
            self.attributes.add(number)

    def _refuse_two_ways(self, run: Run, axes: ArgumentAxes) -> None:
        """Raises for a Variable that comes in or goes out along one axis, and out along another."""
        numbers = {id(v): n for n, v in enumerate(run.inside.variables)}
        new: dict[int, tuple[Any, str]] = {}
        for path, variable, axis in variables_with_axes(self._specs, self._leaves):
            type_name, place = type(variable).__name__, output_place(path)
            number = numbers.get(id(variable))
            if number is None:
                first, at = new.setdefault(id(variable), (axis, place))
                if not _same_axis(axis, first, variable.raw_value):
                    raise SharedReferenceError(
                        f"One {type_name} goes out of nnx.{self.api} at {at} along {first!r} and "
                        f"at {place} along {axis!r}.\n"
                        "Fix: give both places the same axis, or return nnx.clone(...) at one."
                    )
            elif not _same_axis(axis, axes.variables[number], run.now[number]):
                raise SharedReferenceError(
                    f"{type_name} comes into nnx.{self.api} at {run.call.slot_name(number)} along "
                    f"{axes.variables[number]!r} and goes out at {place} along {axis!r}.\n"
                    "Fix: give out_axes the same axis, return nnx.clone(...) of it, or do not "
                    "return it: its update reaches the caller anyway."
                )


def _same_axis(goes: Any, came: Any, value: Any) -> bool:
    if goes == came:
        return True
    if not (isinstance(goes, int) and isinstance(came, int)):
        return False
    return all((goes - came) % (jnp.ndim(x) + 1) == 0 for x in jax.tree_util.tree_leaves(value))


class _FinishedRun(NamedTuple):
    """A run, the axes of what it made and returned, and the slots that it gives new values."""

    run: Run
    places: OutputAxes
    changed: list[int]


class Mapped:
    """The flat function that JAX maps for a call, and the way back from its results."""

    def __init__(
        self, call: Call, in_axes: Any, out_axes: Any, metadata: Any, axis_size: int | None
    ):
        self.call = call
        self.axes = call.axes(in_axes)
        self.size = self.axes.size(axis_size)
        self.out_axes = out_axes
        self._last: _FinishedRun | None = None
        self._broadcast = {n for n, axis in enumerate(self.axes.variables) if axis is None}
        partition.name_axes(call, self.axes, out_axes, metadata)
        self.in_axes = self.axes.slots, self.axes.plain
        self.inputs = call.slot_values, call.plain

    def by_vmap(self, size: int, **options: Any) -> Any:
        """``run`` mapped by ``jax.vmap``; the index of the example is its last argument."""
        in_axes, out_axes = (*self.in_axes, 0), ((0, None),) * 3
        return jax.vmap(self.run, in_axes, out_axes, axis_size=size, **options)

    def run(self, values: Any, plain: Any, index: Any) -> Any:
        """Runs the function on one example; with its ``index``, raises if a value without an axis
        differs between examples."""
        run = self.call.run(values, plain, self._broadcast)
        places = OutputAxes(run, self.out_axes, self.axes)
        changed = sorted(run.changed | self._spread(run))
        if index is not None:
            self._check(run, places, index)
        self._last = _FinishedRun(run, places, changed)
        return (
            split_mapped([run.now[n] for n in changed], [self.axes.slots[n] for n in changed]),
            split_mapped(run.fresh, places.fresh),
            split_mapped(run.plain, places.plain),
        )

    def _spread(self, run: Run) -> set[int]:
        """The slots that ``pmap`` leaves spread over the devices, changed or not."""
        if self.call.api != "pmap" or not self.call.updates:
            return set()
        return {n for n in run.writable if self.axes.slots[n] is not None}

    def finish(self, kept: Any, fresh: Any, leaves: Any) -> Any:
        """Writes the results out."""
        assert self._last is not None
        run, places, changed = self._last
        values = join_mapped(kept, [self.axes.slots[n] for n in changed])
        final = dict(zip(changed, values, strict=True))
        return run.close(final, join_mapped(fresh, places.fresh), join_mapped(leaves, places.plain))

    def _check(self, run: Run, places: OutputAxes, index: Any) -> None:
        """Raises for arrays that differ between examples and have no axis, or one out of range."""
        api = self.call.api
        for number in sorted(run.changed):
            if self.axes.slots[number] is None and differs(run.now[number], index):
                raise AxisError(
                    f"nnx.{api}: {self.call.slot_name(number)} is broadcast, but was given a value "
                    "that differs along the mapped axis.\n"
                    "Fix: map it too, with nnx.StateAxes({...: axis}) in in_axes, or reduce the "
                    "value over the axis first (jax.lax.pmean with an axis_name)."
                )
        for number, value in enumerate(run.fresh):
            if number in places.attributes and places.fresh[number] is None:
                places.fresh[number] = 0 if differs(value, index) else None
                if places.fresh[number] == 0 and not self.call.updates:
                    raise AxisError(
                        f"nnx.{api}: {run.fresh_names()[number]} was sown on an object that is "
                        "broadcast, and differs along the mapped axis.\n"
                        "Fix: map the object too, by its entry in in_axes, or leave graph updates "
                        "on, which stack what is sown."
                    )
            _check_place(value, places.fresh[number], run.fresh_names, number, index, api)
        for number, value in enumerate(run.plain):
            _check_place(value, places.plain[number], run.plain_names, number, index, api)


def _check_place(
    value: Any, axis: Any, names: Callable[[], list[str]], number: int, index: Any, api: str
) -> None:
    if axis is None:
        if differs(value, index):
            raise AxisError(
                f"nnx.{api}: {names()[number]} differs along the mapped axis, but its out_axes is "
                "None.\nFix: give it an axis, or reduce it over the axis first."
            )
        return
    for leaf in jax.tree_util.tree_leaves(value):
        if not -jnp.ndim(leaf) - 1 <= axis <= jnp.ndim(leaf):
            raise AxisError(
                f"nnx.{api}: out_axes {axis} is out of range for {names()[number]}, which is "
                f"{type_text(jnp.asarray(leaf))} for each example.\n"
                "Fix: choose an axis that the stacked array has."
            )


def differs(value: Any, index: Any) -> bool:
    """Whether a value differs along the mapped axis, as ``index`` does."""
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


def split_mapped(values: list[Any], axes: list[Any]) -> tuple[list[Any], list[Any]]:
    """Separates mapped values from broadcast ones; each list has None for the others."""
    mapped = [None if axis is None else value for value, axis in zip(values, axes, strict=True)]
    fixed = [value if axis is None else None for value, axis in zip(values, axes, strict=True)]
    return mapped, fixed


def join_mapped(divided: tuple[list[Any], list[Any]], axes: list[Any]) -> list[Any]:
    """The reverse of ``split_mapped``; moves the mapped axis from the front to its place."""
    return [
        fixed if axis is None else move_from_front(mapped, axis)
        for mapped, fixed, axis in zip(*divided, axes, strict=True)
    ]
