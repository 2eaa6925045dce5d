"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.errors import LayerArgumentError, type_text
from linnet.functional import conv, fusing
from linnet.functional.conv import Padding, PerAxis
from linnet.functional.initializers import default_bias_init, default_kernel_init
from linnet.functional.shapes import as_tuple
from linnet.linen.dtypes import promote_dtype
from linnet.linen.module import Module, compact
from linnet.linen.params import (
    Array,
    PromoteDtype,
    features_of,
    layer_name,
    make_parameters,
    named_in_errors,
)
from linnet.typing import Dtype, Initializer, PrecisionLike


def _masked(layer: Any, kernel: Array) -> Array:
    """The kernel multiplied by the layer's mask, if it has one."""
    if layer.mask is not None and np.shape(layer.mask) != np.shape(kernel):
        raise LayerArgumentError(
            f"Mask needs to have the same shape as weights, {np.shape(kernel)}, but got "
            f"{type_text(layer.mask)}.\n"
            f"Fix: jnp.broadcast_to(mask, {np.shape(kernel)})."
        )
    return conv.mask_kernel(kernel, layer.mask)


class _Conv(Module):
    """Convolution over any number of axes; the features come last.

    Args:
      features: the size of the last axis of the output.
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
      dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as for ``Dense``.
      conv_general_dilated: a function to use in place of ``jax.lax.conv_general_dilated``.
      conv_general_dilated_cls: makes such a function at each call, in place of
        ``conv_general_dilated``.
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: PerAxis = 1
    padding: Padding = "SAME"
    input_dilation: PerAxis = 1
    kernel_dilation: PerAxis = 1
    feature_group_count: int = 1
    use_bias: bool = True
    mask: Array | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    promote_dtype: PromoteDtype = promote_dtype
    conv_general_dilated: Callable[..., Array] | None = None
    conv_general_dilated_cls: Any = None

    @property
    def shared_weights(self) -> bool:
        """Whether one kernel moves over all places, or each place has its own."""
        raise NotImplementedError

    @compact
    def __call__(self, inputs: Array) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(*batch, *spatial, in)``; no batch axis, one or several.

        Returns:
          ``(*batch, *spatial, features)``.

        Raises:
          FeatureError: the input has too few axes.
          LayerArgumentError: arguments do not fit ``kernel_size`` or the input.
        """
        size = as_tuple(self.kernel_size)
        features_of(self, inputs, len(size))
        window: dict[str, Any] = {
            "strides": self.strides,
            "padding": self.padding,
            "input_dilation": self.input_dilation,
            "kernel_dilation": self.kernel_dilation,
        }
        with named_in_errors(self):
            kernel_shape, bias_shape = self._shapes(np.shape(inputs), size, window)
            used = bias_shape if self.use_bias else None
            kernel, bias = make_parameters(self, kernel=kernel_shape, bias=used)
            operands = (inputs, _masked(self, kernel), bias)
            inputs, kernel, bias = self.promote_dtype(*operands, dtype=self.dtype)
            return self._convolve(inputs, kernel, bias, window)

    def _shapes(self, inputs: Any, size: Any, window: Any) -> tuple[Any, Any]:
        """The shapes of kernel and bias."""
        raise NotImplementedError

    def _convolve(self, inputs: Array, kernel: Array, bias: Any, window: Any) -> Array:
        raise NotImplementedError


