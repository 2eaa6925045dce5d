"""The older way to name axes: a collection of names beside each collection of variables.

``param_with_axes("kernel", init, shape, axes=("embed", "mlp"))`` makes a parameter, and in the
collection ``params_axes`` an entry ``kernel_axes`` with the names. ``linen.spmd`` puts the names
around the values instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from linnet import struct
from linnet.core.scope import CollectionFilter, PRNGSequenceFilter, Scope, Variable
from linnet.frozen_dict import FrozenDict, freeze
from linnet.linen import transforms
from linnet.linen.context import context
from linnet.linen.module import Module
from linnet.linen.spmd import (
    RulesFallback as RulesFallback,
    get_logical_axis_rules as get_axis_rules,
    logical_axis_rules as axis_rules,
    logical_to_mesh as logical_to_mesh,
    logical_to_mesh_axes as logical_to_mesh_axes,
    set_logical_axis_rules as set_axis_rules,
    with_logical_constraint as with_sharding_constraint,
)
from linnet.traverse_util import flatten_dict, unflatten_dict
from linnet.typing import (
    In as ScanIn,
    InOutAxis,
    InOutScanAxis,
    LogicalPartitionSpec as LogicalPartitionSpec,
    LogicalPartitionSpecPytree as LogicalPartitionSpecPytree,
    LogicalRules as LogicalRules,
    Out as ScanOut,
    PartitionSpecPytree as PartitionSpecPytree,
)

__all__ = [
    "AxisMetadata",
    "LogicalPartitionSpec",
    "LogicalPartitionSpecPytree",
    "LogicalRules",
    "PartitionSpecPytree",
    "PartitionedVariable",
    "RulesFallback",
    "ScanIn",
    "ScanOut",
    "axis_rules",
    "get_axis_names",
    "get_axis_rules",
    "logical_to_mesh",
    "logical_to_mesh_axes",
    "param_with_axes",
    "remat",
    "scan_with_axes",
    "set_axis_rules",
    "variable_with_axes",
    "vmap_with_axes",
    "with_sharding_constraint",
]

AxisNames = tuple[str | None, ...]


@struct.dataclass
class AxisMetadata:
    """The names of the axes of one variable. A pytree without leaves.

    Args:
      names: the names.
    """

    names: Any = struct.field(pytree_node=False)


class PartitionedVariable(Variable[Any]):
    """A variable whose values are constrained to the sharding that the names of its axes give.

    Args:
      scope: the scope.
      collection: the collection.
      name: the variable's name.
      axes: the names of its axes.
      fallback: what to do with a name for which there is no rule.
    """

    def __init__(
        self,
        scope: Scope,
        collection: str,
        name: str,
        axes: AxisNames | None = None,
        fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
    ):
        super().__init__(scope, collection, name, unbox=True)
        self.axes = axes
        self.fallback = fallback

    def _constrained(self, value: Any) -> Any:
        if self.axes is None:
            return value
        return with_sharding_constraint(value, self.axes, fallback=self.fallback)

    @property
    def value(self) -> Any:
        """The value."""
        return self._constrained(self.scope.get_variable(self.collection, self.name))

    @value.setter
    def value(self, value: Any) -> None:
        self.scope.put_variable(self.collection, self.name, self._constrained(value))


def _running_module(module: Module | None, what: str) -> Any:
    found = module if module is not None else context.module_stack[-1]
    if found is None:
        raise AssertionError(
            f"{what} was called outside of all modules.\n"
            "Fix: call it in setup or in a compact method, or give module=."
        )
    return found


def _note_names(module: Any, name: str, axes: AxisNames, col: str) -> None:
    module.sow(
        f"{col}_axes",
        f"{name}_axes",
        AxisMetadata(tuple(axes)),
        reduce_fn=lambda before, names: _same_names(name, before, names),
        init_fn=lambda: None,
    )


def _same_names(name: str, before: AxisMetadata | None, names: AxisMetadata) -> AxisMetadata:
    """The names of a variable's axes; refuses names that differ from those before."""
    if before is not None and tuple(before.names) != tuple(names.names):
        raise ValueError(
            f'The axes of "{name}" are named {tuple(names.names)}, but were named '
            f"{tuple(before.names)} before.\nFix: name them alike in every call."
        )
    return names


