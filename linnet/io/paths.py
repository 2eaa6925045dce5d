"""Paths of stored entries: how they are written, compared, and named inside a checkpoint.

A path is a tuple of attribute names, dict keys and list positions, with the name of the saved item
first. As text its steps are joined by ``/``: ``model/layers/0/kernel``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Path = tuple[str | int, ...]

_UNSAFE = re.compile(r"[/%~\x00\ud800-\udfff]|^\.+$|^$")


def text_of(path: Iterable[Any]) -> str:
    """The path as text.

    Example:
      >>> text_of(("model", "layers", 0, "kernel"))
      'model/layers/0/kernel'
    """
    return "/".join(map(str, path))


def first_names(names: Iterable[str], most: int = 5) -> str:
    """The first of several names, for a message.

    Example:
      >>> first_names(["a", "b", "c"], 2)
      'a, b, ...'
    """
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def folded(path: Iterable[Any]) -> tuple[str, ...]:
    """The path with every step as text, so that ``0`` and ``'0'`` are the same step."""
    return tuple(map(str, path))


def is_position(step: Any) -> bool:
    """Whether a step can be a position in a list: an integer, or the text of one."""
    if isinstance(step, int):
        return step >= 0
    return step.isascii() and step.isdecimal()


def storage_names(paths: Iterable[Path]) -> dict[Path, tuple[str, ...]]:
    """Names for paths in a format whose keys are text: the same steps, made unique and harmless.

    Two paths may fold to one name (``0`` and ``'0'``, or ``a.b`` and ``a``, ``b``, which Orbax
    joins by dots); the later one gets a mark behind it.

    Example:
      >>> storage_names([("a", 0), ("a", "0"), ("b/c",)])
      {('a', 0): ('a', '0'), ('a', '0'): ('a', '0%2'), ('b/c',): ('b%2Fc',)}
    """
    names: dict[Path, tuple[str, ...]] = {}
    leaves: set[str] = set()
    folders: set[str] = {""}
    clean: dict[str | int, str] = {}
    above: dict[Path, tuple[str, ...]] = {(): ()}
    for path in paths:
        for step in path:
            if step not in clean:
                clean[step] = _UNSAFE.sub(_percent, str(step))
        if path[:-1] not in above:
            above[path[:-1]] = _folder_names([clean[step] for step in path[:-1]], leaves, folders)
        head, last = above[path[:-1]], clean[path[-1]]
        name, number = (*head, last), 1
        while (joined := ".".join(name)) in leaves or joined in folders:
            number += 1
            name = (*head, f"{last}%{number}")
        leaves.add(joined)
        names[path] = name
    return names


def _folder_names(steps: list[str], leaves: set[str], folders: set[str]) -> tuple[str, ...]:
    """Names of the folders on the way to a leaf; none of them may be a leaf itself."""
    for depth in range(len(steps)):
        while (joined := ".".join(steps[: depth + 1])) in leaves:
            steps[depth] += "%2"
        folders.add(joined)
    return tuple(steps)


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{ord(c):02X}" for c in found.group()) or "%"
