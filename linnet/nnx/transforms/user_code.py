"""The key of the user's code that an eager call runs, as it is now.

Unlike that of the library, the user's code may change between two calls: a global or an attribute
of a class gets another value, a notebook defines a method again. What a call has compiled is used
again only while the key is the same. ``eager`` uses it for what it compiles by arguments.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from operator import call, is_
from typing import Any

from linnet.nnx.pytreelib import statics
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.transforms.plan import classes_in


class UserCode:
    """The user's code that a call runs: a function, and the classes of the objects it is given."""

    def __init__(self, function: Any):
        self._function = function
        self._last: _CodeFound | None = None

    def key(self, leaves: Iterable[Any]) -> tuple[Any, ...]:
        """A key of the code as it is now, with what it reads."""
        met = {cls for leaf in leaves if is_node(leaf) for cls in classes_in(leaf)}
        last = self._last
        if last is None or last.met != met or not last.still_fits():
            last = self._last = _CodeFound(self._function, met)
        return last.key


class _CodeFound:
    """A key of code, and the places it was made from, with what was found in each.

    The key depends on what was found alone. If none of that can change in place, the key is the
    same as long as each place holds the very object that was found there.
    """

    def __init__(self, function: Any, met: set[type]):
        self.met = met
        self._orders = [cls.__mro__ for cls in met]
        self._lookups: list[Callable[[], Any]] = []
        self._found: list[Any] = []
        self._can_change = False  # something that was found, in place
        classes = {cls for order in self._orders for cls in order if not _is_of_library(cls)}
        self._namespaces: list[Any] = [vars(cls) for cls in sorted(classes, key=id)]
        keys = [] if _is_of_library(function) else [self._key_of(function)]
        for space in tuple(self._namespaces):
            names = [name for name in space if not name.startswith(_NOT_OF_THE_USER)]
            keys += [(name, self._key_of(self._look_up(space.get, name))) for name in names]
        self.key = tuple(keys)
        self._sizes = list(map(len, self._namespaces))

    def still_fits(self) -> bool:
        """Whether a key made now would be the same."""
        if self._can_change or list(map(len, self._namespaces)) != self._sizes:
            return False
        are_found = all(map(is_, map(call, self._lookups), self._found))
        return are_found and self._orders == [c.__mro__ for c in self.met]

    def _look_up(self, get: Callable[..., Any], *where: Any) -> Any:
        place = functools.partial(get, *where, _ABSENT)
        self._lookups.append(place)
        self._found.append(place())
        return self._found[-1]

    def _key_of(self, member: Any) -> Any:
        """The key of a function, with the contents of global lists, dicts and sets that it
        and the functions it calls read; or the key of what else a class holds."""
        member = member.fget if isinstance(member, property) else member
        member = getattr(member, "__func__", member)
        function = self._unwrapped(member) if callable(member) else member
        if type(function) is not types.FunctionType:
            by_identity = statics.type_needs_no_key(type(function))
            self._can_change |= not (by_identity or statics.may_be_kept(function))
            return statics.key_of(function)
        self._look_up_parts(function)
        names = statics.globals_read(function)
        read = [self._look_up(function.__globals__.get, name) for name in names]
        self._can_change |= not all(map(_is_fixed_global, read))
        held = tuple(value for value in read if type(value) in (list, dict, set))
        return statics.key_of((function, held) if held else function)

    def _unwrapped(self, function: Any) -> Any:
        inner = function
        while inner is not _ABSENT:
            function, inner = inner, self._look_up(getattr, inner, "__wrapped__")
        return function

    def _look_up_parts(self, function: types.FunctionType) -> None:
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._look_up(getattr, function, name)
        for cell in function.__closure__ or ():
            self._look_up(_contents, cell)
        self._namespaces.append(function.__dict__)
        self._can_change |= bool(function.__kwdefaults__ or function.__dict__)
        self._can_change |= not statics.may_be_kept(function)


# Python and Linnet put these in a class.
_NOT_OF_THE_USER = ("__annot", "__abstract", "_abc_", "_linnet", "_pytree")
_ABSENT = object()


def _contents(cell: types.CellType, default: Any) -> Any:
    return default if cell == types.CellType() else cell.cell_contents


def _is_fixed_global(value: Any) -> bool:
    is_module = isinstance(value, types.ModuleType)  # what a module holds is not part of a key
    return is_module or value is _ABSENT or statics.may_be_kept(value)


def _is_of_library(code: Any) -> bool:
    package = (code.__module__ or "").partition(".")[0]
    return package in ("linnet", "builtins", "abc", "typing", "collections")
