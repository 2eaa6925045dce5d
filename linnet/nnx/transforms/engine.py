"""The engine of all transforms: open the arguments, enter, run, leave, close.

A transform of JAX takes a pure function of arrays. A user's function takes live objects and changes
them. One call of a transform goes like this:

1. **open** (``open_tree``, outside): the arguments are walked once, in the order of
   ``graphlib.walk`` (``jit`` uses what it remembers of earlier walks). The result, ``Opened``, is
   a ``Structure`` (static: classes, attribute names, static values, who shares what) and flat lists
   of arrays: the values of the Variables, the arrays that stand in attributes, and the plain
   leaves: those that are in no object.
2. **enter** (``Structure.enter``, inside the JAX transform): copies of the objects are built
   around the tracers. ``Inside`` holds them.
3. **run** (``Inside.run``): the user's function runs on the copies.
4. **leave** (``Inside.leave``): the objects are walked again and compared with what came in. The
   result is ``Effects`` (static) and the arrays that belong to them; together they are an
   ``Outcome``, a pytree that passes through JAX (both in ``effects``).
5. **close** (``close``, outside): the outcome is written into the objects that were passed in.
   Nothing is written before JAX has succeeded.

Steps 2 to 4 are a pure function of arrays. Which of these arrays are mapped, carried or
differentiated is all that the file of a transform has to say.

A **slot** is the number of a Variable or array of the arguments: Variables first, then arrays, each
in the order of the walk. Effects speak of slots and not of objects, so they hold for all objects of
one structure, and a compiled function can be used for other models of the same structure. A
**place** is where an array stands: its holder and its key there.

A transform in a few lines, which runs a function as it is:

>>> import jax.numpy as jnp
>>> from linnet import nnx
>>> counter = nnx.Variable(jnp.array(0))
>>> def count(counter, by):
...     counter[...] += by
...     return "done"
>>> opened = open_tree(((counter, 2), {}), graph=True, api="plain")
>>> opened.slot_values, opened.plain
([Array(0, dtype=int32, weak_type=True)], [2])
>>> inside = opened.structure.enter(opened.slot_values, opened.plain)
>>> out = inside.run(count)
>>> effects, new, plain = inside.leave(out, graph=True, updates=True, api="plain", where=str)
>>> outcome = inside.outcome(effects, new, plain)
>>> outcome.effects.changed, outcome.written
((0,), [Array(2, dtype=int32, weak_type=True)])
>>> close(opened, outcome), int(counter)
('done', 2)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from linnet.errors import CapturedObjectError, SharedReferenceError, path_string
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.walk import Definition, HashedDefinition, Walk, divide_leaves, paths_to
from linnet.nnx.modules.capture import report_sown, sown_attributes
from linnet.nnx.modules.module import capture_run
from linnet.nnx.pytreelib import kinds, locate
from linnet.nnx.pytreelib.attributes import write_arrays
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    OBJECT,
    REFERENCE,
    STATIC,
    VARIABLE,
    is_node,
    key_name,
    kind_of,
)
from linnet.nnx.pytreelib.objects import check_mutable
from linnet.nnx.pytreelib.tracing import naming, same_trace
from linnet.nnx.transforms.effects import (
    SOWN_ONLY,
    Effects,
    GraphUpdates,
    LeavingNode,
    Origin,
    Outcome,
)
from linnet.nnx.transforms.leaks import warn_of_tracers
from linnet.nnx.variablelib.storage import from_refs, settle_seeds
from linnet.nnx.variablelib.variable import Variable, build_variable, rebuild_variable
from linnet.nnx.variablelib.writing import write_values

# ---- opening ------------------------------------------------------------------------------------


def open_tree(
    tree: Any, graph: bool, api: str, where: Callable[[Any], str] = path_string
) -> Opened:
    """Splits a pytree with objects into structure and arrays.

    Raises ``SharedReferenceError``, with both paths, if something is shared and ``graph`` is False.
    ``api`` and ``where``, which prints a path, are for that error.
    """
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_node)
    walk = Walk(graph, api, where=where)
    definitions = [
        HashedDefinition(walk.flatten(x, lambda: tree)[0]) if is_node(x) else None for x in leaves
    ]
    variables, arrays = divide_leaves(walk.leaves)
    plain = list(itertools.filterfalse(is_node, leaves))
    structure = Structure(treedef, tuple(definitions))
    things, places, found = walk.things, walk.places, walk.statics
    return Opened(structure, things, variables, arrays, places, plain, tree, found)


def leaves_with_paths(tree: Any) -> list[tuple[kinds.Path, Any]]:
    """The leaves of a tree, nodes being leaves, with their paths."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    return [(tuple(map(key_name, keys)), leaf) for keys, leaf in found]


