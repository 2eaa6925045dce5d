"""Shardings of arrays, under meshes with and without explicit axes, and rules for axis names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

AxisRules = tuple[tuple[str, Any], ...]

# The rules in force, from the names of axes in a model to the axes of a mesh, for Linen and NNX
# alike. A user context of JAX, so that no compiled function is used under other rules.
axis_rules = jax.make_user_context(())


def as_rules(rules: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> AxisRules:
    """Rules as a tuple of pairs that can be hashed."""
    pairs: Any = rules.items() if isinstance(rules, Mapping) else rules
    return tuple((name, tuple(axis) if isinstance(axis, list) else axis) for name, axis in pairs)


def is_explicit(sharding: Any) -> bool:
    """Whether the mesh of a sharding, or the mesh in force, has axes of explicit type."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else get_abstract_mesh()
    return AxisType.Explicit in mesh.axis_types


def placed(x: Array, sharding: Any) -> Array:
    """Places an array in a sharding; None leaves it as it is.

    Example:
      >>> import jax.numpy as jnp
      >>> placed(jnp.ones(2), None)
      Array([1., 1.], dtype=float32)
    """
    if sharding is None:
        return x
    if is_explicit(sharding):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def sharding_along(x: Array, whole: tuple[int, ...] = ()) -> NamedSharding | None:
    """The explicit sharding of an array, with the axes ``whole`` not sharded; None without one.

    New arrays, such as random masks, need this sharding to be combined with the array.
    """
    sharding = jax.typeof(x).sharding
    if not isinstance(sharding, NamedSharding) or not is_explicit(sharding):
        return None
    spec = entries_of(x)
    for axis in whole:
        spec[axis] = None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def entries_of(x: Array) -> list[Any]:
    """The PartitionSpec in the type of an array, as a list with one entry for each axis."""
    sharding = jax.typeof(x).sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return [*spec, *[None] * (x.ndim - len(spec))]


def joined_entries(first: list[Any], second: Any) -> PartitionSpec:
    """A PartitionSpec of entries and a last one, which is None if its mesh axes are in use."""
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in [*first, second]]
    used = {axis for entry in axes[:-1] for axis in entry}
    return PartitionSpec(*first, None if used.intersection(axes[-1]) else second)


def along_batch(tree: Any, x: Array, batch: tuple[int, ...]) -> Any:
    """Arrays whose first axes are the batch axes of ``x``, sharded along them as ``x`` is."""
    entries = entries_of(x)
    spec = PartitionSpec(*(entries[axis] for axis in batch))
    return jax.tree_util.tree_map(lambda leaf: jax.sharding.reshard(leaf, spec), tree)
