"""Names for the types of Variables: those of Linen's collections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from linnet.nnx.variablelib.variable import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    Variable,
)

VariableType = type[Variable[Any]]

_types: dict[str, VariableType] = {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}


@overload
def register_variable_name(
    name: str, typ: None = None, *, overwrite: bool = False
) -> Callable[[VariableType], VariableType]: ...
@overload
def register_variable_name(
    name: str, typ: VariableType, *, overwrite: bool = False
) -> VariableType: ...
def register_variable_name(
    name: str, typ: VariableType | None = None, *, overwrite: bool = False
) -> Any:
    """Gives a type of Variable a name; usable as a decorator.

    Args:
      name: the name.
      typ: the type; without it a decorator is returned.
      overwrite: take the name away from the type that has it.

    Returns:
      The type, or the decorator.

    Raises:
      ValueError: the name belongs to another type.

    Example:
      >>> from linnet import nnx
      >>> @nnx.register_variable_name("counters")
      ... class Counter(nnx.Variable): ...
      >>> nnx.variable_type_from_name("counters").__name__
      'Counter'
    """
    if typ is None:
        return lambda cls: register_variable_name(name, cls, overwrite=overwrite)
    if not overwrite and _types.get(name, typ) is not typ:
        raise ValueError(
            f"The name {name!r} already stands for {_types[name].__name__}.\n"
            "Fix: choose another name, or pass overwrite=True."
        )
    _types[name] = typ
    return typ


def variable_name_from_type(typ: VariableType, *, allow_register: bool = False) -> str:
    """The name of a type of Variable.

    Args:
      typ: the type.
      allow_register: name it after its class where it has none yet.

    Returns:
      The name.

    Raises:
      ValueError: it has no name and may not be given one.

    Example:
      >>> from linnet import nnx
      >>> nnx.variable_name_from_type(nnx.BatchStat)
      'batch_stats'
    """
    for name, known in _types.items():
        if known is typ:
            return name
    if not allow_register:
        raise ValueError(
            f"{typ.__name__} has no registered name.\n"
            f"Fix: nnx.register_variable_name('{typ.__name__.lower()}', {typ.__name__}), or pass "
            "allow_register=True."
        )
    register_variable_name(typ.__name__, typ)
    return typ.__name__


def variable_type_from_name(
    name: str, *, base: VariableType = Variable, allow_register: bool = False
) -> VariableType:
    """The type of Variable that has a name.

    Args:
      name: the name.
      base: what a new type is derived from.
      allow_register: make a new type where the name is unknown.

    Returns:
      The type.

    Raises:
      ValueError: the name is unknown and no type may be made for it.

    Example:
      >>> from linnet import nnx
      >>> nnx.variable_type_from_name("params").__name__
      'Param'
    """
    if name in _types:
        return _types[name]
    if not allow_register:
        raise ValueError(
            f"No type of Variable is registered as {name!r}; there are {sorted(_types)}.\n"
            f"Fix: nnx.register_variable_name({name!r}, YourVariable), or pass allow_register=True."
        )
    return register_variable_name(name, type(name, (base,), {}))
