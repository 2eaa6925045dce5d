"""Loops over objects outside of traces, where JAX would compile them anew at each call."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from linnet.functional import contractions
from linnet.nnx import kinds, locate, statics
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.tracing import EAGER, current_trace
from linnet.nnx.tracing_state import reading
from linnet.nnx.transforms.arguments import NO_STATIC, Given, flatten_with_gaps
from linnet.nnx.transforms.jit_function import JitFunction
from linnet.nnx.transforms.lift import is_node

_MOST_TRACES = 64


class _Running(threading.local):
    def __init__(self) -> None:
        self.given: list[Any] = []  # the arguments of each call at hand


_running = _Running()


def compiled_outside(
    fun: Any = None,
    *,
    api: str = "jit",
    graph: bool | None = None,
) -> Any:
    """Compiles a function of objects where it is called outside of all traces.

    Inside of a trace it runs as it is; so it does, outside, once it was seen to use arrays that are
    not among its arguments. Those would be constants of what is compiled, and a Variable that it
    reads from around it would seem never to change. So it does, too, while somebody stands in for
    one of JAX's contractions, to see them all.

    Args:
      fun: the function; left out, the call is a decorator. Arrays and objects among its arguments
        are traced; all else (flags, numbers, functions) is part of what is compiled.
      api: the name of what calls it, for errors.
      graph: allow shared references; by default as ``set_graph_mode`` says.

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

    def make(fun: Any) -> Any:
        compiled = _Compiled(fun, api, graph)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_outside = current_trace() is EAGER and compiled.can_be_used
            usable = is_outside and not contractions.are_intercepted()
            return (compiled if usable else fun)(*args, **kwargs)

        return call

    return make if fun is None else make(fun)


class _Compiled(JitFunction):
    """A function that is compiled, with all leaves static that are neither arrays nor objects.

    Attributes:
      can_be_used: whether it gives the same for the same arguments at any time.
    """

    def __init__(self, fun: Callable[..., Any], api: str, graph: Any):
        # Whatever the function left of its objects is brought out.
        super().__init__(self._standing_for_its_arguments(fun), api, graph, True, {})
        self.can_be_used = True
        self._unseen = 1  # traces that were not looked at; the first is yet to come
        self._seen: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _running.given.append((args, kwargs))
        try:
            if self._unseen:
                self._look(args, kwargs)
            count = self.traces.count
            run = super().__call__ if self.can_be_used else self.fun
            result = run(*args, **kwargs)
            self._unseen += self.traces.count - count
        finally:
            _running.given.pop()
        if not self.can_be_used or self.traces.count > _MOST_TRACES:
            self._forget()
        return result

    def _look(self, args: Any, kwargs: Any) -> None:
        """Looks at what will be run for these arguments."""
        if _refers_to_objects(inspect.unwrap(self.fun)):
            self.can_be_used = False  # their flags may change, which no trace shows
            return
        count = self.traces.count
        jaxpr = self.trace(*args, **kwargs).jaxpr
        if any(jaxpr is seen for seen in self._seen):
            return
        self._seen.append(jaxpr)
        self.can_be_used = self.can_be_used and not _has_captured(jaxpr)
        if not self._seen[1:] or self.traces.count == count:
            self._unseen -= 1

    def _standing_for_its_arguments(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with errors that name the objects outside."""
        itself = weakref.ref(self)

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            copies = locate.standing_for(_objects((args, kwargs)), _objects(_running.given[-1]))
            with copies, reading() as read:  # nobody is warned: what has constants is not kept
                out = fun(*args, **kwargs)
            if read and (compiled := itself()) is not None:
                compiled.can_be_used = False  # a Variable may hold a number, not an array
            return out

        return run

    def _forget(self) -> None:
        self.clear_cache()
        self.traces.count = 0
        self._unseen = 1
        self._seen.clear()

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = super()._flatten(args, kwargs)
        if all(map(_is_traced, given.leaves)):
            return given
        leaves, treedef = flatten_with_gaps((args, kwargs))
        fixed = statics.Static(tuple(None if _is_traced(leaf) else leaf for leaf in leaves))
        moving = treedef.unflatten([leaf if _is_traced(leaf) else None for leaf in leaves])
        given = super()._flatten(*moving)
        return given._replace(static=NO_STATIC._replace(leaves=fixed))

    def _take_static(self, args: Any, kwargs: Any) -> Any:
        return NO_STATIC, args, kwargs


def _refers_to_objects(function: Any) -> bool:
    """Whether a function can reach objects of the model that are not among its arguments."""
    pending, met = [function], set()
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or function in met:
            continue
        met.add(function)
        cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
        closed_over = [cell.cell_contents for cell in cells]
        known = [function.__globals__.get(name) for name in _names_in(function.__code__)]
        found = [item for value in (*closed_over, *known) for item in kinds.data_inside(value)]
        if any(kinds.kind_of(item) != kinds.ARRAY for item in found):
            return True
        pending += closed_over  # functions among them
    return False


def _names_in(code: types.CodeType) -> list[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names_in(part))]


def _has_captured(jaxpr: Any) -> bool:
    """Whether it holds arrays that were there before; those made in it are no ``jax.Array``."""
    if any(isinstance(const, jax.Array) for const in getattr(jaxpr, "consts", ())):
        return True
    return any(map(_is_captured, jaxpr.eqns))


def _is_captured(equation: Any) -> bool:
    if any(isinstance(getattr(x, "val", None), jax.Array) for x in equation.invars):
        return True
    inner = jax.tree.leaves(tuple(equation.params.values()))
    return any(_has_captured(x) for x in inner if hasattr(x, "eqns"))


def _objects(tree: Any) -> list[Any]:
    return [value for _, value in iter_graph(tree, graph=True)]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) or is_node(leaf)
