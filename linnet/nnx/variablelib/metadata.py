"""What a Variable carries beside its value: names, axes, hooks, and how it is stored.

A ``Metadata`` is a mapping that is never changed once made, so Variables share it, and it is its
own key in graph definitions and tree structures. A list, a dict or another value inside can still
change in place: where there is one, each Variable has a Metadata of its own, and structures hold a
copy of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from linnet.nnx.pytreelib import statics

HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")
STORAGE = ("hijax", "ref", "eager_sharding")
KEPT_ON_TAKE_OVER = (*STORAGE, "frozen")
"""What a Variable keeps when it takes over another one's metadata."""
_OLD_SHARDING_NAMES = ("sharding", "sharding_names")
_STORAGE_DEFAULTS = {"hijax": False, "ref": False, "eager_sharding": True}


def current_name(name: str) -> str:
    """The name of an entry today; older programs call ``out_sharding`` by two other names."""
    return "out_sharding" if name in _OLD_SHARDING_NAMES else name


class Metadata(dict[str, Any]):
    """An unchanging mapping with a hash; equal if names and values are, by ``statics.key_of``."""

    __slots__ = ("_hash", "_key", "can_change", "hooks", "stored_as_ref")

    def __init__(self, mapping: Mapping[str, Any]):
        super().__init__(mapping)
        for name in _OLD_SHARDING_NAMES:
            if name in mapping:
                self["out_sharding"] = self.pop(name)
        self._key: Any = None
        self._hash = 0
        self.hooks = frozenset(name for name in HOOKS if mapping.get(name))
        # A read-only value needs no ref, and jax.grad takes it only as a plain value.
        is_ref = mapping.get("ref") or mapping.get("hijax")
        self.stored_as_ref = bool(is_ref) and mapping.get("mutable") is not False
        self.can_change = any(map(statics.can_change, mapping.values()))

    @property
    def key(self) -> Any:
        """The key of the items, in the order of their names."""
        if self._key is None:
            self._make_key()
        return self._key

    def _make_key(self) -> None:
        key = statics.key_of(sorted(self.items()))
        self._hash = hash(key)
        self._key = key  # last: another thread that sees a key may read the hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(other) is Metadata and len(self) == len(other) and self.key == other.key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._key is None:
            self._make_key()
        return self._hash

    def replaced(self, updates: Mapping[str, Any]) -> Metadata:
        """A copy with some entries set."""
        return Metadata({**self, **updates}) if updates else self

    def stored_plainly(self) -> Metadata:
        """The metadata of a Variable that is not stored as refs."""
        return self.replaced({"hijax": False, "ref": False})

    def snapshot(self) -> Metadata:
        """The same metadata with a key of its own and copies of its lists, dicts and sets."""
        if not self.can_change:
            return self
        return Metadata({name: statics.copy_mutable(value) for name, value in self.items()})

    def shown(self) -> dict[str, Any]:
        """The entries worth printing: all but storage settings left at their defaults."""
        return {
            name: value
            for name, value in self.items()
            if name not in STORAGE or value != _STORAGE_DEFAULTS[name]
        }

    def __reduce__(self) -> Any:
        return (Metadata, (dict(self),))

    def __copy__(self) -> Metadata:
        return Metadata(self)

    def __deepcopy__(self, memo: Any) -> Metadata:
        return self.snapshot()


@functools.cache
def storage_metadata(hijax: bool, ref: bool, eager_sharding: bool) -> Metadata:
    """The metadata of a Variable that was given none; shared by all such Variables."""
    return Metadata({"hijax": hijax, "ref": ref, "eager_sharding": eager_sharding})


@functools.lru_cache(maxsize=4096)
def _shared_metadata(names: Any, texts: Any, storage: Metadata) -> Metadata:
    return Metadata({**dict(zip(names, texts, strict=True)), **storage})


def complete_metadata(metadata: Mapping[str, Any], storage: Metadata) -> Metadata:
    """A Variable's metadata; shared between Variables where it is nothing but text."""
    if not metadata:
        return storage
    values = tuple(metadata.values())
    if all(type(value) is str for value in values):
        return _shared_metadata(tuple(metadata), values, storage)
    return Metadata({**metadata, **storage})


def run_hook(hook: Any, variable: Any, *args: Any) -> Any:
    """Calls one hook, or several in order, each on the result of the one before."""
    if callable(hook):
        return hook(variable, *args)
    value, *rest = args
    for step in hook:
        value = step(variable, value, *rest)
    return value
