"""Layers that draw random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array

from linnet.errors import LayerArgumentError, ModeError, RngsError
from linnet.functional import dropout
from linnet.functional.shapes import refuse_inputs
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import draw_key, layer_name, not_told, own_stream
from linnet.nnx.rnglib.streams import Rngs
from linnet.nnx.variablelib.variable import Variable


class Dropout(Module):
    """In training, sets entries to zero at random and scales the others up.

    Args:
      rate: the probability that an entry is set to zero.
      broadcast_dims: axes along which entries are dropped together.
      deterministic: let everything through. ``train()``, ``eval()`` and ``nnx.view`` change it.
      rng_collection: the stream to take from an ``nnx.Rngs``.
      rngs: where the keys come from: an ``nnx.Rngs``, a stream or a key. The layer keeps a fork of
        its own. With None, each call has to pass them.

    Raises:
      LayerArgumentError: the rate is no probability.
      RngsError: ``rngs`` is nothing to draw keys from.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones(4))
      Array([2., 0., 2., 0.], dtype=float32)
      >>> layer.eval()
      >>> layer(jnp.ones(4))
      Array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Any = None,
    ):
        check_rate("Dropout", "rate", rate)
        self.rate = rate
        self.broadcast_dims = broadcast_dims
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.rngs = own_stream("Dropout", _chosen(rngs, rng_collection), rng_collection)

    def __call__(
        self, inputs: Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> Array:
        """Applies the layer.

        Args:
          inputs: the values.
          deterministic: let everything through; by default as the attribute says.
          rngs: an ``nnx.Rngs``, a stream or a key to use instead of the layer's own.

        Returns:
          The values, some of them zero.

        Raises:
          FeatureError: ``inputs`` is not floating point, or lacks one of ``broadcast_dims``.
          ModeError: neither the call nor the layer says whether to let everything through.
          RngsError: there are no keys to draw.
        """
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic is None:
            raise ModeError(not_told(self, "drop entries:", "deterministic"))
        if deterministic or self.rate == 0.0:
            return inputs
        refuse_inputs(self, dropout.why_not_dropped(inputs, self.broadcast_dims), layer_name)
        key = None if self.rate == 1.0 else self._draw(rngs)
        return dropout.dropout(inputs, key, rate=self.rate, broadcast_dims=self.broadcast_dims)

    def _draw(self, rngs: Any) -> Array:
        if rngs is None:
            rngs = self.rngs
        if rngs is None:
            raise RngsError(
                f"{layer_name(self)} drops entries (`deterministic` is False), but has no keys: no "
                "rngs argument was provided to Dropout in the constructor or in the call.\nFix: "
                "build it with rngs=nnx.Rngs(0), pass rngs= to the call, or call model.eval()."
            )
        return draw_key(self, _chosen(rngs, self.rng_collection), self.rng_collection)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the flags of ``nnx.view``.

        Args:
          deterministic: let everything through.
        """
        if deterministic is not None:
            self.deterministic = deterministic


def check_rate(layer: str, argument: str, rate: Any) -> None:
    """Refuses a rate that is no probability; Variables and arrays are not checked."""
    problem = None if isinstance(rate, Variable) else dropout.why_no_rate(argument, rate)
    if problem is not None:
        raise LayerArgumentError(f"{layer} {problem}")


def _chosen(rngs: Any, name: str) -> Any:
    """The stream of that name in an ``nnx.Rngs``; anything else is returned as it is."""
    return rngs[name] if isinstance(rngs, Rngs) else rngs
