"""Lifted transforms that map over an axis: ``vmap``, ``scan``, and ``while_loop``.

``core.lift`` has all of them; import them from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core import meta
from linnet.core.filters import CollectionFilter, PRNGSequenceFilter
from linnet.core.packing import Lifted
from linnet.core.partial_eval import partially
from linnet.typing import In, InOutAxis, InOutScanAxis, Out


class Broadcast:
    """The type of ``broadcast``."""

    def __repr__(self) -> str:
        return "broadcast"


broadcast = Broadcast()  # as an axis of scan: not scanned over, the same in each step


def _in_and_out(axes: Mapping[CollectionFilter, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The axes of the collections that go in, and of those that come out."""
    numbers = {key: axis.axis if isinstance(axis, In | Out) else axis for key, axis in axes.items()}
    return (
        {key: numbers[key] for key, axis in axes.items() if not isinstance(axis, Out)},
        {key: numbers[key] for key, axis in axes.items() if not isinstance(axis, In)},
    )


def _change_axes(change: Callable[..., Any], groups: Any, axes: Mapping[Any, Any], params: Any):
    """Removes axes from the metadata of variables, or adds them."""
    return tuple(
        group if axis is None else change(group, axis, params)
        for group, axis in zip(groups, axes.values(), strict=True)
    )


def _spread(prefix: Any, tree: Any) -> list[Any]:
    """The axis of each leaf of a tree, from a prefix pytree of axes."""
    found: list[Any] = []

    def add(axis: Any, part: Any) -> None:
        found.extend([axis] * jax.tree.structure(part).num_leaves)

    jax.tree.map(add, prefix, tree, is_leaf=lambda x: x is None)
    return found


def _size(leaves: list[Any], axes: list[Any]) -> int | None:
    """The size of the first axis that is mapped over."""
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is not None and not isinstance(axis, Broadcast):
            return np.shape(leaf)[axis]
    return None


def _split_keys(groups: Any, is_split: list[bool], count: int) -> tuple[Any, Any]:
    """The keys for each step or entry of the groups that are split, and the other groups."""
    split = functools.partial(jax.random.split, num=count)
    ours = [jax.tree.map(split, g) for g, yes in zip(groups, is_split, strict=True) if yes]
    return ours, [g for g, yes in zip(groups, is_split, strict=True) if not yes]


def _joined_keys(split: list[Any], shared: list[Any], is_split: list[bool]) -> tuple[Any, ...]:
    ours, others = iter(split), iter(shared)
    return tuple(next(ours if yes else others) for yes in is_split)


