"""Batches: checks of what a loop takes them from, and copies of their arrays on the device."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from linnet.errors import DataError

_OF_NUMPY = (np.ndarray, np.generic)
_NUMBERS = (*_OF_NUMPY, bool, int, float, complex)

Shapes = tuple[tuple[int, ...], ...]


def gives_batches(source: Any) -> bool:
    """Whether iterating over a source gives batches; text would give letters, a dict keys."""
    is_one = isinstance(source, str | bytes | Mapping) or getattr(source, "shape", None) == ()
    return not is_one and (isinstance(source, Iterable) or hasattr(source, "__getitem__"))


def source_text(source: Any) -> str:
    """What was given instead of a source, for an error message."""
    what = " (one batch is a list of one: [batch])" if isinstance(source, Mapping) else ""
    return type(source).__name__ + what


def put_on_device(batch: Any, device: Any) -> tuple[Any, Shapes]:
    """Starts to copy the arrays of a batch to a device; returns the batch and the arrays' shapes.

    Whatever NumPy can read (a PyTorch tensor too) counts as an array; other leaves, such as text,
    stay as they are.
    """
    leaves, treedef = jax.tree_util.tree_flatten(batch)
    put: list[Any] = []
    for leaf in leaves:
        try:
            put.append(_put(leaf, device))
        except Exception as error:
            path, _ = jax.tree_util.tree_flatten_with_path(batch)[0][len(put)]
            if text := _why_not_put(leaf, device, error):
                raise DataError(f"batch{jax.tree_util.keystr(path)} {text}") from error
            raise
    shapes = tuple([getattr(x, "shape", ()) for x in put])
    same = all(map(operator.is_, put, leaves))
    return batch if same else treedef.unflatten(put), shapes


def _why_not_put(leaf: Any, device: Any, error: Exception) -> str:
    """What is wrong with a leaf that could not be put on the device; empty if it is not known."""
    if isinstance(error, OverflowError):
        return (
            f"has integers that do not fit into 32 bits, and JAX has 64 bits switched off: {error}."
            "\nFix: jax.config.update('jax_enable_x64', True), or make the numbers smaller."
        )
    shape = np.shape(leaf)
    if isinstance(device, Sharding) and not _divides(device, shape):
        return (
            f"has the shape {shape}, which {device} cannot divide.\n"
            "Fix: drop the last, incomplete batch, choose a batch size that the devices divide, "
            "and leave numbers without axes out of the batch."
        )
    return ""


def _divides(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    if not sharding.is_fully_addressable:
        return True  # the shape is that of one process's part
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        return False
    return len(getattr(sharding, "spec", ())) <= len(shape)


def _put(leaf: Any, device: Any) -> Any:
    is_shared = isinstance(device, Sharding) and not device.is_fully_addressable
    if isinstance(leaf, jax.Array):
        if device is None or (is_shared and not leaf.is_fully_addressable):
            return leaf
    elif not isinstance(leaf, _NUMBERS):
        if not hasattr(leaf, "__array__"):
            return leaf
        leaf = np.asarray(leaf)
    if isinstance(leaf, _OF_NUMPY):
        if leaf.dtype.kind in "OSUMm":
            return leaf
        # Copied, as JAX may share the memory, and the source may write to it again.
        leaf = _narrowed(leaf) if leaf.dtype.kind in "iu" else leaf.copy()
    if is_shared:  # each process has a part of the array
        return jax.make_array_from_process_local_data(device, np.asarray(leaf))
    return jax.device_put(leaf, device)


def _narrowed(leaf: Any) -> Any:
    """A copy of integers in the size that JAX holds; refuses those that it would cut."""
    kept = leaf.dtype if leaf.dtype.itemsize < 8 else jax.dtypes.canonicalize_dtype(leaf.dtype)
    if kept != leaf.dtype and leaf.size:
        least, most, limits = leaf.min(), leaf.max(), np.iinfo(kept)
        if least < limits.min or most > limits.max:
            raise OverflowError(f"{leaf.dtype} from {least} to {most} would become {kept}")
    return leaf.astype(kept)
