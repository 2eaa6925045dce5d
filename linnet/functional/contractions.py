"""JAX's contractions and convolutions, as they are found when they are called.

Libraries that quantise a model, add to it, or count what it does put functions of their own in the
place of JAX's while the model runs: under JAX's names, or as the code of JAX's own functions. So a
contraction is looked up at each call, and nothing that was compiled with JAX's own is used while
one is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def dot_general(*args: Any, **kwargs: Any) -> Any:
    """``jax.lax.dot_general``, looked up when it is called."""
    return jax.lax.dot_general(*args, **kwargs)


def einsum(*args: Any, **kwargs: Any) -> Any:
    """``jnp.einsum``, looked up when it is called."""
    return jnp.einsum(*args, **kwargs)


def conv_general_dilated(*args: Any, **kwargs: Any) -> Any:
    """``jax.lax.conv_general_dilated``, looked up when it is called."""
    return jax.lax.conv_general_dilated(*args, **kwargs)


_JAX = os.path.join(os.path.dirname(jax.__file__), "")


def is_written_by_jax(function: Any) -> bool:
    """Whether JAX wrote a function and all that it wraps, so that it keeps no state.

    Args:
      function: anything that can be called.

    Returns:
      False for a function in disguise, such as ``functools.wraps(jnp.tanh)(mine)``, and for one
      whose code was replaced.

    Example:
      >>> is_written_by_jax(jnp.tanh), is_written_by_jax(jax.jit(lambda x: x))
      (True, False)
    """
    code = getattr(function, "__code__", None)
    wrapped = getattr(function, "__wrapped__", None)
    if code is None:
        by_jax = type(function).__module__.partition(".")[0] in ("jax", "jaxlib")
        return by_jax and wrapped is not None and is_written_by_jax(wrapped)
    return code.co_filename.startswith(_JAX) and (wrapped is None or is_written_by_jax(wrapped))


class Own(NamedTuple):
    """A function of JAX's, to be compared with what is found in its place.

    Attributes:
      names: what is in the module.
      name: the function's name there.
      function: JAX's own, or None where another function stood there from the start.
      code: its code, or None for what JAX keeps compiled.
    """

    names: dict[str, Any]
    name: str
    function: Any
    code: Any


def _own(module: Any, name: str) -> Own:
    function = getattr(module, name)
    if not is_written_by_jax(function):
        function = None
    return Own(vars(module), name, function, getattr(function, "__code__", None))


OWN = {
    name: _own(module, name)
    for module, names in (
        (jax.lax, ("dot_general", "conv_general_dilated", "conv_transpose")),
        (jnp, ("einsum", "matmul", "dot", "tensordot")),
        (jax.nn, ("dot_product_attention",)),
    )
    for name in names
}


def are_intercepted(which: Iterable[Own] = OWN.values()) -> bool:
    """Whether one of JAX's contractions or convolutions is not JAX's own at the moment.

    Args:
      which: those to look at; by default all.

    Returns:
      True where another function has its name, or another code is its code.

    Example:
      >>> are_intercepted()
      False
    """
    for names, name, function, code in which:
        if names[name] is not function or (code is not None and function.__code__ is not code):
            return True
    return False
