"""How the value of a Variable is stored: plainly, as JAX refs, or as a seed not yet made a key.

Whatever it is stands in the ``Cell`` of the Variable. ``var_defaults`` and ``use_eager_sharding``
set the defaults of new Variables. ``to_refs``, ``from_refs`` and ``write_refs`` convert between a
value and its refs. A ``Seed`` stands for a random key that nobody has read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from linnet import config
from linnet.errors import StorageError, type_text
from linnet.nnx.pytreelib import kinds


class Cell:
    """Holds the value of one Variable; with one attribute and nothing else it is fast to read."""

    __slots__ = ("value",)
    value: Any


def new_cell(value: Any) -> Cell:
    """A cell with a value, made faster than by a constructor."""
    cell = Cell()
    cell.value = value
    return cell


def set_cells(cells: Iterable[Cell], values: Iterable[Any]) -> None:
    """Stores values in cells, by a loop in C, which a signal such as Ctrl-C cannot stop halfway."""
    collections.deque(map(_set_value, cells, values), 0)


_set_value = Cell.__dict__["value"].__set__


class use_eager_sharding(
    config.Setting, env="NNX_EAGER_SHARDING", switch="flax_always_shard_variable"
):
    """Whether new Variables with a sharding are placed on the mesh as soon as they are made.

    Args:
      value: True, which is the default, or False.

    Returns:
      A context manager and decorator, which takes the value back; without a block it stays.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> with nnx.use_eager_sharding(False):  # needs no mesh
      ...     kernel = nnx.Param(jnp.ones((4, 2)), out_sharding=("data", None))
      >>> kernel.out_sharding
      ('data', None)
    """


def using_eager_sharding() -> bool:
    """The value of ``use_eager_sharding`` in force here.

    Returns:
      Whether new Variables with a sharding are placed on the mesh as soon as they are made.

    Example:
      >>> from linnet import nnx
      >>> with nnx.use_eager_sharding(False):
      ...     nnx.using_eager_sharding()
      False
    """
    return use_eager_sharding.current_value()


@dataclasses.dataclass(frozen=True)
class VarDefaults(Mapping[str, bool]):
    """How new Variables are stored by default; a mapping from the setting's name to its value.

    Args:
      hijax: as refs that plain JAX transforms update.
      ref: as JAX refs.

    Example:
      >>> from linnet import nnx
      >>> defaults = nnx.var_defaults()
      >>> "hijax" in defaults, {**defaults}
      (True, {'hijax': False, 'ref': False})
    """

    hijax: bool = False
    ref: bool = False

    def __getitem__(self, name: str) -> bool:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


_REF_TYPES = (*kinds.ARRAY_TYPES, np.generic, bool, int, float, complex)
_var_defaults = jax.make_user_context(VarDefaults(config.env_flag("FLAX_HIJAX_VARIABLE", False)))


def current_defaults() -> VarDefaults:
    """The defaults in force here."""
    return _var_defaults.value


class VarDefaultsContext(config.Applied):
    """Defaults in force from the call on, or, as a ``with`` block or decorator, for a while."""

    def __init__(self, defaults: VarDefaults):
        super().__init__(_var_defaults, defaults)
        self.defaults = defaults


def var_defaults(*, hijax: bool | None = None, ref: bool | None = None) -> Any:
    """Sets how new Variables are stored by default; without arguments, returns the defaults.

    Args:
      hijax: store as refs that plain JAX transforms update.
      ref: store as JAX refs.

    Returns:
      Without arguments the defaults in force, a mapping; otherwise something that took effect at
      once, or only for a while where it is used as a ``with`` block or a decorator.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> with nnx.var_defaults(hijax=True):
      ...     v = nnx.Variable(jnp.array(1.0))
      >>> v.hijax, nnx.var_defaults()
      (True, VarDefaults(hijax=False, ref=False))
      >>> @nnx.var_defaults(hijax=True)
      ... def make():
      ...     return nnx.Param(jnp.array(1.0))
      >>> make().hijax, nnx.Param(jnp.array(1.0)).hijax
      (True, False)
    """
    current = current_defaults()
    if hijax is None and ref is None:
        return current
    changes = {"hijax": hijax, "ref": ref}
    given = {name: value for name, value in changes.items() if value is not None}
    return VarDefaultsContext(dataclasses.replace(current, **given))


config.add_switch(
    "flax_hijax_variable",
    lambda: _var_defaults.get_global().hijax,
    lambda value: var_defaults(hijax=value),
)


@functools.partial(register_dataclass, data_fields=["number"], meta_fields=["implementation"])
@dataclasses.dataclass(eq=False, slots=True)
class Seed:
    """A seed whose JAX key is made on first use, and the name of the implementation.

    Making a key takes longer than dispatching a small compiled function. A compiled function takes
    the seed itself (this is a pytree of one number) and makes the key inside; everyone else gets
    the key.
    """

    number: Any
    implementation: str

    def key(self) -> jax.Array:
        """The key; a tracer where the seed is one."""
        return jax.random.key(self.number, impl=self.implementation)


def implementation_of_seeds() -> str | None:
    """The default key implementation; None if settings or a mesh want a key made at once."""
    config, defaults = jax.config, _var_defaults.value
    if defaults.hijax or defaults.ref:
        return None
    if config.jax_default_device is not None or config.jax_random_seed_offset:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    if not jax.sharding.get_abstract_mesh().empty:
        return None
    return config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]


def seed_of(implementation: str | None, value: Any) -> Seed | None:
    """A ``Seed``, if the value is an integer whose key does not depend on its width."""
    if implementation is not None and type(value) is int and 0 <= value < 2**31:
        return Seed(np.uint32(value), implementation)
    return None


def to_refs(value: Any) -> Any:
    """The value with a fresh JAX ref in place of each array or number."""
    return jax.tree_util.tree_map(_to_ref, from_refs(value))


def _to_ref(leaf: Any) -> Any:
    return jax.new_ref(leaf) if isinstance(leaf, _REF_TYPES) else leaf


def from_refs(value: Any) -> Any:
    """The value with each JAX ref read, and a key in place of a ``Seed``."""
    if isinstance(value, jax.Ref):
        return value[...]
    if isinstance(value, kinds.ARRAY_TYPES):
        return value
    if type(value) is Seed:
        return value.key()
    read = lambda leaf: leaf[...] if isinstance(leaf, jax.Ref) else leaf  # noqa: E731
    return jax.tree_util.tree_map(read, value)


def settle_seeds(values: list[Any]) -> list[Any]:
    """The values, with a key in place of each ``Seed``."""
    return [value.key() if type(value) is Seed else value for value in values]


def write_refs(held: Any, value: Any, name: Callable[[], str]) -> bool:
    """Writes a value into the refs of a Variable called ``name()``; False if it holds none yet.

    Nothing is written, and a StorageError raised, if a structure, shape or dtype differs.
    """
    refs, structure = jax.tree_util.tree_flatten(held)
    if not refs or not all(isinstance(ref, jax.Ref) for ref in refs):
        return False
    values, new_structure = jax.tree_util.tree_flatten(from_refs(value))
    if structure != new_structure:
        raise StorageError(
            f"{name()} is stored as JAX refs, whose structure is fixed: it holds {structure}, "
            f"but got {new_structure}.\nFix: keep the structure, or {_STORE_PLAINLY}"
        )
    for ref, new in zip(refs, values, strict=True):
        if not _fits(ref, new):
            raise StorageError(
                f"{name()} is stored as a JAX ref, whose type is fixed: it holds "
                f"{type_text(ref)}, but got {type_text(new)}.\n"
                f"Fix: keep shape and dtype, or {_STORE_PLAINLY}"
            )
    for ref, new in zip(refs, values, strict=True):
        ref[...] = jnp.asarray(new, ref.dtype)
    return True


_STORE_PLAINLY = "store it plainly with nnx.with_vars(..., hijax=False, ref=False)."


def _fits(ref: Any, new: Any) -> bool:
    """Whether a ref can hold ``new`` without a change of its type."""
    if np.shape(new) != ref.shape:
        return False
    array = jnp.asarray(new)
    weak = getattr(array, "weak_type", False)
    return array.dtype == ref.dtype or (weak and jnp.result_type(array, ref.dtype) == ref.dtype)
