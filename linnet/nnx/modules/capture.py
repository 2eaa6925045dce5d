"""Capture: what a run of a model sows and perturbs, without leaving it on the model.

The run works on a copy that shares the model's Variables. So a model from outside a trace can be
used inside it, an error leaves nothing behind, and what was sown stays with the copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from linnet.errors import StateMismatchError, path_string
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.modules.containers import Dict, List
from linnet.nnx.modules.module import Module, capture_run, iter_modules
from linnet.nnx.pytreelib.kinds import ARRAY, STATIC, VARIABLE, Path, child_at, kind_of
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.tracing import current_trace, same_trace
from linnet.nnx.statelib import State, from_flat_state, iter_flat
from linnet.nnx.variablelib.names import VariableType
from linnet.nnx.variablelib.variable import Intermediate, Perturbation, Variable


def capture(
    fn: Any,
    *var_types: VariableType,
    init: Any = None,
    method_outputs: VariableType | None = None,
) -> Callable[..., Any]:
    """Runs a model and returns what it sowed or perturbed, leaving nothing on the model.

    Args:
      fn: a function whose first argument is the module, a module, or a bound method of one; left
        out, so that the types come first, the call is a decorator.
      *var_types: the types of Variables to collect; what is sown of other types is dropped.
      init: a state of Variables that stand in the module from the start, such as perturbations to
        differentiate with respect to.
      method_outputs: a type of Variable under which the output of every method is sown too.

    Returns:
      A function of the same arguments that returns ``(output, *states)``, one state a type; without
      types the output alone.

    Raises:
      TypeError: ``fn`` is not callable, a type is not a type of Variable, or the function was not
        given a module.
      StateMismatchError: ``init`` has values for modules that are not there.

    Example:
      >>> from linnet import nnx
      >>> class Double(nnx.Module):
      ...     def __call__(self, x):
      ...         self.sow(nnx.Intermediate, "input", x)
      ...         return 2 * x
      >>> model = Double()
      >>> y, sown = nnx.capture(model, nnx.Intermediate)(3)
      >>> y, sown["input"].value, hasattr(model, "input")
      (6, (3,), False)

      As a decorator:

      >>> @nnx.capture(nnx.Intermediate)
      ... def run(model, x):
      ...     return model(x)
      >>> run(model, 3)[1]["input"].value
      (3,)
    """
    if isinstance(fn, type) and issubclass(fn, Variable):
        return lambda f: capture(f, fn, *var_types, init=init, method_outputs=method_outputs)
    _check_arguments(fn, [*var_types, *([] if method_outputs is None else [method_outputs])])
    if not var_types and init is None and method_outputs is None:
        return fn

    def run(call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        captured = CaptureRun(module, var_types)
        captured.put_state(init)
        with captured.sowing_outputs(method_outputs), captured.collecting():
            output = call(captured.copy, *args, **kwargs)
        states = captured.take_states()
        captured.write_back()
        return (output, *states) if var_types else output

    owner: Any = fn.__self__ if isinstance(fn, MethodType) else fn
    if isinstance(owner, Pytree):
        call: Any = fn.__func__ if isinstance(fn, MethodType) else _call

        @functools.wraps(call if call is not _call else type(owner).__call__)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return run(call, owner, args, kwargs)

        return bound

    @functools.wraps(fn)
    def free(module: Any, *args: Any, **kwargs: Any) -> Any:
        if kind_of(module) in (STATIC, VARIABLE, ARRAY):
            raise TypeError(
                "nnx.capture collects from the first argument of the function, which must be a "
                f"module or hold some, but it got {type(module).__name__}.\n"
                "Fix: put the module first, or capture the module itself: "
                "nnx.capture(model, nnx.Intermediate)(x)."
            )
        return run(fn, module, args, kwargs)

    return free


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _check_arguments(fn: Any, var_types: list[Any]) -> None:
    if not callable(fn):
        raise TypeError(
            f"nnx.capture takes a function, a module that can be called or a bound method, but got "
            f"{type(fn).__name__}.\nFix: nnx.capture(model, nnx.Intermediate)(x)."
        )
    for var_type in var_types:
        if not (isinstance(var_type, type) and issubclass(var_type, Variable)):
            raise TypeError(
                f"nnx.capture collects types of Variables such as nnx.Intermediate, but got "
                f"{var_type!r}.\nFix: nnx.capture(model, nnx.Intermediate)(x)."
            )


class CaptureRun:
    """One run: the copy of the module that it works on, and the attributes sown there."""

    def __init__(self, module: Any, var_types: tuple[VariableType, ...]):
        walk, build = Walk(True, "capture"), Build()
        self.var_types = var_types
        self.definition, self.leaves = walk.flatten(module)
        self.copy = build.unflatten(self.definition, self.leaves)
        self.originals, self.copies = walk.things, build.things
        self.copy_ids = {id(thing) for thing in self.copies}
        pairs = zip(self.originals, self.copies, strict=True)
        self.copy_by_id = {id(original): copy for original, copy in pairs}
        self.sown: set[tuple[int, Any]] = set()  # attributes, by their module
        self.sown_inside: dict[tuple[int, Any], Module] = {}  # and those of copies in transforms
        self.aside: list[tuple[Module, Any, Variable[Any]]] = []
        for original, copy in zip(self.originals, self.copies, strict=True):
            if isinstance(copy, Pytree):  # a change that the original would refuse is refused
                object.__setattr__(copy, "_pytree_trace", original._pytree_trace)
        for part in self.modules():
            for name, value in list(part._pytree_items().items()):
                if isinstance(value, Intermediate):
                    self.set_aside(part, name, value)

    def modules(self) -> list[Module]:
        """The modules of the copy, as they were before the run."""
        return [copy for copy in self.copies if isinstance(copy, Module)]

    def set_aside(self, part: Module, name: Any, value: Variable[Any]) -> None:
        """Sets an earlier value aside until the run is over."""
        self.aside.append((part, name, value))
        with _open_to_change(part):
            part._pytree_delete(name)

    def keep(self, part: Module, name: Any, variable: Variable[Any]) -> bool:
        """Stores what was sown; False if the module does not belong to this run."""
        if id(part) not in self.copy_ids:
            return False
        with _open_to_change(part):
            part._pytree_set(name, variable)
        return True

    def copy_of(self, part: Module) -> Module:
        """The copy of a module that the run works on, where it uses the module itself."""
        return self.copy_by_id.get(id(part), part) if same_trace(part._pytree_trace) else part

    def begin_sowing(self, part: Module, name: Any, var_type: VariableType) -> None:
        """Notes that an attribute is sown; the first time, sets an earlier value of it aside."""
        is_first = (id(part), name) not in self.sown
        self.note_sown(part, name)
        if id(part) in self.copy_ids and is_first:
            earlier = part._pytree_items().get(name)
            if isinstance(earlier, var_type):
                self.set_aside(part, name, earlier)

    def note_sown(self, part: Module, name: Any) -> None:
        """Remembers that an attribute of a module, or of its copy in a transform, was sown."""
        if id(part) in self.copy_ids:
            self.sown.add((id(part), name))
        else:
            self.sown_inside[id(part), name] = part

    def is_sown(self, part: Any, name: Any) -> bool:
        """Whether an attribute of a module, or of its copy in a transform, was sown in this run."""
        place = (id(part), name)
        return place in self.sown or self.sown_inside.get(place) is part

    def collected_from(self, part: Module) -> tuple[Variable[Any], ...]:
        """What a module has sown so far: a Variable for each type, with values by name."""
        found: list[dict[Path, Any]] = [{} for _ in self.var_types]
        for name, value in part._pytree_items().items():
            if isinstance(value, Intermediate) or (
                isinstance(value, Variable) and self.is_sown(part, name)
            ):
                cls = type(value)
                if cls in self.var_types:
                    found[self.var_types.index(cls)][name] = value.get_value()
                elif not issubclass(cls, Perturbation):
                    self._place(found, name, value.get_value(), cls)
        pairs = zip(self.var_types, found, strict=True)
        return tuple(var_type(values, mutable=False) for var_type, values in pairs)

    def put_state(self, init: Any) -> None:
        """Puts the Variables of a state in their places, as if they had been sown."""
        for path, leaf in _flat(init):
            part = self.copy
            for step in path[:-1]:
                part = child_at(part, step)
            if not isinstance(part, Module):
                raise StateMismatchError(
                    f"init of nnx.capture has a value at {path_string(path)}, but there is no "
                    f"module at {path_string(path[:-1]) or 'the root'}.\n"
                    "Fix: pass a state that nnx.capture returned for this model."
                )
            variable = leaf.copy() if isinstance(leaf, Variable) else Perturbation(leaf)
            self.begin_sowing(part, path[-1], Variable)
            self.keep(part, path[-1], variable)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While the block lasts, ``sow`` and ``perturb`` report to this run."""
        token = capture_run.set(self)
        try:
            yield
        finally:
            capture_run.reset(token)

    @contextmanager
    def sowing_outputs(self, var_type: VariableType | None) -> Iterator[None]:
        """While the block lasts, every method of the copy sows what it returns."""
        classes = [(part, type(part)) for part in self.modules() if var_type is not None]
        for part, cls in classes:
            methods = tuple(own_methods(cls).items())
            object.__setattr__(part, "__class__", _sowing_class(cls, var_type, methods))
        try:
            yield
        finally:
            for part, cls in classes:
                object.__setattr__(part, "__class__", cls)

    def take_states(self) -> list[State]:
        """Removes what was sown from the copy and returns it, one state for each type."""
        flat: list[dict[Path, Any]] = [{} for _ in self.var_types]
        transient = (Intermediate, *self.var_types)
        perturbed = any(issubclass(t, Perturbation) for t in self.var_types)
        for path, part in list(iter_modules(self.copy, graph=True)):
            for name, value in list(part._pytree_items().items()):
                is_new = isinstance(value, Variable) and id(value) not in self.copy_ids
                # By type too: of what a transform inside of the run sowed, not all is noted.
                if is_new and ((id(part), name) in self.sown or isinstance(value, transient)):
                    with _open_to_change(part):
                        part._pytree_delete(name)
                    if perturbed or not isinstance(value, Perturbation):
                        self._place(flat, (*path, name), value, type(value))
        for part, name, value in self.aside:
            with _open_to_change(part):
                part._pytree_set(name, value)
        return [from_flat_state(places) for places in flat]

    def _place(self, flat: list[dict[Any, Any]], key: Any, value: Any, found: type) -> None:
        """Puts a value into the dict of the first type that it belongs to."""
        for var_type, places in zip(self.var_types, flat, strict=True):
            if issubclass(found, var_type):
                places[key] = value
                return

    def write_back(self) -> None:
        """Writes what the run changed, other than values of Variables, into the module itself."""
        walk = Walk(True, "capture")
        definition, leaves = walk.flatten(self.copy)
        if definition == self.definition and _same_leaves(leaves, self.leaves):
            return
        pairs = zip(self.originals, self.copies, strict=True)
        originals = {id(copy): original for original, copy in pairs}
        reuse = {
            number: originals[id(thing)]
            for number, thing in enumerate(walk.things)
            if id(thing) in originals and not isinstance(thing, Variable)
        }
        if all(same_trace(o._pytree_trace) for o in reuse.values() if isinstance(o, Pytree)):
            Build(reuse=reuse).unflatten(definition, leaves)


