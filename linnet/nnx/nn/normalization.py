"""Layers that normalise their input by its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from linnet.errors import FeatureError, LayerArgumentError, ModeError, type_text
from linnet.functional import initializers, norm, shapes
from linnet.functional.dtypes import compute_dtype, promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.shapes import refuse_inputs
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import (
    PromoteDtype,
    layer_name,
    make_parameters,
    not_told,
    store_arguments,
)
from linnet.nnx.nn.weight_normalization import (
    SpectralNorm as SpectralNorm,
    WeightNorm as WeightNorm,
)
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import BatchStat, Param


class NormLayer(Module):
    """What the normalising layers share: their constructor, and the checks of their input.

    All but ``RMSNorm`` have a bias.
    """

    num_features: int
    scale: Param[Array] | None
    bias: Param[Array] | None
    epsilon: float
    dtype: Any
    param_dtype: Any
    use_scale: bool
    use_bias: bool
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool
    promote_dtype: PromoteDtype

    def _build(self, given: Mapping[str, Any], *leave_out: str) -> None:
        """Makes scale and bias, and stores the other arguments of a constructor."""
        names = [name for name in ("scale", "bias") if f"use_{name}" in given]
        make_parameters(self, given, dict.fromkeys(names, (given["num_features"],)))
        store_arguments(self, given, *leave_out)

    def _parameters(self) -> tuple[Any, Any]:
        """The values of ``scale`` and ``bias``, or None."""
        return value_of(self.scale), value_of(self.bias)

    def _statistics_options(self) -> dict[str, Any]:
        return {
            "axis_name": self.axis_name,
            "axis_index_groups": self.axis_index_groups,
            "use_fast_variance": self.use_fast_variance,
        }

    def _check_input(
        self,
        x: Any,
        mask: Any,
        features: int,
        feature_axes: shapes.Axes,
        reduction_axes: shapes.Axes = (),
    ) -> None:
        """Refuses an input or a mask that the layer was not built for."""
        problem = norm.why_not_normalized(
            x, mask, feature_axes, reduction_axes, num_features=features, boolean_mask=True
        )
        refuse_inputs(self, problem, layer_name)


class BatchNorm(NormLayer):
    """Normalises each feature over the batch to mean 0 and variance 1, then scales and shifts.

    In training it uses the statistics of the batch and keeps a running average of them; in
    evaluation it uses the running average.

    Args:
      num_features: the size of the feature axis.
      use_running_average: evaluate. ``train()``, ``eval()`` and ``nnx.view`` change it.
      axis: the feature axis; the statistics are taken over all others.
      momentum: how much of the running average is kept at each step.
      epsilon: added to the variance.
      dtype, promote_dtype, rngs: as for ``Linear``.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
        The statistics are float32.
      use_bias, use_scale: add a bias; multiply by a scale.
      bias_init, scale_init: the initializers of the parameters.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of its devices.
      use_fast_variance: compute the variance in one pass.
      bias_metadata, scale_metadata: metadata of the parameters.

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

    use_running_average: bool | None
    axis: int
    momentum: float

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
        self.mean = BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((num_features,), jnp.float32))
        self._build(locals())

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
            to_do = "use its running average:"
            raise ModeError(not_told(self, to_do, "use_running_average"))
        self._check_input(x, mask, self.num_features, self.axis)
        stats = (self.mean.get_value(), self.var.get_value())
        operands = (x, *stats, *self._parameters())
        x, mean, variance, scale, bias = self.promote_dtype(operands, dtype=self.dtype)
        if self.dtype is None and compute_dtype() is not None:
            mean, variance = stats  # a policy is no reason to round statistics
        if use_running_average:
            return norm.batch_norm(
                x, mean, variance, scale, bias, axis=self.axis, epsilon=self.epsilon
            )
        y, *new = norm.batch_norm_of_batch(
            x, scale, bias, mask, axis=self.axis, epsilon=self.epsilon, **self._statistics_options()
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


class LayerNorm(NormLayer):
    """Normalises each example over its features to mean 0 and variance 1, then scales and shifts.

    Args:
      num_features: the size of the feature axis.
      epsilon: added to the variance.
      reduction_axes: the axes the statistics are taken over.
      feature_axes: the axes of scale and bias.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, axis_name, axis_index_groups,
        use_fast_variance, promote_dtype, rngs, bias_metadata, scale_metadata: as for ``BatchNorm``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> y = nnx.LayerNorm(4, rngs=nnx.Rngs(0))(jnp.arange(4.0))
      >>> bool(jnp.allclose(y.mean(), 0, atol=1e-6))
      True
    """

    reduction_axes: shapes.Axes
    feature_axes: shapes.Axes

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
        reduction_axes: shapes.Axes = -1,
        feature_axes: shapes.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
    ):
        self._build(locals())

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
        self._check_input(x, mask, self.num_features, self.feature_axes, self.reduction_axes)
        x, scale, bias = self.promote_dtype((x, *self._parameters()), dtype=self.dtype)
        return norm.layer_norm(
            x,
            scale,
            bias,
            mask,
            reduction_axes=self.reduction_axes,
            feature_axes=self.feature_axes,
            epsilon=self.epsilon,
            **self._statistics_options(),
        )


