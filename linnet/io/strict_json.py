"""JSON files from elsewhere, read with suspicion: their size and nesting are bounded first."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from linnet.errors import DamagedCheckpointError
from linnet.io import plain_files

_MOST_BYTES = 1 << 25
_MOST_CONTAINERS = 10_000
_MOST_DEPTH = 50
_MOST_DIGITS = 400
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_BRACKETS = re.compile(rb"[\[\]{}]")


def read(path: str, inside: str = "") -> bytes:
    """The bytes of a JSON file.

    Args:
      path: the file.
      inside: the folder that it may not lead out of.

    Raises:
      DamagedCheckpointError: it is too large.
    """
    with plain_files.open_to_read(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise DamagedCheckpointError(
                f"{path} has {size} bytes; {_MOST_BYTES} are allowed for a file of this kind."
            )
        return file.read(size)


def loads(path: str, data: bytes) -> Any:
    """What JSON text says.

    Raises:
      DamagedCheckpointError: it is too deep, has a key twice, or is no JSON.

    Example:
      >>> loads("here", b'{"a": [1, 2]}')
      {'a': [1, 2]}
    """
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)
