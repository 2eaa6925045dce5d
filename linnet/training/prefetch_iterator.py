"""PrefetchIterator: reads ahead in another thread."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PrefetchIterator(Generic[T]):
    """Takes elements from another iterator ahead of time, in a thread of its own.

    An error of the other iterator is raised where its element would have come.

    Args:
      data_iter: the iterator, or anything that can be iterated over.
      buffer_size: how many elements to have ready, at least 1.

    Raises:
      ValueError: ``buffer_size`` is less than 1.

    Example:
      >>> from linnet.training.prefetch_iterator import PrefetchIterator
      >>> list(PrefetchIterator(iter(range(4)), buffer_size=2))
      [0, 1, 2, 3]
    """

    def __init__(self, data_iter: Iterable[T], buffer_size: int = 1):
        if buffer_size < 1:
            raise ValueError(
                f"PrefetchIterator has at least 1 element ready, but got buffer_size={buffer_size}."
                "\nFix: PrefetchIterator(batches, buffer_size=2)."
            )
        # The thread holds the buffer and not this object, so that it ends when this is dropped.
        self._buffer = _ReadAhead(iter(data_iter), buffer_size)
        weakref.finalize(self, self._buffer.close)
        threading.Thread(target=self._buffer.read_all, daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._buffer.take()

    def close(self) -> None:
        """Ends reading; what has been read already is still given out."""
        self._buffer.close()


class _ReadAhead:
    """The elements that are ready, between the thread that reads and the one that takes."""

    def __init__(self, items: Iterator[Any], size: int):
        self._items, self._size = items, size
        self._ready: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def read_all(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or len(self._ready) < self._size)
                    if self._ended:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as raised:
            error = raised
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def take(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
            raise error or StopIteration

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
