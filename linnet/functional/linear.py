"""Contractions with a kernel (dense, general, einsum) and embedding tables."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from linnet.errors import LayerArgumentError, type_text
from linnet.functional import fusing
from linnet.functional.activations import on_gpu
from linnet.functional.fusing import compiled_unless_intercepted, fused
from linnet.functional.sharding import entries_of, is_explicit, joined_entries, placed


def given_options(**options: Any) -> dict[str, Any]:
    """Leaves out options that are None: a replacement for JAX's function need not know them."""
    return {name: value for name, value in options.items() if value is not None}


_ROWS = 16  # the fewest for which a GPU's matrix units are used well
_OWN_PRODUCT = [fusing.JAX_FUNCTIONS["dot_general"]]


def _contract(
    dot_general: Callable[..., Array], inputs: Array, kernel: Array, axes: Any, **options: Any
) -> Array:
    """Calls ``dot_general``; on a GPU one row is computed as several, of which one is taken.

    For a single row XLA writes all the products to memory and adds them up in a second kernel,
    which takes twice the time of a matrix product.
    """
    (contracted, of_kernel), batch = axes
    if not (isinstance(inputs, Tracer) and on_gpu()):
        return dot_general(inputs, kernel, axes, **options)
    is_own = dot_general is fusing.dot_general and not fusing.are_intercepted(_OWN_PRODUCT)
    is_row = not any(batch) and inputs.size == math.prod(inputs.shape[a] for a in contracted)
    if not (is_own and is_row) or "out_sharding" in options or is_explicit(None):
        return dot_general(inputs, kernel, axes, **options)
    zeros = jnp.zeros((_ROWS - 1, *inputs.shape), inputs.dtype)
    rows = jnp.concatenate([inputs[None], zeros])
    shifted = tuple(axis + 1 for axis in contracted)
    return dot_general(rows, kernel, ((shifted, of_kernel), batch), **options)[0]


