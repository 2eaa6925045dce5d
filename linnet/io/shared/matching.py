"""Comparing what is stored with what is wanted, entry by entry; the list of what does not fit.

Works on flat maps from path to type, so it serves every format. ``match`` says for each wanted
entry where its value comes from (a stored entry, a slice of one, or several stacked) and lists
everything that does not fit; ``refuse`` raises with that list.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import jax.numpy as jnp
import numpy as np

from linnet.errors import CheckpointMismatchError, RenameError, misfit_text
from linnet.io.shared.entries import (
    ANYTHING,
    Path,
    Spec,
    fits,
    is_list_index,
    steps_as_text,
    text_of,
)

# In a State that Flax saved, the value of a Variable is one step below it, under one of these.
VALUE_FOLDERS = ("value", "raw_value")
_MOST_COMPARISONS = 200_000  # of names; nothing is guessed where there are more
_MOST_LISTED = 50
_LIKELY = 0.6

Rename = Mapping[str | re.Pattern[str], str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One entry that does not fit.

    Args:
      kind: ``missing``, ``extra``, ``shape``, ``dtype``, ``type`` or ``rename``.
      path: the path of the entry, as text.
      text: what is wrong with it.
      nearest: the path that was likely meant, if there is one.

    Example:
      >>> from linnet import io
      >>> print(io.Problem("extra", "model/gamma", "not in the model", "model/scale"))
      model/gamma: not in the model; did you mean model/scale?
    """

    kind: Literal["missing", "extra", "shape", "dtype", "type", "rename"]
    path: str
    text: str
    nearest: str = ""

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{self.path}: {self.text}{hint}"


def refuse(
    what: str,
    problems: list[Problem],
    fixes: Iterable[str],
    *,
    not_done: str = "changed",
    lines: Iterable[str] | None = None,
) -> NoReturn:
    """Raises an error that lists all problems (as ``lines``, where given)."""
    lists = {f"{what}; nothing was {not_done}": map(str, problems) if lines is None else lines}
    text = misfit_text(lists, fix=f"{', or '.join(fixes)}.", most=_MOST_LISTED)
    raise CheckpointMismatchError(text, problems)


def type_problem(path: Path, wanted: Spec, found: Spec) -> Problem | None:
    """How a stored entry differs from the one that is wanted, if it does."""
    if fits(wanted, found):
        return None
    kind = "dtype" if wanted.shape == found.shape else "shape"
    kind = kind if wanted.category == found.category else "type"
    return Problem(kind, text_of(path), f"expected {wanted}, found {found}")


# ---- where a value comes from -------------------------------------------------------------------

# Layers that are scanned over hold `layers/kernel` (or, in an `nnx.Stack`, `layers/stacked/kernel`)
# with a leading axis; listed ones hold `layers/0/kernel` and so on.

STACKED = "stacked"  # the step that nnx.Stack has where a list has a position


@dataclasses.dataclass(frozen=True, slots=True)
class StoredValue:
    """A stored entry or, with an ``index`` on its first axes, a layer of a stored stack."""

    path: Path
    spec: Spec  # of the layer
    index: tuple[int, ...] = ()

    @property
    def stored(self) -> list[Path]:
        return [self.path]

    def build(self, values: dict[Path, Any]) -> Any:
        return values[self.path][self.index] if self.index else values[self.path]


@dataclasses.dataclass(frozen=True, slots=True)
class StackedLayers:
    """Listed layers, to be stacked."""

    layers: tuple[Origin, ...]

    @property
    def spec(self) -> Spec:
        spec = self.layers[0].spec
        return dataclasses.replace(spec, shape=(len(self.layers), *spec.shape))

    @property
    def stored(self) -> list[Path]:
        return [path for layer in self.layers for path in layer.stored]

    def build(self, values: dict[Path, Any]) -> Any:
        layers = [layer.build(values) for layer in self.layers]
        return (np if all(isinstance(x, np.ndarray) for x in layers) else jnp).stack(layers)


# `stored` has the stored entries that are needed; `build` makes the wanted value of their values.
Origin = StoredValue | StackedLayers
Lookup = Callable[[Path], StoredValue | None]


