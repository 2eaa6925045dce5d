"""Losses: softmax cross-entropy, whole and in chunks.

A language model's logits are its largest array: tokens times vocabulary, in float32, once forward
and once backward. In chunks they are made for some tokens at a time, used and thrown away, and made
again for the gradient: a third more work in the last layer for a fraction of the memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional.fusing import compiled_unless_intercepted, fused


@fused
def softmax_cross_entropy(logits: Array, labels: Array) -> Array:
    """``-log softmax(logits)[label]``, in at least float32.

    Args:
      logits: ``(..., classes)``.
      labels: integers, of shape ``(...)``; one that is no class gives nan.

    Returns:
      The losses, ``(...)``.

    Example:
      >>> softmax_cross_entropy(jnp.zeros((1, 2)), jnp.array([1]))
      Array([0.6931472], dtype=float32)
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return _loss(logits, labels, jax.nn.logsumexp(logits, axis=-1))


def _loss(logits: Array, labels: Array, normalizer: Array) -> Array:
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    chosen = jnp.take_along_axis(logits, jnp.where(is_class, labels, 0)[..., None], axis=-1)
    return jnp.where(is_class, normalizer - chosen[..., 0], jnp.nan)


def chunked_softmax_cross_entropy(
    hidden: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None = None,
    *,
    chunk_size: int = 1024,
    transposed: bool = False,
    precision: Any = None,
) -> Array:
    """Softmax cross-entropy of ``hidden @ kernel + bias``, whose logits are never held whole.

    The same numbers as ``softmax_cross_entropy`` of these logits, and the same gradients; those of
    kernel and bias are summed up in at least float32.

    Args:
      hidden: ``(..., features)``, what goes into the last layer.
      kernel: ``(features, classes)``, the kernel of the last layer.
      labels: integers, of shape ``(...)``; one that is no class gives nan, to be left out with
        ``jnp.where``.
      bias: ``(classes,)``, or None.
      chunk_size: how many tokens at a time, each with a float32 for every class.
      transposed: ``kernel`` is ``(classes, features)``, as an embedding table is.
      precision: as for ``jax.lax.dot_general``.

    Returns:
      The losses, ``(...)``.

    Raises:
      FeatureError: shapes or dtypes that do not fit.
      LayerArgumentError: ``chunk_size`` is not positive.

    Example:
      >>> hidden, table = jnp.ones((2, 5, 3)), jnp.eye(4, 3)
      >>> labels = jnp.zeros((2, 5), int)
      >>> loss = chunked_softmax_cross_entropy(hidden, table, labels, chunk_size=4, transposed=True)
      >>> bool(jnp.allclose(loss, softmax_cross_entropy(hidden @ table.T, labels)))
      True
    """
    _check(hidden, kernel, labels, bias, chunk_size, transposed)
    return _chunked(
        hidden,
        kernel,
        labels,
        bias,
        chunk_size=chunk_size,
        transposed=transposed,
        precision=precision,
    )


@compiled_unless_intercepted("dot_general")
def _chunked(
    hidden: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None,
    *,
    chunk_size: int,
    transposed: bool,
    precision: Any,
) -> Array:
    tokens = labels.size
    chunk_size = min(chunk_size, max(tokens, 1))
    padding = -tokens % chunk_size
    head = _Head(transposed, precision)
    features = hidden.shape[-1]
    rows = jnp.pad(jnp.reshape(hidden, (tokens, features)), ((0, padding), (0, 0)))
    rows = jnp.reshape(rows, (-1, chunk_size, features))
    targets = jnp.reshape(jnp.pad(jnp.ravel(labels), (0, padding)), (-1, chunk_size))
    losses: Any = _losses(head, rows, kernel, bias, targets)
    return jnp.reshape(jnp.ravel(losses)[:tokens], labels.shape)


