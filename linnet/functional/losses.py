"""Losses: softmax cross-entropy, whole and in chunks, and loss scaling.

A language model's logits are its largest array: tokens times vocabulary, once forward and once
backward. In chunks they are made for some tokens at a time, used for the loss and its gradients,
and thrown away. The gradients are taken in the forward pass, so that the logits are not made twice;
the backward pass scales them by the cotangents that arrive. Scaling is exact for the rows of
``hidden``, one token each, and for sums over tokens where the cotangents are all equal. Where they
are not, the logits and the sums are computed again.

Loss scaling keeps gradients in float16 from being flushed to zero: the loss is multiplied by a
scale, and the gradients are divided by it. The scale adjusts itself: it grows after a run of finite
gradients and shrinks when one is not finite, in which case the step is left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional.fusing import compiled_unless_intercepted, fused

Reduction = Literal["mean", "sum"] | None

_NO_CLASS = -1
_LOGITS_OF_A_CHUNK = 2**28
SMALLEST = jnp.finfo(jnp.float32).tiny


@fused
@jax.named_scope("cross_entropy")
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
    logits = logits.astype(_at_least_float32(logits))
    return _loss(logits, labels, _normalizer(logits))


def _at_least_float32(*arrays: Any) -> Any:
    """The dtype of losses and sums over arrays."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def _normalizer(logits: Array) -> Array:
    return jax.nn.logsumexp(logits, axis=-1)


def _loss(logits: Array, labels: Array, normalizer: Array) -> Array:
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    chosen = _chosen(logits, jnp.where(is_class, labels, 0))
    return jnp.where(is_class, normalizer - chosen, jnp.nan)


@jax.custom_jvp
def _chosen(logits: Array, labels: Array) -> Array:
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