def sown_attributes(things: list[Any]) -> tuple[tuple[int, Any], ...]:
    """What the running ``nnx.capture`` has sown in objects: their numbers, and attributes."""
    run = capture_run.get()
    if run is None:
        return ()
    modules = [(number, x) for number, x in enumerate(things) if isinstance(x, Module)]
    return tuple(
        (number, name)
        for number, module in modules
        for name in module._pytree_items()
        if run.is_sown(module, name)
    )


def report_sown(things: list[Any], attributes: tuple[tuple[int, Any], ...]) -> None:
    """Tells the running ``nnx.capture`` what a function sowed that was traced in another run."""
    run = capture_run.get()
    if run is not None:
        for number, name in attributes:
            run.note_sown(things[number], name)


@contextmanager
def _open_to_change(part: Pytree) -> Iterator[None]:
    """Lets the running trace change an object, whatever trace it belongs to."""
    owner = part._pytree_trace
    object.__setattr__(part, "_pytree_trace", current_trace())
    try:
        yield
    finally:
        object.__setattr__(part, "_pytree_trace", owner)


def _flat(init: Any) -> Any:
    if init is None:
        return ()
    return (init if isinstance(init, State) else State(init)).flat_state()


def _same_leaves(leaves: Any, others: Any) -> bool:
    pairs = zip(iter_flat(leaves), iter_flat(others), strict=True)
    return all(leaf is other for (_, leaf), (_, other) in pairs)


