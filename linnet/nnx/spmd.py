"""Sharding of Variables: axis names in metadata, rules from names to mesh axes, shardings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet import config
from linnet.errors import AxisError
from linnet.functional.sharding import as_rules, axis_rules
from linnet.nnx.graphlib.split_merge import split
from linnet.nnx.graphlib.traverse import map as map_variables
from linnet.nnx.transforms import partition
from linnet.nnx.transforms.partition import PARTITION_NAME as PARTITION_NAME
from linnet.nnx.transforms.staging import eval_shape, shapes_on_mesh
from linnet.nnx.variablelib.drawing import with_metadata
from linnet.nnx.variablelib.placement import mesh_in_force, sharding_of, spec_of
from linnet.nnx.variablelib.variable import Variable, is_variable

Rules = Sequence[tuple[str, Any]]

A = TypeVar("A")


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
      >>> with jax.set_mesh(jax.make_mesh((1,), ("model",))):
      ...     kernel = nnx.Param(init(jax.random.key(0), (2, 2)))
      >>> kernel.out_sharding, tuple(kernel.value.sharding.spec)
      ((None, 'model'), (None, 'model'))
    """
    if mesh is not None:
        metadata["mesh"] = mesh
    return with_metadata(initializer, out_sharding=sharding, **metadata)


def get_partition_spec(tree: Any) -> Any:
    """A tree with the partition spec of each Variable as its value.

    Args:
      tree: a state, a module, or any pytree with Variables.

    Returns:
      The tree with a ``PartitionSpec`` as the value of each Variable: its axis names, or no
      sharding for an array without names.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> with nnx.use_eager_sharding(False):
      ...     state = nnx.State({"w": nnx.Param(jnp.ones((2, 2)), out_sharding=(None, "model"))})
      >>> tuple(nnx.get_partition_spec(state).w.value)
      (None, 'model')
    """

    def spec(x: Any) -> Any:
        return x.replace(get_var_pspec(x)) if isinstance(x, Variable) else _unsharded(x)

    return jax.tree_util.tree_map(spec, tree, is_leaf=is_variable)


def get_var_pspec(v: Variable[Any]) -> PartitionSpec | None:
    """The partition spec of one Variable.

    Args:
      v: the Variable.

    Returns:
      Its axis names as names of mesh axes; no sharding for an array without names; None for a
      value that is no array.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> with nnx.use_eager_sharding(False):
      ...     kernel = nnx.Param(jnp.ones((2, 2)), out_sharding=("a", None))
      >>> tuple(nnx.spmd.get_var_pspec(kernel))
      ('a', None)
    """
    names = v.sharding_names
    return _unsharded(v.raw_value) if names is None else spec_of(names, v.get_metadata())


def add_axis(tree: A, index: int, transform_metadata: Mapping[Any, Any]) -> A:
    """Names an axis that the values of all Variables gained, in their metadata.

    Args:
      tree: a state, a module, or any pytree with Variables, which are changed in place.
      index: the position of the axis, counted from the end if negative.
      transform_metadata: ``{nnx.PARTITION_NAME: name}``.

    Returns:
      A tree of the same Variables.

    Raises:
      AxisError: a Variable has axis names, and ``transform_metadata`` gives none for the axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> with nnx.use_eager_sharding(False):
      ...     state = nnx.State({"w": nnx.Param(jnp.ones((3, 2)), out_sharding=("model",))})
      >>> nnx.spmd.add_axis(state, 0, {nnx.PARTITION_NAME: "layers"})["w"].out_sharding
      ('layers', 'model')
    """

    def add(variable: Variable[Any], names: int) -> None:
        position = index if index >= 0 else max(0, names + 1 + index)
        partition.add_name(variable, position, transform_metadata.get(PARTITION_NAME))

    return _rename(tree, transform_metadata, add)


def remove_axis(tree: A, index: int, transform_metadata: Mapping[Any, Any]) -> A:
    """Removes the name of an axis that the values of all Variables lost from their metadata.

    Args:
      tree: a state, a module, or any pytree with Variables, which are changed in place.
      index: the position of the axis, counted from the end if negative.
      transform_metadata: ``{nnx.PARTITION_NAME: name}``.

    Returns:
      A tree of the same Variables.

    Raises:
      AxisError: the axis has another name, or ``transform_metadata`` gives none.
    """

    def remove(variable: Variable[Any], names: int) -> None:
        position = index if index >= 0 else max(0, names + index)
        name, where = transform_metadata.get(PARTITION_NAME), f"this {type(variable).__name__}"
        partition.remove_name(variable, position, name, where)

    return _rename(tree, transform_metadata, remove)


