"""Modules of NNX and of Linen inside of an ``nnx.bridge.Module``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linnet import linen
from linnet.errors import BridgeError
from linnet.nnx.bridge.module import ModuleStackEntry, adopt, current_context
from linnet.nnx.bridge.wrappers import ToNNX
from linnet.nnx.modules.module import Module
from linnet.nnx.rnglib.streams import Rngs


def _running(function: str) -> ModuleStackEntry:
    entry = current_context()
    if entry is None or entry.module.scope is None:
        raise BridgeError(
            f"{function}() only needed inside bridge Module: no setup and no compact method of an "
            "nnx.bridge.Module is running.\nFix: outside of one, make the module itself."
        )
    return entry


def nnx_in_bridge_mdl(factory: Callable[[Rngs], Module], name: str | None = None) -> Module:
    """Makes an NNX module in a method of an ``nnx.bridge.Module``.

    Args:
      factory: makes the module from random streams.
      name: its name, in a compact method; by default the name of its class with a number.

    Returns:
      The module.

    Raises:
      BridgeError: no ``setup`` and no compact method is running.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Model(nnx.bridge.Module):
      ...     @nnx.bridge.compact
      ...     def __call__(self, x):
      ...         return nnx.bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(2, 3, rngs=rngs))(x)
      >>> list(Model().init(0, jnp.ones((1, 2)))["params"])
      ['Linear_0']
    """
    entry = _running("nnx_in_bridge_mdl")
    scope = entry.module.scope
    module = factory(scope.rngs if scope.initializing else _with_default(scope.rngs))
    if entry.in_compact:
        adopt(entry, module, type(module), name)
    return module


def linen_in_bridge_mdl(linen_module: linen.Module, name: str | None = None) -> ToNNX:
    """Makes a Linen module part of an ``nnx.bridge.Module``, in one of its methods.

    Args:
      linen_module: the Linen module.
      name: its name, in a compact method; by default the name of its class with a number.

    Returns:
      The module, as a ``ToNNX``.

    Raises:
      BridgeError: no ``setup`` and no compact method is running.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import linen, nnx
      >>> class Model(nnx.bridge.Module):
      ...     @nnx.bridge.compact
      ...     def __call__(self, x):
      ...         return nnx.bridge.linen_in_bridge_mdl(linen.Dense(3))(x)
      >>> list(Model().init(0, jnp.ones((1, 2)))["params"])
      ['Dense_0']
    """
    entry = _running("linen_in_bridge_mdl")
    module = ToNNX(linen_module, rngs=entry.module.scope.rngs)
    if entry.in_compact:
        adopt(entry, module, type(linen_module), name)
    return module


def _with_default(rngs: Rngs) -> Rngs:
    """Adds a ``default`` stream, for parameters that given ones overwrite after they are drawn."""
    if "default" in rngs:
        return rngs
    completed: Any = Rngs(0)
    for name, stream in rngs.items():
        setattr(completed, name, stream)
    return completed
