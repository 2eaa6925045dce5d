"""Loops over objects: scan, while_loop, fori_loop.

A loop must say beforehand what it carries. Variables that are merely read should not be carried, or
every step would keep a copy of the weights; which ones are written is known only after tracing. So
a loop is first traced carrying what must be carried, and once more if the body turns out to write
to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import AxisError, CarryError, path_string
from linnet.nnx.kinds import key_name
from linnet.nnx.transforms import partition
from linnet.nnx.transforms.axes import Axes, Carry, broadcast_prefix, move_from_front, move_to_front
from linnet.nnx.transforms.lift import is_node
from linnet.nnx.transforms.mapping import OutputAxes
from linnet.nnx.transforms.run import Call, transform
from linnet.nnx.variablelib import type_text


class _Grew(Exception):
    """Internal: the body writes to Variables that were not carried."""

    def __init__(self, numbers: set[int]):
        self.numbers = numbers


def settle(attempt: Callable[[set[int]], Any], carried: set[int]) -> Any:
    """Traces a loop, carrying more Variables each time the body turns out to write to them."""
    while True:
        try:
            return attempt(carried)
        except _Grew as grew:
            carried = carried | grew.numbers


def check_written(call: Call, inside: Any, allowed: set[int]) -> None:
    """Starts over if the body wrote to Variables that are not among those carried."""
    missing = set(inside.changed()) - allowed
    if missing:
        raise _Grew(missing)


def check_same_type(before: Any, after: Any, where: str, api: str) -> None:
    """Raises if what a loop carries has another structure, shape or dtype after a step."""
    old, old_tree = jax.tree_util.tree_flatten_with_path(before)
    new, new_tree = jax.tree_util.tree_flatten(after)
    if old_tree != new_tree:
        raise CarryError(
            f"nnx.{api}: the carry {where} changes its structure from {old_tree} to {new_tree}.\n"
            "Fix: return the carry in the form in which it came in."
        )
    for (path, a), b in zip(old, new, strict=True):
        kinds = [(jnp.shape(x), jnp.result_type(x)) for x in (a, b)]
        weak = not hasattr(a, "dtype") or getattr(a, "weak_type", False)
        same = kinds[0] == kinds[1] or (weak and kinds[0][0] == kinds[1][0])
        if not same:
            place = where + path_string(key_name(key) for key in path)
            raise CarryError(
                f"nnx.{api}: the carry {place} changes from {_text(a)} to {_text(b)}.\n"
                "Fix: keep shape and dtype, for example with .astype(...)."
            )


def _text(x: Any) -> str:
    return type_text(x if hasattr(x, "dtype") else jnp.asarray(x))


def check_variables(call: Call, inside: Any, numbers: Any) -> None:
    """The same for the Variables that are carried."""
    for number in numbers:
        check_same_type(
            inside.values[number], inside.raw(number), call.opened.path_of(number), call.api
        )


class _Scan:
    """One call of ``nnx.scan``: who is carried, who is scanned, and what comes out."""

    def __init__(self, call: Call, in_axes: Any, out_axes: Any, options: dict[str, Any]):
        self.call = call
        self.opened = call.opened
        self.axes = Axes(call.opened, in_axes, "scan")
        self.out_axes = out_axes
        self.options = options
        variables = self.axes.variables
        self.always = {n for n, axis in enumerate(variables) if axis is Carry}
        self.scanned = [n for n, axis in enumerate(variables) if isinstance(axis, int)]
        self.plain_carried = [n for n, axis in enumerate(self.axes.plain) if axis is Carry]
        self.has_carry = any(spec is Carry for spec in self.axes.specs)
        self.length = self._length()

    def _length(self) -> int:
        size = self.axes.size(None)
        length = self.options["length"]
        if size is None and length is None:
            raise AxisError(
                "nnx.scan has nothing to scan over and no length.\n"
                "Fix: give an argument an axis in in_axes, or pass length."
            )
        if size is not None and length is not None and size != length:
            raise AxisError(f"nnx.scan: length={length}, but the scanned axes have size {size}.")
        return int(length if size is None else size)  # pyright: ignore[reportArgumentType]

    def run(self) -> Any:
        """Scans, and writes the result out."""
        return settle(self._attempt, self.always)

    def _attempt(self, carried_set: set[int]) -> Any:
        opened, axes, call = self.opened, self.axes, self.call
        carried = sorted(carried_set)
        values = opened.values
        xs = (
            [move_to_front(values[n], axes.variables[n]) for n in self.scanned],
            [move_to_front(x, a) if isinstance(a, int) else None
             for x, a in zip(opened.arrays, axes.arrays, strict=True)],
            [move_to_front(x, a) if isinstance(a, int) else None
             for x, a in zip(opened.plain, axes.plain, strict=True)],
        )  # fmt: skip
        start = (
            [values[n] for n in carried],
            [_as_arrays(opened.plain[n]) for n in self.plain_carried],
        )
        found: list[Any] = []

        def body(carry: Any, x: Any) -> Any:
            inner = list(values)
            for number, value in zip(carried, carry[0], strict=True):
                inner[number] = value
            for number, value in zip(self.scanned, x[0], strict=True):
                inner[number] = value
            arrays = [a if b is None else b for a, b in zip(opened.arrays, x[1], strict=True)]
            plain = [a if b is None else b for a, b in zip(opened.plain, x[2], strict=True)]
            for number, value in zip(self.plain_carried, carry[1], strict=True):
                plain[number] = value
            moving = carried_set | set(self.scanned)
            same = {n for n in range(len(inner)) if n not in moving}
            inside, news, leaves, out = call.run(inner, arrays, plain, same)
            check_written(call, inside, moving)
            check_variables(call, inside, carried)
            specs = _OutSpecs(self, out)
            next_plain, rest = self._divide(specs, leaves, carry[1])
            written = [n for n in self.scanned if n in inside.changed()]
            found.append((OutputAxes(call, out, specs.axes, len(news)), specs, written))
            ys = ([inside.raw(n) for n in written], news, rest)
            return ([inside.raw(n) for n in carried], next_plain), ys

        options = {k: self.options[k] for k in ("reverse", "unroll", "_split_transpose")}
        (last, last_plain), (written, news, rest) = jax.lax.scan(
            body, start, xs, length=self.length, **options
        )
        places, specs, numbers = found[-1]
        return self._finish(carried, last, last_plain, numbers, written, news, rest, places, specs)

    def _divide(self, specs: _OutSpecs, leaves: list[Any], before: list[Any]) -> Any:
        """The carried leaves of the output, checked, and the others."""
        carried = [x for x, axis in zip(leaves, specs.plain, strict=True) if axis is Carry]
        rest = [x for x, axis in zip(leaves, specs.plain, strict=True) if axis is not Carry]
        if len(carried) != len(before):
            raise CarryError(
                f"nnx.scan: the carry goes in with {len(before)} arrays and comes out with "
                f"{len(carried)}.\nFix: return the carry, in the form in which it came in, at the "
                "place that out_axes marks with nnx.Carry."
            )
        for old, new, number in zip(before, carried, self.plain_carried, strict=True):
            where = path_string(self.axes.plain_paths[number])
            check_same_type(old, new, where, "scan")
        return carried, rest

    def _finish(
        self,
        carried: list[int],
        last: list[Any],
        last_plain: list[Any],
        numbers: list[int],
        written: list[Any],
        news: list[Any],
        rest: list[Any],
        places: OutputAxes,
        specs: _OutSpecs,
    ) -> Any:
        values = dict(zip(carried, last, strict=True))
        for number, value in zip(numbers, written, strict=True):
            values[number] = move_from_front(value, self.axes.variables[number])
        finals, others = iter(last_plain), iter(rest)
        leaves = [
            next(finals) if axis is Carry else move_from_front(next(others), axis)
            for axis in specs.plain
        ]
        news = [move_from_front(x, a) for x, a in zip(news, places.news, strict=True)]
        effects = self.call.effects
        assert effects is not None
        return self.call.close([values[n] for n in effects.changed], news, leaves)


class _OutSpecs:
    """The axis, or Carry, of each leaf of what the body returned."""

    def __init__(self, scan: _Scan, out: Any):
        specs = broadcast_prefix(scan.out_axes, out, "scan", "out_axes")
        leaves = jax.tree_util.tree_leaves(out, is_leaf=is_node)
        if None in specs:
            raise AxisError(
                "nnx.scan: out_axes=None would keep one step's output and lose the others.\n"
                "Fix: stack it along an axis, or carry it."
            )
        self.plain = [s for s, leaf in zip(specs, leaves, strict=True) if not is_node(leaf)]
        structure = jax.tree_util.tree_structure(out, is_leaf=is_node)
        self.axes = structure.unflatten([0 if spec is Carry else spec for spec in specs])


def _as_arrays(value: Any) -> Any:
    return jax.tree_util.tree_map(jnp.asarray, value)


def _lifted_scan(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    partition_name: str | None,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    if kwargs:
        raise TypeError(
            f"nnx.scan takes positional arguments only, but got {sorted(kwargs)}.\n"
            "Fix: pass them by position, with an entry each in in_axes."
        )
    call = Call(f, args, kwargs, "scan", graph, graph_updates)
    scan = _Scan(call, in_axes, out_axes, options)
    with partition.removed(call, scan.axes.variables, partition_name):
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
        same in every step, or ``StateAxes`` of these.
      out_axes: ``nnx.Carry`` where the carry is returned, an axis to stack the rest along.
      transform_metadata: ``{nnx.PARTITION_NAME: name}`` names the axis in the sharding metadata.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.

    Returns:
      The function. Variables that are scanned are updated along their axis; all others that the
      function writes to go from step to step.

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
    """
    options = {
        "length": length,
        "reverse": reverse,
        "unroll": unroll,
        "_split_transpose": _split_transpose,
    }
    return transform(
        "scan",
        _lifted_scan,
        f,
        in_axes=in_axes,
        out_axes=out_axes,
        options=options,
        partition_name=partition.name_in(transform_metadata),
        graph=graph,
        graph_updates=graph_updates,
    )


