"""Whether two leaves of a state are equal (``same_leaf``), or of one type (``mismatch``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import Path, path_string, type_text
from linnet.nnx.variablelib.variable import Variable, stored_value


def same_leaf(first: Any, second: Any) -> bool:
    """Whether two leaves of a state have one type, shape and dtype, and equal elements."""
    if type(first) is not type(second) and isinstance(first, Variable | type(None)):
        return False
    leaves, structure = jax.tree_util.tree_flatten(first)
    others, other_structure = jax.tree_util.tree_flatten(second)
    if structure != other_structure:
        return False
    return all(_same_array(a, b) for a, b in zip(leaves, others, strict=True))


def _same_array(first: Any, second: Any) -> bool:
    if any(getattr(first, x, None) != getattr(second, x, None) for x in ("shape", "dtype")):
        return False
    if not isinstance(first, (jax.Array, np.ndarray)):
        return bool(first == second)
    if jnp.issubdtype(first.dtype, jax.dtypes.prng_key):
        first, second = jax.random.key_data(first), jax.random.key_data(second)
    first, second = np.asarray(first), np.asarray(second)
    return np.array_equal(first, second) or first.tobytes() == second.tobytes()


def mismatch(path: Path, old: Any, new: Any) -> str:
    """A line that says how ``new`` differs from ``old`` in shape or dtype; empty if it does not."""
    old_leaves, structure = jax.tree_util.tree_flatten(stored_value(old))
    new_leaves, new_structure = jax.tree_util.tree_flatten(stored_value(new))
    if structure != new_structure:
        return f"{path_string(path)}: expected {structure}, got {new_structure}"
    for before, after in zip(old_leaves, new_leaves, strict=True):
        if not _same_type(before, after):
            return f"{path_string(path)}: expected {type_text(before)}, got {type_text(after)}"
    return ""


def _same_type(before: Any, after: Any) -> bool:
    numbers = (bool, int, float, complex)
    if not all(hasattr(x, "shape") or isinstance(x, numbers) for x in (before, after)):
        return True
    dtypes = [x.dtype for x in (before, after) if hasattr(x, "dtype")]
    same_dtype = len(dtypes) < 2 or dtypes[0] == dtypes[1]
    return same_dtype and getattr(before, "shape", ()) == getattr(after, "shape", ())
