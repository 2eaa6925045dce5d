"""Running the user's function inside a transform, and the loop that finds out what it changes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from linnet.nnx import locate
from linnet.nnx.graphlib.abstract import refuse_abstract
from linnet.nnx.graphlib.modes import graph_mode, graph_updates
from linnet.nnx.tracing_state import naming
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.lift import Effects, Opened, Structure, close, open_tree
from linnet.nnx.transforms.retrace import TraceLog, difference


class Call:
    """One call of a transform: the arguments opened, and what the run inside did.

    Args:
      f: the user's function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      api: the name of the transform.
      graph: as the user said.
      updates: as the user said.
      named: the function whose parameters name the arguments in errors, where ``f`` is a wrapper.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        api: str,
        graph: bool | None,
        updates: bool | None,
        named: Callable[..., Any] | None = None,
    ):
        self.f = f
        self._named = f if named is None else named
        self.api = api
        self.graph = graph_mode(graph)
        self.updates = graph_updates(updates)
        self.opened: Opened = open_tree((args, kwargs), self.graph, api, where=self.where)
        self.effects: Effects | None = None
        self.before: Callable[[Any], None] | None = None  # run on the objects inside, first
        self.after: list[Callable[[Any, Any], None]] = []  # and last, with the output

    @functools.cached_property
    def _names(self) -> TraceLog:
        return TraceLog(self._named)

    def where(self, path: Any) -> str:
        """A place in the arguments, as the parameters of the user's function name it."""
        return self._names.where(tuple(path)) if len(path) > 1 else "of all arguments"

    def difference(self, now: Structure) -> str:
        """The first difference between the arguments as they came and as they are now."""
        return difference(self._names, self.opened.structure, now)

    def run(
        self, values: Any, arrays: Any, plain: Any, as_values: Any = frozenset()
    ) -> tuple[Any, list[Any], list[Any], Any]:
        """Runs the function on tracers, inside the transform.

        Variables in ``as_values`` are no refs inside, however they are stored.

        Returns:
          The objects inside, the arrays of new things, the plain leaves, and the raw output.
        """
        inside = self.opened.structure.enter(values, arrays, plain, as_values)
        args, kwargs = inside.tree
        if self.before is not None:
            self.before(inside)
        refs = [v for n in as_values if (v := inside.variables[n])._metadata.stored_as_ref]
        copies = locate.standing_for(inside.objects, self.opened.seen)
        with naming(inside.nodes), copies, _without_refs(refs):
            out = self.f(*args, **kwargs)
        for last in self.after:
            last(inside, out)
        self.effects, news, leaves = inside.leave(
            out, self.graph, self.updates, self.api, self.where
        )
        return inside, news, leaves, out

    def run_changed(self, values: Any, arrays: Any, plain: Any) -> tuple[Any, Any, Any]:
        """The same; gives the changed values, the arrays of new things, and the plain leaves."""
        inside, news, leaves, _ = self.run(values, arrays, plain)
        assert self.effects is not None
        return [inside.raw(number) for number in self.effects.changed], news, leaves

    def close(self, changed: Any, news: Any, leaves: Any) -> Any:
        """Writes the changes out and gives the output."""
        assert self.effects is not None
        return close(self.opened, self.effects, changed, news, leaves)


@contextlib.contextmanager
def _without_refs(variables: list[Any]) -> Iterator[None]:
    """Has Variables hold plain values for a while, whatever is written to them."""
    settings = [{name: v._metadata[name] for name in ("hijax", "ref")} for v in variables]
    for variable in variables:
        plain = variable._metadata.replaced({"hijax": False, "ref": False})
        object.__setattr__(variable, "_metadata", plain)
    yield
    for variable, setting in zip(variables, settings, strict=True):
        object.__setattr__(variable, "_metadata", variable._metadata.replaced(setting))


def without_static(
    f: Callable[..., Any], args: tuple[Any, ...], static: tuple[int, ...], api: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that knows its static arguments, and the arguments without them.

    Raises:
      ValueError: there is no such argument.
    """
    count = len(args)
    beyond = [n for n in static if not -count <= n < count]
    if beyond:
        raise ValueError(
            f"nnx.{api}: static argument {beyond[0]} is out of range for a call with {count} "
            "positional arguments.\nFix: pass it by position, or name another one."
        )
    fixed = {n % count: args[n] for n in static}

    def with_static(*inner: Any, **named: Any) -> Any:
        return f(*(fixed.get(n, arg) for n, arg in enumerate(inner)), **named)

    return with_static, tuple(None if n in fixed else arg for n, arg in enumerate(args))


def positional(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], api: str
) -> tuple[Any, ...]:
    """Arguments that were given by name put where they stand by position.

    Raises:
      TypeError: one of them has no position.
    """
    if not kwargs:
        return args
    bound = inspect.signature(f).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"nnx.{api} takes arguments by position, and {sorted(bound.kwargs)} cannot be given "
            "one.\nFix: pass them by position, or bind them first with functools.partial."
        )
    return bound.args


def transform(
    api: str, lifted: Callable[..., Any], f: Any, /, *, finish: Any = None, **options: Any
) -> Any:
    """A function that runs ``lifted(f, args, kwargs, **options)``, or a decorator that makes one;
    ``finish`` has the last word on it."""

    def make(f: Any) -> Any:
        refuse_bound_method(f, api)

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return lifted(f, args, kwargs, **options)
            except TypeError as error:
                refuse_abstract((args, kwargs), error)
                raise

        return wrapper if finish is None else finish(wrapper)

    return make if f is None else make(f)
