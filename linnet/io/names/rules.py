"""Maps of names: which stored tensors are which of the model's, and how their axes are arranged.

A pattern such as ``(head dim) width -> width head dim`` has the axes of the stored tensor on its
left side and those of the model's on its right. Names stand for axes, parentheses for axes that are
merged into one, the first name outermost. All sizes follow from the model's shape.

Where one stored tensor holds several of the model's, or the other way round, ``+`` marks the axis
along which they are concatenated, and the name ``part`` the axis on which they are stacked.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from linnet.errors import NameMapError
from linnet.io.shared.entries import text_of
from linnet.io.shared.matching import Rename, renamed

# ---- axes ---------------------------------------------------------------------------------------

PART = "part"
_SIDE = re.compile(r"(?:\s*(?:\((?:\s*\w+)*\s*\)|\w+)\+?)*\s*")
_GROUP = re.compile(r"(?:\(([\w\s]*)\)|(\w+))(\+?)")

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Side = tuple[tuple[str, ...], ...]
Array = np.ndarray[Any, Any]


class MisfitError(Exception):
    """A pattern does not apply to a shape."""


@dataclasses.dataclass(frozen=True)
class AxisPattern:
    """A parsed pattern: the axes of each side, each with the names that it consists of."""

    stored: Side
    model: Side
    stored_along: int | None = None  # the stored axis that concatenates the model's tensors
    model_along: int | None = None  # the model's axis that concatenates stored tensors

    def sizes(self, shape: Shape, known: Sizes) -> dict[str, int]:
        """The size of each name, from the shape of one of the model's tensors; or a MisfitError."""
        if len(shape) != len(self.model):
            raise MisfitError
        sizes = dict(known)
        for names, size in zip(self.model, shape, strict=True):
            open_names = [name for name in names if name not in sizes]
            rest = math.prod(sizes[name] for name in names if name in sizes)
            if len(open_names) > 1 or (open_names and (rest == 0 or size % rest)):
                raise MisfitError
            if open_names:
                sizes[open_names[0]] = size // rest
            elif rest != size:
                raise MisfitError
        return sizes


def _flat(side: Side) -> list[str]:
    return [name for names in side for name in names]


def shape_of(side: Side, sizes: Sizes) -> Shape:
    """The shape of a side whose names have these sizes."""
    return tuple(math.prod(sizes[name] for name in names) for names in side)


def rearranged(array: Array, source: Side, target: Side, sizes: Sizes) -> Array:
    """Rearranges the axes of an array from one side to the other; a view where possible."""
    flat = _flat(source)
    order = [flat.index(name) for name in _flat(target)]
    apart = array.reshape([sizes[name] for name in flat])
    return apart.transpose(order).reshape(shape_of(target, sizes))


def divide(
    array: Array, source: Side, target: Side, along: int | None, parts: Sequence[Sizes]
) -> list[Array]:
    """Splits an array along an axis of the source side, or takes it apart on its axis ``part``.

    The results have the axes of the target side; ``parts`` has the sizes of the names in each.
    """
    if len(parts) == 1:
        return [rearranged(array, source, target, parts[0])]
    if along is None:
        return list(rearranged(array, source, ((PART,), *target), parts[0]))
    ends = np.cumsum([shape_of(source, sizes)[along] for sizes in parts])
    pieces = np.split(array, [int(end) for end in ends[:-1]], along)
    return [rearranged(x, source, target, sizes) for x, sizes in zip(pieces, parts, strict=True)]


def unite(
    arrays: Sequence[Array], source: Side, target: Side, along: int | None, parts: Sequence[Sizes]
) -> Array:
    """The reverse of ``divide``: ``along`` is an axis of the target."""
    if len(parts) == 1:
        return rearranged(arrays[0], source, target, parts[0])
    if along is None:
        return rearranged(np.stack(arrays), ((PART,), *source), target, parts[0])
    pieces = [rearranged(x, source, target, sizes) for x, sizes in zip(arrays, parts, strict=True)]
    return np.concatenate(pieces, along)


