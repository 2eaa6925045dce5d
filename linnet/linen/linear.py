"""Layers that contract with a kernel, and embedding tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import FeatureError, LayerArgumentError, type_text
from linnet.functional import fusing, linear
from linnet.functional.conv import canonicalize_padding as canonicalize_padding
from linnet.functional.initializers import (
    default_bias_init as default_bias_init,
    default_embed_init as default_embed_init,
    default_kernel_init as default_kernel_init,
)
from linnet.functional.shapes import as_tuple, refuse_inputs
from linnet.linen.conv import Conv as Conv, ConvLocal as ConvLocal, ConvTranspose as ConvTranspose
from linnet.linen.dtypes import promote_dtype
from linnet.linen.module import Module, compact, merge_param
from linnet.linen.params import (
    Array,
    PromoteDtype,
    features_of,
    layer_name,
    make_parameters,
    named_in_errors,
)
from linnet.typing import (
    ConvGeneralDilatedT as ConvGeneralDilatedT,
    DotGeneralT as DotGeneralT,
    Dtype,
    Initializer,
    PrecisionLike as PrecisionLike,
    PromoteDtypeFn as PromoteDtypeFn,
)


class Dense(Module):
    """Affine map of the last axis: ``y = x @ kernel + bias``.

    Args:
      features: the size of the last axis of the output.
      use_bias: add a bias.
      dtype: compute in this dtype.
      param_dtype: the dtype of the parameters.
      precision: the precision of the contraction.
      kernel_init, bias_init: the initializers of the parameters.
      promote_dtype: converts inputs and parameters to one dtype.
      dot_general: a function to use in place of ``jax.lax.dot_general``.
      dot_general_cls: makes such a function at each call, in place of ``dot_general``.

    Example:
      >>> from linnet import linen as nn
      >>> y, variables = nn.Dense(4).init_with_output(jax.random.key(0), jnp.ones((1, 3)))
      >>> y.shape, jax.tree.map(jnp.shape, variables)
      ((1, 4), {'params': {'bias': (4,), 'kernel': (3, 4)}})
    """

    features: int
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    promote_dtype: PromoteDtype = promote_dtype
    dot_general: Callable[..., Array] | None = None
    dot_general_cls: Any = None

    @compact
    def __call__(self, inputs: Array) -> Array:
        """Applies the layer.

        Args:
          inputs: ``(..., in)``.

        Returns:
          ``(..., features)``.

        Raises:
          FeatureError: the input has no axis.
          ScopeParamShapeError: the layer has parameters for another input.
        """
        shape = (features_of(self, inputs), self.features)
        bias_shape = (self.features,) if self.use_bias else None
        kernel, bias = make_parameters(self, kernel=shape, bias=bias_shape)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return linear.dense(
            inputs,
            kernel,
            bias,
            dot_general=fusing.chosen(self.dot_general_cls, self.dot_general, fusing.dot_general),
            precision=self.precision,
        )


def _drawn_as(init: Initializer, drawn: tuple[int, ...]) -> Initializer:
    """An initializer that draws in another shape, and reshapes what it drew, boxed or not."""

    def drawn_flat(key: Any, shape: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: jnp.reshape(x, shape), init(key, drawn, dtype))

    return drawn_flat


class DenseGeneral(Module):
    """Affine map of several axes at once, with a separate kernel for each entry of batch axes.

    The kernel has shape ``(*batch, *in, *features)`` and is drawn as one matrix, with batch and
    inputs as its rows.

    Args:
      features: the sizes of the axes that take the place of the contracted ones, last in the
        output.
      axis: the axes that are contracted, in ascending order, whatever order they are written in.
      batch_dims: leading axes of the input that have a kernel for each entry.
      use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype, dot_general,
        dot_general_cls: as for ``Dense``.

    Example:
      >>> from linnet import linen as nn
      >>> layer = nn.DenseGeneral((4, 5), axis=(-2, -1))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((7, 2, 3)))[0].shape
      (7, 4, 5)
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    batch_dims: Sequence[int] = ()
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    precision: PrecisionLike = None
    promote_dtype: PromoteDtype = promote_dtype
    dot_general: Callable[..., Array] | None = None
    dot_general_cls: Any = None

    @compact
    def __call__(self, inputs: Array) -> Array:
        """Applies the layer.

        Args:
          inputs: any shape that has the axes.

        Returns:
          ``(*batch, *rest of inputs, *features)``.

        Raises:
          FeatureError: an axis is missing.
          LayerArgumentError: the batch axes are not the leading ones.
        """
        batch_axis, axis = self._axes(inputs)
        batch, ins = (tuple(inputs.shape[a] for a in axes) for axes in (batch_axis, axis))
        outs = as_tuple(self.features)
        kernel_init = _drawn_as(self.kernel_init, (math.prod(batch + ins), math.prod(outs)))
        kernel = self.param("kernel", kernel_init, (*batch, *ins, *outs), self.param_dtype)
        bias = None
        if self.use_bias:
            bias_init = _drawn_as(self.bias_init, (math.prod(batch + outs),))
            bias = self.param("bias", bias_init, batch + outs, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return linear.dense_general(
            inputs,
            kernel,
            bias,
            axis=axis,
            batch_axis=batch_axis,
            dot_general=fusing.chosen(self.dot_general_cls, self.dot_general, fusing.dot_general),
            precision=self.precision,
        )

    def _axes(self, inputs: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The batch axes and the contracted axes, sorted; refuses those that do not fit."""
        ndim = jnp.ndim(inputs)
        batch, axis = (
            tuple(sorted(a + ndim if a < 0 else a for a in as_tuple(axes)))
            for axes in (self.batch_dims, self.axis)
        )
        if batch != tuple(range(len(batch))):
            raise LayerArgumentError(
                f"{layer_name(self)} takes leading axes as batch axes, but got batch_dims="
                f"{self.batch_dims}: they must be consecutive leading dimensions starting from 0.\n"
                "Fix: move them to the front of the input and number them from 0."
            )
        if all(0 <= a < ndim for a in axis) and len({*batch, *axis}) == len(batch) + len(axis):
            return batch, axis
        raise FeatureError(
            f"{layer_name(self)} contracts axes {self.axis}, beside batch axes {batch}, but got "
            f"{type_text(inputs)}.\nFix: choose other axes, or give the input more."
        )


class Einsum(Module):
    """Contraction of the input with a kernel, written as an einsum.

    Args:
      shape: the shape of the kernel.
      einsum_str: ``"inputs,kernel->output"``; may be given to the call instead.
      use_bias: add a bias, with a size for each kernel axis that is in the output.
      dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as for ``Dense``.
      preferred_element_type: the dtype that the contraction accumulates in and returns.

    Example:
      >>> from linnet import linen as nn
      >>> layer = nn.Einsum((8, 2, 4), "nta,hab->nthb")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((16, 11, 2)))[0].shape
      (16, 11, 8, 4)
    """

    shape: Sequence[int]
    einsum_str: str | None = None
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    promote_dtype: PromoteDtype = promote_dtype
    preferred_element_type: Dtype | None = None

    @compact
    def __call__(self, inputs: Array, einsum_str: str | None = None) -> Array:
        """Applies the layer.

        Args:
          inputs: the first operand.
          einsum_str: the equation, where the layer has none.

        Returns:
          The output of the einsum, plus the bias.

        Raises:
          ValueError: the equation is given neither here nor to the layer, or to both.
          LayerArgumentError: it does not fit the kernel.
        """
        equation = merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        shape = as_tuple(self.shape)
        with named_in_errors(self):
            bias_shape = linear.einsum_bias_shape(equation, shape)
        used = bias_shape if self.use_bias else None
        kernel, bias = make_parameters(self, kernel=shape, bias=used)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return linear.einsum(
            inputs,
            kernel,
            bias,
            equation=equation,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


class Embed(Module):
    """A table of vectors, one for each index.

    Args:
      num_embeddings: how many vectors.
      features: their size.
      dtype: of the output; by default that of the precision policy, or of the table.
      param_dtype: the dtype of the table.
      embedding_init: the initializer of the table.
      promote_dtype: converts inputs and parameters to one dtype.

    Example:
      >>> from linnet import linen as nn
      >>> layer = nn.Embed(5, 3)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[1, 4]]))
      >>> y.shape
      (1, 2, 3)
      >>> layer.apply(variables, jnp.ones((1, 3)), method="attend").shape
      (1, 5)
    """

    num_embeddings: int
    features: int
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    embedding_init: Initializer = default_embed_init
    promote_dtype: PromoteDtype = promote_dtype

    def setup(self) -> None:
        """Makes the table."""
        shape = (self.num_embeddings, self.features)
        self.embedding = self.param("embedding", self.embedding_init, shape, self.param_dtype)

    def __call__(self, inputs: Array) -> Array:
        """Looks up the vectors of indices.

        Args:
          inputs: integers; negative ones count from the end, those beyond the table give nan. With
            one vector every index stands for it.

        Returns:
          ``(*inputs.shape, features)``.

        Raises:
          FeatureError: the indices are not integers.
        """
        refuse_inputs(self, linear.why_no_indices(inputs, jnp.result_type(inputs)), layer_name)
        (table,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        return linear.embed(table, inputs)

    def attend(self, query: Array) -> Array:
        """Scores a query against every vector, as in a language model's last layer.

        Args:
          query: ``(..., features)``.

        Returns:
          ``(..., num_embeddings)``.

        Raises:
          FeatureError: the last axis has another size.
        """
        shape = np.shape(query)
        if not shape or shape[-1] != self.features:
            raise FeatureError(
                f"{layer_name(self)} expected queries whose last axis has size {self.features}, "
                f"but got {type_text(query)}.\nFix: move the feature axis last."
            )
        query, table = self.promote_dtype(query, self.embedding, dtype=self.dtype)
        return linear.attend(table, query)
