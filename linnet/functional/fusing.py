"""A function of arrays that runs as one operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

# From JAX 0.12 on, True leaves the call in the trace, for the compiler to inline.
_INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]

_MISSING: Any = object()

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function, so that a call outside of all traces is one operation, not many.

    Inside a trace it leaves no mark on what is compiled: its operations stand in the caller's.

    Args:
      function: takes arrays by position and options by keyword. Options are constants of the
        compiled code; lists among them count as tuples, and with an array among them, or a
        function that is not JAX's own and might keep state, the function runs as it is.

    Returns:
      The function.

    Example:
      >>> import jax.numpy as jnp
      >>> @fused
      ... def scaled(x, *, factors):
      ...     return x * sum(factors)
      >>> scaled(jnp.ones(2), factors=[1, 2])
      Array([3., 3.], dtype=float32)
    """
    defaults = function.__kwdefaults__ or {}

    @functools.cache  # made when it is first needed: importing the library makes none
    def compiled() -> Callable[..., Any]:
        code = function.__code__
        count = code.co_argcount
        names = code.co_varnames[count : count + code.co_kwonlyargcount]
        return jax.jit(function, static_argnames=names, inline=_INLINE)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = {}
        for name, value in options.items():
            if value is defaults.get(name, _MISSING):
                continue  # the fewer options, the faster the call
            if value is not None and not isinstance(value, (str, int, float)):
                if isinstance(value, (list, tuple)):
                    value = _frozen(value)
                elif isinstance(value, (jax.Array, np.ndarray)) or _is_foreign(value):
                    return function(*args, **options)
            given[name] = value
        return compiled()(*args, **given)

    return call


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _is_foreign(value: Any) -> bool:
    """Whether an option is a function that JAX did not write; dtypes are classes, and no matter."""
    if not callable(value) or isinstance(value, type):
        return False
    return str(getattr(value, "__module__", "")).partition(".")[0] != "jax"
