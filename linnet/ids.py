"""Numbers that are given out once: an id stays unique when its owner is copied."""

from __future__ import annotations

import itertools
from typing import Any


class UUIDManager:
    """Gives out ids, each once, also to threads.

    Example:
      >>> from linnet import ids
      >>> give = ids.UUIDManager()
      >>> give(), give()
      (FlaxId(1), FlaxId(2))
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # one call gives a number, so that no lock is needed

    def __call__(self) -> FlaxId:
        return FlaxId(next(self._numbers))


uuid = UUIDManager()


class FlaxId:
    """An id that ``linnet.ids.uuid`` gave out. Copies, shallow or deep, are new ids.

    Args:
      rawid: the number.

    Example:
      >>> import copy
      >>> from linnet import ids
      >>> own = ids.uuid()
      >>> own == own, copy.copy(own) == own
      (True, False)
    """

    __slots__ = ("id",)

    def __init__(self, rawid: int):
        self.id = rawid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlaxId) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"FlaxId({self.id})"

    def __copy__(self) -> FlaxId:
        return uuid()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlaxId:
        return uuid()
