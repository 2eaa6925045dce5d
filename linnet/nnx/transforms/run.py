"""Running the user's function inside a transform, and the loop that finds out what it changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
        self.opened: Opened = open_tree((args, kwargs), self.graph, api)
        self.effects: Effects | None = None
        self.before: Callable[[Any], None] | None = None  # run on the objects inside, first
        self.after: Callable[[Any, Any], None] | None = None  # and last, with the output

    def where(self, path: Any) -> str:
        """A place in the arguments, as the parameters of the user's function name it."""
        return TraceLog(self._named).where(tuple(path))

    def difference(self, now: Structure) -> str:
        """The first difference between the arguments as they came and as they are now."""
        return difference(TraceLog(self._named), self.opened.structure, now)

    def run(
        self, values: Any, arrays: Any, plain: Any, as_values: Any = frozenset()
    ) -> tuple[Any, list[Any], list[Any], Any]:
        """Runs the function on tracers, inside the transform.

        ``as_values`` is for ``Structure.enter``.

        Returns:
          The objects inside, the arrays of new things, the plain leaves, and the raw output.
        """
        inside = self.opened.structure.enter(values, arrays, plain, as_values)
        args, kwargs = inside.tree
        if self.before is not None:
            self.before(inside)
        with naming(inside.nodes):
            out = self.f(*args, **kwargs)
        if self.after is not None:
            self.after(inside, out)
        self.effects, news, leaves = inside.leave(out, self.graph, self.updates, self.api)
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


def transform(api: str, lifted: Callable[..., Any], f: Any, /, **options: Any) -> Any:
    """A function that runs ``lifted(f, args, kwargs, **options)``, or a decorator that makes
    one."""

    def make(f: Any) -> Any:
        refuse_bound_method(f, api)

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return lifted(f, args, kwargs, **options)

        return wrapper

    return make if f is None else make(f)
