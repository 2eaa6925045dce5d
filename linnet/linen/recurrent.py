"""Recurrent layers: a cell run along a sequence, in one direction or in both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import LayerArgumentError
from linnet.frozen_dict import FrozenDict
from linnet.functional import recurrent
from linnet.functional.recurrent import (
    batch_of_sequences,
    concatenate_features,
    flip_sequences as flip_sequences,
    or_default,
)
from linnet.functional.shapes import refuse_inputs
from linnet.linen.module import Module
from linnet.linen.params import Array, layer_name
from linnet.linen.recurrent_cells import (
    ConvLSTMCell as ConvLSTMCell,
    DenseParams as DenseParams,
    GRUCell as GRUCell,
    LSTMCell as LSTMCell,
    MGUCell as MGUCell,
    OptimizedLSTMCell as OptimizedLSTMCell,
    RNNCellBase as RNNCellBase,
    SimpleCell as SimpleCell,
)
from linnet.linen.transforms import scan
from linnet.typing import PRNGKey


class RNN(Module):
    """Runs a cell along a sequence.

    Args:
      cell: the cell, an ``RNNCellBase``.
      time_major: inputs and outputs have the time axis first, else after the batch.
      return_carry: return the last carry too.
      reverse: begin at the end of the sequence.
      keep_order: when ``reverse``, give the outputs in the order of the inputs.
      unroll: how many steps to put into one iteration of the loop.
      variable_axes, variable_broadcast, variable_carry, split_rngs: as for ``linen.scan``.

    Example:
      >>> from linnet import linen as nn
      >>> rnn = nn.RNN(nn.GRUCell(4))
      >>> rnn.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
      (2, 5, 4)
    """

    cell: RNNCellBase
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    unroll: int = 1
    variable_axes: Mapping[Any, Any] = FrozenDict()
    variable_broadcast: Any = "params"
    variable_carry: Any = False
    split_rngs: Mapping[Any, bool] = FrozenDict({"params": False})

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Any = None,
        init_key: PRNGKey | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs the cell.

        Args:
          inputs: ``(*batch, time, *features)``, or ``(time, *batch, *features)``.
          initial_carry: the first carry; by default the cell's ``initialize_carry``.
          init_key: the key of the first carry; by default ``jax.random.key(0)``.
          seq_lengths: the length of each sequence, integers of shape ``batch``, or one for all. The
            last carry is then that of each sequence's last step. Outputs beyond are padding, to be
            ignored.
          return_carry, time_major, keep_order: by default as the fields say.
          reverse: likewise; each sequence then begins at its own end.

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
        name = functools.partial(layer_name, self)
        batch, seq_lengths = batch_of_sequences(
            name, inputs, seq_lengths, self.cell.num_feature_axes, time_major
        )
        if initial_carry is None:
            key = jax.random.key(0) if init_key is None else init_key
            shape = (*batch, *np.shape(inputs)[batch_axes + 1 :])
            initial_carry = self.cell.initialize_carry(key, shape)

        def flip(x: Array) -> Array:
            return flip_sequences(x, seq_lengths, batch_axes, time_major)

        # A loop that runs backwards would give the steps other keys and slices of variables;
        # sequences of different lengths are reversed one by one.
        needs_flip = (
            bool(self.variable_axes) or any(self.split_rngs.values()) or seq_lengths is not None
        )
        backwards = reverse and not needs_flip
        if reverse and not backwards:
            inputs = flip(inputs)
        axis = 0 if time_major else batch_axes
        lengths = seq_lengths if return_carry else None
        carry, outputs = self._run(initial_carry, inputs, lengths, axis, backwards)
        if reverse and backwards != keep_order:
            outputs = jax.tree.map(flip, outputs)
        return (carry, outputs) if return_carry else outputs

    def _run(self, carry: Any, inputs: Any, lengths: Any, axis: int, backwards: bool) -> Any:
        """The carry of each sequence's last step, and the outputs."""

        def step(cell: Any, held: Any, x: Any) -> Any:
            if lengths is None:
                return cell(held, x)
            (carry, last), (x, number) = held, x
            carry, y = cell(carry, x)
            return (carry, recurrent.keep_until(number, lengths, carry, last)), y

        loop = scan(
            step,
            in_axes=axis if lengths is None else ((axis, 0),),
            out_axes=axis,
            reverse=backwards,
            unroll=self.unroll,
            variable_axes=self.variable_axes,
            variable_broadcast=self.variable_broadcast,
            variable_carry=self.variable_carry,
            split_rngs=self.split_rngs,
        )
        if lengths is None:
            return loop(self.cell, carry, inputs)
        numbers = jnp.arange(np.shape(inputs)[axis])
        (_, last), outputs = loop(self.cell, (carry, carry), (inputs, numbers))
        return last, outputs


class Bidirectional(Module):
    """Runs one RNN forward and one backward along a sequence, and merges their outputs.

    Args:
      forward_rnn: the RNN that runs forward.
      backward_rnn: the RNN that runs backward; its outputs are put in the order of the inputs.
      merge_fn: merges the two outputs; by default it concatenates them along the last axis.
      time_major: inputs and outputs have the time axis first, else after the batch.
      return_carry: return the last carries too, as a pair.

    Example:
      >>> from linnet import linen as nn
      >>> layer = nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4)))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 3)))[0].shape
      (2, 5, 8)
    """

    forward_rnn: RNN
    backward_rnn: RNN
    merge_fn: Callable[..., Any] = concatenate_features
    time_major: bool = False
    return_carry: bool = False

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Any = None,
        init_key: PRNGKey | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs both.

        Args:
          inputs, seq_lengths, return_carry, time_major: as for ``RNN``.
          initial_carry: the first carries, a pair; by default each cell's ``initialize_carry``.
          init_key: the key of the first carries, split for the two; as for ``RNN`` by default.
          reverse, keep_order: not used; they are there because an RNN takes them. Both directions
            are run, and the outputs are always in the order of the inputs.

        Returns:
          The merged outputs, or ``((forward carry, backward carry), outputs)``.

        Raises:
          LayerArgumentError: a cell in place of an RNN.
          FeatureError: ``initial_carry`` is not a pair, or an RNN refuses its inputs.
        """
        del reverse, keep_order
        for rnn in (self.forward_rnn, self.backward_rnn):
            if isinstance(rnn, RNNCellBase):
                raise LayerArgumentError(
                    f"{layer_name(self)} runs an RNN in each direction, but got a "
                    f"{type(rnn).__name__}, which is a cell.\n"
                    "Fix: linen.Bidirectional(linen.RNN(cell), linen.RNN(other_cell))."
                )
        carries = (None, None) if initial_carry is None else initial_carry
        refuse_inputs(self, recurrent.why_no_pair(carries), layer_name)
        keys = (None, None) if init_key is None else jax.random.split(init_key)
        shared: dict[str, Any] = {
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": or_default(time_major, self.time_major),
        }
        carry_f, outputs_f = self.forward_rnn(
            inputs, initial_carry=carries[0], init_key=keys[0], reverse=False, **shared
        )
        carry_b, outputs_b = self.backward_rnn(
            inputs,
            initial_carry=carries[1],
            init_key=keys[1],
            reverse=True,
            keep_order=True,
            **shared,
        )
        outputs = jax.tree.map(self.merge_fn, outputs_f, outputs_b)
        if not or_default(return_carry, self.return_carry):
            return outputs
        return (carry_f, carry_b), outputs
