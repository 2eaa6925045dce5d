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

import builtins
import dis
import enum
import functools
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable
from operator import call, is_
from typing import Any, NamedTuple

import jax
import numpy as np

from linnet.frozen_dict import FrozenDict
from linnet.nnx.graphlib.walk import Definition, HashedDefinition
from linnet.nnx.pytreelib import statics
from linnet.nnx.pytreelib.attributes import OwnMethod, StaticPart
from linnet.nnx.pytreelib.kinds import PYTREE
from linnet.nnx.transforms.axes import StateAxes
from linnet.nnx.transforms.grad import DiffState
from linnet.nnx.transforms.jit import JitFunction
from linnet.nnx.transforms.plan import are_same, definition_of

# Packages whose functions always do the same, and whose modules and classes do not change.
LIBRARIES = {
    *("jax", "jaxlib", "numpy", "linnet", "optax", "ml_dtypes", "einops"),
    *("abc", "builtins", "collections", "dataclasses", "enum", "functools", "itertools", "math"),
    *("operator", "reprlib", "types", "typing"),
}
_WRAP_ONE_FUNCTION = {
    "dataclasses",
    "jax",
    "linnet",
    "reprlib",
}  # what their wrappers do depends on the function inside

_CANNOT_CHANGE = {bool, int, float, complex, str, bytes, range, slice, type(None), type(Ellipsis)}
_CANNOT_CHANGE |= {type(NotImplemented), types.GetSetDescriptorType, types.MemberDescriptorType}
_CANNOT_CHANGE |= {types.WrapperDescriptorType, types.MethodDescriptorType, typing.TypeVar}
_CANNOT_CHANGE |= {types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType}
_OF_LIBRARY_CANNOT_CHANGE = (enum.Enum, np.dtype, np.generic, jax.sharding.PartitionSpec)
_OF_LIBRARY_CANNOT_CHANGE += (jax.sharding.Sharding, jax.sharding.Mesh)
_JITTED = type(jax.jit(is_))

_READ_ANYTHING = {"__import__", "compile", "eval", "exec", "globals", "input", "open", "vars"}
_OF_NUMPY_READ_ANYTHING = {"random", "load", "loadtxt", "genfromtxt", "fromfile", "memmap"}
_READ_BY_NAME = (np.random, builtins)  # modules whose functions read anything
# Python and Linnet put these in a class, and no code of the user's reads them.
_NOT_OF_THE_USER = ("__annot", "__abstract", "__dataclass_", "__orig_bases__", "__parameters__")
_NOT_OF_THE_USER += ("__slotnames__", "_abc_", "_linnet", "_pytree")
_HEAP_TYPE = 1 << 9  # a flag of classes that are made while a program runs
_ABSENT = object()


class UserCode:
    """The user's code that the calls of one function run.

    Args:
      function: the function, perhaps with wrappers of Linnet around it.
      options: what these wrappers were given beside it, such as axes by filters.
    """

    def __init__(self, function: Any, options: tuple[Any, ...] = ()):
        while _is_function_of_library(function) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        self._constant = options if _is_function_of_library(function) else (function, *options)
        self._numbers: dict[Any, int] = {}
        self._new_numbers = itertools.count()
        self._last: CodeRead | None = None

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
            self._last = None  # what unknown code reads is not kept: it may be a model
            found = CodeRead(self._constant, definitions, options)
            if not found.is_known:
                return None
            found.number = self._numbers.setdefault(found.key(), next(self._new_numbers))
            last = self._last = found
        return last.number

    def forget(self) -> None:
        """Gives other numbers from now on."""
        self._last, self._numbers = None, {}


class _UnknownError(Exception):
    """Internal: the code reads something that may change unnoticed."""


