"""The one engine: every transform opens its arguments, runs a pure function, and closes.

``open_tree`` takes objects apart into a ``Structure`` (static) and flat lists of arrays.
``Structure.enter`` builds fresh objects around the tracers of a transform; the user's function
runs on those. ``leave`` compares them with what came in and says, as ``Effects`` (static) and
lists of arrays, what changed. ``close`` writes that into the objects outside. What lies between
``enter`` and ``leave`` is a pure function of arrays, and that is all a transform's own file needs
to know.

There is one order of things, that of the walk (``graphlib.walk``): it lists the leaves as it meets
them, the definition it makes lists their places in the same order, and objects are built from
leaves by following the definition. Effects name Variables and arrays by their numbers in that
order, so they hold for any objects of the same structure: a compiled function is used again for
other models of the same kind.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.walk import Definition, Walk, paths_to
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    OBJECT,
    VARIABLE,
    holds_data,
    key_name,
    kind_of,
)
from linnet.nnx.pytreelib.objects import check_mutable
from linnet.nnx.variablelib.storage import Seed, from_refs
from linnet.nnx.variablelib.variable import Variable, build_variable, rebuild_variable, write_values

Path = tuple[Any, ...]


def is_node(x: Any) -> bool:
    """Whether a leaf of the arguments is an object of the model."""
    return kind_of(x) in (OBJECT, VARIABLE)


class _Supply(Build):
    """Builds objects from leaves in the order of the walk instead of a state."""

    __slots__ = ("arrays", "variables")

    def __init__(self, variables: list[Any], arrays: list[Any]):
        super().__init__()
        self.variables = iter(variables)
        self.arrays = iter(arrays)

    def unflatten(self, definition: Definition, state: Any = None) -> Any:
        if definition.kind == VARIABLE:
            return self._next_variable()
        if definition.kind == ARRAY:
            return next(self.arrays)
        made = self._node(definition, None)
        if self.unusual:
            self._mark_unusual()
        return made

    def _next_variable(self) -> Any:
        variable = next(self.variables)
        self.objects.append(variable)
        return variable

    def _children(self, names: Any, definitions: Any, state: Any) -> tuple[dict[Any, Any], Any]:
        items: dict[Any, Any] = {}
        unusual = []
        for name, definition in zip(names, definitions, strict=True):
            kind = definition.kind
            if kind == VARIABLE:
                items[name] = self._next_variable()
            elif kind == ARRAY:
                items[name] = leaf = next(self.arrays)
                if not holds_data(leaf):
                    unusual.append(name)
            else:
                items[name] = self._node(definition, None)
        return items, unusual


class Form:
    """The definition of one object among the arguments, with a hash that is computed once."""

    __slots__ = ("_hash", "definition")

    def __init__(self, definition: Definition):
        self.definition = definition
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Form or hash(self) != hash(other):
            return False
        if self.definition is not other.definition:
            if self.definition != other.definition:
                return False
            other.definition = self.definition  # the next comparison takes no time
        return True

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.definition)
        return self._hash


class Structure:
    """What arguments are, without their arrays: hashable, and all that tracing needs to know.

    Args:
      treedef: the tree of the arguments, whose leaves are objects and everything else.
      forms: for each leaf its ``Form``, or None for what is not an object.
    """

    __slots__ = ("__dict__", "forms", "treedef")

    def __init__(self, treedef: Any, forms: tuple[Form | None, ...]):
        self.treedef = treedef
        self.forms = forms

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is Structure and self.treedef == other.treedef and self.forms == other.forms
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.forms))

    @property
    def definitions(self) -> tuple[Definition | None, ...]:
        """The definitions of the leaves, None for what is not an object."""
        return tuple(None if form is None else form.definition for form in self.forms)

    @functools.cached_property
    def node_definitions(self) -> list[Definition]:
        """The definitions of the objects alone."""
        return [form.definition for form in self.forms if form is not None]

    @functools.cached_property
    def variable_kinds(self) -> list[Definition]:
        """The definitions of the Variables, by their numbers."""
        leaves = (leaf for node in self.node_definitions for _, leaf in node.leaves())
        return [leaf for leaf in leaves if leaf.kind == VARIABLE]

    @functools.cached_property
    def fixed_arrays(self) -> frozenset[int]:
        """The numbers of arrays that stand in a tuple or in a pytree that others registered."""
        holders = [kind for node in self.node_definitions for kind in _array_holders(node, None)]
        return frozenset(n for n, kind in enumerate(holders) if kind not in (OBJECT, LIST, DICT))

    def enter(self, values: Any, arrays: Any, plain: Any, as_values: Any = frozenset()) -> Inside:
        """Fresh objects of this structure around the given arrays.

        Variables that are stored as refs get new refs, except those in ``as_values``, which hold
        the value itself until they are written to.
        """
        values = [value.key() if type(value) is Seed else value for value in values]
        variables = [
            build_variable(definition.form, value, definition.own)
            if number in as_values
            else rebuild_variable(definition.form, value, definition.own)
            for number, (definition, value) in enumerate(
                zip(self.variable_kinds, values, strict=True)
            )
        ]
        supply = _Supply(variables, list(arrays))
        rest = iter(plain)
        leaves = [
            next(rest) if definition is None else supply.unflatten(definition)
            for definition in self.definitions
        ]
        nodes = [x for x, form in zip(leaves, self.forms, strict=True) if form is not None]
        tree = self.treedef.unflatten(leaves)
        return Inside(self, tree, nodes, variables, values, list(arrays), supply.objects)


def _array_holders(definition: Definition, holder: int | None) -> Iterator[int | None]:
    """For each array of a definition, in the order of the walk, the kind of what it stands in."""
    if definition.kind == ARRAY:
        yield holder
    for child in definition.children:
        yield from _array_holders(child, definition.kind)


@dataclasses.dataclass
class Opened:
    """Arguments taken apart: their structure, what it belongs to, and the arrays."""

    structure: Structure
    seen: list[Any]
    variables: list[Variable[Any]]
    arrays: list[Any]
    places: list[tuple[Any, Any]]  # for each array, what it stands in, and its key there
    plain: list[Any]
    tree: Any

    @property
    def values(self) -> list[Any]:
        """The Variables' values, refs read."""
        return [
            from_refs(v._raw) if v._metadata.stored_as_ref or v._made_when_read else v._raw
            for v in self.variables
        ]

    @functools.cached_property
    def _leaf_places(self) -> list[tuple[int, Path, bool]]:
        """For each leaf of the objects: which argument leaf it is in, its path, what it is."""
        leaves = jax.tree_util.tree_leaves_with_path(self.tree, is_leaf=is_node)
        return [
            (position, (*(key_name(key) for key in path), *inner), leaf.kind == VARIABLE)
            for position, ((path, _), form) in enumerate(
                zip(leaves, self.structure.forms, strict=True)
            )
            if form is not None
            for inner, leaf in form.definition.leaves()
        ]

    @functools.cached_property
    def variable_paths(self) -> list[Path]:
        """Where each Variable was first met."""
        return [path for _, path, is_variable in self._leaf_places if is_variable]

    @functools.cached_property
    def array_paths(self) -> list[Path]:
        """Where each array stands."""
        return [path for _, path, is_variable in self._leaf_places if not is_variable]

    @functools.cached_property
    def owners(self) -> list[int]:
        """Which leaf of the arguments each Variable was first met in."""
        return [owner for owner, _, is_variable in self._leaf_places if is_variable]

    @functools.cached_property
    def array_owners(self) -> list[int]:
        """Which leaf of the arguments each array stands in."""
        return [owner for owner, _, is_variable in self._leaf_places if not is_variable]


