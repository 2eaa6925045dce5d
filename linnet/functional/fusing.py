"""Functions of arrays that run as one operation outside of traces.

Inside of a trace they are called as they are: what a layer does belongs to the trace at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from linnet.functional import contractions

_OUTSIDE = get_opaque_trace_state()
_MISSING: Any = object()

P = ParamSpec("P")
R = TypeVar("R")


def is_tracing() -> bool:
    """Whether a trace is running: of ``jax.jit``, ``jax.grad``, ``jax.vmap`` or another."""
    return get_opaque_trace_state() != _OUTSIDE


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function without contractions, so that outside of traces it is one operation.

    Args:
      function: takes arrays by position and options by keyword. Options are constants of the
        compiled code; lists among them count as tuples, and with an array among them, or a
        function that JAX did not write and that might keep state, the function runs as it is.

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
    return _compiled_while(function, ())


def compiled_unless_intercepted(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compiles a function with contractions, for calls outside of traces.

    It runs as it is while somebody stands in for one of JAX's functions that it calls. Meant for
    functions of one contraction and little else: outside of traces ``jax.lax.dot_general`` takes
    four times as long as ``jnp.matmul``, which JAX itself keeps compiled.

    Args:
      *names: the functions it calls, of ``contractions.OWN``.

    Returns:
      A decorator for functions as those of ``fused``.

    Example:
      >>> import jax.numpy as jnp
      >>> @compiled_unless_intercepted("einsum")
      ... def product(x, y):
      ...     return jnp.einsum("ab,bc->ac", x, y)
      >>> product(jnp.ones((1, 2)), jnp.ones((2, 1)))
      Array([[2.]], dtype=float32)
    """
    own = tuple(contractions.OWN[name] for name in names)
    return lambda function: _compiled_while(function, own)


def _compiled_while(function: Callable[P, R], own: tuple[contractions.Own, ...]) -> Callable[P, R]:
    """The function compiled, for calls outside of traces while JAX's functions are its own."""
    default = (function.__kwdefaults__ or {}).get

    @functools.cache  # made when it is first needed: importing the library makes none
    def compiled() -> Callable[..., Any]:
        code = function.__code__
        count = code.co_argcount
        names = code.co_varnames[count : count + code.co_kwonlyargcount]
        return jax.jit(function, static_argnames=names)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_tracing() or contractions.are_intercepted(own):
            return function(*_as_arrays(args), **options)
        given = {}
        for name, value in options.items():
            if value is default(name, _MISSING):
                continue  # the fewer options, the faster the call
            if value is not None and not isinstance(value, (str, int, float)):
                if isinstance(value, (list, tuple)):
                    value = _hashable(value)
                elif isinstance(value, (jax.Array, np.ndarray)) or _may_keep_state(value):
                    return function(*_as_arrays(args), **options)
            given[name] = value
        return compiled()(*args, **given)

    return call


def _as_arrays(args: tuple[Any, ...]) -> Any:
    """Arguments with arrays of JAX in place of NumPy's and of numbers, as ``jax.jit`` has them."""
    if all(arg is None or isinstance(arg, jax.Array) for arg in args):
        return args
    convert = (np.ndarray, np.generic, bool, int, float, complex)
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, convert) else x, args)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return _frozen(value)
    return value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _may_keep_state(value: Any) -> bool:
    """Whether an option is a function that JAX did not write; dtypes are classes, and no matter."""
    if not callable(value) or isinstance(value, type):
        return False
    return not contractions.is_written_by_jax(value)
