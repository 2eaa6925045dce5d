"""State: the Variables of an object as a nested mapping, without the object.

Inside, a State is plain nested dicts with Variables (or arrays) at the leaves; sub-mappings come
out as States. It is a JAX pytree whose leaves are the Variables' values. ``FlatState`` is the same
as pairs of path and leaf. ``iter_flat`` and ``nest`` convert nested dicts to paths and back; what
divides, compares or selects is built on these two.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, Generic, Self, TypeVar, overload

from jax.tree_util import DictKey, SequenceKey, register_pytree_with_keys

from linnet.errors import (
    FilterError,
    MissingEntryError,
    StateMismatchError,
    compare_entries,
    integer_hint,
    list_paths,
    misfit_text,
    name_some,
    path_string,
)
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.pytreelib.kinds import Path, sort_keys
from linnet.nnx.pytreelib.printing import (
    PrintedForm,
    PrintedPair,
    Representable,
    mapping_items,
    render_mapping,
)
from linnet.nnx.variablelib.comparing import mismatch, same_leaf
from linnet.nnx.variablelib.variable import Variable, stored_value
from linnet.traverse_util import iter_entries, put_leaf, taken_place

__all__ = [
    "FlatState",
    "State",
    "compare_states",
    "diff",
    "filter_state",
    "from_flat_state",
    "map_state",
    "merge_state",
    "replace_by_pure_dict",
    "restore_int_paths",
    "split_state",
    "to_flat_state",
    "to_pure_dict",
]

L = TypeVar("L")


class State(MutableMapping[Any, Any], Representable):
    """A nested mapping of Variables, read by item or by attribute.

    Args:
      mapping: nested mappings, or pairs of key and value.

    Example:
      >>> from linnet import nnx
      >>> state = nnx.State({"layer": {"w": nnx.Param(1.0)}})
      >>> state.layer.w.value, list(state.flat_state().paths)
      (1.0, [('layer', 'w')])
    """

    __slots__ = ("__weakref__", "_mapping")

    def __class_getitem__(cls, _: Any) -> type[Self]:
        # For annotations such as State[str, Any]; the parameters mean nothing at run time.
        return cls

    def __init__(self, mapping: Any = (), /, *, _copy: bool = True):
        if _copy:
            mapping = _plain(dict(mapping))
        object.__setattr__(self, "_mapping", mapping)

    @property
    def raw_mapping(self) -> dict[Any, Any]:
        """The nested dicts inside, not copied."""
        return self._mapping

    def __getitem__(self, key: Any) -> Any:
        try:
            value = self._mapping[key]
        except KeyError:
            hint = integer_hint(key, self._mapping)
            raise MissingEntryError(
                f"No entry {key!r} in State; it has {self._keys_text()}."
                + (f"\nFix: {hint}." if hint else "")
            ) from None
        return State(value, _copy=False) if type(value) is dict else value

    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def _keys_text(self) -> str:
        return name_some(map(repr, self._mapping)) or "no entries"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mapping" or name not in self._mapping:
            keys = "no entries" if name == "_mapping" else self._keys_text()
            raise AttributeError(f"No attribute {name!r} in State; it has {keys}.")
        return self[name]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mapping[key] = _plain(value)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delitem__(self, key: Any) -> None:
        del self._mapping[key]

    def __delattr__(self, name: str) -> None:
        if name not in self._mapping:
            raise AttributeError(f"No attribute {name!r} in State.")
        del self._mapping[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def __or__(self, other: State) -> State:
        return State.merge(self, other)

    def __sub__(self, other: State) -> State:
        """What is in this state at paths that the other one does not have."""
        paths = {path for path, _ in iter_flat(other._mapping)}
        return from_flat_state((p, x) for p, x in iter_flat(self._mapping) if p not in paths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._mapping == _plain(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def map(self, f: Callable[[Path, Any], Any]) -> State:
        """A state of the same paths with ``f(path, leaf)`` at each."""
        return map_state(f, self)

    def flat_state(self) -> FlatState[Any]:
        """The leaves by path."""
        return to_flat_state(self)

    @classmethod
    def from_flat_path(cls, flat_state: Any, /) -> State:
        """A state from pairs of path and leaf, or a mapping of them."""
        return from_flat_state(flat_state)

    def to_pure_dict(self, extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
        """Nested dicts of plain values; see ``to_pure_dict``."""
        return to_pure_dict(self, extract_fn)

    def replace_by_pure_dict(
        self, pure_dict: Mapping[Any, Any], replace_fn: Callable[[Any, Any], Any] | None = None
    ) -> None:
        """Takes values over in place; see ``replace_by_pure_dict``."""
        replace_by_pure_dict(self, pure_dict, replace_fn)

    @overload
    def split(self, first: Filter, /) -> State: ...
    @overload
    def split(self, first: Filter, second: Filter, /, *filters: Filter) -> tuple[State, ...]: ...
    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """Divides the leaves among filters that must cover all of them; see ``split_state``."""
        return split_state(self, first, *filters)

    @overload
    def filter(self, first: Filter, /) -> State: ...
    @overload
    def filter(self, first: Filter, second: Filter, /, *filters: Filter) -> tuple[State, ...]: ...
    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """The leaves that each filter selects; see ``filter_state``."""
        return filter_state(self, first, *filters)

    @staticmethod
    def merge(state: Mapping[Any, Any], /, *states: Mapping[Any, Any]) -> State:
        """One state of several; later ones win."""
        return merge_state(state, *states)

    def _printed_form(self) -> PrintedForm:
        return PrintedForm("State({", mapping_items(self._mapping), "})")

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return render_mapping(self, path, subtree_renderer)

    def __reduce__(self) -> Any:
        return (State, (self._mapping,))

    def __deepcopy__(self, memo: Any) -> State:
        return State(copy.deepcopy(self._mapping, memo), _copy=False)


def _plain(value: Any) -> Any:
    """Nested mappings as nested dicts, copied; leaves as they are."""
    if type(value) is dict or isinstance(value, Mapping):
        items = value._mapping if isinstance(value, State) else value
        return {key: _plain(item) for key, item in items.items()}
    return value


def plain_mapping(state: Any) -> Any:
    """The nested dicts of a state without copying where it can; a leaf is returned as it is."""
    if isinstance(state, State):
        return state._mapping
    return _plain(state) if isinstance(state, Mapping) else state


def as_state(mapping: Any) -> Any:
    """Nested dicts as a State that shares them; a lone leaf as it is."""
    return State(mapping, _copy=False) if type(mapping) is dict else mapping


def _flatten_state(state: State) -> tuple[list[Any], tuple[Any, ...]]:
    keys = sort_keys(state._mapping)
    return [state._mapping[key] for key in keys], tuple(keys)


def _flatten_state_with_keys(state: State) -> tuple[list[Any], tuple[Any, ...]]:
    children, keys = _flatten_state(state)
    return [(DictKey(key), child) for key, child in zip(keys, children, strict=True)], keys


def _unflatten_state(keys: tuple[Any, ...], children: Iterable[Any]) -> State:
    return State(dict(zip(keys, children, strict=True)), _copy=False)


register_pytree_with_keys(State, _flatten_state_with_keys, _unflatten_state, _flatten_state)


def iter_flat(mapping: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf of nested dicts with its path, in the order of the keys."""
    if type(mapping) is not dict:
        yield path, mapping
        return
    for key in sort_keys(mapping):
        value = mapping[key]
        if type(value) is dict:
            yield from iter_flat(value, (*path, key))
        else:
            yield (*path, key), value


