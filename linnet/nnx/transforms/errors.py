"""Errors that JAX raises in a call, in terms of the user's functions and arguments.

JAX names the function that it traces, and its arguments. Those are ours, with flat lists of arrays.
``named_after`` gives a function the name, file and line of the user's; ``name_arguments`` puts the
paths of the user's arguments into the message.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import source_info_util

from linnet.errors import DonatedBufferError, UntraceableError, name_some
from linnet.nnx.graphlib.explain import donated_error, is_deleted, refuse_abstract
from linnet.nnx.pytreelib.kinds import ARRAY_TYPES, Path, is_node
from linnet.nnx.transforms.arguments import Donated
from linnet.nnx.transforms.engine import Opened, leaves_with_paths, output_place

_NOT_AN_ARRAY = ("as an abstract array", "not a valid JAX type")
_DEPENDS = re.compile(r"depends on the values? of the arguments? (?P<names>[^\n]+?)\.(?=\n|$)")

# What was traced on a line of the library belongs to the line of the user that called it.
source_info_util.register_exclusion(str(pathlib.Path(__file__).parents[2]))


def named_after(flat: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Gives ``flat`` the name, file and line of the user's function, as JAX prints them."""
    signature = inspect.signature(flat)
    functools.update_wrapper(flat, function)
    flat.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return flat


def name_arguments(
    error: Exception,
    groups: Mapping[str, Sequence[Path]],
    where: Callable[[Any], str],
    api: str,
    fix: Callable[[list[Path]], str] = lambda paths: "",
) -> None:
    """Puts the paths of the user's arguments into a message of JAX, and adds a note with a fix.

    JAX names an argument by one of the ``groups`` and a number, such as ``values[3]``; ``where``
    prints a path; ``fix`` gives text to add to the fix, from the paths of the arguments named.
    """
    text = str(error)
    found = _DEPENDS.search(text)
    if found is None or getattr(error, "names_arguments", False):
        return
    group_names = "|".join(map(re.escape, groups))
    met: list[Path] = []

    def to_path(match: re.Match[str]) -> str:
        path = groups[match["group"]][int(match["number"])]
        met.append(path)
        return where(path)

    listed = re.split(r", and |, | and ", found["names"])
    flat_name = rf"^(?P<group>{group_names})\[(?P<number>\d+)\]"
    named = [re.sub(flat_name, to_path, name) for name in listed]
    if not met:
        return
    one = len(named) == 1
    names = name_some(named)
    depends = "value of the argument" if one else "values of the arguments"
    changed = text[: found.start()] + f"depends on the {depends} {names}." + text[found.end() :]
    error.args = (changed, *error.args[1:])
    error.names_arguments = True  # pyright: ignore[reportAttributeAccessIssue]
    error.add_note(
        f"nnx.{api}: {names} {'is' if one else 'are'} traced, so Python cannot decide by "
        f"{'its value' if one else 'their values'}.\n"
        f"Fix: compute with jnp.where, or branch with nnx.cond{fix(met)}."
    )


