"""Ctrl-C and SIGTERM as a request to leave after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class Interrupts:
    """While it is entered, the first signal is announced and the second one acts at once.

    A signal that the program ignores stays ignored, as Ctrl-C is in a program that a shell started
    in the background; so does one that something else than Python handles.

    Args:
      announce: called with ``"SIGINT"`` or ``"SIGTERM"``.
    """

    def __init__(self, announce: Callable[[str], Any]):
        self._announce = announce
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere it is not allowed
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: Any) -> None:
        self.__exit__()
        self._announce(signal.Signals(number).name)
