"""The state of a thread: the modules whose methods are running, interceptors, and logs of calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from linnet import config

if TYPE_CHECKING:
    from linnet.linen.module_base import ModuleBase

Interceptor = Callable[..., Any]


class DynamicContext(threading.local):
    """The stacks of one thread."""

    def __init__(self) -> None:
        # The module of each running method, outermost first; a new module gets the last as parent.
        self.module_stack: list[ModuleBase | None] = [None]
        # For each running init or apply, which outputs are sown into "intermediates".
        self.capture_stack: list[bool | Callable[[Any, str], bool]] = []
        # For each running summary, the calls that were made.
        self.call_info_stack: list[CallLog] = []
        self.interceptors: list[Interceptor] = []
        self.named_call: bool | None = None  # None: as the switch flax_profile says


context = DynamicContext()


@dataclasses.dataclass(frozen=True)
class InterceptorContext:
    """What an interceptor is told about the call it may change.

    Args:
      module: the module.
      method_name: the method.
      orig_method: the method itself, without interceptors.
    """

    module: ModuleBase
    method_name: str
    orig_method: Callable[..., Any]


@contextlib.contextmanager
def intercept_methods(interceptor: Interceptor) -> Iterator[None]:
    """Runs every method call of every module through a function, within a ``with`` block.

    Args:
      interceptor: a function ``(next_fun, args, kwargs, context)`` that is called in the place of
        each method. ``next_fun(*args, **kwargs)`` goes on with the call, ``context`` has the
        ``module``, the ``method_name`` and the ``orig_method``. What it returns is the output.
        Where ``with`` blocks are nested, the interceptor of the outermost is called first.

    Returns:
      A context manager.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> def loud(next_fun, args, kwargs, context):
      ...     print(context.module.path, context.method_name)
      ...     return next_fun(*args, **kwargs)
      >>> class Model(nn.Module):
      ...     def __call__(self, x):
      ...         return 2 * x
      >>> with nn.intercept_methods(loud):
      ...     Model().apply({}, 1)
      () __call__
      2
    """
    context.interceptors.append(interceptor)
    try:
        yield
    finally:
        context.interceptors.pop()


def run_interceptors(
    orig_method: Callable[..., Any], module: ModuleBase, *args: Any, **kwargs: Any
) -> Any:
    """Calls a method through the interceptors of this thread."""
    if not context.interceptors:
        return orig_method(*args, **kwargs)
    name = getattr(orig_method, "__name__", "unnamed_function")
    about = InterceptorContext(module, name, orig_method)
    call = orig_method
    for interceptor in reversed(context.interceptors):
        call = _Intercepted(interceptor, call, about)
    return call(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Intercepted:
    """A call of one interceptor, which goes on with the call by ``next_fun``."""

    interceptor: Interceptor
    next_fun: Callable[..., Any]
    about: InterceptorContext

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.interceptor(self.next_fun, args, kwargs, self.about)


# ---- names of modules in compiled programs ------------------------------------------------------


def enable_named_call() -> None:
    """Names the operations of each module in compiled programs, from here on. The default.

    Example:
      >>> from linnet import linen as nn
      >>> nn.enable_named_call()
    """
    context.named_call = True


def disable_named_call() -> None:
    """Leaves the names of modules out of compiled programs, from here on.

    Example:
      >>> from linnet import linen as nn
      >>> nn.disable_named_call()
      >>> nn.enable_named_call()
    """
    context.named_call = False


@contextlib.contextmanager
def override_named_call(enable: bool = True) -> Iterator[None]:
    """Sets for a ``with`` block whether compiled programs name the operations of each module.

    Args:
      enable: whether they do.

    Returns:
      A context manager.

    Example:
      >>> from linnet import linen as nn
      >>> with nn.override_named_call(False):
      ...     pass
    """
    before = context.named_call
    context.named_call = enable
    try:
        yield
    finally:
        context.named_call = before


def name_scope(
    module: ModuleBase, method: str, force: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """The named scope for a method of a module, if names are wanted."""
    named = config.flax_profile if context.named_call is None else context.named_call
    if not named and not force:
        return contextlib.nullcontext()
    name = module.name or type(module).__name__
    return jax.named_scope(name if method == "__call__" else f"{name}.{method}")


def named_call(class_fn: Callable[..., Any], force: bool = True) -> Callable[..., Any]:
    """Names the operations of a function of a module in compiled programs.

    The methods of a module have their names already, unless they are decorated with ``nn.nowrap``.

    Args:
      class_fn: a function whose first parameter is a module.
      force: name them also where ``disable_named_call`` was called.

    Returns:
      The function.

    Example:
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     @nn.nowrap
      ...     @nn.named_call
      ...     def double(self, x):
      ...         return 2 * x
      >>> Model().double(3)
      6
    """

    @functools.wraps(class_fn)
    def named(module: ModuleBase, *args: Any, **kwargs: Any) -> Any:
        with name_scope(module, class_fn.__name__, force):
            return class_fn(module, *args, **kwargs)

    return named


# ---- what a summary sees ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CallInfo:
    """One call of a method, for summaries."""

    index: int
    path: tuple[str, ...]
    module: ModuleBase
    rngs: Any
    mutable: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    variables: dict[str, Any]  # as the method sees them: a lifted transform may have sliced them


class CallLog:
    """The calls of one run, numbered in the order in which they began."""

    def __init__(self) -> None:
        self.begun = 0
        self.calls: list[CallInfo] = []

    def next_index(self) -> int:
        """The number of the call that begins."""
        self.begun += 1
        return self.begun - 1


@contextlib.contextmanager
def logged_calls() -> Iterator[CallLog]:
    """Logs the calls of all methods within a ``with`` block."""
    log = CallLog()
    context.call_info_stack.append(log)
    try:
        yield log
    finally:
        context.call_info_stack.pop()
