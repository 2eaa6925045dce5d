"""The entries of a model that weights files hold, and loading them, tensor by tensor."""

from __future__ import annotations

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import FilterError
from linnet.io.names.applying import Target, Unit, apply_map, rule_paths
from linnet.io.names.rules import NameMap, Names, Rule, resolved
from linnet.io.shared import objects, placing
from linnet.io.shared.entries import ANYTHING, Path, Spec, first_names, is_key, text_of
from linnet.io.shared.matching import Origin, Problem, Rename, StackedLayers, match, refuse, renamed
from linnet.io.shared.objects import Contents, Restored, check_writable, contents_of
from linnet.io.weights.files import TensorFiles, open_tensors
from linnet.nnx.filterlib import Any as AnyOf, Not, to_predicate
from linnet.nnx.nn.rotary import is_rotary_table
from linnet.nnx.rnglib.streams import RngState
from linnet.nnx.variablelib.variable import Cache, Intermediate

ITEM = "model"
WEIGHTS = Not(AnyOf(RngState, Cache, Intermediate, is_rotary_table))
NO_VALUE = "has no value yet, and weights files do not hold one"
_MOST_GUESSES = 100_000
_PREVENTS_LOADING = ("missing", "shape", "dtype")  # kinds of problems
AS_IT_IS = Rule("*", "*")
NAMELESS = "value"  # the name of the tensor where the model is a single array


def load_safetensors(
    path: Any,
    model: Any,
    names: Names | None = None,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
    only: Any = None,
) -> Restored:
    """Loads weights from safetensors files into a model.

    All names, shapes and dtypes are compared before any tensor is read, and nothing is written
    unless every tensor fits. The tensors are read one at a time, so that an abstract model
    (``nnx.eval_shape``) costs one tensor more than its own memory; a live model keeps its old
    weights until all new ones are there.

    Args:
      path: a file, the index of a model in several files, or a folder with either.
      model: what to load into: a module, a State or a pytree of arrays, live or abstract. Entries
        with a sharding get their values in that sharding.
      names: which tensors are which entries, from ``linnet.io.names``; also a function that takes
        the model, as ``names.pytorch``. By default a tensor's name is the entry's path, with dots.
      strict: refuse missing, extra, misshapen or wrongly typed entries; otherwise load what fits,
        and return the list as ``problems``.
      rename: new names for tensors of the file, from old to new, before the map:
        ``{"module.": "", "ema": None}``. ``*`` stands for one step and ``**`` for any number;
        ``None`` leaves tensors out. Compiled regular expressions see ``/`` for each dot.
      cast: convert floating-point numbers to the model's dtype, if that can hold them.
      only: a filter for the entries to load; tensors of other entries are passed over. By default
        all but random state, caches, intermediates and the tables of ``nnx.RoPE``.

    Returns:
      The model as ``.model``, and ``.problems``. A module is the same object, updated in place.

    Raises:
      CheckpointMismatchError: entries do not fit; all are listed, and nothing was changed.
      CheckpointNotFoundError: the path does not exist.
      NotACheckpointError: the path leads to something else than safetensors files.
      TensorFileError: a file is damaged or malicious.
      UnsafePathError: the index leads out of its folder.
      NameMapError: ``names`` is no map.
      RenameError: ``rename`` is invalid, or gives two tensors the same name.
      FilterError: ``only`` chooses nothing.
      TraceContextError: the model is traced.

    Example:
      >>> import tempfile
      >>> from linnet import io, nnx
      >>> file = tempfile.mkdtemp() + "/model.safetensors"
      >>> io.save_safetensors(file, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> io.load_safetensors(file, model).problems
      []
      >>> model.kernel.shape, type(model.kernel[...]).__name__
      ((2, 3), 'ArrayImpl')
    """
    with open_tensors(path) as files:
        entries = model_entries(model, only)
        check_writable({path: entries.leaf(path) for path in entries.specs}, "loaded")
        loading = _WeightLoading(files, entries, cast, rename or {})
        if names is None:
            loading.match_by_path()
        else:
            loading.match_by_map(resolved(names, model, loading.old_names))
        loading.check_types()
        loading.refuse_problems(strict)
        values = loading.read()
        loading.refuse_problems(strict)
        loaded = entries.write(values)
    return Restored({ITEM: loaded}, loading.problems, files.path)


