"""What a run of the user's function did: ``Effects`` (static), and the ``Outcome`` with its arrays.

Effects speak of slots, so they are valid for all objects of one structure. ``engine`` makes them
when a run leaves, and applies them when a call closes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_pytree_node

from linnet.nnx.graphlib.walk import Definition
from linnet.nnx.modules.module import capture_run
from linnet.nnx.pytreelib.kinds import Path
from linnet.nnx.statelib import nest

# Graph updates that bring out only what was sown, which nnx.capture waits for outside.
SOWN_ONLY: Final = "sown only"
GraphUpdates = bool | Literal["sown only"]


def sown_only() -> GraphUpdates:
    """What graph updates are where they are off: ``SOWN_ONLY`` while ``nnx.capture`` runs."""
    return SOWN_ONLY if capture_run.get() is not None else False


class Origin(NamedTuple):
    """Where a leaf of a leaving object comes from: a slot of the inputs, or the new arrays."""

    came_in: bool
    number: int


@dataclasses.dataclass(frozen=True)
class LeavingNode:
    """An object as it leaves: its definition, and the path and origin of each of its leaves."""

    definition: Definition
    leaves: tuple[tuple[Path, Origin], ...]

    def state(self, old: list[Any], new: list[Any]) -> Any:
        """The state of the object, from the inputs and the new arrays."""
        return nest(
            (path, old[number] if came_in else new[number])
            for path, (came_in, number) in self.leaves
        )


@dataclasses.dataclass(frozen=True)
class Effects:
    """What a run did, in terms of slots: static, and valid for all objects of the structure."""

    changed: tuple[int, ...]  # the slots with a new value
    variable_count: int  # how many slots are Variables
    # None unless the structure changed; then every object among the arguments, and after them
    # those that were taken out of the arguments.
    argument_nodes: tuple[LeavingNode, ...] | None
    reused: tuple[int | None, ...]  # for each thing that leaves, its number among the inputs
    out_treedef: Any  # the tree of the output; None if it has no objects and passes as it is
    output_nodes: tuple[LeavingNode | None, ...]  # for each leaf of the output; None if plain
    # Whether the output was walked with the numbers of the arguments, so that its references may
    # mean them.
    counts_inputs: bool
    kept: tuple[tuple[int, int], ...] = ()  # input arrays in ``argument_nodes``: new and old number
    moved: tuple[tuple[int, int], ...] = ()  # slots that take the input array of another slot
    sown: tuple[tuple[int, Any], ...] = ()  # for nnx.capture: numbers of objects, and attributes
    # For each static value that leaves and is copied, its number among those that came in.
    reused_statics: tuple[int | None, ...] = ()
    # The objects whose private containers the function was given, and may have put elsewhere.
    handed_out: tuple[int, ...] = ()

    @functools.cached_property
    def writes_variables_only(self) -> bool:
        """Whether only values of Variables changed, and the output has no objects."""
        keeps_structure = self.argument_nodes is None and self.out_treedef is None
        return keeps_structure and not self.moved and self.last < self.variable_count

    @functools.cached_property
    def last(self) -> int:
        """The highest slot that changed, or -1."""
        return self.changed[-1] if self.changed else -1

    @functools.cached_property
    def pick(self) -> Callable[[list[Any]], Any]:
        """Picks the items of changed Variables from a list with one for each Variable."""
        if len(self.changed) > 1:
            return operator.itemgetter(*self.changed)
        # For one number or none an itemgetter gives no sequence, but for a slice it does.
        return operator.itemgetter(slice(self.last, self.last + 1) if self.changed else slice(0))


class Outcome:
    """What a run did, as a pytree: effects (static), and the arrays that belong to them."""

    __slots__ = ("effects", "new", "plain", "written")

    def __init__(self, effects: Effects, arrays: tuple[Any, Any, Any]):
        self.effects = effects
        # The new values of the slots in ``effects.changed``, the arrays of new Variables and
        # objects, and the plain leaves of the output.
        self.written, self.new, self.plain = arrays


def with_arrays(outcome: Outcome) -> Outcome:
    """The outcome with arrays for numbers in objects, which jax.checkpoint and checkify return."""
    written, new = jax.tree_util.tree_map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x, getattr(x, "dtype", None)),
        (outcome.written, outcome.new),
    )
    return Outcome(outcome.effects, (written, new, outcome.plain))


register_pytree_node(Outcome, lambda o: ((o.written, o.new, o.plain), o.effects), Outcome)
