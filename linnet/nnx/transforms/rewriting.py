"""Programs in a form that compiles to fewer passes over memory on a GPU, equal up to rounding.

The gradient of taking one element of each row, as losses over integer labels do, is a scatter of
one number into each row of zeros. On a GPU that is a kernel of its own over an array of the size of
the logits. Written as a comparison of the index with each position, it fuses with what follows.

Why it is the same: where a row gets one number, adding it to a zero at its index is to choose it
there and zero elsewhere (but for the sign of a zero); an index outside of the row matches no
position, as the scatter drops it.

The logarithm of a sum of exponentials takes the maximum of each row, and then the sum of ``exp(x -
shift)``, where the shift is that maximum: two passes. A kernel (``functional.row_kernels``) finds
both in one. JAX cannot differentiate a kernel or divide it among devices, so ``with_kernels`` is
for programs that are compiled next, on one device.

Why it is the same for any finite shift: ``exp(x - shift)`` is ``exp(x - maximum)`` times
``exp(maximum - shift)``, and the second factor does not depend on the place in the row. The sum is
added up in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import is_
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from linnet.functional import row_kernels
from linnet.functional.activations import on_gpu

_DROPPING = (
    jax.lax.GatherScatterMode.FILL_OR_DROP,
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def rewrites() -> bool:
    """Whether programs are rewritten: only where it is worth a longer trace."""
    return on_gpu()


def rewriting(
    function: Callable[..., Any], rewrite: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None
) -> Callable[..., Any]:
    """A function of arrays whose program is rewritten whenever it is traced."""

    @functools.wraps(function)
    def rewritten(*args: Any) -> Any:
        if not rewrites():
            return function(*args)
        program, result = jax.make_jaxpr(function, return_shape=True)(*args)
        program = (rewrite or with_fewer_passes)(program)
        return evaluate(program, result, jax.tree_util.tree_leaves(args))

    return rewritten


def evaluate(program: ClosedJaxpr, result: Any, leaves: list[Any]) -> Any:
    """Runs a program on arrays, and returns its results in the structure of ``result``."""
    return jax.tree_util.tree_structure(result).unflatten(jaxpr_as_fun(program)(*leaves))


def with_fewer_passes(program: ClosedJaxpr) -> ClosedJaxpr:
    """Replaces scatters that add one number to each row of zeros by comparisons of the index."""

    def compare(jaxpr: Jaxpr) -> dict[int, Any]:
        made_by = _made_by(jaxpr)
        return {
            number: [_as_comparison(eqn)]
            for number, eqn in enumerate(jaxpr.eqns)
            if eqn.primitive.name == "scatter-add" and _is_one_number_a_row(eqn, made_by)
        }

    return _rewritten(program, compare)


def with_kernels(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program with kernels, where it runs on one GPU; it can only be compiled afterwards."""
    if not on_gpu() or jax.device_count() > 1:
        return program
    return _rewritten(program, _max_and_exp_sums)


def _rewritten(program: ClosedJaxpr, rule: Callable[[Jaxpr], dict[int, Any]]) -> ClosedJaxpr:
    """Applies a rule to a program and all programs inside of it.

    The rule gives the equations to put in the place of some, by their number.
    """
    replaced = rule(program.jaxpr)
    eqns = []
    for number, eqn in enumerate(program.jaxpr.eqns):
        inner = {name: p for name, p in eqn.params.items() if isinstance(p, ClosedJaxpr)}
        new = {name: _rewritten(p, rule) for name, p in inner.items()}
        if any(new[name] is not p for name, p in inner.items()):
            eqn = eqn.replace(params={**eqn.params, **new})
        eqns += replaced.get(number, [eqn])
    if len(eqns) == len(program.eqns) and all(map(is_, eqns, program.eqns)):
        return program
    return program.replace(jaxpr=program.jaxpr.replace(eqns=eqns))


