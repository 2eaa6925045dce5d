"""Programs in a form that compiles to fewer passes over memory, with the same results.

The gradient of taking one element of each row, as losses over integer labels do, is a scatter of
one number into each row of zeros. On a GPU that is a kernel of its own over an array of the size of
the logits. Written as a comparison of the index with each position, it fuses with what follows.

Why it is the same: where a row gets one number, adding it to a zero at its index is to choose it
there and zero elsewhere (but for the sign of a zero); an index outside of the row matches no
position, as the scatter drops it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from linnet.functional.activations import on_gpu

_DROPPING = (
    jax.lax.GatherScatterMode.FILL_OR_DROP,
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def rewrites() -> bool:
    """Whether programs are rewritten: only where it is worth a longer trace."""
    return on_gpu()


def rewriting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays whose program is rewritten whenever it is traced."""

    @functools.wraps(function)
    def rewritten(*args: Any) -> Any:
        if not rewrites():
            return function(*args)
        program, result = jax.make_jaxpr(function, return_shape=True)(*args)
        return evaluate(with_fewer_passes(program), result, jax.tree_util.tree_leaves(args))

    return rewritten


def evaluate(program: ClosedJaxpr, result: Any, leaves: list[Any]) -> Any:
    """Runs a program on arrays, and returns its results in the structure of ``result``."""
    return jax.tree_util.tree_structure(result).unflatten(jaxpr_as_fun(program)(*leaves))


def with_fewer_passes(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program with scatters of one number into each row of zeros as comparisons."""
    jaxpr = _rewritten(program.jaxpr)
    return program if jaxpr is program.jaxpr else program.replace(jaxpr=jaxpr)


def _rewritten(jaxpr: Jaxpr) -> Jaxpr:
    made_by = {
        eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "broadcast_in_dim"
    }
    eqns = [_rewritten_equation(eqn, made_by) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _rewritten_equation(eqn: Any, made_by: dict[Any, Any]) -> Any:
    if eqn.primitive.name == "scatter-add" and _is_one_number_a_row(eqn, made_by):
        return _as_comparison(eqn)
    inner = {name: p for name, p in eqn.params.items() if isinstance(p, ClosedJaxpr)}
    new = {name: with_fewer_passes(p) for name, p in inner.items()}
    if all(new[name] is p for name, p in inner.items()):
        return eqn
    return eqn.replace(params={**eqn.params, **new})


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
    eqn = made_by.get(operand)
    return eqn is not None and isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 0


@jax.jit
def _compare(operand: Any, indices: Any, updates: Any) -> Any:
    """What one number for each row gives: the number at its index, and zeros."""
    positions = jax.lax.broadcasted_iota(indices.dtype, operand.shape, operand.ndim - 1)
    return jnp.where(positions == indices[..., 0], updates, jnp.zeros((), operand.dtype))


def _as_comparison(eqn: Any) -> Any:
    """The equation of ``_compare`` in the place of a scatter, if its result has the same type."""
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    [call] = jax.make_jaxpr(_compare)(*inputs).eqns
    if [v.aval for v in call.outvars] != [v.aval for v in eqn.outvars]:
        return eqn
    return call.replace(invars=eqn.invars, outvars=eqn.outvars)
