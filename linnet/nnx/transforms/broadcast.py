"""What is the same in every step of a scan: it stays as it was, whatever a step writes to it.

A step of ``nnx.scan`` sees its own writes to what has axis ``None``; the next step begins with the
values from before the scan again, and so does the program after it. Each step therefore ends by
putting back the Variables and arrays that it changed or replaced. Static attributes and what a step
adds to an object are no values: they stay.
"""

from __future__ import annotations

import warnings
from typing import Any

from linnet.errors import DroppedWriteWarning, name_some
from linnet.nnx import locate
from linnet.nnx.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    STATIC,
    VARIABLE,
    container_items,
    kind_of,
    one_level,
)
from linnet.nnx.rnglib import RngState
from linnet.nnx.transforms.lift import Inside
from linnet.nnx.transforms.slots import Slots

_MISSING = object()


class Broadcast:
    """The slots of one scan that are the same in every step.

    Args:
      slots: all slots of the call.
      numbers: which of them.
    """

    def __init__(self, slots: Slots, numbers: list[int]):
        self._slots = slots
        self._numbers = numbers
        self._dropped: set[int] = set()

    def put_back(self, inside: Inside) -> None:
        """Undoes what a step did to them."""
        roots = list(zip(self._slots.node_paths, inside.nodes, strict=True))
        leaves = [*inside.variables, *inside.arrays]
        for number in self._numbers:
            path, leaf = self._slots.paths[number], leaves[number]
            prefix, node = next((p, node) for p, node in roots if path[: len(p)] == p)
            replaced = _put_back_at(node, path[len(prefix) :], leaf)[1]
            written = number < self._slots.variables and _restore_variable(inside, number)
            if replaced or written:
                self._dropped.add(number)

    def warn(self, told: set[str]) -> None:
        """Names what the steps wrote to, except what the user was ``told`` before."""
        slots = self._slots
        new = [number for number in sorted(self._dropped) if slots.where(number) not in told]
        if not new:
            return
        names = [slots.where(number) for number in new]
        variables = slots.call.opened.variables
        streams = any(isinstance(variables[n], RngState) for n in new if n < slots.variables)
        keys = ", so that random streams give each step the same keys" if streams else ""
        warnings.warn(
            f"nnx.scan drops what its function writes to {name_some(names)}: with axis None every "
            f"step begins with the values from before the scan{keys}, and these are left after "
            "it. To hand writes from step to step give nnx.Carry instead, for an object "
            "nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}).",
            DroppedWriteWarning,
            stacklevel=locate.outer_level(),
        )
        told.update(names)


def _restore_variable(inside: Inside, number: int) -> bool:
    """Gives a Variable the value and metadata that it came in with; tells if it had others."""
    variable, value = inside.variables[number], inside.values[number]
    metadata = inside.structure.variable_kinds[number].own
    if variable._raw is value and variable._metadata == metadata:
        return False
    object.__setattr__(variable, "_raw", value)
    object.__setattr__(variable, "_metadata", metadata)
    return True


def _put_back_at(holder: Any, path: tuple[Any, ...], leaf: Any) -> tuple[Any, bool]:
    """The holder with ``leaf`` at a path if other data took its place there, and whether it did."""
    if not path:
        other = holder is not leaf and kind_of(holder) in (VARIABLE, ARRAY)
        return (leaf, True) if other else (holder, False)
    child = _child(holder, path[0])
    if child is _MISSING:
        return holder, False
    restored, replaced = _put_back_at(child, path[1:], leaf)
    return (holder if restored is child else _with_child(holder, path[0], restored)), replaced


def _child(holder: Any, name: Any) -> Any:
    kind = kind_of(holder)
    if kind in (STATIC, VARIABLE, ARRAY):
        return _MISSING
    if kind == METHOD:
        return getattr(holder, name, _MISSING)
    items = holder._pytree_items() if kind == OBJECT else dict(container_items(holder, kind))
    return items.get(name, _MISSING)


def _with_child(holder: Any, name: Any, child: Any) -> Any:
    """The holder itself with another child, or a copy of one that cannot change."""
    kind = kind_of(holder)
    if kind == OBJECT:
        holder._pytree_restore({**holder._pytree_items(), name: child})
        return holder
    if kind in (LIST, DICT):
        holder[name] = child
        return holder
    if kind == PYTREE:
        items, treedef = one_level(holder)
        return treedef.unflatten([child if key == name else item for key, item in items])
    items = {**dict(container_items(holder, kind)), name: child}
    is_named = hasattr(holder, "_fields")
    return type(holder)(**items) if is_named else type(holder)(items.values())
