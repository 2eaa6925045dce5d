"""What a module is: fields, submodules, names and variables.

How a module comes to its scope (``__post_init__``):

- A module that is made inside a running method has that method's module as its parent. In a compact
  method it gets its name (``Dense_0``) and its scope, a child of the parent's, at once. In
  ``setup`` it waits until it is assigned to an attribute, and is named after it.
- A module that is made outside has no parent. As a field of another it is adopted when that one is
  bound, under the name of the field.
- Methods are wrapped (``wrapping``): the first call runs ``setup``, every call is put on the stack
  of running modules (``context``). At the end of a compact method the scope is rewound, so that the
  next call gets the same names and with them the same variables.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax.numpy as jnp

from linnet import config
from linnet.core.scope import PRNGKey, Scope, Variable, VariableDict
from linnet.errors import (
    AssignSubModuleError,
    CallCompactUnboundModuleError,
    CallSetupUnboundModuleError,
    NameInUseError,
    SetAttributeFrozenModuleError,
    SetAttributeInModuleSetupError,
    UnboundModuleError,
)
from linnet.ids import uuid
from linnet.linen.context import CallInfo, context, name_scope, run_interceptors
from linnet.linen.submodules import (
    ModuleState,
    ParentDescriptor,
    UnspecifiedParent,
    freeze_attribute,
    map_modules,
    module_repr,
    named_modules,
    unspecified_parent,
)
from linnet.linen.wrapping import (
    compact,
    make_dataclass,
    name_scope_methods,
    wrap_attributes,
)

M = TypeVar("M", bound="ModuleBase")
T = TypeVar("T")

_unset = ModuleState()  # of a module whose __post_init__ has not run


def tuple_reduce(xs: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    """The reduction of ``sow``: a tuple of all values."""
    if not isinstance(xs, tuple):
        raise TypeError(
            f"sow adds to a tuple, but found a {type(xs).__name__} under that name.\n"
            "Fix: sow under another name, or give reduce_fn and init_fn for other values."
        )
    return (*xs, x)


def tuple_init() -> tuple[Any, ...]:
    """The first value of ``sow``."""
    return ()


@dataclass_transform(field_specifiers=(dataclasses.field,))
class _Dataclass:
    """Tells type checkers that subclasses are dataclasses."""


class ModuleBase(_Dataclass):
    """Fields, submodules, names and variables: what a module is, apart from init and apply."""

    parent: Any = dataclasses.field(default=unspecified_parent, repr=False, kw_only=True)
    name: str | None = dataclasses.field(default=None, kw_only=True)

    scope: ClassVar[Any] = None
    _state: ClassVar[ModuleState] = _unset

    def __init_subclass__(cls, kw_only: bool = False, wrap: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        make_dataclass(cls, kw_only)
        if wrap:
            wrap_attributes(cls)

    # ---- construction, attributes, text ---------------------------------------------------------

    def __post_init__(self) -> None:
        set_attribute = functools.partial(object.__setattr__, self)
        set_attribute("_id", uuid())
        set_attribute("_state", ModuleState())
        if isinstance(self.parent, UnspecifiedParent):
            set_attribute("parent", context.module_stack[-1])
        parent = self.parent
        if parent is None:
            return
        if isinstance(parent, ModuleBase):
            if parent._state.in_setup and self.name is None:
                return  # it gets its name and scope when it is assigned to an attribute
            self._join(parent)
        elif isinstance(parent, Scope):
            set_attribute("scope", parent)
        else:
            raise ValueError(
                f"The parent of a {type(self).__name__} must be a module, a scope or None, but "
                f"got {parent!r} ({type(parent).__name__})."
            )
        with self._state.setting_up():
            for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
                if field.init and field.name not in ("parent", "name"):
                    self._register_submodules(field.name, getattr(self, field.name))
        self._state.is_initialized = True

    def _join(self, parent: ModuleBase) -> None:
        """Takes a name among the children of a parent, and a child of its scope."""
        if not parent._initialization_allowed:
            raise AssignSubModuleError(type(self).__name__)
        if parent.scope is None:
            raise UnboundModuleError(
                f"A {type(self).__name__} was made in a method of a {type(parent).__name__} that "
                "has no variables.\nFix: call the method through apply, init or bind."
            )
        if self.name is None:
            prefix = f"{type(self).__name__}_"
            number = parent._state.autoname_cursor.get(prefix, 0)
            parent._state.autoname_cursor[prefix] = number + 1
            object.__setattr__(self, "name", f"{prefix}{number}")
        name: Any = self.name
        if parent.scope.name_reserved(name):
            raise NameInUseError("submodule", name, parent._where())
        parent._state.children[name] = self
        object.__setattr__(self, "scope", parent.scope.push(name))

    def _register_submodules(self, name: str, value: Any) -> None:
        """Stores an attribute, and adopts the modules in it that have no scope yet."""
        value = freeze_attribute(value)
        for path, module in named_modules(value, name):
            if module.scope is not None:
                continue  # it has a scope already, and is shared
            own = module.name if config.flax_preserve_adopted_names else None
            object.__setattr__(module, "parent", self)
            object.__setattr__(module, "name", own or path)
            module.__post_init__()
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        state = self._state
        if name == "__orig_class__" or not (state.in_setup or state.is_initialized):
            object.__setattr__(self, name, value)
        elif not state.in_setup:
            raise SetAttributeFrozenModuleError(self._where(), name, value)
        elif name in self.__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
            raise SetAttributeInModuleSetupError
        else:
            self._register_submodules(name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self._try_setup()
            if name in self.__dict__:
                return self.__dict__[name]
        hint = ""
        if self.scope is None and not name.startswith("__"):
            hint = (
                "\nFix: attributes that setup makes are there once the module is bound: use "
                "module.bind(variables), or a method through apply."
            )
        raise AttributeError(f'"{self._where()}" object has no attribute "{name}".{hint}')

    def __repr__(self) -> str:
        return module_repr(self)

    def _where(self) -> str:
        """The class, and the path of a module that has one, for messages."""
        if self.scope is None or not self.scope.path:
            return type(self).__name__
        return f"{type(self).__name__} at {'/'.join(self.scope.path)}"

    def setup(self) -> None:
        """Makes submodules and variables, once a module is bound. For subclasses."""

    def _try_setup(self) -> None:
        """Runs setup if the module is bound and it has not run."""
        state = self._state
        if self.scope is None or state.in_setup or state.setup_called or not state.is_initialized:
            return
        state.setup_called = True
        with state.setting_up():
            for name, fun in name_scope_methods(type(self)):
                state.name_scopes[name] = CompactNameScope(
                    fun, weakref.ref(self), parent=self, name=name
                )
            self.setup()

    @property
    def _initialization_allowed(self) -> bool:
        """Whether submodules and variables can be made at the moment."""
        state = self._state
        return not state.is_initialized or state.in_setup or state.in_compact_method

    def _call_wrapped_method(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a method: after setup, with the module on the stack of running modules."""
        name = getattr(fun, "__name__", "unnamed_function")
        is_compact = hasattr(fun, "compact")
        if self._state is _unset:
            object.__setattr__(self, "_state", ModuleState())
        state = self._state
        if name == "setup":
            if self.scope is None:
                raise CallSetupUnboundModuleError
        else:
            self._try_setup()
        if is_compact and self.scope is None:
            raise CallCompactUnboundModuleError
        outermost = is_compact and not state.in_compact_method
        state.in_compact_method |= is_compact
        context.module_stack.append(self)
        try:
            if name == "setup":
                return run_interceptors(fun.__get__(self), self, *args, **kwargs)
            return self._watched(fun, name, args, kwargs)
        finally:
            context.module_stack.pop()
            if outermost:
                if not self.scope.invalid:
                    object.__setattr__(self, "scope", self.scope.rewound())
                state.reset()

    def _watched(
        self,
        fun: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a method in its named scope; logs the call and captures its output if asked for."""
        log = context.call_info_stack[-1] if context.call_info_stack else None
        index = log.next_index() if log is not None else 0
        with name_scope(self, name):
            out = run_interceptors(fun.__get__(self), self, *args, **kwargs)
        if log is not None and self.scope is not None:
            log.calls.append(
                CallInfo(
                    index,
                    self.path,
                    self.clone(parent=None),
                    self.scope.rngs,
                    self.scope.mutable,
                    name,
                    args,
                    kwargs,
                    out,
                    dict(self.scope.variables()),
                )
            )
        if context.capture_stack and self.scope is not None:
            wanted = context.capture_stack[-1]
            if wanted and callable(wanted) and wanted(self, name):
                self.sow("intermediates", name, out)
        return out

    # ---- copies ---------------------------------------------------------------------------------

    def clone(
        self: M,
        *,
        parent: Any = None,
        _deep_clone: bool | dict[Any, Any] = False,
        _reset_names: bool = False,
        **updates: Any,
    ) -> M:
        """A copy without variables, of which fields can have other values.

        Args:
          parent: the module or scope of the copy.
          _deep_clone: copy the modules in its fields too.
          _reset_names: forget the names of the modules in its fields.
          **updates: fields with other values.

        Returns:
          The copy.

        Example:
          >>> from linnet import linen as nn
          >>> class Layer(nn.Module):
          ...     size: int
          >>> Layer(3).clone(size=4).size
          4
        """
        attrs = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if f.init and f.name != "parent"
        }
        attrs.update(parent=parent, **updates)
        if _deep_clone is not False:
            copies: dict[Any, Any] = {} if _deep_clone is True else _deep_clone

            def copied(module: Any) -> Any:
                if module._id not in copies:
                    names = {"name": None} if _reset_names and module.scope is not None else {}
                    copies[module._id] = module.clone(
                        _deep_clone=copies, _reset_names=_reset_names, **names
                    )
                return copies[module._id]

            attrs = {
                key: value if key == "parent" else map_modules(copied, value)
                for key, value in attrs.items()
            }
        return type(self)(**attrs)

    def copy(
        self: M, *, parent: Any = unspecified_parent, name: str | None = None, **updates: Any
    ) -> M:
        """A copy with its own copies of the modules in its fields, in the running module.

        Args:
          parent: the module or scope of the copy; by default the running module.
          name: its name.
          **updates: fields with other values.

        Returns:
          The copy.
        """
        return self.clone(parent=parent, name=name, _deep_clone=True, **updates)

    # ---- variables ------------------------------------------------------------------------------

    def _bound_scope(self, use: str) -> Scope:
        if self.scope is None:
            raise UnboundModuleError(
                f"{type(self).__name__}.{use} needs variables, but the module is not bound.\n"
                "Fix: use it in a method that init or apply runs, or on module.bind(variables)."
            )
        return self.scope

    def _check_new_variable(self, method: str, col: str, name: str) -> Scope:
        """The scope; refuses a variable of a taken name, or that cannot be made at the moment."""
        scope = self._bound_scope(method)
        if not self._initialization_allowed:
            raise ValueError(
                f'The {method} "{name}" of {self._where()} was made outside of setup and of a '
                "compact method.\nFix: make it in setup, or decorate the method with @nn.compact."
            )
        if scope.name_reserved(name, col):
            raise NameInUseError(method, name, self._where())
        self._state.children[name] = col
        return scope

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[Any]:
        """A variable of a collection, made if it is missing and the collection can be written.

        Args:
          col: the collection.
          name: the variable.
          init_fn: makes its first value.
          *init_args, **init_kwargs: arguments of ``init_fn``.
          unbox: take values out of their metadata.

        Returns:
          The variable; its ``value`` can be read and set.

        Raises:
          NameInUseError: the name is taken.
          ScopeVariableNotFoundError: the variable is missing and cannot be made.
        """
        scope = self._check_new_variable("variable", col, name)
        return scope.variable(col, name, init_fn, *init_args, unbox=unbox, **init_kwargs)

    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Any:
        """A parameter, made if it is missing and ``params`` can be written.

        Args:
          name: the parameter.
          init_fn: makes its first value from a random key.
          *init_args, **init_kwargs: further arguments of ``init_fn``.
          unbox: take the value out of its metadata.

        Returns:
          The value.

        Raises:
          NameInUseError: the name is taken.
          ScopeParamShapeError: the value has another shape than ``init_fn`` gives.
          ScopeParamNotFoundError: the parameter is missing and cannot be made.
        """
        scope = self._check_new_variable("param", "params", name)
        return scope.param(name, init_fn, *init_args, unbox=unbox, **init_kwargs)

    def has_variable(self, col: str, name: str) -> bool:
        """Whether a collection has a variable of this module."""
        return self._bound_scope("has_variable").has_variable(col, name)

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        """The value of a variable of this module, or ``default``."""
        return self._bound_scope("get_variable").get_variable(col, name, default)

    def put_variable(self, col: str, name: str, value: Any) -> None:
        """Writes a variable of this module.

        Args:
          col: the collection.
          name: the variable.
          value: its new value.

        Raises:
          ModifyScopeVariableError: the collection cannot be written in this call.
        """
        self._bound_scope("put_variable").put_variable(col, name, value)

    def is_mutable_collection(self, col: str) -> bool:
        """Whether a collection can be written in this call."""
        return self._bound_scope("is_mutable_collection").is_mutable_collection(col)

    def is_initializing(self) -> bool:
        """Whether this call is one of ``init``."""
        return self._bound_scope("is_initializing").get_flag("initializing", False)

    def has_rng(self, name: str) -> bool:
        """Whether a key was given for a random stream."""
        return self._bound_scope("has_rng").has_rng(name)

    def make_rng(self, name: str = "params") -> PRNGKey:
        """Draws a new key from a random stream.

        Args:
          name: the stream; one that was not given falls back to ``params``.

        Returns:
          The key; it depends on the path of the module and on how many were drawn there before.

        Raises:
          InvalidRngError: there is neither the stream nor ``params``.
        """
        return self._bound_scope("make_rng").make_rng(name)

    @property
    def variables(self) -> VariableDict:
        """The collections of this module."""
        return self._bound_scope("variables").variables()

    @property
    def path(self) -> tuple[str, ...]:
        """The names from the root module to this one."""
        return self._bound_scope("path").path

    def sow(
        self,
        col: str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = tuple_reduce,
        init_fn: Callable[[], Any] = tuple_init,
    ) -> bool:
        """Adds a value to a variable, if its collection can be written.

        Args:
          col: the collection, such as ``intermediates``.
          name: the variable.
          value: the value.
          reduce_fn: the new value of the variable from the one before and ``value``.
          init_fn: the value before the first.

        Returns:
          Whether it was added.

        Example:
          >>> from linnet import linen as nn
          >>> class Model(nn.Module):
          ...     def __call__(self, x):
          ...         self.sow("intermediates", "inputs", x)
          ...         return 2 * x
          >>> Model().apply({}, 1, mutable=["intermediates"])
          (2, {'intermediates': {'inputs': (1,)}})
        """
        scope = self._bound_scope("sow")
        if not scope.is_mutable_collection(col):
            return False
        if not scope.has_variable(col, name):
            scope.reserve(name, col)
            self._state.children[name] = col
            before = init_fn()
        else:
            before = scope.get_variable(col, name)
        scope.put_variable(col, name, reduce_fn(before, value))
        return True

    def perturb(self, name: str, value: T, collection: str = "perturbations") -> T:
        """Adds a variable of zeros to a value: its gradient is that of the value.

        Args:
          name: the variable.
          value: the value.
          collection: the variable's collection.

        Returns:
          The value plus the variable; the value alone where the collection is neither given nor
          being made.
        """
        scope = self._bound_scope("perturb")
        if not scope.has_variable(collection, name):
            if scope.is_mutable_collection(collection):
                scope.reserve(name, collection)
                self._state.children[name] = collection
                scope.put_variable(collection, name, jnp.zeros_like(value))  # pyright: ignore[reportArgumentType]
            elif collection in scope.root._variables:
                raise ValueError(
                    f'The collection "{collection}" was given, but has no "{name}" for '
                    f"{self._where()}.\n"
                    "Fix: give all perturbations, as init returns them, or leave the collection "
                    "out."
                )
            else:
                return value
        return value + scope.get_variable(collection, name)


# ModuleBase itself is a dataclass like its subclasses, and holds its parent weakly.
dataclasses.dataclass(unsafe_hash=True, repr=False)(ModuleBase)
type.__setattr__(ModuleBase, "parent", ParentDescriptor())


class CompactNameScope(ModuleBase):
    """The submodules that a ``compact_name_scope`` method of a module makes.

    Args:
      fn: the method.
      module_fn: returns the module.
    """

    fn: Callable[..., Any]
    module_fn: Callable[[], Any]

    @compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method, with this module as the parent of those that it makes."""
        return self.fn(self.module_fn(), *args, **kwargs)
