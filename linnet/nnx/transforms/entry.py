"""What ``nnx.jit`` compiled: an entry for each structure of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from linnet.nnx.graphlib.walk import HashedDefinition
from linnet.nnx.transforms.arguments import Donated, StaticArguments
from linnet.nnx.transforms.donation import DonatingFunction
from linnet.nnx.transforms.effects import GraphUpdates, Outcome
from linnet.nnx.transforms.engine import Structure
from linnet.nnx.variablelib.storage import from_refs, settle_seeds


class Signature(NamedTuple):
    """What of a call does not depend on which objects it gets.

    Attributes:
      graph: whether it is made in graph mode.
      updates: its graph updates.
      is_capturing: whether ``nnx.capture`` waits for what is sown.
      treedef: the tree of the arguments, objects being leaves.
      static: the static arguments.
      are_nodes: for each leaf, whether it is an object or a Variable.
    """

    graph: bool
    updates: GraphUpdates
    is_capturing: bool
    treedef: Any
    static: StaticArguments
    are_nodes: tuple[bool, ...]


class LatestNodes:
    """The definitions of the objects in the latest call of an entry.

    A trace builds its objects from these, not from the definitions that the entry was made for.
    Both are equal, but equal functions held by two models may be different objects, and the trace
    has to call those of the model it was given.
    ``are_outdated`` says that such a function read something that had changed since the walk: what
    was traced then must not be used again.
    """

    __slots__ = ("are_outdated", "hashed_definitions")

    def __init__(self, hashed_definitions: Iterable[HashedDefinition]):
        self.hashed_definitions = hashed_definitions
        self.are_outdated = False


class CompiledEntry:
    """The compiled function for one structure of the arguments and one set of static arguments.

    ``jit`` makes it with other options. ``uses_refs`` says whether Variables are stored as refs, to
    be read and written through them; ``takes_values`` whether random streams are passed as keys,
    not seeds, and no state is donated unasked: with refs, shardings, donated arguments, or compiled
    ahead of time. ``make_pure`` makes the function again, with other Variables donated;
    ``donating_function`` is a function compiled from it that donates state, False if there is none,
    and None before the first call decides that.
    """

    __slots__ = (
        "donated",
        "donating_function",
        "jit",
        "jitted",
        "latest",
        "make_pure",
        "takes_values",
        "uses_refs",
    )

    def __init__(
        self,
        structure: Structure,
        donated: Donated,
        jit: Callable[..., Any],
        takes_values: bool,
        make_pure: Callable[[Donated], Callable[..., Outcome]] | None,
        latest: LatestNodes,
    ):
        self.latest = latest
        self.donated = donated
        self.jit = jit
        self.jitted = jit()
        self.make_pure = make_pure
        self.donating_function: DonatingFunction | Literal[False] | None = None
        self.uses_refs = any(x.static.stored_as_ref for x in structure.variable_definitions)
        self.takes_values = takes_values or self.uses_refs

    def read(self, cells: list[Any]) -> list[Any]:
        """The values in the cells of Variables, as the function takes them."""
        values = [cell.value for cell in cells]
        if self.uses_refs:
            return list(map(from_refs, values))
        return settle_seeds(values) if self.takes_values else values

    def _compiled(self) -> set[Any]:
        return {self.jitted, (self.donating_function or self).jitted}

    def cache_size(self) -> int:
        """How often this was compiled."""
        return sum(jitted._cache_size() for jitted in self._compiled())

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        for jitted in self._compiled():
            jitted.clear_cache()


class SignatureTable:
    """The entries and plans for calls that differ in nothing but their objects.

    ``plans`` has the plans by the ids of the objects. The entries are found by the definitions of
    the objects; those equal to the ones of the call before are found by comparing, without a hash,
    which is a test of identity once they were found equal.
    """

    __slots__ = ("_entries", "_last", "plans")

    def __init__(self) -> None:
        self.plans: dict[tuple[int, ...], Any] = {}
        self._entries: dict[Any, CompiledEntry] = {}
        self._last: tuple[Any, Any] = (None, None)  # one object, so that threads see both or none

    def find(self, definitions: tuple[Any, ...]) -> CompiledEntry | None:
        """The entry for objects of these definitions, if there is one."""
        last, entry = self._last
        if last == definitions:
            return entry
        entry = self._entries.get(definitions)
        if entry is not None:
            self._last = (definitions, entry)
        return entry

    def add(self, definitions: tuple[Any, ...], entry: CompiledEntry) -> None:
        """Adds an entry."""
        self._entries[definitions] = entry


class CompiledFunctions:
    """All that was compiled for one function, under the names that ``jax.jit`` has for it."""

    def __init__(self, function: Any):
        self._function = function

    def _cache_size(self) -> int:
        return sum(entry.cache_size() for entry in self._function._entries.values())

    def clear_cache(self) -> None:
        """Forgets everything compiled so far."""
        self._function.clear_cache()
