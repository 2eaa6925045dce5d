"""An immutable dict that is a pytree, and functions for dicts that may be one."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar

import jax

from linnet import serialization

K = TypeVar("K")
V = TypeVar("V")


class _FrozenKeys(KeysView[K]):
    def __repr__(self) -> str:
        return f"frozen_dict_keys({list(self)})"


class _FrozenValues(ValuesView[V]):
    def __repr__(self) -> str:
        return f"frozen_dict_values({list(self)})"


@jax.tree_util.register_pytree_with_keys_class
class FrozenDict(Mapping[K, V]):
    """A dict that cannot be changed, nor the dicts inside of it. A pytree with sorted keys.

    Args:
      *args: as for ``dict``.
      __unsafe_skip_copy__: take the one dict that was given as it is, without a copy.
      **kwargs: as for ``dict``.

    Example:
      >>> from linnet.core import FrozenDict
      >>> frozen = FrozenDict({"a": {"b": 1}})
      >>> frozen["a"]
      FrozenDict({
          b: 1,
      })
      >>> frozen.copy({"c": 2}).unfreeze()
      {'a': {'b': 1}, 'c': 2}
    """

    __slots__ = ("_dict", "_hash")

    def __init__(self, *args: Any, __unsafe_skip_copy__: bool = False, **kwargs: Any):
        given: Any = dict(*args, **kwargs)
        self._dict: dict[K, V] = given if __unsafe_skip_copy__ else unfreeze(given)
        self._hash: int | None = None

    def __getitem__(self, key: K) -> V:
        value: Any = self._dict[key]
        if isinstance(value, dict):
            value = FrozenDict(value, __unsafe_skip_copy__=True)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        raise ValueError(
            f"FrozenDict is immutable; its entry {key!r} cannot be set.\n"
            f"Fix: frozen.copy({{{key!r}: value}}) gives a FrozenDict with that entry."
        )

    def __contains__(self, key: object) -> bool:
        return key in self._dict

    def __iter__(self) -> Iterator[K]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def __repr__(self) -> str:
        return self.pretty_repr()

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (self.unfreeze(),)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenDict):
            return self._dict == other._dict
        return isinstance(other, Mapping) and self._dict == unfreeze(other)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.items()))
        return self._hash

    def keys(self) -> KeysView[K]:
        """The keys, in the order they were given."""
        return _FrozenKeys(self)

    def values(self) -> ValuesView[V]:
        """The values; dicts among them are frozen."""
        return _FrozenValues(self)

    def items(self) -> Any:
        """Pairs of keys and values; dicts among the values are frozen."""
        return ((key, self[key]) for key in self._dict)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or ``default``."""
        return self[key] if key in self._dict else default

    def copy(self, add_or_replace: Mapping[Any, Any] = {}) -> FrozenDict[K, V]:
        """A FrozenDict with more or other entries.

        Args:
          add_or_replace: the entries.

        Returns:
          The new FrozenDict.
        """
        return type(self)({**self._dict, **unfreeze(add_or_replace)})

    def pop(self, key: K) -> tuple[FrozenDict[K, V], V]:
        """Takes an entry out.

        Args:
          key: the entry's key.

        Returns:
          The FrozenDict without the entry, and the value.

        Raises:
          KeyError: there is no such entry.
        """
        value = self[key]
        rest = {k: v for k, v in self._dict.items() if k != key}
        return type(self)(rest, __unsafe_skip_copy__=True), value

    def unfreeze(self) -> dict[K, V]:
        """A plain dict of plain dicts with the same entries."""
        return unfreeze(self._dict)

    def pretty_repr(self, num_spaces: int = 4) -> str:
        """The text that ``repr`` gives, indented by ``num_spaces`` a level."""
        return f"FrozenDict({pretty_repr(self._dict, num_spaces)})"

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[K, ...]]:
        """The children with their keys, sorted, for JAX."""
        names: Any = tuple(sorted(self._dict))  # pyright: ignore[reportArgumentType]
        children = tuple((jax.tree_util.DictKey(name), self._dict[name]) for name in names)
        return children, names

    @classmethod
    def tree_unflatten(cls, keys: Any, values: Any) -> FrozenDict[K, V]:
        """The FrozenDict of sorted keys and their values, for JAX."""
        return cls(zip(keys, values, strict=True), __unsafe_skip_copy__=True)


