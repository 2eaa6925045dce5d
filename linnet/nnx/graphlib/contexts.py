"""Identities kept across several calls of split and merge.

Within one ``split_context`` objects are numbered together, so what two arguments share is one
number; within one ``merge_context`` a number is one object. ``update_context(tag)`` ties both
sides of a
transform: what was split outside, merged inside, changed, split inside and merged outside again
is, for everything that survived, the same objects, changed in place.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build, VariableMaker, use_variable
from linnet.nnx.graphlib.graphdef import GraphDef, merge_states
from linnet.nnx.graphlib.modes import graph_mode
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.statelib import FlatState, divide, iter_flat, plain_mapping


class RefIndex:
    """Things by identity, numbered in the order they were met."""

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


class UpdateContext:
    """Both sides of a transform: which object inside stands for which one outside.

    Args:
      tag: the name that ``split_context`` and ``merge_context`` refer to.
      outer_ref_outer_index: what was split outside.
      outer_index_inner_ref: what was merged inside, by outer number.
      outer_index_outer_ref: what was split outside, by its number.
      inner_ref_outer_index: the outer numbers of what was merged inside.
      static_cache: kept for callers that pass it; not used.
    """

    def __init__(
        self,
        tag: Any,
        outer_ref_outer_index: RefIndex | None = None,
        outer_index_inner_ref: list[Any] | None = None,
        outer_index_outer_ref: list[Any] | None = None,
        inner_ref_outer_index: RefIndex | None = None,
        static_cache: Any = None,
    ):
        self.tag = tag
        self.outer_ref_outer_index = outer_ref_outer_index
        self.outer_index_inner_ref = outer_index_inner_ref
        self.outer_index_outer_ref = outer_index_outer_ref
        self.inner_ref_outer_index = inner_ref_outer_index
        self.static_cache = static_cache

    def flatten_end(self, ref_index: RefIndex) -> None:
        """Takes note of what a ``split_context`` met: the outside first, then the inside."""
        if self.outer_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = ref_index.things

    def unflatten_end(self, index_ref: list[Any], inner_merge: bool) -> None:
        """Takes note of what a ``merge_context`` built."""
        if inner_merge:
            self.outer_index_inner_ref = index_ref
            self.inner_ref_outer_index = RefIndex()
            self.inner_ref_outer_index.add_all(index_ref)


@contextlib.contextmanager
def _update_block(tag: Any) -> Iterator[UpdateContext]:
    context = UpdateContext(tag)
    stack = _tags.contexts.setdefault(tag, [])
    stack.append(context)
    try:
        yield context
    finally:
        stack.pop()


class _UpdateManager(contextlib.ContextDecorator):
    def __init__(self, tag: Any):
        self.tag = tag
        self._blocks: list[Any] = []

    def _recreate_cm(self) -> _UpdateManager:
        return _UpdateManager(self.tag)

    def __enter__(self) -> UpdateContext:
        self._blocks.append(_update_block(self.tag))
        return self._blocks[-1].__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._blocks.pop().__exit__(*error)


def update_context(tag: Any) -> Any:
    """Ties the splits and merges of one transform together; a context manager and decorator.

    Args:
      tag: a name that ``split_context`` and ``merge_context`` inside it are given too.

    Returns:
      The context manager.
    """
    return _UpdateManager(tag)


def current_update_context(tag: Any) -> UpdateContext:
    """The innermost ``update_context`` of that tag.

    Raises:
      ValueError: there is none.
    """
    stack = _tags.contexts.get(tag)
    if not stack:
        raise ValueError(
            f"No update context found for tag {tag!r}.\nFix: with nnx.update_context({tag!r}): ..."
        )
    return stack[-1]


class SplitContext:
    """Splits several objects, numbering what they share once.

    Args:
      ctxtag: the tag of an update context, or None.
      ref_index: what was met so far.
      is_inner: whether this is the inside of a transform.
    """

    def __init__(self, ctxtag: Any, ref_index: RefIndex, is_inner: bool | None):
        self.ctxtag = ctxtag
        self.ref_index = ref_index
        self.is_inner = is_inner

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
        flat = [FlatState(iter_flat(plain_mapping(s)), sort=False) for s in divide(mapping, filters, exhaustive=True)]  # fmt: skip # noqa: E501
        return (graphdef, *(flat if with_paths else [list(f.leaves) for f in flat]))


class MergeContext:
    """Merges several objects, giving each number one object.

    Args:
      ctxtag: the tag of an update context, or None.
      index_ref: what was built so far.
      is_inner: whether this is the inside of a transform.
    """

    def __init__(self, ctxtag: Any, index_ref: list[Any], is_inner: bool | None):
        self.ctxtag = ctxtag
        self.index_ref = index_ref
        self.is_inner = is_inner

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


class _Decorating:
    """A context manager that, used on a function, passes the context as its first argument."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._blocks: list[Any] = []

    def __enter__(self) -> Any:
        self._blocks.append(self._make())
        return self._blocks[-1].__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._blocks.pop().__exit__(*error)

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._make() as context:
                return f(context, *args, **kwargs)

        return wrapper


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


def _flatten(
    node: Any, ref_index: RefIndex, outer: RefIndex | None, graph: bool
) -> tuple[GraphDef, Any]:
    first = len(ref_index)
    walk = Walk(graph, "split", dict(ref_index.numbers), len(ref_index))
    definition, mapping = walk.flatten(node)
    ref_index.add_all(walk.seen)
    outer_index = None if outer is None else tuple(outer.get(thing) for thing in walk.seen)
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
    if isinstance(state, (list, tuple)):
        paths = sorted_leaf_paths(graphdef)
        return FlatState(zip(paths, state, strict=True), sort=False).to_nested_state()
    return state


def sorted_leaf_paths(graphdef: GraphDef) -> list[tuple[Any, ...]]:
    """The paths of a graphdef's leaves in the order in which ``flatten`` lists them."""
    return list(FlatState((path, None) for path, _ in graphdef.definition.leaves()).paths)


def flatten_with(
    node: Any, with_paths: bool, ref_index: Any, ref_outer_index: Any, graph: bool | None
) -> tuple[GraphDef, Any]:
    """The body of ``nnx.flatten``."""
    index = RefIndex() if ref_index is None else ref_index
    graphdef, mapping = _flatten(node, index, ref_outer_index, graph_mode(graph))
    flat = FlatState(iter_flat(mapping), sort=False)
    return graphdef, (flat if with_paths else list(flat.leaves))


def unflatten_with(
    graphdef: GraphDef,
    state: Any,
    index_ref: list[Any] | None,
    outer: Mapping[int, Any] | None,
    make: VariableMaker,
) -> Any:
    """The body of ``nnx.unflatten``."""
    built = [] if index_ref is None else index_ref
    mapping = plain_mapping(_nested(graphdef, state))
    return _unflatten(graphdef, mapping, built, outer, make)
