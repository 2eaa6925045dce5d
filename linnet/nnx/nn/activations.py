"""Activation functions, and PReLU, which has a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import FeatureError, type_text
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
    identity as identity,
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
from linnet.functional.dtypes import (
    compute_dtype,
    default_param_dtype,
    promote_dtype as default_promote,
)
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import PromoteDtype, layer_name
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import Param


class PReLU(Module):
    """Multiplies negative inputs by a learned slope: ``x if x >= 0 else negative_slope * x``.

    Args:
      negative_slope_init: the initial slope.
      dtype: compute in this dtype; by default that of the input.
      param_dtype: the dtype of the parameter; by default that of the precision policy, or float32.
      promote_dtype: converts inputs and parameters to one dtype.
      negative_slope_metadata: metadata of the parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> nnx.PReLU(0.5)(jnp.array([-2.0, 3.0]))
      Array([-1.,  3.], dtype=float32)
    """

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        promote_dtype: PromoteDtype = default_promote,
        negative_slope_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        slope = jnp.asarray(negative_slope_init, param_dtype)
        self.negative_slope = Param(slope, **negative_slope_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: any shape.

        Returns:
          The same shape.

        Raises:
          FeatureError: ``inputs`` are no numbers.
        """
        if not hasattr(inputs, "dtype") and not np.issubdtype(np.asarray(inputs).dtype, np.number):
            raise FeatureError(
                f"{layer_name(self)} expected an array of numbers, but got {type_text(inputs)}.\n"
                "Fix: pass an array, or a number."
            )
        dtype = self.dtype
        if dtype is None and compute_dtype() is None:
            # A slope in float32 does not widen bfloat16 inputs.
            found = inputs.dtype if hasattr(inputs, "dtype") else np.result_type(inputs)
            dtype = found if jnp.issubdtype(found, jnp.inexact) else None
        operands = (inputs, value_of(self.negative_slope))
        inputs, slope = self.promote_dtype(operands, dtype=dtype)
        return activations.prelu(inputs, slope)
