"""One pass over an object: its definition, and its Variables and arrays as nested dicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx import kinds, mixed, statics
from linnet.nnx.attributes import sort_attributes, static_part
from linnet.nnx.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    STATIC,
    VARIABLE,
    kind_of,
)

REF = -1
LEAF = (ARRAY,)

Definition = tuple[Any, ...]
Index = dict[int, int]  # id of a thing with identity -> its number


class Walk:
    """The state of one pass, or of several that number their objects together.

    Args:
      graph: allow a second visit; otherwise it is an error that names ``api``.
      api: the function the user called, for that error.
      index: numbers given in earlier passes.
      first: the number of the first thing met, where others were numbered elsewhere.
      where: how a path is printed in that error.
    """

    __slots__ = ("api", "first", "graph", "index", "root", "seen", "where")

    def __init__(
        self,
        graph: bool,
        api: str,
        index: Index | None = None,
        first: int = 0,
        where: Callable[[Any], str] = path_string,
    ):
        self.where = where
        self.graph = graph
        self.api = api
        self.first = first
        self.index: Index = {} if index is None else index
        self.seen: list[Any] = []  # keeps what is numbered alive, in the order of the numbers
        self.root: Any = None

    def flatten(self, root: Any, within: Any = None) -> tuple[Definition, Any]:
        """The definition of ``root`` and its leaves by key; a lone leaf stands for itself.

        ``within`` is what paths in errors start from, where ``root`` is part of something larger.
        """
        self.root = root if within is None else within
        kind = kind_of(root)
        if kind == VARIABLE:
            definition = self._variable(root)
            return definition, (root if definition[0] == VARIABLE else {})
        if kind == ARRAY:
            return LEAF, root
        if kind == STATIC:
            return (STATIC, statics.Static(root)), {}
        return self._node(root, kind)

    def _number(self, value: Any) -> int | None:
        """Numbers a thing; returns the number it had if it has been met before."""
        index = self.index
        number = index.get(id(value))
        if number is None:
            index[id(value)] = self.first + len(index)
            self.seen.append(value)
        return number

    def _variable(self, variable: Any) -> Definition:
        number = self._number(variable)
        if number is None:
            return (VARIABLE, type(variable), variable._metadata.snapshot())
        return self._again(variable, number)

    def _node(self, value: Any, kind: int, forced: bool = False) -> tuple[Definition, Any]:
        if kind == OBJECT:
            return self._object(value)
        if kind == METHOD:
            number = self.index.get(id(value.__self__))
            owner, state = self._object(value.__self__) if number is None else ((REF, number), {})
            head = (METHOD, statics.Static(value.__func__))
            return (*head, ("__self__",), (owner,)), {"__self__": state} if state else {}
        if kind in (LIST, DICT):
            number = self._number(value)
            if number is not None and self.graph:
                return (REF, number), {}
            if number is not None:  # in a tree a plain list may stand twice: it becomes two
                self.index[-len(self.index)] = len(self.index)
                self.seen.append(value)
        return self._container(value, kind, forced)

    def _object(self, obj: Any) -> tuple[Definition, dict[Any, Any]]:
        number = self._number(obj)
        if number is not None:
            return self._again(obj, number), {}
        names, values, value_kinds, part = sort_attributes(obj)
        definitions, state = self._children(names, values, value_kinds)
        return (OBJECT, type(obj), names, definitions, part, mixed.kept_marks(obj)), state

    def _children(self, names: Any, values: Any, value_kinds: Any) -> Any:
        definitions: list[Any] = []
        state: dict[Any, Any] = {}
        index, seen, first = self.index, self.seen, self.first
        methods = []
        for name, value, kind in zip(names, values, value_kinds, strict=True):
            if kind == VARIABLE:
                key = id(value)
                number = index.get(key)
                if number is None:
                    index[key] = first + len(index)
                    seen.append(value)
                    metadata = value._metadata
                    if metadata.has_containers:
                        metadata = metadata.snapshot()
                    definitions.append((VARIABLE, type(value), metadata))
                    state[name] = value
                else:
                    definitions.append(self._again(value, number))
            elif kind == OBJECT:
                definition, inner = self._object(value)
                definitions.append(definition)
                if inner:
                    state[name] = inner
            elif kind <= ARRAY:
                definitions.append(LEAF)
                state[name] = value
            elif kind == METHOD:  # last, so that its owner is found where it really stands
                methods.append((len(definitions), name, value))
                definitions.append(None)
            else:
                definition, inner = self._node(value, kind, not kinds.holds_data(value))
                definitions.append(definition)
                if inner:
                    state[name] = inner
        for position, name, value in methods:
            definitions[position], inner = self._node(value, METHOD)
            if inner:
                state[name] = inner
        return tuple(definitions), state

    def _again(self, value: Any, number: int) -> Definition:
        if not self.graph:
            refuse_sharing(self.root, value, self.api, self.where)
        return (REF, number)

    def _container(self, value: Any, kind: int, forced: bool) -> tuple[Definition, dict[Any, Any]]:
        if kind == PYTREE:
            items, form = kinds.one_level(value)
            forced = True
        else:
            items = children_of(value, kind)
            form = type(value)
        keys, children, static_keys, static_values = [], [], [], []
        for key, item in items:
            if forced or (kind_of(item) != STATIC and kinds.holds_data(item)):
                keys.append(key)
                children.append(item)
            else:
                static_keys.append(key)
                static_values.append(item)
        definitions, state = self._children(keys, children, [kind_of(item) for item in children])
        order = tuple(value) if kind == DICT else len(items)
        part = static_part(tuple(static_keys), static_values)
        definition = (kind, form, tuple(keys), definitions, part, order)
        return definition, {key: state[key] for key in kinds.sort_keys(state)}


def refuse_sharing(
    root: Any, value: Any, api: str, where: Callable[[Any], str] = path_string
) -> None:
    """Raises for something that stands in two places; both are named."""
    paths = itertools.islice(paths_to(root, value), 2)
    first, second = (where(path) or "the root" for path in paths)
    kind = "Variable" if kind_of(value) == VARIABLE else type(value).__name__
    allow = "" if api.startswith("Module.") else f"nnx.{api}(..., graph=True) or "
    raise SharedReferenceError(
        f"{kind} at {second} was already seen at {first}. tree-mode "
        f"{api} (graph=False) does not support shared {kind} references.\n"
        f"Fix: give each place its own {type(value).__name__}, or allow sharing with "
        f"{allow}nnx.set_graph_mode(True)."
    )


def paths_to(root: Any, target: Any) -> Iterator[tuple[Any, ...]]:
    """Every path that leads to ``target``, each object on the way entered once."""
    entered: set[int] = set()

    def visit(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if value is target:
            yield path
        kind = kind_of(value)
        if kind in (STATIC, VARIABLE, ARRAY) or id(value) in entered:
            return
        if kind == OBJECT:
            entered.add(id(value))
        for key, child in children_of(value, kind):
            # A method is no place of its own for an owner that stands elsewhere.
            if kind != METHOD or id(child) not in entered:
                yield from visit(child, (*path, key))

    return visit(root, ())


def children_of(value: Any, kind: int) -> list[tuple[Any, Any]]:
    """The attributes or elements of anything that has some, by key, in the order of the walk."""
    if kind == OBJECT:
        items = value._pytree_items()
        return _methods_last([(key, items[key]) for key in kinds.sort_keys(items)])
    if kind == METHOD:
        owner = kinds.bound_owner(value)
        return [] if owner is None else [("__self__", owner)]
    items = list(kinds.container_items(value, kind))
    if kind == DICT:
        by_key = dict(items)
        items = [(key, by_key[key]) for key in kinds.sort_keys(by_key)]
    return _methods_last(items)


def _methods_last(items: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The owner of a method is found where it really stands, if it stands anywhere else."""
    late = [item for item in items if type(item[1]) is MethodType]
    return [item for item in items if type(item[1]) is not MethodType] + late if late else items