def leaves_by_path(tree: Any) -> dict[kinds.Path, Any]:
    """The Variables and arrays in the objects of a tree, by path."""
    opened = open_tree(tree, True, "")
    return dict(zip(opened.slot_paths, opened.slot_leaves, strict=True))


def variables_in(tree: Any) -> list[tuple[kinds.Path, Variable[Any]]]:
    """The Variables in the objects of a tree, with their paths."""
    return [(path, x) for path, x in leaves_by_path(tree).items() if isinstance(x, Variable)]


@dataclasses.dataclass
class Opened:
    """Opened arguments."""

    structure: Structure
    things: list[Any]  # in the order of their numbers
    variables: list[Variable[Any]]
    arrays: list[Any]
    places: list[tuple[Any, Any]]  # of the arrays: holder and key
    plain: list[Any]
    tree: Any
    statics: list[Any]  # of ``Walk.statics``

    @property
    def variable_values(self) -> list[Any]:
        """The Variables' values, with refs read and keys made of seeds."""
        return [
            from_refs(v._raw) if v._metadata.stored_as_ref or v._made_when_read else v._raw
            for v in self.variables
        ]

    @property
    def slot_values(self) -> list[Any]:
        return self.variable_values + self.arrays

    @property
    def slot_leaves(self) -> list[Any]:
        return [*self.variables, *self.arrays]

    @functools.cached_property
    def leaf_paths(self) -> list[kinds.Path]:
        """The path of each leaf of the tree, nodes being leaves."""
        return [path for path, _ in leaves_with_paths(self.tree)]

    @functools.cached_property
    def nodes(self) -> list[Any]:
        """The nodes among the leaves of the tree."""
        return self.at_nodes(jax.tree_util.tree_leaves(self.tree, is_leaf=is_node))

    def at_nodes(self, items: list[Any]) -> list[Any]:
        """Takes one item per leaf, and returns the items of leaves that are nodes."""
        return [
            x
            for x, definition in zip(items, self.structure.hashed_definitions, strict=True)
            if definition is not None
        ]

    def at_plain(self, items: list[Any]) -> list[Any]:
        """Takes one item per leaf, and returns the items of plain leaves."""
        return [
            x
            for x, definition in zip(items, self.structure.hashed_definitions, strict=True)
            if definition is None
        ]

    @functools.cached_property
    def node_paths(self) -> list[kinds.Path]:
        return self.at_nodes(self.leaf_paths)

    @functools.cached_property
    def plain_paths(self) -> list[kinds.Path]:
        return self.at_plain(self.leaf_paths)

    @functools.cached_property
    def slot_owners(self) -> list[tuple[int, kinds.Path]]:
        """For each slot, the number of the leaf of the tree that it is in, and its path."""
        found = [
            (leaf.kind, owner, (*prefix, *inner))
            for owner, (prefix, definition) in enumerate(
                zip(self.leaf_paths, self.structure.definitions, strict=True)
            )
            if definition is not None
            for inner, leaf in definition.leaves()
        ]
        found.sort(key=lambda leaf: leaf[0] != VARIABLE)
        return [(owner, path) for _, owner, path in found]

    @functools.cached_property
    def slot_paths(self) -> list[kinds.Path]:
        """The path at which each slot was first met."""
        return [path for _, path in self.slot_owners]

    @property
    def variable_paths(self) -> list[kinds.Path]:
        return self.slot_paths[: len(self.variables)]

    @property
    def array_paths(self) -> list[kinds.Path]:
        return self.slot_paths[len(self.variables) :]


