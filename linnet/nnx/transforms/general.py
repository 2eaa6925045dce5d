"""JAX transforms of one's own over live objects: ``split_inputs`` around, ``merge_inputs`` inside.

    f = split_inputs(jax.jit(merge_inputs(g)))

``split_inputs`` takes objects apart before a transform and brings back afterwards what changed;
``merge_inputs`` puts them together before the function and takes them apart after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import jax

from linnet.nnx.graphlib.contexts import from_tree, to_tree, update_context
from linnet.nnx.pytreelib.kinds import is_node

TAG = "split_merge_inputs"


@overload
def split_inputs(f: None = None, *, ctxtag: str = TAG) -> Callable[[Any], Callable[..., Any]]: ...
@overload
def split_inputs(f: Callable[..., Any], *, ctxtag: str = TAG) -> Callable[..., Any]: ...
def split_inputs(f: Any = None, *, ctxtag: str = TAG) -> Any:
    """Calls a function with its objects taken apart, and writes what it returns of them back.

    Args:
      f: the result of a JAX transform of ``merge_inputs(function)``; left out, the call is a
        decorator.
      ctxtag: a name, the same as that of the ``merge_inputs`` inside.

    Returns:
      A function of live objects, given by position.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> from linnet.nnx.transforms.general import merge_inputs, split_inputs
      >>> @split_inputs
      ... @jax.jit
      ... @merge_inputs
      ... def double(variable):
      ...     variable.value *= 2
      >>> variable = nnx.Variable(jax.numpy.array(3.0))
      >>> double(variable)
      >>> float(variable.value)
      6.0
    """
    if f is None:
        return functools.partial(split_inputs, ctxtag=ctxtag)

    @functools.wraps(f)
    def outside(*args: Any) -> Any:
        with update_context(ctxtag):
            returned = f(*to_tree(args, ctxtag=ctxtag))
            _, out = from_tree(returned, is_inner=False, ctxtag=ctxtag)
        return out

    return outside


@overload
def merge_inputs(f: None = None, *, ctxtag: str = TAG) -> Callable[[Any], Callable[..., Any]]: ...
@overload
def merge_inputs(f: Callable[..., Any], *, ctxtag: str = TAG) -> Callable[..., Any]: ...
def merge_inputs(f: Any = None, *, ctxtag: str = TAG) -> Any:
    """Calls a function of live objects with those that ``split_inputs`` took apart.

    Args:
      f: the function; left out, the call is a decorator.
      ctxtag: a name, the same as that of the ``split_inputs`` outside.

    Returns:
      A function of pytrees, which returns the changed objects, taken apart, beside its output. Put
      a JAX transform around it, and ``split_inputs`` around that.

    Raises:
      ValueError: it is called without ``split_inputs`` around it.
    """
    if f is None:
        return functools.partial(merge_inputs, ctxtag=ctxtag)

    @functools.wraps(f)
    def inside(*pure_args: Any) -> Any:
        args = from_tree(pure_args, is_inner=True, ctxtag=ctxtag)
        out = f(*args)
        objects = jax.tree_util.tree_map(lambda x: x if is_node(x) else None, args, is_leaf=is_node)
        return to_tree((objects, out), ctxtag=ctxtag)

    return inside
