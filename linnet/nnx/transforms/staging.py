"""Looking at and checking what a function of objects computes: make_jaxpr, checkify."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from linnet.nnx.graphlib.contexts import from_tree, to_tree
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.split_merge import clone
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.run import Call, transform, without_static
from linnet.nnx.variablelib.storage import from_refs


def make_jaxpr(
    f: Any = None,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    static_argnums: int | tuple[int, ...] = (),
) -> Any:
    """A function that gives the jaxpr of a function of objects.

    Args:
      f: the function; left out, the call is a decorator.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says.
      static_argnums: positional arguments that are not traced.

    Returns:
      A function of the same arguments that returns the jaxpr; its inputs are the Variables' values
      and then the other arrays, its outputs what the function returns and the values it changed.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    def make(f: Callable[..., Any]) -> Any:
        refuse_bound_method(f, "make_jaxpr")

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with_static, moving = without_static(f, args, static, "make_jaxpr")
            call = Call(with_static, moving, kwargs, "make_jaxpr", graph, graph_updates, named=f)

            def pure(values: Any, arrays: Any, plain: Any) -> Any:
                changed, news, leaves = call.run_changed(values, arrays, plain)
                return leaves, news, changed

            opened = call.opened
            return jax.make_jaxpr(pure)(opened.values, opened.arrays, opened.plain)

        return wrapper

    return make if f is None else make(f)


def _lifted_checkify(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    errors: Any,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    from jax.experimental import checkify as jax_checkify

    call = Call(f, args, kwargs, "checkify", graph, graph_updates)
    chosen = jax_checkify.user_checks if errors is None else errors
    checked = jax_checkify.checkify(call.run_changed, errors=chosen)
    opened = call.opened
    error, (changed, news, leaves) = checked(opened.values, opened.arrays, opened.plain)
    return error, call.close(changed, news, leaves)


def checkify(
    f: Any,
    errors: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.experimental.checkify.checkify`` for functions of objects.

    Args:
      f: the function.
      errors: which errors to look for; by default the user's own checks.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      A function that returns ``(error, output)``; ``error.throw()`` raises if there was one.
    """
    return transform(
        "checkify", _lifted_checkify, f, errors=errors, graph=graph, graph_updates=graph_updates
    )


def eval_shape(
    f: Callable[..., Any],
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Runs a function on shapes alone, such as the constructor of a model too big to build.

    Args:
      f: the function; what it returns may contain modules and Variables.
      *args: its arguments; modules among them are not changed.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: accepted for symmetry; nothing is carried out of a run without values.
      **kwargs: more arguments.

    Returns:
      What ``f`` returns, with ``jax.ShapeDtypeStruct`` in place of arrays.

    Raises:
      SharedReferenceError: something is shared in tree mode; both paths are named.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Table(nnx.Module):
      ...     def __init__(self, rows):
      ...         self.w = nnx.Param(jnp.zeros((rows, 10**6)))
      >>> nnx.eval_shape(lambda: Table(10**6)).w.value
      ShapeDtypeStruct(shape=(1000000, 1000000), dtype=float32)
    """
    del graph_updates

    def run(tree: Any) -> Any:
        inner_args, inner_kwargs = from_tree(tree)
        inner_args, inner_kwargs = clone((inner_args, inner_kwargs), graph=True)
        out = f(*inner_args, **inner_kwargs)
        flatten_node(out, graph, "eval_shape")  # refuses what a tree cannot hold
        return jax.tree_util.tree_map(from_refs, to_tree(out))  # JAX lets no ref out

    flatten_node((args, kwargs), graph, "eval_shape")
    return from_tree(jax.eval_shape(run, to_tree((args, kwargs))))
