"""Switches for programs, and the ambient settings of the library.

``linnet.config.flax_profile`` reads a switch, ``linnet.config.update("flax_profile", True)`` sets
it, and the environment variable ``FLAX_PROFILE`` sets what it is at first:

- ``nnx_graph_mode``, ``nnx_graph_updates``: as ``nnx.set_graph_mode`` and
  ``nnx.set_graph_updates``.
- ``flax_always_shard_variable``: as ``nnx.use_eager_sharding``.
- ``flax_hijax_variable``: as ``nnx.var_defaults(hijax=...)``.
- ``flax_max_repr_depth``: how many levels of an object are printed; None for all.
- the other ``flax_`` switches are for Linen and ``training.checkpoints``, or only kept for programs
  that set them; NNX does the same for both values.

A setting can be made by a call, a ``with`` block, a decorator or an environment variable. Each is a
JAX user context, so that a compiled function is never reused under another value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])

_open_blocks = threading.local()
_lock = threading.Lock()
_MOST_CHANGES = 100
# For each user context the values that were set outside of blocks and not undone since, by a serial
# number; the last one is in force.
_changes: dict[Any, dict[int, Any]] = {}
_numbers = itertools.count()

# ---- switches -----------------------------------------------------------------------------------

if TYPE_CHECKING:
    flax_always_shard_variable: bool
    flax_array_ref: bool
    flax_filter_frames: bool
    flax_fix_rng_separator: bool
    flax_hijax_variable: bool
    flax_max_repr_depth: int | None
    flax_preserve_adopted_names: bool
    flax_profile: bool
    flax_pytree_module: bool
    flax_return_frozendict: bool
    flax_use_flaxlib: bool
    flax_use_orbax_checkpointing: bool
    nnx_graph_mode: bool
    nnx_graph_updates: bool

# Functions that read and set a switch. Those of settings are added where the setting is defined.
_switches: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {}
# The values that were set of switches without a setting, or before their setting was defined.
_kept: dict[str, Any] = {}


def add_switch(name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
    """Makes a setting a switch of this module, with the value it was given before."""
    _switches[name] = (read, write)
    if name in _kept:
        write(_kept.pop(name))


def _add_kept(name: str, value: Any) -> None:
    """A switch that has this value until another is set."""
    add_switch(name, lambda: _kept.get(name, value), functools.partial(_kept.__setitem__, name))


def update(name: str, value: Any, /) -> None:
    """Sets a switch, for everything that follows.

    Args:
      name: the switch, such as ``"flax_max_repr_depth"``.
      value: its value.

    Raises:
      LookupError: there is no such switch.
      TypeError: the switch does not take such a value.

    Example:
      >>> from linnet import config, nnx
      >>> config.update("flax_max_repr_depth", 0)
      >>> nnx.Sequential()
      Sequential(...)
      >>> config.update("flax_max_repr_depth", None)
    """
    read, write = _switch(name)
    is_depth = name == "flax_max_repr_depth"
    fits = value is None or type(value) is int if is_depth else value in (True, False)
    if not fits:
        wanted = "a number of levels or None" if is_depth else "True or False"
        raise TypeError(
            f"linnet.config.{name} takes {wanted}, but got {value!r}; it is {read()!r} now."
        )
    write(value if is_depth else bool(value))


@contextlib.contextmanager
def temp_flip_flag(var_name: str, var_value: bool) -> Iterator[None]:
    """Sets a switch for the length of a ``with`` block.

    Args:
      var_name: the switch, with or without ``flax_`` before it.
      var_value: its value in the block.

    Raises:
      LookupError: there is no such switch.

    Returns:
      A context manager.

    Example:
      >>> from linnet import config
      >>> with config.temp_flip_flag("return_frozendict", True):
      ...     config.flax_return_frozendict
      True
      >>> config.flax_return_frozendict
      False
    """
    name = var_name if var_name in _switches else f"flax_{var_name}"
    before = _switch(name)[0]()
    update(name, var_value)
    try:
        yield
    finally:
        update(name, before)


def _switch(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if name not in _switches:
        near = get_close_matches(name, _switches, 1)
        raise LookupError(
            f"Unrecognized config option: {name}. There are {', '.join(sorted(_switches))}."
            + (f"\nFix: {near[0]}." if near else "")
        )
    return _switches[name]


class _Module(ModuleType):
    """This module, whose switches are read as attributes and set by ``update``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _switches:
                return _switches[name][0]()
            raise AttributeError(f"module 'linnet.config' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _switches:
            raise AttributeError(
                f"linnet.config.{name} is not set by assignment.\n"
                f"Fix: linnet.config.update({name!r}, {value!r})."
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_switches]


sys.modules[__name__].__class__ = _Module


# ---- the environment, and settings --------------------------------------------------------------


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


def _env_depth() -> int | None:
    text = os.environ.get("FLAX_MAX_REPR_DEPTH", "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"FLAX_MAX_REPR_DEPTH={text!r} in the environment: use a number.")
    return int(text) if text else None


for _name in (
    "flax_array_ref flax_fix_rng_separator flax_hijax_variable flax_preserve_adopted_names "
    "flax_return_frozendict flax_use_flaxlib"
).split():
    _add_kept(_name, env_flag(_name.upper(), False))
for _name in (
    "flax_filter_frames flax_profile flax_pytree_module flax_use_orbax_checkpointing "
    "nnx_graph_mode nnx_graph_updates"
).split():
    _add_kept(_name, env_flag(_name.upper(), True))
_add_kept("flax_max_repr_depth", _env_depth())
_always_shard = env_flag("NNX_EAGER_SHARDING", env_flag("FLAX_ALWAYS_SHARD_VARIABLE", True))
_add_kept("flax_always_shard_variable", _always_shard)


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
        changes = _changes.setdefault(context, {next(_numbers): context.get_global()})
        if len(changes) > _MOST_CHANGES:
            del changes[min(changes)]
        number = next(_numbers)
        changes[number] = value
        context.set_global(value)
        return functools.partial(_take_back, context, number)


def _leave(block: list[Any], change: Any) -> None:
    if change in block:
        block.remove(change)
        change.__exit__(None, None, None)


def _take_back(context: Any, number: int) -> None:
    # Other threads may have changed the value since: theirs stands, and this one is forgotten.
    with _lock:
        changes = _changes[context]
        if number in changes:
            del changes[number]
            context.set_global(changes[max(changes)])


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

    context: ClassVar[Any]  # the user context of JAX that holds the value

    def __init_subclass__(
        cls, env: str | None = None, default: bool = True, switch: str | None = None
    ):
        if switch is not None:
            default = env_flag(switch.upper(), default)
        cls.context = jax.make_user_context(env_flag(env, default) if env else default)
        if switch is not None:
            add_switch(switch, cls.get_default, cls)

    def __init__(self, value: bool):
        super().__init__(self.context, bool(value))

    @classmethod
    def current_value(cls) -> bool:
        """The value in force here."""
        return cls.context.value

    @classmethod
    def get_default(cls) -> bool:
        """The value in force outside of all ``with`` blocks."""
        return cls.context.get_global()

    @classmethod
    def get_stack(cls) -> list[bool]:
        """The value outside of all blocks, and the one in force here if a block changed it."""
        outside, here = cls.get_default(), cls.current_value()
        return [outside] if outside == here else [outside, here]
