"""Branches over objects: cond, switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from linnet.errors import BranchError
from linnet.nnx.transforms.lift import Effects
from linnet.nnx.transforms.loops import check_written, settle
from linnet.nnx.transforms.run import Call


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
      index: which branch.
      branches: the branches.
      *operands: the arguments of all.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: carry changed structure out; by default as ``set_graph_updates`` says.
      **kwargs: as for ``jax.lax.switch``.

    Returns:
      What the branch returned.

    Raises:
      BranchError: the branches change the structure of objects, or return, differently.
    """
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
        calls = [Call(f, operands, {}, api, graph, graph_updates) for f in branches]

        def lifted(call: Call) -> Callable[..., Any]:
            def run(inputs: Any) -> Any:
                inside, news, leaves, _ = call.run(*inputs)
                check_written(call, inside, numbers)
                return [inside.raw(number) for number in written], news, leaves

            return run

        opened = calls[0].opened
        inputs = (opened.values, opened.arrays, opened.plain)
        try:
            changed, news, leaves = select([lifted(call) for call in calls], inputs)
        except TypeError as error:
            _compare([call.effects for call in calls], api)
            raise BranchError(f"nnx.{api}: the branches do not match: {error}") from None
        effects = [call.effects for call in calls]
        _compare(effects, api)
        values = dict(zip(written, changed, strict=True))
        first = calls[0]
        first.effects = _with_changed(effects[0], written)
        return first.close([values[n] for n in written], news, leaves)

    return settle(attempt, set())


def _with_changed(effects: Effects | None, numbers: list[int]) -> Effects:
    import dataclasses

    assert effects is not None
    return dataclasses.replace(effects, changed=tuple(numbers))


def _compare(effects: list[Effects | None], api: str) -> None:
    first = effects[0]
    for number, other in enumerate(effects[1:], start=1):
        if first is None or other is None:
            continue
        if (first.parts, first.reused) != (other.parts, other.reused):
            raise BranchError(
                f"nnx.{api}: branch {number} changes the structure of its operands differently "
                "from branch 0 (an attribute added, removed, or set to another static value).\n"
                "Fix: make the same changes in every branch, or make them outside."
            )
        if (first.out_treedef, first.out_parts) != (other.out_treedef, other.out_parts):
            raise BranchError(
                f"nnx.{api}: branch {number} returns {other.out_treedef}, but branch 0 returns "
                f"{first.out_treedef}.\nFix: return the same structure from every branch."
            )