class Conv(_Conv):
    __doc__ = f"""{_Conv.__doc__}
    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> layer = nn.Conv(4, (3, 3), strides=2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 8, 8, 3)))[0].shape
      (1, 4, 4, 4)
    """

    @property
    def shared_weights(self) -> bool:
        """True: one kernel moves over all places."""
        return True

    def _shapes(self, inputs: Any, size: Any, window: Any) -> tuple[Any, Any]:
        groups = self.feature_group_count
        if groups < 1 or inputs[-1] % groups or self.features % groups:
            raise LayerArgumentError(
                f"the features are divided into feature_group_count={groups} groups, but the input "
                f"has {inputs[-1]} and the output {self.features}.\n"
                "Fix: choose a number that divides both."
            )
        return (*size, inputs[-1] // groups, self.features), (self.features,)

    def _convolve(self, inputs: Array, kernel: Array, bias: Any, window: Any) -> Array:
        operation = fusing.chosen(
            self.conv_general_dilated_cls, self.conv_general_dilated, fusing.conv_general_dilated
        )
        return conv.conv(
            inputs,
            kernel,
            bias,
            feature_group_count=self.feature_group_count,
            conv_general_dilated=operation,
            precision=self.precision,
            **window,
        )


class ConvLocal(_Conv):
    """Convolution with a kernel of its own at each place of the output.

    The kernel has shape ``(*places, in * window, features)``. Arguments as for ``Conv``, but
    features are not divided into groups.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> y, variables = nn.ConvLocal(4, 3).init_with_output(jax.random.key(0), jnp.ones((1, 8, 2)))
      >>> y.shape, variables["params"]["kernel"].shape
      ((1, 8, 4), (8, 6, 4))
    """

    @property
    def shared_weights(self) -> bool:
        """False: each place has its own kernel."""
        return False

    def _shapes(self, inputs: Any, size: Any, window: Any) -> tuple[Any, Any]:
        if self.feature_group_count != 1:
            raise NotImplementedError(
                f"{layer_name(self)} does not divide its features into groups, but got "
                f"feature_group_count={self.feature_group_count}.\nFix: leave it 1."
            )
        places = conv.conv_shape(inputs, self.features, size, **window)[-len(size) - 1 : -1]
        rows = inputs[-1] * int(np.prod(size))
        return (*places, rows, self.features), (*places, self.features)

    def _convolve(self, inputs: Array, kernel: Array, bias: Any, window: Any) -> Array:
        size = as_tuple(self.kernel_size)
        return conv.conv_local(
            inputs, kernel, bias, kernel_size=size, precision=self.precision, **window
        )


class ConvTranspose(Module):
    """Transposed convolution over any number of axes; the features come last.

    Args:
      features, kernel_size, kernel_dilation: as for ``Conv``.
      strides: how many outputs there are for each input, a number for all axes or one for each.
      padding: ``"SAME"``, ``"VALID"``, ``"CIRCULAR"`` or, for strides of 1, ``"SAME_LOWER"`` in any
        letter case, a number, or a number or pair (before, after) for each axis.
      use_bias, mask, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as for
        ``Conv``.
      transpose_kernel: hold the kernel as ``(*spatial, features, in)`` and use it flipped: the
        gradient of a convolution with that kernel.
      preferred_element_type: the dtype that the convolution accumulates in and returns.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> layer = nn.ConvTranspose(4, (3, 3), strides=(2, 2))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 8, 8, 3)))[0].shape
      (1, 16, 16, 4)
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: Sequence[int] | None = None
    padding: Padding = "SAME"
    kernel_dilation: Sequence[int] | None = None
    use_bias: bool = True
    mask: Array | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    transpose_kernel: bool = False
    promote_dtype: PromoteDtype = promote_dtype
    preferred_element_type: Dtype | None = None

    @compact
    def __call__(self, inputs: Array) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(*batch, *spatial, in)``; no batch axis, one or several.

        Returns:
          ``(*batch, *spatial, features)``.

        Raises:
          FeatureError: the input has too few axes.
          LayerArgumentError: arguments do not fit ``kernel_size``, or the padding the strides.
        """
        size = as_tuple(self.kernel_size)
        ends = (features_of(self, inputs, len(size)), self.features)
        shape = (*size, *(reversed(ends) if self.transpose_kernel else ends))
        bias_shape = (self.features,) if self.use_bias else None
        kernel, bias = make_parameters(self, kernel=shape, bias=bias_shape)
        with named_in_errors(self):
            operands = (inputs, _masked(self, kernel), bias)
            inputs, kernel, bias = self.promote_dtype(*operands, dtype=self.dtype)
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
