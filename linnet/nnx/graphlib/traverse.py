"""Functions that go through an object: iterate, map, change the Variables.

``iter_graph`` and ``iter_children`` only look; ``map``, ``recursive_map``, ``with_vars``,
``as_pure`` and ``prefix`` make a copy with other parts; ``set_metadata`` changes Variables in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, TypeVar

import jax

from linnet.errors import StorageError, list_paths, path_string
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build, variable_maker
from linnet.nnx.graphlib.graphdef import flatten_node, graph_mode
from linnet.nnx.graphlib.walk import refuse_sharing
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.kinds import (
    AFTER,
    AGAIN,
    BEFORE,
    SINGLE,
    Path,
    children_of,
    is_node,
    key_name,
    kind_of,
)
from linnet.nnx.pytreelib.objects import new_object
from linnet.nnx.pytreelib.tracing import current_trace
from linnet.nnx.pytreelib.watch import home_of
from linnet.nnx.statelib import iter_flat, map_state
from linnet.nnx.variablelib.variable import (
    Variable,
    is_variable,
    stored_value,
)

N = TypeVar("N")


def iter_graph(node: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Path, Any]]:
    """Every object, Variable, container, array and static value in ``node``, with its path.

    Args:
      node: a module, or any pytree of modules and Variables.
      graph: allow shared references, each visited once; by default as ``set_graph_mode`` says.

    Yields:
      ``(path, value)``; what is inside comes before what it is in, so ``node`` itself is last.

    Example:
      >>> from linnet import nnx
      >>> for path, value in nnx.iter_graph([nnx.Param(1.0), {"n": 2}]):
      ...     print(path, type(value).__name__)
      (0,) Param
      (1, 'n') int
      (1,) dict
      () list
    """
    for event, path, value in _visits(node, graph_mode(graph), "iter_graph"):
        if event in (SINGLE, AFTER):
            yield path, value


def iter_objects(node: Any, cls: type[N], graph: bool | None, api: str) -> Iterator[tuple[Path, N]]:
    """The objects of a class that ``iter_graph`` gives; an error names ``api``."""
    allowed = graph_mode(graph)
    # Less to visit saves time; a Variable that stands twice is refused unless that is allowed.
    left_out = (*kinds.PLAIN, kinds.VARIABLE) if allowed else kinds.PLAIN
    for event, path, value in _visits(node, allowed, api, left_out):
        if event in (SINGLE, AFTER) and isinstance(value, cls):
            yield path, value


def _visits(
    root: Any, allowed: bool, api: str, left_out: tuple[int, ...] = ()
) -> Iterator[tuple[int, Path, Any]]:
    """``kinds.visits`` where lists and dicts have an identity only if sharing is allowed."""
    enter_again = (kinds.TUPLE, kinds.PYTREE, kinds.METHOD)
    if not allowed:
        enter_again += (kinds.LIST, kinds.DICT)
    found = kinds.visits(root, _handed_out, left_out=left_out, enter_again=enter_again)
    for event, path, value in found:
        if event == AGAIN and not allowed and is_node(value):
            refuse_sharing(root, value, api)
        yield event, path, value


def _handed_out(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    """The children of something, whose containers the caller may change from now on."""
    if kind == kinds.OBJECT:
        value._pytree_hand_out()
    return children_of(value, kind)


def iter_children(node: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Any, Any]]:
    """The objects and Variables directly below ``node``, with their keys.

    ``nnx.List`` and ``nnx.Dict`` are objects. Plain lists and dicts are not, and are not looked
    into.

    Args:
      node: a module, or any pytree of modules and Variables.
      graph: makes no difference: a child that stands twice is given twice in either mode.

    Yields:
      ``(key, child)``.

    Example:
      >>> from linnet import nnx
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layers = nnx.List([nnx.Linear(1, 1, rngs=rngs)])
      ...         self.scale, self.extra = nnx.Param(1.0), [nnx.Linear(1, 1, rngs=rngs)]
      >>> [key for key, _ in nnx.iter_children(Net(nnx.Rngs(0)))]
      ['layers', 'scale']
    """
    for key, child in children_of(node, kind_of(node)):
        if kind_of(child) in (kinds.OBJECT, kinds.VARIABLE):
            yield key, child


def find_duplicates(node: Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """Where one object or Variable stands in several places.

    Args:
      node: a module, or any pytree of modules and Variables.
      only: a filter for what is reported.

    Returns:
      One list of paths for each thing that is shared.

    Example:
      >>> from linnet import nnx
      >>> p = nnx.Param(1.0)
      >>> nnx.find_duplicates({"a": p, "b": [p]})
      [[('a',), ('b', 0)]]
    """
    predicate = filterlib.to_predicate(only)
    found: dict[int, tuple[Any, list[Path]]] = {}
    for path, value in kinds.places(node, plain=False, every_path=True):
        if kind_of(value) in (kinds.OBJECT, kinds.VARIABLE):
            found.setdefault(id(value), (value, []))[1].append(path)
    shared = ((value, paths) for value, paths in found.values() if len(paths) > 1)
    return [paths for value, paths in shared if predicate(paths[0], value)]


def map(
    f: Callable[[Path, Any], Any],
    node: N,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> N:
    """A copy of an object with ``f(path, variable)`` in place of each Variable.

    Args:
      f: gives a Variable, or a value for a new Variable of the same type.
      node: a module, a state, or any pytree of modules and Variables.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      recreate_variables: wrap plain results in Variables; with ``False`` they stand as they are.

    Returns:
      The new object.

    Example:
      >>> from linnet import nnx
      >>> doubled = nnx.map(lambda path, v: v.value * 2, {"w": nnx.Param(2.0)})
      >>> doubled["w"]
      Param(
        value=4.0
      )
    """
    graphdef, mapping = flatten_node(node, graph, "map")
    if type(mapping) is dict:
        mapping = map_state(f, mapping).raw_mapping
    else:
        mapping = f((), mapping)
    make = variable_maker(copy=False, recreate=recreate_variables)
    return Build(make).unflatten(graphdef.definition, mapping)


def recursive_map(f: Callable[[Path, Any], Any], node: Any, /, *, graph: bool | None = None) -> Any:
    """Rebuilds an object from the leaves up, passing each rebuilt piece through ``f``.

    Args:
      f: takes a path and what stands there (an object with its new children, a Variable, an array,
        a static value) and returns what shall stand there.
      node: a module, or any pytree of modules and Variables.
      graph: allow shared references, each mapped once; by default as ``set_graph_mode`` says.

    Returns:
      What ``f`` returns for the rebuilt ``node``.

    Example:
      >>> from linnet import nnx
      >>> def no_dropout(path, x):
      ...     return (lambda x: x) if isinstance(x, nnx.Dropout) else x
      >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
      >>> nnx.recursive_map(no_dropout, model).layers[1](3)
      3
    """
    made: dict[int, Any] = {}  # by the id of what it was made from
    held: list[dict[Any, Any]] = [{}]  # what was made for the children of each holder on the way
    for event, path, value in _visits(node, graph_mode(graph), "recursive_map"):
        if event == BEFORE:
            held.append({})
            if (shell := _shell(value)) is not None:  # a cycle finds the new object
                made[id(value)] = shell
            continue
        if event == AGAIN:
            result = made[id(value)]
        else:
            rebuilt = value if event == SINGLE else _rebuilt(value, held.pop(), made)
            result = made[id(value)] = f(path, rebuilt)
        held[-1][path[-1] if path else None] = result
    return held[0][None]


def _shell(value: Any) -> Any:
    """What takes the place of an object, list or dict, still empty; None for anything else."""
    kind = kind_of(value)
    if kind == kinds.OBJECT:
        return new_object(type(value), value._pytree_marks, current_trace())
    return type(value)() if kind in (kinds.LIST, kinds.DICT) else None


def _rebuilt(value: Any, items: dict[Any, Any], made: dict[int, Any]) -> Any:
    """A holder like ``value`` with other items."""
    kind = kind_of(value)
    if kind == kinds.METHOD:
        owner = kinds.bound_owner(value)
        return value if owner is None else MethodType(value.__func__, made[id(owner)])
    if kind in (kinds.TUPLE, kinds.PYTREE):
        return kinds.with_elements(value, kind, items)
    shell = made[id(value)]
    if kind == kinds.OBJECT:
        shell._pytree_restore({key: items[key] for key in value._pytree_items()})
    elif kind == kinds.DICT:
        shell.update((key, items[key]) for key in value)
    else:
        shell.extend(items[position] for position in range(len(value)))
    return shell


def flat_variables(node: Any, graph: bool | None, api: str) -> list[tuple[Path, Variable[Any]]]:
    """The Variables below ``node`` with their first paths."""
    _, mapping = flatten_node(node, graph, api)
    return [(path, leaf) for path, leaf in iter_flat(mapping) if isinstance(leaf, Variable)]


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
      mutable: ``False`` makes the copy's Variables read-only, and plain values instead of refs,
        so that ``jax.grad`` can differentiate with respect to them.
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

    Example:
      >>> from linnet import nnx
      >>> nnx.as_pure({"w": nnx.Param(1.0), "n": 2})
      {'w': 1.0, 'n': 2}
    """
    return recursive_map(lambda path, x: stored_value(x), tree, graph=True)


pure = as_pure


def set_metadata(node: Any, /, *, only: Filter = ..., **metadata: Any) -> None:
    """Sets metadata on the Variables of an object, in place.

    Args:
      node: a module, or any pytree of modules and Variables.
      only: a filter for the Variables this is about.
      **metadata: what to set.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> nnx.set_metadata(model, only=nnx.PathContains("bias"), decay=False)
      >>> model.bias.decay, model.kernel.has_metadata("decay")
      (False, False)
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

    flatten_node(node, graph, "prefix")  # refuses what a tree cannot hold
    leaves, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_variable)
    chosen = []
    for keys, leaf in leaves:
        value = choose(tuple(key_name(key) for key in keys), leaf)
        if isinstance(leaf, Variable):  # without a ref around the value
            value = type(leaf).from_metadata(value, leaf.get_metadata())
        chosen.append(value)
    made = structure.unflatten(chosen)
    for part in jax.tree_util.tree_leaves(made, is_leaf=is_node):
        if is_node(part):
            home_of(part).is_prefix = True
    return made
