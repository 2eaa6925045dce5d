"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from linnet.errors import LayerArgumentError
from linnet.functional import contractions, conv
from linnet.functional.conv import Padding, PerAxis
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.precision import default_param_dtype
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import (
    PromoteDtype,
    check_features,
    default_bias_init,
    default_kernel_init,
    layer_name,
    make_param,
    value_of,
)
from linnet.nnx.variablelib.variable import type_text

Array = jax.Array


def _per_axis(value: Any) -> Any:
    """Lists as tuples, which need no guard in a plan."""
    return tuple(map(_per_axis, value)) if isinstance(value, (list, tuple)) else value


def _check_arguments(layer: Any, names: Sequence[str], **numbers: PerAxis) -> None:
    """Refuses a padding, or numbers for each axis, that do not fit the kernel."""
    axes = len(layer.kernel_size)
    try:
        conv.canonical_padding(layer.padding, axes, names)
        for name, value in numbers.items():
            conv.per_axis(value, axes, name)
        conv.check_dilated(layer.padding, numbers.get("input_dilation"))
        if names is conv.TRANSPOSED_PADDINGS:
            conv.check_transposed(layer.padding, numbers["strides"])
    except LayerArgumentError as error:
        raise LayerArgumentError(f"{layer_name(layer)}: {error}") from None


def _masked_kernel(layer: Any) -> Any:
    kernel, mask = value_of(layer.kernel), value_of(layer.mask)
    if mask is not None and np.shape(mask) != kernel.shape:
        raise LayerArgumentError(
            f"{layer_name(layer)} expected a mask of the kernel's shape {kernel.shape}, but got "
            f"{type_text(mask)}.\nFix: jnp.broadcast_to(mask, {kernel.shape})."
        )
    return conv.mask_kernel(kernel, mask)