class Structure:
    """The static part of arguments, which is a cache key and all that tracing needs to know.

    ``treedef`` is the tree of the arguments, objects being leaves; ``hashed_definitions`` has one
    for each object and None for each plain leaf.
    """

    __slots__ = ("__dict__", "hashed_definitions", "treedef")

    def __init__(self, treedef: Any, hashed_definitions: tuple[HashedDefinition | None, ...]):
        self.treedef = treedef
        self.hashed_definitions = hashed_definitions

    def __eq__(self, other: object) -> bool:
        return self is other or (
            type(other) is Structure
            and self.treedef == other.treedef
            and self.hashed_definitions == other.hashed_definitions
        )

    def __hash__(self) -> int:
        return hash((self.treedef, self.hashed_definitions))

    def with_nodes(self, definitions: Iterable[HashedDefinition]) -> Structure:
        """The same structure with the definitions of other objects, equal to those of its own."""
        others = iter(definitions)
        found = [None if own is None else next(others) for own in self.hashed_definitions]
        return Structure(self.treedef, tuple(found))

    def statics_still_fit(self) -> bool:
        """Whether the keys of static values are those of the values now."""
        found = (part for node in self.node_definitions for _, part in node.parts())
        held = [x for part in found for x in part.static_values()]
        return all(x.still_fits() for x in held)

    @property
    def definitions(self) -> tuple[Definition | None, ...]:
        """The definitions of the objects, and None for each plain leaf."""
        return tuple(
            None if definition is None else definition.value
            for definition in self.hashed_definitions
        )

    @functools.cached_property
    def node_definitions(self) -> list[Definition]:
        """The definitions of the objects alone."""
        return [
            definition.value for definition in self.hashed_definitions if definition is not None
        ]

    @functools.cached_property
    def variable_definitions(self) -> list[Definition]:
        """The definition of each Variable, in the order of the slots."""
        leaves = (leaf for node in self.node_definitions for _, leaf in node.leaves())
        return [leaf for leaf in leaves if leaf.kind == VARIABLE]

    @functools.cached_property
    def fixed_arrays(self) -> frozenset[int]:
        """The numbers of the arrays whose holder cannot be written to: tuples, foreign pytrees."""
        parts = (pair for node in self.node_definitions for pair in node.parts())
        holders = [holder for holder, part in parts if part.kind == ARRAY]
        return frozenset(
            n for n, x in enumerate(holders) if x is None or x.kind not in (OBJECT, LIST, DICT)
        )

    def enter(self, slot_values: Any, plain: Any, as_values: Any = frozenset()) -> Inside:
        """Builds objects of this structure around a value for each slot, and plain leaves.

        Variables that are stored as refs get new refs. Those in ``as_values`` hold the value itself
        until they are written to.
        """
        values = settle_seeds(slot_values)
        variables = [
            build_variable(definition.payload, value, definition.static)
            if number in as_values
            else rebuild_variable(definition.payload, value, definition.static)
            for number, (definition, value) in enumerate(
                zip(self.variable_definitions, values, strict=False)
            )
        ]
        arrays = values[len(variables) :]
        return Inside(self, variables, values, arrays, *self.build(variables, arrays, plain))

    def build(self, variables: list[Any], arrays: list[Any], plain: Iterable[Any]) -> Any:
        """Builds objects: the leaves of the tree, the tree, and all things and statics in it."""
        build, plain_leaves = Build(), iter(plain)
        by_kind = {VARIABLE: iter(variables), ARRAY: iter(arrays)}
        leaves = [
            next(plain_leaves) if d is None else build.unflatten(d, _state(d, by_kind))
            for d in self.definitions
        ]
        return leaves, self.treedef.unflatten(leaves), build.things, build.statics


