"""Identities kept across several calls of split and merge, and objects inside pytrees.

Within one ``split_context`` objects are numbered together, so what two arguments share is one
number; within one ``merge_context`` a number is one object. ``update_context(tag)`` ties both sides
of a transform: what was split outside, merged inside, changed, split inside and merged outside
again is, for everything that survived, the same objects, changed in place.

``flatten`` and ``unflatten`` are split and merge for callers that keep the index themselves;
``to_tree`` and ``from_tree`` apply a context to every object in a pytree of other things.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import SequenceKey, register_pytree_with_keys

from linnet.config import Reusable
from linnet.errors import SharedReferenceError, path_string
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build, VariableMaker, use_variable, variable_maker
from linnet.nnx.graphlib.graphdef import GraphDef, graph_mode, nested_leaves
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.kinds import VARIABLE, Path, is_node, key_name, kind_of
from linnet.nnx.pytreelib.tracing import pushed
from linnet.nnx.statelib import (
    FlatState,
    divide,
    iter_flat,
    merge_states,
    plain_mapping,
    to_flat_state,
)

# ---- contexts -----------------------------------------------------------------------------------


def split_context(ctxtag: Any = None) -> Any:
    """Splits several objects so that what they share is shared again after merging.

    Args:
      ctxtag: the tag of an ``update_context``, to tie the two sides of a transform.

    Returns:
      A context manager that gives a ``SplitContext``; as a decorator it passes it to the function.

    Example:
      >>> from linnet import nnx
      >>> shared = nnx.Param(1.0)
      >>> with nnx.split_context() as ctx:
      ...     a, b = ctx.split({"p": shared}), ctx.split({"q": shared})
      >>> with nnx.merge_context() as ctx:
      ...     a, b = ctx.merge(*a), ctx.merge(*b)
      >>> a["p"] is b["q"]
      True
    """

    @contextlib.contextmanager
    def block() -> Iterator[SplitContext]:
        index = RefIndex()
        inner = None
        if ctxtag is not None:
            inner = current_update_context(ctxtag).inner_ref_outer_index is not None
        yield SplitContext(ctxtag, index, inner)
        if ctxtag is not None:
            current_update_context(ctxtag).flatten_end(index)

    return _Decorating(block)


def merge_context(ctxtag: Any = None, inner: bool | None = None) -> Any:
    """Merges several objects that one ``split_context`` took apart.

    Args:
      ctxtag: the tag of an ``update_context``, to tie the two sides of a transform.
      inner: whether this is the inside of the transform; outside, objects are changed in place.

    Returns:
      A context manager that gives a ``MergeContext``; as a decorator it passes it to the function.

    Raises:
      ValueError: a tag was given without ``inner``.

    Example:
      >>> from linnet import nnx
      >>> shared = nnx.Param(1.0)
      >>> with nnx.split_context() as ctx:
      ...     parts = [ctx.split([shared]), ctx.split([shared])]
      >>> with nnx.merge_context() as ctx:
      ...     first, second = (ctx.merge(*part) for part in parts)
      >>> first[0] is second[0]
      True
    """
    if ctxtag is not None and inner is None:
        raise ValueError("merge_context with a tag needs inner=True (inside) or inner=False.")

    @contextlib.contextmanager
    def block() -> Iterator[MergeContext]:
        built: list[Any] = []
        yield MergeContext(ctxtag, built, inner)
        if ctxtag is not None:
            current_update_context(ctxtag).unflatten_end(built, bool(inner))

    return _Decorating(block)


def update_context(tag: Any) -> Any:
    """Ties the splits and merges of one transform together; a context manager and decorator.

    Args:
      tag: a name that ``split_context`` and ``merge_context`` inside it are given too.

    Returns:
      The context manager.

    Example:
      >>> from linnet import nnx
      >>> counter = nnx.Dict(n=nnx.Variable(0))
      >>> with nnx.update_context("step"):
      ...     with nnx.split_context("step") as ctx:
      ...         parts = ctx.split(counter)
      ...     with nnx.merge_context("step", inner=True) as ctx:
      ...         inside = ctx.merge(*parts)
      ...     inside.n.value += 1
      ...     with nnx.split_context("step") as ctx:
      ...         parts = ctx.split(inside)
      ...     with nnx.merge_context("step", inner=False) as ctx:
      ...         outside = ctx.merge(*parts)
      >>> outside is counter, counter.n.value
      (True, 1)
    """

    def block() -> Any:
        return pushed(_tags.contexts.setdefault(tag, []), UpdateContext(tag))

    return _Decorating(block, passes=False)


def current_update_context(tag: Any) -> UpdateContext:
    """The innermost ``update_context`` of that tag.

    Args:
      tag: the tag that ``update_context`` was given.

    Returns:
      The context that is open now.

    Raises:
      ValueError: there is none.

    Example:
      >>> from linnet import nnx
      >>> with nnx.update_context("step"):
      ...     nnx.current_update_context("step").tag
      'step'
    """
    stack = _tags.contexts.get(tag)
    if not stack:
        raise ValueError(
            f"No update context found for tag {tag!r}.\nFix: with nnx.update_context({tag!r}): ..."
        )
    return stack[-1]


@dataclasses.dataclass(eq=False, repr=False)
class SplitContext:
    """Splits several objects, numbering what they share once.

    Args:
      ctxtag: the tag of an update context, or None.
      ref_index: what was met so far.
      is_inner: whether this is the inside of a transform.
    """

    ctxtag: Any
    ref_index: RefIndex
    is_inner: bool | None

    def _outer(self) -> RefIndex | None:
        if self.ctxtag is None or not self.is_inner:
            return None
        return current_update_context(self.ctxtag).inner_ref_outer_index

    def split(self, node: Any, *filters: Filter) -> tuple[Any, ...]:
        """``nnx.split`` with the numbers of this context."""
        graphdef, mapping = _flatten(node, self.ref_index, self._outer(), True)
        return (graphdef, *divide(mapping, filters, exhaustive=True))

    def flatten(self, node: Any, *filters: Filter, with_paths: bool = True) -> tuple[Any, ...]:
        """``nnx.flatten`` with the numbers of this context, divided among filters."""
        graphdef, mapping = _flatten(node, self.ref_index, self._outer(), True)
        flat = list(map(to_flat_state, divide(mapping, filters, exhaustive=True)))
        return (graphdef, *(flat if with_paths else [list(f.leaves) for f in flat]))


@dataclasses.dataclass(eq=False, repr=False)
class MergeContext:
    """Merges several objects, giving each number one object.

    Args:
      ctxtag: the tag of an update context, or None.
      index_ref: what was built so far.
      is_inner: whether this is the inside of a transform.
    """

    ctxtag: Any
    index_ref: list[Any]
    is_inner: bool | None

    def _outer(self) -> Mapping[int, Any] | None:
        if self.ctxtag is None or self.is_inner:
            return None
        known = current_update_context(self.ctxtag).outer_index_outer_ref
        return None if known is None else dict(enumerate(known))

    def merge(self, graphdef: GraphDef, state: Any, /, *states: Any) -> Any:
        """``nnx.merge`` with the objects of this context."""
        mapping = merge_states((state, *states))
        return _unflatten(graphdef, mapping, self.index_ref, self._outer(), use_variable)

    def unflatten(self, graphdef: GraphDef, flat_state: Any, /, *flat_states: Any) -> Any:
        """``nnx.unflatten`` with the objects of this context."""
        mapping = merge_states(tuple(_nested(graphdef, s) for s in (flat_state, *flat_states)))
        return _unflatten(graphdef, mapping, self.index_ref, self._outer(), use_variable)


@dataclasses.dataclass(eq=False, repr=False)
class UpdateContext:
    """Both sides of a transform: which inner object stands for which outer one.

    Args:
      tag: the name that ``split_context`` and ``merge_context`` refer to.
      outer_ref_outer_index: what was split outside.
      outer_index_inner_ref: what was merged inside, by outer number; for callers, as in Flax.
      outer_index_outer_ref: what was split outside, by its number.
      inner_ref_outer_index: the outer numbers of what was merged inside.
      static_cache: accepted because Flax takes it; not used.
    """

    tag: Any
    outer_ref_outer_index: RefIndex | None = None
    outer_index_inner_ref: list[Any] | None = None
    outer_index_outer_ref: list[Any] | None = None
    inner_ref_outer_index: RefIndex | None = None
    static_cache: Any = None

    def flatten_end(self, ref_index: RefIndex) -> None:
        """Stores what the first ``split_context``, that of the outside, numbered."""
        if self.outer_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = ref_index.things

    def unflatten_end(self, index_ref: list[Any], inner_merge: bool) -> None:
        """Stores what a ``merge_context`` of the inside built."""
        if inner_merge:
            self.outer_index_inner_ref = index_ref
            self.inner_ref_outer_index = RefIndex()
            self.inner_ref_outer_index.add_all(index_ref)


class RefIndex:
    """Numbers for objects and other things with an identity, in the order they are added."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.things: list[Any] = []

    def __len__(self) -> int:
        return len(self.things)

    def get(self, thing: Any) -> int | None:
        """The number of a thing, if it has one."""
        return self.numbers.get(id(thing))

    def add_all(self, things: list[Any]) -> None:
        """Numbers things that were not met before."""
        for thing in things:
            self.numbers[id(thing)] = len(self.things)
            self.things.append(thing)


