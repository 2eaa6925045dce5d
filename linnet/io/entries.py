"""What is known about a stored or wanted entry without holding its value."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ARRAY, KEY, VALUE, ANY = "array", "key", "value", "any"

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The type of an entry.

    Args:
      kind: ``array``, ``key`` (a typed PRNG key), ``value`` (a plain Python value) or ``any``.
      dtype: the name of the dtype, such as ``float32`` or ``key<fry>``, or of the Python type.
      shape: the shape; of keys, without the axis of their data.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind in (VALUE, ANY):
            return self.dtype or "anything"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        """How many bytes the array takes; zero for values."""
        if self.kind != ARRAY:
            return 0
        return math.prod(self.shape) * np.dtype(jnp.dtype(self.dtype)).itemsize


ANYTHING = Spec(ANY)


def spec_of(leaf: Any) -> Spec | None:
    """The type of an array, of what stands for one, or of a plain value; None for the rest."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and hasattr(leaf, "shape"):
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return Spec(KEY, str(dtype), tuple(leaf.shape))
        return Spec(ARRAY, np.dtype(dtype).name, tuple(leaf.shape))
    if type(leaf) in PLAIN_TYPES:
        return Spec(VALUE, type(leaf).__name__)
    return None


@functools.cache
def key_implementations() -> dict[str, str]:
    """The names of PRNG implementations, by the dtype of their keys as text."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {
        str(jax.eval_shape(functools.partial(jax.random.key, 0, impl=n)).dtype): n for n in names
    }


def fits(wanted: Spec, found: Spec) -> bool:
    """Whether an entry can be restored as wanted without a change of what it means.

    Besides equal types: raw key data for a key, and a plain number for a scalar array or the other
    way round, both of the same kind of number.
    """
    if wanted == found or ANY in (wanted.kind, found.kind):
        return True
    if wanted.kind == KEY and found.kind == ARRAY:
        return found.dtype == "uint32" and found.shape[:-1] == wanted.shape and found.shape != ()
    if {wanted.kind, found.kind} == {ARRAY, VALUE} and wanted.shape == found.shape == ():
        return _number_kind(wanted) == _number_kind(found) != ""
    return False


def _number_kind(spec: Spec) -> str:
    if spec.kind == VALUE:
        return spec.dtype if spec.dtype in ("bool", "int", "float", "complex") else ""
    dtype = jnp.dtype(spec.dtype)
    for name, family in (
        ("bool", np.bool_),
        ("int", np.integer),
        ("float", np.floating),
        ("complex", np.complexfloating),
    ):
        if jnp.issubdtype(dtype, family):
            return name
    return ""
