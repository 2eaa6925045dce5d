"""``tabulate``: a table of a model's parts, what goes in and out of them, what they hold and cost.

The call is traced on shapes alone, on a copy whose classes record every call. So nothing is
computed, the model is not changed, and it may be abstract.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core

from linnet.errors import SummaryError, name_some, path_string
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.split_merge import merge
from linnet.nnx.graphlib.traverse import flat_variables, iter_graph
from linnet.nnx.modules.capture import class_around, own_methods
from linnet.nnx.modules.containers import Dict, List
from linnet.nnx.modules.freezing import frozen, trainable
from linnet.nnx.pytreelib.kinds import Path, is_node
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.printing import count_variables
from linnet.nnx.rnglib.streams import Rngs, RngStream
from linnet.nnx.statelib import to_pure_dict
from linnet.nnx.transforms.run import Call
from linnet.nnx.variablelib.variable import Param, Variable
from linnet.tables import (
    abstract,
    array_size,
    count_flops,
    describe,
    draw,
    is_inexact,
    joined_lines,
    make_console,
    number_text,
    short_type,
    size_text,
    with_gradients,
)
from linnet.typing import has_shape_dtype

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_COLUMNS = tuple("path type inputs outputs flops vjp_flops kinds variables trains".split())
_OTHER = "other"

# The static attribute that holds a part's path, so that copies inside transforms have it too. The
# number of the run is in it: a function compiled in one run would not be traced in the next.
_PATH = "_summary_path"
_run_ids = itertools.count()
_recorder: ContextVar[Any] = ContextVar("recorder", default=None)


@dataclasses.dataclass
class CallInfo:
    """One call of a part of a model; a row of the summary.

    Args:
      call_order: its number, in the order in which the calls began.
      object_id: identifies the part.
      type: its class.
      path: where it is in the model; a method other than ``__call__`` is the last step.
      inputs: the arguments by position and those by name, shapes in place of arrays.
      outputs: what it returned, likewise.
      flops: floating point operations forward, if asked for.
      vjp_flops: those forward and backward, if asked for.
    """

    call_order: int
    object_id: int
    type: type
    path: Path
    inputs: tuple[Any, Any] = ((), {})
    outputs: Any = None
    flops: int | None = None
    vjp_flops: int | None = None
    place: Path = ()  # the path of the part itself

    @property
    def inputs_repr(self) -> str:
        """The arguments as text, one a line."""
        return "\n".join(line for part in self.inputs if part for line in describe(part))


def filter_rng_streams(row: CallInfo) -> bool:
    """Leaves out the rows of random streams."""
    return not issubclass(row.type, (Rngs, RngStream))


def tabulate(
    obj: Any,
    *input_args: Any,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: Callable[[CallInfo], bool] = filter_rng_streams,
    columns: Sequence[str] | None = None,
    table_kwargs: Mapping[str, Any] = _NO_OPTIONS,
    column_kwargs: Mapping[str, Any] = _NO_OPTIONS,
    console_kwargs: Mapping[str, Any] = _NO_OPTIONS,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **input_kwargs: Any,
) -> str:
    """A table of a model's parts that a call runs, in the order in which they run.

    Nothing is computed and the model is not changed. It may be abstract (``nnx.eval_shape``), and
    so may its inputs (``jax.ShapeDtypeStruct``).

    Args:
      obj: the model.
      *input_args: what it is called with.
      depth: how many levels of parts to show; 0 is the model alone. By default all.
      method: the method that is called.
      row_filter: which rows to show.
      columns: which columns to show, in order, of ``path``, ``type``, ``inputs``, ``outputs``,
        ``flops`` (forward), ``vjp_flops`` (forward and backward), ``kinds`` (one column for each
        type of Variable) or the name of a type, ``variables`` and ``trains``. Operations are
        counted if a column asks for them.
      table_kwargs: passed on to ``rich.table.Table``.
      column_kwargs: passed on to ``rich.table.Table.add_column``.
      console_kwargs: passed on to ``rich.console.Console``, such as ``{"width": 80}``.
      compute_flops: count operations forward, as XLA does: the body of a loop counts once.
      compute_vjp_flops: count operations forward and backward, with respect to what trains and to
        the inputs.
      **input_kwargs: more of what it is called with.

    Returns:
      The text of the table, in colour if it would be printed to a terminal.

    Raises:
      SummaryError: ``obj`` has no such method, or there is no such column.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.relu)
      >>> nnx.freeze(model, "layers.0.bias")
      >>> print(nnx.tabulate(model, jnp.ones((2, 8)), console_kwargs={"width": 90}))
                                         Sequential Summary
      ╭───────────┬────────────┬──────────┬──────────┬────────────┬──────────────────┬────────╮
      │ path      │ type       │ inputs   │ outputs  │ Param      │ variables        │ trains │
      ├───────────┼────────────┼──────────┼──────────┼────────────┼──────────────────┼────────┤
      │           │ Sequential │ f32[2,8] │ f32[2,4] │ 36 (144 B) │                  │ part   │
      │ layers[0] │ Linear     │ f32[2,8] │ f32[2,4] │ 36 (144 B) │ bias: f32[4]     │ part   │
      │           │            │          │          │            │ kernel: f32[8,4] │        │
      ├───────────┼────────────┼──────────┼──────────┼────────────┼──────────────────┼────────┤
      │ total     │            │          │          │ 36 (144 B) │                  │ 88.9 % │
      ╰───────────┴────────────┴──────────┴──────────┴────────────┴──────────────────┴────────╯
                                    Total Parameters: 36 (144 B)
    """
    _check_method(obj, method)
    parts = {path: part for path, part in iter_graph(obj, graph=True) if _is_part(part)}
    types = [name for name, (size, _) in count_variables(obj).items() if size]
    names = _column_names(columns, types, compute_flops, compute_vjp_flops)
    recorder = CallRecorder("flops" in names, "vjp_flops" in names)
    calls = recorder.run(obj, method, input_args, input_kwargs)
    rows = [
        call
        for call in calls
        if row_filter(call) and (depth is None or _depth(call.place, parts) <= depth)
    ]
    console = make_console(console_kwargs)
    make = functools.partial(_Table, obj, parts, rows, names)
    table, remark = _fitting(make, console.width, columns is None)
    remarks = [_parameter_total(obj), remark, _not_called(parts, calls)]
    title = f"{type(obj).__name__} Summary"
    cells, total = table.cells, table.total
    shown = list(filter(None, remarks))
    return draw(
        title,
        table.names,
        cells,
        total,
        styles=_STYLES,
        remarks=shown,
        table_kwargs=table_kwargs,
        column_kwargs=column_kwargs,
        console=console,
    )


def _parameter_total(obj: Any) -> str:
    """How much the Variables of all types hold, which Flax's tables end with."""
    counts = count_variables(obj).values()
    return f"Total Parameters: {size_text(sum(c[0] for c in counts), sum(c[1] for c in counts))}"


