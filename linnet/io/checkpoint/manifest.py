"""The manifest of a checkpoint: every entry with its type, plain values, checksums of all files.

It is written when all arrays are, into the folder that is then renamed to its final name, so a
folder with a manifest is a whole checkpoint; the checksums tell whether it still is one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from linnet.errors import DamagedCheckpointError
from linnet.io.shared.entries import Path, Spec, decode_value, encode_value, key_implementations
from linnet.io.shared.files import flush_path, write_through
from linnet.io.shared.folders import MANIFEST, ORBAX_CHECKPOINT

FORMAT = "linnet checkpoint"
VERSION = 1

# Orbax writes these after the manifest; nothing that is restored depends on them.
_UNCHECKED = {MANIFEST, ORBAX_CHECKPOINT, "commit_success.txt"}
_LARGEST = 1 << 28
_PIECE = 1 << 26
_BUFFER = 1 << 18
_FLUSHED = 1 << 18  # bytes; TensorStore flushes larger files of its own
_TENSORSTORE = "d"  # the name of the folders with its data
_SMALL = 1 << 20
_CONTAINER_NAMES = ("list", "tuple", "dict")


@dataclasses.dataclass
class StoredEntry:
    """What the manifest says of one entry of a checkpoint: its type, and where its value is."""

    spec: Spec
    name: tuple[str, ...] = ()  # in the Orbax tree; empty where the manifest alone holds it
    value: Any = None  # of a plain value
    host: bool = False  # a NumPy array or number, not a JAX array
    variable: str = ""  # the class name of the Variable, for people who read the manifest
    scalar: bool = False  # a NumPy number, not an array


Position = tuple[dict[Path, Any], dict[Path, str]]  # an iterator's: plain values and containers


@dataclasses.dataclass
class Manifest:
    """What a checkpoint holds."""

    entries: dict[Path, StoredEntry]
    containers: dict[Path, str]  # lists, tuples and dicts outside of objects
    aliases: list[tuple[Path, Path]]  # pairs of paths that led to one object
    score: float | None = None
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)  # size, checksum
    # The position in each process, of iterators for which it was not the same in all of them.
    positions: dict[Path, list[Position]] = dataclasses.field(default_factory=dict)

    def in_process(self, number: int, count: int) -> Manifest:
        """The manifest with the positions of one process, if ``count`` processes saved theirs."""
        entries, containers = self.entries, self.containers
        for top, positions in self.positions.items():
            if len(positions) == count:
                values, own = positions[number]
                entries = {p: x for p, x in entries.items() if p[: len(top)] != top}
                entries |= {
                    p: StoredEntry(Spec("value", type(x).__name__), value=x)
                    for p, x in values.items()
                }
                containers = {p: x for p, x in containers.items() if p[: len(top)] != top} | own
        return dataclasses.replace(self, entries=entries, containers=containers)


def write(folder: str, manifest: Manifest) -> None:
    """Takes checksums of the files in a folder, flushes all of it, and writes the manifest."""
    root = pathlib.Path(folder)
    below = list(root.rglob("*"))
    found = (path.relative_to(root).as_posix() for path in below if not path.is_dir())
    names = sorted(name for name in found if name not in _UNCHECKED)
    files = dict(zip(names, checksums(folder, names), strict=True))
    for name, (size, _) in files.items():
        if size < _FLUSHED or pathlib.PurePath(name).parent.name != _TENSORSTORE:
            flush_path(os.path.join(folder, name))
    for path in filter(pathlib.Path.is_dir, below):
        flush_path(os.fspath(path))
    text = json.dumps(_to_json(dataclasses.replace(manifest, files=files)), separators=(",", ":"))
    body = text.encode()
    path = os.path.join(folder, MANIFEST)
    write_through(path, b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body))
    flush_path(folder)


def checksums(folder: str, names: Iterable[str]) -> list[tuple[int, int]]:
    """Size and CRC-32 of files; of a large file, the CRC-32 of the CRC-32s of its pieces."""
    paths = [os.path.join(folder, name) for name in names]
    sizes = [os.lstat(path).st_size for path in paths]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        pieces = [
            [pool.submit(_checksum, path, start) for start in range(0, max(size, 1), _PIECE)]
            for path, size in zip(paths, sizes, strict=True)
        ]
    found = [[piece.result() for piece in parts] for parts in pieces]
    sums = [
        parts[0] if len(parts) == 1 else zlib.crc32(struct.pack(f"<{len(parts)}I", *parts))
        for parts in found
    ]
    return list(zip(sizes, sums, strict=True))


def _checksum(path: str, start: int) -> int:
    buffer = memoryview(bytearray(_BUFFER))
    value, left = 0, _PIECE
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _BUFFER)])):
            value = zlib.crc32(buffer[:count], value)
            left -= count
    return value


def is_in(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, MANIFEST))


def read(folder: str) -> Manifest:
    """Reads the manifest of a checkpoint, unless it is damaged."""
    path = os.path.join(folder, MANIFEST)
    try:
        if os.path.getsize(path) > _LARGEST:
            raise DamagedCheckpointError(f"{path} is larger than any manifest.")
        with open(path, "rb") as file:
            raw = file.read()
        head, _, body = raw.partition(b',"manifest":')
        body = body.removesuffix(b"}\n")
        if head != b'{"crc32":%d' % zlib.crc32(body):
            raise DamagedCheckpointError(f"{path} is not what was written.")
        return _from_json(json.loads(body))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error


def complaint(folder: str, manifest: Manifest, *, verify: bool) -> str:
    """Which file is missing or of another size or, with ``verify``, checksum; empty if none is."""
    root = os.path.realpath(folder)
    for name, (size, _) in manifest.files.items():
        path = os.path.join(root, name)
        try:
            found = os.lstat(path)
        except OSError:
            return f"{name} is not there"
        if not stat.S_ISREG(found.st_mode) or os.path.realpath(path) != path:
            return f"{name} is not a regular file inside the folder"
        if found.st_size != size:
            return f"{name} has {found.st_size} bytes, but {size} were written"
    if not verify:
        return ""
    try:
        sums = checksums(folder, manifest.files)
    except OSError as error:
        return str(error)
    for (name, written), facts in zip(manifest.files.items(), sums, strict=True):
        if facts != written:
            return f"{name} is not what was written: its checksum differs"
    return ""


def _to_json(manifest: Manifest) -> dict[str, Any]:
    by_top = manifest.positions.items()
    positions = [[list(top), list(map(position_to_json, found))] for top, found in by_top]
    return ({"positions": positions} if positions else {}) | {
        "format": FORMAT,
        "version": VERSION,
        "time": round(time.time(), 3),
        "score": encode_value(manifest.score),
        "entries": [_entry_to_json(path, entry) for path, entry in manifest.entries.items()],
        "containers": [[list(path), container] for path, container in manifest.containers.items()],
        "aliases": [[list(path), list(other)] for path, other in manifest.aliases],
        "files": {name: list(facts) for name, facts in manifest.files.items()},
    }


def position_to_json(position: Position) -> list[Any]:
    values, containers = position
    encoded = [[list(path), encode_value(value)] for path, value in values.items()]
    return [encoded, [[list(path), container] for path, container in containers.items()]]


def position_from_json(data: Any) -> Position:
    values, containers = data
    decoded = {_path(path): decode_value(value) for path, value in values}
    return decoded, {
        _path(path): _one_of(container, _CONTAINER_NAMES) for path, container in containers
    }


def _entry_to_json(path: Path, entry: StoredEntry) -> dict[str, Any]:
    spec = entry.spec
    facts: dict[str, Any] = {"path": list(path), "is": spec.category, "dtype": spec.dtype}
    if spec.is_value:
        facts["value"] = encode_value(entry.value)
    else:
        facts["shape"] = list(spec.shape)
    more = {"name": entry.name, "host": entry.host, "kind": entry.variable, "scalar": entry.scalar}
    return facts | {key: value for key, value in more.items() if value}


def _from_json(data: Mapping[str, Any]) -> Manifest:
    if data["format"] != FORMAT or data["version"] > VERSION:
        raise DamagedCheckpointError(
            f"The manifest is of format {data['format']!r}, version {data['version']!r}; this "
            f"version of Linnet reads {FORMAT!r} up to {VERSION}; a newer Linnet may read it."
        )
    entries = dict(_entry_from_json(facts) for facts in data["entries"])
    files = {
        _inside(name): (_count(size), _count(checksum))
        for name, (size, checksum) in data["files"].items()
    }
    manifest = Manifest(
        entries,
        {
            _path(path): _one_of(container, _CONTAINER_NAMES)
            for path, container in data["containers"]
        },
        [(_path(path), _path(other)) for path, other in data["aliases"]],
        decode_value(data["score"]),
        files,
        {
            _path(top): [position_from_json(position) for position in positions]
            for top, positions in data.get("positions", ())
        },
    )
    # Small arrays may be stored compressed; nothing can make the large ones smaller.
    sizes = (entry.spec.nbytes for entry in entries.values() if entry.name)
    promised = sum(size for size in sizes if size > _SMALL)
    if promised > sum(size for size, _ in files.values()):
        raise DamagedCheckpointError("The entries are larger than the files that hold them.")
    return manifest


def _entry_from_json(facts: Mapping[str, Any]) -> tuple[Path, StoredEntry]:
    category, dtype = _one_of(facts["is"], ("array", "key", "value")), facts["dtype"]
    value = None
    if category == "value":
        value = decode_value(facts["value"])
        spec = Spec("value", type(value).__name__)
    else:
        if category == "key":
            _one_of(dtype, key_implementations())
        spec = Spec(category, dtype, tuple(_count(size) for size in facts["shape"]))
        spec.nbytes  # noqa: B018  raises for a dtype that there is not
    name = tuple(_one_of(type(step), (str,)) and step for step in facts.get("name", ()))
    host, scalar = bool(facts.get("host")), bool(facts.get("scalar"))
    return _path(facts["path"]), StoredEntry(spec, name, value, host, scalar=scalar)


def _path(steps: Any) -> Path:
    if not steps or any(type(step) not in (str, int) for step in steps):
        raise ValueError(f"{steps!r} is no path")
    return tuple(steps)


def _inside(name: str) -> str:
    parts = name.split("/")
    if os.path.isabs(name) or any(part in ("", ".", "..") for part in parts) or "\\" in name:
        raise ValueError(f"{name!r} is not inside the checkpoint")
    return name


def _one_of(value: Any, allowed: Any) -> Any:
    if value not in allowed:
        raise ValueError(f"{value!r} is not allowed here")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
