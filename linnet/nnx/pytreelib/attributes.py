"""The attributes of an object, sorted into data and static, and their way through JAX.

**Sorting.** ``sort_attributes`` depends on the names of the attributes, the types of their values
and, for containers, on whether there is data inside. All but the last is remembered: an
``AttributeLayout`` for each class and combination of names and types, so that walking a model costs
little more than reading it.

**Static attributes** of one object form a ``StaticPart``, hashable and comparable, which is part of
tree structures and graph definitions. Marks (``nnx.data``, ``nnx.static``, annotations) override
the sorting by type.

**Containers.** JAX flattens a list or dict by itself, takes every element for a leaf, and sorts the
keys of a dict or ``defaultdict``. A container that also holds static values, or whose keys are in
another order, and a bound method, is therefore wrapped in ``WrappedChild`` when an object is
flattened, and unwrapped when it is unflattened.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
import warnings
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import itemgetter
from types import MethodType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar

from jax.tree_util import DictKey, GetAttrKey, register_pytree_with_keys

from linnet.errors import HiddenDataWarning, LostVariableWarning, StaticDataError, path_string
from linnet.nnx.pytreelib import kinds, statics
from linnet.nnx.pytreelib.kinds import ARRAY, DICT, METHOD, OBJECT, PYTREE, STATIC, kind_of

T = TypeVar("T")

_DATA, _STATIC = "linnet.data", "linnet.static"

Data = Annotated[T, _DATA]

Static = Annotated[T, _STATIC]


# ---- sorting ------------------------------------------------------------------------------------


class Sorted(NamedTuple):
    """The attributes of one object: data in the order of names, and statics ready to compare."""

    names: tuple[Any, ...]
    values: Any
    kinds: tuple[int, ...]
    static_part: StaticPart


_MOST_LAYOUTS = 256  # of one class; a list that grows step by step makes a new one each time

_MOST_STATIC_PARTS = 64  # of one division


def sort_attributes(obj: Any) -> Sorted:
    """Sorts the attributes of an object; a StaticDataError if one marked static holds data."""
    items = obj._pytree_items()
    marks = obj._pytree_marks
    key: tuple[Any, ...] = (tuple(items), tuple(map(type, items.values())))
    if marks is not None:
        key = (*key, tuple(marks.items()))
    layouts = type(obj)._pytree_layouts
    layout = layouts.get(key)
    if layout is None:
        if len(layouts) >= _MOST_LAYOUTS:
            layouts.clear()
        layout = layouts[key] = AttributeLayout(obj, items)
    division = layout.division_for(obj, items) if layout.doubtful else layout.divisions.get(())
    if division is None:
        division = layout.division_for(obj, items)
    for name in division.guarded:
        if _holds_data_of_others(obj, items[name]) and kinds.data_inside(items[name]):
            refuse_data(obj, name, items[name])
    packed = division.read_static(items)
    if division.to_pack:
        packed = list(packed)
        for position in division.to_pack:
            packed[position] = _packed_static(obj, packed[position])
        packed = tuple(packed)
    static_part = division.static_part(packed)
    fields = (division.names, division.read(items), division.data_kinds, static_part)
    return tuple.__new__(Sorted, fields)  # faster than the class


def data_children(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    """The data of an object, or all elements of a container, in the order of every walk."""
    if kind != OBJECT:
        return kinds.children_of(value, kind)
    return zip(*sort_attributes(value)[:2], strict=True)


def write_arrays(places: list[tuple[Any, Any]], values: list[Any]) -> None:
    """Replaces the arrays in these places, which is no change of structure."""
    for (holder, key), value in zip(places, values, strict=True):
        store = holder._pytree_store(key) if kind_of(holder) == OBJECT else holder
        store[key] = value


def _packed_static(obj: Any, value: Any) -> Any:
    if type(value) is float and statics.float_needs_no_key(value):
        return value
    if type(value) is MethodType and value.__self__ is obj:
        return OwnMethod(value.__func__)
    return statics.static_value(value)


def _holds_data_of_others(obj: Any, value: Any) -> bool:
    if type(value) is MethodType and value.__self__ is obj:
        return False
    return kinds.holds_data(value)


class AttributeLayout:
    """How attributes of certain names, types and marks are sorted: a ``_Division`` for each answer
    to which of the containers (``doubtful``) hold data."""

    def __init__(self, obj: Any, items: dict[Any, Any]):
        self.order_of_all = tuple(items) if obj._pytree_ordered else None
        self.kinds = {name: kind_of(items[name]) for name in kinds.sort_keys(items)}
        given = {name: mark for name, mark in marks_of(obj).items() if name in self.kinds}
        # An empty container has the mask ``()``, from which nothing follows.
        self.marks = {name: bool(mark) for name, mark in given.items() if mark or mark is False}
        unmarked = (name for name in self.kinds if name not in self.marks)
        self.doubtful = tuple(name for name in unmarked if self.kinds[name] > ARRAY)
        self.divisions: dict[Any, _Division] = {}

    def division_for(self, obj: Any, items: dict[Any, Any]) -> _Division:
        """The division into data and static, given which containers hold data now."""
        answers = tuple([_holds_data_of_others(obj, items[name]) for name in self.doubtful])
        known = self.divisions.get(answers)
        if known is None:
            by_type = {name: STATIC < kind <= ARRAY for name, kind in self.kinds.items()}
            by_content = dict(zip(self.doubtful, answers, strict=True))
            is_data = {**by_type, **by_content, **self.marks}
            known = self.divisions[answers] = _Division(self, items, is_data)
        return known


class _Division:
    """The names of data and static attributes, and functions that read their values."""

    def __init__(self, layout: AttributeLayout, items: dict[Any, Any], is_data: dict[Any, bool]):
        data = (name for name in layout.kinds if is_data[name])
        # Methods last, as in every walk.
        self.names = tuple(sorted(data, key=lambda name: layout.kinds[name] == METHOD))
        self.static_names = tuple(name for name in layout.kinds if not is_data[name])
        self.data_kinds = tuple(layout.kinds[name] for name in self.names)
        self.order_of_all = layout.order_of_all
        self.read = _reader(self.names)
        self.read_static = _reader(self.static_names)
        self.types = tuple(type(items[name]) for name in self.static_names)
        self.to_pack = tuple(
            i for i, cls in enumerate(self.types) if not statics.type_needs_no_key(cls)
        )
        self.static_parts: dict[Any, StaticPart] = {}
        self.guarded = tuple(n for n in self.static_names if layout.kinds[n] != STATIC)

    def static_part(self, packed: tuple[Any, ...]) -> StaticPart:
        """The ``StaticPart`` of these values; one for all objects, where a cache may keep them."""
        known = self.static_parts.get(packed)
        if known is None:
            known = StaticPart(self.static_names, packed, self.types, self.order_of_all)
            if all(map(statics.may_be_kept, packed)):
                if len(self.static_parts) >= _MOST_STATIC_PARTS:
                    self.static_parts.clear()
                self.static_parts[packed] = known
        return known


def _reader(names: tuple[Any, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda items: ()
    if len(names) == 1:
        (name,) = names
        return lambda items: (items[name],)
    return itemgetter(*names)


# ---- static attributes and marks ----------------------------------------------------------------


class StaticPart(statics.Unchanging):
    """The static attributes of one object, as part of a structure: hashable and comparable.

    ``packed`` has the static values in the form in which they are compared; ``order`` lists all
    attributes, data and static, where their order carries meaning.
    """

    __slots__ = ("_changeable", "_hash", "names", "order", "packed", "special", "template", "types")

    def __init__(
        self,
        names: tuple[Any, ...],
        packed: tuple[Any, ...],
        types: tuple[type, ...],
        order: tuple[Any, ...] | None = None,
    ):
        self.names = names
        self.packed = packed
        self.types = types
        self.order = order
        self._hash: int | None = None
        self._changeable: tuple[Any, ...] | None = None
        pairs = list(zip(names, packed, strict=True))
        self.special = [(name, value) for name, value in pairs if _is_special(value)]
        self.template = {
            name: v.value if type(v) is statics.StaticValue else v for name, v in pairs
        }

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is StaticPart
            and self.names == other.names
            and self.types == other.types
            and self.order == other.order
            and self.packed == other.packed
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.names, self.packed))
        return self._hash

    @property
    def copied_values(self) -> Iterable[tuple[Any, Any]]:
        """The values of which every object gets a copy of its own, as they are compared."""
        return (pair for pair in self.special if type(pair[1]) is statics.StaticValue)

    @property
    def changeable(self) -> tuple[Any, ...]:
        """The names of the values that can change in place."""
        if self._changeable is None:
            items = self.template.items()
            self._changeable = tuple(name for name, value in items if statics.can_change(value))
        return self._changeable

    def apply(self, items: dict[Any, Any], obj: Any) -> None:
        """Adds the attributes to ``items`` as ``obj`` shall have them."""
        items.update(self.template)
        for name, value in self.special:
            items[name] = value.bind(obj) if type(value) is OwnMethod else value.thaw()
        if self.order is not None:
            ordered = {name: items[name] for name in self.order}
            items.clear()
            items.update(ordered)

    def __repr__(self) -> str:
        return repr(self.template)

    def __reduce__(self) -> Any:
        # Without the types: some cannot be pickled, and all follow from the values.
        return (_restore_part, (self.names, self.packed, self.order))


def make_static_part(names: tuple[Any, ...], values: list[Any]) -> StaticPart:
    """A ``StaticPart`` of values that are not wrapped yet."""
    return StaticPart(names, *statics.pack_statics(values))


def keep_equal_statics(
    items: dict[Any, Any], static_part: StaticPart, own: Any, copied: bool = True
) -> None:
    """Puts static values of ``own``, a mapping, into ``items`` where those there are equal to them.

    So an object or container that is filled keeps its own, and gets none of another one. Without
    ``copied`` this is about those alone of which objects do not get copies.
    """
    for name, packed, cls in zip(
        static_part.names, static_part.packed, static_part.types, strict=True
    ):
        if name not in own or type(own[name]) is not cls or type(packed) is OwnMethod:
            continue
        if not copied and _is_special(packed):
            continue
        if statics.pack_statics([own[name]])[0] == (packed,):
            items[name] = own[name]


def _restore_part(names: tuple[Any, ...], packed: tuple[Any, ...], order: Any) -> StaticPart:
    return StaticPart(names, packed, tuple(map(_type_behind, packed)), order)


def _type_behind(value: Any) -> type:
    if type(value) is OwnMethod:
        return MethodType
    return type(value.value) if type(value) is statics.StaticValue else type(value)


def _is_special(value: Any) -> bool:
    return type(value) is OwnMethod or (type(value) is statics.StaticValue and value.mutable)


@dataclasses.dataclass(unsafe_hash=True)
class OwnMethod:
    """Stands for a method of the object itself, so that a copy gets its own."""

    function: Callable[..., Any]

    def bind(self, obj: Any) -> Any:
        """The method of another object."""
        return MethodType(self.function, obj)


statics.add_type_without_key(OwnMethod)


def marks_of(obj: Any) -> dict[Any, Any]:
    """The marks of the attributes of an object, by hand and by annotations of its class."""
    declared = annotations_of(type(obj))
    return declared if obj._pytree_marks is None else {**declared, **obj._pytree_marks}


def names_marked_data(obj: Any) -> list[Any]:
    """The names of the attributes that are marked as data."""
    return [name for name, mark in marks_of(obj).items() if mark is True]


def static_marks(obj: Any) -> tuple[Any, ...]:
    """The names marked static by hand. Marks for data show in the structure by themselves."""
    marks = obj._pytree_marks
    if marks is None:
        return ()
    return tuple(name for name in kinds.sort_keys(marks) if marks[name] is False)


def kept_marks(obj: Any) -> tuple[tuple[Any, Any], ...]:
    """The marks of an object that a copy must be given: those that its values do not imply."""
    marks = obj._pytree_marks
    if marks is None:
        return ()
    items = obj._pytree_items()
    names = [name for name in kinds.sort_keys(marks) if name in items]
    return tuple((name, marks[name]) for name in names if _is_needed(items[name], marks[name]))


def _is_needed(value: Any, mark: Any) -> bool:
    if mark is True:
        kind = kind_of(value)
        if kind <= ARRAY or kind == PYTREE or not kinds.holds_data(value):
            return False
        return not _flattens_as_in_jax(value, kind) or _has_static_element(value, kind)
    return True


def _has_static_element(value: Any, kind: int) -> bool:
    """Whether a container holds None or an empty container, which are data only by a mark."""
    if kind not in (kinds.LIST, kinds.DICT, kinds.TUPLE):
        return False
    items = [item for _, item in kinds.items_of(value, kind)]
    return not all(map(kinds.holds_data, items)) or any(
        _has_static_element(item, kind_of(item)) for item in items
    )


def annotations_of(cls: Any) -> dict[str, bool]:
    """Attributes that the class declares as data (True) or static (False)."""
    known = cls._pytree_annotations
    if known is None:
        known = {}
        for base in reversed(cls.__mro__):
            for name, hint in _hints_of(base).items():
                mark = _annotation_mark(hint)
                if mark is not None:
                    known[name] = mark
            for name, value in base.__dict__.get("__dataclass_fields__", {}).items():
                if "static" in value.metadata:
                    known[name] = not value.metadata["static"]
        cls._pytree_annotations = known
    return known


def _hints_of(cls: type) -> dict[str, Any]:
    try:
        return inspect.get_annotations(cls, eval_str=True)
    except Exception:  # a name that is local to a function, or only there for type checkers
        return inspect.get_annotations(cls)


def _annotation_mark(hint: Any) -> bool | None:
    if isinstance(hint, str):
        head = hint.split("[", 1)[0].rsplit(".", 1)[-1].strip()
        return {"Data": True, "Static": False}.get(head) if "[" in hint else None
    if typing.get_origin(hint) is Annotated:
        extras = hint.__metadata__
        return True if _DATA in extras else False if _STATIC in extras else None
    if typing.get_origin(hint) in (typing.Union, UnionType):
        marks = [_annotation_mark(part) for part in typing.get_args(hint)]
        return next((mark for mark in marks if mark is not None), None)
    return None


def refuse_data(obj: Any, name: Any, value: Any) -> None:
    found = ", ".join(sorted({type(item).__name__ for item in kinds.data_inside(value)}))
    got = found if kind_of(value) <= ARRAY else f"{type(value).__name__} with {found}"
    annotate = f", or annotate it `{name}: nnx.Data[...]`" if isinstance(name, str) else ""
    raise StaticDataError(
        f"{path_string([name], type(obj).__name__)} is static, but got data: {got}.\n"
        f"Fix: drop the static mark, or assign nnx.data(...){annotate}."
    )


_OPAQUE = (set, frozenset, list, dict, deque, UserList, UserDict)


def warn_of_hidden_data(obj: Any, name: Any, value: Any) -> None:
    """Warns of a value that counts as static although there are Variables or objects inside."""
    fix = "use a list, a tuple, a dict or nnx.List, and a method in place of a partial"
    if type(value) is defaultdict:
        items: Iterable[Any] = [value.default_factory]
    elif kind_of(value) != STATIC:
        return
    elif isinstance(value, functools.partial):
        # A module among the arguments, such as a table of rotary embeddings, may be meant.
        arguments = (value.func, *value.args, *value.keywords.values())
        items = [item for item in arguments if kind_of(item) != OBJECT]
    elif isinstance(value, _OPAQUE):
        items = value.values() if isinstance(value, (dict, UserDict)) else value
    else:
        inside = getattr(value, "__dict__", None)
        if not inside or isinstance(value, type) or _is_of_library(type(value)):
            return
        items = inside.values()
        fix = f"let {type(value).__name__} derive from nnx.Module"
    found = ", ".join(sorted({name for name in map(_hidden_name, items) if name}))
    if found:
        warnings.warn(
            f"{path_string([name], type(obj).__name__)} is a {type(value).__name__} with {found} "
            "inside. Modules do not look into it, so nothing in it is trained, saved or updated.\n"
            f"Fix: {fix}; if this is meant, say nnx.static(...).",
            HiddenDataWarning,
            stacklevel=3,
        )


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("jax", "jaxlib", "linnet", "numpy", "optax")


def _hidden_name(value: Any) -> str:
    """The name of an object, Variable or method of an object, for a warning; "" for the rest."""
    if kind_of(value) == METHOD and kinds.bound_owner(value) is not None:
        return value.__func__.__qualname__
    return type(value).__name__ if kinds.is_node(value) else ""


def warn_of_lost_variable(obj: Any, name: Any, variable: Any) -> None:
    """Warns of an array that takes the place of a Variable."""
    cls, place = type(variable).__name__, path_string([name], type(obj).__name__)
    warnings.warn(
        f"{place} was a {cls} and becomes a plain array, which is not a {cls} any more to "
        "filters, gradients and optimizers.\n"
        f"Fix: write the value, as in `.{name}[...] = value`; or assign nnx.{cls}(value).",
        LostVariableWarning,
        stacklevel=3,
    )


# ---- containers and methods on their way through JAX --------------------------------------------


# Like any mask it is stored as the mark of the attribute, so that copies do not follow it either,
# and compared with ==, since marks are pickled with definitions.
_NOT_FOLLOWED = ("method of an object that is not followed",)


@dataclasses.dataclass(eq=False)
class WrappedChild:
    """A container or bound method that an object hands to JAX as a child.

    ``holder`` is the object whose attribute it is, or is part of. ``data_mask`` says which elements
    are data (a tuple of True, False or a nested mask), where that does not follow from the
    elements; a method that is not followed has ``_NOT_FOLLOWED``. ``own`` tells that a method of
    the holder is inside, which a copy binds to itself.
    """

    value: Any
    holder: Any = None
    data_mask: Any = None
    own: bool = False


def wrap_child(value: Any, holder: Any, data_mask: Any = None) -> Any:
    """Wraps a container that JAX would flatten otherwise than we do, or a bound method.

    ``data_mask`` is as in ``WrappedChild``, or True if all of the value is data.
    """
    if kind_of(value) == METHOD:
        return WrappedChild(value, holder, data_mask)
    if data_mask is None:
        data_mask = data_mask_of(value)
    elif data_mask is True:
        data_mask = _full_mask(value)
    return value if data_mask is True else WrappedChild(value, holder, data_mask)


def unwrap_child(child: Any, holder: Any) -> tuple[Any, Any]:
    """The value of an attribute, and the mark to store with it, None if the value implies it."""
    if type(child) is not WrappedChild:
        kind = kind_of(child)
        follows = kinds.holds_data(child) and (kind <= ARRAY or _flattens_as_in_jax(child, kind))
        return child, None if follows else True
    value = _bind_own(child.value, holder) if child.own else child.value
    follows = child.data_mask is None or data_mask_of(value) == child.data_mask
    if kind_of(value) == PYTREE and not kinds.holds_data(value):  # None took the place of it all
        follows = False
    return value, None if follows else child.data_mask


def data_mask_of(value: Any) -> Any:
    """Which elements hold data, as nested tuples; True if JAX would flatten it the same way."""
    kind = kind_of(value)
    if kind <= ARRAY or kind == METHOD or _flattens_as_in_jax(value, kind):
        return True
    if kind == PYTREE:  # of which JAX makes every element a leaf
        return _full_mask(value)
    items = kinds.sorted_items(value, kind)
    return tuple(kinds.holds_data(item) and data_mask_of(item) for _, item in items)


def _full_mask(value: Any) -> Any:
    """The data mask of a container that is all data; True unless a dict's order must be kept."""
    kind = kind_of(value)
    if kind <= ARRAY or kind == METHOD or (kind == PYTREE and _flattens_as_in_jax(value, kind)):
        return True
    data_mask = tuple(_full_mask(item) for _, item in kinds.sorted_items(value, kind))
    in_order = not isinstance(value, dict) or list(value) == kinds.sort_keys(value)
    return True if in_order and all(entry is True for entry in data_mask) else data_mask