@_chosen.defjvp
def _chosen_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Uses a comparison, whose transpose fuses; that of a gather is a scatter, which does not."""
    logits, labels = primals
    of_logits = jnp.where(_is_label(labels, logits), tangents[0], 0)
    return _chosen(logits, labels), jnp.sum(of_logits, axis=-1)


def _is_label(labels: Array, logits: Array) -> Array:
    return labels[..., None] == lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)


def chunked_softmax_cross_entropy(
    hidden: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None = None,
    *,
    weights: Array | None = None,
    reduction: Reduction = None,
    chunk_size: int | None = None,
    transposed: bool = False,
    logits_dtype: Any = None,
    precision: Any = None,
) -> Array:
    """Softmax cross-entropy of ``hidden @ kernel + bias``, whose logits are never held whole.

    The same numbers as ``softmax_cross_entropy`` of these logits, and the same gradients; those of
    kernel and bias are summed up in at least float32.

    The logits are made once, for loss and gradients together, where all tokens count alike:
    ``losses.mean()``, ``losses.sum()``, and either of them over the tokens whose labels are
    classes. Tokens that count differently want ``weights`` and a ``reduction``; multiplying the
    losses by weights outside gives the same numbers, but the logits are made again in the backward
    pass. Under ``jax.vmap`` they are made twice without a ``reduction``.

    Args:
      hidden: ``(..., features)``, what goes into the last layer.
      kernel: ``(features, classes)``, the kernel of the last layer.
      labels: integers, of shape ``(...)``; one that is no class gives nan, to be left out with
        ``jnp.where`` or a weight of 0.
      bias: ``(classes,)``, or None.
      weights: what each token counts, of shape ``(...)``, or None for 1. A token of weight 0 is
        left out, whatever its label.
      reduction: ``"sum"`` for the weighted sum, ``"mean"`` for that over the sum of the weights,
        None for each token's loss, times its weight.
      chunk_size: how many tokens at a time; None for about as many as have 2**28 logits.
      transposed: ``kernel`` is ``(classes, features)``, as an embedding table is.
      logits_dtype: the dtype in which the logits of a chunk are stored, None for that of
        ``hidden @ kernel``. Softmax and sums are in at least float32 either way. With bfloat16
        operands ``jnp.float32`` keeps the logits from being rounded to 8 bits, as they are in
        ``hidden @ kernel``, at twice the bytes.
      precision: as for ``jax.lax.dot_general``.

    Returns:
      The losses, ``(...)``, or their sum or mean, in at least float32.

    Raises:
      FeatureError: shapes or dtypes that do not fit.
      LayerArgumentError: ``chunk_size`` is not positive, or ``reduction`` is none of the three.

    Example:
      >>> hidden, table = jnp.ones((2, 5, 3)), jnp.eye(4, 3)
      >>> labels = jnp.zeros((2, 5), int)
      >>> loss = chunked_softmax_cross_entropy(hidden, table, labels, chunk_size=4, transposed=True)
      >>> bool(jnp.allclose(loss, softmax_cross_entropy(hidden @ table.T, labels)))
      True
    """
    _check(hidden, kernel, labels, bias, weights, chunk_size, transposed, reduction)
    return _chunked(
        hidden,
        kernel,
        labels,
        bias,
        weights,
        reduction=reduction,
        chunk_size=chunk_size,
        transposed=transposed,
        logits_dtype=logits_dtype,
        precision=precision,
    )


@compiled_unless_intercepted("dot_general")
def _chunked(
    hidden: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None,
    weights: Array | None,
    *,
    reduction: Reduction,
    chunk_size: int | None,
    transposed: bool,
    logits_dtype: Any,
    precision: Any,
) -> Array:
    classes = kernel.shape[0 if transposed else 1]
    tokens = labels.size
    size = _chunk_size(tokens, classes) if chunk_size is None else min(chunk_size, max(tokens, 1))

    def chunks(x: Array, fill: float) -> Array:
        x = jnp.reshape(x, (tokens, *x.shape[labels.ndim :]))
        padding = [(0, -tokens % size), *[(0, 0)] * (x.ndim - 1)]
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.reshape(x, (-1, size, *x.shape[1:]))

    head = _LogitsOptions(transposed, logits_dtype, precision)
    layer = _LastLayer(chunks(hidden, 0), kernel, bias)
    is_class = (labels >= 0) & (labels < classes)
    targets = jnp.where(is_class, labels, _NO_CLASS).astype(jnp.int32)
    targets = chunks(targets, _NO_CLASS)
    dtype = _at_least_float32(layer.rows, layer.kernel)
    if weights is not None:
        weights = weights.astype(dtype)
    if reduction is None:
        losses: Any = _losses(head, layer, targets)
        losses = jnp.reshape(jnp.ravel(losses)[:tokens], labels.shape)
        return losses if weights is None else _weighted(losses, weights)
    weights = jnp.ones(labels.shape, dtype) if weights is None else weights
    total: Any = _total(head, layer, targets, chunks(weights, 0))
    return total if reduction == "sum" else total / jnp.sum(weights)


def _chunk_size(tokens: int, classes: int) -> int:
    """The number of tokens in a chunk, chosen so that chunks have one size where possible."""
    fewest = max(-(-tokens * classes // _LOGITS_OF_A_CHUNK), 1)
    even = (chunks for chunks in range(fewest, 2 * fewest) if tokens % chunks == 0)
    return max(-(-tokens // next(even, fewest)), 1)


def _weighted(losses: Array, weights: Array) -> Array:
    return jnp.where(weights == 0, 0, losses * weights)


# One chunk after the other.


class _LastLayer(NamedTuple):
    """The chunked inputs of the last layer and its parameters, or the gradients of all three."""

    rows: Any
    kernel: Any
    bias: Any


class _LogitsOptions(NamedTuple):
    """How the last layer computes its logits."""

    transposed: bool
    logits_dtype: Any
    precision: Any

    def logits(self, rows: Array, kernel: Array, bias: Array | None) -> Array:
        axes = (1, 1 if self.transposed else 0)
        logits = self._contract(rows, kernel, axes, self.logits_dtype)
        logits = logits.astype(_at_least_float32(logits))
        return logits if bias is None else logits + bias.astype(logits.dtype)[None]

    def of_rows(self, grads: Array, kernel: Array) -> Array:
        """The gradient of the rows."""
        return self._contract(grads, kernel, (1, 0 if self.transposed else 1), None)

    def of_kernel(self, grads: Array, rows: Array) -> Array:
        """The gradient of the kernel, in at least float32."""
        pair = (grads, rows) if self.transposed else (rows, grads)
        return self._contract(*pair, (0, 0), _at_least_float32(*pair))

    def _contract(self, a: Array, b: Array, axes: tuple[int, int], into: Any) -> Array:
        dtype = jnp.result_type(a, b)
        return jax.lax.dot_general(
            a.astype(dtype),
            b.astype(dtype),
            (((axes[0],), (axes[1],)), ((), ())),
            precision=self.precision,
            preferred_element_type=dtype if into is None else into,
        )


@jax.named_scope("cross_entropy")
def _losses_alone(head: _LogitsOptions, layer: _LastLayer, targets: Array) -> Array:
    def chunk(_: None, x: tuple[Array, Array]) -> Any:
        logits = head.logits(x[0], layer.kernel, layer.bias)
        return None, _loss(logits, x[1], _normalizer(logits))

    return lax.scan(chunk, None, (layer.rows, targets))[1]


@jax.named_scope("cross_entropy")
def _losses_and_gradients(
    head: _LogitsOptions, layer: _LastLayer, targets: Array, weights: Array, wanted: _LastLayer
) -> tuple[Array, _LastLayer]:
    """The losses, and those gradients of their weighted sum that are wanted."""
    _, kernel, bias = layer
    dtype = _at_least_float32(layer.rows, layer.kernel)
    narrow = jnp.result_type(layer.rows, kernel)

    def chunk(sums: Any, x: tuple[Array, ...]) -> Any:
        rows, target, weight = x
        logits = head.logits(rows, kernel, bias)
        normalizer = _normalizer(logits)
        softmax = jnp.exp(logits - normalizer[:, None])
        of_logits = (softmax - _is_label(target, logits).astype(softmax.dtype)) * weight[:, None]
        of_kernel, of_bias = sums
        if wanted.bias:
            of_bias = of_bias + jnp.sum(of_logits, axis=0)
        of_logits = of_logits.astype(narrow)
        if wanted.kernel:
            of_kernel = of_kernel + head.of_kernel(of_logits, rows)
        of_rows = head.of_rows(of_logits, kernel).astype(rows.dtype) if wanted.rows else None
        return (of_kernel, of_bias), (_loss(logits, target, normalizer), of_rows)

    zeros = (
        jnp.zeros(kernel.shape, dtype) if wanted.kernel else None,
        jnp.zeros(bias.shape, dtype) if wanted.bias else None,
    )
    weights = jnp.where(targets == _NO_CLASS, 0, weights)
    sums, (losses, of_rows) = lax.scan(chunk, zeros, (layer.rows, targets, weights))
    return losses, _LastLayer(of_rows, *sums)


def _given(primals: Any) -> tuple[Any, Any]:
    """The values of a forward rule's arguments, and whether each is differentiated."""
    values = jax.tree.map(lambda primal: primal.value, primals)
    return values, jax.tree.map(lambda primal: primal.perturbed, primals)


