"""Layers that normalise the weights of another layer.

As in Flax, a call writes the normalised weights into the layer, and these are what an optimizer
updates.
The statistics and scales are kept in dicts whose keys are the paths of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from linnet.errors import LayerArgumentError, path_string, type_text
from linnet.functional import initializers, norm, shapes
from linnet.functional.dtypes import (
    compute_dtype,
    default_param_dtype,
    promote_dtype as default_promote,
)
from linnet.functional.initializers import Initializer
from linnet.nnx.filterlib import Filter, PathContains
from linnet.nnx.graphlib import state
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import PromoteDtype, check_rngs, layer_name, next_key
from linnet.nnx.pytreelib.kinds import Path
from linnet.nnx.statelib import to_flat_state
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import BatchStat, Param, Variable

default_filter = PathContains("kernel")


def _check_callable(name: str, layer: Any) -> None:
    if not (callable(layer) or isinstance(layer, Module)):
        raise LayerArgumentError(
            f"{name} applies a layer, but got {layer!r}.\nFix: pass the layer itself, such as "
            "nnx.Linear(3, 4, rngs=rngs)."
        )


class SpectralNorm(Module):
    """Applies a layer with its weights divided by their largest singular value.

    The singular value is estimated by power iteration, which goes on from call to call. Weights are
    the parameters with two axes or more; with more than two they count as matrices
    ``(-1, features)``.

    Args:
      layer_instance: the layer.
      n_steps: iterations at each call; with 0 the layer is applied as it is.
      epsilon: keeps the length of the vectors in the iteration away from zero.
      dtype: round the normalised weights to this dtype; they are kept in their own.
      param_dtype: the dtype of the statistics.
      error_on_non_matrix: refuse weights with more than two axes.
      update_stats: store the results of the iteration; ``train()`` and ``eval()`` change it.
      rngs: the random streams that parameters are drawn from.

    Raises:
      LayerArgumentError: ``layer_instance`` cannot be called, or a weight has more than two axes
        and ``error_on_non_matrix`` is set.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layer = nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), n_steps=20, rngs=rngs)
      >>> layer(jnp.ones((1, 3))).shape
      (1, 4)
      >>> largest = jnp.linalg.svd(layer.layer_instance.kernel[...], compute_uv=False)[0]
      >>> bool(jnp.allclose(largest, 1))
      True
    """

    def __init__(
        self,
        layer_instance: Callable[..., Any],
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Any,
    ):
        _check_callable("SpectralNorm", layer_instance)
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        self.batch_stats: dict[Path, BatchStat[Array]] = {}
        init = initializers.normal()
        for path, weight in self._weights():
            u = init(next_key(rngs), (1, weight.shape[-1]), param_dtype)
            self.batch_stats[*path, "u"] = BatchStat(u)
            self.batch_stats[*path, "sigma"] = BatchStat(jnp.ones((), param_dtype))

    def _weights(self) -> Iterator[tuple[Path, Param[Array]]]:
        if self.n_steps < 1:
            return
        for path, param in to_flat_state(state(self.layer_instance, Param)):
            if jnp.ndim(param.get_value()) > 2 and self.error_on_non_matrix:
                raise LayerArgumentError(
                    f"Layer instance parameter is {len(param.shape)}D but error_on_non_matrix is "
                    f"True: {layer_name(self)} was given a layer whose {path_string(path)[1:]} is "
                    f"{type_text(param.get_value())}.\nFix: pass error_on_non_matrix=False to "
                    "normalise it as a matrix (-1, features)."
                )
            if jnp.ndim(param.get_value()) > 1:
                yield path, param

    def __call__(self, x: Any, update_stats: bool | None = None) -> Any:
        """Normalises the weights and applies the layer.

        Args:
          x: the input of the layer.
          update_stats: store the results of the iteration; by default unless
            ``use_running_average`` is set.

        Returns:
          The output of the layer.
        """
        if update_stats is None:
            update_stats = not self.use_running_average
        for path, weight in self._weights():
            value = weight.get_value()
            u, sigma = self.batch_stats[*path, "u"], self.batch_stats[*path, "sigma"]
            normalised, *found = norm.spectral_norm(
                value, u.get_value(), steps=self.n_steps, epsilon=self.epsilon
            )
            if self.dtype is not None:
                normalised = normalised.astype(self.dtype)
            weight.set_value(normalised.astype(value.dtype))
            if update_stats:
                for statistic, new in zip((u, sigma), found, strict=True):
                    statistic.set_value(new.astype(statistic.get_value().dtype))
        return self.layer_instance(x)


class WeightNorm(Module):
    """Applies a layer with each feature of its weights scaled to a given length.

    Args:
      layer_instance: the layer.
      feature_axes: the axes of the features; a length is taken over all others. None takes one
        length of the whole weight.
      use_scale: multiply by a scale. It is an array and no ``Param``; to train it, put one in
        place: ``layer.scales[path] = nnx.Param(layer.scales[path])``.
      scale_init: the initializer of the scale.
      epsilon: added to the squared length.
      dtype: the dtype of the normalised weights; by default that of weight and scale promoted.
      param_dtype: the dtype of the scale; by default that of the precision policy, or float32.
      variable_filter: which Variables of the layer are weights.
      promote_dtype: how weight and scale are brought to one dtype.
      rngs: where the keys for ``scale_init`` come from. They are not counted as drawn.

    Raises:
      LayerArgumentError: ``layer_instance`` cannot be called, or a weight lacks a feature axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layer = nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs)
      >>> layer(jnp.ones((1, 3))).shape
      (1, 4)
      >>> lengths = jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0)
      >>> bool(jnp.allclose(lengths, 1))
      True
    """

    def __init__(
        self,
        layer_instance: Callable[..., Any],
        *,
        feature_axes: shapes.Axes | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        epsilon: float = 1e-12,
        dtype: Any = None,
        param_dtype: Any = None,
        variable_filter: Filter = default_filter,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
    ):
        param_dtype = default_param_dtype(param_dtype)
        _check_callable("WeightNorm", layer_instance)
        self.layer_instance = layer_instance
        self.feature_axes = feature_axes
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = variable_filter
        self.promote_dtype = promote_dtype
        self.scales: dict[Path, Any] | None = None
        for path, weight in self._weights():
            name = path_string(path)[1:]
            problem = norm.why_no_length(name, weight.get_value(), feature_axes)
            if problem is not None:
                raise LayerArgumentError(f"WeightNorm {problem}")
        if use_scale:
            check_rngs(rngs)
            stream = rngs["params"]
            base_key = jax.random.fold_in(stream.key.get_value(), stream.count.get_value())
            self.scales = {}
            for number, (path, weight) in enumerate(self._weights()):
                shape = norm.scale_shape(weight.get_value(), feature_axes)
                key = jax.random.fold_in(base_key, number)
                self.scales[path] = scale_init(key, shape, param_dtype)

    def _weights(self) -> Iterator[tuple[Path, Variable[Array]]]:
        for path, weight in to_flat_state(state(self.layer_instance, self.variable_filter)):
            if isinstance(weight, Variable) and jnp.issubdtype(weight.dtype, jnp.inexact):
                yield path, weight

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Normalises the weights and applies the layer.

        Args:
          x: the input of the layer.
          *args, **kwargs: passed on to the layer.

        Returns:
          The output of the layer.
        """
        for path, weight in self._weights():
            scale = None if self.scales is None else value_of(self.scales[path])
            value = weight.get_value()
            # A precision policy is for computing with weights; their own dtype stays.
            dtype = None if compute_dtype() is None else value.dtype
            value, scale = self.promote_dtype((value, scale), dtype=dtype)
            normalised = norm.weight_norm(
                value, scale, feature_axes=self.feature_axes, epsilon=self.epsilon
            )
            if self.dtype is not None:
                normalised = normalised.astype(self.dtype)
            weight.set_value(normalised)
        return self.layer_instance(x, *args, **kwargs)
