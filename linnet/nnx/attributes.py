"""Sorting the attributes of an object into data and static.

The answer depends on the names of the attributes, the types of their values, and, for containers,
on whether there is data inside. All but the last is remembered: a ``Layout`` for each class and
combination of names and types, so that walking a model costs little more than reading it.
"""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Callable
from operator import itemgetter
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar

from linnet.errors import HiddenDataWarning, LostVariableWarning, StaticDataError, path_string
from linnet.nnx import kinds, statics
from linnet.nnx.kinds import ARRAY, STATIC, kind_of

T = TypeVar("T")

_DATA, _STATIC = "linnet.data", "linnet.static"

Data = Annotated[T, _DATA]
Static = Annotated[T, _STATIC]


def refuse_data(obj: Any, name: Any, value: Any) -> None:
    found = ", ".join(sorted({type(item).__name__ for item in kinds.data_inside(value)}))
    got = found if kind_of(value) <= ARRAY else f"{type(value).__name__} with {found}"
    annotate = f", or annotate it `{name}: nnx.Data[...]`" if isinstance(name, str) else ""
    raise StaticDataError(
        f"{path_string([name], type(obj).__name__)} is static, but got data: {got}.\n"
        f"Fix: drop the static mark, or assign nnx.data(...){annotate}."
    )


def warn_of_hidden_data(obj: Any, name: Any, value: Any) -> None:
    """Warns of a container that counts as static although there are objects inside."""
    hidden = kinds.hidden_inside(value)
    if hidden:
        found = ", ".join(sorted({type(item).__name__ for item in hidden}))
        warnings.warn(
            f"{path_string([name], type(obj).__name__)} is a {type(value).__name__} with {found} "
            "inside. Modules do not look into it, so nothing in it is trained, saved or updated.\n"
            "Fix: use a list, a tuple, a dict or nnx.List; if this is meant, say nnx.static(...).",
            HiddenDataWarning,
            stacklevel=3,
        )