class _Head(NamedTuple):
    """How a last layer computes, kernel and bias apart."""

    transposed: bool
    precision: Any

    def logits(self, rows: Array, kernel: Array, bias: Array | None) -> Array:
        features = 1 if self.transposed else 0
        logits = self._contract(rows, kernel, (1, features))
        return logits if bias is None else logits + bias.astype(logits.dtype)[None]

    def of_rows(self, grads: Array, kernel: Array) -> Array:
        """The gradient of the rows."""
        return self._contract(grads, kernel, (1, 0 if self.transposed else 1))

    def of_kernel(self, grads: Array, rows: Array) -> Array:
        """The gradient of the kernel."""
        pair = (grads, rows) if self.transposed else (rows, grads)
        return self._contract(*pair, (0, 0))

    def _contract(self, a: Array, b: Array, axes: tuple[int, int]) -> Array:
        dtype = jnp.result_type(a, b)
        numbers = (((axes[0],), (axes[1],)), ((), ()))
        return jax.lax.dot_general(
            a.astype(dtype),
            b.astype(dtype),
            numbers,
            precision=self.precision,
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(head: _Head, rows: Array, kernel: Array, bias: Any, targets: Array) -> Array:
    return _losses_forward(head, rows, kernel, bias, targets)[0]


def _losses_forward(head: _Head, rows: Array, kernel: Array, bias: Any, targets: Array) -> Any:
    def chunk(_: None, x: tuple[Array, Array]) -> Any:
        logits = head.logits(x[0], kernel, bias)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        return None, (_loss(logits, x[1], normalizer), normalizer)

    _, (losses, normalizers) = lax.scan(chunk, None, (rows, targets))
    return losses, (rows, kernel, bias, targets, normalizers)


def _losses_backward(head: _Head, residuals: Any, grads: Array) -> Any:
    rows, kernel, bias, targets, normalizers = residuals
    dtype = normalizers.dtype

    def chunk(sums: tuple[Array, Any], x: tuple[Array, ...]) -> Any:
        rows, target, normalizer, grad = x
        logits = head.logits(rows, kernel, bias)
        softmax = jnp.exp(logits - normalizer[:, None])
        is_target = target[:, None] == lax.broadcasted_iota(target.dtype, logits.shape, 1)
        of_logits = (softmax - is_target.astype(dtype)) * grad[:, None]
        of_kernel, of_bias = sums
        if of_bias is not None:
            of_bias = of_bias + jnp.sum(of_logits, axis=0)
        of_logits = of_logits.astype(jnp.result_type(rows, kernel))
        of_kernel = of_kernel + head.of_kernel(of_logits, rows)
        return (of_kernel, of_bias), head.of_rows(of_logits, kernel).astype(rows.dtype)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), (kernel, bias))
    sums, of_rows = lax.scan(chunk, zeros, (rows, targets, normalizers, grads))
    of_kernel, of_bias = jax.tree.map(lambda g, x: g.astype(x.dtype), sums, (kernel, bias))
    return of_rows, of_kernel, of_bias, None


_losses.defvjp(_losses_forward, _losses_backward)


def _check(hidden: Any, kernel: Any, labels: Any, bias: Any, chunk: int, transposed: bool) -> None:
    name = "chunked_softmax_cross_entropy"
    if chunk < 1:
        raise LayerArgumentError(
            f"{name} takes chunk_size tokens at a time, but got chunk_size={chunk}.\n"
            "Fix: choose 1 or more; 1024 is a good start."
        )
    size, kernel_shape = np.shape(hidden)[-1:], np.shape(kernel)
    features = kernel_shape[-1:] if transposed else kernel_shape[:1]
    classes = kernel_shape[:1] if transposed else kernel_shape[-1:]
    if not size or len(kernel_shape) != 2 or features != size:
        axes = "(classes, features)" if transposed else "(features, classes)"
        raise FeatureError(
            f"{name} expected a kernel {axes} with the features of hidden, but got "
            f"{kernel_shape} for hidden {np.shape(hidden)}.\n"
            f"Fix: pass transposed={not transposed} if the kernel has its axes the other way round."
        )
    integers = jnp.issubdtype(jnp.result_type(labels), jnp.integer)
    if not integers or np.shape(labels) != np.shape(hidden)[:-1]:
        raise FeatureError(
            f"{name} expected labels that are integers of shape {np.shape(hidden)[:-1]}, but got "
            f"{jnp.result_type(labels)} of shape {np.shape(labels)}.\n"
            "Fix: give one class number a token, not one-hot rows."
        )
    if bias is not None and np.shape(bias) != classes:
        raise FeatureError(
            f"{name} expected a bias of shape {classes}, but got {np.shape(bias)}.\n"
            "Fix: give one entry a class."
        )