IndexRef = list


class _Tags(threading.local):
    def __init__(self) -> None:
        self.contexts: dict[Any, list[UpdateContext]] = {}


_tags = _Tags()


class _Decorating(Reusable):
    """A context manager that also decorates functions, passing them the context if ``passes``."""

    def __init__(self, make: Callable[[], Any], passes: bool = True):
        super().__init__()
        self._open = make
        self._passes = passes

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._open() as context:
                return f(context, *args, **kwargs) if self._passes else f(*args, **kwargs)

        return wrapper


# ---- flattening with an index of what was met before --------------------------------------------


def flatten(
    node: Any,
    /,
    *,
    with_paths: bool = True,
    ref_index: Any = None,
    ref_outer_index: Any = None,
    graph: bool | None = None,
) -> tuple[GraphDef, Any]:
    """The structure of an object and its leaves in the order of the walk.

    Args:
      node: a module, or any pytree of modules and Variables.
      with_paths: give a ``FlatState``; otherwise a plain list of leaves.
      ref_index: a ``RefIndex`` of what earlier calls met; this call adds to it.
      ref_outer_index: a ``RefIndex`` of objects outside; the graphdef is tied to them.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      ``(graphdef, flat_state)``.

    Example:
      >>> from linnet import nnx
      >>> graphdef, flat = nnx.flatten({"b": nnx.Param(1.0), "a": [nnx.Param(2.0)]})
      >>> flat.paths
      (('a', 0), ('b',))
    """
    index = RefIndex() if ref_index is None else ref_index
    graphdef, mapping = _flatten(node, index, ref_outer_index, graph_mode(graph))
    flat = FlatState(iter_flat(mapping), sort=False)
    return graphdef, (flat if with_paths else list(flat.leaves))