def warn_of_lost_variable(obj: Any, name: Any, variable: Any) -> None:
    """Warns of an array that takes the place of a Variable."""
    kind, place = type(variable).__name__, path_string([name], type(obj).__name__)
    warnings.warn(
        f"{place} was a {kind} and becomes a plain array, which is not a {kind} any more to "
        "filters, gradients and optimizers.\n"
        f"Fix: write the value, as in `.{name}[...] = value`; or assign nnx.{kind}(value).",
        LostVariableWarning,
        stacklevel=3,
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


class OwnMethod:
    """Stands for a method of the object itself, so that a copy gets its own."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __eq__(self, other: object) -> bool:
        return type(other) is OwnMethod and self.function == other.function

    def __hash__(self) -> int:
        return hash(self.function)

    def bind(self, obj: Any) -> Any:
        """The method of another object."""
        return kinds.MethodType(self.function, obj)


def static_marks(obj: Any) -> tuple[Any, ...]:
    """The names marked static by hand. Marks for data show in the structure by themselves."""
    marks = obj._pytree_marks
    if marks is None:
        return ()
    return tuple(name for name in kinds.sort_keys(marks) if marks[name] is False)


statics.add_self_keyed(OwnMethod)


class StaticPart:
    """The static attributes of one object, as part of a structure: hashable and comparable.

    Args:
      names: their names.
      packed: their values, as ``statics.pack`` gives them.
      types: the types of the values.
      order: all attributes, data and static, where their order carries meaning.
    """

    __slots__ = ("_hash", "names", "order", "packed", "special", "template", "types")

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
        pairs = list(zip(names, packed, strict=True))
        self.special = [(name, value) for name, value in pairs if _is_special(value)]
        self.template = {name: v.value if type(v) is statics.Static else v for name, v in pairs}

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

    def __copy__(self) -> StaticPart:
        return self  # nobody can change it

    def __deepcopy__(self, memo: Any) -> StaticPart:
        return self


def _restore_part(names: tuple[Any, ...], packed: tuple[Any, ...], order: Any) -> StaticPart:
    return StaticPart(names, packed, tuple(map(_type_behind, packed)), order)


def _type_behind(value: Any) -> type:
    if type(value) is OwnMethod:
        return kinds.MethodType
    return type(value.value) if type(value) is statics.Static else type(value)


def _is_special(value: Any) -> bool:
    return type(value) is OwnMethod or (type(value) is statics.Static and value.mutable)


class Sorted(NamedTuple):
    """The attributes of one object: data in the order of names, and statics ready to compare."""

    names: tuple[Any, ...]
    values: Any
    kinds: tuple[int, ...]
    statics: StaticPart


class Layout:
    """How the attributes of a class are sorted when they have certain names and types.

    ``doubtful`` are containers, which may or may not hold data; for each combination there is one
    ``_Order``.
    """

    __slots__ = ("doubtful", "kinds", "names", "order_of_all", "orders")

    def __init__(self, obj: Any, items: dict[Any, Any]):
        declared = annotations_of(type(obj))
        names = kinds.sort_keys(items)
        self.names = tuple(names)
        self.order_of_all = _order_of(obj, items)
        self.kinds = {name: kind_of(items[name]) for name in names}
        self.doubtful = tuple(n for n in names if n not in declared and self.kinds[n] > ARRAY)
        self.orders: dict[Any, _Order] = {}

    def order(self, obj: Any, items: dict[Any, Any]) -> _Order:
        """The order for what the doubtful attributes hold now."""
        answers = tuple([_holds_data_of_others(obj, items[name]) for name in self.doubtful])
        known = self.orders.get(answers)
        if known is None:
            declared = annotations_of(type(obj))
            is_data = {n: STATIC < kind <= ARRAY for n, kind in self.kinds.items()}
            is_data.update(zip(self.doubtful, answers, strict=True))
            is_data.update((n, mark) for n, mark in declared.items() if n in is_data)
            known = self.orders[answers] = _Order(self, items, is_data)
        return known


def _holds_data_of_others(obj: Any, value: Any) -> bool:
    if type(value) is kinds.MethodType and value.__self__ is obj:
        return False
    return kinds.holds_data(value)


def _order_of(obj: Any, items: dict[Any, Any]) -> tuple[Any, ...] | None:
    return tuple(items) if obj._pytree_ordered else None


class _Order:
    """Names of data and of statics, and how to read both at once."""

    __slots__ = (
        "data_kinds",
        "guarded",
        "names",
        "order_of_all",
        "parts",
        "read",
        "read_static",
        "static_names",
        "to_wrap",
        "types",
    )

    def __init__(self, layout: Layout, items: dict[Any, Any], is_data: dict[Any, bool]):
        self.names = _methods_last(
            [name for name in layout.names if is_data[name]], layout.kinds.__getitem__
        )
        self.static_names = tuple(name for name in layout.names if not is_data[name])
        self.data_kinds = tuple(layout.kinds[name] for name in self.names)
        self.order_of_all = layout.order_of_all
        self.read = _reader(self.names)
        self.read_static = _reader(self.static_names)
        self.types = tuple(type(items[name]) for name in self.static_names)
        self.to_wrap = tuple(
            i for i, kind in enumerate(self.types) if not statics.is_self_keyed(kind)
        )
        self.parts: dict[Any, StaticPart] = {}
        self.guarded = tuple(n for n in self.static_names if layout.kinds[n] != STATIC)

    def part(self, packed: tuple[Any, ...]) -> StaticPart:
        """One ``StaticPart`` for all objects whose static attributes are the same and plain."""
        known = self.parts.get(packed)
        if known is None:
            known = StaticPart(self.static_names, packed, self.types, self.order_of_all)
            if all(map(statics.is_plain, packed)):
                if len(self.parts) >= _MOST_PARTS:
                    self.parts.clear()
                self.parts[packed] = known
        return known


def _methods_last(names: list[Any], kind: Callable[[Any], int]) -> tuple[Any, ...]:
    """Names in the order of every walk: the owner of a method is met where it really stands."""
    return tuple(sorted(names, key=lambda name: kind(name) == kinds.METHOD))


def _reader(names: tuple[Any, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda items: ()
    if len(names) == 1:
        (name,) = names
        return lambda items: (items[name],)
    return itemgetter(*names)


_MOST_LAYOUTS = 256  # of one class; a list that grows step by step makes a new one each time
_MOST_PARTS = 64  # of one layout


def sort_attributes(obj: Any) -> Sorted:
    """The attributes of an object, data and static, each in the order of their names.

    Raises:
      StaticDataError: an attribute marked static holds data.
    """
    items = obj._pytree_items()
    if obj._pytree_marks is not None:
        return _sort_marked(obj, items)
    key = (tuple(items), tuple(map(type, items.values())))
    layouts = type(obj)._pytree_layouts
    layout = layouts.get(key)
    if layout is None:
        if len(layouts) >= _MOST_LAYOUTS:
            layouts.clear()
        layout = layouts[key] = Layout(obj, items)
    order = layout.order(obj, items) if layout.doubtful else layout.orders.get(())
    if order is None:
        order = layout.order(obj, items)
    packed = order.read_static(items)
    if order.to_wrap:
        packed = list(packed)
        for position in order.to_wrap:
            packed[position] = _wrap(obj, packed[position])
        packed = tuple(packed)
        for name in order.guarded:
            if _holds_data_of_others(obj, items[name]):
                refuse_data(obj, name, items[name])
    return Sorted(order.names, order.read(items), order.data_kinds, order.part(packed))


def _wrap(obj: Any, value: Any) -> Any:
    if type(value) is float and statics.is_own_key(value):
        return value
    if type(value) is kinds.MethodType and value.__self__ is obj:
        return OwnMethod(value.__func__)
    return statics.static(value)


def _sort_marked(obj: Any, items: dict[Any, Any]) -> Sorted:
    """The same for an object with marks of its own, which are rare: attribute by attribute."""
    marks = {**annotations_of(type(obj)), **obj._pytree_marks}
    data_names, static_names, packed = [], [], []
    for name in kinds.sort_keys(items):
        value = items[name]
        mark = marks.get(name)
        has_data = _holds_data_of_others(obj, value)
        if mark is False and has_data:
            refuse_data(obj, name, value)
        if mark or has_data:
            data_names.append(name)
        else:
            static_names.append(name)
            packed.append(_wrap(obj, value) if type(value) is kinds.MethodType else value)
    types = tuple(type(items[name]) for name in static_names)
    part = static_part(tuple(static_names), packed, types, _order_of(obj, items))
    names = _methods_last(data_names, lambda name: kind_of(items[name]))
    values = [items[name] for name in names]
    return Sorted(names, values, tuple(map(kind_of, values)), part)


def static_part(
    names: tuple[Any, ...], values: list[Any], types: Any = None, order: Any = None
) -> StaticPart:
    """A ``StaticPart`` of values that are not wrapped yet."""
    packed, own_types, _ = statics.pack(values)
    return StaticPart(names, packed, own_types if types is None else types, order)
