"""Traced arrays that a function leaves in static values and metadata, which nobody can use then."""

from __future__ import annotations

import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer

from linnet.errors import HiddenDataWarning, type_text
from linnet.nnx.graphlib.walk import Definition, paths_to
from linnet.nnx.pytreelib import locate, statics
from linnet.nnx.pytreelib.attributes import StaticPart, sort_attributes
from linnet.nnx.pytreelib.kinds import (
    DICT,
    LIST,
    OBJECT,
    STATIC,
    VARIABLE,
    container_items,
    is_node,
    kind_of,
)


def warn_of_tracers(
    things: Iterable[Any],
    came_in: Iterable[Definition],
    tree: Any,
    api: str,
    where: Callable[[Any], str],
) -> None:
    """Warns of the first static value or metadata of objects in a tree with a new tracer in it.

    ``came_in`` are the definitions of the arguments: tracers in these belong to a trace outside.
    """
    known: set[int] | None = None
    for thing in things:
        for name, value in _static_items(thing):
            tracers = [x for x in _inner_values(value) if isinstance(x, Tracer)]
            if tracers and known is None:
                known = set(map(id, _static_tracers(came_in)))
            tracer = next((x for x in tracers if id(x) not in (known or ())), None)
            if tracer is None:
                continue
            path = next(paths_to(tree, thing), ())
            is_metadata = kind_of(thing) == VARIABLE
            place = f"metadata {name!r} of {where(path)}" if is_metadata else where((*path, name))
            warnings.warn(
                f"nnx.{api}: {place} is static, and holds a traced {type_text(tracer)} now. Arrays "
                "in static values are not brought out of the call, and JAX raises "
                "UnexpectedTracerError where this one is used.\n"
                "Fix: keep it in a Variable or in an attribute of a module.",
                HiddenDataWarning,
                stacklevel=locate.outer_level(),
            )
            return


def _static_items(thing: Any) -> Iterator[tuple[Any, Any]]:
    kind = kind_of(thing)
    if kind == VARIABLE:
        yield from thing._metadata.items()
    elif kind == OBJECT:
        items = thing._pytree_items()
        for name in sort_attributes(thing).static_part.names:
            yield name, items[name]
    elif kind in (LIST, DICT):
        yield from ((key, x) for key, x in container_items(thing, kind) if kind_of(x) == STATIC)


def _static_tracers(definitions: Iterable[Definition]) -> Iterator[Tracer]:
    for definition in definitions:
        for _, part in definition.parts():
            static = part.static
            held = static.template if isinstance(static, StaticPart) else static or {}
            for value in held.values():
                yield from (x for x in _inner_values(value) if isinstance(x, Tracer))


def _inner_values(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The arrays and objects that a static value consists of, in no particular order."""
    cls, seen = type(value), set() if seen is None else seen
    if statics.type_needs_no_key(cls) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, jax.Array) or is_node(value):
        yield value
        return
    parts = [*statics.compared_parts(value).values()]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        parts += value
    elif cls is functools.partial:
        parts += (value.func, *value.args, *value.keywords.values())
    elif cls is types.MethodType:
        parts.append(value.__self__)
    elif cls is types.FunctionType:
        parts += statics.function_parts(value)
    for part in parts:
        yield from _inner_values(part, seen)
