"""Variable: a value that can be changed in place, with a type and metadata.

A Variable has one ``Cell`` for as long as it lives, its attribute ``_cell``. It holds the value or,
for Variables stored as JAX refs (``ref=True`` and ``hijax=True``), one mutable ref for each
array of the value. ``nnx.jit`` reads values through cells: all cells are of one class, so that
reading a list of them takes half as long. Every Variable belongs to the trace it was made in; a
write from another one is refused, except through a ref, which JAX itself carries out of the trace.

Below the class stand the types that the library uses (``Param``, ``BatchStat``, ...), and the
functions that make Variables without running hooks.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, all_leaves, register_pytree_with_keys

from linnet.errors import InPlaceError, TraceContextError, type_text
from linnet.functional.fusing import is_tracing
from linnet.nnx.pytreelib import kinds, locate, watch
from linnet.nnx.pytreelib.printing import PrintedForm, Representable, render_variable
from linnet.nnx.pytreelib.tracing import (
    EAGER,
    constants,
    current_trace,
    note_constant,
    note_write,
    same_trace,
    traced_reads,
)
from linnet.nnx.variablelib import placement
from linnet.nnx.variablelib.drawing import VariableMetadata
from linnet.nnx.variablelib.metadata import (
    HOOKS,
    KEPT_ON_TAKE_OVER,
    STORAGE,
    Metadata,
    complete_metadata,
    current_name,
    run_hook,
    storage_metadata,
)
from linnet.nnx.variablelib.operators import ArrayLike, array_type, plain_index, value_of, with_item
from linnet.nnx.variablelib.ownership import (
    donations,
    is_donated_elsewhere,
    wait_for_donation,
)
from linnet.nnx.variablelib.storage import (
    current_defaults,
    from_refs,
    new_cell,
    to_refs,
    using_eager_sharding,
    write_refs,
)
from linnet.tables import array_size, size_text

A = TypeVar("A")

V = TypeVar("V", bound="Variable[Any]")

_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<not given>"})()

_VALUE_KEY = GetAttrKey("value")


class Variable(ArrayLike, Representable, Generic[A]):
    """A mutable box for an array (or any pytree of arrays), read and written in place.

    Args:
      value: the value; what ``with_metadata`` made brings its metadata along.
      hijax: store as JAX refs that plain ``jax.jit`` updates; default from ``var_defaults``.
      ref: store as JAX refs; default from ``var_defaults``.
      eager_sharding: place the value on the mesh when it is made; default from
        ``use_eager_sharding``.
      **metadata: anything to keep beside the value. ``on_get_value``, ``on_set_value``,
        ``on_create_value``, ``on_add_axis`` and ``on_remove_axis`` are hooks: functions of the
        Variable and the value (or axis).

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> count = nnx.Variable(jnp.zeros((), jnp.int32), unit="steps")
      >>> count[...] += 1
      >>> int(count.value), count.unit
      (1, 'steps')
    """

    __slots__ = ("__weakref__", "_cell", "_linnet_home", "_metadata", "_own", "_trace")
    _linnet_kind: ClassVar[int] = kinds.VARIABLE
    _count_as: ClassVar[str] = ""
    _made_when_read: ClassVar[bool] = False  # ``_raw`` may hold a seed, or a Python number
    _class_hooks: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._class_hooks = frozenset(name for name in HOOKS if hasattr(cls, name))
        _register(cls)

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        variable = super().__new__(cls)
        _set_cell(variable, new_cell(_MISSING))
        _set_home(variable, None)
        return variable

    def __init__(
        self,
        value: A | VariableMetadata,
        *,
        hijax: bool | None = None,
        ref: bool | None = None,
        eager_sharding: bool | None = None,
        **metadata: Any,
    ):
        if isinstance(value, VariableMetadata):
            metadata = value.merged(metadata)
            hijax = metadata.get("hijax") if hijax is None else hijax
            ref = metadata.get("ref") if ref is None else ref
            if eager_sharding is None:
                eager_sharding = metadata.get("eager_sharding")
            value = value.raw_value
        defaults = current_defaults()
        storage = storage_metadata(
            defaults.hijax if hijax is None else bool(hijax),
            defaults.ref if ref is None else bool(ref),
            using_eager_sharding() if eager_sharding is None else bool(eager_sharding),
        )
        complete = complete_metadata(metadata, storage)
        if self._cell.value is not _MISSING:  # a Variable in use is initialised again
            self._check_writable()
            watch.announce_content(self)
        _set(self, "_metadata", complete)
        _set(self, "_trace", current_trace())
        self._cell.value = value  # which hooks may read
        created: Any = self.create_value(value)  # pyright: ignore[reportArgumentType]
        if "out_sharding" in complete and complete["eager_sharding"]:
            name = functools.partial(placement.while_building, type(self).__name__)
            created = placement.place(created, complete, name)
        self._cell.value = to_refs(created) if complete.stored_as_ref else created

    # ---- the value ------------------------------------------------------------------------------

    @property
    def _raw(self) -> Any:
        """What is stored. Whoever reads it may keep it, so it is not the Variable's alone."""
        while True:  # the order is explained in ``ownership``
            if donations:
                wait_for_donation(self)
            _set_own(self, None)
            value = self._cell.value
            if not (donations and is_donated_elsewhere(self)) and self._own is None:
                return value

    @property
    def value(self) -> A:
        """The value; assigning replaces it."""
        return self.get_value()

    @value.setter
    def value(self, value: A) -> None:
        self.set_value(value)

    def get_value(self, *, index: Any = _MISSING) -> Any:
        """The value, or the part of it at ``index``, after the ``on_get_value`` hook."""
        value, metadata = self._raw, self._metadata
        if metadata.stored_as_ref:
            value = from_refs(value)
        elif traced_reads and self._trace is EAGER:
            note_constant(self)
        if index is not _MISSING and index is not Ellipsis:
            value = value[plain_index(index)]
        if "on_get_value" in metadata.hooks:
            value = run_hook(metadata["on_get_value"], self, value)
        elif "on_get_value" in self._class_hooks:
            value = self.on_get_value(value)
        return value

    def set_value(self, value: Any, *, index: Any = _MISSING) -> None:
        """Replaces the value, or the part of it at ``index``, through the ``on_set_value`` hook."""
        self._check_writable()
        value = value_of(value)
        if "on_set_value" in self._metadata.hooks:
            value = run_hook(self._metadata["on_set_value"], self, value)
        elif "on_set_value" in self._class_hooks:
            value = self.on_set_value(value)
        if index is not _MISSING:
            value = self._with_item(plain_index(index), value)
        self._put(value)

    def _with_item(self, index: Any, new: Any) -> Any:
        old = from_refs(self._raw) if self._metadata.stored_as_ref else self._raw
        try:
            new = with_item(old, index, new)
        except Exception as error:
            error.add_note(f"This was a write to {self._named()}, which holds {type_text(old)}.")
            raise
        if self._metadata.get("out_sharding") and self._metadata["eager_sharding"]:
            return placement.as_before(old, new)
        return new

    def create_value(self, value: A) -> A:
        """The value as a new Variable keeps it: through the ``on_create_value`` hook."""
        if "on_create_value" in self._metadata.hooks:
            return run_hook(self._metadata["on_create_value"], self, value)
        if "on_create_value" in self._class_hooks:
            return self.on_create_value(value)
        return value

    @property
    def raw_value(self) -> Any:
        """What is stored, before hooks; refs for a Variable that is stored as refs."""
        return self._raw

    @raw_value.setter
    def raw_value(self, value: Any) -> None:
        self.set_raw_value(value)

    def get_raw_value(self) -> Any:
        """What is stored, before hooks; refs for a Variable that is stored as refs."""
        return self._raw

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool = False) -> None:
        """Replaces what is stored without running hooks."""
        if _unsafe_bypass_check:
            self._cell.value = value
        else:
            self._check_writable()
            self._put(value)

    def _check_writable(self) -> None:
        self._check_mutable()
        if not self._metadata.stored_as_ref and not same_trace(self._trace):
            self._refuse_write()

    def _check_mutable(self) -> None:
        if not self._metadata.get("mutable", True):
            raise TraceContextError(
                f"{self._named()} is read-only: it was made with mutable=False.\n"
                "Fix: write to the original (for stack[i] of an nnx.Stack: `with stack.borrow(i) "
                "as layer:`), or make a copy with nnx.with_vars(..., mutable=True)."
            )

    def _put(self, value: Any) -> None:
        if constants:
            note_write(self)
        if self._metadata.stored_as_ref:
            if write_refs(self._raw, value, self._named):
                return
            if not same_trace(self._trace):
                self._refuse_write()
            value = to_refs(value)
        self._cell.value = value

    def _refuse_write(self) -> NoReturn:
        if not is_tracing():
            raise TraceContextError(
                f"Cannot mutate {self._named()} from a different trace level: it was made inside "
                "a function that JAX traced, and that trace has ended.\n"
                "Fix: return its value from the function and write that to a Variable made outside."
            )
        raise TraceContextError(
            f"Cannot mutate {self._named()} from a different trace level: it was made outside the "
            "function that JAX is tracing, so the write would be lost or leak a tracer.\n"
            "Fix: pass it (or the module that holds it) as an argument to an nnx transform, such "
            "as nnx.jit, which carries out the updates of its arguments, not of what the function "
            "captures; where jax.grad hands an argument through untraced, refresh it first with "
            "nnx.clone(...) or nnx.merge(..., copy=True)."
        )

    def _named(self) -> str:
        name = locate.describe(self)
        return f"{type(self).__name__} at {name}" if name else type(self).__name__

    def __getitem__(self, key: Any) -> Any:
        return self.get_value(index=key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set_value(value, index=key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value, for Variables that hold a callable pytree."""
        return self.get_value()(*args, **kwargs)

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.get_value())

    @property
    def shape(self) -> Any:
        """The shape of the value."""
        return self.get_value().shape

    def _in_place(self, symbol: str, op: Callable[[Any, Any], Any], other: Any) -> Any:
        old = self.get_value()
        new = op(old, value_of(other))
        before, after = array_type(old), array_type(new)
        if before != after:
            raise InPlaceError(
                f"`{symbol}` on {self._named()} would change it from {type_text(old)} to "
                f"{type_text(new)}, in place, for everyone who holds it.\n"
                f"Fix: for a new value write `y = variable {symbol[:-1]} x`; to change the "
                "Variable itself assign `variable.value = ...`."
            )
        self.set_value(new)
        return self

    # ---- metadata -------------------------------------------------------------------------------

    def get_metadata(
        self, name: str = _MISSING, default: Any = _MISSING, *, exclude_required: bool = False
    ) -> Any:
        """One entry of the metadata, or all of it as a dict.

        Args:
          name: the entry; without it a dict of all entries is returned.
          default: returned where there is no such entry.
          exclude_required: leave out ``hijax``, ``ref`` and ``eager_sharding``.

        Returns:
          The entry, or a new dict.

        Raises:
          KeyError: there is no such entry and no default.
        """
        if name is _MISSING:
            hidden = STORAGE if exclude_required else ()
            return {key: value for key, value in self._metadata.items() if key not in hidden}
        name = current_name(name)
        if name not in self._metadata and default is not _MISSING:
            return default
        return self._metadata[name]

    def set_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Sets metadata: by keyword, as ``(name, value)``, or all of it anew from one mapping."""
        if not same_trace(self._trace):
            self._refuse_write()
        if len(args) == 1 and not kwargs:
            storage = {name: self._metadata[name] for name in STORAGE}
            self._replace_metadata(Metadata({**storage, **args[0]}))
            return
        if len(args) == 2 and not kwargs:
            kwargs = {args[0]: args[1]}
        elif args:
            raise TypeError(
                "set_metadata takes one mapping, a name and a value, or keywords; "
                f"got {len(args)} positional and {len(kwargs)} keyword arguments."
            )
        self._replace_metadata(self._metadata.replaced(kwargs))

    def _replace_metadata(self, metadata: Metadata) -> None:
        if metadata.stored_as_ref != self._metadata.stored_as_ref:
            convert = to_refs if metadata.stored_as_ref else from_refs
            self._cell.value = convert(self._raw)
        _set(self, "_metadata", metadata)
        watch.announce_static(self)

    def has_metadata(self, name: str) -> bool:
        """Whether there is metadata under that name."""
        return current_name(name) in self._metadata

    def del_metadata(self, name: str) -> None:
        """Removes one entry of the metadata."""
        if not same_trace(self._trace):
            self._refuse_write()
        rest = dict(self._metadata)
        del rest[current_name(name)]
        self._replace_metadata(Metadata(rest))

    @property
    def hijax(self) -> bool:
        """Whether plain JAX transforms update this Variable."""
        return self._metadata.get("hijax", False)

    @property
    def ref(self) -> bool:
        """Whether this Variable is stored as JAX refs because it asked for them."""
        return self._metadata.get("ref", False)

    @property
    def sharding_names(self) -> Any:
        """The axis names, given as ``out_sharding``, ``sharding`` or ``sharding_names``."""
        return self._metadata.get("out_sharding")

    @property
    def type(self) -> type:
        """The type of this Variable."""
        return type(self)

    var_type = type

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Calls the ``on_add_axis`` hook with an axis that the value gained, and its name.

        The names in the metadata stay as they are; ``nnx.spmd.add_axis`` changes them too.
        """
        self._axis_hook("on_add_axis", axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Calls the ``on_remove_axis`` hook with an axis that the value lost, and its name.

        The names in the metadata stay as they are; ``nnx.spmd.remove_axis`` changes them too.
        """
        self._axis_hook("on_remove_axis", axis_index, axis_name)

    def _axis_hook(self, hook: str, axis_index: int, axis_name: str | None) -> None:
        if hook in self._metadata.hooks:
            steps = self._metadata[hook]
            for step in [steps] if callable(steps) else steps:
                step(self, axis_index, axis_name)
        elif hook in self._class_hooks:
            getattr(self, hook)(axis_index, axis_name)

    # ---- copies ---------------------------------------------------------------------------------

    def copy(self: V, value: Any = _MISSING, *, _copy_ref: bool = True, **updates: Any) -> V:
        """A new Variable of the same type, with another value or metadata where given.

        Args:
          value: the value of the copy; by default the same arrays.
          _copy_ref: for a Variable that is stored as refs, copy them, as by default, and not share
            them with the copy. Flax has this argument, under this name.
          **updates: metadata to change.

        Returns:
          The copy, which belongs to the running trace.
        """
        metadata = self._metadata.replaced(updates)
        raw = in_own_containers(self._raw) if value is _MISSING else value_of(value)
        if not metadata.stored_as_ref:
            raw = from_refs(raw)
        elif _copy_ref or value is not _MISSING:
            raw = to_refs(raw)
        return build_variable(type(self), raw, metadata)

    def replace(self: V, value: Any = _MISSING, *, _copy_ref: bool = True, **updates: Any) -> V:
        """A new Variable of the same type with other parts; see ``copy``."""
        return self.copy(value, _copy_ref=_copy_ref, **updates)

    def to_state(self: V, value: Any = _MISSING, *, _copy_ref: bool = True, **updates: Any) -> V:
        """A copy; states hold Variables."""
        return self.copy(value, _copy_ref=_copy_ref, **updates)

    def copy_from(self, other: Variable[A]) -> None:
        """Takes over value and metadata of another Variable of the same type."""
        if self is other:
            return
        if type(self) is not type(other):
            raise ValueError(
                f"{self._named()} can copy from another {type(self).__name__}, "
                f"but got {type(other).__name__}.\nFix: variable.value = other.value."
            )
        self.update_from_state(other)

    def update_from_state(self, variable_state: Variable[A]) -> None:
        """Takes over value and metadata of another Variable; storage and freezing stay its own."""
        self._check_writable()
        self._put(in_own_containers(from_refs(variable_state._raw)))
        metadata, own = variable_state._metadata, self._metadata
        if metadata is own:
            return
        if any(metadata.get(name) != own.get(name) for name in KEPT_ON_TAKE_OVER):
            kept = {name: own[name] for name in KEPT_ON_TAKE_OVER if name in own}
            taken = {
                name: value for name, value in metadata.items() if name not in KEPT_ON_TAKE_OVER
            }
            metadata = Metadata({**taken, **kept})
        self._replace_metadata(metadata)

    @classmethod
    def from_metadata(cls: type[V], value: Any, attributes: Mapping[str, Any]) -> V:
        """A Variable of this type from a stored value and all of its metadata, without hooks."""
        storage = storage_metadata(False, False, True)
        return build_variable(cls, value, Metadata({**storage, **attributes}))

    def __copy__(self: V) -> V:
        return self.copy()

    def __deepcopy__(self: V, memo: dict[int, Any]) -> V:
        return self.copy(jax.tree_util.tree_map(copy_array, from_refs(self._raw)))

    def __reduce__(self) -> Any:
        return (rebuild_variable, (type(self), from_refs(self._raw), self._metadata))

    # ---- attributes and printing ----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Variable.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in self._metadata:
            return self._metadata[name]
        value = self.get_value()
        try:
            return getattr(value, name)
        except AttributeError:
            raise AttributeError(_no_attribute(self, name, value)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._metadata:
            self.set_metadata(name, value)
        elif name == "__class__":
            _set(self, name, value)
            watch.announce_static(self)
        elif isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(
                f"Cannot set attribute {name!r} of {self._named()}: a Variable has a value and "
                f"metadata.\nFix: variable.set_metadata({name}=value), or variable.value = value."
            )

    def _printed_form(self) -> PrintedForm:
        value = from_refs(self._raw)
        size, nbytes = array_size(value)
        # In a module, large refs that were asked for print as refs.
        seen = self._raw if self.ref and size > 1 else value
        items = [("value=", seen)]
        items += [(f"{name}=", item) for name, item in self._metadata.shown().items()]
        comment = size_text(size, nbytes) if size else ""
        return PrintedForm(f"{type(self).__name__}(", items, ")", comment)

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return render_variable(self, path, subtree_renderer)


_set = object.__setattr__
_set_cell = Variable.__dict__["_cell"].__set__
_set_own = Variable.__dict__["_own"].__set__
_set_metadata = Variable.__dict__["_metadata"].__set__
_set_trace = Variable.__dict__["_trace"].__set__
_set_home = Variable.__dict__["_linnet_home"].__set__


def _no_attribute(variable: Variable[Any], name: str, value: Any) -> str:
    known = [*variable._metadata, *(key for key in dir(type(variable)) if key[0] != "_")]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if isinstance(value, jax.ShapeDtypeStruct):
        hint = " It has only a shape and a dtype, as nnx.eval_shape gives them, and no value."
    return (
        f"{variable._named()} has no attribute or metadata {name!r}, "
        f"and its value ({type_text(value) if hasattr(value, 'dtype') else type(value).__name__}) "
        f"has none of that name.{hint}"
    )


def copy_array(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _register(cls: type[Variable[Any]]) -> None:
    register_pytree_with_keys(
        cls,
        lambda variable: (((_VALUE_KEY, _stored(variable)),), variable._metadata.snapshot()),
        functools.partial(_unflatten, cls),
        _flatten,
    )


def _flatten(variable: Variable[Any]) -> tuple[tuple[Any], Metadata]:
    metadata = variable._metadata
    return (_stored(variable),), metadata.snapshot() if metadata.can_change else metadata


def _stored(variable: Variable[Any]) -> Any:
    return variable.raw_value if variable._made_when_read else variable._raw


def _unflatten(cls: type[V], metadata: Any, children: Any) -> V:
    return build_variable(cls, children[0], metadata)


_register(Variable)


# ---- the types of Variables ---------------------------------------------------------------------


class Param(Variable[A]):
    """A parameter that training changes."""


class BatchStat(Variable[A]):
    """A running statistic of batches, as in batch normalisation."""


class Cache(Variable[A]):
    """A value kept from call to call, such as keys and values while decoding."""


class Intermediate(Variable[A]):
    """A value that a module stored with ``sow`` while it ran."""


class Perturbation(Intermediate[A]):
    """A zero added to a value so that the gradient of that value can be taken."""


class OptState(Variable[A]):
    """State of an optimizer. A number put in the place of an array takes on its dtype."""

    def on_set_value(self, value: Any) -> Any:
        # A learning rate that is set as a Python number, or as an array made of one, is weakly
        # typed, and would retrace.
        weak = isinstance(value, (bool, int, float)) or getattr(value, "weak_type", False)
        if not weak or isinstance(value, Tracer):
            return value
        old = self._raw
        return jnp.asarray(value, old.dtype) if hasattr(old, "dtype") else value


class OptArray(OptState[A]):
    """State of an optimizer that belongs to no single parameter, such as a count."""


class OptVariable(OptState[A]):
    """State of an optimizer for one parameter, whose metadata it carries."""


VariableState = Variable


# ---- making Variables ---------------------------------------------------------------------------


def build_variable(cls: type[V], raw: Any, metadata: Metadata, trace: Any = None) -> V:
    """A Variable from its stored parts, which belongs to the running trace, or to ``trace``."""
    variable = object.__new__(cls)
    _set_cell(variable, new_cell(raw))
    _set_metadata(variable, metadata.snapshot() if metadata.can_change else metadata)
    _set_trace(variable, current_trace() if trace is None else trace)
    _set_home(variable, None)
    return variable


def rebuild_variable(cls: type[V], value: Any, metadata: Metadata) -> V:
    """A Variable from a plain value and complete metadata, without running hooks."""
    return build_variable(cls, to_refs(value) if metadata.stored_as_ref else value, metadata)


def is_variable(value: Any) -> bool:
    """Whether a value is a Variable."""
    return isinstance(value, Variable)


def stored_value(leaf: Any) -> Any:
    """What a Variable stores, refs read and hooks not run; anything else is its own value."""
    return from_refs(leaf.raw_value) if isinstance(leaf, Variable) else leaf


def in_own_containers(value: Any) -> Any:
    """A value in new lists and dicts, so that a write inside one reaches one Variable only."""
    return value if all_leaves((value,)) else jax.tree_util.tree_map(_itself, value)


def _itself(leaf: Any) -> Any:
    return leaf


def copy_of(variable: V) -> V:
    """``variable.copy()`` without its options, and faster."""
    metadata = variable._metadata
    raw = variable._raw
    raw = to_refs(raw) if metadata.stored_as_ref else in_own_containers(raw)
    return build_variable(type(variable), raw, metadata)
