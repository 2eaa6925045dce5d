"""Pytree: Python objects that are JAX pytrees, their attributes sorted into data and static.

Data is what JAX traces: Variables, arrays, other Pytrees, and containers with such things inside.
Everything else is static and becomes part of the tree's structure. The sorting is done anew at each
flattening, by type, so a list that is filled after it was assigned needs no announcement.

Beside ``__dict__`` an object remembers the trace it belongs to, what ``nnx.jit`` keeps with it (its
``Home``; see ``watch``), and the marks of attributes that were sorted by hand (``data``,
``static``), or by an unflattening that put something else where an array had been (a sharding, an
axis, ``None``).
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    dataclass_transform,
    overload,
)

from jax.tree_util import register_pytree_with_keys

from linnet.errors import StaticDataError, TraceContextError, path_string
from linnet.nnx.pytreelib import attributes, kinds, locate, statics, watch
from linnet.nnx.pytreelib.attributes import (
    annotations_of,
    refuse_data,
    sort_attributes,
    static_marks,
    warn_of_hidden_data,
    warn_of_lost_variable,
)
from linnet.nnx.pytreelib.kinds import ARRAY, KINDS, OBJECT, STATIC, VARIABLE, kind_of
from linnet.nnx.pytreelib.printing import PrintedForm, Representable, count_variables, render_object
from linnet.nnx.pytreelib.tracing import current_trace, same_trace

T = TypeVar("T")

P = TypeVar("P", bound="Pytree")

_MISSING: Any = dataclasses.MISSING


@overload
def data(value: T, **kwargs: Any) -> T: ...
@overload
def data(**kwargs: Any) -> Any: ...
def data(value: Any = _MISSING, **kwargs: Any) -> Any:
    """Marks an attribute as data, whatever its value's type.

    Args:
      value: what to assign; left out, the call declares a dataclass field.
      **kwargs: passed on to ``dataclasses.field``.

    Returns:
      Something to assign to an attribute of a Pytree or to use as a dataclass field.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> class Clock(nnx.Module):
      ...     def __init__(self):
      ...         self.tick, self.rate = nnx.data(0), 2
      >>> jax.tree.leaves(Clock())
      [0]
    """
    return _marked_field(value, True, kwargs)


@overload
def static(value: T, **kwargs: Any) -> T: ...
@overload
def static(**kwargs: Any) -> Any: ...
def static(value: Any = _MISSING, **kwargs: Any) -> Any:
    """Marks an attribute as static; putting data there is an error.

    Args:
      value: what to assign; left out, the call declares a dataclass field.
      **kwargs: passed on to ``dataclasses.field``.

    Returns:
      Something to assign to an attribute of a Pytree or to use as a dataclass field.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> class Clock(nnx.Module):
      ...     def __init__(self):
      ...         self.names = nnx.static(["tick", "tock"])
      >>> jax.tree.leaves(Clock())
      []
    """
    return _marked_field(value, False, kwargs)


def _marked_field(value: Any, is_data: bool, options: dict[str, Any]) -> Any:
    metadata = {**options.pop("metadata", {}), "static": not is_data}
    if value is not _MISSING:
        metadata["linnet_value"] = value
        # A default of a mutable kind must not be shared between instances of a dataclass.
        if type(value).__hash__ is None:
            options["default_factory"] = functools.partial(statics.copy_mutable, value)
        else:
            options["default"] = value
    return dataclasses.field(metadata=metadata, **options)


def has_data(value: Any) -> list[Any]:
    """The data found in ``value``, however deep in containers.

    Args:
      value: any Python object.

    Returns:
      A list of the objects, Variables and arrays; empty if there are none.

    Example:
      >>> from linnet import nnx
      >>> nnx.has_data({"rate": 0.1, "weights": [nnx.Param(1.0), 2]})
      [Param(
        value=1.0
      )]
    """
    return kinds.data_inside(value)


class _DataclassOptions(TypedDict, total=False):
    init: bool
    eq: bool
    order: bool
    unsafe_hash: bool
    match_args: bool
    kw_only: bool
    slots: bool
    weakref_slot: bool


@overload
@dataclass_transform(field_specifiers=(dataclasses.field, data, static), eq_default=False)
def dataclass(cls: type[T], /, **options: Unpack[_DataclassOptions]) -> type[T]: ...
@overload
@dataclass_transform(field_specifiers=(dataclasses.field, data, static), eq_default=False)
def dataclass(
    cls: None = None, /, **options: Unpack[_DataclassOptions]
) -> Callable[[type[T]], type[T]]: ...
def dataclass(
    cls: type[T] | None = None,
    /,
    *,
    init: bool = True,
    eq: bool = False,
    order: bool = False,
    unsafe_hash: bool = False,
    match_args: bool = True,
    kw_only: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
) -> Any:
    """``dataclasses.dataclass`` for Pytrees and Modules.

    Equality stays identity unless ``eq=True`` is asked for: arrays have no single truth value.

    Args:
      cls: the class; without it a decorator is returned.
      init: as for ``dataclasses.dataclass``, like the rest.
      eq: compare field by field.
      order: add ordering.
      unsafe_hash: add a hash of the fields.
      match_args: add ``__match_args__``.
      kw_only: make every field keyword-only.
      slots: refused: a Pytree keeps its attributes in ``__dict__``.
      weakref_slot: refused likewise.

    Returns:
      The class.

    Raises:
      TypeError: ``slots`` or ``weakref_slot`` was asked for.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> @nnx.dataclass
      ... class Scale(nnx.Module):
      ...     factor: nnx.Param
      ...     name: str = "scale"
      >>> Scale(nnx.Param(jnp.ones(2))).name
      'scale'
    """
    options = {"init": init, "eq": eq, "order": order, "unsafe_hash": unsafe_hash}
    options |= {"match_args": match_args, "kw_only": kw_only}
    if slots or weakref_slot:
        raise TypeError(
            "nnx.dataclass cannot use slots: a Pytree keeps its attributes in __dict__.\n"
            "Fix: leave out slots=True and weakref_slot=True."
        )

    def make(cls: type[T]) -> type[T]:
        return dataclasses.dataclass(cls, repr=False, **options)

    return make if cls is None else make(cls)


class PytreeMeta(abc.ABCMeta):
    """The class of Pytree classes: abstract methods count, slots are refused, and a constructor
    that is called without random streams says how to give them."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any
    ) -> Any:
        _refuse_slots(namespace.get("__qualname__", name), bases, namespace)
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        cls._note_change(name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        cls._note_change(name)

    def _note_change(cls, name: str) -> None:
        """Notes a change of one of Linnet's classes, unless Linnet or Python itself makes it."""
        own = __name__.partition(".")[0]
        if cls.__module__.partition(".")[0] != own or name.startswith(("_abc", "__abstract")):
            return
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.partition(".")[0] not in (own, "abc", "dataclasses", "typing"):
            watch.changed_classes.append(cls)

    # Without virtual subclasses, which Pytrees have no use for: those of ABCMeta take seven times
    # as long, and isinstance is asked for every attribute of a model.
    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor; ``inspect`` would take that of ``__call__`` below."""
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return type.__call__(cls, *args, **kwargs)
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is None:  # the constructor itself did not begin
                _explain_missing_rngs(cls, error)
            raise


def _refuse_slots(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
    """Refuses ``__slots__`` in user classes: copies and split carry only ``__dict__``."""
    inherited = [(cls.__qualname__, vars(cls)) for base in bases for cls in base.__mro__]
    for owner, attributes_of_class in ((name, namespace), *inherited):
        slots = attributes_of_class.get("__slots__")
        package = attributes_of_class.get("__module__", "").partition(".")[0]
        if slots and package != __name__.partition(".")[0]:
            by = "" if owner == name else f" by its base {owner}"
            raise TypeError(
                f"A Pytree keeps its attributes in __dict__, but {name} has __slots__ = {slots!r}"
                f"{by}, which split, copies and transforms would lose.\nFix: leave out __slots__."
            )


def _explain_missing_rngs(cls: type, error: TypeError) -> None:
    """Tells what to give where Python says that the argument ``rngs`` is missing."""
    text = str(error)
    _, found, missing = text.partition("__init__() missing ")
    if found and "'rngs'" in missing:
        error.args = (
            f"{cls.__qualname__}.{found}{missing}.\n"
            f"Fix: {cls.__name__}(..., rngs=nnx.Rngs(0)); in the constructor of another module, "
            "pass on the rngs that it was given.",
        )


# Pyright takes __dict__ of an instance for that of the class if it has a metaclass.
if TYPE_CHECKING:
    _Base = Representable
else:

    class _Base(Representable, metaclass=PytreeMeta):
        __slots__ = ()


class _Layouts(dict[Any, Any]):
    """The cache of attribute layouts of a class; empty in a copy that cloudpickle makes."""

    def __reduce__(self) -> Any:
        return _Layouts, ()


class Pytree(_Base):
    """A Python object that is a JAX pytree of its attributes.

    Subclasses take one class option. ``pytree=False`` leaves the class unregistered, so that JAX
    sees an instance as a leaf while ``nnx.split`` and the other graph functions still look inside.
    ``pytree="strict"`` refuses arrays, and containers with data, that are not declared as data.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Point(nnx.Pytree):
      ...     def __init__(self, x, label):
      ...         self.x, self.label = jnp.asarray(x), label
      >>> moved = jax.tree.map(lambda x: x + 1, Point(1.0, "a"))
      >>> float(moved.x), moved.label
      (2.0, 'a')
    """

    __slots__ = (
        "__dict__",
        "__orig_class__",  # what typing leaves behind after List[Linear](...), no attribute
        "__weakref__",
        "_linnet_home",
        "_pytree_marks",
        "_pytree_trace",
    )

    _linnet_kind: ClassVar[int] = OBJECT
    _pytree_annotations: ClassVar[dict[str, bool] | None] = None
    _pytree_ordered: ClassVar[bool] = False  # whether the order of attributes carries meaning
    _pytree_registered: ClassVar[bool] = True
    _pytree_strict: ClassVar[bool] = False
    _pytree_layouts: ClassVar[dict[Any, Any]] = _Layouts()

    def __init_subclass__(cls, *, pytree: bool | str = True, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._pytree_annotations = None
        cls._pytree_layouts = _Layouts()
        cls._pytree_registered = bool(pytree)
        cls._pytree_strict = cls._pytree_strict or pytree == "strict"
        if pytree:
            register_pytree_with_keys(
                cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten
            )

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__ and cls.__new__ is Pytree.__new__:
            raise TypeError(
                f"{cls.__qualname__}() takes no arguments: the class has no __init__.\n"
                "Fix: define __init__(self, ...) (is its name misspelled?), or decorate a class "
                "of annotated fields with @nnx.dataclass."
            )
        return new_object(cls, None, current_trace())

    def __setattr__(self, name: str, value: Any) -> None:
        check_mutable(self, name)
        value, mark = unwrap_mark(self, name, value)
        if mark is not None:
            self._pytree_mark(name, mark)
        else:
            mark = annotations_of(type(self)).get(name)
            if self._pytree_marks is not None:
                mark = self._pytree_marks.get(name, mark)
            if mark is False and kinds.data_inside(value):
                refuse_data(self, name, value)
            if mark is None:
                warn_of_hidden_data(self, name, value)
                if self._pytree_strict:
                    _check_declared(self, name, value)
        before = self.__dict__.get(name, _MISSING)
        if kind_of(before) == VARIABLE and _is_array(value):
            warn_of_lost_variable(self, name, before)
        object.__setattr__(self, name, value)
        if before is not value and self._linnet_home is not None:
            _announce_write(self, before, value)

    def __delattr__(self, name: str) -> None:
        check_mutable(self, name)
        object.__delattr__(self, name)
        self._pytree_unmark(name)
        watch.announce_content(self)

    def __dir__(self) -> list[str]:
        """Attributes and methods, without the private ones of Linnet's own classes."""
        ours = [cls for cls in type(self).__mro__ if cls.__module__.startswith("linnet.")]
        private = {name for cls in ours for name in vars(cls) if not name.startswith("__")}
        return [n for n in super().__dir__() if not n.startswith("_") or n not in private]

    def _pytree_items(self) -> dict[Any, Any]:
        """The attributes by key; containers override it together with ``_pytree_restore``."""
        return self.__dict__

    def _pytree_restore(self, items: dict[Any, Any]) -> None:
        self.__dict__.update(items)

    def _pytree_private(self) -> tuple[Any, ...]:
        """Names of attributes whose lists and dicts were never exposed to the user."""
        return ()

    def _pytree_hand_out(self) -> None:
        """Called before the lists and dicts in private attributes are given to somebody."""

    def _pytree_has_handed_out(self) -> bool:
        """Whether somebody was given such lists and dicts."""
        return False

    def _pytree_store(self, key: Any) -> Any:
        """What holds the attribute of that key, to be read and written as ``store[key]``."""
        return self.__dict__

    def _pytree_set(self, key: Any, value: Any) -> None:
        """Sets one attribute, or element of a container, whatever kind of key it has."""
        if isinstance(key, str):
            setattr(self, key, value)
        else:
            type(self).__setitem__(self, key, value)  # pyright: ignore[reportAttributeAccessIssue]

    def _pytree_delete(self, key: Any) -> None:
        if isinstance(key, str):
            delattr(self, key)
        else:
            type(self).__delitem__(self, key)  # pyright: ignore[reportAttributeAccessIssue]

    def _pytree_clear(self, marks: dict[Any, bool] | None) -> None:
        """Drops every attribute before ``_pytree_restore`` puts others in their place."""
        watch.announce_content(self)
        self.__dict__.clear()
        _set(self, "_pytree_marks", marks)

    def _pytree_mark(self, key: Any, is_data: bool) -> None:
        _set(self, "_pytree_marks", {**(self._pytree_marks or {}), key: is_data})
        watch.announce_content(self)

    def _pytree_unmark(self, key: Any) -> None:
        marks = self._pytree_marks
        if marks is not None and key in marks:
            _set(self, "_pytree_marks", {k: v for k, v in marks.items() if k != key} or None)

    def _printed_form(self) -> PrintedForm:
        items = [(f"{name}=", value) for name, value in self._pytree_items().items()]
        comment = str(count_variables(self))
        return PrintedForm(f"{type(self).__name__}(", items, ")", comment, short_arrays=True)

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return render_object(self, path, subtree_renderer)

    def __copy__(self: P) -> P:
        make, args, state = self._pytree_parts()
        copied = make(*args)
        copied.__setstate__(state)
        for key, value in [*copied._pytree_items().items()]:
            if isinstance(value, MethodType) and value.__self__ is self:
                copied._pytree_set(key, MethodType(value.__func__, copied))
        return copied

    def _pytree_parts(self) -> Any:
        reduced: Any = self.__reduce_ex__(4)
        return (*reduced, None)[:3]

    def __deepcopy__(self: P, memo: dict[int, Any]) -> P:
        make, args, state = self._pytree_parts()
        copied = memo[id(self)] = make(*args)
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def __getstate__(self) -> Any:
        return (dict(self._pytree_items()), self._pytree_marks)

    def __setstate__(self, state: Any) -> None:
        items, marks = state
        self._pytree_restore(items)
        _set(self, "_pytree_marks", marks)
        watch.announce_content(self)


Object = Pytree

_set = object.__setattr__
_set_trace = Pytree.__dict__["_pytree_trace"].__set__
_set_marks = Pytree.__dict__["_pytree_marks"].__set__
_set_home = Pytree.__dict__["_linnet_home"].__set__


def check_pytree(pytree: Any) -> None:
    """Raises if an attribute that is marked static holds data, here or in an object below.

    Args:
      pytree: the object to look through, with everything below it.

    Raises:
      StaticDataError: an attribute marked static holds data.
      TypeError: ``pytree`` is not a Pytree.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Dict(names=nnx.static([]))
      >>> nnx.check_pytree(model)
      >>> model.names.append(nnx.Param(1.0))
      >>> nnx.check_pytree(model)
      Traceback (most recent call last):
      linnet.errors.StaticDataError: ...
    """
    if not isinstance(pytree, Pytree):
        raise TypeError(f"check_pytree takes a Pytree, but got {type(pytree).__name__}.")
    for _ in kinds.places(pytree, attributes.data_children, plain=False, methods=False):
        pass  # sorting the attributes of an object raises


# ---- writing attributes -------------------------------------------------------------------------


def new_object(cls: type[P], marks: dict[Any, bool] | None, trace: Any) -> P:
    """An instance without attributes, its constructor not run."""
    obj = object.__new__(cls)
    _set_trace(obj, trace)
    _set_marks(obj, marks)
    _set_home(obj, None)
    return obj


def check_mutable(obj: Pytree, name: Any) -> None:
    """Refuses a change from another trace than the object's own, or of a read-only attribute."""
    if not same_trace(obj._pytree_trace):
        _refuse_mutation(obj, name)
    home = obj._linnet_home
    if home is not None and home.read_only:
        _refuse_fixed(obj, name, home.read_only)


def fix_data(obj: Pytree) -> None:
    """Makes the attributes that hold data (Variables, arrays, objects) read-only from now on."""
    items = obj._pytree_items().items()
    watch.home_of(obj).read_only = frozenset(
        name for name, value in items if kinds.holds_data(value)
    )


def _refuse_fixed(obj: Pytree, name: Any, fixed: frozenset[Any]) -> None:
    # A position may be counted from the end, or be a slice: then the whole list counts.
    if name in fixed if isinstance(name, str) else any(not isinstance(n, str) for n in fixed):
        raise TraceContextError(
            f"{path_string([name], locate.describe(obj) or type(obj).__name__)} is read-only: it "
            "belongs to a copy out of an nnx.Stack, which would not get what is put there.\n"
            "Fix: write to the layer in `with stack.borrow(i) as layer:`, or give the stack a "
            "whole one, stack[i] = layer; stack.to_list() makes copies that can be changed."
        )


def _refuse_mutation(obj: Pytree, name: Any) -> None:
    where = locate.describe(obj)
    raise TraceContextError(
        f"Cannot mutate '{type(obj).__name__}' from different trace level: "
        f"{path_string([name], where or type(obj).__name__)} was set or deleted inside a function "
        "that JAX is tracing, but the object was made outside.\n"
        "Fix: pass the object as an argument to the function, and use an nnx transform, such as "
        "nnx.jit, which carries out the changes of its arguments, not of what it captures."
    )


def unwrap_mark(obj: Pytree, name: Any, value: Any) -> tuple[Any, bool | None]:
    """A value that may be wrapped in ``data`` or ``static``, and which of the two it was."""
    if not isinstance(value, dataclasses.Field):
        if type(value) in (list, dict, tuple):
            _refuse_marks_inside(obj, name, value)
        return value, None
    mark = not value.metadata.get("static", False)
    value = _field_value(obj, name, value)
    if not mark and kinds.data_inside(value):
        refuse_data(obj, name, value)
    return value, mark


def _refuse_marks_inside(obj: Pytree, name: Any, value: Any) -> None:
    for item in value.values() if type(value) is dict else value:
        if isinstance(item, dataclasses.Field) and "linnet_value" in item.metadata:
            raise ValueError(
                f"{path_string([name], type(obj).__name__)} got nnx.data(...) or nnx.static(...) "
                f"inside a {type(value).__name__}.\n"
                "Fix: mark the whole attribute, or put the elements in an nnx.List or nnx.Dict, "
                "which sort them one by one."
            )


def _field_value(obj: Pytree, name: str, field: dataclasses.Field[Any]) -> Any:
    if "linnet_value" in field.metadata:
        return field.metadata["linnet_value"]
    if field.default is not _MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(
        f"{type(obj).__name__}.{name} was assigned nnx.data() or nnx.static() without a value.\n"
        f"Fix: self.{name} = nnx.data(value); the empty form is for dataclass fields."
    )


def _check_declared(obj: Pytree, name: str, value: Any) -> None:
    if kind_of(value) not in (VARIABLE, OBJECT) and kinds.holds_data(value):
        raise StaticDataError(
            f"{path_string([name], type(obj).__name__)} holds data ({type(value).__name__}) "
            "without saying so, and the class is strict.\n"
            f"Fix: self.{name} = nnx.data(...), annotate it `{name}: nnx.Data[...]`, or keep the "
            "array in a Variable."
        )


def _is_array(value: Any) -> bool:
    return KINDS.get(type(value)) == ARRAY


def _announce_write(obj: Pytree, before: Any, value: Any) -> None:
    """Tells the watchers of an object that an attribute was set, unless only a value changed."""
    if _is_array(before) and _is_array(value):
        return
    if kind_of(before) == STATIC and kind_of(value) == STATIC:
        watch.announce_static(obj)
    else:
        watch.announce_content(obj)


# ---- flattening ---------------------------------------------------------------------------------


def _flatten(obj: Pytree) -> tuple[Any, Any]:
    if not next(locate.flattened) % locate.LOOK_EVERY:
        locate.refuse_cycle(obj)
    names, values, value_kinds, static_part = sort_attributes(obj)
    aux = (names, static_part, static_marks(obj))
    if any(kind > ARRAY for kind in value_kinds):
        obj._pytree_hand_out()
        marks = attributes.marks_of(obj)
        values = [
            value if kind <= ARRAY else attributes.wrap_child(value, obj, marks.get(name))
            for name, value, kind in zip(names, values, value_kinds, strict=True)
        ]
    return values, aux


def _flatten_with_keys(obj: Pytree) -> tuple[list[Any], Any]:
    children, aux = _flatten(obj)
    return [
        (kinds.jax_key(n, OBJECT), child) for n, child in zip(aux[0], children, strict=True)
    ], aux


def _unflatten(cls: type[P], aux: Any, children: Any) -> P:
    names, static_part, marked_static = aux
    marks: dict[Any, Any] = dict.fromkeys(marked_static, False)
    obj = new_object(cls, None, current_trace())
    items = {}
    for name, child in zip(names, children, strict=True):
        items[name], mark = attributes.unwrap_child(child, obj)
        if mark is not None:
            # Something else stands where data was (a sharding, an axis): it is still data.
            marks[name] = mark
    if marks:
        _set_marks(obj, marks)
    static_part.apply(items, obj)
    obj._pytree_restore(items)
    return obj


register_pytree_with_keys(
    Pytree, _flatten_with_keys, functools.partial(_unflatten, Pytree), _flatten
)