def param_with_axes(
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    axes: AxisNames | None = None,
    module: Module | None = None,
    **init_kwargs: Any,
) -> Any:
    """A parameter of the running module, with names for its axes in ``params_axes``.

    Args:
      name: the parameter.
      init_fn: makes its first value from a random key.
      *init_args, **init_kwargs: further arguments of ``init_fn``.
      axes: the names of its axes.
      module: the module, by default the running one.

    Returns:
      The value; under rules and a mesh, the compiler is told how it is sharded.

    Raises:
      AssertionError: no module is running.
      ValueError: ``axes`` are not given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> from linnet.linen import partitioning
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         ones = jax.nn.initializers.ones
      ...         return x * partitioning.param_with_axes("scale", ones, (3,), axes=("embed",))
      >>> Scale().init(jax.random.key(0), jnp.ones(3))["params_axes"]
      {'scale_axes': AxisMetadata(names=('embed',))}
    """
    target = _running_module(module, "param_with_axes")
    value = target.param(name, init_fn, *init_args, **init_kwargs)
    axes = _given_axes(name, axes)
    _note_names(target, name, axes, "params")
    return with_sharding_constraint(value, PartitionSpec(*axes))


def _given_axes(name: str, axes: AxisNames | None) -> AxisNames:
    if axes is None:
        raise ValueError(
            f'"{name}" was made without names for its axes.\n'
            'Fix: axes=("embed", "mlp"), one name or None for each axis.'
        )
    return axes


def variable_with_axes(
    collection: str,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    axes: AxisNames | None = None,
    module: Module | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
    **init_kwargs: Any,
) -> PartitionedVariable:
    """A variable of the running module, with names for its axes in ``<collection>_axes``.

    Args:
      collection: the collection.
      name: the variable.
      init_fn: makes its first value.
      *init_args, **init_kwargs: arguments of ``init_fn``.
      axes, module: as for ``param_with_axes``.
      fallback: what to do with a name for which there is no rule.

    Returns:
      The variable.

    Raises:
      AssertionError: no module is running.
      ValueError: ``axes`` are not given.
    """
    target = _running_module(module, "variable_with_axes")
    made = target.variable(collection, name, init_fn, *init_args, **init_kwargs)
    axes = _given_axes(name, axes)
    _note_names(target, name, axes, collection)
    return PartitionedVariable(made.scope, collection, name, axes, fallback)


def get_axis_names(axes_metadata: Mapping[str, Any]) -> FrozenDict[str, Any]:
    """The names of axes of a collection ``<collection>_axes``, shaped as the collection itself.

    Args:
      axes_metadata: such as ``variables["params_axes"]``.

    Returns:
      A partition spec for each variable, under the variable's name.

    Example:
      >>> from linnet.linen import partitioning
      >>> axes = {"dense": {"kernel_axes": partitioning.AxisMetadata(("embed", "mlp"))}}
      >>> tuple(partitioning.get_axis_names(axes)["dense"]["kernel"])
      ('embed', 'mlp')
    """
    flat = flatten_dict(axes_metadata)
    names = {
        (*path[:-1], str(path[-1]).removesuffix("_axes")): PartitionSpec(*entry.names)
        for path, entry in flat.items()
    }
    return freeze(unflatten_dict(names))


# ---- lifted transforms that keep the names in step ----------------------------------------------


