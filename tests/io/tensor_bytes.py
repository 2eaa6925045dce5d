"""Safetensors files made by hand, right or wrong in one place."""

import json


def header_bytes(header, data=b"", *, length=None):
    """A file from a header (text, bytes, or something for json.dumps) and the bytes behind it."""
    if not isinstance(header, bytes | str):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