def united_shape(target: Side, along: int | None, parts: Sequence[Sizes]) -> Shape:
    """The shape of what ``unite`` gives; a MisfitError if the parts differ in size."""
    shapes = [shape_of(target, sizes) for sizes in parts]
    if along is not None:
        total = sum(shape[along] for shape in shapes)
        shapes = [(*shape[:along], total, *shape[along + 1 :]) for shape in shapes]
    if len(set(shapes)) > 1:
        raise MisfitError
    return shapes[0]


@functools.cache
def parse(pattern: str) -> AxisPattern:
    """Parses a pattern such as ``(head dim) width -> width head dim``.

    Example:
      >>> parse("(head dim)+ width -> width head dim")
      AxisPattern(stored=(('head', 'dim'), ('width',)), model=(('width',), ('head',), ('dim',)),
                  stored_along=0, model_along=None)
    """
    sides = pattern.split("->")
    if len(sides) != 2 or not all(_SIDE.fullmatch(side) for side in sides):
        _refuse_pattern(pattern, "it is not of the form (head dim) width -> width head dim")
    (stored, stored_along), (model, model_along) = map(_side, sides)
    for side in (stored, model):
        names = _flat(side)
        if len(set(names)) < len(names):
            _refuse_pattern(pattern, "a side has a name twice")
    left, right = (set(_flat(side)) for side in (stored, model))
    if (left ^ right) - {PART}:
        _refuse_pattern(pattern, f"{', '.join(sorted(left ^ right))} stands on one side only")
    marks = (stored_along is not None) + (model_along is not None) + (PART in left ^ right)
    if marks > 1:
        _refuse_pattern(pattern, "it has more than one + or part")
    return AxisPattern(stored, model, stored_along, model_along)


def _side(text: str) -> tuple[Side, int | None]:
    groups, along = [], None
    for number, (group, name, plus) in enumerate(_GROUP.findall(text)):
        groups.append(tuple(group.split()) if not name else (name,))
        if plus:
            along = number if along is None else _refuse_pattern(text, "it has two +")
    return tuple(groups), along


def _refuse_pattern(pattern: str, why: str) -> Any:
    raise NameMapError(
        f"{pattern!r} does not say how axes are arranged: {why}.\n"
        "Fix: name each axis of the stored tensor, then ->, then those of the model's."
    )


def lengths(total: int, portions: Sequence[int]) -> list[int]:
    """Divides a size in given proportions; a MisfitError if it cannot be divided so."""
    if total % sum(portions):
        raise MisfitError
    unit = total // sum(portions)
    return [unit * portion for portion in portions]


# ---- rules and maps -----------------------------------------------------------------------------

