"""``flax.io``: functions on files. Paths are those of the local file system."""

from __future__ import annotations

import contextlib
import enum
import glob as patterns
import os
import shutil
from collections.abc import Iterator
from typing import Any

from linnet.errors import AlreadyExistsError

NotFoundError = FileNotFoundError
Path = str | os.PathLike[str]


class BackendMode(enum.Enum):
    """What reads and writes files: Python, or TensorFlow, which Linnet does not use."""

    DEFAULT = 0
    TF = 1


io_mode = BackendMode.DEFAULT


def set_mode(override: BackendMode) -> None:
    """Chooses what reads and writes files.

    Args:
      override: ``BackendMode.DEFAULT``.

    Raises:
      ValueError: another mode was asked for.
    """
    if override is not BackendMode.DEFAULT:
        raise ValueError(
            f"flax.io.set_mode: Linnet uses Python's own functions on files, not {override}.\n"
            "Fix: use BackendMode.DEFAULT; for files in a bucket, a path of Orbax or fsspec."
        )


@contextlib.contextmanager
def override_mode(override: BackendMode) -> Iterator[None]:
    """Chooses what reads and writes files within a ``with`` block.

    Args:
      override: as for ``set_mode``.

    Yields:
      Nothing.
    """
    set_mode(override)
    yield


def GFile(name: Path, mode: str) -> Any:
    """Opens a file, as ``open``.

    Args:
      name: the path.
      mode: how to open it, such as ``"rb"``.

    Returns:
      The file.
    """
    return open(name, mode)


def listdir(path: Path) -> list[str]:
    """The names in a folder."""
    return os.listdir(path)


def isdir(path: Path) -> bool:
    """Whether a path is a folder."""
    return os.path.isdir(path)


def exists(path: Path) -> bool:
    """Whether there is something at a path.

    Example:
      >>> exists("/nowhere")
      False
    """
    return os.path.exists(path)


def getsize(path: Path) -> int:
    """The size of a file in bytes."""
    return os.path.getsize(path)


def makedirs(path: Path) -> None:
    """Makes a folder, and those that it is in, if they are missing."""
    os.makedirs(path, exist_ok=True)


def glob(pattern: str) -> list[str]:
    """The paths that a pattern with ``*`` and ``?`` matches."""
    return patterns.glob(pattern)


def copy(src: Path, dst: Path, overwrite: bool = False) -> None:
    """Copies a file.

    Args:
      src: the file.
      dst: the path of the copy.
      overwrite: replace a file at that path.

    Raises:
      AlreadyExistsError: there is one, and it is not to be replaced.
    """
    _check_free(dst, overwrite)
    shutil.copy(src, dst)


def rename(src: Path, dst: Path, overwrite: bool = False) -> None:
    """Moves a file or folder.

    Args:
      src: its path.
      dst: its new path.
      overwrite: replace a file at that path.

    Raises:
      AlreadyExistsError: there is one, and it is not to be replaced.
    """
    _check_free(dst, overwrite)
    os.replace(src, dst)


def _check_free(path: Path, overwrite: bool) -> None:
    if not overwrite and os.path.exists(path):
        raise AlreadyExistsError(path)


def remove(path: Path) -> None:
    """Removes a file."""
    os.remove(path)


def rmtree(path: Path) -> None:
    """Removes a folder with everything in it."""
    shutil.rmtree(path)
