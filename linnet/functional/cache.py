"""The key/value cache of attention: what a decoder has seen so far."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from linnet.functional.fusing import fused


@fused
def extend_cache(
    query: Array,
    key: Array,
    value: Array,
    cached_key: Array,
    cached_value: Array,
    index: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """Writes new keys and values behind those that are in the cache.

    Args:
      query: ``(..., new, heads, depth)``, the queries of the new positions.
      key: ``(..., new, key heads, depth)``.
      value: likewise.
      cached_key: ``(..., length, key heads, depth)``, of which ``index`` are in use.
      cached_value: likewise.
      index: how many positions are in use.

    Returns:
      ``(query, cached_key, cached_value, index, mask)``: the cache with the new positions in it,
      how many are in use now, and the mask by which each new position looks at itself and those
      before it. Where the cache has no room, the query is nan, so that the output is.

    Example:
      >>> new, cache = jnp.ones((1, 1, 1)), jnp.zeros((3, 1, 1))
      >>> _, key, _, index, mask = extend_cache(new, new, new, cache, cache, jnp.array(1))
      >>> key.ravel(), int(index), mask[0]
      (Array([0., 1., 0.], dtype=float32), 2, Array([[ True,  True, False]], dtype=bool))
    """
    new, length = key.shape[-3], cached_key.shape[-3]
    cached_key, cached_value = (
        lax.dynamic_update_slice_in_dim(cached, x.astype(cached.dtype), index, axis=cached.ndim - 3)
        for cached, x in ((cached_key, key), (cached_value, value))
    )
    positions, seen = (lax.broadcasted_iota(index.dtype, (new, length), axis) for axis in (0, 1))
    mask = jnp.reshape(seen <= positions + index, (1,) * (key.ndim - 2) + (new, length))
    query = jnp.where(index + new <= length, query, jnp.nan)
    return query, cached_key, cached_value, index + new, mask
