"""How modules go through a lifted transform.

A lifted class is a subclass whose methods run on a copy: the modules of a call - the one whose
method it is, those in its fields, those among the arguments - are exchanged for copies bound to the
scopes inside the transform (``ModuleCall``). ``core.packing`` tells what happens to the scopes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from linnet.core.packing import StaticResult
from linnet.core.rng import LazyRng
from linnet.core.scoping import Variable
from linnet.errors import TransformedMethodReturnValueError, TransformTargetError
from linnet.linen.context import context
from linnet.linen.module import Module
from linnet.linen.submodules import is_module, map_modules, named_modules

Apply = Callable[..., Any]  # (*functions of scopes, scopes, *args) -> result

# ---- modules inside a transform -----------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """Stands among arguments for a module or a Variable; a pytree without leaves."""

    number: int


def _is_bound(value: Any) -> bool:
    return is_module(value) or isinstance(value, Variable)


def _fields_of(module: Module) -> dict[str, Any]:
    return {
        f.name: getattr(module, f.name)
        for f in dataclasses.fields(module)  # pyright: ignore[reportArgumentType]
        if f.init and f.name not in ("parent", "name")
    }


class ModuleCall:
    """The modules of one call of a lifted function, and the arguments without them.

    Args:
      target: the module, or a pytree of modules, that the function is called with.
      args: positional arguments.
      kwargs: keyword arguments.
      cls: the class that the target has inside; by default its own.
    """

    def __init__(self, target: Any, args: Any, kwargs: Any, cls: type | None = None):
        self.objects: list[Any] = []  # by the number of their placeholder
        self.modules: dict[Any, Module] = {}
        self.cls = cls
        self.target, self.args, self.kwargs = jax.tree.map(
            self._with_placeholder, (target, args, kwargs), is_leaf=_is_bound
        )
        owners = [x for x in self.objects if isinstance(x, Variable)] + list(self.modules.values())
        # The target comes first: gradients are taken with respect to its variables.
        self.bound = [x for x in owners if x.scope is not None]
        self.bound.sort(key=lambda x: x is not target)
        self.scopes = [x.scope for x in self.bound]
        self.cursors: list[dict[str, int]] | None = None

    def _with_placeholder(self, leaf: Any) -> Any:
        if not _is_bound(leaf):
            return leaf
        self._collect(leaf)
        self.objects.append(leaf)
        return Placeholder(len(self.objects) - 1)

    def _collect(self, value: Any) -> None:
        if is_module(value) and value._id not in self.modules:
            self.modules[value._id] = value
            for field in _fields_of(value).values():
                for _, module in named_modules(field):
                    self._collect(module)

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of modules as one of the scopes inside."""

        @functools.wraps(fn)
        def in_scopes(scopes: Any, *args: Any, **kwargs: Any) -> Any:
            inside = _InnerModules(self, dict(zip(map(id, self.bound), scopes, strict=True)))
            target, args, kwargs = jax.tree.map(
                inside.exchange,
                (self.target, args, kwargs),
                is_leaf=lambda x: isinstance(x, Placeholder),
            )
            with _running(target):
                y = fn(target, *args, **kwargs)
            if any(map(_is_bound, jax.tree.leaves(y, is_leaf=_is_bound))):
                raise TransformedMethodReturnValueError(getattr(fn, "__name__", repr(fn)))
            self.cursors = inside.cursors()
            return y

        return in_scopes

    @contextlib.contextmanager
    def own_keys(self) -> Iterator[None]:
        """Gives the target, for a ``with`` block, keys that were drawn for it by its path."""
        found = jax.tree.leaves(self.target, is_leaf=lambda x: isinstance(x, Placeholder))
        objects = (self.objects[x.number] for x in found if isinstance(x, Placeholder))
        scopes = {id(x.scope): x.scope for x in objects if x.scope is not None}.values()
        before = [scope.rngs for scope in scopes]
        try:
            for scope in scopes:
                scope.rngs = {name: LazyRng(scope.make_rng(name), ()) for name in scope.rngs}
            yield
        finally:
            for scope, rngs in zip(scopes, before, strict=True):
                scope.rngs = rngs

    def finish(self, cursors: Any = None) -> None:
        """Lets automatic names outside continue after those that were given inside."""
        found = self.cursors if cursors is None else [dict(cursor) for cursor in cursors]
        for module, cursor in zip(self.modules.values(), found or (), strict=False):
            module._state.autoname_cursor.update(cursor)

    def cache_key(self) -> Hashable:
        """A cache key: what a trace depends on, beside scopes and arrays.

        It equals no other key where a field of a module cannot be hashed.
        """
        numbers = {key: number for number, key in enumerate(self.modules)}
        modules = tuple(
            (
                type(module),
                module.name,
                module._state.in_compact_method,
                tuple(module._state.autoname_cursor.items()),
                tuple((k, _field_key(v, numbers)) for k, v in _fields_of(module).items()),
            )
            for module in self.modules.values()
        )
        places = tuple(
            numbers[x._id] if is_module(x) else (x.collection, x.name, x.unbox)
            for x in self.objects
        )
        watched = (tuple(map(id, context.interceptors)), *context.capture_stack[-1:])
        return jax.tree.structure(self.target), modules, places, watched


