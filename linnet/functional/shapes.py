"""Shapes and axes: what several families of functions compute of them and check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from linnet.errors import FeatureError, type_text
from linnet.typing import Axes as Axes


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array, or of what becomes one; for arrays faster than ``np.shape``."""
    try:
        return x.shape
    except AttributeError:
        return np.shape(x)


def as_tuple(value: Axes) -> tuple[int, ...]:
    """A number, of Python or NumPy, or a sequence as a tuple."""
    return (int(value),) if isinstance(value, (int, np.integer)) else tuple(value)


def positive_axes(axes: Axes, ndim: int) -> tuple[int, ...]:
    """Axes as non-negative numbers."""
    return tuple(a % ndim for a in as_tuple(axes))


def missing_axes(axes: Axes, ndim: int) -> list[int]:
    """Those of the axes that an array with ``ndim`` axes does not have.

    Example:
      >>> missing_axes((0, -3), 2)
      [-3]
    """
    return [a for a in as_tuple(axes) if not -ndim <= a < ndim]


def with_rank(x: Array, ndim: int) -> Array:
    """Adds leading axes of size 1, up to the rank."""
    missing = ndim - x.ndim
    return x if missing <= 0 else jnp.reshape(x, (1,) * missing + x.shape)


def broadcasts_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether an array of one shape broadcasts to another shape.

    Example:
      >>> broadcasts_to((1, 3), (4, 2, 3)), broadcasts_to((2, 3), (1, 3))
      (True, False)
    """
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in sizes)


def broadcast_together(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether arrays of two shapes can be added or multiplied.

    Example:
      >>> broadcast_together((2, 1), (3,)), broadcast_together((2, 4), (3,))
      (True, False)
    """
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def too_few_axes(inputs: Any, axes: int, last: str, what: str = "") -> str:
    """The rest of an error text for inputs without ``axes`` axes before the one of the features."""
    more = f"; kernel_size says how many axes ({axes} here) the kernel moves over" if axes else ""
    return (
        f"expected {what}at least {axes + 1} {'axes' if axes else 'axis'}, the last {last}, but "
        f"got {type_text(inputs)}.\n"
        f"Fix: keep the feature axis, also where it has size 1{more}."
    )


def refuse_inputs(layer: Any, problem: str | None, name_of: Callable[[Any], str]) -> None:
    """Raises ``FeatureError`` with the name of a layer, if there is a problem with its inputs.

    ``name_of`` makes the name, which is costly in NNX: it is called only to raise.
    """
    if problem is not None:
        raise FeatureError(f"{name_of(layer)} {problem}")
