"""Sampling from logits: temperature, the ``k`` most likely classes, a set of given probability."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def keep_top_k(logits: Array, k: int) -> Array:
    """Sets all but the ``k`` largest logits to minus infinity.

    Args:
      logits: ``(..., classes)``.
      k: how many to keep; more where several equal the smallest of them.

    Returns:
      The logits.

    Example:
      >>> keep_top_k(jnp.array([1.0, 3.0, 2.0]), 2)
      Array([-inf,   3.,   2.], dtype=float32)
    """
    if k >= logits.shape[-1]:
        return logits
    least = lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: Array, p: Any) -> Array:
    """Keeps the smallest set of classes whose probabilities add up to ``p`` or more.

    Args:
      logits: ``(..., classes)``.
      p: the probability, or one for each row. The most likely class is always kept.

    Returns:
      The logits, minus infinity outside of the set.

    Example:
      >>> keep_top_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.6)
      Array([-0.6931472, -1.2039728,       -inf], dtype=float32)
    """
    ordered = jnp.flip(jnp.sort(logits.astype(jnp.float32), axis=-1), axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    of_more_likely = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (of_more_likely < _for_each_row(p, logits)).at[..., 0].set(True)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least.astype(logits.dtype), -jnp.inf, logits)


def _for_each_row(number: Any, logits: Array) -> Array:
    """A number, or one for each row, in the shape ``(..., 1)``."""
    return jnp.broadcast_to(jnp.asarray(number, jnp.float32), logits.shape[:-1])[..., None]


def sample_logits(
    logits: Array, key: Any, *, temperature: Any = 1.0, top_k: int | None = None, top_p: Any = None
) -> Array:
    """Draws a class for each row of logits.

    Args:
      logits: ``(..., classes)``.
      key: a random key; None for the most likely class.
      temperature: divides the logits; below 1 likely classes become more likely. A number, or one
        for each row.
      top_k: draw among the ``top_k`` most likely classes.
      top_p: draw among the most likely classes that together have this probability.

    Returns:
      The classes, int32, of shape ``(...)``.

    Example:
      >>> logits = jnp.array([[0.0, 5.0, 4.0]])
      >>> sample_logits(logits, None), sample_logits(logits, jax.random.key(0), top_k=1)
      (Array([1], dtype=int32), Array([1], dtype=int32))
    """
    if key is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32) / _for_each_row(temperature, logits)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
