"""Filters: what selects Variables by type, tag, path, or any predicate.

A filter is a type of Variable, a tag, ``...``, a boolean, ``None``, a sequence of filters, one of
the classes below, or any function of ``(path, value)``.
"""

from __future__ import annotations

import builtins
import dataclasses
import fnmatch
from collections.abc import Callable, Hashable, Iterable
from types import EllipsisType
from typing import Any as AnyValue

from linnet.errors import FilterError

Path = tuple[Hashable, ...]
Predicate = Callable[[Path, AnyValue], bool]
FilterLiteral = type | str | Predicate | bool | EllipsisType | None
Filter = FilterLiteral | tuple["Filter", ...] | list["Filter"]


class _Combined:
    """Filters combined; equal when class and parts are."""

    def __init__(self, *filters: Filter):
        self.predicates = tuple(map(to_predicate, filters))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.predicates))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"


class Any(_Combined):
    """Selects what at least one of the filters selects.

    Args:
      *filters: the filters; without any, nothing is selected.

    Returns:
      A filter.

    Raises:
      FilterError: one of them is not a filter.

    Example:
      >>> from linnet import nnx
      >>> nnx.Any(nnx.Param, "dropout")(("w",), nnx.Param(1.0))
      True
    """

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return builtins.any(predicate(path, x) for predicate in self.predicates)


class All(_Combined):
    """Selects what every one of the filters selects.

    Args:
      *filters: the filters; without any, everything is selected.

    Returns:
      A filter.

    Raises:
      FilterError: one of them is not a filter.

    Example:
      >>> from linnet import nnx
      >>> is_bias = nnx.All(nnx.Param, nnx.PathContains("bias"))
      >>> is_bias(("bias",), nnx.Param(1.0)), is_bias(("kernel",), nnx.Param(1.0))
      (True, False)
    """

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return builtins.all(predicate(path, x) for predicate in self.predicates)


class Not(_Combined):
    """Selects what the filter does not.

    Args:
      collection_filter: a filter.

    Returns:
      A filter.

    Raises:
      FilterError: it is not a filter.

    Example:
      >>> from linnet import nnx
      >>> nnx.Not(nnx.Param)(("mean",), nnx.BatchStat(1.0))
      True
    """

    def __init__(self, collection_filter: Filter, /):
        super().__init__(collection_filter)

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return not self.predicates[0](path, x)


@dataclasses.dataclass(frozen=True)
class WithTag:
    """Selects Variables whose metadata ``tag`` is this one, such as the streams of ``nnx.Rngs``.

    Args:
      tag: the tag.

    Returns:
      A filter.

    Example:
      >>> from linnet import nnx
      >>> nnx.WithTag("dropout")(("key",), nnx.Rngs(dropout=0).dropout.key)
      True
    """

    tag: str

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return _tag_of(x) == self.tag

    def __repr__(self) -> str:
        return f"WithTag({self.tag!r})"


