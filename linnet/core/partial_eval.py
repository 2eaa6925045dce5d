"""Running a function some of whose arguments have shapes but no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from linnet.errors import LazyInitError

_UNKNOWN = object()


def lazily(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, of which only what the result needs is computed.

    Args:
      fn: a function of pytrees that returns a pytree of arrays.
      *args: pytrees, with a ``jax.ShapeDtypeStruct`` wherever there is no value.

    Returns:
      The result.

    Raises:
      LazyInitError: a part of the result depends on an argument without a value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet.core.partial_eval import lazily
      >>> lazily(lambda x: jnp.zeros(x.shape), jax.ShapeDtypeStruct((2,), jnp.float32))
      Array([0., 0.], dtype=float32)
    """
    result = partially(fn, *args)
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if _is_unknown(leaf):
            where = "".join(f"[{getattr(key, 'key', key)!r}]" for key in path)
            unknown = filter(_is_unknown, jax.tree.leaves(args))
            given = ", ".join(f"{x.dtype}{list(x.shape)}" for x in unknown)
            raise LazyInitError(
                f"{where or 'the result'}, {leaf.dtype}{list(leaf.shape)}, depends on one of the "
                f"arguments without values ({given})"
            )
    return result


def partially(fn: Callable[..., Any], *args: Any) -> Any:
    """As ``lazily``, with a ``jax.ShapeDtypeStruct`` for what depends on an unknown argument."""
    unknown, rebuild = split_leaves(args, _is_unknown)
    trace = jax.make_jaxpr(lambda *values: fn(*rebuild(values)), return_shape=True)
    closed, shapes = trace(*unknown)
    # Also inside of loops: a scan gives parameters that do not depend on what it carries.
    needed, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), True)
    values = _evaluate(needed, closed.consts, [_UNKNOWN] * len(unknown))
    expected, structure = jax.tree.flatten(shapes)
    results = [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype) if value is _UNKNOWN else value
        for shape, value in zip(expected, values, strict=True)
    ]
    return jax.tree.unflatten(structure, results)


def split_leaves(
    tree: Any, is_wanted: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The wanted leaves of a pytree, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    positions = [n for n, leaf in enumerate(leaves) if is_wanted(leaf)]

    def rebuild(values: Sequence[Any]) -> Any:
        filled = list(leaves)
        for position, value in zip(positions, values, strict=True):
            filled[position] = value
        return treedef.unflatten(filled)

    return [leaves[n] for n in positions], rebuild


def _is_unknown(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, unknown where they depend on an unknown argument."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in _needed(jaxpr):
        inputs = [read(atom) for atom in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if not any(value is _UNKNOWN for value in inputs):
            outputs = _run(eqn, inputs, jaxpr)
        elif isinstance(inner, ClosedJaxpr):
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = [_UNKNOWN] * len(eqn.outvars)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _needed(jaxpr: Jaxpr) -> list[Any]:
    """The equations that the outputs of a program depend on."""
    wanted = {id(atom) for atom in jaxpr.outvars}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if any(id(var) in wanted for var in eqn.outvars):
            wanted.update(id(atom) for atom in eqn.invars)
            found.append(eqn)
    return found[::-1]


def _run(eqn: Any, inputs: list[Any], jaxpr: Jaxpr) -> list[Any]:
    """The outputs of one equation, as a program of its own."""
    variables = {
        id(atom): (atom, value)
        for atom, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(atom, Literal)
    }
    outvars = [var for var in eqn.outvars if not isinstance(var, DropVar)]
    alone = jaxpr.replace(
        constvars=[],
        invars=[var for var, _ in variables.values()],
        outvars=outvars,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    run = jaxpr_as_fun(ClosedJaxpr(alone, []))
    found = dict(zip(outvars, run(*(value for _, value in variables.values())), strict=True))
    return [found.get(var, _UNKNOWN) for var in eqn.outvars]
