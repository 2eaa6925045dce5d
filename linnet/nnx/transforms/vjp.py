"""Derivatives at a point (``vjp``, ``jvp``), and rules of the user for them (``custom_vjp``)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import GradientRuleError, MissingRuleError, type_text
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.traverse import map as graphlib_map
from linnet.nnx.pytreelib.kinds import VARIABLE, Path, is_node
from linnet.nnx.statelib import State, from_flat_state, iter_flat, plain_mapping
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.effects import LeavingNode, Outcome
from linnet.nnx.transforms.engine import leaves_with_paths, open_tree
from linnet.nnx.transforms.grad import (
    DiffState,
    Wanted,
    below,
    main_output,
    map_argument,
    plain_values,
    refuse_reduce_axes,
    stored_plainly,
    with_value,
)
from linnet.nnx.transforms.run import Call, positional, transform, without_static
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import Variable, is_variable, rebuild_variable


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
      *primals: its arguments; without any, a function of them is returned.
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
    refuse_reduce_axes("vjp", reduce_axes)

    def lifted(call: Call) -> Any:
        wanted = Wanted(call, tuple(range(len(call.opened.tree[0]))))
        run = lambda diff: wanted.run(diff, has_aux)  # noqa: E731
        _, pull, outcome = jax.vjp(run, wanted.values(), has_aux=True)
        out = call.close(outcome)

        def vjp_fn(cotangent: Any) -> Any:
            (diff,) = pull(plain_values(cotangent))
            return wanted.gradients(diff)

        return (out[0], vjp_fn, out[1]) if has_aux else (out, vjp_fn)

    made = transform("vjp", lifted, f, graph, graph_updates)
    return made(*primals) if primals else made


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
      primals: its arguments, a tuple; left out, a function of primals and tangents is returned.
      tangents: the direction: for each argument a tangent of the same form, a ``State`` for an
        object. Variables that a ``State`` leaves out do not move.
      has_aux: the function returns a pair, and only the first is differentiated.
      graph, graph_updates: by default as ``set_graph_mode`` and ``set_graph_updates`` say.

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

    def make(f: Callable[..., Any]) -> Any:
        refuse_bound_method(f, "jvp")

        def derivative(primals: Any, tangents: Any) -> Any:
            lifted = lambda call: _jvp(call, tuple(tangents), has_aux)  # noqa: E731
            return transform("jvp", lifted, f, graph, graph_updates)(*primals)

        return functools.wraps(f)(derivative)

    if primals is not None:
        return make(f)(primals, tangents)
    return make if f is None else make(f)


def _jvp(call: Call, tangents: tuple[Any, ...], has_aux: bool) -> Any:
    moves, count = _tangents(call, tangents), len(call.slot_values)
    moving = [n for n, x in enumerate(call.inputs) if n >= count or _is_inexact(x)]
    # JAX 0.12 cannot make a ref of integers under jvp.
    fixed = set(range(call.variable_count)) - set(moving)
    filling: list[Callable[[Any], Any]] = []

    def run(values: Any) -> Any:
        made = call.run(*call.fill((moving, values), runs_once=True), fixed)
        result = main_output(made.out, has_aux, "jvp")
        filling.append(_filling(made.out[0] if has_aux else made.out))
        return result, made.outcome()

    points = [call.inputs[n] if n < count else jnp.asarray(call.inputs[n]) for n in moving]
    directions = [moves[n] for n in moving]
    _, tangent, outcome = jax.jvp(run, (points,), (directions,), has_aux=True)
    out = call.close(outcome)
    tangent = filling[-1](tangent)
    return (out[0], tangent, out[1]) if has_aux else (out, tangent)


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
      graph, graph_updates: by default as ``set_graph_mode`` and ``set_graph_updates`` say.

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
            output. Without graph updates it is the gradient of the output alone, and a parameter
            ``updates_g`` gets a tuple with one entry for each argument: the argument with
            gradients in the Variables that the function wrote to, and None elsewhere.
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
            raise MissingRuleError(
                f"No VJP defined for custom_vjp function {getattr(self.fun, '__name__', self.fun)} "
                "using defvjp.\nFix: call f.defvjp(fwd, bwd)."
            )
        given = positional(self.fun, args, kwargs, "custom_vjp")
        return _CustomCall(self, self.fwd, self.bwd, given).run()


class _CustomCall:
    """One call of a ``CustomVjp``: the flat function that JAX gets, and its rule."""

    def __init__(
        self,
        custom: CustomVjp,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        args: tuple[Any, ...],
    ):
        self.custom = custom
        self.bwd = bwd
        self.all_args = args
        count = len(args)
        whole = [n for n in custom.nondiff if not isinstance(n, DiffState)]
        self.nondiff = sorted({n % count for n in whole})
        self.filters = {n.argnum % count: n for n in custom.nondiff if isinstance(n, DiffState)}
        # JAX takes no tracer in an argument that is not differentiated, so arrays and objects among
        # them are differentiated too, and their gradient is set to zero.
        static = tuple(
            n
            for n in self.nondiff
            if not any(is_node(x) or hasattr(x, "dtype") for _, x in leaves_with_paths(args[n]))
        )
        self.static = {n: args[n] for n in static}
        fun, moving = without_static(custom.fun, args, static, "custom_vjp")
        self.fwd, _ = without_static(fwd, args, static, "custom_vjp")
        self.call = Call(
            fun, moving, {}, "custom_vjp", custom._graph, custom._updates, named_by=custom.fun
        )
        self.effects: Any = None  # of the last run
        self.residuals: Any = None  # their structure, from the last run of ``fwd``

    def run(self) -> Any:
        """Runs the function under ``jax.custom_vjp`` with the user's rule."""

        @jax.custom_vjp
        def flat(values: Any, plain: Any) -> Any:
            return self._primal(self.call, values, plain)

        flat.defvjp(self._forward, self._backward)
        plain = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in self.call.plain]
        now, new, leaves = flat(self.call.slot_values, plain)
        changed = [now[n] for n in self.effects.changed]
        return self.call.close(Outcome(self.effects, (changed, new, leaves)))

    def _primal(self, call: Call, values: Any, plain: Any) -> Any:
        run = call.run(values, plain)
        self.effects = run.effects
        return run.inside.slot_values(), run.new, run.plain

    def _forward(self, values: Any, plain: Any) -> Any:
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

        call = self.call.for_function(run, self.custom.fun)
        out = self._primal(call, values, plain)
        kept = found[-1]
        self.residuals = kept.structure
        return out, (kept.slot_values, kept.plain, (values, plain))

    def _backward(self, saved: Any, cotangent: Any) -> Any:
        *kept, inputs = saved
        residuals = self.residuals.enter(*kept).tree
        slot_grads, new, leaves = cotangent
        out = self._output_gradient(slot_grads, new, leaves)
        incoming = (self._updates_of(slot_grads), out) if self.call.updates else out
        named = {"updates_g": self._changes_of(slot_grads)} if self._takes_updates() else {}
        grads = self.bwd(*self._fixed(inputs), residuals, incoming, **named)
        return self._flat(grads, inputs)

    def _fixed(self, inputs: Any) -> list[Any]:
        """The arguments that are not differentiated, as they came in."""
        if len(self.static) < len(self.nondiff):
            args = self.call.opened.structure.enter(*inputs).tree[0]
        else:
            args = ()
        return [self.static[n] if n in self.static else args[n] for n in self.nondiff]

    def _output_gradient(self, slot_grads: list[Any], new: list[Any], leaves: list[Any]) -> Any:
        """The gradient of the output in its structure; with graph updates a State for an object."""
        effects = self.effects
        rest = iter(leaves)
        made = []
        for node in effects.output_nodes:
            if node is None:
                made.append(next(rest))
            elif not self.call.updates or node.definition.kind == VARIABLE:
                made.append(Build().unflatten(node.definition, node.state(slot_grads, new)))
            else:
                made.append(from_flat_state(self._pairs(node, slot_grads, new)))
        return effects.out_treedef.unflatten(made)

    def _pairs(self, node: LeavingNode, slot_grads: list[Any], new: list[Any]) -> Iterator[Any]:
        for path, (came_in, number) in node.leaves:
            gradient = slot_grads[number] if came_in else new[number]
            definition = node.definition.at(path)
            if definition.kind == VARIABLE:
                metadata = stored_plainly(definition.static)
                gradient = rebuild_variable(definition.payload, gradient, metadata)
            yield path, gradient

    def _arguments(self) -> list[tuple[int, Any]]:
        args = self.call.opened.tree[0]
        return [(n, arg) for n, arg in enumerate(args) if n not in self.nondiff]

    def _updates_of(self, slot_grads: list[Any]) -> tuple[Any, ...]:
        """For each argument, the gradients of the new values of its Variables."""
        opened = self.call.opened
        gradients = map(with_value, opened.variables, slot_grads)
        by_path = dict(zip(opened.variable_paths, gradients, strict=True))

        def answer(prefix: Path, leaf: Any) -> Any:
            if not is_node(leaf):
                return None
            found = below(prefix, by_path)
            return found.get(()) if isinstance(leaf, Variable) else from_flat_state(found)

        return tuple(map_argument(answer, self.call, n) for n, _ in self._arguments())

    def _takes_updates(self) -> bool:
        """Whether ``bwd`` gets the gradients of what was written in a parameter of its own."""
        if self.call.updates:
            return False
        try:
            return "updates_g" in inspect.signature(self.bwd).parameters
        except (TypeError, ValueError):  # some functions in C have no signature
            return False

    def _changes_of(self, slot_grads: list[Any]) -> tuple[Any, ...]:
        """The arguments with gradients in the Variables that were written to, None elsewhere."""
        opened = self.call.opened
        numbers = {id(v): n for n, v in enumerate(opened.variables)}

        def change(path: Any, leaf: Any) -> Any:
            number = numbers.get(id(leaf), -1)
            return with_value(leaf, slot_grads[number]) if number in self.effects.changed else None

        def answer(leaf: Any) -> Any:
            if not is_node(leaf) or isinstance(leaf, Variable):
                return change((), leaf)
            return graphlib_map(change, leaf, graph=True, recreate_variables=False)

        return jax.tree_util.tree_map(answer, tuple(self.all_args), is_leaf=is_node)

    def _flat(self, grads: Any, inputs: Any) -> Any:
        """The gradients that ``bwd`` returned as flat cotangents, zeros where there is none."""
        arguments = self._arguments()
        grads = grads if isinstance(grads, tuple) else (grads,)
        if len(grads) != len(arguments):
            raise GradientRuleError(
                f"custom_vjp: bwd must return {len(arguments)} gradients, one for each "
                f"differentiable argument, but got {len(grads)}.\n"
                "Fix: return a tuple of gradients, None where there is none."
            )
        given: dict[Any, Any] = {}
        for (number, arg), grad in zip(arguments, grads, strict=True):
            if isinstance(arg, State) and isinstance(grad, State):
                given |= _flat_variables((0, number), grad)
            elif grad is not None:
                given |= _by_path((0, number), arg, grad)
        values, plain = inputs
        pairs = zip(self.call.input_paths, [*values, *plain], strict=True)
        found = [self._fit(given.pop(path, None), value, path) for path, value in pairs]
        if given:
            raise GradientRuleError(
                f"custom_vjp: bwd returned a gradient for {self.call.where(next(iter(given)))}, "
                "but the arguments have nothing there.\n"
                "Fix: return gradients for Variables of the arguments only."
            )
        return found[: len(values)], found[len(values) :]

    def _fit(self, grad: Any, value: Any, path: Any) -> Any:
        """A gradient as JAX wants it: zeros where there is none, float0 for integers."""
        grad = value_of(grad)
        if grad is None or not self._is_differentiable(path):
            return _zeros_like(value)

        found, wanted = map(jax.tree_util.tree_structure, (grad, value))
        if found != wanted:
            raise GradientRuleError(
                f"custom_vjp: bwd returned {found} as the gradient for {self.call.where(path)}, "
                f"whose value is {wanted}.\n"
                "Fix: return a gradient of the form of the argument; with graph updates bwd gets a "
                "pair, of which the second is the gradient of the output."
            )

        def one(x: Any, g: Any) -> Any:
            if not _is_inexact(x):
                return _float0(x)
            if jnp.shape(x) != jnp.shape(g):
                raise GradientRuleError(
                    f"custom_vjp: bwd returned a gradient of shape {jnp.shape(g)} for "
                    f"{self.call.where(path)}, which is {type_text(jnp.asarray(x))}.\n"
                    "Fix: return a gradient of the shape of the argument."
                )
            return jnp.asarray(g, jnp.result_type(x))

        return jax.tree_util.tree_map(one, value, grad)

    def _is_differentiable(self, path: Any) -> bool:
        wanted, paths = self.filters.get(path[1]), self.call.opened.variable_paths
        if wanted is None or path not in paths:
            return True
        return wanted.map_prefix(path[2:], self.call.opened.variables[paths.index(path)])


