"""Deep copies of Python objects, which share arrays, Variables and modules with the originals."""

from __future__ import annotations

import copy
import io
import pickle
import types
import weakref
from typing import Any

import jax


def deep_copy(value: Any) -> Any:
    """A deep copy in which JAX's arrays, Variables and modules are those of the original.

    ``copy.deepcopy`` would copy arrays too: in a trace into tracers, and otherwise into arrays that
    the equality of most containers does not compare.
    """
    stream, kept = io.BytesIO(), _Kept()
    _Pickler(stream, kept).dump(value)
    stream.seek(0)
    return _Unpickler(stream, kept).load()


# What ``copy.deepcopy`` gives back as it is, and arrays.
_NEVER_COPIED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.ModuleType),
    *(property, weakref.ref, jax.Array),
)


class _Kept:
    """What is not pickled with a value: the pickle has its number here instead."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[int, tuple[int, Any]] = {}  # by id, with what keeps the id in use

    def number_of(self, value: Any) -> int | None:
        cls = type(value)
        is_kept = isinstance(value, _NEVER_COPIED) or hasattr(cls, "_linnet_kind")
        if not is_kept and not hasattr(cls, "__deepcopy__"):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.values), value
            with jax.ensure_compile_time_eval():  # NumPy's arrays may hold some of JAX
                self.values.append(value if is_kept else copy.deepcopy(value))
        return self._numbers[id(value)][0]


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, kept: _Kept):
        super().__init__(stream, protocol=5)
        self._kept = kept

    def persistent_id(self, obj: Any) -> Any:
        return self._kept.number_of(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, kept: _Kept):
        super().__init__(stream)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept.values[pid]
