"""One pass over an object: its definition, and its Variables and arrays as nested dicts."""

from __future__ import annotations

from typing import Any

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx import kinds, statics
from linnet.nnx.attributes import sort_attributes, static_marks, static_part
from linnet.nnx.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    STATIC,
    TUPLE,
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
    """

    __slots__ = ("api", "graph", "index", "root", "seen")

    def __init__(self, graph: bool, api: str, index: Index | None = None):
        self.graph = graph
        self.api = api
        self.index: Index = {} if index is None else index
        self.seen: list[Any] = []  # keeps what is numbered alive, in the order of the numbers
        self.root: Any = None

    def flatten(self, root: Any) -> tuple[Definition, Any]:
        """The definition of ``root`` and its leaves by key; a lone leaf stands for itself."""
        self.root = root
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
            index[id(value)] = len(index)
            self.seen.append(value)
        return number

    def _variable(self, variable: Any) -> Definition:
        number = self._number(variable)
        if number is None:
            return (VARIABLE, type(variable), variable._metadata)
        return self._again(variable, number)

    def _node(self, value: Any, kind: int, forced: bool = False) -> tuple[Definition, Any]:
        if kind == OBJECT:
            return self._object(value)
        if kind == METHOD:
            owner, state = self._object(value.__self__)
            head = (METHOD, statics.Static(value.__func__))
            return (*head, ("__self__",), (owner,)), {"__self__": state} if state else {}
        if kind in (LIST, DICT) and self.graph:
            number = self._number(value)
            if number is not None:
                return (REF, number), {}
        return self._container(value, kind, forced)

    def _object(self, obj: Any) -> tuple[Definition, dict[Any, Any]]:
        number = self._number(obj)
        if number is not None:
            return self._again(obj, number), {}
        names, values, value_kinds, part = sort_attributes(obj)
        definitions, state = self._children(names, values, value_kinds)
        return (OBJECT, type(obj), names, definitions, part, static_marks(obj)), state

    def _children(self, names: Any, values: Any, value_kinds: Any) -> Any:
        definitions: list[Any] = []
        state: dict[Any, Any] = {}
        index, seen = self.index, self.seen
        methods = []
        for name, value, kind in zip(names, values, value_kinds, strict=True):
            if kind == VARIABLE:
                key = id(value)
                number = index.get(key)
                if number is None:
                    index[key] = len(index)
                    seen.append(value)
                    definitions.append((VARIABLE, type(value), value._metadata))
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
            refuse_sharing(self.root, value, self.api)
        return (REF, number)

    def _container(self, value: Any, kind: int, forced: bool) -> tuple[Definition, dict[Any, Any]]:
        if kind == PYTREE:
            items, form = kinds.one_level(value)
            forced = True
        else:
            items = list(kinds.container_items(value, kind))
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
        order = tuple(key for key, _ in items) if kind == DICT else len(items)
        part = static_part(tuple(static_keys), static_values)
        definition = (kind, form, tuple(keys), definitions, part, order)
        return definition, {key: state[key] for key in kinds.sort_keys(state)}


def refuse_sharing(root: Any, value: Any, api: str) -> None:
    """Raises for something that stands in two places; both are named."""
    first, second = paths_to(root, value)[:2]
    kind = "Variable" if kind_of(value) == VARIABLE else type(value).__name__
    raise SharedReferenceError(
        f"{kind} at {path_string(second)} was already seen at {path_string(first)}. "
        f"Tree mode (graph=False) does not support shared references: {api} found one "
        f"{type(value).__name__} in two places.\n"
        f"Fix: give each place its own, or pass graph=True, as in nnx.{api}(..., graph=True) or "
        f"nnx.compat.{api}(...)."
    )


def paths_to(root: Any, target: Any) -> list[tuple[Any, ...]]:
    """Every path that leads to ``target`` without passing through it or going round in a cycle."""
    found: list[tuple[Any, ...]] = []

    def visit(value: Any, path: tuple[Any, ...], above: tuple[int, ...]) -> None:
        if value is target:
            found.append(path)
            if path:
                return
        kind = kind_of(value)
        if kind in (STATIC, VARIABLE, ARRAY) or id(value) in above:
            return
        for key, child in children_of(value, kind):
            visit(child, (*path, key), (*above, id(value)))

    visit(root, (), ())
    return found


def children_of(value: Any, kind: int) -> list[tuple[Any, Any]]:
    """The attributes or elements of anything that has some, by key, in the order of the walk."""
    if kind == OBJECT:
        items = value._pytree_items()
        keys = items if value._pytree_ordered else kinds.sort_keys(items)
        return [(key, items[key]) for key in keys]
    if kind == METHOD:
        owner = kinds.bound_owner(value)
        return [] if owner is None else [("__self__", owner)]
    items = list(kinds.container_items(value, kind))
    if kind in (TUPLE, LIST, PYTREE):
        return items
    by_key = dict(items)
    return [(key, by_key[key]) for key in kinds.sort_keys(by_key)]
