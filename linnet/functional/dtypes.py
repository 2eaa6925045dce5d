"""Which dtype a computation runs in."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from linnet.functional import precision
from linnet.functional.precision import Policy


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that a computation over ``args`` runs in.

    Args:
      *args: arrays; None is skipped.
      dtype: the dtype asked for; by default that of the precision policy in force, or that of the
        promoted arguments.
      inexact: promote integers to floating point, and refuse to compute in them.

    Returns:
      The dtype.

    Raises:
      ValueError: ``dtype`` is not floating point and ``inexact`` is set.
    """
    if dtype is None:
        dtype = jnp.result_type(*[x for x in args if x is not None])
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
        if Policy.any_made and jnp.issubdtype(dtype, jnp.floating):
            ruled = precision.compute_dtype()
            dtype = dtype if ruled is None else ruled
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"Dtype must be inexact: {dtype}.\nFix: use a floating-point dtype.")
    return dtype


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Arrays converted to one dtype.

    Args:
      args: a tuple or list of arrays; None stays None.
      dtype: the dtype; by default that of the precision policy in force (``nnx.precision``), or
        that of the promoted arrays.
      inexact: promote integers to floating point.

    Returns:
      The arrays, in the same kind of sequence.

    Example:
      >>> import jax.numpy as jnp
      >>> x, y = promote_dtype((jnp.ones(2, jnp.int32), jnp.ones(2, jnp.float16)))
      >>> x.dtype, y.dtype
      (dtype('float16'), dtype('float16'))
    """
    is_ruled = dtype is None and Policy.any_made and precision.compute_dtype() is not None
    if not is_ruled and _is_settled(args, dtype, inexact):
        return args
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return type(args)([None if x is None else jnp.asarray(x, dtype) for x in args])


def _is_settled(args: Any, dtype: Any, inexact: bool) -> bool:
    """Whether the arrays have the one dtype already: the common case, and then the cheap one."""
    for x in args:
        if x is None:
            continue
        if not (_is_array_type(type(x)) or isinstance(x, jax.Array)) or x.weak_type:
            return False
        found = x.dtype
        if dtype is None:
            dtype = found
        elif found is not dtype and found != dtype:
            return False
    return dtype is not None and (not inexact or _is_inexact(dtype))


@functools.cache
def _is_array_type(kind: type) -> bool:
    """Whether a type is that of arrays outside of traces: ``isinstance`` takes several times as
    long, and sees tracers too."""
    return issubclass(kind, jax.Array)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
