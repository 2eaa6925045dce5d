"""Forward and backward derivatives at a point: vjp, jvp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.pytreelib.kinds import VARIABLE, key_name
from linnet.nnx.statelib import State, from_flat_state, iter_flat, plain_mapping
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.engine import is_node, open_tree
from linnet.nnx.transforms.grad import (
    DiffState,
    Wanted,
    check_pair,
    check_reduce_axes,
    like_argument,
    plain_values,
    stored_plainly,
    with_value,
)
from linnet.nnx.transforms.run import Call, Slots, positional, transform, without_static
from linnet.nnx.variablelib.variable import Variable, rebuild_variable, type_text


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


class CustomVjp:
    """A function with a derivative rule of its own; ``defvjp`` sets the rule."""

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Any, graph: Any, updates: Any):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff = tuple(nondiff_argnums)
        self._graph = graph
        self._updates = updates
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def defvjp(
        self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False
    ) -> None:
        """Sets the rule.

        Args:
          fwd: takes the arguments of the function and returns ``(output, residuals)``; residuals
            may contain Variables and objects.
          bwd: takes the ``nondiff_argnums`` arguments, the residuals and the incoming gradient, and
            returns one gradient for each other argument: ``None`` for zero, and zero for what a
            State leaves out. With graph updates the incoming gradient is a pair: gradients of what
            the function wrote to its arguments (a State for each object), and the gradient of the
            output.
          symbolic_zeros: must be False.

        Raises:
          NotImplementedError: ``symbolic_zeros`` is True.
        """
        if symbolic_zeros:
            raise NotImplementedError(
                "custom_vjp: symbolic_zeros=True is not supported.\nFix: leave it out; gradients "
                "that are zero arrive as arrays of zeros."
            )
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise AttributeError(
                f"No VJP defined for custom_vjp function {getattr(self.fun, '__name__', self.fun)} "
                "using defvjp.\nFix: call f.defvjp(fwd, bwd)."
            )
        return _Rule(self, positional(self.fun, args, kwargs, "custom_vjp")).run()


def _holds_arrays(tree: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_node)
    return any(is_node(leaf) or hasattr(leaf, "dtype") for leaf in leaves)


class _Rule:
    """One call: the flat function that JAX sees, with its forward and backward parts."""

    def __init__(self, custom: CustomVjp, args: tuple[Any, ...]):
        self.custom = custom
        count = len(args)
        whole = [n for n in custom.nondiff if not isinstance(n, DiffState)]
        self.nondiff = sorted({n % count for n in whole})
        self.filters = {n.argnum % count: n for n in custom.nondiff if isinstance(n, DiffState)}
        # JAX lets no tracer into an argument that is not differentiated, so that arrays and objects
        # take the usual way and get zero for a gradient.
        static = tuple(n for n in self.nondiff if not _holds_arrays(args[n]))
        self.static = {n: args[n] for n in static}
        fun, moving = without_static(custom.fun, args, static, "custom_vjp")
        self.fwd, _ = without_static(_required(custom.fwd), args, static, "custom_vjp")
        self.call = Call(
            fun, moving, {}, "custom_vjp", custom._graph, custom._updates, named=custom.fun
        )
        self.slots = Slots(self.call)
        self.residuals: Any = None

    def _primal(self, values: Any, arrays: Any, plain: Any) -> Any:
        inside, news, leaves, _ = self.call.run(values, arrays, plain)
        return inside.slot_values(), news, leaves

    def _forward(self, values: Any, arrays: Any, plain: Any) -> Any:
        call = self.call
        found: list[Any] = []

        def run(*args: Any) -> Any:
            pair = self.fwd(*args)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    "custom_vjp: fwd must return a pair (output, residuals), but got "
                    f"{type(pair).__name__}.\nFix: return both; None will do for no residuals."
                )
            found.append(open_tree(pair[1], True, "custom_vjp"))
            return pair[0]

        before, call.f = call.f, run
        try:
            out = self._primal(values, arrays, plain)
        finally:
            call.f = before
        kept = found[-1]
        self.residuals = kept.structure
        return out, (kept.values, kept.arrays, kept.plain, (values, arrays, plain))

    def _backward(self, saved: Any, cotangent: Any) -> Any:
        *kept, inputs = saved
        residuals = self.residuals.enter(*kept).tree
        moved, news, leaves = cotangent
        out = self._output_gradient(moved, news, leaves)
        incoming = (self._updates_of(moved), out) if self.call.updates else out
        grads = _required(self.custom.bwd)(*self._fixed(inputs), residuals, incoming)
        return self._flat(grads, inputs)

    def _fixed(self, inputs: Any) -> list[Any]:
        """The arguments that are not differentiated, as they came in."""
        if len(self.static) < len(self.nondiff):
            args = self.call.opened.structure.enter(*inputs).tree[0]
        else:
            args = ()
        return [self.static[n] if n in self.static else args[n] for n in self.nondiff]

    def _output_gradient(self, moved: list[Any], news: list[Any], leaves: list[Any]) -> Any:
        """The gradient in the form of the output; with graph updates a State for an object."""
        effects = self.call.effects
        assert effects is not None
        rest = iter(leaves)
        made = []
        for part in effects.out_parts:
            if part is None:
                made.append(next(rest))
            elif not self.call.updates or part.definition.kind == VARIABLE:
                made.append(Build().unflatten(part.definition, part.state(moved, news)))
            else:
                made.append(from_flat_state(self._pairs(part, moved, news)))
        return effects.out_treedef.unflatten(made)

    def _pairs(self, part: Any, moved: list[Any], news: list[Any]) -> Iterator[Any]:
        for path, slot in part.leaves:
            gradient = moved[slot.number] if slot.old else news[slot.number]
            definition = part.definition.at(path)
            if definition.kind == VARIABLE:
                metadata = stored_plainly(definition.own)
                gradient = rebuild_variable(definition.form, gradient, metadata)
            yield path, gradient

    def _arguments(self) -> list[tuple[int, Any]]:
        args = self.call.opened.tree[0]
        return [(n, arg) for n, arg in enumerate(args) if n not in self.nondiff]

    def _updates_of(self, moved: list[Any]) -> tuple[Any, ...]:
        """For each argument the gradients of its Variables' new values."""
        opened = self.call.opened

        def answer(prefix: tuple[Any, ...], leaf: Any) -> Any:
            if not is_node(leaf):
                return None
            pairs = {
                path[len(prefix) :]: with_value(opened.variables[n], moved[n])
                for n, path in enumerate(opened.variable_paths)
                if path[: len(prefix)] == prefix
            }
            return pairs.get(()) if isinstance(leaf, Variable) else from_flat_state(pairs)

        return tuple(
            jax.tree_util.tree_map_with_path(
                lambda path, leaf, n=n: answer((0, n, *(key_name(k) for k in path)), leaf),
                arg,
                is_leaf=is_node,
            )
            for n, arg in self._arguments()
        )

    def _flat(self, grads: Any, inputs: Any) -> Any:
        """Gradients in the form of the arguments as flat cotangents, zeros where there is none."""
        arguments = self._arguments()
        grads = grads if isinstance(grads, tuple) else (grads,)
        if len(grads) != len(arguments):
            raise TypeError(
                f"custom_vjp: bwd must return {len(arguments)} gradients, one for each "
                f"differentiable argument, but got {len(grads)}.\n"
                "Fix: return a tuple of gradients, None where there is none."
            )
        given: dict[Any, Any] = {}
        for (number, arg), grad in zip(arguments, grads, strict=True):
            self._collect(number, arg, grad, given)
        slots = self.slots
        values = [
            self._fit(given.pop(path, None), value, path)
            for path, value in zip(slots.paths, [*inputs[0], *inputs[1]], strict=True)
        ]
        rest = [
            self._fit(given.pop(path, None), value, path)
            for path, value in zip(slots.plain_paths, inputs[2], strict=True)
        ]
        if given:
            raise TypeError(
                f"custom_vjp: bwd returned a gradient for {self.call.where(next(iter(given)))}, "
                "but the arguments have nothing there.\n"
                "Fix: return gradients for Variables of the arguments only."
            )
        return values[: slots.variables], values[slots.variables :], rest

    def _collect(self, number: int, arg: Any, grad: Any, given: Any) -> None:
        flat, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=is_node)
        if grad is None:
            return
        if isinstance(arg, State) and isinstance(grad, State):
            given |= {(0, number, *path): x for path, x in iter_flat(grad.raw_mapping)}
            return
        for (path, leaf), part in zip(flat, tree.flatten_up_to(grad), strict=True):
            prefix = (0, number, *(key_name(k) for k in path))
            if not is_node(leaf) or isinstance(leaf, Variable):
                given[prefix] = part
            elif part is not None:
                mapping = part if isinstance(part, (State, dict)) else like_argument(part)
                given |= {(*prefix, *p): x for p, x in iter_flat(plain_mapping(mapping))}

    def _fit(self, grad: Any, value: Any, path: Any) -> Any:
        """A gradient as JAX wants it: zeros where there is none, float0 for integers."""
        grad = grad.get_value() if isinstance(grad, Variable) else grad
        if grad is None or not self._is_differentiable(path):
            return zeros_like(value)

        def one(x: Any, g: Any) -> Any:
            if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                return np.zeros(jnp.shape(x), jax.dtypes.float0)
            if jnp.shape(x) != jnp.shape(g):
                raise ValueError(
                    f"custom_vjp: bwd returned a gradient of shape {jnp.shape(g)} for "
                    f"{self.call.where(path)}, which is {type_text(jnp.asarray(x))}.\n"
                    "Fix: return a gradient of the shape of the argument."
                )
            return jnp.asarray(g, jnp.result_type(x))

        return jax.tree_util.tree_map(one, value, grad)

    def _is_differentiable(self, path: Any) -> bool:
        wanted = self.filters.get(path[1])
        if wanted is None or path not in self.call.opened.variable_paths:
            return True
        number = self.call.opened.variable_paths.index(path)
        return wanted.map_prefix(path[2:], self.call.opened.variables[number])

    def run(self) -> Any:
        """Runs the function, with the rule in place for whoever differentiates."""
        flat = jax.custom_vjp(self._primal)
        flat.defvjp(self._forward, self._backward)
        opened = self.call.opened
        plain = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in opened.plain]
        kept, news, leaves = flat(opened.values, opened.arrays, plain)
        effects = self.call.effects
        assert effects is not None
        return self.call.close([kept[n] for n in effects.changed], news, leaves)


