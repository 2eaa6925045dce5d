"""Opening files that other programs may have written, and writing files durably.

A file from elsewhere is not trusted: regular files only, inside their folder only, and JSON
with bounds on its size and nesting.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from io import FileIO
from typing import Any

from linnet.errors import CheckpointNotFoundError, DamagedCheckpointError, UnsafePathError

# ---- opening ------------------------------------------------------------------------------------

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LONGEST_NAME = 255
SURROGATE = re.compile("[\ud800-\udfff]")  # UTF-8 has no bytes for it
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def open_to_read(path: str, inside: str = "") -> FileIO:
    """Opens a regular file, and no device, pipe or folder."""
    # `inside` is the folder that links may not lead out of; empty for a path that the user gave.
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
    home = os.path.realpath(inside)
    allowed = [home]
    # The Hugging Face cache keeps the files of `repo/snapshots/x` in `repo/blobs`.
    above, _ = os.path.split(home)
    if os.path.basename(above) == "snapshots":
        allowed.append(os.path.join(os.path.dirname(above), "blobs"))
    if not any(os.path.commonpath([real, folder]) == folder for folder in allowed):
        raise UnsafePathError(
            f"{path} leads to {real}, outside of its folder.\n"
            "Fix: if you trust it, copy it into the folder, or name the file itself."
        )


def check_name(name: str, source: str) -> None:
    """Refuses a name that another file mentions, unless it is a plain one without a folder."""
    if (
        not name
        or name.startswith(".")
        or any(mark in name for mark in "/\\\0:")
        or SURROGATE.search(name)
        or len(name.encode()) > _LONGEST_NAME
    ):
        raise UnsafePathError(
            f"{source} names the file {name[:100]!r}, which is not the plain name of a file "
            "beside it.\nFix: do not load this; ask whoever made it."
        )


# ---- JSON from elsewhere -----------------------------------------------------------------------

_MOST_BYTES = 1 << 25
_MOST_CONTAINERS = 10_000
_MOST_DEPTH = 50
_MOST_DIGITS = 400
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_BRACKETS = re.compile(rb"[\[\]{}]")


def read_json(path: str, inside: str = "") -> bytes:
    """The bytes of a JSON file, unless it is too large; ``inside`` as for ``open_to_read``."""
    with open_to_read(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise DamagedCheckpointError(
                f"{path} has {size} bytes; {_MOST_BYTES} are allowed for a file of this kind."
            )
        return file.read(size)


def parse_json(path: str, data: bytes) -> Any:
    """Parses JSON text that is not too deep and has no key twice; ``path`` is for errors."""
    # Brackets inside text are counted, too: a real index has very few of them.
    containers = data.count(b"[") + data.count(b"{")
    if containers > _MOST_CONTAINERS:
        raise DamagedCheckpointError(
            f"{path} has {containers} lists and objects; {_MOST_CONTAINERS} are allowed."
        )
    if _depth(data) > _MOST_DEPTH:
        raise DamagedCheckpointError(f"{path} is nested more than {_MOST_DEPTH} deep.")
    try:
        return json.loads(
            data, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer
        )
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is not proper JSON: {error}.") from error


def _depth(data: bytes) -> int:
    deepest = depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def repeated_keys(pairs: list[tuple[str, Any]]) -> list[str]:
    return [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := repeated_keys(pairs):
        raise ValueError(f"it has the key {twice[0][:80]!r} twice")
    return dict(pairs)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


# ---- writing ------------------------------------------------------------------------------------


def write_through(path: str, *pieces: bytes) -> None:
    """Writes a file, and waits until its bytes are on the disk."""
    with open(path, "wb") as file:
        file.writelines(pieces)
        flush(file)


def flush(file: Any) -> None:
    """Waits until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_path(path: str) -> None:
    """Waits until a closed file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