def _state(definition: Definition, by_kind: dict[int, Iterator[Any]]) -> Any:
    """The state of an object; ``by_kind`` has its leaves of each kind in the order of the walk."""
    if definition.kind in by_kind:
        return next(by_kind[definition.kind])
    return {
        name: _state(child, by_kind)
        for name, child in zip(definition.names, definition.children, strict=True)
        if child.kind not in (REFERENCE, STATIC)
    }


# ---- inside -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Inside:
    """The objects inside a transform, and the arrays they were made from."""

    structure: Structure
    variables: list[Variable[Any]]
    values_before: list[Any]  # of all slots, as they came in
    arrays: list[Any]
    leaves: list[Any]  # of the tree
    tree: Any
    things: list[Any]  # in the order of their numbers
    statics: list[Any]  # in the order of their numbers
    # In the places of ``arrays``, after the run; None if the structure changed, and without graph
    # updates (but see ``carry.take_arrays``).
    arrays_after: list[Any] | None = None

    def __post_init__(self) -> None:
        # A pytree that a Variable holds can be changed in place, which leaves it the same object.
        self._contents = {
            number: jax.tree_util.tree_flatten(value)
            for number, value in enumerate(self.values_before[: len(self.variables)])
            if not isinstance(value, kinds.ARRAY_TYPES)
        }

    @property
    def nodes(self) -> list[Any]:
        """The nodes among the leaves of the tree."""
        return list(filter(is_node, self.leaves))

    def run(self, f: Callable[..., Any], originals: list[Any] | None = None) -> Any:
        """Calls the function; errors find the place of a copy by its ``originals`` outside."""
        args, kwargs = self.tree
        with naming(self.nodes), locate.standing_for(self.things, originals or []):
            return f(*args, **kwargs)

    def is_changed(self, number: int) -> bool:
        """Whether a Variable holds something else than it came in with."""
        raw = self.variables[number]._raw
        if raw is not self.values_before[number]:
            return True
        before = self._contents.get(number)
        if before is None:
            return False
        leaves, structure = jax.tree_util.tree_flatten(raw)
        same = structure == before[1] and all(map(operator.is_, leaves, before[0]))
        return not same

    def put_back(self, number: int) -> None:
        """Gives a Variable the value again that it came in with."""
        if number in self._contents:
            leaves, structure = self._contents[number]
            self.values_before[number] = structure.unflatten(leaves)
        self.variables[number]._cell.value = self.values_before[number]

    def value(self, number: int) -> Any:
        """The value that a slot has now."""
        count = len(self.variables)
        if number >= count:
            return self._current_arrays()[number - count]
        return from_refs(self.variables[number]._raw)

    def with_moved(self, effects: Effects) -> Effects:
        """Effects in which a slot that now holds the input array of another is in ``moved``.

        The array is not returned from JAX, so that a NumPy array is not turned into one of JAX.
        """
        count = len(self.variables)
        slots = {id(x): count + n for n, x in enumerate(self.arrays)}
        moved = {
            n: slots[id(x)]
            for n in effects.changed
            if n >= count and id(x := self.value(n)) in slots
        }
        changed = tuple(n for n in effects.changed if n not in moved)
        return dataclasses.replace(effects, changed=changed, moved=tuple(moved.items()))

    def with_returned(self, effects: Effects, numbers: frozenset[int]) -> Effects:
        """Effects with more slots that come back as if they had changed."""
        moved = {number for number, _ in effects.moved}
        # There are no arrays to return if the structure changed.
        count = len(self.variables) + len(self.arrays_after or ())
        more = {number for number in numbers if number < count} - moved
        return dataclasses.replace(effects, changed=tuple(sorted({*effects.changed, *more})))

    def _keep_only_sown(self, is_sown: Callable[[Any, Any], bool]) -> None:
        """Puts the Variables into objects of the structure that came in, with what was sown."""
        plain = itertools.filterfalse(is_node, self.leaves)
        arrays, changed_things = self._current_arrays(), self.things
        built = self.structure.build(self.variables, arrays, plain)
        self.leaves, self.tree, self.things, self.statics = built
        for changed, clean in zip(changed_things, self.things, strict=True):
            if kind_of(changed) != OBJECT:
                continue
            for name, value in changed._pytree_items().items():
                if is_sown(changed, name):
                    clean._pytree_set(name, value)

    def slot_values(self) -> list[Any]:
        """The values that all slots have now."""
        values = [self.value(number) for number in range(len(self.variables))]
        return values + self._current_arrays()

    def _current_arrays(self) -> list[Any]:
        return self.arrays if self.arrays_after is None else self.arrays_after

    def leave(
        self,
        out: Any,
        graph: bool,
        updates: GraphUpdates,
        api: str,
        where: Callable[[Any], str],
        with_detached: bool = False,
    ) -> tuple[Effects, list[Any], list[Any]]:
        """Compares the objects with what came in.

        Returns the effects, the arrays of new Variables and objects, and the plain leaves of the
        output. With ``updates`` changed structure is part of the effects, with ``SOWN_ONLY`` only
        what was sown; without, or with ``SOWN_ONLY``, a Variable that came in and is returned
        raises ``SharedReferenceError``. What the function captured from outside and gives out
        raises ``CapturedObjectError``. ``with_detached`` compares objects, too, that the function
        took out of the arguments: somebody outside may hold them.
        """
        sown = sown_attributes(self.things)
        if updates is SOWN_ONLY:
            self._keep_only_sown(capture_run.get().is_sown)
        walk = Walk(True if updates else graph, api, where=output_place)
        leaving = _Leaving(self, walk, updates, api, where)
        argument_nodes, kept = leaving.arguments(with_detached) if updates else (None, ())
        treedef, output_nodes, plain = leaving.output(out)
        count = len(self.variables)
        variables = [number for number in range(count) if self.is_changed(number)]
        pairs = enumerate(zip(self.arrays, self._current_arrays(), strict=True), start=count)
        effects = Effects(
            changed=(*variables, *(number for number, (old, now) in pairs if old is not now)),
            variable_count=count,
            argument_nodes=argument_nodes,
            reused=leaving.reused() if argument_nodes is not None or any(output_nodes) else (),
            out_treedef=treedef,
            output_nodes=output_nodes,
            counts_inputs=bool(updates),
            kept=kept,
            sown=sown,
            reused_statics=leaving.reused_statics(),
            handed_out=tuple(
                number
                for number, thing in enumerate(self.things)
                if kind_of(thing) == OBJECT and thing._pytree_has_handed_out()
            ),
        )
        return effects, leaving.new, plain

    def outcome(self, effects: Effects, new: list[Any], plain: Any) -> Outcome:
        """The effects with all arrays that belong to them."""
        return Outcome(effects, ([self.value(number) for number in effects.changed], new, plain))


