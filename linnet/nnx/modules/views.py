"""Copies of a module that share its Variables but have other attributes."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter, Predicate
from linnet.nnx.graphlib.build import Build, use_variable
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.traverse import iter_objects
from linnet.nnx.modules.module import Module, iter_modules, set_where_present
from linnet.nnx.pytreelib.kinds import Path

N = TypeVar("N")
_STACK = "_apply_to_layers"  # the method of nnx.Stack that runs a function on each of its layers


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

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Sequential(nnx.Dropout(0.5), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
      >>> quiet = nnx.with_attributes(model, deterministic=True)
      >>> quiet.layers[0].deterministic, quiet.layers[1].kernel is model.layers[1].kernel
      (True, True)
    """
    copied = _copy(node, graph, "with_attributes")
    modules = iter_modules(copied, graph=True)
    set_where_present(modules, only, attributes, node if raise_if_not_found else None)
    return copied


def _copy(node: N, graph: bool | None, api: str) -> N:
    graphdef, mapping = flatten_node(node, graph, api)
    return Build(use_variable).unflatten(graphdef.definition, mapping)


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
    copied = _copy(node, graph, "view")
    taken: set[str] = set()
    _set_flags(copied, (), filterlib.to_predicate(only), kwargs, taken)
    unused = set(kwargs) - taken
    if unused and raise_if_not_found:
        raise ValueError(
            f"Unused keys found in nnx.view: {sorted(unused)}; no module of "
            f"{type(node).__name__} takes them.\nFix: see nnx.view_info(model) for those it takes."
        )
    return copied


def _set_flags(
    node: Any, root: Path, predicate: Predicate, flags: dict[str, Any], taken: set[str]
) -> None:
    """Gives flags to the modules below that take them; adds the names of those to ``taken``."""
    modules = dict(iter_modules(node, graph=True))
    stacks = {path for path, module in modules.items() if hasattr(module, _STACK)}
    layers = {(*path, "stacked") for path in stacks}
    for path, module in modules.items():
        if any(path[:length] in layers for length in range(1, len(path) + 1)):
            continue  # part of a layer, and its turn comes with that
        if path in stacks:
            place = (*root, *path, "stacked")
            options = {"root": place, "predicate": predicate, "flags": flags, "taken": taken}
            getattr(module, _STACK)(functools.partial(_set_flags, **options))
        set_view = getattr(module, "set_view", None)
        if set_view is None or not predicate((*root, *path), module):
            continue
        named, takes_all = _options(set_view)
        known = {key: value for key, value in flags.items() if takes_all or key in named}
        rest = set_view(**known)
        taken |= set(known) - set(rest or ())


def view_info(node: Any, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """The flags that ``nnx.view`` can set, by class.

    Args:
      node: a module, or any pytree of modules.
      only: which modules, by type, path or predicate.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      A text with each class, its flags with type and default, and what its docstring says of them.

    Example:
      >>> from linnet import nnx
      >>> print(nnx.view_info(nnx.Dropout(0.5)).splitlines()[0])
      Dropout:
    """
    predicate = filterlib.to_predicate(only)
    classes: dict[type, None] = {}
    for path, module in iter_objects(node, Module, graph, "view_info"):
        if hasattr(module, "set_view") and predicate(path, module):
            classes.setdefault(type(module))
    return "\n".join(_class_info(cls) for cls in sorted(classes, key=lambda cls: cls.__qualname__))


def _class_info(cls: Any) -> str:
    described = _described_arguments(inspect.getdoc(cls.set_view) or "")
    lines = [f"{cls.__qualname__}:"]
    for name, parameter in _options(cls.set_view)[0].items():
        hint = parameter.annotation
        hint = hint if isinstance(hint, str) else inspect.formatannotation(hint)
        annotation = "" if parameter.annotation is parameter.empty else f": {hint}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"  {name}{annotation}{default}")
        if name in described:
            lines.append(textwrap.indent(described[name], "    "))
    return "\n".join(lines)


def _described_arguments(doc: str) -> dict[str, str]:
    """The entries of an ``Args:`` section by name."""
    found: dict[str, list[str]] = {}
    lines = iter(doc.splitlines())
    for line in lines:
        if line.strip() == "Args:":
            break
    name, margin = "", None
    for line in lines:
        if line and not line.startswith(" "):
            break
        indent = len(line) - len(line.lstrip())
        margin = indent if margin is None else margin
        head, colon, text = line.strip().partition(":")
        head = head.partition("(")[0].strip()  # `name (type): text` is common too
        if colon and head.isidentifier() and indent <= margin:
            name, found[head] = head, [text.strip()]
        elif name:
            found[name].append(line)
    return {name: _entry(*entry) for name, entry in found.items()}


def _entry(first: str, *more: str) -> str:
    rest = textwrap.dedent("\n".join(more))
    return f"{first}\n{rest}".strip()
