"""Forward and backward derivatives at a point: vjp, jvp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.kinds import key_name
from linnet.nnx.statelib import State, iter_flat, plain_mapping
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.gradients import (
    Wanted,
    check_pair,
    check_reduce_axes,
    plain_values,
    stored_plainly,
)
from linnet.nnx.transforms.lift import is_node
from linnet.nnx.transforms.run import Call, transform
from linnet.nnx.transforms.slots import Slots
from linnet.nnx.variablelib import Variable, rebuild_variable


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
      f: the function; without it, or without primals, the call is a decorator.
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
    options = {"has_aux": has_aux, "graph": graph, "graph_updates": graph_updates}
    if not primals:
        return transform("vjp", lambda f, args, _: vjp(f, *args, **options), f)
    refuse_bound_method(f, "vjp")
    call = Call(f, primals, {}, "vjp", graph, graph_updates)
    wanted = Wanted(call, tuple(range(len(primals))))

    def run(diff: Any) -> Any:
        out, rest = wanted.run(diff)
        if has_aux:
            check_pair(out, "vjp")
        return plain_values(out[0] if has_aux else out), rest

    _, pull, rest = jax.vjp(run, wanted.values(), has_aux=True)
    out = call.close(*rest)

    def vjp_fn(cotangent: Any) -> Any:
        (diff,) = pull(plain_values(cotangent))
        return wanted.gradients(diff)

    return (out[0], vjp_fn, out[1]) if has_aux else (out, vjp_fn)


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
      f: the function; without it, or without primals, the call is a decorator.
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
    options = {"has_aux": has_aux, "graph": graph, "graph_updates": graph_updates}
    if primals is None:
        return transform("jvp", lambda f, args, _: jvp(f, *args, **options), f)
    refuse_bound_method(f, "jvp")
    call = Call(f, tuple(primals), {}, "jvp", graph, graph_updates)
    slots = Slots(call)
    moves, plain_moves = _Tangents(slots).flat(tuple(tangents))
    moving = [n for n, value in enumerate(slots.values) if _is_inexact(value)]
    forms: list[Any] = []

    def run(moved: Any, plain: Any) -> Any:
        values, count = list(slots.values), slots.variables
        for number, value in zip(moving, moved, strict=True):
            values[number] = value
        # JAX 0.12 cannot make a ref of integers under jvp.
        fixed = set(range(count)) - set(moving)
        inside, news, leaves, out = call.run(values[:count], values[count:], plain, fixed)
        if has_aux:
            check_pair(out, "jvp")
        assert call.effects is not None
        changed = [inside.raw(number) for number in call.effects.changed]
        result = out[0] if has_aux else out
        forms.append(_Form(result))
        return plain_values(result), (changed, news, leaves)

    points = ([slots.values[n] for n in moving], [jnp.asarray(x) for x in slots.plain])
    directions = ([moves[n] for n in moving], plain_moves)
    _, moved, rest = jax.jvp(run, points, directions, has_aux=True)
    out = call.close(*rest)
    moved = forms[-1].fill(moved)
    return (out[0], moved, out[1]) if has_aux else (out, moved)


class _Form:
    """Where the Variables of an output stand, so that its derivative can have them too."""

    def __init__(self, out: Any):
        leaves, self.tree = jax.tree_util.tree_flatten(out, is_leaf=_is_variable)
        # Kinds and metadata only: a Variable would keep the tracers of the run alive.
        self.kinds = [(type(x), x._metadata) if _is_variable(x) else None for x in leaves]

    def fill(self, values: Any) -> Any:
        parts = self.tree.flatten_up_to(values)
        return self.tree.unflatten(
            part if kind is None else rebuild_variable(kind[0], part, stored_plainly(kind[1]))
            for kind, part in zip(self.kinds, parts, strict=True)
        )


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


class _Tangents:
    """Tangents in the form of the arguments as flat lists."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.by_path: dict[Any, Any] = {}
        self.plain: list[Any] = []

    def flat(self, tangents: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """One tangent for each slot and plain leaf, zero where nothing was given.

        Raises:
          TypeError: there are too many or too few, or one is for something that is not there.
        """
        args = self.slots.call.opened.tree[0]
        if len(args) != len(tangents):
            raise TypeError(
                f"nnx.jvp got {len(args)} primals and {len(tangents)} tangents.\n"
                "Fix: give one tangent for each primal."
            )
        for position, (arg, tangent) in enumerate(zip(args, tangents, strict=True)):
            self._collect((0, position), arg, tangent)
        moves = [
            self._move(self.by_path.pop(path, None), value)
            for path, value in zip(self.slots.paths, self.slots.values, strict=True)
        ]
        if self.by_path:
            where = self.slots.call.where(next(iter(self.by_path)))
            raise TypeError(
                f"nnx.jvp got a tangent for {where}, but the primals have nothing there.\n"
                "Fix: give tangents for Variables of the primals only."
            )
        return moves, [x if hasattr(x, "dtype") else jnp.asarray(x) for x in self.plain]

    def _collect(self, prefix: Any, arg: Any, tangent: Any) -> None:
        flat, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=is_node)
        for (keys, leaf), part in zip(flat, tree.flatten_up_to(tangent), strict=True):
            path = (*prefix, *(key_name(key) for key in keys))
            if not is_node(leaf):
                self.plain.append(part)
            elif isinstance(leaf, Variable):
                self.by_path[path] = part
            elif isinstance(part, (State, dict)):
                self._add(path, plain_mapping(part))
            else:
                self._add(path, flatten_node(part, True, "jvp")[1])

    def _add(self, prefix: Any, mapping: Any) -> None:
        self.by_path |= {(*prefix, *path): x for path, x in iter_flat(mapping)}

    def _move(self, tangent: Any, value: Any) -> Any:
        tangent = tangent.get_value() if isinstance(tangent, Variable) else tangent
        return zeros_like(value) if tangent is None else tangent


def _is_inexact(value: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(value)
    return any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves)


def zeros_like(value: Any) -> Any:
    """A zero tangent: of the same type for floats, ``float0`` for the rest."""

    def zero(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return jnp.zeros_like(x)
        return np.zeros(jnp.shape(x), jax.dtypes.float0)

    return jax.tree_util.tree_map(zero, value)