def _filling(out: Any) -> Callable[[Any], Any]:
    """A function that puts derivatives into Variables where the output has Variables."""
    leaves, tree = jax.tree_util.tree_flatten(out, is_leaf=is_variable)
    # Types and metadata only: a Variable would keep the tracers of the run alive.
    types = [(type(x), x._metadata) if is_variable(x) else None for x in leaves]
    return lambda values: tree.unflatten(
        part if pair is None else rebuild_variable(pair[0], part, stored_plainly(pair[1]))
        for pair, part in zip(types, tree.flatten_up_to(values), strict=True)
    )


def _tangents(call: Call, tangents: tuple[Any, ...]) -> list[Any]:
    """One tangent for each slot and for each plain leaf; slots without one get zero."""
    args = call.opened.tree[0]
    if len(args) != len(tangents):
        raise TypeError(
            f"nnx.jvp got {len(args)} primals and {len(tangents)} tangents.\n"
            "Fix: give one tangent for each primal."
        )
    given: dict[Any, Any] = {}
    for number, (arg, tangent) in enumerate(zip(args, tangents, strict=True)):
        given |= _by_path((0, number), arg, tangent)
    plain = [given.pop(path) for path in call.opened.plain_paths]
    moves = []
    for path, value in zip(call.paths, call.slot_values, strict=True):
        tangent = plain_values(given.pop(path, None))
        moves.append(_zeros_like(value) if tangent is None else tangent)
    if given:
        raise TypeError(
            f"nnx.jvp got a tangent for {call.where(next(iter(given)))}, but the primals have "
            "nothing there.\nFix: give tangents for Variables of the primals only."
        )
    return moves + [x if hasattr(x, "dtype") else jnp.asarray(x) for x in plain]


