"""Which slots a loop or a branch writes to.

JAX must know beforehand what goes round in a loop or comes out of a branch. Variables that are
merely read should not, or every step would keep a copy of the weights; which ones are written is
known only after tracing. So a call is first traced with what is known, and once more if its
functions turn out to write to others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from linnet.nnx.transforms import programs
from linnet.nnx.transforms.slots import Run, Slots

_MOST_KNOWN = 1024

# What functions wrote to before, by their code and the structure of what they were given.
_known: dict[Hashable, set[int]] = {}


class _Grew(Exception):
    """Internal: the functions write to slots that were not expected."""


class Written:
    """The slots that one call writes to.

    Args:
      slots: the slots of the call.
      functions: the functions that it runs. What those of the same code wrote to before is expected
        from the start, which saves a trace and decides nothing else: a slot that is expected in
        vain keeps its value.
    """

    def __init__(self, slots: Slots, functions: Sequence[Any] = ()):
        self._missing: set[int] = set()
        self._outside = programs.is_outside()
        self._call: Hashable = None
        if self._outside and functions:
            codes = tuple(getattr(f, "__code__", type(f)) for f in functions)
            self._call = (codes, hash(slots.call.opened.structure), len(slots.values))

    def settle(self, attempt: Callable[[set[int]], Any], expected: Iterable[int] = ()) -> Any:
        """Tries with more slots until none is missing.

        Args:
          attempt: takes the slots that may be written, calls ``check`` with each run of a function,
            and hands what it gives to JAX to ``run``.
          expected: the slots of the first attempt.

        Returns:
          What the last attempt returned.
        """
        expected = set(expected) | _known.get(self._call, set())
        while True:
            try:
                return attempt(expected)
            except _Grew:
                expected = expected | self._missing
                self._missing = set()
                if self._call is not None:
                    if len(_known) >= _MOST_KNOWN:
                        _known.clear()
                    _known[self._call] = expected

    def check(self, run: Run, expected: set[int]) -> None:
        """Looks at the slots that were written by a run."""
        self._missing |= run.changed - expected
        if not self._outside:
            self._start_over()

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Runs a function of arrays in which runs are checked."""
        # Where nothing else is traced the trace ends before it is thrown away: JAX keeps the
        # arrays that an interrupted one met.
        return programs.run(f, *args, before_running=self._start_over)

    def _start_over(self) -> None:
        if self._missing:
            raise _Grew
