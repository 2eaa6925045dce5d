"""Names for the types that programs annotate with: ``from linnet.typing import Array, Dtype``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import jax

T = TypeVar("T")

# ---- arrays, dtypes and functions of them -------------------------------------------------------

Array = jax.Array | Any
PRNGKey = jax.Array
RNGSequences = dict[str, PRNGKey]
Dtype = jax.typing.DTypeLike | Any
Shape = Sequence[int]
PrecisionLike = (
    None | str | jax.lax.Precision | tuple[str, str] | tuple[jax.lax.Precision, jax.lax.Precision]
)
Initializer = Callable[..., Any]  # a function of a key, a shape and a dtype
DotGeneralT = Callable[..., Array]
ConvGeneralDilatedT = Callable[..., Array]
EinsumT = Callable[..., Array]
PaddingLike = str | int | Sequence[int | tuple[int, int]]
LaxPadding = str | Sequence[tuple[int, int]]


class PromoteDtypeFn(Protocol):
    """A function that converts arrays to one dtype: the one given, or the one they promote to."""

    def __call__(self, args: tuple[T, ...], /, *, dtype: Any = None, inexact: bool = True) -> Any:
        """The arrays in one dtype."""
        ...


class ShapeDtype(Protocol):
    """Whatever has a shape and a dtype."""

    shape: Shape
    dtype: Dtype


def has_shape_dtype(x: Any) -> TypeGuard[ShapeDtype]:
    """Whether something has a shape and a dtype.

    Args:
      x: anything.

    Returns:
      True for arrays, abstract ones too.

    Example:
      >>> import numpy as np
      >>> has_shape_dtype(np.ones(2)), has_shape_dtype(2)
      (True, False)
    """
    return hasattr(x, "shape") and hasattr(x, "dtype")


# ---- paths and collections ----------------------------------------------------------------------


class Key(Hashable, Protocol):
    """One step of a path: it has a hash and an order."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether this step comes first."""
        ...


def is_key_like(x: Any) -> TypeGuard[Key]:
    """Whether something can be a step of a path.

    Args:
      x: anything.

    Returns:
      True if it has a hash and an order.

    Example:
      >>> is_key_like("kernel"), is_key_like(0), is_key_like([0])
      (True, True, False)
    """
    return isinstance(x, Hashable) and hasattr(x, "__lt__")


Path = str
PathParts = tuple[Key, ...]
Leaf = Any
ArrayPytree = Any
Collection = Mapping[str, Any]
MutableCollection = dict[str, Any]
VariableDict = Mapping[str, Collection]
FrozenVariableDict = Mapping[str, Collection]
MutableVariableDict = dict[str, MutableCollection]
PRNGFoldable = int | str

# ---- axes and sharding --------------------------------------------------------------------------

Axis = int | None
Axes = int | Sequence[int]
ScanAxis = int
AxisName = str | tuple[str, ...] | None
Sharding = tuple[AxisName, ...]
LogicalNames = tuple[str | None, ...]
LogicalRules = Sequence[tuple[str, AxisName]]
LogicalPartitionSpec = Any
LogicalPartitionSpecPytree = Any
PartitionSpecPytree = Any


@dataclasses.dataclass(frozen=True)
class In(Generic[T]):
    """An axis that counts for the inputs of a lifted transform alone."""

    axis: T


@dataclasses.dataclass(frozen=True)
class Out(Generic[T]):
    """An axis that counts for the outputs of a lifted transform alone."""

    axis: T


InOutAxis = Axis | In[Axis] | Out[Axis]
InOutScanAxis = ScanAxis | In[ScanAxis] | Out[ScanAxis]


class Missing:
    """The type of ``MISSING``, which stands for an argument that was not given."""


MISSING = Missing()