def _flattens_as_in_jax(value: Any, kind: int) -> bool:
    """Whether JAX's own flattening of a container treats every element as we do."""
    if kind in (METHOD, PYTREE):
        is_unsorted = type(value) is defaultdict and list(value) != kinds.sort_keys(value)
        return kind == PYTREE and not is_unsorted
    if kind == DICT:
        keys = list(value)
        return keys == kinds.sort_keys(keys) and all(
            map(_element_flattens_as_in_jax, value.values())
        )
    return all(map(_element_flattens_as_in_jax, value))


def _element_flattens_as_in_jax(value: Any) -> bool:
    kind = kind_of(value)
    if kind == STATIC:
        return value is None
    return kind <= ARRAY or _flattens_as_in_jax(value, kind)


def _flatten(mixed: WrappedChild) -> tuple[list[Any], Any]:
    value, holder = mixed.value, mixed.holder
    kind = kind_of(value)
    if kind == METHOD:
        return _flatten_method(value, holder, mixed.data_mask == _NOT_FOLLOWED)
    items = kinds.sorted_items(value, kind)
    data_mask = mixed.data_mask
    if data_mask is None or len(data_mask) != len(items):
        data_mask = data_mask_of(value)
    children, static_values = [], []
    for (key, item), entry in zip(items, data_mask, strict=True):
        if entry is False:
            static_values.append(item)
        else:
            jax_key = DictKey(key) if kind == PYTREE else kinds.jax_key(key, kind)
            children.append((jax_key, wrap_child(item, holder, entry)))
    keys, order = tuple(key for key, _ in items), tuple(value) if kind == DICT else None
    is_data = tuple(entry is not False for entry in data_mask)
    cls = kinds.one_level(value)[1] if kind == PYTREE else type(value)
    return children, (cls, keys, order, is_data, statics.pack_statics(static_values))


