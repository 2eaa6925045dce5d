"""Paths of stored entries: how they are written, compared, and named inside a checkpoint.

A path is a tuple of attribute names, dict keys and list positions, with the name of the saved item
first. As text its steps are joined by ``/``: ``model/layers/0/kernel``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Path = tuple[str | int, ...]

_UNSAFE = re.compile(r"[/%~\x00]|^\.+$|^$")


def text_of(path: Iterable[Any]) -> str:
    """The path as text.

    Example:
      >>> text_of(("model", "layers", 0, "kernel"))
      'model/layers/0/kernel'
    """
    return "/".join(map(str, path))


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
    for path in paths:
        *above, last = [_UNSAFE.sub(_percent, str(step)) for step in path]
        # No folder on the way may be a leaf already.
        for depth in range(len(above)):
            while ".".join(above[: depth + 1]) in leaves:
                above[depth] += "%2"
        name, number = (*above, last), 1
        while (joined := ".".join(name)) in leaves or joined in folders:
            number += 1
            name = (*above, f"{last}%{number}")
        leaves.add(joined)
        folders.update(".".join(above[:depth]) for depth in range(1, len(above) + 1))
        names[path] = name
    return names


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{ord(c):02X}" for c in found.group()) or "%"
