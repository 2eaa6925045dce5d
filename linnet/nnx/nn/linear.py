"""Layers that contract with a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FeatureError
from linnet.functional import initializers, linear
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.nnx import locate
from linnet.nnx.module import Module
from linnet.nnx.variablelib import Param, type_text

Array = jax.Array
PromoteDtype = Callable[..., Any]
default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros


def layer_name(layer: Module) -> str:
    """The path of a layer in the model, as the program at hand would write it, and its class."""
    path = locate.describe(layer)
    return f"{path} ({type(layer).__name__})" if path else type(layer).__name__


def make_param(
    rngs: Any, init: Initializer, shape: tuple[int, ...], dtype: Any, metadata: Mapping[str, Any]
) -> Param[Array]:
    """A parameter from an initializer and a key of the ``params`` stream."""
    return Param(init(rngs.params(), shape, dtype), **metadata)


class Linear(Module):
    """Affine map of the last axis: ``y = x @ kernel + bias``.

    Args:
      in_features: the size of the last axis of the input.
      out_features: the size of the last axis of the output.
      use_bias: add a bias.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters.
      precision: as for ``jax.lax.dot_general``.
      kernel_init: the initializer of the kernel.
      bias_init: the initializer of the bias.
      dot_general: the contraction.
      promote_dtype: how operands are brought to one dtype.
      preferred_element_type: as for ``jax.lax.dot_general``.
      rngs: where the keys come from.
      kernel_metadata: metadata of the kernel.
      bias_metadata: metadata of the bias.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 3))).shape
      (1, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Callable[..., Array] = jax.lax.dot_general,
        promote_dtype: PromoteDtype = default_promote,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        shape = (in_features, out_features)
        self.kernel = make_param(rngs, kernel_init, shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = make_param(rngs, bias_init, (out_features,), param_dtype, bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(..., in_features)``.
          out_sharding: the sharding of the output.

        Returns:
          ``(..., out_features)``.
        """
        if jnp.ndim(inputs) == 0 or jnp.shape(inputs)[-1] != self.in_features:
            raise FeatureError(
                f"{layer_name(self)} expected inputs whose last axis has size "
                f"{self.in_features}, but got {type_text(inputs)}.\n"
                f"Fix: build it with in_features={jnp.shape(inputs)[-1:] or 1}, or move the "
                "feature axis last."
            )
        bias = None if self.bias is None else self.bias.get_value()
        operands = (inputs, self.kernel.get_value(), bias)
        inputs, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        return linear.dense(
            inputs,
            kernel,
            bias,
            dot_general=self.dot_general,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )
