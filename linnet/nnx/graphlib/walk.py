"""Definition and Walk: one pass over an object that gives its structure, leaves and state.

A ``Definition`` is what an object is without its leaves: a kind, a payload (such as the class), the
names and definitions of the children, and what is static. Things with an identity (objects,
Variables, lists, dicts) are numbered in the order of the walk; a reference holds the number of
something met before. What differs by mode:

- an object or Variable that stands twice: a reference in graph mode, an error in tree mode;
- a list or dict that stands twice: a reference in graph mode, two copies in tree mode;
- an element that is no data, in a plain container or one marked as data: static in graph mode, a
  leaf in tree mode, as for JAX.

Leaves are listed in the same order by ``Walk.leaves``, by ``Definition.leaves`` and by ``Build``,
so that they need no names on the way. ``Notes`` records what a plan of ``nnx.jit`` must compare by
itself, because it can change without being announced.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx.pytreelib import attributes, kinds, statics
from linnet.nnx.pytreelib.attributes import make_static_part, sort_attributes
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    REFERENCE,
    STATIC,
    TUPLE,
    VARIABLE,
    Path,
    kind_of,
)


class Definition(NamedTuple):
    """One node of what a walk found: hashable, comparable, and the same for equal objects.

    Things with an identity (objects, Variables, lists, dicts) are numbered as the walk meets them,
    and a second visit gives a reference to the number of the first.

    Attributes:
      kind: of ``pytreelib.kinds``.
      payload: what belongs to the kind. The class of an object, Variable or container; JAX's
        structure of a registered pytree; the function of a method and a static value, each as
        ``StaticValue``; the number that a reference refers to.
      names: the keys of the children, in the order of the walk.
      children: their definitions.
      static: the ``StaticPart`` of an object or container; the ``Metadata`` of a Variable.
      all_keys: the keys of a container in its own order, those of static elements among them.
      marks: which attributes of an object are marked as data or as static.
      shared: the static attributes of an object that hold the same list, dict or other changeable
        value as an earlier one, with the number of that value.
    """

    kind: int
    payload: Any = None
    names: tuple[Any, ...] = ()
    children: tuple[Any, ...] = ()
    static: Any = None
    all_keys: Any = None
    marks: tuple[Any, ...] = ()
    shared: tuple[tuple[Any, int], ...] = ()

    def items(self) -> Iterable[tuple[Any, Definition]]:
        """The children with their keys."""
        return zip(self.names, self.children, strict=True)

    def at(self, path: Path) -> Definition:
        """What stands at a path."""
        found = self
        for step in path:
            found = dict(found.items())[step]
        return found

    def leaves(self, path: Path = ()) -> Iterator[tuple[Path, Definition]]:
        """The Variables and arrays with their paths, in the order in which a walk meets them."""
        if self.kind in (VARIABLE, ARRAY):
            yield path, self
        else:
            for name, child in self.items():
                yield from child.leaves((*path, name))

    def parts(self) -> Iterator[tuple[Definition | None, Definition]]:
        """Itself and every definition below, in the order of the walk, each with its holder."""
        pending: list[tuple[Definition | None, Definition]] = [(None, self)]
        while pending:
            holder, part = pending.pop()
            yield holder, part
            pending += [(part, child) for child in reversed(part.children)]

    def static_values(self) -> Iterator[statics.StaticValue]:
        """The static values of this part alone that have a key."""
        packed = self.static.packed if isinstance(self.static, attributes.StaticPart) else ()
        yield from (x for x in (self.payload, *packed) if type(x) is statics.StaticValue)

    @property
    def is_numbered(self) -> bool:
        """Whether it is something with an identity, met for the first time."""
        return self.kind in (OBJECT, VARIABLE, LIST, DICT)

    @property
    def text(self) -> str:
        """A name for messages."""
        if self.kind == ARRAY:
            return "an array"
        if self.kind == REFERENCE:
            return "a shared reference"
        if self.kind == STATIC:
            return repr(self.payload.value)
        return getattr(self.payload, "__name__", str(self.payload))


class HashedDefinition:
    """A definition as a cache key: its hash is computed once, and what was found equal is known."""

    __slots__ = ("_hash", "_same", "value")

    def __init__(self, definition: Definition):
        self.value = definition
        self._same = definition  # one that is equal, and stands for all that were found so
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if type(other) is not HashedDefinition:
            return False
        if self._same is not other._same:
            # A definition that was just found has no hash yet, and comparing takes less time.
            are_hashed = self._hash is not None and other._hash is not None
            if (are_hashed and self._hash != other._hash) or self.value != other.value:
                return False
            other._same = self._same  # the next comparison takes no time
        return True

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.value)
        return self._hash


ARRAY_LEAF = Definition(ARRAY)
NOTHING = Definition(STATIC, statics.StaticValue(None))  # as for JAX, None is no leaf


def reference(number: int) -> Definition:
    """The definition of a second visit: a reference to the number given at the first."""
    return Definition(REFERENCE, number)


Index = dict[int, int]  # id of a thing with identity -> its number


@dataclasses.dataclass(eq=False)
class Notes:
    """What a walk depends on that can change without being announced: static values that change
    in place, and pytrees of foreign types. ``private`` are containers only their object has."""

    static_values: list[Any] = dataclasses.field(default_factory=list)
    pytrees: list[Any] = dataclasses.field(default_factory=list)
    private: set[int] = dataclasses.field(default_factory=set)

    def add_object(self, obj: Any, static_names: Iterable[Any]) -> None:
        """Records the changeable static values and the private containers of an object."""
        items = obj._pytree_items()
        self.add_static(items[name] for name in static_names)
        for name in obj._pytree_private():
            self._add_private(items[name])

    def _add_private(self, value: Any) -> None:
        kind = kind_of(value)
        if kind in (LIST, DICT, TUPLE):
            self.private.add(id(value))
            for _, item in kinds.container_items(value, kind):
                self._add_private(item)

    def add_static(self, values: Iterable[Any]) -> None:
        """Records the static values that can change in place."""
        self.static_values += [value for value in values if statics.can_change(value)]


@dataclasses.dataclass(eq=False, slots=True)
class Walk:
    """The state of one pass, or of several that number their objects together.

    Without ``graph`` a second visit is an error that names ``api``, its paths printed by ``where``.
    ``index`` and ``first`` are the numbers given in earlier passes and how many there are.
    ``things`` lists what this pass numbered, ``leaves`` the Variables and arrays in the order of
    ``Definition.leaves``, and ``places`` the holder and key of each array among them. ``statics``
    lists the static values that copies of their objects get a copy of, those that stand in several
    places of one root once, and ``static_index`` has their numbers in the latest root.
    """

    graph: bool
    api: str
    index: Index = dataclasses.field(default_factory=dict)
    first: int = 0
    where: Callable[[Any], str] = path_string
    notes: Notes | None = None
    things: list[Any] = dataclasses.field(default_factory=list)  # keeps what is numbered alive
    leaves: list[Any] = dataclasses.field(default_factory=list)
    places: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    find_root: Callable[[], Any] = lambda: None
    statics: list[Any] = dataclasses.field(default_factory=list)
    static_index: Index = dataclasses.field(default_factory=dict)

    def flatten(self, root: Any, within: Callable[[], Any] | None = None) -> tuple[Definition, Any]:
        """The definition of ``root`` and its leaves by key; a lone leaf stands for itself.

        ``within()`` is called only for an error: it gives the tree that contains ``root``, from
        which paths are counted.
        """
        self.find_root = within or (lambda: root)
        self.static_index = {}
        kind = kind_of(root)
        if kind == OBJECT:
            return self._object(root)
        whole = () if self.graph else (None,)
        definitions, state = self._children(None, (None,), (root,), (kind,), whole)
        return definitions[0], state.get(None, {})

    def _number(self, value: Any) -> int | None:
        """Numbers a thing; returns the number it had if it has been met before."""
        index = self.index
        number = index.get(id(value))
        if number is None:
            index[id(value)] = self.first + len(self.things)
            self.things.append(value)
        return number

    def _node(self, value: Any, kind: int, all_are_leaves: bool) -> tuple[Definition, Any]:
        if kind == METHOD:
            number = self.index.get(id(value.__self__))
            owner, state = (
                self._object(value.__self__) if number is None else (reference(number), {})
            )
            function = statics.StaticValue(value.__func__)
            definition = Definition(METHOD, function, ("__self__",), (owner,))
            return definition, {"__self__": state} if state else {}
        if kind in (LIST, DICT):
            number = self._number(value)
            if number is not None and self.graph:
                return reference(number), {}
            if number is not None:  # in a tree a plain list may stand twice: it becomes two
                self.things.append(value)
        return self._container(value, kind, all_are_leaves)

    def _object(self, obj: Any) -> tuple[Definition, dict[Any, Any]]:
        number = self._number(obj)
        if number is not None:
            return self._again(obj, number), {}
        names, values, value_kinds, static_part = sort_attributes(obj)
        if self.notes is not None:
            self.notes.add_object(obj, static_part.names)
        whole = () if self.graph else attributes.names_marked_data(obj)
        definitions, state = self._children(obj, names, values, value_kinds, whole)
        marks = attributes.kept_marks(obj) if obj._pytree_marks else ()
        shared = self._shared_statics(obj, static_part) if static_part.special else ()
        fields = (OBJECT, type(obj), names, definitions, static_part, None, marks, shared)
        return _new(Definition, fields), state

    def _shared_statics(self, obj: Any, static_part: Any) -> tuple[tuple[Any, int], ...]:
        """The attributes whose value was met before, with its number; numbers the others."""
        items, index, shared = obj._pytree_items(), self.static_index, []
        for name, _ in static_part.copied_values:
            value = items[name]
            if self.graph and id(value) in index:
                shared.append((name, index[id(value)]))
            else:
                index[id(value)] = len(index)
                self.statics.append(value)
        return tuple(shared)

    def _children(
        self, holder: Any, names: Any, values: Any, value_kinds: Any, whole: Container[Any] = ()
    ) -> Any:
        """The definitions of the children, and their state.

        ``whole`` names the containers of which every element is a leaf, whatever its type.
        """
        definitions: list[Any] = []
        state: dict[Any, Any] = {}
        index, first, things, leaves = self.index, self.first, self.things, self.leaves
        for name, value, kind in zip(names, values, value_kinds, strict=True):
            if kind == VARIABLE:
                key = id(value)
                number = index.get(key)
                if number is None:
                    index[key] = first + len(things)
                    things.append(value)
                    leaves.append(value)
                    metadata = value._metadata
                    if metadata.can_change:
                        metadata = metadata.snapshot()
                    definitions.append(
                        _new(Definition, (VARIABLE, type(value), (), (), metadata, None, (), ()))
                    )
                    state[name] = value
                else:
                    definitions.append(self._again(value, number))
            elif kind == OBJECT:
                definition, inner = self._object(value)
                definitions.append(definition)
                if inner:
                    state[name] = inner
            elif value is None:
                definitions.append(NOTHING)
            elif kind <= ARRAY:
                definitions.append(ARRAY_LEAF)
                leaves.append(value)
                self.places.append((holder, name))
                state[name] = value
            else:
                definition, inner = self._node(value, kind, name in whole)
                definitions.append(definition)
                if inner:
                    state[name] = inner
        return tuple(definitions), state

    def _again(self, value: Any, number: int) -> Definition:
        if not self.graph:
            refuse_sharing(self.find_root(), value, self.api, self.where)
        return reference(number)

    def _container(
        self, value: Any, kind: int, all_are_leaves: bool
    ) -> tuple[Definition, dict[Any, Any]]:
        keys, items, item_kinds = _elements(value, kind)
        static_part, in_order = _NO_STATICS, kind != PYTREE and not hasattr(value, "_fields")
        all_are_leaves = all_are_leaves or (kind == PYTREE and not self.graph)
        if not all_are_leaves and not _all_data(items, item_kinds):
            is_data = list(map(kinds.holds_data, items))
            statics_found = [
                (k, x) for k, x, data in zip(keys, items, is_data, strict=True) if not data
            ]
            names, values = [k for k, _ in statics_found], [x for _, x in statics_found]
            static_part = make_static_part(tuple(names), values)
            if self.notes is not None:
                self.notes.add_static(x for _, x in statics_found)
            keys, items, item_kinds = (
                list(itertools.compress(column, is_data)) for column in (keys, items, item_kinds)
            )
        if METHOD in item_kinds:  # after the others, as in every walk
            in_order = False
            last = sorted(range(len(keys)), key=lambda n: item_kinds[n] == METHOD)
            keys, items, item_kinds = (
                [column[n] for n in last] for column in (keys, items, item_kinds)
            )
        whole = keys if all_are_leaves else ()
        definitions, state = self._children(value, keys, items, item_kinds, whole)
        if not in_order:
            state = {key: state[key] for key in kinds.sort_keys(state)}
        payload: Any = type(value)
        all_keys: Any = tuple(value) if kind == DICT else None
        if kind in (LIST, TUPLE):
            all_keys = range(len(value))
        elif kind == PYTREE:
            children, payload = kinds.one_level(value)
            all_keys = tuple(key for key, _ in children)
            if self.notes is not None:
                self.notes.pytrees.append(value)
        fields = (kind, payload, tuple(keys), definitions, static_part, all_keys, (), ())
        return _new(Definition, fields), state


def divide_leaves(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Separates the leaves that a walk met into Variables and arrays."""
    variables = [leaf for leaf in leaves if kind_of(leaf) == VARIABLE]
    return variables, [leaf for leaf in leaves if kind_of(leaf) != VARIABLE]


