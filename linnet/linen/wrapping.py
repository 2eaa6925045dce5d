"""What a module class is made of: marks on methods, and wrappers around methods and properties."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from linnet.errors import (
    DescriptorAttributeError,
    ReservedModuleAttributeError,
    UnboundModuleError,
)

F = TypeVar("F", bound=Callable[..., Any])

# Methods that run while a module has no state yet, or that Python calls on its own.
_NEVER_WRAPPED = {
    "__new__",
    "__init__",
    "__post_init__",
    "__init_subclass__",
    "__class_getitem__",
    "__repr__",
    "__eq__",
    "__hash__",
    "__getattr__",
    "__getattribute__",
    "__setattr__",
    "__delattr__",
    "__getstate__",
    "__setstate__",
    "__reduce__",
    "__reduce_ex__",
    "__copy__",
    "__deepcopy__",
    "__replace__",
    "__dir__",
    "__sizeof__",
    "__annotate_func__",
}

_OWN_LAYERS = __name__.rpartition(".")[0] + "."


def compact(fun: F) -> F:
    """Marks a method in which submodules and variables are made where they are used.

    Args:
      fun: a method.

    Returns:
      The method.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, (x.shape[-1],))
      >>> Scale().init(jax.random.key(0), jnp.ones(2))
      {'params': {'scale': Array([1., 1.], dtype=float32)}}
    """
    fun.compact = True  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def nowrap(fun: F) -> F:
    """Leaves a method of a module as it is: no setup before it, no interceptors, no named scope.

    Args:
      fun: a method.

    Returns:
      The method.

    Example:
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     size: int = 3
      ...     @nn.nowrap
      ...     def doubled(self):
      ...         return 2 * self.size
      >>> Model().doubled()
      6
    """
    fun.nowrap = True  # pyright: ignore[reportFunctionMemberAccess]
    return fun


def compact_name_scope(fun: F) -> F:
    """Marks a method in which submodules are made where they are used, under the method's name.

    A class can have several such methods, beside its one ``@compact`` method.

    Args:
      fun: a method.

    Returns:
      The method.

    Raises:
      UnboundModuleError: the method is called on a module without variables.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return self.head(nn.Dense(4)(x))
      ...     @nn.compact_name_scope
      ...     def head(self, x):
      ...         return nn.Dense(2)(x)
      >>> variables = Model().init(jax.random.key(0), jnp.ones((1, 3)))
      >>> sorted(variables["params"]), sorted(variables["params"]["head"])
      (['Dense_0', 'head'], ['Dense_0'])
    """

    @functools.wraps(fun)
    def in_own_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._try_setup()
        own = self._state.name_scopes.get(fun.__name__)
        if own is None:
            raise UnboundModuleError(
                f"{type(self).__name__}.{fun.__name__} was called on a module without variables.\n"
                "Fix: call it through apply, init or bind."
            )
        if own._state.in_compact_method:  # from the method of a subclass that overrides this one
            return fun(self, *args, **kwargs)
        return own(*args, **kwargs)

    in_own_scope.compact_name_scope = True  # pyright: ignore[reportAttributeAccessIssue]
    in_own_scope.nowrap = True  # pyright: ignore[reportAttributeAccessIssue]
    in_own_scope.inner_fun = fun  # pyright: ignore[reportAttributeAccessIssue]
    return in_own_scope  # pyright: ignore[reportReturnType]


def wrap_method_once(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method so that a module knows of its calls; one that is wrapped stays as it is.

    Args:
      fun: a function whose first parameter is a module.

    Returns:
      The wrapped method.
    """
    if hasattr(fun, "method_handler_wrapped") or hasattr(fun, "nowrap"):
        return fun

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if args and hasattr(args[0], "_call_wrapped_method"):
            return args[0]._call_wrapped_method(fun, args[1:], kwargs)
        return fun(*args, **kwargs)

    wrapped.method_handler_wrapped = True  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped


class DescriptorWrapper:
    """A property or another descriptor of a module, before which setup has run."""

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        functools.update_wrapper(self, wrapped)  # pyright: ignore[reportArgumentType]

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self.wrapped.__get__(obj, owner)
        obj._try_setup()
        try:
            return self.wrapped.__get__(obj, owner)
        except AttributeError as error:
            # Python would call __getattr__ and then report that the property is missing.
            raise DescriptorAttributeError from error

    def __set__(self, obj: Any, value: Any) -> None:
        if not hasattr(self.wrapped, "__set__"):
            obj.__dict__[self.__name__] = value
        else:
            self.wrapped.__set__(obj, value)

    def __delete__(self, obj: Any) -> None:
        self.wrapped.__delete__(obj)

    def __set_name__(self, owner: type, name: str) -> None:
        if hasattr(self.wrapped, "__set_name__"):
            self.wrapped.__set_name__(owner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def _is_descriptor(value: Any) -> bool:
    return (
        not inspect.isfunction(value)
        and not isinstance(value, type | staticmethod | classmethod | DescriptorWrapper)
        and hasattr(type(value), "__get__")
        and not hasattr(value, "method_handler_wrapped")
        and not hasattr(value, "nowrap")
    )


def make_dataclass(cls: Any, kw_only: bool) -> None:
    """Makes a module class a dataclass whose last fields are ``parent`` and ``name``."""
    annotations = inspect.get_annotations(cls)
    if "parent" in annotations or "str" not in str(annotations.get("name", str)):
        raise ReservedModuleAttributeError(annotations)
    if "name" in annotations:  # a class may declare it again; the inherited field is kept
        cls.__annotations__ = {k: v for k, v in annotations.items() if k != "name"}
        if "name" in cls.__dict__:
            del cls.name
    dataclasses.dataclass(
        cls, unsafe_hash="__hash__" not in cls.__dict__, repr=False, kw_only=kw_only
    )
    # Both are keyword-only and so last in the signature; they are last among the fields too.
    fields = cls.__dataclass_fields__
    for name in ("parent", "name"):
        fields[name] = fields.pop(name)
    cls.__hash__ = _hash_of_unbound(cls.__hash__)


def _hash_of_unbound(hash_fn: Callable[[Any], int]) -> Callable[[Any], int]:
    if hasattr(hash_fn, "of_unbound"):
        return hash_fn

    @functools.wraps(hash_fn)
    def hash_unbound(self: Any) -> int:
        if self.scope is not None:
            raise TypeError(
                f"The {self._where()} holds variables, and has no hash.\n"
                "Fix: use the module before init, apply or bind, or module.unbind()[0]."
            )
        return hash_fn(self)

    hash_unbound.of_unbound = True  # pyright: ignore[reportAttributeAccessIssue]
    return hash_unbound


def wrap_attributes(cls: Any) -> None:
    """Wraps the methods and descriptors of a module class."""
    fields = {f.name for f in dataclasses.fields(cls)}
    # Private methods of Linnet's own layers stay unwrapped: interceptors and captured
    # intermediates do not see them.
    is_layer = cls.__module__.startswith(_OWN_LAYERS)
    for name, value in list(cls.__dict__.items()):
        if name in fields or name in _NEVER_WRAPPED:
            continue
        if is_layer and name.startswith("_") and not name.startswith("__"):
            continue
        if inspect.isfunction(value):
            setattr(cls, name, wrap_method_once(value))
        elif _is_descriptor(value) and not name.startswith("__"):
            setattr(cls, name, DescriptorWrapper(value))


@functools.cache
def name_scope_methods(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    """The methods of a class that are decorated with ``compact_name_scope``."""
    methods = ((name, inspect.getattr_static(cls, name)) for name in dir(cls))
    return [(name, m.inner_fun) for name, m in methods if hasattr(m, "inner_fun")]