def freeze(xs: Mapping[Any, Any]) -> FrozenDict[Any, Any]:
    """Makes a FrozenDict of a dict, at every level.

    Args:
      xs: a dict.

    Returns:
      A FrozenDict with the same entries.

    Example:
      >>> from linnet.core import freeze, unfreeze
      >>> unfreeze(freeze({"a": {"b": 1}}))
      {'a': {'b': 1}}
    """
    return FrozenDict(xs)


def unfreeze(x: Any) -> Any:
    """Makes a plain dict of a FrozenDict, or copies a dict, at every level.

    Args:
      x: a FrozenDict or a dict; anything else is returned as it is.

    Returns:
      A plain dict of plain dicts.

    Example:
      >>> from linnet import core
      >>> core.unfreeze(core.freeze({"a": {"b": 1}}))
      {'a': {'b': 1}}
    """
    if isinstance(x, FrozenDict):
        x = x._dict
    elif not isinstance(x, dict):
        return x
    return {key: unfreeze(value) for key, value in x.items()}


def _check_dict(x: Any) -> None:
    if not isinstance(x, FrozenDict | dict):
        raise TypeError(f"Expected a FrozenDict or a dict, but got {x!r} ({type(x).__name__}).")


def copy(
    x: FrozenDict[Any, Any] | dict[Any, Any],
    add_or_replace: Mapping[Any, Any] = {},
) -> FrozenDict[Any, Any] | dict[Any, Any]:
    """Copies a FrozenDict or a dict, with more or other entries.

    Args:
      x: a FrozenDict or a dict.
      add_or_replace: the entries.

    Returns:
      The copy, of the same class.

    Raises:
      TypeError: ``x`` is neither.

    Example:
      >>> from linnet import core
      >>> core.copy({"a": 1}, {"b": 2})
      {'a': 1, 'b': 2}
    """
    _check_dict(x)
    if isinstance(x, FrozenDict):
        return x.copy(add_or_replace)
    return {**unfreeze(x), **add_or_replace}


def pop(
    x: FrozenDict[Any, Any] | dict[Any, Any], key: Any
) -> tuple[FrozenDict[Any, Any] | dict[Any, Any], Any]:
    """Takes an entry out of a copy of a FrozenDict or a dict.

    Args:
      x: a FrozenDict or a dict; it is not changed.
      key: the entry's key.

    Returns:
      The copy without the entry, and the value.

    Raises:
      TypeError: ``x`` is neither.
      KeyError: there is no such entry.

    Example:
      >>> from linnet import core
      >>> core.pop({"params": 1, "cache": 2}, "cache")
      ({'params': 1}, 2)
    """
    _check_dict(x)
    if isinstance(x, FrozenDict):
        return x.pop(key)
    rest = unfreeze(x)
    value = rest.pop(key)
    return rest, value


def pretty_repr(x: Any, num_spaces: int = 4) -> str:
    """Prints a nested dict with one entry a line.

    Args:
      x: a FrozenDict, a dict, or anything else, which is printed by its ``repr``.
      num_spaces: how far each level is indented.

    Returns:
      The text.

    Example:
      >>> from linnet import core
      >>> print(core.pretty_repr({"a": {"b": 1}}, 2))
      {
        a: {
          b: 1,
        },
      }
    """
    if isinstance(x, FrozenDict):
        return x.pretty_repr(num_spaces)
    if not isinstance(x, dict):
        return repr(x)
    if not x:
        return "{}"
    entries = (f"{key}: {pretty_repr(value, num_spaces)},\n" for key, value in x.items())
    lines = "".join(entries).splitlines(keepends=True)
    return "{\n" + "".join(" " * num_spaces + line for line in lines) + "}"


def _to_state_dict(frozen: FrozenDict[Any, Any]) -> dict[str, Any]:
    return {str(key): serialization.to_state_dict(value) for key, value in frozen.items()}


def _from_state_dict(frozen: FrozenDict[Any, Any], state: Any) -> FrozenDict[Any, Any]:
    return FrozenDict(serialization.from_state_dict(frozen.unfreeze(), state))


serialization.register_serialization_state(FrozenDict, _to_state_dict, _from_state_dict)
