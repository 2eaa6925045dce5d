"""Module: the base class of Linen models, and functions of a module as functions of variables.

A module is a frozen dataclass that describes a layer. It has no variables of its own: ``init`` and
``apply`` copy it, bind the copy to a scope (``core.scope``) and run one of its methods.
``module_base`` tells how a module comes to its scope.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from linnet import core
from linnet.core.scope import (
    CollectionFilter as CollectionFilter,
    DenyList as DenyList,
    FrozenVariableDict as FrozenVariableDict,
    PRNGKey as PRNGKey,
    RNGSequences as RNGSequences,
    Scope as Scope,
    Variable as Variable,
    VariableDict as VariableDict,
    union_filters as union_filters,
)
from linnet.errors import (
    ApplyModuleInvalidMethodError,
    CallShareScopeOnUnboundModuleError,
    CallUnbindOnUnboundModuleError,
    IncorrectPostInitOverrideError,
    InvalidInstanceModuleError,
    NameInUseError,
)
from linnet.linen import summary
from linnet.linen.context import (
    InterceptorContext as InterceptorContext,
    context as _context,
    disable_named_call as disable_named_call,
    enable_named_call as enable_named_call,
    intercept_methods as intercept_methods,
    override_named_call as override_named_call,
    run_interceptors as run_interceptors,
)
from linnet.linen.module_base import (
    CompactNameScope as CompactNameScope,
    ModuleBase as ModuleBase,
    tuple_init as tuple_init,
    tuple_reduce as tuple_reduce,
)
from linnet.linen.submodules import is_module
from linnet.linen.summary import NO_INTERMEDIATES, NO_OPTIONS
from linnet.linen.wrapping import (
    compact as compact,
    compact_name_scope as compact_name_scope,
    nowrap as nowrap,
    wrap_method_once as wrap_method_once,
)

M = TypeVar("M", bound="Module")
T = TypeVar("T")


class Module(ModuleBase, wrap=False):
    """The base class of Linen models: a dataclass that describes a layer.

    Fields are declared as in a dataclass; ``parent`` and ``name`` are added. Submodules and
    variables are made in ``setup``, or in one method decorated with ``@nn.compact``.

    Args:
      *args, **kwargs: the fields.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Affine(nn.Module):
      ...     features: int
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         shape = (x.shape[-1], self.features)
      ...         kernel = self.param("kernel", jax.nn.initializers.ones, shape)
      ...         return x @ kernel
      >>> class Model(nn.Module):
      ...     def setup(self):
      ...         self.layers = [Affine(2), Affine(1)]
      ...     def __call__(self, x):
      ...         for layer in self.layers:
      ...             x = layer(x)
      ...         return x
      >>> model, x = Model(), jnp.ones((1, 3))
      >>> variables = model.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'layers_0': {'kernel': (3, 2)}, 'layers_1': {'kernel': (2, 1)}}}
      >>> model.apply(variables, x)
      Array([[6.]], dtype=float32)
    """

    def bind(
        self: M,
        variables: VariableDict,
        *args: Any,
        rngs: Any = None,
        mutable: CollectionFilter = False,
    ) -> M:
        """A copy that holds variables, whose methods and submodules can be used directly.

        Args:
          variables: the collections.
          *args: not used.
          rngs: a random key for each stream.
          mutable: a filter of the collections that can be written.

        Returns:
          The bound copy.

        Example:
          >>> import jax
          >>> from linnet import linen as nn
          >>> class Scale(nn.Module):
          ...     def setup(self):
          ...         self.scale = self.param("scale", jax.nn.initializers.ones, ())
          >>> float(Scale().bind({"params": {"scale": 3.0}}).scale)
          3.0
        """
        _check_instance(self)
        scope = core.bind(variables, rngs=rngs, mutable=mutable)
        return self.clone(parent=scope, _deep_clone=True)

    def unbind(self: M) -> tuple[M, VariableDict]:
        """The opposite of ``bind``: a copy without variables, and the variables.

        Returns:
          The copy, and the collections.

        Raises:
          CallUnbindOnUnboundModuleError: the module holds no variables.
        """
        if self.scope is None:
            raise CallUnbindOnUnboundModuleError
        variables = self.variables
        return self.clone(_deep_clone=True, _reset_names=True, name=None), variables

    # ---- running --------------------------------------------------------------------------------

    def apply(
        self,
        variables: VariableDict,
        *args: Any,
        rngs: Any = None,
        method: Callable[..., Any] | str | None = None,
        mutable: CollectionFilter = False,
        capture_intermediates: bool | Callable[[Module, str], bool] = False,
        **kwargs: Any,
    ) -> Any:
        """Runs a method on variables.

        Args:
          variables: the collections.
          *args, **kwargs: arguments of the method.
          rngs: a random key for each stream, or one for ``params``.
          method: the method, or its name, or a function of the module; by default ``__call__``.
          mutable: a filter of the collections that can be written.
          capture_intermediates: keep the output of every ``__call__``, or of the methods for which
            a function ``(module, method_name)`` is true, in the collection ``intermediates``.

        Returns:
          What the method returns; if ``mutable`` is not False, with the collections that could be
          written.

        Raises:
          ApplyModuleInvalidMethodError: ``method`` is no function of a module.

        Example:
          >>> from linnet import linen as nn
          >>> class Count(nn.Module):
          ...     def setup(self):
          ...         self.n = self.variable("counts", "n", lambda: 0)
          ...     def __call__(self):
          ...         self.n.value += 1
          ...         return self.n.value
          >>> Count().apply({"counts": {"n": 2}}, mutable=["counts"])
          (3, {'counts': {'n': 3}})
        """
        fn = _method_of(self, method)
        run = apply(fn, self, mutable=mutable, capture_intermediates=capture_intermediates)
        return run(variables, *args, **kwargs, rngs=rngs)

    def init_with_output(
        self,
        rngs: Any,
        *args: Any,
        method: Callable[..., Any] | str | None = None,
        mutable: CollectionFilter = NO_INTERMEDIATES,
        capture_intermediates: bool | Callable[[Module, str], bool] = False,
        **kwargs: Any,
    ) -> Any:
        """Makes the variables, and returns the method's output with them.

        Args:
          rngs, *args, method, capture_intermediates, **kwargs: as for ``apply``.
          mutable: a filter of the collections to make.

        Returns:
          What the method returns, and the collections.
        """
        fn = _method_of(self, method)
        run = init_with_output(
            fn, self, mutable=mutable, capture_intermediates=capture_intermediates
        )
        return run(rngs, *args, **kwargs)

    def init(
        self,
        rngs: Any,
        *args: Any,
        method: Callable[..., Any] | str | None = None,
        mutable: CollectionFilter = NO_INTERMEDIATES,
        capture_intermediates: bool | Callable[[Module, str], bool] = False,
        **kwargs: Any,
    ) -> Any:
        """Makes the variables, by running a method on example arguments.

        Args:
          rngs, *args, method, capture_intermediates, **kwargs: as for ``apply``.
          mutable: a filter of the collections to make.

        Returns:
          The collections, as nested dicts.
        """
        fn = _method_of(self, method)
        run = init(fn, self, mutable=mutable, capture_intermediates=capture_intermediates)
        return run(rngs, *args, **kwargs)

    def lazy_init(
        self,
        rngs: Any,
        *args: Any,
        method: Callable[..., Any] | str | None = None,
        mutable: CollectionFilter = NO_INTERMEDIATES,
        **kwargs: Any,
    ) -> Any:
        """As ``init``, without computing anything that the variables do not need.

        Args:
          rngs, method, mutable, **kwargs: as for ``init``.
          *args: positional arguments of the method, with a ``jax.ShapeDtypeStruct`` for arrays.

        Returns:
          The collections, as nested dicts.

        Raises:
          LazyInitError: a variable depends on an argument that has no values.
        """
        fn = _method_of(self, method)
        run = core.lazy_init(_in_scope(fn, self, False), mutable=mutable)
        return run(rngs, *args, **kwargs)

    # ---- summaries ------------------------------------------------------------------------------

    def tabulate(
        self,
        rngs: Any,
        *args: Any,
        depth: int | None = None,
        show_repeated: bool = False,
        mutable: CollectionFilter = NO_INTERMEDIATES,
        console_kwargs: Mapping[str, Any] | None = None,
        table_kwargs: Mapping[str, Any] = NO_OPTIONS,
        column_kwargs: Mapping[str, Any] = NO_OPTIONS,
        compute_flops: bool = False,
        compute_vjp_flops: bool = False,
        **kwargs: Any,
    ) -> str:
        """A table of the modules, what goes in and out of them, what they hold and cost.

        Args:
          rngs, depth, show_repeated, mutable, console_kwargs, table_kwargs, column_kwargs,
            compute_flops, compute_vjp_flops: as for ``linen.tabulate``.
          *args, **kwargs: what the model is called with.

        Returns:
          The text of the table.
        """
        table = summary.tabulate(
            self,
            rngs,
            depth=depth,
            show_repeated=show_repeated,
            mutable=mutable,
            console_kwargs=console_kwargs,
            table_kwargs=table_kwargs,
            column_kwargs=column_kwargs,
            compute_flops=compute_flops,
            compute_vjp_flops=compute_vjp_flops,
        )
        return table(*args, **kwargs)

    def module_paths(
        self,
        rngs: Any,
        *args: Any,
        show_repeated: bool = False,
        mutable: CollectionFilter = NO_INTERMEDIATES,
        **kwargs: Any,
    ) -> dict[str, Module]:
        """The modules that a call of the model runs, by their paths.

        Args:
          rngs, mutable, *args, **kwargs: as for ``tabulate``.
          show_repeated: go over every call of a module, not the first one alone.

        Returns:
          Copies of the modules by paths such as ``encoder/Dense_0``; the model itself is ``""``.
        """
        kwargs["mutable"] = mutable
        rows = summary.module_table(self, rngs, args, kwargs, show_repeated=show_repeated)
        return {"/".join(row.path): row.module_copy for row in rows}


def _check_instance(module: Any) -> None:
    if not isinstance(module, Module):
        raise InvalidInstanceModuleError
    if "_id" not in module.__dict__:
        raise IncorrectPostInitOverrideError


def _method_of(module: Any, method: Any) -> Callable[..., Any]:
    """The function of a module that ``method=`` stands for."""
    _check_instance(module)
    if method is None:
        method = "__call__"
    if isinstance(method, str):
        found = getattr(module, method)
        if not callable(found):
            raise TypeError(
                f"{type(module).__name__}.{method} is no method, but {type(found).__name__}."
            )
        method = found
    return unbound_function(method)


def unbound_function(method: Any) -> Callable[..., Any]:
    """The function of a module that a method, bound or not, or a function stands for."""
    if inspect.ismethod(method) and is_module(method.__self__):
        method = method.__func__
    if not callable(method):
        raise ApplyModuleInvalidMethodError(method)
    with contextlib.suppress(ValueError):
        if not inspect.signature(method).parameters:
            raise ApplyModuleInvalidMethodError(method)
    return method


# ---- functions of a module as functions of variables --------------------------------------------


def capture_call_intermediates(module: Module, method_name: str) -> bool:
    """The filter of ``capture_intermediates=True``: outputs of ``__call__``."""
    return method_name == "__call__"


def _in_scope(
    fn: Callable[..., Any],
    module: Module,
    capture: bool | Callable[[Module, str], bool],
) -> Callable[..., Any]:
    """Makes a function of a module one of a scope, to which it binds a copy of the module."""
    wanted = capture_call_intermediates if capture is True else capture

    @functools.wraps(fn)
    def in_scope(scope: Scope, *args: Any, **kwargs: Any) -> Any:
        _context.capture_stack.append(wanted)
        try:
            return fn(module.clone(parent=scope, _deep_clone=True), *args, **kwargs)
        finally:
            _context.capture_stack.pop()

    return in_scope


def apply(
    fn: Callable[..., Any],
    module: Module,
    mutable: CollectionFilter = False,
    capture_intermediates: bool | Callable[[Module, str], bool] = False,
) -> Callable[..., Any]:
    """Makes a function of a module a function of variables.

    Args:
      fn: a function whose first parameter is the module.
      module: the module.
      mutable: a filter of the collections that can be written.
      capture_intermediates: as for ``Module.apply``.

    Returns:
      A function of variables, the other arguments, and ``rngs``.

    Example:
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     def double(self, x):
      ...         return 2 * x
      >>> nn.apply(lambda model, x: model.double(x) + 1, Model())({}, 3)
      7
    """
    if capture_intermediates:
        mutable = union_filters(mutable, "intermediates")
    return core.apply(_in_scope(fn, module, capture_intermediates), mutable=mutable)


def init_with_output(
    fn: Callable[..., Any],
    module: Module,
    mutable: CollectionFilter = NO_INTERMEDIATES,
    capture_intermediates: bool | Callable[[Module, str], bool] = False,
) -> Callable[..., Any]:
    """Makes a function of a module a function that makes its variables.

    Args:
      fn: a function whose first parameter is the module.
      module: the module.
      mutable: a filter of the collections to make.
      capture_intermediates: as for ``Module.apply``.

    Returns:
      A function of random keys and the other arguments, that returns what ``fn`` returns and the
      collections.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> make = nn.init_with_output(lambda dense, x: 2 * dense(x), nn.Dense(3))
      >>> y, variables = make(jax.random.key(0), jnp.ones((1, 2)))
      >>> y.shape, sorted(variables["params"])
      ((1, 3), ['bias', 'kernel'])
    """
    if capture_intermediates:
        mutable = union_filters(mutable, "intermediates")
    return core.init(_in_scope(fn, module, capture_intermediates), mutable=mutable)


def init(
    fn: Callable[..., Any],
    module: Module,
    mutable: CollectionFilter = NO_INTERMEDIATES,
    capture_intermediates: bool | Callable[[Module, str], bool] = False,
) -> Callable[..., Any]:
    """As ``init_with_output``, for the collections alone.

    Args:
      fn, module, mutable, capture_intermediates: as for ``init_with_output``.

    Returns:
      A function of random keys and the other arguments, that returns the collections.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> make = nn.init(lambda dense, x: dense(x), nn.Dense(3))
      >>> make(jax.random.key(0), jnp.ones((1, 2)))["params"]["kernel"].shape
      (2, 3)
    """
    run = init_with_output(fn, module, mutable, capture_intermediates)

    @functools.wraps(run)
    def collections(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)[1]

    return collections


def merge_param(name: str, a: T | None, b: T | None) -> T:
    """One value from a field and an argument of which exactly one is given.

    Args:
      name: what the value is called.
      a: the one value, or None.
      b: the other, or None.

    Returns:
      The one that is not None.

    Raises:
      ValueError: both or none are given.

    Example:
      >>> from linnet import linen as nn
      >>> nn.merge_param("deterministic", None, True)
      True
    """
    if a is None and b is None:
        raise ValueError(
            f"Parameter `{name}` must be passed to the constructor or at call time.\n"
            f"Fix: give {name}= in one of the two places."
        )
    if a is not None and b is not None:
        raise ValueError(
            f"Parameter `{name}` was passed to the constructor ({a!r}) and at call time ({b!r}).\n"
            f"Fix: give {name}= in one of the two places."
        )
    return a if a is not None else b  # pyright: ignore[reportReturnType]


def share_scope(module: Module, other: Module, /) -> None:
    """Makes two modules share one scope, so that their variables stand side by side.

    If ``other`` is inside of ``module``, its variables move up to those of ``module``, as if
    ``module`` had made them. Otherwise the variables of ``module`` move to those of ``other``.

    Args:
      module: a bound module.
      other: another bound module.

    Raises:
      CallShareScopeOnUnboundModuleError: one of the two is not bound.
      NameInUseError: both have something of the same name.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, ())
      >>> class Shifted(nn.Module):
      ...     base: nn.Module
      ...     def setup(self):
      ...         nn.share_scope(self, self.base)
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return self.base(x) + self.param("shift", jax.nn.initializers.zeros, ())
      >>> sorted(Shifted(Scale()).init(jax.random.key(0), 1.0)["params"])
      ['scale', 'shift']
    """
    if module.scope is None or other.scope is None:
        raise CallShareScopeOnUnboundModuleError
    depth = len(module.scope.path)
    is_inside = len(other.scope.path) > depth and other.scope.path[:depth] == module.scope.path
    if is_inside:
        _move(other, module.scope)
    elif other.scope is not module.scope:
        _move(module, other.scope)


def _move(module: Module, scope: Scope) -> None:
    """Gives a module another scope, and the modules that it made scopes below that."""
    old = module.scope
    object.__setattr__(module, "scope", scope)
    if old.parent is not None:
        old.parent.reservations[old.name].discard(None)
    for name, child in module._state.children.items():
        if is_module(child) and child.scope.path == (*old.path, name):
            if scope.name_reserved(name):
                raise NameInUseError("submodule", name, module._where())
            _move(child, scope.push(name))
