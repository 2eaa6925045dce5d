"""Takes scopes apart into variables and random keys, and puts them together inside a transform.

A lifted transform is a transform of JAX around a function of scopes. Scopes are no arrays, so
each call goes the same way, whatever the transform is:

1. ``Lifted`` finds the scopes that lie in no other one, and sorts their collections and random keys
   into groups, one for each filter of the transform. Groups are pytrees.
2. The transform of JAX is applied to a function of groups. Inside, ``enter`` makes scopes of them,
   the user's function runs, and ``leave`` takes the collections that could be written out again.
3. ``write`` puts these into the scopes outside.

The counters of random draws are shared between a scope and the one inside: both go on counting,
and a body that is traced twice has drawn twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from linnet.core.filters import (
    Filter,
    group_collections,
    intersect_filters,
    is_filter_empty,
    union_filters,
)
from linnet.core.rng import LazyRng
from linnet.core.scoping import Scope
from linnet.frozen_dict import unfreeze
from linnet.traverse_util import iter_entries

VariableGroups = tuple[tuple[dict[str, Any], ...], ...]
RngGroups = tuple[tuple[dict[str, Any], ...], ...]


@dataclasses.dataclass(frozen=True)
class ScopeStructure:
    """How the scopes of a call were given: their pytree, and for each the number of the root scope
    that it lies in, with the path below."""

    tree: Any
    places: tuple[tuple[int, tuple[str, ...]], ...]

    def of_scopes(self, group: Sequence[dict[str, Any]]) -> Any:
        """A group of variables in the pytree of the scopes."""
        found = []
        for number, below in self.places:
            collections: Any = group[number]
            for name in below:
                collections = {col: xs[name] for col, xs in collections.items() if name in xs}
            found.append(collections)
        return jax.tree.unflatten(self.tree, found)

    def of_roots(self, by_scope: Any) -> tuple[Any, ...]:
        """The items of the root scopes, from a tree with one item for each scope."""
        found = self.tree.flatten_up_to(by_scope)
        count = 1 + max((number for number, _ in self.places), default=-1)
        return tuple(found[self.places.index((number, ()))] for number in range(count))


class Lifted:
    """The scopes of one call of a lifted function.

    Args:
      scope_tree: a scope, or a pytree of scopes.
      in_filters: a filter for each group of collections that goes in.
      out_filters: a filter for each group that comes out; only these can be written inside.
      rng_filters: a filter for each group of random streams.
      name: the transform's name, for errors.
    """

    def __init__(
        self,
        scope_tree: Any,
        in_filters: Sequence[Filter],
        out_filters: Sequence[Filter],
        rng_filters: Sequence[Filter],
        name: str,
    ):
        scopes, tree = jax.tree.flatten(scope_tree)
        for scope in scopes:
            if not isinstance(scope, Scope):
                raise TypeError(
                    f"A function lifted with {name} takes a scope, or a pytree of scopes, as its "
                    f"first argument, but got {type(scope).__name__}.\n"
                    "Fix: lifted(scope, x)."
                )
        self.roots, places = _separate(scopes)
        self.structure = ScopeStructure(tree, tuple(places))
        self.in_filters, self.out_filters = tuple(in_filters), tuple(out_filters)
        self.rng_filters, self.name = tuple(rng_filters), name
        self._writable = functools.reduce(union_filters, self.out_filters, False)

    def variable_groups(self) -> VariableGroups:
        """The collections of each root scope, for each filter."""
        for root in self.roots:
            root._populate_collections()
        found = [group_collections(root._variables, self.in_filters) for root in self.roots]
        return _by_group(found, len(self.in_filters))

    def rng_groups(self) -> RngGroups:
        """The random keys of each root scope, for each filter."""
        found = [group_collections(root.rngs, self.rng_filters) for root in self.roots]
        return _by_group(found, len(self.rng_filters))

    def pathless_rng_groups(self) -> RngGroups:
        """The random keys of each root scope, without the paths that are still to be folded in.

        What is compiled then does not depend on the path. Scopes of different paths draw the same
        keys inside, as in Flax, unless the caller has drawn one for each.
        """
        return jax.tree.map(
            lambda rng: rng.replace(suffix=()),
            self.rng_groups(),
            is_leaf=lambda x: isinstance(x, LazyRng),
        )

    def can_write(self, col_filter: Filter) -> bool:
        """Whether a collection that a filter takes could be written inside."""
        both = (intersect_filters(root.mutable, col_filter) for root in self.roots)
        return not all(map(is_filter_empty, both))

    def enter(self, variable_groups: VariableGroups, rng_groups: RngGroups) -> Any:
        """Scopes inside a transform, in the structure that those outside were given in."""
        inner = []
        for number, root in enumerate(self.roots):
            mutable = intersect_filters(root.mutable, self._writable)
            scope = Scope(
                {},
                rngs=_merged(group[number] for group in rng_groups),
                name=root.name,
                mutable=mutable,
                path=root.path,
                debug_path=_debug_path(root, self.name),
                flags=root.flags,
            )
            for col, xs in _merged(group[number] for group in variable_groups).items():
                scope._variables[col] = unfreeze(xs) if scope.is_mutable_collection(col) else xs
            scope.rng_counters = root.rng_counters
            inner.append(scope)
        scopes = [_descend(inner[number], below) for number, below in self.structure.places]
        return jax.tree.unflatten(self.structure.tree, scopes)

    def leave(self, scope_tree: Any) -> VariableGroups:
        """The collections that could be written inside, for each filter; ends the scopes."""
        scopes = jax.tree.leaves(scope_tree)
        roots = self.structure.of_roots(scope_tree)
        found = [group_collections(s.mutable_variables(), self.out_filters) for s in roots]
        for scope in scopes:
            scope.invalidate()
        return _by_group(found, len(self.out_filters))

    def write(self, out_groups: VariableGroups) -> None:
        """Writes what came out; collections that a loop only handed on cannot be written."""
        for group in out_groups:
            for root, collections in zip(self.roots, group, strict=True):
                for col, xs in collections.items():
                    if root.is_mutable_collection(col):
                        for name, value in xs.items():
                            root.put_variable(col, name, unfreeze(value))

    def draws(self) -> int:
        """How many random keys were drawn so far."""
        return sum(n for root in self.roots for _, n in iter_entries(root.rng_counters))


def _separate(scopes: list[Scope]) -> tuple[list[Scope], list[tuple[int, tuple[str, ...]]]]:
    """The scopes that lie in no other, and for each scope the number of one and the path below."""
    roots: list[Scope] = []
    for scope in sorted(scopes, key=lambda scope: len(scope.path)):
        if not any(_is_inside(scope, root) for root in roots):
            roots.append(scope)
    places = []
    for scope in scopes:
        number = next(n for n, root in enumerate(roots) if _is_inside(scope, root))
        places.append((number, scope.path[len(roots[number].path) :]))
    return roots, places


def _is_inside(scope: Scope, other: Scope) -> bool:
    if scope.root._variables is not other.root._variables:
        return False
    return scope.path[: len(other.path)] == other.path


def _descend(scope: Scope, names: tuple[str, ...]) -> Scope:
    """A scope below, whose name stays free: setup may run again inside and take it."""
    for name in names:
        below = scope.push(name, reuse=True)
        del scope.reservations[name]
        scope = below
    return scope


def _debug_path(scope: Scope, name: str) -> tuple[str, ...]:
    last = scope.debug_path[-1] if scope.debug_path else ""
    return (*scope.debug_path[:-1], f"{name}({last})")


def _by_group(found: list[Sequence[dict[str, Any]]], count: int) -> Any:
    return tuple(tuple(groups[n] for groups in found) for n in range(count))


def _merged(dicts: Any) -> dict[str, Any]:
    return {key: value for one in dicts for key, value in one.items()}


@jax.tree_util.register_static
class StaticResult:
    """A value that a compiled function returns beside its arrays: fixed when it is traced."""

    def __init__(self, value: Hashable):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticResult) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def shifted_argnums(argnums: int | Iterable[int], before: int) -> tuple[int, ...]:
    """Shifts argnums for a function whose scope is replaced by ``before`` arguments."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return tuple(number + before - 1 if number > 0 else number for number in numbers)