class _InnerModules:
    """Copies of the modules of a call, bound to scopes inside a transform."""

    def __init__(self, call: ModuleCall, scopes: dict[int, Any]):
        self.call, self.scopes = call, scopes
        self.copies: dict[Any, Module] = {}

    def exchange(self, leaf: Any) -> Any:
        if not isinstance(leaf, Placeholder):
            return leaf
        value = self.call.objects[leaf.number]
        if is_module(value):
            return self.copy(value)
        return Variable(self.scopes[id(value)], value.collection, value.name, value.unbox)

    def copy(self, module: Any) -> Any:
        if module._id not in self.copies:
            fields = {k: map_modules(self.copy, v) for k, v in _fields_of(module).items()}
            is_target = self.call.cls is not None and module is self.call.objects[0]
            cls: Any = self.call.cls if is_target else type(module)
            scope = self.scopes.get(id(module))
            inner = cls(**fields, parent=scope, name=module.name)
            inner._state.in_compact_method = module._state.in_compact_method
            inner._state.autoname_cursor = dict(module._state.autoname_cursor)
            self.copies[module._id] = inner
        return self.copies[module._id]

    def cursors(self) -> list[dict[str, int]]:
        made = (self.copies.get(key) for key in self.call.modules)
        return [dict(inner._state.autoname_cursor) if inner else {} for inner in made]


@contextlib.contextmanager
def _running(target: Any) -> Iterator[None]:
    """A region in which new modules have the target as their parent."""
    context.module_stack.append(target if is_module(target) else None)
    try:
        yield
    finally:
        context.module_stack.pop()


class _Unknown:
    """Part of a cache key for a value that cannot be hashed; equal to nothing else."""


def _field_key(value: Any, numbers: Mapping[Any, int]) -> Hashable:
    """A field of a module as a part of a cache key; modules in it as their numbers."""
    if is_module(value):
        return ("module", numbers[value._id])
    if isinstance(value, list | tuple):
        return (type(value), *(_field_key(item, numbers) for item in value))
    if isinstance(value, Mapping):
        return (type(value), *((k, _field_key(item, numbers)) for k, item in value.items()))
    try:
        hash(value)
    except TypeError:
        return _Unknown()
    return (type(value), value)


def call_directly(apply: Apply, fns: Sequence[Callable[..., Any]], target: Any, args: Any) -> Any:
    """Calls a transform on functions of a module."""
    call = ModuleCall(target, args, {})
    y = apply(*map(call.function, fns), call.scopes, *call.args)
    call.finish()
    return y


# ---- classes and functions ----------------------------------------------------------------------


def _lifted_from(cls: type) -> dict[Any, Any]:
    """The lifted classes that were made from a class, by key; kept as an attribute of the class."""
    if "__linnet_lifted__" not in vars(cls):
        setattr(cls, "__linnet_lifted__", {})  # noqa: B010
    return vars(cls)["__linnet_lifted__"]


