"""Live objects as flat maps from path to leaf, and values written back into them.

An item of a checkpoint is a module, an optimizer, a State, a Variable, an iterator with a position,
or a pytree of such objects, arrays and plain values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from linnet.errors import CheckpointArgumentError, TraceContextError, UnstorableError
from linnet.io.shared.entries import Path, Spec, leaf_spec, text_of, value_at
from linnet.io.shared.matching import Problem
from linnet.nnx.graphlib import find_duplicates
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.update import update_same_types
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.kinds import DICT, PYTREE, kind_of
from linnet.nnx.statelib import State, from_flat_state, iter_flat
from linnet.nnx.variablelib.variable import Variable, stored_value

_CONTAINER_BY_KIND = {kinds.LIST: "list", kinds.TUPLE: "tuple", DICT: "dict", PYTREE: "dict"}
_POSITION_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Contents:
    """What a set of items consists of, by path."""

    def __init__(self, items: Mapping[str, Any]):
        self.items = dict(items)
        self.leaves: dict[Path, Any] = {}  # arrays, shapes and plain values
        self.holders: dict[Path, Variable] = {}  # the Variable that a leaf is in
        self.variable_depths: dict[Path, int] = {}  # how many steps lead to that Variable
        self.containers: dict[Path, str] = {}  # outside of objects: `list`, `tuple` or `dict`
        self.aliases: list[tuple[Path, Path]] = []  # pairs that lead to one object or Variable
        self.iterators: dict[Path, PositionMethods] = {}
        self.wildcards: list[Path] = []  # where `...` stands: anything is wanted
        self.live: dict[Path, Any] = {}  # modules, Variables and States
        # Of each Variable and array in an object, the paths of its leaves and their treedef.
        self.treedefs: dict[Path, tuple[list[Path], Any]] = {}

    def specs(self) -> dict[Path, Spec]:
        """The type of each leaf; refuses a leaf that is neither an array nor a plain value."""
        return {
            path: leaf_spec(leaf) or refuse_type(path, leaf) for path, leaf in self.leaves.items()
        }


def refuse_type(path: Path, leaf: Any) -> NoReturn:
    raise UnstorableError(
        f"{text_of(path)} is a {type(leaf).__name__}, which a checkpoint cannot hold.\n"
        "Fix: pass arrays, numbers, text, bytes, None, containers of these, modules and States, or "
        "objects with get_state and set_state (or state_dict and load_state_dict)."
    )


def why_not_stored(leaf: Any, why_not_in_format: Callable[[Any], str]) -> str:
    """Why a leaf cannot be stored, in words; empty if it can.

    ``why_not_in_format`` says why not of leaves that other formats can hold, or returns "".
    """
    if isinstance(leaf, Tracer):
        return "is traced: nothing can be saved inside a function that JAX compiles"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "is abstract: it has a shape and no value"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "was given away: its buffer was donated to a compiled function"
    if isinstance(leaf, np.ma.MaskedArray):
        return "is a masked array, and its mask would be lost"
    return why_not_in_format(leaf)


def check_writable(leaves: Mapping[Path, Any], done: str) -> None:
    """Refuses to write to leaves that are traced, or whose sharding does not divide their shape.

    ``done`` says in the error what was to be done: ``restored`` or ``loaded``.
    """
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            try:
                leaf.sharding.shard_shape(leaf.shape)
            except ValueError as error:
                raise CheckpointArgumentError(
                    f"{text_of(path)} is {leaf_spec(leaf)}, which {leaf.sharding} cannot divide "
                    f"evenly.\nFix: replicate that axis, or choose another mesh."
                ) from error
        if isinstance(leaf, Tracer):
            raise TraceContextError(
                f"{text_of(path)} is traced: nothing can be {done} inside a function that JAX "
                f"compiles.\nFix: have it {done} before the call, and pass the model."
            )


def items_of_call(items: Any, named: Mapping[str, Any], call: str) -> dict[str, Any]:
    """The items of a call, from its mapping and its keywords; refuses an item without a name."""
    if items is not None and not isinstance(items, Mapping):
        raise CheckpointArgumentError(
            f"Items have names: expected a mapping from name to item, but got a "
            f"{type(items).__name__}.\nFix: {call}."
        )
    return {**(items or {}), **named}


class PositionMethods(NamedTuple):
    """The methods that read and set the position of a data iterator."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def position_methods(value: Any) -> PositionMethods | None:
    """The methods that get and set the position of a data iterator of Grain or PyTorch, if any."""
    for names in _POSITION_METHODS:
        read, write = (getattr(value, name, None) for name in names)
        if callable(read) and callable(write):
            return PositionMethods(read, write)
    return None


def is_live(value: Any) -> bool:
    """Whether a value is a module, a Variable or a State."""
    return kinds.is_node(value) or isinstance(value, State)


def contents_of(items: Mapping[str, Any], *, with_positions: bool) -> Contents:
    """Flattens the items of a call; ``with_positions`` adds the positions of iterators."""
    contents = Contents(items)
    for name, item in items.items():
        try:
            _visit(contents, item, (name,), with_positions)
        except RecursionError:
            raise UnstorableError(
                f"{name} holds itself, or containers inside each other without end.\n"
                "Fix: save the parts of it under names of their own."
            ) from None
    if contents.live:
        _flatten_live(contents)
    return contents


