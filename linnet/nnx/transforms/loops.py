"""Loops over objects: scan, while_loop, fori_loop.

What a loop carries is what it is told to carry and what its body writes to (``written.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import AxisError, CarryError, name_some
from linnet.nnx.transforms import carry, partition
from linnet.nnx.transforms.axes import (
    Axes,
    Carry,
    broadcast_prefix,
    is_prefix_leaf,
    move_from_front,
    move_to_front,
)
from linnet.nnx.transforms.carry import Broadcast
from linnet.nnx.transforms.eager import Written, compiled_outside
from linnet.nnx.transforms.engine import Inside
from linnet.nnx.transforms.run import Call, Run, Slots, positional, transform
from linnet.nnx.transforms.vmap import OutputAxes
from linnet.nnx.variablelib.variable import Variable


def check_carried(run: Run, numbers: Any) -> None:
    """Raises if a carried slot has another structure, shape or dtype after a step."""
    slots = run.slots
    before = [*run.inside.values, *run.inside.arrays]
    for number in numbers:
        where = slots.where(number)
        carry.check_same_type(before[number], run.now[number], where, slots.call.api)


def as_arrays(value: Any) -> Any:
    """Python numbers as arrays."""
    return jax.tree_util.tree_map(jnp.asarray, value)


class _Scan:
    """One call of ``nnx.scan``: who is carried, who is scanned, and what comes out."""

    def __init__(
        self,
        call: Call,
        in_axes: Any,
        out_axes: Any,
        options: dict[str, Any],
        told: set[str] | None,
    ):
        args = call.opened.tree[0]
        if in_axes is Carry and len(args) == 1:
            in_axes = (Carry,)
        elif isinstance(in_axes, list):
            in_axes = tuple(in_axes)
        self.call = call
        self.axes = Axes(call.opened, in_axes, "scan", where=call.where)
        self.out_axes = out_axes
        self.options = options
        self.slots = Slots(call)
        self.written = Written(self.slots)
        self.carry = carry.marked(in_axes, args)
        self.always = {n for n, axis in enumerate(self.axes.slots) if axis is Carry}
        self.scanned = [n for n, axis in enumerate(self.axes.slots) if isinstance(axis, int)]
        self.plain_carried = [n for n, axis in enumerate(self.axes.plain) if axis is Carry]
        self.plain_scanned = [n for n, axis in enumerate(self.axes.plain) if isinstance(axis, int)]
        self.broadcast = Broadcast(
            self.slots, [n for n, axis in enumerate(self.axes.slots) if axis is None]
        )
        self.told = told if call.updates else None
        self.length = self.axes.size(options["length"], "length")
        if self.length is None:
            raise AxisError(
                "nnx.scan has nothing to scan over and no length.\n"
                "Fix: give an argument an axis in in_axes, or pass length."
            )
        f, in_prefix = call.f, in_axes
        call.f = lambda *a, **k: self._hand_on(carry.marked(in_prefix, a), f(*a, **k))

    def _hand_on(self, before: list[Any], out: Any) -> Any:
        """The output of a step, compared with the carry that went in, its objects left out."""
        after = self._marked_output(out)
        if len(before) != len(after):
            raise CarryError(
                f"nnx.scan: in_axes marks {len(before)} places with nnx.Carry, and out_axes "
                f"{len(after)}.\nFix: mark the carry in both, and return it, in the form in which "
                "it came in, at the place that out_axes marks."
            )
        handed = carry.Handed("scan", lambda path: self.call.where((0, *path)))
        parts = iter(
            handed.replace(path, came, goes)
            for (path, came), (_, goes) in zip(before, after, strict=True)
        )
        return jax.tree_util.tree_map(
            lambda mark, part: next(parts) if mark is Carry else part,
            self.out_axes,
            out,
            is_leaf=is_prefix_leaf,
        )

    def _marked_output(self, out: Any) -> list[Any]:
        broadcast_prefix(self.out_axes, out, "scan", "out_axes")  # raises if it does not fit
        return carry.marked(self.out_axes, out)

    def run(self) -> Any:
        """Scans, and writes the result out."""
        self.call.after.insert(0, self._end_step)
        out = self.written.settle(self._attempt, self.always)
        return carry.restore(out, [part for _, part in self.carry])

    def _end_step(self, inside: Inside, out: Any) -> None:
        carried = [n for n in self.always if n < self.slots.variables]
        carry.take_places(self.slots, inside, carried)
        if self.told is not None:
            self.broadcast.put_back(inside)

    def _attempt(self, carried_set: set[int]) -> Any:
        slots, axes = self.slots, self.axes
        carried = sorted(carried_set)
        moving = carried_set | set(self.scanned)
        fixed = set(range(slots.variables)) - moving
        xs = (
            [move_to_front(slots.values[n], axes.slots[n]) for n in self.scanned],
            [move_to_front(slots.plain[n], axes.plain[n]) for n in self.plain_scanned],
        )
        start = (
            [slots.values[n] for n in carried],
            [as_arrays(slots.plain[n]) for n in self.plain_carried],
        )
        found: list[Any] = []

        def body(held: Any, x: Any) -> Any:
            values = _filled(slots.values, (carried, held[0]), (self.scanned, x[0]))
            plain = _filled(slots.plain, (self.plain_carried, held[1]), (self.plain_scanned, x[1]))
            run = slots.run(values, plain, fixed)
            self.written.check(run, moving)
            check_carried(run, carried)
            places = _ScanOutput(run, self.out_axes, axes)
            next_plain, rest = self._divide(places, run.leaves, held[1])
            written = [n for n in self.scanned if n in run.changed]
            found.append((run, places.plain, places.fresh, written))
            ys = ([run.now[n] for n in written], run.fresh, rest)
            result = ([run.now[n] for n in carried], next_plain), ys
            run.forget()
            return result

        options = {k: self.options[k] for k in ("reverse", "unroll", "_split_transpose")}
        length = None if any(xs) else self.length  # JAX takes an open length from xs alone
        loop = lambda start, xs: jax.lax.scan(body, start, xs, length=length, **options)  # noqa: E731
        last, stacked = self.written.run(loop, start, xs)
        if self.told is not None:
            self.broadcast.warn(self.told)
        return self._finish(found[-1], carried, last, stacked)

    def _divide(self, places: OutputAxes, leaves: list[Any], before: list[Any]) -> Any:
        """The carried leaves of the output, checked, and the others."""
        pairs = list(zip(leaves, places.plain, strict=True))
        carried = [x for x, axis in pairs if axis is Carry]
        for old, new, number in zip(before, carried, self.plain_carried, strict=True):
            where = self.call.where(self.axes.plain_paths[number])
            carry.check_same_type(old, new, where, "scan")
        return carried, [x for x, axis in pairs if axis is not Carry]

    def _finish(self, found: Any, carried: list[int], last: Any, stacked: Any) -> Any:
        run, plain_axes, fresh_axes, written = found
        final = {n: x for n, x in zip(carried, last[0], strict=True) if n in run.changed}
        for number, value in zip(written, stacked[0], strict=True):
            final[number] = move_from_front(value, self.axes.slots[number])
        fresh = [move_from_front(x, a) for x, a in zip(stacked[1], fresh_axes, strict=True)]
        carried_leaves, others = iter(last[1]), iter(stacked[2])
        leaves = [
            next(carried_leaves) if axis is Carry else move_from_front(next(others), axis)
            for axis in plain_axes
        ]
        return run.close(final, fresh, leaves)


def _filled(values: list[Any], *given: tuple[list[int], list[Any]]) -> list[Any]:
    """A copy of ``values`` with some of them replaced."""
    filled = list(values)
    for numbers, news in given:
        for number, value in zip(numbers, news, strict=True):
            filled[number] = value
    return filled


class _ScanOutput(OutputAxes):
    """The axis, or Carry, of each leaf of what a step returned."""

    def __init__(self, run: Run, out_axes: Any, axes: Axes):
        super().__init__(run, out_axes, axes)
        lost = [self.plain_name(n) for n, axis in enumerate(self.plain) if axis is None]
        lost += [self.fresh_name(n) for n in range(len(self.fresh)) if self._is_lost(n)]
        if lost:
            raise AxisError(
                f"nnx.scan: out_axes=None for {lost[0]} would keep one step's output and lose the "
                "others.\nFix: stack it along an axis, or carry it."
            )
        # What a step adds to an object that is carried or broadcast is stacked.
        self.fresh = [0 if axis is None or axis is Carry else axis for axis in self.fresh]

    def _is_lost(self, number: int) -> bool:
        return self.fresh[number] is None and number not in self.attributes


def _lifted_scan(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    axis: partition.AxisName | None,
    graph: bool | None,
    graph_updates: bool | None,
    told: set[str] | None,
) -> Any:
    call = Call(f, positional(f, args, kwargs, "scan"), {}, "scan", graph, graph_updates)
    scan = _Scan(call, in_axes, out_axes, options, told)
    partition.name_axes(call, scan.axes, out_axes, axis)
    return scan.run()


def scan(
    f: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: dict[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Runs a function of objects step by step over an axis, handing a carry from step to step.

    Args:
      f: the function; left out, the call is a decorator.
      length: the number of steps, where no argument tells.
      reverse: start at the end.
      unroll: as for ``jax.lax.scan``.
      in_axes: for each argument ``nnx.Carry``, an axis to scan over, ``None`` for one that is the
        same in every step, or ``StateAxes`` of these. A step sees what it writes to Variables and
        arrays with ``None``; the next step and the program after the scan do not, as in Flax.
      out_axes: ``nnx.Carry`` where the carry is returned, an axis to stack the rest along.
      transform_metadata: ``{nnx.PARTITION_NAME: name}`` names the axis in the sharding metadata.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The function. Variables that are scanned are updated along their axis, those that are carried
      go from step to step, and those with ``None`` stay as they were; a ``DroppedWriteWarning``
      names each that is written to. Static attributes that a step sets stay set. What a step adds
      to an object is stacked along the object's axis, or along axis 0 where the object is carried
      or broadcast. Without graph updates there is no structure to bring out, and Variables with
      ``None`` are carried where they are written to.

    Raises:
      AxisError: an axis out of range, or different sizes.
      CarryError: the carry changes its structure, shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
      ... def total(so_far, x):
      ...     return so_far + x, so_far
      >>> total(jnp.zeros(()), jnp.arange(3.0))
      (Array(3., dtype=float32), Array([0., 0., 1.], dtype=float32))

      Running statistics are carried, parameters are the same in every step:

      >>> axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
      >>> norm = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
      >>> normalise = nnx.scan(lambda norm, x: norm(x), in_axes=(axes, 0), out_axes=0)
      >>> normalise(norm, jnp.ones((3, 4, 2))).shape
      (3, 4, 2)
      >>> norm.mean[...]
      Array([0.875, 0.875], dtype=float32)
    """
    return _scan(
        f,
        in_axes,
        out_axes,
        {
            "length": length,
            "reverse": reverse,
            "unroll": unroll,
            "_split_transpose": _split_transpose,
        },
        transform_metadata,
        graph,
        graph_updates,
        told=set(),
    )