def _required(f: Callable[..., Any] | None) -> Callable[..., Any]:
    assert f is not None
    return f


def custom_vjp(
    fun: Any = None,
    *,
    nondiff_argnums: tuple[Any, ...] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives a function of objects a derivative rule of its own.

    Args:
      fun: the function; left out, the call is a decorator.
      nondiff_argnums: arguments that are not differentiated; they are passed to ``bwd`` first. A
        ``DiffState`` says instead which Variables of an argument are differentiated.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says.

    Returns:
      The function, with ``defvjp(fwd, bwd)`` to set the rule.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> @nnx.custom_vjp
      ... def scaled(v, x):
      ...     return v * x
      >>> def fwd(v, x):
      ...     return scaled(v, x), (v, x)
      >>> def bwd(residuals, g):
      ...     v, x = residuals
      ...     _, g = g
      ...     return nnx.Param(g * x * 10), g * v
      >>> scaled.defvjp(fwd, bwd)
      >>> v = nnx.Param(jnp.array(2.0))
      >>> float(nnx.grad(scaled)(v, jnp.array(3.0)).value)
      30.0
    """

    def make(fun: Any) -> Any:
        refuse_bound_method(fun, "custom_vjp")
        return CustomVjp(fun, nondiff_argnums, graph, graph_updates)

    return make if fun is None else make(fun)
