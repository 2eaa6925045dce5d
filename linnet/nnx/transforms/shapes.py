"""Shapes without arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.split_merge import clone
from linnet.nnx.graphlib.trees import from_tree, to_tree
from linnet.nnx.var_storage import from_refs


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
