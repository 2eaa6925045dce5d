"""Dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linnet.errors import type_text
from linnet.functional.fusing import fused
from linnet.functional.shapes import missing_axes
from linnet.functional.sharding import sharding_along


@fused
def dropout(inputs: Array, key: Any, *, rate: float, broadcast_dims: Sequence[int] = ()) -> Array:
    """Sets entries to zero with probability ``rate`` and scales the others up.

    Under a mesh with explicit axes the mask is drawn in the sharding of the inputs.

    Args:
      inputs: the values, floating point.
      key: a random key; may be None where the rate is 0 or 1.
      rate: the probability.
      broadcast_dims: axes along which one draw holds for all.

    Returns:
      The values, with the same mean.

    Example:
      >>> dropout(jnp.ones((2, 3)), jax.random.key(0), rate=0.5, broadcast_dims=(0,))
      Array([[0., 0., 2.],
             [0., 0., 2.]], dtype=float32)
    """
    if rate == 0.0:
        return inputs
    if rate == 1.0:
        return jnp.zeros_like(inputs)
    keep = 1.0 - rate
    shape = list(inputs.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    axes = tuple(broadcast_dims)
    drawn = jax.random.bernoulli(
        key, p=keep, shape=tuple(shape), out_sharding=sharding_along(inputs, whole=axes)
    )
    mask = jnp.broadcast_to(drawn, inputs.shape, out_sharding=sharding_along(inputs))
    return lax.select(mask, inputs / keep, jnp.zeros_like(inputs))


def why_no_rate(name: str, rate: Any) -> str | None:
    """Why the argument ``name`` is no probability, or None; arrays may be traced, and pass.

    Example:
      >>> print(why_no_rate("rate", 2.0))
      sets entries to zero with a probability, but got rate=2.0.
      Fix: choose a rate between 0 and 1.
    """
    is_number = isinstance(rate, (int, float, np.number))
    if isinstance(rate, (jax.Array, np.ndarray)) or (is_number and 0 <= rate <= 1):
        return None
    return (
        f"sets entries to zero with a probability, but got {name}={rate!r}.\n"
        "Fix: choose a rate between 0 and 1."
    )


def why_not_dropped(inputs: Any, broadcast_dims: Sequence[int]) -> str | None:
    """The reason why ``dropout`` cannot take inputs, as the rest of an error text, or None.

    Example:
      >>> print(why_not_dropped(jnp.ones(2, int), ()))
      expected floating-point inputs, but got int32[2].
      Fix: convert them first, x.astype(float).
    """
    if not jnp.issubdtype(jnp.result_type(inputs), jnp.inexact):
        return (
            f"expected floating-point inputs, but got {type_text(inputs)}.\n"
            "Fix: convert them first, x.astype(float)."
        )
    missing = missing_axes(broadcast_dims, jnp.ndim(inputs))
    if not missing:
        return None
    return (
        f"draws once along axis {missing[0]}, which {type_text(inputs)} does not have.\n"
        "Fix: choose other broadcast_dims."
    )
