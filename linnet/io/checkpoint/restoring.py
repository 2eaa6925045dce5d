"""Restoring: from a folder or a tree into live objects, with everything compared first."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import CheckpointArgumentError
from linnet.io.checkpoint import sources
from linnet.io.shared import objects
from linnet.io.shared.entries import (
    Path,
    at_or_below,
    is_list_index,
    nest_containers,
    raw_data,
    steps_as_text,
    text_of,
)
from linnet.io.shared.matching import (
    VALUE_FOLDERS,
    Match,
    Problem,
    Rename,
    StoredValue,
    match,
    refuse,
)
from linnet.io.shared.objects import Contents, Restored, check_writable, contents_of, items_of_call
from linnet.io.shared.placing import as_leaf, sharding_for

_OPT_STATE = "opt_state"  # the attribute with an optimizer's state, here and in Flax


def restore(
    path: Any,
    items: Mapping[str, Any] | None = None,
    /,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    verify: bool = True,
    **named: Any,
) -> Restored:
    """Restores what was saved into live objects, or into abstract ones.

    Everything is compared before anything is written: either all fits and is written, or every
    entry that does not fit is listed and nothing is changed. Layers of an ``nnx.Stack`` (or scanned
    in another way) and listed layers restore into each other.

    Args:
      path: the folder of a checkpoint that Linnet or, with Orbax, another program wrote.
      items: what to restore into, by name; for names that are no keywords.
      strict: refuse a checkpoint with missing, extra, misshapen or wrongly typed entries;
        otherwise restore what fits, and return the list as ``problems``.
      rename: new paths for entries of the checkpoint, from old to new (of tied weights, any of
        their paths will do):
        ``{"model/encoder": "model/backbone", "**/gamma": "**/scale"}``. Keys are paths as the
        errors print them, with ``*`` for one step and ``**`` for any number, or compiled regular
        expressions; ``None`` leaves entries out.
      verify: compare the checksums of all files first.
      **named: more items. An object or State is written into; one made by ``nnx.eval_shape`` or
        with shardings gets its arrays where they belong, without a second copy. For plain values
        pass an example of the type, or ``...`` for whatever was saved.

    Returns:
      The items. Without any items to restore into, all that was saved; plain values that were not
      asked for are there as well.

    Raises:
      CheckpointMismatchError: entries do not fit; all are listed, and nothing was changed.
      CheckpointNotFoundError: there is nothing.
      NotACheckpointError: there is something else.
      DamagedCheckpointError: files are not what was written.
      TraceContextError: it is called inside a function that JAX compiles.
      CheckpointArgumentError: an argument is of no use, or a sharding does not divide its entry.

    Example:
      >>> import tempfile
      >>> from linnet import io, nnx
      >>> path = f"{tempfile.mkdtemp()}/best"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> io.save(path, model=model, epoch=5)
      >>> fresh = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> io.restore(path, model=fresh).epoch
      5
      >>> bool((fresh.kernel[...] == model.kernel[...]).all())
      True
    """
    wanted = items_of_call(items, named, "io.restore(path, model=model)")
    source = sources.open_checkpoint(path, verify=verify)
    return restore_from(source, wanted, strict=strict, rename=rename)


def load_tree(
    tree: Mapping[Any, Any],
    items: Mapping[str, Any] | None = None,
    /,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    **named: Any,
) -> Restored:
    """Restores from nested dicts of arrays, as ``restore`` does from a folder.

    Args:
      tree: the nested dicts, for example what ``linnet.serialization.msgpack_restore`` gives.
        With one item to restore into, whose name is no key of them, they are its entries.
      items: what to restore into, by name.
      strict, rename: as for ``restore``.
      **named: more items.

    Returns:
      The items.

    Raises:
      CheckpointMismatchError: entries do not fit; all are listed, and nothing was changed.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import io, nnx
      >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> _ = io.load_tree({"weight": jnp.ones((2, 1))}, model=model,
      ...                  rename={"model/weight": "model/kernel"})
      >>> model.kernel.value.tolist()
      [[1.0], [1.0]]
    """
    wanted = items_of_call(items, named, "io.load_tree(tree, model=model)")
    if not isinstance(tree, Mapping):
        raise CheckpointArgumentError(
            f"The tree is nested dicts, but got a {type(tree).__name__}.\n"
            "Fix: io.load_tree(nnx.state(model), model=other), or io.load_tree({'model': ...})."
        )
    return restore_from(sources.tree_source(tree), wanted, strict=strict, rename=rename)


def restore_from(
    source: sources.Source, items: Mapping[str, Any], *, strict: bool, rename: Rename | None
) -> Restored:
    """Restores items from any source; see ``restore``."""
    names = {str(path[0]) for path in source.specs if path}
    if not source.is_named and len(items) == 1 and not names & items.keys():
        source = sources.source_below(source, next(iter(items)))
    idle: list[Problem] = []
    if rename:
        source, idle = sources.renamed_source(source, rename)
    if not items:
        paths = [*source.specs, *source.containers, *(other for other, _ in source.aliases)]
        items = dict.fromkeys((str(path[0]) for path in paths), ...)
    contents = contents_of(items, with_positions=False)
    check_writable(contents.leaves, "restored")
    wildcard_paths = [*contents.wildcards, *contents.iterators]
    found = match(
        contents.specs(),
        source.specs,
        aliases=[*contents.aliases, *source.aliases],
        variable_depths=contents.variable_depths,
        wildcard_paths=[
            path
            for path in wildcard_paths
            if path not in source.containers or at_or_below(path, source.specs)
        ],
        scope=items,
    )
    problems = idle + _by_item(found, contents, source)
    problems += [
        Problem(
            "type",
            text_of(path),
            f"saved with a position for each of {count} processes; this run has "
            f"{jax.process_count()}",
        )
        for path, count in source.other_process_counts.items()
        if path in contents.iterators
    ]
    if strict and problems:
        others = _other_optimizers(problems, source.specs, contents.leaves)
        _refuse(source.name, problems, others)
    values, more = _read(source, found, contents)
    more += _twin_problems(source, found, values)
    if strict and more:
        _refuse(source.name, more)
    filled = {
        path: nest_containers(at_or_below(path, values), at_or_below(path, source.containers), path)
        for path in wildcard_paths
        if at_or_below(path, values) or path in source.containers
    }
    positions = {path: filled[path] for path in contents.iterators if path in filled}
    restored = objects.write(contents, {**values, **filled}, positions)
    return Restored({**_plain_items(source, items), **restored}, problems + more, source.name)


def _by_item(found: Match, contents: Contents, source: sources.Source) -> list[Problem]:
    """The problems, with a single one for an item that was not saved at all."""
    saved = {str(path[0]) for path in [*source.specs, *source.containers] if path}
    absent = [name for name in contents.items if name not in saved]
    text = f"not saved; there are {', '.join(sorted(saved)) or 'no items'}"
    problems = []
    for name in absent:
        if any(f"{p.path}/".startswith(f"{name}/") for p in found.problems):
            close = difflib.get_close_matches(name, sorted(saved), n=1)
            problems.append(Problem("missing", name, text, *close))
    inside = tuple(f"{name}/" for name in absent)
    return problems + [p for p in found.problems if not f"{p.path}/".startswith(inside)]


def _refuse(name: str, problems: list[Problem], others: Sequence[_OtherOptimizer] = ()) -> NoReturn:
    """Raises for problems; those in the state of another optimizer are told in one line."""
    inside = tuple(f"{other.path}/" for other in others)
    rest = [problem for problem in problems if not problem.path.startswith(inside)]
    refuse(
        f"{name} does not fit what it is to be restored into",
        problems,
        [*itertools.chain.from_iterable(other.fixes() for other in others), *_fixes(rest)],
        lines=[*map(str, others), *map(str, rest)],
    )


@dataclasses.dataclass(frozen=True)
class _OtherOptimizer:
    """The state of an optimizer that has other parts than the one it is restored into."""

    path: str
    saved: list[Path]
    here: list[Path]

    def __str__(self) -> str:
        saved, here = (
            ", ".join(map(text_of, parts)) or "nothing" for parts in (self.saved, self.here)
        )
        return f"{self.path}: saved by another optimizer, with {saved}; the one here has {here}"

    def fixes(self) -> Iterator[str]:
        yield "build the optimizer as it was when it was saved"
        saved, here = ({part[:-1] for part in parts} for parts in (self.saved, self.here))
        names = [[part[-1] for part in parts] for parts in (self.saved, self.here)]
        if len(saved) == len(here) == 1 and names[0] == names[1]:
            old, new = (text_of((self.path, *parts.pop())) for parts in (saved, here))
            yield f"rename={{{old!r}: {new!r}}} if only its place has changed"
        yield f"leave {self.path.partition('/')[0]} out of the items"


def _other_optimizers(
    problems: list[Problem], stored: Iterable[Path], wanted: Iterable[Path]
) -> list[_OtherOptimizer]:
    """The optimizers with problems whose saved state has other parts than the wanted one."""
    stored, wanted = (dict.fromkeys(map(_variable_path, paths)) for paths in (stored, wanted))
    # The paths of parameters inside of an item, or inside of an attribute of one.
    param_paths = {
        path[start:] for path in [*stored, *wanted] if _OPT_STATE not in path for start in (1, 2)
    }
    saved, here = (_optimizer_parts(paths, param_paths) for paths in (stored, wanted))
    return [
        _OtherOptimizer(text_of(top), saved.get(top, []), here.get(top, []))
        for top in {**saved, **here}
        if saved.get(top) != here.get(top)
        and any(problem.path.startswith(f"{text_of(top)}/") for problem in problems)
    ]


def _variable_path(path: Path) -> Path:
    return steps_as_text(path[:-1] if len(path) > 1 and path[-1] in VALUE_FOLDERS else path)


def _optimizer_parts(paths: Iterable[Path], param_paths: set[Path]) -> dict[Path, list[Path]]:
    """The parts of each optimizer's state, such as ``0/mu``: a value, or one for each parameter."""
    states: dict[Path, list[Path]] = {}
    for path in paths:
        if _OPT_STATE in path:
            top = path[: path.index(_OPT_STATE) + 1]
            states.setdefault(top, []).append(path[len(top) :])
    found: dict[Path, list[Path]] = {}
    for top, inner in states.items():
        # Parts with a value for each parameter, under the path that the parameter has in its model.
        param_trees = {
            next((p[:end] for end in range(1, len(p)) if p[end:] in param_paths), ()) for p in inner
        }
        found[top] = sorted({_part(path, param_trees) for path in inner})
    return found