_PLUMBING = {*Module.__mro__, *List.__mro__, *Dict.__mro__}


@functools.lru_cache(maxsize=256)
def _sowing_class(cls: type[Module], var_type: VariableType, methods: Any) -> type[Module]:
    """A subclass of ``cls`` whose ``methods``, those it has now, sow what they return."""

    def sowing(part: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = method(part, *args, **kwargs)
        part.sow(var_type, name, output)
        return output

    return class_around(cls, sowing, methods)


def class_around(
    cls: type[Pytree], around: Callable[..., Any], methods: Any, **attributes: Any
) -> Any:
    """A subclass whose ``methods`` run as ``around(self, name, method, args, kwargs)``."""

    def wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(self, name, method, args, kwargs)

        return wrapper

    wrappers = {name: wrapped(name, method) for name, method in methods}
    return type(cls.__name__, (cls,), {**wrappers, "__module__": cls.__module__, **attributes})


def own_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods that a class adds to those that every module has, transformed ones too."""
    return {
        name: method
        for base in reversed(cls.__mro__)
        if base not in _PLUMBING
        for name, method in vars(base).items()
        if _is_method(method)
        and (name == "__call__" or not name.startswith("_"))
        and name != "set_view"
    }


def _is_method(x: Any) -> bool:
    lifted = hasattr(x, "__wrapped__") and not isinstance(x, (staticmethod, classmethod, type))
    return isinstance(x, FunctionType) or (lifted and callable(x))
