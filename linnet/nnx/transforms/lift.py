"""The one engine: every transform opens its arguments, runs a pure function, and closes.

``open_tree`` takes objects apart into a ``Structure`` (static) and flat lists of arrays.
``Structure.enter`` builds fresh objects around the tracers of a transform; the user's function
runs on those. ``leave`` compares them with what came in and says, as ``Effects`` (static) and
lists of arrays, what changed. ``close`` writes that into the objects outside. What lies between
``enter`` and ``leave`` is a pure function of arrays, and that is all a transform's own file needs
to know.

Effects name Variables by their number, so that they hold for any objects of the same structure: a
compiled function is used again for other models of the same kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx.bulk import write_values
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.walk import REF, Definition, Walk, paths_to
from linnet.nnx.kinds import ARRAY, METHOD, OBJECT, STATIC, VARIABLE, holds_data, key_name, kind_of
from linnet.nnx.var_storage import from_refs
from linnet.nnx.variablelib import Variable, build_variable, rebuild_variable

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
        if definition[0] == VARIABLE:
            return self._next_variable()
        if definition[0] == ARRAY:
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
        late, unusual = [], []
        for name, definition in zip(names, definitions, strict=True):
            kind = definition[0]
            if kind == VARIABLE:
                items[name] = self._next_variable()
            elif kind == ARRAY:
                items[name] = leaf = next(self.arrays)
                if not holds_data(leaf):
                    unusual.append(name)
            elif kind == METHOD:
                items[name] = None
                late.append((name, definition))
            else:
                items[name] = self._node(definition, None)
        for name, definition in late:
            items[name] = self._node(definition, None)
        return items, unusual


def leaves_in_order(definition: Definition, state: Any) -> Iterator[tuple[Path, Any]]:
    """The Variables and arrays of a state in the order in which a walk meets them, with paths."""
    kind = definition[0]
    if kind in (VARIABLE, ARRAY):
        yield (), state
        return
    if kind in (REF, STATIC):
        return
    pairs = list(zip(definition[2], definition[3], strict=True))
    pairs = [p for p in pairs if p[1][0] != METHOD] + [p for p in pairs if p[1][0] == METHOD]
    for name, child in pairs:
        if child[0] in (VARIABLE, ARRAY) or (isinstance(state, dict) and name in state):
            for path, leaf in leaves_in_order(child, state[name]):
                yield (name, *path), leaf


class Structure:
    """What arguments are, without their arrays: hashable, and all that tracing needs to know."""

    __slots__ = ("_hash", "definitions", "treedef", "variable_kinds")

    def __init__(self, treedef: Any, definitions: tuple[Definition | None, ...]):
        self.treedef = treedef
        self.definitions = definitions
        self.variable_kinds = [d for x in definitions if x for d in _variable_definitions(x)]
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is Structure
            and hash(self) == hash(other)
            and self.treedef == other.treedef
            and self.definitions == other.definitions
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.treedef, self.definitions))
        return self._hash

    def enter(self, values: Any, arrays: Any, plain: Any, as_values: Any = frozenset()) -> Inside:
        """Fresh objects of this structure around the given arrays.

        Variables that are stored as refs get new refs, except those in ``as_values``, which hold
        the value itself until they are written to.
        """
        variables = [
            build_variable(definition[1], value, definition[2])
            if number in as_values
            else rebuild_variable(definition[1], value, definition[2])
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
        nodes = [x for x, d in zip(leaves, self.definitions, strict=True) if d is not None]
        tree = self.treedef.unflatten(leaves)
        return Inside(self, tree, nodes, variables, list(values), list(arrays), supply.objects)


def _variable_definitions(definition: Definition) -> Iterator[Definition]:
    kind = definition[0]
    if kind == VARIABLE:
        yield definition
    elif kind not in (ARRAY, REF, STATIC):
        children = definition[3]
        yield from (d for c in children if c[0] != METHOD for d in _variable_definitions(c))
        yield from (d for c in children if c[0] == METHOD for d in _variable_definitions(c))


@dataclasses.dataclass
class Opened:
    """Arguments taken apart: their structure, what it belongs to, and the arrays."""

    structure: Structure
    seen: list[Any]
    variables: list[Variable[Any]]
    arrays: list[Any]
    plain: list[Any]
    tree: Any
    variable_paths: list[Path]
    array_paths: list[Path]
    owners: list[int]  # which leaf of the arguments each Variable was first met in
    array_owners: list[int]

    @property
    def values(self) -> list[Any]:
        """The Variables' values, refs read."""
        return [from_refs(v._raw) if v._metadata.stored_as_ref else v._raw for v in self.variables]