@dataclasses.dataclass
class ModelEntries:
    """The entries of a model by path; paths are inside the model."""

    contents: Contents
    specs: dict[Path, Spec]  # the types of the entries that are stored or loaded
    left_out: dict[Path, Spec]  # the types of those that the filter leaves out
    passed_over: dict[Path, Spec]  # what the caller's own filter leaves out: the file may have it

    def aliases(self, paths: Iterable[Path]) -> dict[Path, Path]:
        """Further paths of entries that several paths lead to, and the first path of each."""
        return {
            (*other[1:], *path[len(first) - 1 :]): path
            for other, first in self.contents.aliases
            for path in paths
            if path[: len(first) - 1] == first[1:]
        }

    def apply_map(self, names: NameMap, specs: dict[Path, Spec]) -> tuple[list[Unit], list[Path]]:
        """Applies a map: the units, and the entries that no rule names."""
        shapes = {path: spec.shape for path, spec in specs.items()}
        return apply_map(names, shapes, self.aliases(shapes))

    def leaf(self, path: Path) -> Any:
        return self.contents.leaves[(ITEM, *path)]

    def write(self, values: dict[Path, Any]) -> Any:
        full = {(ITEM, *path): value for path, value in values.items()}
        return objects.write(self.contents, full, {})[ITEM]


def model_entries(model: Any, only: Any = None) -> ModelEntries:
    """The entries of a module, State or pytree of arrays; refuses a filter that chooses none."""
    contents = contents_of({ITEM: model}, with_positions=False)
    chosen = to_predicate(WEIGHTS if only is None else only)
    specs: dict[Path, Spec] = {}
    left_out: dict[Path, Spec] = {}
    for path, spec in contents.specs().items():
        leaf = contents.leaves[path]
        variable_path = path[1 : contents.variable_depths.get(path, len(path))]
        kept = specs if chosen(variable_path, contents.holders.get(path, leaf)) else left_out
        if spec.category == "key":  # keys are stored as their key data
            spec = Spec("array", "uint32", jax.eval_shape(jax.random.key_data, leaf).shape)
        kept[path[1:]] = spec
    if only is not None and left_out and not specs:
        raise FilterError(
            f"only={only!r} chooses none of the {len(left_out)} entries: "
            f"{first_names(map(text_of, left_out))}\n"
            "Fix: a filter for some of them, or only=... for all."
        )
    return ModelEntries(contents, specs, left_out, {} if only is None else left_out)


# ---- loading ------------------------------------------------------------------------------------


