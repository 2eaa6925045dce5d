"""Objects to (GraphDef, State) and back.

- ``walk``: ``Walk``, one pass over an object that gives its ``Definition``, leaves and state.
- ``build``: ``Build``, objects from a definition and a state, new or filled in place.
- ``graphdef``: ``GraphDef``, the definition that users hold, with its hash and the numbers of
  objects outside; calling a method on a state; ``set_graph_mode`` and ``set_graph_updates``.
- ``split_merge``: ``split``, ``merge``, ``state``, ``graphdef``, ``clone``, ``unpack``.
- ``update``: ``update`` and ``pop``, which change an object in place, all or nothing.
- ``traverse``: ``iter_graph``, ``map``, ``recursive_map``, ``with_vars``, ``prefix`` and the like.
- ``explain``: errors of JAX about Variables that have only a shape, or whose buffer is gone.
- ``contexts``: several splits or merges that share one numbering (``split_context``,
  ``merge_context``, ``update_context``); the same for the objects inside a pytree (``to_tree``,
  ``from_tree``).

``split`` walks an object once: things with an identity are numbered in the order of the walk, and a
second visit becomes a reference to the number (in tree mode, for an object or Variable, an error).
The nested dicts of leaves are divided by filters into States. ``merge`` joins the States and builds
the objects in the same order, so that a reference finds what its number stands for.
"""

from linnet.nnx.graphlib.contexts import (
    IndexRef,
    MergeContext,
    NodeStates,
    RefIndex,
    SplitContext,
    UpdateContext,
    current_update_context,
    flatten,
    from_tree,
    merge_context,
    split_context,
    to_tree,
    unflatten,
    update_context,
)
from linnet.nnx.graphlib.graphdef import (
    GraphDef,
    NodeDef,
    PureState,
    call,
    set_graph_mode,
    set_graph_updates,
)
from linnet.nnx.graphlib.split_merge import (
    GraphState,
    clone,
    graphdef,
    merge,
    split,
    state,
    unpack,
    variables,
)
from linnet.nnx.graphlib.traverse import (
    as_pure,
    find_duplicates,
    iter_children,
    iter_graph,
    map,
    prefix,
    pure,
    recursive_map,
    set_metadata,
    vars_as,
    with_vars,
)
from linnet.nnx.graphlib.update import pop, update

__all__ = [
    "GraphDef",
    "GraphState",
    "IndexRef",
    "MergeContext",
    "NodeDef",
    "NodeStates",
    "PureState",
    "RefIndex",
    "SplitContext",
    "UpdateContext",
    "as_pure",
    "call",
    "clone",
    "current_update_context",
    "find_duplicates",
    "flatten",
    "from_tree",
    "graphdef",
    "iter_children",
    "iter_graph",
    "map",
    "merge",
    "merge_context",
    "pop",
    "prefix",
    "pure",
    "recursive_map",
    "set_graph_mode",
    "set_graph_updates",
    "set_metadata",
    "split",
    "split_context",
    "state",
    "to_tree",
    "unflatten",
    "unpack",
    "update",
    "update_context",
    "variables",
    "vars_as",
    "with_vars",
]
