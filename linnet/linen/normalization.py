"""Layers that normalise their input by its statistics."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.errors import LayerArgumentError
from linnet.functional import initializers, norm, shapes
from linnet.functional.norm import Groups
from linnet.functional.shapes import refuse_inputs
from linnet.linen.dtypes import canonicalize_dtype
from linnet.linen.module import Module, compact, merge_param
from linnet.linen.params import Array, layer_name, make_parameters
from linnet.linen.weight_normalization import SpectralNorm as SpectralNorm, WeightNorm as WeightNorm
from linnet.typing import Axes, Dtype, Initializer


class _Normalization(Module):
    """What the normalising layers share: their parameters, and the options of the statistics."""

    def _options(self, x: Any, features: Axes, reduced: Axes = (), mask: Any = None) -> Any:
        """Scale, bias and the options of the function; refuses an input that does not fit."""
        layer: Any = self
        refuse_inputs(self, norm.why_not_normalized(x, mask, features, reduced), layer_name)
        shape = tuple(np.shape(x)[axis] for axis in shapes.positive_axes(features, np.ndim(x)))
        scale, bias = make_parameters(
            self,
            scale=shape if layer.use_scale else None,
            bias=shape if getattr(layer, "use_bias", False) else None,
        )
        options: dict[str, Any] = {
            "epsilon": layer.epsilon,
            "dtype": canonicalize_dtype(x, scale, bias, dtype=layer.dtype),
        }
        return scale, bias, options

    def _statistics(self) -> dict[str, Any]:
        """The options of the statistics."""
        layer: Any = self
        # There is no mapped axis while the parameters are made.
        mapped = not self.is_initializing()
        return {
            "axis_name": layer.axis_name if mapped else None,
            "axis_index_groups": layer.axis_index_groups if mapped else None,
            "use_fast_variance": layer.use_fast_variance,
            "force_float32_reductions": layer.force_float32_reductions,
        }


class BatchNorm(_Normalization):
    """Normalises each feature over the batch to mean 0 and variance 1, then scales and shifts.

    In training it uses the statistics of the batch and keeps a running average of them in the
    collection ``batch_stats``, which has to be mutable; in evaluation it uses the running average.

    Args:
      use_running_average: evaluate; may be given to the call instead.
      axis: the feature axis; the statistics are taken over all others.
      momentum: how much of the running average is kept at each step.
      epsilon: added to the variance.
      dtype: of the output.
      param_dtype: the dtype of the parameters. The statistics are float32.
      use_bias, use_scale: add a bias; multiply by a scale.
      bias_init, scale_init: the initializers of the parameters.
      axis_name: a mapped axis to take the statistics over too.
      axis_index_groups: groups of its devices.
      use_fast_variance: compute the variance in one pass.
      force_float32_reductions: take the statistics in at least float32.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer, x = nn.BatchNorm(momentum=0.5, epsilon=0.0), jnp.array([[1.0], [3.0]])
      >>> variables = layer.init(jax.random.key(0), x, use_running_average=False)
      >>> y, new = layer.apply(variables, x, use_running_average=False, mutable="batch_stats")
      >>> y.ravel(), new["batch_stats"]["mean"]
      (Array([-1.,  1.], dtype=float32), Array([1.], dtype=float32))
    """

    use_running_average: bool | None = None
    axis: int = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    axis_name: str | None = None
    axis_index_groups: Groups = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        """Applies the layer, and in training moves the running average.

        Args:
          x: the input.
          use_running_average: evaluate.
          mask: True where values count for the statistics; broadcasts to ``x``.

        Returns:
          The normalised input.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit.
          ValueError: ``use_running_average`` is given neither here nor to the layer, or to both.
          ModifyScopeVariableError: it trains, and ``batch_stats`` is not mutable.
        """
        evaluates = merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        refuse_inputs(self, norm.why_not_normalized(x, mask, self.axis), layer_name)
        features = shapes.positive_axes(self.axis, x.ndim)
        shape = tuple(x.shape[axis] for axis in features)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        variance = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale, bias, options = self._options(x, features)
        if evaluates:
            return norm.batch_norm(
                x, mean.value, variance.value, scale, bias, axis=features, **options
            )
        y, *new = norm.batch_norm_of_batch(
            x, scale, bias, mask, axis=features, **options, **self._statistics()
        )
        if not self.is_initializing():
            mean.value, variance.value = norm.running_average(
                (mean.value, variance.value),
                tuple(value if value.shape == shape else value.reshape(shape) for value in new),
                momentum=self.momentum,
            )
        return y


class LayerNorm(_Normalization):
    """Normalises each example over its features to mean 0 and variance 1, then scales and shifts.

    Args:
      epsilon: added to the variance.
      reduction_axes: the axes the statistics are taken over.
      feature_axes: the axes of scale and bias.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, axis_name, axis_index_groups,
        use_fast_variance, force_float32_reductions: as for ``BatchNorm``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> y, _ = nn.LayerNorm().init_with_output(jax.random.key(0), jnp.arange(4.0))
      >>> bool(jnp.allclose(y.mean(), 0, atol=1e-6))
      True
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Groups = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
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
        scale, bias, options = self._options(x, self.feature_axes, self.reduction_axes, mask)
        return norm.layer_norm(
            x,
            scale,
            bias,
            mask,
            reduction_axes=self.reduction_axes,
            feature_axes=self.feature_axes,
            **options,
            **self._statistics(),
        )


