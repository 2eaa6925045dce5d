"""Nested mappings flattened to paths and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]
IsLeaf = Callable[[Path, Any], bool]


class EmptyNode:
    """The entry of an empty mapping in a flat dict."""

    def __repr__(self) -> str:
        return "empty_node"


empty_node = EmptyNode()


def _entries(
    xs: Any, path: Path, keep_empty_nodes: bool, is_leaf: IsLeaf | None
) -> Iterator[tuple[Path, Any]]:
    if not isinstance(xs, Mapping) or (is_leaf is not None and is_leaf(path, xs)):
        yield path, xs
        return
    if not xs and keep_empty_nodes and path:
        yield path, empty_node
    for key, value in xs.items():
        yield from _entries(value, (*path, key), keep_empty_nodes, is_leaf)


def _check_mapping(xs: Any, api: str) -> None:
    if not isinstance(xs, Mapping):
        raise TypeError(f"{api} takes nested mappings, but got {type(xs).__name__}.")


def flatten_to_sequence(
    xs: Mapping[Any, Any], /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, Any]]:
    """Lists the leaves of nested mappings with their paths.

    Args:
      xs: nested mappings.
      is_leaf: a function of path and value that stops the descent.

    Returns:
      Pairs of path and leaf.
    """
    _check_mapping(xs, "flatten_to_sequence")
    return list(_entries(xs, (), False, is_leaf))


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Flattens nested mappings to a dict of leaves by path.

    Args:
      xs: nested mappings.
      keep_empty_nodes: keep empty mappings as ``empty_node``.
      is_leaf: a function of path and value that stops the descent.
      sep: join the steps of a path to one string with this between them.

    Returns:
      A flat dict.

    Example:
      >>> flatten_mapping({"a": {"b": 1}}, sep="/")
      {'a/b': 1}
    """
    _check_mapping(xs, "flatten_mapping")
    pairs = _entries(xs, (), keep_empty_nodes, is_leaf)
    return {path if sep is None else sep.join(map(str, path)): value for path, value in pairs}


def unflatten_mapping(xs: Any, /, *, sep: str | None = None) -> dict[Any, Any]:
    """Makes nested dicts from leaves by path; the reverse of ``flatten_mapping``.

    Args:
      xs: a flat mapping, or pairs of path and leaf.
      sep: what joins the steps of a path, if paths are strings.

    Returns:
      Nested dicts.

    Raises:
      ValueError: one path leads through the leaf of another, or is empty.

    Example:
      >>> unflatten_mapping({("a", "b"): 1})
      {'a': {'b': 1}}
    """
    nested: dict[Any, Any] = {}
    made = {id(nested)}  # the dicts of the result, as opposed to dicts among the leaves
    for path, value in xs.items() if isinstance(xs, Mapping) else xs:
        steps = tuple(path.split(sep) if sep is not None else path)
        node = nested
        for step in steps[:-1]:
            if step not in node:
                node[step] = {}
                made.add(id(node[step]))
            node = node[step]
            if id(node) not in made:
                break
        if not steps or id(node) not in made or steps[-1] in node:
            raise ValueError(
                f"unflatten_mapping cannot place the leaf at {path!r}: another leaf stands there, "
                "above it or below it.\nFix: give each leaf a path of its own."
            )
        node[steps[-1]] = {} if isinstance(value, EmptyNode) else value
    return nested
