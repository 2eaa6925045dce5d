"""Batches from anywhere: on the device, and their shapes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

Shapes = tuple[tuple[int, ...], ...]

_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)


def put_on_device(batch: Any, device: Any) -> tuple[Any, Shapes]:
    """Starts to copy the arrays of a batch to a device.

    Args:
      batch: any pytree; whatever NumPy can read (a PyTorch tensor too) counts as an array, and
        what it cannot, such as text, stays as it is.
      device: a device or a sharding; None for JAX's default.

    Returns:
      The batch, without waiting for the copies, and the shapes of its arrays.
    """
    leaves, treedef = jax.tree_util.tree_flatten(batch)
    put = [_put(leaf, device) for leaf in leaves]
    shapes = tuple([getattr(x, "shape", ()) for x in put])
    same = all(map(operator.is_, put, leaves))
    return batch if same else treedef.unflatten(put), shapes


def _put(leaf: Any, device: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf if device is None else jax.device_put(leaf, device)
    if not isinstance(leaf, _NUMBERS):
        if not hasattr(leaf, "__array__"):
            return leaf
        leaf = np.asarray(leaf)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
        return leaf
    return jax.device_put(leaf, device)
