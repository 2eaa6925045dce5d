"""Lifted transforms: those of JAX, of module classes and of functions of a module.

``lifting`` tells how modules go through a transform, ``core.lift`` has the transforms of scopes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from linnet.core import lift, meta
from linnet.core.filters import CollectionFilter, PRNGSequenceFilter
from linnet.linen.lifting import call_directly, lift_target, run_compiled, run_with_own_keys
from linnet.typing import InOutAxis, InOutScanAxis

Target = TypeVar("Target", bound=Any)


def without(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The arguments of a transform, its ``locals()``, but for those named."""
    return {name: value for name, value in given.items() if name not in names}


def vmap(
    target: Target,
    variable_axes: Mapping[CollectionFilter, InOutAxis] = {},
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: str | None = None,
    spmd_axis_name: str | None = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Any = None,
) -> Target:
    """``jax.vmap`` of a module class, or of a function of a module.

    Args:
      target: a module class, or a function whose first argument is a module.
      variable_axes: for filters of collections the axis that is mapped over; None for variables
        that all entries share. Collections that no filter takes are not seen inside.
      split_rngs: for filters of random streams whether each entry has keys of its own.
      in_axes: the axis of each argument but the module, as for ``jax.vmap``.
      out_axes: the axes of the outputs.
      axis_size: the size of the axis, needed where no argument has it.
      axis_name: the name of the axis, for collectives.
      spmd_axis_name: the axes of the mesh that the axis is divided along.
      metadata_params: what the boxes of variables need to know of the axis.
      methods: the methods of a class to map, or a dict of methods with their own arguments; by
        default ``__call__``.

    Returns:
      The mapped class or function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.normal(), ())
      >>> Scales = nn.vmap(Scale, variable_axes={"params": 0}, split_rngs={"params": True})
      >>> Scales().init(jax.random.key(0), jnp.ones(3))["params"]["scale"].shape
      (3,)
    """
    options = without(locals(), "target", "methods")
    return lift_target(lift.vmap, target, options, methods)


def scan(
    target: Target,
    variable_axes: Mapping[CollectionFilter, InOutScanAxis] = {},
    variable_broadcast: CollectionFilter = False,
    variable_carry: CollectionFilter = False,
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Any = None,
    _split_transpose: bool = False,
    check_constancy_invariants: bool = True,
) -> Target:
    """``jax.lax.scan`` of a module class, or of a function of a module.

    Args:
      target: a module class, or a function, with a method ``(carry, *xs)`` that returns the new
        carry and an output.
      variable_axes: for filters of collections the axis that is scanned over.
      variable_broadcast: a filter of the collections that all steps share.
      variable_carry: a filter of the collections that each step hands on to the next.
      split_rngs: for filters of random streams whether each step has keys of its own.
      in_axes: the axis of each of ``xs`` that is scanned over, or ``nn.broadcast``.
      out_axes: the axis of each output along which the steps are stacked, or ``nn.broadcast``.
      length: the number of steps, needed where nothing is scanned over.
      reverse: go from the last step to the first.
      unroll: how many steps to unroll.
      data_transform: a function of the groups of variables and of random keys inside the body.
      metadata_params: what the boxes of variables need to know of the axis.
      methods: as for ``vmap``.
      _split_transpose: as for ``jax.lax.scan``.
      check_constancy_invariants: as for ``core.lift.scan``.

    Returns:
      The scanned class or function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Layer(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, _):
      ...         return x + self.param("b", jax.nn.initializers.ones, ()), None
      >>> Layers = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=4)
      >>> (y, _), variables = Layers().init_with_output(jax.random.key(0), 0.0, None)
      >>> float(y), variables["params"]["b"].shape
      (4.0, (4,))
    """
    options = without(locals(), "target", "methods")
    return lift_target(lift.scan, target, options, methods)


