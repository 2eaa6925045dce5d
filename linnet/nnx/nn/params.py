"""What layers share: how a parameter is made, and how an error names its layer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import FeatureError, LayerArgumentError, RngsError
from linnet.functional import initializers
from linnet.functional.initializers import Initializer
from linnet.functional.precision import Policy, compute_dtype
from linnet.nnx.modules.module import Module
from linnet.nnx.pytreelib import locate
from linnet.nnx.variablelib.metadata import VariableMetadata
from linnet.nnx.variablelib.variable import Param, Variable, type_text

PromoteDtype = Callable[..., Any]
default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros


def layer_name(layer: Module) -> str:
    """The path of a layer in the model, as the program at hand would write it, and its class."""
    path = locate.describe(layer)
    return f"{path} ({type(layer).__name__})" if path else type(layer).__name__


def make_param(
    rngs: Any,
    init: Initializer,
    shape: tuple[int, ...],
    dtype: Any,
    metadata: Mapping[str, Any],
    *,
    drawn_as: tuple[int, ...] | None = None,
) -> Param[jax.Array]:
    """A parameter from an initializer and a key of the ``params`` stream.

    Args:
      rngs: where the key comes from.
      init: the initializer.
      shape: the shape of the parameter.
      dtype: its dtype.
      metadata: its metadata.
      drawn_as: the shape that the initializer sees, of the same size.

    Returns:
      The parameter.

    Raises:
      RngsError: ``rngs`` has no streams.
      LayerArgumentError: a size is no whole number.
    """
    key = next_key(rngs)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
        raise LayerArgumentError(
            f"{_under_construction()} wants whole numbers as sizes, but got {tuple(shape)} as the "
            "shape of a parameter.\nFix: pass integers; a // b divides whole numbers."
        )
    value = init(key, shape if drawn_as is None else drawn_as, dtype)
    if drawn_as is not None:
        value = _reshaped(value, shape)
    return Param(value, **metadata)


def next_key(rngs: Any) -> jax.Array:
    """A key of the ``params`` stream.

    Raises:
      RngsError: ``rngs`` has no streams.
    """
    check_rngs(rngs)
    return rngs.params()


def check_rngs(rngs: Any) -> None:
    """Refuses to build a layer without random streams.

    Raises:
      RngsError: ``rngs`` has no streams.
    """
    if not hasattr(rngs, "params"):
        raise RngsError(
            f"{_under_construction()} draws its parameters from rngs, but got "
            f"{type_text(rngs) if hasattr(rngs, 'dtype') else repr(rngs)}.\n"
            "Fix: pass rngs=nnx.Rngs(0), or the rngs your own constructor was given."
        )


def _under_construction() -> str:
    """The class of the layer whose constructor is running."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Module):
        frame = frame.f_back
    return "A layer" if frame is None else type(frame.f_locals["self"]).__name__


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, VariableMetadata):
        return dataclasses.replace(value, raw_value=jnp.reshape(value.raw_value, shape))
    return jnp.reshape(value, shape)


class _Float32ByDefault:
    """The default of a ``dtype`` that is float32, but gives way to a precision policy."""

    def __repr__(self) -> str:
        return "float32, unless a precision policy says otherwise"


FLOAT32_BY_DEFAULT: Any = _Float32ByDefault()


def told_dtype(layer: Any) -> Any:
    """The dtype that a layer was told to compute in, or None.

    Args:
      layer: the layer. Where it has ``dtype_is_default``, its dtype is one that was not asked for,
        and gives way to the precision policy in force.

    Returns:
      The dtype.
    """
    dtype = layer.dtype
    if dtype is None or not Policy.any_made:
        return dtype
    gives_way = getattr(layer, "dtype_is_default", False) and compute_dtype() is not None
    return None if gives_way else dtype


def value_of(parameter: Any) -> Any:
    """The value of a parameter, also where a plain array, or None, has taken its place."""
    return parameter.get_value() if isinstance(parameter, Variable) else parameter


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array, or of what becomes one; for arrays faster than ``np.shape``."""
    try:
        return x.shape
    except AttributeError:
        return np.shape(x)


def check_features(layer: Module, inputs: Any, size: int, argument: str, axes: int = 0) -> None:
    """Refuses an input whose last axis has another size than the layer was built for.

    Args:
      layer: the layer.
      inputs: its input.
      size: the size wanted.
      argument: the constructor argument that says so.
      axes: how many axes must stand before the last.

    Raises:
      FeatureError: it does not fit.
    """
    shape = shape_of(inputs)
    if len(shape) > axes and shape[-1] == size:
        return
    if len(shape) <= axes:
        what = f"at least {axes + 1} {'axes' if axes else 'axis'}, the last of size {size}"
        fix = "keep the feature axis, also where it has size 1"
        if axes:
            fix += f"; kernel_size says how many axes ({axes} here) the kernel moves over"
    else:
        what = f"inputs whose last axis has size {size}"
        fix = f"build it with {argument}={shape[-1]}, or move the feature axis last"
    raise FeatureError(
        f"{layer_name(layer)} expected {what}, but got {type_text(inputs)}.\nFix: {fix}."
    )