def scan_layers(
    f: Callable[..., Any],
    *,
    length: int,
    reverse: bool,
    unroll: int | bool,
    in_axes: Any,
    out_axes: Any,
    transform_metadata: dict[str, Any],
) -> Any:
    """``scan``, but Variables with axis ``None`` that a step writes to go from step to step."""
    options = {"length": length, "reverse": reverse, "unroll": unroll, "_split_transpose": False}
    return _scan(f, in_axes, out_axes, options, transform_metadata, None, None, told=None)


def _scan(
    f: Any,
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    transform_metadata: dict[str, Any] | None,
    graph: bool | None,
    graph_updates: bool | None,
    told: set[str] | None,
) -> Any:
    """``told`` has the names of which the user was warned; without it, writes go on."""
    return transform(
        "scan",
        _lifted_scan,
        f,
        finish=compiled_outside(api="scan", graph=graph),
        in_axes=in_axes,
        out_axes=out_axes,
        options=options,
        axis=partition.name_in(transform_metadata),
        graph=graph,
        graph_updates=graph_updates,
        told=told,
    )


class _Loop:
    """What ``while_loop`` and ``fori_loop`` share: one value that goes round."""

    def __init__(self, f: Callable[..., Any], value: Any, api: str, graph: Any, updates: Any):
        self.call = Call(f, (value,), {}, api, graph, updates, named=lambda init_val: None)
        self.body = f
        self.slots = Slots(self.call)
        self.written = Written(self.slots, [f])
        self.start = as_arrays(self.slots.plain)
        self._last: Run | None = None

    def enter(self, carried: list[int], held: Any) -> tuple[list[Any], list[Any]]:
        """The values and plain leaves inside, from what goes round."""
        return _filled(self.slots.values, (carried, held[0])), held[1]

    def step(self, carried: list[int], held: Any, extra: tuple[Any, ...] = ()) -> Any:
        """One round of the body."""
        values, plain = self.enter(carried, held)
        self.call.f = lambda value: self._hand_on(value, self.body(*extra, value))
        run = self.slots.run(values, plain, set(range(self.slots.variables)) - set(carried))
        if run.form() is not None:
            raise CarryError(
                f"nnx.{self.call.api}: the body changes the structure of its value: "
                f"{run.difference()}.\nFix: change only the values of Variables in the loop; make "
                "other changes before it or after it."
            )
        self.written.check(run, set(carried))
        check_carried(run, carried)
        for old, new, path in zip(plain, run.leaves, self.slots.plain_paths, strict=True):
            carry.check_same_type(old, new, self.call.where(path), self.call.api)
        self._last = run
        result = [run.now[n] for n in carried], run.leaves
        run.forget()
        return result

    def _hand_on(self, before: Any, after: Any) -> Any:
        handed = carry.Handed(self.call.api, lambda path: self.call.where((0, 0, *path)))
        return handed.replace((), before, after)

    def ask(self, cond_fun: Callable[[Any], Any], carried: list[int], held: Any) -> Any:
        """Whether to go round once more."""
        values, plain = self.enter(carried, held)
        self.call.f = lambda value: _value(cond_fun(value))
        run = self.slots.run(values, plain, set(range(self.slots.variables)))
        if run.changed or run.form() is not None:
            names = name_some(map(self.slots.where, sorted(run.changed))) or run.difference()
            raise ValueError(
                f"nnx.while_loop: cond_fun writes to {names}, and the write would be lost.\n"
                "Fix: write in body_fun."
            )
        return run.out

    def finish(self, carried: list[int], held: Any) -> Any:
        """Writes the last round out."""
        assert self._last is not None
        pairs = zip(carried, held[0], strict=True)
        final = {number: value for number, value in pairs if number in self._last.changed}
        out = self._last.close(final, [], held[1])
        return carry.restore(out, self.call.opened.tree[0][0])


