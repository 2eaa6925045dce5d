"""The operators that let a Variable stand wherever its array could, and writing a part of one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from linnet.nnx.pytreelib import kinds


def value_of(other: Any) -> Any:
    """The value of a Variable; anything else is its own value."""
    return other.get_value() if isinstance(other, ArrayLike) else other


def _is_true(value: Any) -> bool:
    """The truth of a number; of an array, whether it has elements, as `if self.bias:` means."""
    return len(value) > 0 if getattr(value, "ndim", 0) else bool(value)


class ArrayLike:
    """Arithmetic, comparison, conversion and indexing by the value inside."""

    __slots__ = ()

    def get_value(self) -> Any:
        """The value that the operators work on."""
        raise NotImplementedError

    def _in_place(self, symbol: str, op: Callable[[Any, Any], Any], other: Any) -> Any:
        raise NotImplementedError

    # fmt: off
    def __add__(self, other: Any) -> Any: return self.get_value() + value_of(other)
    def __radd__(self, other: Any) -> Any: return other + self.get_value()
    def __sub__(self, other: Any) -> Any: return self.get_value() - value_of(other)
    def __rsub__(self, other: Any) -> Any: return other - self.get_value()
    def __mul__(self, other: Any) -> Any: return self.get_value() * value_of(other)
    def __rmul__(self, other: Any) -> Any: return other * self.get_value()
    def __matmul__(self, other: Any) -> Any: return self.get_value() @ value_of(other)
    def __rmatmul__(self, other: Any) -> Any: return other @ self.get_value()
    def __truediv__(self, other: Any) -> Any: return self.get_value() / value_of(other)
    def __rtruediv__(self, other: Any) -> Any: return other / self.get_value()
    def __floordiv__(self, other: Any) -> Any: return self.get_value() // value_of(other)
    def __rfloordiv__(self, other: Any) -> Any: return other // self.get_value()
    def __mod__(self, other: Any) -> Any: return self.get_value() % value_of(other)
    def __rmod__(self, other: Any) -> Any: return other % self.get_value()
    def __divmod__(self, other: Any) -> Any: return divmod(self.get_value(), value_of(other))
    def __rdivmod__(self, other: Any) -> Any: return divmod(other, self.get_value())
    def __pow__(self, other: Any) -> Any: return self.get_value() ** value_of(other)
    def __rpow__(self, other: Any) -> Any: return other ** self.get_value()
    def __lshift__(self, other: Any) -> Any: return self.get_value() << value_of(other)
    def __rlshift__(self, other: Any) -> Any: return other << self.get_value()
    def __rshift__(self, other: Any) -> Any: return self.get_value() >> value_of(other)
    def __rrshift__(self, other: Any) -> Any: return other >> self.get_value()
    def __and__(self, other: Any) -> Any: return self.get_value() & value_of(other)
    def __rand__(self, other: Any) -> Any: return other & self.get_value()
    def __or__(self, other: Any) -> Any: return self.get_value() | value_of(other)
    def __ror__(self, other: Any) -> Any: return other | self.get_value()
    def __xor__(self, other: Any) -> Any: return self.get_value() ^ value_of(other)
    def __rxor__(self, other: Any) -> Any: return other ^ self.get_value()

    def __eq__(self, other: object) -> Any: return self.get_value() == value_of(other)
    def __ne__(self, other: object) -> Any: return self.get_value() != value_of(other)
    def __lt__(self, other: Any) -> Any: return self.get_value() < value_of(other)
    def __le__(self, other: Any) -> Any: return self.get_value() <= value_of(other)
    def __gt__(self, other: Any) -> Any: return self.get_value() > value_of(other)
    def __ge__(self, other: Any) -> Any: return self.get_value() >= value_of(other)

    def __neg__(self) -> Any: return -self.get_value()
    def __pos__(self) -> Any: return +self.get_value()
    def __abs__(self) -> Any: return abs(self.get_value())
    def __invert__(self) -> Any: return ~self.get_value()
    def __round__(self, digits: int = 0) -> Any: return self.get_value().__round__(digits)
    def __bool__(self) -> bool: return _is_true(self.get_value())
    def __int__(self) -> int: return int(self.get_value())
    def __float__(self) -> float: return float(self.get_value())
    def __complex__(self) -> complex: return complex(self.get_value())
    def __index__(self) -> int: return operator.index(self.get_value())
    def __len__(self) -> int: return len(self.get_value())
    def __iter__(self) -> Iterator[Any]: return iter(self.get_value())
    def __contains__(self, item: Any) -> bool: return value_of(item) in self.get_value()

    def __iadd__(self, other: Any) -> Any: return self._in_place("+=", operator.add, other)
    def __isub__(self, other: Any) -> Any: return self._in_place("-=", operator.sub, other)
    def __imul__(self, other: Any) -> Any: return self._in_place("*=", operator.mul, other)
    def __imatmul__(self, other: Any) -> Any: return self._in_place("@=", operator.matmul, other)
    def __itruediv__(self, other: Any) -> Any: return self._in_place("/=", operator.truediv, other)
    def __ifloordiv__(self, x: Any) -> Any: return self._in_place("//=", operator.floordiv, x)
    def __imod__(self, other: Any) -> Any: return self._in_place("%=", operator.mod, other)
    def __ipow__(self, other: Any) -> Any: return self._in_place("**=", operator.pow, other)
    def __ilshift__(self, other: Any) -> Any: return self._in_place("<<=", operator.lshift, other)
    def __irshift__(self, other: Any) -> Any: return self._in_place(">>=", operator.rshift, other)
    def __iand__(self, other: Any) -> Any: return self._in_place("&=", operator.and_, other)
    def __ior__(self, other: Any) -> Any: return self._in_place("|=", operator.or_, other)
    def __ixor__(self, other: Any) -> Any: return self._in_place("^=", operator.xor, other)
    # fmt: on

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else str(self)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.get_value(), dtype)
        return array.copy() if copy else array

    # NumPy must hand `array + variable` to the reflected operator above.
    __array_priority__ = 1000


def plain_index(index: Any) -> Any:
    """An index with the values of the Variables in it."""
    return tuple(map(value_of, index)) if type(index) is tuple else value_of(index)


def with_item(value: Any, index: Any, new: Any) -> Any:
    """``value`` with ``new`` at ``index``; the old value is left as it was."""
    if isinstance(value, (jax.Array, Tracer)):
        return _refilled(value, new) if index is Ellipsis else value.at[index].set(new)
    if isinstance(value, np.ndarray) and not isinstance(new, Tracer):
        changed = value.copy()
        changed[index] = new
        return changed
    if isinstance(value, np.ndarray):
        return jnp.asarray(value).at[index].set(new)
    if index is Ellipsis:
        return new
    changed = type(value)(value)
    changed[index] = new
    return changed


def _refilled(value: Any, new: Any) -> Any:
    """``new`` cast and broadcast to the dtype and shape of ``value``."""
    is_array = isinstance(new, (jax.Array, Tracer))
    if is_array and new.dtype == value.dtype and new.shape == value.shape:
        return new
    # JAX's own assignment keeps a weak type and knows keys and lists, but reads the old value.
    special = jnp.issubdtype(value.dtype, jax.dtypes.extended) or value.weak_type
    if (
        special
        or isinstance(new, (list, tuple))
        or not jnp.can_cast(jnp.result_type(new), value.dtype, "same_kind")
    ):
        return value.at[...].set(new)
    own = jnp.array(new, value.dtype, copy=isinstance(new, np.ndarray))
    return jnp.broadcast_to(own, value.shape)


def array_type(value: Any) -> Any:
    """Shape and dtype of an array or number; of anything else its type."""
    if not isinstance(value, (*kinds.ARRAY_TYPES, np.generic, bool, int, float, complex)):
        return type(value)
    return getattr(value, "shape", ()), jnp.result_type(value)