def _part(path: Path, param_trees: set[Path]) -> Path:
    """The part of an optimizer's state that an entry is in, such as ``0/mu``."""
    for end in range(1, len(path)):
        if path[:end] in param_trees:
            return path[:end]
    # The model is not among the items: a part ends at the first name with a name below it.
    named = (n for n, step in enumerate(path) if not is_list_index(step))
    return path[: next((n + 1 for n in named if not is_list_index((*path, 0)[n + 1])), len(path))]


def _fixes(problems: list[Problem]) -> Iterator[str]:
    first = {problem.kind: problem for problem in reversed(problems)}
    meant = next((p for p in problems if p.nearest and p.kind == "missing"), None)
    if meant:
        yield f"rename={{{meant.nearest!r}: {meant.path!r}}} for entries that have another name now"
    elif "missing" in first or "rename" in first:
        yield "rename={old: new} for entries that have another name now"
    elif "extra" in first:
        yield f"rename={{{first['extra'].path!r}: None}} for entries that are to be left out"
    if "dtype" in first:
        yield "restore with the dtypes that were saved and convert afterwards"
    yield "strict=False to restore what fits and get this list back"


def _read(
    source: sources.Source, found: Match, contents: Contents
) -> tuple[dict[Path, Any], list[Problem]]:
    """Reads the values of all entries that fit, as the items hold them."""
    placements: dict[Path, Any] = {}
    for path, origin in found.origins.items():
        is_whole = isinstance(origin, StoredValue) and not origin.index
        placement = _placement(path, contents) if is_whole else np.ndarray
        placements |= dict.fromkeys(origin.stored, placement)
    raw = source.read(placements)
    last_use = {p: path for path, origin in found.origins.items() for p in origin.stored}
    values: dict[Path, Any] = {}
    problems: list[Problem] = []
    for path, origin in found.origins.items():
        value = origin.build(raw)
        for stored in origin.stored:
            if last_use[stored] == path:
                del raw[stored]
        if path in contents.leaves:
            value = as_leaf(path, contents.leaves[path], value)
        if isinstance(value, Problem):
            problems.append(value)
        else:
            values[path] = value
    return values, problems


