"""Finds where a Variable or module lives, at the moment an error is raised.

Objects do not know their place in a model. When an error needs it, the frames of the running
program are searched, innermost first, for a name from which the object can be reached.
"""

from __future__ import annotations

import collections
import itertools
import sys
from typing import Any

from linnet.errors import path_string
from linnet.nnx import kinds

_MOST_STEPS = 100_000  # so that an error is not kept waiting by a list of a million numbers
_CONTAINERS = (kinds.LIST, kinds.DICT, kinds.TUPLE)


def route(root: Any, target: Any) -> list[str] | None:
    """The shortest way from ``root`` to ``target`` by identity, step by step, or None.

    Example:
      >>> target = [0]
      >>> route({"a": [1, target]}, target)
      ["['a']", '[1]']
    """
    pending: collections.deque[tuple[list[str], Any]] = collections.deque([([], root)])
    seen: set[int] = set()
    for _ in range(_MOST_STEPS):
        if not pending:
            return None
        steps, value = pending.popleft()
        if value is target:
            return steps
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
        for key, child in itertools.islice(items, _MOST_STEPS):
            step = f"[{key!r}]" if kind == kinds.DICT else path_string([key])
            pending.append(([*steps, step], child))
    return None


def describe(target: Any) -> str:
    """``name.of.target`` as the calling program would write it, or an empty string."""
    best, most_steps = "", -1
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("linnet.", "jax.")):
            names = {name: frame.f_globals.get(name) for name in frame.f_code.co_names}
            for name, value in {**names, **frame.f_locals}.items():
                is_object = kinds.kind_of(value) == kinds.OBJECT
                if (best and not is_object) or not name.isidentifier():
                    continue  # a found list is as good as the next; `.0` is Python's own name
                steps = _steps(value, target)
                # Outer frames come later and know the whole model, so its longest name wins; a
                # list or dict there may be any wrapper's `args`.
                if steps is not None and (not is_object or len(steps) >= most_steps):
                    best = name + "".join(steps)
                    most_steps = len(steps) if is_object else -1
        frame = frame.f_back
    return best


def _steps(value: Any, target: Any) -> list[str] | None:
    if kinds.kind_of(value) not in (kinds.OBJECT, *_CONTAINERS):
        return [] if value is target else None
    try:
        return route(value, target)
    except Exception:  # a foreign pytree that cannot be opened must not hide the error at hand
        return None
