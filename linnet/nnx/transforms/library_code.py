"""Whether objects hold code of JAX and Linnet alone, so that what ran before runs again.

``eager`` may use what it compiled for an earlier call only if the same code would run now. Code of
the user's may read anything: globals, files, the time. So it is used only where the library's own
function calls nothing but code of the libraries: where every class and function among the arguments
is theirs. Such code reads its arguments, which are part of the cache key, and settings, which
``jax.jit`` has in its key. A class of Linnet's in which somebody replaced a method counts as the
user's from then on (``watch.changed_classes``).
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from linnet.frozen_dict import FrozenDict
from linnet.nnx.graphlib.walk import Definition, HashedDefinition
from linnet.nnx.pytreelib import statics
from linnet.nnx.pytreelib.attributes import OwnMethod, StaticPart
from linnet.nnx.pytreelib.kinds import PYTREE
from linnet.nnx.pytreelib.watch import changed_classes
from linnet.nnx.transforms.axes import StateAxes

LIBRARIES = {"jax", "jaxlib", "linnet"}
_PLAIN = {bool, int, float, complex, str, bytes, range, slice, type(None), type(Ellipsis)}
_CONTAINERS = (list, tuple, set, frozenset)
_OF_JAX_OR_NUMPY = (np.dtype, np.generic, jax.sharding.PartitionSpec, jax.sharding.Sharding)


def is_of_libraries(definitions: Iterable[HashedDefinition], options: Iterable[Any]) -> bool:
    """Whether objects of these definitions, and these options, hold no code of the user's."""
    parts = (part for definition in definitions for _, part in definition.value.parts())
    return all(map(_has_no_user_code, options)) and all(map(_part_has_no_user_code, parts))


def _part_has_no_user_code(part: Definition) -> bool:
    if part.kind == PYTREE:
        return False  # a definition does not tell the classes in it
    static = part.static
    held = static.template if isinstance(static, StaticPart) else static or {}
    return _has_no_user_code(part.payload) and all(map(_has_no_user_code, held.values()))


def _has_no_user_code(value: Any) -> bool:
    cls = type(value)
    if cls in _PLAIN:
        return True
    if isinstance(value, type):
        return _is_class_of_library(value)
    parts = _parts_of(value)
    if parts is not None:
        return all(map(_has_no_user_code, parts))
    if isinstance(value, np.ufunc):
        return getattr(np, value.__name__, None) is value
    if isinstance(value, (enum.Enum, *_OF_JAX_OR_NUMPY)):
        return _is_class_of_library(cls)
    return callable(value) and _is_named_in_library(value)


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What a value consists of; None if it is none of the kinds that stand for their parts."""
    cls: Any = type(value)
    if cls in _CONTAINERS:
        return value
    if cls in (dict, FrozenDict):
        return (*value, *value.values())
    if cls is statics.StaticValue:
        return (value.value,)
    if cls is OwnMethod:
        return (value.function,)
    if cls is types.MethodType:
        return value.__func__, value.__self__
    if cls is functools.partial:
        return value.func, *value.args, *value.keywords.values()
    if cls is StateAxes:
        return [part for pair in value.items() for part in pair]
    if isinstance(value, types.FunctionType) and _is_made_by_library(value):
        options = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return *options, *statics.closed_over(value).values(), *value.__dict__.values()
    return tuple(value) if isinstance(value, tuple) and _is_class_of_library(cls) else None


def _is_made_by_library(function: types.FunctionType) -> bool:
    """Whether a function was made by a function of a library, as initializers are."""
    package = _package(function.__globals__.get("__name__"))
    return package in LIBRARIES and not _is_named_in_library(function)


def _is_class_of_library(cls: type) -> bool:
    """Whether a class is JAX's, NumPy's, Linnet's or Python's, as one finds it there."""
    if any(base in changed_classes for base in cls.__mro__):
        return False
    if cls.__module__ == "builtins" or issubclass(cls, np.generic):
        return getattr(sys.modules[cls.__module__], cls.__name__, None) is cls
    return _is_named_in_library(cls) or issubclass(cls, np.dtype)


def _is_named_in_library(value: Any) -> bool:
    """Whether a library has a value under the name that the value says it has."""
    module: Any = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if _package(module) not in LIBRARIES or not isinstance(name, str):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
