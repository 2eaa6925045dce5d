"""Plain Python values as JSON and back, exactly: nan, bytes and complex numbers included."""

from __future__ import annotations

import base64
import math
from typing import Any

from linnet.errors import DamagedCheckpointError


def encode(value: Any) -> Any:
    """A plain value as JSON can hold it.

    Example:
      >>> encode(b"ab"), encode(float("inf")), encode(1.5)
      ({'bytes': 'YWI='}, {'float': 'inf'}, 1.5)
    """
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode(value: Any) -> Any:
    """The reverse of ``encode``.

    Raises:
      DamagedCheckpointError: it is nothing that ``encode`` makes.
    """
    try:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case {"bytes": str(text)}:
                return base64.b64decode(text, validate=True)
            case {"complex": [str(real), str(imag)]}:
                return complex(float.fromhex(real), float.fromhex(imag))
            case {"float": "inf" | "-inf" | "nan" as text}:
                return float(text)
    except ValueError:
        pass
    raise DamagedCheckpointError(f"The manifest has {str(value)[:80]!r} where a value should be.")
