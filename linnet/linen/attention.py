"""Dot-product attention, and the layers of several heads over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.errors import CacheError, FeatureError, LayerArgumentError, type_text
from linnet.functional import attention, fusing
from linnet.functional.attention import (
    combine_masks as combine_masks,
    make_attention_mask as make_attention_mask,
    make_causal_mask as make_causal_mask,
)
from linnet.functional.linear import einsum_by
from linnet.functional.shapes import refuse_inputs, with_rank
from linnet.linen.dtypes import promote_dtype
from linnet.linen.linear import DenseGeneral, default_bias_init, default_kernel_init
from linnet.linen.module import Module, compact, merge_param
from linnet.linen.normalization import LayerNorm
from linnet.linen.params import Array, layer_name
from linnet.typing import Dtype, Initializer, PrecisionLike, PRNGKey

Einsum = Callable[..., Array]


def dot_product_attention_weights(
    query: Array,
    key: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKey | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    einsum: Einsum | None = None,
) -> Array:
    """The weight of each key for each query; arguments as for ``dot_product_attention``.

    Returns:
      ``(..., heads, queries, keys)``; the last axis sums to 1 where nothing is dropped.

    Example:
      >>> from linnet import linen as nn
      >>> x = jnp.ones((1, 2, 1, 4))
      >>> nn.dot_product_attention_weights(x, x)[0, 0]
      Array([[0.5, 0.5],
             [0.5, 0.5]], dtype=float32)
    """
    del force_fp32_for_softmax  # the softmax is in at least float32 always
    query, key = promote_dtype(query, key, dtype=dtype)
    sow = None
    if module is not None:
        sow = functools.partial(module.sow, "intermediates", "attention_weights")
    return attention.checked_weights(
        query,
        key,
        bias,
        mask,
        dropout_rng,
        dropout_rate=0.0 if deterministic else dropout_rate,
        broadcast_dropout=broadcast_dropout,
        sow=sow,
        precision=precision,
        einsum=_einsum(einsum, einsum_dot_general),
    )


def _einsum(given: Einsum | None, dot_general: Callable[..., Array] | None) -> Einsum:
    """The einsum that was given, or one over a given contraction, or JAX's."""
    if given is not None:
        return given
    if dot_general is None:
        return fusing.einsum
    return functools.partial(einsum_by, dot_general)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKey | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Einsum | None = None,
    attn_weights_value_einsum: Einsum | None = None,
) -> Array:
    """Averages the values, weighted by how well their keys match each query.

    On a GPU the fused kernel runs where it can: see ``linnet.functional.attention``.

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
      module: sow the weights, before any are dropped, as ``attention_weights`` among this module's
        ``intermediates``.
      force_fp32_for_softmax: the softmax is in at least float32 anyway.
      einsum_dot_general: a function to use in place of ``jax.lax.dot_general``.
      qk_attn_weights_einsum: a function to use in place of ``jnp.einsum`` for the scores.
      attn_weights_value_einsum: likewise for the average.

    Returns:
      ``(..., queries, heads, value depth)``.

    Raises:
      FeatureError: shapes that do not fit together.
      RngsError: weights are to be dropped and there is no key.

    Example:
      >>> from linnet import linen as nn
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> nn.dot_product_attention(x, x, x).shape
      (1, 5, 2, 4)
    """
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    rate = 0.0 if deterministic else dropout_rate
    own = (module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    if all(given is None for given in own):
        return attention.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            dropout_rng,
            dropout_rate=rate,
            broadcast_dropout=broadcast_dropout,
            precision=precision,
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
        einsum_dot_general=einsum_dot_general,
        einsum=qk_attn_weights_einsum,
    )
    einsum = _einsum(attn_weights_value_einsum, einsum_dot_general)
    return attention.weighted_values(weights, value, precision=precision, einsum=einsum)


