"""Nested mappings flattened to paths and back, under the names of NNX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linnet import traverse_util
from linnet.traverse_util import EmptyNode as EmptyNode, IsLeaf, Path, empty_node as empty_node


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
    traverse_util.check_mapping(xs, "flatten_to_sequence")
    return list(traverse_util.iter_entries(xs, is_leaf=is_leaf))


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Flattens nested mappings to a dict of leaves by path; ``traverse_util.flatten_dict``.

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
    traverse_util.check_mapping(xs, "flatten_mapping")
    return traverse_util.flatten_dict(xs, keep_empty_nodes, is_leaf, sep)


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
    return traverse_util.unflatten_dict(xs, sep)