@dataclasses.dataclass(frozen=True)
class HasTag:
    """Selects Variables that have a tag, whichever it is."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return _tag_of(x) is not None


def _tag_of(x: AnyValue) -> AnyValue:
    metadata = getattr(x, "_metadata", None)
    return metadata.get("tag") if metadata is not None else getattr(x, "tag", None)


@dataclasses.dataclass(frozen=True)
class PathContains:
    """Selects what has ``key`` as a step of its path; with ``exact=False``, as a part of a step.

    Args:
      key: the step: the name of an attribute, the position in a list, or the key in a dict.
      exact: whether a step must be equal to ``key``; otherwise its text must contain that of it.

    Returns:
      A filter.

    Example:
      >>> from linnet import nnx
      >>> path = ("encoder", "layers", 0, "kernel")
      >>> nnx.PathContains("layers")(path, None), nnx.PathContains("layer")(path, None)
      (True, False)
      >>> nnx.PathContains("layer", exact=False)(path, None)
      True
    """

    key: Hashable
    exact: bool = True

    def __call__(self, path: Path, x: AnyValue) -> bool:
        if self.exact:
            return self.key in path
        return builtins.any(str(self.key) in str(step) for step in path)

    def __repr__(self) -> str:
        return f"PathContains({self.key!r}{'' if self.exact else ', exact=False'})"


class PathIn:
    """Selects what stands at one of the given paths."""

    def __init__(self, *paths: Path):
        self.paths = frozenset(paths)
        self._listed = paths

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return path in self.paths

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathIn) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return f"PathIn({', '.join(map(repr, self._listed))})"


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """Selects what stands at a path that matches a pattern, and all that is below it.

    The steps of a path are joined by dots. In a step ``*``, ``?`` and ``[...]`` stand for text as
    in file names; the step ``**`` stands for any number of steps.

    Args:
      pattern: for example ``"encoder"``, ``"blocks.*.mlp"`` or ``"**.bias"``.

    Example:
      >>> from linnet import nnx
      >>> below = nnx.PathPattern("blocks.*.mlp")
      >>> below(("blocks", 3, "mlp", "kernel"), None), below(("blocks", 3, "norm"), None)
      (True, False)
    """

    pattern: str

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return _matches(self.pattern.split("."), [str(step) for step in path])

    def __repr__(self) -> str:
        return f"PathPattern({self.pattern!r})"


def _matches(pattern: list[str], path: list[str]) -> bool:
    """Whether a pattern names the path or something above it."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return builtins.any(_matches(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    if not path or not fnmatch.fnmatchcase(path[0], pattern[0]):
        return False
    return _matches(pattern[1:], path[1:])


@dataclasses.dataclass(frozen=True)
class OfType:
    """Selects Variables (and other values) of a type and its subclasses.

    Args:
      type: the type.

    Returns:
      A filter.

    Example:
      >>> from linnet import nnx
      >>> of_params = nnx.OfType(nnx.Param)
      >>> of_params(("w",), nnx.Param(1.0)), of_params(("w",), nnx.Cache(1.0))
      (True, False)
    """

    type: builtins.type

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return isinstance(x, self.type)

    def __repr__(self) -> str:
        return f"OfType({self.type!r})"


@dataclasses.dataclass(frozen=True)
class Everything:
    """Selects everything."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Selects nothing."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return False


def to_predicate(filter: Filter) -> Predicate:
    """The function of ``(path, value)`` that a filter stands for.

    Args:
      filter: any filter.

    Returns:
      The predicate.

    Raises:
      FilterError: it is not a filter.

    Example:
      >>> from linnet import nnx
      >>> to_predicate([nnx.Param, "rngs"])
      Any(OfType(<class 'linnet.nnx.variablelib.variable.Param'>), WithTag('rngs'))
    """
    if filter is Ellipsis or filter is True:
        return Everything()
    if filter is None or filter is False:
        return Nothing()
    if isinstance(filter, str):
        return WithTag(filter)
    if isinstance(filter, type):
        return OfType(filter)
    if isinstance(filter, (list, tuple)):
        return Any(*filter)
    if callable(filter):
        return filter
    raise FilterError(
        f"Not a filter: {filter!r} ({type(filter).__name__}).\n"
        "Fix: use a kind of Variable such as nnx.Param, a tag (str), `...`, True, False, None, "
        "a function of (path, value), a sequence of these, or nnx.All, nnx.Any, nnx.Not, "
        "nnx.PathContains, nnx.OfType."
    )


def filters_to_predicates(filters: Iterable[Filter]) -> tuple[Predicate, ...]:
    """The predicates of several filters that divide something among them.

    Args:
      filters: the filters; the first that selects a value gets it.

    Returns:
      One predicate a filter.

    Raises:
      FilterError: ``...`` or ``True`` stands before another filter, which could get nothing.
    """
    filters = tuple(filters)
    for position, filter in enumerate(filters[:-1]):
        if filter is Ellipsis or filter is True:
            rest = filters[position + 1 :]
            if builtins.any(later is not Ellipsis and later is not True for later in rest):
                raise FilterError(
                    f"`...` or `True` can only be used as the last filter, but {filter!r} stands "
                    f"at position {position} before {rest}, which would get nothing.\n"
                    "Fix: move it to the end."
                )
    return tuple(map(to_predicate, filters))
