"""Whether the user's code that an eager call runs is known, and still what it was.

The user's code may change between two calls: a global or an attribute of a class gets another
value, a notebook defines a method again. ``eager`` may use what it compiled in an earlier call only
while none of that happened. So ``UserCode`` looks through all that the code can read: functions
with their globals, closures and defaults, the classes of the objects, and what these hold.

Why that is sound: all that is found either cannot change in place (numbers, text, ...) or belongs
to one of ``LIBRARIES``, which do not change; and every place in which it was found is compared by
identity before each use. Code that reads anything else (a list, a dict, an array, an object or a
module of the user's) counts as unknown, and nothing that was compiled is used for it.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable
from operator import call, is_
from typing import Any, NamedTuple

import jax
import numpy as np

from linnet.nnx.graphlib.walk import Definition
from linnet.nnx.pytreelib import statics
from linnet.nnx.pytreelib.attributes import OwnMethod, StaticPart
from linnet.nnx.pytreelib.kinds import PYTREE, is_node
from linnet.nnx.transforms.engine import HashedDefinition
from linnet.nnx.transforms.plan import definition_of

# Packages whose functions always do the same, and whose modules and classes do not change.
LIBRARIES = {
    *("jax", "jaxlib", "numpy", "linnet", "optax", "ml_dtypes", "einops"),
    *("abc", "builtins", "collections", "dataclasses", "enum", "functools", "itertools", "math"),
    *("operator", "types", "typing"),
}

_READ_ANYTHING = {"__import__", "compile", "eval", "exec", "globals", "input", "open", "vars"}
_CANNOT_CHANGE = {bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis)}
_CANNOT_CHANGE |= {type(NotImplemented), types.GetSetDescriptorType, types.MemberDescriptorType}
# Python and Linnet put these in a class, and no code of the user's reads them.
_NOT_OF_THE_USER = ("__annot", "__abstract", "__dataclass_", "_abc_", "_linnet", "_pytree")
_ABSENT = object()


class UserCode:
    """The user's code that the calls of one function run.

    Args:
      function: the function, perhaps with wrappers of a library around it.
    """

    def __init__(self, function: Any):
        while is_of_library(function) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        self._functions = () if is_of_library(function) else (function,)
        self._numbers: dict[Any, int] = {}
        self._new_numbers = itertools.count()
        self._last: Found | None = None

    def version(self, nodes: Iterable[Any], options: list[Any]) -> int | None:
        """A number for the code as it is now, equal for equal code; None if it is unknown.

        Args:
          nodes: the objects among the arguments.
          options: the other arguments, but for arrays.
        """
        try:
            definitions = [definition_of(node) for node in nodes]
        except Exception:
            return None  # the call itself will say what is wrong
        last = self._last
        if last is None or not last.still_fits(definitions, options):
            last = Found(self._functions, definitions, options)
            if last.is_known:
                last.number = self._numbers.setdefault(last.key(), next(self._new_numbers))
            self._last = last
        return last.number

    def forget(self) -> None:
        """Gives other numbers from now on."""
        self._last, self._numbers = None, {}


class _UnknownError(Exception):
    """Internal: the code reads something that may change unnoticed."""


class Found:
    """What some code can read, and the places in which it was found."""

    def __init__(
        self, functions: Iterable[Any], definitions: list[HashedDefinition], options: list[Any]
    ):
        self.number: int | None = None
        self.is_known = True
        self._definitions, self._options = definitions, options
        self._places: list[Callable[[], Any]] = []
        self._names: list[Any] = []
        self._found: list[Any] = []
        self._namespaces: list[Any] = []
        self._met: dict[int, Any] = {}
        try:
            for value in (*functions, *options):
                self._read(value, is_compared=True)
            for definition in definitions:
                for _, part in definition.value.parts():
                    self._read_part(part)
        except _UnknownError:
            self.is_known = False
        self._sizes = list(map(len, self._namespaces))

    def key(self) -> Any:
        """A key that is equal for code that reads the same."""
        return tuple(self._names), tuple(map(statics.key_of, self._found)), tuple(self._sizes)

    def still_fits(self, definitions: list[HashedDefinition], options: list[Any]) -> bool:
        """Whether the same would be found now, for objects of these definitions."""
        return (
            _are_same(definitions, self._definitions)
            and _are_same(options, self._options)
            and list(map(len, self._namespaces)) == self._sizes
            and all(map(is_, map(call, self._places), self._found))
        )

    def _look_up(self, get: Callable[..., Any], *where: Any) -> Any:
        place = functools.partial(get, *where, _ABSENT)
        self._places.append(place)
        self._names.append(where[-1] if isinstance(where[-1], str) else None)
        self._found.append(place())
        return self._found[-1]

    def _read_part(self, part: Definition) -> None:
        if part.kind == PYTREE:
            raise _UnknownError  # a definition does not tell the classes of its parts
        static = part.static
        held = static.template.values() if isinstance(static, StaticPart) else static or {}
        for value in (part.payload, *(held.values() if isinstance(held, dict) else held)):
            self._read(value, is_compared=True)

    def _read(self, value: Any, is_compared: bool = False) -> None:
        """Reads a value and all that can be reached from it.

        ``is_compared`` says that a change in place gives other definitions or options.
        """
        cls = type(value)
        if cls in _CANNOT_CHANGE or value is _ABSENT or id(value) in self._met:
            return
        self._met[id(value)] = value
        parts = _parts_of(value, is_compared)
        if cls is types.FunctionType:
            self._read_function(value)
        elif isinstance(value, type):
            self._read_class(value)
        elif parts is not None:
            for part in parts:
                self._read(part, is_compared)
        elif not _is_fixed_by_library(value):
            raise _UnknownError

    def _read_function(self, function: types.FunctionType) -> None:
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._look_up(getattr, function, name)
        if is_of_library(function) and hasattr(function, "__wrapped__"):
            # What a wrapper of a library does depends on the function in it.
            self._read(self._look_up(getattr, function, "__wrapped__"))
            return
        if not is_of_library(function):
            self._read_globals(function)
        for cell in function.__closure__ or ():
            self._read(self._look_up(_contents, cell))
        self._read(function.__defaults__)
        self._read_namespace(function.__dict__)
        self._read_namespace(function.__kwdefaults__ or {})

    def _read_globals(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__)
        if not LIBRARIES.issuperset(names.imported) or names.written:
            raise _UnknownError
        for name in names.read:
            value = self._look_up(function.__globals__.get, name)
            if name in _READ_ANYTHING or (value is np and "random" in names.attributes):
                raise _UnknownError
            self._read(value)

    def _read_class(self, cls: type) -> None:
        if is_of_library(cls):
            return
        if not is_of_library(type(cls)):
            raise _UnknownError
        for base in self._look_up(getattr, cls, "__mro__"):
            if not is_of_library(base):
                self._met[id(base)] = base
                self._read_namespace(vars(base))

    def _read_namespace(self, namespace: Any) -> None:
        self._namespaces.append(namespace)
        for name in namespace:
            if not name.startswith(_NOT_OF_THE_USER):
                self._read(self._look_up(namespace.get, name))


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _contents(cell: types.CellType, default: Any) -> Any:
    return default if cell == types.CellType() else cell.cell_contents


def _parts_of(value: Any, is_compared: bool) -> Iterable[Any] | None:
    """What a value consists of, if it cannot change or is compared; None if it has no parts."""
    cls = type(value)
    if isinstance(value, tuple):
        return cls, *value
    if cls is frozenset or (is_compared and cls in (list, set)):
        return value
    if is_compared and cls is dict:
        return (*value, *value.values())
    if cls is statics.StaticValue:
        return (value.value,)
    if cls is OwnMethod:
        return (value.function,)
    if cls is property:
        return value.fget, value.fset, value.fdel
    if cls in (staticmethod, classmethod):
        return (value.__func__,)
    if cls is types.MethodType:
        return value.__func__, value.__self__
    if cls is functools.partial:
        return value.func, *value.args, *value.keywords.values()
    if is_compared and dataclasses.is_dataclass(cls) and not is_of_library(cls):
        return cls, *(getattr(value, f.name, None) for f in dataclasses.fields(value))
    if not is_of_library(cls) or is_node(value):
        return None
    if hasattr(value, "__wrapped__"):
        return (value.__wrapped__,)
    return None


def _is_fixed_by_library(value: Any) -> bool:
    """Whether a value is a library's own, and no container, array or object of a model."""
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in LIBRARIES
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    if isinstance(value, (list, dict, set, np.ndarray, jax.Array)) or is_node(value):
        return False
    held = getattr(value, "__dict__", {}).values()
    has_code = any(isinstance(x, types.FunctionType) and not is_of_library(x) for x in held)
    return is_of_library(type(value)) and not has_code


def is_of_library(value: Any) -> bool:
    """Whether a function, or a class, or the class of a value is one of ``LIBRARIES``."""
    if isinstance(value, types.FunctionType):
        return _package(value.__globals__.get("__name__")) in LIBRARIES
    return _is_class_of_library(value if isinstance(value, type) else type(value))


def _is_class_of_library(cls: type) -> bool:
    if _package(cls.__module__) not in LIBRARIES:
        return False
    # A class that the user made by calling ``type`` may have the name of a library's module.
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls or cls.__module__ == "builtins"


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


class _Names(NamedTuple):
    """The names in some code, and in the functions inside of it."""

    read: set[str]  # globals
    attributes: set[str]
    imported: set[str]  # packages
    written: set[str]  # globals, and variables of the functions around it


_WRITE_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_WRITE_CELL = ("STORE_DEREF", "DELETE_DEREF")


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    names = _Names(set(statics.global_names(code)), set(code.co_names), set(), set())
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            names.imported.add(_package(step.argval))
        elif step.opname in _WRITE_GLOBAL or (
            step.opname in _WRITE_CELL and step.argval in code.co_freevars
        ):
            names.written.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for found, more in zip(names, _names_in(inner), strict=True):
                found |= more
    return names
