"""The states of equal layers, stacked into one and taken apart again."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import LayerArgumentError, StateMismatchError, list_lines, path_string
from linnet.nnx.graphlib import clone, find_duplicates, state
from linnet.nnx.statelib import State, from_flat_state, to_flat_state
from linnet.nnx.transforms.partition import add_name, remove_name
from linnet.nnx.transforms.retrace import differences
from linnet.nnx.variablelib.storage import from_refs
from linnet.nnx.variablelib.variable import Variable, type_text


def value_in(leaf: Any) -> Any:
    """What a leaf of a state holds: the value of a Variable, without hooks, or an array."""
    return from_refs(leaf.raw_value) if isinstance(leaf, Variable) else leaf


def values_of(layer: Any) -> list[Any]:
    """The values of all leaves of a layer's state."""
    return [value_in(leaf) for _, leaf in to_flat_state(state(layer, graph=True))]


def same(one: Any, other: Any) -> bool:
    """Whether two pytrees hold the same arrays, by identity."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def map_leaf(f: Callable[..., Any], *leaves: Any) -> Any:
    """``f`` of the arrays that leaves of states hold; a Variable gives a Variable."""
    value = jax.tree.map(f, *map(value_in, leaves))
    return leaves[0].copy(value) if isinstance(leaves[0], Variable) else value


def state_at(whole: Any, position: int, partition: str | None) -> State:
    """The state of one layer."""

    def take(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return x[position]

    found = {path: map_leaf(take, leaf) for path, leaf in to_flat_state(whole)}
    for path, leaf in found.items():
        if isinstance(leaf, Variable):
            remove_name(leaf, 0, partition, path_string(path))
    return from_flat_state(found)


def stack_states(states: list[Any], partition: str | None) -> State:
    """The states of layers as one.

    Raises:
      StateMismatchError: they do not have the same paths, shapes and dtypes.
    """

    def join(*xs: Any) -> Any:
        if isinstance(xs[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(xs), *xs[0].shape), xs[0].dtype)
        return jnp.stack(xs)

    flat = [dict(to_flat_state(one)) for one in states]
    _check_alike([{path: _text(leaf) for path, leaf in one.items()} for one in flat])
    found = {path: map_leaf(join, *(one[path] for one in flat)) for path in flat[0]}
    for leaf in found.values():
        if isinstance(leaf, Variable):
            add_name(leaf, 0, partition)
    return from_flat_state(found)


def _text(leaf: Any) -> str:
    return ", ".join(map(type_text, jax.tree.leaves(value_in(leaf))))


def _check_alike(layers: list[dict[Any, str]]) -> None:
    first = layers[0]
    found = [
        f"{path_string((number, *path))}: {one.get(path, 'nothing')}, but "
        f"{path_string((0, *path))}: {first.get(path, 'nothing')}"
        for number, one in enumerate(layers)
        for path in {**first, **one}
        if one.get(path) != first.get(path)
    ]
    if found:
        raise StateMismatchError(
            f"Only equal layers can be stacked, but these differ:\n{list_lines(found)}\n"
            "Fix: restore them into an nnx.List."
        )


def writable_copy(layer: Any) -> Any:
    """A copy of a layer that may itself be a read-only copy out of a stack."""
    copy = clone(layer, graph=True)
    for _, leaf in to_flat_state(state(copy, graph=True)):
        if isinstance(leaf, Variable) and leaf.has_metadata("mutable"):
            leaf.del_metadata("mutable")
    return copy


def equal_copies(layers: list[Any]) -> list[Any]:
    """Copies of layers that are equal but for the values of their Variables and arrays.

    Raises:
      LayerArgumentError: they are not, or share an object or a Variable; the paths are listed.
    """
    for paths in find_duplicates(layers):
        if len({path[0] for path in paths}) > 1:
            places = " and ".join(path_string(path, "layers") for path in paths[:2])
            raise LayerArgumentError(
                f"Stack keeps the Variables of each layer apart, but {places} are the same.\n"
                "Fix: build the layers with Variables and rngs of their own (rngs.fork()), or pass "
                "what they share to the call."
            )
    copies = [writable_copy(layer) for layer in layers]
    found = [
        f"layers[0] and layers[{number}] at {text}".replace(" at :", ":")
        for number, other in enumerate(copies)
        for text in differences(copies[0], other)
    ]
    if found:
        raise LayerArgumentError(
            f"Stack takes equal layers, but these differ:\n{list_lines(found)}\n"
            "Fix: build them with the same arguments, or keep them in an nnx.List."
        )
    return copies


def as_returned(x: Any, types: Any) -> Any:
    """The input in the floating-point types that a layer returns; None if those do not fit."""
    leaves, structure = jax.tree.flatten(x)
    wanted, returned = jax.tree.flatten(types)
    if structure != returned or not all(map(_can_become, leaves, wanted)):
        return None
    pairs = zip(leaves, wanted, strict=True)
    return structure.unflatten([jnp.asarray(a, b.dtype) for a, b in pairs])


def _can_become(leaf: Any, wanted: Any) -> bool:
    dtypes = (jnp.result_type(leaf), wanted.dtype)
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return jnp.shape(leaf) == wanted.shape and (floating or dtypes[0] == dtypes[1])
