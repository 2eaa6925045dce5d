"""Safetensors files to read from: one, or several that an index names as one."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from linnet.errors import CheckpointNotFoundError, NotACheckpointError, TensorFileError
from linnet.io import folders, plain_files, strict_json, tensor_header
from linnet.io.paths import first_names
from linnet.io.tensor_header import LENGTH_BYTES, Tensor, refuse

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_PICKLES = {b"PK\x03\x04": "PyTorch", b"\x80\x02": "pickle", b"\x80\x04": "pickle"}
_MOST_SHARDS = 10_000
_PIECE = 1 << 20
_MOST_AT_ONCE = 1 << 30  # systems give up at 2 GB


class TensorFile:
    """One open safetensors file.

    Args:
      path: the file.
      inside: the folder that it may not lead out of; empty for a path that the user gave.

    Raises:
      TensorFileError: its header is refused.
    """

    def __init__(self, path: str, inside: str = ""):
        self.path = path
        self._file = plain_files.open_to_read(path, inside)
        try:
            size = os.fstat(self._file.fileno()).st_size
            length = _header_length(path, self._file.read(LENGTH_BYTES), size)
            self._data = LENGTH_BYTES + length
            header = bytearray(length)
            self._read_into(memoryview(header), LENGTH_BYTES)
            self.tensors, self.metadata = tensor_header.parse(
                path, bytes(header), size - self._data
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
        """The values of a tensor, or of a part of it.

        Args:
          name: the tensor.
          index: positions on its first axes.

        Raises:
          TensorFileError: the file was cut off in the meantime, or a boolean is neither 0 nor 1.
        """
        tensor = self.tensors[name]
        start, shape = self._data + tensor.start, tensor.shape
        for position in index:
            shape = shape[1:]
            start += position * math.prod(shape) * tensor.dtype.itemsize
        array = np.empty(shape, tensor.dtype)
        raw = array.reshape(-1).view(np.uint8)
        self._read_into(raw.data, start)
        if array.dtype == np.bool_ and raw.size and raw.max() > 1:
            refuse(self.path, f"{name!r} is boolean and has the value {raw.max()}")
        return array

    def raw(self, tensor: Tensor, start: int) -> bytes:
        """Some bytes of a tensor."""
        piece = bytearray(min(_PIECE, tensor.nbytes - start))
        self._read_into(memoryview(piece), self._data + tensor.start + start)
        return bytes(piece)

    def _read_into(self, buffer: memoryview, start: int) -> None:
        done = 0
        self._file.seek(start)
        while done < len(buffer):
            count = self._file.readinto(buffer[done : done + _MOST_AT_ONCE])
            if not count:
                refuse(self.path, "it was cut off while it was read")
            done += count


def _header_length(path: str, head: bytes, size: int) -> int:
    try:
        return tensor_header.header_length(path, head, size)
    except TensorFileError as error:
        # Not before: the length of a header may begin with these bytes, too.
        tool = next((tool for magic, tool in _PICKLES.items() if head.startswith(magic)), "")
        if not tool:
            raise
        raise NotACheckpointError(
            f"{path} is a {tool} file, which can run any code when it is opened; linnet.io never "
            "opens one.\nFix: in PyTorch, load it with weights_only=True and write it with "
            "safetensors.torch.save_file."
        ) from error


@dataclasses.dataclass
class TensorFiles:
    """Open safetensors files, seen as one.

    Args:
      path: what they are called in messages.
      files: the files by name, in the order of the index.
      homes: the name of the file that each tensor is in.
      index: the name of the index and its bytes, where there is one.
    """

    path: str
    files: dict[str, TensorFile]
    homes: dict[str, str]
    index: tuple[str, bytes] | None = None

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: self.files[home].tensors[name] for name, home in self.homes.items()}

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
        """The values of a tensor, or of the part at some positions on its first axes."""
        return self.files[self.homes[name]].read(name, index)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type and the same bytes."""
        (a, first), (b, second) = (
            (self.files[self.homes[x]], self.tensors[x]) for x in (name, other)
        )
        if (first.code, first.shape) != (second.code, second.shape):
            return False
        pieces = range(0, first.nbytes, _PIECE)
        return all(a.raw(first, start) == b.raw(second, start) for start in pieces)


def open_tensors(path: Any) -> TensorFiles:
    """Opens a safetensors file, an index, or a folder with either.

    Raises:
      CheckpointNotFoundError: there is nothing.
      NotACheckpointError: there is something else.
      TensorFileError: a header or the index is refused.
      UnsafePathError: the index names a file outside of its folder.
    """
    place = folders.local_path(path)
    if not os.path.lexists(place):
        raise CheckpointNotFoundError(f"There is no {place}.\nFix: check the path.")
    folder = ""
    if os.path.isdir(place):
        folder, place = place, os.path.join(place, _choose(place))
    if place.endswith(".json"):
        return _open_sharded(place, folder)
    file = TensorFile(place, folder)
    name = os.path.basename(place)
    return TensorFiles(place, {name: file}, dict.fromkeys(file.tensors, name))


def _choose(folder: str) -> str:
    """The file to open in a folder."""
    names = sorted(os.listdir(folder))
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [name for name in names if name.endswith(suffix)]
        if f"model{suffix}" in found:
            return f"model{suffix}"
        if len(found) == 1:
            return found[0]
        if found:
            raise NotACheckpointError(
                f"{folder} holds {first_names(found)} and none of them is model{suffix}.\n"
                "Fix: name the one to open."
            )
    raise NotACheckpointError(
        f"{folder} holds no safetensors file; it holds {first_names(names) or 'nothing'}.\n"
        "Fix: name the folder that they are in; in PyTorch, safetensors.torch.save_file makes one."
    )


def _open_sharded(path: str, inside: str) -> TensorFiles:
    folder = os.path.dirname(path)
    raw = strict_json.read(path, inside)
    homes = _weight_map(path, strict_json.loads(path, raw))
    opened = TensorFiles(path, {}, homes, (os.path.basename(path), raw))
    try:
        for name in dict.fromkeys(homes.values()):
            place = os.path.join(folder, name)
            if not os.path.lexists(place):
                raise CheckpointNotFoundError(
                    f"{path} names {name}, and there is no such file.\n"
                    "Fix: download or copy all files that the index names."
                )
            opened.files[name] = TensorFile(place, folder)
        _check_index(path, opened)
    except BaseException:
        opened.__exit__()
        raise
    return opened


def _weight_map(path: str, index: Any) -> dict[str, str]:
    homes = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(homes, Mapping) or not all(isinstance(x, str) for x in homes.values()):
        raise TensorFileError(
            f"{path} has no weight_map from the names of tensors to the names of files.\n"
            "Fix: name the index of a sharded safetensors model."
        )
    shards = set(homes.values())
    if len(shards) > _MOST_SHARDS:
        raise TensorFileError(f"{path} names {len(shards)} files; {_MOST_SHARDS} are allowed.")
    for name in shards:
        plain_files.check_name(name, path)
    return dict(homes)


def _check_index(path: str, opened: TensorFiles) -> None:
    """Refuses an index that does not say what the files hold."""
    for name, home in opened.homes.items():
        if name not in opened.files[home].tensors:
            raise TensorFileError(
                f"{path} says that {name} is in {home}, but it is not.\n"
                "Fix: download or write the index again."
            )
    for home, file in opened.files.items():
        for name in file.tensors:
            if name not in opened.homes:
                raise TensorFileError(
                    f"{home} holds {name}, which {path} does not name.\n"
                    "Fix: download or write the index again."
                )
