"""Initializers: functions of a key, a shape and a dtype."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn.initializers import constant as constant
from jax.nn.initializers import delta_orthogonal as delta_orthogonal
from jax.nn.initializers import glorot_normal as glorot_normal
from jax.nn.initializers import glorot_uniform as glorot_uniform
from jax.nn.initializers import he_normal as he_normal
from jax.nn.initializers import he_uniform as he_uniform
from jax.nn.initializers import kaiming_normal as kaiming_normal
from jax.nn.initializers import kaiming_uniform as kaiming_uniform
from jax.nn.initializers import lecun_normal as lecun_normal
from jax.nn.initializers import lecun_uniform as lecun_uniform
from jax.nn.initializers import normal as normal
from jax.nn.initializers import ones as ones
from jax.nn.initializers import orthogonal as orthogonal
from jax.nn.initializers import truncated_normal as truncated_normal
from jax.nn.initializers import uniform as uniform
from jax.nn.initializers import variance_scaling as variance_scaling
from jax.nn.initializers import xavier_normal as xavier_normal
from jax.nn.initializers import xavier_uniform as xavier_uniform
from jax.nn.initializers import zeros as zeros

Initializer = Callable[..., jax.Array]


def ones_init() -> Initializer:
    """An initializer of ones."""
    return ones


def zeros_init() -> Initializer:
    """An initializer of zeros."""
    return zeros


def flattened(initializer: Initializer, rows: int, batch: int = 0) -> Initializer:
    """An initializer for a kernel of several axes that sees it as one matrix.

    Args:
      initializer: the initializer of the matrix.
      rows: how many leading axes (after the batch) are inputs; the rest are outputs.
      batch: how many axes before those have a matrix each.

    Returns:
      An initializer that draws in the flat shape, one key for each matrix of the batch.
    """

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        counts = shape[:batch]
        matrix = (_product(shape[batch : batch + rows]), _product(shape[batch + rows :]))
        if not counts:
            return jnp.reshape(initializer(key, matrix, dtype), shape)
        keys = jax.random.split(key, _product(counts))
        drawn = jax.vmap(lambda k: initializer(k, matrix, dtype))(keys)
        return jnp.reshape(drawn, shape)

    return init


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
