"""Objects inside pytrees of other things: each replaced by its parts, and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import SequenceKey, register_pytree_with_keys

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx import kinds
from linnet.nnx.graphlib.contexts import MergeContext, SplitContext, merge_context, split_context
from linnet.nnx.graphlib.graphdef import GraphDef
from linnet.nnx.kinds import OBJECT, VARIABLE, key_name, kind_of


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


def _is_node(x: Any) -> bool:
    return kind_of(x) in (OBJECT, VARIABLE)


def _split_default(ctx: SplitContext, path: Any, prefix: Any, leaf: Any) -> Any:
    return NodeStates.from_split(*ctx.split(leaf))


def _merge_default(ctx: MergeContext, path: Any, prefix: Any, leaf: Any) -> Any:
    return ctx.merge(leaf.graphdef, *leaf.states)


def _broadcast(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One prefix value for each leaf of ``tree``."""
    if prefix is None:
        return [None] * len(jax.tree_util.tree_leaves(tree, is_leaf=is_leaf))
    return jax.tree_util.tree_leaves(
        jax.tree_util.tree_map(
            lambda value, part: jax.tree_util.tree_map(
                lambda _: _Boxed(value), part, is_leaf=is_leaf
            ),
            prefix,
            tree,
            is_leaf=lambda x: x is None,
        ),
        is_leaf=lambda x: isinstance(x, _Boxed),
    )


class _Boxed:
    def __init__(self, value: Any):
        self.value = value


def _unbox(prefixes: list[Any]) -> list[Any]:
    return [p.value if isinstance(p, _Boxed) else p for p in prefixes]


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
    """
    split = split_fn or _split_default
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
    prefixes = _unbox(_broadcast(prefix, tree, _is_node))
    out = []
    placed: dict[int, tuple[Any, Any]] = {}
    with split_context(ctxtag) as ctx:
        for (path, leaf), value in zip(leaves, prefixes, strict=True):
            if _is_node(leaf):
                names = tuple(key_name(key) for key in path)
                if check_aliasing:
                    _check_aliasing(leaf, names, value, placed)
                leaf = split(ctx, path, value, leaf)
            elif map_non_graph_nodes:
                leaf = split(ctx, path, value, leaf)
            out.append(leaf)
    return structure.unflatten(out)


def _check_aliasing(node: Any, path: Any, prefix: Any, placed: dict[int, tuple[Any, Any]]) -> None:
    pending, seen = [(path, node)], set()
    while pending:
        where, value = pending.pop()
        kind = kind_of(value)
        if kind in (kinds.STATIC, kinds.ARRAY, kinds.METHOD) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind == VARIABLE:
            first, other = placed.setdefault(id(value), (where, prefix))
            if other is not prefix and other != prefix:
                raise SharedReferenceError(
                    f"{type(value).__name__} at {path_string(where)} was already seen at "
                    f"{path_string(first)}, under another prefix: {other!r} and {prefix!r}.\n"
                    "Fix: give both places the same prefix, or pass a copy."
                )
            continue
        items = value._pytree_items().items() if kind == OBJECT else None
        for key, child in kinds.container_items(value, kind) if items is None else items:
            pending.append(((*where, key), child))


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
    """
    merge = merge_fn or _merge_default
    is_node = is_node_leaf or (lambda x: isinstance(x, NodeStates))
    stops = is_leaf or is_node
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)
    prefixes = _unbox(_broadcast(prefix, tree, stops))
    out = []
    with merge_context(ctxtag, is_inner) as ctx:
        for (path, leaf), value in zip(leaves, prefixes, strict=True):
            if is_node(leaf) or map_non_graph_nodes:
                leaf = merge(ctx, path, value, leaf)
            out.append(leaf)
    return structure.unflatten(out)
