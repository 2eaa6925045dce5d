"""Taking objects apart into (GraphDef, State) and putting them together again."""

from __future__ import annotations

import collections
from collections.abc import Iterator, MutableMapping
from typing import Any, Self, TypeVar, overload

import jax
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from linnet.errors import StateMismatchError, name_some, path_string
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build, copy_variable, use_variable, variable_maker
from linnet.nnx.graphlib.graphdef import GraphDef, flatten_node, nested_leaves
from linnet.nnx.pytreelib.printing import PrintedForm, Representable
from linnet.nnx.statelib import State, divide, iter_flat, merge_states, one_or_all, plain_mapping
from linnet.nnx.variablelib.variable import Variable, copy_array, stored_value

N = TypeVar("N")


@overload
def split(node: N, /, *, graph: bool | None = None) -> tuple[GraphDef[N], State]: ...
@overload
def split(node: N, first: Filter, /, *, graph: bool | None = None) -> tuple[GraphDef[N], State]: ...
@overload
def split(node: N, first: Filter, second: Filter, /, *filters: Filter, graph: bool | None = None) -> tuple[GraphDef[N], State, *tuple[State, ...]]: ...  # fmt: skip # noqa: E501
def split(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """Takes an object apart into its structure and its Variables.

    The states hold the object's own Variables, not copies: what is written to them is written to
    the object. ``nnx.clone`` of a state gives a snapshot.

    Args:
      node: a module, or any pytree of modules and Variables.
      *filters: divide the Variables into one state each; together they must cover all of them.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      ``(graphdef, state)``, or ``(graphdef, *states)`` with one state a filter.

    Raises:
      FilterError: Variables are left over; their paths are listed.
      SharedReferenceError: something is shared in tree mode; both paths are named.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Net(nnx.Module):
      ...     def __init__(self):
      ...         self.w, self.mean = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(2))
      >>> graphdef, params, rest = nnx.split(Net(), nnx.Param, ...)
      >>> list(params), list(rest)
      (['w'], ['mean'])
    """
    graphdef, mapping = flatten_node(node, graph, "split")
    return (graphdef, *divide(mapping, filters, exhaustive=True))


@overload
def merge(
    graphdef_or_graphstate: GraphDef[N],
    /,
    *states: Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> N: ...
@overload
def merge(
    graphdef_or_graphstate: GraphState,
    /,
    *states: Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> Any: ...
def merge(
    graphdef_or_graphstate: Any,
    /,
    *states: Any,
    copy: bool = False,
    recreate_variables: bool = True,
) -> Any:
    """Puts an object together from its structure and its states; the reverse of ``split``.

    Args:
      graphdef_or_graphstate: the graphdef, or a ``GraphState`` that brings its own.
      *states: all states of the split, in any order; nested dicts of plain values do too. In place
        of them, one flat list of leaves or Variables in the order of ``jax.tree.leaves(state)``.
      copy: copy the states' Variables; otherwise they become the object's own.
      recreate_variables: make Variables for leaves that are plain values; with ``False`` such
        leaves are kept as they are.

    Returns:
      The object. Its constructor is not run.

    Raises:
      StateMismatchError: leaves are missing or left over; all paths are listed.
      TypeError: there is no state.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> graphdef, state = nnx.split({"a": nnx.Param(jnp.ones(1)), "b": nnx.Param(jnp.zeros(2))})
      >>> nnx.merge(graphdef, jax.tree.leaves(state))["b"].value.tolist()
      [0.0, 0.0]
    """
    if isinstance(graphdef_or_graphstate, GraphState):
        states = (graphdef_or_graphstate, *states)
        graphdef = _common_graphdef(states)
        states = tuple(s._state if isinstance(s, GraphState) else s for s in states)
    else:
        graphdef = graphdef_or_graphstate
    if not isinstance(graphdef, GraphDef):
        raise TypeError(
            f"merge takes a GraphDef first, but got {type(graphdef).__name__}.\n"
            "Fix: graphdef, state = nnx.split(model); nnx.merge(graphdef, state)."
        )
    if not states:
        raise TypeError(
            "merge() missing 1 required positional argument: 'state'.\n"
            "Fix: nnx.merge(graphdef, state) with what nnx.split gave; an empty dict if there is "
            "nothing in the state."
        )
    make = variable_maker(copy, recreate_variables)
    states = _by_name(graphdef, states)
    merged = merge_states(states)
    if len(states) > 1:
        _refuse_twice(states, merged)
    return Build(make).unflatten(graphdef.definition, merged)


def _refuse_twice(states: tuple[Any, ...], merged: Any) -> None:
    """Raises if several states have a value for the same path: all but the last would be lost."""
    if sum(_leaf_count(plain_mapping(state)) for state in states) == _leaf_count(merged):
        return
    paths = [path for state in states for path, _ in iter_flat(plain_mapping(state))]
    twice = [path for path, times in collections.Counter(paths).items() if times > 1]
    raise StateMismatchError(
        "merge got several values for "
        f"{name_some(map(path_string, twice), 5, ' and others') or 'one path'}.\n"
        "Fix: pass each part of the state once; nnx.merge_state(first, second) takes the later one."
    )


def _leaf_count(mapping: Any) -> int:
    return sum(map(_leaf_count, mapping.values())) if type(mapping) is dict else 1


def _by_name(graphdef: GraphDef, states: tuple[Any, ...]) -> tuple[Any, ...]:
    """The states as they are, or the nested state of a flat list of leaves."""
    if not any(isinstance(state, list) for state in states):
        return states
    if len(states) != 1:
        raise StateMismatchError(
            f"Only one state can be passed as a list, but merge got {len(states)} states.\n"
            "Fix: put all leaves in one list, in the order of jax.tree.leaves of the whole state."
        )
    return (nested_leaves(graphdef, states[0]),)


@overload
def state(node: Any, filter: Filter = ..., /, *, graph: bool | None = None) -> State: ...
@overload
def state(node: Any, first: Filter, second: Filter, /, *filters: Filter, graph: bool | None = None) -> tuple[State, State, *tuple[State, ...]]: ...  # fmt: skip # noqa: E501
def state(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """The Variables of an object, or those that filters select.

    Args:
      node: a module, or any pytree of modules and Variables.
      *filters: one state for each; what none selects is left out.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      A state, or a tuple of states for several filters. It holds the object's own Variables.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> list(nnx.state(model)), list(nnx.state(model, nnx.Param))
      (['bias', 'mean', 'scale', 'var'], ['bias', 'scale'])
    """
    _, mapping = flatten_node(node, graph, "state")
    return one_or_all(divide(mapping, filters, exhaustive=False))


variables = state


def graphdef(node: N, /, *, graph: bool | None = None) -> GraphDef[N]:
    """The structure of an object.

    Args:
      node: a module, or any pytree of modules and Variables.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      The GraphDef that ``split`` would give.

    Example:
      >>> from linnet import nnx
      >>> nnx.graphdef({"a": nnx.Param(1.0)}) == nnx.graphdef({"a": nnx.Param(2.0)})
      True
    """
    return flatten_node(node, graph, "graphdef")[0]


def clone(node: N, variables: bool = True, *, arrays: bool = False, graph: bool | None = None) -> N:
    """A copy of an object, a state, or any pytree of them; what is shared inside stays shared.

    Args:
      node: what to copy.
      variables: copy the Variables too; otherwise the copy shares them with the original.
      arrays: copy the arrays as well, so that one of the two may be donated.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      The copy. Its Variables belong to the running trace.

    Example:
      >>> from linnet import nnx
      >>> state = nnx.State({"w": nnx.Param(1.0)})
      >>> nnx.clone(state)["w"] is state["w"]
      False
    """
    graphdef, mapping = flatten_node(node, graph, "clone")
    make = copy_variable if variables else use_variable
    if arrays:
        make = _copy_with_arrays
        mapping = _copy_leaves(mapping)
    return Build(make).unflatten(graphdef.definition, mapping)


def _copy_leaves(leaf: Any) -> Any:
    if type(leaf) is dict:
        return {key: _copy_leaves(item) for key, item in leaf.items()}
    return copy_array(leaf)


def _copy_with_arrays(leaf: Any, cls: type, metadata: Any) -> Any:
    if not isinstance(leaf, Variable):
        return copy_variable(leaf, cls, metadata)
    return leaf.copy(jax.tree_util.tree_map(copy_array, stored_value(leaf)))


class GraphState(MutableMapping[Any, Any], Representable):
    """A state together with its graphdef, so that ``merge`` needs no other argument.

    Args:
      _graphdef: the structure.
      _state: the state, whole or one part of it.

    Example:
      >>> from linnet import nnx
      >>> graph_state = nnx.unpack({"w": nnx.Param(1.0)})
      >>> type(graph_state).__name__, graph_state["w"].value
      ('GraphState', 1.0)
    """

    __slots__ = ("__weakref__", "_graphdef", "_state")

    def __class_getitem__(cls, _: Any) -> type[Self]:
        # For annotations such as GraphState[str, Any]; the parameters mean nothing at run time.
        return cls

    def __init__(self, _graphdef: GraphDef, _state: Any):
        object.__setattr__(self, "_graphdef", _graphdef)
        object.__setattr__(self, "_state", _state)

    def __getitem__(self, key: Any) -> Any:
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __reduce__(self) -> Any:
        return (GraphState, (self._graphdef, self._state))

    def _printed_form(self) -> PrintedForm:
        items = [("_graphdef=", self._graphdef), ("_state=", self._state)]
        return PrintedForm("GraphState(", items, ")")


def _flatten_graph_state(graph_state: GraphState) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of the state itself, so that paths are those of the state."""
    state = graph_state._state
    children, structure = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: x is not state
    )
    items = [(path[0] if path else GetAttrKey("_state"), child) for path, child in children]
    return items, (graph_state._graphdef, structure)


def _unflatten_graph_state(aux: Any, children: Any) -> GraphState:
    graphdef, structure = aux
    return GraphState(graphdef, structure.unflatten(children))


register_pytree_with_keys(GraphState, _flatten_graph_state, _unflatten_graph_state)


def unpack(node: Any, *filters: Filter, graph: bool | None = None) -> Any:
    """Takes an object apart into states that carry the structure with them.

    Args:
      node: a module, or any pytree of modules and Variables.
      *filters: one ``GraphState`` for each; together they must cover all Variables.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      A ``GraphState``, or a tuple of them for several filters; ``merge(*graph_states)`` is the way
      back.

    Example:
      >>> from linnet import nnx
      >>> params, others = nnx.unpack({"w": nnx.Param(1.0), "n": nnx.Cache(2)}, nnx.Param, ...)
      >>> nnx.merge(params, others)["n"].value
      2
    """
    graphdef, *states = split(node, *filters, graph=graph)
    return one_or_all(tuple(GraphState(graphdef, part) for part in states))


def _common_graphdef(states: tuple[Any, ...]) -> GraphDef:
    graphdefs = [state._graphdef for state in states if isinstance(state, GraphState)]
    if any(other != graphdefs[0] for other in graphdefs[1:]):
        raise StateMismatchError(
            "merge got GraphStates with different graphdefs, so of different objects.\n"
            "Fix: merge the parts that one nnx.unpack gave."
        )
    return graphdefs[0]