def _check_method(obj: Any, method: str) -> None:
    if not isinstance(obj, Pytree):
        raise SummaryError(
            f"nnx.tabulate takes a model and what to call it with, but got {type(obj).__name__}.\n"
            "Fix: nnx.tabulate(model, x)."
        )
    if not callable(getattr(obj, method, None)):
        known = sorted(own_methods(type(obj)))
        raise SummaryError(
            f"nnx.tabulate: {type(obj).__name__} has no method {method!r}; it has "
            f"{', '.join(known) or 'none of its own'}.\nFix: nnx.tabulate(model, x, method=...)."
        )


def _column_names(
    columns: Sequence[str] | None, types: list[str], flops: bool, vjp_flops: bool
) -> list[str]:
    """The columns to show; in the place of ``kinds``, the types of Variables."""
    asked = {"flops": flops, "vjp_flops": vjp_flops}
    wanted = columns or [name for name in _COLUMNS if asked.get(name, True)]
    unknown = [name for name in wanted if name not in (*_COLUMNS, *types)]
    if unknown:
        raise SummaryError(
            f"nnx.tabulate has no column {', '.join(map(repr, unknown))}.\n"
            f"Fix: choose from {', '.join((*_COLUMNS, *types))}."
        )
    return [name for want in wanted for name in (types if want == "kinds" else [want])]


