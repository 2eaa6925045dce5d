"""Placing tensors: in the right order, on the right device, and nothing held longer than needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SLAB = 1 << 17  # elements


def home(leaf: Any) -> Any:
    """The sharding that the value of an entry has to have, if any."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


@functools.partial(jax.jit, donate_argnums=0)
def with_slab(stack: Any, slab: Any, corner: Any) -> Any:
    """A stack with a slab written into it at a corner; the old one is given away."""
    return jax.lax.dynamic_update_slice(stack, slab, tuple(corner))


def slabs(layer: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """A layer in slabs along its longest axis, each with the corner where it belongs.

    On its way to a device a slab is held twice, beside the stored tensor. All have one shape, for
    one program to write them: the last lies over the one before it.
    """
    if layer.size <= _SLAB:
        yield (0,) * layer.ndim, layer
        return
    axis = int(np.argmax(layer.shape))
    length = layer.shape[axis]
    wide = -(-length // min(length, -(-layer.size // _SLAB)))
    for start in range(0, length, wide):
        start = min(start, length - wide)
        at = tuple(start if n == axis else 0 for n in range(layer.ndim))
        yield at, layer[(slice(None),) * axis + (slice(start, start + wide),)]


def finish(value: Any) -> Any:
    """Waits until JAX does not need what it has copied any more."""
    jax.block_until_ready(value)
    jax.device_put(np.int8(0))  # it lets go of one thing when it is given the next
    return value


def in_order(array: Any, dtype: Any) -> Any:
    """An array of a dtype in the order of C, with no copy in between."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    copy = np.empty(array.shape, dtype)
    copy[...] = array
    return copy


def overflows(array: Any, dtype: Any) -> bool:
    """Whether finite numbers would not be finite any more in another floating-point dtype."""
    if jnp.finfo(dtype).max >= jnp.finfo(array.dtype).max:
        return False
    flat = array.ravel("K")
    return any(_loses_numbers(flat[n : n + _SLAB], dtype) for n in range(0, flat.size, _SLAB))


def _loses_numbers(piece: Any, dtype: Any) -> bool:
    with np.errstate(over="ignore"):
        after = piece.astype(dtype).astype(np.float32)
    return bool((np.isfinite(piece) & ~np.isfinite(after)).any())