class _WeightLoading:
    """One call of ``load_safetensors``."""

    def __init__(self, files: TensorFiles, entries: ModelEntries, cast: bool, rename: Rename):
        self.files, self.entries, self.cast = files, entries, cast
        self.units: list[Unit] = []
        self.problems = [
            Problem("missing", text_of(path), NO_VALUE)
            for path in entries.left_out
            if isinstance(entries.leaf(path), jax.ShapeDtypeStruct)
        ]
        self.cast_helps = False
        self.guesses = 0
        self.values: dict[Path, Any] = {}
        self.stacks: dict[Path, Any] = {}
        self.layers_left: collections.Counter[Path] = collections.Counter()
        if isinstance(rename, Mapping):
            rename = {_with_slashes(old): _with_slashes(new) for old, new in rename.items()}
        moved, idle = renamed([tuple(name.split(".")) for name in files.tensors], rename)
        self.old_names = {tensor_name(new): tensor_name(old) for new, old in moved.items()}
        self.problems += [
            dataclasses.replace(p, path=p.path.replace("/", "."), text="renames no tensor")
            for p in idle
        ]

    def spec(self, name: str) -> Spec:
        return self.files.tensors[self.old_names[name]].spec

    # ---- which tensor goes where ----------------------------------------------------------------

    def match_by_path(self) -> None:
        """Without a map, the name of a tensor is a path."""
        entries = (*self.entries.specs, *self.entries.passed_over)
        paths = {_dotted(path) or (NAMELESS,): path for path in entries}
        contents = self.entries.contents
        found = match(
            dict.fromkeys(paths, ANYTHING),  # types are compared later
            {_dotted((name,)): self.spec(name) for name in self.old_names},
            aliases=[(_dotted(a[1:]), _dotted(b[1:])) for a, b in contents.aliases],
            variable_depths={
                _dotted(path[1:]): len(_dotted(path[1:steps]))
                for path, steps in contents.variable_depths.items()
            },
        )
        passed_over = set(map(text_of, map(_dotted, self.entries.passed_over)))
        self.problems += (
            _with_dots(problem)
            for problem in found.problems
            if problem.kind != "missing" or problem.path not in passed_over
        )
        for dotted, origin in found.origins.items():
            path = paths[dotted]
            wanted = self.entries.specs.get(path)
            if wanted and isinstance(origin, StackedLayers) and origin.spec.shape != wanted.shape:
                layers = first_names(map(tensor_name, origin.stored), 3)
                text = f"expected {wanted}, found {origin.spec} in the file as {layers}"
                self.problems.append(Problem("shape", text_of(path), text))
            elif wanted:
                self.units += _units(path, origin, wanted.shape)
        for twin, dotted in found.twins.items():
            (first,) = found.origins[dotted].stored
            is_wanted = paths[dotted] in self.entries.specs
            if is_wanted and not self._are_equal(tensor_name(twin), tensor_name(first)):
                self.problems.append(_differing(tensor_name(twin), tensor_name(first)))

    def match_by_map(self, names: NameMap) -> None:
        """With a map, its rules say which tensor goes where."""
        units, unnamed = self.entries.apply_map(names, self.entries.specs)
        used: set[str] = set()
        absent: dict[Path, list[str]] = {path: [] for path in unnamed}
        for unit in units:
            stored = tuple(
                name if name in self.old_names else names.tied.get(name, name)
                for name in unit.stored
            )
            used.update(stored, unit.stored)
            lacking = [name for name in stored if name not in self.old_names]
            if not lacking:
                self.units.append(dataclasses.replace(unit, stored=stored))
                continue
            for target in unit.targets:
                absent.setdefault(target.path, []).extend(lacking)
        used |= self._passed_over(names)
        left = [
            name
            for name in self.old_names
            if not (name in used or names.is_ignored(name))
            and not self._are_equal(name, names.tied.get(name, ""))
        ]
        self.problems += self._absent(absent, left)
        self.problems += [self._extra(name, names) for name in left]

    def _passed_over(self, names: NameMap) -> set[str]:
        """The tensors of entries that the caller's filter leaves out."""
        passed_over = self.entries.passed_over
        return {
            name
            for unit in self.entries.apply_map(names, self.entries.specs | passed_over)[0]
            if any(target.path in passed_over for target in unit.targets)
            for name in unit.stored
        }

    def _are_equal(self, name: str, other: str) -> bool:
        """Whether there is another tensor with the same type and the same bytes."""
        old = self.old_names
        return other in old and self.files.are_equal(old[name], old[other])

    def _absent(self, absent: Mapping[Path, list[str]], left: list[str]) -> Iterator[Problem]:
        """One problem for each entry that gets no value, with the tensor that was likely meant."""
        for path, lacking in absent.items():
            if not lacking:
                yield Problem("missing", text_of(path), "missing: the map has no tensor for it")
                continue
            text = f"missing: there is no {first_names(lacking, 3)} in the file"
            yield Problem("missing", text_of(path), text, self.guess(lacking[0], left))

    def guess(self, text: str, candidates: Iterable[str]) -> str:
        """The closest known name, or '' if there are too many to compare."""
        candidates = list(candidates)
        self.guesses += len(candidates)
        if self.guesses > _MOST_GUESSES:
            return ""
        return next(iter(difflib.get_close_matches(text, candidates, n=1)), "")

    def _extra(self, name: str, names: NameMap) -> Problem:
        if name in names.tied:
            return _differing(name, names.tied[name])
        paths = rule_paths(names, name)
        if not paths:
            return Problem("extra", name, "not wanted: the map has no such tensor")
        known = set(map(text_of, self.entries.specs))
        if taken := [path for path in paths if path in known]:
            return Problem("extra", name, f"not wanted: {taken[0]} is made of other tensors")
        close = self.guess(paths[0], known)
        return Problem("extra", name, f"not wanted: the model has no {' or '.join(paths)}", close)

    # ---- types ----------------------------------------------------------------------------------

    def check_types(self) -> None:
        """Leaves out what has another shape or dtype than the model wants."""
        for unit in self.units:
            self.problems += self._misfits(unit)
        # A stack with a layer that does not fit is left as it was.
        wrong = {problem.path for problem in self.problems if problem.kind in _PREVENTS_LOADING}
        self.units = [
            unit
            for unit in self.units
            if not any(text_of(target.path) in wrong for target in unit.targets)
        ]

    def _misfits(self, unit: Unit) -> Iterator[Problem]:
        above = self.spec(unit.stored[0]).shape[: len(unit.index)]
        shapes = [(*above, *shape) for shape in unit.stored_shapes()]
        for name, shape in zip(unit.stored, shapes, strict=True):
            found = self.spec(name)
            for target in unit.targets:
                wanted = dataclasses.replace(self.entries.specs[target.path], shape=shape)
                castable = found.is_floating and wanted.is_floating
                same_dtype = found.dtype == wanted.dtype or (self.cast and castable)
                if found.shape == shape and same_dtype:
                    continue
                kind = "shape" if found.shape != shape else "dtype"
                self.cast_helps |= castable and kind == "dtype"
                text = f"expected {wanted} in the file as {name}, found {found}"
                yield Problem(kind, text_of(target.path), text)

    def refuse_problems(self, strict: bool) -> None:
        if not (strict and self.problems):
            return
        hints = ["rename={old: new} for tensors that have another name"]
        if self.cast_helps:
            hints.append("cast=True to convert dtypes")
        if any(problem.text == NO_VALUE for problem in self.problems):
            hints.append("a model with values (not nnx.eval_shape) for random state and caches")
        hints.append("strict=False to load what fits and get this list back")
        refuse(f"{self.files.path} does not fit the model", self.problems, hints)

    # ---- values ---------------------------------------------------------------------------------

    def read(self) -> dict[Path, Any]:
        """Reads all that fits; holds one stored tensor at a time beyond what it returns."""
        targets = (target for unit in self.units for target in unit.targets)
        self.layers_left = collections.Counter(target.path for target in targets)
        # The layers of a stack come together, so that few stacks are open at once.
        for unit in sorted(self.units, key=_stack_of):
            self._read_unit(unit)
        return self.values

    def _read_unit(self, unit: Unit) -> None:
        tensors = [self.files.read(self.old_names[name], unit.index) for name in unit.stored]
        if unit.rule.check and (complaint := unit.rule.check(tensors)):
            self.problems.append(Problem("type", text_of(unit.targets[0].path), complaint))
            return
        lost = [
            Problem("dtype", text_of(path), f"{name} has numbers that are too large for {dtype}")
            for name, tensor in zip(unit.stored, tensors, strict=True)
            for path, dtype in ((t.path, self._dtype(t.path)) for t in unit.targets)
            if tensor.dtype != dtype and placing.overflows(tensor, dtype)
        ]
        if lost:
            self.problems += lost
            return
        if unit.rule.add:
            # Converted before they are added: the sum is not rounded to the stored dtype.
            tensors = [np.asarray(x, self._dtype(unit.targets[0].path), order="C") for x in tensors]
        parts = unit.rule.load(tensors, [target.shape for target in unit.targets])
        del tensors
        # Contiguous copies, so that the stored tensor is freed before they are placed. Layers of
        # stacks are copied from the stored tensor to where they belong.
        parts = [
            part if target.index else np.asarray(part, self._dtype(target.path), order="C")
            for part, target in zip(parts, unit.targets, strict=True)
        ]
        for target in reversed(unit.targets):
            self._keep(target, parts.pop())

    def _keep(self, target: Target, part: Any) -> None:
        """Places a tensor, or puts a layer into its stack and places that when it is full."""
        path = target.path
        self.layers_left[path] -= 1
        if target.index:
            self._put_layer(path, target.index, part)
            if self.layers_left[path]:
                return
            part = self.stacks.pop(path)
        leaf = self.entries.leaf(path)
        if isinstance(leaf, np.ndarray):
            value = placing.as_leaf(path, leaf, part if part.base is None else part.copy())
        else:
            sharding = placing.committed_sharding(leaf)
            part = jax.device_put(part, sharding) if sharding else part
            value = placing.wait_for_copy(placing.as_leaf(path, leaf, part))
        if isinstance(value, Problem):
            self.problems.append(value)
        else:
            self.values[path] = value

    def _put_layer(self, path: Path, index: tuple[int, ...], layer: Any) -> None:
        """Writes a layer into its stack, which is already on the device where it belongs."""
        shape, dtype = self.entries.specs[path].shape, self._dtype(path)
        leaf = self.entries.leaf(path)
        if isinstance(leaf, np.ndarray) or is_key(leaf):  # stacked on the host
            if path not in self.stacks:
                self.stacks[path] = np.empty(shape, dtype)
            self.stacks[path][index] = layer
            return
        if path not in self.stacks:
            self.stacks[path] = jnp.zeros(shape, dtype, device=placing.committed_sharding(leaf))
        for start, piece in placing.slabs(layer):
            piece = np.asarray(piece, dtype, order="C")
            piece = piece.reshape((1,) * len(index) + piece.shape)
            corner = np.array((*index, *start), np.int32)
            stack = placing.with_slab(self.stacks.pop(path), piece, corner)
            self.stacks[path] = placing.wait_for_copy(stack)

    def _dtype(self, path: Path) -> Any:
        return jnp.dtype(self.entries.specs[path].dtype)