class _Leaving:
    """The objects of one run as they leave, compared with what came in.

    ``new`` gets the arrays that did not come in.
    """

    def __init__(
        self,
        inside: Inside,
        walk: Walk,
        updates: GraphUpdates,
        api: str,
        where: Callable[[Any], str],
    ):
        self._inside, self._walk, self._updates = inside, walk, updates
        self._api, self._where = api, where
        self._numbers = {id(v): number for number, v in enumerate(inside.variables)}
        self._inputs = {id(thing): number for number, thing in enumerate(inside.things)}
        self.new: list[Any] = []

    def arguments(self, with_detached: bool) -> tuple[Any, tuple[tuple[int, int], ...]]:
        """The arguments, and the arrays in them that came in, for ``Effects``.

        Without a change of structure there are none, and ``inside`` gets its ``arrays_after``.
        """
        inside, walk = self._inside, self._walk
        definitions = [walk.flatten(node, lambda: inside.tree)[0] for node in inside.nodes]
        arrays = divide_leaves(walk.leaves)[1]
        if not self._are_rebuilt(definitions, arrays):
            inside.arrays_after = arrays
            return None, ()
        self._refuse_captured(walk.things, inside.tree, self._where)
        came_in = inside.structure.node_definitions
        warn_of_tracers(walk.things, came_in, inside.tree, self._api, self._where)
        if with_detached:
            definitions += [
                walk.flatten(thing)[0]
                for thing in inside.things
                if id(thing) not in walk.index and not isinstance(thing, Variable)
            ]
        leaves = iter(walk.leaves)
        nodes = tuple([self._node(definition, leaves) for definition in definitions])
        return nodes, tuple(self._kept_arrays())

    def output(self, out: Any) -> tuple[Any, tuple[LeavingNode | None, ...], list[Any]]:
        """The tree of the output, its objects (None for a plain leaf), and its plain leaves."""
        walk = self._walk
        leaves, treedef = jax.tree_util.tree_flatten(out, is_leaf=is_node)
        nodes: list[LeavingNode | None] = []
        for leaf in leaves:
            if not is_node(leaf):
                nodes.append(None)
                continue
            leaf_count, thing_count = len(walk.leaves), len(walk.things)
            definition = walk.flatten(leaf, lambda: out)[0]
            if self._updates is not True:
                self._refuse_returning(leaves_by_path(leaf).values(), out)
            self._refuse_captured(walk.things[thing_count:], out, output_place)
            came_in = self._inside.structure.node_definitions
            warn_of_tracers(walk.things[thing_count:], came_in, out, self._api, output_place)
            nodes.append(self._node(definition, iter(walk.leaves[leaf_count:])))
        return treedef, tuple(nodes), list(itertools.filterfalse(is_node, leaves))

    def reused(self) -> tuple[int | None, ...]:
        """For each thing that leaves, its number among those that came in."""
        return tuple([self._inputs.get(id(thing)) for thing in self._walk.things])

    def reused_statics(self) -> tuple[int | None, ...]:
        """For each static value that leaves, its number among those that came in."""
        numbers = {id(value): number for number, value in enumerate(self._inside.statics)}
        return tuple([numbers.get(id(value)) for value in self._walk.statics])

    def _are_rebuilt(self, definitions: list[Definition], arrays: list[Any]) -> bool:
        """Whether the structure changed, and not only the values of slots."""
        inside, things = self._inside, self._walk.things
        if definitions != inside.structure.node_definitions or len(things) != len(inside.things):
            return True
        if any(map(operator.is_not, things, inside.things)):
            return True
        return any(arrays[n] is not inside.arrays[n] for n in inside.structure.fixed_arrays)

    def _kept_arrays(self) -> Iterator[tuple[int, int]]:
        """Yields new and old number of each array that came in, which the objects outside keep."""
        came = {id(x): number for number, x in enumerate(self._inside.arrays)}
        others = (leaf for leaf in self._walk.leaves if id(leaf) not in self._numbers)
        for new, leaf in enumerate(others):
            if id(leaf) in came:
                yield new, came[id(leaf)]

    def _node(self, definition: Definition, walked: Iterator[Any]) -> LeavingNode:
        """Describes a leaving object, whose leaves are the next of ``walked``."""
        leaves = []
        for path, _ in definition.leaves():
            leaf = next(walked)
            number = self._numbers.get(id(leaf)) if isinstance(leaf, Variable) else None
            if number is None:
                origin = Origin(False, len(self.new))
                self.new.append(from_refs(leaf._raw) if isinstance(leaf, Variable) else leaf)
            else:
                origin = Origin(True, number)
            leaves.append((path, origin))
        return LeavingNode(definition, tuple(leaves))

    def _refuse_returning(self, leaves: Iterable[Any], out: Any) -> None:
        """Raises for a Variable that came in and is returned."""
        for leaf in leaves:
            if isinstance(leaf, Variable) and id(leaf) in self._numbers:
                came = self._where(next(paths_to(self._inside.tree, leaf)))
                goes = output_place(next(paths_to(out, leaf), ()))
                raise SharedReferenceError(
                    f"{type(leaf).__name__} comes into nnx.{self._api} at {came} and goes out at "
                    f"{goes}, which needs graph updates.\n"
                    "Fix: do not return it (its update reaches the caller anyway), return "
                    "nnx.clone(...) of it, or pass graph=True, graph_updates=True."
                )

    def _refuse_captured(self, things: list[Any], tree: Any, where: Callable[[Any], str]) -> None:
        """Raises for a Variable, or with graph updates any object, that another trace made."""
        api, updates = self._api, self._updates
        returns_objects = api in _GIVE_OUT_NEW_OBJECTS if updates else api != "eval_shape"
        if not returns_objects:
            return
        for thing in things:
            if id(thing) in self._inputs or not is_node(thing):
                continue
            is_variable = isinstance(thing, Variable)
            made_in = thing._trace if is_variable else thing._pytree_trace
            if (updates or is_variable) and not same_trace(made_in):
                type_name = type(thing).__name__
                raise CapturedObjectError(
                    f"nnx.{api}: {where(next(paths_to(tree, thing), ()))} is a {type_name} that "
                    "the function captured from outside; the caller would get another one with the "
                    "same values.\n"
                    f"Fix: pass the {type_name} as an argument, use it outside as it is, or give "
                    "out nnx.clone(...) of it."
                )


