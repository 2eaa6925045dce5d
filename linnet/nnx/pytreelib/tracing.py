"""What is known about the running trace: its token, names of modules, constants it read.

JAX gives an opaque token for the running trace; a write to an object of another trace is refused by
comparing tokens. Outside of all traces ``current_trace`` always returns the same object, ``EAGER``,
so that the common comparison is by identity.

While a transform traces, ``naming`` gives its modules names for ``jax.named_scope``, and
``compiling`` collects the Variables from outside that the function reads: they become constants of
the compiled function, and ``note_write`` warns when one of them is written later.
"""

from __future__ import annotations

import collections
import functools
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from linnet.errors import StaleConstantWarning
from linnet.functional.fusing import EAGER as EAGER
from linnet.nnx.pytreelib import kinds

T = TypeVar("T")


def current_trace() -> Any:
    """The token of the running trace; ``EAGER`` itself outside of all traces."""
    token = get_opaque_trace_state()
    return EAGER if token == EAGER else token


def same_trace(owner: Any) -> bool:
    """Whether ``owner`` is the token of the running trace."""
    return owner == get_opaque_trace_state()


@functools.cache
def mapped_tracer() -> type:
    """The class of the tracers that ``jax.vmap`` makes, found by making one."""
    found: list[type] = []
    jax.vmap(lambda x: found.append(type(x)) or x)(jnp.zeros(1))
    return found[0]


@contextmanager
def pushed(stack: list[T], item: T) -> Iterator[T]:
    """Keeps an item on a stack for as long as the block lasts."""
    stack.append(item)
    try:
        yield item
    finally:
        stack.pop()


class _RunningTransforms(threading.local):
    def __init__(self) -> None:
        self.names: list[dict[int, str]] = []  # for each running transform, its modules' names


running = _RunningTransforms()


def naming(nodes: list[Any]) -> AbstractContextManager[Any]:
    """Names the modules below ``nodes`` for as long as the block lasts."""
    return pushed(running.names, _names_of(nodes))


def scope_name(module: Any) -> str | None:
    """The name of a module inside the innermost transform that has it."""
    for names in reversed(running.names):
        if id(module) in names:
            return names[id(module)]
    return None


def _names_of(nodes: list[Any]) -> dict[int, str]:
    """The name of each module below ``nodes``: its attribute, with its position in lists."""
    names: dict[int, str] = {}
    for node in nodes:
        for path, value in kinds.places(node, kinds.items_of, plain=False, methods=False):
            if kinds.kind_of(value) == kinds.OBJECT and id(value) not in names:
                name = type(node).__name__
                for key in path:
                    name = f"{name}_{key}" if isinstance(key, int) else str(key)
                names[id(value)] = name
    return names


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Records the constants that a function reads while it is traced, if that succeeds."""
    with reading() as read:
        yield
    for variable in read:
        _add_constant(variable, name)


# By thread: for each function that is being traced there, the Variables from outside that it read.
# Empty in most calls, and then looked into by nobody.
traced_reads: dict[int, list[list[Any]]] = {}


@contextmanager
def reading() -> Iterator[list[Any]]:
    """Collects Variables from outside that a function reads while traced; no warning follows."""
    thread = threading.get_ident()
    functions = traced_reads.setdefault(thread, [])
    try:
        with pushed(functions, []) as read:
            yield read
    finally:
        if not functions:
            del traced_reads[thread]


# Variables that a compiled function read as constants: id -> (reference, function).
constants: dict[int, tuple[weakref.ref[Any], str]] = {}


def note_constant(variable: Any) -> None:
    """Remembers that the function this thread traces, if any, read a Variable from outside."""
    functions = traced_reads.get(threading.get_ident())
    if functions:
        functions[-1].append(variable)


def _add_constant(variable: Any, function: str) -> None:
    key = id(variable)
    if key not in constants:
        reference = weakref.ref(variable, lambda _: constants.pop(key, None))
        constants[key] = (reference, function)


def note_write(variable: Any) -> None:
    """Warns, once, that a compiled function will not see what is written to a Variable."""
    reference, function = constants.pop(id(variable), (None, ""))
    if reference is None or reference() is not variable:
        return
    warnings.warn(
        f"{variable._named()} was changed, but the compiled function {function} read it as a "
        "constant and goes on with the old value. Pass the module as an argument, or use "
        "nnx.jit(module), so that later values count.",
        StaleConstantWarning,
        stacklevel=4,
    )


def note_writes(variables: Iterable[Any]) -> None:
    """Calls ``note_write`` for each; the loop runs in C, so that Ctrl-C cannot stop it halfway."""
    collections.deque(map(note_write, variables), 0)
