"""Recurrence: one step of each kind of cell, a cell along a sequence, and reversed sequences.

A step takes the projections of the input and of the hidden state, computed before, for all gates:
either concatenated along the last axis, or as a tuple with an array for each gate. One that needs
their sum alone also takes the sum, and None as the projection of the hidden state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linnet.errors import FeatureError, type_text
from linnet.functional.dtypes import promote_dtype
from linnet.functional.fusing import compiled_unless_intercepted, fused
from linnet.functional.linear import dense
from linnet.functional.shapes import shape_of

Gates = Any  # an array for all gates, or a tuple with an array for each


def _split(gates: Gates, number: int) -> list[Array]:
    return list(gates) if isinstance(gates, (tuple, list)) else jnp.split(gates, number, axis=-1)


def _sum(inputs: Gates, hidden: Gates | None) -> Gates:
    return inputs if hidden is None else jax.tree.map(jnp.add, inputs, hidden)


@fused
def lstm_step(
    c: Array,
    h: Array,
    inputs: Gates,
    hidden: Gates | None,
    *,
    gate_fn: Callable[..., Any] = jax.nn.sigmoid,
    activation_fn: Callable[..., Any] = jnp.tanh,
) -> tuple[Array, Array, Array]:
    """One step of a long short-term memory: ``c' = f c + i g``, ``h' = o tanh(c')``.

    Args:
      c: the cell state, ``(..., features)``.
      h: the hidden state; only its dtype counts here.
      inputs: the projection of the input for the gates i, f, g, o.
      hidden: the projection of the hidden state, bias included; None if it is in ``inputs``.
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
    gates = _split(_sum(inputs, hidden), 4)
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
    hidden: Array | None,
    *,
    activation_fn: Callable[..., Any] = jnp.tanh,
    residual: bool = False,
) -> tuple[Array, Array]:
    """One step of a simple recurrent cell: ``h' = tanh(inputs + hidden)``.

    Args:
      h: the hidden state, ``(..., features)``.
      inputs: the projection of the input, bias included.
      hidden: the projection of the hidden state; None if it is in ``inputs``.
      activation_fn: the activation of the sum.
      residual: add the hidden state to the sum.

    Returns:
      ``(h, output)``; the state in the dtype it came in, the output in that of the sum.

    Example:
      >>> h, output = simple_step(jnp.zeros(1), jnp.ones(1), jnp.ones(1), activation_fn=jnp.sign)
      >>> h
      Array([1.], dtype=float32)
    """
    total = _sum(inputs, hidden)
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
    i, g, f, o = _split(_sum(inputs, hidden), 4)
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


