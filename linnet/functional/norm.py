"""Normalisation of activations by their statistics and of weights by their norms.

Statistics are computed in at least float32, whatever the dtype of the values, unless a caller says
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linnet.errors import type_text
from linnet.functional.fusing import fused
from linnet.functional.shapes import Axes, broadcasts_to, missing_axes, positive_axes

Groups = Sequence[Sequence[int]] | None


def moments(
    x: Array,
    mask: Array | None = None,
    *,
    axes: Axes,
    axis_name: str | None = None,
    axis_index_groups: Groups = None,
    use_fast_variance: bool = True,
    force_float32_reductions: bool = True,
) -> tuple[Array, Array]:
    """Mean and variance over axes, which stay with size 1; options as for ``layer_norm``.

    ``use_fast_variance`` computes ``E[x^2] - E[x]^2`` in one pass, instead of two.
    """
    average = _AxisMean(x, mask, axes, axis_name, axis_index_groups)
    found = average.moments(_for_statistics(x, force_float32_reductions), use_fast_variance)
    return found.spread_mean, found.spread_variance


def mean_square(
    x: Array,
    mask: Array | None = None,
    *,
    axes: Axes,
    axis_name: str | None = None,
    axis_index_groups: Groups = None,
    force_float32_reductions: bool = True,
) -> Array:
    """Mean of the squares over axes, which stay with size 1; arguments as for ``moments``."""
    average = _AxisMean(x, mask, axes, axis_name, axis_index_groups)
    (square,) = average(_abs_square(_for_statistics(x, force_float32_reductions)))
    return average.spread(square)


class _Moments(NamedTuple):
    """Mean and variance, without the axes they were taken over, and spread over those."""

    mean: Array
    variance: Array
    spread_mean: Array
    spread_variance: Array


class _AxisMean:
    """Takes means over axes of arrays, over a mapped axis, and only where a mask is not 0."""

    def __init__(self, x: Array, mask: Any, axes: Axes, axis_name: str | None, groups: Groups):
        self.axes = positive_axes(axes, x.ndim)
        self.axis_name, self.groups = axis_name, groups
        self.mask = mask
        if mask is not None:
            self.mask = jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)
            self.count = jnp.sum(self.mask, self.axes, dtype=jnp.float32)

    def _mean(self, x: Array) -> Array:
        if self.mask is None:
            return jnp.mean(x, self.axes)
        total = jnp.sum(x, self.axes, where=self.mask)
        return total / self.count.astype(total.dtype)

    def __call__(self, *values: Array) -> list[Array]:
        means = list(map(self._mean, values))
        if self.axis_name is None:
            return means
        # One collective for all: its cost is that devices wait for each other.
        return list(lax.pmean(jnp.stack(means), self.axis_name, axis_index_groups=self.groups))

    def spread(self, mean: Array) -> Array:
        """A mean with axes of size 1 for those it was taken over."""
        return jnp.expand_dims(mean, self.axes)

    def moments(self, x: Array, in_one_pass: bool) -> _Moments:
        """Mean and variance of ``x``, the latter as ``E[x^2] - E[x]^2`` if in one pass."""
        if in_one_pass:
            mean, mean_square = self(x, _abs_square(x))
            variance = jnp.maximum(0.0, mean_square - _abs_square(mean))
            return _Moments(mean, variance, self.spread(mean), self.spread(variance))
        (mean,) = self(x)
        spread = self.spread(mean)
        (variance,) = self(_abs_square(x - spread))
        return _Moments(mean, variance, spread, self.spread(variance))


def _widened(x: Array) -> Array:
    """Converts to float32 what is narrower."""
    is_wide = jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits >= 32
    return x if is_wide else x.astype(jnp.float32)


def _for_statistics(x: Array, in_float32: bool) -> Array:
    is_settled = not in_float32 and jnp.issubdtype(x.dtype, jnp.inexact)
    return x if is_settled else _widened(x)


def _shape_of(features: Axes, x: Array) -> list[int]:
    """The shape in which an array with one entry for each feature broadcasts to ``x``."""
    features = positive_axes(features, x.ndim)
    return [n if axis in features else 1 for axis, n in enumerate(x.shape)]


def _abs_square(x: Array) -> Array:
    return lax.real(x * lax.conj(x)) if jnp.iscomplexobj(x) else lax.square(x)


def _affine(
    x: Any,
    mean: Array | None,
    variance: Array,
    scale: Array | None,
    bias: Array | None,
    features: Axes,
    epsilon: float,
    dtype: Any = None,
) -> Array:
    """``(x - mean) / sqrt(variance + epsilon) * scale + bias``; mean and variance broadcast."""
    shape = _shape_of(features, x)
    dtype = x.dtype if dtype is None else dtype
    if variance.dtype != x.dtype:
        x, scale, bias = (v if v is None else _widened(v) for v in (x, scale, bias))
    factor = lax.rsqrt(variance + epsilon)
    if scale is not None:
        factor = factor * jnp.reshape(scale, shape)
    y = (x if mean is None else x - mean) * factor
    if bias is not None:
        y = y + jnp.reshape(bias, shape)
    return y.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else y


@fused
def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    reduction_axes: Axes = -1,
    feature_axes: Axes = -1,
    epsilon: float = 1e-6,
    axis_name: str | None = None,
    axis_index_groups: Groups = None,
    use_fast_variance: bool = True,
    force_float32_reductions: bool = True,
    dtype: Any = None,
) -> Array:
    """Normalises to mean 0 and variance 1 over some axes, then scales and shifts the features.

    Args:
      x: the values.
      scale: one entry for each feature, or None.
      bias: likewise.
      mask: True where values count for the statistics; broadcasts to ``x``.
      reduction_axes: the axes the statistics are taken over.
      feature_axes: the axes of the features.
      epsilon: added to the variance.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of its devices.
      use_fast_variance: compute the variance in one pass.
      force_float32_reductions: take the statistics in at least float32.
      dtype: of the output; by default that of ``x``.

    Returns:
      The normalised values.

    Example:
      >>> layer_norm(jnp.array([1.0, 3.0]), epsilon=0.0)
      Array([-1.,  1.], dtype=float32)
    """
    mean, variance = moments(
        x,
        mask,
        axes=reduction_axes,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        use_fast_variance=use_fast_variance,
        force_float32_reductions=force_float32_reductions,
    )
    return _affine(x, mean, variance, scale, bias, feature_axes, epsilon, dtype)


@fused
def rms_norm(
    x: Array,
    scale: Array | None = None,
    mask: Array | None = None,
    *,
    reduction_axes: Axes = -1,
    feature_axes: Axes = -1,
    epsilon: float = 1e-6,
    axis_name: str | None = None,
    axis_index_groups: Groups = None,
    force_float32_reductions: bool = True,
    dtype: Any = None,
) -> Array:
    """Divides by the root of the mean square over some axes, then scales the features.

    Args:
      x: the values.
      scale: one entry for each feature, or None.
      mask: True where values count for the statistics; broadcasts to ``x``.
      reduction_axes: the axes the statistics are taken over.
      feature_axes: the axes of the features.
      epsilon: added to the mean square.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of its devices.
      force_float32_reductions: take the mean square in at least float32.
      dtype: of the output; by default that of ``x``.

    Returns:
      The normalised values.

    Example:
      >>> rms_norm(jnp.array([3.0, 3.0]), epsilon=0.0)
      Array([1., 1.], dtype=float32)
    """
    square = mean_square(
        x,
        mask,
        axes=reduction_axes,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        force_float32_reductions=force_float32_reductions,
    )
    return _affine(x, None, square, scale, None, feature_axes, epsilon, dtype)


@fused
def group_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    groups: int,
    reduction_axes: Axes | None = None,
    epsilon: float = 1e-6,
    axis_name: str | None = None,
    axis_index_groups: Groups = None,
    use_fast_variance: bool = True,
    force_float32_reductions: bool = True,
    dtype: Any = None,
) -> Array:
    """Normalises groups of features to mean 0 and variance 1, then scales and shifts each feature.

    Args:
      x: ``(batch, ..., features)``.
      scale: one entry for each feature, or None.
      bias: likewise.
      mask: True where values count for the statistics; broadcasts to ``x``.
      groups: how many groups.
      reduction_axes: the axes the statistics are taken over, the last among them; by default all
        but the first.
      epsilon: added to the variance.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of its devices.
      use_fast_variance: compute the variance in one pass.
      force_float32_reductions: take the statistics in at least float32.
      dtype: of the output; by default that of ``x``.

    Returns:
      The normalised values.

    Example:
      >>> group_norm(jnp.array([[1.0, 3.0, 5.0, 9.0]]), groups=2, epsilon=0.0)
      Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """
    last = x.ndim - 1
    axes = range(1, x.ndim) if reduction_axes is None else positive_axes(reduction_axes, x.ndim)
    grouped = (*x.shape[:-1], groups, x.shape[-1] // groups)
    mask = None if mask is None else jnp.reshape(jnp.broadcast_to(mask, x.shape), grouped)
    values = jnp.reshape(x, grouped)
    mean, variance = moments(
        values,
        mask,
        axes=(*(a for a in axes if a != last), x.ndim),
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        use_fast_variance=use_fast_variance,
        force_float32_reductions=force_float32_reductions,
    )
    y = _affine(values, mean, variance, scale, bias, (last, x.ndim), epsilon, dtype)
    return jnp.reshape(y, x.shape)


@fused
def batch_norm(
    x: Array,
    mean: Array,
    variance: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    dtype: Any = None,
) -> Array:
    """Normalises by given statistics, then scales and shifts the features.

    Args:
      x: the values.
      mean: one entry for each feature.
      variance: likewise.
      scale: likewise, or None.
      bias: likewise.
      axis: the axis of the features.
      epsilon: added to the variance.
      dtype: of the output; by default that of ``x``.

    Returns:
      The normalised values.

    Example:
      >>> batch_norm(jnp.array([[5.0]]), jnp.array([1.0]), jnp.array([4.0]), epsilon=0.0)
      Array([[2.]], dtype=float32)
    """
    shape = _shape_of(axis, x)
    mean, variance = jnp.reshape(mean, shape), jnp.reshape(variance, shape)
    return _affine(x, mean, variance, scale, bias, axis, epsilon, dtype)


@fused
def batch_norm_of_batch(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    axis: Axes = -1,
    epsilon: float = 1e-5,
    axis_name: str | None = None,
    axis_index_groups: Groups = None,
    use_fast_variance: bool = True,
    force_float32_reductions: bool = True,
    dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """Normalises each feature to mean 0 and variance 1 over the batch, then scales and shifts.

    Args:
      x: the values.
      scale: one entry for each feature, or None.
      bias: likewise.
      mask: True where values count for the statistics; broadcasts to ``x``.
      axis: the axis of the features; the statistics are taken over all others.
      epsilon: added to the variance.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of its devices.
      use_fast_variance: compute the variance in one pass.
      force_float32_reductions: take the statistics in at least float32.
      dtype: of the output; by default that of ``x``.

    Returns:
      ``(y, mean, variance)``: the normalised values and the statistics, one entry for each feature.

    Example:
      >>> y, mean, variance = batch_norm_of_batch(jnp.array([[1.0], [3.0]]), epsilon=0.0)
      >>> y.ravel().tolist(), float(mean[0]), float(variance[0])
      ([-1.0, 1.0], 2.0, 1.0)
    """
    features = positive_axes(axis, x.ndim)
    batch = [a for a in range(x.ndim) if a not in features]
    average = _AxisMean(x, mask, batch, axis_name, axis_index_groups)
    found = average.moments(_for_statistics(x, force_float32_reductions), use_fast_variance)
    y = _affine(x, found.spread_mean, found.spread_variance, scale, bias, features, epsilon, dtype)
    return y, found.mean.ravel(), found.variance.ravel()


@fused
def running_average(
    old: tuple[Array, ...], new: tuple[Array, ...], *, momentum: float
) -> tuple[Array, ...]:
    """Moves averages towards new values: ``momentum * old + (1 - momentum) * new``.

    Args:
      old: the averages so far.
      new: the new values.
      momentum: the share of the old averages that is kept.

    Returns:
      The averages, each in the dtype it had; complex where the new one is.

    Example:
      >>> running_average((jnp.array(0.0),), (jnp.array(4.0),), momentum=0.75)
      (Array(1., dtype=float32),)
    """

    def mixed(a: Array, b: Array) -> Array:
        y = momentum * _widened(a) + (1 - momentum) * b
        return y if jnp.iscomplexobj(y) else y.astype(a.dtype)

    return tuple(map(mixed, old, new))


def spectral_norm(
    weight: Array, u: Array, *, steps: int = 1, epsilon: float = 1e-12
) -> tuple[Array, Array, Array]:
    """Divides a weight by its largest singular value, estimated by power iteration.

    Args:
      weight: ``(..., out)``, taken as the matrix ``(-1, out)``.
      u: ``(1, out)``, the estimate so far of the right singular vector.
      steps: iterations, at least one.
      epsilon: keeps the length of the vectors away from zero.

    Returns:
      ``(weight, u, sigma)``: the normalised weight, the new estimate, the singular value. No
      gradient flows through the iteration.

    Example:
      >>> matrix = jnp.diag(jnp.array([4.0, 1.0]))
      >>> weight, u, sigma = spectral_norm(matrix, jnp.ones((1, 2)), steps=20)
      >>> round(float(sigma.ravel()[0]), 4), round(float(weight[1, 1]), 4)
      (4.0, 0.25)
    """
    matrix, transposed, u = _as_matrix(weight, u)
    v = u
    for _ in range(steps):
        v = _unit(jnp.matmul(u, transposed), epsilon=epsilon)
        u = _unit(jnp.matmul(v, matrix), epsilon=epsilon)
    u, v = lax.stop_gradient(u), lax.stop_gradient(v)
    sigma = jnp.matmul(jnp.matmul(v, matrix), u.T)
    normalised, sigma = _divided(matrix, sigma, shape=weight.shape)
    return normalised, u, sigma


@fused
def _as_matrix(weight: Array, u: Array) -> tuple[Array, Array, Array]:
    matrix = jnp.reshape(_widened(weight), (-1, weight.shape[-1]))
    return matrix, matrix.T, _widened(u)


@fused
def _unit(x: Array, *, epsilon: float) -> Array:
    return x * lax.rsqrt(lax.square(x).sum(keepdims=True) + epsilon)


@fused
def _divided(matrix: Array, sigma: Array, *, shape: tuple[int, ...]) -> tuple[Array, Array]:
    sigma = sigma[0, 0]
    return jnp.reshape(matrix / jnp.where(sigma == 0, 1, sigma), shape), sigma


@fused
def weight_norm(
    weight: Array,
    scale: Array | None = None,
    *,
    feature_axes: Axes | None = -1,
    epsilon: float = 1e-12,
) -> Array:
    """Scales each feature of a weight to length one, or to the length given by ``scale``.

    Args:
      weight: any shape.
      scale: of the shape of the feature axes, or None.
      feature_axes: the axes of the features; None for one length of all.
      epsilon: added to the squared length.

    Returns:
      The normalised weight.

    Example:
      >>> weight_norm(jnp.array([[3.0], [4.0]]), jnp.array([10.0])).round(4)
      Array([[6.], [8.]], dtype=float32)
    """
    features = () if feature_axes is None else positive_axes(feature_axes, weight.ndim)
    axes = tuple(a for a in range(weight.ndim) if a not in features)
    weight = weight * lax.rsqrt(_abs_square(weight).sum(axes, keepdims=True) + epsilon)
    return weight if scale is None else weight * jnp.reshape(scale, _shape_of(features, weight))


def scale_shape(weight: Array, feature_axes: Axes | None) -> tuple[int, ...]:
    """The shape of the ``scale`` of ``weight_norm``.

    Example:
      >>> scale_shape(jnp.ones((2, 3, 4)), (-1, 0)), scale_shape(jnp.ones(2), None)
      ((2, 4), ())
    """
    features = () if feature_axes is None else positive_axes(feature_axes, weight.ndim)
    return tuple(n for axis, n in enumerate(weight.shape) if axis in features)


# Why a layer cannot take what it was given: the rest of an error text, or None.


def why_not_normalized(
    x: Any,
    mask: Any,
    feature_axes: Axes,
    reduction_axes: Axes = (),
    *,
    num_features: int | None = None,
    boolean_mask: bool = False,
) -> str | None:
    """Why the statistics of ``x`` cannot be taken; ``num_features`` None allows any number."""
    shape = np.shape(x)
    for axes in (feature_axes, reduction_axes):
        missing = missing_axes(axes, len(shape))
        if missing:
            return (
                f"works on axis {missing[0]}, which {type_text(x)} does not have.\n"
                "Fix: give the input more axes, or build the layer for other axes."
            )
    if num_features is not None:
        found = math.prod(shape[axis] for axis in positive_axes(feature_axes, len(shape)))
        if found != num_features:
            return (
                f"expected {num_features} features on axis {feature_axes}, but got {found} in "
                f"{type_text(x)}.\n"
                f"Fix: build it with num_features={found}, or for another feature axis."
            )
    return None if mask is None else _why_not_masked(x, mask, boolean_mask)


def _why_not_masked(x: Any, mask: Any, boolean: bool) -> str | None:
    if boolean and jnp.result_type(mask) != jnp.bool_:
        fix = "make it a boolean array: mask.astype(bool)."
    elif not broadcasts_to(np.shape(mask), np.shape(x)):
        fix = "give it the shape of the input, or 1 for axes it is the same along."
    else:
        return None
    return (
        f"expected a {'boolean ' if boolean else ''}mask that broadcasts to {type_text(x)}, but "
        f"got {type_text(mask)}.\nFix: {fix}"
    )


def why_no_length(name: str, weight: Any, feature_axes: Axes | None) -> str | None:
    """Why ``weight_norm`` cannot take a weight of this name."""
    if not missing_axes(() if feature_axes is None else feature_axes, weight.ndim):
        return None
    return (
        f"expected weights with axes {feature_axes}, but {name} is {type_text(weight)}.\n"
        "Fix: choose feature_axes that all weights have, or a variable_filter."
    )
