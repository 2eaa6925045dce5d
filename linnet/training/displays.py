"""Displays: how a loop shows its progress, as a bar, in lines, or not at all."""

from __future__ import annotations

import sys
import time
from typing import Any

_SECONDS_BETWEEN_LINES = 5.0


def make_display(show: str, title: str, total: int | None) -> Display:
    if show == "auto":
        show = "bar" if sys.stdout.isatty() else "lines"
    displays = {"bar": Bar, "lines": Lines, "nothing": Display}
    if not isinstance(show, str) or show not in displays:
        raise ValueError(
            f"A loop cannot show {show!r}.\nFix: choose 'auto', 'bar', 'lines' or 'nothing'."
        )
    return displays[show](title, total)


class Display:
    """Shows the progress of a run; this one shows nothing but what it is told to say."""

    def __init__(self, title: str, total: int | None):
        self._title = title
        self._total = total
        self._speed = Speed(total)

    def start(self, step: int) -> None:
        """Called when the run begins, or continues after ``step`` steps."""

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Called now and then with the newest metrics."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def stop(self) -> None:
        """Called at the end."""


class Silence(Display):
    """Says nothing: another process shows the progress."""

    def say(self, text: str) -> None:
        pass


class Lines(Display):
    """Prints a line every few seconds and one at the end."""

    _printed_at = 0.0
    _printed_step = -1
    _newest: tuple[int, dict[str, float]] | None = None

    def start(self, step: int) -> None:
        self._speed.mark(step)
        self._printed_at, self._printed_step = time.monotonic(), step

    def show(self, step: int, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        self._newest = (step, metrics)
        self._speed.mark(step)
        if now - self._printed_at >= _SECONDS_BETWEEN_LINES or step == self._total:
            self._print(step, metrics)

    def _print(self, step: int, metrics: dict[str, float]) -> None:
        if step == self._printed_step:
            return
        self._printed_at, self._printed_step = time.monotonic(), step
        count = step if self._total is None else f"{step}/{self._total}"
        parts = [f"{self._title}  step {count}", _metrics_text(metrics), self._speed.text(step)]
        self.say("  ".join(part for part in parts if part))

    def stop(self) -> None:
        # The last line of a run that ended early or whose length was not known.
        if self._newest is not None:
            self._print(*self._newest)


class Bar(Display):
    """A progress bar with the newest metrics, the speed and the time left."""

    _progress: Any = None
    _task: Any = None

    def start(self, step: int) -> None:
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
        if self._progress is None:
            return
        self._speed.mark(step)
        self._progress.update(
            self._task,
            completed=step,
            metrics=_metrics_text(metrics),
            speed=self._speed.text(step),
            refresh=True,
        )

    def say(self, text: str) -> None:
        if self._progress is None:
            super().say(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Speed:
    """The recent number of steps a second and the time left."""

    def __init__(self, total: int | None):
        self._total = total
        self._marks: list[tuple[float, int]] = []

    def mark(self, step: int) -> None:
        self._marks = [*self._marks[-30:], (time.monotonic(), step)]

    @property
    def rate(self) -> float:
        """Steps a second; 0 while unknown. The first interval, which compiles, is left out."""
        (start, first), (end, last) = self._marks[min(1, len(self._marks) - 1)], self._marks[-1]
        return (last - first) / (end - start) if end > start else 0.0

    def text(self, step: int) -> str:
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


def _metrics_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
