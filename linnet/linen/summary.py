"""``tabulate``: a table of a model's modules, what goes in and out, what they hold and cost.

``init`` is traced on shapes alone while every call is logged, so that nothing is computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from linnet.core import meta
from linnet.core.partial_eval import split_leaves
from linnet.core.scope import CollectionFilter, DenyList
from linnet.linen.context import CallInfo, logged_calls
from linnet.tables import (
    abstract,
    array_size,
    count_flops,
    describe,
    draw,
    is_inexact,
    make_console,
    number_text,
    short_type,
    size_text,
    with_gradients,
)
from linnet.traverse_util import iter_entries
from linnet.typing import has_shape_dtype

if TYPE_CHECKING:
    from linnet.linen.module import Module

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
NO_INTERMEDIATES = DenyList("intermediates")

_STYLES: dict[str, dict[str, Any]] = {
    "path": {"no_wrap": True, "overflow": "ellipsis", "style": "bold"},
    "module": {"overflow": "fold", "style": "cyan"},
    "inputs": {"overflow": "fold", "style": "dim"},
    "outputs": {"overflow": "fold", "style": "dim"},
    "flops": {"justify": "right", "no_wrap": True},
    "vjp_flops": {"justify": "right", "no_wrap": True},
}


@dataclasses.dataclass
class Row:
    """One call of a module in a table.

    Args:
      path: the names from the model to the module.
      module_copy: a copy of the module, without variables.
      method: the method that was called.
      inputs: its arguments, shapes in place of arrays.
      outputs: what it returned, likewise.
      module_variables: the module's own variables, by collection.
      counted_variables: those, and those of the modules inside that the table does not show.
      flops: floating point operations forward, if asked for.
      vjp_flops: those forward and backward, if asked for.
    """

    path: tuple[str, ...]
    module_copy: Any
    method: str
    inputs: Any
    outputs: Any
    module_variables: dict[str, dict[str, Any]]
    counted_variables: dict[str, Any]
    flops: int | None = None
    vjp_flops: int | None = None


class Table(list[Row]):
    """The rows of a summary.

    Args:
      module: the model.
      collections: the collections of its variables.
      rows: the rows.
    """

    def __init__(self, module: Module, collections: Sequence[str], rows: Any):
        super().__init__(rows)
        self.module = module
        self.collections = collections


def tabulate(
    module: Module,
    rngs: Any,
    depth: int | None = None,
    show_repeated: bool = False,
    mutable: CollectionFilter = NO_INTERMEDIATES,
    console_kwargs: Mapping[str, Any] | None = None,
    table_kwargs: Mapping[str, Any] = NO_OPTIONS,
    column_kwargs: Mapping[str, Any] = NO_OPTIONS,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **kwargs: Any,
) -> Callable[..., str]:
    """A function that gives a table of a model's modules, in the order in which they run.

    Args:
      module: the model.
      rngs: a random key for each stream, or one for ``params``.
      depth: how many levels of modules to show; by default all.
      show_repeated: show every call of a module, not the first one alone.
      mutable: a filter of the collections to make.
      console_kwargs: passed on to ``rich.console.Console``, such as ``{"width": 80}``.
      table_kwargs: passed on to ``rich.table.Table``.
      column_kwargs: passed on to ``rich.table.Table.add_column``.
      compute_flops: count operations forward, as XLA does.
      compute_vjp_flops: count operations forward and backward.
      **kwargs: keyword arguments of ``init``.

    Returns:
      A function of what the model is called with, that returns the text of the table.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen as nn
      >>> class Scale(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return x * self.param("scale", jax.nn.initializers.ones, (x.shape[-1],))
      >>> class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return Scale()(x)
      >>> table = nn.tabulate(Model(), jax.random.key(0), console_kwargs={"width": 80})
      >>> print(table(jnp.ones(3)))
                           Model Summary
      ╭─────────┬────────┬────────┬─────────┬───────────────╮
      │ path    │ module │ inputs │ outputs │ params        │
      ├─────────┼────────┼────────┼─────────┼───────────────┤
      │         │ Model  │ f32[3] │ f32[3]  │               │
      │ Scale_0 │ Scale  │ f32[3] │ f32[3]  │ scale: f32[3] │
      │         │        │        │         │ 3 (12 B)      │
      ├─────────┼────────┼────────┼─────────┼───────────────┤
      │ total   │        │        │         │ 3 (12 B)      │
      ╰─────────┴────────┴────────┴─────────┴───────────────╯
    """

    def table_of(*args: Any, **call_kwargs: Any) -> str:
        table = module_table(
            module,
            rngs,
            args,
            {**kwargs, **call_kwargs, "mutable": mutable},
            depth=depth,
            show_repeated=show_repeated,
            flops=compute_flops,
            vjp_flops=compute_vjp_flops,
        )
        names = ["path", "module", "inputs", "outputs"]
        names += ["flops"] * compute_flops + ["vjp_flops"] * compute_vjp_flops
        rows = [_cells(row, names, table.collections) for row in table]
        total = [""] * len(names) + [
            _size([row.counted_variables.get(col) for row in table]) for col in table.collections
        ]
        total[0] = "total"
        title = f"{type(module).__name__} Summary"
        columns = [*names, *table.collections]
        console = make_console(console_kwargs or NO_OPTIONS)
        return draw(
            title,
            columns,
            rows,
            total,
            styles=_STYLES,
            remarks=(),
            table_kwargs=table_kwargs,
            column_kwargs=column_kwargs,
            console=console,
        )

    return table_of


def _cells(row: Row, names: Sequence[str], collections: Sequence[str]) -> list[str]:
    method = "" if row.method == "__call__" else f" ({row.method})"
    texts = {
        "path": "/".join(row.path),
        "module": type(row.module_copy).__name__ + method,
        "inputs": "\n".join(line for part in row.inputs if part for line in describe(part)),
        "outputs": "\n".join(describe(row.outputs)),
        "flops": number_text(row.flops),
        "vjp_flops": number_text(row.vjp_flops),
    }
    cells = [texts[name] for name in names]
    for col in collections:
        own = [_described(name, v) for name, v in row.module_variables.get(col, {}).items()]
        size = _size([row.counted_variables.get(col)])
        cells.append("\n".join([*own, *([size] if size else [])]))
    return cells


def _described(name: str, value: Any) -> str:
    names = f" {tuple(value.names)}" if isinstance(value, meta.Partitioned) else ""
    value = meta.unbox(value)
    text = short_type(value) if hasattr(value, "dtype") else ", ".join(describe(value))
    return f"{name}: {text}{names}"


def _size(trees: list[Any]) -> str:
    size, nbytes = array_size(trees)
    return size_text(size, nbytes) if size else ""


def module_table(
    module: Module,
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    depth: int | None = None,
    show_repeated: bool = False,
    flops: bool = False,
    vjp_flops: bool = False,
) -> Table:
    """The rows of a summary: the calls that ``module.init(rngs, *args, **kwargs)`` makes."""
    calls: list[CallInfo] = []
    arrays, rebuild = split_leaves((args, kwargs), has_shape_dtype)

    def traced(rngs: Any, values: list[Any]) -> Any:
        inner_args, inner_kwargs = rebuild(values)
        with logged_calls() as log:
            variables = module.init(rngs, *inner_args, **inner_kwargs)
        calls.extend(_without_tracers(call) for call in log.calls)
        return variables

    variables = jax.eval_shape(traced, rngs, arrays)
    calls.sort(key=lambda call: call.index)
    seen: set[tuple[str, ...]] = set()
    rows = []
    shown = {call.path for call in calls if depth is None or len(call.path) <= depth}
    for call in calls:
        first = call.path not in seen
        if call.path not in shown or not (first or show_repeated):
            continue
        seen.add(call.path)
        own, counted = _variables_of(call.path, variables, shown) if first else ({}, {})
        row = Row(
            call.path,
            call.module,
            call.method,
            (call.args, call.kwargs),
            call.outputs,
            own,
            counted,
        )
        if flops:
            row.flops = _count(call, rngs, backward=False)
        if vjp_flops:
            row.vjp_flops = _count(call, rngs, backward=True)
        rows.append(row)
    cols = [col for col in variables if any(row.counted_variables.get(col) for row in rows)]
    return Table(module, sorted(cols, key=lambda col: (col != "params", col)), rows)


def _without_tracers(call: CallInfo) -> CallInfo:
    names = ("args", "kwargs", "outputs", "variables")
    shapes = {name: jax.tree.map(abstract, getattr(call, name)) for name in names}
    return dataclasses.replace(call, rngs=None, **shapes)


def _variables_of(
    path: tuple[str, ...], variables: Mapping[str, Any], shown: set[tuple[str, ...]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """A module's own variables, and these together with those of inner modules without a row."""
    own: dict[str, dict[str, Any]] = {}
    counted: dict[str, Any] = {}
    for col, tree in variables.items():
        here = _at(tree, path)
        if not isinstance(here, Mapping):
            continue
        own[col] = {k: v for k, v in here.items() if not isinstance(v, Mapping)}
        inner = iter_entries(here, path, is_leaf=lambda p, _: p != path and p in shown)
        counted[col] = [value for _, value in inner if not isinstance(value, Mapping)]
    return own, counted


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _count(call: CallInfo, rngs: Any, backward: bool) -> int | None:
    """The operations of one call, forward or forward and backward."""
    arrays, rebuild = split_leaves((call.args, call.kwargs), has_shape_dtype)

    def forward(values: Any) -> Any:
        given, keys, inner = values
        args, kwargs = rebuild(inner)
        method = getattr(type(call.module), call.method)
        run = functools.partial(call.module.apply, given, *args, **kwargs)
        return run(rngs=keys, method=method, mutable=call.mutable)

    keys = jax.eval_shape(lambda rngs: rngs, rngs)
    run = functools.partial(_forward_and_backward, forward) if backward else forward
    return count_flops(run, (call.variables, keys, arrays))


def _forward_and_backward(forward: Callable[..., Any], values: Any) -> Any:
    """The outputs, and their gradients with respect to all variables and inputs."""
    leaves, treedef = jax.tree.flatten(values)
    chosen = [n for n, leaf in enumerate(leaves) if is_inexact(leaf)]
    return with_gradients(lambda leaves: forward(treedef.unflatten(leaves)), leaves, chosen)
