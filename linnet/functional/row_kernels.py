"""Kernels that go over the rows of a large array once, where XLA goes over them several times."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_CHUNK = 4096  # elements of a row that one step of the kernel reads
_WARPS = 4


def max_and_exp_sum(x: Array) -> tuple[Array, Array]:
    """For each row of an array, its maximum and the sum of ``exp(x - maximum)``.

    On a GPU that is one pass over the array, on other platforms two.

    Args:
      x: ``(..., size)``, float32, bfloat16 or float16, with fewer than 2**31 elements.

    Returns:
      ``(maximum, total)``, both ``(...)`` in float32. The total is 1 where the maximum is infinite,
      so that ``total * exp(maximum - shift)`` is the sum of ``exp(x - shift)`` for a finite shift.

    Example:
      >>> maximum, total = max_and_exp_sum(jnp.array([[0.0, 0.0, -jnp.inf]]))
      >>> maximum.tolist(), total.tolist()
      ([0.0], [2.0])
    """
    return jax.lax.platform_dependent(x, cuda=_in_one_pass, default=_in_two_passes)


def _in_two_passes(x: Array) -> tuple[Array, Array]:
    x = x.astype(jnp.float32)
    maximum = x.max(-1)
    total = jnp.exp(x - maximum[..., None]).sum(-1)
    return maximum, jnp.where(jnp.isinf(maximum), 1.0, total)


def _in_one_pass(x: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *batch, size = x.shape
    rows = math.prod(batch)
    whole = pl.BlockSpec((rows, size), lambda row: (0, 0))
    one_each = pl.BlockSpec((rows,), lambda row: (0,))
    call = pl.pallas_call(
        functools.partial(_max_and_exp_sum, size=size),
        grid=(rows,),
        in_specs=[whole],
        out_specs=[one_each, one_each],
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * 2,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=interpret,  # without a GPU, to test it
        name="max_and_exp_sum",
    )
    maximum, total = call(jnp.reshape(x, (rows, size)))
    return jnp.reshape(maximum, batch), jnp.reshape(total, batch)


def _max_and_exp_sum(x: Any, maximum: Any, total: Any, *, size: int) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    row = pl.program_id(0)

    def add_chunk(number: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        old, so_far = found
        start = number * _CHUNK
        is_inside = start + jnp.arange(_CHUNK) < size
        part = x.at[row, pl.ds(start, _CHUNK)]
        values = triton.load(part, mask=is_inside, other=-jnp.inf).astype(jnp.float32)
        new = jnp.maximum(old, jnp.max(values))
        shift = jnp.where(new == -jnp.inf, 0.0, new)  # -inf - -inf would be no number
        return new, so_far * jnp.exp(old - shift) + jnp.sum(jnp.exp(values - shift))

    nothing = (jnp.float32(-jnp.inf), jnp.float32(0.0))
    highest, added = jax.lax.fori_loop(0, pl.cdiv(size, _CHUNK), add_chunk, nothing)
    maximum[row] = highest
    total[row] = jnp.where(jnp.isinf(highest), 1.0, added)
