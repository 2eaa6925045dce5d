"""Pictures of what was logged; matplotlib, of the ``examples`` extra, loads when they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import MissingPackageError
from linnet.training.records import read_metrics

_FIXED = ("step", "epoch", "time")
_FAINT_FROM = 50  # from so many points on, a smooth line is drawn over them


def pyplot() -> Any:
    """``matplotlib.pyplot``, drawing to files.

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

    Numbers whose names end alike (``loss``, ``test_loss``) share a panel.

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
        if name not in _FIXED:
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
    middle = width // 2  # a mean stands in the middle of what it is the mean of
    axis.plot(steps[middle : middle + len(smooth)], smooth, color=line.get_color(), label=name)
