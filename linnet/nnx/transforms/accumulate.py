"""Gradients of a large batch, computed on one part of it after the other: micro-batches."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from linnet.errors import AxisError, type_text
from linnet.nnx.filterlib import Filter
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.transforms.axes import Carry
from linnet.nnx.transforms.grad import Wanted, count_specs_for, gradients_of, requested
from linnet.nnx.transforms.loops import scan_layers
from linnet.nnx.transforms.option_types import AccumulateOptions, P, R, ValueAndGradDecorator
from linnet.nnx.transforms.run import Call, count_specs, transform

_API = "accumulate_gradients"


@overload
def accumulate_gradients(
    f: Callable[P, R], **options: Unpack[AccumulateOptions]
) -> Callable[P, tuple[R, Any]]: ...
@overload
def accumulate_gradients(
    f: None = None, **options: Unpack[AccumulateOptions]
) -> ValueAndGradDecorator: ...
def accumulate_gradients(
    f: Any = None,
    *,
    micro_batches: int,
    in_axes: Any = 0,
    reduction: Literal["mean", "sum"] = "mean",
    argnums: Any = 0,
    has_aux: bool = False,
    wrt: Filter | None = None,
    dtype: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``value_and_grad`` on one micro-batch after the other, with the memory that one needs.

    The batch is cut into equal parts, and the parts are run by a loop. What the function writes to
    Variables in one part (statistics, the counts of random streams, metrics) the next one reads, as
    in a loop by hand. Part ``i`` of ``n`` holds the examples ``i``, ``i + n``, ``i + 2 * n`` and so
    on. If the batch is sharded along its examples, and its size is a multiple of ``n`` times the
    number of devices, every device then computes on its own examples, without communication.

    Args:
      f: the function; left out, the call is a decorator.
      micro_batches: the number of parts.
      in_axes: the axis of the examples, ``None`` for what every part gets whole, or a tuple with
        one of these, or a pytree of them, for each argument. Objects, numbers and what is
        differentiated are always whole.
      reduction: ``"mean"`` where the function returns the mean over its examples; ``"sum"`` where
        it returns a sum.
      argnums, has_aux, wrt, graph, graph_updates: as for ``grad``.
      dtype: the dtype in which gradients are added, such as ``jnp.float32`` for parameters in
        bfloat16; by default their own, in which they are returned in any case.

    Returns:
      A function that returns ``(value, gradient)``, or ``((value, aux), gradient)``: the mean, or
      the sum, over the parts. ``aux`` is stacked, with the parts along a new first axis.

    Raises:
      AxisError: the examples do not go into equal parts, arguments have different numbers of
        them, or there are none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> def loss(model, x, y):
      ...     return ((model(x) - y) ** 2).mean()
      >>> model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
      >>> x, y = jnp.ones((32, 4)), jnp.ones((32, 1))
      >>> value, grads = nnx.accumulate_gradients(loss, micro_batches=8)(model, x, y)
      >>> whole, expected = nnx.value_and_grad(loss)(model, x, y)
      >>> bool(jnp.allclose(grads["kernel"][...], expected["kernel"][...]))
      True
    """
    _check_options(micro_batches, reduction)
    argnums = requested(argnums, wrt)
    divisor = micro_batches if reduction == "mean" else 1

    def lifted(call: Call) -> Any:
        wanted = Wanted(call, argnums)
        parts = _Parts(call, in_axes, wanted, micro_batches)
        gradients = gradients_of(call.f, _API, argnums, has_aux, graph, graph_updates)
        like, structure = jax.tree.flatten(wanted.gradients(wanted.values()))

        def step(total: list[Any], number: Any, whole: Any) -> Any:
            args, kwargs = parts.take(whole, number)
            out, grads = gradients(*args, **kwargs)
            pairs = zip(total, jax.tree.leaves(grads), strict=True)
            return [x + g.astype(x.dtype) for x, g in pairs], out

        loop = scan_layers(
            step, length=micro_batches, in_axes=(Carry, 0, None), out_axes=(Carry, 0)
        )
        zeros = [jnp.zeros_like(x, dtype=dtype) for x in like]
        total, out = loop(zeros, jnp.arange(micro_batches), parts.whole)
        pairs = zip(total, like, strict=True)
        grads = structure.unflatten([(x / divisor).astype(own.dtype) for x, own in pairs])
        losses, aux = out if has_aux else (out, None)
        loss = losses.sum(0) / divisor
        return ((loss, aux) if has_aux else loss), grads

    return transform(
        _API,
        lifted,
        f,
        graph,
        graph_updates,
        own_specs=max(count_specs_for(argnums), count_specs(in_axes) or 0),
    )


