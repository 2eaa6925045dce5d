"""Static values as keys: hashable, comparable, and safe from later change.

A GraphDef and the aux data of a pytree decide whether a compiled function fits. They must not
change when a list inside a module grows, must tell ``1`` from ``True`` and ``0.0`` from ``-0.0``,
and should call two functions equal that are made by the same code from equal parts. ``key_of``
makes such a key from any value; ``StaticValue`` carries the key together with the value. Most
values are their own key; ``pack_statics`` wraps only the others.
"""

from __future__ import annotations

import argparse
import copy
import copyreg
import dataclasses
import dis
import enum
import functools
import sys
import types
import warnings
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from operator import is_
from typing import Any, Self

import jax
import numpy as np

from linnet.errors import UnequalCopyWarning
from linnet.frozen_dict import FrozenDict
from linnet.nnx.pytreelib.copying import deep_copy

# Types whose instances are their own key: immutable, hashable, and equal only to themselves
# (numbers of different types are told apart by the type that always stands beside a key).
# Types that compare by identity, enums and classes join as they are met.
_NEEDS_NO_KEY: set[type] = {bool, int, str, bytes, type(None), type(Ellipsis), type}

_NEEDS_KEY: set[type] = {float, complex}

# Types whose values may be kept for good and stand in for an equal one.
_MAY_BE_KEPT: set[type] = {*_NEEDS_NO_KEY, *_NEEDS_KEY, range}

_MEMO_ELEMENTS = frozenset({bool, int, str, bytes, type(None), type(Ellipsis)})

_FIXED = (float, complex, range, types.FunctionType)

_VIEWS = [
    type(view)
    for mapping in ({}, OrderedDict())
    for view in (mapping.keys(), mapping.values(), mapping.items())
]

_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)

_COMPARED_BY_IDENTITY = (np.ndarray, jax.Array)


# ---- static values in structures ----------------------------------------------------------------


