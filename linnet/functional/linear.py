"""Contractions with a kernel: dense, general, einsum; embedding tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def _options(**options: Any) -> dict[str, Any]:
    """Only what was given: a replacement for ``lax.dot_general`` need not know the rest."""
    return {name: value for name, value in options.items() if value is not None}


def dense(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    dot_general: Callable[..., Array] = lax.dot_general,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Affine map of the last axis.

    Args:
      inputs: ``(..., in)``.
      kernel: ``(in, out)``.
      bias: ``(out,)``, or None.
      dot_general: the contraction, as ``jax.lax.dot_general``.
      precision: as for ``dot_general``.
      preferred_element_type: as for ``dot_general``.
      out_sharding: as for ``dot_general``.

    Returns:
      ``inputs @ kernel + bias``, ``(..., out)``.
    """
    contract = (((inputs.ndim - 1,), (0,)), ((), ()))
    options = _options(preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    out = dot_general(inputs, kernel, contract, precision=precision, **options)
    return out if bias is None else out + jnp.reshape(bias, (1,) * (out.ndim - 1) + (-1,))


def dense_general(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    axis: tuple[int, ...] = (-1,),
    batch_axis: tuple[int, ...] = (),
    dot_general: Callable[..., Array] = lax.dot_general,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Affine map of several axes at once, with a kernel of its own for each entry of batch axes.

    Args:
      inputs: any shape.
      kernel: ``(*batch, *in, *out)``.
      bias: ``(*batch, *out)``, or None.
      axis: the axes of ``inputs`` that are contracted, in the order of the kernel.
      batch_axis: the axes of ``inputs`` that the kernel has too; they come first in the output.
      dot_general: the contraction, as ``jax.lax.dot_general``.
      precision: as for ``dot_general``.
      preferred_element_type: as for ``dot_general``.
      out_sharding: as for ``dot_general``.

    Returns:
      ``(*batch, *rest of inputs, *out)``.
    """
    axis = tuple(a % inputs.ndim for a in axis)
    batch_axis = tuple(a % inputs.ndim for a in batch_axis)
    batch = len(batch_axis)
    contract = ((axis, tuple(range(batch, batch + len(axis)))), (batch_axis, tuple(range(batch))))
    options = _options(preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    out = dot_general(inputs, kernel, contract, precision=precision, **options)
    if bias is None:
        return out
    features = bias.ndim - batch
    between = out.ndim - batch - features
    shape = bias.shape[:batch] + (1,) * between + bias.shape[batch:]
    return out + jnp.reshape(bias, shape)


def einsum(
    equation: str,
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    op: Callable[..., Array] = jnp.einsum,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Contraction written as an einsum, and a bias over the output axes that the kernel gives.

    Args:
      equation: ``"inputs,kernel->output"``.
      inputs: the first operand.
      kernel: the second operand.
      bias: one size for each kernel axis that is in the output, or None.
      op: the contraction, as ``jnp.einsum``.
      precision: as for ``jnp.einsum``.
      preferred_element_type: as for ``jnp.einsum``.
      out_sharding: as for ``jnp.einsum``.

    Returns:
      The output.
    """
    options = _options(preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    out = op(equation, inputs, kernel, precision=precision, **options)
    return out if bias is None else out + jnp.reshape(bias, einsum_bias_shape(equation, bias.shape))


def einsum_bias_shape(equation: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a bias as it is added: 1 where the output axis does not come from the kernel."""
    operands, output = equation.replace(" ", "").split("->")
    kernel = operands.split(",")[1]
    sizes = iter(shape)
    return tuple(next(sizes) if letter in kernel else 1 for letter in output)


def embed(table: Array, indices: Array, *, out_sharding: Any = None) -> Array:
    """Rows of a table.

    Args:
      table: ``(rows, features)``.
      indices: integers.
      out_sharding: the sharding of the output.

    Returns:
      ``(*indices.shape, features)``.
    """
    if table.shape[0] == 1:  # one row: a gather would only copy it
        return jnp.broadcast_to(table, (*indices.shape, table.shape[1]))
    if out_sharding is None:
        return jnp.take(table, indices, axis=0)
    return table.at[indices].get(out_sharding=out_sharding)


def attend(table: Array, query: Array, *, out_sharding: Any = None) -> Array:
    """Scores of a query against every row of a table.

    Args:
      table: ``(rows, features)``.
      query: ``(..., features)``.
      out_sharding: the sharding of the output.

    Returns:
      ``query @ table.T``, ``(..., rows)``.
    """
    contract = (((query.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(query, table, contract, **_options(out_sharding=out_sharding))
