"""Why a jitted function was traced again, and other differences of structures in words."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from linnet.errors import first_lines, path_string, type_text
from linnet.functional import dtypes
from linnet.nnx.graphlib.walk import Definition
from linnet.nnx.pytreelib import kinds, statics
from linnet.nnx.pytreelib.kinds import ARRAY, METHOD, REFERENCE, STATIC, VARIABLE, Path
from linnet.nnx.transforms.arguments import StaticArguments
from linnet.nnx.transforms.engine import Opened, Structure, leaves_with_paths, open_tree

_MOST_KEPT = 16
_MOST_REASONS = 4
_MOST_TEXT = 80
_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()


def explain_retrace(fun: Any) -> str:
    """Says why a function made by ``nnx.jit`` was traced the last time.

    Args:
      fun: the jitted function, or a method or partial of one.

    Returns:
      A text: how often it was traced and, for the last time, the path and the field that differ
      from the nearest trace before it.

    Raises:
      TypeError: it was not made by ``nnx.jit``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Noise(nnx.Module):
      ...     def __init__(self):
      ...         self.deterministic = False
      >>> @nnx.jit
      ... def run(model, x):
      ...     return x
      >>> model = Noise()
      >>> _ = run(model, jnp.ones(2))
      >>> model.deterministic = True
      >>> _ = run(model, jnp.ones(2))
      >>> print(nnx.explain_retrace(run))
      run was traced 2 times. The last time because model.deterministic: False -> True
    """
    inner = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    log = getattr(getattr(inner, "__func__", inner), "traces", None)
    if not isinstance(log, TraceLog):
        raise TypeError(f"explain_retrace takes a function made by nnx.jit, but got {fun!r}.")
    times = f"{log.name} was traced {log.count} time{'' if log.count == 1 else 's'}."
    if len(log.kept) < 2:
        return times
    *earlier, last = log.kept
    nearest = min((_reasons(log, old, last) for old in reversed(earlier)), key=len)
    nearest = nearest or ["a setting of JAX or nnx changed, or a cache was cleared"]
    shown = first_lines(nearest, _MOST_REASONS)
    return f"{times} The last time because {'; '.join(shown)}"


class Trace(NamedTuple):
    """What one trace depended on: structure, types, static arguments and precision policy."""

    structure: Structure
    types: dict[Path, Any]
    static: dict[Any, Any]
    precision: Any


class ArgumentNames:
    """The names that the parameters of a function give to its arguments."""

    def __init__(self, fun: Any):
        self.parameters = _parameters(fun)

    def where(self, path: Path) -> str:
        """A path in the arguments, as the parameters of the function name it."""
        place = path[1]
        if isinstance(place, int) and place < len(self.parameters):
            place = self.parameters[place]
        return path_string(path[2:], place if isinstance(place, str) else f"[{place}]")


class TraceLog(ArgumentNames):
    """The last traces of one function."""

    def __init__(self, fun: Any):
        super().__init__(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.count = 0
        self.kept: list[Trace] = []

    def add(self, tree: Any, static: StaticArguments) -> None:
        """Adds a trace with these arguments and static arguments."""
        opened = open_tree(tree, True, "")
        paths = [*opened.slot_paths, *opened.plain_paths]
        values = [*opened.slot_values, *opened.plain]
        found = {
            path: jax.tree_util.tree_map(jax.typeof, value)
            for path, value in zip(paths, values, strict=True)
        }
        self.count += 1
        static_values = dict((*static.args, *static.kwargs))
        trace = Trace(opened.structure, found, static_values, dtypes.context.value)
        self.kept = [*self.kept[1 - _MOST_KEPT :], trace]


def _parameters(fun: Any) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _reasons(log: TraceLog, old: Trace, new: Trace) -> list[str]:
    return [
        *_compare_mappings(
            old.static, new.static, lambda place: f"static argument {log.where((0, place))}"
        ),
        *_compare_structures(log, old.structure, new.structure),
        *_compare_types(log, old.types, new.types),
        *_compare_precision(old.precision, new.precision),
    ]


def difference(names: ArgumentNames, old: Structure, new: Structure) -> str:
    """The first difference of two structures, in words."""
    return next(_compare_structures(names, old, new), "the arguments are arranged differently")


def differences(old: Any, new: Any) -> list[str]:
    """All differences of two objects but the values of their arrays, in words, by path."""
    opened = [open_tree(thing, True, "differences") for thing in (old, new)]
    before, after = (_array_texts(one) for one in opened)
    was: Any
    now: Any
    was, now = (one.structure.definitions[0] for one in opened)
    return [
        *_compare(was, now, ""),
        *(
            f"{path_string(path)}: {before[path]} -> {after[path]}"
            for path in before
            if before[path] != after.get(path, before[path])
        ),
    ]


def _array_texts(opened: Opened) -> dict[Path, str]:
    """Shape and dtype of the arrays of opened objects, by path."""
    return {
        path: ", ".join(
            type_text(leaf if hasattr(leaf, "dtype") else jax.typeof(leaf))
            for leaf in jax.tree_util.tree_leaves(value)
        )
        for path, value in zip(opened.slot_paths, opened.slot_values, strict=True)
    }


def _compare_mappings(old: Any, new: Any, where: Callable[[Any], str]) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys(), key=str):
        yield from _compare_values(old.get(key, _ABSENT), new.get(key, _ABSENT), where(key))


def _compare_structures(names: ArgumentNames, old: Structure, new: Structure) -> Iterator[str]:
    before, after = _by_path(old), _by_path(new)
    for path in before | after:
        where = names.where(path)
        was, now = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if was is _ABSENT or now is _ABSENT:
            yield f"{where}: {'new' if was is _ABSENT else 'removed'}"
        elif was is None or now is None:
            if was is not now:
                yield f"{where}: {_kind_text(was)} -> {_kind_text(now)}"
        else:
            yield from _compare(was, now, where)


def _by_path(structure: Structure) -> dict[Path, Definition | None]:
    """The definition of each leaf of the arguments, None for a plain one, by path."""
    tree = structure.treedef.unflatten(range(structure.treedef.num_leaves))
    return {path: structure.definitions[number] for path, number in leaves_with_paths(tree)}


def _compare_types(names: ArgumentNames, old: Any, new: Any) -> Iterator[str]:
    for path, now in new.items():
        was = old.get(path, now)
        if was != now:
            texts = _type_text(was), _type_text(now)
            change = " -> ".join(texts) if texts[0] != texts[1] else "another sharding"
            yield f"{names.where(path)}: {change}"


def _compare_precision(old: Any, new: Any) -> Iterator[str]:
    if old != new:
        was, now = ("none" if scope is None else repr(scope.policy) for scope in (old, new))
        change = f"{was} -> {now}" if was != now else "now inside of a call that obeys it"
        yield f"the precision policy: {change}"


def _type_text(types: Any) -> str:
    texts = [
        type_text(leaf) + " (weakly typed)" * getattr(leaf, "weak_type", False)
        for leaf in jax.tree_util.tree_leaves(types)
    ]
    return ", ".join(texts) or "nothing"


def _compare(old: Definition, new: Definition, where: str) -> Iterator[str]:
    if old == new:
        return
    is_leaf = old.kind in (REFERENCE, ARRAY, STATIC, METHOD)
    if old.kind != new.kind or (not is_leaf and old.payload != new.payload):
        yield f"{where}: {_kind_text(old)} -> {_kind_text(new)}"
        return
    if old.kind == VARIABLE:
        yield from _compare_mappings(
            old.static.shown(), new.static.shown(), lambda name: f"{where} metadata {name}"
        )
    elif is_leaf:
        yield f"{where}: another reference"
    else:
        yield from _compare_attributes(old, new, where)


def _compare_attributes(old: Definition, new: Definition, where: str) -> Iterator[str]:
    before, after = (
        {**dict(d.items()), **{k: _Value(v) for k, v in d.static.template.items()}}
        for d in (old, new)
    )
    for name in kinds.sort_keys(before.keys() | after.keys()):
        place = path_string([name], where)
        was, now = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if isinstance(was, _Value) and isinstance(now, _Value):
            yield from _compare_values(was.value, now.value, place)
        elif was is _ABSENT:
            yield f"{place}: new ({_kind_text(now)})"
        elif now is _ABSENT:
            yield f"{place}: removed"
        elif isinstance(was, _Value) or isinstance(now, _Value):
            yield f"{place}: {_kind_text(was)} -> {_kind_text(now)}"
        else:
            yield from _compare(was, now, place)
    for name in kinds.sort_keys(dict(old.shared).keys() ^ dict(new.shared).keys()):
        change = "is no longer" if name in dict(old.shared) else "is now"
        yield f"{path_string([name], where)}: {change} the value of an attribute before it, too"


class _Value(NamedTuple):
    """A static attribute, beside the definitions of data."""

    value: Any


def _compare_values(old: Any, new: Any, where: str) -> Iterator[str]:
    """Where two static values differ, looking into containers, dataclasses and functions."""
    if statics.key_of(old) == statics.key_of(new):
        return
    before, after = _inner_values(old), _inner_values(new)
    if before is not None and after is not None and type(old) is type(new):
        names = before if before.keys() == after.keys() else ()
        found = [
            text
            for name in names
            for text in _compare_values(before[name], after[name], path_string([name], where))
        ]
        if found:
            yield from found
            return
    yield f"{where}: {_text(old)} -> {_text(new)}"


def _inner_values(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(kinds.container_items(value, kinds.kind_of(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.FunctionType):
        return {"__code__": value.__code__, **statics.closed_over(value)}
    return None


def _text(value: Any) -> str:
    text = value.__qualname__ if isinstance(value, types.FunctionType) else repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _kind_text(thing: Any) -> str:
    if thing is None:
        return "no object"
    if isinstance(thing, _Value):
        return _text(thing.value)
    return thing.text
