"""Collections of Linen variables as NNX Variables by attribute, and back.

A Linen variable has a collection and a path; an NNX Variable has a type and a path. The types stand
for the collections by the names of ``nnx.register_variable_name``. Metadata goes along: a box of
Linen (``Partitioned``) becomes metadata that remembers the box as ``linen_meta_type``, and metadata
that no box of Linen made becomes an ``NNXMeta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import DictKey

from linnet import struct
from linnet.core import meta
from linnet.errors import CollectionError, path_string
from linnet.nnx import spmd
from linnet.nnx.pytreelib.kinds import Path
from linnet.nnx.variablelib.drawing import VariableMetadata, with_metadata
from linnet.nnx.variablelib.metadata import STORAGE, Metadata
from linnet.nnx.variablelib.names import variable_name_from_type, variable_type_from_name
from linnet.nnx.variablelib.variable import Variable
from linnet.traverse_util import iter_entries, put_leaf, taken_place
from linnet.typing import LogicalNames

BOX_TYPE = "linen_meta_type"  # the metadata that remembers the box a value was in


class NNXMeta(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A Linen box with the type and the metadata of an NNX Variable.

    Args:
      var_type: the type of the Variable.
      value: its value.
      metadata: its metadata.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> box = nnx.bridge.NNXMeta(nnx.Param, jnp.ones(2), {"unit": "m"})
      >>> box.to_nnx_variable().unit
      'm'
    """

    var_type: type[Variable[Any]] = struct.field(pytree_node=False)
    value: Any
    # __post_init__ makes it a Metadata, which is hashable: JAX hashes the structure of arguments.
    metadata: dict[str, Any] = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        if not isinstance(self.metadata, Metadata):
            object.__setattr__(self, "metadata", Metadata(self.metadata))

    def unbox(self) -> Any:
        """The value."""
        return self.value

    def replace_boxed(self, val: Any) -> NNXMeta:
        """The same metadata around another value."""
        return self.replace(value=val)

    def _with_axis(self, change: Callable[..., Any], index: int, params: dict[Any, Any]) -> NNXMeta:
        if meta.PARTITION_NAME not in params:
            return self
        variable = self.var_type.from_metadata(self.value, self.metadata)
        change({"value": variable}, index, {spmd.PARTITION_NAME: params[meta.PARTITION_NAME]})
        changed = variable.get_metadata()
        return self.replace(metadata={k: v for k, v in changed.items() if self._is_ours(k)})

    def _is_ours(self, name: str) -> bool:
        return name in self.metadata or name not in STORAGE

    def add_axis(self, index: int, params: dict[Any, Any]) -> NNXMeta:
        """The box of a value that gained an axis, with its name where ``params`` has one.

        Args:
          index: the position of the axis.
          params: ``{nn.PARTITION_NAME: name}``.

        Returns:
          The new box.
        """
        return self._with_axis(spmd.add_axis, index, params)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> NNXMeta:
        """The box of a value that lost an axis, without its name.

        Args:
          index: the position of the axis.
          params: ``{nn.PARTITION_NAME: name}``.

        Returns:
          The new box.
        """
        return self._with_axis(spmd.remove_axis, index, params)

    def get_partition_spec(self) -> PartitionSpec:
        """The names of the axes as a ``PartitionSpec``."""
        variable = self.var_type.from_metadata(self.value, self.metadata)
        return spmd.get_var_pspec(variable) or PartitionSpec()

    def to_nnx_variable(self) -> Variable[Any]:
        """The Variable with this type, value and metadata."""
        return self.var_type(self.value, **self.metadata)


def with_partitioning(
    fn: Callable[..., Any], names: LogicalNames, mesh: Mesh | None = None
) -> Callable[..., VariableMetadata]:
    """Wraps an initializer so that its value has axis names, in Linen as a ``Partitioned``.

    Args:
      fn: any function that returns an array.
      names: for each axis the name of a mesh axis, or None.
      mesh: the mesh, if it is not the one of ``jax.set_mesh``.

    Returns:
      A function of the same arguments; pass its result to ``nnx.Param`` or another Variable.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> init = nnx.bridge.with_partitioning(jax.nn.initializers.zeros, (None, "model"))
      >>> layer = nnx.bridge.to_linen(nnx.Linear, 2, 2, kernel_init=init)
      >>> with jax.set_mesh(jax.make_mesh((1,), ("model",))):
      ...     variables = layer.init(jax.random.key(0), jax.numpy.ones((1, 2)))
      >>> variables["params"]["kernel"].names
      (None, 'model')
    """
    return with_metadata(fn, out_sharding=names, mesh=mesh, **{BOX_TYPE: meta.Partitioned})


def is_vanilla_variable(vs: Variable[Any]) -> bool:
    """Whether a Variable has no metadata other than how it is stored."""
    return not vs.get_metadata(exclude_required=True)


def to_linen_var(vs: Variable[Any]) -> Any:
    """The value of a Variable as Linen keeps it: in a box if it has metadata.

    Args:
      vs: the Variable.

    Returns:
      The value; in the box it came from (``Partitioned``) or in an ``NNXMeta`` with metadata.

    Example:
      >>> from linnet import nnx
      >>> nnx.bridge.variables.to_linen_var(nnx.Param(1.0))
      1.0
      >>> type(nnx.bridge.variables.to_linen_var(nnx.Param(1.0, unit="m"))).__name__
      'NNXMeta'
    """
    value, metadata = vs.get_value(), vs.get_metadata()
    box = metadata.pop(BOX_TYPE, None)
    if box is not None and hasattr(box, "from_nnx_metadata"):
        return box.from_nnx_metadata({"value": value, **metadata})
    if box is not None:
        own = {name: x for name, x in metadata.items() if name not in STORAGE}
        return box(value, **own)
    if is_vanilla_variable(vs):
        return value
    return NNXMeta(type(vs), value, metadata)


