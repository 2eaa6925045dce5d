"""The arguments of a compiled function: taken apart outside, put together while tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import not_
from types import MethodType
from typing import Any, NamedTuple

import jax

from linnet.nnx import statics
from linnet.nnx.pytreelib import Pytree
from linnet.nnx.transforms.lift import is_node


def refuse_bound_method(fun: Any, api: str) -> None:
    """Raises for ``nnx.jit(model.method)``, whose module would be a constant."""
    if isinstance(fun, MethodType) and isinstance(fun.__self__, Pytree):
        cls, name = type(fun.__self__).__name__, fun.__name__
        raise ValueError(
            f"nnx.{api} does not support bound methods: {cls}.{name} would take the module as a "
            f"constant.\nFix: decorate the method with @nnx.{api}, or call "
            f"nnx.{api}({cls}.{name})(instance, ...) with the unbound method."
        )


def after_module(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``nnx.jit`` for a method, from those for the call of a module."""
    shifted = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        given = shifted[name]
        numbers = (given,) if isinstance(given, int) else given or ()
        shifted[name] = tuple(n + 1 if n >= 0 else n for n in numbers)
    if isinstance(shifted["in_shardings"], (list, tuple)):
        shifted["in_shardings"] = (None, *shifted["in_shardings"])
    return shifted


class Static(NamedTuple):
    """The static arguments of a call, by number and by name, and their types: 1 is not True.

    Where single leaves are static, ``leaves`` has one value for each leaf, None for the others.
    """

    args: tuple[tuple[int, Any], ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    types: tuple[type, ...] = ()
    leaves: statics.Static | None = None

    def put_back(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """All arguments, from those that have gaps where the static ones were."""
        if self.leaves is not None:
            found, treedef = flatten_with_gaps((args, kwargs))
            pairs = zip(found, self.leaves.value, strict=True)
            return treedef.unflatten([fixed if leaf is None else leaf for leaf, fixed in pairs])
        args = list(args)
        for number, value in self.args:
            args[number] = value
        return args, {**kwargs, **dict(self.kwargs)}


def flatten_with_gaps(tree: Any) -> tuple[list[Any], Any]:
    """Arguments flat, None among their leaves."""
    return jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is None or is_node(x))


class Given(NamedTuple):
    """The arguments of one call, flat."""

    leaves: Sequence[Any]  # objects of the model among them
    treedef: Any
    static: Static


class Donated(NamedTuple):
    """For each Variable, and for each plain leaf, whether a donated argument brought it."""

    variables: tuple[bool, ...] = ()
    plain: tuple[bool, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.variables or self.plain)

    @property
    def numbers(self) -> Iterator[int]:
        """The numbers of the Variables."""
        return compress(count(), self.variables)

    def divide(self, values: Any, arrays: Any, plain: Any) -> tuple[Any, Any, Any, Any]:
        """The arguments of the compiled function: what is donated is the second."""
        if not self.any:
            return values, (), arrays, plain
        kept, given = _divide(values, self.variables)
        kept_plain, given_plain = _divide(plain, self.plain)
        return kept, (given, given_plain), arrays, kept_plain

    def join(self, values: Any, given: Any, plain: Any) -> tuple[Any, Any]:
        """The values and plain leaves from the first, second and last of these."""
        if not self.any:
            return values, plain
        return _join(values, given[0], self.variables), _join(plain, given[1], self.plain)


NO_STATIC = Static()
NOTHING_DONATED = Donated()


def _divide(items: Any, chosen: tuple[bool, ...]) -> tuple[list[Any], list[Any]]:
    return list(compress(items, map(not_, chosen))), list(compress(items, chosen))


def _join(others: Any, found: Any, chosen: tuple[bool, ...]) -> list[Any]:
    rest, given = iter(others), iter(found)
    return [next(given) if is_donated else next(rest) for is_donated in chosen]