def _twin_problems(
    source: sources.Source, found: Match, values: Mapping[Path, Any]
) -> list[Problem]:
    """Problems for tied weights that were saved apart, with different values."""
    problems = []
    for stored, path in found.twins.items():
        if path not in values:
            continue
        placement = None if source.specs[stored].is_value else np.ndarray
        if not _is_equal(source.read({stored: placement})[stored], values[path]):
            text = f"not wanted: it differs from {text_of(path)}, to which it is tied here"
            problems.append(Problem("extra", text_of(stored), text))
    return problems


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, str | bytes | None):
        return one == other
    one, other = raw_data(one), raw_data(other)
    return np.shape(one) == np.shape(other) and bool(jnp.array_equal(one, other, equal_nan=True))


def _placement(path: Path, contents: Contents) -> Any:
    """Where the value of an entry is wanted, as in ``sources.Placements``."""
    leaf = contents.leaves.get(path)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.ndarray
    if not hasattr(leaf, "shape"):
        return None
    return sharding_for(leaf) or np.ndarray


def _plain_items(source: sources.Source, items: Mapping[str, Any]) -> dict[str, Any]:
    """The saved items that nobody asked for, if they are plain values."""
    names = dict.fromkeys(str(path[0]) for path in [*source.specs, *source.containers])
    found = {}
    for name in names:
        specs = at_or_below((name,), source.specs)
        if source.is_named and name not in items and all(s.is_value for s in specs.values()):
            values = source.read(dict.fromkeys(specs))
            found[name] = nest_containers(values, at_or_below((name,), source.containers), (name,))
    return found
