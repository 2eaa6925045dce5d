"""What was logged, in files: one row a step in ``metrics.csv``, and TensorBoard event files."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np

from linnet.training.events import EventFile

FILE_NAME = "metrics.csv"
PREVIOUS_NAME = "metrics.previous.csv"
_FIXED = ["step", "epoch", "time"]


class Records:
    """Rows of numbers, written as they come.

    Args:
      folder: where to; None keeps the newest values only.
      tensorboard: write an event file too.
    """

    def __init__(self, folder: str | Path | None, tensorboard: bool = False):
        self.last: dict[str, float] = {}
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._file: Any = None  # open between the first row and the end
        self._events: EventFile | None = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if tensorboard:
                self._events = EventFile(self._path.parent)

    def start_over(self) -> None:
        """Moves the rows of an earlier run out of the way, to ``metrics.previous.csv``."""
        if self._path is not None and self._file is None and self._path.exists():
            os.replace(self._path, self._path.with_name(PREVIOUS_NAME))

    def forget_after(self, step: int) -> None:
        """Removes rows of later steps, which a run that goes on from here makes again."""
        if self._path is not None and self._path.exists():
            self._rewrite(lambda row: int(row["step"]) <= step)

    def add(self, step: int, epoch: int, when: float, metrics: dict[str, float]) -> None:
        """Takes the numbers of a step; several of one step are one row."""
        self.last |= metrics
        if self._path is None:
            return
        if not self._rows or self._rows[-1]["step"] != step:
            self._rows.append({"step": step, "epoch": epoch, "time": round(when, 3)})
        self._rows[-1] |= metrics
        if self._events is not None:
            self._events.add(step, when, metrics)

    def flush(self, everything: bool = False) -> None:
        """Writes the rows, except the newest, to which more may come."""
        ready = self._rows if everything else self._rows[:-1]
        if not ready:
            return
        self._rows = self._rows[len(ready) :]
        names = dict.fromkeys(name for row in ready for name in row)
        file = self._file
        if file is None or not set(names) <= set(self._columns):
            file = self._file = self._open(list(names))
        csv.writer(file).writerows([[row.get(name, "") for name in self._columns] for row in ready])
        file.flush()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Writes what is left."""
        self.flush(everything=True)
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file = None

    def _open(self, names: list[str]) -> Any:
        """The file, opened anew, with columns for these names too."""
        assert self._path is not None
        if self._file is not None:
            self._file.close()
        if self._path.exists() and self._path.stat().st_size:
            self._rewrite(lambda row: True, names)
        else:
            self._columns = [*_FIXED, *(name for name in names if name not in _FIXED)]
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerow(self._columns)
        return self._path.open("a", newline="")

    def _rewrite(self, keep: Any, names: list[str] | None = None) -> None:
        assert self._path is not None
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if keep(row)]
            known = list(reader.fieldnames or _FIXED)
        self._columns = list(dict.fromkeys([*known, *(names or ())]))
        whole = self._path.with_suffix(".part")
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(whole, self._path)


def read_metrics(folder: str | Path) -> dict[str, np.ndarray]:
    """The columns of ``metrics.csv``.

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
