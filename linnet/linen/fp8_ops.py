"""Contractions in 8-bit floating point, to be given to layers as ``dot_general_cls``.

Their scales and histories are in the collection ``_overwrite_with_gradient``: the gradients of its
entries are their next values, to be stored as they are. See ``linnet.functional.fp8``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from linnet.functional import fp8
from linnet.functional.fp8 import (
    OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT,
    compute_amax_history as compute_amax_history,
    compute_scale as compute_scale,
    dequantize as dequantize,
    dot_general_with_precision as dot_general_with_precision,
    fp8_scaled_dot_general as fp8_scaled_dot_general,
    get_fp8_max as get_fp8_max,
    in_q as in_q,
    in_qdq as in_qdq,
    out_dq as out_dq,
    out_qdq as out_qdq,
    qdq as qdq,
    quantize as quantize,
    quantize_dequantize_update as quantize_dequantize_update,
    quantized_dot as quantized_dot,
    update_fp8_meta as update_fp8_meta,
)
from linnet.functional.linear import einsum_by
from linnet.linen.module import Module, compact
from linnet.linen.params import Array
from linnet.typing import Dtype


class Fp8DotGeneralBase(Module):
    """What the contractions share: scales and histories; arguments as for ``Fp8DotGeneralOp``."""

    amax_history_length: int = 1024
    e4m3_dtype: Dtype = jnp.float8_e4m3fn
    e5m2_dtype: Dtype = jnp.float8_e5m2

    def _meta(self) -> dict[str, tuple[Array, Array]]:
        """Scale and history of the input, of the kernel and of the output's gradient."""
        found = {}
        for of in ("input", "kernel", "output_grad"):
            scale, history = (
                self.variable(OVERWRITE_WITH_GRADIENT, f"{of}_{name}", init, (size,), jnp.float32)
                for name, init, size in (
                    ("scale", jnp.ones, 1),
                    ("amax_history", jnp.zeros, self.amax_history_length),
                )
            )
            found[of] = (scale.value, history.value)
        return found

    def _scaled(self, meta: Any, compute_dtype: Any) -> Any:
        """A contraction in 8 bits with these scales."""
        options = {}
        for of, name in (("input", "lhs"), ("kernel", "rhs"), ("output_grad", "grad")):
            options[f"{name}_scale"], options[f"{name}_amax_history"] = meta[of]
        return functools.partial(
            fp8.fp8_scaled_dot_general,
            quantize_compute_type=compute_dtype,
            e4m3_dtype=self.e4m3_dtype,
            **options,
        )


def _operands(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> tuple[Any, Any, Any, Any]:
    """The arguments of a contraction, the second operand in the dtype of the first."""
    del precision
    return lhs, jnp.asarray(rhs, lhs.dtype), dimension_numbers, preferred_element_type


class Fp8DotGeneralOp(Fp8DotGeneralBase):
    """A contraction whose operands, and the gradient of its output, are rounded to 8 bits.

    The contraction is written in the dtype of the operands; compilers for devices that have 8-bit
    contractions replace it.

    Args:
      amax_history_length: how many calls the scales look back.
      e4m3_dtype: the 8-bit dtype of the operands.
      e5m2_dtype: the 8-bit dtype of gradients.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.Dense(4, dot_general_cls=nn.Fp8DotGeneralOp)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """

    @compact
    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """Contracts.

        Args:
          *args, **kwargs: as for ``jax.lax.dot_general``.

        Returns:
          The contraction.
        """
        lhs, rhs, dimension_numbers, _ = _operands(*args, **kwargs)
        dtype, meta = lhs.dtype, self._meta()
        lhs = fp8.in_qdq(dtype, self.e4m3_dtype, lhs, *meta["input"])
        rhs = fp8.in_qdq(dtype, self.e4m3_dtype, rhs, *meta["kernel"])
        out = fp8.dot_general_with_precision(lhs, rhs, dimension_numbers)
        return fp8.out_qdq(dtype, self.e5m2_dtype, out, *meta["output_grad"])


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """``Fp8DotGeneralOp`` in the 8-bit dtypes without infinities and negative zero.

    Arguments as for ``Fp8DotGeneralOp``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.Dense(4, dot_general_cls=nn.NANOOFp8DotGeneralOp)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3)))[0].shape
      (1, 4)
    """

    e4m3_dtype: Dtype = jnp.float8_e4m3fnuz
    e5m2_dtype: Dtype = jnp.float8_e5m2fnuz


class Fp8DirectDotGeneralOp(Fp8DotGeneralBase):
    """A contraction in 8 bits, forward and backward; arguments as for ``Fp8DotGeneralOp``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 3)))[0].shape
      (1, 4)
    """

    @compact
    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """Contracts.

        Args:
          *args, **kwargs: as for ``jax.lax.dot_general``.

        Returns:
          The contraction, in the dtype of the first operand.
        """
        lhs, rhs, dimension_numbers, preferred = _operands(*args, **kwargs)
        contract = self._scaled(self._meta(), lhs.dtype)
        return contract(lhs, rhs, dimension_numbers, preferred_element_type=preferred)


Fp8DotGeneral = Fp8DirectDotGeneralOp


class Fp8Einsum(Fp8DotGeneralBase):
    """An einsum of two operands in 8 bits; arguments as for ``Fp8DotGeneralOp``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> x = jnp.ones((16, 16))
      >>> nn.Fp8Einsum().init_with_output(jax.random.key(0), "ab,bc->ac", x, x)[0].shape
      (16, 16)
    """

    @compact
    def __call__(
        self,
        eqn: str,
        lhs: Array,
        rhs: Array,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> Array:
        """Contracts.

        Args:
          eqn: the equation, with two operands.
          lhs, rhs: the operands.
          precision: not used; it is there because ``jnp.einsum`` takes it.
          preferred_element_type: of the output.

        Returns:
          The contraction.
        """
        dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
        contract = self._scaled(self._meta(), lhs.dtype)
        return einsum_by(contract, eqn, lhs, rhs.astype(lhs.dtype), dtype=dtype)