class Unchanging:
    """Base of immutable classes: copy and deepcopy return the object itself."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class StaticValue(Unchanging):
    """A static value with its key; equal to another by the key alone."""

    __slots__ = ("hash", "key", "mutable", "value")

    def __init__(self, value: Any):
        self.value = copy_mutable(value)
        self.mutable = self.value is not value
        self.key = key_of(value)
        self.hash = hash(self.key)

    def __eq__(self, other: object) -> bool:
        return type(other) is StaticValue and self.hash == other.hash and self.key == other.key

    def __hash__(self) -> int:
        return self.hash

    def __repr__(self) -> str:
        return repr(self.value)

    def still_fits(self) -> bool:
        """Whether the key is that of the value now: a function may read what has changed since."""
        if self.mutable or self.key == key_of(self.value):
            return True
        if type(self.value) is types.FunctionType:
            _function_statics.pop(self.value, None)
        return False

    def thaw(self) -> Any:
        """The value, copied where it can change, so that no two holders share it."""
        return copy_mutable(self.value) if self.mutable else self.value

    def __reduce__(self) -> Any:
        return (StaticValue, (self.value,))


def static_value(value: Any) -> StaticValue:
    """``StaticValue(value)``, cached where that is safe: layers hold many functions and tuples."""
    cls = type(value)
    if cls is types.FunctionType and value.__closure__ is None and not value.__dict__:
        known = _function_statics.get(value)
        if known is None:
            known = StaticValue(value)
            if "<locals>" not in value.__qualname__ and may_be_kept(value):
                _function_statics[value] = known
        return known
    if cls is tuple and _MEMO_ELEMENTS.issuperset(element_types := tuple(map(type, value))):
        return _static_tuple(value, element_types)
    return StaticValue(value)


# Of functions that live as long as their module.
_function_statics: dict[types.FunctionType, StaticValue] = {}


@functools.lru_cache(maxsize=4096)
def _static_tuple(value: tuple[Any, ...], element_types: tuple[type, ...]) -> StaticValue:
    return StaticValue(value)


def pack_statics(values: list[Any]) -> tuple[tuple[Any, ...], tuple[type, ...]]:
    """Static values for aux data, each as its own key or wrapped in ``StaticValue``; and their
    types, so that ``1`` and ``True`` differ."""
    value_types = tuple(map(type, values))
    if _NEEDS_NO_KEY.issuperset(value_types):
        return tuple(values), value_types
    packed: list[Any] = []
    for cls, value in zip(value_types, values, strict=True):
        own_key = float_needs_no_key(value) if cls is float else type_needs_no_key(cls)
        packed.append(value if own_key else static_value(value))
    return tuple(packed), value_types


def unpack_statics(values: tuple[Any, ...]) -> list[Any]:
    """The values that ``pack_statics`` took."""
    return [value.thaw() if type(value) is StaticValue else value for value in values]


def copy_mutable(value: Any) -> Any:
    """Copies what can be changed in place, however nested in lists, dicts, tuples and partials.

    That is lists, dicts, sets, dataclasses that are not frozen, other objects that have an equality
    but no hash, and NumPy arrays in any of them. What nothing in Python can copy stays as it is.
    """
    return _copy(value, {})


def _copy(value: Any, made: dict[int, Any]) -> Any:
    """``copy_mutable``; ``made`` has the copies so far, by the id of what they are copies of."""
    cls = type(value)
    if type_needs_no_key(cls) or cls in _FIXED:
        return value
    if id(value) in made:
        return made[id(value)]
    if cls is list:
        new = made[id(value)] = []
        new += [_copy(item, made) for item in value]
        return new
    if cls is dict:
        new = made[id(value)] = {}
        new.update((key, _copy(item, made)) for key, item in value.items())
        return new
    if cls is set:
        return made.setdefault(id(value), set(value))
    if isinstance(value, tuple):
        items = [_copy(item, made) for item in value]
        make = tuple if cls is tuple else getattr(cls, "_make", None)
        return value if make is None or all(map(is_, items, value)) else make(items)
    if cls is functools.partial:
        args, keywords = _copy(value.args, made), _copy(value.keywords, made)
        are_same = args is value.args and all(map(is_, keywords.values(), value.keywords.values()))
        return value if are_same else functools.partial(value.func, *args, **keywords)
    if cls is types.MappingProxyType:
        return types.MappingProxyType(_copy(dict(value), made))
    if cls in _HANDLERS:
        return value
    if isinstance(value, np.ndarray):
        return value if _is_fixed_array(value) else _copy_array(value, made)
    try:
        if _has_parts(value):
            return _copy_parts(value, made)
        return deep_copy(value) if _is_compared_with_a_copy(value) else value
    except Exception:
        return value


def _copy_parts(value: Any, made: dict[int, Any]) -> Any:
    """A copy of a dataclass, namespace, deque, or of a dict or list of a class of its own."""
    new = copy.copy(value)
    if not _is_frozen(type(value)):
        made[id(value)] = new
    parts = compared_parts(value)
    copied = {name: _copy(part, made) for name, part in parts.items()}
    if _is_frozen(type(value)) and all(map(is_, copied.values(), parts.values())):
        return value
    if isinstance(value, dict):
        for key, item in dict.items(value):
            dict.__setitem__(new, key, _copy(item, made))
    elif isinstance(value, list):
        list.__setitem__(new, slice(None), [_copy(item, made) for item in list.__iter__(value)])
    elif isinstance(value, deque):
        new.clear()
        new.extend(_copy(item, made) for item in value)
    for name, part in copied.items():
        if part is not parts[name]:
            object.__setattr__(new, name, part)
    return new


def _is_fixed_array(value: Any) -> bool:
    """Whether nobody can write to the elements of an array."""
    return type(value) is np.ndarray and not value.flags.writeable and value.base is None


def _copy_array(value: Any, made: dict[int, Any]) -> Any:
    new = made[id(value)] = deep_copy(value) if value.dtype.hasobject else value.copy()
    for name, part in getattr(value, "__dict__", {}).items():
        object.__setattr__(new, name, _copy(part, made))
    return new


def compared_parts(value: Any) -> dict[str, Any]:
    """The attributes of an object, but for the fields of a dataclass that its equality leaves out.

    What a ``functools.cached_property`` keeps there follows from the others.
    """
    parts = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            parts.pop(field.name, None)
            if field.compare and hasattr(value, field.name):
                parts[field.name] = getattr(value, field.name)
    return {name: part for name, part in parts.items() if not _is_cached(type(value), name)}


def _is_cached(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), functools.cached_property)


def _is_frozen(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]


_WITH_PARTS = (
    *(dict, list, deque, UserDict, UserList, ChainMap),
    *(types.SimpleNamespace, argparse.Namespace),
)


def _has_parts(value: Any) -> bool:
    """Whether a value is compared by its parts, exactly, and not by an equality of its own."""
    cls = type(value)
    if hasattr(cls, "_linnet_kind"):
        return False
    if isinstance(value, _WITH_PARTS):
        return True
    # The equality that the decorator made has no file.
    code = getattr(cls.__eq__, "__code__", None)
    return dataclasses.is_dataclass(cls) and code is not None and code.co_filename == "<string>"


def _is_compared_with_a_copy(value: Any) -> bool:
    """Whether the key of a value, of a type without a rule of its own, is a ``Snapshot``."""
    cls = type(value)
    if isinstance(value, (*_COMPARED_BY_IDENTITY, np.generic)) or hasattr(cls, "_linnet_kind"):
        return False
    try:
        hash(value)
    except Exception:  # a TypeError, or whatever the user's own __hash__ raises
        return True
    return False


# ---- which values need a key -------------------------------------------------------------------


def type_needs_no_key(cls: type) -> bool:
    """Whether values of a type stand for themselves in a key."""
    if cls in _NEEDS_NO_KEY:
        return True
    if cls in _NEEDS_KEY:
        return False
    by_identity = cls.__eq__ is object.__eq__ and cls not in _HANDLERS
    if by_identity or issubclass(cls, (type, enum.Enum, np.dtype)):
        _NEEDS_NO_KEY.add(cls)
        return True
    _NEEDS_KEY.add(cls)
    return False


def float_needs_no_key(value: float) -> bool:
    """Whether a float stands for itself: neither a zero, which has a sign, nor a nan."""
    return bool(value) and value == value


def add_type_without_key(cls: type) -> None:
    """Declares that values of a type stand for themselves in a key, and hold nothing alive."""
    _NEEDS_NO_KEY.add(cls)
    _MAY_BE_KEPT.add(cls)


def can_change(value: Any) -> bool:
    """Whether a static value can be modified in place.

    Numbers, text, functions, types, what compares by identity, and what else comes from JAX or
    NumPy than an array that can be written count as fixed, and so do tuples, partials, frozen dicts
    and frozen dataclasses of such.

    Example:
      >>> can_change((1, "a")), can_change(([1], "a"))
      (False, True)
    """
    cls = type(value)
    if type_needs_no_key(cls) or cls in _FIXED or isinstance(value, np.generic):
        return False
    if isinstance(value, np.ndarray):
        return not _is_fixed_array(value)
    if isinstance(value, (tuple, frozenset)):
        return any(map(can_change, value))
    if cls is FrozenDict:
        return any(map(can_change, value.values()))
    if cls is functools.partial:
        return any(map(can_change, (value.func, *value.args, *value.keywords.values())))
    if cls in _BOUND:
        return can_change(value.__self__)
    if _is_frozen(cls):
        names = (field.name for field in dataclasses.fields(cls) if hasattr(value, field.name))
        return any(can_change(getattr(value, name)) for name in names)
    return cls.__module__.partition(".")[0] not in ("jax", "jaxlib", "numpy")


def may_be_kept(value: Any, depth: int = 4) -> bool:
    """Whether a cache may keep ``value``: it cannot change, and no model hangs on it.

    A closure over a module or a list may not: kept, it would keep the module alive; used instead
    of an equal closure, it would make both share one list.
    """
    cls = type(value)
    if cls in _MAY_BE_KEPT or isinstance(value, (type, enum.Enum, np.dtype, np.generic)):
        return True
    if depth == 0:
        return False
    if cls is StaticValue:
        return may_be_kept(value.value, depth)
    if cls in (tuple, frozenset):
        return all(may_be_kept(item, depth - 1) for item in value)
    if cls is types.FunctionType:
        return all(may_be_kept(part, depth - 1) for part in function_parts(value))
    return callable(value) and cls.__module__.partition(".")[0] in ("jax", "jaxlib", "numpy")


def function_parts(function: types.FunctionType) -> list[Any]:
    """What a function holds: what it closes over, its defaults and its attributes."""
    keywords = (function.__kwdefaults__ or {}).values()
    return [
        *closed_over(function).values(),
        *(function.__defaults__ or ()),
        *keywords,
        *function.__dict__.values(),
    ]


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    """The values of the variables that a function closes over, but for those not bound yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


