"""Rotary position embedding as a module, and attention over it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linnet.errors import FeatureError, LayerArgumentError, type_text
from linnet.functional import rotary
from linnet.functional.shapes import broadcasts_to
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.attention import dot_product_attention
from linnet.nnx.nn.params import layer_name
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import Variable


class RoPE(Module):
    """Rotary position embedding: turns pairs of features by angles that grow with the position.

    The score of a query and a key then depends on how far apart they are. Feature ``i`` and feature
    ``i + size / 2`` are a pair, as in Llama. The output is at least float32.

    Args:
      theta: pair ``i`` is turned by ``position / theta ** (2 * i / size)``.
      embedding_size: with ``max_seq_len``, the size of what is turned, that of a head; sines and
        cosines are then made once and kept as Variables.
      max_seq_len: how many positions these tables have.

    Raises:
      LayerArgumentError: the size is odd, or one of size and length is missing.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> turned = nnx.RoPE()(jnp.ones((6, 4)))  # the same features at positions 0 to 5
      >>> products = turned @ turned.T
      >>> bool(jnp.allclose(products[1, 3], products[2, 4], atol=1e-4))  # the distance alone counts
      True
    """

    theta: float
    cached_sin: Variable[Any] | None
    cached_cos: Variable[Any] | None

    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
    ):
        self.theta = theta
        self.cached_sin = self.cached_cos = None
        if (embedding_size is None) != (max_seq_len is None):
            raise LayerArgumentError(
                f"RoPE got embedding_size={embedding_size} and max_seq_len={max_seq_len}.\n"
                "Fix: give both, to keep tables of sines and cosines, or none of them."
            )
        if embedding_size is not None and max_seq_len is not None:
            if embedding_size <= 0 or embedding_size % 2:
                raise LayerArgumentError(
                    f"RoPE turns pairs of features, but got embedding_size={embedding_size}.\n"
                    "Fix: pass an even size, that of one head."
                )
            # A RoPE in an attention_fn is static for transforms: it must not hold tracers.
            with jax.ensure_compile_time_eval():
                tables = rotary.rotary_tables(jnp.arange(max_seq_len), embedding_size, theta)
            self.cached_sin, self.cached_cos = map(Variable, tables)

    def __call__(self, x: Array, input_positions: Array | None = None) -> Array:
        """Turns the features at each position.

        Args:
          x: ``(..., length, size)``.
          input_positions: ``(..., length)``; by default 0 to length - 1.

        Returns:
          As ``x``, in at least float32.

        Raises:
          FeatureError: the size is odd or not that of the tables, there are more positions than
            the tables have, or the positions do not fit.
        """
        x = jnp.asarray(value_of(x))
        if x.ndim < 2 or x.shape[-1] % 2 or not x.shape[-1]:
            raise FeatureError(
                f"{layer_name(self)} expected inputs of shape (..., length, an even size), but got "
                f"{type_text(x)}.\nFix: give every head an even number of features."
            )
        return rotary.rotate(x, *self._tables(x, value_of(input_positions)))

    def _tables(self, x: Array, positions: Any) -> tuple[Array, Array]:
        """Sines and cosines that broadcast against the halves of ``x``."""
        *batch, length, size = x.shape
        if positions is None and self.cached_sin is not None and self.cached_cos is not None:
            sines, cosines = self.cached_sin.get_value(), self.cached_cos.get_value()
            if length > sines.shape[0] or size != 2 * sines.shape[1]:
                raise FeatureError(
                    f"{layer_name(self)} has tables for {sines.shape[0]} positions of size "
                    f"{2 * sines.shape[1]}, but got {type_text(x)}.\n"
                    "Fix: build it with another max_seq_len and embedding_size, or with neither."
                )
            sines, cosines = sines[:length], cosines[:length]
        else:
            positions = jnp.arange(length) if positions is None else positions
            shape = np.shape(positions)
            wanted = (*batch, length)
            if shape[-1:] != (length,) or not broadcasts_to(shape, wanted):
                raise FeatureError(
                    f"{layer_name(self)} got positions of shape {shape} for {type_text(x)}.\n"
                    f"Fix: give one position for each entry, in the shape ({length},) or {wanted}."
                )
            sines, cosines = rotary.rotary_tables(positions, size, self.theta)
        lead = (1,) * (x.ndim - sines.ndim)
        return jnp.reshape(sines, lead + sines.shape), jnp.reshape(cosines, lead + cosines.shape)


def is_rotary_table(path: tuple[Any, ...], x: Any) -> bool:
    """A filter for the tables of ``RoPE``, which are made from its arguments and not trained."""
    return type(x) is Variable and path[-1:] in (("cached_sin",), ("cached_cos",))


def dot_product_attention_with_rope(
    query: Array,
    key: Array,
    value: Array,
    *,
    rope: RoPE,
    input_positions: Array | None = None,
    **kwargs: Any,
) -> Array:
    """``dot_product_attention`` of queries and keys that a ``RoPE`` turned.

    With ``rope`` filled in by ``functools.partial`` it is an ``attention_fn`` for
    ``nnx.MultiHeadAttention``, with the cache too: the layer tells it where in the cache the
    queries are.

    Args:
      query, key, value, **kwargs: as for ``dot_product_attention``.
      rope: turns queries and keys.
      input_positions: those of the queries, ``(..., queries)``, and of the keys too if these are as
        many. By default, and for keys that are more, positions count from 0.

    Returns:
      ``(..., queries, heads, value depth)``.

    Raises:
      FeatureError: shapes that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> nnx.dot_product_attention_with_rope(x, x, x, rope=nnx.RoPE()).shape
      (1, 3, 2, 4)
    """
    alike = np.shape(query)[-3] == np.shape(key)[-3]
    turned = (
        _turned(rope, query, input_positions),
        _turned(rope, key, input_positions if alike else None),
    )
    return dot_product_attention(*turned, value, **kwargs)


def _turned(rope: RoPE, x: Array, positions: Any) -> Array:
    """Applies a RoPE to ``(..., length, heads, depth)``."""
    if positions is not None:
        positions = jnp.expand_dims(positions, -2)  # the axis of the heads
    return jnp.swapaxes(rope(jnp.swapaxes(x, -3, -2), positions), -3, -2)
