"""custom_vjp: a derivative rule of one's own for a function of objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.nnx.graphlib.modes import graph_updates as resolve_updates
from linnet.nnx.kinds import key_name
from linnet.nnx.statelib import State, from_flat_state, iter_flat, plain_mapping
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.autodiff import like_argument, with_value
from linnet.nnx.transforms.lift import is_node, open_tree
from linnet.nnx.transforms.linearize import zeros_like
from linnet.nnx.transforms.run import Call
from linnet.nnx.variablelib import Variable


class CustomVjp:
    """A function with a derivative rule of its own; ``defvjp`` sets the rule."""

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: Any, graph: Any, updates: Any):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff = tuple(_argnum(n) for n in nondiff_argnums)
        self._graph = graph
        self._updates = updates
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets the rule.

        Args:
          fwd: takes the arguments of the function and returns ``(output, residuals)``; residuals
          may
            contain Variables and objects.
          bwd: takes the ``nondiff_argnums`` arguments, the residuals and the incoming gradient, and
            returns one gradient for each other argument. With graph updates the incoming gradient
            is a pair: gradients of what the function wrote to its arguments (a State for each
            object), and the gradient of the output.
        """
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise AttributeError(
                f"No VJP defined for custom_vjp function {getattr(self.fun, '__name__', self.fun)} "
                "using defvjp.\nFix: call f.defvjp(fwd, bwd)."
            )
        return _Rule(self, args).run()


def _argnum(number: Any) -> int:
    return number.argnum if hasattr(number, "argnum") else number


class _Rule:
    """One call: the flat function that JAX sees, with its forward and backward parts."""

    def __init__(self, custom: CustomVjp, args: tuple[Any, ...]):
        self.custom = custom
        self.fixed = {n % len(args): args[n] for n in custom.nondiff}
        self.updates = resolve_updates(custom._updates)
        moving = tuple(None if n in self.fixed else arg for n, arg in enumerate(args))
        self.call = Call(
            self._with_fixed(custom.fun), moving, {}, "custom_vjp", custom._graph, custom._updates
        )
        self.residuals: Any = None

    def _with_fixed(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inner: f(*(self.fixed.get(n, arg) for n, arg in enumerate(inner)))

    def _primal(self, values: Any, arrays: Any, plain: Any) -> Any:
        inside, news, leaves, _ = self.call.run(values, arrays, plain)
        return [inside.raw(n) for n in range(len(inside.variables))], news, leaves

    def _forward(self, values: Any, arrays: Any, plain: Any) -> Any:
        call = self.call
        found: list[Any] = []

        def run(*args: Any) -> Any:
            pair = self._with_fixed(_required(self.custom.fwd))(*args)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    "custom_vjp: fwd must return a pair (output, residuals), but got "
                    f"{type(pair).__name__}."
                )
            found.append(open_tree(pair[1], True, "custom_vjp"))
            return pair[0]

        before, call.f = call.f, run
        try:
            inside, news, leaves, _ = call.run(values, arrays, plain)
        finally:
            call.f = before
        kept = found[-1]
        self.residuals = kept.structure
        out = ([inside.raw(n) for n in range(len(inside.variables))], news, leaves)
        return out, (kept.values, kept.arrays, kept.plain, (values, arrays, plain))

    def _backward(self, saved: Any, cotangent: Any) -> Any:
        values, arrays, plain, inputs = saved
        residuals = self.residuals.enter(values, arrays, plain).tree
        effects = self.call.effects
        assert effects is not None
        moved, _, leaves = cotangent
        out = effects.out_treedef.unflatten(leaves) if not any(effects.out_parts) else leaves
        fixed = [self.fixed[n] for n in sorted(self.fixed)]
        incoming = (self._updates_of(moved), out) if self.updates else out
        grads = _required(self.custom.bwd)(*fixed, residuals, incoming)
        return self._flat(grads, inputs)

    def _arguments(self) -> list[tuple[int, Any]]:
        args = self.call.opened.tree[0]
        return [(n, arg) for n, arg in enumerate(args) if n not in self.fixed]

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
            return pairs[()] if isinstance(leaf, Variable) else from_flat_state(pairs)

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
                f"differentiable argument, but got {len(grads)}."
            )
        given: dict[Any, Any] = {}
        plain: dict[Any, Any] = {}
        for (number, arg), grad in zip(arguments, grads, strict=True):
            self._collect(number, arg, grad, given, plain)
        opened = self.call.opened
        values = [
            _fit(given.get(path), value)
            for path, value in zip(opened.variable_paths, inputs[0], strict=True)
        ]
        paths = jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node)
        names = [tuple(key_name(k) for k in path) for path, leaf in paths if not is_node(leaf)]
        rest = [_fit(plain.get(name), x) for name, x in zip(names, inputs[2], strict=True)]
        return values, [zeros_like(x) for x in inputs[1]], rest

    def _collect(self, number: int, arg: Any, grad: Any, given: Any, plain: Any) -> None:
        flat, tree = jax.tree_util.tree_flatten_with_path(arg, is_leaf=is_node)
        if grad is None:
            return
        if isinstance(arg, State) and isinstance(grad, State):
            given |= {(0, number, *path): x for path, x in iter_flat(grad.raw_mapping)}
            return
        for (path, leaf), part in zip(flat, tree.flatten_up_to(grad), strict=True):
            prefix = (0, number, *(key_name(k) for k in path))
            if not is_node(leaf):
                plain[prefix] = part
            elif isinstance(leaf, Variable):
                given[prefix] = part
            elif part is not None:
                mapping = part if isinstance(part, (State, dict)) else like_argument(part)
                given |= {(*prefix, *p): x for p, x in iter_flat(plain_mapping(mapping))}

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


def _fit(grad: Any, value: Any) -> Any:
    """A gradient as JAX wants it for a value: zeros where there is none, float0 for integers."""
    grad = grad.get_value() if isinstance(grad, Variable) else grad
    if grad is None:
        return zeros_like(value)

    def one(x: Any, g: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return np.zeros(jnp.shape(x), jax.dtypes.float0)
        return jnp.asarray(g, jnp.result_type(x))

    return jax.tree_util.tree_map(one, value, grad)


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
      nondiff_argnums: arguments that are not differentiated; they are passed to ``bwd`` first.
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
