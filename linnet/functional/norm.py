"""Normalisation: statistics over axes, and the affine map that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Axes = int | Sequence[int]


def positive_axes(axes: Axes, ndim: int) -> tuple[int, ...]:
    """Axes as non-negative numbers."""
    return tuple(a % ndim for a in ([axes] if isinstance(axes, int) else axes))


def moments(
    x: Array,
    axes: Axes,
    *,
    dtype: Any = None,
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    use_mean: bool = True,
    use_fast_variance: bool = True,
    mask: Array | None = None,
) -> tuple[Array, Array]:
    """Mean and variance over axes, in at least float32.

    Args:
      x: the values.
      axes: the axes to reduce.
      dtype: compute in this dtype, at least float32.
      axis_name: average over this mapped axis too.
      axis_index_groups: groups of devices to average over.
      use_mean: subtract the mean; otherwise the variance is the mean square.
      use_fast_variance: ``E[x^2] - E[x]^2`` in one pass, instead of two.
      mask: True where values count.

    Returns:
      ``(mean, variance)``, with the reduced axes gone.
    """
    dtype = jnp.result_type(x) if dtype is None else dtype
    dtype = jnp.promote_types(dtype, jnp.float32)
    x = jnp.asarray(x, dtype)
    axes = positive_axes(axes, x.ndim)

    def average(*values: Array, where: Array | None = mask) -> list[Array]:
        means = [v.mean(axes, where=where) for v in values]
        if axis_name is None:
            return means
        stacked = lax.pmean(jnp.stack(means), axis_name, axis_index_groups=axis_index_groups)
        return list(stacked)

    square = lax.real(x * lax.conj(x)) if jnp.iscomplexobj(x) else lax.square(x)
    if not use_mean:
        (variance,) = average(square)
        return jnp.zeros(variance.shape, dtype), variance
    if use_fast_variance:
        mean, mean_square = average(x, square)
        mean_squared = jnp.square(jnp.abs(mean)) if jnp.iscomplexobj(x) else lax.square(mean)
        return mean, jnp.maximum(0.0, mean_square - mean_squared)
    (mean,) = average(x)
    centred = x - jnp.expand_dims(mean, axes)
    square = jnp.square(jnp.abs(centred)) if jnp.iscomplexobj(x) else lax.square(centred)
    (variance,) = average(square)
    return mean, variance


def normalize(
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    reduction_axes: Axes,
    feature_axes: Axes,
    epsilon: float,
    dtype: Any,
) -> Array:
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias``.

    Args:
      x: the values.
      mean: without the reduced axes.
      variance: likewise.
      scale: one entry for each feature, or None.
      bias: likewise.
      reduction_axes: the axes that mean and variance lack.
      feature_axes: the axes of the features.
      epsilon: keeps the square root away from zero.
      dtype: of the output.

    Returns:
      The normalised values.
    """
    reduced = positive_axes(reduction_axes, x.ndim)
    features = positive_axes(feature_axes, x.ndim)
    feature_shape = [x.shape[a] if a in features else 1 for a in range(x.ndim)]
    y = x - jnp.expand_dims(mean, reduced)
    factor = lax.rsqrt(jnp.expand_dims(variance, reduced) + epsilon)
    if scale is not None:
        factor = factor * jnp.reshape(scale, feature_shape)
    y = y * factor
    if bias is not None:
        y = y + jnp.reshape(bias, feature_shape)
    return jnp.asarray(y, dtype)


def group_moments(
    x: Array, groups: int, reduction_axes: Axes, mask: Array | None, **options: Any
) -> tuple[Array, Array]:
    """Mean and variance of each group of features.

    Args:
      x: ``(..., features)``.
      groups: how many groups.
      reduction_axes: the axes to reduce, the features among them.
      mask: True where values count; the shape of ``x``.
      **options: as for ``moments``.

    Returns:
      ``(mean, variance)``, one entry for each feature, with the other reduced axes gone.
    """
    size = x.shape[-1] // groups
    shape = (*x.shape[:-1], groups, size)
    axes = [a for a in positive_axes(reduction_axes, x.ndim) if a != x.ndim - 1]
    mask = None if mask is None else jnp.reshape(jnp.broadcast_to(mask, x.shape), shape)
    mean, variance = moments(jnp.reshape(x, shape), (*axes, x.ndim), mask=mask, **options)
    return jnp.repeat(mean, size, axis=-1), jnp.repeat(variance, size, axis=-1)


def running_average(old: Array, new: Array, momentum: float) -> Array:
    """``momentum * old + (1 - momentum) * new``."""
    return momentum * old + (1 - momentum) * new
