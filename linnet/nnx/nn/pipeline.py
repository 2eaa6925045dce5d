"""A pipeline: the layers of a stack on the devices of one mesh axis, with micro-batches in turn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from linnet.errors import AxisError, LayerArgumentError, type_text
from linnet.nnx.graphlib.traverse import flat_variables
from linnet.nnx.nn.params import layer_name
from linnet.nnx.nn.stack import Stack
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.transforms import Carry, shard_map
from linnet.nnx.transforms.accumulate import cut_examples
from linnet.nnx.transforms.loops import scan_layers


def pipeline(
    stack: Stack,
    x: Any,
    *args: Any,
    mesh: Mesh,
    micro_batches: int,
    axis: str = "stage",
    **kwargs: Any,
) -> Any:
    """Applies a stack whose layers are divided among the devices of a mesh axis.

    Each device, or group of devices, holds some of the layers, one after the other: a stage. The
    batch goes through in micro-batches, so that the stages work at the same time, each on another
    one (the GPipe schedule). Of ``micro_batches + stages - 1`` rounds a stage works in
    ``micro_batches``. The numbers, gradients included, are those of the stack called with one
    micro-batch after the other, and so is what layers write to their Variables. Micro-batch ``i``
    of ``n`` holds the examples ``i``, ``i + n`` and so on, as for ``nnx.accumulate_gradients``.

    Args:
      stack: the layers; their number is a multiple of the stages. Sharded along the layers, as
        ``nnx.fsdp(stack, mesh, rules=[("stacked", (axis,))])`` does it, each stage holds its own.
      x: the input: an array, or a pytree of arrays, with the examples along the first axis.
      *args, **kwargs: the same for every layer and micro-batch: arrays and flags.
      mesh: the devices; its other axes may shard the batch and the layers as elsewhere.
      micro_batches: the number of parts that the batch is cut into.
      axis: the mesh axis of the stages.

    Returns:
      The output of the last layer, for the whole batch, on all stages.

    Raises:
      AxisError: the mesh does not have the axis, the layers cannot be divided among the stages, or
        the examples among the micro-batches.
      LayerArgumentError: there is an object among ``args``.

    Example:
      >>> import functools
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> mesh = jax.make_mesh((1,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> stack = nnx.Stack(functools.partial(nnx.Linear, 4, 4), 6, rngs=nnx.Rngs(0))
      >>> nnx.pipeline(stack, jnp.ones((8, 4)), mesh=mesh, micro_batches=4).shape
      (8, 4)
    """
    stages = _check(stack, x, (args, kwargs), mesh, axis, micro_batches)
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf if hasattr(leaf, "shape") else None for leaf in leaves]

    def call_layers(layers: Any, x: Any, arrays: list[Any]) -> Any:
        pairs = zip(leaves, arrays, strict=True)
        args, kwargs = structure.unflatten([a if b is None else b for a, b in pairs])
        return Stack._with_layers(layers, stack.length // stages, stack)(x, *args, **kwargs)

    def round_of(layers: Any, arriving: Any, number: Any, parts: Any, arrays: Any) -> Any:
        stage = jax.lax.axis_index(axis)
        own = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), part(parts, number), arriving)
        before = [(v, v.raw_value) for _, v in flat_variables(layers, None, "pipeline")]
        out = call_layers(layers, own, arrays)
        # In the first and last rounds a stage may have no micro-batch, and must not write then.
        works = (number >= stage) & (number < stage + micro_batches)
        for variable, old in before:
            if variable.raw_value is not old:
                new = jax.tree.map(lambda a, b: jnp.where(works, a, b), variable.raw_value, old)
                variable.set_raw_value(new)
        return jax.lax.ppermute(out, axis, [(n, n + 1) for n in range(stages - 1)]), out

    def part(parts: Any, number: Any) -> Any:
        number = jnp.minimum(number, micro_batches - 1)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, 1, False), parts)

    def run(layers: Any, parts: Any, arrays: list[Any]) -> Any:
        rounds = micro_batches + stages - 1
        # Before anything has arrived, a stage runs on the first micro-batch and not on zeros, of
        # which gradients may be nan.
        start = jax.tree.map(lambda x: jax.lax.pcast(x, axis, to="varying"), part(parts, 0))
        _, outs = scan_layers(
            round_of,
            length=rounds,
            reverse=False,
            unroll=1,
            in_axes=(None, Carry, 0, None, None),
            out_axes=(Carry, 0),
            transform_metadata={},
        )(layers, start, jnp.arange(rounds), parts, arrays)
        is_last = jax.lax.axis_index(axis) == stages - 1
        last = jax.tree.map(lambda x: jnp.where(is_last, x[stages - 1 :], 0), outs)
        return jax.lax.psum(last, axis)

    parts = jax.tree.map(lambda x: cut_examples(x, 0, micro_batches), x)
    whole = PartitionSpec()
    outs = shard_map(
        run,
        mesh=mesh,
        in_specs=(PartitionSpec(axis), whole, whole),
        out_specs=whole,
        axis_names={axis},
    )(stack.stacked, parts, arrays)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape((-1, *x.shape[2:])), outs)


def _check(stack: Stack, x: Any, rest: Any, mesh: Any, axis: str, count: int) -> int:
    """The number of stages; raises for what cannot be divided."""
    name = layer_name(stack)
    if axis not in mesh.shape:
        raise AxisError(
            f"nnx.pipeline: {name} is to be divided along the mesh axis {axis!r}, but the mesh has "
            f"{tuple(mesh.shape)}.\nFix: pass axis= with the mesh axis of the stages."
        )
    stages = mesh.shape[axis]
    if stack.length % stages:
        raise AxisError(
            f"nnx.pipeline: the {stack.length} layers of {name} cannot be divided among the "
            f"{stages} devices of {axis!r}.\nFix: choose a number of layers that is a multiple."
        )
    for leaf in jax.tree.leaves(x):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % count:
            raise AxisError(
                f"nnx.pipeline: the first axis of the input of {name}, {type_text(leaf)}, does not "
                f"go into {count} equal micro-batches.\n"
                "Fix: choose micro_batches so that it divides the number of examples."
            )
    found = [leaf for leaf in jax.tree.leaves(rest, is_leaf=is_node) if is_node(leaf)]
    if found:
        raise LayerArgumentError(
            f"nnx.pipeline: {name} was given a {type(found[0]).__name__} beside its input, which "
            "every stage would change in its own way.\n"
            "Fix: build the layers with it, or pass arrays and flags."
        )
    return stages
