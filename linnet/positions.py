"""Where an iterator of data is: told and set in Grain's way or in PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def position_methods(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """The methods that tell and set the position of a data iterator.

    Args:
      value: an iterator, a loader, or anything.

    Returns:
      The two methods; None if it does not have both.
    """
    for read, write in _METHODS:
        if callable(getattr(value, read, None)) and callable(getattr(value, write, None)):
            return getattr(value, read), getattr(value, write)
    return None
