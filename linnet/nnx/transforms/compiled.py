"""Compiled functions of arrays, and what they give."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from jax.tree_util import register_pytree_node

from linnet.nnx.transforms.arguments import Donated
from linnet.nnx.transforms.lift import Effects, Structure


class Outcome:
    """What a compiled function gives: arrays, and the static effects they belong to."""

    __slots__ = ("changed", "effects", "news", "plain")

    def __init__(self, effects: Effects, changed: Any, news: Any, plain: Any):
        self.effects = effects
        self.changed = changed
        self.news = news
        self.plain = plain


register_pytree_node(
    Outcome,
    lambda o: ((o.changed, o.news, o.plain), o.effects),
    lambda effects, children: Outcome(effects, *children),
)


class Entry:
    """The compiled function for one structure of the arguments and one set of static arguments.

    Args:
      structure: of the arguments.
      donated: which of them are donated.
      jitted: the function of arrays.
      takes_values: whether it takes no seeds in the place of random keys.

    Attributes:
      uses_refs: whether Variables are stored as refs, to be read and written through them.
      takes_values: whether it takes the values of Variables, not what they store.
    """

    __slots__ = ("donated", "jitted", "structure", "takes_values", "uses_refs")

    def __init__(self, structure: Structure, donated: Donated, jitted: Any, takes_values: bool):
        self.structure = structure
        self.donated = donated
        self.jitted = jitted
        self.uses_refs = any(kind.own.stored_as_ref for kind in structure.variable_kinds)
        self.takes_values = takes_values or self.uses_refs


class _Stage:
    """A stage of JAX's on the way to a compiled function, and what its arguments must be.

    Args:
      function: the ``JitFunction``.
      stage: the stage, whose own attributes can be read here.
      structure: of the arguments.
      static: the static arguments; the compiled function is called without them.
      bound: arguments that were given beforehand.
    """

    def __init__(self, function: Any, stage: Any, structure: Any, static: Any, bound: Any = ()):
        self._function = function
        self._stage = stage
        self._structure = structure
        self._static = static
        self._bound = bound

    def _next(self, kind: type[_StageT], stage: Any) -> _StageT:
        return kind(self._function, stage, self._structure, self._static, self._bound)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


_StageT = TypeVar("_StageT", bound=_Stage)


class Traced(_Stage):
    """A traced function of objects; ``lower`` goes on."""

    def lower(self, **kwargs: Any) -> Lowered:
        """Lowers; see ``jax.stages.Traced.lower``."""
        return self._next(Lowered, self._stage.lower(**kwargs))


class Lowered(_Stage):
    """A lowered function of objects; ``compile`` makes it callable."""

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles; see ``jax.stages.Lowered.compile``."""
        return self._next(Compiled, self._stage.compile(*args, **kwargs))


class Compiled(_Stage):
    """A compiled function of objects of one structure; calling it updates them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*self._bound, *args]
        for number, value in self._static[0]:
            given.insert(number, value)
        return self._planned(*given, **kwargs, **dict(self._static[1]))

    @functools.cached_property
    def _planned(self) -> Any:
        return self._function.running(self._stage, self._structure)


class PartialJit(functools.partial):
    """A function made by ``nnx.jit`` with its first arguments given."""

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers for these further arguments without running."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces for these further arguments without running."""
        traced = self._jitted.trace(*self.args, *args, **self.keywords, **kwargs)
        traced._bound = self.args
        return traced

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes of the output for these further arguments, without running."""
        return self._jitted.eval_shape(*self.args, *args, **self.keywords, **kwargs)

    def clear_cache(self) -> None:
        """Forgets everything compiled so far."""
        self._jitted.clear_cache()

    @property
    def _jitted(self) -> Any:
        return self.func
