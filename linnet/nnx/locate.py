"""Finds where a Variable or module lives, at the moment an error is raised.

Objects do not know their place in a model. When an error needs it, the frames of the running
program are searched, outermost first, for a name from which the object can be reached.
"""

from __future__ import annotations

import sys
from typing import Any

from linnet.errors import path_string
from linnet.nnx import kinds

_MOST_NODES = 100_000


def path_from(root: Any, target: Any) -> tuple[Any, ...] | None:
    """The path that leads from ``root`` to ``target`` by identity, or None."""
    pending: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_NODES:
        path, value = pending.pop()
        if value is target:
            return path
        kind = kinds.kind_of(value)
        if kind in (kinds.STATIC, kinds.VARIABLE, kinds.ARRAY) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind == kinds.OBJECT:
            items = value._pytree_items().items()
        elif kind == kinds.METHOD:
            items = ()
        else:
            items = kinds.container_items(value, kind)
        pending.extend(((*path, key), child) for key, child in items)
    return None


def describe(target: Any) -> str:
    """``name.of.target`` as the calling program would write it, or an empty string."""
    best = ""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("linnet.", "jax.")):
            names = {name: frame.f_globals.get(name) for name in frame.f_code.co_names}
            for name, value in {**names, **frame.f_locals}.items():
                if kinds.kind_of(value) not in (kinds.OBJECT, kinds.LIST, kinds.DICT, kinds.TUPLE):
                    if value is target and not best:
                        best = name
                    continue
                path = path_from(value, target)
                # Outer frames are visited later and know the whole model, so the longest name wins.
                if path is not None and len(path) >= best.count(".") + best.count("["):
                    best = path_string(path, root=name)
        frame = frame.f_back
    return best
