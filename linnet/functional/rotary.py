"""Rotary position embedding: pairs of features are turned by angles that grow with the position.

Feature ``i`` of the first half and feature ``i`` of the second half are a pair.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from linnet.functional.fusing import fused


def rotary_tables(positions: Any, features: int, theta: float) -> tuple[Array, Array]:
    """The sines and cosines of the angles at positions.

    Args:
      positions: of any shape ``(...)``, numbers.
      features: the size of what is turned, even.
      theta: the angle of pair ``i`` is ``position / theta ** (2 * i / features)``.

    Returns:
      Two arrays of shape ``(..., features / 2)``, float32.

    Example:
      >>> sines, cosines = rotary_tables(jnp.array([0, 1]), 2, 10000.0)
      >>> cosines.round(4).ravel()
      Array([1.    , 0.5403], dtype=float32)
    """
    pairs = jnp.arange(0, features, 2, dtype=jnp.float32)
    timescale = theta ** (pairs / features)
    positions = jnp.asarray(positions, jnp.float32)[..., None]
    angles = positions / jnp.reshape(timescale, (1,) * (positions.ndim - 1) + (-1,))
    return jnp.sin(angles), jnp.cos(angles)


@fused
def rotate(x: Array, sines: Array, cosines: Array) -> Array:
    """Turns pairs of features, in at least float32.

    Args:
      x: ``(..., features)``.
      sines: broadcasts to ``(..., features / 2)``.
      cosines: likewise.

    Returns:
      As ``x``.

    Example:
      >>> rotate(jnp.array([3.0, 4.0]), jnp.array([1.0]), jnp.array([0.0]))
      Array([-4.,  3.], dtype=float32)
    """
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
