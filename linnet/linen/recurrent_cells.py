"""Recurrent cells: from a carry and an input to the next carry and an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.functional import recurrent
from linnet.functional.activations import sigmoid, tanh
from linnet.functional.initializers import (
    default_bias_init,
    default_kernel_init,
    ones,
    orthogonal,
    zeros,
)
from linnet.functional.shapes import as_tuple, refuse_inputs
from linnet.linen.conv import Conv
from linnet.linen.dtypes import canonicalize_dtype
from linnet.linen.linear import Dense
from linnet.linen.module import Module, compact, nowrap
from linnet.linen.params import Array, layer_name, make_parameters
from linnet.typing import Dtype, Initializer, PRNGKey

Activation = Callable[..., Any]
default_recurrent_init = orthogonal()


class RNNCellBase(Module):
    """The interface of a cell for ``linen.RNN``: two methods and a property.

    Example:
      >>> from linnet import linen as nn
      >>> class Sum(nn.RNNCellBase):
      ...     num_feature_axes = 1
      ...     @nn.nowrap
      ...     def initialize_carry(self, rng, input_shape):
      ...         return jnp.zeros(input_shape)
      ...     def __call__(self, carry, inputs):
      ...         return carry + inputs, carry + inputs
      >>> nn.RNN(Sum()).apply({}, jnp.ones((1, 3, 1))).ravel()
      Array([1., 2., 3.], dtype=float32)
    """

    @nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Any:
        """The carry before the first step.

        Args:
          rng: a random key.
          input_shape: the shape of one step's input, batch included.

        Returns:
          The carry.
        """
        raise NotImplementedError(_missing(self, "initialize_carry"))

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        raise NotImplementedError(_missing(self, "num_feature_axes"))


def _missing(cell: Any, name: str) -> str:
    return f"{type(cell).__name__} does not define {name}.\nFix: define it, as linen.RNN needs it."


class _HiddenCell(RNNCellBase):
    """What the cells here share: a carry of ``_carries`` equal arrays, and their projections."""

    _carries = 1

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        return 1

    @nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Any:
        """The carry before the first step.

        Args:
          rng: a random key.
          input_shape: the shape of one step's input, batch included.

        Returns:
          An array with ``features`` in place of the input's, or a pair of them ``(c, h)``.
        """
        cell: Any = self
        shape = (*input_shape[:-1], cell.features)
        if self._carries == 1:
            return cell.carry_init(rng, shape, cell.param_dtype)
        # Zeros need no keys: there is nothing to split then.
        keys = (rng, rng) if cell.carry_init is zeros else jax.random.split(rng)
        return tuple(cell.carry_init(key, shape, cell.param_dtype) for key in keys)

    def _check(self, carry: Any, inputs: Any) -> tuple[Any, ...]:
        """The arrays of the carry; refuses one that does not fit the input."""
        cell: Any = self
        arrays = tuple(carry) if isinstance(carry, (tuple, list)) else (carry,)
        problem = recurrent.why_no_carry(
            arrays,
            inputs,
            features=cell.features,
            carries=self._carries,
            made_by="initialize_carry(key, inputs.shape)",
        )
        refuse_inputs(self, problem, layer_name)
        return arrays

    def _project(self, of: str, name: str, bias_init: Initializer | None) -> Dense:
        """A projection of the ``"input"`` or of the ``"hidden"`` state, named after its gate."""
        cell: Any = self
        return Dense(
            cell.features,
            use_bias=bias_init is not None,
            dtype=cell.dtype,
            param_dtype=cell.param_dtype,
            kernel_init=cell.kernel_init if of == "input" else cell.recurrent_kernel_init,
            bias_init=bias_init or default_bias_init,
            name=name,
        )


class _GatedCell(_HiddenCell):
    """The first fields of all cells with gates. Positional arguments have the order of fields."""

    features: int
    gate_fn: Activation = sigmoid
    activation_fn: Activation = tanh
    kernel_init: Initializer = default_kernel_init
    recurrent_kernel_init: Initializer = default_recurrent_init


class _LSTMArguments(_GatedCell):
    """The fields of ``LSTMCell`` and of the cells with the same arguments."""

    bias_init: Initializer = default_bias_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = zeros


class LSTMCell(_LSTMArguments):
    """Long short-term memory, with a projection for each gate.

    ``i, f, o = sigmoid(W x + U h + b)``, ``g = tanh(W x + U h + b)``, ``c' = f c + i g``,
    ``h' = o tanh(c')``. The carry is ``(c, h)``, the output ``h'``.

    Args:
      features: the size of the last axis of ``c``, ``h`` and the output.
      gate_fn: the activation of the gates.
      activation_fn: the activation of ``g`` and of the cell state.
      kernel_init, recurrent_kernel_init, bias_init: the initializers of the kernels of the input,
        of those of the hidden state, and of the biases.
      dtype: compute in this dtype.
      param_dtype: the dtype of the parameters and of the first carry.
      carry_init: the initializer of the carry.

    Example:
      >>> from linnet import linen as nn
      >>> cell, x = nn.LSTMCell(4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, x)
      >>> y.shape, sorted(variables["params"])
      ((2, 4), ['hf', 'hg', 'hi', 'ho', 'if', 'ig', 'ii', 'io'])
    """

    _carries = 2

    @compact
    def __call__(self, carry: Any, inputs: Array) -> Any:
        """One step.

        Args:
          carry: ``(c, h)``, each ``(..., features)``.
          inputs: ``(..., in)``.

        Returns:
          ``((c, h), output)``.

        Raises:
          FeatureError: the carry does not fit the input.
        """
        c, h = self._check(carry, inputs)
        c, h, output = recurrent.lstm_step(
            c,
            h,
            tuple(self._project("input", f"i{gate}", None)(inputs) for gate in "ifgo"),
            tuple(self._project("hidden", f"h{gate}", self.bias_init)(h) for gate in "ifgo"),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return (c, h), output


class DenseParams(Module):
    """The parameters of a ``Dense``, for a layer that contracts with several at once.

    Args:
      features, use_bias, param_dtype, kernel_init, bias_init: as for ``Dense``.

    Example:
      >>> from linnet import linen as nn
      >>> (kernel, bias), _ = DenseParams(4).init_with_output(jax.random.key(0), jnp.ones((1, 3)))
      >>> kernel.shape, bias.shape
      ((3, 4), (4,))
    """

    features: int
    use_bias: bool = True
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init

    @compact
    def __call__(self, inputs: Array) -> tuple[Array, Array | None]:
        """The kernel and the bias, or None.

        Args:
          inputs: ``(..., in)``; only its shape counts.

        Returns:
          ``(in, features)`` and ``(features,)``.
        """
        shape = (np.shape(inputs)[-1], self.features)
        bias_shape = (self.features,) if self.use_bias else None
        kernel, bias = make_parameters(self, kernel=shape, bias=bias_shape)
        return kernel, bias


class OptimizedLSTMCell(_LSTMArguments):
    """Long short-term memory, with one contraction for all gates.

    Arguments as for ``LSTMCell``, and so are equations and parameters.

    Example:
      >>> from linnet import linen as nn
      >>> cell, x = nn.OptimizedLSTMCell(4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, x)
      >>> y.shape, sorted(variables["params"])
      ((2, 4), ['hf', 'hg', 'hi', 'ho', 'if', 'ig', 'ii', 'io'])
    """

    _carries = 2

    @compact
    def __call__(self, carry: Any, inputs: Array) -> Any:
        """One step; arguments and errors as for ``LSTMCell``."""
        c, h = self._check(carry, inputs)
        c, h, output = recurrent.lstm_step(
            c,
            h,
            self._all_gates("i", inputs, self.kernel_init, use_bias=False),
            self._all_gates("h", h, self.recurrent_kernel_init, use_bias=True),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )
        return (c, h), output

    def _all_gates(self, letter: str, x: Array, kernel_init: Any, *, use_bias: bool) -> Array:
        made = [
            DenseParams(
                self.features,
                use_bias=use_bias,
                param_dtype=self.param_dtype,
                kernel_init=kernel_init,
                bias_init=self.bias_init,
                name=f"{letter}{gate}",
            )(x)
            for gate in "ifgo"
        ]
        kernels, biases = zip(*made, strict=True)
        dtype = canonicalize_dtype(x, *kernels, *biases, dtype=self.dtype)
        return recurrent.dense_gates(x, kernels, biases if use_bias else None, dtype=dtype)


class SimpleCell(_HiddenCell):
    """A simple recurrent cell: ``h' = tanh(W x + U h + b)``.

    Args:
      features, kernel_init, recurrent_kernel_init, bias_init, dtype, param_dtype, carry_init: as
        for ``LSTMCell``.
      activation_fn: the activation.
      residual: add the carry before the activation.

    Example:
      >>> from linnet import linen as nn
      >>> cell, x = nn.SimpleCell(4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, x)
      >>> bool((carry == y).all())
      True
    """

    features: int
    activation_fn: Activation = tanh
    kernel_init: Initializer = default_kernel_init
    recurrent_kernel_init: Initializer = default_recurrent_init
    bias_init: Initializer = default_bias_init
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = zeros
    residual: bool = False

    @compact
    def __call__(self, carry: Array, inputs: Array) -> Any:
        """One step.

        Args:
          carry: ``h``, ``(..., features)``.
          inputs: ``(..., in)``.

        Returns:
          ``(h, output)``.

        Raises:
          FeatureError: the carry does not fit the input.
        """
        (h,) = self._check(carry, inputs)
        hidden = self._project("hidden", "h", None)(h)
        return recurrent.simple_step(
            h,
            self._project("input", "i", self.bias_init)(inputs),
            hidden,
            activation_fn=self.activation_fn,
            residual=self.residual,
        )


class GRUCell(_LSTMArguments):
    """Gated recurrent unit.

    ``r, z = sigmoid(W x + b + U h)``, ``n = tanh(W x + b + r (U h + b'))``,
    ``h' = (1 - z) n + z h``. The carry is ``h``, the output ``h'``. Arguments as for
    ``LSTMCell``.

    Example:
      >>> from linnet import linen as nn
      >>> cell, x = nn.GRUCell(4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, x)
      >>> y.shape, sorted(variables["params"])
      ((2, 4), ['hn', 'hr', 'hz', 'in', 'ir', 'iz'])
    """

    @compact
    def __call__(self, carry: Array, inputs: Array) -> Any:
        """One step; arguments and errors as for ``SimpleCell``."""
        (h,) = self._check(carry, inputs)
        biases = {"r": None, "z": None, "n": self.bias_init}
        return recurrent.gru_step(
            h,
            tuple(self._project("input", f"i{gate}", self.bias_init)(inputs) for gate in biases),
            tuple(self._project("hidden", f"h{gate}", init)(h) for gate, init in biases.items()),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
        )


class MGUCell(_GatedCell):
    """Minimal gated unit: a gated recurrent unit whose one gate both resets and forgets.

    ``f = sigmoid(W x + b + U h)``, ``n = tanh(W x + b + f (U h + b'))``,
    ``h' = (1 - f) n + f h``. The carry is ``h``, the output ``h'``.

    Args:
      features, kernel_init, recurrent_kernel_init, dtype, param_dtype, carry_init: as for
        ``LSTMCell``.
      gate_fn, activation_fn: the activations of the gate and of ``n``.
      forget_bias_init, activation_bias_init: the initializers of the bias of the gate and of the
        biases of ``n``.
      reset_gate: multiply the hidden state by the gate in ``n``; without it there is no ``b'``.

    Example:
      >>> from linnet import linen as nn
      >>> cell, x = nn.MGUCell(4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, x)
      >>> y.shape, sorted(variables["params"])
      ((2, 4), ['hf', 'hn', 'if', 'in'])
    """

    forget_bias_init: Initializer = ones
    activation_bias_init: Initializer = zeros
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = zeros
    reset_gate: bool = True

    @compact
    def __call__(self, carry: Array, inputs: Array) -> Any:
        """One step; arguments and errors as for ``SimpleCell``."""
        (h,) = self._check(carry, inputs)
        of_n = self.activation_bias_init
        of_hidden_n = of_n if self.reset_gate else None
        return recurrent.mgu_step(
            h,
            (
                self._project("input", "if", self.forget_bias_init)(inputs),
                self._project("input", "in", of_n)(inputs),
            ),
            (
                self._project("hidden", "hf", None)(h),
                self._project("hidden", "hn", of_hidden_n)(h),
            ),
            gate_fn=self.gate_fn,
            activation_fn=self.activation_fn,
            reset_gate=self.reset_gate,
        )


class ConvLSTMCell(_HiddenCell):
    """Long short-term memory over images: its projections are convolutions.

    Args:
      features: the size of the last axis of ``c``, ``h`` and the output.
      strides: how far the window moves, over the input and over the hidden state; by default 1.
      kernel_size, padding, use_bias, dtype: as for ``Conv``.
      param_dtype, carry_init: as for ``LSTMCell``.

    Example:
      >>> from linnet import linen as nn
      >>> cell, x = nn.ConvLSTMCell(4, (3, 3)), jnp.ones((2, 8, 8, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> (carry, y), variables = cell.init_with_output(jax.random.key(0), carry, x)
      >>> y.shape, sorted(variables["params"])
      ((2, 8, 8, 4), ['hh', 'ih'])
    """

    features: int
    kernel_size: Sequence[int]
    strides: Sequence[int] | None = None
    padding: str | Sequence[tuple[int, int]] = "SAME"
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = zeros

    _carries = 2

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        return len(as_tuple(self.kernel_size)) + 1

    @compact
    def __call__(self, carry: Any, inputs: Array) -> Any:
        """One step.

        Args:
          carry: ``(c, h)``, each ``(..., *spatial, features)``.
          inputs: ``(..., *spatial, in)``.

        Returns:
          ``((c, h), output)``.
        """
        c, h = carry
        shared: dict[str, Any] = {
            "features": 4 * self.features,
            "kernel_size": self.kernel_size,
            "padding": self.padding,
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }
        of_input = Conv(strides=self.strides, name="ih", **shared)(inputs)
        of_hidden = Conv(strides=self.strides, name="hh", **shared)(h)
        c, h, output = recurrent.conv_lstm_step(c, h, of_input, of_hidden)
        return (c, h), output