def same_stack(path: Path, lookup: Lookup) -> StoredValue | None:
    """The stored stack in its other form: with or without the step of an ``nnx.Stack``."""
    forms = [(*path[:at], *path[at + 1 :]) for at, step in enumerate(path) if step == STACKED]
    forms += [(*path[:at], STACKED, *path[at:]) for at in range(1, len(path) + 1)]
    found = (lookup(form) for form in forms)
    return next((whole for whole in found if whole and whole.spec.shape), None)


def part_of_stack(path: Path, lookup: Lookup) -> StoredValue | None:
    """The slice of a stored stack that stands for a listed layer's entry."""
    # From the last position on, so that of nested stacks the outer one has the first index.
    for at in reversed(range(len(path))):
        if not is_list_index(path[at]):
            continue
        position, above, below = int(path[at]), path[:at], path[at + 1 :]
        for stacked in ((*above, STACKED, *below), (*above, *below)):
            whole = lookup(stacked) or part_of_stack(stacked, lookup)
            if whole and not whole.spec.is_value and position < (*whole.spec.shape, 0)[0]:
                spec = dataclasses.replace(whole.spec, shape=whole.spec.shape[1:])
                return StoredValue(whole.path, spec, (*whole.index, position))
    return None


def stack_of_parts(path: Path, lookup: Lookup, start: int = 1, depth: int = 2) -> Origin | None:
    """The stack of stored listed layers' entries that stands for a stacked entry."""
    # A list may begin at any step from `start` on; at most `depth` lists are inside each other.
    for at in range(start, len(path) + 1):
        below = path[at + 1 :] if path[at : at + 1] == (STACKED,) else path[at:]
        layers: list[Any] = []
        while True:
            listed = (*path[:at], len(layers), *below)
            layer = lookup(listed)
            if layer is None and depth > 1:
                layer = stack_of_parts(listed, lookup, at + 1, depth - 1)
            if layer is None:
                break
            layers.append(layer)
        if layers and not layers[0].spec.is_value and len({x.spec for x in layers}) == 1:
            return StackedLayers(tuple(layers))
    return None


# ---- matching -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Match:
    """Where each wanted entry comes from, and what does not fit."""

    origins: dict[Path, Origin]
    problems: list[Problem]
    # Stored entries that share their wanted entry with another stored one, and that wanted entry:
    # tied weights that were saved apart. They are no problem if their values are equal.
    twins: dict[Path, Path] = dataclasses.field(default_factory=dict)


def match(
    wanted: Mapping[Path, Spec],
    stored: Mapping[Path, Spec],
    *,
    aliases: Iterable[tuple[Path, Path]] = (),
    variable_depths: Mapping[Path, int] | None = None,
    wildcard_paths: Iterable[Path] = (),
    scope: Iterable[str] | None = None,
) -> Match:
    """Finds the origin of each wanted entry, and all that does not fit."""
    # `aliases` are pairs of paths that lead to one thing, in the stored tree or the wanted one;
    # `variable_depths` has, for entries inside a Variable, how many steps lead to it; below
    # `wildcard_paths` all that is stored is wanted; entries of items that are not in `scope` are no
    # problem.
    within = None if scope is None else set(map(str, scope))
    aliases = list(aliases)
    taken, missing = _stored_under(wildcard_paths, stored, aliases)
    result = Match({new: StoredValue(old, stored[old]) for new, old in taken.items()}, [])
    finder = _EntryFinder(stored, aliases)
    used = set(taken.values())
    layers_used: dict[Path, set[int]] = {}
    for path, spec in wanted.items():
        origin = finder.find(path, (variable_depths or {}).get(path))
        if origin is None:
            missing.append(path)
            continue
        used.update(origin.stored)
        if isinstance(origin, StoredValue) and origin.index:
            layers_used.setdefault(origin.path, set()).add(origin.index[0])
        if problem := type_problem(path, spec, origin.spec):
            result.problems.append(problem)
        else:
            result.origins[path] = origin
    also_known = {other: path for path in wanted for other in finder.renamings(steps_as_text(path))}
    left = [p for p in stored if p not in used and (within is None or str(p[0]) in within)]
    result.twins |= {
        p: also_known[steps_as_text(p)] for p in left if steps_as_text(p) in also_known
    }
    extra = {path: stored[path] for path in left if path not in result.twins}
    result.problems += _unmatched(missing, extra, wanted)
    for path, positions in layers_used.items():
        if left_over := [i for i in range(stored[path].shape[0]) if i not in positions]:
            text = f"layers {left_over} of the stack are not wanted"
            result.problems.append(Problem("extra", text_of(path), text))
    return result


