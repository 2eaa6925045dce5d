"""Functions of objects that were traced, lowered or compiled ahead of time, or partly applied."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

from linnet.nnx.transforms import compiler_options as options_of_compiler


@dataclasses.dataclass(eq=False, repr=False)
class _Stage:
    """One of ``jax.stages``, whose attributes can be read here, for arguments of one structure.

    The compiled function is called without the ``static`` arguments, and without the ``bound``
    ones, which were given before.
    """

    _function: Any
    _stage: Any
    _structure: Any
    _static: Any
    _bound: Any = ()
    # The paths of the arguments, by the names that JAX has for them.
    paths: dict[str, Any] = dataclasses.field(default_factory=dict)

    def _next(self, cls: type[_StageT], stage: Any) -> _StageT:
        return cls(self._function, stage, self._structure, self._static, self._bound, self.paths)

    def argument_name(self, group: str, number: int) -> str:
        """The user's path to the argument that JAX calls ``group[number]``."""
        paths = self.paths.get(group, ())
        known = number < len(paths)
        return self._function.traces.where(paths[number]) if known else f"{group}[{number}]"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


_StageT = TypeVar("_StageT", bound=_Stage)


class Traced(_Stage):
    """A traced function of objects; ``lower`` goes on."""

    def lower(self, **kwargs: Any) -> Lowered:
        """Lowers; see ``jax.stages.Traced.lower``."""
        lowered = self._next(Lowered, self._stage.lower(**kwargs))
        of_user = self._function._options.get("compiler_options")
        lowered.compiler_options = options_of_compiler.chosen(self._stage.jaxpr, of_user)
        return lowered


class Lowered(_Stage):
    """A lowered function of objects; ``compile`` makes it callable."""

    compiler_options: dict[str, Any] | None = None

    def compile(self, compiler_options: dict[str, Any] | None = None, **kwargs: Any) -> Compiled:
        """Compiles; see ``jax.stages.Lowered.compile``."""
        options = {**(self.compiler_options or {}), **(compiler_options or {})} or None
        return self._next(Compiled, self._stage.compile(options, **kwargs))


class Compiled(_Stage):
    """A compiled function of objects of one structure; calling it updates them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*self._bound, *args]
        for number, value in self._static.args:
            given.insert(number, value)
        return self._planned(*given, **kwargs, **dict(self._static.kwargs))

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
    def jitted_fn(self) -> Any:
        """What was compiled so far; ``jitted_fn._cache_size()`` counts it."""
        return self._jitted.jitted_fn

    @property
    def _jitted(self) -> Any:
        return self.func