def _is_batch(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(hasattr(x, "ndim") and x.ndim > 0 for x in leaves)


def vmap(
    fn: Callable[..., Any],
    variable_axes: Mapping[CollectionFilter, InOutAxis],
    split_rngs: Mapping[PRNGSequenceFilter, bool],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: str | None = None,
    spmd_axis_name: str | None = None,
    metadata_params: Mapping[Any, Any] = {},
) -> Callable[..., Any]:
    """``jax.vmap`` of a function of a scope.

    Args:
      fn: a function whose first parameter is a scope, or a pytree of scopes.
      variable_axes: for filters of collections the axis that is mapped over; None for variables
        that all entries share. Collections that no filter takes are not seen inside.
      split_rngs: for filters of random streams whether each entry has keys of its own.
      in_axes: the axis of each other argument, as for ``jax.vmap``. Arrays given by keyword are
        mapped over their first axis, and other values are the same for each entry.
      out_axes: the axes of the outputs.
      axis_size: the size of the axis, needed where no argument has it.
      axis_name: the name of the axis, for collectives.
      spmd_axis_name: the axes of the mesh that the axis is divided along.
      metadata_params: what the boxes of variables need to know of the axis.

    Returns:
      The mapped function.

    Raises:
      ValueError: nothing has the axis that is mapped over, and ``axis_size`` is not given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def dense(scope, x):
      ...     return x * scope.param("w", jax.nn.initializers.normal(), (2,))
      >>> many = lift.vmap(dense, variable_axes={"params": 0}, split_rngs={"params": True})
      >>> y, variables = core.init(many)(jax.random.key(0), jnp.ones((3, 2)))
      >>> variables["params"]["w"].shape
      (3, 2)
    """
    axes_in, axes_out = _in_and_out(variable_axes)
    is_split = list(split_rngs.values())

    @functools.wraps(fn)
    def mapped(scope_tree: Any, *args: Any, **kwargs: Any) -> Any:
        lifted = Lifted(scope_tree, [*axes_in], [*axes_out], [*split_rngs], "vmap")
        groups = lifted.variable_groups()
        variables = _change_axes(meta.remove_axis, groups, axes_in, metadata_params)
        mapped_kwargs = {k: arg for k, arg in kwargs.items() if _is_batch(arg)}
        fixed_kwargs = {k: arg for k, arg in kwargs.items() if k not in mapped_kwargs}
        size = axis_size
        if size is None:
            given = (args, mapped_kwargs, variables)
            prefix = (in_axes, 0, tuple(axes_in.values()))
            size = _size(jax.tree.leaves(given), _spread(prefix, given))
        if size is None and any(is_split):
            raise ValueError(
                "vmap cannot tell how many entries there are: no argument and no variable has an "
                "axis that is mapped over.\nFix: give axis_size."
            )
        split, shared = _split_keys(lifted.rng_groups(), is_split, size or 0)

        def one(variables: Any, split: Any, args: Any, kwargs: Any) -> Any:
            scopes = lifted.enter(variables, _joined_keys(split, shared, is_split))
            return fn(scopes, *args, **kwargs, **fixed_kwargs), lifted.leave(scopes)

        y, out = jax.vmap(
            one,
            in_axes=(tuple(axes_in.values()), 0, in_axes, 0),
            out_axes=(out_axes, tuple(axes_out.values())),
            axis_size=axis_size,
            axis_name=axis_name,
            spmd_axis_name=spmd_axis_name,
        )(variables, split, args, mapped_kwargs)
        lifted.write(_change_axes(meta.add_axis, out, axes_out, metadata_params))
        return y

    return mapped


class _DrewKeys(Exception):
    """The body of a scan drew random keys when it was traced for the first time."""


class _ScopeScan:
    """One call of a scanned function: its inputs with their axes in front, and its body."""

    def __init__(
        self,
        fn: Callable[..., Any],
        lifted: Lifted,
        xs: Any,
        kwargs: Mapping[str, Any],
        *,
        is_split: list[bool],
        in_axes: Any,
        out_axes: Any,
        data_transform: Callable[..., Any] | None,
    ):
        self.fn, self.lifted, self.kwargs = fn, lifted, kwargs
        self.is_split, self.out_axes, self.data_transform = is_split, out_axes, data_transform
        leaves, self.xs_tree = jax.tree.flatten(xs)
        self.axes = _spread(in_axes, xs)
        scanned = [not isinstance(axis, Broadcast) for axis in self.axes]
        self.fixed = [x for x, yes in zip(leaves, scanned, strict=True) if not yes]
        self.xs = [
            jnp.moveaxis(jnp.asarray(x), axis, 0)
            for x, axis, yes in zip(leaves, self.axes, scanned, strict=True)
            if yes
        ]
        self.ys_tree: Any = None
        self.ys_axes: list[Any] = []

    def step(self, broadcast_vars: Any, shared: Any, carry: Any, slices: Any) -> Any:
        """One step: the new carry, what is stacked, and what must be the same in each step."""
        carry_vars, state = carry
        axes_vars, split, xs = slices
        ours, others = iter(xs), iter(self.fixed)
        inputs = [next(others if isinstance(axis, Broadcast) else ours) for axis in self.axes]
        variables = (broadcast_vars, carry_vars, *axes_vars)
        rngs = _joined_keys(split, shared, self.is_split)
        if self.data_transform is not None:
            variables, rngs = self.data_transform(variables, rngs)
        scopes = self.lifted.enter(variables, rngs)
        state, ys = self.fn(scopes, state, *jax.tree.unflatten(self.xs_tree, inputs), **self.kwargs)
        broadcast_out, carry_out, *axes_out = self.lifted.leave(scopes)
        leaves, self.ys_tree = jax.tree.flatten(ys)
        self.ys_axes = _spread(self.out_axes, ys)
        fixed = [isinstance(axis, Broadcast) for axis in self.ys_axes]
        stacked = [y for y, yes in zip(leaves, fixed, strict=True) if not yes]
        constant = [y for y, yes in zip(leaves, fixed, strict=True) if yes]
        # Collections that cannot be written are handed on as they are.
        carried = _updated(carry_vars, carry_out)
        return (carried, state), (axes_out, stacked), (broadcast_out, constant)

    def constants(self, broadcast_vars: Any, shared: Any, carry: Any, slices: Any) -> Any:
        """The broadcast variables and outputs, from the shapes of the carry and of one slice."""
        one = jax.tree.map(_shape_of, carry), jax.tree.map(lambda x: _shape_of(x[0]), slices)
        found = partially(lambda *args: self.step(broadcast_vars, shared, *args)[2], *one)
        for path, leaf in jax.tree_util.tree_leaves_with_path(found[0]):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                names = [key.key for key in path if hasattr(key, "key")]
                raise ValueError(
                    f"The broadcasted variable {'/'.join(map(str, names))} has a data dependency "
                    "on the scan body: it is made from the carry or from what is scanned over.\n"
                    "Fix: make it from shapes and random keys that are not split, or scan over it "
                    "with variable_axes."
                )
        return found

    def outputs(self, stacked: list[Any], constant: list[Any]) -> Any:
        """The outputs, with their axes where they were asked for."""
        ours, others = iter(stacked), iter(constant)
        ys = [
            next(others) if isinstance(axis, Broadcast) else jnp.moveaxis(next(ours), 0, axis)
            for axis in self.ys_axes
        ]
        return jax.tree.unflatten(self.ys_tree, ys)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype)


