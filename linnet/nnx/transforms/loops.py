"""Loops over objects: ``scan``, ``while_loop`` and ``fori_loop``.

A loop carries the slots that the user marks with ``nnx.Carry`` and those that its body writes to.
The latter are found by running it: ``eager.Written`` tries again with more slots until no write is
missed. ``carry`` has the checks of what is carried.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp

from linnet.errors import AxisError, CarryError, DroppedWriteWarning, name_some, path_string
from linnet.nnx.pytreelib import locate
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.transforms import carry, partition
from linnet.nnx.transforms.axes import (
    ArgumentAxes,
    Carry,
    axis_for,
    broadcast_prefix,
    is_prefix_leaf,
    move_from_front,
    move_to_front,
)
from linnet.nnx.transforms.carry import BroadcastSlots
from linnet.nnx.transforms.eager import Written
from linnet.nnx.transforms.engine import Inside, leaves_by_path, output_place
from linnet.nnx.transforms.option_types import Decorator, P, R, ScanOptions
from linnet.nnx.transforms.run import Call, Run, count_specs, transform
from linnet.nnx.transforms.vmap import OutputAxes
from linnet.nnx.variablelib.operators import value_of


@overload
def scan(f: Callable[P, R], **options: Unpack[ScanOptions]) -> Callable[P, R]: ...
@overload
def scan(f: None = None, **options: Unpack[ScanOptions]) -> Decorator: ...
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
      graph, graph_updates: as for ``jit``.

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
    return scan_layers(
        f,
        length=length,
        in_axes=in_axes,
        out_axes=out_axes,
        transform_metadata=transform_metadata,
        graph=graph,
        graph_updates=graph_updates,
        already_warned=set(),
        reverse=reverse,
        unroll=unroll,
        _split_transpose=_split_transpose,
    )


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
      cond_fun: whether to go on; what it writes to objects is dropped, with a warning.
      body_fun: makes the next value; objects are changed in place and returned.
      init_val: the first value.
      graph, graph_updates: by default as ``set_graph_mode`` and ``set_graph_updates`` say.

    Returns:
      The last value, with the objects that came in.

    Raises:
      CarryError: the value changes its structure, shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> def double(v):
      ...     v[...] *= 2
      ...     return v
      >>> v = nnx.Variable(jnp.array(1.0))
      >>> nnx.while_loop(lambda v: v < 100, double, v) is v, float(v.value)
      (True, 128.0)
    """
    loop = _LoopCall(body_fun, init_val, "while_loop", graph, graph_updates)

    def run(carried: list[int], start: Any) -> Any:
        go_on = loop.call.named(lambda held: loop.ask(cond_fun, carried, held), cond_fun)
        body = loop.call.named(lambda held: loop.step(carried, held), body_fun)
        return jax.lax.while_loop(go_on, body, start)

    return loop.settle(run)


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
      init_val, graph, graph_updates: as for ``while_loop``.
      unroll: as for ``jax.lax.fori_loop``.

    Returns:
      The last value, with the objects that came in.

    Raises:
      CarryError: the value changes its structure, shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> def add(i, v):
      ...     v[...] += i
      ...     return v
      >>> v = nnx.Variable(jnp.array(0))
      >>> nnx.fori_loop(0, 4, add, v) is v, int(v.value)
      (True, 6)
    """
    loop = _LoopCall(body_fun, init_val, "fori_loop", graph, graph_updates)

    def run(carried: list[int], start: Any) -> Any:
        body = loop.call.named(lambda i, held: loop.step(carried, held, (i,)), body_fun)
        return jax.lax.fori_loop(lower, upper, body, start, unroll=unroll)

    return loop.settle(run)


def scan_layers(
    f: Any,
    *,
    length: int | None,
    in_axes: Any,
    out_axes: Any,
    transform_metadata: dict[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    already_warned: set[str] | None = None,
    **options: Any,
) -> Any:
    """``scan``, with ``options`` for ``jax.lax.scan``.

    Writes to Variables with axis ``None`` are dropped with a warning, once for each slot in
    ``already_warned``; where that is None, such Variables are carried from step to step.
    """

    def lifted(call: Call) -> Any:
        scan = _ScanCall(call, in_axes, out_axes, length, options, already_warned)
        partition.name_axes(call, scan.axes, out_axes, transform_metadata)
        return scan.run()

    return transform(
        "scan",
        lifted,
        f,
        graph,
        graph_updates,
        own_specs=count_specs(in_axes),
        by_position=True,
    )


class _FinishedStep(NamedTuple):
    """The run of one step, the axes of its plain and fresh outputs, and the slots it changed."""

    run: Run
    plain_axes: list[Any]
    fresh_axes: list[Any]
    changed: list[int]


class _ScanCall:
    """One call of ``nnx.scan``: which slots are carried, scanned or broadcast, and the results."""

    def __init__(
        self,
        call: Call,
        in_axes: Any,
        out_axes: Any,
        length: int | None,
        options: dict[str, Any],
        already_warned: set[str] | None,
    ):
        args = call.opened.tree[0]
        if in_axes is Carry and len(args) == 1:
            in_axes = (Carry,)
        elif isinstance(in_axes, list):
            in_axes = tuple(in_axes)
        self.call = call
        self.axes = call.axes(in_axes)
        self.out_axes = out_axes
        self.options = options
        self.written = Written(call)
        self.carry = carry.marked(in_axes, args)
        if len(self.carry) > 1:
            places = " and ".join(f"in_axes{path_string(path)}" for path, _ in self.carry[:2])
            raise CarryError(
                f"nnx.scan: nnx.Carry stands in two places: {places}.\n"
                "Fix: carry one argument, such as a tuple of all that is handed from step to step."
            )
        # Numbers among the inputs of the call: slots, and after them plain leaves.
        self.input_axes = [*self.axes.slots, *self.axes.plain]
        self.always = {n for n, axis in enumerate(self.input_axes) if axis is Carry}
        self.scanned = [n for n, axis in enumerate(self.input_axes) if isinstance(axis, int)]
        self.broadcast = BroadcastSlots(
            call, [n for n, axis in enumerate(self.axes.slots) if axis is None]
        )
        self.already_warned = already_warned if call.updates else None
        self.length = self.axes.size(length, "length")
        if self.length is None:
            raise AxisError(
                "nnx.scan has nothing to scan over and no length.\n"
                "Fix: give an argument an axis in in_axes, or pass length."
            )
        f = call.f
        call.f = lambda *a, **k: self._hand_on(carry.marked(in_axes, a), f(*a, **k))

    def _hand_on(self, before: list[Any], out: Any) -> Any:
        """Checks the carry that a step returned, and puts a ``Same`` in for each of its objects."""
        broadcast_prefix(self.out_axes, out, "scan", "out_axes")  # raises if it does not fit
        after = carry.marked(self.out_axes, out)
        if len(before) != len(after):
            raise CarryError(
                f"nnx.scan: in_axes marks {len(before)} places with nnx.Carry, and out_axes "
                f"{len(after)}.\nFix: mark the carry in both, and return it, in the form in which "
                "it came in, at the place that out_axes marks."
            )
        if not before:
            return out
        [(path, came)], [(_, goes)] = before, after
        handed = carry.handed_on(self.call, (0, *path), came, goes)
        return jax.tree_util.tree_map(
            lambda mark, part: handed if mark is Carry else part,
            self.out_axes,
            out,
            is_leaf=is_prefix_leaf,
        )

    def run(self) -> Any:
        """Scans, and writes the results out."""
        self.call.after.insert(0, self._end_step)
        out = self.written.settle(self._attempt, self.always)
        return carry.restore(out, [part for _, part in self.carry])

    def _end_step(self, inside: Inside, out: Any) -> None:
        count = self.call.variable_count
        arrays = range(count, len(self.call.slot_values))
        carry.take_places(self.call, inside, self.always.intersection(range(count)))
        carry.take_arrays(self.call, inside, self.always.intersection(arrays))
        carry.refuse_rebuilding(self.call, inside, [path for path, _ in self.carry])
        if self.already_warned is not None:
            self.broadcast.put_back(inside)

    def _attempt(self, carried_set: set[int]) -> Any:
        call, axes = self.call, self.input_axes
        carried = sorted(carried_set)
        moving = carried_set | set(self.scanned)
        fixed = set(range(call.variable_count)) - moving
        xs = [move_to_front(call.inputs[n], axes[n]) for n in self.scanned]
        finished: list[_FinishedStep] = []

        def body(held: Any, x: Any) -> Any:
            run = call.run(*call.fill((carried, held), (self.scanned, x)), fixed)
            self.written.check(run, moving)
            places = _ScanOutput(run, self.out_axes, self.axes)
            leaves = list(zip(run.plain, places.plain, strict=True))
            after = _next_carry(run, carried, held, [x for x, axis in leaves if axis is Carry])
            changed = [n for n in self.scanned if n in run.changed]
            finished.append(_FinishedStep(run, places.plain, places.fresh, changed))
            others = [x for x, axis in leaves if axis is not Carry]
            result = after, ([run.now[n] for n in changed], run.fresh, others)
            run.forget()
            return result

        paths = call.input_paths
        call.argument_names = {
            "held": [paths[n] for n in carried],
            "x": [paths[n] for n in self.scanned],
        }
        step = call.named(body)
        start = _start(call, carried)
        length = None if xs else self.length  # JAX takes an open length from xs alone
        loop = lambda start, xs: jax.lax.scan(step, start, xs, length=length, **self.options)  # noqa: E731
        last, stacked = self.written.run(loop, start, xs)
        if self.already_warned is not None:
            self.broadcast.warn(self.already_warned)
        return self._finish(finished[-1], carried, last, stacked)

    def _finish(self, finished: _FinishedStep, carried: list[int], last: Any, stacked: Any) -> Any:
        run, plain_axes, fresh_axes, changed = finished
        final = {n: x for n, x in zip(carried, last, strict=True) if n in run.changed}
        for number, value in zip(changed, stacked[0], strict=True):
            final[number] = move_from_front(value, self.axes.slots[number])
        fresh = [move_from_front(x, a) for x, a in zip(stacked[1], fresh_axes, strict=True)]
        count = sum(axis is Carry for axis in plain_axes)
        carried_leaves, others = iter(last[len(last) - count :]), iter(stacked[2])
        leaves = [
            next(carried_leaves) if axis is Carry else move_from_front(next(others), axis)
            for axis in plain_axes
        ]
        return run.close(final, fresh, leaves)


class _ScanOutput(OutputAxes):
    """The axis, or Carry, of each leaf of what a step returned."""

    def __init__(self, run: Run, out_axes: Any, axes: ArgumentAxes):
        super().__init__(run, out_axes, axes)
        lost = [run.plain_names()[n] for n, axis in enumerate(self.plain) if axis is None]
        lost += [
            output_place((*place, *path))
            for spec, (place, leaf) in zip(self._specs, self._leaves, strict=True)
            if is_node(leaf)
            for path, found in leaves_by_path(leaf).items()
            if axis_for(spec, path or place, found) is None
        ]
        if lost:
            raise AxisError(
                f"nnx.scan: out_axes=None for {lost[0]} would keep one step's output and lose the "
                "others.\nFix: stack it along an axis, or carry it."
            )
        sown = [n for n in self.attributes if self.fresh[n] is None or self.fresh[n] is Carry]
        if sown and not run.call.updates:
            kept = "broadcast" if self.fresh[min(sown)] is None else "carried"
            raise CarryError(
                f"nnx.scan: {run.fresh_names()[min(sown)]} was sown on an object that is {kept}, "
                "which has no place for a value of each step.\n"
                "Fix: scan over the object, by its entry in in_axes, or leave graph updates on, "
                "which stack what is sown."
            )
        # What a step adds to an object that is carried or broadcast is stacked.
        self.fresh = [0 if axis is None or axis is Carry else axis for axis in self.fresh]


class _LoopCall:
    """One call of ``while_loop`` or ``fori_loop``, which hand one value from step to step."""

    def __init__(self, f: Callable[..., Any], value: Any, api: str, graph: Any, updates: Any):
        self.call = Call(f, (value,), {}, api, graph, updates, named_by=lambda init_val: None)
        self.body = f
        self.written = Written(self.call, [f])
        self.call.after.insert(0, self._end_step)
        self._last: Run | None = None
        self._already_warned: set[str] = set()  # of writes to these slots

    def _end_step(self, inside: Inside, out: Any) -> None:
        call, count = self.call, self.call.variable_count
        if call.api == "fori_loop" or not call.updates:
            carry.take_places(call, inside, range(count))
        carry.take_arrays(call, inside, range(count, len(call.slot_values)))
        carry.refuse_rebuilding(call, inside)

    def settle(self, run: Callable[[list[int], Any], Any]) -> Any:
        """Runs the loop with the slots that its body writes to carried, and writes results out."""
        call = self.call

        def attempt(numbers: set[int]) -> Any:
            carried = [*sorted(numbers), *range(len(call.slot_values), len(call.inputs))]
            call.argument_names = {"held": [call.input_paths[n] for n in carried]}
            with call.naming_arguments():
                start = _start(call, carried)
                last = self.written.run(lambda start: run(carried, start), start)
            assert self._last is not None
            pairs = zip(carried, last, strict=True)
            final = {number: value for number, value in pairs if number in self._last.changed}
            out = self._last.close(final, [], last[len(numbers) :])
            return carry.restore(out, call.opened.tree[0][0])

        return self.written.settle(attempt)

    def step(self, carried: list[int], held: Any, extra: tuple[Any, ...] = ()) -> Any:
        """Runs the body once, on carried values and plain leaves."""
        call = self.call
        call.f = lambda value: carry.handed_on(call, (0, 0), value, self.body(*extra, value))
        fixed = set(range(call.variable_count)) - set(carried)
        run = call.run(*call.fill((carried, held)), fixed)
        if run.structure_change() is not None:
            raise CarryError(
                f"nnx.{self.call.api}: the body changes the structure of its value: "
                f"{run.difference()}.\nFix: change only the values of Variables in the loop; make "
                "other changes before it or after it."
            )
        self.written.check(run, set(carried))
        self._last = run
        after = _next_carry(run, carried, held, run.plain)
        run.forget()
        return after

    def ask(self, cond_fun: Callable[[Any], Any], carried: list[int], held: Any) -> Any:
        """Runs the condition; what it writes is dropped."""
        call = self.call
        call.f = lambda value: value_of(cond_fun(value))
        run = call.run(*call.fill((carried, held)), set(range(call.variable_count)))
        if run.structure_change() is not None:
            raise CarryError(
                f"nnx.while_loop: cond_fun changes the structure of its value: {run.difference()}."
                "\nFix: let cond_fun only read; change objects before the loop or after it."
            )
        new = [
            name
            for name in map(call.slot_name, sorted(run.changed))
            if name not in self._already_warned
        ]
        if new:
            warnings.warn(
                f"nnx.while_loop drops what cond_fun writes to {name_some(new)}: the condition is "
                "asked on copies of the value. Write in body_fun instead.",
                DroppedWriteWarning,
                stacklevel=locate.outer_level(),
            )
            self._already_warned.update(new)
        return run.out


def _start(call: Call, carried: list[int]) -> list[Any]:
    """What is carried into the first step, as arrays."""
    return jax.tree_util.tree_map(jnp.asarray, [call.inputs[n] for n in carried])


def _next_carry(run: Run, carried: list[int], held: list[Any], leaves: list[Any]) -> list[Any]:
    """What is carried after a step, slots and plain ``leaves``; raises if its type changed."""
    call = run.call
    after = [*(run.now[n] for n in carried if n < len(call.slot_values)), *leaves]
    for number, old, new in zip(carried, held, after, strict=True):
        carry.check_same_type(old, new, call.where(call.input_paths[number]), call.api)
    return after