def _depth(path: Path, parts: dict[Path, Any]) -> int:
    """The number of parts along a path, its own included; containers do not count."""
    return sum(path[:end] in parts for end in range(1, len(path) + 1))


def _not_called(parts: dict[Path, Any], calls: list[CallInfo]) -> str:
    """Names the parts that hold Variables and were not called, nor any part inside of them."""
    places = [call.place for call in calls]
    found: list[Path] = []
    for path in sorted(parts, key=len):
        inside = any(path[: len(other)] == other for other in found)
        touched = any(place[: len(path)] == path for place in places)
        streams = isinstance(parts[path], (Rngs, RngStream))
        if not (inside or touched or streams) and count_variables(parts[path]):
            found.append(path)
    return f"not called: {name_some(map(_path_text, found), 3)}" if found else ""


def _path_text(path: Path) -> str:
    return path_string(path).removeprefix(".")


# ---- recording the calls ------------------------------------------------------------------------


class _AbstractTree:
    """A pytree whose arrays and objects are replaced by shapes, to be filled with values later."""

    def __init__(self, tree: Any):
        leaves, self.treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_node)
        self.parts: list[tuple[str, Any]] = []
        self.avals: list[Any] = []
        for leaf in leaves:
            if is_node(leaf):
                graphdef, mapping = flatten_node(leaf, True, "tabulate")
                self.parts.append(("node", graphdef))
                self.avals.append(jax.tree_util.tree_map(abstract, to_pure_dict(mapping)))
            elif has_shape_dtype(leaf):
                self.parts.append(("array", None))
                self.avals.append(abstract(leaf))
            else:
                self.parts.append(("other", leaf))

    def fill(self, values: list[Any]) -> Any:
        """Returns the pytree with these values for the arrays."""
        given = iter(values)
        leaves = [
            part if what == "other" else merge(part, next(given)) if what == "node" else next(given)
            for what, part in self.parts
        ]
        return jax.tree_util.tree_unflatten(self.treedef, leaves)


