"""Attention, ``softmax(query key^T / sqrt(depth)) value``, with its masks and its key/value cache.

Which implementation runs is decided here and nowhere else. The plain one is written out below; the
other is cuDNN's fused kernel, which never holds the weights and is several times as fast. It is
used unless the caller asks for the plain one, JAX's contractions are replaced, or ``why_not_fused``
gives a reason against it.

Axes are ``(..., length, heads, depth)``. Key and value may have fewer heads than the query: each of
their heads then serves a group of the query's. A mask is True (or not 0) where a query may look at
a key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from linnet.errors import FeatureError, RngsError
from linnet.functional import fusing
from linnet.functional.dropout import dropout
from linnet.functional.fusing import compiled_unless_intercepted, fused
from linnet.functional.shapes import broadcast_together, broadcasts_to, with_rank

Implementation = Literal["xla", "cudnn"] | None
Capability = tuple[int, int] | None

_HALF = (jnp.bfloat16, jnp.float16)
_IN_PLAIN_MATHS = [fusing.JAX_FUNCTIONS["einsum"], fusing.JAX_FUNCTIONS["dot_general"]]
_SHORTEST = 64  # below, the plain maths is as fast and the weights are small


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    dropout_key: Any = None,
    *,
    is_causal: bool = False,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    precision: Any = None,
    implementation: Implementation = None,
    key_lengths: Any = None,
) -> Array:
    """Averages the values, weighted by how well their keys match each query.

    Args:
      query: ``(..., queries, heads, depth)``.
      key: ``(..., keys, key heads, depth)``; ``heads`` is a multiple of ``key heads``.
      value: ``(..., keys, key heads, value depth)``.
      bias: added to the scores; broadcasts to ``(..., heads, queries, keys)``.
      mask: True (or not 0) where a query may look; broadcasts likewise. A query that may look
        nowhere gets the average of all values.
      dropout_key: a random key, needed where weights are dropped.
      is_causal: query ``i`` may look at keys ``0`` to ``i`` only.
      dropout_rate: the probability that a weight is set to zero.
      broadcast_dropout: draw once for all heads and examples.
      precision: as for ``jnp.einsum``.
      implementation: ``"xla"`` for the plain maths, ``"cudnn"`` for the fused GPU kernel, None for
        the fused kernel where it can run and the plain maths elsewhere. The fused kernel has first
        derivatives in reverse mode only: ask for ``"xla"`` where others are needed.
      key_lengths: how many keys a query may look at, from the first on, at least 1: a number, or
        one for each entry of the batch axes. Instead of a mask it saves reading the others.

    Returns:
      ``(..., queries, heads, value depth)``.

    Raises:
      FeatureError: shapes that do not fit together.
      RngsError: weights are to be dropped and there is no key.
      ValueError: ``"cudnn"`` was asked for and cannot do this.

    Example:
      >>> query, key = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 3, 1, 4))
      >>> value = jnp.arange(3.0).reshape(1, 3, 1, 1)
      >>> dot_product_attention(query, key, value, is_causal=True).ravel()
      Array([0. , 0.5], dtype=float32)
    """
    name = "dot_product_attention"
    check_operands(name, query, key, value, bias, mask)
    check_dropout(name, dropout_rate, dropout_key)
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            f"{name} has the implementations 'xla' and 'cudnn', but got {implementation!r}.\n"
            "Fix: leave it None, which takes the fastest that can run."
        )
    if implementation is None and fusing.are_intercepted(_IN_PLAIN_MATHS):
        implementation = "xla"  # what replaces a contraction has to see those of attention too
    if implementation != "xla":
        drops = dropout_rate > 0.0
        by_length = key_lengths is not None and bias is None and mask is None
        reason = why_not_fused(
            query, key, value, drops=drops, capability=gpu_capability(), by_length=by_length
        )
        if reason is None:
            if not by_length:
                mask, key_lengths = within_lengths(mask, key_lengths, key), None
            options = {"is_causal": is_causal, "precision": precision}
            return _fused_where_it_runs(query, key, value, bias, mask, key_lengths, **options)
        if implementation == "cudnn":
            raise ValueError(
                f"{name}: cuDNN's kernel was asked for, but {reason}.\n"
                "Fix: leave implementation None, which falls back to the plain maths."
            )
    mask = within_lengths(mask, key_lengths, key)
    weights = attention_weights(query, key, bias, mask, is_causal=is_causal, precision=precision)
    if dropout_rate > 0.0:
        weights = drop_weights(weights, dropout_key, rate=dropout_rate, broadcast=broadcast_dropout)
    return weighted_values(weights, value, precision=precision)


# The plain maths.


def checked_weights(
    query: Array,
    key: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    dropout_key: Any = None,
    *,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    sow: Callable[[Array], Any] | None = None,
    **options: Any,
) -> Array:
    """``attention_weights`` with these options, some dropped; refuses operands that do not fit.

    ``sow`` gets the weights before any are dropped.
    """
    check_operands("dot_product_attention", query, key, key, bias, mask)
    check_dropout("dot_product_attention", dropout_rate, dropout_key)
    weights = attention_weights(query, key, bias, mask, **options)
    if sow is not None:
        sow(weights)
    if dropout_rate > 0.0:
        weights = drop_weights(weights, dropout_key, rate=dropout_rate, broadcast=broadcast_dropout)
    return weights


def attention_weights(
    query: Array,
    key: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    precision: Any = None,
    einsum: Callable[..., Array] = fusing.einsum,
) -> Array:
    """The weight of each key for each query, by a softmax in at least float32.

    Args:
      query: ``(..., queries, heads, depth)``.
      key: ``(..., keys, key heads, depth)``.
      bias: added to the scores.
      mask: True (or not 0) where a query may look.
      is_causal: query ``i`` may look at keys ``0`` to ``i`` only.
      precision: as for ``jnp.einsum``.
      einsum: the contraction, as ``jnp.einsum``.

    Returns:
      ``(..., heads, queries, keys)``; the last axis sums to 1.

    Example:
      >>> attention_weights(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)), is_causal=True)
      Array([[[1. , 0. ],
              [0.5, 0.5]]], dtype=float32)
    """
    *batch, queries, heads, depth = query.shape
    keys, key_heads = key.shape[-3:-1]
    dtype = query.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    options = {"preferred_element_type": wide} if wide != dtype and _is_jnp(einsum) else {}
    if heads == key_heads:
        equation = "...qhd,...khd->...hqk"
    else:
        equation = "...qhgd,...khd->...hgqk"
        query = jnp.reshape(query, (*batch, queries, key_heads, heads // key_heads, depth))
    scores = einsum(equation, query, key, precision=precision, **options)
    return _softmax(
        scores,
        bias,
        mask,
        shape=(*batch, heads, queries, keys),
        factor=depth**-0.5,
        is_causal=is_causal,
        dtype=dtype,
    )


def _is_jnp(einsum: Callable[..., Array]) -> bool:
    """Whether a function takes the options of ``jnp.einsum``."""
    return einsum is fusing.einsum or einsum is jnp.einsum


@fused
def _softmax(
    scores: Array,
    bias: Array | None,
    mask: Array | None,
    *,
    shape: tuple[int, ...],
    factor: float,
    is_causal: bool,
    dtype: Any,
) -> Array:
    """Attention weights from the products of queries and keys."""
    wide = jnp.promote_types(dtype, jnp.float32)
    scores = jnp.reshape(scores.astype(wide), shape) * factor
    if bias is not None:
        scores = scores + with_rank(bias, scores.ndim).astype(wide)
    allowed = _allowed(mask, is_causal, *shape[-2:])
    if allowed is not None:
        lowest = jnp.finfo(wide).min
        scores = jnp.where(with_rank(allowed, scores.ndim), scores, lowest)
    return jax.nn.softmax(scores).astype(dtype)


def weighted_values(
    weights: Array,
    value: Array,
    *,
    precision: Any = None,
    einsum: Callable[..., Array] = fusing.einsum,
) -> Array:
    """Averages the values by given weights.

    Args:
      weights: ``(..., heads, queries, keys)``.
      value: ``(..., keys, key heads, depth)``.
      precision: as for ``jnp.einsum``.
      einsum: the contraction, as ``jnp.einsum``.

    Returns:
      ``(..., queries, heads, depth)``.

    Example:
      >>> weighted_values(jnp.full((1, 1, 2), 0.5), jnp.arange(2.0).reshape(2, 1, 1))
      Array([[[0.5]]], dtype=float32)
    """
    *batch, heads, queries, keys = weights.shape
    key_heads, depth = value.shape[-2:]
    if heads == key_heads:
        return einsum("...hqk,...khd->...qhd", weights, value, precision=precision)
    weights = jnp.reshape(weights, (*batch, key_heads, heads // key_heads, queries, keys))
    out = einsum("...hgqk,...khd->...qhgd", weights, value, precision=precision)
    return jnp.reshape(out, (*batch, queries, heads, depth))


@fused
def drop_weights(weights: Array, key: Any, *, rate: float, broadcast: bool = True) -> Array:
    """Applies dropout to attention weights.

    Args:
      weights: ``(..., heads, queries, keys)``.
      key: a random key.
      rate: the probability that a weight is set to zero.
      broadcast: draw once for all heads and examples.

    Returns:
      The weights, some of them zero and the others larger.

    Example:
      >>> dropped = drop_weights(jnp.ones((1, 2, 8, 8)), jax.random.key(0), rate=0.5)
      >>> sorted(set(dropped.ravel().tolist()))
      [0.0, 2.0]
    """
    dims = tuple(range(weights.ndim - 2)) if broadcast else ()
    return dropout(weights, key, rate=rate, broadcast_dims=dims)


def _allowed(mask: Any, is_causal: bool, queries: int, keys: int) -> Array | None:
    """Where a query may look, or None for everywhere."""
    if mask is not None:
        mask = mask.astype(bool)
    if not is_causal:
        return mask
    row, column = (lax.broadcasted_iota(jnp.int32, (queries, keys), axis) for axis in (0, 1))
    causal = row >= column
    return causal if mask is None else mask & with_rank(causal, mask.ndim)


def within_lengths(mask: Any, lengths: Any, key: Array) -> Any:
    """A mask that also leaves out the keys from ``lengths`` on, if that is not None.

    Example:
      >>> within_lengths(None, 2, jnp.ones((3, 1, 4)))
      Array([[[ True,  True, False]]], dtype=bool)
    """
    if lengths is None:
        return mask
    ends = jnp.broadcast_to(jnp.asarray(lengths), key.shape[:-3])[..., None, None, None]
    numbers = lax.broadcasted_iota(
        ends.dtype, (1,) * (key.ndim - 1) + key.shape[-3:-2], key.ndim - 1
    )
    there = numbers < ends
    return there if mask is None else with_rank(mask.astype(bool), there.ndim) & there


# The fused kernel.


@functools.cache
def gpu_capability() -> Capability:
    """The compute capability of the CUDA GPU that programs run on by default, or None."""
    if jax.default_backend() != "gpu":
        return None
    version = str(getattr(jax.devices()[0], "compute_capability", ""))
    major, _, minor = version.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def why_not_fused(
    query: Array,
    key: Array,
    value: Array,
    *,
    drops: bool,
    capability: Capability,
    by_length: bool = False,
) -> str | None:
    """The reason why the fused kernel cannot run, as the end of a sentence, or None.

    Example:
      >>> x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
      >>> why_not_fused(x, x, x, drops=False, capability=(9, 0))
      >>> why_not_fused(x, x, x, drops=True, capability=(9, 0))
      'it cannot drop weights'
    """
    lengths = queries, keys = query.shape[-3], key.shape[-3]
    depth = query.shape[-1]
    dtypes = {x.dtype for x in (query, key, value)}
    if capability is None or capability < (8, 0):
        return "there is no CUDA GPU of compute capability 8.0 or later"
    deepest = 256 if capability >= (9, 0) else 128
    if len(dtypes) > 1 or query.dtype not in _HALF:
        return "it computes in bfloat16 or float16, and got " + ", ".join(sorted(map(str, dtypes)))
    if drops:
        return "it cannot drop weights"
    if value.shape[-1] != depth or depth % 8 or depth > deepest:
        return (
            f"it wants one depth for all, a multiple of 8 up to {deepest}, and got {depth} and "
            f"{value.shape[-1]}"
        )
    odd = (queries % 2 or keys % 2) and not by_length
    if odd or max(lengths) < _SHORTEST or 0 in query.shape:
        return (
            f"it wants an even number of queries and of keys, one of them at least {_SHORTEST}, "
            f"and got {queries} and {keys}"
        )
    return None


@compiled_unless_intercepted("einsum", "dot_general", "dot_product_attention")
def _fused_where_it_runs(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    key_lengths: Any,
    *,
    is_causal: bool,
    precision: Any,
) -> Array:
    """The fused kernel on CUDA, the plain maths where this is compiled for another device.

    The platform of a traced function is known only when it is lowered. Both branches are traced,
    and the compiler drops the residuals of the unused one.
    """

    def plain(query: Array, key: Array, value: Array, bias: Any, mask: Any, lengths: Any) -> Array:
        mask = within_lengths(mask, lengths, key)
        weights = attention_weights(
            query, key, bias, mask, is_causal=is_causal, precision=precision
        )
        return weighted_values(weights, value, precision=precision)

    kernel = functools.partial(_cudnn, is_causal=is_causal)
    operands = (query, key, value, bias, mask, key_lengths)
    return lax.platform_dependent(*operands, cuda=kernel, default=plain)


def _cudnn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    key_lengths: Any,
    *,
    is_causal: bool,
) -> Array:
    shape = scores_shape(query, key)

    def four_axes(x: Array) -> Array:
        return jnp.reshape(x, (-1, *x.shape[-3:]))

    def spread(x: Array) -> Array:
        """Broadcasts the query and key axes, as the kernel wants, and makes one batch axis."""
        x = with_rank(x, len(shape))
        batch = shape[:-3] if len(shape) != 4 else x.shape[:1]
        return four_axes(jnp.broadcast_to(x, (*batch, x.shape[-3], *shape[-2:])))

    ends = None
    if key_lengths is not None:
        ends = jnp.broadcast_to(key_lengths, shape[:-3]).astype(jnp.int32).ravel()
    looks = None
    if mask is not None:
        # A row of the mask that is False throughout would get wrong gradients, even nan. The kernel
        # gets it as True throughout, and its output is replaced.
        mask = with_rank(mask.astype(bool), len(shape))
        allowed = _allowed(mask, is_causal, *shape[-2:])
        assert allowed is not None
        looks = jnp.any(allowed, axis=-1, keepdims=True)
        mask = mask | ~looks
    out = jax.nn.dot_product_attention(
        four_axes(query),
        four_axes(key),
        four_axes(value),
        None if bias is None else spread(bias.astype(query.dtype)),
        None if mask is None else spread(mask),
        is_causal=is_causal,
        implementation="cudnn",
        key_value_seq_lengths=ends,
    )
    out = jnp.reshape(out, query.shape)
    if looks is None:
        return out
    average = jnp.mean(value, axis=-3, keepdims=True, dtype=jnp.float32).astype(out.dtype)
    average = jnp.repeat(average, shape[-3] // value.shape[-2], axis=-2)
    return jnp.where(jnp.swapaxes(looks, -2, -3), out, average)


# Masks and the key/value cache.


def make_attention_mask(
    query_input: Array,
    key_input: Array,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Any = jnp.float32,
) -> Array:
    """Makes a mask from one entry for each query and one for each key.

    Args:
      query_input: ``(..., queries)``, for example True where there is no padding.
      key_input: ``(..., keys)``.
      pairwise_fn: combines an entry of each.
      extra_batch_dims: how many axes of size 1 to add in front.
      dtype: of the mask.

    Returns:
      ``(..., 1, queries, keys)``; the 1 is for the heads.

    Raises:
      FeatureError: the axes before the last differ.

    Example:
      >>> make_attention_mask(jnp.array([1, 1, 0]), jnp.array([1, 0]), dtype=bool)[0]
      Array([[ True, False],
             [ True, False],
             [False, False]], dtype=bool)
    """
    queries, keys = np.shape(query_input), np.shape(key_input)
    if not (queries and keys and broadcast_together(queries[:-1], keys[:-1])):
        raise FeatureError(
            "make_attention_mask expected (..., queries) and (..., keys) whose other axes are "
            f"alike, but got {queries} and {keys}.\n"
            "Fix: give both the same batch axes, or size 1 where all are alike."
        )
    mask = pairwise_fn(jnp.expand_dims(query_input, -1), jnp.expand_dims(key_input, -2))
    axes = (*range(extra_batch_dims), extra_batch_dims + mask.ndim - 2)
    return jnp.expand_dims(mask, axes).astype(dtype)


def make_causal_mask(x: Array, extra_batch_dims: int = 0, dtype: Any = jnp.float32) -> Array:
    """Makes a mask by which each position may look at itself and those before it.

    Args:
      x: ``(..., length)``; only its shape counts.
      extra_batch_dims: how many axes of size 1 to add in front.
      dtype: of the mask.

    Returns:
      ``(..., 1, length, length)``; the 1 is for the heads.

    Raises:
      FeatureError: ``x`` has no axis.

    Example:
      >>> make_causal_mask(jnp.ones(2))[0]
      Array([[1., 0.],
             [1., 1.]], dtype=float32)
    """
    if not np.ndim(x):
        raise FeatureError(
            f"make_causal_mask expected an array of shape (..., length), but got {x!r}.\n"
            "Fix: pass the tokens, or jnp.ones((batch, length))."
        )
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: Array | None, dtype: Any = jnp.float32) -> Array | None:
    """Combines masks: a query may look at a key where all masks allow it.

    Args:
      *masks: the masks, of equal rank; None allows everything.
      dtype: of the mask.

    Returns:
      The mask, or None where there is none to combine.

    Raises:
      FeatureError: the ranks differ, or the sizes.

    Example:
      >>> combine_masks(jnp.array([1, 0]), None, jnp.array([1, 1]), dtype=bool)
      Array([ True, False], dtype=bool)
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    ranks = tuple(mask.ndim for mask in given)
    sizes = zip(*(mask.shape for mask in given), strict=False)
    if len(set(ranks)) > 1 or any(len({*axis, 1}) > 2 for axis in sizes):
        shapes = ", ".join(str(mask.shape) for mask in given)
        raise FeatureError(
            f"combine_masks: masks must have same rank and broadcast, but got {shapes}.\n"
            "Fix: give all of them (batch, heads, queries, keys), of size 1 where all are alike."
        )
    return functools.reduce(jnp.logical_and, given).astype(dtype)