def is_about(error: Exception, function: Any, transform: str) -> bool:
    """Whether a message of JAX is about the trace of a function for a transform of that name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
    return f"{place} for {transform}." in str(error)


@dataclasses.dataclass
class FailedCall:
    """A call of a function that JAX refused with ``error``; ``where`` prints paths of arguments."""

    error: Exception
    opened: Opened
    donated: Donated
    function: Any
    api: str
    where: Callable[[Any], str]

    def explain(self) -> None:
        """Raises a clearer error, or puts the paths of the arguments into JAX's and notes a fix."""
        text = str(self.error)
        if "donate" in text:
            self._refuse_donating_twice()
        if "deleted" in text or "donated" in text:
            self._refuse_donated()
        if isinstance(self.error, TypeError):
            refuse_abstract(self.opened.tree, self.error)
            if any(part in text for part in _NOT_AN_ARRAY):
                self._refuse_untraceable()
        if is_about(self.error, self.function, "jit"):
            self._name_arguments()
        self._note_lost()

    def _deleted(self) -> list[str]:
        pairs = zip(self.opened.variable_paths, self.opened.variable_values, strict=True)
        return [self.where(path) for path, value in pairs if is_deleted(value)]

    def _refuse_donated(self) -> None:
        gone = self._deleted()
        if gone:
            raise donated_error(gone) from self.error

    def _refuse_donating_twice(self) -> None:
        """Refuses two places with one array, where the array is donated."""
        opened = self.opened
        paths = (*opened.variable_paths, *opened.array_paths, *opened.plain_paths)
        values = (*opened.variable_values, *opened.arrays, *opened.plain)
        places: dict[int, list[Path]] = {}
        for path, value in zip(paths, values, strict=True):
            for leaf in jax.tree_util.tree_leaves(value):
                if isinstance(leaf, jax.Array):
                    places.setdefault(id(leaf), []).append(path)
        shared = next((found for found in places.values() if len(found) > 1), None)
        if shared is not None:
            first, *others = map(self.where, shared)
            raise DonatedBufferError(
                f"nnx.{self.api}: {first} and {name_some(others)} hold the same array, which "
                "cannot be donated and used a second time in one call.\n"
                "Fix: give each an array of its own (jnp.copy), or put one Variable in both "
                "places, or donate nothing: large state is donated without donate_argnums too."
            ) from self.error

    def _note_lost(self) -> None:
        """Notes which Variables lost their values to a call that failed while it ran."""
        gone = self._deleted()
        if gone:
            self.error.add_note(
                f"The memory of {name_some(gone)} was donated to this call, so what was there is "
                "lost.\nFix: restore it from a checkpoint; and so that the next call that fails "
                "leaves its arguments as they were, donate nothing: no donate_argnums, and "
                "nnx.use_state_donation(False) before the function is first called."
            )

    def _refuse_untraceable(self) -> None:
        opened = self.opened
        held = zip(
            (*opened.variable_paths, *opened.array_paths),
            (*opened.variable_values, *opened.arrays),
            strict=True,
        )
        for path, value in held:
            for leaf in jax.tree_util.tree_leaves(value):
                if not is_traceable(leaf):
                    raise UntraceableError(
                        f"nnx.{self.api}: {self.where(path)} holds {reprlib.repr(leaf)} "
                        f"({type(leaf).__name__}), which JAX does not take as an array.\n"
                        "Fix: hold it in a plain attribute, which is static, and an array of text "
                        "or objects there as a list, .tolist()."
                    ) from self.error
        for path, leaf in zip(opened.plain_paths, opened.plain, strict=True):
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

    def _name_arguments(self) -> None:
        groups = argument_paths(self.opened, self.donated)
        plain = groups["plain"]

        def or_static(met: list[Path]) -> str:
            if len(met) > 1 or len(met[0]) > 2 or met[0] not in plain:
                return ""
            return f"; or make it static, {self._made_static(met[0])}, if it is a flag"

        name_arguments(self.error, groups, self.where, self.api, or_static)


def argument_paths(opened: Opened, donated: Donated) -> dict[str, Sequence[Path]]:
    """The paths of the arguments of a compiled function, by the names that JAX has for them."""
    kept, donated_values, arrays, plain = donated.divide(
        opened.variable_paths, opened.array_paths, opened.plain_paths
    )
    groups = {"values": kept, "arrays": arrays, "plain": plain}
    return groups | {f"donated_values[{n}]": part for n, part in enumerate(donated_values)}


def refuse_untraceable_output(out: Any, api: str) -> None:
    """Raises ``UntraceableError`` for something in the output that is no array, with its place."""
    for path, leaf in leaves_with_paths(out):
        if not (is_node(leaf) or isinstance(leaf, ARRAY_TYPES) or is_traceable(leaf)):
            raise UntraceableError(
                f"nnx.{api}: {output_place(path)} is {reprlib.repr(leaf)} "
                f"({type(leaf).__name__}), which is no array and cannot leave a compiled function."
                "\nFix: return arrays, modules and Variables, and compute the rest outside."
            )


def is_traceable(leaf: Any) -> bool:
    """Whether JAX takes a leaf as an array."""
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True
