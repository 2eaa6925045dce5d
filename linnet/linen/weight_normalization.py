"""Layers that normalise the weights of another layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import LayerArgumentError, type_text
from linnet.functional import initializers, norm
from linnet.linen.dtypes import canonicalize_dtype, promote_dtype
from linnet.linen.module import Module, compact
from linnet.linen.params import Array, layer_name
from linnet.linen.transforms import map_variables
from linnet.typing import Axes, Dtype, Initializer


def _mapped_weights(
    module: Any, function: Any, args: Any, kwargs: Any, mutable: bool = True
) -> Any:
    """Calls the layer of a module with its parameters replaced by ``function(name, value)``.

    Where parameters can be written, ``mutable`` ones keep what they were replaced by.
    """
    layer = module.layer_instance

    def replace(variables: Any) -> Any:
        def one(path: Any, value: Any) -> Any:
            keys = (str(getattr(step, "key", step)) for step in path)
            return function("/".join((layer.name, *keys)), value)

        return {
            name: jax.tree_util.tree_map_with_path(one, values)
            for name, values in variables.items()
        }

    return map_variables(
        lambda layer: layer(*args, **kwargs),
        trans_in_fn=replace,
        init=module.is_initializing(),
        mutable=mutable,
    )(layer)


class SpectralNorm(Module):
    """Applies a layer with its weights divided by their largest singular value.

    The singular value is estimated by power iteration, which goes on from call to call. Weights are
    the parameters with two axes or more; with more than two they count as matrices
    ``(-1, features)``.

    Args:
      layer_instance: the layer.
      n_steps: iterations at each call.
      epsilon: keeps the length of the vectors in the iteration away from zero.
      dtype: the dtype of the normalised weights; by default that of the weights.
      param_dtype: the dtype of the statistics.
      error_on_non_matrix: refuse weights with more than two axes.
      collection_name: the collection of the statistics.

    Example:
      >>> from linnet import linen as nn
      >>> layer = nn.SpectralNorm(nn.Dense(4))
      >>> x = jnp.ones((1, 3))
      >>> variables = layer.init(jax.random.key(0), x, update_stats=False)
      >>> y, new = layer.apply(variables, x, update_stats=True, mutable="batch_stats")
      >>> sorted(new["batch_stats"])
      ['layer_instance/kernel/sigma', 'layer_instance/kernel/u']
    """

    layer_instance: Module
    n_steps: int = 1
    epsilon: float = 1e-12
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    error_on_non_matrix: bool = False
    collection_name: str = "batch_stats"

    @compact
    def __call__(self, *args: Any, update_stats: bool, **kwargs: Any) -> Any:
        """Applies the layer with normalised weights.

        Args:
          *args, **kwargs: passed on to the layer.
          update_stats: store the results of the iteration; their collection has to be mutable.

        Returns:
          The output of the layer.

        Raises:
          LayerArgumentError: a weight has more than two axes and ``error_on_non_matrix`` is set.
        """
        normalize = functools.partial(self._normalize, update_stats)
        return _mapped_weights(self, normalize, args, kwargs)

    def _normalize(self, update_stats: bool, name: str, weight: Array) -> Array:
        if weight.ndim < 2 or self.n_steps < 1:
            return weight
        if weight.ndim > 2 and self.error_on_non_matrix:
            raise LayerArgumentError(
                f"Input is {weight.ndim}D but error_on_non_matrix is True: {layer_name(self)} was "
                f"given a layer whose {name} is {type_text(weight)}.\nFix: pass "
                "error_on_non_matrix=False to normalise it as a matrix (-1, features)."
            )
        stats = (
            self.variable(self.collection_name, f"{name}/u", self._draw, weight.shape[-1]),
            self.variable(self.collection_name, f"{name}/sigma", jnp.ones, (), self.param_dtype),
        )
        normalised, *found = norm.spectral_norm(
            weight, stats[0].value, steps=self.n_steps, epsilon=self.epsilon
        )
        if update_stats:
            for statistic, new in zip(stats, found, strict=True):
                statistic.value = new.astype(self.param_dtype)
        return normalised.astype(canonicalize_dtype(weight, dtype=self.dtype))

    def _draw(self, size: int) -> Array:
        return jax.random.normal(self.make_rng("params"), (1, size), self.param_dtype)


class WeightNorm(Module):
    """Applies a layer with each feature of its weights scaled to a given length.

    Args:
      layer_instance: the layer.
      epsilon: added to the squared length.
      dtype: the dtype of the normalised weights; by default that of weight and scale promoted.
      param_dtype: the dtype of the scales.
      use_scale: multiply by a scale, a parameter of this module.
      scale_init: the initializer of the scales.
      feature_axes: the axes of the features; a length is taken over all others. None takes one
        length of the whole weight.
      variable_filter: parts of names; parameters whose name contains one are weights. None or an
        empty set for all.

    Example:
      >>> from linnet import linen as nn
      >>> layer = nn.WeightNorm(nn.Dense(4))
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 3)))
      >>> sorted(variables["params"])
      ['layer_instance', 'layer_instance/kernel/scale']
    """

    layer_instance: Module
    epsilon: float = 1e-12
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = initializers.ones
    feature_axes: Axes | None = -1
    variable_filter: Any = dataclasses.field(default_factory=lambda: {"kernel"})

    @compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layer with normalised weights.

        Args:
          *args, **kwargs: passed on to the layer.

        Returns:
          The output of the layer.

        Raises:
          LayerArgumentError: a weight lacks a feature axis.
        """
        mutable = self.is_initializing()
        return _mapped_weights(self, self._normalize, args, kwargs, mutable=mutable)

    def _normalize(self, name: str, weight: Array) -> Array:
        if self.variable_filter and not any(part in name for part in self.variable_filter):
            return weight
        problem = norm.why_no_length(name, weight, self.feature_axes)
        if problem is not None:
            raise LayerArgumentError(f"{layer_name(self)} {problem}")
        scale = None
        if self.use_scale:
            shape = norm.scale_shape(weight, self.feature_axes)
            scale = self.param(f"{name}/scale", self.scale_init, shape, self.param_dtype)
        weight, scale = promote_dtype(weight, scale)
        normalised = norm.weight_norm(
            weight, scale, feature_axes=self.feature_axes, epsilon=self.epsilon
        )
        return normalised if self.dtype is None else normalised.astype(self.dtype)
