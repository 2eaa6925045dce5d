"""Nested dicts flattened to paths and back, and traversals that read and change parts of data.

``put_leaf`` builds nested dicts from paths, in states and in the bridge too, and in ``linnet.io``,
whose ``nest_containers`` makes lists and tuples of some of them.
``linnet.nnx.traversals`` offers the same flattening under the names of NNX.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax

Path = tuple[Any, ...]
IsLeaf = Callable[[Path, Any], bool]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EmptyNode:
    """The entry of an empty mapping in a flat dict; a pytree without leaves."""

    def __repr__(self) -> str:
        return "empty_node"


empty_node = EmptyNode()


def iter_entries(
    xs: Any, path: Path = (), keep_empty_nodes: bool = False, is_leaf: IsLeaf | None = None
) -> Iterator[tuple[Path, Any]]:
    """Yields the path and value of each leaf of nested mappings."""
    if not isinstance(xs, Mapping) or (is_leaf is not None and is_leaf(path, xs)):
        yield path, xs
        return
    if not xs and keep_empty_nodes and path:
        yield path, empty_node
    for key, value in xs.items():
        yield from iter_entries(value, (*path, key), keep_empty_nodes, is_leaf)


def put_leaf(
    nested: dict[Any, Any],
    path: Path,
    leaf: Any,
    *,
    replace: bool = False,
    whole: Collection[int] = (),
) -> bool:
    """Sets a leaf in nested dicts, making those on the way; returns whether there was room for it.

    There is none at a path that is taken, or leads through another leaf; then nothing is changed.
    With ``replace`` a leaf may take the place of another or of an empty dict, and a dict that of a
    dict. ``whole`` has the ids of dicts that are leaves themselves, and are not entered.
    """
    node = nested
    for key in path[:-1]:
        if key in node:
            node = node[key]
            if type(node) is not dict or (whole and id(node) in whole):
                return False
        else:
            node[key] = below = {}
            node = below
    last = path[-1]
    if last in node:
        is_leaf = type(node[last]) is not dict or not node[last]
        if not replace or not (is_leaf or type(leaf) is dict):
            return False
    node[last] = leaf
    return True


def taken_place(nested: dict[Any, Any], path: Path) -> Path:
    """Where ``put_leaf`` found no room: the path of a leaf above, or ``path`` itself."""
    node = nested
    for end, key in enumerate(path[:-1], 1):
        node = node[key]
        if type(node) is not dict:
            return path[:end]
    return path


class _NotNested(TypeError, AssertionError):
    """Nested mappings were asked for, and something else was given."""


def check_mapping(xs: Any, api: str) -> None:
    """Raises a TypeError (also an AssertionError) for anything but a mapping."""
    if not isinstance(xs, Mapping):
        raise _NotNested(
            f"{api} takes nested mappings, but got {type(xs).__name__}.\n"
            "Fix: pass a dict, or nnx.to_pure_dict(nnx.state(model)) for a model."
        )


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Flattens nested dicts to one dict of leaves by path.

    Args:
      xs: nested dicts, or other mappings.
      keep_empty_nodes: keep empty dicts as ``empty_node``; otherwise they are lost.
      is_leaf: a function of path and value that stops the descent.
      sep: join the steps of a path to one string with this between them.

    Returns:
      A flat dict, whose keys are tuples of steps or, with ``sep``, strings.

    Raises:
      TypeError: ``xs`` is not a mapping.

    Example:
      >>> from linnet import traverse_util
      >>> traverse_util.flatten_dict({"a": {"b": 1}, "c": 2})
      {('a', 'b'): 1, ('c',): 2}
    """
    check_mapping(xs, "flatten_dict")
    pairs = iter_entries(xs, (), keep_empty_nodes, is_leaf)
    return {path if sep is None else sep.join(map(str, path)): value for path, value in pairs}


def unflatten_dict(xs: Any, sep: str | None = None) -> dict[Any, Any]:
    """Makes nested dicts from leaves by path; the reverse of ``flatten_dict``.

    Args:
      xs: a flat mapping, or pairs of path and leaf.
      sep: what joins the steps of a path, if paths are strings.

    Returns:
      Nested dicts.

    Raises:
      ValueError: one path leads through the leaf of another, or is empty.

    Example:
      >>> from linnet import traverse_util
      >>> traverse_util.unflatten_dict({"a/b": 1, "c": 2}, sep="/")
      {'a': {'b': 1}, 'c': 2}
    """
    nested: dict[Any, Any] = {}
    whole: set[int] = set()
    for path, value in xs.items() if isinstance(xs, Mapping) else xs:
        steps = tuple(path.split(sep) if sep is not None else path)
        leaf = {} if isinstance(value, EmptyNode) else value
        if not steps or not put_leaf(nested, steps, leaf, whole=whole):
            raise ValueError(
                f"Cannot place the leaf at {path!r}: another leaf stands there, above it or "
                "below it.\nFix: give each leaf a path of its own."
            )
        if type(leaf) is dict:
            whole.add(id(leaf))
    return nested


