"""Which arrays only their Variables hold, so that ``nnx.jit`` may reuse their memory.

An array belongs to a Variable alone if ``nnx.jit`` wrote it there and nobody has read it since. The
attribute ``_own`` of the Variable is a weak reference to that array; a write of another array makes
the two differ, and every read through ``Variable._raw`` sets it to None, so that the next call
donates a copy. ``nnx.jit`` itself reads the cell, and gives the array to nobody but JAX.

Threads: a call that donates enters its Variables in ``donations``, looks at ``_own``, runs, writes
the new arrays to the cells, sets ``_own``, and leaves. A read waits until no call donates the
Variable, sets ``_own`` to None, reads the cell, looks whether a call has entered by now, and last
whether ``_own`` is still None; otherwise it begins again. If a call enters after that look, it
sees the None. If it left before, it set ``_own`` either before the read did, which then got its new
array, or after, which the read finds.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from itertools import repeat
from operator import attrgetter, call, is_
from typing import Any

import jax
import jax.numpy as jnp

donations: dict[int, list[Any]] = {}  # by thread: the Variables it donates now
_LONGEST_WAIT = 60.0  # seconds
_own_of = attrgetter("_own")


class donation_in_progress:
    """A block that other threads which read these Variables wait for."""

    __slots__ = ("_thread", "_variables")

    def __init__(self, variables: list[Any]):
        self._variables = variables

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        donations[self._thread] = self._variables

    def __exit__(self, *_: object) -> None:
        donations.pop(self._thread, None)


def is_donated_elsewhere(variable: Any) -> bool:
    """Whether another thread donates this Variable now; None stands for every Variable."""
    thread = threading.get_ident()
    return any(
        other != thread and (variable is None or any(variable is one for one in donated))
        for other, donated in list(donations.items())
    )


def wait_for_donation(variable: Any) -> None:
    """Waits while another thread donates this Variable; None stands for every Variable."""
    end = time.monotonic() + _LONGEST_WAIT
    while is_donated_elsewhere(variable):
        if time.monotonic() > end:
            raise RuntimeError(
                "A Variable was read while a compiled function that replaces it ran in another "
                f"thread for more than {_LONGEST_WAIT:.0f} s.\n"
                "Fix: read it before or after the call, or switch donation off with "
                "nnx.use_state_donation(False) before the function is first called."
            )
        time.sleep(5e-5)


def are_own(variables: list[Any], cells: list[Any]) -> bool:
    """Whether each of the Variables alone holds the array in its cell."""
    try:
        held = map(call, map(_own_of, variables))
        return all(map(is_, held, [cell.value for cell in cells]))
    except (AttributeError, TypeError):  # one has no reference: nobody wrote it, or it was read
        return False


def copy_unowned(variables: list[Any], cells: list[Any]) -> None:
    """Puts copies in the place of arrays that others may hold."""
    if are_own(variables, cells):
        return
    for variable, cell in zip(variables, cells, strict=True):
        if not are_own([variable], [cell]):
            cell.value = jax.tree_util.tree_map(jnp.array, cell.value)


def note_owned(variables: list[Any], cells: list[Any]) -> None:
    """Notes that only these Variables hold their arrays, which a compiled function made."""
    references = [weakref.ref(cell.value) for cell in cells]
    collections.deque(map(object.__setattr__, variables, repeat("_own"), references), 0)
