"""Safetensors files, one or several that an index names as one: opening them, and writing them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from linnet.errors import CheckpointNotFoundError, NotACheckpointError, TensorFileError
from linnet.io.shared import folders
from linnet.io.shared.entries import Spec, first_names, grouped, leaf_spec
from linnet.io.shared.files import (
    check_name,
    flush,
    open_to_read,
    parse_json,
    read_json,
    write_through,
)
from linnet.io.weights import header as header_lib
from linnet.io.weights.header import LENGTH_BYTES, Tensor, refuse_file

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
STEM = "model"
_MOST_SHARDS = 10_000
_PIECE = 1 << 20
_MOST_AT_ONCE = 1 << 30  # operating systems read less than 2 GB in one call


class TensorFile:
    """One open safetensors file; ``inside`` is the folder that links may not lead out of."""

    def __init__(self, path: str, inside: str = ""):
        self.path = path
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open_to_read(path, inside))
            size = os.fstat(self._file.fileno()).st_size
            length = header_lib.header_length(path, self._file.read(LENGTH_BYTES), size)
            self._data = LENGTH_BYTES + length
            header = bytearray(length)
            self._read_into(memoryview(header), LENGTH_BYTES)
            self.tensors, self.metadata = header_lib.parse(path, bytes(header), size - self._data)
            stack.pop_all()

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
        """Reads a tensor, or the part at the positions ``index`` on its first axes."""
        tensor = self.tensors[name]
        start, shape = self._data + tensor.start, tensor.spec.shape
        for position in index:
            shape = shape[1:]
            start += position * math.prod(shape) * tensor.dtype.itemsize
        array = np.empty(shape, tensor.dtype)
        raw = array.reshape(-1).view(np.uint8)
        self._read_into(raw.data, start)
        if array.dtype == np.bool_ and raw.size and raw.max() > 1:
            refuse_file(self.path, f"{name!r} is boolean and has the value {raw.max()}")
        return array

    def raw(self, tensor: Tensor, start: int) -> bytes:
        piece = bytearray(min(_PIECE, tensor.spec.nbytes - start))
        self._read_into(memoryview(piece), self._data + tensor.start + start)
        return bytes(piece)

    def _read_into(self, buffer: memoryview, start: int) -> None:
        done = 0
        self._file.seek(start)
        while done < len(buffer):
            count = self._file.readinto(buffer[done : done + _MOST_AT_ONCE])
            if not count:
                refuse_file(self.path, "it was cut off while it was read")
            done += count


@dataclasses.dataclass
class TensorFiles(contextlib.AbstractContextManager["TensorFiles"]):
    """Open safetensors files, seen as one; by default none."""

    path: str = ""  # of the file or the index
    files: dict[str, TensorFile] = dataclasses.field(default_factory=dict)  # by name
    weight_map: dict[str, str] = dataclasses.field(default_factory=dict)  # the file of each tensor
    index: tuple[str, bytes] | None = None  # its name and its bytes

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {name: self.files[file].tensors[name] for name, file in self.weight_map.items()}

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
        return self.files[self.weight_map[name]].read(name, index)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type and the same bytes."""
        (a, first), (b, second) = (
            (self.files[self.weight_map[x]], self.tensors[x]) for x in (name, other)
        )
        pieces = range(0, first.spec.nbytes, _PIECE)
        same = (a.raw(first, start) == b.raw(second, start) for start in pieces)
        return first.spec == second.spec and all(same)


def open_tensors(path: Any) -> TensorFiles:
    """Opens a safetensors file, an index with all files that it names, or a folder with either."""
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
    names = sorted(os.listdir(folder))
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [name for name in names if name.endswith(suffix)]
        if f"{STEM}{suffix}" in found:
            return f"{STEM}{suffix}"
        if len(found) == 1:
            return found[0]
        if found:
            raise NotACheckpointError(
                f"{folder} holds {first_names(found)} and none of them is {STEM}{suffix}.\n"
                "Fix: name the one to open."
            )
    raise NotACheckpointError(
        f"{folder} holds no safetensors file; it holds {first_names(names) or 'nothing'}.\n"
        "Fix: name the folder that they are in; in PyTorch, safetensors.torch.save_file makes one."
    )


def _open_sharded(path: str, inside: str) -> TensorFiles:
    folder = os.path.dirname(path)
    raw = read_json(path, inside)
    weight_map = _weight_map(path, parse_json(path, raw))
    with contextlib.ExitStack() as stack:
        opened = TensorFiles(path, {}, weight_map, (os.path.basename(path), raw))
        stack.enter_context(opened)
        for name in dict.fromkeys(weight_map.values()):
            place = os.path.join(folder, name)
            if not os.path.lexists(place):
                raise CheckpointNotFoundError(
                    f"{path} names {name}, and there is no such file.\n"
                    "Fix: download or copy all files that the index names."
                )
            opened.files[name] = TensorFile(place, folder)
        _check_index(path, opened)
        stack.pop_all()
    return opened


