"""What is kept beside the attributes of an object: its watchers, records, lock and the like.

Every object and Variable has one attribute for all that, ``_linnet_home``, empty until somebody
needs it. It belongs to the object, so nothing here is looked up by an id that could be reused.

**Change notification.** A compiled function remembers what its arguments consist of
(``transforms.plan``). A write that changes the structure of an object, not just a value, announces
itself to the object's watchers; nobody pays for objects that nobody watches.

**The rest of a ``Home``.** The records of walks that began at the object, the lock that a call of a
compiled function holds, the names of read-only attributes, and whether ``nnx.prefix`` made the
object.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Protocol


class Watcher(Protocol):
    """Something that depends on the structure of objects."""

    def static_changed(self, thing: Any) -> None:
        """Called after a static value or metadata of ``thing`` may have changed."""

    def content_changed(self) -> None:
        """Called after the contents of a watched object may have changed."""


_serial = itertools.count()
# Linnet's own classes of which somebody else replaced an attribute, in the order of the changes.
changed_classes: list[type] = []


_registering = threading.Lock()


class Home:
    """What is kept beside the attributes of an object or Variable, made when it is first needed.

    Attributes:
      watchers: weak references to those who are told of changes.
      records: what is remembered of walks that began at this object.
      met: whether a compiled function was called with the object before.
      lock: held while a compiled function reads, runs on, and writes to the object.
      serial: the order in which several such locks are taken.
      is_prefix: whether ``nnx.prefix`` made the object, so that a transform may take it as one.
      read_only: the names of read-only attributes.
    """

    __slots__ = ("is_prefix", "lock", "met", "read_only", "records", "serial", "watchers")

    def __init__(self) -> None:
        self.watchers: tuple[weakref.ref[Any], ...] = ()
        self.records: list[Any] = []
        self.met = False
        self.lock = threading.RLock()
        self.serial = next(_serial)
        self.is_prefix = False
        self.read_only: frozenset[Any] = frozenset()


def home_of(thing: Any) -> Home:
    """The ``Home`` of an object or Variable, made when it is first asked for."""
    return thing._linnet_home or _make_home(thing)


def _make_home(thing: Any) -> Home:
    with _registering:
        home = thing._linnet_home
        if home is None:
            home = Home()
            object.__setattr__(thing, "_linnet_home", home)
    return home


def watch(things: list[Any], watcher: Watcher) -> None:
    """Adds ``watcher`` to those that are told when the structure of ``things`` changes."""
    reference = weakref.ref(watcher)
    homes = [home_of(thing) for thing in things]
    with _registering:  # reading the old watchers and writing the new ones is one step
        for home in homes:
            alive = [ref for ref in home.watchers if ref() is not None]
            home.watchers = (*alive, reference)


def announce_static(thing: Any) -> None:
    """Tells the watchers that only a static value or the metadata of ``thing`` changed."""
    for watcher in _watchers_of(thing):
        watcher.static_changed(thing)


def announce_content(thing: Any) -> None:
    """Tells the watchers that the contents of ``thing`` may have changed."""
    for watcher in _watchers_of(thing):
        watcher.content_changed()


def _watchers_of(thing: Any) -> list[Watcher]:
    home = thing._linnet_home
    found = [ref() for ref in home.watchers] if home is not None else ()
    return [watcher for watcher in found if watcher is not None]