def to_nnx_var(col: str, x: Any) -> Variable[Any]:
    """The Variable for a value of a collection.

    Args:
      col: the collection; a name that stands for no type yet gets a new one.
      x: the value, in a box or not.

    Returns:
      The Variable. The metadata of a box becomes its metadata.

    Raises:
      CollectionError: ``x`` is an ``NNXMeta`` of another type than the collection's.

    Example:
      >>> import jax
      >>> from linnet import linen, nnx
      >>> box = linen.Partitioned(jax.numpy.ones(2), names=("model",))
      >>> with jax.set_mesh(jax.make_mesh((1,), ("model",))):
      ...     nnx.bridge.variables.to_nnx_var("params", box).out_sharding
      ('model',)
    """
    var_type = variable_type_from_name(col, allow_register=True)
    if isinstance(x, NNXMeta):
        if x.var_type is not var_type:
            raise CollectionError(
                f"The collection {col!r} has Variables of the type {var_type.__name__}, but got "
                f"an NNXMeta of a {x.var_type.__name__}.\n"
                f"Fix: put it into the collection of its type, or register the type by the name: "
                f"nnx.register_variable_name({col!r}, {x.var_type.__name__}, overwrite=True)."
            )
        return x.to_nnx_variable()
    if not isinstance(x, meta.AxisMetadata):
        return var_type(x)
    to_metadata = getattr(x, "to_nnx_metadata", None)
    metadata = dict(to_metadata() if to_metadata is not None else vars(x))
    metadata.pop("value", None)
    metadata[BOX_TYPE] = type(x)
    return var_type(x.unbox(), **metadata)


def flat_entries(tree: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    """Every value of nested mappings, boxed or not, with its path."""
    for key, value in tree.items():
        yield from iter_entries(value, (key,))


def as_position(key: Any) -> Any:
    """A key as the position in a list that it may stand for: stored files have numbers as text."""
    return int(key) if isinstance(key, str) and key.isdigit() else key


def put_at(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Sets a value in nested dicts, making those on the way; refuses a path that is taken."""
    if not put_leaf(tree, path, value):
        taken = path_string(taken_place(tree, path))
        raise CollectionError(
            f"Two collections have something at {taken}: an NNX object has one attribute there, "
            f"and no place for {path_string(path)}.\n"
            "Fix: give one of the two variables another name in the Linen module."
        )


def linen_vars_to_nnx_attrs(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Linen's collections as nested dicts of Variables, one for all of them.

    Args:
      variables: the collections.

    Returns:
      Nested dicts by the paths of the variables.

    Raises:
      CollectionError: two collections have a variable of the same path.

    Example:
      >>> from linnet import nnx
      >>> attrs = nnx.bridge.variables.linen_vars_to_nnx_attrs(
      ...     {"params": {"norm": {"scale": 1.0}}, "batch_stats": {"norm": {"mean": 0.0}}}
      ... )
      >>> {name: type(v).__name__ for name, v in attrs["norm"].items()}
      {'scale': 'Param', 'mean': 'BatchStat'}
    """
    attrs: dict[str, Any] = {}
    for col, tree in variables.items():
        for path, value in flat_entries(tree):
            put_at(attrs, path, to_nnx_var(col, value))
    return attrs


def nnx_attrs_to_linen_vars(nnx_attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of Variables as Linen's collections: undoes ``linen_vars_to_nnx_attrs``.

    Args:
      nnx_attrs: nested dicts of Variables.

    Returns:
      The collections.

    Raises:
      CollectionError: a value is not a Variable.
      ValueError: the type of a Variable has no name.

    Example:
      >>> from linnet import nnx
      >>> nnx.bridge.variables.nnx_attrs_to_linen_vars({"norm": {"mean": nnx.BatchStat(0.0)}})
      {'batch_stats': {'norm': {'mean': 0.0}}}
    """
    collections: dict[str, Any] = {}
    for path, value in flat_entries(nnx_attrs):
        if not isinstance(value, Variable):
            raise CollectionError(
                f"Cannot infer collection name from value: {path_string(path)} is no Variable, but "
                f"{type(value).__name__}.\n"
                "Fix: put the value into a Variable, such as nnx.Param; to change one that is "
                "there, write to it: variable[...] = value."
            )
        col = variable_name_from_type(type(value))
        put_at(collections.setdefault(col, {}), path, to_linen_var(value))
    return collections


def get_col_name(keypath: Sequence[Any]) -> str:
    """The collection of a leaf of variables, from its path as JAX gives it.

    Args:
      keypath: the path, of ``jax.tree_util`` keys.

    Returns:
      The first key.

    Raises:
      CollectionError: the first key is not that of a dict.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({"params": {"w": 1}})
      >>> nnx.bridge.variables.get_col_name(path)
      'params'
    """
    first = keypath[0]
    if not isinstance(first, DictKey):
        raise CollectionError(
            f"The path of a variable begins with its collection, a jax.tree_util.DictKey, but got "
            f"{first!r}."
        )
    return first.key


def sort_variable_types(types: Iterable[type]) -> list[type]:
    """Types in an order in which a subclass comes before its bases.

    Args:
      types: types of Variables.

    Returns:
      The sorted list.

    Example:
      >>> from linnet import nnx
      >>> [t.__name__ for t in nnx.bridge.variables.sort_variable_types([nnx.Variable, nnx.Param])]
      ['Param', 'Variable']
    """
    return sorted(types, key=lambda t: -len(t.__mro__))
