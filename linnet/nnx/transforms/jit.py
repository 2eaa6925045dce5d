"""nnx.jit: compiled functions of live objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from linnet.nnx.pytreelib import Pytree
from linnet.nnx.transforms.arguments import after_module, refuse_bound_method
from linnet.nnx.transforms.compiled import PartialJit
from linnet.nnx.transforms.jit_function import JitFunction


def jit(
    fun: Any = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | tuple[int, ...] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Compiles a function whose arguments and outputs may be live modules.

    What the function writes to Variables reaches the objects that were passed in. A step costs what
    a hand-written ``jax.jit`` over a flat list of the same arrays costs.

    Args:
      fun: the function, or a module, which is then passed to its ``__call__`` as an argument
        that the numbers below do not count; left out, the call is a decorator.
      in_shardings: as for ``jax.jit``, with ``StateSharding`` for objects.
      out_shardings: likewise.
      static_argnums: arguments that are part of what is compiled.
      static_argnames: the same by name.
      donate_argnums: arguments whose buffers may be reused; objects get new ones.
      donate_argnames: the same by name.
      keep_unused: as for ``jax.jit``.
      device: as for ``jax.jit``.
      backend: as for ``jax.jit``.
      inline: as for ``jax.jit``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The compiled function, with ``lower``, ``trace``, ``eval_shape`` and ``clear_cache``.

    Raises:
      ValueError: ``fun`` is a bound method of a module.
      TypeError: it cannot be called.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Counter(nnx.Module):
      ...     def __init__(self):
      ...         self.n = nnx.Variable(jnp.zeros((), jnp.int32))
      >>> @nnx.jit
      ... def count(counter, by):
      ...     counter.n[...] += by
      >>> counter = Counter()
      >>> for by in range(4):
      ...     count(counter, by)
      >>> int(counter.n.value)
      6
    """
    options = {
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "keep_unused": keep_unused,
        "inline": inline,
    }
    options |= {k: v for k, v in (("device", device), ("backend", backend)) if v is not None}

    def make(fun: Any) -> Any:
        refuse_bound_method(fun, "jit")
        if not callable(fun):
            raise TypeError(f"nnx.jit takes a function or a module that is one, but got {fun!r}.")
        if isinstance(fun, Pytree):
            method = getattr(type(fun), "__call__")  # noqa: B004, B009
            shifted = after_module(options)
            return PartialJit(JitFunction(method, "jit", graph, graph_updates, shifted), fun)
        return JitFunction(fun, "jit", graph, graph_updates, dict(options))

    return make if fun is None else make(fun)


def jit_partial(
    fun: Callable[..., Any],
    *partial_args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | tuple[int, ...] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: Any = None,
    backend: str | None = None,
    inline: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """``functools.partial(nnx.jit(fun, ...), *partial_args)``.

    Args:
      fun: the function.
      *partial_args: its first arguments.
      in_shardings: as for ``jit``, like the rest.
      out_shardings: as for ``jit``.
      static_argnums: as for ``jit``.
      static_argnames: as for ``jit``.
      donate_argnums: as for ``jit``.
      donate_argnames: as for ``jit``.
      keep_unused: as for ``jit``.
      device: as for ``jit``.
      backend: as for ``jit``.
      inline: as for ``jit``.
      graph: as for ``jit``.
      graph_updates: as for ``jit``.

    Returns:
      The compiled function of the remaining arguments.
    """
    jitted = jit(
        fun,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused,
        device=device,
        backend=backend,
        inline=inline,
        graph=graph,
        graph_updates=graph_updates,
    )
    return PartialJit(jitted, *partial_args)


def cached_partial(
    f: Callable[..., Any],
    *cached_args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """``functools.partial``, kept for programs that used it for speed; plans made it needless.

    Args:
      f: a function made by ``nnx.jit``, or any other.
      *cached_args: its first arguments.
      graph: accepted for symmetry.
      graph_updates: accepted for symmetry.

    Returns:
      The function of the remaining arguments.
    """
    del graph, graph_updates
    partial = PartialJit if isinstance(f, JitFunction) else functools.partial
    return partial(f, *cached_args)
