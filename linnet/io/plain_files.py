"""Opening files that others may have put there: regular ones only, inside their folder only."""

from __future__ import annotations

import os
import stat
from io import FileIO

from linnet.errors import CheckpointNotFoundError, UnsafePathError

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LONGEST_NAME = 255
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def open_to_read(path: str, inside: str = "") -> FileIO:
    """Opens a regular file.

    Args:
      path: the file.
      inside: the folder that it may not lead out of; empty for a path that the user gave.

    Raises:
      CheckpointNotFoundError: there is no such file.
      UnsafePathError: it is a device, a pipe or a folder, or a link that leads out of the folder.
    """
    real = os.path.realpath(path)
    if inside:
        _check_inside(path, real, inside)
    try:
        # Without O_NONBLOCK, a pipe that nobody writes to would never open.
        descriptor = os.open(real, _FLAGS | _NO_LINK)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"There is no file {path}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafePathError(f"{path} is not a regular file.\nFix: name a file.")
    return FileIO(descriptor)


def _check_inside(path: str, real: str, inside: str) -> None:
    """The Hugging Face cache keeps the files of ``repo/snapshots/x`` in ``repo/blobs``."""
    home = os.path.realpath(inside)
    allowed = [home]
    above, _ = os.path.split(home)
    if os.path.basename(above) == "snapshots":
        allowed.append(os.path.join(os.path.dirname(above), "blobs"))
    if not any(os.path.commonpath([real, folder]) == folder for folder in allowed):
        raise UnsafePathError(
            f"{path} leads to {real}, outside of its folder.\n"
            "Fix: if you trust it, copy it into the folder, or name the file itself."
        )


def check_name(name: object, source: str) -> str:
    """The name of a file that another file mentions: a plain name, without a folder.

    Raises:
      UnsafePathError: it is none.
    """
    if (
        not isinstance(name, str)
        or not name
        or name.startswith(".")
        or any(mark in name for mark in "/\\\0:")
        or len(name.encode(errors="surrogatepass")) > _LONGEST_NAME
        or any(0xD800 <= ord(letter) < 0xE000 for letter in name)  # halves of characters
    ):
        raise UnsafePathError(
            f"{source} names the file {str(name)[:100]!r}, which is not the plain name of a file "
            "beside it.\nFix: do not load this; ask whoever made it."
        )
    return name