def _rename(
    tree: A, metadata: Mapping[Any, Any], change: Callable[[Variable[Any], int], None]
) -> A:
    """Changes the axis names of all Variables, given how many names each has."""

    def renamed(x: Any) -> Any:
        if not isinstance(x, Variable):
            return x
        names = x.get_metadata("out_sharding", None)
        if names and PARTITION_NAME not in metadata:
            raise AxisError(
                f"A {type(x).__name__} has the axis names {names!r}, but transform_metadata="
                f"{dict(metadata)!r} does not name the axis.\n"
                'Fix: {nnx.PARTITION_NAME: "name"}, with None for an axis that is not sharded.'
            )
        change(x, len(names or ()))
        return x

    return jax.tree_util.tree_map(renamed, tree, is_leaf=is_variable)


@contextlib.contextmanager
def logical_axis_rules(rules: Rules) -> Iterator[None]:
    """Maps the axis names on Variables to mesh axes for the length of a ``with`` block.

    Args:
      rules: pairs of a name and the mesh axis it stands for: a name, a tuple of names, or None for
        an axis that is not sharded. Names without a rule are mesh axes themselves.

    Returns:
      A context manager.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> with jax.set_mesh(mesh), nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
      ...     kernel = nnx.Param(jnp.ones((2, 2)), out_sharding=("embed", "mlp"))
      ...     tuple(nnx.get_partition_spec(kernel).value)
      (None, 'model')
    """
    with config.value_block(axis_rules, as_rules(rules)):
        yield


def _unsharded(value: Any) -> PartitionSpec | None:
    return PartitionSpec() if hasattr(value, "shape") else None


def get_named_sharding(tree: Any, mesh: Mesh) -> Any:
    """A tree with the sharding of each Variable on a mesh as its value.

    Args:
      tree: a state, a module, or any pytree with Variables.
      mesh: the mesh.

    Returns:
      The tree with a ``NamedSharding`` as the value of each Variable.

    Raises:
      ShardingError: the axis names of a Variable do not fit its shape or the mesh.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> with nnx.use_eager_sharding(False):
      ...     state = nnx.State({"w": nnx.Param(jnp.ones((2, 2)), out_sharding=(None, "model"))})
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> tuple(nnx.get_named_sharding(state, mesh).w.value.spec)
      (None, 'model')
    """

    def sharding(path: Any, x: Any) -> Any:
        if not isinstance(x, Variable):
            spec = _unsharded(x)
            return None if spec is None else NamedSharding(mesh, spec)
        value, metadata = x.raw_value, {**x.get_metadata(), "mesh": mesh}
        if not hasattr(value, "shape"):
            return x.replace(None)
        where = jax.tree_util.keystr(path)
        name = f"The {type(x).__name__}" + (f" at {where}" if where else "")
        names = x.sharding_names or ()
        return x.replace(sharding_of(names, metadata, value, lambda: name, strict=False))

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=is_variable)


def as_abstract(tree: Any, graph: bool | None = None) -> Any:
    """Puts shardings on an abstract tree, from the axis names and the mesh in force.

    Args:
      tree: a module, a state, or any pytree of them, as ``nnx.eval_shape`` made it.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      A copy in which every ``jax.ShapeDtypeStruct`` in a Variable has its sharding: on the mesh in
      its ``mesh`` metadata, or the one of ``jax.set_mesh``. Without a mesh, and where there is an
      array, nothing changes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> make = lambda: nnx.Param(jnp.ones((4, 2)), out_sharding=("rows", None))
      >>> with jax.set_mesh(jax.make_mesh((1,), ("rows",))):
      ...     tuple(nnx.as_abstract(nnx.eval_shape(make)).value.sharding.spec)
      ('rows', None)
    """

    mesh = mesh_in_force()

    def placed(path: Any, variable: Any) -> Any:
        if not isinstance(variable, Variable):
            return variable
        return variable.replace(shapes_on_mesh(variable, mesh, path))

    return map_variables(placed, tree, graph=graph)


abstract_with_sharding = as_abstract


def get_abstract_model(
    init_fn: Callable[[], Any], mesh: Mesh, *, graph: bool | None = None
) -> tuple[Any, Any]:
    """The structure of a model and its abstract state, with shardings, without building it.

    Args:
      init_fn: makes the model.
      mesh: the mesh that the axis names belong to.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      ``(graphdef, state)``, the state with a ``jax.ShapeDtypeStruct`` in each Variable.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> graphdef, state = nnx.get_abstract_model(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), mesh)
      >>> state.kernel.value.shape, state.kernel.value.sharding.mesh.axis_names
      ((2, 3), ('model',))
    """
    with jax.set_mesh(mesh):
        model = as_abstract(eval_shape(init_fn, graph=graph), graph=graph)
    return split(model, graph=graph)
