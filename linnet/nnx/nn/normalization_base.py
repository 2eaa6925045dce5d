"""What the normalising layers share: reading their parameters and checking their input."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.errors import FeatureError
from linnet.functional.norm import Axes, positive_axes
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import layer_name
from linnet.nnx.variablelib.variable import type_text


def parameters(layer: Any) -> tuple[Any, Any]:
    """The values of ``scale`` and ``bias``, or None."""
    scale, bias = layer.scale, layer.bias
    return (
        None if scale is None else scale.get_value(),
        None if bias is None else bias.get_value(),
    )


def statistics_options(layer: Any) -> dict[str, Any]:
    """How a layer takes its statistics."""
    return {
        "axis_name": layer.axis_name,
        "axis_index_groups": layer.axis_index_groups,
        "use_fast_variance": layer.use_fast_variance,
    }


def check_input(
    layer: Module, x: Any, mask: Any, features: int, feature_axes: Axes, reduction_axes: Axes = ()
) -> None:
    """Refuses an input that a layer was not built for.

    Args:
      layer: the layer.
      x: its input.
      mask: its mask, or None.
      features: how many features it was built for.
      feature_axes: the axes they are on.
      reduction_axes: the axes it reduces.

    Raises:
      FeatureError: an axis is missing, the features are more or fewer, or the mask does not fit.
    """
    shape = np.shape(x)
    for axes in (feature_axes, reduction_axes):
        beyond = [a for a in _listed(axes) if not -len(shape) <= a < len(shape)]
        if beyond:
            raise FeatureError(
                f"{layer_name(layer)} works on axis {beyond[0]}, which {type_text(x)} does not "
                "have.\nFix: give the input more axes, or build the layer for other axes."
            )
    found = math.prod(shape[axis] for axis in positive_axes(feature_axes, len(shape)))
    if found != features:
        raise FeatureError(
            f"{layer_name(layer)} expected {features} features on axis {feature_axes}, but got "
            f"{found} in {type_text(x)}.\n"
            f"Fix: build it with num_features={found}, or for another feature axis."
        )
    if mask is not None:
        _check_mask(layer, x, mask)


def _listed(axes: Axes) -> Any:
    return (axes,) if isinstance(axes, int) else axes


def _check_mask(layer: Module, x: Any, mask: Any) -> None:
    """Refuses a mask that is not of booleans or does not broadcast to the input."""
    wrong = ""
    if jnp.result_type(mask) != jnp.bool_:
        wrong = "Fix: make it a boolean array: mask.astype(bool)."
    else:
        shape, wanted = np.shape(mask), np.shape(x)
        fits = len(shape) <= len(wanted) and all(
            n in (1, m) for n, m in zip(reversed(shape), reversed(wanted), strict=False)
        )
        if not fits:
            wrong = "Fix: give it the shape of the input, or 1 for axes it is the same along."
    if wrong:
        raise FeatureError(
            f"{layer_name(layer)} expected a boolean mask that broadcasts to {type_text(x)}, but "
            f"got {type_text(mask)}.\n{wrong}"
        )