def _check_options(micro_batches: Any, reduction: Any) -> None:
    if operator.index(micro_batches) < 1:
        raise ValueError(
            f"nnx.{_API} needs at least one micro-batch, but got micro_batches={micro_batches}.\n"
            "Fix: pass the number of parts that the batch is cut into."
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"nnx.{_API} got reduction={reduction!r}.\n"
            'Fix: "mean" for a function that returns the mean over its examples, "sum" for a sum.'
        )


class _Parts:
    """The arguments of a call with the batch cut into parts; ``take`` gives one of them."""

    def __init__(self, call: Call, in_axes: Any, wanted: Wanted, count: int):
        by_name = in_axes if isinstance(in_axes, int) else 0
        axes = call.axes(in_axes, by_name=by_name)
        axes.slots = [None] * len(axes.slots)
        plain = enumerate(zip(axes.plain, call.plain, strict=True), start=len(axes.slots))
        axes.plain = [
            axis if n not in wanted.numbers and jnp.ndim(x) else None for n, (axis, x) in plain
        ]
        size = axes.size(None)
        if size is None or size % count:
            raise _not_divisible(call, axes.plain, size, count)
        self.axes = [
            None if axis is None else axis % jnp.ndim(x)
            for axis, x in zip(axes.plain, call.plain, strict=True)
        ]
        self.whole = self._with_plain(
            call.opened.tree, lambda x, axis: cut_examples(x, axis, count)
        )

    def take(self, whole: Any, number: Any) -> Any:
        """The arguments for one part of the batch."""
        return self._with_plain(
            whole, lambda x, axis: jax.lax.dynamic_index_in_dim(x, number, axis + 1, keepdims=False)
        )

    def _with_plain(self, tree: Any, change: Callable[[Any, int], Any]) -> Any:
        """Arguments with those leaves changed that have an axis of examples."""
        axes = iter(self.axes)

        def changed(leaf: Any) -> Any:
            axis = None if is_node(leaf) else next(axes)
            return leaf if axis is None else change(leaf, axis)

        return jax.tree.map(changed, tree, is_leaf=is_node)


def cut_examples(x: Any, axis: int, count: int) -> Any:
    """An array with the axis of examples as two: those of one part, and the parts.

    In this order the shards of the axis stay where they are.
    """
    shape = jnp.shape(x)
    return jnp.reshape(x, (*shape[:axis], shape[axis] // count, count, *shape[axis + 1 :]))


def _not_divisible(call: Call, axes: list[Any], size: int | None, count: int) -> AxisError:
    if size is None:
        return AxisError(
            f"nnx.{_API} found no array to cut into {count} micro-batches.\n"
            "Fix: pass the batch as an argument of its own, with an axis in in_axes."
        )
    number = next(n for n, axis in enumerate(axes) if axis is not None)
    where = call.where(call.opened.plain_paths[number])
    return AxisError(
        f"nnx.{_API}: axis {axes[number]} of {where} has size {size}, which does not go into "
        f"{count} equal micro-batches: {type_text(call.plain[number])}.\n"
        f"Fix: choose micro_batches so that it divides {size}, or a batch of "
        f"{max(size - size % count, count)}."
    )
