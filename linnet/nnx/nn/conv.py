"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from linnet.errors import LayerArgumentError, type_text
from linnet.functional import conv, fusing
from linnet.functional.conv import Padding, PerAxis, canonicalize_padding as canonicalize_padding
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.shapes import as_tuple
from linnet.nnx.nn.params import (
    KernelLayer,
    PromoteDtype,
    check_features,
    default_bias_init,
    default_kernel_init,
    given_dtype,
    layer_name,
    make_parameters,
    parameter_value,
    store_arguments,
)
from linnet.nnx.variablelib.operators import value_of


class ConvolutionLayer(KernelLayer):
    """What the convolutions share: their constructor, and the promotion of their operands."""

    in_features: int
    out_features: int
    kernel_size: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    strides: PerAxis
    padding: Padding
    kernel_dilation: PerAxis
    use_bias: bool
    mask: Any

    def _build(self, given: Mapping[str, Any], paddings: Sequence[str]) -> None:
        """Stores the arguments of a constructor, checks them and makes the parameters."""
        given = {**given, "kernel_size": as_tuple(given["kernel_size"])}
        names = ("strides", "input_dilation", "kernel_dilation")
        numbers = {name: given[name] for name in names if name in given}
        for name in (*numbers, "padding"):
            given[name] = fusing.as_tuples(given[name])  # tuples need no guard in a plan
        store_arguments(self, given)
        axes = len(self.kernel_size)
        try:
            conv.canonical_padding(self.padding, axes, paddings)
            for name, value in numbers.items():
                conv.per_axis(value, axes, name)
            conv.check_dilated(self.padding, numbers.get("input_dilation"))
            if paddings is conv.TRANSPOSED_PADDINGS:
                conv.check_transposed(self.padding, numbers["strides"])
        except LayerArgumentError as error:
            raise LayerArgumentError(f"{layer_name(self)}: {error}") from None
        self.kernel_shape = (*self.kernel_size, *self._kernel_features())
        shapes = {"kernel": self.kernel_shape, "bias": (self.out_features,)}
        make_parameters(self, given, shapes)

    def _kernel_features(self) -> tuple[int, int]:
        """The sizes of the last two axes of the kernel."""
        raise NotImplementedError

    def _promoted(self, inputs: Any) -> Any:
        check_features(self, inputs, self.in_features, "in_features", len(self.kernel_size))
        kernel, mask = parameter_value(self.kernel), value_of(self.mask)
        if mask is not None and np.shape(mask) != kernel.shape:
            raise LayerArgumentError(
                f"{layer_name(self)} expected a mask of the kernel's shape {kernel.shape}, but got "
                f"{type_text(mask)}.\nFix: jnp.broadcast_to(mask, {kernel.shape})."
            )
        operands = (inputs, conv.mask_kernel(kernel, mask), parameter_value(self.bias))
        return self.promote_dtype(operands, dtype=given_dtype(self))


class Conv(ConvolutionLayer):
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
      mask: an array of the kernel's shape that the kernel is multiplied by.
      conv_general_dilated: a function to use in place of ``jax.lax.conv_general_dilated``.
      dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype, preferred_element_type,
        rngs, kernel_metadata, bias_metadata: as for ``Linear``.

    Raises:
      LayerArgumentError: arguments do not fit ``kernel_size``, or groups do not divide features.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Conv(3, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 8, 3))).shape
      (1, 4, 4, 4)
    """

    input_dilation: PerAxis
    feature_group_count: int
    conv_general_dilated: Callable[..., Array]

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
        conv_general_dilated: Callable[..., Array] = fusing.conv_general_dilated,
        promote_dtype: PromoteDtype = default_promote,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        self._build(locals(), conv.PADDINGS)

    def _kernel_features(self) -> tuple[int, int]:
        groups = self.feature_group_count
        if groups < 1 or self.in_features % groups or self.out_features % groups:
            raise LayerArgumentError(
                f"Conv divides its features into feature_group_count={groups} groups, but got "
                f"in_features={self.in_features} and out_features={self.out_features}.\n"
                "Fix: choose a number that divides both."
            )
        return self.in_features // groups, self.out_features

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
        inputs, kernel, bias = self._promoted(inputs)
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


class ConvTranspose(ConvolutionLayer):
    """Transposed convolution over any number of axes; the features come last.

    Args:
      in_features, out_features, kernel_size, kernel_dilation: as for ``Conv``.
      strides: how many outputs there are for each input, a number for all axes or one for each.
      padding: ``"SAME"``, ``"VALID"``, ``"CIRCULAR"`` or, for strides of 1, ``"SAME_LOWER"`` in any
        letter case, a number, or a number or pair (before, after) for each axis.
      transpose_kernel: hold the kernel as ``(*spatial, out, in)`` and use it flipped: the gradient
        of a convolution with that kernel.
      use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype,
        preferred_element_type, rngs, kernel_metadata, bias_metadata: as for ``Conv``.

    Raises:
      LayerArgumentError: arguments do not fit ``kernel_size``, or the padding the strides.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.ConvTranspose(3, 4, (3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 8, 8, 3))).shape
      (1, 16, 16, 4)
    """

    transpose_kernel: bool

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
        self._build(locals(), conv.TRANSPOSED_PADDINGS)

    def _kernel_features(self) -> tuple[int, int]:
        if self.transpose_kernel:
            return self.out_features, self.in_features
        return self.in_features, self.out_features

    def __call__(self, inputs: Array) -> Array:
        """Applies the layer; the input, the output's axes and the errors are as for ``Conv``."""
        inputs, kernel, bias = self._promoted(inputs)
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