def pack(
    fn: Callable[..., Any],
    in_variable_filters: Sequence[Filter],
    out_variable_filters: Sequence[Filter],
    rng_filters: Sequence[Filter],
    name: str | None = None,
    enable_kwargs: bool = False,
) -> Callable[..., Any]:
    """Makes a function of groups of variables and random keys a function of scopes.

    Args:
      fn: ``fn(scope_fn, repack_fn, variable_groups, rng_groups, *args)``, which returns a result
        and groups of variables. ``scope_fn(variable_groups, rng_groups)`` makes a scope of groups,
        and ``repack_fn(scope)`` takes the groups that come out of it. A group has a dict of
        collections for each scope.
      in_variable_filters: a filter of collections for each group that goes in.
      out_variable_filters: one for each group that comes out; others cannot be written inside.
      rng_filters: a filter of random streams for each group of keys.
      name: the name of the transform, for errors.
      enable_kwargs: whether ``fn`` takes keyword arguments.

    Returns:
      A function of a scope, or a pytree of scopes, and the other arguments.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> from linnet.core import lift
      >>> def doubled(fn):
      ...     def inner(scope_fn, repack_fn, variables, rngs, x):
      ...         scope = scope_fn(jax.tree.map(lambda v: 2 * v, variables), rngs)
      ...         return fn(scope, x), repack_fn(scope)
      ...     return lift.pack(inner, ["params"], [], [])
      >>> def scale(scope, x):
      ...     return x * scope.get_variable("params", "s")
      >>> core.apply(doubled(scale))({"params": {"s": 3.0}}, 1.0)
      6.0
    """

    @functools.wraps(fn)
    def packed(scope_tree: Any, *args: Any, **kwargs: Any) -> Any:
        shown = name or getattr(fn, "__name__", "pack")
        if kwargs and not enable_kwargs:
            raise NotImplementedError(
                f"A function lifted with {shown} takes no keyword arguments, but got "
                f"{', '.join(kwargs)}.\nFix: pass them by position."
            )
        lifted = Lifted(scope_tree, in_variable_filters, out_variable_filters, rng_filters, shown)
        groups = lifted.variable_groups(), lifted.rng_groups()
        y, out = fn(lifted.enter, lifted.leave, *groups, *args, **kwargs)
        lifted.write(out)
        return y

    return packed
