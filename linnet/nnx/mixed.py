"""Plain containers as JAX should see them inside an object.

To JAX every element of a list, dict or tuple is data, a dict has no order, and a bound method is a
leaf. Where an object means something else, the container or method travels in a ``Mixed``, a
pytree of its own that tells static elements from data.

The *shape* of a container says which is which: one entry an element, False for static, True for
data, and a shape for a container inside that is mixed too; a method whose owner is left alone is
``ALONE``. The shape follows from the elements, except where something else was put in the place of
arrays (an axis, a sharding): then it is kept as the mark of the attribute.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from jax.tree_util import DictKey, GetAttrKey, SequenceKey, register_pytree_with_keys

from linnet.nnx import kinds, statics
from linnet.nnx.attributes import OwnMethod
from linnet.nnx.kinds import ARRAY, DICT, METHOD, OBJECT, PYTREE, STATIC, VARIABLE, kind_of

ALONE = ("method of an object that is not followed",)


class Mixed:
    """A container or bound method on its way through JAX.

    Args:
      value: the container or method.
      holder: the object whose attribute it is, or is part of.
      shape: its shape, where that does not follow from the elements.
      own: whether a method of the holder is inside, to be bound to the copy.
    """

    __slots__ = ("holder", "own", "shape", "value")

    def __init__(self, value: Any, holder: Any = None, shape: Any = None, own: bool = False):
        self.value = value
        self.holder = holder
        self.shape = shape
        self.own = own


def wrap(value: Any, holder: Any, shape: Any = None) -> Any:
    """``value`` as JAX should see it: mixed containers and bound methods are wrapped.

    Args:
      value: the value of an attribute, or an element.
      holder: the object whose attribute it is, or is part of.
      shape: its shape, True if all of it is data, or None if that follows from the elements.

    Returns:
      The value, or a ``Mixed`` around it.
    """
    if kind_of(value) == METHOD:
        return Mixed(value, holder, shape)
    if shape is None:
        shape = shape_of(value)
    elif shape is True:
        shape = _all_data(value)
    return value if shape is True else Mixed(value, holder, shape)


def _all_data(value: Any) -> Any:
    """The shape of a container with nothing but data; True unless there is an order to keep."""
    kind = kind_of(value)
    if kind <= ARRAY or kind in (METHOD, PYTREE):
        return True
    shape = tuple(_all_data(item) for _, item in _sorted_items(value))
    in_order = kind != DICT or list(value) == kinds.sort_keys(value)
    return True if in_order and all(entry is True for entry in shape) else shape


def unwrap(child: Any, holder: Any) -> tuple[Any, Any]:
    """The attribute that ``child`` stands for, and the mark it needs to be seen alike again."""
    if type(child) is not Mixed:
        kind = kind_of(child)
        follows = kinds.holds_data(child) and (kind <= ARRAY or _is_pure(child, kind))
        return child, None if follows else True
    value = _bind_own(child.value, holder) if child.own else child.value
    follows = child.shape is None or shape_of(value) == child.shape
    return value, None if follows else child.shape


def kept_marks(obj: Any) -> tuple[tuple[Any, Any], ...]:
    """The marks of an object that a copy must be given: those that its values do not imply."""
    marks = obj._pytree_marks
    if marks is None:
        return ()
    items = obj._pytree_items()
    names = [name for name in kinds.sort_keys(marks) if name in items]
    return tuple((name, marks[name]) for name in names if _is_news(items[name], marks[name]))


def _is_news(value: Any, mark: Any) -> bool:
    if mark is True:
        kind = kind_of(value)
        return kind > ARRAY and kinds.holds_data(value) and not _is_pure(value, kind)
    return True


def shape_of(value: Any) -> Any:
    """The shape that follows from the elements; True where JAX's own view is right."""
    kind = kind_of(value)
    if kind <= ARRAY or kind == METHOD or _is_pure(value, kind):
        return True
    return tuple(kinds.holds_data(item) and shape_of(item) for _, item in _sorted_items(value))


def _sorted_items(value: Any) -> list[tuple[Any, Any]]:
    kind = kind_of(value)
    items = list(kinds.container_items(value, kind))
    if kind == DICT:
        return [(key, value[key]) for key in kinds.sort_keys(value)]
    return items