# With graph updates, these return objects that the function made; the others return copies.
_GIVE_OUT_NEW_OBJECTS = frozenset({"jit", "vmap", "pmap", "scan", "shard_map"})


def output_place(path: Any) -> str:
    """A path in the output as text."""
    return path_string(path, "the output")


# ---- closing ------------------------------------------------------------------------------------


def close(opened: Opened, outcome: Outcome) -> Any:
    """Writes an outcome into the objects outside, and returns the output of the user's function."""
    effects, written, plain = outcome.effects, outcome.written, outcome.plain
    count = len(opened.variables)
    split = sum(number < count for number in effects.changed)  # arrays come after Variables
    places = [opened.places[number - count] for number in effects.changed[split:]]
    for holder, key in places:
        if kind_of(holder) == OBJECT:
            check_mutable(holder, key)
    write_values([opened.variables[n] for n in effects.changed[:split]], written[:split])
    write_arrays(places, written[split:])
    write_arrays(
        [opened.places[number - count] for number, _ in effects.moved],
        [opened.arrays[came - count] for _, came in effects.moved],
    )
    if effects.argument_nodes is None and not any(effects.output_nodes):
        return plain if effects.out_treedef is None else effects.out_treedef.unflatten(plain)
    return _close_objects(opened, effects, outcome.new, plain)


