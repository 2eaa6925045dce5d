"""Applying a map of names to a model: which stored tensors make which entries of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from linnet.io.names.rules import STAR, MisfitError, NameMap, Rule, Shape
from linnet.io.shared.entries import Path, steps_as_text
from linnet.io.shared.matching import STACKED

Entries = Mapping[tuple[str, ...], tuple[Path, Shape]]  # by the path that a pattern is to fit
Captured = tuple[str | None, ...]  # None where the model has its layers stacked


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One of the model's tensors, or a layer of one that is stacked."""

    path: Path
    index: tuple[int, ...]  # the positions of the layer on the first axes
    shape: Shape  # of the layer


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Stored tensors and the tensors of the model that one rule makes of them."""

    rule: Rule
    stored: tuple[str, ...]
    targets: tuple[Target, ...]
    index: tuple[int, ...] = ()  # of the layer in the only stored tensor, if that is a stack

    def stored_shapes(self) -> list[Shape]:
        """The shapes that the stored tensors have to have."""
        return self.rule.stored_shapes([target.shape for target in self.targets])


def apply_map(
    names: NameMap, shapes: Mapping[Path, Shape], aliases: Mapping[Path, Path]
) -> tuple[list[Unit], list[Path]]:
    """Applies a map to a model with these shapes; ``aliases`` are the further paths of its entries.

    Returns the units, and the entries that no rule names, or of which it names only some layers.
    """
    entries = {steps_as_text(path): (path, shape) for path, shape in shapes.items()}
    entries |= {steps_as_text(alias): (path, shapes[path]) for alias, path in aliases.items()}
    units: list[Unit] = []
    stored: set[str] = set()
    claimed: dict[Path, set[tuple[int, ...]]] = {path: set() for path in shapes}
    for rule in names.rules:
        for unit in _units(rule, entries):
            taken = any(target.index in claimed[target.path] for target in unit.targets)
            if taken or stored & set(unit.stored):
                continue
            units.append(unit)
            stored.update(unit.stored)
            for target in unit.targets:
                claimed[target.path].add(target.index)
    return units, [path for path in shapes if not _is_covered(shapes[path], claimed[path])]


def _is_covered(shape: Shape, indices: set[tuple[int, ...]]) -> bool:
    depth = len(next(iter(indices), ()))
    return len(indices) == math.prod(shape[:depth])


def _find(pattern: str, rank: int | None, entries: Entries) -> dict[tuple[str, ...], Target]:
    """The entries that fit a pattern, stacked ones by layer; keys are what the stars stand for."""
    steps = tuple(pattern.split("/"))
    found: dict[tuple[str, ...], Target] = {}
    for name in entries if STAR in pattern else {steps} & entries.keys():
        if (captured := _capture(steps, name)) is None:
            continue
        for caught, target in _layers(*entries[name], captured):
            if rank is None or len(target.shape) == rank:
                found.setdefault(caught, target)
    return found


def _capture(pattern: Sequence[str], path: Sequence[str]) -> Captured | None:
    """The steps that the stars of a pattern match in a path, or None if it does not match."""
    if not pattern:
        return None if path else ()
    head, rest = pattern[0], pattern[1:]
    if head != STAR:
        return _capture(rest, path[1:]) if path and path[0] == head else None
    if path:
        caught = None if path[0] == STACKED else path[0]
        if (below := _capture(rest, path[1:])) is not None:
            return (caught, *below)
    # Layers that are scanned over by hand have no step of their own.
    below = _capture(rest, path)
    return None if below is None else (None, *below)


def _layers(
    path: Path, shape: Shape, captured: Captured
) -> Iterator[tuple[tuple[str, ...], Target]]:
    """The layers of an entry, each with its numbers in place of the None in ``captured``."""
    depth = captured.count(None)
    if len(shape) < depth:
        return
    for index in itertools.product(*map(range, shape[:depth])):
        numbers = iter(index)
        caught = tuple(str(next(numbers)) if text is None else text for text in captured)
        yield caught, Target(path, index, shape[depth:])


def _units(rule: Rule, entries: Entries) -> Iterator[Unit]:
    """The units that a rule makes: one for each match of its ``*`` for which all paths exist."""
    rank = len(rule.pattern.model) if rule.pattern else None
    found = [_find(path, rank, entries) for path in rule.paths]
    for caught in found[0]:
        if not all(caught in by_star for by_star in found):
            continue
        targets = tuple(by_star[caught] for by_star in found)
        unit = Unit(rule, tuple(fill(name, caught) for name in rule.stored), targets)
        try:
            unit.stored_shapes()
        except MisfitError:
            continue
        yield unit


def fill(pattern: str, caught: Sequence[Any]) -> str:
    """A pattern with its stars replaced."""
    pieces = pattern.split(STAR)
    texts = itertools.chain(map(str, caught), itertools.repeat(""))
    return "".join(piece + text for piece, text in zip(pieces, texts, strict=False))


def rule_paths(names: NameMap, stored: str) -> list[str]:
    """The paths that rules give a stored tensor, for errors."""
    found = []
    for rule in names.rules:
        for name in rule.stored:
            caught = _capture(name.split("."), stored.split("."))
            if caught is not None and None not in caught:
                found += [fill(path, caught) for path in rule.paths]
    return list(dict.fromkeys(found))
