"""Files of a run: ``metrics.csv`` with a row a step, TensorBoard event files, and its curves.

tensorboardX and matplotlib, of the ``examples`` extra, load when they are first used.
"""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import MissingPackageError

FILE_NAME = "metrics.csv"
PREVIOUS_NAME = "metrics.previous.csv"
FIXED = ("step", "epoch", "time")  # columns that every run has
_SECONDS_BETWEEN_FLUSHES = 5
_FAINT_FROM = 50  # from this many points on, a smoothed line is drawn over them

_event_files = itertools.count()


class Records:
    """Writes metrics to a folder; without a folder it keeps the newest values only."""

    def __init__(self, folder: str | Path | None, tensorboard: bool = False):
        self.last: dict[str, float] = {}
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._file: Any = None  # open between the first row and the end
        self._growing: int | None = None  # where the newest row begins, if it is in the file too
        self._events: Any = None
        if self._path is not None:
            if tensorboard:
                self._events = _summary_writer(self._path.parent)
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def start_over(self) -> None:
        """Moves the rows of an earlier run out of the way, to ``metrics.previous.csv``."""
        if self._path is not None and self._file is None and self._path.exists():
            os.replace(self._path, self._path.with_name(PREVIOUS_NAME))

    def forget_after(self, step: int) -> None:
        """Removes the rows after a step, from which a run continues."""
        self.flush(everything=True)
        self._rows, self._growing = [], None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path is not None and self._path.exists():
            self._rewrite(lambda row: int(row["step"]) <= step)

    def add(self, step: int, epoch: int, when: float, metrics: dict[str, float]) -> None:
        """Adds metrics of a step; all of one step share a row."""
        self.last |= metrics
        if self._path is None:
            return
        if not self._rows or self._rows[-1]["step"] != step:
            self._rows.append({"step": step, "epoch": epoch, "time": round(when, 3)})
        self._rows[-1] |= metrics
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step, when)

    def flush(self, everything: bool = False) -> None:
        """Writes the rows; the newest, which may still grow, only if everything is wanted."""
        *ready, newest = self._rows or [{}]
        if not ready and not (everything and newest):
            return
        if self._growing is not None:
            self._file.truncate(self._growing)
            self._growing = None
        self._rows = [newest]
        written = [*ready, newest] if everything else ready
        names = dict.fromkeys(name for row in written for name in row)
        file = self._file
        if file is None or not set(names) <= set(self._columns):
            file = self._file = self._open(list(names))
        for row in written:
            if row is newest:
                file.flush()
                self._growing = os.fstat(file.fileno()).st_size
            csv.writer(file).writerow([row.get(name, "") for name in self._columns])
        file.flush()

    def close(self) -> None:
        self.flush(everything=True)
        self._rows, self._growing = [], None
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file = None

    def _open(self, names: list[str]) -> Any:
        """Opens the file with columns for these names too."""
        assert self._path is not None
        if self._file is not None:
            self._file.close()
        if self._path.exists() and self._path.stat().st_size:
            self._rewrite(lambda row: True, names)
        else:
            self._columns = [*FIXED, *(name for name in names if name not in FIXED)]
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerow(self._columns)
        return self._path.open("a", newline="")

    def _rewrite(self, keep: Any, names: list[str] | None = None) -> None:
        assert self._path is not None
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if keep(row)]
            known = list(reader.fieldnames or FIXED)
        self._columns = list(dict.fromkeys([*known, *(names or ())]))
        whole = self._path.with_suffix(".part")
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(whole, self._path)


def _summary_writer(folder: Path) -> Any:
    try:
        import tensorboardX
    except ImportError as error:
        raise MissingPackageError(
            "Loop(tensorboard=True) needs tensorboardX, which is not installed.\n"
            "Fix: pip install 'linnet[examples]', or pip install tensorboardX."
        ) from error
    # tensorboardX names a file by the second and overwrites one of the same name.
    return tensorboardX.SummaryWriter(
        str(folder),
        flush_secs=_SECONDS_BETWEEN_FLUSHES,
        filename_suffix=f".{os.getpid()}.{next(_event_files)}",
    )


def read_metrics(folder: str | Path) -> dict[str, np.ndarray]:
    """Reads the columns of ``metrics.csv``.

    Args:
      folder: where it is, or the file itself.

    Returns:
      One array of float64 a column, nan where a step has no such number.
    """
    path = Path(folder)
    with (path / FILE_NAME if path.is_dir() else path).open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        names = list(reader.fieldnames or ())
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}


def pyplot() -> Any:
    """Returns ``matplotlib.pyplot``, set to draw to files.

    Raises:
      MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackageError(
            "Pictures need matplotlib, which is not installed.\n"
            "Fix: pip install 'linnet[examples]'."
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_curves(folder: str | Path, path: str | Path | None = None) -> Path:
    """Draws the curves of a run.

    Metrics whose names have the same last word (``loss``, ``test_loss``) share a panel.

    Args:
      folder: a folder with ``metrics.csv``.
      path: where the picture goes; ``curves.png`` beside it by default.

    Returns:
      The path of the picture.

    Raises:
      MissingPackageError: matplotlib is not installed.
    """
    plt = pyplot()
    columns = read_metrics(folder)
    panels: dict[str, list[str]] = {}
    for name in columns:
        if name not in FIXED:
            panels.setdefault(name.rsplit("_", 1)[-1], []).append(name)
    figure, axes = plt.subplots(
        1, max(len(panels), 1), figsize=(5 * max(len(panels), 1), 3.5), squeeze=False
    )
    for axis, (title, names) in zip(axes[0], panels.items(), strict=False):
        for name in names:
            _draw(axis, columns["step"], columns[name], name)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            axis.legend(frameon=False)
    figure.tight_layout()
    path = Path(folder) / "curves.png" if path is None else Path(path)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _draw(axis: Any, steps: np.ndarray, values: np.ndarray, name: str) -> None:
    given = ~np.isnan(values)
    steps, values = steps[given], values[given]
    if len(steps) < _FAINT_FROM:
        axis.plot(steps, values, label=name, marker="o", markersize=3)
        return
    (line,) = axis.plot(steps, values, alpha=0.25)
    width = max(len(values) // 50, 5)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    middle = width // 2  # a mean is drawn at the middle of its window
    axis.plot(steps[middle : middle + len(smooth)], smooth, color=line.get_color(), label=name)
