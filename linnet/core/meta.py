"""Metadata around the values of variables: boxes that lifted transforms keep in step with axes.

A box is a pytree node around one value. ``Partitioned`` is the one that names the axes of an array
for a mesh. Initializers wrapped with ``with_partitioning`` return boxes; ``param`` and ``variable``
take the values out of them again.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet import struct
from linnet.errors import PartitioningUnspecifiedError
from linnet.functional.sharding import placed
from linnet.typing import LogicalNames as LogicalNames

A = TypeVar("A")
B = TypeVar("B")

PARTITION_NAME = "partition_name"


class AxisMetadata(Generic[A], metaclass=abc.ABCMeta):
    """The base of boxes. A subclass is a pytree with its value among the children.

    Lifted transforms call ``add_axis`` where the value gained an axis and ``remove_axis`` where it
    lost one, with the ``metadata_params`` they were given.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet.core import meta
      >>> box = meta.Partitioned(jnp.ones((2, 3)), names=("data", None))
      >>> box.add_axis(0, {meta.PARTITION_NAME: "layers"}).names
      ('layers', 'data', None)
      >>> box.unbox().shape
      (2, 3)
    """

    @abc.abstractmethod
    def unbox(self) -> A:
        """The value."""

    @abc.abstractmethod
    def replace_boxed(self, val: B) -> AxisMetadata[B]:
        """The same box around another value."""

    @abc.abstractmethod
    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """The box of a value that gained an axis at a position."""

    @abc.abstractmethod
    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """The box of a value that lost the axis at a position."""


def is_axis_metadata(val: Any) -> bool:
    """Whether something is a box."""
    return isinstance(val, AxisMetadata)


def map_axis_meta(fn: Callable[[AxisMetadata[Any]], Any], tree: Any) -> Any:
    """Replaces every box of a tree, without looking into boxes.

    Args:
      fn: a function of a box.
      tree: any pytree.

    Returns:
      The tree with what ``fn`` returned in the place of each box.

    Example:
      >>> from linnet.core import meta
      >>> meta.map_axis_meta(lambda box: box.names, {"b": 2, "w": meta.Partitioned(1, ("a",))})
      {'b': 2, 'w': ('a',)}
    """
    return jax.tree_util.tree_map(
        lambda x: fn(x) if is_axis_metadata(x) else x, tree, is_leaf=is_axis_metadata
    )


def add_axis(tree: Any, index: int, params: dict[Any, Any]) -> Any:
    """Notes in every box of a tree that its value gained an axis.

    Args:
      tree: any pytree.
      index: the position of the axis.
      params: what the boxes need to know of it, such as ``{PARTITION_NAME: name}``.

    Returns:
      The tree with new boxes.

    Example:
      >>> from linnet.core import meta
      >>> box = meta.Partitioned(1, names=("model",))
      >>> meta.add_axis({"w": box}, 0, {meta.PARTITION_NAME: "layers"})["w"].names
      ('layers', 'model')
    """
    return map_axis_meta(lambda box: box.add_axis(index, params), tree)


def remove_axis(tree: Any, index: int, params: dict[Any, Any]) -> Any:
    """Notes in every box of a tree that its value lost an axis.

    Args:
      tree: any pytree.
      index: the position the axis had.
      params: what the boxes need to know of it, such as ``{PARTITION_NAME: name}``.

    Returns:
      The tree with new boxes.

    Example:
      >>> from linnet.core import meta
      >>> box = meta.Partitioned(1, names=("layers", "model"))
      >>> meta.remove_axis({"w": box}, 0, {meta.PARTITION_NAME: "layers"})["w"].names
      ('model',)
    """
    return map_axis_meta(lambda box: box.remove_axis(index, params), tree)


def unbox(tree: Any) -> Any:
    """Takes all values of a tree out of their boxes.

    Args:
      tree: any pytree.

    Returns:
      The tree with the value of each box in its place; boxes in boxes are opened too.

    Example:
      >>> from linnet.core import meta
      >>> meta.unbox({"b": 2, "w": meta.Partitioned(1, ("a",))})
      {'b': 2, 'w': 1}
    """
    return map_axis_meta(lambda box: unbox(box.unbox()), tree)


def replace_boxed(tree: Any, updates: Any) -> Any:
    """Puts other values into the boxes of a tree.

    Args:
      tree: a pytree with boxes.
      updates: a pytree as ``unbox(tree)`` gives it.

    Returns:
      The updates, boxed as the values of ``tree`` are.

    Example:
      >>> from linnet.core import meta
      >>> meta.replace_boxed({"w": meta.Partitioned(1, ("a",))}, {"w": 2})
      {'w': Partitioned(value=2, names=('a',), mesh=None)}
    """

    def put(held: Any, update: Any) -> Any:
        if not is_axis_metadata(held):
            return update
        return held.replace_boxed(replace_boxed(held.unbox(), update))

    return jax.tree_util.tree_map(put, tree, updates, is_leaf=is_axis_metadata)


def get_global_mesh() -> Any:
    """The mesh of ``jax.set_mesh``, as an abstract one; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def global_mesh_defined() -> bool:
    """Whether there is a mesh of ``jax.set_mesh``."""
    return get_global_mesh() is not None


