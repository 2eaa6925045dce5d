"""Initializers: functions of a key, a shape and a dtype."""

from typing import Any

import jax.numpy as jnp
from jax.nn.initializers import (
    constant as constant,
    delta_orthogonal as delta_orthogonal,
    glorot_normal as glorot_normal,
    glorot_uniform as glorot_uniform,
    he_normal as he_normal,
    he_uniform as he_uniform,
    kaiming_normal as kaiming_normal,
    kaiming_uniform as kaiming_uniform,
    lecun_normal as lecun_normal,
    lecun_uniform as lecun_uniform,
    normal as normal,
    ones as ones,
    orthogonal as orthogonal,
    truncated_normal as truncated_normal,
    uniform as uniform,
    variance_scaling as variance_scaling,
    xavier_normal as xavier_normal,
    xavier_uniform as xavier_uniform,
    zeros as zeros,
)

from linnet.typing import Initializer as Initializer

default_kernel_init = lecun_normal()
default_bias_init = zeros
default_embed_init = variance_scaling(1.0, "fan_in", "normal", out_axis=0)
_orthogonal = orthogonal()


def modified_orthogonal(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
    """An orthogonal initializer that computes in at least float32, for any dtype."""
    return _orthogonal(key, shape, jnp.promote_types(dtype, jnp.float32)).astype(dtype)


def ones_init() -> Initializer:
    """An initializer of ones.

    Returns:
      A function of a key, a shape and a dtype.

    Example:
      >>> import jax
      >>> ones_init()(jax.random.key(0), (2,))
      Array([1., 1.], dtype=float32)
    """
    return ones


def zeros_init() -> Initializer:
    """An initializer of zeros.

    Returns:
      A function of a key, a shape and a dtype.

    Example:
      >>> import jax
      >>> zeros_init()(jax.random.key(0), (2,))
      Array([0., 0.], dtype=float32)
    """
    return zeros
