"""Files of a run: ``metrics.csv`` with a row a step, TensorBoard event files, and its curves.

tensorboardX and matplotlib, of the ``examples`` extra, load when they are first used.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import MissingPackageError, RecordError, name_some, type_text

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
        self._path = None if folder is None else _folder(folder) / FILE_NAME
        self._rows: list[dict[str, Any]] = []
        self._is_changed = False  # whether a row has grown since everything was written
        self._columns: list[str] = []
        self._file: Any = None  # open between the first row and the end
        self._identity: tuple[int, int] | None = None  # of the file that this object wrote
        self._growing: int | None = None  # where the newest row begins, if the file has it already
        self._from: int | None = 0  # the step to continue after; None once the file ends there
        self._writes_events = tensorboard and self._path is not None
        self._events: Any = None
        if self._path is not None:
            self._open_events()
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                error.add_note("Fix: Loop(folder=...) takes a folder that can be made.")
                raise

    def _open_events(self) -> None:
        if self._writes_events and self._events is None:
            assert self._path is not None
            self._events = _summary_writer(self._path.parent)

    def go_on_from(self, step: int) -> None:
        """Continues a run after a step: later rows are removed when the run begins."""
        if self._from is None:
            self.flush(everything=True)
            self._close_file()
            self._rows, self._growing, self._identity = [], None, None
        self._rows = [row for row in self._rows if row["step"] <= step]
        self._from = step

    def begin(self) -> None:
        """Removes later rows of a run that is continued; moves those of another run away."""
        if self._from is None or self._path is None:
            return
        if self._path.exists():
            if self._from == 0:
                os.replace(self._path, self._path.with_name(PREVIOUS_NAME))
            else:
                self._rewrite(self._from)
        self._from = None

    def add(self, step: int, epoch: int, when: float, metrics: dict[str, float]) -> None:
        """Adds metrics of a step; all of one step share a row."""
        self.last |= metrics
        if self._path is None:
            return
        if not self._rows or self._rows[-1]["step"] != step:
            self._rows.append({"step": step, "epoch": epoch, "time": round(when, 3)})
        self._rows[-1] |= metrics
        self._is_changed = True
        self._open_events()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step, when)

    def flush(self, everything: bool = False) -> None:
        """Writes the rows; the newest, which may still grow, only if everything is wanted."""
        *ready, newest = self._rows or [{}]
        if self._path is None or not (ready or (everything and self._is_changed)):
            return
        try:
            self._write(ready, newest, everything)
        except OSError as error:
            error.add_note(
                f"Raised while {self._path} was written; its last rows may be missing.\n"
                "Fix: Loop(folder=...) takes a folder with room that can be written to."
            )
            raise

    def _write(self, ready: list[Any], newest: dict[str, Any], everything: bool) -> None:
        assert self._path is not None
        self.begin()
        self._check_file()
        if self._growing is not None:
            os.truncate(self._path, self._growing)
            self._growing = None
        self._rows = [newest]
        written = [*ready, newest] if everything else ready
        names = dict.fromkeys(name for row in written for name in row)
        file = self._file
        if file is None or not set(names) <= set(self._columns):
            file = self._open(list(names))
        for row in written:
            if row is newest:
                file.flush()
                self._growing = os.fstat(file.fileno()).st_size
                self._is_changed = False
            csv.writer(file).writerow([row.get(name, "") for name in self._columns])
        file.flush()

    def close(self) -> None:
        """Writes everything; what is added later is written by the next call."""
        self.flush(everything=True)
        self._close_file()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_file(self) -> None:
        """Begins a new file if that of this run was removed; refuses a file of another program."""
        if self._identity is None:
            return
        assert self._path is not None
        try:
            found = _identity(os.stat(self._path))
        except FileNotFoundError:
            self._close_file()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._growing = self._identity = None
            return
        if found != self._identity:
            path, self._path = self._path, None
            raise RecordError(
                f"{path} is not the file that this loop began: another loop writes there, and has "
                f"moved the rows of this one to {PREVIOUS_NAME}, or somebody replaced it.\n"
                "Fix: give each loop a folder of its own."
            )

    def _open(self, names: list[str]) -> Any:
        """Opens the file with columns for these names too."""
        assert self._path is not None
        self._close_file()
        if self._path.exists() and self._path.stat().st_size:
            self._rewrite(None, names)
        else:
            self._columns = [*FIXED, *(name for name in names if name not in FIXED)]
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerow(self._columns)
        self._file = self._path.open("a", newline="")
        self._identity = _identity(os.fstat(self._file.fileno()))
        return self._file

    def _rewrite(self, last: int | None, names: list[str] | None = None) -> None:
        """Writes the file anew, up to a step, with columns for these names too."""
        assert self._path is not None
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            known = list(reader.fieldnames or FIXED)
            _check_columns(self._path, known)
            rows = [row for row in reader if last is None or _step_of(row) <= last]
        self._columns = list(dict.fromkeys([*known, *(names or ())]))
        whole = self._path.with_suffix(".part")
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(whole, self._path)


def _check_columns(path: Any, names: Iterable[str]) -> None:
    if not set(FIXED) <= set(names):
        raise RecordError(
            f"{path} holds no metrics of a loop: its columns are {name_some(names) or 'none'}.\n"
            "Fix: name the folder of a run; to begin one here, move the file away first."
        )


def _folder(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise RecordError(
            f"Loop(folder=...) takes the path of a folder, but got {type_text(folder)}.\n"
            "Fix: Loop(batches, folder='runs/first')."
        )
    return Path(folder)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _step_of(row: dict[str, Any]) -> float:
    """The step of a row; infinite for one that was cut off when a process was killed."""
    is_whole = None not in row.values() and row["step"].isdecimal()
    return int(row["step"]) if is_whole else float("inf")


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

    Raises:
      RecordError: the file has something that is no number.

    Example:
      >>> import pathlib, tempfile
      >>> from linnet import training
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> _ = (folder / "metrics.csv").write_text("step,loss\\n1,0.5\\n2,\\n")
      >>> training.read_metrics(folder)
      {'step': array([1., 2.]), 'loss': array([0.5, nan])}
    """
    path = Path(folder)
    path = path / FILE_NAME if path.is_dir() else path
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        names = list(reader.fieldnames or ())
    return {name: np.array([_number(path, row, name) for row in rows]) for name in names}


def _number(path: Path, row: dict[str, Any], name: str) -> float:
    try:
        return float(row[name] or "nan")
    except ValueError as error:
        raise RecordError(
            f"{path} has {row[name]!r} in the column {name}, which is no number.\n"
            "Fix: remove that row; a run that was killed while it wrote may have left half of one."
        ) from error


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
      RecordError: there are no metrics of a loop.

    Example:
      >>> import pathlib, tempfile
      >>> from linnet import training
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> header = "step,epoch,time,loss"
      >>> _ = (folder / "metrics.csv").write_text(header + "\\n1,0,0.1,0.5\\n2,0,0.2,0.4\\n")
      >>> training.plot_curves(folder).name
      'curves.png'
    """
    plt = pyplot()
    columns = read_metrics(folder)
    _check_columns(folder, columns)
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
