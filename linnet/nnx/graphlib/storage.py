"""The same object with its Variables stored, marked or unwrapped another way."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from linnet.errors import StorageError, list_paths, path_string
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.modes import graph_mode
from linnet.nnx.graphlib.traverse import find_duplicates, flat_variables, recursive_map
from linnet.nnx.kinds import key_name
from linnet.nnx.statelib import iter_flat
from linnet.nnx.variablelib import Variable

N = TypeVar("N")


def with_vars(
    node: N,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> N:
    """A copy of an object whose Variables are stored another way.

    Args:
      node: a module, a state, or any pytree of modules and Variables.
      hijax: as refs that plain JAX transforms update, or not.
      ref: as JAX refs, or not.
      mutable: ``False`` makes the copy's Variables read-only.
      only: a filter for the Variables this is about; the others are shared with the original.
      allow_duplicates: a Variable that stands in two places is copied once and stays shared;
        otherwise that is an error when refs are asked for, which JAX takes only once.

    Returns:
      The copy.

    Raises:
      StorageError: a Variable that would become a ref stands in two places.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> counter = nnx.with_vars({"n": nnx.Variable(jnp.array(0))}, hijax=True)
      >>> @jax.jit
      ... def count(counter):
      ...     counter["n"][...] += 1
      >>> count(counter)
      >>> int(counter["n"].value)
      1
    """
    predicate = filterlib.to_predicate(only)
    if (hijax or ref) and not allow_duplicates and (shared := find_duplicates(node, only=only)):
        raise StorageError(
            "with_vars cannot turn shared Variables into refs, which JAX takes only once:\n"
            + list_paths(path for paths in shared for path in paths)
            + "\nFix: give each place its own Variable, or pass allow_duplicates=True."
        )
    settings = {"hijax": hijax, "ref": ref, "mutable": mutable}
    changes = {name: value for name, value in settings.items() if value is not None}
    graphdef, mapping = flatten_node(node, True, "with_vars")
    chosen = {id(leaf) for path, leaf in iter_flat(mapping) if predicate(path, leaf)}

    def make(leaf: Any, cls: type, metadata: Any) -> Any:
        return leaf.copy(**changes) if id(leaf) in chosen else leaf

    return Build(make).unflatten(graphdef.definition, mapping)


vars_as = with_vars


def as_pure(tree: N) -> N:
    """A copy of ``tree`` with each Variable replaced by its value.

    Args:
      tree: a module, a state, or any pytree of modules and Variables.

    Returns:
      The copy; for a state, a state of plain arrays.
    """
    return recursive_map(
        lambda path, x: x.get_value() if isinstance(x, Variable) else x, tree, graph=True
    )


pure = as_pure


def set_metadata(node: Any, /, *, only: Filter = ..., **metadata: Any) -> None:
    """Sets metadata on the Variables of an object, in place.

    Args:
      node: a module, or any pytree of modules and Variables.
      only: a filter for the Variables this is about.
      **metadata: what to set.
    """
    predicate = filterlib.to_predicate(only)
    for path, variable in flat_variables(node, True, "set_metadata"):
        if predicate(path, variable):
            variable.set_metadata(**metadata)


def prefix(node: Any, filter_map: Any, /, *, graph: bool | None = None) -> Any:
    """A tree of the same structure with one value for each leaf, such as an axis or a sharding.

    Args:
      node: a module, or any pytree of modules and Variables; in graph mode all arguments together.
      filter_map: a function of ``(path, variable)``, or a dict from filter to value, tried in
        order.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      A copy of ``node`` with the values in place of arrays, usable as ``in_axes``,
      ``in_shardings`` and the like of a JAX transform over ``node``.

    Raises:
      ValueError: no filter of the map selects a leaf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> state = nnx.State({"w": nnx.Param(jnp.ones(3)), "n": nnx.Cache(jnp.array(2.0))})
      >>> axes = nnx.prefix(state, {nnx.Param: 0, ...: None})
      >>> jax.vmap(lambda s: s.w * s.n, in_axes=(axes,))(state).tolist()
      [2.0, 2.0, 2.0]
    """
    if callable(filter_map):
        choose = filter_map
    else:
        table = [(filterlib.to_predicate(key), value) for key, value in dict(filter_map).items()]

        def choose(path: Any, leaf: Any) -> Any:
            for predicate, value in table:
                if predicate(path, leaf):
                    return value
            raise ValueError(
                f"prefix: no filter selects the leaf at {path_string(path)} "
                f"({type(leaf).__name__}).\n"
                "Fix: add `...: value` for everything that is left."
            )

    flatten_node(node, graph_mode(graph), "prefix")  # refuses what a tree cannot hold
    leaves, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_variable)
    chosen = []
    for keys, leaf in leaves:
        value = choose(tuple(map(key_name, keys)), leaf)
        if isinstance(leaf, Variable):  # without a ref around the value
            value = type(leaf).from_metadata(value, leaf.get_metadata())
        chosen.append(value)
    return structure.unflatten(chosen)


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)