class CodeRead:
    """What some code can read, and the places in which it was found.

    Args:
      constant: the function, and what its wrappers were made with.
      definitions: of the objects among the arguments.
      options: the other arguments, but for arrays.
    """

    def __init__(
        self, constant: Iterable[Any], definitions: list[HashedDefinition], options: list[Any]
    ):
        self.number: int | None = None
        self.is_known = True
        self._definitions, self._options = definitions, options
        self._places: list[Callable[[], Any]] = []
        self._names: list[Any] = []
        self._found: list[Any] = []
        self._namespaces: list[Any] = []
        self._met: dict[tuple[int, bool], Any] = {}
        try:
            for value in constant:
                self._read(value)
            for value in options:
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
            are_same(definitions, self._definitions)
            and are_same(options, self._options)
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
        held = static.template if isinstance(static, StaticPart) else static or {}
        for value in (part.payload, *held.values()):
            self._read(value, is_compared=True)

    def _read(self, value: Any, is_compared: bool = False) -> None:
        """Reads a value and all that can be reached from it.

        ``is_compared`` says that it is part of a definition or an option, where another value that
        is equal may stand for it, and where a change in place of a container is seen.
        """
        cls = type(value)
        if cls in _CANNOT_CHANGE or value is _ABSENT or (id(value), is_compared) in self._met:
            return
        self._met[id(value), is_compared] = value
        if cls is types.FunctionType:
            self._read_function(value, is_compared)
        elif isinstance(value, type):
            self._read_class(value)
        elif cls is functools.partial:
            self._read(value.func, is_compared)
            self._read(value.args, is_compared)
            self._read_namespace(value.keywords)
        elif (parts := _parts_of(value, is_compared)) is not None:
            for part in parts:
                self._read(part, is_compared)
        elif not _is_fixed_by_library(value):
            raise _UnknownError

    def _read_function(self, function: types.FunctionType, is_compared: bool) -> None:
        is_library = _is_function_of_library(function)
        if is_compared and not is_library and function.__closure__:
            raise _UnknownError  # an equal function with other cells may stand for it
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._look_up(getattr, function, name)
        if is_library and hasattr(function, "__wrapped__"):
            if _package_of(function) not in _WRAP_ONE_FUNCTION:
                raise _UnknownError
            self._read(self._look_up(getattr, function, "__wrapped__"))
            return
        if not is_library:
            self._read_globals(function)
        for cell in function.__closure__ or ():
            self._read(self._look_up(_contents, cell))
        self._read(function.__defaults__)
        self._read_namespace(function.__dict__)
        self._read_namespace(function.__kwdefaults__ or {})

    def _read_globals(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__)
        if names.change or names.read & _READ_ANYTHING:
            raise _UnknownError
        for name in names.read:
            value = self._look_up(function.__globals__.get, name)
            if value is np and names.attributes & _OF_NUMPY_READ_ANYTHING:
                raise _UnknownError
            self._read(value)

    def _read_class(self, cls: type) -> None:
        if _is_class_of_library(cls):
            return
        if not _is_class_of_library(type(cls)):
            raise _UnknownError
        for base in self._look_up(getattr, cls, "__mro__"):
            if not _is_class_of_library(base):
                self._read_namespace(vars(base))

    def _read_namespace(self, namespace: Any) -> None:
        self._namespaces.append(namespace)
        for name in namespace:
            if not name.startswith(_NOT_OF_THE_USER):
                self._read(self._look_up(namespace.get, name))


def _contents(cell: types.CellType, default: Any) -> Any:
    return default if cell == types.CellType() else cell.cell_contents


def _parts_of(value: Any, is_compared: bool) -> Iterable[Any] | None:
    """What a value consists of, if it cannot change or is compared; None if it is no container."""
    cls = type(value)
    if cls in (tuple, frozenset) or (is_compared and cls in (list, set)):
        return value
    if issubclass(cls, tuple) and _is_class_of_library(cls):
        return value
    if cls is FrozenDict or (is_compared and cls is dict):
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
    if cls is StateAxes:
        return [part for pair in value.items() for part in pair]
    if cls is DiffState:
        return value.argnum, value.filter
    if cls is JitFunction:
        return (value.fun,)
    if cls is _JITTED and not _is_named_in_library(value):
        return (value.__wrapped__,)
    return None


def _is_fixed_by_library(value: Any) -> bool:
    """Whether a value is a module, function or constant of a library."""
    if isinstance(value, types.ModuleType):
        return _package(value.__name__) in LIBRARIES and value not in _READ_BY_NAME
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    if isinstance(value, np.ufunc):
        return getattr(np, value.__name__, None) is value
    if isinstance(value, _OF_LIBRARY_CANNOT_CHANGE):
        return _is_class_of_library(type(value)) and type(value) is not np.void
    return callable(value) and _is_named_in_library(value)


def _is_function_of_library(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _package_of(value) in LIBRARIES


def _package_of(function: types.FunctionType) -> str:
    return _package(function.__globals__.get("__name__"))


def _is_class_of_library(cls: type) -> bool:
    if cls.__module__ == "builtins":
        return not cls.__flags__ & _HEAP_TYPE
    return _is_named_in_library(cls)


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


class _Names(NamedTuple):
    """The names in some code, and in the functions inside of it."""

    read: set[str]  # globals
    attributes: set[str]
    change: set[str]  # names that are imported, and globals and closed-over ones that are written


_CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
_CHANGES_IF_CLOSED_OVER = ("STORE_DEREF", "DELETE_DEREF")


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    names = _Names(set(statics.global_names(code)), set(code.co_names), set())
    for step in dis.get_instructions(code):
        is_closed_over = step.argval in code.co_freevars if step.opname.endswith("DEREF") else False
        if step.opname in _CHANGES or (step.opname in _CHANGES_IF_CLOSED_OVER and is_closed_over):
            names.change.add(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for found, more in zip(names, _names_in(inner), strict=True):
                found |= more
    return names
