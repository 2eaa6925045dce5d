"""Forward and backward derivatives at a point: vjp, jvp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.modes import graph_updates as resolve_updates
from linnet.nnx.kinds import key_name
from linnet.nnx.statelib import State, iter_flat, plain_mapping
from linnet.nnx.transforms.autodiff import Wanted, check_reduce_axes
from linnet.nnx.transforms.lift import is_node
from linnet.nnx.transforms.run import Call
from linnet.nnx.variablelib import Variable


def vjp(
    f: Any = None,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """The value of a function of objects at a point, and its vector-Jacobian product there.

    Args:
      f: the function; left out, the call is a decorator.
      *primals: its arguments.
      has_aux: the function returns a pair, and only the first is differentiated.
      reduce_axes: accepted for older programs; must be empty.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says. With them, objects are differentiated
        with respect to their ``Param`` Variables and get a ``State``.

    Returns:
      ``(value, vjp_fn)``, or ``(value, vjp_fn, aux)``; ``vjp_fn`` takes a cotangent of the value
      and returns one gradient for each argument.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> v = nnx.Param(jnp.array(3.0))
      >>> value, pull = nnx.vjp(lambda v, x: v * x, v, jnp.array(2.0))
      >>> float(value), [float(g[...] if hasattr(g, "value") else g) for g in pull(1.0)]
      (6.0, [2.0, 3.0])
    """
    check_reduce_axes("vjp", reduce_axes)
    if f is None:
        options = {"has_aux": has_aux, "graph": graph, "graph_updates": graph_updates}
        return lambda f: lambda *args: vjp(f, *args, **options)
    updates = resolve_updates(graph_updates)
    call = Call(f, primals, {}, "vjp", graph, graph_updates)
    wanted = Wanted(call, tuple(range(len(primals))), updates)

    def run(diff: Any) -> Any:
        inside, news, leaves, out = call.run(*wanted.substitute(diff))
        assert call.effects is not None
        changed = [inside.raw(number) for number in call.effects.changed]
        return _values(out[0] if has_aux else out), (changed, news, leaves)

    _, pull, (changed, news, leaves) = jax.vjp(run, wanted.values(), has_aux=True)
    out = call.close(changed, news, leaves)

    def vjp_fn(cotangent: Any) -> Any:
        ((variables, plain),) = pull(_values(cotangent))
        return wanted.gradients(variables, plain, updates)

    return (out[0], vjp_fn, out[1]) if has_aux else (out, vjp_fn)


def _values(tree: Any) -> Any:
    """Variables in a tree replaced by their values."""
    return jax.tree_util.tree_map(
        lambda x: x.get_value() if isinstance(x, Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Variable),
    )


def jvp(
    f: Any = None,
    primals: Any = None,
    tangents: Any = None,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """The value of a function of objects at a point, and its derivative in a direction.

    Args:
      f: the function; left out, the call is a decorator.
      primals: its arguments, a tuple.
      tangents: the direction: for each argument a tangent of the same form, a ``State`` for an
        object. Variables that a ``State`` leaves out do not move.
      has_aux: the function returns a pair, and only the first is differentiated.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says.

    Returns:
      ``(value, derivative)``, or ``(value, derivative, aux)``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> v = nnx.Param(jnp.array(3.0))
      >>> value, moved = nnx.jvp(lambda v: v * v, (v,), (nnx.Param(jnp.array(1.0)),))
      >>> float(value), float(moved)
      (9.0, 6.0)
    """
    if f is None:
        options = {"has_aux": has_aux, "graph": graph, "graph_updates": graph_updates}
        return lambda f: lambda primals, tangents: jvp(f, primals, tangents, **options)
    call = Call(f, tuple(primals), {}, "jvp", graph, graph_updates)
    opened = call.opened
    moves = _tangents(call, tuple(tangents))

    def run(values: Any, plain: Any) -> Any:
        inside, news, leaves, out = call.run(values, opened.arrays, plain)
        assert call.effects is not None
        changed = [inside.raw(number) for number in call.effects.changed]
        return _values(out[0] if has_aux else out), (changed, news, leaves)

    points = (opened.values, [jnp.asarray(x) for x in opened.plain])
    _, moved, (changed, news, leaves) = jax.jvp(run, points, moves, has_aux=True)
    out = call.close(changed, news, leaves)
    return (out[0], moved, out[1]) if has_aux else (out, moved)


def _tangents(call: Call, tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The direction as flat lists, zeros where nothing was given."""
    opened = call.opened
    given: dict[Any, Any] = {}
    plain: list[Any] = []
    args = opened.tree[0]
    if len(args) != len(tangents):
        raise TypeError(f"nnx.jvp got {len(args)} primals and {len(tangents)} tangents.")
    for position, (arg, tangent) in enumerate(zip(args, tangents, strict=True)):
        flat, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=is_node)
        parts = tree.flatten_up_to(tangent)
        for (path, leaf), part in zip(flat, parts, strict=True):
            if not is_node(leaf):
                plain.append(part)
                continue
            prefix = (0, position, *(key_name(key) for key in path))
            if isinstance(leaf, Variable):
                given[prefix] = part
                continue
            mapping = (
                plain_mapping(part)
                if isinstance(part, (State, dict))
                else flatten_node(part, True, "jvp")[1]
            )
            given |= {(*prefix, *inner): x for inner, x in iter_flat(mapping)}
    moves = []
    for path, value in zip(opened.variable_paths, opened.values, strict=True):
        tangent = given.get(path)
        tangent = tangent.get_value() if isinstance(tangent, Variable) else tangent
        moves.append(zeros_like(value) if tangent is None else tangent)
    return moves, [x if hasattr(x, "dtype") else jnp.asarray(x) for x in plain]


def zeros_like(value: Any) -> Any:
    """A zero tangent: of the same type for floats, ``float0`` for the rest."""

    def zero(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return jnp.zeros_like(x)
        return np.zeros(jnp.shape(x), jax.dtypes.float0)

    return jax.tree_util.tree_map(zero, value)