def open_tree(
    tree: Any, graph: bool, api: str, where: Callable[[Any], str] = path_string
) -> Opened:
    """Takes the objects in a pytree of arguments apart.

    Args:
      tree: the arguments.
      graph: allow shared references.
      api: the transform, for errors.
      where: how a path is printed in errors.

    Returns:
      The parts.

    Raises:
      SharedReferenceError: something is shared in tree mode; both paths are named.
    """
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_node)
    walk = Walk(graph, api, where=where)
    forms: list[Form | None] = []
    plain: list[Any] = []
    for leaf in leaves:
        if is_node(leaf):
            forms.append(Form(walk.flatten(leaf, within=tree)[0]))
        else:
            forms.append(None)
            plain.append(leaf)
    variables, arrays = divide_leaves(walk.leaves)
    structure = Structure(treedef, tuple(forms))
    return Opened(structure, walk.seen, variables, arrays, walk.places, plain, tree)


def divide_leaves(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """The Variables, and the arrays, of what a walk met."""
    variables = [leaf for leaf in leaves if isinstance(leaf, Variable)]
    return variables, [leaf for leaf in leaves if not isinstance(leaf, Variable)]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands in a state for a Variable that came in (``old``) or for an array that goes out."""

    old: bool
    number: int


@dataclasses.dataclass(frozen=True)
class _Part:
    """One node as it leaves: its definition, and its leaves as pairs of path and ``_Slot``."""

    definition: Definition
    leaves: tuple[tuple[Path, _Slot], ...]

    def state(self, old: list[Any], new: list[Any]) -> Any:
        """The state of the node, its slots filled."""
        root: dict[Any, Any] = {}
        for path, slot in self.leaves:
            leaf = old[slot.number] if slot.old else new[slot.number]
            if not path:
                return leaf
            node = root
            for step in path[:-1]:
                node = node.setdefault(step, {})
            node[path[-1]] = leaf
        return root


@dataclasses.dataclass(frozen=True)
class Effects:
    """What a run did, in terms of numbers: static, and the same for every object of a structure.

    Variables and arrays of the arguments are numbered together, Variables first.
    """

    changed: tuple[int, ...]  # Variables and arrays with a new value
    parts: tuple[_Part, ...] | None  # the nodes of the arguments, where their structure changed
    reused: tuple[int | None, ...]  # for each thing met while leaving, its number coming in
    out_treedef: Any
    out_parts: tuple[_Part | None, ...]
    counts_inputs: bool  # whether the numbers of the outputs go on from those of the arguments
    kept: tuple[tuple[int, int], ...] = ()  # arrays of ``parts`` that came in, with those numbers
    moved: tuple[tuple[int, int], ...] = ()  # arrays that took the place of others, with theirs

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether only values changed, and the output is without objects, left as it is."""
        return self.parts is None and self.out_treedef is None and not self.moved

    @functools.cached_property
    def last(self) -> int:
        """The highest number among those that changed."""
        return self.changed[-1] if self.changed else -1

    @functools.cached_property
    def pick(self) -> Callable[[list[Any]], Any]:
        """Picks the Variables that changed from all of them, where no array did."""
        if len(self.changed) > 1:
            return operator.itemgetter(*self.changed)
        return lambda variables: [variables[number] for number in self.changed]


@dataclasses.dataclass
class Inside:
    """The objects inside a transform, and what they were made from."""

    structure: Structure
    tree: Any
    nodes: list[Any]
    variables: list[Variable[Any]]
    values: list[Any]
    arrays: list[Any]
    objects: list[Any]
    left: list[Any] = dataclasses.field(default_factory=list)  # what was met while leaving
    now: list[Any] = dataclasses.field(default_factory=list)  # the arrays, after the run

    def __post_init__(self) -> None:
        # A pytree that a Variable holds can be changed in place, which leaves it the same object.
        self._contents = {
            number: jax.tree_util.tree_flatten(value)
            for number, value in enumerate(self.values)
            if not isinstance(value, kinds.ARRAY_TYPES)
        }

    def _is_changed(self, number: int) -> bool:
        raw = self.variables[number]._raw
        if raw is not self.values[number]:
            return True
        before = self._contents.get(number)
        if before is None:
            return False
        leaves, structure = jax.tree_util.tree_flatten(raw)
        same = structure == before[1] and all(map(operator.is_, leaves, before[0]))
        return not same

    def changed(self) -> tuple[int, ...]:
        """The numbers of the Variables, and of the arrays, that were written to."""
        count = len(self.variables)
        variables = [number for number in range(count) if self._is_changed(number)]
        pairs = zip(self.arrays, self.now, strict=False)
        return (*variables, *(count + n for n, (a, b) in enumerate(pairs) if a is not b))

    def raw(self, number: int) -> Any:
        """The value that a Variable or array has now."""
        count = len(self.variables)
        if number >= count:
            return self.now[number - count]
        return from_refs(self.variables[number]._raw)

    def with_moved(self, effects: Effects) -> Effects:
        """Effects in which an array that came in goes to its new place as it is.

        The objects outside keep the arrays they have: a NumPy array stays one.
        """
        count = len(self.variables)
        came = {id(x): count + n for n, x in enumerate(self.arrays)}
        moved = {
            n: came[id(x)] for n in effects.changed if n >= count and id(x := self.raw(n)) in came
        }
        changed = tuple(n for n in effects.changed if n not in moved)
        return dataclasses.replace(effects, changed=changed, moved=tuple(moved.items()))

    def slot_values(self) -> list[Any]:
        """The values that all Variables and arrays have now."""
        values = [self.raw(number) for number in range(len(self.variables))]
        return values + (self.now or self.arrays)

    def leave(
        self, out: Any, graph: bool, updates: bool, api: str, where: Callable[[Any], str]
    ) -> tuple[Effects, list[Any], list[Any]]:
        """What a run changed and returned.

        Args:
          out: what the user's function returned.
          graph: allow shared references in it.
          updates: carry changed structure out.
          api: the transform, for errors.
          where: how a place in the arguments is printed in them.

        Returns:
          The effects; the arrays that new Variables and objects hold; the other leaves of ``out``.

        Raises:
          SharedReferenceError: without graph updates, a Variable comes in and goes out again.
        """
        walk = Walk(True if updates else graph, api)
        news: list[Any] = []
        numbers = {id(v): number for number, v in enumerate(self.variables)}
        parts: list[_Part] | None = None
        kept: list[tuple[int, int]] = []
        if updates:
            definitions = [walk.flatten(node, within=self.tree)[0] for node in self.nodes]
            arrays = divide_leaves(walk.leaves)[1]
            if self._is_rebuilt(definitions, walk.seen, arrays):
                leaves = iter(walk.leaves)
                parts = [_part(definition, leaves, numbers, news) for definition in definitions]
                kept = list(self._kept_arrays(walk.leaves))
            else:
                self.now = arrays
        leaves, treedef = jax.tree_util.tree_flatten(out, is_leaf=is_node)
        out_parts: list[_Part | None] = []
        plain = []
        for leaf in leaves:
            if not is_node(leaf):
                out_parts.append(None)
                plain.append(leaf)
                continue
            met = len(walk.leaves)
            definition = walk.flatten(leaf, within=out)[0]
            if not updates:
                self._refuse_returning(walk.leaves[met:], numbers, out, api, where)
            out_parts.append(_part(definition, iter(walk.leaves[met:]), numbers, news))
        self.left = walk.seen
        came = {id(thing): number for number, thing in enumerate(self.objects)}
        reused = tuple(came.get(id(thing)) for thing in walk.seen)
        effects = Effects(
            self.changed(),
            None if parts is None else tuple(parts),
            reused if parts is not None or any(out_parts) else (),
            treedef,
            tuple(out_parts),
            updates,
            tuple(kept),
        )
        return effects, news, plain

    def _is_rebuilt(self, definitions: list[Definition], seen: list[Any], arrays: Any) -> bool:
        """Whether more changed than the values of Variables and of arrays in their places."""
        if definitions != self.structure.node_definitions or len(seen) != len(self.objects):
            return True
        if any(map(operator.is_not, seen, self.objects)):
            return True
        return any(arrays[n] is not self.arrays[n] for n in self.structure.fixed_arrays)

    def _kept_arrays(self, leaves: list[Any]) -> Iterator[tuple[int, int]]:
        """For arrays that came in and are left in place, their numbers among the new and the old.

        The objects outside keep those they have: a NumPy array stays one.
        """
        numbers = {id(x): number for number, x in enumerate(self.arrays)}
        variables = {id(v) for v in self.variables}
        for new, leaf in enumerate(leaf for leaf in leaves if id(leaf) not in variables):
            if id(leaf) in numbers:
                yield new, numbers[id(leaf)]

    def _refuse_returning(
        self,
        leaves: list[Any],
        numbers: dict[int, int],
        out: Any,
        api: str,
        where: Callable[[Any], str],
    ) -> None:
        for leaf in leaves:
            if isinstance(leaf, Variable) and id(leaf) in numbers:
                came = where(next(paths_to(self.tree, leaf)))
                goes = path_string(next(paths_to(out, leaf), ()), "the output")
                raise SharedReferenceError(
                    f"{type(leaf).__name__} comes into {api} at {came} and goes out at {goes}, "
                    "which needs graph updates.\n"
                    "Fix: do not return it (its update reaches the caller anyway), return "
                    "nnx.clone(...) of it, or pass graph_updates=True."
                )


def _part(
    definition: Definition, found: Iterator[Any], numbers: dict[int, int], news: list[Any]
) -> _Part:
    leaves = []
    for path, _ in definition.leaves():
        leaf = next(found)
        number = numbers.get(id(leaf)) if isinstance(leaf, Variable) else None
        if number is None:
            slot = _Slot(False, len(news))
            news.append(from_refs(leaf._raw) if isinstance(leaf, Variable) else leaf)
        else:
            slot = _Slot(True, number)
        leaves.append((path, slot))
    return _Part(definition, tuple(leaves))


def close(
    opened: Opened, effects: Effects, changed: list[Any], news: list[Any], plain: list[Any]
) -> Any:
    """Writes what a run changed into the objects outside and gives what it returned.

    Args:
      opened: the arguments.
      effects: what ``leave`` said.
      changed: the values of ``effects.changed``.
      news: the arrays of new Variables and objects.
      plain: the other leaves of the output.

    Returns:
      The output of the user's function.
    """
    count = len(opened.variables)
    written = sum(number < count for number in effects.changed)  # arrays come after Variables
    places = [opened.places[number - count] for number in effects.changed[written:]]
    for holder, key in places:
        if kind_of(holder) == OBJECT:
            check_mutable(holder, key)
    write_values([opened.variables[n] for n in effects.changed[:written]], changed[:written])
    write_arrays(places, changed[written:])
    write_arrays(
        [opened.places[number - count] for number, _ in effects.moved],
        [opened.arrays[came - count] for _, came in effects.moved],
    )
    if effects.parts is None and not any(effects.out_parts):
        return plain if effects.out_treedef is None else effects.out_treedef.unflatten(plain)
    return _close_objects(opened, effects, news, plain)


def write_arrays(places: list[tuple[Any, Any]], values: list[Any]) -> None:
    """Puts arrays in place of others, which is no change of structure."""
    for (holder, key), value in zip(places, values, strict=True):
        store = holder._pytree_store(key) if kind_of(holder) == OBJECT else holder
        store[key] = value


def _close_objects(opened: Opened, effects: Effects, news: list[Any], plain: list[Any]) -> Any:
    def make(leaf: Any, cls: type, metadata: Any) -> Any:
        if not isinstance(leaf, Variable):
            return rebuild_variable(cls, leaf, metadata)
        if leaf._metadata is not metadata:
            leaf._replace_metadata(metadata)
        return leaf

    reuse = {
        number: opened.seen[came]
        for number, came in enumerate(effects.reused)
        if came is not None and not isinstance(opened.seen[came], Variable)
    }
    if effects.parts is None and effects.counts_inputs:
        build = Build(make, list(opened.seen), reuse)
    else:
        build = Build(make, [], reuse)
        news = list(news)
        for new, came in effects.kept:
            news[new] = opened.arrays[came]
        for part in effects.parts or ():
            build.unflatten(part.definition, part.state(opened.variables, news))
    if effects.out_treedef is None:
        return plain
    rest = iter(plain)
    leaves = [
        next(rest)
        if part is None
        else build.unflatten(part.definition, part.state(opened.variables, news))
        for part in effects.out_parts
    ]
    return effects.out_treedef.unflatten(leaves)
