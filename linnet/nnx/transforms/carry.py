"""Checks of what a loop carries from step to step, and of what stays the same in every step.

The carry must come back with the objects, structure, shapes and dtypes that it went in with.
``BroadcastSlots`` undoes what a step of ``nnx.scan`` writes to slots with axis None.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_static

from linnet.errors import CarryError, DroppedWriteWarning, name_some, path_string, type_text
from linnet.nnx.pytreelib import locate
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    OBJECT,
    VARIABLE,
    Path,
    child_at,
    is_node,
    key_name,
    kind_of,
    with_elements,
)
from linnet.nnx.rnglib.streams import RngState
from linnet.nnx.transforms.axes import Carry, is_prefix_leaf
from linnet.nnx.transforms.engine import Inside, leaves_with_paths, open_tree
from linnet.nnx.transforms.run import Call
from linnet.nnx.variablelib.storage import from_refs


@register_static
@dataclasses.dataclass(frozen=True)
class Same:
    """Stands for an object of the carry, by its number there, in the output of a step."""

    number: int


def marked(prefix: Any, tree: Any) -> list[tuple[Path, Any]]:
    """The parts of a tree that a prefix marks with ``nnx.Carry``, with their paths."""
    found: list[tuple[Path, Any]] = []

    def visit(path: Any, mark: Any, part: Any) -> None:
        if mark is Carry:
            found.append((tuple(key_name(key) for key in path), part))

    jax.tree_util.tree_map_with_path(visit, prefix, tree, is_leaf=is_prefix_leaf)
    return found


def handed_on(call: Call, path: Path, before: Any, after: Any) -> Any:
    """The carry at ``path`` after a step, with a ``Same`` in place of each object.

    Raises ``CarryError`` if its structure differs, or an object is not the one that came in.
    """
    new, new_tree = jax.tree_util.tree_flatten(after, is_leaf=is_node)
    if new_tree != _form(before):
        raise _structure_error(call.api, call.where, path, before, after)
    numbers = itertools.count()
    out = []
    for (inner, came), goes in zip(leaves_with_paths(before), new, strict=True):
        is_object = is_node(came) or is_node(goes)
        if is_object and goes is not came:
            raise CarryError(
                f"nnx.{call.api}: the step returns another {type(goes).__name__} than the "
                f"{type(came).__name__} that came in at {call.where((*path, *inner))}.\n"
                "Fix: change the object in place and return it; a carry keeps its identity."
            )
        out.append(Same(next(numbers)) if is_object else goes)
    return new_tree.unflatten(out)


def refuse_rebuilding(call: Call, inside: Inside, within: Iterable[Path] = ((),)) -> None:
    """Raises if a step changed the structure ``within`` these arguments, unless that goes out."""
    if call.brings_structure_out:
        return
    paths = [path[1:] for path in call.opened.node_paths]
    carried = [any(path[: len(place)] == place for place in within) for path in paths]
    before, after = (
        open_tree(list(itertools.compress(nodes, carried)), True, call.api).structure
        for nodes in (call.opened.nodes, inside.nodes)
    )
    if before != after:
        found = call.difference(open_tree(inside.tree, True, call.api).structure)
        raise CarryError(
            f"nnx.{call.api}: a step changes the structure of what is carried: {found}.\n"
            "Fix: change only the values of Variables in the loop; make other changes before it or "
            "after it."
        )


def take_places(call: Call, inside: Inside, numbers: Iterable[int]) -> None:
    """Puts a carried Variable back where a step put a new one of its type, with the new value.

    Raises ``CarryError`` for anything else in its place.
    """
    taken = {}
    here = {number: _current(call, inside, number) for number in numbers}
    carried = {id(inside.variables[number]) for number in here}
    fixed = {id(variable) for variable in inside.variables} - carried
    met = Counter(map(id, here.values()))
    for number, current in here.items():
        came = inside.variables[number]
        if current is came or kind_of(current) not in (VARIABLE, ARRAY):
            continue
        if kind_of(current) == VARIABLE and (met[id(current)] > 1 or id(current) in fixed):
            raise CarryError(
                f"nnx.{call.api}: the step puts a {type(current).__name__} that stands elsewhere "
                f"too in the place of the {type(came).__name__} at {call.slot_name(number)}, which "
                "is carried.\nFix: copy the value, or share the Variable before the loop."
            )
        if type(current) is not type(came) or not call.updates:
            replacement = (
                "plain array" if kind_of(current) == ARRAY else f"new {type(current).__name__}"
            )
            where = call.slot_name(number)
            raise CarryError(
                f"nnx.{call.api}: the step puts a {replacement} in the place of the "
                f"{type(came).__name__} at {where}, which is carried.\n"
                f"Fix: write to the Variable that is there, {where}[...] = value."
            )
        taken[number] = from_refs(current._raw)
    for number, value in taken.items():
        variable = inside.variables[number]
        _with_value_at(*_way_to(call, inside, number), variable)
        variable._cell.value = value


def take_arrays(call: Call, inside: Inside, numbers: Iterable[int]) -> None:
    """Sets ``inside.arrays_after`` to what carried slots hold now; raises if that is no array.

    With graph updates ``leave`` does that.
    """
    if call.updates:
        return
    after = list(inside.arrays)
    for number in numbers:
        current = _current(call, inside, number)
        if kind_of(current) != ARRAY:
            raise CarryError(
                f"nnx.{call.api}: the step leaves no array at {call.slot_name(number)}, which is "
                "carried.\nFix: keep an array of the same shape and dtype there."
            )
        after[number - call.variable_count] = current
    inside.arrays_after = after


def restore(out: Any, carry: Any) -> Any:
    """The output with the objects of the carry in place of each ``Same``."""
    objects = [x for x in jax.tree_util.tree_leaves(carry, is_leaf=is_node) if is_node(x)]
    stops = lambda x: isinstance(x, Same) or is_node(x)  # noqa: E731
    return jax.tree_util.tree_map(
        lambda x: objects[x.number] if isinstance(x, Same) else x, out, is_leaf=stops
    )


def _structure_error(
    api: str, where: Callable[[Path], str], path: Path, before: Any, after: Any
) -> CarryError:
    """An error that names the innermost place where two trees differ."""
    while True:
        old, old_tree = _children_with_keys(before)
        new, new_tree = _children_with_keys(after)
        if old_tree != new_tree:
            break
        pairs = zip(old, new, strict=True)
        (key, before), (_, after) = next(p for p in pairs if _form(p[0][1]) != _form(p[1][1]))
        path = (*path, *(key_name(k) for k in key))
    return CarryError(
        f"nnx.{api}: the carry {where(path)} changes its structure from {_form(before)} to "
        f"{_form(after)}.\nFix: return the carry in the form in which it came in."
    )


def _form(tree: Any) -> Any:
    return jax.tree_util.tree_structure(tree, is_leaf=is_node)


def _children_with_keys(tree: Any) -> Any:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree or is_node(x))


def check_same_type(before: Any, after: Any, where: str, api: str) -> None:
    """Raises if something that is carried has another structure, shape or dtype after a step."""
    old, old_tree = jax.tree_util.tree_flatten_with_path(before)
    new, new_tree = jax.tree_util.tree_flatten(after)
    if old_tree != new_tree:
        place = lambda path: where + path_string(path)  # noqa: E731
        raise _structure_error(api, place, (), before, after)
    for (path, came), goes in zip(old, new, strict=True):
        if not _fits(came, goes):
            place = where + path_string(key_name(key) for key in path)
            raise CarryError(
                f"nnx.{api}: the carry {place} changes from {_text(came)} to {_text(goes)}.\n"
                "Fix: keep shape and dtype, for example with .astype(...)."
            )


def _fits(came: Any, goes: Any) -> bool:
    if jnp.shape(came) != jnp.shape(goes):
        return False
    before, after = jnp.result_type(came), jnp.result_type(goes)
    # JAX starts a weakly typed carry in the type that the first step gives it.
    is_weak = not hasattr(came, "dtype") or getattr(came, "weak_type", False)
    return before == after or (is_weak and jnp.result_type(came, goes) == after)


def _text(x: Any) -> str:
    return type_text(x if hasattr(x, "dtype") else jnp.asarray(x))


class BroadcastSlots:
    """The slots of one scan that are the same in every step."""

    def __init__(self, call: Call, numbers: list[int]):
        self._call = call
        self._numbers = numbers
        self._dropped: set[int] = set()

    def put_back(self, inside: Inside) -> None:
        """Undoes what a step did to them."""
        leaves = [*inside.variables, *inside.arrays]
        for number in self._numbers:
            current, leaf = _current(self._call, inside, number), leaves[number]
            replaced = current is not leaf and kind_of(current) in (VARIABLE, ARRAY)
            if replaced:
                _with_value_at(*_way_to(self._call, inside, number), leaf)
            is_variable = number < self._call.variable_count
            written = is_variable and _restore_variable(inside, number)
            if replaced or written:
                self._dropped.add(number)

    def warn(self, already_warned: set[str]) -> None:
        """Warns of the slots that steps wrote to, and enters them in ``already_warned``."""
        call = self._call
        new = [
            number
            for number in sorted(self._dropped)
            if call.slot_name(number) not in already_warned
        ]
        if not new:
            return
        names = [call.slot_name(number) for number in new]
        variables = call.opened.variables
        streams = any(isinstance(variables[n], RngState) for n in new if n < call.variable_count)
        keys = ", so that random streams give each step the same keys" if streams else ""
        warnings.warn(
            f"nnx.scan drops what its function writes to {name_some(names)}: with axis None every "
            f"step begins with the values from before the scan{keys}, and these are left after "
            "it. To hand writes from step to step give nnx.Carry instead, for an object "
            "nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}).",
            DroppedWriteWarning,
            stacklevel=locate.outer_level(),
        )
        already_warned.update(names)


def _restore_variable(inside: Inside, number: int) -> bool:
    """Resets the value and metadata of a Variable; returns whether they had changed."""
    variable = inside.variables[number]
    metadata = inside.structure.variable_definitions[number].static
    if not inside.is_changed(number) and variable._metadata == metadata:
        return False
    inside.put_back(number)
    object.__setattr__(variable, "_metadata", metadata)
    return True


_MISSING = object()


def _way_to(call: Call, inside: Inside, number: int) -> tuple[Any, Path]:
    """The object inside a run that a slot is in, and the path from there."""
    owner, path = call.opened.slot_owners[number]
    return inside.leaves[owner], path[len(call.opened.leaf_paths[owner]) :]


def _current(call: Call, inside: Inside, number: int) -> Any:
    """What is in the place of a slot now; ``_MISSING`` if there is no such place any more."""
    root, path = _way_to(call, inside, number)
    return functools.reduce(lambda holder, name: child_at(holder, name, _MISSING), path, root)


def _with_value_at(holder: Any, path: Path, value: Any) -> Any:
    """Puts something at a path in the holder, or in a copy of a holder that cannot change."""
    if not path:
        return value
    name, child = path[0], child_at(holder, path[0], _MISSING)
    changed = _with_value_at(child, path[1:], value)
    if changed is child:
        return holder
    kind = kind_of(holder)
    if kind == OBJECT:
        holder._pytree_restore({**holder._pytree_items(), name: changed})
        return holder
    if kind in (LIST, DICT):
        holder[name] = changed
        return holder
    return with_elements(holder, kind, {name: changed})
