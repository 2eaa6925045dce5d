"""Branches over objects: cond, switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import BranchError
from linnet.nnx.transforms.lift import is_node
from linnet.nnx.transforms.loops import check_written, settle
from linnet.nnx.transforms.run import Call
from linnet.nnx.transforms.slots import Run, Slots, output_text
from linnet.nnx.variablelib import type_text


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

    Args:
      pred: which branch.
      true_fun: the branch for true.
      false_fun: the branch for false.
      *operands: the arguments of both.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.
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
    select = lambda branches, run: jax.lax.cond(pred, *branches, run, **kwargs)  # noqa: E731
    return _branch("cond", [true_fun, false_fun], operands, select, graph, graph_updates)


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``jax.lax.switch`` with objects among the operands.

    Args:
      index: which branch; an index out of range is brought into it.
      branches: the branches.
      *operands: the arguments of all.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.
      **kwargs: as for ``jax.lax.switch``.

    Returns:
      What the branch returned.

    Raises:
      ValueError: there are no branches.
      BranchError: the branches change the structure of objects, or return, differently.
    """
    if not branches:
        raise ValueError("nnx.switch got no branches.\nFix: give it at least one function.")
    select = lambda chosen, run: jax.lax.switch(index, chosen, run, **kwargs)  # noqa: E731
    return _branch("switch", list(branches), operands, select, graph, graph_updates)


def _branch(
    api: str,
    branches: list[Callable[..., Any]],
    operands: tuple[Any, ...],
    select: Callable[..., Any],
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    def attempt(numbers: set[int]) -> Any:
        written = sorted(numbers)
        slots = [Slots(Call(f, operands, {}, api, graph, graph_updates)) for f in branches]
        runs: dict[int, Run] = {}

        def lifted(number: int) -> Callable[..., Any]:
            def branch(inputs: Any) -> Any:
                values, plain = inputs
                fixed = set(range(slots[number].variables)) - numbers
                run = slots[number].run(values, plain, fixed)
                runs[number] = run
                check_written(run, numbers)
                if len(runs) == len(branches):
                    _compare([runs[n] for n in range(len(runs))], written)
                return [run.now[n] for n in written], run.fresh, run.leaves

            return branch

        inputs = (slots[0].values, slots[0].plain)
        changed, fresh, leaves = select([lifted(n) for n in range(len(branches))], inputs)
        # Arrays in attributes may have changed in one branch and not in another.
        run = max(runs.values(), key=lambda run: run.effects.parts is not None)
        return run.close(dict(zip(written, changed, strict=True)), fresh, leaves)

    return settle(attempt, set())


def _compare(runs: list[Run], written: list[int]) -> None:
    """Raises if a branch does something else than the first."""
    first = runs[0]
    api = first.slots.call.api
    for number, run in enumerate(runs[1:], start=1):
        if run.form() != first.form():
            changes = [r.difference() if r.form() else "nothing" for r in (first, run)]
            raise BranchError(
                f"nnx.{api}: branch {number} changes the structure of its operands differently "
                f"from branch 0.\n  - branch 0: {changes[0]}\n  - branch {number}: {changes[1]}\n"
                "Fix: make the same changes in every branch, or make them outside."
            )
        _compare_outputs(api, number, first, run)
        for slot in written:
            _compare_types(api, number, first.slots.where(slot), first.now[slot], run.now[slot])


def _compare_outputs(api: str, number: int, first: Run, run: Run) -> None:
    if first.effects.out_treedef != run.effects.out_treedef:
        raise BranchError(
            f"nnx.{api}: branch {number} returns {run.effects.out_treedef}, but branch 0 returns "
            f"{first.effects.out_treedef}.\nFix: return the same structure from every branch."
        )
    if first.effects.out_parts != run.effects.out_parts:
        differ = zip(first.effects.out_parts, run.effects.out_parts, strict=True)
        position = next(n for n, (one, other) in enumerate(differ) if one != other)
        path, _ = jax.tree_util.tree_leaves_with_path(first.out, is_leaf=is_node)[position]
        raise BranchError(
            f"nnx.{api}: branch {number} returns another object at {output_text(path)} than branch "
            "0.\nFix: return new objects of one structure, or the same operand, from every branch."
        )
    paths = jax.tree_util.tree_leaves_with_path(first.out, is_leaf=is_node)
    names = [output_text(path) for path, leaf in paths if not is_node(leaf)]
    for name, one, other in zip(names, first.leaves, run.leaves, strict=True):
        _compare_types(api, number, name, one, other)
    for name, one, other in zip(first.fresh_names(), first.fresh, run.fresh, strict=True):
        _compare_types(api, number, name, one, other)


def _compare_types(api: str, number: int, where: str, one: Any, other: Any) -> None:
    old, old_tree = jax.tree_util.tree_flatten(one)
    new, new_tree = jax.tree_util.tree_flatten(other)
    texts = [", ".join(type_text(jnp.asarray(x)) for x in leaves) for leaves in (new, old)]
    if old_tree != new_tree or texts[0] != texts[1]:
        kinds = texts if old_tree == new_tree else [new_tree, old_tree]
        raise BranchError(
            f"nnx.{api}: branch {number} gives {kinds[0]} for {where}, but branch 0 gives "
            f"{kinds[1]}.\nFix: give the same structure, shapes and dtypes in every branch."
        )
