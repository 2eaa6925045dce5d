"""Branches over objects: ``cond`` and ``switch``.

All branches run on the same opened operands, and must do the same to their structure. The slots
that one of them writes to are outputs of all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import BranchError, type_text
from linnet.nnx.transforms.eager import Written
from linnet.nnx.transforms.engine import leaves_with_paths, output_place
from linnet.nnx.transforms.run import Call, Run


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``jax.lax.cond`` with objects among the operands.

    Outside of compiled functions the branches are traced at each call, so that they read captured
    values as they are now; calls whose traces are equal share the compiled code.

    Args:
      pred: which branch.
      true_fun: the branch for true.
      false_fun: the branch for false.
      *operands: the arguments of both.
      graph, graph_updates: as for ``jit``.
      **kwargs: as for ``jax.lax.cond``.

    Returns:
      What the branch returned.

    Raises:
      BranchError: the branches change the structure of objects, or return, differently.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> v = nnx.Variable(jnp.array(1.0))
      >>> def double(v):
      ...     v[...] *= 2
      >>> nnx.cond(True, double, lambda v: None, v)
      >>> float(v.value)
      2.0
    """

    def select(pred: Any, branches: Any, inputs: Any) -> Any:
        return jax.lax.cond(pred, *branches, inputs, **kwargs)

    return _branch("cond", pred, [true_fun, false_fun], operands, select, graph, graph_updates)


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``jax.lax.switch`` with objects among the operands; traced and compiled as ``nnx.cond``.

    Args:
      index: which branch; an index out of range is clamped.
      branches: the branches.
      *operands: the arguments of all.
      graph, graph_updates: as for ``jit``.
      **kwargs: as for ``jax.lax.switch``.

    Returns:
      What the branch returned.

    Raises:
      ValueError: there are no branches.
      BranchError: the branches change the structure of objects, or return, differently.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> v = nnx.Variable(jnp.array(3.0))
      >>> def double(v):
      ...     v[...] *= 2
      >>> def negate(v):
      ...     v[...] = -v[...]
      >>> nnx.switch(1, [double, negate], v)
      >>> float(v.value)
      -3.0
    """
    if not branches:
        raise ValueError("nnx.switch got no branches.\nFix: give it at least one function.")
    select = functools.partial(jax.lax.switch, **kwargs)
    return _branch("switch", index, list(branches), operands, select, graph, graph_updates)


def _branch(
    api: str,
    which: Any,
    branches: list[Callable[..., Any]],
    operands: tuple[Any, ...],
    select: Callable[..., Any],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    first = Call(branches[0], operands, {}, api, graph, graph_updates)
    first.argument_names = {"inputs[0]": first.paths, "inputs[1]": first.opened.plain_paths}
    calls = [first.for_function(f, named_by=f) for f in branches]
    written = Written(first, branches)

    def attempt(numbers: set[int]) -> Any:
        ordered = sorted(numbers)
        runs: dict[int, Run] = {}

        def lifted(number: int) -> Callable[..., Any]:
            def branch(inputs: Any) -> Any:
                values, plain = inputs
                fixed = set(range(first.variable_count)) - numbers
                runs[number] = run = calls[number].run(values, plain, fixed)
                written.check(run, numbers)
                if len(runs) == len(branches):
                    _compare([runs[n] for n in range(len(runs))], ordered)
                return [run.now[n] for n in ordered], run.fresh, run.plain

            return calls[number].named(branch)

        all_lifted = [lifted(n) for n in range(len(branches))]
        changed, fresh, leaves = written.run(
            lambda which, inputs: select(which, all_lifted, inputs),
            which,
            (first.slot_values, first.plain),
        )
        # Arrays in attributes may have changed in one branch and not in another.
        run = max(runs.values(), key=lambda run: run.effects.argument_nodes is not None)
        anywhere = set().union(*(run.changed for run in runs.values()))
        pairs = zip(ordered, changed, strict=True)
        return run.close({n: value for n, value in pairs if n in anywhere}, fresh, leaves)

    with contextlib.ExitStack() as naming:
        for call in calls:
            naming.enter_context(call.naming_arguments())
        return written.settle(attempt)


def _compare(runs: list[Run], changed: list[int]) -> None:
    """Raises for a branch whose effects or types differ from those of the first."""
    first = runs[0]
    api = first.call.api
    for number, run in enumerate(runs[1:], start=1):
        found = [first.structure_change(), run.structure_change()]
        if found[0] != found[1]:
            pairs = zip((first, run), found, strict=True)
            changes = [run.difference() if change else "nothing" for run, change in pairs]
            raise BranchError(
                f"nnx.{api}: branch {number} changes the structure of its operands differently "
                f"from branch 0.\n  - branch 0: {changes[0]}\n  - branch {number}: {changes[1]}\n"
                "Fix: make the same changes in every branch, or make them outside."
            )
        _compare_outputs(api, number, first, run)
        names = [*first.plain_names(), *first.fresh_names(), *map(first.call.slot_name, changed)]
        values = ((*r.plain, *r.fresh, *(r.now[n] for n in changed)) for r in (first, run))
        for name, one, other in zip(names, *values, strict=True):
            _compare_types(api, number, name, one, other)


def _compare_outputs(api: str, number: int, first: Run, run: Run) -> None:
    if first.effects.out_treedef != run.effects.out_treedef:
        raise BranchError(
            f"nnx.{api}: branch {number} returns {run.effects.out_treedef}, but branch 0 returns "
            f"{first.effects.out_treedef}.\nFix: return the same structure from every branch."
        )
    if first.effects.output_nodes != run.effects.output_nodes:
        differ = zip(first.effects.output_nodes, run.effects.output_nodes, strict=True)
        position = next(n for n, (one, other) in enumerate(differ) if one != other)
        place = output_place(leaves_with_paths(first.out)[position][0])
        raise BranchError(
            f"nnx.{api}: branch {number} returns another object at {place} than branch "
            "0.\nFix: return new objects of one structure, or the same operand, from every branch."
        )


def _compare_types(api: str, number: int, where: str, one: Any, other: Any) -> None:
    old, old_tree = jax.tree_util.tree_flatten(one)
    new, new_tree = jax.tree_util.tree_flatten(other)
    texts = [", ".join(type_text(jnp.asarray(x)) for x in leaves) for leaves in (new, old)]
    if old_tree != new_tree or texts[0] != texts[1]:
        shown = texts if old_tree == new_tree else [new_tree, old_tree]
        raise BranchError(
            f"nnx.{api}: branch {number} gives {shown[0]} for {where}, but branch 0 gives "
            f"{shown[1]}.\nFix: give the same structure, shapes and dtypes in every branch."
        )