class CallRecorder:
    """Records the calls of one run, with operation counts forward and backward if asked for."""

    def __init__(self, flops: bool, vjp_flops: bool):
        self.flops, self.vjp_flops = flops, vjp_flops
        self.run_id = next(_run_ids)
        self.calls: dict[Path, CallInfo] = {}
        self._running: list[Path] = []
        self._has_failed = False

    def run(self, obj: Any, method: str, args: Any, kwargs: Any) -> list[CallInfo]:
        """Calls a method of a copy of an object on shapes, and returns the recorded calls."""
        shapes = _AbstractTree((obj, args, kwargs))

        def traced(values: Any) -> None:
            copy, inner_args, inner_kwargs = shapes.fill(values)
            self._mark(copy)
            token = _recorder.set(self)
            try:
                getattr(copy, method)(*inner_args, **inner_kwargs)
            finally:
                _recorder.reset(token)

        jax.eval_shape(traced, shapes.avals)
        identity = {path: id(part) for path, part in iter_graph(obj, graph=True)}
        for call in self.calls.values():
            call.object_id = identity.get(call.place, 0)
        return list(self.calls.values())

    def _mark(self, root: Any) -> None:
        """Gives every part of a model its path and a class that records its calls."""
        parts = [(path, part) for path, part in iter_graph(root, graph=True) if _is_part(part)]
        for path, part in parts:
            object.__setattr__(part, _PATH, (self.run_id, path))
            methods = tuple(own_methods(type(part)).items())
            object.__setattr__(part, "__class__", _recording_class(type(part), methods))

    def call(self, part: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a method and records it.

        Of each part this is the first ``__call__``, or else the first method; methods that the part
        calls on itself are left out.
        """
        run, place = part.__dict__.get(_PATH, (None, ()))
        path = place if name == "__call__" else (*place, name)
        if run != self.run_id or not self._is_new(place, path):
            return method(part, *args, **kwargs)
        known = self.calls.get(place)
        order = known.call_order if known else len(self.calls)
        call = self.calls[place] = CallInfo(order, 0, _own_class(part), path, place=place)
        call.inputs = _shapes_of((args, kwargs))
        self._running.append(place)
        try:
            if self.flops or self.vjp_flops:
                out = self._counted(call, method, part, args, kwargs)
            else:
                out = method(part, *args, **kwargs)
        finally:
            self._running.remove(place)
        call.outputs = _shapes_of(out)
        return out

    def _is_new(self, place: Path, path: Path) -> bool:
        known = self.calls.get(place)
        better = known is None or (known.path != place and path == place)
        return better and place not in self._running

    def _counted(self, call: CallInfo, method: Any, part: Any, args: Any, kwargs: Any) -> Any:
        """Runs a method and counts its operations, with one trace for both.

        A call that writes to what it was not given, such as an object in a closure, cannot be
        traced alone: it runs as it is, and has no counts.
        """
        before = dict(self.calls)
        try:
            traced = _TracedCall(method, (part, args, kwargs))
            if self.flops:
                call.flops = count_flops(traced.outputs, traced.avals)
            if self.vjp_flops:
                call.vjp_flops = count_flops(traced.gradients, traced.avals)
            return traced.run()
        except Exception:
            if self._has_failed:  # without counting as well
                raise
        self.calls = before
        call.flops = call.vjp_flops = None
        try:
            return method(part, *args, **kwargs)
        except Exception:
            self._has_failed = True
            raise


class _TracedCall:
    """A call of a method that was traced on its own, inside another trace: its operations can be
    counted, and it runs without another call of the method."""

    _out_treedef: Any
    _out_static: list[Any]

    def __init__(self, method: Callable[..., Any], given: tuple[Any, Any, Any]):
        leaves, treedef = jax.tree_util.tree_flatten(given, is_leaf=is_node)
        traced = [n for n, leaf in enumerate(leaves) if _is_dynamic(leaf)]

        def body(*values: Any) -> Any:
            for number, value in zip(traced, values, strict=True):
                leaves[number] = value
            part, args, kwargs = jax.tree_util.tree_unflatten(treedef, leaves)
            out = method(part, *args, **kwargs)
            found, self._out_treedef = jax.tree_util.tree_flatten(out, is_leaf=is_node)
            self._out_static = [None if _is_dynamic(leaf) else leaf for leaf in found]
            return [leaf if _is_dynamic(leaf) else None for leaf in found]

        self._call = Call(body, tuple(leaves[n] for n in traced), {}, "tabulate", True, True)
        self._values = (self._call.slot_values, self._call.plain)
        self._jitted = jax.jit(self._call.outcome)
        trace = self._jitted.trace(*self._values)
        self._jaxpr = trace.jaxpr
        self._out_count = len(jax.tree_util.tree_leaves(trace.out_info.plain))
        arrays = jax.tree_util.tree_leaves(self._values)
        self.avals = [abstract(x) for x in (*self._jaxpr.consts, *arrays)]

    def run(self) -> Any:
        """Makes the call part of the trace around it."""
        dynamic = self._call.close(self._jitted(*self._values))
        pairs = zip(dynamic, self._out_static, strict=True)
        leaves = [static if leaf is None else leaf for leaf, static in pairs]
        return jax.tree_util.tree_unflatten(self._out_treedef, leaves)

    def outputs(self, arrays: list[Any]) -> list[Any]:
        """The arrays that the call returns, as a function of all that it reads."""
        count = len(self._jaxpr.consts)
        closed = jax.extend.core.ClosedJaxpr(self._jaxpr.jaxpr, arrays[:count])
        found = jax.extend.core.jaxpr_as_fun(closed)(*arrays[count:])
        return found[len(found) - self._out_count :]  # those that it changes come first

    def gradients(self, arrays: list[Any]) -> Any:
        """The outputs, and the gradients of all that trains and of the inputs."""
        flags = [flag for group in self._trained() for flag in group]
        flags = [*(False for _ in self._jaxpr.consts), *flags]
        chosen = [n for n, flag in enumerate(flags) if flag and is_inexact(arrays[n])]
        return with_gradients(self.outputs, arrays, chosen)

    def _trained(self) -> Iterator[list[bool]]:
        """For the arrays of each slot and plain leaf, whether a training step differentiates."""
        values, plain = self._values
        opened = self._call.opened
        for path, leaf, value in zip(opened.slot_paths, opened.slot_leaves, values, strict=True):
            yield [trainable(path, leaf)] * len(jax.tree_util.tree_leaves(value))
        yield [True] * len(jax.tree_util.tree_leaves(plain))


def _is_dynamic(leaf: Any) -> bool:
    """Whether a compiled function takes or returns this; other leaves stay as they are."""
    return is_node(leaf) or isinstance(leaf, jax.Array)


def _is_part(x: Any) -> bool:
    """Whether something may have a row: an object of a model that is no container."""
    return isinstance(x, Pytree) and type(x) not in (List, Dict)


@functools.lru_cache(maxsize=256)
def _recording_class(cls: type[Pytree], methods: Any) -> type[Pytree]:
    """A subclass of ``cls`` whose ``methods``, those it has now, record their calls."""

    def recording(part: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recorder = _recorder.get()
        if recorder is None:
            return method(part, *args, **kwargs)
        return recorder.call(part, name, method, args, kwargs)

    return class_around(cls, recording, methods, __qualname__=cls.__qualname__, _recorded=cls)


def _own_class(part: Any) -> type:
    return getattr(type(part), "_recorded", type(part))


def _shapes_of(tree: Any) -> Any:
    """A pytree with shapes in place of arrays and class names in place of objects."""

    def shape(x: Any) -> Any:
        return _own_class(x).__name__ if is_node(x) else abstract(x)

    return jax.tree_util.tree_map(shape, tree, is_leaf=is_node)


# ---- the table ----------------------------------------------------------------------------------


class _Table:
    """The rows of a summary as cells of text.

    ``narrow`` says how much to leave out: 1 leaves out the names of Variables, 2 joins the types
    that are no parameters, 3 leaves out bytes, 4 the inputs too, 5 all that is no parameter.
    """

    def __init__(
        self, obj: Any, parts: dict[Path, Any], rows: list[CallInfo], names: list[str], narrow: int
    ):
        self.obj, self.parts, self.rows, self.narrow = obj, parts, rows, narrow
        self.counts = count_variables(obj)
        dropped = ["variables"] * (narrow >= 1) + ["inputs"] * (narrow >= 4)
        self.names = [n for n in names if n not in dropped]
        if narrow >= 2 and any(name in self.counts and name != "Param" for name in names):
            kept = [n for n in self.names if n not in self.counts or n == "Param"]
            at = kept.index("trains") if "trains" in kept else len(kept)
            self.names = [*kept[:at], *([_OTHER] if narrow < 5 else []), *kept[at:]]
        self.cells = [[self._cell(name, row) for name in self.names] for row in rows]
        self.total = ["total", *map(self._total, self.names[1:])]

    @property
    def width(self) -> int:
        """The width without folded lines."""
        lines = [self.names, *self.cells, self.total]
        widths = (
            max(len(x) for cell in c for x in cell.split("\n")) for c in zip(*lines, strict=True)
        )
        return sum(width + 3 for width in widths) + 1

    def _cell(self, name: str, row: CallInfo) -> str:
        part = self.parts[row.place]
        if name in self.counts or name == _OTHER:
            return self._size(count_variables(part), name)
        texts: dict[str, Callable[[], str]] = {
            "path": lambda: self._indented(row),
            "type": lambda: row.type.__name__,
            "inputs": lambda: joined_lines(row.inputs_repr.splitlines()),
            "outputs": lambda: joined_lines(describe(row.outputs)),
            "flops": lambda: number_text(row.flops),
            "vjp_flops": lambda: number_text(row.vjp_flops),
            "variables": lambda: joined_lines(_own_variables(part), most=99),
            "trains": lambda: _trains(part),
        }
        return texts[name]()

    def _size(self, counts: Any, name: str) -> str:
        chosen = [
            n for n in counts if (n not in ("Param", *self.names) if name == _OTHER else n == name)
        ]
        size, nbytes = (sum(counts[n][part] for n in chosen) for part in (0, 1))
        if not size:
            return ""
        return f"{size:,}" if self.narrow >= 3 else size_text(size, nbytes)

    def _indented(self, row: CallInfo) -> str:
        """The path relative to the nearest shown part above, indented by the number of those."""
        shown = {other.place for other in self.rows}
        above = [end for end in range(len(row.place)) if row.place[:end] in shown]
        text = _path_text(row.path[above[-1] if above else 0 :])
        text += "()" if row.path != row.place else ""
        return "  " * max(len(above) - 1, 0) + text

    def _total(self, name: str) -> str:
        if name == "trains":
            sizes = _parameters(self.obj)
            trained = sum(size for trains, size in sizes if trains)
            return f"{100 * trained / max(sum(size for _, size in sizes), 1):.3g} %"
        return self._size(self.counts, name) if name in self.counts or name == _OTHER else ""


_LEFT_OUT = (
    "",
    "names of Variables are left out",
    "names of Variables are left out, other kinds are joined",
    "names and bytes are left out",
    "names, inputs and bytes are left out",
    "names, inputs, bytes and other kinds are left out",
)


def _fitting(make: Callable[[int], _Table], width: int, free: bool) -> tuple[_Table, str]:
    """Returns the widest table that fits, and a remark if something was left out."""
    full = table = make(0)
    for narrow in range(1, len(_LEFT_OUT) if free else 1):
        if table.width <= width:
            break
        table = make(narrow)
    if table is full:
        return full, ""
    return table, f"{_LEFT_OUT[table.narrow]} to fit {width} columns; all of it takes {full.width}"


_STYLES: dict[str, dict[str, Any]] = {
    "path": {"no_wrap": True, "overflow": "ellipsis", "style": "bold"},
    "type": {"overflow": "fold", "style": "cyan"},
    "inputs": {"overflow": "fold", "style": "dim"},
    "outputs": {"overflow": "fold", "style": "dim"},
    "flops": {"justify": "right", "no_wrap": True},
    "vjp_flops": {"justify": "right", "no_wrap": True},
    "variables": {"overflow": "fold", "style": "dim"},
    "trains": {"no_wrap": True, "style": "green"},
}


def _own_variables(part: Any) -> list[str]:
    items = sorted(part._pytree_items().items(), key=lambda item: str(item[0]))
    return [
        f"{name}: {short_type(value.raw_value)}"
        for name, value in items
        if isinstance(value, Variable) and hasattr(value.raw_value, "dtype")
    ]


def _parameters(part: Any) -> list[tuple[bool, int]]:
    """For each parameter whether it trains, and its size."""
    found = flat_variables(part, True, "tabulate")
    return [
        (not frozen(path, variable), array_size(variable.raw_value)[0])
        for path, variable in found
        if isinstance(variable, Param)
    ]


def _trains(part: Any) -> str:
    """Whether the parameters of a part train: all, none or a part of them."""
    states = {trains for trains, _ in _parameters(part)}
    if not states:
        return ""
    return "part" if len(states) == 2 else "yes" if states.pop() else "frozen"
