"""Activation functions, and PReLU, which has a parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from linnet.functional import activations
from linnet.functional.activations import celu as celu
from linnet.functional.activations import elu as elu
from linnet.functional.activations import gelu as gelu
from linnet.functional.activations import glu as glu
from linnet.functional.activations import hard_sigmoid as hard_sigmoid
from linnet.functional.activations import hard_silu as hard_silu
from linnet.functional.activations import hard_swish as hard_swish
from linnet.functional.activations import hard_tanh as hard_tanh
from linnet.functional.activations import leaky_relu as leaky_relu
from linnet.functional.activations import log_sigmoid as log_sigmoid
from linnet.functional.activations import log_softmax as log_softmax
from linnet.functional.activations import logsumexp as logsumexp
from linnet.functional.activations import one_hot as one_hot
from linnet.functional.activations import relu as relu
from linnet.functional.activations import relu6 as relu6
from linnet.functional.activations import selu as selu
from linnet.functional.activations import sigmoid as sigmoid
from linnet.functional.activations import silu as silu
from linnet.functional.activations import soft_sign as soft_sign
from linnet.functional.activations import softmax as softmax
from linnet.functional.activations import softplus as softplus
from linnet.functional.activations import standardize as standardize
from linnet.functional.activations import swish as swish
from linnet.functional.activations import tanh as tanh
from linnet.linen.dtypes import promote_dtype
from linnet.linen.module import Module as Module
from linnet.linen.module import compact as compact

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