class RMSNorm(NormLayer):
    """Divides each example by the root mean square of its features, then scales.

    Args:
      epsilon: added to the mean square.
      use_fast_variance: not used: a mean square has no slow variant.
      num_features, dtype, param_dtype, use_scale, scale_init, reduction_axes, feature_axes,
        axis_name, axis_index_groups, promote_dtype, rngs, scale_metadata: as for ``LayerNorm``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> nnx.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[3.0, -3.0]]))
      Array([[ 1., -1.]], dtype=float32)
    """

    reduction_axes: shapes.Axes
    feature_axes: shapes.Axes

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = None,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: shapes.Axes = -1,
        feature_axes: shapes.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        scale_metadata: Mapping[str, Any] = {},
    ):
        self._build(locals())

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Applies the layer; arguments and errors as for ``LayerNorm``."""
        self._check_input(x, mask, self.num_features, self.feature_axes, self.reduction_axes)
        x, scale = self.promote_dtype((x, value_of(self.scale)), dtype=self.dtype)
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


class GroupNorm(NormLayer):
    """Normalises groups of features of each example to mean 0 and variance 1, scales and shifts.

    Args:
      num_features: the size of the last axis.
      num_groups: how many groups; pass None to give ``group_size`` instead.
      group_size: how many features a group has.
      epsilon: added to the variance.
      reduction_axes: the axes the statistics are taken over, the last among them; by default all
        but the first.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, axis_name, axis_index_groups,
        use_fast_variance, promote_dtype, rngs, bias_metadata, scale_metadata: as for ``BatchNorm``.

    Raises:
      LayerArgumentError: the groups do not divide the features, or are given twice or not at all.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.GroupNorm(4, num_groups=2, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1.0, 3.0, 10.0, 30.0]]))
      Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    reduction_axes: shapes.Axes | None

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
        reduction_axes: shapes.Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
    ):
        self.feature_axis = -1
        self.num_groups = _number_of_groups(num_features, num_groups, group_size)
        self.group_size = num_features // self.num_groups
        self._build(locals(), "num_features", "num_groups", "group_size")

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer to ``(batch, ..., num_features)``; arguments as for ``LayerNorm``.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit, or ``reduction_axes`` lack the last axis.
        """
        axes = self.reduction_axes
        features = self.num_groups * self.group_size
        self._check_input(x, mask, features, self.feature_axis, () if axes is None else axes)
        last = jnp.ndim(x) - 1
        if axes is not None and last not in shapes.positive_axes(axes, last + 1):
            raise FeatureError(
                f"{layer_name(self)} takes its statistics over groups of the last axis, but "
                f"reduction_axes={axes} lack it.\nFix: add -1 to reduction_axes."
            )
        if axes is None and last == 0:
            raise FeatureError(
                f"{layer_name(self)} expected an input of shape (batch, ..., {features}), but got "
                f"{type_text(x)}.\nFix: add a batch axis, x[None], or pass reduction_axes=(-1,)."
            )
        x, scale, bias = self.promote_dtype((x, *self._parameters()), dtype=self.dtype)
        return norm.group_norm(
            x,
            scale,
            bias,
            mask,
            groups=self.num_groups,
            reduction_axes=axes,
            epsilon=self.epsilon,
            **self._statistics_options(),
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


class InstanceNorm(NormLayer):
    """Normalises each feature of each example over space to mean 0 and variance 1.

    Args:
      num_features: the size of the feature axis.
      epsilon: added to the variance.
      feature_axes: the axes of the features; the statistics are taken over all others but the
        first, which is the batch.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, axis_name, axis_index_groups,
        use_fast_variance, promote_dtype, rngs, bias_metadata, scale_metadata: as for ``BatchNorm``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.InstanceNorm(1, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[[1.0], [3.0]]])).ravel()
      Array([-1.,  1.], dtype=float32)
    """

    feature_axes: shapes.Axes

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
        feature_axes: shapes.Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        bias_metadata: Mapping[str, Any] = {},
        scale_metadata: Mapping[str, Any] = {},
    ):
        self._build(locals())

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer to ``(batch, ...)``; arguments as for ``LayerNorm``.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit, or the batch is among the features.
        """
        self._check_input(x, mask, self.num_features, self.feature_axes)
        features = shapes.positive_axes(self.feature_axes, jnp.ndim(x))
        if 0 in features:
            raise FeatureError(
                f"The channel axes cannot include the leading dimension, which is the batch: "
                f"{layer_name(self)} has feature_axes={self.feature_axes} and got "
                f"{type_text(x)}.\nFix: add a batch axis, x[None], or choose other feature_axes."
            )
        x, scale, bias = self.promote_dtype((x, *self._parameters()), dtype=self.dtype)
        return norm.layer_norm(
            x,
            scale,
            bias,
            mask,
            reduction_axes=tuple(a for a in range(1, x.ndim) if a not in features),
            feature_axes=features,
            epsilon=self.epsilon,
            **self._statistics_options(),
        )
