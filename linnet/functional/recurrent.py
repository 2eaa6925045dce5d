"""Recurrence: one step of each kind of cell, and reversed sequences.

A step takes the projections of the input and of the hidden state, computed before, for all gates:
either concatenated along the last axis, or as a tuple with an array for each gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from linnet.functional.dtypes import promote_dtype
from linnet.functional.fusing import compiled_unless_intercepted, fused
from linnet.functional.linear import dense

Gates = Any  # an array for all gates, or a tuple with an array for each


def _split(gates: Gates, number: int) -> list[Array]:
    return list(gates) if isinstance(gates, (tuple, list)) else jnp.split(gates, number, axis=-1)


@fused
def lstm_step(
    c: Array,
    h: Array,
    inputs: Gates,
    hidden: Gates,
    *,
    gate_fn: Callable[..., Any] = jax.nn.sigmoid,
    activation_fn: Callable[..., Any] = jnp.tanh,
) -> tuple[Array, Array, Array]:
    """One step of a long short-term memory: ``c' = f c + i g``, ``h' = o tanh(c')``.

    Args:
      c: the cell state, ``(..., features)``.
      h: the hidden state; only its dtype counts here.
      inputs: the projection of the input for the gates i, f, g, o.
      hidden: the projection of the hidden state, bias included.
      gate_fn: the activation of the gates i, f and o.
      activation_fn: the activation of g and of the cell state.

    Returns:
      ``(c, h, output)``; the states in the dtype they came in, the output in that of the gates.

    Example:
      >>> zeros, open_gates = jnp.zeros(1), jnp.full(4, 10.0)
      >>> c, h, output = lstm_step(zeros, zeros, open_gates, jnp.zeros(4))
      >>> c.round(2), h.round(2)
      (Array([1.], dtype=float32), Array([0.76], dtype=float32))
    """
    gates = _split(jax.tree.map(jnp.add, inputs, hidden), 4)
    return _lstm(c, h, gates, gate_fn, activation_fn)


def _lstm(c: Array, h: Array, gates: Any, gate_fn: Any, activation_fn: Any) -> Any:
    i, f, g, o = gates
    new_c = gate_fn(f) * c + gate_fn(i) * activation_fn(g)
    new_h = gate_fn(o) * activation_fn(new_c)
    return new_c.astype(c.dtype), new_h.astype(h.dtype), new_h


@fused
def gru_step(
    h: Array,
    inputs: Gates,
    hidden: Gates,
    *,
    gate_fn: Callable[..., Any] = jax.nn.sigmoid,
    activation_fn: Callable[..., Any] = jnp.tanh,
) -> tuple[Array, Array]:
    """One step of a gated recurrent unit: ``h' = (1 - z) n + z h``.

    Args:
      h: the hidden state, ``(..., features)``.
      inputs: the projection of the input for r, z, n, bias included.
      hidden: the projection of the hidden state; that for n is multiplied by r.
      gate_fn: the activation of the gates r and z.
      activation_fn: the activation of n.

    Returns:
      ``(h, output)``; the state in the dtype it came in, the output in that of the gates.

    Example:
      >>> h, output = gru_step(jnp.ones(1), jnp.zeros(3), jnp.zeros(3))
      >>> h
      Array([0.5], dtype=float32)
    """
    input_r, input_z, input_n = _split(inputs, 3)
    hidden_r, hidden_z, hidden_n = _split(hidden, 3)
    r = gate_fn(input_r + hidden_r)
    z = gate_fn(input_z + hidden_z)
    n = activation_fn(input_n + r * hidden_n)
    new_h = (1.0 - z) * n + z * h
    return new_h.astype(h.dtype), new_h


@fused
def simple_step(
    h: Array,
    inputs: Array,
    hidden: Array,
    *,
    activation_fn: Callable[..., Any] = jnp.tanh,
    residual: bool = False,
) -> tuple[Array, Array]:
    """One step of a simple recurrent cell: ``h' = tanh(inputs + hidden)``.

    Args:
      h: the hidden state, ``(..., features)``.
      inputs: the projection of the input, bias included.
      hidden: the projection of the hidden state.
      activation_fn: the activation of the sum.
      residual: add the hidden state to the sum.

    Returns:
      ``(h, output)``; the state in the dtype it came in, the output in that of the sum.

    Example:
      >>> h, output = simple_step(jnp.zeros(1), jnp.ones(1), jnp.ones(1), activation_fn=jnp.sign)
      >>> h
      Array([1.], dtype=float32)
    """
    total = inputs + hidden
    if residual:
        total = total + h
    new_h = activation_fn(total)
    return new_h.astype(h.dtype), new_h


@fused
def mgu_step(
    h: Array,
    inputs: Gates,
    hidden: Gates,
    *,
    gate_fn: Callable[..., Any] = jax.nn.sigmoid,
    activation_fn: Callable[..., Any] = jnp.tanh,
    reset_gate: bool = True,
) -> tuple[Array, Array]:
    """One step of a minimal gated unit, whose gate both resets and forgets: ``(1 - f) n + f h``.

    Args:
      h: the hidden state, ``(..., features)``.
      inputs: the projection of the input for f and n, bias included.
      hidden: the projection of the hidden state; that for n is multiplied by f.
      gate_fn: the activation of the gate f.
      activation_fn: the activation of n.
      reset_gate: multiply by f.

    Returns:
      ``(h, output)``; the state in the dtype it came in, the output in that of the gates.

    Example:
      >>> h, output = mgu_step(jnp.ones(1), jnp.zeros(2), jnp.zeros(2))
      >>> h
      Array([0.5], dtype=float32)
    """
    input_f, input_n = _split(inputs, 2)
    hidden_f, hidden_n = _split(hidden, 2)
    f = gate_fn(input_f + hidden_f)
    n = activation_fn(input_n + (f * hidden_n if reset_gate else hidden_n))
    new_h = (1.0 - f) * n + f * h
    return new_h.astype(h.dtype), new_h


@fused
def conv_lstm_step(c: Array, h: Array, inputs: Gates, hidden: Gates) -> tuple[Array, Array, Array]:
    """One step of a convolutional LSTM: gates i, g, f, o, of which f is shifted by one.

    Args:
      c: the cell state, ``(..., features)``.
      h: the hidden state; only its dtype counts here.
      inputs: the convolution of the input, for all gates.
      hidden: the convolution of the hidden state.

    Returns:
      As ``lstm_step``.

    Example:
      >>> c, h, output = conv_lstm_step(jnp.ones(1), jnp.ones(1), jnp.zeros(4), jnp.zeros(4))
      >>> bool(c[0] == jax.nn.sigmoid(1.0))
      True
    """
    i, g, f, o = _split(jax.tree.map(jnp.add, inputs, hidden), 4)
    return _lstm(c, h, (i, f + 1.0, g, o), jax.nn.sigmoid, jnp.tanh)


@compiled_unless_intercepted("dot_general")
def dense_gates(
    inputs: Array,
    kernels: tuple[Array, ...],
    biases: tuple[Array, ...] | None = None,
    *,
    dtype: Any = None,
) -> Array:
    """Projects to several gates by one contraction with their kernels side by side.

    Args:
      inputs: ``(..., in)``.
      kernels: for each gate ``(in, features)``.
      biases: for each gate ``(features,)``, or None.
      dtype: compute in this dtype.

    Returns:
      ``(..., gates * features)``.

    Example:
      >>> dense_gates(jnp.ones(2), (jnp.ones((2, 1)), jnp.zeros((2, 1))))
      Array([2., 0.], dtype=float32)
    """
    kernel = jnp.concatenate(kernels, axis=-1)
    bias = None if biases is None else jnp.concatenate(biases, axis=-1)
    return dense(*promote_dtype((inputs, kernel, bias), dtype=dtype))


def concatenate_features(a: Array, b: Array) -> Array:
    """Two outputs side by side along the last axis.

    Example:
      >>> concatenate_features(jnp.ones(1), jnp.zeros(1))
      Array([1., 0.], dtype=float32)
    """
    return jnp.concatenate([a, b], axis=-1)


def flip_sequences(
    inputs: Array, seq_lengths: Array | None, num_batch_dims: int, time_major: bool
) -> Array:
    """Reverses each sequence and leaves the padding after it.

    Args:
      inputs: ``(*batch, time, ...)``, or ``(time, *batch, ...)``.
      seq_lengths: the length of each sequence, of shape ``batch``; by default all of it.
      num_batch_dims: how many axes the batch has.
      time_major: time is the first axis.

    Returns:
      The sequences, each of its steps in reverse order; so are the steps of its padding.

    Example:
      >>> flip_sequences(jnp.arange(5), jnp.array(3), 0, time_major=False)
      Array([2, 1, 0, 4, 3], dtype=int32)
    """
    axis = 0 if time_major else num_batch_dims
    if seq_lengths is None:
        return jnp.flip(inputs, axis)
    length = inputs.shape[axis]
    steps = jnp.arange(length, dtype=seq_lengths.dtype)
    lengths = jnp.expand_dims(seq_lengths, axis)
    steps = jnp.reshape(steps, [-1 if a == axis else 1 for a in range(lengths.ndim)])
    order = (lengths - 1 - steps) % length
    order = jnp.reshape(order, order.shape + (1,) * (inputs.ndim - order.ndim))
    return jnp.take_along_axis(inputs, order, axis)


def keep_until(step: Array, seq_lengths: Array, new: Any, old: Any) -> Any:
    """Selects the new carry for sequences that still run, the old one for those that have ended.

    Args:
      step: the number of the step.
      seq_lengths: the length of each sequence, of shape ``batch``.
      new: a pytree of arrays ``(*batch, ...)``.
      old: likewise.

    Returns:
      Likewise.

    Example:
      >>> keep_until(jnp.array(2), jnp.array([2, 3]), jnp.ones(2), jnp.zeros(2))
      Array([0., 1.], dtype=float32)
    """
    running = step < seq_lengths

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(
            jnp.reshape(running, running.shape + (1,) * (old.ndim - running.ndim)), new, old
        )

    return jax.tree.map(choose, new, old)
