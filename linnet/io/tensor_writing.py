"""Writing safetensors files, one or several with an index: all of them whole, or none."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from linnet.io import folders, tensor_header
from linnet.io.entries import Spec
from linnet.io.tensor_files import INDEX_SUFFIX, SUFFIX
from linnet.io.tensor_header import Tensor

Layout = dict[str, tuple[list[Tensor], Mapping[str, str]]]  # file -> its tensors, its metadata

STEM = "model"
_NUMBERED = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}")
_DIGITS = re.compile(r"(\d+)")


def lay_out(
    specs: Mapping[str, Spec], most_bytes: int | None, metadata: Mapping[str, str]
) -> Layout:
    """Divides tensors over files of at most so many bytes; a larger tensor has its own."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name in sorted(specs, key=_natural) if most_bytes is not None else specs:
        size = specs[name].nbytes
        if most_bytes is not None and shards[-1] and filled + size > most_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = specs[name]
        filled += size
    return {
        file: (tensor_header.arrange(shard), metadata)
        for file, shard in zip(_file_names(len(shards)), shards, strict=True)
    }


def _natural(name: str) -> list[Any]:
    """Sorts layer 10 behind layer 9."""
    pieces = _DIGITS.split(name)
    return [(int(piece), "") if n % 2 else (-1, piece) for n, piece in enumerate(pieces)]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [f"{STEM}{SUFFIX}"]
    return [f"{STEM}-{n:05d}-of-{count:05d}{SUFFIX}" for n in range(1, count + 1)]


def index_of(layout: Layout) -> tuple[str, bytes]:
    """The index of several files and its name, as Hugging Face's libraries write it."""
    homes = {tensor.name: file for file, (tensors, _) in layout.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors, _ in layout.values() for tensor in tensors)
    facts = {"metadata": {"total_size": total}, "weight_map": homes}
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    return STEM + INDEX_SUFFIX, text.encode()


def write(
    folder: str,
    layout: Layout,
    values: Callable[[str], Any],
    *,
    overwrite: bool,
    index: tuple[str, bytes] | None = None,
) -> None:
    """Writes files.

    All are written under other names first. Before the files of an older model are replaced, its
    index goes, and the new one comes last, so that no index ever names files of two models.

    Args:
      folder: where.
      layout: what is in each file.
      values: gives the values of a tensor by its name; called once for each, in order.
      overwrite: files may be there already.
      index: the name of the index, and its contents.

    Raises:
      CheckpointExistsError: something is there already.
      CheckpointWriteError: there is no room or no permission; what was there before is intact.
    """
    finals = [os.path.join(folder, file) for file in layout]
    if index:
        finals.append(os.path.join(folder, index[0]))
    total = sum(tensor.nbytes for tensors, _ in layout.values() for tensor in tensors)
    for final in finals:
        folders.prepare(final, total, overwrite=overwrite, is_checkpoint=False)
    news = [final + folders.REPLACEMENT for final in finals]
    try:
        for new, (tensors, metadata) in zip(news, layout.values(), strict=False):
            _write_file(new, tensors, metadata, values)
        if index:
            with open(news[-1], "wb") as file:
                file.write(index[1])
                _flush(file)
        _put_in_place(folder, news, finals, is_model=bool(index) or f"{STEM}{SUFFIX}" in layout)
    except OSError as error:
        _remove(news)
        raise folders.write_error(folder, error) from error
    except BaseException:
        _remove(news)
        raise


def _write_file(
    path: str, tensors: Sequence[Tensor], metadata: Mapping[str, str], values: Callable[[str], Any]
) -> None:
    with open(path, "wb") as file:
        file.write(tensor_header.encode(tensors, metadata))
        for tensor in tensors:
            array = np.asarray(values(tensor.name), order="C")
            assert (array.dtype, array.shape) == (tensor.dtype, tensor.shape), tensor.name
            file.write(array.reshape(-1).view(np.uint8).data)
        _flush(file)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _put_in_place(folder: str, news: list[str], finals: list[str], *, is_model: bool) -> None:
    kept = set(map(os.path.basename, finals))
    old = [name for name in os.listdir(folder) if is_model and _is_of_model(name)]
    index = os.path.join(folder, STEM + INDEX_SUFFIX)
    if is_model and os.path.lexists(index):
        os.unlink(index)
        folders.flush_folder(folder)
    for new, final in zip(news, finals, strict=True):
        os.replace(new, final)
    _remove(os.path.join(folder, name) for name in old if name not in kept)
    folders.flush_folder(folder)


def _is_of_model(name: str) -> bool:
    return name in (STEM + SUFFIX, STEM + INDEX_SUFFIX) or bool(_NUMBERED.fullmatch(name))


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