def path_aware_map(f: Callable[[Path, Any], Any], nested_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Maps a function of path and leaf over nested dicts.

    Args:
      f: a function of the path, a tuple of steps, and the leaf.
      nested_dict: nested dicts, or other mappings.

    Returns:
      Nested dicts of what ``f`` returned; empty dicts stay.

    Example:
      >>> from linnet import traverse_util
      >>> params = {"dense": {"kernel": 1.0, "bias": 2.0}}
      >>> traverse_util.path_aware_map(lambda path, x: x * ("bias" not in path), params)
      {'dense': {'kernel': 1.0, 'bias': 0.0}}
    """
    check_mapping(nested_dict, "path_aware_map")
    flat = iter_entries(nested_dict, (), keep_empty_nodes=True)
    return unflatten_dict((path, x if isinstance(x, EmptyNode) else f(path, x)) for path, x in flat)


# ---- traversals ---------------------------------------------------------------------------------


class Traversal(abc.ABC):
    """What selects parts of nested data, to read them or to change them in a copy.

    Longer traversals are made from ``t_identity``: ``t_identity["params"].each().filter(fn)``.

    Example:
      >>> from linnet.traverse_util import t_identity
      >>> data = {"a": [1, 2], "b": 3}
      >>> evens = t_identity["a"].each().filter(lambda x: x % 2 == 0)
      >>> list(evens.iterate(data)), evens.update(lambda x: 10 * x, data)
      ([2], {'a': [1, 20], 'b': 3})
    """

    @abc.abstractmethod
    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        """A copy of the data in which the selected parts went through a function.

        Args:
          fn: the function.
          inputs: the data, which stay as they are.

        Returns:
          The copy.
        """

    @abc.abstractmethod
    def iterate(self, inputs: Any) -> Iterator[Any]:
        """The selected parts, one after another.

        Args:
          inputs: the data.

        Returns:
          An iterator.
        """

    def set(self, values: Iterable[Any], inputs: Any) -> Any:
        """A copy of the data with other values in the selected places.

        Args:
          values: one for each selected part, in the order of ``iterate``.
          inputs: the data.

        Returns:
          The copy.

        Raises:
          ValueError: there are too few values, or too many.
        """
        given = list(values)
        taken = 0

        def take(_: Any) -> Any:
            nonlocal taken
            taken += 1
            return given[taken - 1] if taken <= len(given) else None

        changed = self.update(take, inputs)
        if taken != len(given):
            raise ValueError(
                f"{'Not enough' if taken > len(given) else 'Too many'} values provided: the "
                f"traversal selects {taken} parts, but got {len(given)} values.\n"
                "Fix: give one value for each part."
            )
        return changed

    def compose(self, other: Traversal) -> Traversal:
        """Selects with ``other`` inside of what this one selects."""
        return TraverseCompose(self, other)

    def merge(self, *traversals: Traversal) -> Traversal:
        """Selects with each of several traversals inside of what this one selects."""
        return self.compose(TraverseMerge(*traversals))

    def each(self) -> Traversal:
        """Selects the entries of a list, tuple or dict."""
        return self.compose(TraverseEach())

    def tree(self) -> Traversal:
        """Selects the leaves of a pytree."""
        return self.compose(TraverseTree())

    def filter(self, fn: Callable[[Any], bool]) -> Traversal:
        """Selects what a function of the value is true for."""
        return self.compose(TraverseFilter(fn))

    def __getitem__(self, key: Any) -> Traversal:
        return self.compose(TraverseItem(key))

    def __getattr__(self, attr: str) -> Traversal:
        if attr.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}")
        return self.compose(TraverseAttr(attr))


class TraverseId(Traversal):
    """Selects the data as a whole."""

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        return fn(inputs)

    def iterate(self, inputs: Any) -> Iterator[Any]:
        yield inputs


t_identity = TraverseId()


class TraverseCompose(Traversal):
    """Selects with one traversal inside of what another one selects.

    Args:
      x: the outer traversal.
      y: the inner one.
    """

    def __init__(self, x: Traversal, y: Traversal):
        self._outer, self._inner = x, y

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        return self._outer.update(lambda part: self._inner.update(fn, part), inputs)

    def iterate(self, inputs: Any) -> Iterator[Any]:
        for part in self._outer.iterate(inputs):
            yield from self._inner.iterate(part)


class TraverseMerge(Traversal):
    """Selects what each of several traversals selects, one after another.

    Args:
      *traversals: the traversals.
    """

    def __init__(self, *traversals: Traversal):
        self._traversals = traversals

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        for traversal in self._traversals:
            inputs = traversal.update(fn, inputs)
        return inputs

    def iterate(self, inputs: Any) -> Iterator[Any]:
        for traversal in self._traversals:
            yield from traversal.iterate(inputs)


class TraverseFilter(Traversal):
    """Selects the data if a function of it is true.

    Args:
      fn: the function.
    """

    def __init__(self, fn: Callable[[Any], bool]):
        self._fn = fn

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        return fn(inputs) if self._fn(inputs) else inputs

    def iterate(self, inputs: Any) -> Iterator[Any]:
        if self._fn(inputs):
            yield inputs


class TraverseItem(Traversal):
    """Selects an entry by key or index, or a slice.

    ``update`` gets the entries of a slice one by one from a tuple, and the slice of a list whole.

    Args:
      key: a key, an index or a slice.
    """

    def __init__(self, key: Any):
        self._key = key
        self._is_slice = isinstance(key, slice)

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        if isinstance(inputs, tuple):
            new: Any = list(inputs)
            for number in range(len(new))[self._key] if self._is_slice else [self._key]:
                new[number] = fn(new[number])
            return _like(inputs, new)
        new = copy.copy(inputs)
        new[self._key] = fn(inputs[self._key])
        return new

    def iterate(self, inputs: Any) -> Iterator[Any]:
        if self._is_slice:
            yield from inputs[self._key]
        else:
            yield inputs[self._key]


class TraverseEach(Traversal):
    """Selects the entries of a list or tuple, or the values of a dict."""

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        _check_container(inputs)
        if isinstance(inputs, dict):
            return {key: fn(value) for key, value in inputs.items()}
        return _like(inputs, [fn(value) for value in inputs])

    def iterate(self, inputs: Any) -> Iterator[Any]:
        _check_container(inputs)
        yield from inputs.values() if isinstance(inputs, dict) else inputs


def _check_container(inputs: Any) -> None:
    if not isinstance(inputs, (list, tuple, dict)):
        raise ValueError(
            "Only the entries of a list, tuple or dict can be traversed, but got "
            f"{type(inputs).__name__}.\nFix: select a container first: t_identity[key].each()."
        )


def _like(sequence: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of the same type with other items."""
    cls = type(sequence)
    return cls(*items) if hasattr(cls, "_fields") else cls(items)


class TraverseTree(Traversal):
    """Selects the leaves of a pytree."""

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        return jax.tree_util.tree_map(fn, inputs)

    def iterate(self, inputs: Any) -> Iterator[Any]:
        yield from jax.tree_util.tree_leaves(inputs)


class TraverseAttr(Traversal):
    """Selects an attribute, of a dataclass, a named tuple or any other object.

    Args:
      attr: its name.
    """

    def __init__(self, attr: str):
        self._attr = attr

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        value = fn(getattr(inputs, self._attr))
        if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
            return dataclasses.replace(inputs, **{self._attr: value})
        if isinstance(inputs, tuple) and hasattr(inputs, "_replace"):
            return getattr(inputs, "_replace")(**{self._attr: value})  # noqa: B009
        new = copy.copy(inputs)
        setattr(new, self._attr, value)
        return new

    def iterate(self, inputs: Any) -> Iterator[Any]:
        yield getattr(inputs, self._attr)


class ModelParamTraversal(Traversal):
    """Selects the leaves of nested dicts of parameters by path.

    Args:
      filter_fn: a function of the path, a string such as ``"/dense/kernel"``, and the leaf.

    Example:
      >>> from linnet.traverse_util import ModelParamTraversal
      >>> kernels = ModelParamTraversal(lambda path, _: "kernel" in path)
      >>> kernels.update(lambda x: 2 * x, {"dense": {"kernel": 1.0, "bias": 5.0}})
      {'dense': {'bias': 5.0, 'kernel': 2.0}}
    """

    def __init__(self, filter_fn: Callable[[str, Any], bool]):
        self._filter_fn = filter_fn

    def _sorted(self, inputs: Any) -> Iterator[tuple[Path, Any, bool]]:
        """Each path with the value there, and whether that is selected."""
        if not isinstance(inputs, Mapping):
            raise ValueError(
                f"ModelParamTraversal goes through nested dicts, but got {type(inputs).__name__}.\n"
                "Fix: pass the parameters as nested dicts."
            )
        for path, value in sorted(
            iter_entries(inputs, (), True), key=lambda entry: tuple(map(str, entry[0]))
        ):
            name = "/" + "/".join(map(str, path))
            yield path, value, not isinstance(value, EmptyNode) and self._filter_fn(name, value)

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        entries = self._sorted(inputs)
        nested = unflatten_dict((path, fn(x) if selected else x) for path, x, selected in entries)
        return nested if isinstance(inputs, dict) else type(inputs)(nested)

    def iterate(self, inputs: Any) -> Iterator[Any]:
        return (value for _, value, selected in self._sorted(inputs) if selected)
