"""What layers share: how arguments are stored, parameters made, keys drawn, and inputs checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import FeatureError, LayerArgumentError, RngsError, type_text
from linnet.functional.dtypes import (
    Policy,
    PromoteDtype as PromoteDtype,
    compute_dtype,
    default_param_dtype,
)
from linnet.functional.initializers import (
    Initializer,
    default_bias_init as default_bias_init,
    default_kernel_init as default_kernel_init,
)
from linnet.functional.shapes import shape_of, too_few_axes
from linnet.nnx.modules.module import Module
from linnet.nnx.pytreelib import locate
from linnet.nnx.rnglib.streams import Rngs, RngStream, as_key
from linnet.nnx.variablelib import placement
from linnet.nnx.variablelib.drawing import draw
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import Param, Variable


def layer_name(layer: Module) -> str:
    """The path of a layer in the model, as the running program would write it, and its class."""
    path = locate.describe(layer)
    return f"{path} ({type(layer).__name__})" if path else type(layer).__name__


def not_told(layer: Module, to_do: str, flag: str) -> str:
    """The text of the error for a flag that neither the constructor nor the call was given."""
    return (
        f"{layer_name(layer)} was not told whether to {to_do} {flag} is None in the constructor "
        "and in the call.\nFix: call model.train() or model.eval(), nnx.view(model, "
        f"{flag}=True), or pass {flag}= to either."
    )


# Constructors.

# Arguments that only the constructor needs: the layer does not store them.
_NOT_STORED = ("self", "__class__", "rngs")
_ENDINGS_NOT_STORED = ("_init", "_metadata")


def store_arguments(layer: Module, given: Mapping[str, Any], *leave_out: str) -> None:
    """Stores the arguments of a constructor, its ``locals()``, as attributes of the layer.

    ``rngs``, initializers, metadata and the arguments named by ``leave_out`` are not stored.
    ``param_dtype`` is stored as the dtype it stands for.
    """
    for name, value in given.items():
        if name in _NOT_STORED or name.endswith(_ENDINGS_NOT_STORED) or name in leave_out:
            continue
        setattr(layer, name, default_param_dtype(value) if name == "param_dtype" else value)


class KernelLayer(Module):
    """What layers with a kernel and a bias share."""

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None
    dtype: Any
    param_dtype: Any
    precision: Any
    promote_dtype: PromoteDtype
    preferred_element_type: Any

    def _promoted(self, inputs: Any) -> Any:
        """Inputs, kernel and bias in the dtype that the layer computes in."""
        operands = (inputs, parameter_value(self.kernel), parameter_value(self.bias))
        return self.promote_dtype(operands, dtype=given_dtype(self))


def make_parameters(
    layer: Module,
    given: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...] | None],
    drawn_as: Mapping[str, tuple[int, ...]] = {},
) -> None:
    """Makes the parameters of a layer with the arguments of its constructor, its ``locals()``.

    A parameter without a shape, or not to be used, as ``use_bias=False`` says, is None.
    """
    dtype = default_param_dtype(given["param_dtype"])
    for name, shape in shapes.items():
        parameter = None
        if shape is not None and given.get(f"use_{name}", True):
            init, metadata = given[f"{name}_init"], given[f"{name}_metadata"]
            drawn = drawn_as.get(name)
            with placement.making(layer, name):
                parameter = make_param(given["rngs"], init, shape, dtype, metadata, drawn_as=drawn)
        setattr(layer, name, parameter)


def parameter_value(parameter: Any) -> Any:
    """The array of a parameter.

    Libraries may replace a parameter by an object of their own, such as a quantised array, whose
    attribute ``value`` is the array that a layer computes with.
    """
    if parameter is None or isinstance(parameter, Variable):
        return value_of(parameter)
    return getattr(parameter, "value", parameter)


def make_param(
    rngs: Any,
    init: Initializer,
    shape: tuple[int, ...],
    dtype: Any,
    metadata: Mapping[str, Any],
    *,
    drawn_as: tuple[int, ...] | None = None,
) -> Param[jax.Array]:
    """Makes a parameter with an initializer and a key of the ``params`` stream.

    ``drawn_as`` is the shape that the initializer sees, of the same size.
    """
    key = next_key(rngs)
    if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
        raise LayerArgumentError(
            f"{_under_construction()} wants whole numbers as sizes, but got {tuple(shape)} as the "
            "shape of a parameter.\nFix: pass integers; a // b divides whole numbers."
        )
    # The initializer's own result is reshaped only where it was asked for another shape.
    args = (key, drawn_as or shape, dtype)
    return Param(draw(init, args, {}, metadata, drawn_as and shape), **metadata)


def next_key(rngs: Any) -> jax.Array:
    """Draws a key of the ``params`` stream."""
    check_rngs(rngs)
    return rngs.params()


def check_rngs(rngs: Any) -> None:
    """Refuses to build a layer without random streams."""
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


# Keys of layers that draw random numbers in a call.


def is_key(value: Any) -> bool:
    """Whether a value is a JAX key, typed or as an array of uint32."""
    value = value_of(value)
    if not hasattr(value, "dtype"):
        return False
    old = value.dtype == jnp.uint32 and jnp.ndim(value) == 1
    return old or jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def own_stream(layer: str, rngs: Any, name: str) -> RngStream | None:
    """Makes a layer's own stream from the stream ``name`` of an Rngs, a stream, a key, or None."""
    if rngs is None:
        return None
    if isinstance(rngs, Rngs):
        return getattr(rngs, name).fork()
    if isinstance(rngs, RngStream):
        return rngs.fork()
    if is_key(rngs):
        return RngStream(rngs, tag=name)
    raise RngsError(_not_rngs(layer, rngs))


