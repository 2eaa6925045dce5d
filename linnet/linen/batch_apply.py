"""Applying a function of one batch axis to inputs with several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FeatureError


class BatchApply:
    """Applies a function to inputs whose leading axes are merged into one.

    Args:
      f: the function.
      num_dims: how many leading axes to merge. Inputs with fewer axes stay as they are.

    Example:
      >>> from linnet import linen as nn
      >>> total = nn.BatchApply(lambda x: x.sum(axis=1))  # of one batch axis and features
      >>> total(jnp.ones((2, 3, 4))).shape
      (2, 3)
    """

    def __init__(self, f: Callable[..., Any], num_dims: int = 2):
        self._f = f
        self.num_dims = num_dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the function.

        Args:
          *args, **kwargs: pytrees of arrays.

        Returns:
          The outputs, with the leading axes of the inputs.

        Raises:
          FeatureError: no input has that many axes, or their leading axes differ.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        batches = [jnp.shape(x)[: self.num_dims] for x in leaves if jnp.ndim(x) >= self.num_dims]
        if len(set(batches)) != 1:
            raise FeatureError(
                f"BatchApply merges the first {self.num_dims} axes of its inputs, but got shapes "
                f"{', '.join(str(jnp.shape(x)) for x in leaves)}.\n"
                "Fix: give all arrays the same leading axes."
            )
        batch = batches[0]
        merged = [
            jnp.reshape(x, (math.prod(batch), *x.shape[self.num_dims :]))
            if jnp.ndim(x) >= self.num_dims
            else x
            for x in leaves
        ]
        args, kwargs = jax.tree.unflatten(structure, merged)
        return jax.tree.map(
            lambda x: jnp.reshape(x, (*batch, *x.shape[1:])) if jnp.ndim(x) else x,
            self._f(*args, **kwargs),
        )