def _weight_map(path: str, index: Any) -> dict[str, str]:
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, Mapping) or not all(isinstance(x, str) for x in found.values()):
        raise TensorFileError(
            f"{path} has no weight_map from the names of tensors to the names of files.\n"
            "Fix: name the index of a sharded safetensors model."
        )
    shards = set(found.values())
    if len(shards) > _MOST_SHARDS:
        raise TensorFileError(f"{path} names {len(shards)} files; {_MOST_SHARDS} are allowed.")
    for name in shards:
        check_name(name, path)
    return dict(found)


def _check_index(path: str, opened: TensorFiles) -> None:
    """Refuses an index that does not say what the files hold."""
    lacking = (
        f"{path} says that {name} is in {file_name}, but it is not"
        for name, file_name in opened.weight_map.items()
        if name not in opened.files[file_name].tensors
    )
    unnamed = (
        f"{file_name} holds {name}, which {path} does not name"
        for file_name, file in opened.files.items()
        for name in file.tensors
        if name not in opened.weight_map
    )
    for complaint in itertools.chain(lacking, unnamed):
        raise TensorFileError(f"{complaint}.\nFix: download or write the index again.")


# ---- writing ------------------------------------------------------------------------------------

Layout = dict[str, tuple[list[Tensor], Mapping[str, str]]]  # file -> its tensors, its metadata

_OF_MODEL = re.compile(
    rf"{STEM}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}|{STEM}{re.escape(INDEX_SUFFIX)}"
)


def lay_out(
    specs: Mapping[str, Spec], most_bytes: int | None, metadata: Mapping[str, str]
) -> Layout:
    """Divides tensors over files of at most ``most_bytes``; a larger tensor has its own file."""
    names = list(specs) if most_bytes is None else sorted(specs, key=_natural)
    sizes = {name: specs[name].nbytes for name in names}
    shards = grouped(sizes, math.inf if most_bytes is None else most_bytes)
    count = len(shards)
    files = [f"{STEM}-{n:05d}-of-{count:05d}{SUFFIX}" for n in range(1, count + 1)]
    files = files if count > 1 else [f"{STEM}{SUFFIX}"]
    return {
        file: (header_lib.arrange({name: specs[name] for name in shard}), metadata)
        for file, shard in zip(files, shards, strict=True)
    }


def _natural(name: str) -> list[Any]:
    """A sort key that puts layer 10 behind layer 9."""
    # The parts of a split are text and numbers in turn.
    pieces = re.split(r"(\d+)", name)
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)]


def index_of(layout: Layout) -> tuple[str, bytes]:
    """The name and the bytes of the index, as Hugging Face's libraries write it."""
    weight_map = {tensor.name: file for file, (tensors, _) in layout.items() for tensor in tensors}
    facts = {"metadata": {"total_size": _total(layout)}, "weight_map": weight_map}
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    return STEM + INDEX_SUFFIX, text.encode()


def _total(layout: Layout) -> int:
    return sum(tensor.spec.nbytes for tensors, _ in layout.values() for tensor in tensors)


def write(
    folder: str,
    layout: Layout,
    values: Callable[[str], Any],
    *,
    overwrite: bool,
    index: tuple[str, bytes] | None = None,
) -> None:
    """Writes files of a model, with the name and the bytes of their index: all of them or none."""
    # `values` gives the values of a tensor by its name; it is called once for each, in order. All
    # files are written under temporary names first. Before the files of an older model are
    # replaced, its index is removed, and the new one comes last: no index ever names files of two
    # models.
    finals = [os.path.join(folder, file) for file in layout]
    if index:
        finals.append(os.path.join(folder, index[0]))
    for final in finals:
        folders.prepare(final, _total(layout), overwrite=overwrite, is_checkpoint=False)
    news = [final + folders.REPLACEMENT for final in finals]
    try:
        for new, (tensors, metadata) in zip(news, layout.values(), strict=False):
            with open(new, "wb") as file:
                file.write(header_lib.encode(tensors, metadata))
                for tensor in tensors:
                    array = np.asarray(values(tensor.name), order="C")
                    assert leaf_spec(array) == tensor.spec, tensor.name
                    file.write(array.reshape(-1).view(np.uint8).data)
                flush(file)
        if index:
            write_through(news[-1], index[1])
        _put_in_place(folder, news, finals, is_model=bool(index) or f"{STEM}{SUFFIX}" in layout)
    except OSError as error:
        raise folders.write_error(folder, error) from error
    finally:
        _remove(news)


def _put_in_place(folder: str, news: list[str], finals: list[str], *, is_model: bool) -> None:
    kept = set(map(os.path.basename, finals))
    old = [name for name in os.listdir(folder) if is_model and _OF_MODEL.fullmatch(name)]
    index = os.path.join(folder, STEM + INDEX_SUFFIX)
    if is_model and os.path.lexists(index):
        os.unlink(index)
        folders.flush_folder(folder)
    for new, final in zip(news, finals, strict=True):
        os.replace(new, final)
    _remove(os.path.join(folder, name) for name in old if name not in kept)
    folders.flush_folder(folder)


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
