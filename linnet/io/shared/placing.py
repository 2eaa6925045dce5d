"""Gives values the dtype, shape, device and sharding of the entries that they are for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.io.shared.entries import Path, is_key, key_implementations, leaf_spec, text_of
from linnet.io.shared.matching import Problem, type_problem
from linnet.io.shared.processes import spread

_SLAB = 1 << 17  # elements

# ---- where a value belongs ----------------------------------------------------------------------


def committed_sharding(leaf: Any) -> Any:
    """The sharding that the value of an entry has to have, or None where JAX may choose."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def sharding_for(leaf: Any) -> Any:
    """Like ``committed_sharding``, but where JAX may choose and has one device, that device."""
    # With a sharding, Orbax reads arrays straight to the device.
    if sharding := committed_sharding(leaf):
        return sharding
    return jax.sharding.SingleDeviceSharding(jax.devices()[0]) if len(jax.devices()) == 1 else None


def as_leaf(path: Path, leaf: Any, value: Any) -> Any:
    """Converts a value to the type of ``leaf``, on its device; a Problem if it cannot be."""
    wanted = leaf_spec(leaf)
    assert wanted is not None
    try:
        if wanted.is_value:
            value = value.item() if hasattr(value, "item") else value
        elif isinstance(leaf, np.ndarray | np.generic):
            value = np.asarray(value, leaf.dtype)
            value = value if isinstance(leaf, np.ndarray) else value[()]
        elif wanted.category == "key":
            if not is_key(value):
                impl = key_implementations()[wanted.dtype]
                value = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
            value = _with_sharding_of(leaf, value)
        else:
            value = _as_array(leaf, value)
    except (ValueError, TypeError, OverflowError) as error:
        return Problem("type", text_of(path), f"expected {wanted}, found {value!r}: {error}")
    found = leaf_spec(value)
    assert found is not None
    return type_problem(path, wanted, found) or value


def _as_array(leaf: Any, value: Any) -> Any:
    if not isinstance(value, jax.Array):
        value = jnp.asarray(value, leaf.dtype)
    if getattr(leaf, "weak_type", False) and not value.weak_type and value.shape == ():
        weak = jnp.asarray(value.item())  # a plain number makes a weakly typed array
        value = weak if weak.dtype == value.dtype else value
    return _with_sharding_of(leaf, value)


def _with_sharding_of(leaf: Any, value: Any) -> Any:
    sharding = sharding_for(leaf)
    if sharding is None or value.sharding == sharding:
        return value
    if sharding.is_fully_addressable or not value.is_fully_addressable:
        return jax.device_put(value, sharding)
    return spread(value, sharding)  # every process has read all of it


# ---- copying to devices -------------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnums=0)
def with_slab(stack: Any, slab: Any, corner: Any) -> Any:
    """Writes a slab into a stack at a corner; the old stack is donated."""
    return jax.lax.dynamic_update_slice(stack, slab, tuple(corner))


def slabs(layer: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Cuts a layer into slabs along its longest axis, each with the position of its corner."""
    # On its way to a device a slab is in memory twice, beside the stored tensor. All slabs have one
    # shape, so that one compiled program writes them; the last overlaps the one before it.
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


def wait_for_copy(value: Any) -> Any:
    """Waits until JAX has released the host arrays that it copied to a device."""
    jax.block_until_ready(value)
    jax.device_put(np.int8(0))  # JAX releases a host array when it is given the next one
    return value


def overflows(array: Any, dtype: Any) -> bool:
    """Whether a floating-point dtype turns finite numbers of an array into infinities."""
    if jnp.finfo(dtype).max >= jnp.finfo(array.dtype).max:
        return False
    flat = array.ravel("K")
    with np.errstate(over="ignore"):
        for start in range(0, flat.size, _SLAB):
            piece = flat[start : start + _SLAB]
            after = piece.astype(dtype).astype(np.float32)
            if (np.isfinite(piece) & ~np.isfinite(after)).any():
                return True
    return False
