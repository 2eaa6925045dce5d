"""Who wants to know when the structure of an object changes.

A plan of ``nnx.jit`` depends on objects it does not own. It watches them here; a write that changes
their structure, not just a value, announces itself. Nobody pays for objects that nobody watches.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Watcher(Protocol):
    """Something that depends on the structure of objects."""

    def structure_changed(self, thing: Any) -> None:
        """Called after ``thing`` changed, and with None when one is gone."""


class _Watched:
    """One watched object: a weak reference to it, and to each of its watchers."""

    __slots__ = ("thing", "watchers")

    def __init__(self, thing: Any):
        key = id(thing)
        self.thing = weakref.ref(thing, lambda _: _tell(_table.pop(key, None), None))
        self.watchers: list[weakref.ref[Any]] = []


_table: dict[int, _Watched] = {}


def watch(thing: Any, watcher: Watcher) -> None:
    """Tells ``watcher`` from now on when the structure of ``thing`` changes."""
    entry = _table.get(id(thing))
    if entry is None or entry.thing() is not thing:
        entry = _table[id(thing)] = _Watched(thing)
    entry.watchers = [ref for ref in entry.watchers if ref() is not None]
    if all(ref() is not watcher for ref in entry.watchers):
        entry.watchers.append(weakref.ref(watcher))


def announce(thing: Any) -> None:
    """Tells the watchers of ``thing``, if there are any, that its structure changed."""
    entry = _table.get(id(thing))
    if entry is not None and entry.thing() is thing:
        _tell(entry, thing)


def _tell(entry: _Watched | None, thing: Any) -> None:
    for ref in entry.watchers if entry is not None else ():
        watcher = ref()
        if watcher is not None:
            watcher.structure_changed(thing)
