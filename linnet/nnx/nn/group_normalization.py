"""Layers that normalise each example by itself, over groups of features or over space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional import initializers, norm
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.precision import default_param_dtype
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.normalization_base import check_input, parameters, statistics_options
from linnet.nnx.nn.params import PromoteDtype, layer_name, make_param
from linnet.nnx.variablelib.variable import type_text

Array = jax.Array


class GroupNorm(Module):
    """Normalises groups of features of each example to mean 0 and variance 1, scales and shifts.

    Args:
      num_features: the size of the last axis.
      num_groups: how many groups; pass None to give ``group_size`` instead.
      group_size: how many features a group has.
      epsilon: added to the variance.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      use_bias: add a bias.
      use_scale: multiply by a scale.
      bias_init: the initializer of the bias.
      scale_init: the initializer of the scale.
      reduction_axes: the axes the statistics are taken over, the last among them; by default all
        but the first.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of devices for that.
      use_fast_variance: compute the variance in one pass.
      promote_dtype: how operands are brought to one dtype.
      rngs: where the keys come from.
      bias_metadata: metadata of the bias.
      scale_metadata: metadata of the scale.

    Raises:
      LayerArgumentError: the groups do not divide the features, or are given twice or not at all.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.GroupNorm(4, num_groups=2, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1.0, 3.0, 10.0, 30.0]]))
      Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = None,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: norm.Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.feature_axis = -1
        self.num_groups = _number_of_groups(num_features, num_groups, group_size)
        self.group_size = num_features // self.num_groups
        shape = (num_features,)
        self.scale = self.bias = None
        if use_scale:
            self.scale = make_param(rngs, scale_init, shape, param_dtype, scale_metadata)
        if use_bias:
            self.bias = make_param(rngs, bias_init, shape, param_dtype, bias_metadata)
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer.

        Args:
          x: ``(batch, ..., num_features)``.
          mask: True where values count for the statistics; broadcasts to ``x``.

        Returns:
          The normalised input.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit, or ``reduction_axes`` lack the last axis.
        """
        axes = self.reduction_axes
        features = self.num_groups * self.group_size
        check_input(self, x, mask, features, self.feature_axis, () if axes is None else axes)
        last = jnp.ndim(x) - 1
        if axes is not None and last not in norm.positive_axes(axes, last + 1):
            raise FeatureError(
                f"{layer_name(self)} takes its statistics over groups of the last axis, but "
                f"reduction_axes={axes} lack it.\nFix: add -1 to reduction_axes."
            )
        if axes is None and last == 0:
            raise FeatureError(
                f"{layer_name(self)} expected an input of shape (batch, ..., {features}), but got "
                f"{type_text(x)}.\nFix: add a batch axis, x[None], or pass reduction_axes=(-1,)."
            )
        x, scale, bias = self.promote_dtype((x, *parameters(self)), dtype=self.dtype)
        return norm.group_norm(
            x,
            scale,
            bias,
            mask,
            groups=self.num_groups,
            reduction_axes=axes,
            epsilon=self.epsilon,
            **statistics_options(self),
        )


def _number_of_groups(features: int, groups: int | None, size: int | None) -> int:
    if (groups is None) == (size is None):
        raise LayerArgumentError(
            "Either `num_groups` or `group_size` should be specified: GroupNorm got "
            f"num_groups={groups} and group_size={size}.\nFix: for a group_size, pass "
            "num_groups=None, which overrides the default of 32."
        )
    if groups is not None:
        if groups <= 0 or features % groups:
            raise LayerArgumentError(
                f"Number of groups ({groups}) does not divide the number of channels ({features}) "
                f"of GroupNorm.\nFix: choose num_groups so that {features} is a multiple of it."
            )
        return groups
    if not size or size < 0 or features % size:
        raise LayerArgumentError(
            f"Number of features ({features}) is not multiple of the group size ({size}) of "
            f"GroupNorm.\nFix: choose a group_size so that {features} is a multiple of it."
        )
    return features // size


class InstanceNorm(Module):
    """Normalises each feature of each example over space to mean 0 and variance 1.

    Args:
      num_features: the size of the feature axis.
      epsilon: added to the variance.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      use_bias: add a bias.
      use_scale: multiply by a scale.
      bias_init: the initializer of the bias.
      scale_init: the initializer of the scale.
      feature_axes: the axes of the features; the statistics are taken over all others but the
        first, which is the batch.
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
      >>> layer = nnx.InstanceNorm(1, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[[1.0], [3.0]]])).ravel()
      Array([-1.,  1.], dtype=float32)
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
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer.

        Args:
          x: ``(batch, ...)``.
          mask: True where values count for the statistics; broadcasts to ``x``.

        Returns:
          The normalised input.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit, or the batch is among the features.
        """
        check_input(self, x, mask, self.num_features, self.feature_axes)
        features = norm.positive_axes(self.feature_axes, jnp.ndim(x))
        if 0 in features:
            raise FeatureError(
                f"The channel axes cannot include the leading dimension, which is the batch: "
                f"{layer_name(self)} has feature_axes={self.feature_axes} and got "
                f"{type_text(x)}.\nFix: add a batch axis, x[None], or choose other feature_axes."
            )
        x, scale, bias = self.promote_dtype((x, *parameters(self)), dtype=self.dtype)
        return norm.layer_norm(
            x,
            scale,
            bias,
            mask,
            reduction_axes=tuple(a for a in range(1, x.ndim) if a not in features),
            feature_axes=features,
            epsilon=self.epsilon,
            **statistics_options(self),
        )
