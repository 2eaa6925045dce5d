"""The arguments of a compiled function: taken apart outside, put together while tracing."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

from linnet.nnx.pytreelib import Pytree
from linnet.nnx.rnglib import PendingRngs
from linnet.nnx.transforms.lift import Structure


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


class Donated(NamedTuple):
    """The numbers of the Variables and of the plain leaves that donated arguments brought."""

    variables: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.variables or self.plain)

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


def _divide(items: Any, chosen: frozenset[int]) -> tuple[list[Any], list[Any]]:
    others = [item for number, item in enumerate(items) if number not in chosen]
    return others, [items[number] for number in sorted(chosen)]


def _join(others: Any, found: Any, chosen: frozenset[int]) -> list[Any]:
    rest, given = iter(others), iter(found)
    count = len(others) + len(found)
    return [next(given) if number in chosen else next(rest) for number in range(count)]


class RngsEscaped(Exception):
    """Internal: a function kept or changed an Rngs that was passed as seeds."""


class Rebuild:
    """The arguments of a call with objects and plain values alone.

    Args:
      places: for each argument ``"known"`` for an object, ``"rngs"`` for one that is passed as
        seeds, or None.
    """

    static_args: Any = ((), ())

    def __init__(self, places: list[Any]):
        self.places = places

    def __call__(self, structure: Structure, values: Any, arrays: Any, plain: Any) -> Any:
        inside = structure.enter(values, arrays, ())
        rest = iter(plain)
        args = []
        for obj, place in zip(inside.tree[0], self.places, strict=True):
            if place == "known":
                args.append(obj)
                continue
            arg = next(rest)
            args.append(arg.settle() if isinstance(arg, PendingRngs) else arg)
        return inside, args, {}


class Restore:
    """The arguments of any other call, static ones put back."""

    def __init__(self, static_args: Any):
        self.static_args = static_args

    def __call__(self, structure: Structure, values: Any, arrays: Any, plain: Any) -> Any:
        inside = structure.enter(values, arrays, plain)
        args, kwargs = inside.tree
        args = list(args)
        for number, value in self.static_args[0]:
            args[number] = value
        return inside, args, {**kwargs, **dict(self.static_args[1])}
