"""Lifted transforms that differentiate: ``vjp``, ``grad``, ``jvp``, ``custom_vjp``.

``core.lift`` has all of them; import them from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from linnet.core.filters import CollectionFilter, PRNGSequenceFilter
from linnet.core.packing import Lifted, ScopeStructure, shifted_argnums


def _check_reduce_axes(reduce_axes: Any) -> None:
    if reduce_axes:
        raise ValueError(
            f"JAX has no reduce_axes any more, but got {reduce_axes!r}.\n"
            "Fix: leave it out, and sum with jax.lax.psum."
        )


def vjp(
    fn: Callable[..., Any],
    scope: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Any = (),
    vjp_variables: CollectionFilter = "params",
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """``jax.vjp`` of a function of a scope, also with respect to its variables.

    Args:
      fn: a function whose first parameter is the scope.
      scope: a scope, or a pytree of scopes.
      *primals: the other arguments.
      has_aux: ``fn`` returns a pair, whose second part is not differentiated.
      reduce_axes: refused unless empty: JAX has removed it.
      vjp_variables: a filter of the collections that are differentiated.
      variables: a filter of all collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.

    Returns:
      The output and a function of its cotangent, which returns the cotangents of the variables and
      of the arguments; with ``has_aux`` also the second part of the output.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def f(scope, x):
      ...     y, bwd = lift.vjp(lambda s, x: x * s.get_variable("params", "w"), scope, x)
      ...     return bwd(1.0)
      >>> [float(g) for g in jax.tree.leaves(core.apply(f)({"params": {"w": 3.0}}, 2.0))]
      [2.0, 3.0]
    """
    _check_reduce_axes(reduce_axes)
    filters = [vjp_variables, variables]
    lifted = Lifted(scope, filters, filters, [rngs], "vjp")
    differentiated, others = lifted.variable_groups()
    rng_groups = lifted.rng_groups()

    def run(differentiated: Any, *primals: Any) -> Any:
        scopes = lifted.enter((differentiated, others), rng_groups)
        y = fn(scopes, *primals)
        y, aux = y if has_aux else (y, None)
        return y, (aux, lifted.leave(scopes))

    y, pullback, (aux, out) = jax.vjp(run, differentiated, *primals, has_aux=True)
    lifted.write(out)
    backward = jax.tree_util.Partial(functools.partial(_pull_back, lifted.structure), pullback)
    return (y, backward, aux) if has_aux else (y, backward)


def _pull_back(structure: ScopeStructure, pullback: Callable[..., Any], cotangent: Any) -> Any:
    variables, *inputs = pullback(cotangent)
    return (structure.of_scopes(variables), *inputs)


def value_and_grad(
    fn: Callable[..., Any],
    scope: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Any = (),
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """The value of a function of a scope, and its gradients with respect to the other arguments.

    Args:
      fn: a function whose first parameter is the scope, and which returns a number.
      scope: a scope, or a pytree of scopes.
      *primals: the other arguments.
      has_aux: ``fn`` returns a pair, whose second part is not differentiated.
      reduce_axes: refused unless empty: JAX has removed it.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.

    Returns:
      The output, and a tuple of gradients.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def f(scope, x):
      ...     return lift.value_and_grad(lambda s, x: x**2, scope, x)
      >>> value, (gradient,) = core.apply(f)({}, 3.0)
      >>> float(value), float(gradient)
      (9.0, 6.0)
    """
    _check_reduce_axes(reduce_axes)
    lifted = Lifted(scope, [variables], [variables], [rngs], "value_and_grad")
    groups = lifted.variable_groups(), lifted.rng_groups()

    def run(*primals: Any) -> Any:
        scopes = lifted.enter(*groups)
        y = fn(scopes, *primals)
        y, aux = y if has_aux else (y, None)
        return y, (aux, lifted.leave(scopes))

    numbers = tuple(range(len(primals)))
    (y, (aux, out)), grads = jax.value_and_grad(run, numbers, has_aux=True)(*primals)
    lifted.write(out)
    return ((y, aux) if has_aux else y), grads


def grad(fn: Callable[..., Any], scope: Any, *primals: Any, **options: Any) -> Any:
    """The gradients of ``value_and_grad`` alone; with ``has_aux`` a pair with the second output.

    Args:
      fn: as for ``value_and_grad``, like the others.
      scope: a scope, or a pytree of scopes.
      *primals: the other arguments.
      **options: those of ``value_and_grad``.

    Returns:
      A tuple of gradients.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> (gradient,) = core.apply(lambda s, x: lift.grad(lambda s, x: x**2, s, x))({}, 3.0)
      >>> float(gradient)
      6.0
    """
    y, grads = value_and_grad(fn, scope, *primals, **options)
    return (grads, y[1]) if options.get("has_aux") else grads


def jvp(
    fn: Callable[..., Any],
    scope: Any,
    primals: Any,
    tangents: Any,
    variable_tangents: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> tuple[Any, Any]:
    """``jax.jvp`` of a function of a scope, also with respect to its variables.

    Args:
      fn: a function whose first parameter is the scope.
      scope: a scope, or a pytree of scopes.
      primals: the other arguments.
      tangents: their tangents.
      variable_tangents: tangents of variables, by collection; those of other collections are zero.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.

    Returns:
      The output and its tangent.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def f(scope, x):
      ...     product = lambda s, x: x * s.get_variable("params", "w")
      ...     return lift.jvp(product, scope, (x,), (1.0,), {"params": {"w": 1.0}})
      >>> [float(y) for y in core.apply(f)({"params": {"w": 3.0}}, 2.0)]
      [6.0, 5.0]
    """
    by_scope = jax.tree.structure(scope).flatten_up_to(variable_tangents)
    names = {col for collections in by_scope for col, xs in collections.items() if xs}
    filters = [names, variables]
    lifted = Lifted(scope, filters, filters, [rngs], "jvp")
    differentiated, others = lifted.variable_groups()
    rng_groups = lifted.rng_groups()
    by_root = zip(differentiated, lifted.structure.of_roots(variable_tangents), strict=True)
    their_tangents = tuple({col: given[col] for col in cols} for cols, given in by_root)

    def run(differentiated: Any, *args: Any) -> Any:
        scopes = lifted.enter((differentiated, others), rng_groups)
        return fn(scopes, *args), lifted.leave(scopes)

    y, y_tangent, out = jax.jvp(
        run, (differentiated, *primals), (their_tangents, *tangents), has_aux=True
    )
    lifted.write(out)
    return y, y_tangent


def custom_vjp(
    fn: Callable[..., Any],
    forward_fn: Callable[..., Any],
    backward_fn: Callable[..., Any],
    grad_vars: CollectionFilter = "params",
    nondiff_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """A function of a scope with gradients of its own.

    Args:
      fn: a function whose first parameter is a scope.
      forward_fn: the same with residuals: it returns the output and what ``backward_fn`` needs,
        such as the function that ``vjp`` returns.
      backward_fn: ``backward_fn(*nondiff, residuals, cotangent)``, which returns the cotangents of
        the variables, and of each argument.
      grad_vars: a filter of the collections that have a gradient.
      nondiff_argnums: positions of arguments without one; the scope is number 0.

    Returns:
      The function.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def f(scope, x):
      ...     return x * scope.get_variable("params", "w")
      >>> def backward(pullback, cotangent):
      ...     variables, x = pullback(cotangent)
      ...     return jax.tree.map(lambda g: 10 * g, variables), x
      >>> g = lift.custom_vjp(f, lambda scope, x: lift.vjp(f, scope, x), backward)
      >>> grads = jax.grad(lambda v: core.apply(g)(v, 2.0))({"params": {"w": 3.0}})
      >>> float(grads["params"]["w"])
      20.0
    """

    @functools.wraps(fn)
    def with_own_gradient(scope_tree: Any, *args: Any) -> Any:
        filters = [grad_vars, True]
        lifted = Lifted(scope_tree, filters, filters, [True], "custom_vjp")

        def call(function: Callable[..., Any], groups: Any, others: Any, args: Any) -> Any:
            scopes = lifted.enter((groups, others[0]), others[1])
            return function(scopes, *args), lifted.leave(scopes)

        @functools.partial(jax.custom_vjp, nondiff_argnums=shifted_argnums(nondiff_argnums, 2))
        def run(groups: Any, others: Any, *args: Any) -> Any:
            return call(fn, groups, others, args)

        def forward(groups: Any, others: Any, *args: Any) -> Any:
            (y, residuals), out = call(forward_fn, groups, others, args)
            return (y, out), residuals

        def backward(*args: Any) -> Any:
            *fixed, residuals, (cotangent, _) = args
            variables, *inputs = backward_fn(*fixed, residuals, cotangent)
            return lifted.structure.of_roots(variables), None, *inputs

        run.defvjp(forward, backward)
        groups, others = lifted.variable_groups()
        result: Any = run(groups, (others, lifted.rng_groups()), *args)
        y, out = result
        lifted.write(out)
        return y

    return with_own_gradient