def unflatten(
    graphdef: GraphDef,
    state: Any,
    /,
    *,
    index_ref: Any = None,
    outer_index_outer_ref: Mapping[int, Any] | None = None,
    copy_variables: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """The reverse of ``flatten``.

    Args:
      graphdef: the structure.
      state: a state, a ``FlatState`` or a list of leaves in the order of the walk.
      index_ref: an ``IndexRef`` of what earlier calls built; this call adds to it.
      outer_index_outer_ref: objects that are filled in place, by their outer number.
      copy_variables: copy the state's Variables.
      recreate_variables: as for ``merge``.

    Returns:
      The object.

    Example:
      >>> from linnet import nnx
      >>> graphdef, leaves = nnx.flatten({"a": nnx.Param(1.0)}, with_paths=False)
      >>> nnx.unflatten(graphdef, leaves)["a"] is leaves[0]
      True
    """
    make = variable_maker(copy_variables, recreate_variables)
    built = [] if index_ref is None else index_ref
    mapping = plain_mapping(_nested(graphdef, state))
    return _unflatten(graphdef, mapping, built, outer_index_outer_ref, make)


def _flatten(
    node: Any, ref_index: RefIndex, outer: RefIndex | None, graph: bool
) -> tuple[GraphDef, Any]:
    first = len(ref_index)
    walk = Walk(graph, "split", dict(ref_index.numbers), first)
    definition, mapping = walk.flatten(node)
    ref_index.add_all(walk.things)
    outer_index = None if outer is None else tuple(outer.get(thing) for thing in walk.things)
    return GraphDef(definition, first=first, outer_index=outer_index), mapping


def _unflatten(
    graphdef: GraphDef,
    mapping: Any,
    index_ref: list[Any],
    outer: Mapping[int, Any] | None,
    make: VariableMaker,
) -> Any:
    reuse = {}
    if outer is not None and graphdef.outer_index is not None:
        for position, number in enumerate(graphdef.outer_index):
            if number is not None:
                reuse[graphdef.first + position] = outer[number]
    return Build(make, index_ref, reuse).unflatten(graphdef.definition, mapping)


def _nested(graphdef: GraphDef, state: Any) -> Any:
    if isinstance(state, FlatState):
        return state.to_nested_state()
    return nested_leaves(graphdef, state) if isinstance(state, (list, tuple)) else state


# ---- objects inside of pytrees ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NodeStates:
    """The parts of one object inside a larger pytree.

    Args:
      _graphdef: the structure, or None.
      states: the states.
      metadata: anything hashable to keep beside them.
    """

    _graphdef: GraphDef | None
    states: tuple[Any, ...]
    metadata: Any = None

    @property
    def graphdef(self) -> GraphDef:
        """The structure.

        Raises:
          ValueError: there is none.
        """
        if self._graphdef is None:
            raise ValueError("No graphdef available: these NodeStates were made from states alone.")
        return self._graphdef

    @property
    def state(self) -> Any:
        """The state, if there is exactly one.

        Raises:
          ValueError: there are several.
        """
        if len(self.states) != 1:
            raise ValueError(f"Expected exactly one state, got {len(self.states)}.")
        return self.states[0]

    @classmethod
    def from_split(
        cls, graphdef: GraphDef | None, state: Any, /, *states: Any, metadata: Any = None
    ) -> NodeStates:
        """From what ``split`` gave."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: Any, *states: Any) -> NodeStates:
        """From states alone."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(cls, prefixes: Any, /, *, metadata: Any = None) -> NodeStates:
        """From one prefix a state, such as axes."""
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **updates: Any) -> NodeStates:
        """A copy with some parts replaced."""
        return dataclasses.replace(self, **updates)


