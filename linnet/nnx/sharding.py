"""Sharding by rule: an existing or abstract model, and its optimizer, over a mesh in one call.

Fully sharded data parallelism cuts every large array along one axis, over the devices that hold
parts of the batch. Rules by path come first, for the layers that are cut in another way.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from linnet.errors import ShardingError, path_string, type_text
from linnet.nnx.filterlib import Filter, to_predicate
from linnet.nnx.graphlib.split_merge import merge, split
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.modules.module import Module
from linnet.nnx.variablelib.placement import put, sharding_of
from linnet.nnx.variablelib.variable import Variable, from_refs
from linnet.tables import aligned, size_text

PathRules = Iterable[tuple[str, Sequence[Any] | None]]

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class ShardedVariable:
    """What ``nnx.fsdp`` did with one array.

    Args:
      path: where it stands.
      shape: its shape.
      dtype: its dtype.
      spec: how it is sharded.
      bytes_per_device: what each device holds of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """What ``nnx.fsdp`` did; printed, a table.

    Args:
      entries: one for each array.
      mesh: the mesh.
    """

    entries: tuple[ShardedVariable, ...]
    mesh: Any

    @property
    def bytes_per_device(self) -> int:
        """What each device holds of all arrays."""
        return sum(entry.bytes_per_device for entry in self.entries)

    @property
    def total_bytes(self) -> int:
        """What one device would hold without a mesh."""
        return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in self.entries)

    def fits(self, gib: float, *, gradients: bool = True, activations: int = 0) -> bool:
        """Whether devices of some size hold it.

        Args:
          gib: the memory of one device, in GiB.
          gradients: count the gradients of the parameters, sharded as they are.
          activations: bytes that each device needs beside, as ``nnx.activation_bytes`` counts them.

        Returns:
          Whether the arrays, their gradients and the activations fit.
        """
        return self.bytes_needed(gradients=gradients, activations=activations) <= gib * _GIB

    def bytes_needed(self, *, gradients: bool = True, activations: int = 0) -> int:
        """What ``fits`` compares with the memory of a device."""
        trained = (x for x in self.entries if "opt_state" not in x.path)
        extra = sum(x.bytes_per_device for x in trained) if gradients else 0
        return self.bytes_per_device + extra + activations

    def __str__(self) -> str:
        rows = [("path", "shape", "spec", "bytes per device")]
        for x in self.entries:
            spec = ", ".join(map(str, x.spec))
            what = f"{np.dtype(x.dtype).name}{list(x.shape)}"
            rows.append((x.path, what, f"({spec})", f"{x.bytes_per_device:,}"))
        size = size_text(sum(math.prod(x.shape) for x in self.entries), self.total_bytes)
        held = f"{self.bytes_per_device:,} bytes per device"
        return "\n".join([*aligned(rows), f"{len(self.entries)} arrays of {size}; {held}"])


