"""The places of arguments that hold arrays, and what a run did to each of them.

Variables come first, arrays that stand directly in objects after them, numbered together: a
transform that carries or maps values treats both alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from linnet.errors import path_string
from linnet.nnx.graphlib.definition import LEAF, Definition
from linnet.nnx.kinds import key_name
from linnet.nnx.transforms.lift import Inside, is_node, open_tree
from linnet.nnx.transforms.run import Call

Path = tuple[Any, ...]


class Slots:
    """The slots of one call.

    Args:
      call: the call.
    """

    def __init__(self, call: Call):
        opened = call.opened
        self.call = call
        self.values: list[Any] = opened.values + opened.arrays
        self.paths: list[Path] = opened.variable_paths + opened.array_paths
        self.variables = len(opened.variables)
        self.plain: list[Any] = opened.plain
        leaves = jax.tree_util.tree_leaves_with_path(opened.tree, is_leaf=is_node)
        paths = [(tuple(key_name(key) for key in path), leaf) for path, leaf in leaves]
        self.node_paths: list[Path] = [path for path, leaf in paths if is_node(leaf)]
        self.plain_paths: list[Path] = [path for path, leaf in paths if not is_node(leaf)]

    def where(self, number: int) -> str:
        """Where a slot stands, for a message."""
        return self.call.where(self.paths[number])

    def run(self, values: list[Any], plain: Any, fixed: Any = frozenset()) -> Run:
        """Runs the function with these values, inside the transform.

        Args:
          values: one for each slot.
          plain: the other leaves of the arguments.
          fixed: slots that are not expected to change; refs among them are not made anew.

        Returns:
          What the run did.
        """
        count = self.variables
        inside, news, leaves, out = self.call.run(values[:count], values[count:], plain, fixed)
        return Run(self, inside, news, leaves, out)


class Run:
    """What one run did: to the slots, and what it made and returned.

    Attributes:
      now: the value of each slot after the run.
      changed: the slots that were written to.
      fresh: the arrays of new Variables and objects.
      leaves: the plain leaves of the output.
      out: the output.
    """

    def __init__(self, slots: Slots, inside: Inside, news: list[Any], leaves: Any, out: Any):
        effects = slots.call.effects
        assert effects is not None
        self.slots = slots
        self.inside = inside
        self.effects = effects
        self.leaves = leaves
        self.out = out
        self._made = len(news)
        self._moved = self._moved_arrays()
        before = inside.arrays
        self.now = inside.slot_values()
        for made, number in self._moved.items():
            self.now[number] = news[made]
        arrays = {n for n in self._moved.values() if self.now[n] is not before[n - slots.variables]}
        self.changed: set[int] = set(effects.changed) | arrays
        self.fresh = [x for made, x in enumerate(news) if made not in self._moved]

    def _moved_arrays(self) -> dict[int, int]:
        """For what goes out in place of an array that came in, the slot of that array."""
        slots = self.slots
        count = slots.variables
        numbers = {path: count + n for n, path in enumerate(slots.paths[count:])}
        return {
            made: numbers[path]
            for path, made, definition in self._parts()
            if definition == LEAF and path in numbers
        }

    def _parts(self) -> Iterator[tuple[Path, int, Definition]]:
        """What goes out as part of the arguments: path, number, and what it is."""
        for prefix, part in zip(self.slots.node_paths, self.effects.parts or (), strict=False):
            for path, slot in part.leaves:
                if not slot.old:
                    yield (*prefix, *path), slot.number, part.definition.at(path)

    def fresh_places(self) -> Iterator[tuple[int, Path]]:
        """For each of ``fresh`` that became part of an argument, its number there and its path."""
        order = self._order()
        for path, made, _ in self._parts():
            if made in order:
                yield order[made], path

    def fresh_outputs(self) -> Iterator[tuple[int, int, Path]]:
        """For each of ``fresh`` in the output, its number, that of the leaf, and its path there."""
        order = self._order()
        for leaf, part in enumerate(self.effects.out_parts):
            for path, slot in part.leaves if part is not None else ():
                if not slot.old:
                    yield order[slot.number], leaf, path

    def fresh_names(self) -> list[str]:
        """Where each of ``fresh`` stands, for messages."""
        leaves = jax.tree_util.tree_leaves_with_path(self.out, is_leaf=is_node)
        names = [""] * len(self.fresh)
        for number, path in self.fresh_places():
            names[number] = self.slots.call.where(path)
        for number, position, path in self.fresh_outputs():
            names[number] = output_text(leaves[position][0], path)
        return names

    def _order(self) -> dict[int, int]:
        made = [n for n in range(self._made) if n not in self._moved]
        return {number: position for position, number in enumerate(made)}

    def form(self) -> Any:
        """What the run did to the structure of the arguments, comparable; None if nothing."""
        effects, inside = self.effects, self.inside
        if effects.parts is None:
            return None
        kept = effects.reused[: len(inside.objects)]
        parts = tuple(
            (part.definition, tuple((path, self._content(slot)) for path, slot in part.leaves))
            for part in effects.parts
        )
        same = all(
            content == self._came(prefix + path)
            for prefix, (_, leaves) in zip(self.slots.node_paths, parts, strict=True)
            for path, content in leaves
        )
        before = [d for d in inside.structure.definitions if d is not None]
        if same and [d for d, _ in parts] == before and kept == tuple(range(len(inside.objects))):
            return None
        return parts, kept

    def _content(self, slot: Any) -> Any:
        if slot.old:
            return slot.number
        return self._moved.get(slot.number, "new")

    def _came(self, path: Path) -> Any:
        """The slot that had this path when it came in."""
        return self.slots.paths.index(path) if path in self.slots.paths else None

    def difference(self) -> str:
        """How the structure of the arguments changed, in words."""
        call = self.slots.call
        now = open_tree(self.inside.tree, True, call.api).structure
        return call.difference(now)

    def forget(self) -> None:
        """Lets go of tracers: what outlives the trace must not hold on to them."""
        del self.inside, self.now, self.fresh, self.leaves, self.out

    def close(self, final: dict[int, Any], fresh: list[Any], leaves: Any) -> Any:
        """Writes the run out.

        Args:
          final: the values of the slots that changed.
          fresh: as ``fresh``.
          leaves: as ``leaves``.

        Returns:
          The output.
        """
        slots = self.slots
        order = self._order()
        news = [
            fresh[order[made]]
            if made in order
            else final.get(self._moved[made], slots.values[self._moved[made]])
            for made in range(self._made)
        ]
        in_place = self.effects.parts is None  # otherwise arrays go out with the structure
        changed = tuple(n for n in sorted(final) if in_place or n < slots.variables)
        slots.call.effects = dataclasses.replace(self.effects, changed=changed, kept=())
        return slots.call.close([final[n] for n in changed], news, leaves)


def output_text(keys: Any, path: Path = ()) -> str:
    """A place in the output, for a message."""
    return "the output" + path_string((*(key_name(key) for key in keys), *path))