class Partitioned(struct.PyTreeNode, AxisMetadata[A]):
    """A value with the names of its axes on a mesh.

    Args:
      value: an array, a tracer or a shape.
      names: for each axis the name of a mesh axis, or None for an axis that is not sharded.
      mesh: the mesh, if it is not the one of ``jax.set_mesh``.

    Example:
      >>> from linnet import linen as nn
      >>> tuple(nn.Partitioned(1, names=("data", None)).get_partition_spec())
      ('data', None)
    """

    value: Any
    names: LogicalNames = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value.

        Args:
          apply_constraint: inside a trace and under a mesh, tell the compiler how it is sharded.

        Returns:
          The value.
        """
        if not apply_constraint or not (self.mesh is not None or global_mesh_defined()):
            return self.value
        if self.mesh is not None:
            return placed(self.value, self.get_sharding(self.mesh))
        return placed(self.value, self.get_partition_spec())

    def replace_boxed(self, val: Any) -> Any:
        """The same names around another value."""
        return self.replace(value=val)

    def _axis_name(self, params: dict[Any, Any]) -> Any:
        if PARTITION_NAME not in params:
            raise PartitioningUnspecifiedError(self)
        return params[PARTITION_NAME]

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """The box with the name of one more axis.

        Args:
          index: the position of the axis.
          params: ``{PARTITION_NAME: name}``.

        Returns:
          The new box.

        Raises:
          PartitioningUnspecifiedError: ``params`` has no name.
        """
        names = list(self.names)
        position = index if index >= 0 else len(names) + 1 + index
        names.extend([None] * (position - len(names)))
        names.insert(position, self._axis_name(params))
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """The box without the name of one axis.

        Args:
          index: the position of the axis.
          params: ``{PARTITION_NAME: name}``.

        Returns:
          The new box.

        Raises:
          PartitioningUnspecifiedError: ``params`` has no name.
          AssertionError: the axis has another name.
        """
        names = list(self.names)
        name = self._axis_name(params)
        if names.pop(index) != name:
            raise AssertionError(
                f"Axis {index} of a value with the names {self.names} was to be removed as "
                f"{name!r}.\nFix: metadata_params names the axis as it was added."
            )
        return self.replace(names=tuple(names))

    def get_partition_spec(self) -> PartitionSpec:
        """The names as a ``PartitionSpec``."""
        return PartitionSpec(*self.names)

    def get_sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding of the value on a mesh.

        Args:
          mesh: the mesh.

        Returns:
          The sharding.
        """
        return NamedSharding(mesh, self.get_partition_spec())

    def to_nnx_metadata(self) -> dict[str, Any]:
        """The metadata of an NNX Variable with this value."""
        metadata = dict(vars(self))
        metadata["out_sharding"] = metadata.pop("names")
        return metadata

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Any:
        """The box of an NNX Variable's metadata.

        Args:
          metadata: the metadata.

        Returns:
          The box.
        """
        metadata = dict(metadata)
        if "out_sharding" in metadata:
            metadata["names"] = metadata.pop("out_sharding")
        fields = cls.__dataclass_fields__
        return cls(**{key: value for key, value in metadata.items() if key in fields})


def with_partitioning(
    fn: Callable[..., Any], names: LogicalNames, mesh: Mesh | None = None
) -> Callable[..., Partitioned[Any]]:
    """Wraps an initializer so that its result carries the names of its axes.

    Args:
      fn: any function that returns an array.
      names: for each axis the name of a mesh axis, or None.
      mesh: the mesh, if it is not the one of ``jax.set_mesh``.

    Returns:
      A function of the same arguments that returns a ``Partitioned``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> init = nn.with_partitioning(jax.nn.initializers.zeros, (None, "model"))
      >>> init(jax.random.key(0), (2, 2)).names
      (None, 'model')
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Partitioned[Any]:
        return Partitioned(fn(*args, **kwargs), names, mesh=mesh)

    return wrapper


def _leaf_spec(x: Any) -> PartitionSpec | None:
    if hasattr(x, "get_partition_spec"):
        return x.get_partition_spec()
    return PartitionSpec() if hasattr(x, "shape") else None


def get_partition_spec(tree: Any) -> Any:
    """The partition spec of every value of a tree.

    Args:
      tree: variables with boxes, abstract or not.

    Returns:
      The tree with a ``PartitionSpec`` in the place of each box and each array; None for what is
      no array.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> specs = nn.get_partition_spec({"w": nn.Partitioned(jnp.ones(2), ("a",))})
      >>> tuple(specs["w"])
      ('a',)
    """
    return jax.tree_util.tree_map(_leaf_spec, tree, is_leaf=is_axis_metadata)


def get_sharding(tree: Any, mesh: Mesh) -> Any:
    """The sharding on a mesh of every value of a tree.

    Args:
      tree: variables with boxes, abstract or not.
      mesh: the mesh.

    Returns:
      The tree with a sharding in the place of each box and each array; None for what is no array.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> box = nn.Partitioned(jnp.ones((2, 2)), (None, "model"))
      >>> tuple(nn.get_sharding({"w": box}, mesh)["w"].spec)
      (None, 'model')
    """

    def sharding(x: Any) -> Any:
        if hasattr(x, "get_sharding"):
            return x.get_sharding(mesh)
        spec = _leaf_spec(x)
        return None if spec is None else NamedSharding(mesh, spec)

    return jax.tree_util.tree_map(sharding, tree, is_leaf=is_axis_metadata)
