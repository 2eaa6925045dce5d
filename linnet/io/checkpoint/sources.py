"""What values are restored from: Linnet's checkpoints, other Orbax checkpoints, trees in memory.

Each source tells the types of its entries, and then reads the values of those that are wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import CheckpointNotFoundError, DamagedCheckpointError, NotACheckpointError
from linnet.io.checkpoint import manifest, orbax
from linnet.io.checkpoint.manifest import StoredEntry
from linnet.io.shared import folders
from linnet.io.shared.entries import Path, Spec, first_names, grouped, key_implementations, lists_in
from linnet.io.shared.files import parse_json, read_json
from linnet.io.shared.matching import Problem, Rename, RenameRules
from linnet.io.shared.objects import contents_of

# Where the value of each entry is wanted: np.ndarray (on the host), a sharding (on devices) or None
# (as it was saved).
Placements = Mapping[Path, Any]

_GROUP = 1 << 25

_OTHER_TOOLS = (
    (".safetensors", "weights in the safetensors format"),
    ("pytorch_model", "weights that PyTorch saved"),
    (".pt", "weights that PyTorch saved"),  # and .pth
    (".ckpt.index", "a TensorFlow checkpoint"),
    ("saved_model.pb", "a TensorFlow SavedModel"),
    (".npz", "NumPy arrays"),
    (".msgpack", "msgpack bytes; see linnet.serialization and linnet.io.load_tree"),
)


@dataclasses.dataclass
class Source:
    """Something to restore from: the types of its entries, and their values when asked for."""

    name: str
    specs: dict[Path, Spec]
    containers: dict[Path, str]
    read: Callable[[Placements], dict[Path, Any]]
    aliases: list[tuple[Path, Path]] = dataclasses.field(default_factory=list)
    is_named: bool = False  # whether the first step of each path is the name of a saved item
    # Iterators whose positions another number of processes saved than run now, and that number.
    other_process_counts: dict[Path, int] = dataclasses.field(default_factory=dict)


def tree_source(tree: Mapping[Any, Any]) -> Source:
    """Nested containers of arrays and values that are in memory already."""
    contents = contents_of({str(key): item for key, item in tree.items()}, with_positions=False)

    def read(placements: Placements) -> dict[Path, Any]:
        leaves = {path: contents.leaves[path] for path in placements}
        # The restored arrays of NumPy may be changed in place, so they are copies.
        return {p: x.copy() if isinstance(x, np.ndarray) else x for p, x in leaves.items()}

    return Source("the tree", contents.specs(), contents.containers, read)


def linnet_source(folder: str, *, verify: bool) -> Source:
    """A checkpoint that ``linnet.io`` saved."""
    facts = manifest.read(folder).in_process(jax.process_index(), jax.process_count())
    if complaint := manifest.complaint(folder, facts, verify=verify):
        raise DamagedCheckpointError(f"The checkpoint {folder} is damaged: {complaint}.")

    def read(placements: Placements) -> dict[Path, Any]:
        entries = {path: facts.entries[path] for path in placements}
        in_files = {p: e for p, e in entries.items() if e.name and not e.spec.is_value}
        values: dict[Path, Any] = {
            path: entry.value if entry.spec.is_value else _empty_array(entry, placements[path])
            for path, entry in entries.items()
            if path not in in_files
        }
        # While a group is placed, it is in memory twice.
        sizes = {path: entry.spec.nbytes for path, entry in in_files.items()}
        for group in grouped(sizes, max(_GROUP, sum(sizes.values()) // 8)):
            wanted: dict[Path, Any] = {
                entries[p].name: _placement(entries[p], placements[p]) for p in group
            }
            found = orbax.read(folder, wanted)
            values |= {p: _typed(entries[p], placements[p], found[entries[p].name]) for p in group}
        return {path: values[path] for path in placements}

    specs = {path: entry.spec for path, entry in facts.entries.items()}
    counts = {top: len(positions) for top, positions in facts.positions.items()}
    other_process_counts = {
        top: count for top, count in counts.items() if count != jax.process_count()
    }
    return Source(
        folder,
        specs,
        facts.containers,
        read,
        facts.aliases,
        is_named=True,
        other_process_counts=other_process_counts,
    )


def _placement(entry: StoredEntry, wanted: Any) -> Any:
    """The wanted placement; in place of None, the one that was saved, if JAX can hold the dtype."""
    if wanted is not None:
        return wanted
    if entry.host:
        return np.ndarray
    if entry.spec.category == "array":
        dtype = jnp.dtype(entry.spec.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # 64 bits, and JAX has them disabled
            return np.ndarray
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _typed(entry: StoredEntry, placement: Any, value: Any) -> Any:
    """The value as it was before Orbax wrote it, in its own dtype; a NumPy number if it was one."""
    if entry.spec.category == "array" and value.dtype.name != entry.spec.dtype:
        value = orbax.reinterpreted(value, jnp.dtype(entry.spec.dtype))
    return value[()] if entry.scalar and placement is None else value


def _empty_array(entry: StoredEntry, placement: Any) -> Any:
    spec = entry.spec
    if spec.category == "key":
        key = jax.random.key(0, impl=key_implementations()[spec.dtype])
        return jnp.broadcast_to(key, spec.shape)
    module = np if _placement(entry, placement) is np.ndarray else jnp
    return module.zeros(spec.shape, jnp.dtype(spec.dtype))


def orbax_source(folder: str) -> Source:
    """What another program saved with Orbax: a tree, or the items of a CheckpointManager."""
    if _is_tree(folder):
        return _orbax_tree(folder, folder)
    folders = {name: os.path.join(folder, name) for name in sorted(os.listdir(folder))}
    trees = {name: _orbax_tree(inner, folder) for name, inner in folders.items() if _is_tree(inner)}
    if list(trees) == ["default"]:  # the only item has no name
        return trees["default"]
    files = {
        name: os.path.join(folders[name], "metadata") for name in folders.keys() - trees.keys()
    }
    values = {
        name: parse_json(file, read_json(file, inside=folder))
        for name, file in sorted(files.items())
        if os.path.isfile(file)
    }
    parts = [*(source_below(tree, name) for name, tree in trees.items()), tree_source(values)]

    def read(placements: Placements) -> dict[Path, Any]:
        found: dict[Path, Any] = {}
        for part in parts:
            found |= part.read({path: x for path, x in placements.items() if path in part.specs})
        return found

    specs = {path: spec for part in parts for path, spec in part.specs.items()}
    containers = {path: container for part in parts for path, container in part.containers.items()}
    return Source(folder, specs, containers, read)


def _is_tree(folder: str) -> bool:
    signs = (folders.ORBAX_TREE, folders.ORBAX_SHARDING)
    return any(os.path.lexists(os.path.join(folder, sign)) for sign in signs)


def _orbax_tree(place: str, folder: str) -> Source:
    specs = orbax.describe(place)
    # Orbax gives the elements of lists integers, and reads every element of a list or none.
    is_name = lambda step: not isinstance(step, int)  # noqa: E731
    tops = {path: tuple(itertools.takewhile(is_name, path)) for path in specs}
    lists = {path: top for path, top in tops.items() if top != path}

    def read(placements: Placements) -> dict[Path, Any]:
        touched = {lists[path] for path in placements if path in lists}
        elements = {path: np.ndarray for path, top in lists.items() if top in touched}
        wanted = {**elements, **placements}
        try:
            found = orbax.read(
                place, {p: None if specs[p].is_value else x for p, x in wanted.items()}
            )
        except Exception as error:
            _refuse_unreadable(place, folder, error)
        return {path: found[path] for path in placements}

    return Source(folder, specs, lists_in(specs), read)


def renamed_source(source: Source, rename: Rename) -> tuple[Source, list[Problem]]:
    """A source whose entries have new paths, and a problem for each rule that renames nothing."""
    rules = RenameRules(rename)
    moved = rules.moved(source.specs)
    places = {old: new for new, old in moved.items()}
    aliases = []
    for other, first in source.aliases:
        for old in source.specs:
            if old[: len(first)] == first:
                name = rules.new((*other, *old[len(first) :]))
                aliases += [(name, places[old])] if name and old in places else []
    new = with_paths(source, moved, rules.new)
    return dataclasses.replace(new, aliases=aliases), rules.idle()


def source_below(source: Source, name: str) -> Source:
    """Puts the entries of a source, which has no aliases, below a name."""
    moved = {(name, *path): path for path in source.specs}
    below = with_paths(source, moved, lambda path: (name, *path))
    return dataclasses.replace(below, is_named=True)


def with_paths(
    source: Source, moved: Mapping[Path, Path], new: Callable[[Path], Path | None]
) -> Source:
    """A source whose entries have new paths.

    ``moved`` maps the new path of each entry to the old one; ``new`` gives the new path of a
    container or an iterator, or None to leave it out.
    """

    def read(placements: Placements) -> dict[Path, Any]:
        found = source.read({moved[path]: x for path, x in placements.items()})
        return {path: found[moved[path]] for path in placements}

    containers = ((new(path), container) for path, container in source.containers.items())
    return dataclasses.replace(
        source,
        specs={path: source.specs[old] for path, old in moved.items()},
        containers={path: container for path, container in containers if path},
        read=read,
        other_process_counts={
            path: count for top, count in source.other_process_counts.items() if (path := new(top))
        },
    )


# ---- finding checkpoints ------------------------------------------------------------------------


def open_checkpoint(path: Any, *, verify: bool = True) -> Source:
    """Opens a checkpoint of Linnet or Orbax, with ``verify`` after comparing all checksums."""
    folder = folders.find_replacement(folders.local_path(path))
    if not os.path.exists(folder):
        link = f": it is a link to {os.readlink(folder)}" if os.path.islink(folder) else ""
        raise CheckpointNotFoundError(f"There is no checkpoint {folder}{link}.{_offer(folder)}")
    if not os.path.isdir(folder):
        _refuse(folder, [os.path.basename(folder)])
    names = sorted(os.listdir(folder))
    if folders.MANIFEST in names:
        try:
            return linnet_source(folder, verify=verify)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error}{_offer(folder)}") from error
    if folders.is_leftover(os.path.basename(folder)):
        raise DamagedCheckpointError(
            f"The checkpoint {folder} was not finished: the process that wrote it ended."
            f"{_offer(folder)}"
        )
    if orbax.is_marked(folder):
        raise DamagedCheckpointError(
            f"The checkpoint {folder} is damaged: {folders.MANIFEST} is not there, which alone "
            "holds checksums, containers, ties, positions of iterators, and values that Orbax "
            f"cannot hold.{_offer(folder)} What Orbax can read of it: io.load_tree("
            "orbax.checkpoint.PyTreeCheckpointer().restore(path), model=model)."
        )
    if not folders.has_orbax_sign(folder):
        _refuse(folder, names)
    try:
        source = orbax_source(folder)
    except Exception as error:
        _refuse_unreadable(folder, folder, error)
    if not source.specs:
        _refuse(folder, names)
    return source


def _refuse_unreadable(place: str, folder: str, error: Exception) -> NoReturn:
    raise DamagedCheckpointError(
        f"Orbax cannot read {place}: {type(error).__name__}: {error}{_offer(folder)}"
    ) from error


def _refuse(folder: str, names: list[str]) -> NoReturn:
    known = [what for name in names for sign, what in _OTHER_TOOLS if sign in name]
    steps = [name for name in names if name.isdecimal()]
    what, fix = "It is empty.", "name a folder that io.save or Orbax wrote"
    if known:
        what, fix = f"It holds {known[0]}.", "safetensors files are read by io.load_safetensors"
    elif steps:
        what, fix = f"It holds the checkpoints {', '.join(steps)}.", "name one of them"
    elif names:
        what = f"It holds {first_names(names)}." if os.path.isdir(folder) else "It is a file."
    raise NotACheckpointError(
        f"{folder} is not a checkpoint of Linnet or Orbax. {what}\nFix: {fix}."
    )


def _offer(folder: str) -> str:
    """The fix in the error for a checkpoint that cannot be read: a whole one beside it, if any."""
    other = last_whole(os.path.dirname(folder), os.path.basename(folder))
    if other:
        return f"\nFix: restore {other}, which is whole."
    return "\nFix: look for a copy elsewhere; there is no whole checkpoint beside it."


def last_whole(folder: str, but: str = "") -> str:
    """The checkpoint with the highest number, or else the newest, of those that look whole."""
    whole = [os.path.join(folder, name) for name in whole_checkpoints(folder) if name != but]
    return max(whole, key=_recency, default="")


def _recency(path: str) -> tuple[int, float]:
    name = os.path.basename(path)
    with contextlib.suppress(OSError):
        written = os.path.getmtime(folders.find_replacement(path))
        return int(name) if name.isdecimal() else -1, written
    return -1, 0.0


def whole_checkpoints(folder: str) -> Iterator[str]:
    """The names of checkpoints in a folder that look whole, by the sizes of their files."""
    for name in sorted(folders.checkpoint_names(folder)):
        if _looks_whole(folders.find_replacement(os.path.join(folder, name))):
            yield name


def _looks_whole(folder: str) -> bool:
    if not manifest.is_in(folder):
        signs = (folders.ORBAX_TREE, folders.ORBAX_CHECKPOINT)
        is_there = any(os.path.isfile(os.path.join(folder, sign)) for sign in signs)
        return is_there and not orbax.is_marked(folder)
    try:
        return not manifest.complaint(folder, manifest.read(folder), verify=False)
    except (DamagedCheckpointError, OSError):
        return False
