"""What a value is to the object model, decided by its type and remembered.

Every walk (flattening, splitting, printing) asks this question for every attribute, so the answer
is one dictionary look-up. Classes of the object model carry their answer as ``_linnet_kind``.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable
from types import MethodType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

STATIC, VARIABLE, OBJECT, ARRAY, LIST, DICT, TUPLE, PYTREE, METHOD = range(9)
REF = -1  # in a definition, something that was met before

KINDS: dict[type, int] = {list: LIST, dict: DICT, tuple: TUPLE, MethodType: METHOD}
KINDS |= dict.fromkeys((type(None), bool, int, float, str, bytes, complex, type), STATIC)

ARRAY_TYPES = (jax.Array, np.ndarray, Tracer, jax.Ref)


def kind_of(value: Any) -> int:
    """The kind of ``value``; containers are classed by type alone, whatever they hold."""
    kind = KINDS.get(type(value))
    return _classify(value) if kind is None else kind


def _classify(value: Any) -> int:
    cls = type(value)
    kind = getattr(cls, "_linnet_kind", None)
    if kind is None:
        if isinstance(value, ARRAY_TYPES):
            kind = ARRAY
        elif isinstance(value, tuple) and hasattr(cls, "_fields"):
            kind = TUPLE
        elif jax.tree_util.all_leaves([value]):
            kind = STATIC
        else:
            kind = PYTREE
    KINDS[cls] = kind
    return kind


def register_data_type(type_: type) -> type:
    """Makes every instance of a type count as data, like an array.

    Args:
      type_: the class; usable as a decorator.

    Returns:
      The class itself.

    Example:
      >>> from linnet import nnx
      >>> @nnx.register_data_type
      ... class Handle: ...
      >>> nnx.is_data(Handle())
      True
    """
    KINDS[type_] = ARRAY
    return type_


def one_level(value: Any) -> tuple[list[tuple[Hashable, Any]], Any]:
    """The children of a registered pytree by key, and the structure that puts them back."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    return [(key_name(path[0]), child) for path, child in leaves], treedef


def key_name(key: Any) -> Hashable:
    """The plain name of one step of a JAX key path."""
    for field in ("name", "key", "idx"):
        if hasattr(key, field):
            return getattr(key, field)
    return str(key)


def container_items(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    """The elements of a list, dict, tuple or registered pytree, by key."""
    if kind == DICT:
        return value.items()
    if kind == TUPLE and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if kind == PYTREE:
        return one_level(value)[0]
    return enumerate(value)


def bound_owner(value: Any) -> Any:
    """The object of the model a bound method belongs to, or None."""
    owner = value.__self__
    return owner if kind_of(owner) == OBJECT else None


def holds_data(value: Any) -> bool:
    """Whether ``value`` is data or a container with data somewhere inside."""
    kind = KINDS.get(type(value))
    if kind is None:
        kind = _classify(value)
    if kind == STATIC:
        return False
    if kind <= ARRAY:
        return True
    if kind == METHOD:
        return bound_owner(value) is not None
    if kind == PYTREE:  # JAX sees every leaf of a registered pytree as data
        return bool(jax.tree_util.tree_leaves(value, is_leaf=lambda x: kind_of(x) == OBJECT))
    return any(map(holds_data, value.values() if kind == DICT else value))


_OPAQUE = (
    set,
    frozenset,
    collections.deque,
    collections.UserList,
    collections.UserDict,
    list,
    dict,
)


def hidden_inside(value: Any) -> list[Any]:
    """Objects and Variables in a container that counts as static, whatever it holds."""
    if kind_of(value) != STATIC or not isinstance(value, _OPAQUE):
        return []
    items = value.values() if isinstance(value, (dict, collections.UserDict)) else value
    return [item for item in items if kind_of(item) in (OBJECT, VARIABLE)]


def data_inside(value: Any) -> list[Any]:
    """Every piece of data found in ``value``."""
    kind = kind_of(value)
    if kind == STATIC:
        return []
    if kind <= ARRAY:
        return [value]
    if kind == METHOD:
        return [value] if bound_owner(value) is not None else []
    return [leaf for _, item in container_items(value, kind) for leaf in data_inside(item)]


def sort_keys(keys: Iterable[Any]) -> list[Any]:
    """Keys in one order for all: as they compare, and by type and text where they do not."""
    keys = list(keys)
    try:
        return sorted(keys)
    except TypeError:
        pass
    try:
        return sorted(keys, key=lambda key: (type(key).__name__, key))
    except TypeError:
        return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))
