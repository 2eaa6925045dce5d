"""Frozen dataclasses that are JAX pytrees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar, dataclass_transform

import jax

from linnet import serialization
from linnet.errors import SerializationError

T = TypeVar("T")


def field(
    pytree_node: bool = True, *, metadata: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """A dataclass field that is data or, with ``pytree_node=False``, static.

    Args:
      pytree_node: whether JAX traces the field.
      metadata: passed on to ``dataclasses.field``.
      **kwargs: passed on to ``dataclasses.field``.

    Returns:
      The field.

    Example:
      >>> import jax
      >>> from linnet import struct
      >>> class Config(struct.PyTreeNode):
      ...     rate: float
      ...     name: str = struct.field(pytree_node=False, default="adam")
      >>> jax.tree.leaves(Config(0.5))
      [0.5]
    """
    return dataclasses.field(metadata={**(metadata or {}), "pytree_node": pytree_node}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(field, dataclasses.field))
def dataclass(clz: type[T] | None = None, **kwargs: Any) -> Any:
    """Makes a class a frozen dataclass and a JAX pytree, with a ``replace`` method.

    Args:
      clz: the class; without it a decorator is returned.
      **kwargs: as for ``dataclasses.dataclass``; ``frozen`` is on unless it is given.

    Returns:
      The class.

    Example:
      >>> import jax
      >>> from linnet import struct
      >>> @struct.dataclass
      ... class Config:
      ...     rate: float
      ...     name: str = struct.field(pytree_node=False, default="x")
      >>> jax.tree.leaves(Config(0.5).replace(rate=0.25))
      [0.25]
    """
    if clz is None:
        return functools.partial(dataclass, **kwargs)
    if "__linnet_struct__" in clz.__dict__:
        return clz
    kwargs.setdefault("frozen", True)
    made: Any = dataclasses.dataclass(clz, **kwargs)
    fields = [f for f in dataclasses.fields(made) if f.init]
    names = [f.name for f in fields if f.metadata.get("pytree_node", True)]
    static = [f.name for f in fields if f.name not in names]
    jax.tree_util.register_dataclass(made, data_fields=names, meta_fields=static)
    made.replace = PyTreeNode.replace
    made.__linnet_struct__ = True
    serialization.register_serialization_state(
        made,
        functools.partial(_to_state_dict, names),
        functools.partial(_from_state_dict, names),
        override=True,  # a class that is defined again, in a notebook or a test
    )
    return made


def _to_state_dict(names: list[str], node: Any) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(node, name)) for name in names}


def _from_state_dict(names: list[str], node: Any, state: Any) -> Any:
    what = f"in state dict while restoring an instance of {type(node).__name__}"
    where = f"at path {serialization.current_path()}"
    if not isinstance(state, dict):
        raise SerializationError(f"Got a {type(state).__name__} {what}, {where}.")
    missing = [name for name in names if name not in state]
    if missing:
        raise SerializationError(f"Missing field {missing[0]} {what}, {where}.")
    if unknown := [name for name in state if name not in names]:
        listed = ", ".join(f'"{name}"' for name in unknown)
        raise SerializationError(f"Unknown field(s) {listed} {what} {where}.")
    fields = {
        name: serialization.from_state_dict(getattr(node, name), state[name], name=name)
        for name in names
    }
    return node.replace(**fields)


@dataclass_transform(frozen_default=True, field_specifiers=(field, dataclasses.field))
class PyTreeNode:
    """A base class whose subclasses are frozen dataclasses and JAX pytrees.

    Example:
      >>> import jax
      >>> from linnet import struct
      >>> class Point(struct.PyTreeNode):
      ...     x: float
      ...     y: float
      >>> jax.tree.map(lambda v: 2 * v, Point(1.0, 2.0))
      Point(x=2.0, y=4.0)
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__()
        dataclass(cls, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            "PyTreeNode is a base class, not a node.\nFix: derive a class with fields from it."
        )

    def replace(self: T, **overrides: Any) -> T:
        """A copy with some fields replaced.

        Args:
          **overrides: the fields and their new values.

        Returns:
          The copy.
        """
        return dataclasses.replace(self, **overrides)  # pyright: ignore[reportArgumentType]
