"""Errors that JAX raises in a call of a compiled function, in terms of the user's arguments."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any

import jax

from linnet.errors import UntraceableError, name_some
from linnet.nnx.graphlib.traverse import donated_error, is_deleted, refuse_abstract
from linnet.nnx.transforms.arguments import Donated
from linnet.nnx.transforms.engine import Opened

_OWN_NAME = re.compile(r"\b(?:values|arrays|plain|given\[[01]\])\[\d+\]")
_NOT_AN_ARRAY = ("as an abstract array", "not a valid JAX type")


class FailedCall:
    """A call that JAX refused with ``error``; ``where`` prints a path in its arguments."""

    def __init__(
        self,
        error: Exception,
        opened: Opened,
        donated: Donated,
        api: str,
        where: Callable[[Any], str],
    ):
        self.error, self.opened = error, opened
        self.donated, self.api, self.where = donated, api, where

    def explain(self) -> None:
        """Raises a clearer error, or adds the names of the arguments to JAX's as a note.

        The clearer errors are ``DonatedBufferError`` for a Variable whose buffer is gone,
        ``AbstractValueError`` for one that has only a shape, and ``UntraceableError`` for an
        argument that is no array.
        """
        text = str(self.error)
        if "deleted" in text or "donated" in text:
            self._refuse_donated()
        if isinstance(self.error, TypeError):
            refuse_abstract(self.opened.tree, self.error)
            if any(part in text for part in _NOT_AN_ARRAY):
                self._refuse_untraceable()
        if isinstance(self.error, jax.errors.ConcretizationTypeError) or _is_conversion(self.error):
            self._name_arguments(text)

    def _refuse_donated(self) -> None:
        pairs = zip(self.opened.variable_paths, self.opened.values, strict=True)
        gone = [self.where(path) for path, value in pairs if is_deleted(value)]
        if gone:
            raise donated_error(gone) from self.error

    def _refuse_untraceable(self) -> None:
        for path, leaf in zip(self.opened.plain_paths, self.opened.plain, strict=True):
            if not is_traceable(leaf):
                raise UntraceableError(
                    f"nnx.{self.api}: {self.where(path)} is {reprlib.repr(leaf)} "
                    f"({type(leaf).__name__}), which is no array and cannot be traced.\n"
                    f"Fix: {self._made_static(path)} if it is part of the program, such as a mode "
                    "or a function; or bind it with functools.partial."
                ) from self.error

    def _made_static(self, path: Any) -> str:
        name, number = self.where(path[:2]), path[1]
        option = f"static_argnames={name!r}" if name.isidentifier() else f"static_argnums={number}"
        return f"nnx.{self.api}(..., {option})"

    def _name_arguments(self, text: str) -> None:
        """Adds the paths of the arguments that JAX names as ``plain[0]`` and the like."""
        kept, given, arrays, plain = self.donated.divide(
            self.opened.variable_paths, self.opened.array_paths, self.opened.plain_paths
        )
        groups = {"values": kept, "arrays": arrays, "plain": plain}
        groups |= {f"given[{n}]": part for n, part in enumerate(given)}
        paths = {f"{name}[{n}]": p for name, group in groups.items() for n, p in enumerate(group)}
        met = dict.fromkeys(_OWN_NAME.findall(text))
        named = {name: self.where(paths[name]) for name in met if name in paths}
        if not named:
            return
        whose = name_some(f"{name} is {place}" for name, place in named.items())
        flags = [paths[name] for name in named if len(paths[name]) == 2 and paths[name] in plain]
        fix = "compute with jnp.where, or branch with nnx.cond"
        if flags:
            fix += f"; or make it static, {self._made_static(flags[0])}, if it is a flag"
        self.error.add_note(
            f"nnx.{self.api}: {whose}. It is traced, so Python cannot decide by its value.\n"
            f"Fix: {fix}."
        )


def _is_conversion(error: Exception) -> bool:
    kinds = (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)
    return isinstance(error, kinds)


def is_traceable(leaf: Any) -> bool:
    """Whether JAX takes a leaf as an array."""
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True