class Conv(Module):
    """Convolution over any number of axes; the features come last.

    Args:
      in_features: the size of the last axis of the input.
      out_features: the size of the last axis of the output.
      kernel_size: the size of the window, one entry for each axis it moves over; a number for one
        axis.
      strides: how far the window moves, a number for all axes or one for each.
      padding: ``"SAME"``, ``"VALID"``, ``"SAME_LOWER"``, ``"CIRCULAR"``, ``"REFLECT"`` or
        ``"CAUSAL"`` in any letter case, a number, or a number or pair (before, after) for each
        axis.
      input_dilation: the distance between inputs, with zeros between them.
      kernel_dilation: the distance between kernel entries.
      feature_group_count: how many groups the features are divided into; each output sees one.
      use_bias: add a bias.
      mask: of the kernel's shape; the kernel counts where it is 1.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      precision: as for ``jax.lax.conv_general_dilated``.
      kernel_init: the initializer of the kernel.
      bias_init: the initializer of the bias.
      conv_general_dilated: the operation.
      promote_dtype: how operands are brought to one dtype.
      preferred_element_type: as for ``jax.lax.conv_general_dilated``.
      rngs: where the keys come from.
      kernel_metadata: metadata of the kernel.
      bias_metadata: metadata of the bias.

    Raises:
      LayerArgumentError: arguments do not fit ``kernel_size``, or groups do not divide features.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Conv(3, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 8, 3))).shape
      (1, 4, 4, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: PerAxis = 1,
        *,
        padding: Padding = "SAME",
        input_dilation: PerAxis = 1,
        kernel_dilation: PerAxis = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: Any = None,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        conv_general_dilated: Callable[..., Array] = contractions.conv_general_dilated,
        promote_dtype: PromoteDtype = default_promote,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.strides = _per_axis(strides)
        self.padding = _per_axis(padding)
        self.input_dilation = _per_axis(input_dilation)
        self.kernel_dilation = _per_axis(kernel_dilation)
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        _check_arguments(
            self,
            conv.PADDINGS,
            strides=strides,
            input_dilation=input_dilation,
            kernel_dilation=kernel_dilation,
        )
        groups = feature_group_count
        if groups < 1 or in_features % groups or out_features % groups:
            raise LayerArgumentError(
                f"Conv divides its features into feature_group_count={groups} groups, but got "
                f"in_features={in_features} and out_features={out_features}.\n"
                "Fix: choose a number that divides both."
            )

        self.kernel_shape = (*self.kernel_size, in_features // groups, out_features)
        self.kernel = make_param(rngs, kernel_init, self.kernel_shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = make_param(rngs, bias_init, (out_features,), param_dtype, bias_metadata)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(*batch, *spatial, in_features)``; no batch axis, one or several.
          out_sharding: the sharding of the output.

        Returns:
          ``(*batch, *spatial, out_features)``.

        Raises:
          FeatureError: the input has too few axes, or a last axis of another size.
          LayerArgumentError: the mask has another shape than the kernel.
        """
        check_features(self, inputs, self.in_features, "in_features", len(self.kernel_size))
        operands = (inputs, _masked_kernel(self), value_of(self.bias))
        inputs, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        return conv.conv(
            inputs,
            kernel,
            bias,
            strides=self.strides,
            padding=self.padding,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            conv_general_dilated=self.conv_general_dilated,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


class ConvTranspose(Module):
    """Transposed convolution over any number of axes; the features come last.

    Args:
      in_features: the size of the last axis of the input.
      out_features: the size of the last axis of the output.
      kernel_size: the size of the window, one entry for each axis it moves over; a number for one
        axis.
      strides: how many outputs there are for each input, a number for all axes or one for each.
      padding: ``"SAME"``, ``"VALID"``, ``"CIRCULAR"`` or, for strides of 1, ``"SAME_LOWER"`` in any
        letter case, a number, or a number or pair (before, after) for each axis.
      kernel_dilation: the distance between kernel entries.
      use_bias: add a bias.
      mask: of the kernel's shape; the kernel counts where it is 1.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      precision: as for ``jax.lax.conv_general_dilated``.
      kernel_init: the initializer of the kernel.
      bias_init: the initializer of the bias.
      transpose_kernel: hold the kernel as ``(*spatial, out, in)`` and use it flipped: the gradient
        of a convolution with that kernel.
      promote_dtype: how operands are brought to one dtype.
      preferred_element_type: as for ``jax.lax.conv_general_dilated``.
      rngs: where the keys come from.
      kernel_metadata: metadata of the kernel.
      bias_metadata: metadata of the bias.

    Raises:
      LayerArgumentError: arguments do not fit ``kernel_size``, or the padding the strides.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.ConvTranspose(3, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 8, 3))).shape
      (1, 16, 16, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: PerAxis = None,
        *,
        padding: Padding = "SAME",
        kernel_dilation: PerAxis = None,
        use_bias: bool = True,
        mask: Any = None,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtype = default_promote,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.strides = _per_axis(strides)
        self.padding = _per_axis(padding)
        self.kernel_dilation = _per_axis(kernel_dilation)
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        names = conv.TRANSPOSED_PADDINGS
        _check_arguments(self, names, strides=strides, kernel_dilation=kernel_dilation)

        features = (in_features, out_features)
        self.kernel_shape = (*self.kernel_size, *(features[::-1] if transpose_kernel else features))
        self.kernel = make_param(rngs, kernel_init, self.kernel_shape, param_dtype, kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = make_param(rngs, bias_init, (out_features,), param_dtype, bias_metadata)

    def __call__(self, inputs: Array) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(*batch, *spatial, in_features)``; no batch axis, one or several.

        Returns:
          ``(*batch, *spatial, out_features)``.

        Raises:
          FeatureError: the input has too few axes, or a last axis of another size.
          LayerArgumentError: the mask has another shape than the kernel.
        """
        check_features(self, inputs, self.in_features, "in_features", len(self.kernel_size))
        operands = (inputs, _masked_kernel(self), value_of(self.bias))
        inputs, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        return conv.conv_transpose(
            inputs,
            kernel,
            bias,
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
