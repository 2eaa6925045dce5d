"""What a value is to the object model, and what is inside of it.

Every walk (flattening, splitting, printing) asks for the kind of every attribute, so the answer is
decided by type, remembered, and one dictionary look-up. Classes of the object model carry their
answer as ``_linnet_kind``.

``children_of`` lists what an object or container holds, in the order of every walk. ``visits`` is
the traversal of all that can be reached from a root: ``places`` gives a holder before what it
holds, ``graphlib.traverse`` gives and builds it after. There is one other, ``graphlib.walk.Walk``,
which makes definitions and must be fast. Following the paths of a state or of other names is no
traversal (``graphlib.update``, ``write_given`` in ``nnx.bridge.module``, ``io.names.pytorch``), and
neither are small recursions over plain containers, such as ``holds_data`` below.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

# The order counts. Up to ARRAY a value is one piece, and of these all but STATIC are data
# (STATIC < kind <= ARRAY); from LIST on, what it holds decides.
STATIC, VARIABLE, OBJECT, ARRAY, LIST, DICT, TUPLE, PYTREE, METHOD = range(9)
REFERENCE = -1  # in a definition, something that was met before

PLAIN = (STATIC, ARRAY)
_LEAVES = (STATIC, VARIABLE, ARRAY)
_CONTAINERS = (LIST, DICT, TUPLE, PYTREE, METHOD)

KINDS: dict[type, int] = {list: LIST, dict: DICT, tuple: TUPLE, MethodType: METHOD}
KINDS |= dict.fromkeys((type(None), bool, int, float, str, bytes, complex, type), STATIC)

_DATA_TYPES: set[type] = set()  # registered by hand

Path = tuple[Any, ...]

ARRAY_TYPES = (jax.Array, np.ndarray, Tracer, jax.Ref)


def kind_of(value: Any) -> int:
    """The kind of ``value``; of a container by its type alone, whatever it holds."""
    kind = KINDS.get(type(value))
    return _classify(value) if kind is None else kind


def is_node(value: Any) -> bool:
    """Whether a value is an object or a Variable."""
    return kind_of(value) in (OBJECT, VARIABLE)


def _classify(value: Any) -> int:
    cls = type(value)
    kind = getattr(cls, "_linnet_kind", None)
    if kind is None:
        if isinstance(value, ARRAY_TYPES):
            kind = ARRAY
        elif isinstance(value, tuple) and hasattr(cls, "_fields"):
            kind = TUPLE
        elif jax.tree_util.all_leaves([value]):
            kind = ARRAY if cls in _DATA_TYPES else STATIC
        else:
            kind = PYTREE
    KINDS[cls] = kind
    return kind


def register_data_type(type_: type) -> type:
    """Makes every instance of a type count as data, like an array.

    A pytree that is registered with JAX stays a pytree: states have an entry for each array and
    Variable inside.

    Args:
      type_: the class; usable as a decorator.

    Returns:
      The class itself.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> @nnx.register_data_type
      ... class Handle: ...
      >>> nnx.is_data(Handle())
      True
      >>> @nnx.register_data_type
      ... @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass
      ... class Range:
      ...     low: jax.Array
      ...     high: jax.Array | None = None
      >>> list(nnx.state({"range": Range(jnp.zeros(2))})["range"])
      ['low']
    """
    _DATA_TYPES.add(type_)
    KINDS.pop(type_, None)
    return type_


def is_data(value: Any) -> bool:
    """Whether the type of a value makes it data: a Variable, array, Pytree or registered type.

    A list, dict or tuple never is, whatever is inside.

    Args:
      value: any Python object.

    Returns:
      Whether it is data.

    Example:
      >>> import numpy as np
      >>> is_data(np.ones(2)), is_data(3), is_data([np.ones(2)])
      (True, False, False)
    """
    return STATIC < kind_of(value) <= ARRAY or type(value) in _DATA_TYPES


class DefaultDictStructure(NamedTuple):
    """The structure of a ``defaultdict``; that of JAX forgets the order of the keys."""

    default_factory: Any
    keys: tuple[Any, ...]

    def unflatten(self, children: Iterable[Any]) -> collections.defaultdict[Any, Any]:
        return collections.defaultdict(self.default_factory, zip(self.keys, children, strict=True))


def one_level(value: Any) -> tuple[list[tuple[Hashable, Any]], Any]:
    """The children of a registered pytree by key, and the structure that puts them back.

    Where JAX has one key for several children, all of them have their positions for keys.
    """
    if type(value) is collections.defaultdict:
        return list(value.items()), DefaultDictStructure(value.default_factory, tuple(value))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    names = [key_name(path[0]) for path, _ in leaves]
    keys = names if len(set(names)) == len(names) else range(len(names))
    return [(key, child) for key, (_, child) in zip(keys, leaves, strict=True)], treedef


def key_name(key: Any) -> Hashable:
    """The plain name of one step of a JAX key path."""
    for field in ("name", "key", "idx"):
        if hasattr(key, field):
            return getattr(key, field)
    return str(key)


def jax_key(key: Any, kind: int) -> Any:
    """The key of JAX for an attribute or element of something of that kind."""
    if kind == DICT or not isinstance(key, (str, int)):
        return DictKey(key)
    return GetAttrKey(key) if isinstance(key, str) else SequenceKey(key)


def container_items(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    """The elements of a list, dict, tuple or registered pytree, by key."""
    if kind == DICT:
        return value.items()
    if kind == TUPLE and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if kind == PYTREE:
        return one_level(value)[0]
    return enumerate(value)


def sorted_items(value: Any, kind: int) -> list[tuple[Any, Any]]:
    """The elements of a list, dict, tuple or registered pytree, those of a dict in sorted order."""
    if kind == DICT:
        return [(key, value[key]) for key in sort_keys(value)]
    return list(container_items(value, kind))


def with_elements(value: Any, kind: int, changes: dict[Any, Any]) -> Any:
    """A tuple or registered pytree like ``value`` with other elements at some keys."""
    if kind == PYTREE:
        items, structure = one_level(value)
        return structure.unflatten([changes.get(key, item) for key, item in items])
    if hasattr(value, "_fields"):
        return value._replace(**changes)
    return tuple(changes.get(position, item) for position, item in enumerate(value))


def bound_owner(value: Any) -> Any:
    """The object of the model a bound method belongs to, or None."""
    owner = value.__self__
    return owner if kind_of(owner) == OBJECT else None


def items_of(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    """The attributes or elements of anything that has some, by key; a method has its owner."""
    if kind == OBJECT:
        return value._pytree_items().items()
    if kind == METHOD:
        owner = bound_owner(value)
        return () if owner is None else (("__self__", owner),)
    return container_items(value, kind)


def children_of(value: Any, kind: int) -> list[tuple[Any, Any]]:
    """The attributes or elements in the order of every walk: keys sorted.

    Methods come last, so that an object is met at its own attribute before it is met as the owner
    of a bound method.
    """
    if kind == METHOD:
        return list(items_of(value, kind))
    by_key, kind = (value._pytree_items(), DICT) if kind == OBJECT else (value, kind)
    items = sorted_items(by_key, kind)
    late = [item for item in items if type(item[1]) is MethodType]
    return [item for item in items if type(item[1]) is not MethodType] + late if late else items


def child_at(value: Any, key: Any, default: Any = None) -> Any:
    """What stands at a key of something, or ``default`` if it has nothing there."""
    kind = kind_of(value)
    return default if kind in _LEAVES else dict(items_of(value, kind)).get(key, default)


BEFORE, AFTER, SINGLE, AGAIN = range(4)  # how ``visits`` meets something

Children = Callable[[Any, int], Iterable[tuple[Any, Any]]]


def visits(
    root: Any,
    children: Children = children_of,
    *,
    leaves: tuple[int, ...] = _LEAVES,
    left_out: tuple[int, ...] = (),
    enter_again: tuple[int, ...] = (),
    breadth_first: bool = False,
) -> Iterator[tuple[int, Path, Any]]:
    """The traversal of everything but ``graphlib.walk``: every place below ``root``.

    A holder is given as ``BEFORE`` what it holds and as ``AFTER`` it (not if ``breadth_first``),
    what holds nothing as ``SINGLE``, and a Variable or holder that was met before as ``AGAIN``: it
    is not entered a second time unless its kind is among ``enter_again``. What has a kind of
    ``leaves`` is not entered, and what has one of ``left_out`` is not given at all.
    """
    pending: collections.deque[tuple[bool, Path, Any, Path]]
    pending = collections.deque([(False, (), root, ())])
    take = pending.popleft if breadth_first else pending.pop
    met: dict[int, Any] = {}  # keeps what it names alive, so that no id is used again
    while pending:
        was_entered, path, value, above = take()
        if was_entered:
            yield AFTER, path, value
            continue
        if id(value) in met or (above and any(value is holder for holder in above)):
            yield AGAIN, path, value
            continue
        kind = kind_of(value)
        if kind == VARIABLE:
            met[id(value)] = value
        if kind in leaves:
            yield SINGLE, path, value
            continue
        if kind not in enter_again:
            met[id(value)] = value
        elif kind != TUPLE:  # in a cycle something other than a tuple is met again
            above = (*above, value)
        yield BEFORE, path, value
        if not breadth_first:
            pending.append((True, path, value, ()))
        items = children(value, kind)
        if left_out:
            items = [item for item in items if kind_of(item[1]) not in left_out]
        if kind == METHOD:  # an owner that was met at its own attribute is not met here again
            items = [item for item in items if id(item[1]) not in met]
        below = [(False, (*path, key), child, above) for key, child in items]
        pending.extend(below if breadth_first else reversed(below))


def places(
    root: Any,
    children: Children = children_of,
    *,
    plain: bool = True,
    methods: bool = True,
    every_path: bool = False,
    breadth_first: bool = False,
) -> Iterator[tuple[Path, Any]]:
    """Every place below ``root`` with its path, a holder before what it holds.

    What stands in several places is given at each of them and entered at the first. With
    ``every_path`` plain containers are entered each time, so that all paths through them are given.
    Without ``plain`` arrays and static values are left out, which saves time; without ``methods``
    the owner of a bound method is not looked for.
    """
    found = visits(
        root,
        children,
        leaves=_LEAVES if methods else (*_LEAVES, METHOD),
        left_out=() if plain else PLAIN,
        enter_again=_CONTAINERS if every_path else (),
        breadth_first=breadth_first,
    )
    return ((path, value) for event, path, value in found if event != AFTER)


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
        if type(value) in _DATA_TYPES:
            return True
        return any(_has_leaves(child) for _, child in one_level(value)[0])
    return any(map(holds_data, value.values() if kind == DICT else value))


def _has_leaves(value: Any) -> bool:
    """Whether JAX finds a leaf in ``value``; unlike JAX, this takes dicts with keys of any type."""
    kind = kind_of(value)
    if value is None or kind not in (LIST, DICT, TUPLE, PYTREE):
        return value is not None
    children = one_level(value)[0] if kind == PYTREE else container_items(value, kind)
    return any(_has_leaves(child) for _, child in children)


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
    """Sorts keys by comparison, or by type name and text where they do not compare."""
    keys = list(keys)
    try:
        return sorted(keys)
    except TypeError:
        pass
    try:
        return sorted(keys, key=lambda key: (type(key).__name__, key))
    except TypeError:
        return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))