@compiled_unless_intercepted("dot_general")
def dense(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    dot_general: Callable[..., Array] = fusing.dot_general,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Maps the last axis: ``inputs @ kernel + bias``.

    Args:
      inputs: ``(..., in)``.
      kernel: ``(in, out)``.
      bias: ``(out,)``, or None.
      dot_general: the contraction, as ``jax.lax.dot_general``.
      precision: of the contraction.
      preferred_element_type: of the contraction.
      out_sharding: of the contraction.

    Returns:
      ``(..., out)``.

    Example:
      >>> dense(jnp.array([[1.0, 2.0]]), jnp.eye(2), jnp.ones(2))
      Array([[2., 3.]], dtype=float32)
    """
    axes = (((inputs.ndim - 1,), (0,)), ((), ()))
    options = given_options(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    out = _contract(dot_general, inputs, kernel, axes, precision=precision, **options)
    return out if bias is None else add_bias(out, bias)


@fused
def add_bias(out: Array, bias: Array, *, shape: tuple[int, ...] | None = None) -> Array:
    """Adds a bias along the last axis, or reshaped to ``shape``, which broadcasts."""
    if shape is None:
        return out + jnp.reshape(bias, (1,) * (out.ndim - 1) + (-1,))
    rows = out.ndim - bias.ndim
    is_of_last_axes = bias.ndim > 1 and shape == (1,) * rows + out.shape[rows:]
    if is_of_last_axes and _adds_bias_as_vector(out):
        flat = out.reshape(*out.shape[:rows], -1) + bias.reshape((1,) * rows + (-1,))
        return flat.reshape(out.shape)
    return out + jnp.reshape(bias, shape)


def _adds_bias_as_vector(out: Array) -> bool:
    """Whether a bias of several axes is added as one axis.

    A product on a GPU can add a vector to its rows, but not an array of several axes, which takes a
    pass over memory. With several devices one of the axes may be sharded, and is left alone.
    """
    return isinstance(out, Tracer) and on_gpu() and jax.device_count() == 1


@compiled_unless_intercepted("dot_general")
def low_rank(inputs: Array, a: Array, b: Array, *, out_sharding: Any = None) -> Array:
    """Maps the last axis by a product of two matrices: ``inputs @ a @ b``.

    Args:
      inputs: ``(..., in)``.
      a: ``(in, rank)``.
      b: ``(rank, out)``.
      out_sharding: the sharding of the output.

    Returns:
      ``(..., out)``.

    Example:
      >>> low_rank(jnp.ones((1, 3)), jnp.ones((3, 1)), jnp.ones((1, 2)))
      Array([[3., 3.]], dtype=float32)
    """
    return dense(dense(inputs, a), b, out_sharding=out_sharding)


@compiled_unless_intercepted("dot_general")
def dense_general(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    axis: tuple[int, ...] = (-1,),
    batch_axis: tuple[int, ...] = (),
    dot_general: Callable[..., Array] = fusing.dot_general,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Maps several axes at once, with a separate kernel for each entry of the batch axes.

    Args:
      inputs: any shape.
      kernel: ``(*batch, *in, *out)``.
      bias: ``(*batch, *out)``, or None.
      axis: the axes of ``inputs`` that are contracted, in the order of the kernel.
      batch_axis: the axes of ``inputs`` that the kernel has too; they come first in the output.
      dot_general: the contraction, as ``jax.lax.dot_general``.
      precision: of the contraction.
      preferred_element_type: of the contraction.
      out_sharding: of the contraction.

    Returns:
      ``(*batch, *rest of inputs, *out)``.

    Example:
      >>> dense_general(jnp.ones((4, 2, 3)), jnp.ones((2, 3, 5)), axis=(-2, -1)).shape
      (4, 5)
    """
    axis = tuple(a % inputs.ndim for a in axis)
    batch_axis = tuple(a % inputs.ndim for a in batch_axis)
    batch = len(batch_axis)
    axes = ((axis, tuple(range(batch, batch + len(axis)))), (batch_axis, tuple(range(batch))))
    options = given_options(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    out = _contract(dot_general, inputs, kernel, axes, precision=precision, **options)
    if bias is None:
        return out
    features = bias.ndim - batch
    between = out.ndim - batch - features
    shape = bias.shape[:batch] + (1,) * between + bias.shape[batch:]
    return add_bias(out, bias, shape=shape)


@compiled_unless_intercepted("einsum", "dot_general")
def einsum(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    equation: str,
    op: Callable[..., Array] = fusing.einsum,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Computes an einsum and adds a bias along the output axes that come from the kernel.

    Args:
      inputs: the first operand.
      kernel: the second operand.
      bias: one size for each kernel axis that is in the output, or None.
      equation: ``"inputs,kernel->output"``.
      op: the contraction, as ``jnp.einsum``.
      precision: of the contraction.
      preferred_element_type: of the contraction.
      out_sharding: of the contraction.

    Returns:
      The output.

    Example:
      >>> einsum(jnp.ones((2, 3)), jnp.ones((3, 1)), jnp.ones(1), equation="ab,bc->ac")
      Array([[4.],
             [4.]], dtype=float32)
    """
    options = given_options(
        preferred_element_type=preferred_element_type, out_sharding=out_sharding
    )
    out = op(equation, inputs, kernel, precision=precision, **options)
    if bias is None:
        return out
    return add_bias(out, bias, shape=einsum_broadcast_shape(equation, kernel.shape, out.ndim))


@functools.lru_cache(maxsize=1024)
def einsum_axes(equation: str) -> tuple[list[str], list[str], list[str]]:
    """The axis names of inputs, kernel and output in an equation; ``...`` is a name too.

    Example:
      >>> einsum_axes("...a, ab -> ...b")
      (['...', 'a'], ['a', 'b'], ['...', 'b'])
    """
    operands, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise LayerArgumentError(
            f"An einsum of inputs and kernel was expected, but got {equation!r}.\n"
            "Fix: write two operands and the output, for example 'ab,bc->ac'."
        )
    inputs, kernel = operands.split(",")
    return _names(inputs), _names(kernel), _names(output)


def _names(axes: str) -> list[str]:
    return ["..." if axis == "." else axis for axis in axes.replace("...", ".")]


@functools.lru_cache(maxsize=1024)
def einsum_broadcast_shape(
    equation: str, kernel_shape: tuple[int, ...], ndim: int
) -> tuple[int, ...]:
    """The shape in which a bias is added: 1 for output axes that do not come from the kernel.

    ``ndim`` is the rank of the output.
    """
    _, _, output = einsum_axes(equation)
    sizes, hidden = einsum_kernel_sizes(equation, kernel_shape)
    # The inputs may have more axes for ``...`` than the kernel; those of the kernel broadcast.
    hidden = (1,) * (ndim - len(output) + 1 - len(hidden)) + hidden
    shape = ()
    for axis in output:
        shape += hidden if axis == "..." else (sizes.get(axis, 1),)
    return shape


def check_einsum_kernel(equation: str, kernel_shape: tuple[int, ...]) -> None:
    """Refuses an equation that does not have an axis for each of the kernel's."""
    _, kernel, _ = einsum_axes(equation)
    letters, rank = sum(axis != "..." for axis in kernel), len(kernel_shape)
    if rank < letters or (rank > letters and "..." not in kernel):
        raise LayerArgumentError(
            f"{equation!r} has {letters} axes for the kernel, but kernel_shape={kernel_shape}.\n"
            "Fix: write one letter for each axis of the kernel, after the comma."
        )


def einsum_bias_shape(equation: str, kernel_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a bias has: the sizes of the output axes that come from the kernel.

    Example:
      >>> einsum_bias_shape("nta,hab->nthb", (8, 2, 4))
      (8, 4)
    """
    check_einsum_kernel(equation, kernel_shape)
    _, _, output = einsum_axes(equation)
    sizes, hidden = einsum_kernel_sizes(equation, kernel_shape)
    shape = ()
    for axis in output:
        shape += hidden if axis == "..." else (sizes[axis],) if axis in sizes else ()
    return shape


def einsum_kernel_sizes(
    equation: str, kernel_shape: tuple[int, ...]
) -> tuple[dict[str, int], tuple[int, ...]]:
    """The sizes of the kernel's named axes, and of those that ``...`` stands for.

    Example:
      >>> einsum_kernel_sizes("d...ab,bc...->ad...c", (5, 7, 6))
      ({'b': 5, 'c': 7}, (6,))
    """
    _, kernel, _ = einsum_axes(equation)
    if "..." not in kernel:
        return dict(zip(kernel, kernel_shape, strict=True)), ()
    start, after = kernel.index("..."), len(kernel) - kernel.index("...") - 1
    end = len(kernel_shape) - after
    names = [axis for axis in kernel if axis != "..."]
    named = kernel_shape[:start] + kernel_shape[end:]
    return dict(zip(names, named, strict=True)), kernel_shape[start:end]


def einsum_by(
    contract: Callable[..., Array],
    equation: str,
    lhs: Array,
    rhs: Array,
    *,
    dtype: Any = None,
    precision: Any = None,
) -> Array:
    """An einsum of two operands by any contraction with the arguments of ``dot_general``.

    ``jnp.einsum`` takes such a contraction too, by a private parameter, but keeps it in a cache,
    and with it the arrays that it may hold. As there, the operands change places where their order
    does not give that of the output.

    Args:
      contract: contracts two arrays, as ``jax.lax.dot_general`` does.
      equation: the equation.
      lhs, rhs: the operands.
      dtype: of the output; by default the promoted dtype of the operands.
      precision: of the contraction.

    Returns:
      The output.

    Example:
      >>> x = jnp.arange(6.0).reshape(2, 3)
      >>> einsum_by(jax.lax.dot_general, "ab,cb->ca", x, x[:1])
      Array([[ 5., 14.]], dtype=float32)
    """
    dtype = jnp.result_type(lhs, rhs) if dtype is None else dtype
    names, out = _labels(equation, lhs.ndim, rhs.ndim)
    arrays = [lhs, rhs]
    for i, other in ((0, 1), (1, 0)):
        # An axis of size 1 broadcasts. An axis of one operand alone is summed; of an axis that is
        # named twice the diagonal is taken.
        sizes = dict(zip(names[other], arrays[other].shape, strict=True))
        single = [n for n, size in enumerate(arrays[i].shape) if size < sizes.get(names[i][n], 1)]
        arrays[i] = jnp.squeeze(arrays[i], single)
        found = [name for n, name in enumerate(names[i]) if n not in single]
        kept = [name for name in dict.fromkeys(found) if name in out or name in names[other]]
        if found != kept:
            arrays[i] = jnp.einsum(f"{''.join(found)}->{''.join(kept)}", arrays[i])
        names[i] = kept
    shared = set(names[0]) & set(names[1])
    batch = [name for name in out if name in shared]
    contracted = sorted(shared.difference(out))
    rest = [[name for name in labels if name not in shared] for labels in names]
    order = [0, 1] if [*batch, *rest[0], *rest[1]] == [*out] else [1, 0]
    dimension_numbers = tuple(
        tuple(tuple(names[i].index(name) for name in axes) for i in order)
        for axes in (contracted, batch)
    )
    first, second = (arrays[i] for i in order)
    product = contract(first, second, dimension_numbers, precision, preferred_element_type=dtype)
    made = [*batch, *rest[order[0]], *rest[order[1]]]
    return jnp.transpose(product, [made.index(name) for name in out]).astype(dtype)


def _labels(equation: str, lhs_ndim: int, rhs_ndim: int) -> tuple[list[Any], str]:
    """The labels of the two operands and of the output, with letters in the place of dots."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    names = operands.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    covered = [
        ndim - len(labels) + 3 if "..." in labels else 0
        for labels, ndim in zip(names, (lhs_ndim, rhs_ndim), strict=True)
    ]
    dots = "".join(free[: max(covered)])
    names = [
        labels.replace("...", dots[len(dots) - count :])
        for labels, count in zip(names, covered, strict=True)
    ]
    if not arrow:
        once = (name for name in set(operands) - {",", "."} if operands.count(name) == 1)
        out = f"...{''.join(sorted(once))}"
    return names, out.replace("...", dots)


def embed(table: Array, indices: Array, *, out_sharding: Any = None) -> Array:
    """Looks up rows of a table.

    Args:
      table: ``(rows, features)``.
      indices: integers; negative ones count from the end, those beyond the table give nan. In a
        table of one row every index stands for that row.
      out_sharding: the sharding of the output.

    Returns:
      ``(*indices.shape, features)``.

    Example:
      >>> embed(jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 1])).ravel()
      Array([2., 1., 2.], dtype=float32)
    """
    indices = indices if isinstance(indices, Array) else jnp.asarray(indices)
    if table.shape[0] == 1:
        if out_sharding is None:
            row = table if indices.ndim else table[0]
            return jnp.broadcast_to(row, (*indices.shape, table.shape[1]))
        indices = jnp.zeros_like(indices)
    if out_sharding is None and is_explicit(None):
        out_sharding = joined_entries(entries_of(indices), entries_of(table)[-1])
    if out_sharding is not None and is_explicit(out_sharding):
        return table.at[indices].get(mode="fill", out_sharding=out_sharding)
    rows = jnp.take(table, indices, axis=0)
    return placed(rows, out_sharding)


def why_no_indices(inputs: Any, dtype: Any) -> str | None:
    """Why inputs of a dtype are no indices, as the rest of an error text, or None."""
    if _is_integer(dtype):
        return None
    return (
        f"expected integers as indices, but got {type_text(inputs)}.\n"
        "Fix: convert them with .astype(jnp.int32), or use attend() for vectors."
    )


@functools.cache
def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer)


@compiled_unless_intercepted("dot_general")
def attend(table: Array, query: Array, *, out_sharding: Any = None) -> Array:
    """Scores a query against every row of a table: ``query @ table.T``.

    Args:
      table: ``(rows, features)``.
      query: ``(..., features)``.
      out_sharding: the sharding of the output.

    Returns:
      ``(..., rows)``.

    Example:
      >>> attend(jnp.array([[1.0, 0.0], [2.0, 1.0]]), jnp.array([3.0, 4.0]))
      Array([ 3., 10.], dtype=float32)
    """
    contract = (((query.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(query, table, contract, **given_options(out_sharding=out_sharding))
