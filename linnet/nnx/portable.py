"""Functions that ``pickle`` does not take, made so that it does.

``pickle`` names a function by its module and refuses those made inside another function, such as
the parts of an Optax optimizer. But their code is part of the module as well: it can be named by
the function it stands in, and the rest is what the function closed over. ``portable`` puts such
names in place of functions; unpickling gives the functions themselves.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from typing import Any

import jax

_INSIDE = ".<locals>."


@jax.jit
def _jitted() -> None: ...


# JAX pickles these as the functions they were made from, whose names lead to them instead.
_JITTED = type(_jitted)


def portable(value: Any) -> Any:
    """The value with functions that can be named in place of those that ``pickle`` refuses.

    Containers are copied only where something in them changes. What cannot be named, such as a
    function of the main program, is left to the pickler.

    Example:
      >>> import pickle
      >>> import optax
      >>> tx = pickle.loads(pickle.dumps(portable(optax.adam(1e-3))))
      >>> int(tx.init({"w": 1.0})[0].count)
      0
    """
    return _portable(value, {})


def _portable(value: Any, known: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is types.FunctionType:
        return known.get(id(value)) or _function(value, known)
    parts: Any
    if kind is dict:
        parts = list(value.values())
        return _rebuilt(value, parts, known, lambda new: dict(zip(value, new, strict=True)))
    if kind in (list, tuple):
        return _rebuilt(value, value, known, kind)
    if issubclass(kind, tuple) and hasattr(kind, "_make"):
        return _rebuilt(value, value, known, kind._make)  # pyright: ignore[reportAttributeAccessIssue]
    if kind is functools.partial:
        parts = [value.func, value.args, value.keywords]
        return _rebuilt(value, parts, known, lambda new: _Made(_make_partial, tuple(new)))
    if isinstance(value, type) or not (kind is _JITTED or _is_plain_object(kind)):
        return value
    if callable(value) and _is_named(value):
        return _Made(_find, (value.__module__, value.__qualname__))
    if id(value) not in known and kind is not _JITTED:
        known[id(value)] = value
        parts = [vars(value)]
        return _rebuilt(value, parts, known, lambda new: _Made(_new_object, (kind,), *new))
    return value


def _rebuilt(value: Any, parts: Any, known: dict[int, Any], build: Any) -> Any:
    new = [_portable(part, known) for part in parts]
    return value if all(a is b for a, b in zip(parts, new, strict=True)) else build(new)


def _find(module: str, qualname: str) -> Any:
    """What a module has under a name that may have dots."""
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


def _is_named(value: Any) -> bool:
    """Whether a thing is found under its own name, in a module that others can import."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module not in sys.modules or module == "__main__" or not name or "<" in name:
        return False
    try:
        return _find(module, name) is value
    except AttributeError:
        return False


class _Made:
    """Something that is made by a call, and then given its attributes."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def _is_plain_object(kind: type) -> bool:
    """Whether instances are pickled as their attributes, with nothing of their own to say."""
    own = ("__reduce_ex__", "__reduce__", "__getstate__")
    usual = all(getattr(kind, name) is getattr(object, name) for name in own)
    return usual and kind.__dictoffset__ != 0 and not hasattr(kind, "__setstate__")


def _new_object(kind: type) -> Any:
    return object.__new__(kind)


def _make_partial(func: Any, args: Any, keywords: Any) -> Any:
    return functools.partial(func, *args, **keywords)


class _Inner:
    """A function that was made inside another one."""

    def __init__(self, place: tuple[Any, ...]):
        self.place = place
        self.state: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        # The function first and its contents later: it may be among them.
        return (_make_function, self.place, self.state, None, None, _fill_function)


def _function(function: types.FunctionType, known: dict[int, Any]) -> Any:
    if _is_named(function):
        return function
    place = _place_of(function)
    if place is None:
        return function
    inner = known[id(function)] = _Inner(place)
    cells = [] if function.__closure__ is None else function.__closure__
    contents = [cell.cell_contents if cell != types.CellType() else _Unbound for cell in cells]
    inner.state = {
        "cells": [_portable(x, known) for x in contents],
        "__defaults__": _portable(function.__defaults__, known),
        "__kwdefaults__": _portable(function.__kwdefaults__, known),
        "__dict__": {
            name: _portable(x, known)
            for name, x in function.__dict__.items()
            if name != "__wrapped__"
        },
    }
    return inner


class _Unbound:
    """Stands for the contents of a cell that has none."""


def _place_of(function: types.FunctionType) -> tuple[Any, ...] | None:
    """How a function's code is found: module, names on the way in, and which one of that name."""
    module, code = function.__module__, function.__code__
    if module not in sys.modules or module == "__main__" or _INSIDE not in function.__qualname__:
        return None
    if function.__globals__ is not vars(sys.modules[module]):
        return None
    outer, *names = function.__qualname__.split(_INSIDE)
    try:
        found = [_outer_code(module, outer)]
    except (AttributeError, TypeError):
        return None
    numbers = []
    for depth, name in enumerate(names):
        codes = _codes_in(found[-1], name)
        last = depth == len(names) - 1
        # A function in between may stand there several times under one name.
        chosen = [i for i, c in enumerate(codes) if (c is code if last else _holds(c, code))]
        if not chosen:
            return None
        numbers.append(chosen[0])
        found.append(codes[chosen[0]])
    return module, outer, tuple(zip(names, numbers, strict=True)), code.co_freevars


def _outer_code(module: str, name: str) -> types.CodeType:
    return inspect.unwrap(_find(module, name)).__code__


def _codes_in(code: types.CodeType, name: str) -> list[types.CodeType]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [c for c in inside if c.co_name == name]


def _holds(outer: types.CodeType, code: types.CodeType) -> bool:
    inside = [c for c in outer.co_consts if isinstance(c, types.CodeType)]
    return any(c is code or _holds(c, code) for c in inside)


def _make_function(
    module: str, outer: str, steps: tuple[tuple[str, int], ...], names: tuple[str, ...]
) -> types.FunctionType:
    code = _outer_code(module, outer)
    qualname = outer
    for name, number in steps:
        qualname += _INSIDE + name
        codes = _codes_in(code, name)
        if number >= len(codes):
            _refuse(module, qualname)
        code = codes[number]
    if code.co_freevars != names:
        _refuse(module, qualname)
    cells = tuple(types.CellType() for _ in names) or None
    made = types.FunctionType(code, vars(sys.modules[module]), code.co_name, None, cells)
    made.__qualname__, made.__module__ = qualname, module
    return made


def _refuse(module: str, qualname: str) -> None:
    raise AttributeError(
        f"{qualname} in {module} is not what it was when it was pickled.\n"
        "Fix: unpickle with the version of the package that it was pickled with, or save what it "
        "holds with linnet.io."
    )


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        if value is not _Unbound:
            cell.cell_contents = value
    function.__defaults__ = state["__defaults__"]
    function.__kwdefaults__ = state["__kwdefaults__"]
    function.__dict__.update(state["__dict__"])
