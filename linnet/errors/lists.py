"""Lists of what does not fit: entries compared by path, long lists cut, and the message with them.

A message has one list or several, each under its title, the first entries of each and the number of
others, and at the end how to mend it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from linnet.errors.general import Path, StateMismatchError, path_string

_MOST_LISTED = 10

Compare = Callable[[Path, Any, Any], str | bool | None]


def first_lines(lines: Iterable[str], most: int = _MOST_LISTED) -> list[str]:
    """The first lines and, as the last one, the number of others.

    Example:
      >>> first_lines("abc", 3), first_lines("abcd", 3)
      (['a', 'b', 'c'], ['a', 'b', 'c', 'and 1 more'])
    """
    lines = list(lines)
    more = len(lines) - most
    return [*lines[:most], f"and {more} more"] if more > 0 else lines


def list_lines(lines: Iterable[str], most: int = _MOST_LISTED) -> str:
    """Formats lines as a list in a message: the first ones, indented, and the number of others.

    Example:
      >>> print(list_lines(f"layer {n}" for n in range(12)).splitlines()[-1])
        - and 2 more
    """
    return "\n".join(f"  - {line}" for line in first_lines(lines, most))


def path_lines(paths: Iterable[Any]) -> list[str]:
    """A line for each path, to be listed."""
    return [path_string(path) or "(the root)" for path in paths]


def list_paths(paths: Iterable[Any]) -> str:
    """Formats paths as a list in a message, as ``list_lines`` does."""
    return list_lines(path_lines(paths))


def name_some(names: Iterable[str], most: int = _MOST_LISTED, others: str = " and {} more") -> str:
    """Formats names in one line: the first ones and, in the words of ``others``, the number left.

    Example:
      >>> name_some("abc"), name_some("abcdefghijkl")
      ('a, b, c', 'a, b, c, d, e, f, g, h, i, j and 2 more')
      >>> name_some("abc", 2, ", ...")
      'a, b, ...'
    """
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (others.format(more) if more > 0 else "")


def misfit_text(
    lists: Mapping[str, Iterable[str]], *, fix: str, summary: str = "", most: int = _MOST_LISTED
) -> str:
    """The message of an error about what does not fit: lists of lines, each under its title.

    Lists without lines are left out. A single list needs no ``summary``: its title says it.

    Example:
      >>> print(misfit_text({"These differ": ["a: 1, not 2"], "New": []}, fix="leave them out."))
      These differ:
        - a: 1, not 2
      Fix: leave them out.
    """
    texts = {title: list_lines(lines, most) for title, lines in lists.items()}
    parts = [f"{title}:\n{text}" for title, text in texts.items() if text]
    return "\n".join([*filter(None, [summary]), *parts, f"Fix: {fix}"])


class Misfits(NamedTuple):
    """What does not fit between two mappings from path to entry."""

    missing: list[Path]
    extra: list[Path]
    differ: list[str]
    """A line for each entry that both have, but not alike."""

    def under(self, *titles: str) -> dict[str, list[str]]:
        """The lists under their titles: of missing paths, of extra ones, and of what differs."""
        lists = (path_lines(self.missing), path_lines(self.extra), self.differ)
        return dict(zip(titles, lists, strict=False))


def compare_entries(
    wanted: Mapping[Path, Any], given: Mapping[Path, Any], compare: Compare | None = None
) -> Misfits:
    """What does not fit between two mappings, in their order.

    ``compare(path, wanted, given)`` describes how two entries differ, if they do.
    """
    missing = [path for path in wanted if path not in given]
    extra = [path for path in given if path not in wanted]
    texts: list[Any] = []
    if compare is not None:
        texts = [compare(path, wanted[path], given[path]) for path in wanted if path in given]
    return Misfits(missing, extra, [str(text) for text in texts if text])


def check_entries(
    wanted: Mapping[Path, Any],
    given: Mapping[Path, Any],
    compare: Compare,
    *,
    summary: str,
    titles: tuple[str, str, str],
    fix: str,
) -> None:
    """Raises ``StateMismatchError`` unless two mappings have the same paths and entries that fit.

    ``compare`` is as for ``compare_entries``. The titles are those of the missing paths, of the
    extra ones, and of the entries that differ.
    """
    found = compare_entries(wanted, given, compare)
    if any(found):
        raise StateMismatchError(misfit_text(found.under(*titles), fix=fix, summary=summary))
