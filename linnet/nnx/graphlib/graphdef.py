"""GraphDef: the structure of an object, hashable and comparable, and calling a method on a state.

Also here: the two switches of the object model, ``set_graph_mode`` and ``set_graph_updates``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import jax

from linnet.config import Setting
from linnet.errors import StateMismatchError, list_paths
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.walk import Definition, Walk
from linnet.nnx.pytreelib.attributes import StaticPart
from linnet.nnx.pytreelib.kinds import ARRAY, METHOD, REFERENCE, STATIC, VARIABLE
from linnet.nnx.pytreelib.printing import PrintedForm, Representable
from linnet.nnx.statelib import FlatState, State, as_state, from_flat_state, merge_states

Node = TypeVar("Node")


class set_graph_mode(Setting, switch="nnx_graph_mode"):
    """Whether shared references and cycles are allowed (graph mode) or refused (tree mode).

    Args:
      value: True for graph mode, which is the default.

    Returns:
      A context manager and decorator, which takes the value back; without a block it stays.

    Example:
      >>> from linnet import nnx
      >>> shared = nnx.Param(1.0)
      >>> list(nnx.state([shared, shared]))
      [0]
      >>> with nnx.set_graph_mode(False):
      ...     nnx.state([shared, shared])
      Traceback (most recent call last):
      linnet.errors.SharedReferenceError: ...
    """


class set_graph_updates(Setting, switch="nnx_graph_updates"):
    """Whether transforms carry changed structure and static values out, beside values.

    In tree mode they do not.

    Args:
      value: True, which is the default, or False.

    Returns:
      A context manager and decorator, which takes the value back; without a block it stays.

    Example:
      >>> from linnet import nnx
      >>> def count(module):
      ...     module.calls += 1
      >>> module = nnx.Dict(calls=0, w=nnx.Param(1.0))
      >>> nnx.jit(count)(module)
      >>> module.calls
      1
      >>> with nnx.set_graph_updates(False):
      ...     nnx.jit(count)(module)
      >>> module.calls
      1
    """


def graph_mode(graph: bool | None) -> bool:
    """An explicit choice, or else the ambient one."""
    return set_graph_mode.context.value if graph is None else graph


def graph_modes(graph: bool | None, updates: bool | None) -> tuple[bool, bool]:
    """Graph mode and graph updates: explicit choices, or else the ambient ones.

    In tree mode there are no graph updates.
    """
    mode = set_graph_mode.context.value if graph is None else graph
    return mode, mode and (set_graph_updates.context.value if updates is None else updates)


class GraphDef(Representable, Generic[Node]):
    """The structure of an object: its classes, static attributes, types of Variables, sharing.

    It is hashable and comparable, a static argument to any JAX transform, and a pytree without
    leaves, so that it may also be passed like any other argument. In annotations
    ``nnx.GraphDef[Net]`` is the structure of a ``Net``. Programs get one from ``nnx.split``.

    Args:
      nodes: the definition that a walk gave. Flax names the argument so; the property ``nodes``
        lists what is in it.
      attributes, num_leaves: accepted because Flax takes them, and not used: both follow from the
        definition.
      first: the number of its first object, where several are numbered together.
      outer_index: the numbers of the objects outside of a transform that it is tied to.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Scale(nnx.Module):
      ...     def __init__(self, size):
      ...         self.size, self.factor = size, nnx.Param(jnp.full(size, 2.0))
      ...     def __call__(self, x):
      ...         return x * self.factor
      >>> graphdef, state = nnx.split(Scale(2))
      >>> graphdef == nnx.graphdef(Scale(2)), graphdef == nnx.graphdef(Scale(3))
      (True, False)
      >>> y, (graphdef, state) = graphdef.apply(state)(jnp.ones(2))
      >>> y.tolist()
      [2.0, 2.0]
    """

    __slots__ = ("__weakref__", "_hash", "definition", "first", "outer_index")

    def __init__(
        self,
        nodes: Definition,
        attributes: Any = None,
        num_leaves: int | None = None,
        *,
        first: int = 0,
        outer_index: tuple[int | None, ...] | None = None,
    ):
        self.definition = nodes
        self.first = first
        self.outer_index = outer_index
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is GraphDef
            and hash(self) == hash(other)
            and self.first == other.first
            and self.outer_index == other.outer_index
            and self.definition == other.definition
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.definition, self.first, self.outer_index))
        return self._hash

    @property
    def nodes(self) -> list[NodeDef]:
        """Every object, Variable, container and reference in the order of the walk."""
        return list(_nodes(self.definition, itertools.count(self.first)))

    @property
    def attributes(self) -> list[tuple[Any, str]]:
        """Every attribute in the order of the walk, with what it is."""
        return list(_attributes(self.definition))

    @property
    def num_leaves(self) -> int:
        """How many leaves the state has."""
        return sum(1 for _ in self.definition.leaves())

    def with_no_outer_index(self) -> GraphDef:
        """The same structure, without the tie to objects outside of a transform."""
        return GraphDef(self.definition, first=self.first)

    def with_same_outer_index(self) -> GraphDef:
        """A copy with ``outer_index=(0, 1, ...)``: each object is tied to its own number."""
        size = len(self.nodes)
        return GraphDef(self.definition, first=self.first, outer_index=tuple(range(size)))

    def with_matching_outer_index(self, other: GraphDef) -> GraphDef:
        """The same structure, tied to the objects that ``other`` is tied to."""
        return GraphDef(self.definition, first=self.first, outer_index=other.outer_index)

    def apply(self, state: Any, *states: Any, graph: bool | None = None) -> MethodCaller:
        """Calls a method on the object that these states make.

        Args:
          state: a state, as ``split`` gave it.
          *states: more of them.
          graph: graph or tree mode for taking the object apart again.

        Returns:
          A proxy: call it, or a method of it, to get ``(output, (graphdef, state))``.
        """
        return MethodCaller(self, (state, *states), graph)

    def _printed_form(self) -> PrintedForm:
        printed = _Printed(self.definition, itertools.count(self.first))
        return PrintedForm("GraphDef(", [("", printed)], ")")

    def __reduce__(self) -> Any:
        return (_restore, (self.definition, self.first, self.outer_index))


@dataclasses.dataclass(frozen=True)
class NodeDef:
    """One line of ``GraphDef.nodes``."""

    type: str
    index: int | None


def _restore(definition: Definition, first: int, outer_index: Any) -> GraphDef:
    return GraphDef(definition, first=first, outer_index=outer_index)


jax.tree_util.register_static(GraphDef)

PureState = tuple[GraphDef[Node], State]  # what split gives, for annotations: PureState[Net]


def _nodes(definition: Definition, counter: Iterator[int]) -> Iterator[NodeDef]:
    for _, part in definition.parts():
        if part.kind == REFERENCE:
            yield NodeDef("NodeRef", part.payload)
        elif part.kind not in (ARRAY, STATIC):
            yield NodeDef(part.text, next(counter) if part.is_numbered else None)


def _attributes(definition: Definition) -> Iterator[tuple[Any, str]]:
    for name, child in definition.items():
        yield name, "leaf" if child.kind == ARRAY else "node"
        yield from _attributes(child)
    if isinstance(definition.static, StaticPart):
        for name in definition.static.names:
            yield name, "static"


class _Printed(Representable):
    """Prints one definition; ``counter`` numbers what has an identity."""

    def __init__(self, definition: Definition, counter: Iterator[int]):
        self.definition = definition
        self.counter = counter

    def _printed_form(self) -> PrintedForm:
        definition = self.definition
        kind = definition.kind
        if kind == ARRAY:
            return PrintedForm("Array", (), "")
        if kind == REFERENCE:
            return PrintedForm(f"<the same as number {definition.payload}>", (), "")
        if kind in (STATIC, METHOD):
            return PrintedForm(repr(definition.payload.value), (), "")
        comment = f"number {next(self.counter)}" if definition.is_numbered else ""
        items: list[Any]
        if kind == VARIABLE:
            items = [(f"{key}=", value) for key, value in definition.static.shown().items()]
        else:
            items = [
                (f"{key}=", _Printed(child, self.counter)) for key, child in definition.items()
            ]
            items += [(f"{key}=", value) for key, value in definition.static.template.items()]
        return PrintedForm(f"{definition.text}(", items, ")", comment)


def flatten_node(node: Any, graph: bool | None, api: str) -> tuple[GraphDef, Any]:
    """The GraphDef of ``node`` and its leaves as nested dicts."""
    definition, mapping = Walk(graph_mode(graph), api).flatten(node)
    return GraphDef(definition), mapping


def nested_leaves(graphdef: GraphDef, leaves: Sequence[Any]) -> Any:
    """The nested state built from a flat list of leaves in key order."""
    paths = FlatState((path, None) for path, _ in graphdef.definition.leaves()).paths
    if len(paths) != len(leaves):
        raise StateMismatchError(
            f"Incorrect number of leaves, expected {len(paths)} leaves, but got {len(leaves)}. "
            f"Expected in this order:\n{list_paths(paths)}\n"
            "Fix: pass jax.tree.leaves(state), with one leaf for each Variable; where Variables "
            "hold pytrees, pass the state itself."
        )
    return from_flat_state(zip(paths, leaves, strict=True))


class MethodCaller:
    """Calls a method of an object that exists only as a graphdef and its states.

    Attribute access and indexing lead to sub-objects; calling runs the method there and returns
    ``(output, (graphdef, state))``, the object taken apart again.
    """

    def __init__(
        self,
        graphdef: GraphDef,
        states: tuple[Any, ...],
        graph: bool | None = None,
        steps: tuple[Any, ...] = (),
    ):
        self._parts = (graphdef, states, graph, steps)

    def _step(self, step: Any) -> MethodCaller:
        graphdef, states, graph, steps = self._parts
        return MethodCaller(graphdef, states, graph, (*steps, step))

    def __getattr__(self, name: str) -> MethodCaller:
        return self._step((getattr, name))

    def __getitem__(self, key: Any) -> MethodCaller:
        return self._step((lambda obj, k: obj[k], key))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[GraphDef, Any]]:
        graphdef, states, graph, steps = self._parts
        root = Build().unflatten(graphdef.definition, merge_states(states))
        target = root
        for access, key in steps:
            target = access(target, key)
        output = target(*args, **kwargs)
        new_graphdef, mapping = flatten_node(root, graph, "call")
        return output, (new_graphdef, as_state(mapping))


def call(graphdef_state: tuple[GraphDef, Any], /) -> MethodCaller:
    """Calls a method on an object that was split.

    Args:
      graphdef_state: the pair that ``split`` gave.

    Returns:
      A proxy: ``call(pair).method(...)`` returns ``(output, (graphdef, state))``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> parts = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> y, (graphdef, state) = nnx.call(parts)(jnp.ones((1, 2)))
      >>> y.shape
      (1, 3)
    """
    graphdef, *states = graphdef_state
    return graphdef.apply(*states)
