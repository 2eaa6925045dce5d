"""Masks for attention: 1 or True where a query may look at a key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from linnet.errors import FeatureError


def make_attention_mask(
    query_input: Array,
    key_input: Array,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Any = jnp.float32,
) -> Array:
    """A mask from one entry a query and one a key.

    Args:
      query_input: ``(..., queries)``, for example True where there is no padding.
      key_input: ``(..., keys)``.
      pairwise_fn: combines an entry of each.
      extra_batch_dims: how many axes of size 1 to add in front.
      dtype: of the mask.

    Returns:
      ``(..., 1, queries, keys)``; the 1 is for the heads.

    Raises:
      FeatureError: the axes before the last differ.

    Example:
      >>> make_attention_mask(jnp.array([1, 1, 0]), jnp.array([1, 0]), dtype=bool)[0]
      Array([[ True, False],
             [ True, False],
             [False, False]], dtype=bool)
    """
    queries, keys = np.shape(query_input), np.shape(key_input)
    if not (queries and keys and _broadcast(queries[:-1], keys[:-1])):
        raise FeatureError(
            "make_attention_mask expected (..., queries) and (..., keys) whose other axes are "
            f"alike, but got {queries} and {keys}.\n"
            "Fix: give both the same batch axes, or size 1 where all are alike."
        )
    mask = pairwise_fn(jnp.expand_dims(query_input, -1), jnp.expand_dims(key_input, -2))
    axes = (*range(extra_batch_dims), extra_batch_dims + mask.ndim - 2)
    return jnp.expand_dims(mask, axes).astype(dtype)


def make_causal_mask(x: Array, extra_batch_dims: int = 0, dtype: Any = jnp.float32) -> Array:
    """A mask by which each position may look at itself and those before it.

    Args:
      x: ``(..., length)``; only its shape counts.
      extra_batch_dims: how many axes of size 1 to add in front.
      dtype: of the mask.

    Returns:
      ``(..., 1, length, length)``; the 1 is for the heads.

    Raises:
      FeatureError: ``x`` has no axis.

    Example:
      >>> make_causal_mask(jnp.ones(2))[0]
      Array([[1., 0.],
             [1., 1.]], dtype=float32)
    """
    if not np.ndim(x):
        raise FeatureError(
            f"make_causal_mask expected an array of shape (..., length), but got {x!r}.\n"
            "Fix: pass the tokens, or jnp.ones((batch, length))."
        )
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def _broadcast(one: Any, other: Any) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def combine_masks(*masks: Array | None, dtype: Any = jnp.float32) -> Array | None:
    """A mask that lets through what all of them let through.

    Args:
      *masks: the masks, of equal rank; None lets everything through.
      dtype: of the mask.

    Returns:
      The mask, or None where there is none to combine.

    Raises:
      FeatureError: the ranks differ, or the sizes.

    Example:
      >>> combine_masks(jnp.array([1, 0]), None, jnp.array([1, 1]), dtype=bool)
      Array([ True, False], dtype=bool)
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    ranks = tuple(mask.ndim for mask in given)
    sizes = zip(*(mask.shape for mask in given), strict=False)
    if len(set(ranks)) > 1 or any(len({*axis, 1}) > 2 for axis in sizes):
        shapes = ", ".join(str(mask.shape) for mask in given)
        raise FeatureError(
            f"combine_masks: masks must have same rank and broadcast, but got {shapes}.\n"
            "Fix: give all of them (batch, heads, queries, keys), of size 1 where all are alike."
        )
    return functools.reduce(jnp.logical_and, given).astype(dtype)