def checkpoint(
    target: Target,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
    methods: Any = None,
) -> Target:
    """``jax.checkpoint`` of a module class, or of a function of a module.

    Args:
      target: a module class, or a function whose first argument is a module.
      variables, rngs: filters of the collections and random streams that are seen inside.
      concrete: ignored; accepted because Flax takes it.
      prevent_cse: keep the compiler from merging both computations; False is enough in a scan.
      static_argnums: positions of arguments that are not traced; the module is number 0.
      policy: what may be kept, as for ``jax.checkpoint``.
      methods: as for ``vmap``.

    Returns:
      The class or function, which is computed again for gradients.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("s", jax.nn.initializers.ones, ())
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.remat(Block)()(x)
      >>> Model().init(jax.random.key(0), 1.0)
      {'params': {'CheckpointBlock_0': {'s': Array(1., dtype=float32)}}}
    """
    options = without(locals(), "target", "methods")
    return lift_target(lift.checkpoint, target, options, methods)


remat = checkpoint


def remat_scan(
    target: Target,
    lengths: Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    variable_broadcast: CollectionFilter = False,
    variable_carry: CollectionFilter = False,
    variable_axes: Mapping[CollectionFilter, InOutScanAxis] = {True: 0},
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {True: True},
) -> Target:
    """A scan of scans of a module class or function, each step computed again for gradients.

    Args:
      target: a module class, or a function of a module, with one argument, which it returns anew.
      lengths: the number of steps of each scan, the outermost first.
      policy: what may be kept, as for ``jax.checkpoint``.
      variable_broadcast, variable_carry, variable_axes, split_rngs: as for ``scan``.

    Returns:
      The class or function.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> class Layer(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x + self.param("b", jax.nn.initializers.ones, ())
      >>> y, variables = nn.remat_scan(Layer, (2, 3))().init_with_output(jax.random.key(0), 0.0)
      >>> float(y), variables["params"]["b"].shape
      (6.0, (2, 3))
    """
    options = without(locals(), "target")
    return lift_target(lift.remat_scan, target, options)


def jit(
    target: Target,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    device: Any = None,
    backend: str | None = None,
    methods: Any = None,
) -> Target:
    """``jax.jit`` of a module class, or of a function of a module.

    It is compiled once for modules with equal fields at the same place.

    Args:
      target, variables, rngs, static_argnums, methods: as for ``checkpoint``.
      static_argnames: names of such keyword arguments.
      donate_argnums: positions of arguments whose memory may be used again.
      device, backend: what to run on.

    Returns:
      The compiled class or function.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, ())
      >>> float(nn.jit(Scale)().apply({"params": {"scale": 3.0}}, 2.0))
      6.0
    """
    options = without(locals(), "target", "methods")
    return lift_target(lift.CompiledScopes, target, options, methods, name="jit", run=run_compiled)


def map_variables(
    target: Target,
    mapped_collections: CollectionFilter = True,
    trans_in_fn: Callable[[Any], Any] = lambda variables: variables,
    trans_out_fn: Callable[[Any], Any] = lambda variables: variables,
    init: bool = False,
    mutable: bool = False,
    rngs: PRNGSequenceFilter = True,
    variables: CollectionFilter = True,
    methods: Any = None,
) -> Target:
    """Lets a module class, or a function of a module, see its variables through another function.

    Args:
      target: a module class, or a function whose first argument is a module.
      mapped_collections: a filter of the collections that are mapped.
      trans_in_fn: a function of these collections, ``{"params": {...}}``, that gives those inside.
      trans_out_fn: the way back, for what is written inside.
      init: if the collections can be written, run the target first without ``trans_in_fn``, so
        that it makes its variables.
      mutable: the collections can be written inside; so they are with ``init``.
      rngs: a filter of the random streams that are seen inside.
      variables: a filter of the other collections that are seen inside.
      methods: as for ``vmap``.

    Returns:
      The class or function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, ())
      >>> minus = lambda variables: jax.tree.map(jnp.negative, variables)
      >>> Negated = nn.map_variables(Scale, "params", minus)
      >>> float(Negated().apply({"params": {"scale": jnp.array(3.0)}}, 2.0))
      -6.0
    """
    options = {
        "mapped_collections": mapped_collections,
        "map_in_fn": trans_in_fn,
        "map_out_fn": trans_out_fn,
        "init": init,
        "mutable": mutable,
        "rngs": rngs,
        "variables": variables,
    }
    return lift_target(lift.map_variables, target, options, methods)


