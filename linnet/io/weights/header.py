"""The header of a safetensors file: read without trust, written as the format's own library does.

A file is the length of the header (8 bytes, little-endian), the header (JSON), and the bytes of all
tensors. The header comes from somebody else, so it is taken apart piece by piece: no piece is given
to the JSON parser before its size and nesting are known, and no tensor is believed before all of
them fill the file exactly.

The package ``safetensors`` (0.8) is not used, and no dependency, because it

- maps files into memory: one that is cut off while it is read kills the process (SIGBUS), where
  ``TensorFile`` raises an error;
- opens files by name, so that between our look at a file (is it regular, is it inside its folder?)
  and its opening it could be exchanged;
- accepts a tensor name or a metadata key twice, members it does not know and shapes that no array
  can have, and its errors name neither the file nor, mostly, the tensor;
- has no float8 numbers in NumPy, and no slices of tensors without elements;
- writes all tensors of a file at once, from memory, in an order of its own: ``files.write`` holds
  one at a time, and ``like=`` keeps the order of tensors and metadata of another file.

The tests compare both directions with it, byte for byte.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from linnet.errors import NotACheckpointError, TensorFileError
from linnet.io.exported import DTYPES
from linnet.io.shared.entries import Spec
from linnet.io.shared.files import SURROGATE, repeated_keys

METADATA = "__metadata__"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_MOST_NAME = 4096
_MOST_ENTRY = 4096
_MOST_AXES = 64  # as NumPy
_PICKLES = {b"PK\x03\x04": "PyTorch", b"\x80\x02": "pickle", b"\x80\x04": "pickle"}

_NARROWER_THAN_A_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
_CODE_OF_NAME = {name: code for code, name in DTYPES.items()}
_POSITION_OF_NAME = {name: position for position, name in enumerate(DTYPES.values())}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """The type of a tensor, and where it lies in its file."""

    name: str
    spec: Spec
    start: int  # of its bytes, counted from the end of the header

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(jnp.dtype(self.spec.dtype))


def code_of(dtype: Any) -> str:
    """The format's name of a dtype; empty where it has none."""
    return _CODE_OF_NAME.get(np.dtype(dtype).name, "")


def why_no_name(name: str) -> str:
    """Why a tensor cannot have this name, in words; empty if it can."""
    if name == METADATA:
        return "that is the name of the metadata"
    if len(name) > _MOST_NAME:
        return f"a name has at most {_MOST_NAME} characters"
    if SURROGATE.search(name):
        return "that has a lone surrogate in it"
    return ""


def header_length(file: str, head: bytes, file_bytes: int) -> int:
    """The length of the header, from the first bytes of a file; refused if it cannot be."""
    length = int.from_bytes(head, "little")
    if len(head) < LENGTH_BYTES:
        why = f"it has {file_bytes} bytes, too few for a header"
    elif length > MOST_HEADER_BYTES:
        why = f"its header is said to have {length} bytes; {MOST_HEADER_BYTES} are allowed"
    elif length > file_bytes - LENGTH_BYTES:
        why = f"its header is said to have {length} bytes, but the file has {file_bytes}"
    else:
        return length
    # Looked at last, as the length of a valid header may begin with these bytes, too.
    tool = next((tool for magic, tool in _PICKLES.items() if head.startswith(magic)), "")
    if tool:
        raise NotACheckpointError(
            f"{file} is a {tool} file, which can run any code when it is opened; linnet.io never "
            "opens one.\nFix: in PyTorch, load it with weights_only=True and write it with "
            "safetensors.torch.save_file."
        )
    refuse_file(file, why)