class RMSNorm(_Normalization):
    """Divides each example by the root mean square of its features, then scales.

    Args:
      epsilon: added to the mean square.
      use_fast_variance: not used: a mean square has no slow variant.
      dtype, param_dtype, use_scale, scale_init, reduction_axes, feature_axes, axis_name,
        axis_index_groups, force_float32_reductions: as for ``LayerNorm``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> x = jnp.array([[3.0, -3.0]])
      >>> nn.RMSNorm(epsilon=0.0).init_with_output(jax.random.key(0), x)[0]
      Array([[ 1., -1.]], dtype=float32)
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Groups = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer; arguments and errors as for ``LayerNorm``."""
        scale, _, options = self._options(x, self.feature_axes, self.reduction_axes, mask)
        statistics = self._statistics()
        del statistics["use_fast_variance"]
        return norm.rms_norm(
            x,
            scale,
            mask,
            reduction_axes=self.reduction_axes,
            feature_axes=self.feature_axes,
            **options,
            **statistics,
        )


class GroupNorm(_Normalization):
    """Normalises groups of features of each example to mean 0 and variance 1, scales and shifts.

    Args:
      num_groups: how many groups; pass None to give ``group_size`` instead.
      group_size: how many features a group has.
      epsilon: added to the variance.
      reduction_axes: the axes the statistics are taken over, the last among them; by default all
        but the first.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, axis_name, axis_index_groups,
        use_fast_variance, force_float32_reductions: as for ``BatchNorm``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> x = jnp.array([[1.0, 3.0, 10.0, 30.0]])
      >>> nn.GroupNorm(2, epsilon=0.0).init_with_output(jax.random.key(0), x)[0]
      Array([[-1.,  1., -1.,  1.]], dtype=float32)
    """

    num_groups: int | None = 32
    group_size: int | None = None
    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    reduction_axes: Axes | None = None
    axis_name: str | None = None
    axis_index_groups: Groups = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer to ``(batch, ..., features)``; arguments as for ``LayerNorm``.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit.
          LayerArgumentError: the features cannot be divided into these groups.
        """
        reduced = () if self.reduction_axes is None else self.reduction_axes
        scale, bias, options = self._options(x, -1, reduced, mask)
        return norm.group_norm(
            x,
            scale,
            bias,
            mask,
            groups=self._groups(x.shape[-1]),
            reduction_axes=self.reduction_axes,
            **options,
            **self._statistics(),
        )

    def _groups(self, features: int) -> int:
        """How many groups there are."""
        if (self.num_groups is None) == (self.group_size is None):
            raise LayerArgumentError(
                f"{layer_name(self)}: Either `num_groups` or `group_size` should be specified, but "
                f"got num_groups={self.num_groups} and group_size={self.group_size}.\n"
                "Fix: give one of them; num_groups=None takes away its default of 32."
            )
        by_size = self.num_groups is None
        number = (self.group_size if by_size else self.num_groups) or 0
        if number < 1 or features % number:
            asked = f"group_size={number}" if by_size else f"num_groups={number}"
            raise LayerArgumentError(
                f"{layer_name(self)}: {features} features cannot be divided into groups with "
                f"{asked}.\nFix: choose a divisor of {features}."
            )
        return features // number if by_size else number


class InstanceNorm(_Normalization):
    """Normalises each feature of each example to mean 0 and variance 1, then scales and shifts.

    Args:
      epsilon: added to the variance.
      feature_axes: the axes of the features; the statistics are taken over all others but the
        first.
      dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, axis_name, axis_index_groups,
        use_fast_variance, force_float32_reductions: as for ``BatchNorm``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> x = jnp.array([[[1.0], [3.0]]])
      >>> nn.InstanceNorm(epsilon=0.0).init_with_output(jax.random.key(0), x)[0].ravel()
      Array([-1.,  1.], dtype=float32)
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = initializers.zeros
    scale_init: Initializer = initializers.ones
    feature_axes: Axes = -1
    axis_name: str | None = None
    axis_index_groups: Groups = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        """Applies the layer to ``(batch, ...)``; arguments as for ``LayerNorm``.

        Raises:
          FeatureError: ``x`` or ``mask`` does not fit.
          LayerArgumentError: the first axis is among ``feature_axes``.
        """
        scale, bias, options = self._options(x, self.feature_axes, mask=mask)
        features = shapes.positive_axes(self.feature_axes, x.ndim)
        if 0 in features:
            raise LayerArgumentError(
                f"{layer_name(self)}: The channel axes cannot include the leading dimension, which "
                f"is the batch, but got feature_axes={self.feature_axes}.\n"
                "Fix: choose other axes, or give the input a batch axis."
            )
        return norm.layer_norm(
            x,
            scale,
            bias,
            mask,
            reduction_axes=[axis for axis in range(1, x.ndim) if axis not in features],
            feature_axes=features,
            **options,
            **self._statistics(),
        )