def _value(x: Any) -> Any:
    return x.get_value() if isinstance(x, Variable) else x


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.lax.while_loop`` with objects in the value; traced and compiled as ``nnx.cond``.

    Args:
      cond_fun: whether to go on; it may read objects but not change them.
      body_fun: makes the next value; objects are changed in place and returned.
      init_val: the first value.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says.

    Returns:
      The last value, with the objects that came in.

    Raises:
      CarryError: the value changes its structure, shape or dtype.
    """
    loop = _Loop(body_fun, init_val, "while_loop", graph, graph_updates)

    def attempt(numbers: set[int]) -> Any:
        carried = sorted(numbers)
        start = ([loop.slots.values[n] for n in carried], loop.start)
        go_on = lambda held: loop.ask(cond_fun, carried, held)  # noqa: E731
        body = lambda held: loop.step(carried, held)  # noqa: E731
        last = loop.written.run(lambda held: jax.lax.while_loop(go_on, body, held), start)
        return loop.finish(carried, last)

    return loop.written.settle(attempt)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.lax.fori_loop`` with objects in the value; traced and compiled as ``nnx.cond``.

    Args:
      lower: the first index.
      upper: the index to stop before.
      body_fun: a function of index and value; objects are changed in place and returned.
      init_val: the first value.
      unroll: as for ``jax.lax.fori_loop``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says.

    Returns:
      The last value, with the objects that came in.

    Raises:
      CarryError: the value changes its structure, shape or dtype.
    """
    loop = _Loop(body_fun, init_val, "fori_loop", graph, graph_updates)

    def attempt(numbers: set[int]) -> Any:
        carried = sorted(numbers)
        start = ([loop.slots.values[n] for n in carried], loop.start)
        body = lambda i, held: loop.step(carried, held, (i,))  # noqa: E731
        repeat = lambda held: jax.lax.fori_loop(lower, upper, body, held, unroll=unroll)  # noqa: E731
        last = loop.written.run(repeat, start)
        return loop.finish(carried, last)

    return loop.written.settle(attempt)