PREFIX = "~"
STAR = "*"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Connects one or several stored tensors with one or several tensors of the model.

    Args:
      stored: the name in the file, or names. ``*`` stands for the number of a layer, and ``~`` at
        the beginning for the prefix of the map.
      paths: the path in the model, or paths, with ``/`` between the steps and as many ``*``. Where
        the model has its layers stacked, each is a slice.
      axes: how the axes are arranged, such as ``out in -> in out``; empty if they are the same.
        ``(head dim)+ width -> width head dim`` with several paths: the stored tensor is their
        concatenation.
      sizes: sizes of axes that the model's shape leaves open.
      portions: where one of the model's tensors consists of several stored ones, their sizes in
        proportion; by default equal.
      flip: names of axes whose order is reversed.
      add: several stored tensors are added up. Written back, the first is the sum, the others zero.
      check: takes the stored tensors, and tells in words why the model cannot hold them; empty text
        if it can.

    Raises:
      NameMapError: the parts do not fit together.

    Example:
      >>> from linnet.io import names
      >>> rule = names.Rule("h.*.fc.weight", "blocks/*/up/kernel", "out in -> in out")
      >>> rule.stored, rule.paths
      (('h.*.fc.weight',), ('blocks/*/up/kernel',))
    """

    stored: Any
    paths: Any
    axes: str = ""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    portions: Sequence[int] = ()
    flip: Sequence[str] = ()
    add: bool = False
    check: Callable[[Sequence[Array]], str] | None = None

    def __post_init__(self) -> None:
        for field in ("stored", "paths"):
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, str) else tuple(value))
        if not self.portions:
            object.__setattr__(self, "portions", (1,) * len(self.stored))
        stars = {text.count(STAR) for text in (*self.stored, *self.paths)}
        pattern = self.pattern
        splits = pattern is not None and (
            pattern.stored_along is not None or PART in _flat(pattern.stored)
        )
        joins = pattern is not None and (
            pattern.model_along is not None or PART in _flat(pattern.model)
        )
        if not self.stored or not self.paths or len(stars) > 1:
            self._refuse("stored names and paths want the same number of *")
        if splits != (len(self.paths) > 1):
            self._refuse("with several paths, and then only, the left side wants + or part")
        if joins != self._joins or len(self.portions) != len(self.stored):
            self._refuse("with several stored names, and then only, the right side wants + or part")
        known = {PART, *(_flat(pattern.model) if pattern else ())}
        if unknown := [name for name in (*self.sizes, *self.flip) if name not in known]:
            self._refuse(f"no axis is called {unknown[0]}")

    def _refuse(self, why: str) -> None:
        raise NameMapError(
            f"The rule {', '.join(self.stored)} <-> {', '.join(self.paths)} ({self.axes!r}) does "
            f"not fit together: {why}.\nFix: see linnet.io.names.Rule."
        )

    @property
    def pattern(self) -> AxisPattern | None:
        return parse(self.axes) if self.axes else None

    @property
    def _joins(self) -> bool:
        return len(self.stored) > 1 and not self.add

    def _part_sizes(self, pattern: AxisPattern, shapes: Sequence[Shape]) -> list[dict[str, int]]:
        """The size of each axis name, for each of the tensors that are concatenated or stacked."""
        parts = len(self.stored) if self._joins else len(self.paths)
        known = {**self.sizes, PART: parts}
        along = pattern.model_along
        if along is not None:
            (whole,) = shapes
            pieces = lengths(whole[along], self.portions)
            shapes = [(*whole[:along], piece, *whole[along + 1 :]) for piece in pieces]
        elif self._joins:
            shapes = [shapes[0]] * parts
        return [pattern.sizes(shape, known) for shape in shapes]

    def stored_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes of the stored tensors, from those of the model's; or a MisfitError."""
        pattern = self.pattern
        if pattern is None:
            return [shapes[0]] * len(self.stored)
        part_sizes = self._part_sizes(pattern, shapes)
        if self._joins:
            return [shape_of(pattern.stored, sizes) for sizes in part_sizes]
        whole = united_shape(pattern.stored, pattern.stored_along, part_sizes)
        return [whole] * len(self.stored)

    def load(self, tensors: Sequence[Array], shapes: Sequence[Shape]) -> list[Array]:
        """The model's tensors, of the given shapes, from the stored ones."""
        pattern = self.pattern
        if self.add:
            tensors = [sum(tensors[1:], tensors[0])]
        if pattern is None:
            return list(tensors)
        part_sizes, sides = self._part_sizes(pattern, shapes), (pattern.stored, pattern.model)
        if self._joins:
            parts = [unite(tensors, *sides, pattern.model_along, part_sizes)]
        else:
            parts = divide(tensors[0], *sides, pattern.stored_along, part_sizes)
        return [self._flipped(part, pattern) for part in parts]

    def store(self, tensors: Sequence[Array]) -> list[Array]:
        """The stored tensors, from the model's."""
        pattern, whole = self.pattern, tensors[0]
        if pattern is not None:
            part_sizes = self._part_sizes(pattern, [tensor.shape for tensor in tensors])
            tensors = [self._flipped(tensor, pattern) for tensor in tensors]
            sides = (pattern.model, pattern.stored)
            if self._joins:
                return divide(tensors[0], *sides, pattern.model_along, part_sizes)
            whole = unite(tensors, *sides, pattern.stored_along, part_sizes)
        return [whole, *(np.zeros_like(whole) for _ in self.stored[1:])]

    def _flipped(self, array: Array, pattern: AxisPattern) -> Array:
        flipped = tuple(n for n, names in enumerate(pattern.model) if set(names) & set(self.flip))
        return np.flip(array, flipped) if flipped else array