class MultiHeadDotProductAttention(Module):
    """Attention with several heads between projections of its inputs.

    With ``decode=True`` it works position by position: the first call, in ``init``, makes room in
    the collection ``cache`` for as many positions as its inputs have; each call then adds those of
    its inputs and attends to all so far.

    Args:
      num_heads: the number of heads.
      dtype, broadcast_dropout, dropout_rate, precision: as for ``dot_product_attention``.
      param_dtype: the dtype of the parameters.
      qkv_features: the size of all heads together; by default that of the queries' last axis.
      out_features: the size of the last axis of the output; by default likewise.
      deterministic: drop nothing; may be given to the call instead.
      kernel_init, bias_init: the initializers of the parameters.
      out_kernel_init, out_bias_init: those of the output projection; by default the same.
      use_bias: add biases.
      attention_fn: a function like ``linen.dot_product_attention``.
      decode: use the cache.
      normalize_qk: layer normalisation of each head's query and key.
      force_fp32_for_softmax: passed on to ``attention_fn``.
      qkv_dot_general, out_dot_general, qkv_dot_general_cls, out_dot_general_cls: ``dot_general``
        and ``dot_general_cls`` of the input projections and of the output projection.
      qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: make the arguments of these names,
        without ``_cls``, of ``attention_fn``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))
      >>> y.shape, sorted(variables["params"])
      ((1, 5, 8), ['key', 'out', 'query', 'value'])
    """

    num_heads: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = default_bias_init
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: Callable[..., Array] = dot_product_attention
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: Callable[..., Array] | None = None
    out_dot_general: Callable[..., Array] | None = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: Callable[..., Einsum] | None = None
    attn_weights_value_einsum_cls: Callable[..., Einsum] | None = None

    @compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        mask: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: PRNGKey | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Applies the layer.

        Args:
          inputs_q: ``(..., queries, features)``.
          inputs_k: ``(..., keys, features)``; by default ``inputs_q``.
          inputs_v: ``(..., keys, features)``; by default ``inputs_k``.
          inputs_kv: the older name of both.
          mask: True (or not 0) where a query may look; broadcasts to
            ``(..., heads, queries, keys)``.
          deterministic: drop nothing.
          dropout_rng: a key to use instead of one of the stream ``dropout``.
          sow_weights: sow the weights as ``attention_weights`` among the ``intermediates``.

        Returns:
          ``(..., queries, out_features)``.

        Raises:
          FeatureError: an input or the mask does not fit.
          LayerArgumentError: the heads do not divide the features.
          ValueError: weights may be dropped, and ``deterministic`` is given neither here nor to the
            layer, or to both.
          CacheError: the cache is full, or of another shape.
        """
        inputs_k, inputs_v = self._inputs(inputs_q, inputs_k, inputs_v, inputs_kv)
        query, key, value = self._project_inputs(inputs_q, inputs_k, inputs_v)
        if self.decode:
            query, key, value, mask = self._extend_cache(query, key, value, mask)
        elif mask is not None:
            self._check_mask(mask, query, key)
        drops = False
        if self.dropout_rate > 0.0:
            drops = not merge_param("deterministic", self.deterministic, deterministic)
            if drops and dropout_rng is None:
                dropout_rng = self.make_rng("dropout")
        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=dropout_rng,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=not drops,
            dtype=self.dtype,
            precision=self.precision,
            **self._newer_options(sow_weights),
        )
        width = np.shape(inputs_q)[-1] if self.out_features is None else self.out_features
        return self._projection(
            features=width,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(x)

    def _projection(self, **options: Any) -> DenseGeneral:
        return DenseGeneral(
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            use_bias=self.use_bias,
            **options,
        )

    def _project_inputs(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """The query, key and value of each head."""
        project = functools.partial(
            self._projection,
            features=(self.num_heads, self._depth(self.qkv_features or np.shape(q)[-1])),
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        query, key, value = (
            project(name=name)(x) for name, x in (("query", q), ("key", k), ("value", v))
        )
        if self.normalize_qk:
            normalize = functools.partial(
                LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            query, key = normalize(name="query_ln")(query), normalize(name="key_ln")(key)
        return query, key, value

    def _newer_options(self, sow_weights: bool) -> dict[str, Any]:
        """Options that an ``attention_fn`` of the user may lack; passed only where needed."""
        options: dict[str, Any] = {}
        if sow_weights:
            options["module"] = self
        if self.force_fp32_for_softmax:
            options["force_fp32_for_softmax"] = True
        for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum"):
            made_by = getattr(self, f"{name}_cls")
            if made_by is not None:
                options[name] = made_by()
        return options

    def _inputs(self, q: Any, k: Any, v: Any, kv: Any) -> tuple[Array, Array]:
        """The inputs of keys and values; refuses inputs that do not fit together."""
        if kv is not None and (k is not None or v is not None):
            raise FeatureError(
                f"{layer_name(self)} got inputs_kv beside inputs_k or inputs_v.\n"
                "Fix: pass inputs_k alone if they are the same; inputs_v follows it."
            )
        k = kv if k is None else k
        refuse_inputs(self, attention.why_no_keys(k, v), layer_name)
        k = q if k is None else k
        v = k if v is None else v
        if min(map(np.ndim, (q, k, v))) < 2:
            raise FeatureError(
                f"{layer_name(self)} expected inputs of shape (..., length, features), but got "
                f"{', '.join(map(type_text, (q, k, v)))}.\n"
                "Fix: keep both axes, also where they have size 1."
            )
        if self.attention_fn is dot_product_attention:
            refuse_inputs(self, attention.why_not_one_batch(q, k, v), layer_name)
        return k, v

    def _depth(self, features: int) -> int:
        if self.num_heads <= 0 or features % self.num_heads:
            raise LayerArgumentError(
                f"{layer_name(self)}: Memory dimension ({features}) must be divisible by number of "
                f"heads ({self.num_heads}).\nFix: choose qkv_features as a multiple of num_heads."
            )
        return features // self.num_heads

    def _check_mask(self, mask: Any, query: Array, key: Array) -> None:
        shape = attention.scores_shape(query, key)
        refuse_inputs(self, attention.why_not_broadcast("mask", mask, shape), layer_name)

    def _extend_cache(self, query: Array, key: Array, value: Array, mask: Any) -> Any:
        """Adds to the cache, and returns the query, all keys and values so far, and the mask.

        The call that makes the cache gives it the length of its inputs and leaves it empty.
        """
        is_made = self.has_variable("cache", "cached_key")
        cache = (
            self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
            self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
            self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32)),
        )
        if not is_made:
            return query, key, value, mask
        keys, values, index = (part.value for part in cache)
        self._check_room(key, keys, index)
        if mask is not None:
            self._check_mask(mask, query, keys)
        extended = attention.extend_cache(query, key, value, keys, values, index)
        query, keys, values, index, seen = extended
        for part, content in zip(cache, (keys, values, index), strict=True):
            part.value = content
        if mask is not None:
            seen = combine_masks(with_rank(mask, seen.ndim), seen, dtype=bool)
        return query, keys, values, seen

    def _check_room(self, key: Array, cached: Array, index: Any) -> None:
        *batch, room = cached.shape[:-2]
        *new_batch, new = key.shape[:-2]
        if new_batch != batch or new > room or key.shape[-2:] != cached.shape[-2:]:
            raise CacheError(
                f"{layer_name(self)}: Autoregressive cache shape error, the cache has room for "
                f"{room} positions in a batch of {tuple(batch)}, with keys {cached.shape[-2:]}, "
                f"but got keys of shape {key.shape}.\n"
                "Fix: make the cache by init, with the shape of the longest input."
            )
        problem = attention.why_full(index, new, room)
        if problem is not None:
            raise CacheError(
                f"{layer_name(self)}: {problem}\n"
                "Fix: make a new cache by init, with the shape of a longer input."
            )


class MultiHeadAttention(MultiHeadDotProductAttention):
    """Attention with several heads; arguments as for ``MultiHeadDotProductAttention``.

    It is the shorter name of that class.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.MultiHeadAttention(num_heads=2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape
      (1, 5, 8)
    """


class SelfAttention(MultiHeadDotProductAttention):
    """Attention of a sequence to itself; the older form of ``MultiHeadAttention``.

    Arguments as for ``MultiHeadDotProductAttention``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.SelfAttention(num_heads=2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape
      (1, 5, 8)
    """

    @compact
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: Array,
        mask: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: PRNGKey | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Applies the layer; arguments and errors as for ``MultiHeadDotProductAttention``."""
        return super().__call__(
            inputs_q,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )
