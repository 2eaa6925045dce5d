"""The states of equal layers: stacked, taken apart again, and compared."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from linnet.errors import StateMismatchError, misfit_text, path_string, type_text
from linnet.nnx.graphlib import state
from linnet.nnx.statelib import State, from_flat_state, to_flat_state
from linnet.nnx.transforms.partition import ANY_NAME, add_name, remove_name
from linnet.nnx.variablelib.variable import Variable, stored_value


def name_of_layers(partition: str | None) -> Any:
    """The name that the layers' axis must have in the metadata of every Variable."""
    return ANY_NAME if partition is None else partition


def leaves_of(layer: Any) -> dict[Any, Any]:
    """The Variables and arrays of a layer by path."""
    return dict(to_flat_state(state(layer, graph=True)))


def values_of(layer: Any) -> dict[Any, Any]:
    """The stored values of the Variables and arrays of a layer by path."""
    return {path: stored_value(leaf) for path, leaf in leaves_of(layer).items()}


def first_axis(x: Any) -> tuple[Any, Any]:
    """The size of the first axis, and the explicit mesh axes that it is sharded along, or None."""
    if not jnp.shape(x):
        return None, None
    is_shape = isinstance(x, jax.ShapeDtypeStruct)
    return x.shape[0], None if is_shape else jax.typeof(x).sharding.spec[0]


def same_arrays(one: Any, other: Any) -> bool:
    """Whether two pytrees hold the same arrays, by identity."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def differ(one: Any, other: Any, when_traced: bool, index: Any = ...) -> bool:
    """Whether two pytrees hold different numbers; ``when_traced`` where that cannot be known."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    if [*map(jnp.shape, leaves)] != [*map(jnp.shape, others)]:
        return True
    if any(isinstance(x, Tracer) for x in (*leaves, *others)):
        return when_traced
    return not all(_equal(x[index], y[index]) for x, y in zip(leaves, others, strict=True))


def _equal(x: Any, y: Any) -> bool:
    both_nan = (x != x) & (y != y)
    return bool(jnp.all((x == y) | both_nan))


def is_read_anew(leaf: Any) -> bool:
    """Whether each read gives a new array, as of a Variable that is stored as refs."""
    return isinstance(leaf, Variable) and not same_arrays(leaf.raw_value, stored_value(leaf))


def changed_paths(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    """Where the values of two layers are not the same arrays."""

    def changed(path: Any) -> bool:
        old, new = stored_value(before[path]), stored_value(after[path])
        if is_read_anew(after[path]):
            return differ(old, new, when_traced=True)
        return not same_arrays(old, new)

    return [path for path in before if path not in after or changed(path)]


def map_leaf(f: Callable[..., Any], *leaves: Any) -> Any:
    """Maps the arrays of leaves at one path; the leaf stays a Variable if it is one."""
    value = jax.tree.map(f, *map(stored_value, leaves))
    return leaves[0].copy(value) if isinstance(leaves[0], Variable) else value


def state_at(whole: Any, position: int, partition: str | None) -> State:
    """The state of one layer out of the state of a stack."""

    def take(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return x[position]

    found = {path: map_leaf(take, leaf) for path, leaf in to_flat_state(whole)}
    for path, leaf in found.items():
        if isinstance(leaf, Variable):
            remove_name(leaf, 0, name_of_layers(partition), path_string(path))
    return from_flat_state(found)


def stack_states(states: list[Any], partition: str | None) -> State:
    """Stacks the states of layers, which must have the same paths, shapes and dtypes."""

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
    return ", ".join(map(type_text, jax.tree.leaves(stored_value(leaf))))


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
        what = "Only equal layers can be stacked, but these differ"
        fix = "restore them into an nnx.List."
        raise StateMismatchError(misfit_text({what: found}, fix=fix))