def _is_pure(value: Any, kind: int) -> bool:
    """Whether JAX's own flattening of a container treats every element as we do."""
    if kind in (METHOD, PYTREE):
        return kind == PYTREE
    if kind == DICT:
        keys = list(value)
        return keys == kinds.sort_keys(keys) and all(map(_is_pure_element, value.values()))
    return all(map(_is_pure_element, value))


def _is_pure_element(value: Any) -> bool:
    kind = kind_of(value)
    if kind == STATIC:
        return value is None
    return kind <= ARRAY or _is_pure(value, kind)


def _flatten(mixed: Mixed) -> tuple[list[Any], Any]:
    value, holder = mixed.value, mixed.holder
    kind = kind_of(value)
    if kind == METHOD:
        return _flatten_method(value, holder, mixed.shape == ALONE)
    items = _sorted_items(value)
    shape = mixed.shape
    if shape is None or len(shape) != len(items):
        shape = shape_of(value)
    children, static_values = [], []
    for (key, item), entry in zip(items, shape, strict=True):
        if entry is False:
            static_values.append(item)
        else:
            children.append((_key(key, kind), wrap(item, holder, entry)))
    keys, order = tuple(key for key, _ in items), tuple(value) if kind == DICT else None
    is_data = tuple(entry is not False for entry in shape)
    return children, (type(value), keys, order, is_data, statics.pack(static_values))


def _key(key: Any, kind: int) -> Any:
    if kind == DICT:
        return DictKey(key)
    return GetAttrKey(key) if isinstance(key, str) else SequenceKey(key)


def _flatten_method(method: MethodType, holder: Any, alone: bool) -> tuple[list[Any], Any]:
    owner = method.__self__
    if owner is holder:
        return [], (OwnMethod, method.__func__)
    if alone or _leads_to(owner, holder):
        # JAX would go round for ever. Like any static value it stays what it is.
        return [], (statics.Identity, method.__func__, statics.Identity(owner))
    return [(GetAttrKey("__self__"), owner)], (MethodType, method.__func__)


def _leads_to(root: Any, target: Any) -> bool:
    pending, seen = [root], set()
    while pending:
        value = pending.pop()
        if value is target:
            return True
        kind = kind_of(value)
        if kind in (STATIC, VARIABLE, ARRAY) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind == OBJECT:
            pending.extend(value._pytree_items().values())
        elif kind == METHOD:
            pending.append(value.__self__)
        else:
            pending.extend(item for _, item in kinds.container_items(value, kind))
    return False


def _unflatten(aux: Any, children: Any) -> Mixed:
    form, function_or_keys, *rest = aux
    if form is OwnMethod:
        return Mixed(OwnMethod(function_or_keys), own=True)
    if form is statics.Identity:
        return Mixed(MethodType(function_or_keys, rest[0].value), shape=ALONE)
    if form is MethodType:
        return Mixed(MethodType(function_or_keys, children[0]))
    order, is_data, packed = rest
    children, static_values = iter(children), iter(statics.unpack(packed[0]))
    values, shape, own = [], [], False
    for entry in is_data:
        value = next(children) if entry else next(static_values)
        if type(value) is Mixed:
            own = own or value.own
            entry = True if value.shape is None else value.shape
            value = value.value
        values.append(value)
        shape.append(entry)
    if order is not None:
        by_key = dict(zip(function_or_keys, values, strict=True))
        value = {key: by_key[key] for key in order}
    else:
        value = form(*values) if hasattr(form, "_fields") else form(values)
    return Mixed(value, shape=tuple(shape), own=own)


def _bind_own(value: Any, holder: Any) -> Any:
    """The container with methods of ``holder`` where they were left out."""
    kind = type(value)
    if kind is OwnMethod:
        return value.bind(holder)
    if kind is dict:
        return {key: _bind_own(item, holder) for key, item in value.items()}
    if kind is list or isinstance(value, tuple):
        items = [_bind_own(item, holder) for item in value]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return value


register_pytree_with_keys(Mixed, _flatten, _unflatten)