register_pytree_with_keys(
    NodeStates,
    lambda n: (
        [(SequenceKey(i), state) for i, state in enumerate(n.states)],
        (n._graphdef, n.metadata),
    ),
    lambda aux, states: NodeStates(aux[0], tuple(states), aux[1]),
)


def to_tree(
    tree: Any,
    /,
    *,
    prefix: Any = None,
    split_fn: Callable[[SplitContext, Any, Any, Any], Any] | None = None,
    map_non_graph_nodes: bool = False,
    ctxtag: Any = None,
    check_aliasing: bool = True,
) -> Any:
    """Replaces each object and Variable in a pytree by its parts.

    Args:
      tree: any pytree.
      prefix: a tree prefix of ``tree``; its values are passed to ``split_fn``.
      split_fn: a function of the split context, path, prefix value and object that returns what
        shall stand in its place; by default ``NodeStates``.
      map_non_graph_nodes: pass other leaves through ``split_fn`` too.
      ctxtag: the tag of an ``update_context``.
      check_aliasing: refuse one object under two different prefix values.

    Returns:
      The pytree without objects; ``from_tree`` is the way back.

    Raises:
      SharedReferenceError: one object stands under two different prefix values.

    Example:
      >>> from linnet import nnx
      >>> pure = nnx.to_tree([nnx.Param(1.0), 2])
      >>> type(pure[0]).__name__, pure[1]
      ('NodeStates', 2)
      >>> nnx.from_tree(pure)[0].value
      1.0
    """
    split = split_fn or (lambda ctx, _path, _prefix, x: NodeStates.from_split(*ctx.split(x)))
    placed: dict[int, tuple[Any, Any]] = {}
    with split_context(ctxtag) as ctx:

        def apart(path: Any, value: Any, leaf: Any) -> Any:
            if check_aliasing and is_node(leaf):
                _check_aliasing(leaf, tuple(map(key_name, path)), value, placed)
            is_split = map_non_graph_nodes or is_node(leaf)
            return split(ctx, path, value, leaf) if is_split else leaf

        return _map_with_prefix(apart, prefix, tree, is_node)


