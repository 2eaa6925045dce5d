"""Layers that draw random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from linnet.errors import LayerArgumentError
from linnet.functional import dropout
from linnet.functional.shapes import refuse_inputs
from linnet.linen.module import Module, compact, merge_param
from linnet.linen.params import Array, layer_name
from linnet.typing import PRNGKey


class Dropout(Module):
    """In training, sets entries to zero at random and scales the others up.

    Args:
      rate: the probability that an entry is set to zero.
      broadcast_dims: axes along which entries are dropped together.
      deterministic: let everything through; may be given to the call instead.
      rng_collection: the random stream to draw from.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> layer = nn.Dropout(0.5, deterministic=False)
      >>> layer.apply({}, jnp.ones(4), rngs={"dropout": jax.random.key(1)}).shape
      (4,)
    """

    rate: float
    broadcast_dims: Sequence[int] = ()
    deterministic: bool | None = None
    rng_collection: str = "dropout"

    @compact
    def __call__(
        self, inputs: Array, deterministic: bool | None = None, rng: PRNGKey | None = None
    ) -> Array:
        """Applies the layer.

        Args:
          inputs: the values.
          deterministic: let everything through.
          rng: a key to use instead of one of the stream.

        Returns:
          The values, some of them zero.

        Raises:
          ValueError: ``deterministic`` is given neither here nor to the layer, or to both.
          InvalidRngError: there is no stream to draw from.
          FeatureError: ``inputs`` is not floating point, or lacks one of ``broadcast_dims``.
          LayerArgumentError: the rate is no probability.
        """
        deterministic = merge_param("deterministic", self.deterministic, deterministic)
        if deterministic or self.rate == 0.0:
            return inputs
        if self.rate == 1.0:
            return jnp.zeros_like(inputs)
        self._check(inputs)
        if rng is None:
            rng = self.make_rng(self.rng_collection)
        return dropout.dropout(inputs, rng, rate=self.rate, broadcast_dims=self.broadcast_dims)

    def _check(self, inputs: Array) -> None:
        """Refuses a rate that is no probability, and inputs that ``dropout`` cannot take."""
        is_number = isinstance(self.rate, (int, float))
        if is_number and (problem := dropout.why_no_rate("rate", self.rate)) is not None:
            raise LayerArgumentError(f"{layer_name(self)} {problem}")
        refuse_inputs(self, dropout.why_not_dropped(inputs, self.broadcast_dims), layer_name)
