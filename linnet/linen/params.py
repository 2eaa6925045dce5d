"""What layers share: their names in errors, checks of their inputs, and what their fields mean.

A layer owns its parameters and calls one function of ``linnet.functional``, the same as its twin in
``linnet.nnx``. Sizes of inputs are not given: they are taken from the first input. Fields that many
layers have mean the same in all of them:

- ``dtype``: the dtype to compute in. By default it is that of the precision policy in force, or the
  one that inputs and parameters promote to.
- ``param_dtype``: the dtype of the parameters.
- ``promote_dtype``: a function with the signature of ``linen.dtypes.promote_dtype``. It gets inputs
  and parameters, and ``dtype``, and returns them in one dtype.
- ``kernel_init``, ``bias_init``, ``scale_init``, ...: functions of a key, a shape and a dtype, such
  as those of ``linen.initializers``.
- ``use_bias``, ``use_scale``: whether the layer has the parameter.
- ``precision``, ``preferred_element_type``: passed on to the contraction or convolution, as
  ``jax.lax.dot_general`` takes them.
- ``dot_general``, ``conv_general_dilated``: a function to use in place of JAX's, for example to
  quantise a layer.
- ``dot_general_cls``, ``conv_general_dilated_cls``, ``..._einsum_cls``: makes such a function at
  each call, for example a module such as ``linen.Fp8DotGeneralOp``; used in place of one given.
- ``axis_name``, ``axis_index_groups``: a mapped axis, and groups of its devices, over which a
  normalisation takes its statistics too, as ``jax.lax.pmean`` takes them.
- ``use_fast_variance``: compute the variance in one pass, as ``E[x^2] - E[x]^2``, instead of two.
- ``force_float32_reductions``: take statistics in at least float32, whatever ``dtype`` says.
- ``parent``, ``name``: of every module.

Flags that a layer and its call both have, such as ``deterministic`` and ``use_running_average``,
must be given to one of them and not to both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import Array as Array

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional.dtypes import PromoteDtype as PromoteDtype
from linnet.functional.shapes import too_few_axes
from linnet.linen.module import Module


def layer_name(layer: Module) -> str:
    """The path of a layer in the model and its class, for example ``/encoder/Dense_0 (Dense)``."""
    path = "" if layer.scope is None else layer.scope.path_text
    return f"{path} ({type(layer).__name__})" if path else type(layer).__name__


@contextlib.contextmanager
def named_in_errors(layer: Module) -> Iterator[None]:
    """A region in which errors about arguments begin with the name of a layer."""
    try:
        yield
    except (LayerArgumentError, FeatureError) as error:
        raise type(error)(f"{layer_name(layer)}: {error}") from None


def make_parameters(layer: Any, **shapes: tuple[int, ...] | None) -> list[Any]:
    """The parameters of these names and shapes; None for one without a shape."""
    return [
        None
        if shape is None
        else layer.param(name, getattr(layer, f"{name}_init"), shape, layer.param_dtype)
        for name, shape in shapes.items()
    ]


def features_of(layer: Module, inputs: Any, axes: int = 0) -> int:
    """The size of the last axis; refuses inputs that have no ``axes`` axes before it."""
    shape = np.shape(inputs)
    if len(shape) > axes:
        return shape[-1]
    problem = too_few_axes(inputs, axes, "for the features", what="inputs with ")
    raise FeatureError(f"{layer_name(layer)} {problem}")
