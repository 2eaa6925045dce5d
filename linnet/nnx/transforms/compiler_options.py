"""Options of the compiler that suit a program.

On a GPU, XLA compiles a product either by Triton, together with operations before it, or by
cuBLASLt, which adds a bias, an activation or a residual to the result before it is written to
memory. XLA chooses by the time of the product alone, without what cuBLASLt saves behind it. It also
joins products that share an operand, and the parts of the result are then copied out of it. For
large products both cost passes over memory and gain nothing, since each of them keeps the whole GPU
busy, so a program that consists of such products is compiled without Triton's products and without
joining. The options change which kernels run, not what is computed.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from linnet.functional.activations import on_gpu

FOR_LARGE_PRODUCTS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
_LEAST_SIZE = 256  # rows, columns and sums of a product that is large
_LEAST_SHARE = 0.9  # of the operations, in large products


def chosen(program: ClosedJaxpr, of_user: dict[str, Any] | None) -> dict[str, Any] | None:
    """The options for a program: those that suit it, and before them the user's."""
    return {**suited_to(program), **(of_user or {})} or None


def are_chosen() -> bool:
    """Whether any options are known that suit programs here."""
    return on_gpu()


def suited_to(program: ClosedJaxpr) -> dict[str, Any]:
    """The options that suit a program; empty where it is not known that any is of use."""
    if not are_chosen():
        return {}
    by_user = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in FOR_LARGE_PRODUCTS.items() if name not in by_user}
    return options if options and has_large_products(program.jaxpr) else {}


def has_large_products(jaxpr: Jaxpr) -> bool:
    """Whether nearly all operations of a program's products are in large 16-bit ones."""
    total, large = _operations(jaxpr)
    return large > _LEAST_SHARE * total


def _operations(jaxpr: Jaxpr) -> tuple[int, int]:
    """The operations in products, and those in large ones.

    Of the branches of a ``cond`` only the one with the fewest operations counts, since the others
    are mostly for platforms that lack a kernel. The body of a ``while`` counts once.
    """
    total = large = 0
    for eqn in jaxpr.eqns:
        found = list(map(_operations, programs_inside(eqn)))
        if eqn.primitive.name == "dot_general":
            found = [_operations_of_product(eqn)]
        elif eqn.primitive.name == "cond":
            found = [min(found)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(every for every, _ in found)
        large += times * sum(some for _, some in found)
    return total, large


def programs_inside(eqn: Any) -> list[Jaxpr]:
    """The programs among the parameters of an operation, such as the body of a loop."""
    found = jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=_is_program)
    return [getattr(value, "jaxpr", value) for value in found if _is_program(value)]


def _operations_of_product(eqn: Any) -> tuple[int, int]:
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = eqn.invars
    count = math.prod(left.aval.shape[axis] for axis in batch)
    inner = math.prod(left.aval.shape[axis] for axis in contracted)
    rows, columns = (v.aval.size // max(1, count * inner) for v in (left, right))
    is_large = min(rows, columns, inner) >= _LEAST_SIZE and _is_half(left) and _is_half(right)
    operations = count * inner * rows * columns
    return operations, operations * is_large


def _is_half(variable: Any) -> bool:
    dtype = variable.aval.dtype
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


def _is_program(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))