def _scaled(grad: Array | None, by: Array, like: Array) -> Any:
    """Scales a gradient and converts it to the dtype of its primal."""
    return None if grad is None else (grad.astype(by.dtype) * by).astype(like.dtype)


# The output is one number: the backward pass multiplies the gradients of the forward pass by its
# cotangent.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(head: _LogitsOptions, layer: _LastLayer, targets: Array, weights: Array) -> Array:
    return jnp.sum(_weighted(_losses_alone(head, layer, targets), weights))


def _total_forward(head: _LogitsOptions, *primals: Any) -> Any:
    (layer, targets, weights), (wanted, _, weights_too) = _given(primals)
    losses, grads = _losses_and_gradients(head, layer, targets, weights, wanted)
    of_weights = jnp.where(targets == _NO_CLASS, 0, losses) if weights_too else None
    dtypes = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), layer)
    return jnp.sum(_weighted(losses, weights)), (grads, of_weights, dtypes)


def _total_backward(head: _LogitsOptions, residuals: Any, of_total: Array) -> Any:
    grads, of_weights, dtypes = residuals
    of_layer = _LastLayer(
        *(_scaled(grad, of_total, x) for grad, x in zip(grads, dtypes, strict=True))
    )
    return of_layer, None, None if of_weights is None else of_weights * of_total