def _visit(contents: Contents, value: Any, path: Path, with_positions: bool) -> None:
    """Adds what is at a path and below it, outside of objects, which ``_flatten_live`` opens."""
    node_kind = kind_of(value)
    if is_live(value):
        contents.live[path] = value
    elif value is ...:
        contents.wildcards.append(path)
    elif node_kind in (kinds.STATIC, PYTREE) and (methods := position_methods(value)):
        contents.iterators[path] = methods
        if with_positions:
            _visit(contents, methods.read(), path, with_positions)
    elif node_kind in _CONTAINER_BY_KIND:
        # The fields of a named tuple are kept by name.
        contents.containers[path] = (
            "dict" if hasattr(value, "_fields") else _CONTAINER_BY_KIND[node_kind]
        )
        for key, item in kinds.container_items(value, node_kind):
            if type(key) not in (str, int):
                raise UnstorableError(
                    f"{text_of(path)} has the key {key!r}; keys are text or integers.\n"
                    "Fix: convert the keys before saving."
                )
            _visit(contents, item, (*path, key), with_positions)
    elif node_kind == kinds.METHOD:
        refuse_type(path, value)
    else:
        contents.leaves[path] = value


def _flatten_live(contents: Contents) -> None:
    """Adds the leaves of all objects, each object once even if several items hold it."""
    nested = from_flat_state(contents.live).raw_mapping
    for path, leaf in iter_flat(flatten_node(nested, True, "save")[1]):
        is_variable = isinstance(leaf, Variable)
        value = stored_value(leaf)
        inside, treedef = [((), value)], _LEAF
        if is_variable and not isinstance(value, jax.Array):  # a pytree
            inside, treedef = jax.tree_util.tree_flatten_with_path(value)
        found: dict[Any, Any] = {(*path, *map(kinds.key_name, s)): part for s, part in inside}
        contents.leaves |= found
        contents.treedefs[path] = (list(found), treedef)
        if is_variable:
            contents.variable_depths |= dict.fromkeys(found, len(path))
            contents.holders |= dict.fromkeys(found, leaf)
    for first, *others in find_duplicates(nested):
        contents.aliases += [(other, first) for other in others]


_LEAF = jax.tree_util.tree_structure(0)


def write(
    contents: Contents, values: Mapping[Path, Any], positions: Mapping[Path, Any]
) -> dict[str, Any]:
    """Writes new leaves and iterators' positions into the items: all or, after an error, none."""
    nested = from_flat_state(contents.live).raw_mapping
    live = {
        path: treedef.unflatten([values.get(part, contents.leaves[part]) for part in parts])
        for path, (parts, treedef) in contents.treedefs.items()
        if any(part in values for part in parts)
    }
    with _positions_set(contents, positions):
        update_same_types(nested, from_flat_state(live))
    # A State of arrays was not changed in place, but replaced by a new one.
    values = {**values, **{path: value_at(nested, path) for path in contents.live}}
    items = contents.items.items()
    return {name: _rebuilt(item, (name,), contents, values) for name, item in items}


@contextlib.contextmanager
def _positions_set(contents: Contents, positions: Mapping[Path, Any]) -> Iterator[None]:
    """Sets the positions of iterators; after an error, sets them back."""
    undo: list[Callable[[], Any]] = []
    try:
        for path, position in positions.items():
            methods = contents.iterators[path]
            with contextlib.suppress(Exception):  # one that has not begun may have no position yet
                undo.append(functools.partial(methods.write, methods.read()))
            try:
                methods.write(position)
            except Exception as error:
                error.add_note(f"Raised while the position of {text_of(path)} was set.")
                raise
        yield
    except Exception:
        for put_back in undo:
            with contextlib.suppress(Exception):
                put_back()
        raise


def _rebuilt(value: Any, path: Any, contents: Contents, values: Mapping[Path, Any]) -> Any:
    """An item, or a part of one, with the new values in new containers of the same types."""
    if path in contents.iterators:
        return value
    if path not in contents.containers:
        return values.get(path, value)
    node_kind = kind_of(value)
    items = kinds.container_items(value, node_kind)
    new = {key: _rebuilt(child, (*path, key), contents, values) for key, child in items}
    if node_kind == DICT:
        return new
    if node_kind == kinds.LIST:
        return list(new.values())
    return kinds.with_elements(value, node_kind, new)


class Restored(dict[str, Any]):
    """The items that were restored, read by key or as attributes.

    Objects are the ones that were passed, and changed; plain values and containers are new.

    Args:
      items: the items by name.
      problems: what did not fit; empty unless ``strict=False`` was passed.
      path: where it came from.

    Example:
      >>> import tempfile
      >>> from linnet import io
      >>> path = f"{tempfile.mkdtemp()}/best"
      >>> io.save(path, note="small", step=3)
      >>> restored = io.restore(path)
      >>> restored.note, restored["step"], restored.problems
      ('small', 3, [])
    """

    def __init__(self, items: Mapping[str, Any], problems: list[Problem], path: str):
        super().__init__(items)
        self.problems = problems
        self.path = path

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"{name!r} was not restored; there are {', '.join(self) or 'no items'}.\n"
                f"Fix: pass {name}=... to restore it, if it was saved."
            ) from None