@fused
def extend_cache(
    query: Array,
    key: Array,
    value: Array,
    cached_key: Array,
    cached_value: Array,
    index: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """Writes new keys and values into the cache, after those that are there.

    Args:
      query: ``(..., new, heads, depth)``, the queries of the new positions.
      key: ``(..., new, key heads, depth)``.
      value: likewise.
      cached_key: ``(..., length, key heads, depth)``, of which ``index`` are in use.
      cached_value: likewise.
      index: how many positions are in use.

    Returns:
      ``(query, cached_key, cached_value, index, mask)``: the cache with the new positions in it,
      how many are in use now, and the mask by which each new position looks at itself and those
      before it. Where the cache has no room, the query is nan, so that the output is.

    Example:
      >>> new, cache = jnp.ones((1, 1, 1)), jnp.zeros((3, 1, 1))
      >>> _, key, _, index, mask = extend_cache(new, new, new, cache, cache, jnp.array(1))
      >>> key.ravel(), int(index), mask[0]
      (Array([0., 1., 0.], dtype=float32), 2, Array([[ True,  True, False]], dtype=bool))
    """
    new, length = key.shape[-3], cached_key.shape[-3]
    cached_key, cached_value = (
        lax.dynamic_update_slice_in_dim(cached, x.astype(cached.dtype), index, axis=cached.ndim - 3)
        for cached, x in ((cached_key, key), (cached_value, value))
    )
    positions, seen = (lax.broadcasted_iota(index.dtype, (new, length), axis) for axis in (0, 1))
    mask = jnp.reshape(seen <= positions + index, (1,) * (key.ndim - 2) + (new, length))
    query = jnp.where(index + new <= length, query, jnp.nan)
    return query, cached_key, cached_value, index + new, mask


# Shapes.


def scores_shape(query: Any, key: Any) -> tuple[int, ...]:
    """The shape of the scores: ``(..., heads, queries, keys)``."""
    *batch, queries, heads, _ = np.shape(query)
    return (*batch, heads, queries, np.shape(key)[-3])


def check_dropout(name: str, rate: float, key: Any) -> None:
    """Raises RngsError where weights are to be dropped and there is no key."""
    if rate > 0.0 and key is None:
        raise RngsError(
            f"{name} is to drop weights (dropout_rate={rate}), but has no key.\n"
            "Fix: pass a key, or deterministic=True."
        )


def check_operands(
    name: str, query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None
) -> None:
    """Raises FeatureError, naming the caller, for operands whose shapes do not fit together."""
    q, k, v = np.shape(query), np.shape(key), np.shape(value)
    if not (len(q) == len(k) == len(v) and len(q) >= 3):
        problem = "q, k, v must have same rank, at least 3: (..., length, heads, depth)"
    elif not q[:-3] == k[:-3] == v[:-3]:
        problem = "q, k, v batch dims must match"
    elif k[-3] != v[-3]:
        problem = "k, v lengths must match"
    elif k[-2] != v[-2] or k[-2] == 0 or q[-2] % k[-2]:
        problem = (
            "k and v must have the same number of heads, and the number of query heads must be a "
            "multiple of it"
        )
    elif q[-1] != k[-1]:
        problem = "q and k must have the same depth"
    else:
        for what, array in (("bias", bias), ("mask", mask)):
            if array is not None:
                check_broadcast(name, what, array, scores_shape(query, key))
        return
    raise FeatureError(
        f"{name}: {problem}, but got {q}, {k} and {v}.\n"
        "Fix: give all three the axes (..., length, heads, depth)."
    )


def check_broadcast(name: str, what: str, array: Any, shape: Sequence[int]) -> None:
    """Raises FeatureError for a bias or mask that does not broadcast to the scores' shape."""
    problem = why_not_broadcast(what, array, shape)
    if problem is not None:
        raise FeatureError(f"{name} {problem}")


# Why a layer cannot take what it was given: the rest of an error text, or None.


def why_not_broadcast(what: str, array: Any, shape: Sequence[int]) -> str | None:
    """Why a bias or mask cannot be applied to scores of a shape."""
    got = np.shape(array)
    if broadcasts_to(got, shape):
        return None
    return (
        f"expected a {what} that broadcasts to {tuple(shape)}: (batch, heads, queries, "
        f"keys), but got one of shape {got}.\nFix: give it these axes, of size 1 where all are "
        f"alike; {what}[:, None] adds one for the heads."
    )


def why_no_keys(inputs_k: Any, inputs_v: Any) -> str | None:
    """Why there are no keys: ``inputs_v`` was given without ``inputs_k``."""
    if inputs_k is not None or inputs_v is None:
        return None
    return (
        "got inputs_v and no inputs_k: `inputs_k` cannot be None if `inputs_v` is not None.\n"
        "Fix: pass both as inputs_k alone if they are the same; inputs_v follows it."
    )


def why_not_one_batch(q: Any, k: Any, v: Any, *, tells_batch: bool = False) -> str | None:
    """Why inputs ``(..., length, features)`` do not go together."""
    (*batch, _, _), (*keys, length, _), (*values, values_length, _) = map(np.shape, (q, k, v))
    if batch == keys == values and length == values_length:
        return None
    return (
        f"expected inputs of one batch, {f'{tuple(batch)}, ' if tells_batch else ''}with as many "
        f"keys as values, but got inputs_q of shape {np.shape(q)}, inputs_k {np.shape(k)} and "
        f"inputs_v {np.shape(v)}.\n"
        "Fix: give all the same batch axes; jnp.broadcast_to repeats an array along one."
    )


def why_full(index: Any, new: int, room: int) -> str | None:
    """Why a cache of which ``index`` positions are in use cannot take ``new`` more, if known."""
    if isinstance(index, Tracer) or int(index) + new <= room:
        return None
    return (
        f"the cache is full, {int(index)} of its {room} positions are in use, and got {new} more."
    )
