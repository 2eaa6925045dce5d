"""Sharding metadata on Variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet.nnx.metadata import with_metadata
from linnet.nnx.variablelib import Variable

PARTITION_NAME = "partition_name"


def with_partitioning(
    initializer: Callable[..., Any], sharding: Any, mesh: Mesh | None = None, **metadata: Any
) -> Callable[..., Any]:
    """Wraps an initializer so that the Variable made from its result carries axis names.

    Args:
      initializer: any function that returns a value.
      sharding: one axis name (or None) for each dimension.
      mesh: the mesh the names belong to.
      **metadata: more metadata to add.

    Returns:
      A function of the same arguments; pass its result to ``nnx.Param`` or another Variable.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> init = nnx.with_partitioning(jax.nn.initializers.zeros, (None, "model"))
      >>> nnx.Param(init(jax.random.key(0), (2, 2))).out_sharding
      (None, 'model')
    """
    if mesh is not None:
        metadata["mesh"] = mesh
    return with_metadata(initializer, out_sharding=sharding, **metadata)


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def get_partition_spec(tree: Any) -> Any:
    """The partition spec of each Variable, in its place.

    Args:
      tree: a state, a module, or any pytree with Variables.

    Returns:
      The tree with a ``PartitionSpec`` as the value of each Variable: its axis names, or no
      sharding for an array without names.
    """

    def spec(x: Any) -> Any:
        if isinstance(x, Variable):
            names = x.sharding_names
            return x.replace(_as_spec(names) if names is not None else _unsharded(x.raw_value))
        return _unsharded(x)

    return jax.tree_util.tree_map(spec, tree, is_leaf=_is_variable)


def _as_spec(names: Any) -> PartitionSpec:
    return names if isinstance(names, PartitionSpec) else PartitionSpec(*names)


def _unsharded(value: Any) -> PartitionSpec | None:
    return PartitionSpec() if hasattr(value, "shape") else None


def get_named_sharding(tree: Any, mesh: Mesh) -> Any:
    """The sharding of each Variable on a mesh, in its place.

    Args:
      tree: a state, a module, or any pytree with Variables.
      mesh: the mesh.

    Returns:
      The tree with a ``NamedSharding`` as the value of each Variable.
    """
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(mesh, spec),
        get_partition_spec(tree),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
