"""Dot-product attention, and the layer of several heads over it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from linnet.errors import (
    CacheError,
    FeatureError,
    LayerArgumentError,
    ModeError,
    RngsError,
    type_text,
)
from linnet.functional import attention
from linnet.functional.attention import (
    Implementation,
    combine_masks as combine_masks,
    make_attention_mask as make_attention_mask,
    make_causal_mask as make_causal_mask,
)
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.shapes import as_tuple, refuse_inputs, with_rank
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.linear import LinearGeneral
from linnet.nnx.nn.normalization import LayerNorm
from linnet.nnx.nn.params import (
    PromoteDtype,
    default_bias_init,
    default_kernel_init,
    draw_key,
    layer_name,
    not_told,
    own_stream,
    store_arguments,
)
from linnet.nnx.nn.stochastic import check_rate
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import Cache, Intermediate

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
    """The weight of each key for each query; arguments as for ``dot_product_attention``.

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
    sow = None
    if module is not None:
        sow = functools.partial(module.sow, Intermediate, "attention_weights")
    return attention.checked_weights(
        query,
        key,
        bias,
        mask,
        dropout_rng,
        dropout_rate=0.0 if deterministic else dropout_rate,
        broadcast_dropout=broadcast_dropout,
        sow=sow,
        is_causal=is_causal,
        precision=precision,
    )


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
    key_lengths: Any = None,
) -> Array:
    """Averages the values, weighted by how well their keys match each query.

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
      dtype: compute in this dtype; by default the promoted dtype of the operands.
      precision: the precision of the contractions.
      module: sow the weights, before any are dropped, as ``attention_weights`` on this module.
      promote_dtype: converts inputs and parameters to one dtype.
      is_causal: query ``i`` may look at keys ``0`` to ``i`` only.
      implementation: ``"xla"`` for the plain maths, ``"cudnn"`` for the fused GPU kernel, None for
        the fused kernel where it can run. It has first derivatives in reverse mode only, and no
        weights: with ``module`` the plain maths is taken.
      key_lengths: how many keys a query may look at, from the first on: a number, or one for each
        entry of the batch axes. Instead of a mask it saves reading the others.

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
            key_lengths=key_lengths,
        )
    attention.check_operands("dot_product_attention", query, key, value)
    mask = attention.within_lengths(mask, key_lengths, key)
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


class MultiHeadAttention(Module):
    """Attention with several heads between projections of its inputs.

    With ``decode=True`` it works position by position: ``init_cache`` makes room for the keys and
    values, and a call adds those of its inputs and attends to all so far.

    Args:
      num_heads: the number of heads of the query.
      in_features: the size of the last axis of ``inputs_q``.
      qkv_features: the size of all heads together; by default ``in_features``.
      out_features: the size of the last axis of the output; by default ``in_features``.
      num_kv_heads: the number of heads of key and value, a divisor of ``num_heads``; by default
        ``num_heads``.
      in_kv_features: the size of the last axis of ``inputs_k`` and ``inputs_v``; by default
        ``in_features``.
      dtype, broadcast_dropout, dropout_rate, precision, implementation: as for
        ``nnx.dot_product_attention``.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      deterministic: drop nothing. ``train()``, ``eval()`` and ``nnx.view`` change it.
      kernel_init, bias_init: the initializers of the parameters.
      out_kernel_init, out_bias_init: those of the output projection; by default the same.
      use_bias: add biases.
      attention_fn: a function like ``nnx.dot_product_attention``.
      decode: use the cache; by default not.
      normalize_qk: layer normalisation of each head's query and key.
      qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: ``promote_dtype`` of the input
        projections, of the output projection and of the normalisation.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: ``dot_general``
        and ``dot_general_cls`` of the input projections and of the output projection.
      rngs: the random streams that parameters are drawn from.
      keep_rngs: keep a stream of keys for dropout.
      kernel_metadata, bias_metadata: metadata of the parameters.
      out_kernel_metadata, out_bias_metadata: that of the output projection; by default the same.
      query_ln_scale_metadata, key_ln_scale_metadata: metadata of the scales that normalise queries
        and keys.

    Raises:
      LayerArgumentError: the numbers of heads do not divide the features or each other.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 8)), is_causal=True).shape
      (1, 5, 8)
    """

    num_heads: int
    in_features: int
    qkv_features: int
    out_features: int
    num_kv_heads: int
    in_kv_features: int
    dtype: Any
    param_dtype: Any
    broadcast_dropout: bool
    dropout_rate: float
    deterministic: bool | None
    precision: Any
    attention_fn: Callable[..., Array]
    decode: bool | None
    implementation: Implementation

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., Array] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: PromoteDtype = default_promote,
        out_promote_dtype: PromoteDtype = default_promote,
        ln_promote_dtype: PromoteDtype = default_promote,
        qkv_dot_general: Callable[..., Array] | None = None,
        out_dot_general: Callable[..., Array] | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: Any,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = {},
        out_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
        out_bias_metadata: Mapping[str, Any] = {},
        query_ln_scale_metadata: Mapping[str, Any] = {},
        key_ln_scale_metadata: Mapping[str, Any] = {},
        implementation: Implementation = None,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        store_arguments(self, locals(), "keep_rngs")
        _check_heads(qkv_features, num_heads, num_kv_heads)
        check_rate("MultiHeadAttention", "dropout_rate", dropout_rate)
        self.head_dim = qkv_features // num_heads

        shared: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": self.param_dtype,
            "precision": precision,
            "use_bias": use_bias,
            "rngs": rngs,
        }
        project = functools.partial(
            LinearGeneral,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=qkv_promote_dtype,
            dot_general=qkv_dot_general,
            dot_general_cls=qkv_dot_general_cls,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            **shared,
        )
        self.query = project(in_features, (num_heads, self.head_dim))
        self.key = project(in_kv_features, (num_kv_heads, self.head_dim))
        self.value = project(in_kv_features, (num_kv_heads, self.head_dim))
        self.query_ln = self.key_ln = None
        if normalize_qk:
            normalize = functools.partial(
                LayerNorm,
                self.head_dim,
                use_bias=False,
                dtype=dtype,
                param_dtype=self.param_dtype,
                promote_dtype=ln_promote_dtype,
                rngs=rngs,
            )
            self.query_ln = normalize(scale_metadata=query_ln_scale_metadata)
            self.key_ln = normalize(scale_metadata=key_ln_scale_metadata)
        self.out = LinearGeneral(
            (num_heads, self.head_dim),
            out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
            **shared,
        )
        keeps = keep_rngs and dropout_rate > 0.0
        self.rngs = own_stream("MultiHeadAttention", rngs, "dropout") if keeps else None
        self.cached_key: Cache[Array] | None = None
        self.cached_value: Cache[Array] | None = None
        self.cache_index: Cache[Array] | None = None

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Array | None = None,
    ) -> Array:
        """Applies the layer.

        Args:
          inputs_q: ``(..., queries, in_features)``.
          inputs_k: ``(..., keys, in_kv_features)``; by default ``inputs_q``.
          inputs_v: ``(..., keys, in_kv_features)``; by default ``inputs_k``.
          mask: True (or not 0) where a query may look; broadcasts to
            ``(..., heads, queries, keys)``.
          deterministic: drop nothing; by default as the attribute says.
          rngs: an ``nnx.Rngs``, a stream or a key to use instead of the layer's own.
          sow_weights: sow the weights as ``attention_weights``, an ``nnx.Intermediate``.
          decode: use the cache; by default as the attribute says.
          is_causal: query ``i`` may look at keys ``0`` to ``i`` only. With the cache that is so
            anyway.
          out_sharding: the sharding of the output.
          qkv_sharding: the sharding of query, key and value.
          input_positions: passed on to an ``attention_fn`` that takes positions, such as
            ``dot_product_attention_with_rope``; with the cache by default those in the cache.

        Returns:
          ``(..., queries, out_features)``.

        Raises:
          FeatureError: an input or the mask does not fit.
          ModeError: neither the call nor the layer says whether to drop weights.
          RngsError: weights are to be dropped and there are no keys.
          CacheError: the cache is missing, full, or of another shape.
        """
        inputs_k, inputs_v = self._checked_inputs(inputs_q, inputs_k, inputs_v)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)

        mask = value_of(mask)
        key_lengths = None
        decodes = self.decode if decode is None else decode
        keys_to_see = self._room(key) if decodes else key
        if mask is not None:
            self._check_mask(mask, query, keys_to_see, bool(decodes))
        if decodes:
            assert self.cache_index is not None
            if input_positions is None and _takes(self.attention_fn, "input_positions"):
                input_positions = self.cache_index.get_value() + jnp.arange(key.shape[-3])
            by_length = mask is None and key.shape[-3] == 1
            query, key, value, mask = self._extend_cache(query, key, value, mask)
            is_causal = False
            if by_length and _takes(self.attention_fn, "key_lengths"):
                mask, key_lengths = None, self.cache_index.get_value()
        drops = self._drops(deterministic)
        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=self._draw(rngs) if drops else None,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=not drops,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            **self._newer_options(is_causal, input_positions, key_lengths),
        )
        return self.out(x, out_sharding=out_sharding)

    def _checked_inputs(self, q: Any, k: Any, v: Any) -> tuple[Array, Array]:
        refuse_inputs(self, attention.why_no_keys(k, v), layer_name)
        k = q if k is None else k
        v = k if v is None else v
        kv_size = self.in_kv_features
        wanted = (
            ("inputs_q", q, self.in_features, "in_features"),
            ("inputs_k", k, kv_size, "in_kv_features"),
            ("inputs_v", v, kv_size, "in_kv_features"),
        )
        for name, x, size, argument in wanted:
            shape = np.shape(x)
            if len(shape) < 2 or shape[-1] != size:
                raise FeatureError(
                    f"{layer_name(self)} expected {name} of shape (..., length, {size}), but got "
                    f"{type_text(x)}.\nFix: build it with another {argument}, or move the feature "
                    "axis last."
                )
        if self.attention_fn is dot_product_attention:
            refuse_inputs(self, attention.why_not_one_batch(q, k, v, tells_batch=True), layer_name)
        return k, v

    def _check_mask(self, mask: Any, query: Array, key: Array, decodes: bool) -> None:
        shape = attention.scores_shape(query, key)
        problem = attention.why_not_broadcast("mask", mask, shape)
        if problem is not None and decodes:
            problem = problem.partition("\n")[0] + (
                f" The keys are the {shape[-1]} positions of the cache.\n"
                "Fix: leave a causal mask out and pass is_causal=True, which the cache knows; "
                "another mask has to be one for all positions of the cache."
            )
        refuse_inputs(self, problem, layer_name)

    def _drops(self, deterministic: bool | None) -> bool:
        """Whether weights are to be dropped."""
        if self.dropout_rate == 0.0:
            return False
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None:
            to_do = f"drop weights: dropout_rate is {self.dropout_rate}, and"
            raise ModeError(not_told(self, to_do, "deterministic"))
        return not deterministic

    def _draw(self, rngs: Any) -> Array:
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise RngsError(
                f"{layer_name(self)} drops weights, but has no keys: it was built with "
                "keep_rngs=False, and 'rngs' must be provided to the call.\n"
                "Fix: pass rngs=nnx.Rngs(0) to the call, or deterministic=True."
            )
        return draw_key(self, rngs, "dropout")

    def _newer_options(self, is_causal: bool, positions: Any, key_lengths: Any) -> dict[str, Any]:
        """Options that an ``attention_fn`` of the user may lack; passed only where needed."""
        options: dict[str, Any] = {} if key_lengths is None else {"key_lengths": key_lengths}
        if positions is not None:
            if _takes(self.attention_fn, "input_positions") is False:
                raise LayerArgumentError(
                    f"{layer_name(self)} got input_positions, which its attention_fn does not "
                    "take.\nFix: leave them out, or build the layer with attention_fn="
                    "functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())."
                )
            options["input_positions"] = positions
        if is_causal or _takes(self.attention_fn, "is_causal") is not False:
            options["is_causal"] = is_causal
        if self.implementation is not None:
            options["implementation"] = self.implementation
        return options

    def _room(self, key: Array) -> Array:
        """Returns the cached keys, and refuses a cache that is missing, full or does not fit."""
        if self.cached_key is None or self.cache_index is None:
            raise CacheError(
                f"{layer_name(self)}: Autoregressive cache not initialized.\nFix: call "
                "init_cache(inputs.shape) first, with the longest length, or pass decode=False."
            )
        cached, index = self.cached_key.get_value(), self.cache_index.get_value()
        *batch, room = cached.shape[:-2]
        *new_batch, new = key.shape[:-2]
        if new_batch != batch or new > room:
            raise CacheError(
                f"{layer_name(self)}: Autoregressive cache shape error, the cache has room for "
                f"{room} positions in a batch of {tuple(batch)}, but got keys of shape "
                f"{key.shape}.\nFix: call init_cache with the shape of the longest input."
            )
        if not isinstance(index, Tracer) and int(index) > room:
            raise CacheError(
                f"{layer_name(self)}: the cache overflowed inside a compiled function: it got "
                f"{int(index)} positions and has room for {room}, so the outputs since then are "
                "nan.\n"
                "Fix: call init_cache with a longer length, and do it again."
            )
        problem = attention.why_full(index, new, room)
        if problem is not None:
            raise CacheError(
                f"{layer_name(self)}: {problem}\n"
                "Fix: call init_cache with a longer length, or to start over."
            )
        return cached

    def _extend_cache(self, query: Array, key: Array, value: Array, mask: Any) -> Any:
        """Adds to the cache, and returns the query, all keys and values so far, and the mask."""
        cache: Any = (self.cached_key, self.cached_value, self.cache_index)
        parts = (part.get_value() for part in cache)
        query, *new, seen = attention.extend_cache(query, key, value, *parts)
        for part, content in zip(cache, new, strict=True):
            part.set_value(content)
        if mask is not None:
            seen = combine_masks(with_rank(mask, seen.ndim), seen, dtype=bool)
        return query, new[0], new[1], seen

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache.

        Args:
          input_shape: ``(..., length, features)``: the batch, and the longest length.
          dtype: of the keys and values in it.

        Raises:
          CacheError: the shape has no length.

        Example:
          >>> import jax.numpy as jnp
          >>> from linnet import nnx
          >>> layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
          >>> layer.init_cache((1, 5, 8))
          >>> layer(jnp.ones((1, 1, 8))).shape, int(layer.cache_index)
          ((1, 1, 8), 1)
        """
        if len(input_shape) < 2:
            raise CacheError(
                f"{layer_name(self)} makes a cache from a shape (..., length, features), but got "
                f"{tuple(input_shape)}.\nFix: init_cache((batch, longest_length, features))."
            )
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = Cache(jnp.zeros(shape, dtype))
        self.cached_value = Cache(jnp.zeros(shape, dtype))
        self.cache_index = Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the flags of ``nnx.view``.

        Args:
          deterministic: drop nothing.
          decode: use the cache.
          batch_size: with ``max_length``, makes an empty cache for a batch of this size.
          max_length: how many positions that cache has room for.

        Raises:
          LayerArgumentError: one of ``batch_size`` and ``max_length`` without the other.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if (batch_size is None) != (max_length is None):
            raise LayerArgumentError(
                f"MultiHeadAttention makes a cache from batch_size and max_length, but got "
                f"batch_size={batch_size} and max_length={max_length}.\nFix: give both or neither."
            )
        if batch_size is not None and max_length is not None and self.decode is not False:
            shape = (*as_tuple(batch_size), max_length, self.in_kv_features)
            self.init_cache(shape, self.param_dtype if self.dtype is None else self.dtype)


@functools.lru_cache(maxsize=256)
def _takes(function: Callable[..., Any], name: str) -> bool | None:
    """Whether a function has a parameter of this name; None if ``**kwargs`` may take it instead."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True if name in parameters else None
    return name in parameters


def _check_heads(features: int, heads: int, kv_heads: int) -> None:
    if heads <= 0 or features % heads:
        raise LayerArgumentError(
            f"MultiHeadAttention: Memory dimension ({features}) must be divisible by 'num_heads' "
            f"heads ({heads}).\nFix: choose qkv_features as a multiple of num_heads."
        )
    if kv_heads <= 0 or heads % kv_heads:
        raise LayerArgumentError(
            f"MultiHeadAttention: num_heads ({heads}) must be divisible by num_kv_heads "
            f"({kv_heads}).\nFix: choose num_kv_heads as a divisor of num_heads."
        )