# ---- keys ---------------------------------------------------------------------------------------


def key_of(value: Any) -> Any:
    """A hashable key of ``value``: equal keys, equal behaviour as a static value.

    Args:
      value: any Python object.

    Returns:
      A key that later changes of ``value`` do not reach. JAX's arrays, Variables and modules met on
      the way are compared by identity, and so are NumPy's arrays that functions hold.

    Example:
      >>> key_of([1, 2]) == key_of([1, 2]), key_of([1, 2]) == key_of([1, 2.0])
      (True, False)
      >>> make = lambda rate: lambda x: x * rate
      >>> key_of(make(0.1)) == key_of(make(0.1)), key_of(make(0.1)) == key_of(make(0.2))
      (True, False)
    """
    return _key_of(value, {})


class Identity:
    """A key that is equal only to a key of the same object; it keeps that object alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and self.value is other.value

    def __hash__(self) -> int:
        return object.__hash__(self.value)

    def __repr__(self) -> str:
        return f"Identity({self.value!r})"


class _WeakIdentity:
    """A key that is equal only to a key of the same object, and does not keep that object alive.

    Once the object is gone, it is equal to no other key.
    """

    __slots__ = ("hash", "ref")

    def __init__(self, value: Any):
        self.ref = weakref.ref(value)
        self.hash = object.__hash__(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self.ref()
        return type(other) is _WeakIdentity and value is not None and value is other.ref()

    def __hash__(self) -> int:
        return self.hash


class Snapshot:
    """A key for a value that has equality but no hash: compared with a copy made now."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        try:
            self.value = deep_copy(value)
        except Exception:
            self.value = value
        if not _are_equal(self.value, value):
            _warn_of_unequal_copy(value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not Snapshot or type(self.value) is not type(other.value):
            return False
        return _are_equal(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


_never_equal: weakref.WeakSet[type] = weakref.WeakSet()  # the user has been warned of these


def _are_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        with jax.ensure_compile_time_eval():  # in a trace the equality of arrays has no value
            return bool(first == second)
    except Exception:
        return False


def _warn_of_unequal_copy(value: Any) -> None:
    if type(value) in _never_equal:
        return
    _never_equal.add(type(value))
    name = type(value).__name__
    warnings.warn(
        f"A {name} that a module or a static argument holds is not equal to a copy of itself: "
        f"{name}.__eq__ fails or returns something else than a bool, or nothing can copy it. "
        "Nothing that is compiled for it can be used again, so every call traces and compiles.\n"
        f"Fix: let {name}.__eq__ return a bool, or hold what is in the {name} in attributes of the "
        "module.",
        UnequalCopyWarning,
        stacklevel=2,
    )


def _key_of(value: Any, seen: dict[int, int]) -> Any:
    cls = type(value)
    if type_needs_no_key(cls):
        return (cls, value)
    if cls is float or cls is complex:
        return (cls, repr(value))  # differs for 0.0 and -0.0, and is the same for every nan
    if isinstance(value, np.generic):
        return (cls, value.dtype, value.tobytes())
    if id(value) in seen:
        return ("cycle", seen[id(value)])
    handler = _HANDLERS.get(cls)
    if handler is None and isinstance(value, tuple):
        handler = _key_of_sequence
    if handler is None and _has_parts(value):
        handler = _key_of_parts
    if handler is not None:
        seen[id(value)] = len(seen)
        key = (cls, handler(value, seen))
        del seen[id(value)]
        return key
    if isinstance(value, np.ndarray) and not _is_fixed_array(value):
        return Identity(value) if type(seen) is _InFunction else _key_of_array(value, seen)
    if isinstance(value, _COMPARED_BY_IDENTITY) or hasattr(cls, "_linnet_kind"):
        return Identity(value)
    if not _is_compared_with_a_copy(value):
        return (cls, hash(value), value)  # changed in place it equals itself, with another hash
    snapshot = Snapshot(value)
    if snapshot.value is not value:
        return snapshot
    # It cannot be copied, so it is compared by its attributes.
    state = object.__getstate__(value)
    if state is None and not hasattr(value, "__dict__"):
        _warn_of_unequal_copy(value)
        return (cls, Identity(object()))
    return (cls, Identity(value), _key_of(state, seen))


class _InFunction(dict[int, int]):
    """The containers around something that a function holds, where arrays count by identity."""


def _key_of_array(value: Any, seen: dict[int, int]) -> tuple[Any, ...]:
    if value.dtype.hasobject:
        held: Any = _key_of(value.tolist(), seen)
    elif type(value) is np.ndarray:
        held = value.tobytes()
    else:  # a subclass may have more than elements: a mask, attributes
        held = value.__reduce__()[2:], _key_of_mapping(getattr(value, "__dict__", {}), seen)
        held = _key_of(held, seen)
    return type(value), value.dtype, value.shape, held


def _key_of_sequence(value: Any, seen: dict[int, int]) -> tuple[Any, ...]:
    return tuple(_key_of(item, seen) for item in value)


def _key_of_mapping(value: Any, seen: dict[int, int]) -> tuple[Any, ...]:
    return tuple((_key_of(key, seen), _key_of(item, seen)) for key, item in value.items())


def _key_of_parts(value: Any, seen: dict[int, int]) -> tuple[Any, ...]:
    """The key of what ``_copy_parts`` copies."""
    own = _key_of_mapping(compared_parts(value), seen)
    if isinstance(value, dict):
        factory = value.default_factory if isinstance(value, defaultdict) else None
        items = OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)
        return own, _key_of(factory, seen), _key_of_mapping(dict(items), seen)
    if isinstance(value, deque):
        return own, value.maxlen, _key_of_sequence(value, seen)
    return (own, _key_of_sequence(value, seen)) if isinstance(value, list) else own


def _key_of_set(value: Any, seen: dict[int, int]) -> frozenset[Any]:
    return frozenset(_key_of(item, seen) for item in value)


def _key_of_method(value: Any, seen: dict[int, int]) -> tuple[Any, ...]:
    function = getattr(value, "__func__", value.__name__)
    return _key_of(function, seen), _key_of(value.__self__, seen)


def _key_of_function(value: types.FunctionType, seen: dict[int, int]) -> tuple[Any, ...]:
    inside = closed_over(value)
    names = value.__code__.co_freevars
    seen = _InFunction(seen)
    return (
        value.__code__,
        Identity(value.__globals__),
        _key_of(value.__defaults__, seen),
        _key_of(value.__kwdefaults__, seen),
        tuple(_key_of(inside[name], seen) if name in inside else "unbound" for name in names),
        _key_of_mapping(value.__dict__, seen) if value.__dict__ else (),
        tuple(globals_read(value).items()),
        _key_of_global_contents(value, seen),
    )


def _key_of_global_contents(function: types.FunctionType, seen: dict[int, int]) -> tuple[Any, ...]:
    """The contents of the global lists, dicts and such that a function reads, and the code and
    defaults of the functions of its module that it calls."""
    keys: list[Any] = []
    for name in globals_read(function):
        value = function.__globals__.get(name)
        if type(value) is types.FunctionType and value.__globals__ is function.__globals__:
            defaults = (value.__defaults__, value.__kwdefaults__)
            keys.append((value.__code__, _key_of(defaults, seen)))
        elif isinstance(value, set) or _has_parts(value):
            keys.append(_key_of(value, seen))
    return tuple(keys)


_globals_met: weakref.WeakKeyDictionary[types.FunctionType, dict[str, Any]] = (
    weakref.WeakKeyDictionary()
)


def globals_read(function: types.FunctionType) -> dict[str, Any]:
    """The globals read by a function, and by those of its module that it calls, with identities.

    A cell of a notebook that is run again makes equal code that may call other functions.
    """
    module_globals = function.__globals__
    found = _globals_met.get(function)
    if found is None or not all(
        _is_still(value_key, module_globals.get(name, _ABSENT)) for name, value_key in found.items()
    ):
        found = {}
        pending = [function.__code__]
        while pending:
            for name in global_names(pending.pop()):
                if name not in found:
                    value = module_globals.get(name, _ABSENT)
                    found[name] = _identity(value)
                    if type(value) is types.FunctionType and value.__globals__ is module_globals:
                        pending.append(value.__code__)
        _globals_met[function] = found
    return found


_ABSENT = object()  # stands for a name that the module has not, such as that of a builtin function


def _identity(value: Any) -> Any:
    if type(value) in _MAY_BE_KEPT:
        return _key_of(value, {})
    try:
        return _WeakIdentity(value)
    except TypeError:  # a list, a dict or a tuple
        return Identity(value)


def _is_still(value_key: Any, value: Any) -> bool:
    """Whether a value is the one that ``_identity`` gave a key for."""
    cls = type(value_key)
    if cls is _WeakIdentity:
        return value_key.ref() is value
    if cls is Identity:
        return value_key.value is value
    return type(value) in _MAY_BE_KEPT and _key_of(value, {}) == value_key


_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code, and the functions made in it, look up in their module."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname in _LOADS_GLOBAL]
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return tuple(dict.fromkeys([*own, *(name for part in inner for name in global_names(part))]))


_HANDLERS: dict[type, Any] = {
    list: _key_of_sequence,
    tuple: _key_of_sequence,
    dict: _key_of_mapping,
    FrozenDict: _key_of_mapping,
    types.MappingProxyType: _key_of_mapping,
    set: _key_of_set,
    frozenset: _key_of_set,
    range: lambda r, _: (r.start, r.stop, r.step),  # Python calls ranges of the same numbers equal
    types.FunctionType: _key_of_function,
    memoryview: lambda m, _: (m.format, m.shape, m.tobytes()),
    **dict.fromkeys(_BOUND, _key_of_method),
    **dict.fromkeys(_VIEWS, _key_of_sequence),
    functools.partial: lambda p, seen: _key_of_sequence((p.func, p.args, p.keywords), seen),
}


def _pickled_by_name(function: Any) -> Any:
    """Reduces a function of JAX's own types, such as ``jax.nn.relu``, to its name, for ``copyreg``.

    Copied or pickled by its parts it would be another function, and cause a new trace.
    """
    path = getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for name in path.split("."):
        found = getattr(found, name, None)
    return path if found is function else function.__reduce_ex__(4)


for _cls in (type(jax.jit(_pickled_by_name)), jax.custom_jvp, jax.custom_vjp):
    copyreg.pickle(_cls, _pickled_by_name)
