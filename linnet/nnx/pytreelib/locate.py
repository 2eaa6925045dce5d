"""Finds the path of a Variable or module when an error needs it, and finds cycles.

Objects do not know their place in a model. ``describe`` searches the frames of the running program,
innermost first, for a name from which the object can be reached. Inside a transform objects are
copies; ``standing_for`` tells which originals they stand for, which the outer frames know.

``refuse_cycle`` names the path by which an object holds itself. JAX would recurse without end, so
``Pytree`` calls it once in ``LOOK_EVERY`` flattenings.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from linnet.errors import CyclicReferenceError, path_string
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.attributes import data_children
from linnet.nnx.pytreelib.tracing import pushed

_MOST_STEPS = 100_000  # so that an error is not kept waiting by a list of a million numbers
_CONTAINERS = (kinds.LIST, kinds.DICT, kinds.TUPLE)


class _RunningCopies(threading.local):
    def __init__(self) -> None:
        # For each running transform, the objects inside it and those outside, in the same order.
        self.copies: list[tuple[list[Any], list[Any]]] = []


_running = _RunningCopies()


def standing_for(copies: list[Any], originals: list[Any]) -> AbstractContextManager[Any]:
    """While the block lasts, an error about a copy finds the place of its original."""
    return pushed(_running.copies, (copies, originals))


def _and_originals(target: Any) -> list[Any]:
    targets = [target]
    for copies, originals in reversed(_running.copies):
        pairs = zip(copies, originals, strict=False)  # what is new inside comes after the others
        targets += [outer for inner, outer in pairs if inner is targets[-1]][:1]
    return targets


def route(root: Any, *targets: Any) -> list[str] | None:
    """The shortest way from ``root`` to one of ``targets`` by identity, step by step, or None.

    Example:
      >>> target = [0]
      >>> route({"a": [1, target]}, target)
      ["['a']", '[1]']
    """
    reached = kinds.places(root, _steps_from, methods=False, breadth_first=True)
    for steps, value in itertools.islice(reached, _MOST_STEPS):
        if any(value is target for target in targets):
            return list(steps)
    return None


def _steps_from(value: Any, kind: int) -> Iterator[tuple[str, Any]]:
    for key, child in itertools.islice(kinds.items_of(value, kind), _MOST_STEPS):
        yield f"[{key!r}]" if kind == kinds.DICT else path_string([key]), child


def describe(target: Any) -> str:
    """``name.of.target`` as the calling program would write it, or an empty string."""
    best, most_steps = "", -1
    targets = _and_originals(target)
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_inner(frame):
            names = {name: frame.f_globals.get(name) for name in frame.f_code.co_names}
            for name, value in {**names, **frame.f_locals}.items():
                is_object = kinds.kind_of(value) == kinds.OBJECT
                if (best and not is_object) or not name.isidentifier():
                    continue  # a found list is as good as the next; `.0` is Python's own name
                steps = _steps(value, targets)
                # Outer frames come later and know the whole model, so its longest name wins; a
                # list or dict there may be any wrapper's `args`.
                if steps is not None and (not is_object or len(steps) >= most_steps):
                    best = name + "".join(steps)
                    most_steps = len(steps) if is_object else -1
        frame = frame.f_back
    return best


def outer_level() -> int:
    """The ``stacklevel`` with which a warning of the caller points at the user's program."""
    frame, level = sys._getframe(1), 1
    while frame is not None and _is_inner(frame):
        frame, level = frame.f_back, level + 1
    return level


def _is_inner(frame: FrameType) -> bool:
    """Whether Linnet or JAX runs there, not the user's program."""
    return frame.f_globals.get("__name__", "").startswith(("linnet.", "jax."))


def _steps(value: Any, targets: list[Any]) -> list[str] | None:
    if kinds.kind_of(value) not in (kinds.OBJECT, *_CONTAINERS):
        return [] if any(value is target for target in targets) else None
    try:
        return route(value, *targets)
    except Exception:  # a foreign pytree that cannot be opened must not hide the error at hand
        return None


LOOK_EVERY = 101
flattened = itertools.count(1)  # how many objects were flattened


def refuse_cycle(obj: Any) -> None:
    """Raises a CyclicReferenceError that names the path if an object holds itself."""
    for path, value in kinds.places(obj, _tree_children, plain=False, methods=False):
        if value is obj and path:
            raise CyclicReferenceError(
                f"{describe(obj) or type(obj).__name__} holds itself, at "
                f"{path_string(path)}, and JAX takes only trees.\n"
                "Fix: use the nnx transforms (nnx.jit, nnx.grad, nnx.vmap ...), which carry cycles "
                "with graph=True; or split it first, graphdef, state = nnx.split(model), and "
                "nnx.merge(graphdef, state) inside."
            )


def _tree_children(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    """What JAX flattens: of an object its data, if its class is registered."""
    if kind == kinds.OBJECT and not value._pytree_registered:
        return ()
    return data_children(value, kind)
