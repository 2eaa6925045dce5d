"""Filters: which collections of variables, or which random streams, are meant.

A filter is True for all, False for none, one name, a collection of names, or ``DenyList`` of such a
filter for all others. The functions here combine filters as one combines sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Union

from linnet.errors import InvalidFilterError

Filter = Union[bool, str, Collection[str], "DenyList"]
CollectionFilter = Filter
PRNGSequenceFilter = Filter


@dataclasses.dataclass(frozen=True, eq=True)
class DenyList:
    """The filter that takes all but what another filter takes.

    Args:
      deny: the other filter.

    Example:
      >>> from linnet.core import DenyList
      >>> from linnet.core.scope import in_filter
      >>> in_filter(DenyList("params"), "params"), in_filter(DenyList("params"), "cache")
      (False, True)
    """

    deny: Filter


def in_filter(filter_like: Filter, col: str) -> bool:
    """Whether a filter takes a name.

    Args:
      filter_like: the filter.
      col: the name of a collection or of a random stream.

    Returns:
      True if it does.

    Raises:
      InvalidFilterError: the first argument is no filter.
    """
    match filter_like:
        case bool():
            return filter_like
        case str():
            return col == filter_like
        case DenyList():
            return not in_filter(filter_like.deny, col)
        case Collection():
            return col in filter_like
    raise InvalidFilterError(filter_like)


def filter_to_set(x: Filter) -> set[str]:
    """The names that a filter takes, if they can be listed.

    Args:
      x: a filter, but not True and no DenyList.

    Returns:
      The names.

    Raises:
      AssertionError: the filter takes names without end.
      InvalidFilterError: the argument is no filter.
    """
    match x:
        case True | DenyList():
            raise AssertionError(f"The filter {x!r} takes more names than can be listed.")
        case False:
            return set()
        case str():
            return {x}
        case Collection():
            return set(x)
    raise InvalidFilterError(x)


def is_filter_empty(filter_like: Filter) -> bool:
    """Whether a filter takes no name at all.

    Args:
      filter_like: the filter.

    Returns:
      True for False, an empty collection, and the DenyList of all or of a DenyList.

    Raises:
      InvalidFilterError: the argument is no filter.
    """
    match filter_like:
        case bool():
            return not filter_like
        case str():
            return False
        case DenyList():
            return filter_like.deny is True or isinstance(filter_like.deny, DenyList)
        case Collection():
            return len(filter_like) == 0
    raise InvalidFilterError(filter_like)


def union_filters(a: Filter, b: Filter) -> Filter:
    """The filter that takes what either of two takes.

    Args:
      a, b: the two.

    Returns:
      The filter.

    Example:
      >>> from linnet.core.scope import DenyList, union_filters
      >>> sorted(union_filters("params", ["cache"])), union_filters("params", DenyList("params"))
      (['cache', 'params'], DenyList(deny=set()))
    """
    if a is True or b is True:
        return True
    match a, b:
        case DenyList(), DenyList():
            return DenyList(filter_to_set(a.deny) & filter_to_set(b.deny))
        case DenyList(), _:
            return DenyList(filter_to_set(a.deny) - filter_to_set(b))
        case _, DenyList():
            return DenyList(filter_to_set(b.deny) - filter_to_set(a))
    return filter_to_set(a) | filter_to_set(b)


def intersect_filters(a: Filter, b: Filter) -> Filter:
    """The filter that takes what both of two take.

    Args:
      a, b: the two.

    Returns:
      The filter.

    Example:
      >>> from linnet.core.scope import DenyList, intersect_filters
      >>> intersect_filters(["params", "cache"], DenyList("cache"))
      {'params'}
    """
    if a is True or b is True:
        return b if a is True else a
    match a, b:
        case DenyList(), DenyList():
            return DenyList(filter_to_set(a.deny) | filter_to_set(b.deny))
        case DenyList(), _:
            return filter_to_set(b) - filter_to_set(a.deny)
        case _, DenyList():
            return filter_to_set(a) - filter_to_set(b.deny)
    return filter_to_set(a) & filter_to_set(b)


def subtract_filters(a: Filter, b: Filter) -> Filter:
    """The filter that takes what the first takes and the second does not.

    Args:
      a: the first.
      b: the second.

    Returns:
      The filter.

    Example:
      >>> from linnet.core.scope import subtract_filters
      >>> subtract_filters(["params", "cache"], "cache"), subtract_filters(True, "cache")
      ({'params'}, DenyList(deny='cache'))
    """
    if b is True:
        return False
    match a, b:
        case True, _:
            return DenyList(b)
        case DenyList(), DenyList():
            return filter_to_set(b.deny) - filter_to_set(a.deny)
        case DenyList(), _:
            return DenyList(filter_to_set(a.deny) | filter_to_set(b))
        case _, DenyList():
            return filter_to_set(a) & filter_to_set(b.deny)
    return filter_to_set(a) - filter_to_set(b)


def group_collections(
    xs: Mapping[str, Any], col_filters: Sequence[CollectionFilter]
) -> Sequence[dict[str, Any]]:
    """Sorts collections into groups, each into that of the first filter that takes it.

    Args:
      xs: the collections by name.
      col_filters: one filter for each group.

    Returns:
      A dict of collections for each filter; those that no filter takes are left out.

    Example:
      >>> from linnet.core.scope import group_collections
      >>> group_collections({"params": 1, "cache": 2}, ["params", True])
      ({'params': 1}, {'cache': 2})
    """
    groups: list[dict[str, Any]] = [{} for _ in col_filters]
    for name, collection in xs.items():
        for group, col_filter in zip(groups, col_filters, strict=True):
            if in_filter(col_filter, name):
                group[name] = collection
                break
    return tuple(groups)
