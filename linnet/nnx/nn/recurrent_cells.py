"""Recurrent cells: from a carry and an input to the next carry and an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.functional import recurrent
from linnet.functional.dtypes import promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.precision import default_param_dtype
from linnet.nnx.nn import keys
from linnet.nnx.nn.linear import Linear
from linnet.nnx.nn.params import (
    FLOAT32_BY_DEFAULT,
    PromoteDtype,
    default_bias_init,
    default_kernel_init,
)
from linnet.nnx.nn.recurrent_base import HiddenCell, modified_orthogonal

Array = jax.Array


class LSTMCell(HiddenCell):
    """Long short-term memory, with a projection for each gate.

    ``i, f, o = sigmoid(W x + U h + b)``, ``g = tanh(W x + U h + b)``, ``c' = f c + i g``,
    ``h' = o tanh(c')``. The carry is ``(c, h)``, the output ``h'``.

    Args:
      in_features: the size of the last axis of the input.
      hidden_features: the size of the last axis of ``c``, ``h`` and the output.
      gate_fn: of the gates.
      activation_fn: of ``g`` and the cell state.
      kernel_init: the initializer of the kernels of the input.
      recurrent_kernel_init: the initializer of the kernels of the hidden state.
      bias_init: the initializer of the biases.
      dtype: compute in this dtype; by default that of the promoted operands.
      param_dtype: the dtype of the parameters and of the first carry; by default that of the
        precision policy, or float32.
      carry_init: the initializer of the carry; by default zeros.
      promote_dtype: how operands are brought to one dtype.
      keep_rngs: keep a stream of keys for ``carry_init``.
      rngs: where the keys come from.
      kernel_metadata: metadata of the kernels of the input.
      recurrent_kernel_metadata: metadata of the kernels of the hidden state.
      bias_metadata: metadata of the biases.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry = cell.initialize_carry((2, 3))
      >>> carry, y = cell(carry, jnp.ones((2, 3)))
      >>> y.shape
      (2, 4)
    """

    _carries = 2

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = jax.nn.sigmoid,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = default_bias_init,
        dtype: Any = None,
        param_dtype: Any = None,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtype = default_promote,
        keep_rngs: bool = False,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.rngs = keys.own_stream("LSTMCell", rngs, "carry") if keep_rngs else None
        shared: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "promote_dtype": promote_dtype,
            "rngs": rngs,
        }

        def of_input() -> Linear:
            return Linear(
                in_features,
                hidden_features,
                use_bias=False,
                kernel_init=kernel_init,
                kernel_metadata=kernel_metadata,
                **shared,
            )

        def of_hidden() -> Linear:
            return Linear(
                hidden_features,
                hidden_features,
                kernel_init=recurrent_kernel_init,
                bias_init=bias_init,
                kernel_metadata=recurrent_kernel_metadata,
                bias_metadata=bias_metadata,
                **shared,
            )

        self.ii, self.if_, self.ig, self.io = (of_input() for _ in range(4))
        self.hi, self.hf, self.hg, self.ho = (of_hidden() for _ in range(4))
        self.carry_init = carry_init

    def __call__(self, carry: tuple[Array, Array], inputs: Array) -> Any:
        """One step.

        Args:
          carry: ``(c, h)``, each ``(..., hidden_features)``.
          inputs: ``(..., in_features)``.

        Returns:
          ``((c, h), output)``.

        Raises:
          FeatureError: the carry or the input does not fit.
        """
        c, h = self.check(carry, inputs)
        c, h, output = recurrent.lstm_step(
            c,
            h,
            tuple(layer(inputs) for layer in (self.ii, self.if_, self.ig, self.io)),
            tuple(layer(h) for layer in (self.hi, self.hf, self.hg, self.ho)),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return (c, h), output


class _FusedGatesCell(HiddenCell):
    """A cell with one projection of the input and one of the hidden state, for all gates."""

    _gates = 1
    _bias_of_input = True
    _draws_input_first = True

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] | None = jax.nn.sigmoid,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = default_bias_init,
        dtype: Any = None,
        param_dtype: Any = None,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtype = default_promote,
        keep_rngs: bool = False,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.in_features = in_features
        self.hidden_features = hidden_features
        if gate_fn is not None:
            self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.rngs = keys.own_stream(type(self).__name__, rngs, "carry") if keep_rngs else None

        def project(features: int, use_bias: bool, init: Initializer, metadata: Any) -> Linear:
            return Linear(
                features,
                hidden_features * self._gates,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                bias_init=bias_init,
                promote_dtype=promote_dtype,
                rngs=rngs,
                kernel_metadata=metadata,
                bias_metadata=bias_metadata,
            )

        of_input = (in_features, self._bias_of_input, kernel_init, kernel_metadata)
        of_hidden = (
            hidden_features,
            not self._bias_of_input,
            recurrent_kernel_init,
            recurrent_kernel_metadata,
        )
        if self._draws_input_first:
            self.dense_i, self.dense_h = project(*of_input), project(*of_hidden)
        else:
            self.dense_h, self.dense_i = project(*of_hidden), project(*of_input)
        self.carry_init = carry_init


class OptimizedLSTMCell(_FusedGatesCell):
    """Long short-term memory, with one projection for all gates: fewer, larger contractions.

    The gates stand in the order i, f, g, o. Arguments and equations are those of ``LSTMCell``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> cell.dense_i.kernel.shape
      (3, 16)
    """

    _carries = 2
    _gates = 4
    _bias_of_input = False

    def __call__(self, carry: tuple[Array, Array], inputs: Array) -> Any:
        """One step; arguments and errors as for ``LSTMCell``."""
        c, h = self.check(carry, inputs)
        c, h, output = recurrent.lstm_step(
            c,
            h,
            self.dense_i(inputs),
            self.dense_h(h),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return (c, h), output


class GRUCell(_FusedGatesCell):
    """Gated recurrent unit.

    ``r, z = sigmoid(W x + U h + b)``, ``n = tanh(W x + b + r U h)``, ``h' = (1 - z) n + z h``. The
    carry is ``h``, the output ``h'``; the gates stand in the order r, z, n. Arguments are those of
    ``LSTMCell``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
      >>> y.shape
      (2, 4)
    """

    _gates = 3

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """One step.

        Args:
          carry: ``h``, ``(..., hidden_features)``.
          inputs: ``(..., in_features)``.

        Returns:
          ``(h, output)``.

        Raises:
          FeatureError: the carry or the input does not fit.
        """
        (h,) = self.check(carry, inputs)
        return recurrent.gru_step(
            h,
            self.dense_i(inputs),
            self.dense_h(h),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )


class SimpleCell(_FusedGatesCell):
    """The plainest recurrent cell: ``h' = tanh(W x + U h + b)``.

    Args:
      in_features: the size of the last axis of the input.
      hidden_features: the size of the last axis of ``h`` and the output.
      dtype: compute in this dtype, by default float32, or that of the precision policy; None for
        that of the promoted operands.
      param_dtype: the dtype of the parameters and of the first carry; by default that of the
        precision policy, or float32.
      carry_init: the initializer of the carry; by default zeros.
      residual: add the carry before the activation.
      activation_fn: the activation.
      kernel_init: the initializer of the kernel of the input.
      recurrent_kernel_init: the initializer of the kernel of the hidden state.
      bias_init: the initializer of the bias.
      promote_dtype: how operands are brought to one dtype.
      keep_rngs: keep a stream of keys for ``carry_init``.
      rngs: where the keys come from.
      kernel_metadata: metadata of the kernel of the input.
      recurrent_kernel_metadata: metadata of the kernel of the hidden state.
      bias_metadata: metadata of the bias.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
      >>> bool((carry == y).all())
      True
    """

    _draws_input_first = False

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Any = FLOAT32_BY_DEFAULT,
        param_dtype: Any = None,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtype = default_promote,
        keep_rngs: bool = False,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        is_default = dtype is FLOAT32_BY_DEFAULT
        super().__init__(
            in_features,
            hidden_features,
            gate_fn=None,
            activation_fn=activation_fn,
            kernel_init=kernel_init,
            recurrent_kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            dtype=jnp.float32 if is_default else dtype,
            param_dtype=param_dtype,
            carry_init=carry_init,
            promote_dtype=promote_dtype,
            keep_rngs=keep_rngs,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            recurrent_kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.residual = residual
        if is_default:
            self.dense_i.dtype_is_default = self.dense_h.dtype_is_default = True

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """One step.

        Args:
          carry: ``h``, ``(..., hidden_features)``.
          inputs: ``(..., in_features)``.

        Returns:
          ``(h, output)``.

        Raises:
          FeatureError: the carry or the input does not fit.
        """
        (h,) = self.check(carry, inputs)
        return recurrent.simple_step(
            h,
            self.dense_i(inputs),
            self.dense_h(h),
            activation_fn=self.activation_fn,
            residual=self.residual,
        )
