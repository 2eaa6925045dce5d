"""Layers that normalise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FeatureError
from linnet.functional import initializers, norm
from linnet.functional.dtypes import canonicalize_dtype
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.nnx.module import Module
from linnet.nnx.nn.linear import PromoteDtype, layer_name, make_param
from linnet.nnx.variablelib import type_text

Array = jax.Array


class LayerNorm(Module):
    """Normalises each example over its features to mean 0 and variance 1, then scales and shifts.

    Args:
      num_features: the size of the feature axis.
      epsilon: added to the variance.
      dtype: of the output; by default that of the promoted operands.
      param_dtype: the dtype of the parameters.
      use_bias: add a bias.
      use_scale: multiply by a scale.
      bias_init: the initializer of the bias.
      scale_init: the initializer of the scale.
      reduction_axes: the axes the statistics are taken over.
      feature_axes: the axes of scale and bias.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of devices for that.
      use_fast_variance: compute the variance in one pass.
      promote_dtype: how operands are brought to one dtype.
      rngs: where the keys come from.
      bias_metadata: metadata of the bias.
      scale_metadata: metadata of the scale.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> y = nnx.LayerNorm(4, rngs=nnx.Rngs(0))(jnp.arange(4.0))
      >>> bool(jnp.allclose(y.mean(), 0, atol=1e-6))
      True
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: norm.Axes = -1,
        feature_axes: norm.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
    ):
        shape = (num_features,)
        self.scale = self.bias = None
        if use_scale:
            self.scale = make_param(rngs, scale_init, shape, param_dtype, scale_metadata)
        if use_bias:
            self.bias = make_param(rngs, bias_init, shape, param_dtype, bias_metadata)
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer.

        Args:
          x: the input.
          mask: True where values count for the statistics.

        Returns:
          The normalised input.
        """
        _check_features(self, x, self.num_features, self.feature_axes)
        mean, variance = norm.moments(
            x,
            self.reduction_axes,
            dtype=self.dtype,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            use_fast_variance=self.use_fast_variance,
            mask=mask,
        )
        scale = None if self.scale is None else self.scale.get_value()
        bias = None if self.bias is None else self.bias.get_value()
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return norm.normalize(
            x,
            mean,
            variance,
            scale,
            bias,
            reduction_axes=self.reduction_axes,
            feature_axes=self.feature_axes,
            epsilon=self.epsilon,
            dtype=canonicalize_dtype(x, scale, bias, dtype=self.dtype),
        )


def _check_features(layer: Module, x: Any, wanted: int, axes: norm.Axes) -> None:
    """Refuses an input whose feature axes have another size than the parameters."""
    if jnp.ndim(x):
        sizes = [jnp.shape(x)[axis] for axis in norm.positive_axes(axes, jnp.ndim(x))]
        size = 1
        for axis_size in sizes:
            size *= axis_size
        if size == wanted:
            return
    raise FeatureError(
        f"{layer_name(layer)} expected {wanted} features on axis {axes}, but got {type_text(x)}.\n"
        "Fix: build it with the right num_features, or choose other feature_axes."
    )
