"""Dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def dropout(inputs: Array, key: Any, *, rate: float, broadcast_dims: Sequence[int] = ()) -> Array:
    """Sets entries to zero with probability ``rate`` and scales the others up.

    Args:
      inputs: the values.
      key: a random key.
      rate: the probability.
      broadcast_dims: axes along which one draw holds for all.

    Returns:
      The values, with the same mean.
    """
    if rate == 0.0:
        return inputs
    if rate == 1.0:
        return jnp.zeros_like(inputs)
    keep = 1.0 - rate
    shape = list(inputs.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    mask = jnp.broadcast_to(jax.random.bernoulli(key, p=keep, shape=tuple(shape)), inputs.shape)
    return lax.select(mask, inputs / keep, jnp.zeros_like(inputs))