def from_tree(
    tree: Any,
    /,
    *,
    prefix: Any = None,
    merge_fn: Callable[[MergeContext, Any, Any, Any], Any] | None = None,
    is_node_leaf: Callable[[Any], bool] | None = None,
    is_leaf: Callable[[Any], bool] | None = None,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Any = None,
) -> Any:
    """Puts the objects of a pytree back together; the reverse of ``to_tree``.

    Args:
      tree: what ``to_tree`` gave.
      prefix: a tree prefix of ``tree``; its values are passed to ``merge_fn``.
      merge_fn: a function of the merge context, path, prefix value and leaf that returns an object.
      is_node_leaf: tells what stands for an object; by default ``NodeStates``.
      is_leaf: tells what is a leaf; by default the same.
      map_non_graph_nodes: pass other leaves through ``merge_fn`` too.
      is_inner: as for ``merge_context``.
      ctxtag: the tag of an ``update_context``.

    Returns:
      The pytree with objects.

    Example:
      >>> from linnet import nnx
      >>> shared = nnx.Param(1.0)
      >>> a, b = nnx.from_tree(nnx.to_tree(({"w": shared}, {"w": shared})))
      >>> a["w"] is b["w"]
      True
    """
    merge = merge_fn or (lambda ctx, _path, _prefix, x: ctx.merge(x.graphdef, *x.states))
    stands_for_node = is_node_leaf or (lambda x: isinstance(x, NodeStates))
    with merge_context(ctxtag, is_inner) as ctx:

        def together(path: Any, value: Any, leaf: Any) -> Any:
            is_merged = map_non_graph_nodes or stands_for_node(leaf)
            return merge(ctx, path, value, leaf) if is_merged else leaf

        return _map_with_prefix(together, prefix, tree, is_leaf or stands_for_node)


def _check_aliasing(
    node: Any, where: Path, prefix: Any, placed: dict[int, tuple[Path, Any]]
) -> None:
    """Raises if a Variable below ``node`` was placed before under another prefix value."""
    for path, value in kinds.places(node, plain=False, methods=False):
        if kind_of(value) != VARIABLE:
            continue
        first, other = placed.setdefault(id(value), ((*where, *path), prefix))
        if other is not prefix and other != prefix:
            raise SharedReferenceError(
                f"{type(value).__name__} at {path_string((*where, *path))} was already seen at "
                f"{path_string(first)}, under another prefix: {other!r} and {prefix!r}.\n"
                "Fix: give both places the same prefix, or pass a copy."
            )


def _map_with_prefix(
    f: Callable[[Any, Any, Any], Any], prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]
) -> Any:
    """The tree with ``f(path, value, leaf)`` for each leaf and the prefix value above it."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    values: list[Any] = []

    def repeat(value: Any, part: Any) -> None:
        values.extend([value] * len(jax.tree_util.tree_leaves(part, is_leaf=is_leaf)))

    if prefix is None:
        repeat(None, tree)
    else:
        jax.tree_util.tree_map(repeat, prefix, tree, is_leaf=lambda x: x is None)
    pairs = zip(leaves, values, strict=True)
    return structure.unflatten([f(path, value, leaf) for (path, leaf), value in pairs])