class FlatState(Sequence[tuple[Path, L]], Representable, Generic[L]):
    """The leaves of a state by path: a sequence of ``(path, leaf)`` pairs, sorted by path.

    Args:
      items: pairs of path and leaf.
      sort: put them in order first.
    """

    __slots__ = ("_keys", "_values")

    def __init__(self, items: Iterable[tuple[Path, L]], /, *, sort: bool = True):
        pairs = list(items)
        if sort:
            pairs = list(iter_flat(nest(pairs)))
        self._keys: tuple[Path, ...] = tuple(path for path, _ in pairs)
        self._values: list[L] = [value for _, value in pairs]

    @staticmethod
    def from_sorted_keys_values(keys: tuple[Path, ...], values: list[L], /) -> FlatState[L]:
        """A flat state from paths and leaves that are in order already."""
        return FlatState(zip(keys, values, strict=True), sort=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths."""
        return self._keys

    @property
    def leaves(self) -> list[L]:
        """The leaves."""
        return self._values

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatState(list(self)[index], sort=False)
        return self._keys[index], self._values[index]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[Path, L]]:
        return zip(self._keys, self._values, strict=True)

    def to_nested_state(self) -> State:
        """The nested state of these leaves."""
        return from_flat_state(self)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """Divides the leaves among filters that must cover all of them."""
        return self._divide((first, *filters), exhaustive=True)

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """The leaves that each filter selects."""
        return self._divide((first, *filters), exhaustive=False)

    def _divide(self, filters: tuple[Filter, ...], exhaustive: bool) -> Any:
        groups = _divide_flat(self, filters, exhaustive)
        return one_or_all(tuple(FlatState(group, sort=False) for group in groups))

    @staticmethod
    def merge(flat_state: Any, /, *flat_states: Any) -> FlatState[Any]:
        """One flat state of several; later ones win."""
        merged: dict[Path, Any] = {}
        for state in (flat_state, *flat_states):
            merged.update(state)
        return FlatState(merged.items())

    def _printed_form(self) -> PrintedForm:
        items = (("", PrintedPair(*pair)) for pair in self)
        return PrintedForm("FlatState([", items, "])")


register_pytree_with_keys(
    FlatState,
    lambda flat: ([(SequenceKey(i), x) for i, x in enumerate(flat._values)], flat._keys),
    lambda keys, values: FlatState.from_sorted_keys_values(keys, list(values)),
)


def nest(pairs: Iterable[tuple[Path, Any]]) -> Any:
    """Nested dicts from pairs of path and leaf; the leaf itself for an empty path."""
    root: dict[Any, Any] = {}
    for path, value in pairs:
        if not path:
            return value
        if not put_leaf(root, path, value, replace=True):
            _refuse_below(root, path)
    return root


def _refuse_below(nested: dict[Any, Any], path: Path) -> None:
    leaf = taken_place(nested, path)
    if leaf == path:  # and there are others below it
        path = (*path, next(iter(functools.reduce(operator.getitem, path, nested))))
    raise ValueError(
        f"{path_string(path)} lies below {path_string(leaf)}, which is a leaf of the same state.\n"
        "Fix: leave out one of the two paths."
    )


def to_flat_state(state: Any) -> FlatState[Any]:
    """The leaves of a state by path.

    Args:
      state: a state or nested mapping.

    Returns:
      The flat state, its paths in order.

    Example:
      >>> from linnet import nnx
      >>> nnx.to_flat_state({"b": 1, "a": {"w": 2}}).paths
      (('a', 'w'), ('b',))
    """
    return FlatState(iter_flat(plain_mapping(state)), sort=False)


def from_flat_state(flat_state: Any, *, cls: type = State) -> Any:
    """A nested state from pairs of path and leaf, or a mapping of them.

    Args:
      flat_state: the pairs.
      cls: the class of the result.

    Returns:
      The state.

    Example:
      >>> from linnet import nnx
      >>> nnx.from_flat_state({("a", "b"): 1})["a"]["b"]
      1
    """
    pairs = flat_state.items() if isinstance(flat_state, Mapping) else flat_state
    nested = nest(pairs)
    return State(nested, _copy=False) if cls is State else cls(nested)


def map_state(f: Callable[[Path, Any], Any], state: Any) -> State:
    """A state of the same paths with ``f(path, leaf)`` at each.

    Args:
      f: a function of the path, a tuple of keys, and the leaf.
      state: a state or nested mapping.

    Returns:
      The new state.

    Example:
      >>> from linnet import nnx
      >>> state = nnx.State({"w": 1, "layers": {0: 2}})
      >>> nnx.map_state(lambda path, x: (len(path), 10 * x), state).to_pure_dict()
      {'layers': {0: (2, 20)}, 'w': (1, 10)}
    """
    pairs = ((path, f(path, leaf)) for path, leaf in iter_flat(plain_mapping(state)))
    return State(nest(pairs), _copy=False)


def _divide_flat(
    pairs: Iterable[tuple[Path, Any]], filters: tuple[Filter, ...], exhaustive: bool
) -> list[list[tuple[Path, Any]]]:
    """The pairs that go to each filter; if ``exhaustive``, the filters must cover all of them."""
    predicates = filterlib.filters_to_predicates(filters)
    groups: list[list[tuple[Path, Any]]] = [[] for _ in predicates]
    rest = []
    for pair in pairs:
        for predicate, group in zip(predicates, groups, strict=True):
            if predicate(*pair):
                group.append(pair)
                break
        else:
            rest.append(pair)
    if rest and exhaustive:
        raise FilterError(
            f"Non-exhaustive filters, got a non-empty remainder: {filters} select none of\n"
            f"{list_paths(path for path, _ in rest)}\n"
            "Fix: add a filter for them, or `...` at the end to take all that is left."
        )
    return groups


def divide(mapping: Any, filters: tuple[Filter, ...], *, exhaustive: bool) -> tuple[State, ...]:
    """Divides nested dicts among filters, into one State each."""
    if filters in ((), (...,)):
        return (as_state(mapping),)
    groups = _divide_flat(iter_flat(mapping), filters, exhaustive)
    return tuple(as_state(nest(group)) for group in groups)


def one_or_all(parts: tuple[L, ...]) -> L | tuple[L, ...]:
    """What a function returns that gives one part for each filter: a single one stands alone."""
    return parts[0] if len(parts) == 1 else parts


def split_state(state: Any, first: Filter, /, *filters: Filter) -> Any:
    """Divides the leaves of a state among filters that must cover all of them.

    Args:
      state: the state.
      first: a filter.
      *filters: more filters; each leaf goes to the first that selects it.

    Returns:
      One state for one filter, a tuple for several.

    Raises:
      FilterError: a leaf is selected by none; its path is listed.

    Example:
      >>> from linnet import nnx
      >>> state = nnx.State({"w": nnx.Param(1.0), "mean": nnx.BatchStat(0.0)})
      >>> params, others = nnx.split_state(state, nnx.Param, ...)
      >>> list(params), list(others)
      (['w'], ['mean'])
    """
    return one_or_all(divide(plain_mapping(state), (first, *filters), exhaustive=True))


def filter_state(state: Any, first: Filter, /, *filters: Filter) -> Any:
    """The leaves of a state that each filter selects; the rest is left out.

    Args:
      state: the state.
      first: a filter.
      *filters: more filters; each leaf goes to the first that selects it.

    Returns:
      One state for one filter, a tuple for several.

    Example:
      >>> from linnet import nnx
      >>> state = nnx.State({"w": nnx.Param(1.0), "mean": nnx.BatchStat(0.0)})
      >>> list(nnx.filter_state(state, nnx.Param))
      ['w']
    """
    return one_or_all(divide(plain_mapping(state), (first, *filters), exhaustive=False))


def create_path_filters(state: Any) -> dict[filterlib.PathIn, Any]:
    """Groups the paths of a state by their values: a filter for each value that occurs.

    Args:
      state: a state of hashable values, such as axes, or of Variables that hold them.

    Returns:
      The value for each filter, to make ``nnx.StateAxes`` or ``nnx.StateSharding`` from.

    Example:
      >>> from linnet import nnx
      >>> axes = nnx.State({"w": 0, "b": None, "scale": 0})
      >>> nnx.statelib.create_path_filters(axes)
      {PathIn(('b',)): None, PathIn(('scale',), ('w',)): 0}
    """
    paths: dict[Any, list[Path]] = {}
    for path, leaf in to_flat_state(state):
        paths.setdefault(stored_value(leaf), []).append(path)
    return {filterlib.PathIn(*found): value for value, found in paths.items()}


def merge_mappings(mappings: Sequence[Any], path: Path = ()) -> Any:
    """Nested dicts at a path merged, later ones winning; nothing that was passed in is changed."""
    merged = mappings[0]
    for other in mappings[1:]:
        if type(merged) is not dict or type(other) is not dict:
            # A lone Variable: a split by filters gives it beside empty states.
            merged = other if type(other) is not dict or other else merged
            continue
        merged = dict(merged)
        for key, value in other.items():
            if key not in merged or type(value) is not dict:
                merged[key] = value
            elif type(merged[key]) is dict:
                merged[key] = merge_mappings((merged[key], value), (*path, key))
            elif value:
                text = (
                    f"{path_string((*path, key))} is a leaf of one state, and not of a later one."
                )
                raise TypeError(f"{text}\nFix: leave out one of the two.")
    return merged


def merge_states(states: Sequence[Any]) -> Any:
    """Several states as one nested dict."""
    return merge_mappings([plain_mapping(state) for state in states]) if states else {}


def merge_state(state: Any, /, *states: Any, cls: type = State) -> Any:
    """One state of several; where two have the same path the later one wins.

    Args:
      state: a state or nested mapping.
      *states: more of them.
      cls: the class of the result.

    Returns:
      The merged state.

    Raises:
      TypeError: a leaf of one state holds entries in a later one.

    Example:
      >>> from linnet import nnx
      >>> nnx.merge_state({"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"d": 4}}).to_pure_dict()
      {'a': 3, 'b': {'c': 2, 'd': 4}}
    """
    merged = merge_states((state, *states))
    return State(merged, _copy=False) if cls is State else cls(merged)


def diff(state: Any, other: Any, /) -> State:
    """The entries of a state that another one has not, whatever their values.

    Args:
      state: a state or nested mapping.
      other: another one.

    Returns:
      A state of the leaves whose paths are not in ``other``; ``compare_states`` compares values.

    Example:
      >>> from linnet import nnx
      >>> nnx.statelib.diff({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 4, "b": {"c": 5}}).to_pure_dict()
      {'b': {'d': 3}}
    """
    return as_state(_plain(state)) - as_state(_plain(other))


def compare_states(first: Any, second: Any) -> dict[Path, tuple[Any, Any]]:
    """Where two states differ: the paths, with what each has there (None where it has nothing).

    Args:
      first: a state.
      second: another one.

    Returns:
      A dict from path to the two leaves. Leaves are the same when type, shape, dtype and every
      element are.

    Example:
      >>> from linnet import nnx
      >>> nnx.compare_states(nnx.State({"a": 1, "b": 2}), nnx.State({"a": 1, "b": 3}))
      {('b',): (2, 3)}
    """
    left, right = dict(to_flat_state(first)), dict(to_flat_state(second))
    paths = [*left, *(path for path in right if path not in left)]
    pairs = {path: (left.get(path), right.get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if not same_leaf(*pair)}


def to_pure_dict(state: Any, extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
    """Nested dicts with plain values in place of Variables.

    Args:
      state: the state.
      extract_fn: gives the value of a leaf; by default a Variable's value.

    Returns:
      Nested dicts; list positions stay integers.

    Example:
      >>> from linnet import nnx
      >>> nnx.to_pure_dict(nnx.State({"layers": {0: {"w": nnx.Param(1.0)}}}))
      {'layers': {0: {'w': 1.0}}}
    """
    extract = extract_fn or stored_value
    return nest((path, extract(leaf)) for path, leaf in iter_flat(plain_mapping(state)))


def restore_int_paths(pure_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Turns keys such as ``'0'`` back into integers, after a format that only knows strings.

    Args:
      pure_dict: nested mappings.

    Returns:
      Nested dicts; keys that are no text of an integer stay as they are.

    Example:
      >>> restore_int_paths({"layers": {"0": 1, "10": 2}})
      {'layers': {0: 1, 10: 2}}
    """
    restored = {}
    for key, value in pure_dict.items():
        digits = key.removeprefix("-") if isinstance(key, str) else ""
        is_integer = digits.isdecimal() and digits.isascii()
        restored[int(key) if is_integer else key] = (
            restore_int_paths(value) if isinstance(value, Mapping) else value
        )
    return restored


def replace_by_pure_dict(
    state: State, pure_dict: Mapping[Any, Any], replace_fn: Callable[[Any, Any], Any] | None = None
) -> None:
    """Puts plain values into a state, in place.

    Args:
      state: the state to change.
      pure_dict: nested dicts of values; keys that came back as text stand for integers too.
      replace_fn: makes the new leaf from the old one and the value; by default a Variable of the
        same type.

    Raises:
      StateMismatchError: a path is not in the state, or a shape or dtype differs. All are listed,
        and the state is unchanged.

    Example:
      >>> from linnet import nnx
      >>> state = nnx.State({"w": nnx.Param(1.0)})
      >>> nnx.replace_by_pure_dict(state, {"w": 2.0})
      >>> state.w.value
      2.0
    """
    current = dict(iter_flat(state._mapping))
    given = dict(iter_down_to(current, _plain(pure_dict)))
    if any(path not in current for path in given):
        given = dict(iter_down_to(current, restore_int_paths(_plain(pure_dict))))
    known = {path: current[path] for path in given if path in current}
    found = compare_entries(known, given, mismatch if replace_fn is None else None)
    if any(found):
        what = "key in pure_dict not available in state, or of another type"
        unknown = [f"{path_string(path)}: not in the state" for path in found.extra]
        fix = "rename or convert these entries, or pass replace_fn."
        raise StateMismatchError(misfit_text({what: unknown + found.differ}, fix=fix))
    replace = replace_fn or _replace_leaf
    for path, value in given.items():
        current[path] = replace(current[path], value)
    state._mapping.update(nest(current.items()))


def iter_down_to(leaves: Container[Path], mapping: Any) -> Iterator[tuple[Path, Any]]:
    """Every leaf of nested dicts with its path; at a path of ``leaves`` a dict is a leaf too."""
    return iter_entries(mapping, is_leaf=lambda path, _: path in leaves)


def _replace_leaf(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, Variable) else value
