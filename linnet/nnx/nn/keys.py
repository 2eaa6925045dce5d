"""Where a layer's random keys come from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import RngsError
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import layer_name
from linnet.nnx.rnglib.streams import Rngs, RngStream, as_key
from linnet.nnx.variablelib.variable import Variable, type_text


def is_key(value: Any) -> bool:
    """Whether this is a JAX key, of the new kind or of the old."""
    if isinstance(value, Variable):
        value = value.get_value()
    if not hasattr(value, "dtype"):
        return False
    old = value.dtype == jnp.uint32 and jnp.ndim(value) == 1
    return old or jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def own_stream(layer: str, rngs: Any, name: str) -> RngStream | None:
    """A stream that nobody else draws from.

    Args:
      layer: who asks, for the message.
      rngs: an ``nnx.Rngs``, a stream, a key, or None.
      name: the stream to take from an ``nnx.Rngs``.

    Returns:
      The stream, or None.

    Raises:
      RngsError: ``rngs`` is none of these.
    """
    if rngs is None:
        return None
    if isinstance(rngs, Rngs):
        return getattr(rngs, name).fork()
    if isinstance(rngs, RngStream):
        return rngs.fork()
    if is_key(rngs):
        return RngStream(rngs, tag=name)
    raise RngsError(_not_rngs(layer, rngs))


def draw(layer: Module, rngs: Any, name: str) -> jax.Array:
    """A key.

    Args:
      layer: who asks, for the message.
      rngs: an ``nnx.Rngs``, a stream or a key.
      name: the stream to take from an ``nnx.Rngs``.

    Returns:
      The key.

    Raises:
      RngsError: ``rngs`` is none of these.
    """
    if isinstance(rngs, Rngs):
        return getattr(rngs, name)()
    if isinstance(rngs, RngStream):
        return rngs()
    if is_key(rngs):
        return as_key(rngs)
    raise RngsError(_not_rngs(layer_name(layer), rngs))


def _not_rngs(layer: str, rngs: Any) -> str:
    return (
        f"{layer}: rngs must be an nnx.Rngs, an nnx.RngStream or a key, but got "
        f"{type_text(rngs)}.\nFix: pass nnx.Rngs(0), or jax.random.key(0)."
    )