def fsdp(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    *,
    axis: str | tuple[str, ...] = "data",
    min_size: int = 2**14,
    rules: PathRules = (),
    only: Filter = True,
) -> ShardingReport:
    """Shards the Variables of a model, and of its optimizer, over a mesh, in place.

    Each array of at least ``min_size`` elements is cut over the mesh axis ``axis``, along the
    largest of its axes that can be divided evenly; smaller ones, and those without such an axis,
    are whole on each device. In an ``nnx.Stack`` every layer is cut; devices hold different layers
    only if a rule says so. The names go into the metadata as ``out_sharding``, so that what is made
    from the model, such as an optimizer, is sharded alike.

    Args:
      tree: a model, ``(model, optimizer)``, or any pytree of them; with arrays, or abstract as
        ``nnx.eval_shape`` makes it.
      mesh: the mesh; for an abstract model an abstract one will do, of devices that need not exist.
      axis: the mesh axis, or axes, that arrays are cut along.
      min_size: the number of elements from which an array is cut.
      rules: pairs of a regular expression that is searched in the path, such as
        ``r"attention\\.query\\.kernel"``, and the names for each axis of the array (None: whole).
        The first that matches counts. Where it leaves axes whole, ``axis`` is added if it is free.
      only: a filter for the Variables that are sharded.

    Returns:
      What was done, with a table of it as its text.

    Raises:
      ShardingError: a rule does not fit the array it matches, or the mesh.

    Example:
      >>> import jax
      >>> from jax.sharding import AbstractMesh
      >>> from linnet import nnx
      >>> model = nnx.eval_shape(lambda: nnx.Linear(512, 2048, rngs=nnx.Rngs(0)))
      >>> report = nnx.fsdp(model, AbstractMesh((8,), ("data",)))
      >>> print(report)
      path     shape               spec          bytes per device
      .bias    float32[2048]       ()            8,192
      .kernel  float32[512, 2048]  (None, data)  524,288
      2 arrays of 1,050,624 (4.2 MB); 532,480 bytes per device
      >>> report.fits(1)
      True
    """
    patterns = [(re.compile(pattern), names) for pattern, names in rules]
    axes = (axis,) if isinstance(axis, str) else axis
    chosen = to_predicate(only)
    entries: list[ShardedVariable] = []
    for path, variable in iter_graph(tree):
        if not isinstance(variable, Variable) or not chosen(path, variable):
            continue
        value = from_refs(variable.raw_value)
        if not hasattr(value, "shape") or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            continue
        where = path_string(path)
        is_stacked = "stacked" in path  # the first axis is that of the layers of an nnx.Stack
        names = _names(where, value.shape, mesh, axes, min_size, patterns, first=int(is_stacked))
        what = f"The {type(variable).__name__} at {where}"
        sharding = sharding_of(names, {"mesh": mesh}, value, lambda what=what: what, strict=True)
        if isinstance(value, jax.Array) and isinstance(mesh, AbstractMesh):
            raise ShardingError(
                f"{what}, {type_text(value)}, cannot be placed on {mesh}, which has no devices.\n"
                "Fix: pass a jax.sharding.Mesh, or a model made by nnx.eval_shape."
            )
        variable.set_metadata(out_sharding=tuple(names))
        variable.set_raw_value(put(value, sharding))
        shard = sharding.shard_shape(value.shape)
        size = math.prod(shard) * np.dtype(value.dtype).itemsize
        spec = PartitionSpec(*names)
        entries.append(ShardedVariable(where, value.shape, value.dtype, spec, size))
    return ShardingReport(tuple(entries), mesh)


def _names(
    path: str,
    shape: tuple[int, ...],
    mesh: Any,
    axes: tuple[str, ...],
    min_size: int,
    patterns: list[tuple[re.Pattern[str], Any]],
    first: int,
) -> tuple[Any, ...]:
    """The axis names of an array: those of the first rule that matches, with ``axes`` added.

    They are added to axis ``first`` or one after it.
    """
    found = next((names for pattern, names in patterns if pattern.search(path)), ())
    if found is None or not shape:
        return ()
    names = [*found, *[None] * (len(shape) - len(found))]
    used = {name for entry in names for name in (entry if isinstance(entry, tuple) else (entry,))}
    parts = math.prod(mesh.shape[axis] for axis in axes if axis in mesh.shape)
    divisible = [a for a, size in enumerate(shape) if size and size % parts == 0]
    free = [a for a in divisible if names[a] is None and a >= first]
    if math.prod(shape) >= min_size and free and not used.intersection(axes):
        largest = max(free, key=lambda a: shape[a])
        names[largest] = axes if len(axes) > 1 else next(iter(axes))
    while names and names[-1] is None:
        names.pop()
    return tuple(names)


def activation_bytes(f: Any, model: Module, *inputs: Any) -> int:
    """Counts what a gradient keeps between its two passes, without computing or allocating.

    Args:
      f: the loss, a function of the model and the inputs.
      model: the model, abstract or not.
      *inputs: arrays or ``jax.ShapeDtypeStruct``, as one device gets them.

    Returns:
      The bytes of all arrays that are kept for the backward pass, the parameters left out.
      This is an upper estimate: compiled, some share memory or are computed again.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> x = jax.ShapeDtypeStruct((16, 4), jnp.float32)
      >>> nnx.activation_bytes(lambda model, x: (model(x) ** 2).sum(), model, x)
      768
    """
    graphdef, state = split(model)

    def backward(state: Any, inputs: Any) -> Any:
        return jax.vjp(lambda state: f(merge(graphdef, state), *inputs), state)[1]

    kept = jax.tree_util.tree_leaves(jax.eval_shape(backward, state, inputs))
    own = [(x.shape, x.dtype) for x in jax.tree_util.tree_leaves(state)]
    rest = 0
    for x in kept:
        if (x.shape, x.dtype) in own:
            own.remove((x.shape, x.dtype))
        else:
            rest += math.prod(x.shape) * x.dtype.itemsize
    return rest
