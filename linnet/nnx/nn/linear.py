"""Layers that contract with a kernel, and embedding tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from linnet.errors import FeatureError, LayerArgumentError, type_text
from linnet.frozen_dict import FrozenDict
from linnet.functional import fusing, linear
from linnet.functional.dtypes import default_param_dtype, promote_dtype as default_promote
from linnet.functional.initializers import Initializer, default_embed_init as default_embed_init
from linnet.functional.shapes import as_tuple, refuse_inputs
from linnet.nnx.modules.module import Module, with_scope_and_policy
from linnet.nnx.nn.conv import (
    Conv as Conv,
    ConvTranspose as ConvTranspose,
    canonicalize_padding as canonicalize_padding,
)
from linnet.nnx.nn.params import (
    KernelLayer,
    PromoteDtype as PromoteDtype,
    check_features,
    default_bias_init as default_bias_init,
    default_kernel_init as default_kernel_init,
    given_dtype,
    layer_name,
    make_param,
    make_parameters,
    parameter_value,
    store_arguments,
)


class Linear(KernelLayer):
    """Affine map of the last axis: ``y = x @ kernel + bias``.

    Args:
      in_features: the size of the last axis of the input.
      out_features: the size of the last axis of the output.
      use_bias: add a bias.
      dtype: compute in this dtype; by default the promoted dtype of the operands.
      param_dtype: the dtype of the parameters; by default that of the precision policy, or float32.
      precision: the precision of the contraction.
      kernel_init, bias_init: the initializers of the parameters.
      dot_general: a function to use in place of ``jax.lax.dot_general``.
      promote_dtype: converts inputs and parameters to one dtype.
      preferred_element_type: the dtype that the contraction accumulates in and returns.
      rngs: the random streams that parameters are drawn from.
      kernel_metadata, bias_metadata: metadata of the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 3))).shape
      (1, 4)
    """

    in_features: int
    out_features: int
    use_bias: bool
    dot_general: Callable[..., Array]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Callable[..., Array] = fusing.dot_general,
        promote_dtype: PromoteDtype = default_promote,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        given = dict(locals())
        shapes = {"kernel": (in_features, out_features), "bias": (out_features,)}
        make_parameters(self, given, shapes)
        store_arguments(self, given)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(..., in_features)``.
          out_sharding: the sharding of the output.

        Returns:
          ``(..., out_features)``.

        Raises:
          FeatureError: the last axis has another size.
        """
        check_features(self, inputs, self.in_features, "in_features")
        inputs, kernel, bias = self._promoted(inputs)
        return linear.dense(
            inputs,
            kernel,
            bias,
            dot_general=self.dot_general,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


class LinearGeneral(KernelLayer):
    """Affine map of several axes at once, with a separate kernel for each entry of batch axes.

    The kernel has shape ``(*batch, *in_features, *out_features)`` and is drawn as one matrix, with
    batch and inputs as its rows.

    Args:
      in_features: the sizes of the axes that are contracted.
      out_features: the sizes of the axes that take their place, last in the output.
      axis: the axes that are contracted, in ascending order, whatever order they are written in.
      batch_axis: leading axes of the input that have a kernel for each entry, with their sizes.
      dot_general_cls: makes a ``dot_general`` at each call, in place of the one given.
      use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype, dot_general,
        preferred_element_type, rngs, kernel_metadata, bias_metadata: as for ``Linear``.

    Raises:
      LayerArgumentError: ``axis`` and ``in_features`` differ in length, or the batch axes are not
        the leading ones.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((7, 2, 3))).shape
      (7, 4, 5)
    """

    dot_general: Callable[..., Array] | None
    dot_general_cls: Any

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = {},
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: Any = None,
        promote_dtype: PromoteDtype = default_promote,
        dot_general: Callable[..., Array] | None = None,
        dot_general_cls: Any = None,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        given = dict(locals())
        self.in_features = ins = as_tuple(in_features)
        self.out_features = outs = as_tuple(out_features)
        self.axis = as_tuple(axis)
        self.batch_axis = FrozenDict(dict(sorted(batch_axis.items())))
        store_arguments(self, given, "in_features", "out_features", "axis", "batch_axis")
        if len(self.axis) != len(self.in_features):
            raise LayerArgumentError(
                f"LinearGeneral wants one entry of in_features for each axis, but got in_features="
                f"{self.in_features} and axis={self.axis}.\n"
                "Fix: list as many axes as there are input sizes, for example axis=(-2, -1)."
            )
        if list(self.batch_axis) != list(range(len(self.batch_axis))):
            raise LayerArgumentError(
                f"LinearGeneral takes leading axes as batch axes, but got batch_axis="
                f"{dict(self.batch_axis)}.\n"
                "Fix: move them to the front of the input and number them from 0."
            )
        batch = tuple(self.batch_axis.values())
        matrix, flat = (math.prod(batch + ins), math.prod(outs)), (math.prod(batch + outs),)
        shapes = {"kernel": (*batch, *ins, *outs), "bias": batch + outs}
        make_parameters(self, given, shapes, drawn_as={"kernel": matrix, "bias": flat})

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Applies the layer.

        Args:
          inputs: any shape that has the axes the layer was built for.
          out_sharding: the sharding of the output.

        Returns:
          ``(*batch, *rest of inputs, *out_features)``.

        Raises:
          FeatureError: an axis is missing or has another size.
        """
        axis = self._check(inputs)
        inputs, kernel, bias = self._promoted(inputs)
        return linear.dense_general(
            inputs,
            kernel,
            bias,
            axis=axis,
            batch_axis=tuple(self.batch_axis),
            dot_general=fusing.chosen(self.dot_general_cls, self.dot_general, fusing.dot_general),
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )

    def _check(self, inputs: Any) -> tuple[int, ...]:
        """Returns the contracted axes, sorted, and refuses an input that does not have them."""
        shape = np.shape(inputs)
        ndim = len(shape)
        axis = tuple(sorted(a + ndim if a < 0 else a for a in self.axis))
        wanted = {**self.batch_axis, **dict(zip(axis, self.in_features, strict=True))}
        fits = all(0 <= a < ndim and shape[a] == size for a, size in wanted.items())
        if fits and len(wanted) == len(axis) + len(self.batch_axis):
            return axis
        sizes = ", ".join(str(size) for size in self.in_features)
        batch = f" and batch axes {dict(self.batch_axis)}" if self.batch_axis else ""
        raise FeatureError(
            f"{layer_name(self)} expected inputs of size ({sizes}) on axes {self.axis}{batch}, but "
            f"got {type_text(inputs)}.\n"
            "Fix: build it with in_features and axis as in the input, or move the axes."
        )


class Einsum(KernelLayer):
    """Contraction of the input with a kernel, written as an einsum.

    Args:
      einsum_str: ``"inputs,kernel->output"``; may be None where every call gives one.
      kernel_shape: the shape of the kernel; an int for a vector.
      bias_shape: the shape of the bias, a size for each kernel axis that is in the output, those of
        ``...`` in the kernel included; an int for a vector, None for no bias.
      einsum_op: a function to use in place of ``jnp.einsum``.
      dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype, preferred_element_type,
        rngs, kernel_metadata, bias_metadata: as for ``Linear``.

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

    einsum_str: str | None
    kernel_shape: tuple[int, ...]
    bias_shape: tuple[int, ...] | None
    einsum_op: Callable[..., Array]

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: int | Sequence[int],
        bias_shape: int | Sequence[int] | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        precision: Any = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtype = default_promote,
        einsum_op: Callable[..., Array] = fusing.einsum,
        preferred_element_type: Any = None,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        einsum_str = None if einsum_str is None else einsum_str.replace(" ", "")
        kernel_shape = as_tuple(kernel_shape)
        bias_shape = None if bias_shape is None else as_tuple(bias_shape)
        given = dict(locals())
        store_arguments(self, given)
        if einsum_str is not None:
            self._check_equation(einsum_str)
        make_parameters(self, given, {"kernel": kernel_shape, "bias": bias_shape})

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
        inputs, kernel, bias = self._promoted(inputs)
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
            linear.check_einsum_kernel(equation, self.kernel_shape)
        except ValueError as error:
            raise LayerArgumentError(f"{layer_name(self)}: {error}") from None
        if self.bias_shape is None:
            return
        wanted = linear.einsum_bias_shape(equation, self.kernel_shape)
        if math.prod(wanted) != math.prod(self.bias_shape):
            raise LayerArgumentError(
                f"{layer_name(self)}: the kernel gives {equation!r} output axes of size {wanted}, "
                f"but bias_shape={self.bias_shape}.\nFix: bias_shape={wanted}, or None for no bias."
            )

    def _check_input(self, inputs: Any, equation: str) -> None:
        """Refuses an input whose axes do not fit the equation and the kernel."""
        names, _, _ = linear.einsum_axes(equation)
        shape = np.shape(inputs)
        if "..." in names:
            fits = len(shape) >= len(names) - 1
            place = names.index("...")
            hidden = [""] * (len(shape) - len(names) + 1)
            names = [*names[:place], *hidden, *names[place + 1 :]]
        else:
            fits = len(shape) == len(names)
        sizes, _ = linear.einsum_kernel_sizes(equation, self.kernel_shape)
        if fits and all(sizes.get(name, n) == n for name, n in zip(names, shape, strict=True)):
            return
        known = ", ".join(f"{name} = {sizes[name]}" for name in names if name in sizes)
        raise FeatureError(
            f"{layer_name(self)} computes {equation!r} with a kernel of {self.kernel_shape}"
            f"{', so that ' + known if known else ''}, but got {type_text(inputs)}.\n"
            "Fix: build it with another kernel_shape, or give the input the axes of the equation."
        )


class Embed(Module):
    """A table of vectors, one for each index.

    Args:
      num_embeddings: how many vectors.
      features: their size.
      dtype: of the output; by default that of the precision policy, or of the table.
      param_dtype: the dtype of the table; by default that of the precision policy, or float32.
      embedding_init: the initializer of the table.
      promote_dtype, rngs: as for ``Linear``.
      embedding_metadata: metadata of the table.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1, 4]])).shape
      (1, 2, 3)
      >>> layer.attend(jnp.ones((1, 3))).shape
      (1, 5)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        embedding_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        shape = (num_embeddings, features)
        self.embedding = make_param(rngs, embedding_init, shape, param_dtype, embedding_metadata)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = jnp.dtype(param_dtype) if dtype is None else dtype
        self.dtype_is_default = dtype is None
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Looks up the vectors of indices.

        Args:
          inputs: integers; negative ones count from the end, those beyond the table give nan. With
            one vector every index stands for it.
          out_sharding: the sharding of the output.

        Returns:
          ``(*inputs.shape, features)``.

        Raises:
          FeatureError: the indices are not integers.
        """
        refuse_inputs(self, linear.why_no_indices(inputs, _dtype_of(inputs)), layer_name)
        table = parameter_value(self.embedding)
        (table,) = self.promote_dtype((table,), dtype=given_dtype(self), inexact=False)
        return linear.embed(table, inputs, out_sharding=out_sharding)

    @with_scope_and_policy
    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        """Scores a query against every vector, as in a language model's last layer.

        Args:
          query: ``(..., features)``.
          out_sharding: the sharding of the output.

        Returns:
          ``(..., num_embeddings)``.

        Raises:
          FeatureError: the last axis has another size.
        """
        check_features(self, query, self.features, "features")
        operands = (query, parameter_value(self.embedding))
        query, table = self.promote_dtype(operands, dtype=given_dtype(self))
        return linear.attend(table, query, out_sharding=out_sharding)


def _dtype_of(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
