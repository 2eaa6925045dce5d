"""Recurrent layers: a cell run along a sequence, in one direction or in both."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linnet.errors import LayerArgumentError
from linnet.functional import activations, fusing
from linnet.functional.recurrent import (
    batch_of_sequences,
    concatenate_features,
    flip_sequences as flip_sequences,
    keep_until,
    or_default,
    why_no_pair,
)
from linnet.functional.shapes import refuse_inputs
from linnet.functional.sharding import along_batch, is_explicit
from linnet.nnx import filterlib
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import layer_name, own_stream
from linnet.nnx.nn.recurrent_cells import (
    GRUCell as GRUCell,
    LSTMCell as LSTMCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RNNCellBase as RNNCellBase,
    SimpleCell as SimpleCell,
    can_run_as_recurrence,
    modified_orthogonal as modified_orthogonal,
    run_as_recurrence,
)
from linnet.nnx.rnglib.splitting import iter_streams, split_rngs
from linnet.nnx.rnglib.streams import Rngs, RngStream
from linnet.nnx.transforms import Carry, StateAxes, scan
from linnet.nnx.transforms.eager import compiled_outside

_CARRIED = StateAxes({...: Carry})


def _carry_stream(layer: str, rngs: Any) -> RngStream | None:
    """The layer's own stream for first carries; ``rngs`` may be a bool."""
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    return own_stream(layer, rngs, "carry")


@compiled_outside
def _run(
    cell: Any,
    carry: Any,
    inputs: Any,
    lengths: Any,
    *,
    axis: int,
    backwards: bool,
    unroll: int,
    state_axes: Any,
    broadcast: Any,
) -> Any:
    """Runs the cell, and returns the carry of each sequence's last step and the outputs."""
    is_default = state_axes == _CARRIED and all(x is None for x in (lengths, broadcast))
    if is_default and _is_faster_as_recurrence(inputs, axis) and can_run_as_recurrence(cell, carry):
        steps = jnp.moveaxis(inputs, axis, 0)
        carry, outputs = run_as_recurrence(cell, carry, steps, reverse=backwards, unroll=unroll)
        return carry, jnp.moveaxis(outputs, 0, axis)

    def step(cell: Any, carry: Any, x: Any) -> Any:
        streams = _selected_streams(cell, broadcast)
        counts = [stream.count.get_value() for stream in streams]
        result = cell(carry, x)
        for stream, count in zip(streams, counts, strict=True):
            stream.count.set_value(count)
        return result

    def step_with_lengths(cell: Any, held: Any, x: Any, number: Array) -> Any:
        carry, last = held
        carry, y = step(cell, carry, x)
        return (carry, keep_until(number, lengths, carry, last)), y

    options = {"out_axes": (Carry, axis), "reverse": backwards, "unroll": unroll}
    with _new_keys(cell, broadcast):
        if lengths is None:
            loop = scan(step, in_axes=(state_axes, Carry, axis), **options)
            return loop(cell, carry, inputs)
        numbers = jnp.arange(np.shape(inputs)[axis])
        loop = scan(step_with_lengths, in_axes=(state_axes, Carry, axis, 0), **options)
        (_, last), outputs = loop(cell, (carry, carry), inputs, numbers)
        return last, outputs


def _is_faster_as_recurrence(inputs: Any, axis: int) -> bool:
    """Whether ``run_as_recurrence`` is faster: on a GPU a loop waits for each of its operations.

    Under a mesh with explicit axes the loop over the cell has the better errors for shardings.
    """
    if not (fusing.is_tracing() and activations.on_gpu()) or is_explicit(None):
        return False
    return isinstance(inputs, (jax.Array, np.ndarray)) and inputs.shape[axis] > 0


def _new_keys(cell: Any, only: Any) -> Any:
    """A context in which each selected stream has a new key."""
    if only is None:
        return contextlib.nullcontext()
    return split_rngs(cell, splits=1, only=only, squeeze=True, graph_updates=True)


def _selected_streams(cell: Any, only: Any) -> list[RngStream]:
    if only is None:
        return []
    selects = filterlib.to_predicate(only)
    streams = iter_streams(cell, None, "RNN")
    return [stream for path, stream in streams if selects((*path, "key"), stream.key)]


