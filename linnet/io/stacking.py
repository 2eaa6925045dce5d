"""Where the value of a wanted entry comes from: a stored entry, a slice of one, or several stacked.

Layers that are scanned over hold ``layers/kernel`` (or, in an ``nnx.Stack``,
``layers/stacked/kernel``) with a leading axis; listed ones hold ``layers/0/kernel`` and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from linnet.io.entries import VALUE, Spec
from linnet.io.paths import Path, is_position

STACKED = "stacked"  # the step that nnx.Stack has where a list has a position

Lookup = Callable[[Path], "Whole | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A stored entry as it is."""

    path: Path
    spec: Spec

    def stored(self) -> Iterator[Path]:
        """The stored entries that are needed."""
        yield self.path

    def build(self, values: dict[Path, Any]) -> Any:
        """The value, from those of the stored entries."""
        return values[self.path]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One layer of stacked layers."""

    whole: Any
    position: int

    @property
    def spec(self) -> Spec:
        """The type of the layer's own entry."""
        spec = self.whole.spec
        return dataclasses.replace(spec, shape=spec.shape[1:])

    def stored(self) -> Iterator[Path]:
        """The stored entries that are needed."""
        return self.whole.stored()

    def build(self, values: dict[Path, Any]) -> Any:
        """The value, from those of the stored entries."""
        return self.whole.build(values)[self.position]


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Listed layers, to be stacked."""

    layers: tuple[Any, ...]

    @property
    def spec(self) -> Spec:
        """The type of the stacked entry."""
        spec = self.layers[0].spec
        return dataclasses.replace(spec, shape=(len(self.layers), *spec.shape))

    def stored(self) -> Iterator[Path]:
        """The stored entries that are needed."""
        for layer in self.layers:
            yield from layer.stored()

    def build(self, values: dict[Path, Any]) -> Any:
        """The value, from those of the stored entries."""
        import jax.numpy as jnp
        import numpy as np

        layers = [layer.build(values) for layer in self.layers]
        return (np if all(isinstance(x, np.ndarray) for x in layers) else jnp).stack(layers)


Source = Whole | Part | Stack


def same_stack(path: Path, lookup: Lookup) -> Source | None:
    """The stored stack that stands for another form of it: that of an ``nnx.Stack``, or not."""
    forms = [(*path[:at], *path[at + 1 :]) for at, step in enumerate(path) if step == STACKED]
    forms += [(*path[:at], STACKED, *path[at:]) for at in range(1, len(path) + 1)]
    found = (lookup(form) for form in forms)
    return next((whole for whole in found if whole and whole.spec.shape), None)


def part_of_stack(path: Path, lookup: Lookup) -> Source | None:
    """The slice of a stored stack that stands for a listed layer's entry."""
    # The last position first: of stacks in a stack, the outer one has the first axis.
    for at in reversed(range(len(path))):
        if not is_position(path[at]):
            continue
        position, above, below = int(path[at]), path[:at], path[at + 1 :]
        for stacked in ((*above, STACKED, *below), (*above, *below)):
            whole = lookup(stacked) or part_of_stack(stacked, lookup)
            if whole and whole.spec.kind != VALUE and position < (*whole.spec.shape, 0)[0]:
                return Part(whole, position)
    return None


def stack_of_parts(path: Path, lookup: Lookup, start: int = 1, depth: int = 2) -> Source | None:
    """The stack of stored listed layers' entries that stands for a stacked entry.

    Args:
      path: the wanted path.
      lookup: finds a stored entry.
      start: the first place in the path where a list may be.
      depth: how many lists may be inside each other.
    """
    for at in range(start, len(path) + 1):
        below = path[at + 1 :] if path[at : at + 1] == (STACKED,) else path[at:]
        layers: list[Any] = []
        while True:
            listed = (*path[:at], len(layers), *below)
            layer = lookup(listed)
            if layer is None and depth > 1:
                layer = stack_of_parts(listed, lookup, at + 1, depth - 1)
            if layer is None:
                break
            layers.append(layer)
        if layers and layers[0].spec.kind != VALUE and len({x.spec for x in layers}) == 1:
            return Stack(tuple(layers))
    return None


def layers_left(
    parts: Mapping[Path, set[int]], specs: Mapping[Path, Spec]
) -> dict[Path, list[int]]:
    """The layers of stored stacks that nothing asked for, by the path of the stack."""
    left = {
        path: [i for i in range(specs[path].shape[0]) if i not in positions]
        for path, positions in parts.items()
    }
    return {path: positions for path, positions in left.items() if positions}
