"""Changing an object in place from a state: all of it, or nothing and an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

from linnet.errors import FilterError, StateMismatchError, integer_hint, misfit_text, path_string
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.attributes import data_children
from linnet.nnx.pytreelib.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    PYTREE,
    STATIC,
    TUPLE,
    VARIABLE,
    Path,
    children_of,
    kind_of,
)
from linnet.nnx.pytreelib.objects import check_mutable
from linnet.nnx.statelib import from_flat_state, iter_flat, merge_states, one_or_all
from linnet.nnx.variablelib.comparing import mismatch
from linnet.nnx.variablelib.variable import Intermediate, Variable
from linnet.nnx.variablelib.writing import refuse_unwritable, take_over

Setter = Callable[[Any], None]


class _Update:
    """What an update will write, collected before the first write."""

    def __init__(self, same_types: bool) -> None:
        self.same_types = same_types  # another shape or dtype is a problem
        self.variables: list[tuple[Variable[Any], Any]] = []
        self.assignments: list[tuple[Setter, Any]] = []
        self.objects: list[tuple[Any, Any]] = []  # that get an attribute, and its name
        self.rebuilds: list[Callable[[], None]] = []  # tuples and the like, innermost first
        self.problems: list[str] = []

    def visit(self, node: Any, kind: int, new: dict[Any, Any], path: Any, put: Setter) -> None:
        """Compares one object or container with its part of the state."""
        items = node._pytree_items() if kind == OBJECT else dict(children_of(node, kind))
        setter = self._setter(node, kind, put)
        for key, value in new.items():
            planned = len(self.assignments)
            if key not in items:
                self._extra(kind, (*path, key), value, partial(setter, key), items)
            elif (old_kind := kind_of(old := items[key])) == VARIABLE:
                self._variable(old, value, path, key)
            elif type(value) is dict and (old_kind > ARRAY or old_kind == OBJECT):
                self.visit(old, old_kind, value, (*path, key), partial(setter, key))
            elif old_kind == OBJECT:
                found = f"is a {type(old).__name__}, got {type(value).__name__}"
                self.problems.append(f"{path_string((*path, key))}: {found}")
            else:
                self._leaf(old, value, (*path, key), partial(setter, key))
            if kind == OBJECT and len(self.assignments) > planned:
                self.objects.append((node, key))

    def _variable(self, old: Variable[Any], value: Any, path: Any, key: Any) -> None:
        if old is value:
            return
        # The names in a dict must fit, None is no value, and the type of a ref is fixed.
        if self.same_types or type(value) in (dict, NoneType) or old._metadata.stored_as_ref:
            self._compare(old, value, (*path, key))
        self.variables.append((old, value))

    def _compare(self, old: Variable[Any], value: Any, path: Path) -> None:
        a, b = old._raw, value._raw if isinstance(value, Variable) else value
        try:
            fits = a.shape == b.shape and a.dtype == b.dtype
        except AttributeError:
            fits = False
        # What is sown grows from call to call.
        if not fits and not isinstance(old, Intermediate):
            problem = mismatch(path, old, value)
            self.problems += [problem] if problem else []

    def _leaf(self, old: Any, value: Any, path: Any, put: Setter) -> None:
        if isinstance(value, Variable) and old is not None:
            value = value.get_value()
        both_arrays = kind_of(old) == ARRAY and kind_of(value) == ARRAY
        if (self.same_types or not both_arrays) and (problem := mismatch(path, old, value)):
            self.problems.append(problem)
        self.assignments.append((put, value))

    def _extra(self, kind: int, path: Any, value: Any, put: Setter, known: Any) -> None:
        leaves = list(iter_flat(value, path))
        may_grow = kind == DICT or (kind == OBJECT and type(value) is not dict)
        # Modules sow new Variables while they run; anything else that is new is a mistake.
        if may_grow and leaves and all(isinstance(leaf, Intermediate) for _, leaf in leaves):
            self.assignments.append((put, value))
            return
        problem = ": ".join(filter(None, ["not in the object", integer_hint(path[-1], known)]))
        self.problems += [f"{path_string(p)}: {problem}" for p, _ in leaves]

    def _setter(self, node: Any, kind: int, put: Setter) -> Callable[[Any, Any], None]:
        if kind == OBJECT:
            return node._pytree_set
        if kind in (LIST, DICT):
            return node.__setitem__
        changes: dict[Any, Any] = {}

        def rebuild() -> None:
            if changes:
                put(kinds.with_elements(node, kind, changes))

        self.rebuilds.append(rebuild)
        return changes.__setitem__

    def write(self) -> None:
        """Writes everything, or raises before anything is changed."""
        if self.problems:
            what = "The state does not fit the object, which is unchanged"
            fix = "take the state from an object of the same structure."
            raise StateMismatchError(misfit_text({what: self.problems}, fix=fix))
        refuse_unwritable([variable for variable, _ in self.variables])
        for node, key in self.objects:
            check_mutable(node, key)
        for variable, value in self.variables:
            take_over(variable, value)
        for put, value in self.assignments:
            put(value)
        for rebuild in reversed(self.rebuilds):
            rebuild()


def _cannot_replace_root(value: Any) -> None:
    raise StateMismatchError(
        "nnx.update cannot change an array that stands directly in a tuple passed to it.\n"
        "Fix: hold the array in a Variable or a module."
    )


def update(node: Any, state: Any, /, *states: Any) -> None:
    """Writes states into the Variables of an object, in place.

    Values may have another shape or dtype, such as those of a state that was stacked for ``vmap``.
    Paths that the states do not mention stay as they are. New Variables are taken over only when
    they were sown (type ``Intermediate``). Nothing is written unless everything fits.

    Args:
      node: a module, or any pytree of modules and Variables.
      state: a state, or nested dicts of values.
      *states: more of them.

    Raises:
      StateMismatchError: paths that the object does not have, or another shape or dtype for a
        Variable that is stored as a ref; all are listed.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Net(nnx.Module):
      ...     def __init__(self):
      ...         self.w = nnx.Param(jnp.zeros(2))
      >>> net = Net()
      >>> nnx.update(net, {"w": jnp.ones(2)})
      >>> net.w.value.tolist()
      [1.0, 1.0]
    """
    _update(node, merge_states((state, *states)), same_types=False)


def update_same_types(node: Any, state: Any) -> None:
    """``update`` that refuses another shape or dtype too, for restored and computed values."""
    _update(node, merge_states((state,)), same_types=True)


def _update(node: Any, new: Any, same_types: bool) -> None:
    writes = _Update(same_types)
    kind = kind_of(node)
    if kind == VARIABLE:
        writes._variable(node, new, (), "value")
    elif kind in (STATIC, ARRAY, METHOD):
        raise TypeError(
            f"nnx.update changes a module, a Variable or a pytree of them, but got "
            f"{type(node).__name__}."
        )
    elif type(new) is not dict:
        raise StateMismatchError(
            f"nnx.update takes a State or a mapping, but got {type(new).__name__}.\n"
            "Fix: nnx.update(model, state) with a state from nnx.state or nnx.split."
        )
    else:
        writes.visit(node, kind, new, (), _cannot_replace_root)
    writes.write()


def pop(node: Any, *filters: Filter) -> Any:
    """Removes Variables and arrays from an object and returns them.

    Args:
      node: a module, or any pytree of modules.
      *filters: which ones; one state is returned for each. A type of Variables selects no arrays,
        while ``...``, ``nnx.Not`` and functions see them too.

    Returns:
      A state, or a tuple of states for several filters. Shared Variables are removed everywhere.

    Raises:
      FilterError: no filter was given.
      ValueError: something to remove stands in a tuple or another pytree of fixed length.

    Example:
      >>> from linnet import nnx
      >>> class Net(nnx.Module):
      ...     def __call__(self, x):
      ...         self.sow(nnx.Intermediate, "seen", x)
      ...         return x
      >>> net = Net()
      >>> _ = net(3)
      >>> nnx.pop(net, nnx.Intermediate)["seen"].value
      (3,)
    """
    if not filters:
        raise FilterError(
            "Expected at least one filter: nnx.pop(model, nnx.Intermediate), or `...` for all."
        )
    predicates = filterlib.filters_to_predicates(filters)
    found: list[dict[Path, Any]] = [{} for _ in predicates]
    holders: dict[Path, Any] = {}
    is_chosen: dict[int, bool] = {}  # decided where a Variable is met first
    removals: list[tuple[Any, Any]] = []
    for path, value in kinds.places(node, data_children):
        kind = kind_of(value)
        is_marked = kind == STATIC and path and kind_of(holders[path[:-1]]) == OBJECT
        if not path or value is None or not (kind in (VARIABLE, ARRAY) or is_marked):
            holders[path] = value
            continue
        chosen = is_chosen.get(id(value)) if kind == VARIABLE else None
        if chosen is None:
            groups = [
                group for fits, group in zip(predicates, found, strict=True) if fits(path, value)
            ]
            chosen = is_chosen[id(value)] = bool(groups)
            if groups:
                groups[0][path] = value
        if chosen:
            holder = holders[path[:-1]]
            if kind_of(holder) in (TUPLE, PYTREE):
                what = type(value).__name__ if kind == VARIABLE else "array"
                raise ValueError(
                    f"nnx.pop cannot remove the {what} at {path_string(path)}: a "
                    f"{type(holder).__name__} has a fixed length. Nothing was removed.\n"
                    "Fix: hold it in a list, a dict or an attribute."
                )
            removals.append((holder, path[-1]))
    for holder, key in removals:
        if kind_of(holder) == OBJECT:
            check_mutable(holder, key)
    # Later positions first, so that removing from a list does not move what is still to go.
    for holder, key in reversed(removals):
        if kind_of(holder) == OBJECT:
            holder._pytree_delete(key)
        else:
            del holder[key]
    return one_or_all(tuple(from_flat_state(group) for group in found))