def _rename(change: Callable[[list[Any]], None], tree: Any) -> Any:
    def renamed(entry: Any) -> Any:
        if not isinstance(entry, AxisMetadata):
            return entry
        names = list(entry.names)
        change(names)
        return AxisMetadata(tuple(names))

    return jax.tree_util.tree_map(renamed, tree, is_leaf=lambda x: isinstance(x, AxisMetadata))


def _with_axis(target: Any, collection: str, axis: Any, axis_name: str, methods: Any) -> Any:
    """Adds the name of a mapped axis to the names of a collection, outside of ``target``."""
    position = axis.axis if isinstance(axis, ScanIn | ScanOut) else axis

    def remove(names: list[Any]) -> None:
        if axis_name in names:
            names.remove(axis_name)

    def add(names: list[Any]) -> None:
        names.insert(position if position >= 0 else len(names) + 1 + position, axis_name)

    return transforms.map_variables(
        target,
        f"{collection}_axes",
        trans_in_fn=functools.partial(_rename, remove),
        trans_out_fn=functools.partial(_rename, add),
        mutable=True,
        methods=methods,
    )


def scan_with_axes(
    target: Any,
    variable_axes: Mapping[CollectionFilter, InOutScanAxis] = {},
    variable_broadcast: CollectionFilter = False,
    variable_carry: CollectionFilter = False,
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    axis_name: str = "layers",
    axes_collections: tuple[str, ...] = ("params",),
    data_transform: Callable[..., Any] | None = None,
    methods: Any = None,
) -> Any:
    """``nn.scan`` for modules whose variables have names for their axes.

    Args:
      target, variable_axes, variable_broadcast, variable_carry, split_rngs, in_axes, out_axes,
        length, reverse, unroll, data_transform, methods: as for ``nn.scan``.
      axis_name: the name of the axis that variables gain.
      axes_collections: the collections with names for their axes.

    Returns:
      The class or function.
    """
    options = transforms.without(locals(), "axis_name", "axes_collections")
    options["variable_axes"] = {**variable_axes, **{f"{col}_axes": 0 for col in axes_collections}}
    lifted = transforms.scan(**options)
    for col in axes_collections:
        if col in variable_axes:
            lifted = _with_axis(lifted, col, variable_axes[col], axis_name, methods)
    return lifted


def vmap_with_axes(
    target: Any,
    variable_axes: Mapping[CollectionFilter, InOutAxis],
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: str | None = None,
    partitioning_axis_names: Mapping[Any, str] = {},
    spmd_axis_name: str | None = None,
    methods: Any = None,
) -> Any:
    """``nn.vmap`` for modules whose variables have names for their axes.

    Args:
      target, variable_axes, split_rngs, in_axes, out_axes, axis_size, axis_name, spmd_axis_name,
        methods: as for ``nn.vmap``.
      partitioning_axis_names: the name of the axis that the variables of a collection gain.

    Returns:
      The class or function.
    """
    options = transforms.without(locals(), "partitioning_axis_names")
    names = {f"{col}_axes": None for col in variable_axes if isinstance(col, str)}
    options["variable_axes"] = {**variable_axes, **names}
    lifted = transforms.vmap(**options)
    for col, name in partitioning_axis_names.items():
        if col in variable_axes:
            lifted = _with_axis(lifted, col, variable_axes[col], name, methods)
    return lifted


def remat(
    target: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
    methods: Any = None,
) -> Any:
    """``nn.remat`` whose ``static_argnums`` do not count the module.

    Args:
      target, variables, rngs, concrete, prevent_cse, policy, methods: as for ``nn.remat``.
      static_argnums: positions of arguments that are not traced; the first one after the module is
        number 0.

    Returns:
      The class or function.
    """
    options = transforms.without(locals(), "static_argnums")
    numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    lifted = transforms.checkpoint(**options, static_argnums=tuple(n + 1 for n in numbers))
    if isinstance(target, type):
        # Stored parameters have this name in their paths.
        lifted.__name__ = f"Core_remat_static{target.__name__}"
    return lifted
