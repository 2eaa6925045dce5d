"""Lifted transforms: those of JAX, of functions whose first parameter is a scope.

``packing`` tells how a scope goes through a transform; ``lift_axes`` has the transforms that map
over an axis, ``lift_grad`` those that differentiate. ``linen.transforms`` has all of them for
modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet.core import meta
from linnet.core.filters import (
    CollectionFilter,
    DenyList,
    Filter,
    PRNGSequenceFilter,
    subtract_filters,
)
from linnet.core.lift_axes import (
    broadcast as broadcast,
    scan as scan,
    vmap as vmap,
    while_loop as while_loop,
)
from linnet.core.lift_grad import (
    custom_vjp as custom_vjp,
    grad as grad,
    jvp as jvp,
    value_and_grad as value_and_grad,
    vjp as vjp,
)
from linnet.core.packing import (
    Lifted,
    StaticResult,
    VariableGroups,
    pack as pack,
    shifted_argnums,
)

# ---- compiling and recomputing ------------------------------------------------------------------


def checkpoint(
    fn: Callable[..., Any],
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """``jax.checkpoint`` of a function of a scope: gradients compute again what it computes.

    Args:
      fn: a function whose first parameter is a scope, or a pytree of scopes.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.
      concrete: ignored; accepted because Flax takes it.
      prevent_cse: keep the compiler from merging both computations; False is enough in a scan.
      static_argnums: positions of arguments that are not traced; the scope is number 0.
      policy: what may be kept, as for ``jax.checkpoint``.

    Returns:
      The function.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def scale(scope, x):
      ...     return x * scope.param("s", jax.nn.initializers.ones, ())
      >>> core.init(lift.checkpoint(scale))(jax.random.key(0), 2.0)[0]
      Array(2., dtype=float32)
    """

    @functools.wraps(fn)
    def recomputed(scope_tree: Any, *args: Any, **kwargs: Any) -> Any:
        lifted = Lifted(scope_tree, [variables], [variables], [rngs], "checkpoint")

        def run(variable_groups: Any, rng_groups: Any, *args: Any, **kwargs: Any) -> Any:
            scopes = lifted.enter(variable_groups, rng_groups)
            return fn(scopes, *args, **kwargs), lifted.leave(scopes)

        again = jax.checkpoint(
            run,
            prevent_cse=prevent_cse,
            static_argnums=shifted_argnums(static_argnums, 2),
            policy=policy,
        )
        found = again(lifted.variable_groups(), lifted.rng_groups(), *args, **kwargs)
        # Called outside a trace, `jax.checkpoint` may return Python and NumPy scalars; make them
        # JAX arrays.
        y, out = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), found)
        lifted.write(out)
        return y

    return recomputed


remat = checkpoint


def remat_scan(
    body_fn: Callable[..., Any],
    lengths: Sequence[int],
    policy: Callable[..., bool] | None = None,
    variable_broadcast: CollectionFilter = False,
    variable_carry: CollectionFilter = False,
    variable_axes: Mapping[CollectionFilter, Any] = {True: 0},
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {True: True},
) -> Callable[..., Any]:
    """A scan of scans, each step of which is computed again for gradients.

    The memory for gradients grows with the sum of the lengths, the number of steps with their
    product.

    Args:
      body_fn: ``body_fn(scope, carry)``, which returns the new carry.
      lengths: the number of steps of each scan, the outermost first.
      policy: what may be kept, as for ``jax.checkpoint``.
      variable_broadcast: as for ``scan``, like the others.
      variable_carry: a filter of the collections that are handed on.
      variable_axes: the axes of collections that are scanned over.
      split_rngs: whether each step has random keys of its own.

    Returns:
      A function of a scope and a carry.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def layer(scope, x):
      ...     return x + scope.param("b", jax.nn.initializers.ones, ())
      >>> y, variables = core.init(lift.remat_scan(layer, (2, 3)))(jax.random.key(0), 0.0)
      >>> float(y), variables["params"]["b"].shape
      (6.0, (2, 3))
    """
    once = functools.partial(checkpoint, policy=policy, prevent_cse=False)
    if len(lengths) == 1:
        inner = once(body_fn)
    else:
        axes = (variable_broadcast, variable_carry, variable_axes, split_rngs)
        inner = once(remat_scan(body_fn, lengths[1:], policy, *axes))
    steps = scan(
        lambda scope, carry, _: (inner(scope, carry), None),
        variable_axes,
        variable_broadcast,
        variable_carry,
        split_rngs,
        length=lengths[0],
    )
    return functools.wraps(body_fn)(lambda scope, carry: steps(scope, carry, None)[0])


class _JitCall:
    """The static argument of ``jax.jit`` that brings a function and its scopes into the trace.

    Two are equal if their keys are, so that ``jax.jit`` finds what it compiled for an equal call.
    ``jax.jit`` keeps the argument as long as the compiled function: ``drop`` removes the function
    and the scopes after the call.
    """

    def __init__(self, key: Hashable, fn: Callable[..., Any], lifted: Lifted):
        self.key, self.fn, self.lifted = key, fn, lifted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _JitCall) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def drop(self) -> None:
        del self.fn, self.lifted


class CompiledScopes:
    """A function of scopes under ``jax.jit``, compiled once for calls with the same key.

    Args:
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.
      options: those of ``jax.jit``, with positions that count the scope.
    """

    def __init__(self, variables: Filter, rngs: Filter, **options: Any):
        self.filters = variables, rngs
        for name in ("static_argnums", "donate_argnums"):
            options[name] = shifted_argnums(options.get(name, ()), 3)
        options["static_argnums"] = (0, *options["static_argnums"])
        self._jitted = jax.jit(
            _run_compiled, **{name: value for name, value in options.items() if value is not None}
        )

    def __call__(
        self, key: Hashable, fn: Callable[..., Any], scope_tree: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls ``fn``, or what was compiled for a call with the same key before."""
        variables, rngs = self.filters
        lifted = Lifted(scope_tree, [variables], [variables], [rngs], "jit")
        rng_groups = lifted.pathless_rng_groups()
        call = _JitCall((key, _state_of(lifted)), fn, lifted)
        try:
            y, out, counts = self._jitted(
                call, lifted.variable_groups(), rng_groups, *args, **kwargs
            )
        finally:
            call.drop()
        for root, counters in zip(lifted.roots, counts.value, strict=True):
            _restore(root.rng_counters, counters)
        lifted.write(out)
        return y


