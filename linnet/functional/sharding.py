"""Shardings of arrays, under meshes whose axes are explicit and others."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh


def is_explicit(sharding: Any) -> bool:
    """Whether the mesh of a sharding has axes of explicit type."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else get_abstract_mesh()
    return AxisType.Explicit in mesh.axis_types


def placed(x: Array, sharding: Any) -> Array:
    """An array in a sharding; None leaves it as it is.

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
    """The sharding that the type of an array has, with some axes whole; None without explicit axes.

    Arrays made from nothing, such as random masks, need it to meet the array in one operation.
    """
    sharding = jax.typeof(x).sharding
    if not isinstance(sharding, NamedSharding) or not is_explicit(sharding):
        return None
    spec: list[Any] = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    for axis in whole:
        spec[axis] = None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