def draw_key(layer: Module, rngs: Any, name: str) -> jax.Array:
    """Draws a key from the stream ``name`` of an Rngs, or from a stream; a key is used as it is."""
    if isinstance(rngs, Rngs):
        return getattr(rngs, name)()
    if isinstance(rngs, RngStream):
        return rngs()
    if is_key(rngs):
        return as_key(rngs)
    raise RngsError(_not_rngs(layer_name(layer), rngs))


def _not_rngs(layer: str, rngs: Any) -> str:
    return (
        f"{layer}: rngs must be an nnx.Rngs, an nnx.RngStream or a key, but got "
        f"{type_text(rngs)}.\nFix: pass nnx.Rngs(0), or jax.random.key(0)."
    )


# Dtypes.


class _Float32ByDefault:
    """The default of a ``dtype`` that is float32 unless a precision policy sets another."""

    def __repr__(self) -> str:
        return "float32, unless a precision policy says otherwise"


FLOAT32_BY_DEFAULT: Any = _Float32ByDefault()


def given_dtype(layer: Any) -> Any:
    """The dtype that a layer was given to compute in, or None.

    A layer with ``dtype_is_default`` was given none: under a precision policy its ``dtype`` does
    not count.
    """
    dtype = layer.dtype
    if dtype is None or not Policy.any_made:
        return dtype
    gives_way = getattr(layer, "dtype_is_default", False) and compute_dtype() is not None
    return None if gives_way else dtype


# Shapes and inputs.


def check_features(layer: Module, inputs: Any, size: int, argument: str, axes: int = 0) -> None:
    """Refuses an input whose last axis does not have the size that a constructor argument set.

    ``axes`` is the number of axes that must come before the last.
    """
    shape = shape_of(inputs)
    if len(shape) > axes and shape[-1] == size:
        return
    if len(shape) <= axes:
        problem = too_few_axes(inputs, axes, f"of size {size}")
        raise FeatureError(f"{layer_name(layer)} {problem}")
    raise FeatureError(
        f"{layer_name(layer)} expected inputs whose last axis has size {size}, but got "
        f"{type_text(inputs)}.\n"
        f"Fix: build it with {argument}={shape[-1]}, or move the feature axis last."
    )
