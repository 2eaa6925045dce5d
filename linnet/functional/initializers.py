"""Initializers: functions of a key, a shape and a dtype."""

from typing import Any

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

    Example:
      >>> import jax
      >>> ones_init()(jax.random.key(0), (2,))
      Array([1., 1.], dtype=float32)
    """
    return ones


def zeros_init() -> Initializer:
    """An initializer of zeros.

    Example:
      >>> import jax
      >>> zeros_init()(jax.random.key(0), (2,))
      Array([0., 0.], dtype=float32)
    """
    return zeros
