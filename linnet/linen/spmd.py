"""Names for the axes of values and variables, and rules from them to the axes of a mesh."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet import struct
from linnet.core import meta
from linnet.core.spmd import (
    get_logical_axis_rules as get_logical_axis_rules,
    logical_axis_rules as logical_axis_rules,
    set_logical_axis_rules as set_logical_axis_rules,
)
from linnet.errors import AxisError
from linnet.functional.sharding import placed
from linnet.typing import (
    Array as Array,
    ArrayPytree as ArrayPytree,
    LogicalNames as LogicalNames,
    LogicalPartitionSpec as LogicalPartitionSpec,
    LogicalPartitionSpecPytree as LogicalPartitionSpecPytree,
    LogicalRules as LogicalRules,
    PartitionSpecPytree as PartitionSpecPytree,
)


class RulesFallback(enum.Enum):
    """What ``with_logical_constraint`` does with a name for which there is no rule."""

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    RAISE_ERROR = "raise_error"
    NO_CONSTRAINT = "no_constraint"


_UNASSIGNED = object()


def _assigned_axes(names: Any, rules: LogicalRules | None) -> list[Any]:
    """The mesh axis of each name, by the first rule whose mesh axes are still free."""
    rules = get_logical_axis_rules() if rules is None else rules
    texts = [name for name in names if isinstance(name, str)]
    if repeated := [name for name in dict.fromkeys(texts) if texts.count(name) > 1]:
        raise AxisError(
            f"The names {tuple(names)} have {repeated[0]!r} more than once, and one mesh axis "
            "cannot shard two axes of an array.\nFix: give the axes different names."
        )
    axes = [_UNASSIGNED if isinstance(name, str) else name for name in names]
    taken: set[Any] = set()
    for name, axis in rules:
        position = names.index(name) if name in texts else None
        parts = set(axis if isinstance(axis, tuple | list) else (axis,)) - {None}
        if position is not None and axes[position] is _UNASSIGNED and not parts & taken:
            axes[position] = tuple(axis) if isinstance(axis, list) else axis
            taken |= parts
    return axes


def logical_to_mesh_axes(
    array_dim_names: Any, rules: LogicalRules | None = None
) -> PartitionSpec | None:
    """The partition spec of an array by the names of its axes.

    Args:
      array_dim_names: a name or None for each axis; None for no spec at all.
      rules: pairs of a name and a mesh axis, by default those in force. A name goes to the mesh
        axis of its first rule whose mesh axis no earlier rule gave to another name; one without
        a rule is not sharded.

    Returns:
      The spec.

    Raises:
      AxisError: a name stands there twice.

    Example:
      >>> from linnet import linen as nn
      >>> tuple(nn.logical_to_mesh_axes(("batch", "embed"), [("batch", "data"), ("embed", None)]))
      ('data', None)
    """
    if array_dim_names is None:
        return None
    axes = _assigned_axes(tuple(array_dim_names), rules)
    return PartitionSpec(*(None if axis is _UNASSIGNED else axis for axis in axes))


def _is_spec(x: Any) -> bool:
    if x is None or isinstance(x, PartitionSpec):
        return True
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def logical_to_mesh(tree: Any, rules: LogicalRules | None = None) -> Any:
    """Partition specs of mesh axes from those of names, for every spec of a tree.

    Args:
      tree: a pytree of specs, as ``get_partition_spec`` gives it.
      rules: the rules, by default those in force.

    Returns:
      The tree with the specs translated.

    Example:
      >>> from jax.sharding import PartitionSpec
      >>> from linnet import linen as nn
      >>> tuple(nn.logical_to_mesh({"w": PartitionSpec("embed", "mlp")}, [("mlp", "model")])["w"])
      (None, 'model')
    """
    return jax.tree_util.tree_map(
        lambda names: logical_to_mesh_axes(names, rules), tree, is_leaf=_is_spec
    )


def logical_to_mesh_sharding(tree: Any, mesh: Mesh, rules: LogicalRules | None = None) -> Any:
    """Shardings on a mesh from specs of names, for every spec of a tree.

    Args:
      tree, rules: as for ``logical_to_mesh``.
      mesh: the mesh.

    Returns:
      The tree with a sharding in the place of each spec.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from linnet import linen as nn
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> rules = [("batch", "data"), ("embed", None)]
      >>> tuple(nn.logical_to_mesh_sharding({"x": P("batch", "embed")}, mesh, rules)["x"].spec)
      ('data', None)
    """
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(mesh, spec),
        logical_to_mesh(tree, rules),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def _constrained(x: Any, spec: PartitionSpec | None, mesh: Mesh | None) -> Any:
    """Constrains the sharding of a value, if there is a mesh."""
    if spec is None or (mesh is None and not meta.global_mesh_defined()):
        return x
    return placed(x, spec if mesh is None else NamedSharding(mesh, spec))


def with_logical_constraint(
    x: Any,
    logical_axis_resources: Any,
    rules: LogicalRules | None = None,
    mesh: Mesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
    """Tells the compiler how values are sharded, by the names of their axes.

    Args:
      x: an array, or a pytree of them.
      logical_axis_resources: the names of the axes: a spec or a tuple, or a pytree of them.
      rules: the rules, by default those in force. Without rules nothing happens.
      mesh: the mesh, by default that of ``jax.set_mesh``. Without a mesh nothing happens.
      fallback: what to do with a name for which there is no rule.

    Returns:
      The values.

    Raises:
      AxisError: a name has no rule, and ``fallback`` is ``RAISE_ERROR``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> rules = [("batch", "data")]
      >>> y = nn.with_logical_constraint(jnp.ones((2, 3)), ("batch", None), rules, mesh)
      >>> tuple(y.sharding.spec)
      ('data', None)
    """
    rules = get_logical_axis_rules() if rules is None else rules
    if not rules or logical_axis_resources is None:
        return x

    def constrained(names: Any, values: Any) -> Any:
        if names is None:
            return values
        axes = _assigned_axes(tuple(names), rules)
        if _UNASSIGNED in axes and fallback is not RulesFallback.AXIS_IS_UNSHARDED:
            if fallback is RulesFallback.NO_CONSTRAINT:
                return values
            name = tuple(names)[axes.index(_UNASSIGNED)]
            known = ", ".join(repr(known) for known, _ in rules)
            raise AxisError(
                f"There is no rule for the axis {name!r} of {tuple(names)}; there are rules for "
                f"{known}.\nFix: add ({name!r}, mesh_axis_or_None) to the rules."
            )
        spec = PartitionSpec(*(None if axis is _UNASSIGNED else axis for axis in axes))
        return jax.tree_util.tree_map(lambda value: _constrained(value, spec, mesh), values)

    return jax.tree_util.tree_map(constrained, logical_axis_resources, x, is_leaf=_is_spec)


class LogicallyPartitioned(meta.Partitioned[Any]):
    """A value with names of its axes that rules translate to the axes of a mesh.

    Args:
      value: an array, or whatever stands for one.
      names: a name or None for each axis.
      mesh: the mesh, if it is not the one of ``jax.set_mesh``.
      rules: the rules, if they are not those in force.

    Example:
      >>> from linnet import linen as nn
      >>> tuple(nn.LogicallyPartitioned(1, ("embed", "mlp")).get_partition_spec())
      ('embed', 'mlp')
    """

    rules: Any = struct.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value.

        Args:
          apply_constraint: under a mesh and rules, tell the compiler how it is sharded.

        Returns:
          The value.
        """
        if not apply_constraint or (self.mesh is None and not meta.global_mesh_defined()):
            return self.value
        spec = self.get_partition_spec()
        return with_logical_constraint(self.value, spec, rules=self.rules, mesh=self.mesh)

    def to_nnx_metadata(self) -> dict[str, Any]:
        """The metadata of an NNX Variable with this value."""
        metadata = super().to_nnx_metadata()
        metadata["sharding_rules"] = metadata.pop("rules")
        return metadata

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Any:
        """The box of an NNX Variable's metadata.

        Args:
          metadata: the metadata.

        Returns:
          The box.
        """
        return super().from_nnx_metadata({**metadata, "rules": metadata.get("sharding_rules")})


def with_logical_partitioning(
    fn: Callable[..., Any],
    names: LogicalNames,
    mesh: Mesh | None = None,
    rules: LogicalRules | None = None,
) -> Callable[..., LogicallyPartitioned]:
    """Wraps an initializer so that its result carries names of its axes.

    Args:
      fn: any function that returns an array.
      names, mesh, rules: as for ``LogicallyPartitioned``.

    Returns:
      A function of the same arguments that returns a ``LogicallyPartitioned``.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> init = nn.with_logical_partitioning(jax.nn.initializers.zeros, ("embed", "mlp"))
      >>> init(jax.random.key(0), (2, 2)).names
      ('embed', 'mlp')
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> LogicallyPartitioned:
        return LogicallyPartitioned(fn(*args, **kwargs), names, mesh=mesh, rules=rules)

    return wrapper
