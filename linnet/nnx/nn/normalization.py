"""Layers that normalise what flows through them, by the statistics of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import ModeError
from linnet.functional import initializers, norm
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.precision import compute_dtype, default_param_dtype
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.group_normalization import GroupNorm as GroupNorm
from linnet.nnx.nn.group_normalization import InstanceNorm as InstanceNorm
from linnet.nnx.nn.normalization_base import check_input, parameters, statistics_options
from linnet.nnx.nn.params import PromoteDtype, layer_name, make_param
from linnet.nnx.nn.weight_normalization import SpectralNorm as SpectralNorm
from linnet.nnx.nn.weight_normalization import WeightNorm as WeightNorm
from linnet.nnx.variablelib.variable import BatchStat

Array = jax.Array


class BatchNorm(Module):
    """Normalises each feature over the batch to mean 0 and variance 1, then scales and shifts.

    In training it uses the statistics of the batch and keeps a running average of them; in
    evaluation it uses the running average.

    Args:
      num_features: the size of the feature axis.
      use_running_average: evaluate. ``train()``, ``eval()`` and ``nnx.view`` change it.
      axis: the feature axis; the statistics are taken over all others.
      momentum: how much of the running average is kept at each step.
      epsilon: added to the variance.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
        The statistics are float32.
      use_bias: add a bias.
      use_scale: multiply by a scale.
      bias_init: the initializer of the bias.
      scale_init: the initializer of the scale.
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
      >>> layer = nnx.BatchNorm(1, momentum=0.5, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1.0], [3.0]])).ravel()
      Array([-1.,  1.], dtype=float32)
      >>> layer.mean[...]
      Array([1.], dtype=float32)
      >>> layer.eval()
      >>> layer(jnp.array([[1.0], [3.0]])).ravel()
      Array([0., 2.], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = None,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        shape = (num_features,)
        self.mean = BatchStat(jnp.zeros(shape, jnp.float32))
        self.var = BatchStat(jnp.ones(shape, jnp.float32))
        self.scale = self.bias = None
        if use_scale:
            self.scale = make_param(rngs, scale_init, shape, param_dtype, scale_metadata)
        if use_bias:
            self.bias = make_param(rngs, bias_init, shape, param_dtype, bias_metadata)
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        """Applies the layer, and in training moves the running average.

        Args:
          x: the input.
          use_running_average: evaluate; by default as the attribute says.
          mask: True where values count for the statistics; broadcasts to ``x``.

        Returns:
          The normalised input.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit.
          ModeError: neither the call nor the layer says whether to evaluate.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ModeError(
                f"{layer_name(self)} was not told whether to use its running average: "
                "use_running_average is None in the constructor and in the call.\nFix: call "
                "model.train() or model.eval(), nnx.view(model, use_running_average=True), or pass "
                "use_running_average= to either."
            )
        check_input(self, x, mask, self.num_features, self.axis)
        stats = (self.mean.get_value(), self.var.get_value())
        operands = (x, *stats, *parameters(self))
        x, mean, variance, scale, bias = self.promote_dtype(operands, dtype=self.dtype)
        if self.dtype is None and compute_dtype() is not None:
            mean, variance = stats  # a policy is no reason to round statistics
        if use_running_average:
            return norm.batch_norm(
                x, mean, variance, scale, bias, axis=self.axis, epsilon=self.epsilon
            )
        y, *new = norm.batch_norm_of_batch(
            x, scale, bias, mask, axis=self.axis, epsilon=self.epsilon, **statistics_options(self)
        )
        mean, variance = norm.running_average(stats, tuple(new), momentum=self.momentum)
        self.mean.set_value(mean)
        self.var.set_value(variance)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets the flags of ``nnx.view``.

        Args:
          use_running_average: evaluate: use the running average instead of the batch.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average


class LayerNorm(Module):
    """Normalises each example over its features to mean 0 and variance 1, then scales and shifts.

    Args:
      num_features: the size of the feature axis.
      epsilon: added to the variance.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
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
        param_dtype: Any = None,
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
        param_dtype = default_param_dtype(param_dtype)
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
          mask: True where values count for the statistics; broadcasts to ``x``.

        Returns:
          The normalised input.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit.
        """
        check_input(self, x, mask, self.num_features, self.feature_axes, self.reduction_axes)
        x, scale, bias = self.promote_dtype((x, *parameters(self)), dtype=self.dtype)
        return norm.layer_norm(
            x,
            scale,
            bias,
            mask,
            reduction_axes=self.reduction_axes,
            feature_axes=self.feature_axes,
            epsilon=self.epsilon,
            **statistics_options(self),
        )


class RMSNorm(Module):
    """Divides each example by the root mean square of its features, then scales.

    Args:
      num_features: the size of the feature axis.
      epsilon: added to the mean square.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the scale; by default that of the precision policy, or float32.
      use_scale: multiply by a scale.
      scale_init: the initializer of the scale.
      reduction_axes: the axes the mean square is taken over.
      feature_axes: the axes of the scale.
      axis_name: a mapped axis to take the mean square over too.
      axis_index_groups: groups of devices for that.
      use_fast_variance: kept for programs that pass it; there is one way to a mean square.
      promote_dtype: how operands are brought to one dtype.
      rngs: where the keys come from.
      scale_metadata: metadata of the scale.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> nnx.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[3.0, -3.0]]))
      Array([[ 1., -1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = None,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: norm.Axes = -1,
        feature_axes: norm.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        scale_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.scale = None
        if use_scale:
            self.scale = make_param(rngs, scale_init, (num_features,), param_dtype, scale_metadata)
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Applies the layer.

        Args:
          x: the input.
          mask: True where values count for the mean square; broadcasts to ``x``.

        Returns:
          The normalised input.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit.
        """
        check_input(self, x, mask, self.num_features, self.feature_axes, self.reduction_axes)
        scale = None if self.scale is None else self.scale.get_value()
        x, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        return norm.rms_norm(
            x,
            scale,
            mask,
            reduction_axes=self.reduction_axes,
            feature_axes=self.feature_axes,
            epsilon=self.epsilon,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
        )
