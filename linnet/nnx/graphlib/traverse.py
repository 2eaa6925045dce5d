"""Looking through an object, and rebuilding it piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

from linnet.nnx import filterlib, kinds
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.modes import graph_mode
from linnet.nnx.graphlib.walk import children_of, refuse_sharing
from linnet.nnx.kinds import ARRAY, DICT, LIST, METHOD, OBJECT, PYTREE, STATIC, VARIABLE, kind_of
from linnet.nnx.pytreelib import new_object
from linnet.nnx.statelib import iter_flat, map_state
from linnet.nnx.tracing import current_trace
from linnet.nnx.variablelib import Variable, rebuild_variable

N = TypeVar("N")
Path = tuple[Any, ...]


def iter_graph(node: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Path, Any]]:
    """Every object, Variable, container and static value below ``node``, with its path.

    Args:
      node: a module, or any pytree of modules and Variables.
      graph: allow shared references, each visited once; by default as ``set_graph_mode`` says.

    Yields:
      ``(path, value)``; what is inside comes before what it is in, so ``node`` itself is last.
    """
    return walk_for(node, graph, "iter_graph")


def walk_for(node: Any, graph: bool | None, api: str) -> Iterator[tuple[Path, Any]]:
    """``iter_graph`` for another function, which an error names as ``api``."""
    return _iterate(node, graph_mode(graph), api)


def _iterate(root: Any, allowed: bool, api: str) -> Iterator[tuple[Path, Any]]:
    seen: set[int] = set()
    # One frame for each thing whose children are being visited. A generator that calls itself would
    # pass every pair on through all of its frames.
    frames: list[tuple[Path, Any, int, Iterator[tuple[Any, Any]]]] = []
    path, value = (), root
    while True:
        kind = kind_of(value)
        is_new = True
        if kind in (OBJECT, VARIABLE) or (kind in (LIST, DICT) and allowed):
            is_new = id(value) not in seen
            if not is_new and not allowed:
                refuse_sharing(root, value, api)
            seen.add(id(value))
        if is_new and kind in _LEAVES:
            yield path, value
        elif is_new:
            if kind == OBJECT:
                value._pytree_hand_out()
            frames.append((path, value, kind, iter(children_of(value, kind))))
        while frames:
            above, holder, kind, children = frames[-1]
            key, value = next(children, _NO_MORE)
            if key is _END:
                frames.pop()
                yield above, holder
            elif kind != METHOD or id(value) not in seen:
                path = (*above, key)
                break
        else:
            return


_LEAVES = (STATIC, VARIABLE, ARRAY)
_END = object()
_NO_MORE = (_END, None)


def iter_children(node: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Any, Any]]:
    """The objects and Variables directly below ``node``, with their keys.

    Args:
      node: a module, or any pytree of modules and Variables.
      graph: allow the same child twice, visited once; by default as ``set_graph_mode`` says.

    Yields:
      ``(key, child)``.
    """
    return children_for(node, graph, "iter_children")


def children_for(node: Any, graph: bool | None, api: str) -> Iterator[tuple[Any, Any]]:
    """``iter_children`` for another function, which an error names as ``api``."""
    allowed = graph_mode(graph)
    seen: set[int] = set()
    if kind_of(node) == OBJECT:
        node._pytree_hand_out()
    for key, child in children_of(node, kind_of(node)):
        kind = kind_of(child)
        if kind in (STATIC, ARRAY) or (kind > ARRAY and not kinds.holds_data(child)):
            continue
        if id(child) in seen:
            if not allowed:
                refuse_sharing(node, child, api)
            continue
        seen.add(id(child))
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
    places: dict[int, list[Path]] = {}
    things: dict[int, Any] = {}
    _find_places(node, (), places, things, set())
    groups = ((paths, things[key]) for key, paths in places.items() if len(paths) > 1)
    return [paths for paths, thing in groups if predicate(paths[0], thing)]


# What calls itself stands outside of what begins: a function that closes over itself is freed by
# the garbage collector alone, and with it the model that it was called with.
def _find_places(
    value: Any,
    path: Path,
    places: dict[int, list[Path]],
    things: dict[int, Any],
    entered: set[int],
) -> None:
    kind = kind_of(value)
    if kind in (STATIC, ARRAY):
        return
    if kind in (OBJECT, VARIABLE):
        things[id(value)] = value
        places.setdefault(id(value), []).append(path)
    if kind == VARIABLE or id(value) in entered:
        return
    if kind == OBJECT:
        entered.add(id(value))
    for key, child in children_of(value, kind):
        # A method is no place of its own for an owner that stands elsewhere.
        if kind != METHOD or id(child) not in entered:
            _find_places(child, (*path, key), places, things, entered)


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
      f: gives a Variable, or a value for a new Variable of the same kind.
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

    def make(leaf: Any, cls: type, metadata: Any) -> Any:
        if isinstance(leaf, Variable) or not recreate_variables:
            return leaf
        return rebuild_variable(cls, leaf, metadata)

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
    """
    return _RecursiveMap(f, node, graph_mode(graph)).visit(node, ())


class _RecursiveMap:
    """One call of ``recursive_map``: what was rebuilt, by the id of what it was made from."""

    def __init__(self, f: Callable[[Path, Any], Any], root: Any, allowed: bool):
        self.f = f
        self.root = root
        self.allowed = allowed
        self.done: dict[int, Any] = {}
        self.keep_alive: list[Any] = []

    def visit(self, value: Any, path: Path) -> Any:
        """What shall stand in the place of ``value``."""
        kind, done = kind_of(value), self.done
        if kind in (OBJECT, VARIABLE, LIST, DICT) and id(value) in done:
            if self.allowed or kind in (LIST, DICT):
                return done[id(value)]
            refuse_sharing(self.root, value, "recursive_map")
        rebuilt = value
        if kind == METHOD and (owner := kinds.bound_owner(value)) is not None:
            if id(owner) not in done:
                self.visit(owner, (*path, "__self__"))
            rebuilt = MethodType(value.__func__, done[id(owner)])
        elif kind not in (STATIC, VARIABLE, ARRAY, METHOD):
            rebuilt = self._rebuild(value, kind, path)
        result = self.f(path, rebuilt)
        done[id(value)] = result
        self.keep_alive.append(value)
        return result

    def _rebuild(self, value: Any, kind: int, path: Path) -> Any:
        shell: Any = None
        if kind == OBJECT:
            # Registered before its children are visited: a cycle finds the new object.
            shell = new_object(type(value), value._pytree_marks, current_trace())
            self.done[id(value)] = shell
        elif kind in (LIST, DICT):
            shell = self.done[id(value)] = type(value)()
        if kind == PYTREE:
            items, structure = kinds.one_level(value)
            return structure.unflatten([self.visit(item, (*path, key)) for key, item in items])
        items = {key: self.visit(child, (*path, key)) for key, child in children_of(value, kind)}
        if kind == OBJECT:
            order = value._pytree_items()
            shell._pytree_restore({key: items[key] for key in order})
        elif kind == DICT:
            shell.update((key, items[key]) for key in value)
        elif kind == LIST:
            shell.extend(items[position] for position in range(len(value)))
        elif hasattr(value, "_fields"):
            return type(value)(**items)
        else:
            return tuple(items[position] for position in range(len(value)))
        return shell


def flat_variables(node: Any, graph: bool | None, api: str) -> list[tuple[Path, Variable[Any]]]:
    """The Variables below ``node`` with their first paths."""
    _, mapping = flatten_node(node, graph, api)
    return [(path, leaf) for path, leaf in iter_flat(mapping) if isinstance(leaf, Variable)]