# A cell along a sequence.


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The arguments of ``recurrence`` that are not arrays and the same in all steps."""

    project: Callable[[Any, Any], Gates]
    step: Callable[[Any, Gates, Gates | None], tuple[Any, Any]]
    is_sum: bool
    reverse: bool
    unroll: int

    def scan(self, body: Callable[..., Any], carry: Any, xs: Any) -> Any:
        return jax.lax.scan(body, carry, xs, reverse=self.reverse, unroll=self.unroll)

    def joined(self, inputs: Gates, hidden: Gates) -> tuple[Gates, Gates | None]:
        """The projections as the step takes them."""
        return (_sum(inputs, hidden), None) if self.is_sum else (inputs, hidden)


def recurrence(
    project: Callable[[Any, Any], Gates],
    step: Callable[[Any, Gates, Gates | None], tuple[Any, Any]],
    params: Any,
    inputs: Gates,
    carry: Any,
    *,
    is_sum: bool = False,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Runs a cell along the first axis, with one projection in each step, forward and backward.

    The inputs come projected. The derivative with respect to the parameters is one product over
    all steps, outside of the loop; the derivative of a loop over a cell has a product in each step,
    and an addition of the size of the parameters. The derivative keeps the carries and the
    projections, and computes all other intermediate values again. The values are those of a loop
    over the cell, and so are the derivatives, but for the order of additions; forward and reverse
    mode work, to any order.

    Args:
      project: ``project(params, carry)``, the projection of the hidden state in the carry. Given
        carries ``(time, ...)`` it returns the projections of all of them.
      step: ``step(carry, inputs, hidden)``, from the carry and the projections of a step to
        ``(carry, output)``, without parameters. The carry keeps its shapes and dtypes. Neither
        function may use tracers that are not among its arguments.
      params: a pytree of arrays in floating point.
      inputs: the projections of all inputs, ``(time, ...)``.
      carry: the carry before the first step.
      is_sum: the step needs the sum of both projections alone, and gets the sum and None.
      reverse: begin at the end of the sequence; the outputs keep the order of the inputs.
      unroll: how many steps to put into one iteration of the loop. On a GPU several steps take
        less time than one at a time, as what they keep is written at once.

    Returns:
      ``(carry, outputs)``: the carry after the last step, and the outputs ``(time, ...)``.

    Example:
      >>> def decay(rate, h):
      ...     return rate * h
      >>> def step(h, total, _):
      ...     return total, total
      >>> half, ones, start = jnp.array(0.5), jnp.ones(3), jnp.array(0.0)
      >>> h, outputs = recurrence(decay, step, half, ones, start, is_sum=True)
      >>> outputs
      Array([1.  , 1.5 , 1.75], dtype=float32)
    """
    return _run(_Loop(project, step, is_sum, reverse, unroll), params, inputs, carry)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(loop: _Loop, params: Any, inputs: Gates, carry: Any) -> tuple[Any, Any]:
    def body(carry: Any, x: Gates) -> tuple[Any, Any]:
        return loop.step(carry, *loop.joined(x, loop.project(params, carry)))

    return loop.scan(body, carry, inputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_keeping(loop: _Loop, params: Any, inputs: Gates, carry: Any) -> tuple[Any, Any, Any, Any]:
    """As ``_run``, and returns what the derivative needs as well.

    That is the carry before each step, and each step's projections: their sum, or that of the
    hidden state.
    """
    # For each leaf of the carry, the output that is the same array: it is not stored twice.
    places: list[int | None] = []

    def body(carry: Any, x: Gates) -> tuple[Any, Any]:
        hidden = loop.project(params, carry)
        gates = loop.joined(x, hidden)
        new, output = loop.step(carry, *gates)
        ids = [id(leaf) for leaf in jax.tree.leaves(output)]
        news = map(id, jax.tree.leaves(new))
        places[:] = [ids.index(leaf) if leaf in ids else None for leaf in news]
        pairs = zip(jax.tree.leaves(carry), places, strict=True)
        rest = [leaf for leaf, place in pairs if place is None]
        return new, (output, rest, gates[0] if loop.is_sum else hidden)

    last, (outputs, rest, kept) = loop.scan(body, carry, inputs)
    leaves, rest = jax.tree.leaves(outputs), iter(rest)
    first, structure = jax.tree.flatten(carry)
    before = [
        next(rest) if place is None else _delayed(leaf, leaves[place], loop.reverse)
        for leaf, place in zip(first, places, strict=True)
    ]
    return last, outputs, jax.tree.unflatten(structure, before), kept


def _delayed(first: Array, values: Array, reverse: bool) -> Array:
    """A leaf of the carry before each step, from the first one and those after each step."""
    if reverse:
        return jnp.concatenate([values, first[None]])[1:]
    return jnp.concatenate([first[None], values])[:-1]


def _tangents(
    loop: _Loop, primals: Any, tangents: Any, before: Any, kept: Gates
) -> tuple[Any, Any, Any, Any]:
    """The tangents of what ``_run_keeping`` returns."""
    params, inputs, _ = primals
    d_params, d_inputs, d_carry = tangents
    gates = (kept, None) if loop.is_sum else (inputs, kept)
    d_hidden = jax.jvp(lambda p: loop.project(p, before), (params,), (d_params,))[1]

    # Reverse mode would keep each factor of the tangents; the checkpoint computes them again.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(d_carry: Any, xs: Any) -> tuple[Any, Any]:
        carry, gates, (d_inputs, d_hidden) = xs
        d_moved = jax.jvp(lambda c: loop.project(params, c), (carry,), (d_carry,))[1]
        if loop.is_sum:
            d_gates = (_sum(d_inputs, d_moved), None)
        else:
            d_gates = (d_inputs, _sum(d_hidden, d_moved))
        d_new, d_output = jax.jvp(loop.step, (carry, *gates), (d_carry, *d_gates))[1]
        return d_new, (d_output, d_carry, d_gates[0] if loop.is_sum else d_gates[1])

    xs = (before, gates, loop.joined(d_inputs, d_hidden))
    d_last, (d_outputs, d_before, d_kept) = loop.scan(body, d_carry, xs)
    return d_last, d_outputs, d_before, d_kept


@_run.defjvp
def _run_jvp(loop: _Loop, primals: Any, tangents: Any) -> tuple[Any, Any]:
    last, outputs, before, kept = _run_keeping(loop, *primals)
    return (last, outputs), _tangents(loop, primals, tangents, before, kept)[:2]


@_run_keeping.defjvp
def _run_keeping_jvp(loop: _Loop, primals: Any, tangents: Any) -> tuple[Any, Any]:
    kept = _run_keeping(loop, *primals)
    return kept, _tangents(loop, primals, tangents, *kept[2:])


def or_default(given: bool | None, default: bool) -> bool:
    """A flag of a call, or that of the layer where the call was given none."""
    return default if given is None else given


# Why a layer cannot take what it was given: the rest of an error text, or None.


def why_no_carry(
    arrays: tuple[Any, ...], inputs: Any, *, features: int, carries: int, made_by: str
) -> str | None:
    """Why arrays are not the carry, of one array or two, that a cell has for these inputs."""
    wanted = (*shape_of(inputs)[:-1], features)
    if [wanted] * carries == [shape_of(x) for x in arrays]:
        return None
    count = "an array" if carries == 1 else "a pair (c, h) of arrays"
    return (
        f"expected a carry that is {count} of shape {wanted}, but got "
        f"{', '.join(map(type_text, arrays))}.\nFix: make it with {made_by}."
    )


def why_no_pair(carries: Any) -> str | None:
    """Why an initial carry is not a pair, one for each direction."""
    if isinstance(carries, (tuple, list)) and len(carries) == 2:
        return None
    return (
        "expected initial_carry to be a pair, one carry a direction, but got "
        f"{type_text(carries)}.\nFix: pass (forward_carry, backward_carry)."
    )


# Sequences of different lengths.


def batch_of_sequences(
    layer: Callable[[], str],
    inputs: Any,
    seq_lengths: Any,
    feature_axes: int,
    time_major: bool,
) -> tuple[tuple[int, ...], Array | None]:
    """The shape of the batch, and the lengths in it; refuses inputs and lengths that do not fit.

    Args:
      layer: makes the name of the layer, for the error.
      inputs: ``(*batch, time, *features)``, or ``(time, *batch, *features)``.
      seq_lengths: the length of each sequence, one number for all, or None.
      feature_axes: how many axes of the inputs are features.
      time_major: time is the first axis.

    Returns:
      The sizes of the batch axes, and the lengths as an array of that shape, or None.

    Raises:
      FeatureError: there are too few axes, or the lengths are not integers of the batch's shape.

    Example:
      >>> batch_of_sequences(lambda: "RNN", jnp.ones((5, 2, 3)), None, 1, time_major=True)
      ((2,), None)
    """
    shape = np.shape(inputs)
    axes = len(shape) - feature_axes - 1
    if axes < 0:
        order = "(time, ..., features)" if time_major else "(..., time, features)"
        raise FeatureError(
            f"{layer()} expected inputs of shape {order}, with {feature_axes} axes of features, "
            f"but got {type_text(inputs)}.\n"
            "Fix: keep the time axis, also where it has size 1; for one step, call the cell."
        )
    batch = shape[1 : axes + 1] if time_major else shape[:axes]
    if seq_lengths is None:
        return batch, None
    lengths = jnp.asarray(seq_lengths)
    if lengths.shape not in ((), batch) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise FeatureError(
            f"{layer()} expected seq_lengths to be integers of shape {batch}, one a sequence, "
            f"but got {type_text(lengths)}.\n"
            "Fix: give the number of steps of each sequence; check time_major, too."
        )
    return batch, jnp.broadcast_to(lengths, batch)


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
