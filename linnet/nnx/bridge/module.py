"""Module: NNX objects that are written and run as Linen modules are.

A module is a dataclass that describes a layer. ``init`` and ``apply`` copy it, bind the copy to a
scope with random streams, and run one of its methods. Variables and submodules are attributes, as
in NNX, made in ``setup`` or in a method decorated with ``compact``.

Variables that ``apply`` was given are kept in the attribute ``given_variables``, in nested dicts,
until something of their name is made: a parameter, a submodule, an attribute that ``setup`` sets.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import jax

from linnet.core.filters import CollectionFilter
from linnet.errors import BridgeError
from linnet.frozen_dict import FrozenDict
from linnet.nnx.bridge.variables import (
    Path,
    as_position,
    linen_vars_to_nnx_attrs,
    put_at,
    to_linen_var,
    to_nnx_var,
)
from linnet.nnx.graphlib import clone
from linnet.nnx.modules.module import Module as NNXModule
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.objects import Pytree, PytreeMeta, data, dataclass, static
from linnet.nnx.rnglib.streams import Rngs, RngState
from linnet.nnx.variablelib.drawing import VariableMetadata
from linnet.nnx.variablelib.names import variable_name_from_type, variable_type_from_name
from linnet.nnx.variablelib.variable import Intermediate, Param, Perturbation, Variable

F = TypeVar("F", bound=Callable[..., Any])

GIVEN = "given_variables"


class AttrPriority(enum.IntEnum):
    """Which of the attributes that hold a Variable gives it its path: the lowest number does."""

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


# ---- what runs ----------------------------------------------------------------------------------


@dataclasses.dataclass
class ModuleStackEntry:
    """A running method: its module, and how many submodules of each class it has made."""

    module: Module
    in_compact: bool
    in_setup: bool = False
    type_counter: collections.defaultdict[type, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )

    def name_for(self, cls: type) -> str:
        """The next automatic name of a submodule: ``Dense_0``."""
        number = self.type_counter[cls]
        self.type_counter[cls] += 1
        return f"{cls.__name__}_{number}"


class ModuleContext(threading.local):
    """The running methods of one thread, outermost first."""

    def __init__(self) -> None:
        self.module_stack: list[ModuleStackEntry | None] = [None]


MODULE_CONTEXT = ModuleContext()


def current_context() -> ModuleStackEntry | None:
    """The running ``setup`` or compact method, or None."""
    return MODULE_CONTEXT.module_stack[-1]


def current_module() -> Module | None:
    """The module whose ``setup`` or compact method is running, or None.

    Example:
      >>> from linnet import nnx
      >>> nnx.bridge.current_module() is None
      True
    """
    entry = current_context()
    return None if entry is None else entry.module


def _run_in(entry: ModuleStackEntry, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    MODULE_CONTEXT.module_stack.append(entry)
    try:
        return fn(*args, **kwargs)
    finally:
        MODULE_CONTEXT.module_stack.pop()


def compact(f: F) -> F:
    """Marks a method in which submodules and variables are made where they are used.

    Args:
      f: the method.

    Returns:
      The method.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Scale(nnx.bridge.Module):
      ...     @nnx.bridge.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, (x.shape[-1],))
      >>> class Model(nnx.bridge.Module):
      ...     @nnx.bridge.compact
      ...     def __call__(self, x):
      ...         return Scale()(Scale()(x))
      >>> sorted(Model().init(0, jnp.ones(2))["params"])
      ['Scale_0', 'Scale_1']
    """

    @functools.wraps(f)
    def in_compact(self: Module, *args: Any, **kwargs: Any) -> Any:
        outer = current_context()
        if outer is not None and outer.module is self and outer.in_compact:
            # Called by a method of a subclass, whose automatic names it continues.
            return f(self, *args, **kwargs)
        return _run_in(ModuleStackEntry(self, in_compact=True), f, self, *args, **kwargs)

    return in_compact  # pyright: ignore[reportReturnType]


class Scope(Pytree):
    """What a bound module shares with the others of the same call.

    Args:
      rngs: the random streams.
      mutable: a filter of the collections that can be written, for Linen modules inside.
    """

    def __init__(self, rngs: Rngs, mutable: CollectionFilter):
        self.rngs = rngs
        self.mutable = static(mutable)
        self.initializing = False

    def copy(self) -> Scope:
        """A scope with the same random streams."""
        scope = Scope(self.rngs, self.mutable)
        scope.initializing = self.initializing
        return scope


# ---- variables that were given, and those that there are ----------------------------------------


def write_given(value: Any, given: Any) -> None:
    """Writes given Variables over those of an object, a container or a Variable."""
    if isinstance(value, Variable):
        if isinstance(given, Variable):
            value.set_raw_value(given.raw_value)
        return
    kind = kinds.kind_of(value)
    if not isinstance(given, dict) or kind in (kinds.STATIC, kinds.ARRAY):
        return
    if isinstance(value, Module):
        for name, variables in given.items():
            value._give(name, variables)
        return
    items = dict(kinds.items_of(value, kind))
    for key, new in given.items():
        place = key if key in items else as_position(key)
        if place in items:
            write_given(items[place], new)
        elif isinstance(value, Pytree):
            value._pytree_set(key, new)


def _bind_inside(value: Any, scope: Scope) -> None:
    """Binds the modules in an attribute that are not bound yet; each binds those inside of it."""
    for _, part in kinds.places(value, _outside_modules, plain=False, methods=False):
        if isinstance(part, Module) and part.scope is None:
            part._bind(scope)


def _outside_modules(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    return () if isinstance(value, Module) else kinds.items_of(value, kind)


def flat_of(value: Any) -> Iterator[tuple[Path, Any]]:
    """Every Variable below with its first path, by the priorities of attributes and their names."""
    seen: set[int] = set()
    for path, part in kinds.places(value, _by_priority, plain=False, methods=False):
        is_variable = isinstance(part, Variable) and not isinstance(part, RngState)
        if is_variable and id(part) not in seen:
            seen.add(id(part))
            yield path, part


def _by_priority(value: Any, kind: int) -> Iterator[tuple[Any, Any]]:
    """What an object or container holds; what a module was given counts as its attributes."""
    if isinstance(value, Scope):
        return
    items = dict(kinds.items_of(value, kind))
    rank = value.attr_priorities if isinstance(value, Module) else {}
    by_name = kinds.sort_keys(items)
    for key in sorted(by_name, key=lambda name: rank.get(name, AttrPriority.DEFAULT)):
        if isinstance(value, Module) and key == GIVEN:
            yield from _by_priority(items[key], kinds.DICT)
        else:
            yield key, items[key]


def nested_of(value: Any) -> dict[Any, Any]:
    """Every Variable below, in nested dicts."""
    nested: dict[Any, Any] = {}
    for path, variable in flat_of(value):
        put_at(nested, path, variable)
    return nested


def _set(module: Any, name: str, value: Any) -> None:
    """Sets an attribute as NNX does, without looking for modules in it."""
    Pytree.__setattr__(module, name, value)


# ---- modules ------------------------------------------------------------------------------------


class ModuleMeta(PytreeMeta):
    """The metaclass of modules: a module that a compact method makes gets its name at once."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        name = None
        if "name" not in getattr(cls, "__dataclass_fields__", ()):
            name = kwargs.pop("name", None)
        module = super().__call__(*args, **kwargs)
        entry = current_context()
        if entry is not None and entry.in_compact and entry.module.scope is not None:
            adopt(entry, module, cls, name)
        return module


