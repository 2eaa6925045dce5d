"""Errors of JAX about one array, explained: which Variable it is, and why it has no value.

A Variable may have only a shape, from ``nnx.eval_shape``, or its buffer may have been donated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer

from linnet.errors import AbstractValueError, DonatedBufferError, name_some, type_text
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.pytreelib import locate
from linnet.nnx.variablelib.variable import Variable

_FIX = (
    "Fix: give it values with nnx.update(model, state) or a checkpoint (io.restore), or build the "
    "model for real; nnx.eval_shape(f, model) computes with shapes alone."
)


def refuse_abstract(tree: Any, error: TypeError) -> None:
    """Raises an AbstractValueError if JAX's error comes from a Variable that has only a shape."""
    text = str(error)
    if isinstance(error, AbstractValueError) or not (
        "ShapeDtypeStruct" in text or "not a valid JAX type" in text
    ):
        return
    parts = (part for _, part in iter_graph(tree, graph=True))
    abstract = [part for part in parts if isinstance(part, Variable) and _shapes(part)]
    if not abstract:
        return
    variable = max(abstract, key=lambda variable: math.prod(_shapes(variable)[0].shape))
    others = f" (nor have {len(abstract) - 1} others)" if abstract[1:] else ""
    raise AbstractValueError(
        f"{variable._named()} has only a shape and a dtype, {type_text(_shapes(variable)[0])}, and "
        f"no value to compute with{others}.\n{_FIX}"
    ) from error


def refuse_donated(tree: Any, error: Exception) -> None:
    """Raises a DonatedBufferError if JAX's error comes from a Variable whose buffer is gone."""
    if isinstance(error, DonatedBufferError) or "deleted" not in str(error):
        return
    parts = (part for _, part in iter_graph(tree, graph=True))
    gone = [part for part in parts if isinstance(part, Variable) and is_deleted(part.raw_value)]
    if gone:
        raise donated_error(locate.describe(x) or type(x).__name__ for x in gone) from error


def is_deleted(value: Any) -> bool:
    """Whether a buffer of a value was donated."""
    leaves = jax.tree_util.tree_leaves(value)
    arrays = (x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    return any(array.is_deleted() for array in arrays)


def donated_error(names: Iterable[str]) -> DonatedBufferError:
    """The error about Variables whose buffers are gone."""
    return DonatedBufferError(
        f"The buffer of {name_some(names)} was donated to an earlier call and is gone.\n"
        "Fix: use the objects that the call updated; or, before donating, make a copy with arrays "
        "of its own, nnx.clone(model, arrays=True): other clones share theirs with the original."
    )


def _shapes(variable: Variable[Any]) -> list[Any]:
    leaves = jax.tree_util.tree_leaves(variable.raw_value)
    return [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
