"""Functions of arrays, compiled where they are called outside of traces, unless a library replaced
one of JAX's contractions.

Outside of traces a decorated function runs as one compiled operation. Inside of a trace it is
called as it is: its operations become part of that trace.

Libraries that quantise a model, add to it, or count its operations replace JAX's contractions and
convolutions while the model runs: under JAX's names, or by changing the code of JAX's own
functions. So a contraction is looked up at each call, and nothing that was compiled with JAX's own
is used while one is replaced.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state


def _token_outside_of_traces() -> Any:
    """JAX's token for no trace, taken in a new thread: this file may be imported in a trace."""
    tokens: list[Any] = []
    thread = threading.Thread(target=lambda: tokens.append(get_opaque_trace_state()))
    thread.start()
    thread.join()
    return tokens[0]


EAGER = _token_outside_of_traces()
_MISSING: Any = object()
_JAX = os.path.join(os.path.dirname(jax.__file__), "")

P = ParamSpec("P")
R = TypeVar("R")


# Contractions, looked up when they are called.


def dot_general(*args: Any, **kwargs: Any) -> Any:
    """``jax.lax.dot_general``, looked up when it is called."""
    return jax.lax.dot_general(*args, **kwargs)


def einsum(*args: Any, **kwargs: Any) -> Any:
    """``jnp.einsum``, looked up when it is called."""
    return jnp.einsum(*args, **kwargs)


def conv_general_dilated(*args: Any, **kwargs: Any) -> Any:
    """``jax.lax.conv_general_dilated``, looked up when it is called."""
    return jax.lax.conv_general_dilated(*args, **kwargs)


def chosen(made_by: Any, given: Any, default: Callable[..., Any]) -> Callable[..., Any]:
    """The contraction or convolution of a layer: made by its class, given, or the default."""
    if made_by is not None:
        return made_by()
    return default if given is None else given


def is_written_by_jax(function: Any) -> bool:
    """Whether JAX wrote a callable and everything it wraps, so that it keeps no state.

    False for a function under another's name, such as ``functools.wraps(jnp.tanh)(mine)``, and for
    one whose code was replaced.

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


class OwnFunction(NamedTuple):
    """A function of JAX's, to be compared with what is found under its name later.

    Attributes:
      names: the namespace of its module.
      name: its name there.
      function: JAX's own, or None where another function had replaced it from the start.
      code: its code, or None for a function compiled by ``jax.jit``, which has none.
    """

    names: dict[str, Any]
    name: str
    function: Any
    code: Any


def _own(module: Any, name: str) -> OwnFunction:
    function = getattr(module, name)
    if not is_written_by_jax(function):
        function = None
    return OwnFunction(vars(module), name, function, getattr(function, "__code__", None))


JAX_FUNCTIONS = {
    name: _own(module, name)
    for module, names in (
        (jax.lax, ("dot_general", "conv_general_dilated", "conv_transpose")),
        (jnp, ("einsum", "matmul", "dot", "tensordot")),
        (jax.nn, ("dot_product_attention",)),
    )
    for name in names
}


def are_intercepted(which: Iterable[OwnFunction] = JAX_FUNCTIONS.values()) -> bool:
    """Whether one of JAX's contractions or convolutions is replaced at the moment.

    Example:
      >>> are_intercepted()
      False
    """
    for names, name, function, code in which:
        if names[name] is not function or (code is not None and function.__code__ is not code):
            return True
    return False


# Functions that are compiled outside of traces.


def is_tracing() -> bool:
    """Whether a trace is running: of ``jax.jit``, ``jax.grad``, ``jax.vmap`` or another."""
    return get_opaque_trace_state() != EAGER


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function without contractions, so that outside of traces it is one operation.

    Args:
      function: takes arrays by position and options by keyword. Options are constants of the
        compiled code, lists among them as tuples. With an array among the options, or a function
        that JAX did not write and that might keep state, the function is not compiled.

    Returns:
      The function.

    Example:
      >>> @fused
      ... def scaled(x, *, factors):
      ...     return x * sum(factors)
      >>> scaled(jnp.ones(2), factors=[1, 2])
      Array([3., 3.], dtype=float32)
    """
    return _compiled_while(function, ())


def compiled_unless_intercepted(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compiles a function with contractions, for calls outside of traces.

    It is not compiled while one of JAX's functions that it calls is replaced. Meant for functions
    of one contraction and little else: outside of traces ``jax.lax.dot_general`` takes four times
    as long as ``jnp.matmul``, which JAX itself keeps compiled.

    Args:
      *names: the functions it calls, of ``JAX_FUNCTIONS``.

    Returns:
      A decorator for functions as those of ``fused``.

    Example:
      >>> @compiled_unless_intercepted("einsum")
      ... def product(x, y):
      ...     return jnp.einsum("ab,bc->ac", x, y)
      >>> product(jnp.ones((1, 2)), jnp.ones((2, 1)))
      Array([[2.]], dtype=float32)
    """
    own = tuple(JAX_FUNCTIONS[name] for name in names)
    return lambda function: _compiled_while(function, own)


def _compiled_while(function: Callable[P, R], own: tuple[OwnFunction, ...]) -> Callable[P, R]:
    """Compiles a function for calls outside of traces while none of ``own`` is replaced."""
    default = (function.__kwdefaults__ or {}).get

    @functools.cache  # made when it is first needed: importing the library makes none
    def compiled() -> Callable[..., Any]:
        code = function.__code__
        count = code.co_argcount
        names = code.co_varnames[count : count + code.co_kwonlyargcount]
        return jax.jit(function, static_argnames=names)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_tracing() or are_intercepted(own):
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
    """Converts NumPy arrays and numbers among the arguments to JAX arrays, as ``jax.jit`` does."""
    if all(arg is None or isinstance(arg, jax.Array) for arg in args):
        return args
    convert = (np.ndarray, np.generic, bool, int, float, complex)
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, convert) else x, args)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return as_tuples(value)
    return value


def as_tuples(value: Any) -> Any:
    """Lists, and those inside of them, as tuples, which are hashable."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _may_keep_state(value: Any) -> bool:
    """Whether an option is a function that JAX did not write; dtypes are classes, and stateless."""
    return callable(value) and not isinstance(value, type) and not is_written_by_jax(value)
