"""Freezing: Variables that neither ``nnx.grad`` nor an optimizer touches, whatever their filters.

A frozen Variable carries ``frozen=True`` in its metadata. So it stays frozen through ``split``,
``merge``, ``clone`` and transforms, costs nothing in a step, and freezing it later retraces.
"""

from __future__ import annotations

import difflib
from typing import Any

import jax

from linnet.errors import FilterError, path_string
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter, PathPattern
from linnet.nnx.graphlib.traverse import flat_variables
from linnet.nnx.pytreelib.kinds import OBJECT, VARIABLE, Path, kind_of
from linnet.nnx.variablelib.variable import Param, Variable
from linnet.tables import aligned, array_size, is_inexact, size_text


def frozen(path: Path, x: Any) -> bool:
    """A filter that selects what ``nnx.freeze`` froze.

    Args:
      path: where ``x`` stands.
      x: a Variable.

    Returns:
      Whether it is frozen.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> nnx.freeze(model, "bias")
      >>> list(nnx.state(model, nnx.frozen))
      ['bias']
    """
    return isinstance(x, Variable) and bool(x._metadata.get("frozen", False))


def trainable(path: Path, x: Any) -> bool:
    """A filter that selects the parameters that are not frozen.

    Args:
      path: where ``x`` stands.
      x: a Variable.

    Returns:
      Whether it is a ``Param`` that trains.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> nnx.freeze(model, "kernel")
      >>> graphdef, params, rest = nnx.split(model, nnx.trainable, ...)
      >>> list(params), list(rest)
      (['bias'], ['kernel'])
    """
    return isinstance(x, Param) and not frozen(path, x)


def freeze(node: Any, *what: Any, graph: bool | None = None) -> None:
    """Keeps Variables out of training, in place: ``nnx.grad`` and optimizers leave them alone.

    What a forward pass writes by itself, such as running statistics, it still writes. Freeze before
    the optimizer is built.

    Args:
      node: a module, or any pytree of modules and Variables.
      *what: what to freeze: a path pattern such as ``"encoder"`` or ``"blocks.*.mlp"`` (see
        ``nnx.PathPattern``), a module or Variable of ``node``, or a filter such as ``nnx.Param``.
        By default all of it.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Raises:
      FilterError: one of ``what`` is nothing that could train.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs))
      >>> nnx.freeze(model, "layers.0")
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
      >>> [path for path, _ in grads.flat_state()]
      [('layers', 1, 'bias'), ('layers', 1, 'kernel')]
    """
    for variable in _chosen(node, what, graph, "freeze"):
        variable.set_metadata(frozen=True)


def unfreeze(node: Any, *what: Any, graph: bool | None = None) -> None:
    """Lets Variables train again, in place; the reverse of ``nnx.freeze``.

    Args:
      node: a module, or any pytree of modules and Variables.
      *what: as for ``freeze``.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Raises:
      FilterError: one of ``what`` is nothing that could train.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> nnx.freeze(model)
      >>> nnx.unfreeze(model, "bias")
      >>> list(nnx.state(model, nnx.frozen))
      ['kernel']
    """
    for variable in _chosen(node, what, graph, "unfreeze"):
        if variable.has_metadata("frozen"):
            variable.del_metadata("frozen")


def _chosen(node: Any, what: tuple[Any, ...], graph: Any, api: str) -> list[Variable[Any]]:
    """The Variables that ``what`` selects among those that can train."""
    variables = [(p, v) for p, v in flat_variables(node, graph, api) if _can_train(v)]
    chosen: dict[int, Variable[Any]] = {}
    for choice in what or (...,):
        predicate = _predicate(choice, graph, api)
        found = {id(v): v for path, v in variables if predicate(path, v)}
        if not found:
            raise FilterError(_nothing_found(choice, [path for path, _ in variables], api))
        chosen |= found
    return list(chosen.values())


def _predicate(choice: Any, graph: Any, api: str) -> filterlib.Predicate:
    if isinstance(choice, str):
        return PathPattern(choice)
    if kind_of(choice) in (OBJECT, VARIABLE):
        inside = {id(variable) for _, variable in flat_variables(choice, graph, api)}
        return lambda path, x: id(x) in inside
    return filterlib.to_predicate(choice)


def _can_train(variable: Variable[Any]) -> bool:
    return any(map(is_inexact, jax.tree_util.tree_leaves(variable.raw_value)))


def _nothing_found(choice: Any, paths: list[Path], api: str) -> str:
    name = type(choice).__name__ if kind_of(choice) in (OBJECT, VARIABLE) else repr(choice)
    fix = "Fix: name a part of this model."
    if isinstance(choice, str):
        names = dict.fromkeys(
            ".".join(map(str, p[:n])) for p in paths for n in range(1, len(p) + 1)
        )
        close = difflib.get_close_matches(choice, names, n=3, cutoff=0.5)
        known = close or [name for name in names if "." not in name]
        fix = f"Fix: use a path of this model, such as {', '.join(map(repr, known[:6])) or '**'}."
    return f"nnx.{api}: {name} selects nothing that could train.\n{fix}"


def what_trains(
    node: Any, wrt: Filter = Param, *, depth: int | None = None, graph: bool | None = None
) -> str:
    """A text that says what trains and what does not, a line for each module.

    Args:
      node: a module, or any pytree of modules and Variables.
      wrt: the filter that the optimizer has.
      depth: how many steps of a path to tell apart; by default all.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      The text: ``trains``, ``frozen``, or ``-`` for what ``wrt`` does not select.

    Example:
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))
      >>> nnx.freeze(model, "layers.0.kernel")
      >>> print(nnx.what_trains(model))
      trains  .layers[0]  bias         Param      3 (12 B)
      frozen  .layers[0]  kernel       Param      6 (24 B)
      trains  .layers[1]  bias, scale  Param      6 (24 B)
      -       .layers[1]  mean, var    BatchStat  6 (24 B)
      9 of 15 parameters train (60.0 %).
    """
    predicate = filterlib.to_predicate(wrt)
    lines: dict[tuple[str, str, str], list[Any]] = {}
    sizes = {"trains": 0, "frozen": 0, "-": 0}
    for path, variable in flat_variables(node, graph, "what_trains"):
        status = "frozen" if frozen(path, variable) else "trains"
        status = status if predicate(path, variable) else "-"
        size, nbytes = array_size(variable.raw_value)
        sizes[status] += size
        where = path_string(path[:-1][:depth]) or "(the root)"
        line = lines.setdefault((where, status, type(variable).__name__), [{}, 0, 0])
        line[0][str(path[-1]) if path else ""] = None
        line[1] += size
        line[2] += nbytes
    rows = [
        (status, where, _names(names), type_name, size_text(size, nbytes))
        for (where, status, type_name), (names, size, nbytes) in lines.items()
    ]
    trains, total = sizes["trains"], sizes["trains"] + sizes["frozen"]
    share = f"{100 * trains / max(total, 1):.1f} %"
    return "\n".join([*aligned(rows), f"{trains:,} of {total:,} parameters train ({share})."])


def _names(names: dict[str, None]) -> str:
    listed = list(names)
    return ", ".join(listed if len(listed) <= 4 else [*listed[:3], f"... {len(listed) - 3} more"])