_total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)


# The losses of the tokens have a cotangent each.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(head: _LogitsOptions, layer: _LastLayer, targets: Array) -> Array:
    return _losses_alone(head, layer, targets)


def _losses_forward(head: _LogitsOptions, *primals: Any) -> Any:
    (layer, targets), (wanted, _) = _given(primals)
    ones = jnp.ones(targets.shape, _at_least_float32(layer.rows, layer.kernel))
    losses, grads = _losses_and_gradients(head, layer, targets, ones, wanted)
    return losses, (layer, targets, grads)


def _losses_backward(head: _LogitsOptions, residuals: Any, of_losses: Array) -> Any:
    layer, targets, (of_rows, *sums) = residuals
    of_rows = _scaled(of_rows, of_losses[..., None], layer.rows)
    return _LastLayer(of_rows, *_sums(head, layer, targets, of_losses, tuple(sums))), None


_losses.defvjp(_losses_forward, _losses_backward, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(
    head: _LogitsOptions, layer: _LastLayer, targets: Array, weights: Array, ones: tuple
) -> tuple:
    """The gradients of kernel and bias, given those for weights of one."""
    if not jax.tree.leaves(ones):
        return ones
    is_class = targets != _NO_CLASS
    least = jnp.min(weights, where=is_class, initial=jnp.inf)
    most = jnp.max(weights, where=is_class, initial=-jnp.inf)
    return lax.cond(
        least == most,
        lambda: tuple(_scaled(grad, most, x) for grad, x in zip(ones, layer[1:], strict=True)),
        lambda: _sums_made_again(head, layer, targets, weights, ones),
    )


def _sums_made_again(
    head: _LogitsOptions, layer: _LastLayer, targets: Array, weights: Array, ones: tuple
) -> tuple:
    wanted = _LastLayer(False, *(grad is not None for grad in ones))
    _, grads = _losses_and_gradients(head, layer, targets, weights, wanted)
    one = jnp.ones((), weights.dtype)
    return tuple(_scaled(grad, one, x) for grad, x in zip(grads[1:], layer[1:], strict=True))


@_sums.defjvp
def _sums_jvp(head: _LogitsOptions, primals: tuple, tangents: tuple) -> tuple:
    """Computes the sums again: equal weights may have different tangents."""
    layer, targets, weights, ones = primals

    def sums(layer: _LastLayer, weights: Array) -> tuple:
        return _sums_made_again(head, layer, targets, weights, ones)

    return jax.jvp(sums, (layer, weights), (tangents[0], tangents[2]))


def _check(
    hidden: Any,
    kernel: Any,
    labels: Any,
    bias: Any,
    weights: Any,
    chunk: int | None,
    transposed: bool,
    reduction: Any,
) -> None:
    name = "chunked_softmax_cross_entropy"
    if chunk is not None and chunk < 1:
        raise LayerArgumentError(
            f"{name} takes chunk_size tokens at a time, but got chunk_size={chunk}.\n"
            "Fix: choose 1 or more, or leave it None."
        )
    if reduction not in (None, "mean", "sum"):
        raise LayerArgumentError(
            f"{name} has the reductions 'mean' and 'sum', but got {reduction!r}.\n"
            "Fix: choose one of them, or None for the loss of each token."
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
    if weights is not None and np.shape(weights) != np.shape(labels):
        raise FeatureError(
            f"{name} expected weights of the labels' shape {np.shape(labels)}, but got "
            f"{np.shape(weights)}.\nFix: give one weight a token; jnp.broadcast_to spreads them."
        )
    if bias is not None and np.shape(bias) != classes:
        raise FeatureError(
            f"{name} expected a bias of shape {classes}, but got {np.shape(bias)}.\n"
            "Fix: give one entry a class."
        )


# Loss scaling.


def scaled_loss(fun: Callable[..., Any], scale: Any, has_aux: bool = False) -> Callable[..., Any]:
    """Multiplies a loss function, and so its gradients, by a scale.

    Args:
      fun: returns the loss, or ``(loss, aux)``.
      scale: the scale.
      has_aux: whether it returns a pair.

    Returns:
      A function of the same arguments that returns ``(scaled loss, what fun returned)``.

    Example:
      >>> scaled_loss(lambda x: x.sum(), 8.0)(jnp.array([1.0, 2.0]))
      (Array(24., dtype=float32), Array(3., dtype=float32))
    """

    def scaled(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
        out = fun(*args, **kwargs)
        loss = out[0] if has_aux else out
        return loss * jnp.asarray(scale, _at_least_float32(loss)), out

    return scaled


def unscaled(grads: Any, scale: Any, axis_name: Any = None) -> Any:
    """Divides the gradients of a scaled loss by the scale, in at least float32.

    Args:
      grads: a pytree of arrays.
      scale: the scale.
      axis_name: a mapped axis to average over.

    Returns:
      The pytree.

    Example:
      >>> unscaled(jnp.array([8.0, 16.0], jnp.float16), 8.0)
      Array([1., 2.], dtype=float32)
    """

    def divide(grad: Array) -> Array:
        dtype = _at_least_float32(grad)
        return grad.astype(dtype) / jnp.asarray(scale, dtype)

    grads = jax.tree.map(divide, grads)
    return grads if axis_name is None else lax.pmean(grads, axis_name)


def all_finite(tree: Any) -> Array:
    """Whether no number in a pytree of arrays is infinite or nan.

    Example:
      >>> all_finite([jnp.ones(2), jnp.array(jnp.inf)])
      Array(False, dtype=bool)
    """
    checks = (jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    return jax.tree.reduce(operator.and_, list(checks), jnp.array(True))


class ScaleGrowth(Protocol):
    """How a scale adjusts itself.

    It is multiplied by ``growth_factor`` in a finite step that follows ``growth_interval`` others,
    and by ``backoff_factor``, down to ``minimum_scale``, in a step that is not finite.
    """

    @property
    def growth_factor(self) -> float: ...
    @property
    def backoff_factor(self) -> float: ...
    @property
    def growth_interval(self) -> int: ...
    @property
    def minimum_scale(self) -> float | None: ...


def next_scale(scale: Any, steps: Any, finite: Array, growth: ScaleGrowth) -> tuple[Array, Array]:
    """The scale of the next step, and the number of finite steps since it last changed."""
    scale, steps = jnp.asarray(scale, jnp.float32), jnp.asarray(steps, jnp.int32)
    grows = steps == growth.growth_interval
    larger = jnp.minimum(scale * growth.growth_factor, jnp.finfo(jnp.float32).max)
    smaller = scale * growth.backoff_factor
    if growth.minimum_scale is not None:
        smaller = jnp.maximum(smaller, growth.minimum_scale)
    new = jnp.where(finite, jnp.where(grows, larger, scale), smaller)
    return new, jnp.where(finite & ~grows, steps + 1, 0)


def where_finite(finite: Array, new: Any, old: Any) -> Any:
    """Selects the new pytree where a step is finite, the old one where it is not.

    Example:
      >>> where_finite(jnp.array(False), jnp.ones(2), jnp.zeros(2))
      Array([0., 0.], dtype=float32)
    """
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), new, old)
