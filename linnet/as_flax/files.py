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
    """What reads and writes files: Python, or TensorFlow, which Linnet does not use.

    Example:
      >>> set_mode(BackendMode.DEFAULT)
    """

    DEFAULT = 0
    TF = 1


io_mode = BackendMode.DEFAULT


def set_mode(override: BackendMode) -> None:
    """Chooses what reads and writes files.

    Args:
      override: ``BackendMode.DEFAULT``.

    Raises:
      ValueError: another mode was asked for.

    Example:
      >>> set_mode(BackendMode.TF)
      Traceback (most recent call last):
      ValueError: flax.io.set_mode: Linnet uses Python's own functions on files, not BackendMode.TF.
      Fix: use BackendMode.DEFAULT; for files in a bucket, a path of Orbax or fsspec.
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

    Example:
      >>> with override_mode(BackendMode.DEFAULT):
      ...     exists("/nowhere")
      False
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

    Example:
      >>> import tempfile
      >>> with GFile(tempfile.mkdtemp() + "/notes", "w") as file:
      ...     file.write("small")
      5
    """
    return open(name, mode)


def listdir(path: Path) -> list[str]:
    """Lists a folder.

    Args:
      path: the folder.

    Returns:
      The names in it.

    Example:
      >>> import tempfile
      >>> listdir(tempfile.mkdtemp())
      []
    """
    return os.listdir(path)


def isdir(path: Path) -> bool:
    """Whether a path is a folder.

    Args:
      path: the path.

    Returns:
      True if it is.

    Example:
      >>> isdir("/nowhere")
      False
    """
    return os.path.isdir(path)


def exists(path: Path) -> bool:
    """Whether there is something at a path.

    Args:
      path: the path.

    Returns:
      True if there is.

    Example:
      >>> exists("/nowhere")
      False
    """
    return os.path.exists(path)


def getsize(path: Path) -> int:
    """The size of a file.

    Args:
      path: the file.

    Returns:
      The number of its bytes.

    Example:
      >>> import tempfile
      >>> getsize(tempfile.mkstemp()[1])
      0
    """
    return os.path.getsize(path)


def makedirs(path: Path) -> None:
    """Makes a folder, and those that it is in, if they are missing.

    Args:
      path: the folder.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp() + "/runs/first"
      >>> makedirs(folder)
      >>> isdir(folder)
      True
    """
    os.makedirs(path, exist_ok=True)


def glob(pattern: str) -> list[str]:
    """Looks for files and folders by their names.

    Args:
      pattern: a path in which ``*`` stands for any text and ``?`` for one character.

    Returns:
      The paths that it matches.

    Example:
      >>> glob("/nowhere/*")
      []
    """
    return patterns.glob(pattern)


def copy(src: Path, dst: Path, overwrite: bool = False) -> None:
    """Copies a file.

    Args:
      src: the file.
      dst: the path of the copy.
      overwrite: replace a file at that path.

    Raises:
      AlreadyExistsError: there is one, and it is not to be replaced.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkstemp()[1]
      >>> copy(path, path + ".copy")
      >>> exists(path + ".copy")
      True
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

    Example:
      >>> import tempfile
      >>> path = tempfile.mkstemp()[1]
      >>> rename(path, path + ".old")
      >>> exists(path)
      False
    """
    _check_free(dst, overwrite)
    os.replace(src, dst)


def _check_free(path: Path, overwrite: bool) -> None:
    if not overwrite and os.path.exists(path):
        raise AlreadyExistsError(path)


def remove(path: Path) -> None:
    """Removes a file.

    Args:
      path: the file.

    Example:
      >>> import tempfile
      >>> path = tempfile.mkstemp()[1]
      >>> remove(path)
      >>> exists(path)
      False
    """
    os.remove(path)


def rmtree(path: Path) -> None:
    """Removes a folder with everything in it.

    Args:
      path: the folder.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> rmtree(folder)
      >>> exists(folder)
      False
    """
    shutil.rmtree(path)