_NO_STATICS = make_static_part((), [])
_new = tuple.__new__  # faster than the class, and there is one for every attribute of a model


def _elements(value: Any, kind: int) -> tuple[Any, Any, list[int]]:
    """The keys, elements and kinds of what ``kinds.sorted_items`` gives; columns save time."""
    if kind == DICT:
        keys = kinds.sort_keys(value)
        items: Any = [value[key] for key in keys]
    elif kind == PYTREE:
        pairs = kinds.one_level(value)[0]
        keys, items = [key for key, _ in pairs], [item for _, item in pairs]
    else:
        keys, items = getattr(value, "_fields", range(len(value))), value
    return keys, items, list(map(kind_of, items))


def _all_data(items: Any, item_kinds: list[int]) -> bool:
    """Whether nothing among the elements of a container is static."""
    if STATIC in item_kinds:
        return False
    return max(item_kinds, default=ARRAY) <= ARRAY or all(map(kinds.holds_data, items))


def refuse_sharing(
    root: Any, value: Any, api: str, where: Callable[[Any], str] = path_string
) -> None:
    """Raises for something that stands in two places; both are named."""
    paths = itertools.islice(paths_to(root, value), 2)
    first, second = (where(path) or "the root" for path in paths)
    thing = "Variable" if kind_of(value) == VARIABLE else type(value).__name__
    allow = "" if api.startswith("Module.") else f"nnx.{api}(..., graph=True) or "
    raise SharedReferenceError(
        f"{thing} at {second} was already seen at {first}. tree-mode "
        f"{api} (graph=False) does not support shared {thing} references.\n"
        f"Fix: give each place its own {type(value).__name__}, or allow sharing with "
        f"{allow}nnx.set_graph_mode(True)."
    )


def paths_to(root: Any, target: Any) -> Iterator[Path]:
    """Every path that leads to ``target``, each object on the way entered once."""
    return (path for path, value in kinds.places(root, every_path=True) if value is target)
