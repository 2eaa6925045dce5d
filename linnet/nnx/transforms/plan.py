"""Plans: what ``nnx.jit`` remembers of its arguments, so that a call needs no walk.

A ``Record`` holds the result of a walk of one object among the arguments: its definition, its
Variables, and the places of its arrays, in the order of the walk. It is kept by the ``Home`` of
that object, keeps alive everything that was found except the object itself, and refers to no
compiled function. So a model that is dropped is freed with its records, and every id that a record
compares belongs to something that it keeps alive. A ``Plan`` is the list of records for the objects
of one call of one compiled function; it stands in the ``entry.SignatureTable`` of that function,
beside the entries.

Why a record may replace a walk: a walk depends on what each object, list and dict holds, and on
static values and metadata. Objects and Variables announce every change of these
(``pytreelib.watch``). Plain lists and dicts, other pytrees, static values that can change, and
objects of classes with a ``functools.cached_property``, or with a ``__setattr__`` or
``__delattr__`` of their own, announce nothing, so they are compared before each use, elements by
identity (``_Guards``). If nothing was announced and nothing differs, a walk would find what the
record holds.

After an announced change of static values or metadata, the things that changed are described again
by the function that the walk uses. If they have the same children, a walk would take the same
steps, and its definition is a function of the descriptions: it is looked up among those found for
the same descriptions, or the object is walked again. Any other change ends the record.

What is not noticed is a write that goes round ``__setattr__``: ``vars(module)[name] = value``,
``object.__setattr__`` or ``dict.__setitem__`` on the attributes of a module, unless its class is
one of those above. Write ``setattr(module, name, value)``, or call ``nnx.update``. With
``LINNET_CHECK_PLANS=1`` in the environment every call walks anyway, compares all of the above, and
raises where they differ.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, getitem, is_
from typing import Any

import numpy as np

from linnet.errors import path_string
from linnet.nnx.graphlib.walk import HashedDefinition, Notes, Walk, divide_leaves, paths_to
from linnet.nnx.modules.containers import Dict
from linnet.nnx.pytreelib.attributes import kept_marks, sort_attributes
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    ARRAY_TYPES,
    DICT,
    LIST,
    OBJECT,
    PYTREE,
    REFERENCE,
    STATIC,
    TUPLE,
    VARIABLE,
    is_node,
    kind_of,
    one_level,
)
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.statics import key_of, may_be_kept
from linnet.nnx.pytreelib.watch import home_of, watch
from linnet.nnx.transforms.arguments import VariableList
from linnet.nnx.transforms.engine import Opened, Structure
from linnet.nnx.transforms.retrace import TraceLog, difference
from linnet.nnx.variablelib.storage import Seed

CHECK_PLANS = os.environ.get("LINNET_CHECK_PLANS", "") not in ("", "0")

_MOST_RECORDS = 8  # of one object: one for each combination of arguments it is passed with
_MOST_DEFINITIONS = 64  # of one record: combinations of static values


class Record:
    """What ``walk`` finds in one object among the arguments.

    ``earlier`` has the records of the objects before it, ``first`` is how many things were numbered
    in them, ``index`` has the numbers of its own things by id. ``hashed_definition`` is None if
    only a walk can tell it.

    ``_descriptions`` and ``_children`` have what ``_describe`` gave for each watched thing;
    ``_announced`` the ids of things whose static values changed and that were not described again
    yet; ``_altered`` the descriptions that differ now; ``_definitions`` the definition for each
    state of ``_altered``. ``_guards`` compares what announces nothing; ``_guarded`` has, for each
    thing, the static values that it compares. ``arrays`` reads the arrays by ``_stores`` and
    ``_keys``.
    """

    __slots__ = (
        "__weakref__",
        "_altered",
        "_announced",
        "_children",
        "_definitions",
        "_descriptions",
        "_guarded",
        "_guards",
        "_keys",
        "_stores",
        "cells",
        "earlier",
        "first",
        "graph",
        "has_ended",
        "hashed_definition",
        "index",
        "is_kept",
        "places",
        "refers_to_earlier",
        "root",
        "statics",
        "things",
        "variables",
    )

    def __init__(self, root: Any, walk: Walk, arguments: Callable[[], Any]):
        known = len(walk.index)
        self.hashed_definition: HashedDefinition | None = HashedDefinition(
            walk.flatten(root, arguments)[0]
        )
        self.graph, self.first, self.things = walk.graph, walk.first, walk.things
        numbers = walk.index.items()
        self.index = {key: n for key, n in numbers if n >= self.first} if known else walk.index
        self.variables = divide_leaves(walk.leaves)[0] if walk.places else walk.leaves
        self.cells = [variable._cell for variable in self.variables]
        self.places = walk.places
        self.statics = walk.statics
        self.root = weakref.ref(root)
        self.is_kept = False
        self.has_ended = False

    def keep(self, notes: Notes, walk: Walk, earlier: list[Record]) -> None:
        """Watches all that was found, so that the record can be used again, if that is possible.

        ``notes`` says what the walk depends on that cannot be watched. ``walk`` is a second walk:
        it finds something else if another thread changed something before it was watched.
        """
        root = self.root()
        if root is None or kind_of(root) == VARIABLE or not self.things or self._must_be_walked():
            return
        self.earlier = [weakref.ref(record) for record in earlier]
        self._announced: set[int] = set()
        things = self.things
        watched = [thing for thing in things if kind_of(thing) in (OBJECT, VARIABLE)]
        watch(watched, self)
        assert self.hashed_definition is not None
        self.refers_to_earlier = any(
            part.kind == REFERENCE and part.payload < self.first
            for _, part in self.hashed_definition.value.parts()
        )
        found = {id(thing): _describe(thing) for thing in watched}
        self._guarded = {id(thing): _changeable(thing, found[id(thing)][0]) for thing in watched}
        self._descriptions = {key: description for key, (description, _) in found.items()}
        self._children = {key: children for key, (_, children) in found.items()}
        self._altered: dict[int, Any] = {}
        self._definitions: dict[Any, Any] = {frozenset(): self.hashed_definition}
        guards = _Guards(things, notes)
        self._guards = guards if guards.are_any() else None
        stores = [_store(*place) for place in self.places]
        self._stores, self._keys = [store for store, _ in stores], [key for _, key in stores]
        if walk.flatten(root)[0] != self.hashed_definition.value or not are_same(
            walk.things, things
        ):
            self.has_ended = True  # the call that made it still uses what it holds
            return
        # The object owns this record, so the record must not hold a strong reference to the object.
        self.things = [None if thing is root else thing for thing in things]
        self.places = [(None if holder is root else holder, key) for holder, key in self.places]
        home = home_of(root)
        others = [record for record in home.records if not record.has_ended]
        home.records = [*others[1 - _MOST_RECORDS :], self]
        self.is_kept = True

    def _must_be_walked(self) -> bool:
        """Whether there are values that a record cannot read or write without a walk."""
        if any(v._metadata.stored_as_ref or v._metadata.can_change for v in self.variables):
            return True
        holders = (kind_of(holder) for holder, _ in self.places)
        return any(kind not in (OBJECT, LIST, DICT, TUPLE) for kind in holders)

    # ---- changes --------------------------------------------------------------------------------

    def static_changed(self, thing: Any) -> None:
        """Notes that static values or metadata of a thing changed."""
        self._announced.add(id(thing))

    def content_changed(self) -> None:
        """The record no longer fits."""
        self.end()

    def end(self) -> None:
        """Ends the record, and drops what it kept alive."""
        self.has_ended = True
        self.index = {}
        self.things, self.variables, self.cells, self.places = [], [], [], []
        self._stores, self._keys, self.statics = [], [], []
        self._children, self._descriptions, self._guarded, self._altered = {}, {}, {}, {}
        self._guards = None

    def still_fits(self) -> bool:
        """Whether a walk would take the same steps now.

        If it would find a new definition, ``hashed_definition`` is None.
        """
        if self._announced:
            self._describe_announced()
        return not self.has_ended and (self._guards is None or self._guards.still_fit())

    def _describe_announced(self) -> None:
        while self._announced and not self.has_ended:
            key = self._announced.pop()
            try:
                same_steps = self._describe_again(key)
            except BaseException:
                self._announced.add(key)  # an interrupt must not lose a change
                raise
            if not same_steps:
                self.end()
        self.hashed_definition = self._definitions.get(frozenset(self._altered.items()))

    def _describe_again(self, key: int) -> bool:
        thing = self.things[self.index[key] - self.first]
        thing = self.root() if thing is None else thing
        if thing is None:
            return False
        description, children = _describe(thing)
        if not are_same(self._children[key], children):
            return False
        # The guards compare the values that were there then, and know the class of then.
        if description[0] is not self._descriptions[key][0] or not are_same(
            self._guarded[key], _changeable(thing, description)
        ):
            return False
        if description == self._descriptions[key]:
            self._altered.pop(key, None)
        else:
            self._altered[key] = description
        return True

    def add_definition_of(self, found: Record) -> bool:
        """Adds the definition that a new walk found for the static values as they are now.

        If the walk met other things, the record ends, and the result is False.
        """
        if found.index != self.index or self._announced:
            self.end()
            return False
        if len(self._definitions) >= _MOST_DEFINITIONS:
            self._definitions.clear()
        self._definitions[frozenset(self._altered.items())] = self.hashed_definition = (
            found.hashed_definition
        )
        return True

    # ---- use ------------------------------------------------------------------------------------

    def arrays(self) -> list[Any]:
        """The arrays in their places, as they are now."""
        if self.is_kept:
            return list(map(getitem, self._stores, self._keys))
        return [getitem(*_store(*place)) for place in self.places]

    def whole_places(self) -> list[tuple[Any, Any]]:
        """The places of the arrays, the object itself included."""
        root = self.root()
        return [(root if holder is None else holder, key) for holder, key in self.places]

    def whole_things(self) -> list[Any]:
        """The numbered things, the object itself included."""
        root = self.root()
        return [root if thing is None else thing for thing in self.things]

    def is_valid_after(self, earlier: list[Record], numbered: int) -> bool:
        """Whether a walk of the object after these other objects would find the same."""
        if self.first != numbered:
            return False
        if not earlier or are_same([ref() for ref in self.earlier], earlier):
            return True
        return not self.refers_to_earlier and all(
            self.index.keys().isdisjoint(record.index) for record in earlier
        )


def are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same things in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


_VALUE = object()  # stands for an array or a static value, which a walk does not go into


def _describe(thing: Any) -> tuple[Any, list[Any]]:
    """The static part of an object or Variable, and what it holds, ``_VALUE`` for plain values."""
    if kind_of(thing) == VARIABLE:
        return (type(thing), thing._metadata), []
    names, values, value_kinds, static_part = sort_attributes(thing)
    children = [
        _VALUE if kind in (ARRAY, STATIC) and value is not None else value
        for value, kind in zip(values, value_kinds, strict=True)
    ]
    return (type(thing), names, value_kinds, static_part, kept_marks(thing)), children


def _changeable(thing: Any, description: Any) -> list[Any]:
    """The static values of an object or Variable that can change in place."""
    if kind_of(thing) == VARIABLE:
        return list(thing._metadata.values()) if thing._metadata.can_change else []
    names = description[3].changeable
    return [thing._pytree_items()[name] for name in names] if names else []


def _store(holder: Any, key: Any) -> tuple[Any, Any]:
    """The mapping or sequence in which an array is stored, and the key to read it with."""
    kind = kind_of(holder)
    if kind == OBJECT:
        return holder._pytree_store(key), key
    if kind == TUPLE and hasattr(holder, "_fields"):
        return holder, holder._fields.index(key)
    if kind == PYTREE:
        return dict(one_level(holder)[0]), key
    return holder, key


class _Guards:
    """Snapshots of lists, dicts and static values, which change without announcing it."""

    __slots__ = ("dict_items", "dicts", "holding_arrays", "list_items", "lists", "others", "sizes")

    def __init__(self, things: list[Any], notes: Notes):
        containers = [x for x in things if kind_of(x) in (LIST, DICT)]
        containers = [x for x in containers if id(x) not in notes.private]
        objects = [x for x in things if kind_of(x) == OBJECT]
        unannounced = set(filter(_may_write_unannounced, set(map(type, objects))))
        containers += [vars(x) for x in objects if type(x) in unannounced]
        with_arrays = [x for x in containers if ARRAY in map(kind_of, _elements(x))]
        ids = set(map(id, with_arrays))
        self.holding_arrays = [(x, _keys_or_length(x), _without_arrays(x)) for x in with_arrays]
        self.lists = [x for x in containers if type(x) is list and id(x) not in ids]
        self.dicts = [x for x in containers if type(x) is dict and id(x) not in ids]
        self.sizes = self._sizes()
        self.list_items = list(chain.from_iterable(self.lists))
        self.dict_items = self._dict_items()
        self.others = [(x, _children(x), _same_level) for x in notes.pytrees]
        different = {id(x): x for x in notes.static_values}.values()
        self.others += [(x, key_of(x), _has_key) for x in different]

    def are_any(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.lists or self.dicts or self.holding_arrays or self.others)

    def _sizes(self) -> list[int]:
        return [*map(len, self.lists), *map(len, self.dicts)]

    def _dict_items(self) -> list[Any]:
        values = map(dict.values, self.dicts)
        return [*chain.from_iterable(self.dicts), *chain.from_iterable(values)]

    def still_fit(self) -> bool:
        """Whether everything is as it was."""
        if self.sizes and not (
            self._sizes() == self.sizes
            and all(map(is_, chain.from_iterable(self.lists), self.list_items))
            and all(map(is_, self._dict_items(), self.dict_items))
        ):
            return False
        for container, keys, items in self.holding_arrays:
            if _keys_or_length(container) != keys or not are_same(
                _without_arrays(container), items
            ):
                return False
        return all(same(value, before) for value, before, same in self.others)


def _may_write_unannounced(cls: type) -> bool:
    """Whether attributes of a class may change unannounced: it sets or deletes them in its own way,
    or has a ``functools.cached_property``, which writes to ``__dict__``."""
    if cls.__setattr__ not in (Pytree.__setattr__, Dict.__setattr__):
        return True
    if cls.__delattr__ not in (Pytree.__delattr__, Dict.__delattr__):
        return True
    members = chain.from_iterable(vars(base).values() for base in cls.__mro__)
    return any(isinstance(member, functools.cached_property) for member in members)


def _elements(container: Any) -> Any:
    return container.values() if type(container) is dict else container


def _keys_or_length(container: Any) -> Any:
    return list(container) if type(container) is dict else len(container)


def _without_arrays(container: Any) -> list[Any]:
    """The elements, ``_VALUE`` for each array."""
    return [_VALUE if kind_of(x) == ARRAY else x for x in _elements(container)]


def _children(value: Any) -> tuple[list[Any], Any]:
    items, treedef = one_level(value)
    return [child for _, child in items], treedef


def _same_level(value: Any, before: Any) -> bool:
    children, treedef = _children(value)
    return treedef == before[1] and are_same(children, before[0])


def _has_key(value: Any, key: Any) -> bool:
    return key_of(value) == key


def definition_of(root: Any) -> HashedDefinition:
    """The definition of an object, that of a record if one of them fits.

    A record may refer to things that an earlier argument has.
    """
    for record in home_of(root).records:
        # With nothing announced ``still_fits`` changes nothing, so that it needs no lock.
        fits = not record._announced and record.still_fits()
        if fits and record.hashed_definition is not None:
            return record.hashed_definition
    return HashedDefinition(Walk(True, "").flatten(root)[0])


def find_records(
    roots: list[Any],
    graph: bool,
    api: str,
    where: Callable[[Any], str],
    arguments: Callable[[], Any],
) -> list[Record]:
    """A record for each of the objects: a known one that still fits, or one from a walk now.

    The record of an object that is met for the first time is not kept, because some objects are
    new in every call. ``api``, ``where`` and ``arguments``, a function that returns all arguments,
    are for errors.
    """
    records: list[Record] = []
    numbered = 0
    for root in roots:
        home = home_of(root)
        known = _fitting(home.records, graph, records, numbered) if home.records else None
        if known is None or known.hashed_definition is None:
            keeps = home.met or known is not None
            notes = Notes() if keeps else None
            # Most objects share nothing with the others, and then need not know their numbers.
            found = Record(root, Walk(graph, api, {}, numbered, where, notes), arguments)
            if not all(record.index.keys().isdisjoint(found.index) for record in records):
                notes = Notes() if keeps else None
                walk = Walk(graph, api, _numbers(records), numbered, where, notes)
                found = Record(root, walk, arguments)
            if known is None or not known.add_definition_of(found):
                known = found
                if notes is not None:
                    found.keep(notes, Walk(graph, api, _numbers(records), numbered), records)
        home.met = True
        records.append(known)
        numbered += len(known.things)
    return records


def _numbers(records: list[Record]) -> dict[int, int]:
    """The numbers of all things in the records, by id."""
    if not records:
        return {}
    numbers = records[0].index.copy()
    for record in records[1:]:
        numbers.update(record.index)
    return numbers


def _fitting(
    kept: list[Record], graph: bool, earlier: list[Record], numbered: int
) -> Record | None:
    """The first usable record given those of earlier arguments; outdated ones are ended."""
    for record in kept:
        if record.graph == graph and record.is_valid_after(earlier, numbered):
            if record.still_fits():
                return record
            record.end()
    return None


def opened_from(
    treedef: Any, leaves: Any, records: list[Record], plain: list[Any], tree: Any
) -> Opened:
    """The opened arguments, from records of the objects among them."""
    rest = iter(records)
    definitions = tuple(next(rest).hashed_definition if is_node(leaf) else None for leaf in leaves)
    return Opened(
        Structure(treedef, definitions),
        [thing for record in records for thing in record.whole_things()],
        [variable for record in records for variable in record.variables],
        [array for record in records for array in record.arrays()],
        [place for record in records for place in record.whole_places()],
        plain,
        tree,
        [value for record in records for value in record.statics],
    )


def check(planned: Opened, walk: Callable[[], Opened], traces: TraceLog, api: str) -> None:
    """Raises ``AssertionError`` if records and a walk differ; ``traces`` names the places."""
    walked = walk()
    changed = _first_change(planned, walked, traces)
    # Of an object that is never equal to a copy of itself, two walks differ as well.
    if changed is not None and _first_change(walk(), walked, traces) is None:
        raise AssertionError(
            f"A plan of nnx.{api} for {traces.name} does not fit its objects: something changed "
            f"unannounced. This is {changed}.\n"
            "Fix: write setattr(object, name, value) or call nnx.update; a write through "
            "vars(object), object.__dict__, object.__setattr__ or dict.__setitem__ is not noticed. "
            "If the program has none, this is an error of Linnet: please report it."
        )


def _first_change(planned: Opened, walked: Opened, traces: TraceLog) -> str | None:
    """The first difference of records and a walk, with its path, or None."""
    if planned.structure != walked.structure:
        return difference(traces, planned.structure, walked.structure)
    for known, found in zip(planned.things, walked.things, strict=True):
        if known is not found:
            return f"{_place(found, walked, traces)}: another {type(found).__name__} than before"
    for known, found in zip(planned.places, walked.places, strict=True):
        if known[0] is not found[0] or known[1] != found[1]:
            where = path_string([found[1]], _place(found[0], walked, traces))
            return f"{where}: its {type(found[0]).__name__} is another one than before"
    for known, found in zip(planned.statics, walked.statics, strict=True):
        if known is not found:
            return f"another static {type(found).__name__} than before"
    slots = zip(planned.slot_leaves, walked.slot_leaves, walked.slot_paths, strict=True)
    return next(
        (
            f"{traces.where(path)}: another {type(found).__name__} than before"
            for known, found, path in slots
            if known is not found
        ),
        None,
    )


def _place(thing: Any, opened: Opened, traces: TraceLog) -> str:
    return traces.where(next(paths_to(opened.tree, thing)))


class Plan:
    """The records of the objects in one call of a compiled function.

    ``state`` has the Variables of all records, or is None if they would keep other things alive.
    ``forget`` is called when an object is gone.
    """

    __slots__ = ("__weakref__", "locks", "records", "roots", "state")

    def __init__(self, roots: list[Any], records: list[Record], forget: Callable[[Any], Any]):
        self.roots = [weakref.ref(root, forget) for root in roots]
        self.records = [weakref.ref(record) for record in records]
        self.locks = locks_of(roots)
        state = state_of(records)
        self.state = state if _stand_alone(state.variables) else None

    def valid_records(self) -> list[Record] | None:
        """The records of the objects, if all of them fit and none needs a walk."""
        records = []
        for ref in self.records:
            record = ref()
            if record is None or not record.still_fits() or record.hashed_definition is None:
                return None
            records.append(record)
        return records


_is_kept, _serial, _lock = map(attrgetter, ("is_kept", "serial", "lock"))


def make_plan(
    roots: list[Any], records: list[Record], stored: dict[tuple[int, ...], Plan]
) -> Plan | None:
    """Makes a plan for objects and stores it by their ids, if all of their records are kept."""
    key = tuple(map(id, roots))
    stored.pop(key, None)
    if not roots or False in map(_is_kept, records):
        return None
    plan = stored[key] = Plan(roots, records, lambda _: stored.pop(key, None))
    return plan


def locks_of(roots: list[Any]) -> list[Any]:
    """The locks of objects, always in the order of their serials, so that no two calls deadlock."""
    homes = sorted(set(map(home_of, roots)), key=_serial)
    return list(map(_lock, homes))


def state_of(records: list[Record]) -> VariableList:
    """The Variables of all records."""
    return VariableList(
        [record.variables for record in records], [record.cells for record in records]
    )


def _stand_alone(variables: list[Any]) -> bool:
    """Whether no Variable keeps something else alive, such as its model, by a hook or its value."""
    different = {id(v._metadata): v._metadata for v in variables}.values()
    return all(may_be_kept(x) for metadata in different for x in metadata.values()) and all(
        isinstance(v._cell.value, (*ARRAY_TYPES, Seed, np.generic)) for v in variables
    )