def fold_rngs(
    target: Target, variables: CollectionFilter = True, rngs: PRNGSequenceFilter = True
) -> Target:
    """Gives a module class, or a function of a module, random keys that were drawn for it.

    Args:
      target: a module class, or a function whose first argument is a module.
      variables, rngs: filters of the collections and random streams that are seen inside.

    Returns:
      The class or function, whose keys do not depend on its path any more.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.fold_rngs(nn.Dense)(3)(x)
      >>> Model().init_with_output(jax.random.key(0), jnp.ones((1, 2)))[0].shape
      (1, 3)
    """
    options = {"variables": variables, "rngs": rngs}
    return lift_target(lift.fold_rngs, target, options, run=run_with_own_keys)


def add_metadata_axis(
    target: Target,
    variable_axes: Mapping[CollectionFilter, InOutAxis] = {},
    metadata_params: Mapping[Any, Any] = {},
) -> Target:
    """Adds an axis to the metadata of variables, as ``vmap`` and ``scan`` do, and to nothing else.

    Args:
      target: a module class, or a function whose first argument is a module.
      variable_axes: for filters of collections the axis.
      metadata_params: what the boxes of variables need to know of the axis, such as
        ``{nn.PARTITION_NAME: "layers"}``.

    Returns:
      The class or function, inside of which the variables do not have that axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> init = nn.with_partitioning(jax.nn.initializers.ones, (None, "model"))
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.add_metadata_axis(
      ...             nn.Dense, {"params": 0}, {nn.PARTITION_NAME: "layers"}
      ...         )(3, use_bias=False, kernel_init=init, name="dense")(x)
      >>> shapes = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((1, 2)))
      >>> shapes["params"]["dense"]["kernel"].names
      ('layers', None, 'model')
    """
    for col_filter, axis in variable_axes.items():
        change: Any = {"index": axis, "params": dict(metadata_params)}
        remove = functools.partial(meta.remove_axis, **change)
        add = functools.partial(meta.add_axis, **change)
        target = map_variables(target, col_filter, remove, add, mutable=True)
    return target


# ---- functions of a module, called at once ------------------------------------------------------


def vjp(
    fn: Callable[..., Any],
    mdl: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Any = (),
    vjp_variables: CollectionFilter = "params",
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    multi_scope: bool = False,
) -> Any:
    """``jax.vjp`` of a function of a module, also with respect to its variables.

    Args:
      fn: a function whose first argument is the module.
      mdl: the module.
      *primals: the other arguments.
      has_aux: ``fn`` returns a pair, whose second part is not differentiated.
      reduce_axes: refused unless empty: JAX has removed it.
      vjp_variables: a filter of the collections that are differentiated.
      variables: a filter of all collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.
      multi_scope: return a list of cotangents, for the module and for each of those in its fields.

    Returns:
      The output and a function of its cotangent, which returns the cotangents of the variables and
      of the arguments; with ``has_aux`` also the second part of the output.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, ())
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         y, pullback = nn.vjp(lambda m, x: m(x), Scale(name="s"), x)
      ...         return pullback(1.0)
      >>> variables, x = Model().apply({"params": {"s": {"scale": 3.0}}}, 2.0)
      >>> float(variables["params"]["scale"]), float(x)
      (2.0, 3.0)
    """

    def apply(in_scopes: Any, scopes: Any, *primals: Any) -> Any:
        y, pullback, *aux = lift.vjp(
            in_scopes,
            scopes,
            *primals,
            has_aux=has_aux,
            reduce_axes=reduce_axes,
            vjp_variables=vjp_variables,
            variables=variables,
            rngs=rngs,
        )
        if not multi_scope:
            pullback = jax.tree_util.Partial(_pull_back_first, pullback)
        return (y, pullback, *aux)

    return call_directly(apply, [fn], mdl, primals)