def _run_compiled(
    call: _JitCall, variable_groups: Any, rng_groups: Any, *args: Any, **kwargs: Any
) -> Any:
    lifted = call.lifted
    scopes = lifted.enter(variable_groups, rng_groups)
    y, out = call.fn(scopes, *args, **kwargs), lifted.leave(scopes)
    return y, out, StaticResult(tuple(_as_pairs(root.rng_counters) for root in lifted.roots))


def _state_of(lifted: Lifted) -> Hashable:
    """Everything about scopes that a trace depends on, beside their variables and keys."""
    return (
        lifted.structure,
        tuple(
            (
                root.path,
                root.debug_path,
                _hashable_filter(root.mutable),
                _as_pairs(root.flags),
                _as_pairs(root.rng_counters),
            )
            for root in lifted.roots
        ),
    )


def _hashable_filter(col_filter: Any) -> Hashable:
    if isinstance(col_filter, DenyList):
        return ("all but", _hashable_filter(col_filter.deny))
    return col_filter if isinstance(col_filter, bool | str) else frozenset(col_filter)


def _as_pairs(nested: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Nested mappings as nested tuples of pairs, which are hashable."""
    return tuple(
        (key, _as_pairs(value) if isinstance(value, Mapping) else value)
        for key, value in nested.items()
    )


def _restore(counters: dict[Any, Any], pairs: tuple[Any, ...]) -> None:
    """Writes counters that ``_as_pairs`` took down into those of a scope."""
    for key, value in pairs:
        if isinstance(value, tuple):
            _restore(counters.setdefault(key, {}), value)
        else:
            counters[key] = value


def jit(
    fn: Callable[..., Any],
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    device: Any = None,
    backend: str | None = None,
) -> Callable[..., Any]:
    """``jax.jit`` of a function of a scope.

    Args:
      fn: a function whose first parameter is a scope, or a pytree of scopes.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.
      static_argnums: positions of arguments that are not traced; the scope is number 0.
      static_argnames: names of such keyword arguments.
      donate_argnums: positions of arguments whose memory may be used again.
      device: the device to run on.
      backend: the backend to run on.

    Returns:
      The compiled function.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def scale(scope, x):
      ...     return x * scope.param("s", jax.nn.initializers.ones, ())
      >>> core.init(lift.jit(scale))(jax.random.key(0), 2.0)[1]
      {'params': {'s': Array(1., dtype=float32)}}
    """
    compiled = CompiledScopes(
        variables,
        rngs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        device=device,
        backend=backend,
    )
    return functools.wraps(fn)(functools.partial(compiled, fn, fn))


# ---- branches -----------------------------------------------------------------------------------


def _branches(lifted: Lifted, fns: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    def branch(fn: Callable[..., Any], groups: VariableGroups, rngs: Any, *operands: Any) -> Any:
        scopes = lifted.enter(groups, rngs)
        return fn(scopes, *operands), lifted.leave(scopes)

    return [functools.partial(branch, fn) for fn in fns]


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    scope: Any,
    *operands: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """``jax.lax.cond`` of functions of a scope.

    Args:
      pred: which of the two to run.
      true_fun: ``true_fun(scope, *operands)``, run if ``pred`` is true.
      false_fun: run otherwise. Both make the same variables.
      scope: a scope, or a pytree of scopes.
      *operands: the other arguments.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.

    Returns:
      What the function returns.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def f(scope, x):
      ...     return lift.cond(x > 0, lambda s, x: x, lambda s, x: -x, scope, x)
      >>> float(core.apply(f)({}, -2.0))
      2.0
    """
    lifted = Lifted(scope, [variables], [variables], [rngs], "cond")
    groups = lifted.variable_groups(), lifted.rng_groups()
    y, out = jax.lax.cond(pred, *_branches(lifted, (true_fun, false_fun)), *groups, *operands)
    lifted.write(out)
    return y


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    scope: Any,
    *operands: Any,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
) -> Any:
    """``jax.lax.switch`` of functions of a scope.

    Args:
      index: the number of the function to run.
      branches: functions ``fn(scope, *operands)``. All of them make the same variables.
      scope: a scope, or a pytree of scopes.
      *operands: the other arguments.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.

    Returns:
      What the function returns.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def f(scope, i, x):
      ...     return lift.switch(i, [lambda s, x: x, lambda s, x: x**2], scope, x)
      >>> float(core.apply(f)({}, 1, 3.0))
      9.0
    """
    lifted = Lifted(scope, [variables], [variables], [rngs], "switch")
    groups = lifted.variable_groups(), lifted.rng_groups()
    y, out = jax.lax.switch(index, _branches(lifted, branches), *groups, *operands)
    lifted.write(out)
    return y


# ---- variables and keys that are changed on their way in and out --------------------------------


def map_variables(
    fn: Callable[..., Any],
    mapped_collections: CollectionFilter,
    map_in_fn: Callable[[Any], Any] = lambda variables: variables,
    map_out_fn: Callable[[Any], Any] = lambda variables: variables,
    init: bool = False,
    mutable: bool = False,
    rngs: PRNGSequenceFilter = True,
    variables: CollectionFilter = True,
) -> Callable[..., Any]:
    """Lets a function see its variables through another function.

    Args:
      fn: a function whose first parameter is a scope.
      mapped_collections: a filter of the collections that are mapped.
      map_in_fn: a function of these collections, ``{"params": {...}}``, that gives those inside.
      map_out_fn: the way back, for what is written inside.
      init: if the collections can be written, run ``fn`` first without ``map_in_fn``, so that it
        makes its variables.
      mutable: the collections can be written inside; so they are with ``init``.
      rngs: a filter of the random streams that are seen inside.
      variables: a filter of the other collections that are seen inside.

    Returns:
      The function.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def scale(scope, x):
      ...     return x * scope.get_variable("params", "s")
      >>> double = lambda variables: jax.tree.map(lambda v: 2 * v, variables)
      >>> core.apply(lift.map_variables(scale, "params", double))({"params": {"s": 3.0}}, 1.0)
      6.0
    """
    writes = mutable or init

    @functools.wraps(fn)
    def with_mapped(scope_tree: Any, *args: Any, **kwargs: Any) -> Any:
        filters = [mapped_collections, variables]
        unmapped = subtract_filters(variables, mapped_collections)
        out_filters = filters if writes else [False, unmapped]
        lifted = Lifted(scope_tree, filters, out_filters, [rngs], "map_variables")
        mapped, others = lifted.variable_groups()
        rng_groups = lifted.rng_groups()
        if init and lifted.can_write(mapped_collections):
            scopes = lifted.enter((mapped, others), rng_groups)
            fn(scopes, *args, **kwargs)
            mapped = tuple(map(map_out_fn, lifted.leave(scopes)[0]))
        scopes = lifted.enter((tuple(map(map_in_fn, mapped)), others), rng_groups)
        y = fn(scopes, *args, **kwargs)
        out, others_out = lifted.leave(scopes)
        lifted.write((tuple(map(map_out_fn, out)) if writes else out, others_out))
        return y

    return with_mapped


def swap_collection(fn: Callable[..., Any], col_a: str, col_b: str) -> Callable[..., Any]:
    """Lets a function see two collections under each other's names.

    Args:
      fn: a function whose first parameter is a scope.
      col_a: the one collection.
      col_b: the other.

    Returns:
      The function.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> swapped = lift.swap_collection(lambda s: s.get_variable("a", "v"), "a", "b")
      >>> core.apply(swapped)({"a": {"v": 1}, "b": {"v": 2}})
      2
    """
    names = {col_a: col_b, col_b: col_a}

    def swap(variables: Mapping[str, Any]) -> dict[str, Any]:
        return {names[col]: xs for col, xs in variables.items()}

    return map_variables(fn, (col_a, col_b), swap, swap, mutable=True)


def fold_rngs(
    fn: Callable[..., Any], variables: CollectionFilter = True, rngs: PRNGSequenceFilter = True
) -> Callable[..., Any]:
    """Gives a function the random keys of its scope without the path, which is not folded in.

    What is drawn inside then does not depend on the path: scopes of different paths draw the same
    keys, unless the caller has drawn one for each, as ``linen.fold_rngs`` does.

    Args:
      fn: a function whose first parameter is a scope.
      variables: a filter of the collections that are seen inside.
      rngs: a filter of the random streams that are seen inside.

    Returns:
      The function.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> draw = lambda scope: scope.rngs["params"].suffix
      >>> f = lambda scope: (draw(scope.push("a")), lift.fold_rngs(draw)(scope.push("b")))
      >>> core.apply(f)({}, rngs=jax.random.key(0))
      (('a',), ())
    """

    @functools.wraps(fn)
    def folded(scope_tree: Any, *args: Any, **kwargs: Any) -> Any:
        lifted = Lifted(scope_tree, [variables], [variables], [rngs], "fold_rngs")
        scopes = lifted.enter(lifted.variable_groups(), lifted.pathless_rng_groups())
        y = fn(scopes, *args, **kwargs)
        lifted.write(lifted.leave(scopes))
        return y

    return folded


def add_metadata_axis(
    fn: Callable[..., Any],
    variable_axes: Mapping[CollectionFilter, Any] = {},
    metadata_params: Mapping[Any, Any] = {},
) -> Callable[..., Any]:
    """Adds an axis to the metadata of variables, as ``vmap`` and ``scan`` do, and to nothing else.

    Args:
      fn: a function whose first parameter is a scope.
      variable_axes: for filters of collections the axis.
      metadata_params: what the boxes of variables need to know of the axis.

    Returns:
      The function, inside of which the variables do not have that axis.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift, meta
      >>> init = meta.with_partitioning(jax.nn.initializers.ones, ("model",))
      >>> scale = lambda scope: scope.param("s", init, (2,))
      >>> named = lift.add_metadata_axis(scale, {"params": 0}, {meta.PARTITION_NAME: "layers"})
      >>> core.init(named)(jax.random.key(0))[1]["params"]["s"].names
      ('layers', 'model')
    """
    for col_filter, axis in variable_axes.items():
        remove = functools.partial(meta.remove_axis, index=axis, params=dict(metadata_params))
        add = functools.partial(meta.add_axis, index=axis, params=dict(metadata_params))
        fn = map_variables(fn, col_filter, remove, add, mutable=True)
    return fn