def tensor_name(path: Path) -> str:
    """The name of the tensor for a path, in which dots stand between the steps."""
    return ".".join(map(str, path))


def _dotted(path: Path) -> Path:
    """A path with a step for each part between dots, as in the name of a tensor."""
    return tuple(tensor_name(path).split(".")) if path else ()


def _with_slashes(text: Any) -> Any:
    return text.rstrip(".").replace(".", "/") if isinstance(text, str) else text


def _with_dots(problem: Problem) -> Problem:
    """A problem with the names of tensors as the file spells them."""
    # `match_by_path` accepts any type, so that entries are missing or extra, and nothing else.
    dotted = {"extra": "path", "missing": "nearest"}[problem.kind]
    return dataclasses.replace(problem, **{dotted: getattr(problem, dotted).replace("/", ".")})


def _stack_of(unit: Unit) -> str:
    first = unit.targets[0]
    return text_of(first.path) if first.index else ""


def _units(path: Path, origin: Origin, shape: Any, index: tuple[int, ...] = ()) -> Iterator[Unit]:
    """What to read for an entry whose origin was found by its path."""
    if isinstance(origin, StackedLayers):
        for position, layer in enumerate(origin.layers):
            yield from _units(path, layer, shape[1:], (*index, position))
        return
    target = Target(path, index, shape)
    yield Unit(AS_IT_IS, (tensor_name(origin.path),), (target,), origin.index)


def _differing(name: str, other: str) -> Problem:
    return Problem("extra", name, f"differs from {other}, and the model has one entry for both")
