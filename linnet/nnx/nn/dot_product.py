"""Attention between given queries, keys and values."""

from __future__ import annotations

from typing import Any

import jax

from linnet.functional import attention
from linnet.functional.attention import Implementation
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import PromoteDtype, value_of
from linnet.nnx.variablelib.variable import Intermediate

Array = jax.Array


def dot_product_attention_weights(
    query: Array,
    key: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = default_promote,
    is_causal: bool = False,
) -> Array:
    """How much each query looks at each key; arguments as for ``dot_product_attention``.

    Returns:
      ``(..., heads, queries, keys)``; the last axis sums to 1 where nothing is dropped.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet.nnx.nn.attention import dot_product_attention_weights
      >>> x = jnp.ones((1, 2, 1, 4))
      >>> dot_product_attention_weights(x, x)[0, 0]
      Array([[0.5, 0.5],
             [0.5, 0.5]], dtype=float32)
    """
    query, key = promote_dtype((query, key), dtype=dtype)
    bias, mask = value_of(bias), value_of(mask)
    rate = 0.0 if deterministic else dropout_rate
    attention.check_operands("dot_product_attention", query, key, key, bias, mask)
    attention.check_dropout("dot_product_attention", rate, dropout_rng)
    weights = attention.attention_weights(
        query, key, bias, mask, is_causal=is_causal, precision=precision
    )
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    if rate > 0.0:
        weights = attention.drop_weights(
            weights, dropout_rng, rate=rate, broadcast=broadcast_dropout
        )
    return weights


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = default_promote,
    is_causal: bool = False,
    implementation: Implementation = None,
) -> Array:
    """Averages of values, weighted by how well their keys match the queries.

    Args:
      query: ``(..., queries, heads, depth)``.
      key: ``(..., keys, key heads, depth)``; ``heads`` is a multiple of ``key heads``.
      value: ``(..., keys, key heads, value depth)``.
      bias: added to the scores; broadcasts to ``(..., heads, queries, keys)``.
      mask: True (or not 0) where a query may look; broadcasts likewise.
      broadcast_dropout: draw once for all heads and examples.
      dropout_rng: a random key, needed where weights are dropped.
      dropout_rate: the probability that a weight is set to zero.
      deterministic: drop nothing.
      dtype: compute in this dtype; by default that of the promoted operands.
      precision: as for ``jnp.einsum``.
      module: sow the weights, before any are dropped, as ``attention_weights`` on this module.
      promote_dtype: how operands are brought to one dtype.
      is_causal: query ``i`` may look at keys ``0`` to ``i`` only.
      implementation: ``"xla"`` for the plain maths, ``"cudnn"`` for the fused GPU kernel, None for
        the fused kernel where it can run. It has first derivatives in reverse mode only, and no
        weights: with ``module`` the plain maths is taken.

    Returns:
      ``(..., queries, heads, value depth)``.

    Raises:
      FeatureError: shapes that do not fit together.
      RngsError: weights are to be dropped and there is no key.
      ValueError: ``"cudnn"`` was asked for and cannot do this.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> nnx.dot_product_attention(x, x, x, is_causal=True).shape
      (1, 5, 2, 4)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    bias, mask = value_of(bias), value_of(mask)
    rate = 0.0 if deterministic else dropout_rate
    if module is None:
        return attention.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            dropout_rng,
            is_causal=is_causal,
            dropout_rate=rate,
            broadcast_dropout=broadcast_dropout,
            precision=precision,
            implementation=implementation,
        )
    attention.check_operands("dot_product_attention", query, key, value)
    weights = dot_product_attention_weights(
        query,
        key,
        bias,
        mask,
        broadcast_dropout,
        dropout_rng,
        rate,
        precision=precision,
        module=module,
        is_causal=is_causal,
    )
    return attention.weighted_values(weights, value, precision=precision)