def _updated(group: Any, new: Any) -> Any:
    return tuple({**old, **fresh} for old, fresh in zip(group, new, strict=True))


def _has_broadcast(axes: Any) -> bool:
    return any(isinstance(axis, Broadcast) for axis in jax.tree.leaves(axes))


def scan(
    fn: Callable[..., Any],
    variable_axes: Mapping[CollectionFilter, InOutScanAxis] = {},
    variable_broadcast: CollectionFilter = False,
    variable_carry: CollectionFilter = False,
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    _split_transpose: bool = False,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    check_constancy_invariants: bool = True,
) -> Callable[..., Any]:
    """``jax.lax.scan`` of a function of a scope.

    Args:
      fn: ``fn(scope, carry, *xs)``, which returns the new carry and an output.
      variable_axes: for filters of collections the axis that is scanned over.
      variable_broadcast: a filter of the collections that all steps share.
      variable_carry: a filter of the collections that each step hands on to the next. Their
        variables must be there before.
      split_rngs: for filters of random streams whether each step has keys of its own.
      in_axes: the axis of each of ``xs`` that is scanned over, or ``broadcast``.
      out_axes: the axis of each output along which the steps are stacked, or ``broadcast`` for an
        output that is the same in each step.
      length: the number of steps, needed where nothing is scanned over.
      reverse: go from the last step to the first.
      unroll: how many steps to unroll.
      _split_transpose: as for ``jax.lax.scan``.
      data_transform: a function of the groups of variables and of random keys inside the body, for
        constraints on their sharding.
      metadata_params: what the boxes of variables need to know of the axis.
      check_constancy_invariants: trace the body a second time where random keys are drawn in it, as
        Flax does; without that, the keys are those of the first trace.

    Returns:
      A function of a scope, a carry and ``xs``. Keyword arguments are the same in each step.

    Raises:
      ValueError: a variable that all steps share depends on the carry or on ``xs``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def layer(scope, x, _):
      ...     return x + scope.param("b", jax.nn.initializers.ones, ()), x
      >>> deep = lift.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)
      >>> (y, xs), variables = core.init(deep)(jax.random.key(0), 1.0, None)
      >>> float(y), xs.tolist(), variables["params"]["b"].shape
      (4.0, [1.0, 2.0, 3.0], (3,))
    """
    axes_in, axes_out = _in_and_out(variable_axes)
    is_split = list(split_rngs.values())
    loop: dict[str, Any] = {"reverse": reverse, "unroll": unroll}
    if _split_transpose:
        loop["_split_transpose"] = True
    filters = (variable_broadcast, variable_carry)

    @functools.wraps(fn)
    def scanned(scope_tree: Any, init: Any, *xs: Any, **kwargs: Any) -> Any:
        lifted = Lifted(
            scope_tree, [*filters, *axes_in], [*filters, *axes_out], [*split_rngs], "scan"
        )
        shared_vars, carry_vars, *axes_vars = lifted.variable_groups()
        axes_vars = _change_axes(meta.remove_axis, axes_vars, axes_in, metadata_params)
        axes_vars = [
            jax.tree.map(lambda x, axis=axis: jnp.moveaxis(x, axis, 0), group)
            for group, axis in zip(axes_vars, axes_in.values(), strict=True)
        ]
        call = _ScopeScan(
            fn,
            lifted,
            xs,
            kwargs,
            is_split=is_split,
            in_axes=in_axes,
            out_axes=out_axes,
            data_transform=data_transform,
        )
        steps = _number_of_steps(length, call.xs, axes_vars)
        split, shared = _split_keys(lifted.rng_groups(), call.is_split, steps)
        carry, slices = (carry_vars, init), (axes_vars, split, call.xs)

        must_find = lifted.can_write(variable_broadcast) or _has_broadcast(out_axes)
        constant = []
        if must_find:
            found, constant = call.constants(shared_vars, shared, carry, slices)
            shared_vars = _updated(shared_vars, found)
        drawn = lifted.draws()
        try_once = check_constancy_invariants and not must_find

        def body(carry: Any, slices: Any) -> Any:
            after, stacked, _ = call.step(shared_vars, shared, carry, slices)
            if try_once and lifted.draws() != drawn:
                raise _DrewKeys
            return after, stacked

        try:
            last, outs = jax.lax.scan(body, carry, slices, steps, **loop)
        except _DrewKeys:
            # Flax traces the body twice, and programs have the numbers of the second time.
            try_once = False
            last, outs = jax.lax.scan(body, carry, slices, steps, **loop)
        (carry_vars, final), (axes_vars, stacked) = last, outs
        axes_vars = [
            jax.tree.map(lambda x, axis=axis: jnp.moveaxis(x, 0, axis), group)
            for group, axis in zip(axes_vars, axes_out.values(), strict=True)
        ]
        axes_vars = _change_axes(meta.add_axis, axes_vars, axes_out, metadata_params)
        lifted.write((shared_vars, carry_vars, *axes_vars))
        return final, call.outputs(stacked, constant)

    return scanned


