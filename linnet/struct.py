"""Frozen dataclasses that are JAX pytrees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def field(
    pytree_node: bool = True, *, metadata: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """A dataclass field that is data or, with ``pytree_node=False``, part of the structure.

    Args:
      pytree_node: whether JAX traces the field.
      metadata: passed on to ``dataclasses.field``.
      **kwargs: passed on to ``dataclasses.field``.

    Returns:
      The field.
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
    is_data = {f.name: f.metadata.get("pytree_node", True) for f in fields}
    jax.tree_util.register_dataclass(
        made,
        data_fields=[name for name, data in is_data.items() if data],
        meta_fields=[name for name, data in is_data.items() if not data],
    )
    made.replace = _replace
    made.__linnet_struct__ = True
    return made


def _replace(self: T, **overrides: Any) -> T:
    """A copy with some fields replaced."""
    return dataclasses.replace(self, **overrides)  # pyright: ignore[reportArgumentType]


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
        return _replace(self, **overrides)
