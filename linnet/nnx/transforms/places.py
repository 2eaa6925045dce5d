"""What stands, at the end of a run, where a Variable or array of the arguments stood before."""

from __future__ import annotations

from typing import Any

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
from linnet.nnx.transforms.lift import Inside
from linnet.nnx.transforms.slots import Slots

MISSING = object()


class Places:
    """The places of the slots of one run.

    Args:
      slots: the slots of the call.
      inside: the objects of the run.
    """

    def __init__(self, slots: Slots, inside: Inside):
        self._paths = slots.paths
        self._roots = list(zip(slots.node_paths, inside.nodes, strict=True))

    def _way_to(self, number: int) -> tuple[Any, tuple[Any, ...]]:
        path = self._paths[number]
        prefix, node = next((p, node) for p, node in self._roots if path[: len(p)] == p)
        return node, path[len(prefix) :]

    def found(self, number: int) -> Any:
        """What stands in the place of a slot, ``MISSING`` if there is no such place any more."""
        thing, path = self._way_to(number)
        for name in path:
            thing = _child(thing, name)
        return thing

    def put(self, number: int, thing: Any) -> None:
        """Puts something in the place of a slot, where something stands."""
        _with_thing(*self._way_to(number), thing)


def _child(holder: Any, name: Any) -> Any:
    kind = kind_of(holder)
    if kind in (STATIC, VARIABLE, ARRAY):
        return MISSING
    if kind == METHOD:
        return getattr(holder, name, MISSING)
    items = holder._pytree_items() if kind == OBJECT else dict(container_items(holder, kind))
    return items.get(name, MISSING)


def _with_thing(holder: Any, path: tuple[Any, ...], thing: Any) -> Any:
    """The holder itself with something else at a path, or a copy of one that cannot change."""
    if not path:
        return thing
    name, child = path[0], _child(holder, path[0])
    changed = _with_thing(child, path[1:], thing)
    if changed is child:
        return holder
    kind = kind_of(holder)
    if kind == OBJECT:
        holder._pytree_restore({**holder._pytree_items(), name: changed})
        return holder
    if kind in (LIST, DICT):
        holder[name] = changed
        return holder
    if kind == PYTREE:
        items, treedef = one_level(holder)
        return treedef.unflatten([changed if key == name else item for key, item in items])
    items = {**dict(container_items(holder, kind)), name: changed}
    is_named = hasattr(holder, "_fields")
    return type(holder)(**items) if is_named else type(holder)(items.values())