def parse(file: str, header: bytes, data_bytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a header: the tensors by name, in the order of their bytes, and the metadata."""
    try:
        text = header.decode()
    except UnicodeDecodeError as error:
        refuse_file(file, f"its header is not UTF-8 text: {error.reason} at byte {error.start}")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] | None = None
    for name, entry in _members(file, text):
        if name in tensors or (name == METADATA and metadata is not None):
            refuse_file(file, f"its header has {name!r} twice")
        if name == METADATA:
            metadata = _metadata(file, entry)
        else:
            tensors[name] = _tensor(file, name, entry)
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.spec.nbytes))
    _check_filled(file, ordered, data_bytes)
    return {tensor.name: tensor for tensor in ordered}, metadata or {}


def refuse_file(file: str, why: str) -> NoReturn:
    raise TensorFileError(
        f"{file} is damaged or was not made by a safetensors library: {why}.\n"
        "Fix: download or write it again."
    )


# ---- the JSON, piece by piece -------------------------------------------------------------------

# Possessive quantifiers do not backtrack, so that matching takes linear time.
_STRING = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_SHORT_STRING = rf'"(?:[^"\\\x00-\x1f]|\\.){{0,{_MOST_NAME}}}+"'
_FLAT_OBJECT = r'\{(?:[^{}"]++|' + _STRING + r")*+\}"
_ANY_STRING = re.compile(_STRING)
_BLANKS = r"[ \t\n\r]*+"
_SPACE = re.compile(_BLANKS)
# A name, a colon, the position of the entry, the entry, the mark behind it; any may be missing.
_MEMBER = re.compile(
    rf"({_SHORT_STRING})?+{_BLANKS}(:)?+{_BLANKS}()({_FLAT_OBJECT})?+{_BLANKS}([\s\S]?){_BLANKS}"
)


def _members(file: str, text: str) -> Iterator[tuple[str, str]]:
    """The members of the outermost object; each value is an object without objects inside."""
    if not text.startswith("{"):
        refuse_file(file, f"its header begins with {text[:10]!r}, not with a brace")
    at = _skip(text, 1)
    mark = text[at : at + 1]
    if mark == "}":
        at += 1
    while mark != "}":
        found = _MEMBER.match(text, at)
        assert found is not None
        token, colon, _, entry, mark = found.groups()
        if token is None:
            refuse_file(
                file,
                f"its header has {text[at : at + 20]!r} at {at}, where the name of a "
                f"tensor (of at most {_MOST_NAME} characters) should be",
            )
        name = _string(file, token)
        if colon is None:
            refuse_file(file, f"its header has no colon after {name!r}")
        if entry is None:
            there = found.start(3)
            refuse_file(
                file, f"its header has {text[there : there + 20]!r} as the entry of {name!r}"
            )
        yield name, entry
        if mark not in (",", "}"):
            refuse_file(file, f"its header goes on with {mark!r} after the entry of {name!r}")
        at = found.end()
    if _skip(text, at) != len(text):
        refuse_file(file, f"its header goes on with {text[at : at + 20]!r} after its end")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _string(file: str, token: str) -> str:
    try:
        value = json.loads(token)
        value.encode()
    except ValueError as error:
        refuse_file(file, f"its header has the text {token[:40]!r}: {error}")
    return value


def _metadata(file: str, text: str) -> dict[str, str]:
    """An object of strings, read token by token."""
    metadata: dict[str, str] = {}
    at = _skip(text, 1)
    if text[at] == "}":
        return metadata
    mark = ","
    while mark == ",":
        pair = []
        for marks in (":", ",}"):
            found = _ANY_STRING.match(text, at)
            if not found:
                refuse_file(file, f"{METADATA} has {text[at : at + 20]!r} where text should be")
            pair.append(_string(file, found.group()))
            at = _skip(text, found.end())
            mark = text[at]
            if mark not in marks:
                refuse_file(
                    file, f"{METADATA} goes on with {text[at : at + 20]!r} after {pair[-1]!r}"
                )
            at = _skip(text, at + 1)
        if pair[0] in metadata:
            refuse_file(file, f"{METADATA} has {pair[0]!r} twice")
        metadata[pair[0]] = pair[1]
    return metadata


def _tensor(file: str, name: str, text: str) -> Tensor:
    if len(text) > _MOST_ENTRY:
        refuse_file(file, f"the entry of {name!r} has {len(text)} characters")
    try:
        pairs = json.loads(text, object_pairs_hook=list, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        refuse_file(file, f"the entry of {name!r} is no JSON: {error}")
    if twice := repeated_keys(pairs):
        refuse_file(file, f"the entry of {name!r} has {twice[0]!r} twice")
    facts = dict(pairs)
    if facts.keys() != {"dtype", "shape", "data_offsets"}:
        has = ", ".join(facts) or "nothing"
        refuse_file(file, f"the entry of {name!r} has {has}, not dtype, shape, data_offsets")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if code in _NARROWER_THAN_A_BYTE:
        raise TensorFileError(
            f"{file} holds {name!r} as {code}, less than a byte a number, which Linnet does not "
            "read.\nFix: convert it to F8_E4M3 or BF16 first."
        )
    if not isinstance(code, str) or code not in DTYPES:
        refuse_file(file, f"{name!r} is said to have the unknown dtype {str(code)[:40]!r}")
    # Also beside an axis of size 0, where there are no elements: NumPy refuses such shapes.
    if (
        not _are_sizes(shape)
        or len(shape) > _MOST_AXES
        or math.prod(max(size, 1) for size in shape) >= 2**59
    ):
        refuse_file(file, f"{name!r} is said to have the shape {str(shape)[:60]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse_file(file, f"{name!r} is said to lie at {str(offsets)[:60]}")
    spec = Spec("array", DTYPES[code], tuple(shape))
    if spec.nbytes != offsets[1] - offsets[0]:
        refuse_file(
            file,
            f"{name!r} is said to be {code}{list(shape)}, which takes {spec.nbytes} bytes, "
            f"but to lie at {offsets}, which are {offsets[1] - offsets[0]}",
        )
    return Tensor(name, spec, offsets[0])


def _integer(digits: str) -> int:
    # Other readers do not take -0 for 0, so it is refused as a negative number is.
    return -1 if digits == "-0" else int(digits)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _check_filled(file: str, ordered: Iterable[Tensor], data_bytes: int) -> None:
    """Refuses tensors that overlap, leave gaps, or end before or behind the end of the file."""
    end, last = 0, ""
    for tensor in ordered:
        if tensor.start < end:
            refuse_file(file, f"{tensor.name!r} and {last!r} overlap at byte {tensor.start}")
        if tensor.start > end:
            refuse_file(file, f"no tensor has the bytes {end} to {tensor.start}")
        end, last = tensor.start + tensor.spec.nbytes, tensor.name
    if end != data_bytes:
        what = "was cut off" if end > data_bytes else "goes on behind them"
        refuse_file(file, f"its tensors take {end} bytes and it holds {data_bytes}; it {what}")


# ---- writing ------------------------------------------------------------------------------------


def arrange(specs: Mapping[str, Spec]) -> list[Tensor]:
    """Tensors in the order in which the format's own library writes them."""
    names = sorted(specs, key=lambda name: (-_POSITION_OF_NAME[specs[name].dtype], name.encode()))
    starts = itertools.accumulate((specs[name].nbytes for name in names), initial=0)
    return [Tensor(name, specs[name], start) for name, start in zip(names, starts, strict=False)]


def encode(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file: the length of the header, and the header."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": code_of(tensor.dtype),
            "shape": list(tensor.spec.shape),
            "data_offsets": [tensor.start, tensor.start + tensor.spec.nbytes],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
