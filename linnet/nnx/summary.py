"""A table of a model: its parts, what goes in and out, and what they hold and cost."""

from __future__ import annotations

import functools
import io
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from linnet.errors import SummaryError, path_string
from linnet.nnx.call_records import CallInfo as CallInfo
from linnet.nnx.call_records import Records, describe, is_part, short_type
from linnet.nnx.graphlib.traverse import flat_variables, iter_graph
from linnet.nnx.modules.capture import own_methods
from linnet.nnx.modules.freezing import frozen
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.printing import array_size, count_variables, size_text
from linnet.nnx.rnglib.streams import Rngs, RngStream
from linnet.nnx.variablelib.variable import Param, Variable

Path = tuple[Any, ...]

_NONE: Mapping[str, Any] = MappingProxyType({})
_COLUMNS = (
    "path",
    "type",
    "inputs",
    "outputs",
    "flops",
    "vjp_flops",
    "kinds",
    "variables",
    "trains",
)
_OTHER = "other"
_MOST_LINES = 4
_WIDTH = 120  # where there is no terminal


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
    table_kwargs: Mapping[str, Any] = _NONE,
    column_kwargs: Mapping[str, Any] = _NONE,
    console_kwargs: Mapping[str, Any] = _NONE,
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
        kind of Variable) or the name of a kind, ``variables`` and ``trains``. Operations are
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
      >>> print(nnx.tabulate(model, jnp.ones((2, 8)), console_kwargs={"width": 80}))
                              Sequential
      ╭───────────┬────────────┬──────────┬──────────┬────────────┬────────╮
      │ path      │ type       │ inputs   │ outputs  │ Param      │ trains │
      ├───────────┼────────────┼──────────┼──────────┼────────────┼────────┤
      │           │ Sequential │ f32[2,8] │ f32[2,4] │ 36 (144 B) │ part   │
      │ layers[0] │ Linear     │ f32[2,8] │ f32[2,4] │ 36 (144 B) │ part   │
      ├───────────┼────────────┼──────────┼──────────┼────────────┼────────┤
      │ total     │            │          │          │ 36 (144 B) │ 88.9 % │
      ╰───────────┴────────────┴──────────┴──────────┴────────────┴────────╯
    """
    _check_method(obj, method)
    parts = {path: part for path, part in iter_graph(obj, graph=True) if is_part(part)}
    kinds = [kind for kind, (size, _) in count_variables(obj).items() if size]
    names = _column_names(columns, kinds, compute_flops, compute_vjp_flops)
    records = Records("flops" in names, "vjp_flops" in names)
    calls = records.run(obj, method, input_args, input_kwargs)
    rows = [
        call
        for call in calls
        if row_filter(call) and (depth is None or _depth(call.place, parts) <= depth)
    ]
    screen = _screen(console_kwargs)
    make = functools.partial(_Table, obj, parts, rows, names)
    table, remark = _fitting(make, screen.width, columns is None)
    remarks = [text for text in (remark, _not_called(parts, calls)) if text]
    return _drawn(table, remarks, table_kwargs, column_kwargs, screen)


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
    columns: Sequence[str] | None, kinds: list[str], flops: bool, vjp_flops: bool
) -> list[str]:
    """The columns to show, ``kinds`` spelled out."""
    asked = {"flops": flops, "vjp_flops": vjp_flops, "variables": False}
    wanted = columns or [name for name in _COLUMNS if asked.get(name, True)]
    unknown = [name for name in wanted if name not in (*_COLUMNS, *kinds)]
    if unknown:
        raise SummaryError(
            f"nnx.tabulate has no column {', '.join(map(repr, unknown))}.\n"
            f"Fix: choose from {', '.join((*_COLUMNS, *kinds))}."
        )
    return [name for want in wanted for name in (kinds if want == "kinds" else [want])]


def _depth(path: Path, parts: dict[Path, Any]) -> int:
    """How many parts a path leads through, itself included; containers do not count."""
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
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"not called: {', '.join(map(_path_text, found[:3]))}{more}" if found else ""


def _path_text(path: Path) -> str:
    return path_string(path).removeprefix(".")


class _Table:
    """The rows of a summary as cells of text.

    Args:
      obj: the model.
      parts: its parts by path.
      rows: the calls to show.
      names: the columns.
      narrow: how much to leave out: 1 joins the kinds that are no parameters, 2 leaves out bytes,
        3 leaves out the inputs too, 4 all that is no parameter.
    """

    def __init__(
        self, obj: Any, parts: dict[Path, Any], rows: list[CallInfo], names: list[str], narrow: int
    ):
        self.obj, self.parts, self.rows, self.narrow = obj, parts, rows, narrow
        self.kinds = count_variables(obj)
        self.names = [n for n in names if not (n == "inputs" and narrow >= 3)]
        if narrow and any(name in self.kinds and name != "Param" for name in names):
            kept = [n for n in self.names if n not in self.kinds or n == "Param"]
            at = kept.index("trains") if "trains" in kept else len(kept)
            self.names = [*kept[:at], *([_OTHER] if narrow < 4 else []), *kept[at:]]
        self.cells = [[self._cell(name, row) for name in self.names] for row in rows]
        self.total = ["total", *map(self._total, self.names[1:])]

    @property
    def width(self) -> int:
        """How wide it is where nothing is folded."""
        lines = [self.names, *self.cells, self.total]
        widths = (
            max(len(x) for cell in c for x in cell.split("\n")) for c in zip(*lines, strict=True)
        )
        return sum(width + 3 for width in widths) + 1

    def _cell(self, name: str, row: CallInfo) -> str:
        part = self.parts[row.place]
        if name in self.kinds or name == _OTHER:
            return self._size(count_variables(part), name)
        texts: dict[str, Callable[[], str]] = {
            "path": lambda: self._indented(row),
            "type": lambda: row.type.__name__,
            "inputs": lambda: _lines(row.inputs_repr.splitlines()),
            "outputs": lambda: _lines(describe(row.outputs)),
            "flops": lambda: _number(row.flops),
            "vjp_flops": lambda: _number(row.vjp_flops),
            "variables": lambda: _lines(_own_variables(part), most=99),
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
        return f"{size:,}" if self.narrow >= 2 else size_text(size, nbytes)

    def _indented(self, row: CallInfo) -> str:
        """The path from the part above that has a row, indented by how many there are."""
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
        return self._size(self.kinds, name) if name in self.kinds or name == _OTHER else ""


_LEFT_OUT = (
    "",
    "other kinds are joined",
    "bytes are left out",
    "inputs and bytes are left out",
    "inputs, bytes and other kinds are left out",
)


def _fitting(make: Callable[[int], _Table], width: int, free: bool) -> tuple[_Table, str]:
    """The fullest table that fits, and a remark if it is not the full one."""
    full = table = make(0)
    for narrow in range(1, len(_LEFT_OUT) if free else 1):
        if table.width <= width:
            break
        table = make(narrow)
    if table is full:
        return full, ""
    return table, f"{_LEFT_OUT[table.narrow]} to fit {width} columns; all of it takes {full.width}"


def _drawn(table: _Table, remarks: list[str], options: Any, column: Any, screen: Any) -> str:
    import rich.box
    import rich.table
    from rich.text import Text

    settings = {"title": type(table.obj).__name__, "box": rich.box.ROUNDED}
    drawn = rich.table.Table(**{**settings, **options})
    for name in table.names:
        drawn.add_column(name, **{**_style(name), **column})
    for cells in table.cells:
        drawn.add_row(*map(Text, cells))
    drawn.add_section()
    drawn.add_row(*map(Text, table.total), style="bold")
    if remarks:
        drawn.caption = "\n".join(remarks)
    with screen.capture() as captured:
        screen.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().split("\n"))


def _screen(options: Mapping[str, Any]) -> Any:
    from rich.console import Console

    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    settings = {"width": width, "force_terminal": sys.stdout.isatty(), "file": io.StringIO()}
    return Console(**{**settings, **options})


def _style(name: str) -> dict[str, Any]:
    styles: dict[str, dict[str, Any]] = {
        "path": {"no_wrap": True, "overflow": "ellipsis", "style": "bold"},
        "type": {"overflow": "fold", "style": "cyan"},
        "inputs": {"overflow": "fold", "style": "dim"},
        "outputs": {"overflow": "fold", "style": "dim"},
        "flops": {"justify": "right", "no_wrap": True},
        "vjp_flops": {"justify": "right", "no_wrap": True},
        "variables": {"overflow": "fold", "style": "dim"},
        "trains": {"no_wrap": True, "style": "green"},
    }
    return styles.get(name, {"justify": "left", "overflow": "fold"})


def _lines(lines: Sequence[str], most: int = _MOST_LINES) -> str:
    if len(lines) > most:
        lines = [*lines[: most - 1], f"… {len(lines) - most + 1} more"]
    return "\n".join(lines)


def _number(value: int | None) -> str:
    """A count, exact as long as it is short."""
    if value is None:
        return ""
    if value < 10**5:
        return f"{value:,}"
    power = min((len(str(value)) - 1) // 3, 5)
    return f"{value / 1000**power:.1f} {' KMGTP'[power]}"


def _own_variables(part: Any) -> list[str]:
    items = part._pytree_items().items()
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