def _number_of_steps(length: int | None, xs: list[Any], axes_vars: Any) -> int:
    leaves = [*xs, *jax.tree.leaves(axes_vars)]
    if length is None and not leaves:
        raise ValueError(
            "scan cannot tell how many steps there are: the length should be specified, as "
            "nothing is scanned over.\nFix: give length."
        )
    return np.shape(leaves[0])[0] if length is None else length


def while_loop(
    cond_fn: Callable[[Any, Any], Any],
    body_fn: Callable[[Any, Any], Any],
    scope: Any,
    init: Any,
    carry_variables: CollectionFilter = False,
    broadcast_variables: CollectionFilter = True,
    split_rngs: Mapping[PRNGSequenceFilter, bool] = {},
) -> Any:
    """``jax.lax.while_loop`` of functions of a scope.

    Args:
      cond_fn: ``cond_fn(scope, carry)``, whether to go on.
      body_fn: ``body_fn(scope, carry)``, the new carry.
      scope: a scope, or a pytree of scopes.
      init: the first carry.
      carry_variables: a filter of the collections that each step hands on to the next; only these
        can be written. Their variables must be there before.
      broadcast_variables: a filter of the collections that all steps share.
      split_rngs: for filters of random streams whether each step has keys of its own.

    Returns:
      The last carry.

    Example:
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def body(scope, x):
      ...     scope.put_variable("counts", "n", scope.get_variable("counts", "n") + 1)
      ...     return x * 2
      >>> def loop(scope, x):
      ...     return lift.while_loop(lambda _, x: x < 9, body, scope, x, carry_variables="counts")
      >>> y, after = core.apply(loop, mutable="counts")({"counts": {"n": 0}}, 1)
      >>> int(y), int(after["counts"]["n"])
      (16, 4)
    """
    filters = [carry_variables, broadcast_variables]
    is_split = list(split_rngs.values())
    lifted = Lifted(scope, filters, [carry_variables], [*split_rngs], "while_loop")
    carry_vars, shared_vars = lifted.variable_groups()
    groups = lifted.rng_groups()

    def scopes_at(number: Any, carry_vars: Any) -> Any:
        fold = functools.partial(jax.random.fold_in, data=number)
        rngs = [
            jax.tree.map(fold, g) if yes else g for g, yes in zip(groups, is_split, strict=True)
        ]
        return lifted.enter((carry_vars, shared_vars), tuple(rngs))

    def test(state: Any) -> Any:
        number, carry_vars, carry = state
        scopes = scopes_at(number, carry_vars)
        goes_on = cond_fn(scopes, carry)
        lifted.leave(scopes)
        return goes_on

    def body(state: Any) -> Any:
        number, carry_vars, carry = state
        scopes = scopes_at(number, carry_vars)
        carry = body_fn(scopes, carry)
        (out,) = lifted.leave(scopes)
        return number + 1, _updated(carry_vars, out), carry

    _, carry_vars, carry = jax.lax.while_loop(test, body, (0, carry_vars, init))
    lifted.write((carry_vars,))
    return carry