def open_tree(
    tree: Any,
    graph: bool,
    api: str,
    first: int = 0,
    plain: Any = frozenset(),
    where: Callable[[Any], str] = path_string,
) -> Opened:
    """Takes the objects in a pytree of arguments apart.

    Args:
      tree: the arguments.
      graph: allow shared references.
      api: the transform, for errors.
      first: the number of the first thing met.
      plain: numbers of leaves that are left whole, whatever they are.
      where: how a path is printed in errors.

    Returns:
      The parts.

    Raises:
      SharedReferenceError: something is shared in tree mode; both paths are named.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)
    walk = Walk(graph, api, first=first, where=where)
    definitions: list[Any] = []
    opened = Opened(Structure(treedef, ()), walk.seen, [], [], [], tree, [], [], [], [])
    for position, (path, leaf) in enumerate(leaves):
        if position in plain or not is_node(leaf):
            definitions.append(None)
            opened.plain.append(leaf)
            continue
        definition, state = walk.flatten(leaf, within=tree)
        definitions.append(definition)
        prefix = tuple(key_name(key) for key in path)
        for inner_path, inner in leaves_in_order(definition, state):
            is_variable = isinstance(inner, Variable)
            (opened.variables if is_variable else opened.arrays).append(inner)
            paths = opened.variable_paths if is_variable else opened.array_paths
            paths.append((*prefix, *inner_path))
            (opened.owners if is_variable else opened.array_owners).append(position)
    opened.structure = Structure(treedef, tuple(definitions))
    return opened


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
    """What a run did, in terms of numbers: static, and the same for every object of a structure."""

    changed: tuple[int, ...]  # Variables with a new value
    parts: tuple[_Part, ...] | None  # the nodes of the arguments, where their structure changed
    reused: tuple[int | None, ...]  # for each thing met while leaving, its number coming in
    out_treedef: Any
    out_parts: tuple[_Part | None, ...]
    counts_inputs: bool  # whether the numbers of the outputs go on from those of the arguments
    kept: tuple[tuple[int, int], ...] = ()  # arrays of ``parts`` that came in, with those numbers


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

    def changed(self) -> tuple[int, ...]:
        """The numbers of the Variables that were written to."""
        return tuple(
            number
            for number, (variable, value) in enumerate(
                zip(self.variables, self.values, strict=True)
            )
            if variable._raw is not value
        )

    def raw(self, number: int) -> Any:
        """The value that a Variable has now."""
        return from_refs(self.variables[number]._raw)

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
            walked = [walk.flatten(node, within=self.tree) for node in self.nodes]
            arrays = [
                leaf
                for definition, state in walked
                for _, leaf in leaves_in_order(definition, state)
                if not isinstance(leaf, Variable)
            ]
            before = [d for d in self.structure.definitions if d is not None]
            moved = [
                thing is not came for thing, came in zip(walk.seen, self.objects, strict=False)
            ]
            rebuilt = (
                [definition for definition, _ in walked] != before
                or len(walk.seen) != len(self.objects)
                or any(moved)
                or len(arrays) != len(self.arrays)
                or any(a is not b for a, b in zip(arrays, self.arrays, strict=True))
            )
            if rebuilt:
                parts = [_part(definition, state, numbers, news) for definition, state in walked]
                kept = list(self._kept_arrays(walked))
        leaves, treedef = jax.tree_util.tree_flatten(out, is_leaf=is_node)
        out_parts: list[_Part | None] = []
        plain = []
        for leaf in leaves:
            if not is_node(leaf):
                out_parts.append(None)
                plain.append(leaf)
                continue
            definition, state = walk.flatten(leaf, within=out)
            if not updates:
                self._refuse_returning(definition, state, numbers, out, api, where)
            out_parts.append(_part(definition, state, numbers, news))
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

    def _kept_arrays(self, walked: Any) -> Iterator[tuple[int, int]]:
        """For arrays that came in and are left in place, their numbers among the new and the old.

        The objects outside keep those they have: a NumPy array stays one.
        """
        numbers = {id(x): number for number, x in enumerate(self.arrays)}
        variables = {id(v) for v in self.variables}
        leaves = (leaf for walk in walked for _, leaf in leaves_in_order(*walk))
        for new, leaf in enumerate(leaf for leaf in leaves if id(leaf) not in variables):
            if id(leaf) in numbers:
                yield new, numbers[id(leaf)]

    def _refuse_returning(
        self,
        definition: Definition,
        state: Any,
        numbers: dict[int, int],
        out: Any,
        api: str,
        where: Callable[[Any], str],
    ) -> None:
        for _, leaf in leaves_in_order(definition, state):
            if isinstance(leaf, Variable) and id(leaf) in numbers:
                came = where(next(paths_to(self.tree, leaf)))
                goes = path_string(next(paths_to(out, leaf), ()), "the output")
                raise SharedReferenceError(
                    f"{type(leaf).__name__} comes into {api} at {came} and goes out at {goes}, "
                    "which needs graph updates.\n"
                    "Fix: do not return it (its update reaches the caller anyway), return "
                    "nnx.clone(...) of it, or pass graph_updates=True."
                )


def _part(definition: Definition, state: Any, numbers: dict[int, int], news: list[Any]) -> _Part:
    leaves = []
    for path, leaf in leaves_in_order(definition, state):
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
    write_values([opened.variables[number] for number in effects.changed], changed)
    if effects.parts is None and not any(effects.out_parts):
        return plain if effects.out_treedef is None else effects.out_treedef.unflatten(plain)
    return _close_objects(opened, effects, news, plain)


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
