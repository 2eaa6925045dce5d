"""Which dtype a layer computes in."""

from __future__ import annotations

from typing import Any

from linnet.functional import dtypes
from linnet.functional.dtypes import canonicalize_dtype as canonicalize_dtype
from linnet.typing import Dtype as Dtype


def promote_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Converts arrays to one dtype.

    Args:
      *args: the arrays; None stays None.
      dtype: the dtype; by default that of the precision policy in force, or that of the promoted
        arrays.
      inexact: promote integers to floating point.

    Returns:
      The arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> x, y = promote_dtype(jnp.ones(2, jnp.int32), jnp.ones(2, jnp.float16))
      >>> x.dtype, y.dtype
      (dtype('float16'), dtype('float16'))
    """
    return dtypes.promote_dtype(list(args), dtype=dtype, inexact=inexact)