class RNN(Module):
    """Runs a cell along a sequence.

    Args:
      cell: the cell, an ``nnx.RNNCellBase``.
      time_major: inputs and outputs have the time axis first, else after the batch.
      return_carry: return the last carry too.
      reverse: begin at the end of the sequence.
      keep_order: when ``reverse``, give the outputs in the order of the inputs.
      unroll: how many steps to put into one iteration of the loop; on a GPU the cells of this
        library take at least eight.
      state_axes: how the cell's Variables go through the loop, an ``nnx.StateAxes``; by default
        those that a step writes to go from step to step.
      broadcast_rngs: a filter for streams that draw the same keys in every step.
      rngs: where the keys of the first carry come from: an ``nnx.Rngs``, a stream or a key; True
        for a stream of its own with seed 0, False or None for none.

    Raises:
      LayerArgumentError: ``cell`` is no cell.
      RngsError: ``rngs`` is nothing that keys can be drawn from.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))
      >>> rnn(jnp.ones((2, 5, 3))).shape
      (2, 5, 4)
    """

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Any = None,
        broadcast_rngs: Any = None,
        rngs: Any = True,
    ):
        if not hasattr(cell, "initialize_carry"):
            raise LayerArgumentError(
                f"RNN runs a cell such as nnx.LSTMCell, but got a {type(cell).__name__}.\n"
                "Fix: make it an nnx.RNNCellBase, which says what a cell must have."
            )
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.rngs = _carry_stream("RNN", rngs)
        self.state_axes = _CARRIED if state_axes is None else state_axes
        self.broadcast_rngs = broadcast_rngs

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Any = None,
    ) -> Any:
        """Runs the cell.

        Args:
          inputs: ``(*batch, time, *features)``, or ``(time, *batch, *features)``.
          initial_carry: the first carry; by default the cell's ``initialize_carry``.
          seq_lengths: the length of each sequence, integers of shape ``batch``, or one for all. The
            last carry is then that of each sequence's last step. Outputs beyond are padding, to be
            ignored.
          return_carry, time_major, keep_order: by default as the attributes say.
          reverse: likewise; each sequence then begins at its own end.
          rngs: where the keys of the first carry come from; by default the layer's own stream.

        Returns:
          The outputs, or ``(carry, outputs)``.

        Raises:
          FeatureError: ``inputs`` has too few axes, or ``seq_lengths`` does not fit.
        """
        return_carry = or_default(return_carry, self.return_carry)
        time_major = or_default(time_major, self.time_major)
        reverse = or_default(reverse, self.reverse)
        keep_order = or_default(keep_order, self.keep_order)

        batch_axes = np.ndim(inputs) - self.cell.num_feature_axes - 1
        axis = 0 if time_major else batch_axes
        name = functools.partial(layer_name, self)
        batch, seq_lengths = batch_of_sequences(
            name, inputs, seq_lengths, self.cell.num_feature_axes, time_major
        )
        step_shape = (*batch, *np.shape(inputs)[batch_axes + 1 :])
        if isinstance(rngs, Rngs):
            rngs = rngs.carry.fork()
        if initial_carry is None:
            rngs = self.rngs if rngs is None else rngs
            initial_carry = self.cell.initialize_carry(step_shape, rngs)
            if is_explicit(None):
                axes = tuple(a for a in range(batch_axes + 1) if a != axis)
                initial_carry = along_batch(initial_carry, inputs, axes)

        def flip(x: Array) -> Array:
            return flip_sequences(x, seq_lengths, batch_axes, time_major)

        # Sequences of one length need not be reversed: the loop can run backwards.
        backwards = reverse and seq_lengths is None
        if reverse and not backwards:
            inputs = flip(inputs)
        lengths = seq_lengths if return_carry else None
        carry, outputs = _run(
            self.cell,
            initial_carry,
            inputs,
            lengths,
            axis=axis,
            backwards=backwards,
            unroll=self.unroll,
            state_axes=self.state_axes,
            broadcast=self.broadcast_rngs,
        )
        if reverse and backwards != keep_order:
            outputs = jax.tree.map(flip, outputs)
        return (carry, outputs) if return_carry else outputs


class Bidirectional(Module):
    """Runs one RNN forward and one backward along a sequence, and merges their outputs.

    Args:
      forward_rnn: the RNN that runs forward.
      backward_rnn: the RNN that runs backward; its outputs are put in the order of the inputs.
      merge_fn: merges the two outputs; by default it concatenates them along the last axis.
      time_major: inputs and outputs have the time axis first, else after the batch.
      return_carry: return the last carries too, as a pair.
      rngs: where the keys of the first carries come from, as for ``nnx.RNN``; with False or None
        each RNN uses its own.

    Raises:
      LayerArgumentError: a cell in place of an RNN.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> forward, backward = (nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(i))) for i in range(2))
      >>> nnx.Bidirectional(forward, backward)(jnp.ones((2, 5, 3))).shape
      (2, 5, 8)
    """

    merge_fn: Callable[..., Any] = staticmethod(concatenate_features)

    def __init__(
        self,
        forward_rnn: RNN,
        backward_rnn: RNN,
        *,
        merge_fn: Callable[..., Any] = concatenate_features,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Any = True,
    ):
        for rnn in (forward_rnn, backward_rnn):
            if isinstance(rnn, RNNCellBase):
                raise LayerArgumentError(
                    f"Bidirectional runs an RNN in each direction, but got a {type(rnn).__name__}, "
                    "which is a cell.\nFix: nnx.Bidirectional(nnx.RNN(cell), nnx.RNN(other_cell))."
                )
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        self.rngs = _carry_stream("Bidirectional", rngs)

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        rngs: Any = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs both.

        Args:
          inputs, seq_lengths, return_carry, time_major: as for ``nnx.RNN``.
          initial_carry: the first carries, a pair; by default each cell's ``initialize_carry``.
          rngs: where the keys of the first carries come from; by default the layer's own stream.
          reverse, keep_order: not used; they are there because an RNN takes them. Both directions
            are run, and the outputs are always in the order of the inputs.

        Returns:
          The merged outputs, or ``((forward carry, backward carry), outputs)``.

        Raises:
          FeatureError: ``initial_carry`` is not a pair, or an RNN refuses its inputs.
        """
        del reverse, keep_order
        if initial_carry is None:
            initial_carry = (None, None)
        refuse_inputs(self, why_no_pair(initial_carry), layer_name)
        if isinstance(rngs, Rngs):
            rngs = rngs.carry
        shared: dict[str, Any] = {
            "rngs": self.rngs if rngs is None else rngs,
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": or_default(time_major, self.time_major),
        }
        forward, backward = initial_carry
        carry_f, outputs_f = self.forward_rnn(
            inputs, initial_carry=forward, reverse=False, **shared
        )
        carry_b, outputs_b = self.backward_rnn(
            inputs, initial_carry=backward, reverse=True, keep_order=True, **shared
        )
        outputs = jax.tree.map(self.merge_fn, outputs_f, outputs_b)
        if not or_default(return_carry, self.return_carry):
            return outputs
        return (carry_f, carry_b), outputs
