"""Derivatives of functions of objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.modes import graph_updates as resolve_updates
from linnet.nnx.kinds import key_name
from linnet.nnx.statelib import State, from_flat_state, iter_flat
from linnet.nnx.transforms.lift import is_node
from linnet.nnx.transforms.run import Call, transform
from linnet.nnx.variablelib import Param, Variable, rebuild_variable


@dataclasses.dataclass(frozen=True)
class DiffState:
    """Differentiates with respect to the Variables of an argument that a filter selects.

    Args:
      argnum: the position of the argument.
      filter: which of its Variables.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> state = nnx.State({"a": nnx.Param(jnp.array(3.0)), "b": nnx.BatchStat(jnp.array(2.0))})
      >>> grad = nnx.grad(lambda s: s.a * s.b, argnums=nnx.DiffState(0, nnx.BatchStat))
      >>> float(grad(state).b.value)
      3.0
    """

    argnum: int
    filter: Filter

    def map_prefix(self, path: Any, variable: Any) -> bool:
        """Whether a Variable is differentiated."""
        return filterlib.to_predicate(self.filter)(path, variable)


class Wanted:
    """Which Variables and plain leaves of the arguments are differentiated, and how to answer."""

    def __init__(self, call: Call, argnums: Any, updates: bool):
        args = call.opened.tree[0]
        self.single = not isinstance(argnums, Sequence)
        self.requests = [
            _request(number, len(args), call.api, updates)
            for number in ((argnums,) if self.single else argnums)
        ]
        self.call = call
        filters = {argnum: filterlib.to_predicate(wanted) for argnum, wanted in self.requests}
        opened = call.opened
        self.variables = [
            number
            for number, path in enumerate(opened.variable_paths)
            if path[0] == 0
            and path[1] in filters
            and filters[path[1]](path[2:], opened.variables[number])
        ]
        paths = jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node)
        plain_paths = [path for path, leaf in paths if not is_node(leaf)]
        self.plain = [
            number
            for number, path in enumerate(plain_paths)
            if path[0].idx == 0 and path[1].idx in filters
        ]

    def values(self) -> tuple[list[Any], list[Any]]:
        """What is differentiated: values of Variables, and plain leaves."""
        opened = self.call.opened
        values = opened.values
        return [values[n] for n in self.variables], [opened.plain[n] for n in self.plain]

    def substitute(self, diff: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """All values, arrays and plain leaves, with tracers where something is differentiated."""
        opened = self.call.opened
        values, plain = opened.values, list(opened.plain)
        for number, value in zip(self.variables, diff[0], strict=True):
            values[number] = value
        for number, value in zip(self.plain, diff[1], strict=True):
            plain[number] = value
        return values, opened.arrays, plain

    def gradients(self, variables: list[Any], plain: list[Any], updates: bool) -> Any:
        """The derivatives in the form of the arguments."""
        by_variable = dict(zip(self.variables, variables, strict=True))
        by_plain = dict(zip(self.plain, plain, strict=True))
        args = self.call.opened.tree[0]
        made = [self._argument(argnum, args, by_variable, by_plain, updates)
                for argnum, _ in self.requests]  # fmt: skip
        return made[0] if self.single else tuple(made)

    def _argument(self, argnum: int, args: Any, by_variable: Any, by_plain: Any, own: bool) -> Any:
        """One argument with derivatives in place of values; objects become States."""
        opened = self.call.opened
        numbers = {id(v): n for n, v in enumerate(opened.variables)}
        position = {}
        count = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node):
            if not is_node(leaf):
                position[(path[0].idx, *path[1:])] = count
                count += 1

        def answer(path: Any, leaf: Any) -> Any:
            if not is_node(leaf):
                return by_plain[position[(0, jax.tree_util.SequenceKey(argnum), *path)]]
            if isinstance(leaf, Variable):
                return with_value(leaf, by_variable[numbers[id(leaf)]])
            if not own:
                return _gradient_object(leaf, numbers, by_variable)
            prefix = _path_before(opened, leaf, argnum, path)
            pairs = {
                opened.variable_paths[n][len(prefix) :]: with_value(opened.variables[n], g)
                for n, g in by_variable.items()
                if opened.variable_paths[n][: len(prefix)] == prefix
            }
            return from_flat_state(pairs)

        arg = args[argnum]
        if own and not is_node(arg) and _has_variables(arg):
            return _filtered_mapping(arg, numbers, by_variable, answer)
        return jax.tree_util.tree_map_with_path(answer, arg, is_leaf=is_node)


def _has_variables(tree: Any) -> bool:
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_node)
    return any(isinstance(leaf, Variable) for leaf in leaves)


def _filtered_mapping(arg: Any, numbers: Any, by_variable: Any, answer: Any) -> Any:
    """A state of derivatives from an argument that is a State: what is not asked for is left
    out."""
    if not isinstance(arg, State):
        return jax.tree_util.tree_map_with_path(answer, arg, is_leaf=is_node)
    return from_flat_state(
        (path, with_value(leaf, by_variable[numbers[id(leaf)]]))
        for path, leaf in iter_flat(arg.raw_mapping)
        if isinstance(leaf, Variable) and numbers[id(leaf)] in by_variable
    )


def _path_before(opened: Any, leaf: Any, argnum: int, path: Any) -> tuple[Any, ...]:
    return (0, argnum, *(key_name(key) for key in path))


def with_value(variable: Variable[Any], value: Any) -> Variable[Any]:
    """A plain Variable of the same kind with another value, such as its gradient."""
    metadata = variable._metadata.replaced(
        {"hijax": False, "ref": False} if variable._metadata.stored_as_ref else {}
    )
    return rebuild_variable(type(variable), value, metadata)


def like_argument(node: Any) -> Any:
    """The Variables of an object that holds gradients, as nested dicts."""
    return flatten_node(node, True, "grad")[1]


def _gradient_object(node: Any, numbers: Any, by_variable: Any) -> Any:
    """A copy of an object with derivatives in its Variables."""
    graphdef, mapping = flatten_node(node, True, "grad")

    def make(leaf: Any, cls: type, metadata: Any) -> Any:
        return with_value(leaf, by_variable[numbers[id(leaf)]])

    return Build(make).unflatten(graphdef.definition, mapping)


def _request(argnum: Any, count: int, api: str, updates: bool) -> tuple[int, Filter]:
    number = argnum.argnum if isinstance(argnum, DiffState) else argnum
    if not isinstance(number, int) or not -count <= number < count:
        raise ValueError(
            f"nnx.{api}: argnums={argnum!r} is out of range for a call with {count} positional "
            "arguments.\nFix: differentiate an argument that is passed by position."
        )
    if isinstance(argnum, DiffState):
        if not updates:
            raise ValueError(
                f"nnx.{api}: DiffState needs graph updates.\nFix: pass graph_updates=True, or "
                "split the model and differentiate the state of parameters."
            )
        return number % count, argnum.filter
    return number % count, (Param if updates else ...)


def _lifted_grad(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    api: str,
    argnums: Any,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    updates = resolve_updates(graph_updates)
    call = Call(f, args, kwargs, api, graph, graph_updates)
    wanted = Wanted(call, argnums, updates)

    def loss(diff: Any) -> Any:
        inside, news, leaves, out = call.run(*wanted.substitute(diff))
        result = out
        if has_aux:
            if not isinstance(out, tuple) or len(out) != 2:
                raise TypeError(
                    f"nnx.{api} with has_aux=True expects the function to return a pair "
                    f"(loss, aux), but got {type(out).__name__}."
                )
            result = out[0]
        effects = call.effects
        assert effects is not None
        changed = [inside.raw(number) for number in effects.changed]
        result = result.get_value() if isinstance(result, Variable) else result
        return result, (changed, news, leaves)

    grad = jax.value_and_grad(loss, has_aux=True, holomorphic=holomorphic, allow_int=allow_int)
    (_, (changed, news, leaves)), diff_out = grad(wanted.values())
    out = call.close(changed, news, leaves)
    grads = wanted.gradients(diff_out[0], diff_out[1], updates)
    if api == "grad":
        return (grads, out[1]) if has_aux else grads
    return out, grads


def grad(
    f: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    wrt: Filter | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """The gradient of a function of objects.

    Args:
      f: the function; left out, the call is a decorator.
      argnums: the arguments to differentiate: a position, a ``DiffState``, or several. An object is
        differentiated with respect to its ``Param`` Variables.
      has_aux: the function returns a pair, and only the first is differentiated.
      holomorphic: as for ``jax.grad``.
      allow_int: as for ``jax.grad``.
      reduce_axes: accepted for older programs; must be empty.
      wrt: a filter for the Variables of argument ``argnums``, in place of ``DiffState``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says. Without, all of the argument is
        differentiated, and the gradient has the type of the argument, as with ``jax.grad``.

    Returns:
      A function that returns the gradient: a ``State`` for an object, an array for an array.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Line(nnx.Module):
      ...     def __init__(self):
      ...         self.slope = nnx.Param(jnp.array(2.0))
      >>> grads = nnx.grad(lambda line, x: line.slope * x)(Line(), 3.0)
      >>> float(grads["slope"].value)
      3.0
    """
    check_reduce_axes("grad", reduce_axes)
    options = _grad_options(argnums, has_aux, holomorphic, allow_int, wrt, graph, graph_updates)
    return transform("grad", _lifted_grad, f, api="grad", **options)


def value_and_grad(
    f: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    wrt: Filter | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """The value and the gradient of a function of objects.

    Args:
      f: the function; left out, the call is a decorator.
      argnums: as for ``grad``, like the rest.
      has_aux: as for ``grad``.
      holomorphic: as for ``grad``.
      allow_int: as for ``grad``.
      reduce_axes: as for ``grad``.
      wrt: as for ``grad``.
      graph: as for ``grad``.
      graph_updates: as for ``grad``.

    Returns:
      A function that returns ``(value, gradient)``, or ``((value, aux), gradient)``.
    """
    check_reduce_axes("value_and_grad", reduce_axes)
    options = _grad_options(argnums, has_aux, holomorphic, allow_int, wrt, graph, graph_updates)
    return transform("value_and_grad", _lifted_grad, f, api="value_and_grad", **options)


def check_reduce_axes(api: str, reduce_axes: Sequence[Any]) -> None:
    """Raises for an option that JAX no longer has."""
    if reduce_axes:
        raise NotImplementedError(
            f"nnx.{api}: reduce_axes is gone from JAX.\nFix: sum over the axis yourself with "
            "jax.lax.psum."
        )


def _grad_options(
    argnums: Any,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    wrt: Any,
    graph: Any,
    updates: Any,
) -> dict[str, Any]:
    if wrt is not None:
        if not isinstance(argnums, int):
            raise ValueError("wrt is for one argument: pass argnums as an integer.")
        argnums = DiffState(argnums, wrt)
    return {
        "argnums": argnums,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
        "graph": graph,
        "graph_updates": updates,
    }


def remat(
    f: Any = None,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Recomputes a function of objects in the backward pass instead of keeping what it computed.

    What the function writes to Variables is written once.

    Args:
      f: the function; left out, the call is a decorator.
      prevent_cse: as for ``jax.checkpoint``.
      static_argnums: positional arguments that are not traced.
      policy: as for ``jax.checkpoint``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The function.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    return transform(
        "remat",
        _lifted_remat,
        f,
        static=static,
        options={"prevent_cse": prevent_cse, "policy": policy},
        graph=graph,
        graph_updates=graph_updates,
    )


def _lifted_remat(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    static: tuple[int, ...],
    options: dict[str, Any],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    numbers = {n % len(args) for n in static if -len(args) <= n < len(args)}
    fixed = {n: args[n] for n in numbers}
    moving = tuple(None if n in numbers else arg for n, arg in enumerate(args))

    def with_static(*inner: Any, **named: Any) -> Any:
        return f(*(fixed.get(n, arg) for n, arg in enumerate(inner)), **named)

    call = Call(with_static, moving, kwargs, "remat", graph, graph_updates)
    run = jax.checkpoint(call.run_changed, **options)
    return call.close(*run(call.opened.values, call.opened.arrays, call.opened.plain))