@dataclasses.dataclass(frozen=True)
class NameMap:
    """A list of rules, read from top to bottom: the first that the model fits is used.

    Args:
      rules: the rules. Several may name one stored tensor, for different models.
      prefixes: what ``~`` may stand for. In reading the one that the file has is found; in writing
        it is the first.
      ignored: names of stored tensors that hold no weights, such as masks.
      tied: stored tensors that may be left out as they equal another one.

    Example:
      >>> import tempfile
      >>> from linnet import io, nnx
      >>> from linnet.io import names
      >>> layer_names = names.NameMap([
      ...     names.Rule("fc.weight", "kernel", "out in -> in out"),
      ...     names.Rule("fc.bias", "bias"),
      ... ])
      >>> file = tempfile.mkdtemp() + "/fc.safetensors"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> io.save_safetensors(file, model, layer_names)
      >>> fresh = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> _ = io.load_safetensors(file, fresh, layer_names)
      >>> bool((fresh.kernel[...] == model.kernel[...]).all())
      True
    """

    rules: Sequence[Rule]
    prefixes: Sequence[str] = ("",)
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def with_paths(self, rename: Rename) -> NameMap:
        """The same map for a model whose attributes have other names.

        Args:
          rename: from the paths in this map to those of the model, as for ``io.restore``:
            ``{"h": "blocks", "blocks/*/ln_1": "blocks/*/norm1"}``. A path renames what is below it,
            and the rules apply one after the other.

        Returns:
          The new map.

        Raises:
          NameMapError: there is no such path in this map.
          RenameError: ``rename`` is invalid, or gives two paths the same name.

        Example:
          >>> from linnet.io import names
          >>> mine = names.NameMap([names.Rule("h.*.b", "h/*/bias")]).with_paths({"h": "blocks"})
          >>> mine.rules[0].paths
          ('blocks/*/bias',)
        """
        old = {tuple(path.split("/")): None for rule in self.rules for path in rule.paths}
        moved, idle = renamed(old, rename)
        if idle:
            raise NameMapError(
                f"The map has no path {idle[0].path!r}; it has "
                f"{', '.join(map(text_of, list(old)[:8]))}, ...\nFix: use one of these."
            )
        new = {text_of(path): text_of(target) for target, path in moved.items()}
        rules = [
            dataclasses.replace(rule, paths=tuple(new[path] for path in rule.paths))
            for rule in self.rules
            if all(path in new for path in rule.paths)
        ]
        return dataclasses.replace(self, rules=rules)

    def with_prefix(self, prefix: str) -> NameMap:
        """The same map for files in which the names of tensors begin with ``prefix``.

        Where no rule says with ``~`` which names have the prefix, all do.

        Args:
          prefix: the prefix, such as ``"module."``.

        Returns:
          The new map.

        Example:
          >>> from linnet import nnx
          >>> from linnet.io import names
          >>> name_map = names.pytorch(nnx.Embed(2, 3, rngs=nnx.Rngs(0))).with_prefix("module.")
          >>> name_map.at("module.").rules[0].stored
          ('module.weight',)
        """
        if any(name.startswith(PREFIX) for rule in self.rules for name in rule.stored):
            return dataclasses.replace(self, prefixes=(prefix,))
        return dataclasses.replace(
            self._with_stored(lambda name: PREFIX + name), prefixes=(prefix,)
        )

    def at(self, prefix: str) -> NameMap:
        """The same map with the prefix written out."""

        def put(name: str) -> str:
            return prefix + name[1:] if name.startswith(PREFIX) else name

        return dataclasses.replace(self._with_stored(put), prefixes=(prefix,))

    def _with_stored(self, change: Callable[[str], str]) -> NameMap:
        """The same map with all names of stored tensors changed."""
        return NameMap(
            [dataclasses.replace(r, stored=tuple(map(change, r.stored))) for r in self.rules],
            self.prefixes,
            tuple(map(change, self.ignored)),
            {change(name): change(other) for name, other in self.tied.items()},
        )

    def for_names(self, found: Iterable[str]) -> NameMap:
        """The same map with the prefix that most of these names have."""
        found = list(found)
        candidates = [self.at(prefix) for prefix in self.prefixes]
        return max(candidates, key=lambda candidate: candidate.count(found))

    def count(self, found: Iterable[str]) -> int:
        """How many of these names a rule mentions."""
        names = {name for rule in self.rules for name in rule.stored}
        known = matcher(names)
        return sum(1 for name in found if known(name))

    def is_ignored(self, name: str) -> bool:
        """Whether a stored tensor holds no weights."""
        return matcher(self.ignored)(name)


