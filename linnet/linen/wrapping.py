"""What a module class is made of: marks on methods, and wrappers around methods and properties."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from linnet.errors import (
    DescriptorAttributeError,
    MultipleMethodsCompactError,
    ReservedModuleAttributeError,
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


def compact(fun: F) -> F:
    """Marks the one method of a class in which submodules and variables are made where they are used.

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
      ...         return x * self.param("scale", nn.initializers.ones, (x.shape[-1],))
      >>> Scale().init(jax.random.key(0), jnp.ones((1, 2)))
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
    """

    @functools.wraps(fun)
    def in_own_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._state.name_scopes[fun.__name__](*args, **kwargs)

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
    annotations = cls.__dict__.get("__annotations__", {})
    if "parent" in annotations or "name" in annotations:
        raise ReservedModuleAttributeError(annotations)
    dataclasses.dataclass(
        cls, unsafe_hash="__hash__" not in cls.__dict__, repr=False, kw_only=kw_only
    )
    # The two are fields by keyword, so that their place in the signature is the end; here too.
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
                f"The {type(self).__name__} at {self.path or '()'} holds variables, and has no "
                "hash.\nFix: use the module before init, apply or bind, or module.unbind()[0]."
            )
        return hash_fn(self)

    hash_unbound.of_unbound = True  # pyright: ignore[reportAttributeAccessIssue]
    return hash_unbound


def wrap_attributes(cls: Any) -> None:
    """Wraps the methods and descriptors of a module class."""
    fields = {f.name for f in dataclasses.fields(cls)}
    for name, value in list(cls.__dict__.items()):
        if name in fields or name in _NEVER_WRAPPED:
            continue
        if inspect.isfunction(value):
            setattr(cls, name, wrap_method_once(value))
        elif _is_descriptor(value) and not name.startswith("__"):
            setattr(cls, name, DescriptorWrapper(value))


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The methods of a class and of its bases."""
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        if inspect.isfunction(value):
            yield name, value


def check_compact(cls: type) -> None:
    """Raises an error if more than one method of a class is compact."""
    if sum(hasattr(value, "compact") for _, value in methods_of(cls)) > 1:
        raise MultipleMethodsCompactError