def _flatten_method(method: MethodType, holder: Any, is_static: bool) -> tuple[list[Any], Any]:
    owner = method.__self__
    if owner is holder:
        return [], (OwnMethod, method.__func__)
    met = kinds.places(owner, kinds.items_of, plain=False)
    if is_static or any(value is holder for _, value in met):
        # JAX would go round for ever. Like any static value it stays what it is.
        return [], (statics.Identity, method.__func__, statics.Identity(owner))
    return [(GetAttrKey("__self__"), owner)], (MethodType, method.__func__)


def _unflatten(aux: Any, children: Any) -> WrappedChild:
    # ``_flatten`` and ``_flatten_method`` make it: a class, and what belongs to that.
    cls = aux[0]
    if cls is OwnMethod:
        return WrappedChild(OwnMethod(aux[1]), own=True)
    if cls is statics.Identity:
        _, function, owner = aux
        return WrappedChild(MethodType(function, owner.value), data_mask=_NOT_FOLLOWED)
    if cls is MethodType:
        return WrappedChild(MethodType(aux[1], children[0]))
    _, keys, order, is_data, packed = aux
    children, static_values = iter(children), iter(statics.unpack_statics(packed[0]))
    values, data_mask, own = [], [], False
    for entry in is_data:
        value = next(children) if entry else next(static_values)
        if type(value) is WrappedChild:
            own = own or value.own
            entry = True if value.data_mask is None else value.data_mask
            value = value.value
        values.append(value)
        data_mask.append(entry)
    if order is not None:
        by_key = dict(zip(keys, values, strict=True))
        value = {key: by_key[key] for key in order}
    elif isinstance(cls, kinds.DefaultDictStructure):
        value = cls.unflatten(values)
    else:
        value = cls(*values) if hasattr(cls, "_fields") else cls(values)
    return WrappedChild(value, data_mask=tuple(data_mask), own=own)


def _bind_own(value: Any, holder: Any) -> Any:
    """The container with methods of ``holder`` where they were left out."""
    cls = type(value)
    if cls is OwnMethod:
        return value.bind(holder)
    if cls is dict:
        return {key: _bind_own(item, holder) for key, item in value.items()}
    if cls is defaultdict:
        items = ((key, _bind_own(item, holder)) for key, item in value.items())
        return defaultdict(value.default_factory, items)
    if cls is list or isinstance(value, tuple):
        items = [_bind_own(item, holder) for item in value]
        return cls(*items) if hasattr(cls, "_fields") else cls(items)
    return value


register_pytree_with_keys(WrappedChild, _flatten, _unflatten)
