"""The position of a data iterator, in the protocol of Grain or of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def position_methods(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns the methods that get and set a data iterator's position; None without both."""
    for read, write in _METHODS:
        if callable(getattr(value, read, None)) and callable(getattr(value, write, None)):
            return getattr(value, read), getattr(value, write)
    return None
