"""Shardings of objects for ``nnx.jit``: one for each Variable, from a prefix or by filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from linnet.nnx.graphlib.definition import Definition
from linnet.nnx.kinds import VARIABLE
from linnet.nnx.transforms.arguments import Donated, Static
from linnet.nnx.transforms.axes import Axes, FilterMap, broadcast_prefix
from linnet.nnx.transforms.lift import Opened, is_node
from linnet.nnx.variablelib import rebuild_variable


def jit_options(
    opened: Opened,
    donated: Donated,
    in_shardings: Any,
    out_shardings: Any,
    pure: Callable[..., Any],
    where: Callable[[Any], str],
) -> dict[str, Any]:
    """The ``in_shardings`` and ``out_shardings`` of the pure function that is compiled.

    Args:
      opened: the arguments.
      donated: what of them is donated.
      in_shardings: as the user gave them, for the arguments.
      out_shardings: as the user gave them, for the output.
      pure: the function; it is traced once for the form of its output.
      where: how a place in the arguments is printed in errors.

    Returns:
      Options for ``jax.jit``.
    """
    axes = Axes(opened, in_shardings, "jit", "in_shardings", by_name=None, where=where)
    options: dict[str, Any] = {
        "in_shardings": donated.divide(axes.variables, axes.arrays, axes.plain)
    }
    if out_shardings is None:
        return options
    inputs = donated.divide(opened.values, opened.arrays, opened.plain)
    outcome = jax.eval_shape(pure, *inputs)
    changed = [axes.slots[n] for n in outcome.effects.changed]
    news, plain = _output_shardings(outcome, out_shardings)
    options["out_shardings"] = type(outcome)(outcome.effects, changed, news, plain)
    return options


def with_gaps(in_shardings: Any, static: Static) -> Any:
    """Shardings for all positional arguments, from those for the ones that are not static."""
    if not isinstance(in_shardings, (list, tuple)):
        return in_shardings
    shardings = list(in_shardings)
    for number, _ in static.args:
        shardings.insert(number, None)
    return tuple(shardings)


def _output_shardings(outcome: Any, out_shardings: Any) -> tuple[Any, Any]:
    effects = outcome.effects
    if effects.out_treedef is None:
        specs = broadcast_prefix(out_shardings, outcome.plain, "jit", "out_shardings")
        tree = jax.tree_util.tree_structure(outcome.plain, is_leaf=is_node)
        return [None] * len(outcome.news), tree.unflatten(specs)
    skeleton = effects.out_treedef.unflatten(range(effects.out_treedef.num_leaves))
    specs = broadcast_prefix(out_shardings, skeleton, "jit", "out_shardings")
    news: list[Any] = [None] * len(outcome.news)
    plain = []
    for spec, part in zip(specs, effects.out_parts, strict=True):
        if part is None:
            plain.append(spec)
            continue
        for path, slot in part.leaves:
            if not slot.old:
                is_map = isinstance(spec, FilterMap)
                kind = _kind_at(part.definition, path) if is_map else None
                news[slot.number] = spec.map_prefix(path, kind) if is_map else spec
    return news, plain


def _kind_at(definition: Definition, path: tuple[Any, ...]) -> Any:
    """A Variable of the kind that stands at a path, without a value, for filters to look at."""
    found = definition.at(path)
    return rebuild_variable(found.form, None, found.own) if found.kind == VARIABLE else None