def _stored_under(
    wildcard_paths: Iterable[Path], stored: Iterable[Path], aliases: list[tuple[Path, Path]]
) -> tuple[dict[Path, Path], list[Path]]:
    """The stored paths under each item given as ``...``, and such items with nothing stored."""
    taken: dict[Path, Path] = {}
    missing = []
    for wildcard_path in wildcard_paths:
        found = {path: path for path in _under(wildcard_path, stored)}
        if not found:  # saved as an alias of a part of another item
            found = {
                (*name, *path[len(first) :]): path
                for name, first in aliases
                if name[: len(wildcard_path)] == wildcard_path
                for path in _under(first, stored)
            }
        taken |= found
        missing += [] if found else [wildcard_path]
    return taken, missing


def _under(top: Path, paths: Iterable[Path]) -> Iterator[Path]:
    head = steps_as_text(top)
    return (path for path in paths if steps_as_text(path[: len(head)]) == head)


class _EntryFinder:
    """Looks up stored entries by path, by alias, and in stacked or listed form."""

    def __init__(self, stored: Mapping[Path, Spec], aliases: Iterable[tuple[Path, Path]]):
        self.exact = {path: StoredValue(path, spec) for path, spec in stored.items()}
        self.index = {steps_as_text(path): whole for path, whole in self.exact.items()}
        self.aliases: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for first, second in aliases:
            one, other = steps_as_text(first), steps_as_text(second)
            self.aliases.setdefault(one, []).append(other)
            self.aliases.setdefault(other, []).append(one)

    def find(self, path: Path, variable_depth: int | None) -> Origin | None:
        forms = [path]
        if variable_depth is not None:
            above, below = path[:variable_depth], path[variable_depth:]
            forms += [(*above, name, *below) for name in VALUE_FOLDERS]
        searches = (same_stack, part_of_stack, stack_of_parts)
        in_other_form = (search(form, self._lookup) for search in searches for form in forms)
        return next(filter(None, itertools.chain(map(self._lookup, forms), in_other_form)), None)

    def _lookup(self, path: Path) -> StoredValue | None:
        name = steps_as_text(path)
        found = self.exact.get(path) or self.index.get(name)
        if found is None and self.aliases:
            others = (self.index.get(other) for other in self.renamings(name))
            found = next((whole for whole in others if whole), None)
        return found

    def renamings(self, name: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
        """The other paths of an entry, from the aliases of the objects that hold it."""
        for end in range(1, len(name) + 1) if self.aliases else ():
            for other in self.aliases.get(name[:end], ()):
                yield other + name[end:]


def _unmatched(
    missing: list[Path], extra: dict[Path, Spec], wanted: Mapping[Path, Spec]
) -> list[Problem]:
    """Problems for what is missing and what is left over, each with its likely counterpart."""
    meant = nearest({p: wanted.get(p, ANYTHING) for p in missing}, extra)
    back = {other: path for path, other in meant.items()}
    return [
        *(Problem("missing", text_of(p), "missing", text_of(meant.get(p, ()))) for p in missing),
        *(Problem("extra", text_of(p), "not wanted", text_of(back.get(p, ()))) for p in extra),
    ]


def nearest(missing: Mapping[Path, Spec], left: Mapping[Path, Spec]) -> dict[Path, Path]:
    """For each missing entry the one that was likely meant, preferably of a type that fits."""
    if not left or len(missing) * len(left) > _MOST_COMPARISONS:
        return {}
    meant = {}
    others = {text_of(path): path for path in left}
    for path, spec in missing.items():
        close = difflib.get_close_matches(text_of(path), others, len(others), _LIKELY)
        if close:
            meant[path] = max((others[x] for x in close), key=lambda p: fits(spec, left[p]))
    return meant


def renamed(stored: Iterable[Path], rename: Rename) -> tuple[dict[Path, Path], list[Problem]]:
    """The old path for each new one, and a problem for each rule that matched nothing."""
    rules = RenameRules(rename)
    return rules.moved(stored), rules.idle()


class RenameRules:
    """A map of renamed paths, from old to new, as text; the rules apply one after the other."""

    # A path renames what is below it, too; `*` stands for (a part of) one step and `**` for any
    # number of steps, and both stand for the same in the new path; a compiled regular expression is
    # substituted as by `re.sub`. None leaves entries out.

    def __init__(self, rename: Rename):
        if not isinstance(rename, Mapping):
            _refuse_rule(repr(rename))
        self._rules = [_compile(old, new) for old, new in rename.items()]
        self._idle = dict(enumerate(rename))
        self._seen: list[str] = []

    def new(self, path: Path) -> Path | None:
        """The new path, or None for what is left out."""
        old = text = text_of(path)
        self._seen.append(old)
        for number, (pattern, new) in enumerate(self._rules):
            if not pattern.search(text):
                continue
            self._idle.pop(number, None)
            if new is None:
                return None
            text = pattern.sub(new, text)
        return path if text == old else _steps(text, path)

    def moved(self, paths: Iterable[Path]) -> dict[Path, Path]:
        """The old path for each new one; refuses two entries that get the same path."""
        moved: dict[Path, Path] = {}
        for path in paths:
            new = self.new(path)
            if new in moved:
                raise RenameError(
                    f"rename gives two entries the path {text_of(new)}: "
                    f"{text_of(moved[new])} and {text_of(path)}.\n"
                    "Fix: make the rules narrower; they apply one after the other."
                )
            if new is not None:
                moved[new] = path
        return moved

    def idle(self) -> list[Problem]:
        """A problem for each rule that matched nothing so far."""
        problems = []
        for old in self._idle.values():
            text = old.pattern if isinstance(old, re.Pattern) else old
            small = len(self._seen) < 10_000
            close = difflib.get_close_matches(text, self._seen, n=1) if small else []
            problems.append(Problem("rename", text, "renames nothing in the checkpoint", *close))
        return problems


def _steps(text: str, path: Path) -> Path:
    """The steps of a new path; integers among the unchanged steps at both ends stay integers."""
    head: list[str | int] = []
    tail: list[str | int] = []
    for step in reversed(path):
        if not f"/{text}".endswith(f"/{step}"):
            break
        tail.insert(0, step)
        if not (text := text[: -len(str(step)) - 1]):
            return tuple(tail)
    for step in path[: len(path) - len(tail)]:
        if not f"{text}/".startswith(f"{step}/"):
            break
        head.append(step)
        if not (text := text[len(str(step)) + 1 :]):
            return (*head, *tail)
    return (*head, *text.split("/"), *tail)


_STAR = re.compile(r"(\*\*/|\*\*|\*)")
_STAR_PATTERNS = {"**/": "(?:(.*)/)?", "**": "(.*)", "*": "([^/]*)"}


def _compile(old: Any, new: Any) -> tuple[re.Pattern[str], Any]:
    """A pattern to search for, and what ``re.sub`` puts in its place."""
    if isinstance(old, re.Pattern) and isinstance(new, str | None):
        return old, new
    if not isinstance(old, str) or not isinstance(new, str | None):
        _refuse_rule(f"{old!r}: {new!r}")
    pieces = _STAR.split(old)
    pattern = "".join(_STAR_PATTERNS.get(piece) or re.escape(piece) for piece in pieces)
    stars = len(pieces) // 2
    if new is not None and len(_STAR.split(new)) // 2 not in (0, stars):
        raise RenameError(
            f"rename: {old!r} has {stars} stars and {new!r} has {len(_STAR.split(new)) // 2}.\n"
            "Fix: give both the same number, in the same order, or the new path none."
        )
    # The pattern matches a whole path, or the first steps of one.
    return re.compile(f"^{pattern}(?=/|$)"), None if new is None else _filler(new)


def _refuse_rule(got: str) -> NoReturn:
    raise RenameError(
        "rename maps a path (text or a compiled regular expression) to a path or None, but "
        f"got {got}.\nFix: rename={{'model/old/name': 'model/new/name'}}."
    )


def _filler(new: str) -> Any:
    """A function for ``re.sub`` that puts what the stars matched into a new path."""
    pieces = _STAR.split(new)

    def fill(found: re.Match[str]) -> str:
        caught = iter(found.groups())
        text = pieces[0]
        for star, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            part = next(caught) or ""
            text += part + ("/" if star == "**/" and part else "") + piece
        return text

    return fill
