"""Contractions in 8-bit floating point, with scales that follow the largest values seen.

An array is divided by its scale, so that its values fill the range of the 8-bit dtype, and rounded.
The scale comes from a history of the largest magnitudes of the last calls. Scales and histories are
not trained: in place of gradients the backward pass returns their next values, to be stored as they
are.

- ``in_qdq``, ``out_qdq``: round an operand, or the gradient of the output, and return to the dtype
  before. The contraction runs in that dtype, and the compiler may replace it by one in 8 bits.
- ``in_q``, ``quantized_dot``, ``out_dq``: the same with the contraction itself in 8 bits.

Arguments that many have:

- ``scale``, ``amax_history``: ``(1,)`` and ``(length,)``, float32. The newest entry of a history is
  the first; the others follow from the oldest on.
- ``compute_dtype``, ``q_dtype``: the dtype of the values, and the 8-bit dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linnet.functional import fusing

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

# Scales and histories.


def get_fp8_max(fp8_dtype: Any, out_dtype: Any) -> Any:
    """The largest finite value of an 8-bit dtype, as a number of another dtype."""
    return np.asarray(jnp.finfo(fp8_dtype).max, out_dtype)


def compute_scale(amax: Array, scale: Array, fp8_max: Any, margin: int = 0) -> Array:
    """The scale by which the magnitude ``amax`` becomes the largest value of the 8-bit dtype.

    Args:
      amax: the largest magnitude.
      scale: the scale so far, kept where ``amax`` is zero or not finite.
      fp8_max: the largest value of the dtype.
      margin: how many powers of two to stay below it.

    Returns:
      The scale.

    Example:
      >>> float(compute_scale(jnp.array(896.0), jnp.array(1.0), 448.0))
      2.0
    """
    before = 1.0 / scale
    factor = (fp8_max / amax) / (2**margin)
    factor = jnp.where((amax > 0.0) & jnp.isfinite(amax), factor, before)
    return 1.0 / factor


def compute_amax_history(x: Array, amax_history: Array) -> Array:
    """A history with the largest magnitude of an array in front; the oldest entry is dropped.

    Example:
      >>> compute_amax_history(jnp.array([-5.0, 4.0]), jnp.array([1.0, 2.0, 3.0]))
      Array([5., 3., 1.], dtype=float32)
    """
    newest = jnp.max(jnp.abs(x)).astype(amax_history.dtype)
    return jnp.roll(amax_history, -1).at[0].set(newest)


def update_fp8_meta(x: Array, q_dtype: Any, scale: Array, amax_history: Array) -> Any:
    """The scale for an array, by the history so far, and the history with the array in it."""
    return _scale_from(q_dtype, scale, amax_history), compute_amax_history(x, amax_history)


def _scale_from(q_dtype: Any, scale: Array, amax_history: Array) -> Array:
    return compute_scale(jnp.max(amax_history), scale, get_fp8_max(q_dtype, jnp.float32))


# Rounding.


def quantize(x: Array, q_dtype: Any, scale: Array, compute_dtype: Any) -> Array:
    """Divides by the scale and rounds to 8 bits; what is beyond the range becomes its end.

    Example:
      >>> quantize(jnp.array([3.0, 9000.0]), jnp.float8_e4m3fn, jnp.array([2.0]), jnp.float32)
      Array([1.5, 448], dtype=float8_e4m3fn)
    """
    most = get_fp8_max(q_dtype, compute_dtype)
    scaled = x / jnp.broadcast_to(scale.astype(compute_dtype), x.shape)
    return jnp.clip(scaled, -most, most).astype(q_dtype)


def dequantize(x: Array, dq_dtype: Any, scale: Array) -> Array:
    """Multiplies by the scale, in another dtype."""
    return x.astype(dq_dtype) * jnp.broadcast_to(scale.astype(dq_dtype), x.shape)


def qdq(x: Array, q_dtype: Any, scale: Array, compute_dtype: Any) -> Array:
    """Rounds to 8 bits and returns to the dtype before."""
    return dequantize(quantize(x, q_dtype, scale, compute_dtype), x.dtype, scale)


def quantize_dequantize_update(
    x: Array, q_dtype: Any, scale: Array, amax_history: Array, compute_dtype: Any
) -> tuple[Array, Array, Array]:
    """The rounded array, its scale, and the history with it."""
    scale, amax_history = update_fp8_meta(x, q_dtype, scale, amax_history)
    return qdq(x, q_dtype, scale, compute_dtype), scale, amax_history


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_qdq(compute_dtype: Any, q_dtype: Any, inp: Array, scale: Array, amax_history: Array) -> Any:
    """Rounds an operand; its gradient is passed on as it is.

    Example:
      >>> scale, history = jnp.ones(1), jnp.zeros(2)
      >>> in_qdq(jnp.float32, jnp.float8_e4m3fn, jnp.array([1.06]), scale, history)
      Array([1.], dtype=float32)
    """
    return qdq(inp, q_dtype, _scale_from(q_dtype, scale, amax_history), compute_dtype)


def _in_qdq_forward(compute_dtype: Any, q_dtype: Any, inp: Any, scale: Any, history: Any) -> Any:
    out, *meta = quantize_dequantize_update(inp, q_dtype, scale, history, compute_dtype)
    return out, tuple(meta)


def _in_qdq_backward(compute_dtype: Any, q_dtype: Any, meta: Any, gradient: Any) -> Any:
    return gradient, *meta


in_qdq.defvjp(_in_qdq_forward, _in_qdq_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def out_qdq(compute_dtype: Any, q_dtype: Any, out: Array, scale: Array, amax_history: Array) -> Any:
    """Returns an output as it is; its gradient is rounded.

    Example:
      >>> def f(x):
      ...     return out_qdq(jnp.float32, jnp.float8_e5m2, x, jnp.ones(1), jnp.zeros(2)).sum()
      >>> jax.grad(lambda x: f(1.06 * x))(jnp.ones(1))
      Array([1.06], dtype=float32)
    """
    return out


def _out_qdq_forward(compute_dtype: Any, q_dtype: Any, out: Any, scale: Any, history: Any) -> Any:
    return out, (scale, history)


def _out_qdq_backward(compute_dtype: Any, q_dtype: Any, meta: Any, gradient: Any) -> Any:
    scale, history = meta
    return quantize_dequantize_update(gradient, q_dtype, scale, history, compute_dtype)


out_qdq.defvjp(_out_qdq_forward, _out_qdq_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_q(compute_dtype: Any, q_dtype: Any, inp: Array, scale: Array, amax_history: Array) -> Any:
    """An operand in 8 bits, with the scale it was divided by."""
    scale = _scale_from(q_dtype, scale, amax_history)
    return quantize(inp, q_dtype, scale, compute_dtype), scale


def _in_q_forward(compute_dtype: Any, q_dtype: Any, inp: Any, scale: Any, history: Any) -> Any:
    scale, history = update_fp8_meta(inp, q_dtype, scale, history)
    zero = jnp.zeros((), inp.dtype)  # keeps the dtype of the operand
    return (quantize(inp, q_dtype, scale, compute_dtype), scale), (scale, history, zero)


def _in_q_backward(compute_dtype: Any, q_dtype: Any, kept: Any, gradient: Any) -> Any:
    # The gradient of the operand comes from quantized_dot, which takes the operand too.
    *meta, zero = kept
    return jnp.broadcast_to(zero, gradient[0].shape), *meta


in_q.defvjp(_in_q_forward, _in_q_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def out_dq(dq_type: Any, lhs_scale: Array, rhs_scale: Array, out: Array) -> Array:
    """The product of two arrays in 8 bits, multiplied by their scales; its gradient is as it is."""
    return dequantize(out, dq_type, lhs_scale * rhs_scale)


def _out_dq_forward(dq_type: Any, lhs_scale: Any, rhs_scale: Any, out: Any) -> Any:
    return out_dq(dq_type, lhs_scale, rhs_scale, out), (lhs_scale, rhs_scale)


def _out_dq_backward(dq_type: Any, scales: Any, gradient: Any) -> Any:
    return *map(jnp.zeros_like, scales), gradient


out_dq.defvjp(_out_dq_forward, _out_dq_backward)


# Contractions.


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """A contraction in the default precision whose derivatives are in the highest.

    Args:
      lhs, rhs: the operands.
      dimension_numbers: as for ``jax.lax.dot_general``.
      precision, preferred_element_type: not used; ``jax.lax.dot_general`` takes them.

    Returns:
      The contraction.

    Example:
      >>> dot_general_with_precision(jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())))
      Array([[2.]], dtype=float32)
    """
    return fusing.dot_general(lhs, rhs, dimension_numbers, precision=lax.Precision.DEFAULT)


@dot_general_with_precision.defjvp
def _dot_general_jvp(dimensions: Any, precision: Any, preferred: Any, primals: Any, tangents: Any):
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    exact = functools.partial(
        fusing.dot_general, dimension_numbers=dimensions, precision=lax.Precision.HIGHEST
    )
    out = fusing.dot_general(lhs, rhs, dimensions, precision=lax.Precision.DEFAULT)
    return out, exact(lhs, rhs_dot) + exact(lhs_dot, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def quantized_dot(
    lhs: Array,
    q_lhs: Array,
    lhs_scale: Array,
    rhs: Array,
    q_rhs: Array,
    rhs_scale: Array,
    out_grad_scale: Array,
    out_grad_amax_history: Array,
    dimension_numbers: Any,
    preferred_element_type: Any = None,
) -> Array:
    """Contracts two operands in 8 bits; in the backward pass the gradient is in 8 bits too.

    Args:
      lhs, rhs: the operands before they were rounded, which the gradients belong to.
      q_lhs, q_rhs: in 8 bits.
      lhs_scale, rhs_scale: what they were divided by.
      out_grad_scale, out_grad_amax_history: the scale of the output's gradient, and its history.
      dimension_numbers, preferred_element_type: as for ``jax.lax.dot_general``.

    Returns:
      The contraction, to be multiplied by both scales.
    """
    return fusing.dot_general(
        q_lhs,
        q_rhs,
        dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=preferred_element_type,
    )


def _quantized_dot_forward(lhs: Any, q_lhs: Any, lhs_scale: Any, rhs: Any, *rest: Any) -> Any:
    out = quantized_dot(lhs, q_lhs, lhs_scale, rhs, *rest)
    return out, (q_lhs, lhs_scale, *rest[:4])


def _quantized_dot_backward(dimensions: Any, preferred: Any, kept: Any, gradient: Any) -> Any:
    q_lhs, lhs_scale, q_rhs, rhs_scale, scale, history = kept
    scale, history = update_fp8_meta(gradient, jnp.float8_e5m2, scale, history)
    rounded = quantize(gradient, jnp.float8_e5m2, scale, preferred)
    to_lhs = _transposed_dot(rounded, q_lhs.ndim, q_rhs, dimensions, preferred)
    swapped = tuple((theirs, ours) for ours, theirs in dimensions)
    batch = len(dimensions[1][0])
    end = batch + len(_free_axes(q_lhs.ndim, 0, dimensions))
    turned = jnp.transpose(rounded, (*range(batch), *range(end, rounded.ndim), *range(batch, end)))
    to_rhs = _transposed_dot(turned, q_rhs.ndim, q_lhs, swapped, preferred)
    of_lhs = (dequantize(to_lhs, preferred, rhs_scale * scale), None, None)
    of_rhs = (dequantize(to_rhs, preferred, lhs_scale * scale), None, None)
    return *of_lhs, *of_rhs, scale, history


quantized_dot.defvjp(_quantized_dot_forward, _quantized_dot_backward)


def _free_axes(ndim: int, side: int, dimensions: Any) -> list[int]:
    """The axes of an operand that are neither contracted nor batch."""
    contracted, batch = dimensions[0][side], dimensions[1][side]
    return [axis for axis in range(ndim) if axis not in (*contracted, *batch)]


def _transposed_dot(gradient: Array, ndim: int, rhs: Array, dimensions: Any, preferred: Any) -> Any:
    """The gradient of a contraction's first operand, from that of its output."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimensions
    rhs_free, lhs_free = _free_axes(rhs.ndim, 1, dimensions), _free_axes(ndim, 0, dimensions)
    last = tuple(range(gradient.ndim - len(rhs_free), gradient.ndim))
    first = tuple(range(len(lhs_batch)))
    out = fusing.dot_general(
        gradient,
        rhs,
        ((last, rhs_free), (first, rhs_batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=preferred,
    )
    contracted = [lhs_contracted[i] for i in np.argsort(rhs_contracted)]
    return jnp.transpose(out, np.argsort([*lhs_batch, *lhs_free, *contracted]).tolist())


def fp8_scaled_dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    lhs_scale: Array,
    rhs_scale: Array,
    grad_scale: Array,
    lhs_amax_history: Array,
    rhs_amax_history: Array,
    grad_amax_history: Array,
    quantize_compute_type: Any = jnp.float32,
    e4m3_dtype: Any = jnp.float8_e4m3fn,
) -> Array:
    """A contraction in 8 bits, forward and backward.

    Args:
      lhs, rhs: the operands.
      dimension_numbers: as for ``jax.lax.dot_general``.
      precision: not used; it is there because ``jax.lax.dot_general`` takes it.
      preferred_element_type: of the output; by default the dtype of ``lhs``.
      lhs_scale, rhs_scale, grad_scale: the scales of the operands and of the output's gradient.
      lhs_amax_history, rhs_amax_history, grad_amax_history: their histories.
      quantize_compute_type: the dtype that operands are scaled in.
      e4m3_dtype: the 8-bit dtype of the operands.

    Returns:
      The contraction.

    Example:
      >>> one, history = jnp.ones(1), jnp.zeros(4)
      >>> scales = {"lhs_scale": one, "rhs_scale": one, "grad_scale": one}
      >>> names = ("lhs_amax_history", "rhs_amax_history", "grad_amax_history")
      >>> fp8_scaled_dot_general(
      ...     jnp.ones((1, 2)), jnp.ones((2, 1)), (((1,), (0,)), ((), ())),
      ...     **scales, **dict.fromkeys(names, history))
      Array([[2.]], dtype=float32)
    """
    out_dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    rounded: Any = functools.partial(in_q, quantize_compute_type, e4m3_dtype)
    q_lhs, lhs_scale = rounded(lhs, lhs_scale, lhs_amax_history)
    q_rhs, rhs_scale = rounded(rhs, rhs_scale, rhs_amax_history)
    operands = (lhs, q_lhs, lhs_scale, rhs, q_rhs, rhs_scale)
    out = quantized_dot(*operands, grad_scale, grad_amax_history, dimension_numbers, out_dtype)
    return out_dq(out_dtype, lhs_scale, rhs_scale, out)
