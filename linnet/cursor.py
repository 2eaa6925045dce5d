"""Cursor: changes deep inside of immutable trees, written as if the tree were mutable."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from linnet.errors import CursorFindError as CursorFindError, TraverseTreeError as TraverseTreeError
from linnet.serialization import is_named_tuple as is_named_tuple

A = TypeVar("A")
PathFn = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class ParentKey:
    """Where a cursor stands: the cursor above it, and its key there.

    Args:
      parent: the cursor above.
      key: the key, position or attribute there.
    """

    parent: Cursor[Any]
    key: Any


class Cursor(Generic[A]):
    """A place in a tree, at which changes are noted and made in a copy.

    A tree is made of dicts and other mappings, lists, tuples, named tuples and dataclasses.
    Indexing a cursor, and asking it for an attribute, gives a cursor of that place; assigning notes
    a change. ``build`` makes the copy. Operators work on the value, so that ``c["step"] += 1`` does
    what it says.

    Args:
      obj: the tree.
      parent_key: where the cursor stands in a larger one; None for a root.

    Example:
      >>> from linnet.cursor import cursor
      >>> params = {"dense": {"kernel": 1.0, "scales": (1, 2)}}
      >>> c = cursor(params)
      >>> c["dense"]["kernel"] *= 2
      >>> c["dense"]["scales"][1] = 5
      >>> c.build()
      {'dense': {'kernel': 2.0, 'scales': (1, 5)}}
      >>> params
      {'dense': {'kernel': 1.0, 'scales': (1, 2)}}
    """

    _obj: A
    _parent_key: ParentKey | None
    _changes: dict[Any, Any]  # by key: a cursor where one was made, or else a new value

    def __init__(self, obj: A, parent_key: ParentKey | None):
        vars(self).update(_obj=obj, _parent_key=parent_key, _changes={})

    # ---- places ---------------------------------------------------------------------------------

    @property
    def _root(self) -> Cursor[Any]:
        return self if self._parent_key is None else self._parent_key.parent._root

    @property
    def _path(self) -> str:
        if self._parent_key is None:
            return ""
        return _joined(self._parent_key.parent._path, self._parent_key.key)

    def _child(self, key: Any, value: Any) -> Cursor[Any]:
        """The cursor of an entry; the same one each time, so that its changes are found again."""
        found = self._changes.get(key, self)
        if found is self or not isinstance(found, Cursor):
            found = Cursor(value if found is self else found, ParentKey(self, key))
            self._changes[key] = found
        return found

    def __getitem__(self, key: Any) -> Cursor[Any]:
        key = _normal_key(self._obj, key)
        if key in self._changes:
            return self._child(key, None)
        if dataclasses.is_dataclass(self._obj):
            return getattr(self, key)
        if not hasattr(self._obj, "__getitem__"):
            raise TypeError(
                f"The value at {self._path!r} is a {type(self._obj).__name__} and has no entries.\n"
                "Fix: index a dict, a list or a tuple."
            )
        try:
            return self._child(key, self._obj[key])  # pyright: ignore[reportIndexIssue]
        except KeyError:
            raise KeyError(f"There is no key {key!r} at {self._path!r}.") from None

    def __getattr__(self, name: str) -> Cursor[Any]:
        key = name if name not in _fields(self._obj) else _normal_key(self._obj, name)
        if key in self._changes:
            return self._child(key, None)
        if name.startswith("__") or not hasattr(self._obj, name):
            raise AttributeError(
                f"The {type(self._obj).__name__} at {self._path!r} has no attribute {name!r}."
            )
        return self._child(key, getattr(self._obj, name))

    def __setitem__(self, key: Any, value: Any) -> None:
        obj = self._obj
        if not (isinstance(obj, list | tuple | Mapping) or dataclasses.is_dataclass(obj)):
            raise TypeError(
                f"The {type(obj).__name__} at {self._path!r} is a leaf: {key!r} cannot be set in "
                "it.\nFix: set the whole value, such as c['w'] = w.at[0].set(1.0)."
            )
        self._changes[_normal_key(obj, key)] = _plain(value)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __iter__(self) -> Iterator[Cursor[Any]]:
        if not isinstance(self._obj, list | tuple):
            raise NotImplementedError(
                "A cursor of a list or tuple can be iterated over, but the value at "
                f"{self._path!r} is a {type(self._obj).__name__}.\n"
                "Fix: iterate over the keys of the tree itself."
            )
        return (self[position] for position in range(len(self._obj)))

    def __reversed__(self) -> Iterator[Cursor[Any]]:
        return reversed(list(self))

    def __len__(self) -> int:
        return len(_plain(self))

    def __contains__(self, item: Any) -> bool:
        return item in _plain(self)

    def __bool__(self) -> bool:
        return bool(_plain(self))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __str__(self) -> str:
        return str(self.build())

    def __repr__(self) -> str:
        return f"Cursor({self._obj!r}, changes={self._changed()!r})"

    # ---- changes --------------------------------------------------------------------------------

    def _changed(self) -> dict[Any, Any]:
        """The new values by key, of the entries that have one."""
        new = {key: _plain(entry) for key, entry in self._changes.items()}
        return {
            key: value
            for key, value in new.items()
            if value is self._changes[key] or value is not _entry(self._obj, key)
        }

    def build(self) -> A:
        """A copy of the tree with all changes made; the tree itself where there are none.

        Returns:
          The copy, which shares everything unchanged with the tree.
        """
        changes = self._changed()
        return _rebuilt(self._obj, changes) if changes else self._obj

    def set(self, value: Any) -> Any:
        """Changes this place, and builds the whole tree.

        Args:
          value: the new value.

        Returns:
          The tree from the root on, with this change and those noted before.

        Example:
          >>> from linnet.cursor import cursor
          >>> cursor({"a": [1, 2]})["a"][0].set(10)
          {'a': [10, 2]}
        """
        if self._parent_key is None:
            return _plain(value)
        self._parent_key.parent[self._parent_key.key] = value
        return self._root.build()

    def apply_update(self, update_fn: PathFn) -> Cursor[A]:
        """Notes the changes that a function of path and value makes, in the whole tree.

        It does not descend into what the function changed.

        Args:
          update_fn: takes a path, such as ``"dense/kernel"``, and the value there; what it returns
            is the new value, and the same object means no change.

        Returns:
          This cursor.

        Example:
          >>> from linnet.cursor import cursor
          >>> params = {"dense": {"kernel": 1.0, "bias": 1.0}}
          >>> c = cursor(params).apply_update(lambda path, x: 0.0 if "bias" in path else x)
          >>> c.build()
          {'dense': {'kernel': 1.0, 'bias': 0.0}}
        """
        new = []

        def is_changed(path: str, value: Any) -> bool:
            changed = update_fn(path, value)
            if changed is value:
                return False
            new.append(changed)
            return True

        for place, value in zip(list(self.find_all(is_changed)), new, strict=True):
            assert place._parent_key is not None
            place._parent_key.parent[place._parent_key.key] = value
        return self

    def find_all(self, cond_fn: PathFn) -> Iterator[Cursor[Any]]:
        """The places for which a function of path and value is true.

        It does not descend into such a place.

        Args:
          cond_fn: takes a path, such as ``"dense/kernel"``, and the value there.

        Returns:
          An iterator of cursors.

        Example:
          >>> from linnet.cursor import cursor
          >>> c = cursor({"a": {"bias": 1}, "b": {"bias": 2}})
          >>> for bias in c.find_all(lambda path, value: path.endswith("bias")):
          ...     bias.set(0)
          {'a': {'bias': 0}, 'b': {'bias': 2}}
          {'a': {'bias': 0}, 'b': {'bias': 0}}
        """
        return self._search(cond_fn, "")

    def find(self, cond_fn: PathFn) -> Cursor[Any]:
        """The one place for which a function of path and value is true.

        Args:
          cond_fn: takes a path, such as ``"dense/kernel"``, and the value there.

        Returns:
          The cursor of that place.

        Raises:
          CursorFindError: there is none, or more than one.

        Example:
          >>> from linnet.cursor import cursor
          >>> cursor({"a": 1, "b": [2, 3]}).find(lambda path, value: value == 3).set(4)
          {'a': 1, 'b': [2, 4]}
        """
        found = list(itertools.islice(self.find_all(cond_fn), 2))
        if len(found) != 1:
            raise CursorFindError(*found)
        return found[0]

    def _search(self, cond_fn: PathFn, path: str) -> Iterator[Cursor[Any]]:
        for key, place in self._entries():
            here = _joined(path, key)
            if cond_fn(here, place.build()):
                yield place
            else:
                yield from place._search(cond_fn, here)

    def _entries(self) -> Iterator[tuple[Any, Cursor[Any]]]:
        obj: Any = self._obj
        if isinstance(obj, Mapping):
            keys = dict.fromkeys([*obj, *self._changes])
            yield from ((key, self[key]) for key in keys)
        elif is_named_tuple(obj):
            yield from zip(obj._fields, self, strict=True)
        elif isinstance(obj, list | tuple):
            yield from enumerate(self)
        elif dataclasses.is_dataclass(obj):
            yield from ((f.name, getattr(self, f.name)) for f in dataclasses.fields(obj))


def _joined(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _plain(value: Any) -> Any:
    return value.build() if isinstance(value, Cursor) else value


def _fields(obj: Any) -> tuple[str, ...]:
    return obj._fields if is_named_tuple(obj) else ()


def _normal_key(obj: Any, key: Any) -> Any:
    """One key for each entry: positions from the start, also in named tuples."""
    if key in _fields(obj):
        return obj._fields.index(key)
    if isinstance(obj, list | tuple) and isinstance(key, int):
        if not -len(obj) <= key < len(obj):
            raise IndexError(f"There is no entry {key} in a {type(obj).__name__} of {len(obj)}.")
        return key % len(obj)
    if isinstance(obj, list | tuple):
        raise TypeError(
            f"The entries of a {type(obj).__name__} have positions, but got {key!r}.\n"
            "Fix: set entries one by one, or the whole value."
        )
    return key


def _entry(obj: Any, key: Any) -> Any:
    if (isinstance(obj, Mapping) and key in obj) or isinstance(obj, list | tuple):
        return obj[key]
    return getattr(obj, key, None)


def _rebuilt(obj: Any, changes: dict[Any, Any]) -> Any:
    """A copy of a container with some entries replaced."""
    if isinstance(obj, Mapping):
        new = {**obj, **changes}
        return new if type(obj) is dict else type(obj)(new)  # pyright: ignore[reportCallIssue]
    if isinstance(obj, list | tuple):
        items = [changes.get(position, item) for position, item in enumerate(obj)]
        return type(obj)(*items) if is_named_tuple(obj) else type(obj)(items)
    return dataclasses.replace(obj, **changes)


def cursor(obj: A) -> Cursor[A]:
    """A cursor at the root of a tree; see ``Cursor``.

    Args:
      obj: the tree: dicts, lists, tuples, named tuples and dataclasses.

    Returns:
      The cursor.

    Example:
      >>> from linnet.cursor import cursor
      >>> cursor(((1, 2), [3, 4]))[1][0].set(30)
      ((1, 2), [30, 4])
    """
    return Cursor(obj, None)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(*map(_plain, (self, *others)))


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(_plain(other), _plain(self))


_BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
for _name in [*_BINARY, *"lt le eq ne gt ge neg pos abs invert".split()]:
    setattr(Cursor, f"__{_name}__", _forward(getattr(operator, f"__{_name}__")))
for _name in _BINARY:
    setattr(Cursor, f"__r{_name}__", _backward(getattr(operator, f"__{_name}__")))
for _name, _function in {
    "divmod": _forward(divmod),
    "rdivmod": _backward(divmod),
    "round": _forward(round),
}.items():
    setattr(Cursor, f"__{_name}__", _function)
