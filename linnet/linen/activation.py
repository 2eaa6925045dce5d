"""Activation functions, and PReLU, which has a parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from linnet.functional import activations
from linnet.functional.activations import (
    celu as celu,
    elu as elu,
    gelu as gelu,
    glu as glu,
    hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu,
    hard_swish as hard_swish,
    hard_tanh as hard_tanh,
    leaky_relu as leaky_relu,
    log_sigmoid as log_sigmoid,
    log_softmax as log_softmax,
    logsumexp as logsumexp,
    one_hot as one_hot,
    relu as relu,
    relu6 as relu6,
    selu as selu,
    sigmoid as sigmoid,
    silu as silu,
    soft_sign as soft_sign,
    softmax as softmax,
    softplus as softplus,
    standardize as standardize,
    swish as swish,
    tanh as tanh,
)
from linnet.linen.dtypes import promote_dtype
from linnet.linen.module import Module as Module, compact as compact

normalize = standardize


class PReLU(Module):
    """Multiplies negative inputs by a learned slope: ``x if x >= 0 else negative_slope * x``.

    Args:
      param_dtype: the dtype of the slope.
      negative_slope_init: the initial slope.

    Example:
      >>> from linnet import linen as nn
      >>> layer, x = nn.PReLU(negative_slope_init=0.5), jnp.array([-2.0, 3.0])
      >>> layer.init_with_output(jax.random.key(0), x)[0]
      Array([-1.,  3.], dtype=float32)
    """

    param_dtype: Any = jnp.float32
    negative_slope_init: float = 0.01

    @compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: any shape.

        Returns:
          The same shape and dtype.
        """
        slope = self.param(
            "negative_slope", lambda _: jnp.asarray(self.negative_slope_init, self.param_dtype)
        )
        inputs, slope = promote_dtype(inputs, slope, dtype=inputs.dtype, inexact=False)
        return activations.prelu(inputs, slope)