def adopt(entry: ModuleStackEntry, module: Any, cls: type, name: str | None) -> None:
    """Makes a module an attribute of the running one, under a name or an automatic name."""
    name = entry.name_for(cls) if name is None else name
    parent = entry.module
    before = parent.__dict__.get(name)
    if kinds.kind_of(before) == kinds.OBJECT:  # made by an earlier call of the method
        parent._give(name, nested_of(before))
    setattr(parent, name, module)


@dataclass_transform(field_specifiers=(dataclasses.field, data, static), eq_default=False)
class Module(NNXModule, metaclass=ModuleMeta, pytree=False):
    """The base class of NNX models that are written as Linen modules.

    Fields are declared as in a dataclass. Submodules and variables are made in ``setup``, or in a
    method decorated with ``nnx.bridge.compact``; both are attributes.

    Args:
      *args: the fields.
      **kwargs: the fields; ``name`` names a module that a compact method makes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Affine(nnx.bridge.Module):
      ...     features: int
      ...     @nnx.bridge.compact
      ...     def __call__(self, x):
      ...         shape = (x.shape[-1], self.features)
      ...         return x @ self.param("kernel", jax.nn.initializers.ones, shape)
      >>> class Model(nnx.bridge.Module):
      ...     def setup(self):
      ...         self.first, self.second = Affine(2), Affine(1)
      ...     def __call__(self, x):
      ...         return self.second(self.first(x))
      >>> variables = Model().init(0, jnp.ones((1, 3)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'first': {'kernel': (3, 2)}, 'second': {'kernel': (2, 1)}}}
      >>> Model().apply(variables, jnp.ones((1, 3)))
      Array([[6.]], dtype=float32)
    """

    scope: ClassVar[Any] = None
    attr_priorities: ClassVar[Mapping[str, AttrPriority]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**{"pytree": False, **kwargs})
        own = [c for c in cls.__mro__ if issubclass(c, Module) and c is not Module]
        constructs = next((c for c in own if "__init__" in c.__dict__), None)
        is_generated = constructs is None or dataclasses.is_dataclass(constructs)
        if is_generated and "__init__" not in cls.__dict__:
            dataclass(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.scope is None or name in ("scope", GIVEN):
            _set(self, name, value)
            return
        entry = current_context()
        in_setup = entry is not None and entry.in_setup and entry.module is self
        # A Variable that is set after setup keeps its own value.
        if in_setup or not isinstance(value, Variable):
            write_given(value, self._pop_given(name))
        _set(self, name, value)
        _bind_inside(value, self.scope)

    def _give(self, name: str, variables: Any) -> None:
        """Keeps Variables that were given until an attribute of their name is made."""
        if isinstance(variables, Intermediate | Perturbation):  # sow adds to them
            _set(self, name, variables)
            return
        _set(self, GIVEN, {**self.__dict__.get(GIVEN, {}), name: variables})

    def _pop_given(self, name: str) -> Any:
        """Removes the Variables that were given under a name and returns them, or None."""
        given = self.__dict__.get(GIVEN, {})
        if name not in given:
            return None
        rest = {key: value for key, value in given.items() if key != name}
        if rest:
            _set(self, GIVEN, rest)
        else:
            delattr(self, GIVEN)
        return given[name]

    def _own_or_given(self, name: str) -> Any:
        """The Variable of a name, if the module has one or was given one."""
        if name not in self.__dict__ and isinstance(
            self.__dict__.get(GIVEN, {}).get(name), Variable
        ):
            _set(self, name, self._pop_given(name))
        found = self.__dict__.get(name)
        return found if isinstance(found, Variable) else None

    def _bind(self, scope: Scope) -> None:
        """Gives a module its scope, its attributes their variables, and runs setup."""
        held = dict(self.__dict__)
        held.pop(GIVEN, None)
        _set(self, "scope", scope.copy())
        entry = ModuleStackEntry(self, in_compact=False, in_setup=True)
        for name, value in held.items():
            if kinds.kind_of(value) not in (kinds.STATIC, kinds.ARRAY):
                _run_in(entry, setattr, self, name, value)
        setup = getattr(self, "setup", None)
        if setup is not None:
            _run_in(entry, setup)

    def _bound_scope(self) -> Scope:
        if self.scope is None:
            raise BridgeError(
                f"Can't use RNGs on unbound modules: a {type(self).__name__} has none outside of "
                "init and apply.\nFix: call the method through module.apply(variables, ..., "
                "rngs=...), or make the module in setup or in a method with @nnx.bridge.compact."
            )
        return self.scope

    def set_attr_priority(self, name: str, value: AttrPriority) -> None:
        """Says which attribute gives a Variable its path, where several hold it.

        Args:
          name: the attribute.
          value: its priority; by default ``AttrPriority.DEFAULT``.
        """
        _set(self, "attr_priorities", {**self.attr_priorities, name: value})

    # ---- variables ------------------------------------------------------------------------------

    def make_rng(self, name: str = "default") -> jax.Array:
        """Draws a new key from a random stream.

        Args:
          name: the stream; one that does not exist falls back to ``default``.

        Returns:
          The key.

        Raises:
          BridgeError: the module is not bound.
          KeyError: there is no such stream and no default.
        """
        return self._bound_scope().rngs[name]()

    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Param[Any]:
        """A parameter, made if it was not given.

        Args:
          name: the attribute.
          init_fn: makes its first value from a random key.
          *init_args: further positional arguments of ``init_fn``.
          unbox: makes no difference: a value in a box becomes a Param with metadata.
          **init_kwargs: keyword arguments of ``init_fn``.

        Returns:
          The Param.

        Raises:
          BridgeError: the module is not bound.
          KeyError: the parameter was not given, and there is no random stream to make it.
        """
        return self._made(
            "params", name, lambda: init_fn(self.make_rng("params"), *init_args, **init_kwargs)
        )

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[Any]:
        """A Variable of the type that a collection stands for, made if it was not given.

        Args:
          col: the collection.
          name: the attribute.
          init_fn: makes its first value.
          *init_args: positional arguments of ``init_fn``.
          unbox: makes no difference: a value in a box becomes a Variable with metadata.
          **init_kwargs: keyword arguments of ``init_fn``.

        Returns:
          The Variable.

        Raises:
          BridgeError: the module is not bound, or there is neither a value nor ``init_fn``.
        """
        make = None if init_fn is None else functools.partial(init_fn, *init_args, **init_kwargs)
        return self._made(col, name, make)

    def _made(self, col: str, name: str, make: Callable[[], Any] | None) -> Any:
        what = f'{col} "{name}" of a {type(self).__name__}'
        if self.scope is None:
            raise BridgeError(
                "Parameters must be initialized in `setup()` or in a method wrapped in "
                f"`@compact`: the {what} was asked for outside of init and apply.\n"
                "Fix: call module.init(rngs, ...) and module.apply(variables, ...); make "
                "submodules in setup or in a method with @nnx.bridge.compact."
            )
        if self._own_or_given(name) is None:
            if make is None:
                raise BridgeError(
                    f"The {what} was not given, and has no init_fn to make it.\n"
                    f"Fix: pass a function that makes the value, or variables with {col!r}."
                )
            value = make()
            if isinstance(value, VariableMetadata):
                variable = variable_type_from_name(col, allow_register=True)(value)
            else:
                variable = to_nnx_var(col, value)
            _set(self, name, variable)
        return self.__dict__[name]

    def _collections(self) -> dict[str, Any]:
        collections: dict[str, Any] = {}
        for path, variable in flat_of(self):
            col = variable_name_from_type(type(variable), allow_register=True)
            put_at(collections.setdefault(col, {}), path, to_linen_var(variable))
        return collections

    @property
    def variables(self) -> FrozenDict[str, Any]:
        """All Variables, as Linen's collections."""
        return FrozenDict(self._collections())

    def is_initializing(self) -> bool:
        """Whether this call is one of ``init``."""
        return self.scope is not None and self.scope.initializing

    # ---- running --------------------------------------------------------------------------------

    def bind(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        mutable: CollectionFilter = False,
        _initialize: bool = False,
    ) -> Self:
        """A copy that holds variables, whose methods and submodules can be used directly.

        Args:
          variables: the collections.
          *args: not used.
          rngs: random streams: a seed, a key, a dict of them, or ``nnx.Rngs``.
          mutable: a filter of the collections that Linen modules inside can write.

        Returns:
          The bound copy.
        """
        module = clone(self, graph=True)
        if "scope" in module.__dict__:
            delattr(module, "scope")
        scope = Scope(rngs if isinstance(rngs, Rngs) else Rngs(rngs), mutable)
        scope.initializing = _initialize
        write_given(module, linen_vars_to_nnx_attrs(variables))
        module._bind(scope)
        return module

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        method: Callable[..., Any] | str = "__call__",
        mutable: CollectionFilter = False,
        _initialize: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs a method on variables.

        Args:
          variables: the collections.
          *args: positional arguments of the method.
          rngs: random streams: a seed, a key, a dict of them, or ``nnx.Rngs``.
          method: the method, or its name, or a function of the module.
          mutable: a filter of the collections that Linen modules inside can write.
          **kwargs: keyword arguments of the method.

        Returns:
          What the method returns; if ``mutable`` is not False, with all collections.
        """
        module = self.bind(variables, rngs=rngs, mutable=mutable, _initialize=_initialize)
        run = getattr(type(module), method) if isinstance(method, str) else method
        entry = ModuleStackEntry(module, in_compact=False)
        out = _run_in(entry, getattr(run, "__func__", run), module, *args, **kwargs)
        return out if mutable is False else (out, module._collections())

    def init_with_output(
        self,
        rngs: Any = None,
        *args: Any,
        method: Callable[..., Any] | str = "__call__",
        mutable: Any = True,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Makes the variables, and returns the method's output with them.

        Args:
          rngs: random streams: a seed, a key, a dict of them, or ``nnx.Rngs``.
          *args: positional arguments of the method.
          method: the method, or its name, or a function of the module.
          mutable: a filter of the collections that Linen modules inside can write.
          **kwargs: keyword arguments of the method.

        Returns:
          What the method returns, and the collections.
        """
        mutable = True if mutable is False else mutable
        return self.apply(
            {}, *args, rngs=rngs, method=method, mutable=mutable, _initialize=True, **kwargs
        )

    def init(
        self,
        rngs: Any = None,
        *args: Any,
        method: Callable[..., Any] | str = "__call__",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Makes the variables, by running a method on example arguments.

        Args:
          rngs: random streams: a seed, a key, a dict of them, or ``nnx.Rngs``.
          *args: positional arguments of the method.
          method: the method, or its name, or a function of the module.
          **kwargs: keyword arguments of the method.

        Returns:
          The collections, as nested dicts.
        """
        return self.init_with_output(rngs, *args, method=method, **kwargs)[1]