def _pull_back_first(pullback: Callable[..., Any], cotangent: Any) -> Any:
    variables, *inputs = pullback(cotangent)
    return (variables[0] if variables else {}, *inputs)


def value_and_grad(
    fn: Callable[..., Any],
    mdl: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Any = (),
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """The value of a function of a module, and its gradients with respect to the other arguments.

    Args:
      fn: a function whose first argument is the module, and which returns a number.
      mdl: the module.
      *primals: the other arguments.
      has_aux, reduce_axes, variables, rngs: as for ``vjp``.

    Returns:
      The output, and a tuple of gradients.

    Example:
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     def __call__(self, x):
      ...         return nn.value_and_grad(lambda m, x: x**2, self, x)
      >>> value, (gradient,) = Model().apply({}, 3.0)
      >>> float(value), float(gradient)
      (9.0, 6.0)
    """
    options = without(locals(), "fn", "mdl", "primals")
    return call_directly(functools.partial(lift.value_and_grad, **options), [fn], mdl, primals)


def grad(
    fn: Callable[..., Any],
    mdl: Any,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Any = (),
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """The gradients of ``value_and_grad`` alone; with ``has_aux`` a pair with the second output.

    Args:
      fn, mdl, *primals, has_aux, reduce_axes, variables, rngs: as for ``value_and_grad``.

    Returns:
      A tuple of gradients.

    Example:
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     def __call__(self, x):
      ...         return nn.grad(lambda m, x: x**2, self, x)
      >>> (gradient,) = Model().apply({}, 3.0)
      >>> float(gradient)
      6.0
    """
    options = without(locals(), "fn", "mdl", "primals")
    return call_directly(functools.partial(lift.grad, **options), [fn], mdl, primals)


def jvp(
    fn: Callable[..., Any],
    mdl: Any,
    primals: Any,
    tangents: Any,
    variable_tangents: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """``jax.jvp`` of a function of a module, also with respect to its variables.

    Args:
      fn: a function whose first argument is the module.
      mdl: the module.
      primals, tangents: the other arguments, and their tangents.
      variable_tangents: tangents of the module's variables, by collection; others are zero.
      variables, rngs: filters of the collections and random streams that are seen inside.

    Returns:
      The output and its tangent.

    Example:
      >>> from linnet import linen as nn
      >>> class Model(nn.Module):
      ...     def __call__(self, x):
      ...         return nn.jvp(lambda m, x: x**2, self, (x,), (1.0,), {})
      >>> y, tangent = Model().apply({}, 3.0)
      >>> float(y), float(tangent)
      (9.0, 6.0)
    """

    def apply(in_scopes: Any, scopes: Any) -> Any:
        by_scope = [variable_tangents, *({} for _ in scopes[1:])]
        return lift.jvp(in_scopes, scopes, primals, tangents, by_scope, variables, rngs)

    return call_directly(apply, [fn], mdl, ())


def custom_vjp(
    fn: Callable[..., Any],
    forward_fn: Callable[..., Any],
    backward_fn: Callable[..., Any],
    grad_vars: CollectionFilter = "params",
    nondiff_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """A function of a module with gradients of its own.

    Args:
      fn: a function whose first argument is a module.
      forward_fn: the same with residuals: it returns the output and what ``backward_fn`` needs,
        such as the function that ``nn.vjp`` returns.
      backward_fn: ``backward_fn(*nondiff, residuals, cotangent)``, which returns the cotangents of
        the variables, and of each argument.
      grad_vars: a filter of the collections that have a gradient.
      nondiff_argnums: positions of arguments without one; the module is number 0.

    Returns:
      The function.

    Example:
      >>> import jax
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, ())
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         f = lambda m, x: m(x)
      ...         def backward(pullback, cotangent):
      ...             variables, x = pullback(cotangent)
      ...             return jax.tree.map(lambda g: 10 * g, variables), x
      ...         g = nn.custom_vjp(f, lambda m, x: nn.vjp(f, m, x), backward)
      ...         return g(Scale(name="s"), x)
      >>> grads = jax.grad(lambda v: Model().apply(v, 2.0))({"params": {"s": {"scale": 3.0}}})
      >>> float(grads["params"]["s"]["scale"])
      20.0
    """

    @functools.wraps(fn)
    def with_own_gradient(mdl: Any, *args: Any) -> Any:
        def apply(in_scopes: Any, forward: Any, scopes: Any, *args: Any) -> Any:
            def backward(*args: Any) -> Any:
                variables, *inputs = backward_fn(*args)
                return ([variables, *(None for _ in scopes[1:])], *inputs)

            run = lift.custom_vjp(in_scopes, forward, backward, grad_vars, nondiff_argnums)
            return run(scopes, *args)

        return call_directly(apply, [fn, forward_fn], mdl, args)

    return with_own_gradient


def while_loop(
    cond_fn: Callable[[Any, Any], Any],
    body_fn: Callable[[Any, Any], Any],
    mdl: Any,
    init: Any,
    carry_variables: CollectionFilter = False,
    broadcast_variables: CollectionFilter = True,
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
) -> Any:
    """``jax.lax.while_loop`` of functions of a module.

    Args:
      cond_fn: ``cond_fn(mdl, carry)``, whether to go on.
      body_fn: ``body_fn(mdl, carry)``, the new carry.
      mdl: the module.
      init: the first carry.
      carry_variables: a filter of the collections that each step hands on to the next; only these
        can be written. Their variables must be there before.
      broadcast_variables: a filter of the collections that all steps share.
      split_rngs: for filters of random streams whether each step has keys of its own.

    Returns:
      The last carry.

    Example:
      >>> from linnet import linen as nn
      >>> class Doubled(nn.Module):
      ...     def __call__(self, x):
      ...         return nn.while_loop(lambda m, x: x < 9, lambda m, x: 2 * x, self, x)
      >>> int(Doubled().apply({}, 1))
      16
    """
    options = without(locals(), "cond_fn", "body_fn", "mdl", "init")
    run = functools.partial(lift.while_loop, **options)
    return call_directly(run, [cond_fn, body_fn], mdl, (init,))


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    mdl: Any,
    *operands: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """``jax.lax.cond`` of functions of a module.

    Args:
      pred: which of the two to run.
      true_fun: ``true_fun(mdl, *operands)``, run if ``pred`` is true.
      false_fun: run otherwise. Both make the same variables.
      mdl: the module.
      *operands: the other arguments.
      variables, rngs: filters of the collections and random streams that are seen inside.

    Returns:
      What the function returns.

    Example:
      >>> from linnet import linen as nn
      >>> class Absolute(nn.Module):
      ...     def __call__(self, x):
      ...         return nn.cond(x > 0, lambda m, x: x, lambda m, x: -x, self, x)
      >>> float(Absolute().apply({}, -2.0))
      2.0
    """
    run = functools.partial(lift.cond, pred, variables=variables, rngs=rngs)
    return call_directly(run, [true_fun, false_fun], mdl, operands)


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    mdl: Any,
    *operands: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """``jax.lax.switch`` of functions of a module.

    Args:
      index: the number of the function to run.
      branches: functions ``fn(mdl, *operands)``. All of them make the same variables: run each of
        them once while the module is initialized.
      mdl, *operands, variables, rngs: as for ``cond``.

    Returns:
      What the function returns.

    Example:
      >>> from linnet import linen as nn
      >>> class Power(nn.Module):
      ...     def __call__(self, n, x):
      ...         return nn.switch(n, [lambda m, x: x, lambda m, x: x**2], self, x)
      >>> float(Power().apply({}, 1, 3.0))
      9.0
    """

    def apply(*args: Any) -> Any:
        fns, (scopes, *rest) = args[: len(branches)], args[len(branches) :]
        return lift.switch(index, fns, scopes, *rest, variables=variables, rngs=rngs)

    return call_directly(apply, list(branches), mdl, operands)
