"""Pooling: reductions over windows of the spatial axes; the features come last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linnet.errors import FeatureError
from linnet.functional.conv import Padding, PerAxis, canonical_padding, per_axis
from linnet.functional.fusing import fused

PADDINGS = ("SAME", "VALID", "SAME_LOWER")


def pool(
    inputs: Array,
    init: Any,
    reduce_fn: Callable[[Any, Any], Any],
    window_shape: Sequence[int],
    strides: PerAxis,
    padding: Padding,
) -> Array:
    """Reduces every window of the input to one entry.

    Args:
      inputs: ``(*batch, *spatial, features)``; no batch axis, one or several.
      init: the initial value of the reduction.
      reduce_fn: the reduction, for example ``jax.lax.add``.
      window_shape: the size of the window, for each spatial axis.
      strides: how far the window moves, for each axis; None for 1.
      padding: ``"SAME"``, ``"VALID"``, ``"SAME_LOWER"``, a number, or a number or pair for each
        axis.

    Returns:
      ``(*batch, *spatial, features)``.

    Raises:
      FeatureError: the input has too few axes.
      LayerArgumentError: strides or padding do not fit the window.

    Example:
      >>> x = jnp.arange(4.0)[:, None]
      >>> pool(x, 0.0, lax.add, (2,), (2,), "VALID").ravel()
      Array([1., 5.], dtype=float32)
    """
    window = _window(inputs, window_shape)
    axes = len(window)
    batch = inputs.ndim - axes - 1
    padding = canonical_padding(padding, axes, PADDINGS)
    if not isinstance(padding, str):
        padding = (((0, 0),) * batch) + padding + ((0, 0),)
    dimensions = (1,) * batch + window + (1,)
    strides = (1,) * batch + per_axis(strides, axes, "strides") + (1,)
    return lax.reduce_window(inputs, init, reduce_fn, dimensions, strides, padding)


def _window(inputs: Array, window_shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(window_shape, Sequence):
        raise FeatureError(
            f"window_shape must be a sequence, one size for each axis, but got {window_shape!r}.\n"
            f"Fix: window_shape=({window_shape}, {window_shape}) for images."
        )
    if inputs.ndim < len(window_shape) + 1:
        raise FeatureError(
            f"A window of {tuple(window_shape)} needs inputs with at least {len(window_shape) + 1} "
            f"axes, the last for the features, but got {inputs.dtype}{list(inputs.shape)}.\n"
            "Fix: keep the feature axis, also where it has size 1, or give the window fewer axes."
        )
    return tuple(window_shape)


def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: PerAxis = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """Takes the mean of every window.

    Args:
      inputs: ``(*batch, *spatial, features)``.
      window_shape, strides, padding: as for ``pool``.
      count_include_pad: whether padded entries count as zeros; where they do not count at all, the
        output is at least float32.

    Returns:
      ``(*batch, *spatial, features)``.

    Example:
      >>> x = jnp.array([[2.0], [4.0]])
      >>> avg_pool(x, (2,), padding="SAME").ravel()
      Array([3., 2.], dtype=float32)
      >>> avg_pool(x, (2,), padding="SAME", count_include_pad=False).ravel()
      Array([3., 4.], dtype=float32)
    """
    return _mean(
        inputs,
        window_shape=window_shape,
        strides=strides,
        padding=padding,
        count_include_pad=count_include_pad,
    )


def max_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: PerAxis = None,
    padding: Padding = "VALID",
) -> Array:
    """Takes the largest entry of every window.

    Args:
      inputs: ``(*batch, *spatial, features)``.
      window_shape, strides, padding: as for ``pool``.

    Returns:
      ``(*batch, *spatial, features)``.

    Raises:
      FeatureError: the input has too few axes.
      LayerArgumentError: strides or padding do not fit the window.

    Example:
      >>> max_pool(jnp.array([[1.0], [5.0], [2.0]]), (2,)).ravel()
      Array([5., 5.], dtype=float32)
    """
    return _extreme(
        inputs, reduce_fn=lax.max, window_shape=window_shape, strides=strides, padding=padding
    )


def min_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: PerAxis = None,
    padding: Padding = "VALID",
) -> Array:
    """Takes the smallest entry of every window.

    Args:
      inputs: ``(*batch, *spatial, features)``.
      window_shape, strides, padding: as for ``pool``.

    Returns:
      ``(*batch, *spatial, features)``.

    Raises:
      FeatureError: the input has too few axes.
      LayerArgumentError: strides or padding do not fit the window.

    Example:
      >>> min_pool(jnp.array([[1.0], [5.0], [2.0]]), (2,)).ravel()
      Array([1., 2.], dtype=float32)
    """
    return _extreme(
        inputs, reduce_fn=lax.min, window_shape=window_shape, strides=strides, padding=padding
    )


@fused
def _mean(
    inputs: Array,
    *,
    window_shape: Sequence[int],
    strides: PerAxis,
    padding: Padding,
    count_include_pad: bool,
) -> Array:
    total = pool(inputs, np.zeros((), inputs.dtype), lax.add, window_shape, strides, padding)
    if count_include_pad:
        return total / math.prod(window_shape)
    dtype = jnp.promote_types(total.dtype, jnp.float32)
    axes = len(window_shape) + 1
    ones = jnp.ones((1,) * (inputs.ndim - axes) + (*inputs.shape[-axes:-1], 1), dtype)
    counts = pool(ones, np.zeros((), dtype), lax.add, window_shape, strides, padding)
    return total.astype(dtype) / counts


@fused
def _extreme(
    inputs: Array,
    *,
    reduce_fn: Callable[..., Array],
    window_shape: Sequence[int],
    strides: PerAxis,
    padding: Padding,
) -> Array:
    if jnp.issubdtype(inputs.dtype, jnp.inexact):
        least, greatest = -np.inf, np.inf
    else:
        least, greatest = jnp.iinfo(inputs.dtype).min, jnp.iinfo(inputs.dtype).max
    worst = np.array(least if reduce_fn is lax.max else greatest, inputs.dtype)
    return pool(inputs, worst, reduce_fn, window_shape, strides, padding)
