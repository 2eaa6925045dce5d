"""Which arrays only their Variables hold, so that ``nnx.jit`` may reuse their memory.

An array belongs to a Variable alone if ``nnx.jit`` wrote it there and nobody has read it since. The
slot ``_own`` of the Variable has a weak reference to that array; a write of another array makes the
two differ, and every read through ``Variable._raw`` empties the slot before it hands the array out.
``nnx.jit`` itself reads the cell, and gives the array to nobody but JAX.

Threads: a call that donates enters its Variables in ``donations`` before it looks at ``_own``; a
read empties ``_own`` before it looks at ``donations``. So either the call sees the read, and
donates a copy, or the read sees the call, and waits until the new array is there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

donations: dict[int, frozenset[int]] = {}  # by thread: the ids of the Variables it donates now
_LONGEST_WAIT = 60.0  # seconds


@contextmanager
def donating(variables: list[Any]) -> Iterator[None]:
    """Makes other threads that read these Variables wait until the block is left."""
    thread = threading.get_ident()
    donations[thread] = frozenset(map(id, variables))
    try:
        yield
    finally:
        donations.pop(thread, None)


def wait_for_donation(variable: Any) -> None:
    """Waits while another thread donates this Variable; None stands for every Variable."""
    thread, end = threading.get_ident(), time.monotonic() + _LONGEST_WAIT
    while any(
        other != thread and (variable is None or id(variable) in ids)
        for other, ids in list(donations.items())
    ):
        if time.monotonic() > end:
            raise RuntimeError(
                "A Variable was read while a compiled function that replaces it ran in another "
                f"thread for more than {_LONGEST_WAIT:.0f} s.\n"
                "Fix: read it before or after the call, or switch donation off with "
                "nnx.use_state_donation(False) before the function is first called."
            )
        time.sleep(5e-5)


def is_own(variable: Any) -> bool:
    """Whether only the Variable holds its array."""
    try:
        own = variable._own
    except AttributeError:  # it was never written by a compiled function
        return False
    return own is not None and own() is variable._cell[0]


def copy_unowned(variables: Iterable[Any]) -> None:
    """Puts copies in the place of arrays that others may hold."""
    for variable in variables:
        if not is_own(variable):
            variable._cell[0] = jax.tree_util.tree_map(jnp.array, variable._cell[0])


def note_owned(variables: list[Any]) -> None:
    """Notes that only these Variables hold their arrays, which a compiled function made."""
    references = map(weakref.ref, [variable._cell[0] for variable in variables])
    for variable, reference in zip(variables, references, strict=True):
        object.__setattr__(variable, "_own", reference)
