"""Loops of layers outside of traces, where JAX would compile them anew at each call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from linnet.nnx import locate, statics
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.tracing import EAGER, current_trace
from linnet.nnx.transforms.jit import jit
from linnet.nnx.transforms.lift import is_node

F = TypeVar("F", bound=Callable[..., Any])


class _Running(threading.local):
    def __init__(self) -> None:
        self.traced: list[list[Any]] = []  # for each call at hand, its arrays and objects


_running = _Running()


def compiled_outside(fun: F) -> F:
    """Compiles a function of objects where it is called outside of all traces.

    Inside of a trace it runs as it is.

    Args:
      fun: the function. Arrays and objects among its arguments are traced; all else (flags,
        numbers, functions) is part of what is compiled.

    Returns:
      The function.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> traced = []
      >>> @compiled_outside
      ... def scaled(layer, x, *, times):
      ...     traced.append(times)
      ...     return times * layer(x)
      >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> y, again = (scaled(layer, jnp.ones((1, 2)), times=3) for _ in range(2))
      >>> traced
      [3]
    """

    def run(traced: list[Any], structure: Any, fixed: statics.Static) -> Any:
        pairs = zip(traced, fixed.value, strict=True)
        args, kwargs = structure.unflatten([b if a is None else a for a, b in pairs])
        with locate.standing_for(_objects(traced), _objects(_running.traced[-1])):
            return fun(*args, **kwargs)

    jitted = jit(
        functools.update_wrapper(run, fun, ("__name__", "__qualname__")), static_argnums=(1, 2)
    )

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current_trace() is not EAGER:
            return fun(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_node)
        traced = [leaf if _is_traced(leaf) else None for leaf in leaves]
        fixed = tuple(None if _is_traced(leaf) else leaf for leaf in leaves)
        _running.traced.append(traced)
        try:
            return jitted(traced, structure, statics.Static(fixed))
        finally:
            _running.traced.pop()

    return call  # pyright: ignore[reportReturnType]


def _objects(tree: Any) -> list[Any]:
    return [value for _, value in iter_graph(tree, graph=True)]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) or is_node(leaf)
