"""Modules in the attributes of modules: where they are, what they are called, how they print."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from linnet.frozen_dict import FrozenDict

if TYPE_CHECKING:
    from linnet.linen.module_base import ModuleBase


class UnspecifiedParent:
    """Stands for the parent of a module that was given none: the module whose method is running."""

    def __repr__(self) -> str:
        return "<the running module>"

    def __copy__(self) -> UnspecifiedParent:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> UnspecifiedParent:
        return self


unspecified_parent = UnspecifiedParent()


class ParentDescriptor:
    """The parent of a module, held weakly, so that modules are freed when nobody uses them."""

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        held = obj.__dict__.get("_parent_ref")
        return held() if isinstance(held, weakref.ref) else held

    def __set__(self, obj: Any, value: Any) -> None:
        obj.__dict__["_parent_ref"] = weakref.ref(value) if is_module(value) else value


@dataclasses.dataclass
class ModuleState:
    """The state of a module that changes while its methods run."""

    in_compact_method: bool = False
    in_setup: bool = False
    setup_called: bool = False
    is_initialized: bool = False  # bound to a scope, and frozen outside of setup
    autoname_cursor: dict[str, int] = dataclasses.field(default_factory=dict)
    children: dict[str, Any] = dataclasses.field(default_factory=dict)  # a module or a collection
    name_scopes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        """Attributes can be set within this block."""
        self.in_setup = True
        try:
            yield
        finally:
            self.in_setup = False

    def reset(self) -> None:
        """Automatic names start again from 0, at the end of a compact method."""
        self.in_compact_method = False
        self.autoname_cursor = {}


def is_module(value: Any) -> bool:
    """Whether something is a Linen module."""
    return hasattr(type(value), "_call_wrapped_method")


def freeze_attribute(value: Any) -> Any:
    """The value that setup stores for an attribute: lists become tuples, dicts are frozen."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(freeze_attribute(v) for v in value))
    if isinstance(value, list | tuple):
        return tuple(freeze_attribute(v) for v in value)
    if isinstance(value, dict | FrozenDict):
        return FrozenDict(
            {key: freeze_attribute(v) for key, v in value.items()}, __unsafe_skip_copy__=True
        )
    return value


def named_modules(value: Any, name: str = "") -> Iterator[tuple[str, ModuleBase]]:
    """The modules in an attribute, each with its name: ``layers_0`` for the first of a list."""
    if is_module(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_modules(item, f"{name}_{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from named_modules(item, f"{name}_{number}")


def map_modules(fn: Callable[[ModuleBase], Any], value: Any) -> Any:
    """Replaces the modules in an attribute; one without modules is returned as it is."""
    if is_module(value):
        return fn(value)
    if next(named_modules(value), None) is None:
        return value
    if isinstance(value, Mapping):
        mapped = {key: map_modules(fn, item) for key, item in value.items()}
        return type(value)(mapped)  # pyright: ignore[reportCallIssue]
    mapped = [map_modules(fn, item) for item in value]
    return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)


def module_repr(module: ModuleBase, indent: int = 4) -> str:
    """A module as text: its fields, and the submodules and variables that it has."""
    pad = " " * indent
    fields = {
        f.name: getattr(module, f.name)
        for f in dataclasses.fields(module)  # pyright: ignore[reportArgumentType]
        if f.name not in ("parent", "name") and f.repr
    }
    children = {k: v for k, v in module._state.children.items() if is_module(v)}
    lines = []
    if fields:
        lines.append("# attributes")
        lines += [f"{name} = {_value_repr(value)}" for name, value in fields.items()]
    if children:
        lines.append("# children")
        lines += [f"{name} = {module_repr(child, indent)}" for name, child in children.items()]
    if not lines:
        return f"{type(module).__name__}()"
    body = "\n".join(lines).replace("\n", f"\n{pad}")
    return f"{type(module).__name__}(\n{pad}{body}\n)"


def _value_repr(value: Any) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)
