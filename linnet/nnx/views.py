"""The same Variables behind other flags: views, attributes, and what a run leaves behind."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, TypeVar

from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.split_merge import clone
from linnet.nnx.graphlib.update import pop
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.module import Module, iter_modules, raise_not_found
from linnet.nnx.pytreelib import Pytree
from linnet.nnx.tracing import same_trace
from linnet.nnx.variablelib import Variable

N = TypeVar("N")


def with_attributes(
    node: N,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **attributes: Any,
) -> N:
    """A module with other attributes that shares its Variables with the original.

    Args:
      node: a module, or any pytree of modules.
      only: which modules, by type, path or predicate.
      raise_if_not_found: an attribute that no module has is an error.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      **attributes: the attributes and their values, set where modules have them already.

    Returns:
      The new module.

    Raises:
      ValueError: no module has one of the attributes.
    """
    predicate = filterlib.to_predicate(only)
    copied = clone(node, variables=False, graph=graph)
    missing = dict(attributes)
    for path, module in iter_modules(copied, graph=graph):
        for name, value in attributes.items() if predicate(path, module) else ():
            if hasattr(module, name):
                setattr(module, name, value)
                missing.pop(name, None)
    if missing and raise_if_not_found:
        raise_not_found(missing, node)
    return copied


def _options(set_view: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The flags that a ``set_view`` takes by name, and whether it takes others too."""
    parameters = list(inspect.signature(set_view).parameters.values())
    named = {
        p.name: p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def view(
    node: N,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **kwargs: Any,
) -> N:
    """A module with other flags that shares its Variables with the original.

    Each class that has flags takes them in its ``set_view`` method; ``view_info`` lists them.

    Args:
      node: a module, or any pytree of modules.
      only: which modules, by type, path or predicate.
      raise_if_not_found: a flag that no module takes is an error.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      **kwargs: the flags, such as ``deterministic=True``.

    Returns:
      The new module; the original keeps its flags.

    Raises:
      ValueError: no module takes one of the flags.

    Example:
      >>> from linnet import nnx
      >>> class Noise(nnx.Module):
      ...     deterministic = False
      ...     def set_view(self, deterministic: bool | None = None):
      ...         if deterministic is not None:
      ...             self.deterministic = deterministic
      >>> train = Noise()
      >>> nnx.view(train, deterministic=True).deterministic, train.deterministic
      (True, False)
    """
    predicate = filterlib.to_predicate(only)
    copied = clone(node, variables=False, graph=graph)
    unused = set(kwargs)
    for path, module in iter_modules(copied, graph=graph):
        set_view = getattr(module, "set_view", None)
        if set_view is None or not predicate(path, module):
            continue
        named, takes_all = _options(set_view)
        known = {key: value for key, value in kwargs.items() if takes_all or key in named}
        rest = set_view(**known)
        unused -= set(known) - set(rest or ())
    if unused and raise_if_not_found:
        raise ValueError(
            f"Unused keys found in nnx.view: {sorted(unused)}; no module of "
            f"{type(node).__name__} takes them.\nFix: see nnx.view_info(model) for those it takes."
        )
    return copied


def view_info(node: Any, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """The flags that ``nnx.view`` can set, by class.

    Args:
      node: a module, or any pytree of modules.
      only: which modules, by type, path or predicate.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      A text with each class, its flags with type and default, and what its docstring says of them.
    """
    predicate = filterlib.to_predicate(only)
    classes: dict[type, None] = {}
    for path, module in iter_modules(node, graph=graph):
        if hasattr(module, "set_view") and predicate(path, module):
            classes.setdefault(type(module))
    return "\n".join(_class_info(cls) for cls in classes)


def _class_info(cls: Any) -> str:
    described = _described_arguments(inspect.getdoc(cls.set_view) or "")
    lines = [f"{cls.__name__}:"]
    for name, parameter in _options(cls.set_view)[0].items():
        hint = parameter.annotation
        kind = "" if hint is parameter.empty else f": {inspect.formatannotation(hint)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"  {name}{kind}{default}")
        if name in described:
            lines.append(textwrap.indent(described[name], "    "))
    return "\n".join(lines)


def _described_arguments(doc: str) -> dict[str, str]:
    """The entries of an ``Args:`` section by name."""
    found: dict[str, str] = {}
    lines = iter(doc.splitlines())
    for line in lines:
        if line.strip() == "Args:":
            break
    name = ""
    for line in lines:
        if line and not line.startswith(" "):
            break
        head, colon, text = line.strip().partition(":")
        if colon and head.isidentifier():
            name, found[head] = head, text.strip()
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def capture(
    fn: Any,
    *var_types: type[Variable[Any]],
    init: Any = None,
    method_outputs: type[Variable[Any]] | None = None,
) -> Callable[..., Any]:
    """Runs a model and returns what it sowed or perturbed, leaving nothing on the model.

    Args:
      fn: a function whose first argument is the module, a module, or a bound method of one.
      *var_types: the kinds of Variables to collect.
      init: a state of Variables that stand in the module from the start, such as perturbations to
        differentiate with respect to.
      method_outputs: a kind of Variable under which the output of every method is sown too.

    Returns:
      A function of the same arguments that returns ``(output, *states)``, one state a kind; without
      kinds the output alone.

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
    """
    owner = fn.__self__ if isinstance(fn, MethodType) else fn
    if isinstance(owner, Pytree):
        call = fn.__func__ if isinstance(fn, MethodType) else type(fn).__call__

        @functools.wraps(fn.__func__ if isinstance(fn, MethodType) else call)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return _run_captured(call, owner, args, kwargs, var_types, init, method_outputs)

        return bound

    @functools.wraps(fn)
    def free(module: Any, *args: Any, **kwargs: Any) -> Any:
        return _run_captured(fn, module, args, kwargs, var_types, init, method_outputs)

    return free


def _run_captured(
    call: Callable[..., Any],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    var_types: tuple[Any, ...],
    init: Any,
    method_outputs: Any,
) -> Any:
    # The run works on a stand-in that shares the Variables, so that a module from outside a trace
    # can be used inside it, and so that an error leaves nothing behind.
    before = Walk(True, "capture")
    definition, mapping = before.flatten(module)
    built = Build()
    stand_in = built.unflatten(definition, mapping)
    wanted: list[Any] = [*var_types, method_outputs]
    kept = pop(stand_in, wanted)
    for path, leaf in init.flat_state() if init is not None else ():
        _plant(stand_in, path, leaf)
    if method_outputs is not None:
        for _, part in iter_modules(stand_in, graph=True):
            object.__setattr__(part, "__class__", _sowing(type(part), method_outputs))
    try:
        output = call(stand_in, *args, **kwargs)
    finally:
        if method_outputs is not None:
            for _, part in iter_modules(stand_in, graph=True):
                object.__setattr__(part, "__class__", type(part).__mro__[1])
    states = pop(stand_in, *var_types) if var_types else ()
    pop(stand_in, wanted)
    for path, leaf in kept.flat_state():
        _plant(stand_in, path, leaf)
    if same_trace(getattr(module, "_pytree_trace", None)):
        _write_back(stand_in, before.seen, built.objects)
    return output if not var_types else (output, *(states if len(var_types) > 1 else (states,)))


def _plant(module: Any, path: tuple[Any, ...], leaf: Any) -> None:
    """Puts a Variable at a path, whether there was one or not."""
    target = module
    for step in path[:-1]:
        target = target._pytree_items()[step] if isinstance(target, Pytree) else target[step]
    if isinstance(target, Pytree):
        target._pytree_set(path[-1], leaf)
    else:
        target[path[-1]] = leaf


def _write_back(stand_in: Any, originals: list[Any], copies: list[Any]) -> None:
    """Carries what the run changed beside Variables over to the module itself."""
    twins = {id(c): o for o, c in zip(originals, copies, strict=True)}
    after = Walk(True, "capture")
    definition, mapping = after.flatten(stand_in)
    reuse = {}
    for number, thing in enumerate(after.seen):
        if id(thing) in twins and not isinstance(thing, Variable):
            reuse[number] = twins[id(thing)]
    Build(reuse=reuse).unflatten(definition, mapping)


@functools.cache
def _sowing(cls: type[Module], kind: type[Variable[Any]]) -> type[Module]:
    """A subclass of ``cls`` whose methods sow what they return."""

    def sowing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Module, *args: Any, **kwargs: Any) -> Any:
            output = method(self, *args, **kwargs)
            self.sow(kind, name, output)
            return output

        return wrapper

    methods = {
        name: sowing(name, method)
        for base in reversed(cls.__mro__)
        if base not in Module.__mro__
        for name, method in vars(base).items()
        if isinstance(method, FunctionType)
        and (name == "__call__" or not name.startswith("_"))
        and name != "set_view"
    }
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