def _close_objects(opened: Opened, effects: Effects, new: list[Any], plain: list[Any]) -> Any:
    """Rebuilds changed objects in place, and builds those of the output."""

    def make(leaf: Any, cls: type, metadata: Any) -> Any:
        if not isinstance(leaf, Variable):
            return rebuild_variable(cls, leaf, metadata)
        if type(leaf) is not cls:
            leaf.__class__ = cls
        if leaf._metadata.snapshot() != metadata:
            leaf._replace_metadata(metadata.snapshot())
        return leaf

    reuse = {
        number: opened.things[came]
        for number, came in enumerate(effects.reused)
        if came is not None and not isinstance(opened.things[came], Variable)
    }
    own_statics = [None if n is None else opened.statics[n] for n in effects.reused_statics]
    if effects.argument_nodes is None and effects.counts_inputs:
        build = Build(make, list(opened.things), reuse, list(opened.statics), own_statics)
    else:
        build = Build(make, [], reuse, [], own_statics)
        new = list(new)
        for number, came in effects.kept:
            new[number] = opened.arrays[came]
        for node in effects.argument_nodes or ():
            build.unflatten(node.definition, node.state(opened.variables, new))
        report_sown(opened.things, effects.sown)
    for number in effects.handed_out:
        opened.things[number]._pytree_hand_out()
    if effects.out_treedef is None:
        return plain
    plain_leaves = iter(plain)
    leaves = [
        next(plain_leaves)
        if node is None
        else build.unflatten(node.definition, node.state(opened.variables, new))
        for node in effects.output_nodes
    ]
    return effects.out_treedef.unflatten(leaves)