Names = NameMap | Callable[[Any], NameMap]


def resolved(names: Names, model: Any, found: Iterable[str]) -> NameMap:
    """The map for a model, with the prefix that the names in the file have."""
    made: Any = names(model) if callable(names) and _takes_one(names) else names
    if isinstance(made, NameMap):
        return made.for_names(found)
    raise NameMapError(
        "names is a map from linnet.io.names, or a function that makes one for a model, but got "
        f"{names!r}.\nFix: names.{getattr(names, '__name__', 'gpt2')}(), names.pytorch, or "
        "names.NameMap([...])."
    )


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True


def matcher(patterns: Iterable[str]) -> Any:
    """Tells whether a name fits one of some patterns, in which ``*`` stands for one step."""
    texts = [re.escape(text).replace(re.escape(STAR), "[^.]+") for text in patterns]
    return re.compile("|".join(texts) or "(?!)").fullmatch


# ---- rules of layers that several maps share ----------------------------------------------------

FUSED_HEADS = "(head dim)+ width -> width head dim"


def dotted(name: str, more: str) -> str:
    """The name of a tensor in a module, which may be the outermost one."""
    return f"{name}.{more}" if name else more


def slashed(path: str, more: str) -> str:
    """The path of an entry in a module, which may be the outermost one."""
    return f"{path}/{more}" if path else more


def linear(stored: str, path: str, *, is_transposed: bool = True) -> Iterator[Rule]:
    """A PyTorch ``Linear``, or with ``is_transposed=False`` a ``Conv1D`` of GPT-2."""
    axes = "out in -> in out" if is_transposed else "in out -> in out"
    yield Rule(dotted(stored, "weight"), slashed(path, "kernel"), axes)
    yield Rule(dotted(stored, "bias"), slashed(path, "bias"), "out -> out")


def norm(stored: str, path: str) -> Iterator[Rule]:
    """A normalisation with a weight and, perhaps, a bias."""
    yield Rule(dotted(stored, "weight"), slashed(path, "scale"))
    yield Rule(dotted(stored, "bias"), slashed(path, "bias"))


def embedding(stored: str, path: str) -> Iterator[Rule]:
    """A table of embeddings."""
    yield Rule(dotted(stored, "weight"), slashed(path, "embedding"))


def head_projection(stored: str, path: str) -> Iterator[Rule]:
    """A ``Linear`` to heads, for a model with an axis for the heads and for one without."""
    yield Rule(f"{stored}.weight", f"{path}/kernel", "(head dim) width -> width head dim")
    yield Rule(f"{stored}.bias", f"{path}/bias", "(head dim) -> head dim")
    yield from linear(stored, path)


def from_heads(stored: str, path: str, *, is_transposed: bool = True) -> Iterator[Rule]:
    """A ``Linear`` from heads, for a model with an axis for the heads and for one without."""
    axes = "width (head dim)" if is_transposed else "(head dim) width"
    yield Rule(f"{stored}.weight", f"{path}/kernel", f"{axes} -> head dim width")
    yield from linear(stored, path, is_transposed=is_transposed)


def fused_heads(stored: str, paths: Sequence[str], *, is_transposed: bool = True) -> Iterator[Rule]:
    """One ``Linear`` (or ``Conv1D``) to the heads of query, key and value."""
    axes = FUSED_HEADS if is_transposed else "width (head dim)+ -> width head dim"
    yield Rule(f"{stored}.weight", [f"{path}/kernel" for path in paths], axes)
    yield Rule(f"{stored}.bias", [f"{path}/bias" for path in paths], "(head dim)+ -> head dim")
    flat = "out+ in -> in out" if is_transposed else "in out+ -> in out"
    yield Rule(f"{stored}.weight", [f"{path}/kernel" for path in paths], flat)
    yield Rule(f"{stored}.bias", [f"{path}/bias" for path in paths], "out+ -> out")