class _Loop:
    """What ``while_loop`` and ``fori_loop`` share: one value that goes round."""

    def __init__(self, f: Callable[..., Any], value: Any, api: str, graph: Any, updates: Any):
        self.call = Call(f, (value,), {}, api, graph, updates)
        self.api = api
        self.start = [_as_arrays(x) for x in self.call.opened.plain]

    def enter(self, carried: list[int], carry: Any) -> tuple[list[Any], list[Any]]:
        """The values and plain leaves inside, from what goes round."""
        values = list(self.call.opened.values)
        for number, value in zip(carried, carry[0], strict=True):
            values[number] = value
        return values, carry[1]

    def step(self, carried: list[int], carry: Any, extra: tuple[Any, ...] = ()) -> Any:
        """One round of the body."""
        call = self.call
        values, plain = self.enter(carried, carry)
        body = call.f
        call.f = lambda value: body(*extra, value)
        try:
            inside, _, leaves, out = call.run(values, call.opened.arrays, plain)
        finally:
            call.f = body
        check_written(call, inside, set(carried))
        check_variables(call, inside, carried)
        _check_same_objects(inside, out, self.api)
        check_same_type(carry[1], leaves, "", self.api)
        return [inside.raw(n) for n in carried], leaves

    def finish(self, carried: list[int], last: Any) -> Any:
        """Writes the last round out."""
        effects = self.call.effects
        assert effects is not None
        values = dict(zip(carried, last[0], strict=True))
        return self.call.close([values[n] for n in effects.changed], [], last[1])


