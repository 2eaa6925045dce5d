"""Nested mappings flattened to paths and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]
IsLeaf = Callable[[Path, Any], bool]


class EmptyNode:
    """Stands for an empty mapping among flat entries."""

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


def flatten_to_sequence(
    xs: Mapping[Any, Any], /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[Path, Any]]:
    """The leaves of nested mappings with their paths.

    Args:
      xs: nested mappings.
      is_leaf: a function of path and value that stops the descent.

    Returns:
      Pairs of path and leaf.
    """
    return list(_entries(xs, (), False, is_leaf))


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """The leaves of nested mappings by path.

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
    pairs = _entries(xs, (), keep_empty_nodes, is_leaf)
    return {path if sep is None else sep.join(map(str, path)): value for path, value in pairs}


def unflatten_mapping(xs: Mapping[Any, Any], /, *, sep: str | None = None) -> dict[Any, Any]:
    """Nested dicts from leaves by path; the reverse of ``flatten_mapping``.

    Args:
      xs: a flat mapping.
      sep: what joins the steps of a path, if paths are strings.

    Returns:
      Nested dicts.

    Example:
      >>> unflatten_mapping({("a", "b"): 1})
      {'a': {'b': 1}}
    """
    nested: dict[Any, Any] = {}
    for path, value in xs.items():
        steps = path.split(sep) if sep is not None else path
        node = nested
        for step in steps[:-1]:
            node = node.setdefault(step, {})
        node[steps[-1]] = {} if isinstance(value, EmptyNode) else value
    return nested
