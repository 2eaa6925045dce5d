"""Sharding by rule: an existing or abstract model, and its optimizer, over a mesh in one call.

Fully sharded data parallelism cuts every large array along one axis, over the devices that hold
parts of the batch. Rules by path come first, for the layers that are cut in another way.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from linnet.errors import ShardingError, name_some, path_string, type_text
from linnet.nnx.filterlib import Filter, to_predicate
from linnet.nnx.graphlib.split_merge import merge, split
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.modules.module import Module
from linnet.nnx.variablelib.placement import put, sharding_of
from linnet.nnx.variablelib.variable import Variable, stored_value
from linnet.tables import aligned, size_text

Names = Sequence[Any] | PartitionSpec | None
PathRules = Iterable[tuple[str, Names]] | Mapping[str, Names]
_Patterns = list[tuple[re.Pattern[str], Any]]

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
      rules: pairs, or a dict, of a regular expression that is searched in the path, such as
        ``r"attention\\.query\\.kernel"``, and the names for each axis of the array (None: whole).
        The first that matches counts. Where it leaves axes whole, ``axis`` is added if it is free.
      only: a filter for the Variables that are sharded.

    Returns:
      What was done, with a table of it as its text.

    Raises:
      ShardingError: a rule does not fit the array it matches, or the mesh, or matches nothing;
        ``only`` selects nothing; an argument is something else. Then nothing was changed.

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
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        swapped = isinstance(tree, (Mesh, AbstractMesh))
        raise ShardingError(
            f"nnx.fsdp takes a mesh as its second argument, but got {_type_name(mesh)}"
            + (", and the mesh as its first" if swapped else "")
            + ".\nFix: nnx.fsdp(model, mesh), with a jax.sharding.Mesh, as jax.make_mesh makes it."
        )
    patterns = _patterns(rules)
    axes = (axis,) if isinstance(axis, str) else axis
    variables = [(p, v) for p, v in iter_graph(tree) if isinstance(v, Variable)]
    _refuse_unmatched(patterns, [path_string(path) for path, _ in variables])
    chosen = to_predicate(only)
    placements: list[tuple[Variable[Any], tuple[Any, ...], Sharding]] = []
    entries: list[ShardedVariable] = []
    for path, variable in variables:
        if not chosen(path, variable):
            continue
        value = stored_value(variable)
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
        shard = sharding.shard_shape(value.shape)
        size = math.prod(shard) * np.dtype(value.dtype).itemsize
        spec = PartitionSpec(*names)
        placements.append((variable, names, sharding))
        entries.append(ShardedVariable(where, value.shape, value.dtype, spec, size))
    if not entries:
        raise _nothing_to_shard(tree, only, variables)
    for variable, names, sharding in placements:
        variable.set_metadata(out_sharding=names)
        variable.set_raw_value(put(stored_value(variable), sharding))
    return ShardingReport(tuple(entries), mesh)


def _type_name(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _patterns(rules: Any) -> _Patterns:
    """The compiled rules; raises for what is no rule."""
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise ShardingError(f"nnx.fsdp got rules={rules!r}, which are no rules.\n{_RULES_FIX}")
    patterns: _Patterns = []
    for number, rule in enumerate(pairs):
        match rule:
            case (str() | re.Pattern() as text, names) if names is None or isinstance(
                names, _NAMES
            ):
                try:
                    pattern = re.compile(text)
                except re.error as error:
                    problem = f"is no regular expression: {error}"
                else:
                    patterns.append((pattern, (names,) if isinstance(names, str) else names))
                    continue
            case _:
                problem = "is no pair of a regular expression and axis names"
        raise ShardingError(f"nnx.fsdp: rule {number}, {rule!r}, {problem}.\n{_RULES_FIX}")
    return patterns


_NAMES = (str, tuple, list, PartitionSpec)
_RULES_FIX = (
    r"Fix: write rules=[(r'up\.kernel', (None, 'model'))], a regular expression for paths and a "
    "name, a tuple of names or None for each axis; None alone keeps the array whole."
)


def _refuse_unmatched(patterns: _Patterns, paths: list[str]) -> None:
    """Raises for a rule that matches none of the paths, which is misspelled or out of date."""
    for pattern, _ in patterns:
        if paths and not any(map(pattern.search, paths)):
            near = difflib.get_close_matches(pattern.pattern.replace("\\", ""), paths, 3, 0.3)
            raise ShardingError(
                f"nnx.fsdp: the rule {pattern.pattern!r} matches no Variable.\n"
                "Fix: write a regular expression that is found in a path, such as "
                f"{name_some(near or paths[:3])}; "
                "leave out rules for what the model lacks."
            )


def _nothing_to_shard(tree: Any, only: Filter, variables: list[Any]) -> ShardingError:
    if not variables:
        return ShardingError(
            f"nnx.fsdp found no Variables in its first argument, {_type_name(tree)}.\n"
            "Fix: pass a model, (model, optimizer), or a pytree of them."
        )
    kinds = name_some(sorted({type(variable).__name__ for _, variable in variables}))
    return ShardingError(
        f"nnx.fsdp: only={only!r} selects no array among the {len(variables)} Variables "
        f"({kinds}).\nFix: pass a filter such as nnx.Param, or leave it out to shard all."
    )


def _names(
    path: str,
    shape: tuple[int, ...],
    mesh: Any,
    axes: tuple[str, ...],
    min_size: int,
    patterns: _Patterns,
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
