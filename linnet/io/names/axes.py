"""How the axes of a stored tensor lie in the model's: ``(head dim) width -> width head dim``.

The left side is the stored tensor, the right side the model's. Names stand for axes, parentheses
for axes that are one, the first name outermost. All sizes follow from the model's shape.

Where one stored tensor holds several of the model's, or the other way round, ``+`` marks the axis
along which they lie one behind the other, and the name ``part`` the axis on which they are stacked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from linnet.errors import NameMapError

PART = "part"
_SIDE = re.compile(r"(?:\s*(?:\((?:\s*\w+)*\s*\)|\w+)\+?)*\s*")
_GROUP = re.compile(r"(?:\(([\w\s]*)\)|(\w+))(\+?)")

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Side = tuple[tuple[str, ...], ...]
Array = np.ndarray[Any, Any]


class MisfitError(Exception):
    """A shape that a pattern cannot have."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """A parsed pattern.

    Args:
      stored: the axes of the stored tensor, each with the names that it consists of.
      ours: those of the model's tensor.
      stored_along: the stored axis along which the model's tensors lie; None without.
      ours_along: the model's axis along which stored tensors lie; None without.
    """

    stored: Side
    ours: Side
    stored_along: int | None = None
    ours_along: int | None = None

    @property
    def rank(self) -> int:
        """How many axes the model's tensor has."""
        return len(self.ours)

    def sizes(self, shape: Shape, known: Sizes) -> dict[str, int]:
        """The size of each name, from the shape of one of the model's tensors.

        Raises:
          MisfitError: there is no way to give the names sizes.
        """
        if len(shape) != len(self.ours):
            raise MisfitError
        sizes = dict(known)
        for names, size in zip(self.ours, shape, strict=True):
            open_names = [name for name in names if name not in sizes]
            rest = math.prod(sizes[name] for name in names if name in sizes)
            if len(open_names) > 1 or (open_names and (rest == 0 or size % rest)):
                raise MisfitError
            if open_names:
                sizes[open_names[0]] = size // rest
            elif rest != size:
                raise MisfitError
        return sizes


def shape_of(side: Side, sizes: Sizes) -> Shape:
    """The shape of a side whose names have these sizes."""
    return tuple(math.prod(sizes[name] for name in names) for names in side)


def moved(array: Array, source: Side, target: Side, sizes: Sizes) -> Array:
    """An array with the axes of one side, arranged as the other; a view where that is possible."""
    flat = [name for names in source for name in names]
    order = [flat.index(name) for names in target for name in names]
    apart = array.reshape([sizes[name] for name in flat])
    return apart.transpose(order).reshape(shape_of(target, sizes))


def divide(
    array: Array, source: Side, target: Side, along: int | None, every: Sequence[Sizes]
) -> list[Array]:
    """One array as several: lying along an axis of the source, or stacked on its axis ``part``.

    Args:
      array: the array, with the axes of the source.
      source: its axes.
      target: the axes of the results.
      along: the axis of the source along which the results lie.
      every: the sizes of names in each result.
    """
    if len(every) > 1 and along is None:
        return list(moved(array, source, ((PART,), *target), every[0]))
    pieces = [array]
    if len(every) > 1 and along is not None:
        ends = np.cumsum([shape_of(source, sizes)[along] for sizes in every])
        pieces = np.split(array, [int(end) for end in ends[:-1]], along)
    return [moved(piece, source, target, sizes) for piece, sizes in zip(pieces, every, strict=True)]


def unite(
    arrays: Sequence[Array], source: Side, target: Side, along: int | None, every: Sequence[Sizes]
) -> Array:
    """The reverse of ``divide``: ``along`` is an axis of the target."""
    if len(every) > 1 and along is None:
        return moved(np.stack(arrays), ((PART,), *source), target, every[0])
    pieces = [
        moved(array, source, target, sizes) for array, sizes in zip(arrays, every, strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, along or 0)


def united_shape(target: Side, along: int | None, every: Sequence[Sizes]) -> Shape:
    """The shape of what ``unite`` gives.

    Raises:
      MisfitError: the parts do not have the same sizes.
    """
    shapes = [shape_of(target, sizes) for sizes in every]
    if along is not None:
        total = sum(shape[along] for shape in shapes)
        shapes = [(*shape[:along], total, *shape[along + 1 :]) for shape in shapes]
    if len(set(shapes)) > 1:
        raise MisfitError
    return shapes[0]


@functools.cache
def parse(pattern: str) -> Axes:
    """Reads a pattern.

    Raises:
      NameMapError: it is none.

    Example:
      >>> parse("(head dim)+ width -> width head dim")
      Axes(stored=(('head', 'dim'), ('width',)), ours=(('width',), ('head',), ('dim',)),
           stored_along=0, ours_along=None)
    """
    sides = pattern.split("->")
    if len(sides) != 2 or not all(_SIDE.fullmatch(side) for side in sides):
        _refuse(pattern, "it is not of the form (head dim) width -> width head dim")
    (stored, stored_along), (ours, ours_along) = map(_side, sides)
    for side in (stored, ours):
        names = [name for group in side for name in group]
        if len(set(names)) < len(names):
            _refuse(pattern, "a side has a name twice")
    left, right = ({name for group in side for name in group} for side in (stored, ours))
    if (left ^ right) - {PART}:
        _refuse(pattern, f"{', '.join(sorted(left ^ right))} stands on one side only")
    both = (stored_along is not None) + (ours_along is not None) + (len({PART} & (left ^ right)))
    if both > 1:
        _refuse(pattern, "it has more than one + or part")
    return Axes(stored, ours, stored_along, ours_along)


def _side(text: str) -> tuple[Side, int | None]:
    groups, along = [], None
    for number, (group, name, plus) in enumerate(_GROUP.findall(text)):
        groups.append(tuple(group.split()) if not name else (name,))
        if plus:
            along = number if along is None else _refuse(text, "it has two +")
    return tuple(groups), along


def _refuse(pattern: str, why: str) -> Any:
    raise NameMapError(
        f"{pattern!r} does not say how axes are arranged: {why}.\n"
        "Fix: name each axis of the stored tensor, then ->, then those of the model's."
    )


def lengths(total: int, portions: Sequence[int]) -> list[int]:
    """A size divided in given proportions.

    Raises:
      MisfitError: it cannot be divided so.
    """
    if total % sum(portions):
        raise MisfitError
    unit = total // sum(portions)
    return [unit * portion for portion in portions]
