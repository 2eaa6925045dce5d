"""Layers that apply other layers in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from linnet.errors import LayerArgumentError
from linnet.linen.module import Module, compact
from linnet.linen.params import layer_name


class Sequential(Module):
    """Applies layers in turn, each to the output of the one before.

    An output that is a tuple becomes the positional arguments of the next layer, one that is a dict
    its keyword arguments.

    Args:
      layers: modules and functions.

    Raises:
      LayerArgumentError: ``layers`` is no sequence.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
      >>> y, variables = model.init_with_output(jax.random.key(0), jnp.ones((1, 3)))
      >>> y.shape, sorted(variables["params"])
      ((1, 2), ['layers_0', 'layers_2'])
    """

    layers: Sequence[Callable[..., Any]]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence):
            raise LayerArgumentError(
                f"Sequential: 'layers' must be a sequence, got '{type(self.layers).__name__}'.\n"
                "Fix: write the layers in a list."
            )
        super().__post_init__()

    @compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layers.

        Args:
          *args, **kwargs: passed on to the first layer.

        Returns:
          The output of the last layer.

        Raises:
          LayerArgumentError: there are no layers.
        """
        if not self.layers:
            raise LayerArgumentError(
                f"{layer_name(self)} has no layers.\nFix: give it at least one."
            )
        out: Any = None
        for layer in self.layers:
            out = layer(*args, **kwargs)
            args, kwargs = (out if isinstance(out, tuple) else (out,)), {}
            if isinstance(out, dict):
                args, kwargs = (), out
        return out
