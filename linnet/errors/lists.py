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

    Args:
      lines: the lines.
      most: how many of them to keep.

    Returns:
      The lines.

    Example:
      >>> first_lines("abc", 3), first_lines("abcd", 3)
      (['a', 'b', 'c'], ['a', 'b', 'c', 'and 1 more'])
    """
    lines = list(lines)
    more = len(lines) - most
    return [*lines[:most], f"and {more} more"] if more > 0 else lines


def list_lines(lines: Iterable[str], most: int = _MOST_LISTED) -> str:
    """Formats lines as a list in a message: the first ones, indented, and the number of others.

    Args:
      lines: the lines.
      most: how many of them to show.

    Returns:
      The text; empty if there are no lines.

    Example:
      >>> print(list_lines(f"layer {n}" for n in range(12)).splitlines()[-1])
        - and 2 more
    """
    return "\n".join(f"  - {line}" for line in first_lines(lines, most))


def path_lines(paths: Iterable[Any]) -> list[str]:
    """A line for each path, to be listed.

    Args:
      paths: the paths, each a sequence of steps.

    Returns:
      The lines.

    Example:
      >>> path_lines([("blocks", 3), ()])
      ['.blocks[3]', '(the root)']
    """
    return [path_string(path) or "(the root)" for path in paths]


def list_paths(paths: Iterable[Any]) -> str:
    """Formats paths as a list in a message, as ``list_lines`` does.

    Args:
      paths: the paths, each a sequence of steps.

    Returns:
      The text; empty if there are no paths.

    Example:
      >>> print(list_paths([("blocks", 3), ()]))
        - .blocks[3]
        - (the root)
    """
    return list_lines(path_lines(paths))


def name_some(names: Iterable[str], most: int = _MOST_LISTED, others: str = " and {} more") -> str:
    """Formats names in one line: the first ones and, in the words of ``others``, the number left.

    Args:
      names: the names.
      most: how many of them to show.
      others: what follows where there are more; ``{}`` stands for how many.

    Returns:
      The text; empty if there are no names.

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

    Args:
      lists: the lines of each list, by title.
      fix: how to mend it.
      summary: the first line of the message.
      most: how many lines of a list to show.

    Returns:
      The message.

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

    Args:
      wanted: the entries that there should be, by path.
      given: the entries that there are, by path.
      compare: ``compare(path, wanted, given)`` describes how two entries differ; None, False or an
        empty text means that they fit. Left out, only the paths are compared.

    Returns:
      The missing paths, the extra ones, and a line for each entry that differs.

    Example:
      >>> compare_entries({("a",): 1}, {("b",): 1}).missing
      [('a',)]
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

    Args:
      wanted: the entries that there should be, by path.
      given: the entries that there are, by path.
      compare: as for ``compare_entries``.
      summary: the first line of the message.
      titles: of the missing paths, of the extra ones, and of the entries that differ.
      fix: how to mend it.

    Raises:
      StateMismatchError: with every path that does not fit.

    Example:
      >>> check_entries(
      ...     {("a",): 1}, {("b",): 1}, lambda *_: None, summary="These differ:",
      ...     titles=("Missing", "Extra", "Different"), fix="rename them.")
      Traceback (most recent call last):
      linnet.errors.StateMismatchError: These differ:
      Missing:
        - .a
      Extra:
        - .b
      Fix: rename them.
    """
    found = compare_entries(wanted, given, compare)
    if any(found):
        raise StateMismatchError(misfit_text(found.under(*titles), fix=fix, summary=summary))
