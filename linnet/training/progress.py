"""How a training run goes: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

_SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """Something that shows how a run goes."""

    def start(self, step: int) -> None:
        """The run begins, or goes on, after so many steps."""

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """So many steps are done, with these numbers."""

    def say(self, text: str) -> None:
        """Prints a line."""

    def stop(self) -> None:
        """The run is over."""


def make_display(show: str, title: str, total: int | None) -> Display:
    """A display by name.

    Args:
      show: ``"bar"``, ``"lines"``, ``"nothing"``, or ``"auto"``.
      title: what is shown first.
      total: how many steps there will be, if that is known.

    Returns:
      The display.

    Raises:
      ValueError: there is no display of this name.
    """
    if show == "auto":
        show = "bar" if sys.stdout.isatty() else "lines"
    kinds = {"bar": Bar, "lines": Lines, "nothing": Nothing}
    if show not in kinds:
        raise ValueError(
            f"A loop cannot show {show!r}.\nFix: choose 'auto', 'bar', 'lines' or 'nothing'."
        )
    return kinds[show](title, total)


def metrics_text(metrics: dict[str, float]) -> str:
    """Numbers in a row: ``loss 0.1234  accuracy 0.98``."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class Speed:
    """Steps a second, lately, and what is left at that speed."""

    def __init__(self, total: int | None):
        self._total = total
        self._marks: list[tuple[float, int]] = []

    def mark(self, step: int) -> None:
        """So many steps are done now."""
        self._marks = [*self._marks[-30:], (time.monotonic(), step)]

    @property
    def rate(self) -> float:
        """Steps a second; 0 while it is not known. The first look is spent on compiling."""
        (start, first), (end, last) = self._marks[min(1, len(self._marks) - 1)], self._marks[-1]
        return (last - first) / (end - start) if end > start else 0.0

    def text(self, step: int) -> str:
        """The speed and the time left."""
        rate = self.rate
        if not rate:
            return ""
        speed = f"{rate:.0f} steps/s" if rate >= 10 else f"{rate:.2g} steps/s"
        if self._total is None:
            return speed
        return f"{speed}  {_duration((self._total - step) / rate)} left"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Nothing:
    """Shows nothing but what it is told to say."""

    def __init__(self, title: str, total: int | None):
        del title, total

    def start(self, step: int) -> None:
        """Nothing to do."""

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Nothing to do."""

    def say(self, text: str) -> None:
        """Prints a line."""
        print(text, flush=True)

    def stop(self) -> None:
        """Nothing to do."""


class Lines(Nothing):
    """A line every few seconds, and one at the end."""

    def __init__(self, title: str, total: int | None):
        self._title = title
        self._total = total
        self._speed = Speed(total)
        self._printed = (0.0, -1)
        self._newest: tuple[int, dict[str, float]] | None = None

    def start(self, step: int) -> None:
        """Starts the clock."""
        self._speed.mark(step)
        self._printed = (time.monotonic(), step)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a line, if the last one is long enough ago."""
        now = time.monotonic()
        self._newest = (step, metrics)
        self._speed.mark(step)
        if now - self._printed[0] >= _SECONDS_BETWEEN_LINES or step == self._total:
            self._print(step, metrics)

    def _print(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._printed[1]:
            return
        self._printed = (time.monotonic(), step)
        count = step if self._total is None else f"{step}/{self._total}"
        parts = [f"{self._title}  step {count}", metrics_text(metrics), self._speed.text(step)]
        self.say("  ".join(part for part in parts if part))

    def stop(self) -> None:
        """Prints the last line, also of a run that ended early or had no end in sight."""
        if self._newest is not None:
            self._print(*self._newest)


class Bar(Nothing):
    """A bar that moves, with the newest numbers, the speed and the time left."""

    def __init__(self, title: str, total: int | None):
        self._title = title
        self._total = total
        self._speed = Speed(total)
        self._progress: Any = None
        self._task: Any = None

    def start(self, step: int) -> None:
        """Shows the bar."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._speed.mark(step)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[metrics]}"),
            TextColumn("[green]{task.fields[speed]}"),
            auto_refresh=False,
            expand=True,
        )
        self._task = self._progress.add_task(
            self._title, total=self._total, completed=step, metrics="", speed="compiling"
        )
        self._progress.start()
        self._progress.refresh()

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Moves the bar."""
        if self._progress is None:
            return
        self._speed.mark(step)
        self._progress.update(
            self._task,
            completed=step,
            metrics=metrics_text(metrics),
            speed=self._speed.text(step),
            refresh=True,
        )

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._progress is None:
            super().say(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        """Leaves the bar as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
