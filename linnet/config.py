"""Ambient settings: a call, a ``with`` block, a decorator or an environment variable.

Each setting is a JAX user context, so that a compiled function is never reused under another value.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])

_open_blocks = threading.local()
_lock = threading.Lock()
_MOST_CHANGES = 100


class _Change:
    """One value that was set for good, or until it is taken back."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


_changes: dict[Any, list[_Change]] = {}  # the last one of each context is in force


def env_flag(name: str, default: bool) -> bool:
    """Reads a boolean from the environment; raises a ValueError that names it otherwise."""
    text = os.environ.get(name)
    if text is None:
        return default
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{name}={text!r} in the environment: use one of true, false, 1, 0.")


def apply_value(context: Any, value: Any) -> Callable[[], None]:
    """Sets a user context from here on and returns a function that undoes it.

    Inside a ``with`` block of the same context the change lasts until the end of that block;
    outside of all blocks it is for every thread.
    """
    blocks = getattr(_open_blocks, "stacks", {}).get(context)
    if blocks:
        change = context(value)
        change.__enter__()
        blocks[-1].append(change)
        return functools.partial(_leave, blocks[-1], change)
    with _lock:
        changes = _changes.setdefault(context, [_Change(context.get_global())])
        del changes[:-_MOST_CHANGES]
        changes.append(_Change(value))
        context.set_global(value)
        return functools.partial(_take_back, context, changes[-1])


def _leave(block: list[Any], change: Any) -> None:
    if change in block:
        block.remove(change)
        change.__exit__(None, None, None)


def _take_back(context: Any, change: _Change) -> None:
    # Other threads may have changed the value since: theirs stands, and this one is forgotten.
    with _lock:
        changes = _changes[context]
        if change in changes:
            changes.remove(change)
            context.set_global(changes[-1].value)


@contextlib.contextmanager
def value_block(context: Any, value: Any):
    """Holds a user context at ``value`` for the length of a ``with`` block."""
    if not hasattr(_open_blocks, "stacks"):
        _open_blocks.stacks = {}
    blocks = _open_blocks.stacks.setdefault(context, [])
    with context(value):
        blocks.append([])
        try:
            yield
        finally:
            for change in reversed(blocks.pop()):
                change.__exit__(None, None, None)


class Reusable:
    """A context manager that may be entered many times; ``_open`` makes the block of each time."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []

    def _open(self) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Any:
        block = self._open()
        entered = block.__enter__()
        self._blocks.append(block)
        return entered

    def __exit__(self, *error: Any) -> Any:
        return self._blocks.pop().__exit__(*error)


class Applied(Reusable):
    """A value of a user context: in force from here on, or, as a ``with`` block or decorator, for
    a while."""

    def __init__(self, context: Any, value: Any):
        super().__init__()
        self.value = value
        self._user_context = context
        self._undo = apply_value(context, value)

    def _open(self) -> Any:
        self._undo()
        return value_block(self._user_context, self.value)

    def __call__(self, f: F) -> F:
        self._undo()

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with value_block(self._user_context, self.value):
                return f(*args, **kwargs)

        return wrapper  # pyright: ignore[reportReturnType]


class Setting(Applied):
    """One ambient boolean. Constructing it sets the value; used as a block or decorator, for a
    while.

    Args:
      value: the new value.

    Example:
      >>> from linnet import nnx
      >>> with nnx.set_graph_mode(False):
      ...     nnx.set_graph_mode.current_value()
      False
      >>> nnx.set_graph_mode.current_value()
      True
    """

    _context: ClassVar[Any]

    def __init_subclass__(cls, env: str | None = None, default: bool = True):
        cls._context = jax.make_user_context(env_flag(env, default) if env else default)

    def __init__(self, value: bool):
        super().__init__(self._context, bool(value))

    @classmethod
    def current_value(cls) -> bool:
        """The value in force here."""
        return cls._context.value

    @classmethod
    def get_default(cls) -> bool:
        """The value in force outside of all ``with`` blocks."""
        return cls._context.get_global()

    @classmethod
    def get_stack(cls) -> list[bool]:
        """The value outside of all blocks, and the one in force here if a block changed it."""
        outside, here = cls.get_default(), cls.current_value()
        return [outside] if outside == here else [outside, here]