def _made_by(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Maps each variable to the equation that computes it, if that one has no other output."""
    return {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if len(eqn.outvars) == 1}


def _call_of(function: Callable[..., Any], inputs: list[Any]) -> Any:
    """The equation that calls a jitted function with the values of some variables."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    [call] = jax.make_jaxpr(function)(*shapes).eqns
    return call.replace(invars=inputs)


def _is_one_number_a_row(eqn: Any, made_by: dict[Any, Any]) -> bool:
    """Whether a scatter adds one number to each row of an array of zeros."""
    operand, indices, updates = eqn.invars
    numbers, rank = eqn.params["dimension_numbers"], operand.aval.ndim
    batch = (*range(rank - 1),)
    return (
        eqn.params["mode"] in _DROPPING
        and numbers.update_window_dims == ()
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (rank - 1,)
        and numbers.operand_batching_dims == numbers.scatter_indices_batching_dims == batch
        and indices.aval.shape == (*operand.aval.shape[:-1], 1, 1)
        and updates.aval.shape == (*operand.aval.shape[:-1], 1)
        and operand.aval.shape[-1] <= jnp.iinfo(indices.aval.dtype).max
        and _is_zero(operand, made_by)
    )


def _is_zero(operand: Any, made_by: dict[Any, Any]) -> bool:
    eqn = _maker(operand, "broadcast_in_dim", made_by)
    return eqn is not None and isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 0


def _maker(operand: Any, primitive: str, made_by: dict[Any, Any]) -> Any:
    """The equation that an operand comes from, if it is of this primitive."""
    eqn = None if isinstance(operand, Literal) else made_by.get(operand)
    return eqn if eqn is not None and eqn.primitive.name == primitive else None


@jax.jit
def _compare(operand: Any, indices: Any, updates: Any) -> Any:
    """Rows of zeros with one number at its index."""
    positions = jax.lax.broadcasted_iota(indices.dtype, operand.shape, operand.ndim - 1)
    return jnp.where(positions == indices[..., 0], updates, jnp.zeros((), operand.dtype))


def _as_comparison(eqn: Any) -> Any:
    """The equation of ``_compare`` in the place of a scatter, if its result has the same type."""
    call = _call_of(_compare, eqn.invars)
    if [v.aval for v in call.outvars] != [v.aval for v in eqn.outvars]:
        return eqn
    return call.replace(outvars=eqn.outvars)


_LEAST_ROW = 4096  # shorter rows stay on the chip between the passes
_LEAST_SIZE = 1 << 24


def _max_and_exp_sums(jaxpr: Jaxpr) -> dict[int, Any]:
    """Replaces maxima of long rows, and sums of ``exp(row - shift)`` of the same rows."""
    made_by = _made_by(jaxpr)
    maxima = {
        eqn.invars[0]: number
        for number, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name == "reduce_max" and _reduces_long_rows(eqn)
    }
    replaced: dict[int, Any] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "reduce_sum" or not _reduces_long_rows(eqn):
            continue
        exp = _maker(eqn.invars[0], "exp", made_by)
        sub = exp and _maker(exp.invars[0], "sub", made_by)
        if not sub or isinstance(sub.invars[0], Literal) or sub.invars[0] not in maxima:
            continue
        rows, shift = sub.invars
        first = maxima[rows]
        shapes: list[Any] = [v.aval for v in (*eqn.outvars, shift)]
        if first not in replaced and first < number and shapes[1].shape == (*shapes[0].shape, 1):
            source = _maker(rows, "convert_element_type", made_by)
            is_half = source and source.invars[0].aval.dtype in (jnp.bfloat16, jnp.float16)
            kernel = _call_of(_kernel, [source.invars[0] if is_half else rows])
            maximum, total = jaxpr.eqns[first].outvars[0], kernel.outvars[1]
            replaced[first] = [kernel.replace(outvars=[maximum, total])]
            call = _call_of(_shifted, [maximum, total, shift])
            replaced[number] = [call.replace(outvars=eqn.outvars)]
    return replaced


def _reduces_long_rows(eqn: Any) -> bool:
    operand = eqn.invars[0].aval
    return (
        eqn.params["axes"] == (operand.ndim - 1,)
        and operand.dtype == jnp.float32
        and operand.shape[-1] >= _LEAST_ROW
        and _LEAST_SIZE <= operand.size < 1 << 31
    )


@jax.jit
def _kernel(rows: Any) -> Any:
    return row_kernels.max_and_exp_sum(rows)


@jax.jit
def _shifted(maximum: Any, total: Any, shift: Any) -> Any:
    """The sum of ``exp(x - shift)`` from what the kernel finds."""
    return total * jnp.exp(maximum - shift[..., 0])