def _check_same_objects(inside: Any, out: Any, api: str) -> None:
    """The objects that go round must be the same ones in the same places."""
    before, old_tree = jax.tree_util.tree_flatten(inside.tree[0][0], is_leaf=is_node)
    after, new_tree = jax.tree_util.tree_flatten(out, is_leaf=is_node)
    if old_tree != new_tree:
        raise CarryError(
            f"nnx.{api}: the body changes the structure of its value from {old_tree} to "
            f"{new_tree}.\nFix: return the value in the form in which it came in."
        )
    for old, new in zip(before, after, strict=True):
        if is_node(old) and old is not new:
            raise CarryError(
                f"nnx.{api}: the body returns another {type(new).__name__} than the "
                f"{type(old).__name__} that came in.\n"
                "Fix: change the object in place and return it."
            )


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.lax.while_loop`` with objects in the value.

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

        def cond(carry: Any) -> Any:
            values, plain = loop.enter(carried, carry)
            opened = loop.call.opened
            inside = opened.structure.enter(values, opened.arrays, plain)
            answer = cond_fun(inside.tree[0][0])
            if set(inside.changed()) - _refs(inside):
                names = ", ".join(opened.path_of(n) for n in inside.changed())
                raise ValueError(
                    f"nnx.while_loop: cond_fun writes to {names}, and the write would be lost.\n"
                    "Fix: write in body_fun."
                )
            return answer

        start = ([loop.call.opened.values[n] for n in carried], loop.start)
        last = jax.lax.while_loop(cond, lambda carry: loop.step(carried, carry), start)
        return loop.finish(carried, last)

    return settle(attempt, set())


def _refs(inside: Any) -> set[int]:
    return {n for n, v in enumerate(inside.variables) if v._metadata.stored_as_ref}


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
    """``jax.lax.fori_loop`` with objects in the value.

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
        start = ([loop.call.opened.values[n] for n in carried], loop.start)
        last = jax.lax.fori_loop(
            lower, upper, lambda i, carry: loop.step(carried, carry, (i,)), start, unroll=unroll
        )
        return loop.finish(carried, last)

    return settle(attempt, set())