def _by_path(prefix: Any, arg: Any, given: Any) -> dict[Any, Any]:
    """Tangents or gradients that have the structure of an argument, by path."""
    found: dict[Any, Any] = {}
    tree = jax.tree_util.tree_structure(arg, is_leaf=is_node)
    pairs = zip(leaves_with_paths(arg), tree.flatten_up_to(given), strict=True)
    for (path, leaf), part in pairs:
        if not is_node(leaf) or isinstance(leaf, Variable):
            found[*prefix, *path] = part
        elif part is not None:
            found |= _flat_variables((*prefix, *path), part)
    return found


def _flat_variables(prefix: Any, part: Any) -> dict[Any, Any]:
    """The Variables of a State, nested dict or object, by path."""
    mapping = part if isinstance(part, (State, dict)) else flatten_node(part, True, "grad")[1]
    return {(*prefix, *path): x for path, x in iter_flat(plain_mapping(mapping))}


def _is_inexact(value: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(value)
    return any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves)


def _zeros_like(value: Any) -> Any:
    """Zero tangents: of the same dtype for floats, ``float0`` for integers."""
    return jax.tree_util.tree_map(
        lambda x: jnp.zeros_like(x) if _is_inexact(x) else _float0(x), value
    )


def _float0(x: Any) -> Any:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
