"""A layer written as an einsum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional import contractions, linear
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.precision import default_param_dtype
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import (
    PromoteDtype,
    default_bias_init,
    default_kernel_init,
    layer_name,
    make_param,
    value_of,
)
from linnet.nnx.variablelib.variable import type_text

Array = jax.Array


class Einsum(Module):
    """Contraction of the input with a kernel, written as an einsum.

    Args:
      einsum_str: ``"inputs,kernel->output"``; may be None where every call gives one.
      kernel_shape: the shape of the kernel.
      bias_shape: the shape of the bias, a size for each kernel axis that is in the output; None
        for no bias.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      precision: as for ``jnp.einsum``.
      kernel_init: the initializer of the kernel.
      bias_init: the initializer of the bias.
      promote_dtype: how operands are brought to one dtype.
      einsum_op: the contraction, as ``jnp.einsum``.
      preferred_element_type: as for ``jnp.einsum``.
      rngs: where the keys come from.
      kernel_metadata: metadata of the kernel.
      bias_metadata: metadata of the bias.

    Raises:
      LayerArgumentError: the equation does not have two operands and an output, or does not fit
        the shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((16, 11, 2))).shape
      (16, 11, 8, 4)
    """

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtype = default_promote,
        einsum_op: Callable[..., Array] = contractions.einsum,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.einsum_str = None if einsum_str is None else einsum_str.replace(" ", "")
        self.kernel_shape = tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else tuple(bias_shape)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = preferred_element_type
        if self.einsum_str is not None:
            self._check_equation(self.einsum_str)
        self.kernel = make_param(rngs, kernel_init, self.kernel_shape, param_dtype, kernel_metadata)
        self.bias = None
        if self.bias_shape is not None:
            self.bias = make_param(rngs, bias_init, self.bias_shape, param_dtype, bias_metadata)

    def __call__(
        self, inputs: Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> Array:
        """Applies the layer.

        Args:
          inputs: the first operand.
          einsum_str: the equation of this call; by default the layer's.
          out_sharding: the sharding of the output.

        Returns:
          The output of the einsum, plus the bias.

        Raises:
          LayerArgumentError: there is no equation, or it does not fit the parameters.
          FeatureError: the input does not fit the equation.
        """
        if einsum_str is not None:
            equation = einsum_str.replace(" ", "")
            self._check_equation(equation)
        elif self.einsum_str is not None:
            equation = self.einsum_str
        else:
            raise LayerArgumentError(
                f"{layer_name(self)} has no equation.\n"
                "Fix: give einsum_str to the constructor or to the call."
            )
        self._check_input(inputs, equation)
        operands = (inputs, value_of(self.kernel), value_of(self.bias))
        inputs, kernel, bias = self.promote_dtype(operands, dtype=self.dtype)
        return linear.einsum(
            inputs,
            kernel,
            bias,
            equation=equation,
            op=self.einsum_op,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )

    def _check_equation(self, equation: str) -> None:
        """Refuses an equation that does not fit the parameters."""
        try:
            _, kernel, _ = linear.einsum_axes(equation)
        except ValueError as error:
            raise LayerArgumentError(f"{layer_name(self)}: {error}") from None
        if "..." not in kernel and len(kernel) != len(self.kernel_shape):
            raise LayerArgumentError(
                f"{layer_name(self)}: {equation!r} has {len(kernel)} axes for the kernel, but "
                f"kernel_shape={self.kernel_shape}.\n"
                "Fix: write one letter for each axis of the kernel, after the comma."
            )
        if self.bias_shape is None:
            return
        wanted = linear.einsum_bias_shape(equation, self.kernel_shape)
        if math.prod(wanted) != math.prod(self.bias_shape):
            sizes = tuple(size for size in wanted if size != 1)
            raise LayerArgumentError(
                f"{layer_name(self)}: the kernel gives {equation!r} output axes of size {sizes}, "
                f"but bias_shape={self.bias_shape}.\nFix: bias_shape={sizes}, or None for no bias."
            )

    def _check_input(self, inputs: Any, equation: str) -> None:
        """Refuses an input whose axes are more, fewer or of another size than the kernel's."""
        names, kernel, _ = linear.einsum_axes(equation)
        shape = np.shape(inputs)
        if "..." in names:
            fits = len(shape) >= len(names) - 1
            place = names.index("...")
            hidden = [""] * (len(shape) - len(names) + 1)
            names = [*names[:place], *hidden, *names[place + 1 :]]
        else:
            fits = len(shape) == len(names)
        sizes = {} if "..." in kernel else dict(zip(kernel, self.kernel_shape, strict=True))
        if fits and all(sizes.get(name, n) == n for name, n in zip(names, shape, strict=True)):
            return
        known = ", ".join(f"{name} = {sizes[name]}" for name in names if name in sizes)
        raise FeatureError(
            f"{layer_name(self)} computes {equation!r} with a kernel of {self.kernel_shape}"
            f"{', so that ' + known if known else ''}, but got {type_text(inputs)}.\n"
            "Fix: build it with another kernel_shape, or give the input the axes of the equation."
        )