def _key(transform: Any, *options: Any) -> Hashable:
    """The cache key of a lifted class, or None for a class that is not cached.

    It is not cached where an option is a function: a program may make a new one for each call.
    """
    try:
        key = (transform, _option_key(options))
        hash(key)
    except TypeError:
        return None
    return key


def _option_key(value: Any) -> Any:
    """An option as a part of a cache key; refuses functions."""
    if callable(value):
        raise TypeError
    if isinstance(value, Mapping):
        return tuple((_option_key(key), _option_key(item)) for key, item in value.items())
    return (
        tuple(map(_option_key, value)) if isinstance(value, list | tuple) else (type(value), value)
    )


def lift_target(
    transform: Callable[..., Any],
    target: Any,
    options: Mapping[str, Any],
    methods: Any = None,
    name: str | None = None,
    run: Callable[..., Any] | None = None,
) -> Any:
    """Lifts a module class, or a function whose first argument is a module.

    ``transform(fn, **options)`` is a function of scopes; ``run``, if given, makes the whole call.
    """
    name = name or transform.__name__

    def lifted_call(fn: Callable[..., Any], own: Mapping[str, Any], cls: Any) -> Any:
        chosen = {**options, **own}
        make_call = (run or _run_lifted)(transform, chosen)

        @functools.wraps(fn)
        def lifted(module: Any, *args: Any, **kwargs: Any) -> Any:
            return make_call(ModuleCall(module, args, kwargs, cls), fn)

        return lifted

    if inspect.isclass(target) and issubclass(target, Module):
        made = _lifted_from(target)
        key = _key(transform, name, options, methods)
        if key is None:
            return _lift_class(target, name, methods, lifted_call)
        if key not in made:
            made[key] = _lift_class(target, name, methods, lifted_call)
        return made[key]
    if callable(target) and not inspect.isclass(target) and not is_module(target):
        return lifted_call(target, {}, None)
    raise TransformTargetError(target)


def run_with_own_keys(
    transform: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """For ``run`` of ``lift_target``: the target draws its keys before the transform."""
    run_lifted = _run_lifted(transform, options)

    def run(call: ModuleCall, fn: Callable[..., Any]) -> Any:
        with call.own_keys():
            return run_lifted(call, fn)

    return run


def run_compiled(transform: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """For ``run`` of ``lift_target``: one compiled function for all calls of the target."""
    compiled = transform(**options)

    def run(call: ModuleCall, fn: Callable[..., Any]) -> Any:
        in_scopes = call.function(fn)

        def traced(*args: Any, **kwargs: Any) -> Any:
            y = in_scopes(*args, **kwargs)
            return y, StaticResult(tuple(tuple(cursor.items()) for cursor in call.cursors or ()))

        key = (fn, call.cache_key())
        with call.own_keys():
            y, cursors = compiled(key, traced, call.scopes, *call.args, **call.kwargs)
        call.finish(cursors.value)
        return y

    return run


def _run_lifted(transform: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    def run(call: ModuleCall, fn: Callable[..., Any]) -> Any:
        y = transform(call.function(fn), **options)(call.scopes, *call.args, **call.kwargs)
        call.finish()
        return y

    return run


def _lift_class(
    cls: Any, name: str, methods: Any, lifted_call: Callable[[Any, Mapping[str, Any], Any], Any]
) -> Any:
    if methods is None or isinstance(methods, str):
        methods = [methods or "__call__"]
    options = methods if isinstance(methods, Mapping) else {method: {} for method in methods}
    members: dict[str, Any] = {"__doc__": cls.__doc__, "__module__": cls.__module__}
    for method, own in options.items():
        lifted = lifted_call(getattr(cls, method), own, cls)
        lifted.method_handler_wrapped = True  # the method of the copy inside is wrapped
        members[method] = lifted
    return type(cls)(f"{name.capitalize()}{cls.__name__}", (cls,), members)
