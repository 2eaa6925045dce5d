"""What values are restored from: Linnet's checkpoints, other Orbax checkpoints, trees in memory.

Each source tells the types of its entries, and then reads the values of those that are wanted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
)
from linnet.io.checkpoint import manifest, orbax
from linnet.io.shared import folders
from linnet.io.shared.entries import (
    ARRAY,
    KEY,
    VALUE,
    Path,
    Spec,
    first_names,
    key_implementations,
    lists_in,
)
from linnet.io.shared.files import parse_json, read_json
from linnet.io.shared.matching import Rename, RenameRules
from linnet.io.shared.objects import contents_of

Hows = Mapping[Path, Any]  # np.ndarray, a sharding, or None for what was saved

_GROUP = 1 << 25

_OTHER_TOOLS = (
    (".safetensors", "weights in the safetensors format"),
    ("pytorch_model", "weights that PyTorch saved"),
    (".pt", "weights that PyTorch saved"),
    (".pth", "weights that PyTorch saved"),
    (".ckpt.index", "a TensorFlow checkpoint"),
    ("saved_model.pb", "a TensorFlow SavedModel"),
    (".npz", "NumPy arrays"),
    (".msgpack", "msgpack bytes; see linnet.serialization and linnet.io.load_tree"),
)


class Source(Protocol):
    """Something to restore from: the types of its entries, and their values when asked for."""

    name: str
    specs: dict[Path, Spec]
    containers: dict[Path, str]
    aliases: list[tuple[Path, Path]]
    is_named: bool  # whether the first step of each path is the name of a saved item

    def read(self, hows: Hows) -> dict[Path, Any]: ...


class TreeSource:
    """Nested containers of arrays and values that are in memory already."""

    def __init__(self, tree: Mapping[Any, Any]):
        contents = contents_of({str(key): item for key, item in tree.items()}, with_positions=False)
        self.name = "the tree"
        self.specs = contents.specs()
        self.containers = contents.containers
        self.aliases: list[tuple[Path, Path]] = []
        self.is_named = False
        self._leaves = contents.leaves

    def read(self, hows: Hows) -> dict[Path, Any]:
        """The values of entries; what can change is copied."""
        leaves = {path: self._leaves[path] for path in hows}
        return {p: x.copy() if isinstance(x, np.ndarray) else x for p, x in leaves.items()}


class LinnetSource:
    """A checkpoint that ``linnet.io`` saved."""

    is_named = True

    def __init__(self, folder: str, *, verify: bool):
        self.name = folder
        self.manifest = manifest.read(folder)
        check = manifest.complaint_about_bytes if verify else manifest.complaint_about_sizes
        if complaint := check(folder, self.manifest):
            raise DamagedCheckpointError(f"The checkpoint {folder} is damaged: {complaint}.")
        self.specs = self.manifest.specs()
        self.containers = self.manifest.containers
        self.aliases = self.manifest.aliases

    def read(self, hows: Hows) -> dict[Path, Any]:
        """The values of entries; plain values come from the manifest."""
        values: dict[Path, Any] = {}
        names: dict[Path, tuple[str, ...]] = {}
        for path in hows:
            entry = self.manifest.entries[path]
            if entry.spec.kind == VALUE:
                values[path] = entry.value
            elif entry.name:
                names[path] = entry.name
            else:
                values[path] = _nothing(entry.spec, self._how(path, hows[path]) is np.ndarray)
        for group in self._groups(names):
            wanted: dict[Any, Any] = {names[p]: self._how(p, hows[p]) for p in group}
            read = orbax.read(self.name, wanted)
            values |= {path: self._typed(path, hows[path], read[names[path]]) for path in group}
        return {path: values.pop(path) for path in hows}

    def _typed(self, path: Path, how: Any, value: Any) -> Any:
        entry = self.manifest.entries[path]
        if entry.spec.kind == ARRAY and value.dtype.name != entry.spec.dtype:
            value = orbax.uncarried(value, jnp.dtype(entry.spec.dtype))
        return value[()] if entry.scalar and how is None else value

    def _groups(self, paths: Iterable[Path]) -> Iterator[list[Path]]:
        """Groups entries to be read together: while a group is placed, it is in memory twice."""
        sizes = {path: self.specs[path].nbytes for path in paths}
        most = max(_GROUP, sum(sizes.values()) // 8)
        group: list[Path] = []
        held = 0
        for path, size in sizes.items():
            if group and held + size > most:
                yield group
                group, held = [], 0
            group.append(path)
            held += size
        if group:
            yield group

    def _how(self, path: Path, how: Any) -> Any:
        entry = self.manifest.entries[path]
        if how is not None:
            return how
        if entry.host:
            return np.ndarray
        if entry.spec.kind == ARRAY:
            dtype = jnp.dtype(entry.spec.dtype)
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # 64 bits, and JAX has them disabled
                return np.ndarray
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _nothing(spec: Spec, host: bool) -> Any:
    """An array without elements."""
    if spec.kind == KEY:
        key = jax.random.key(0, impl=key_implementations()[spec.dtype])
        return jnp.broadcast_to(key, spec.shape)
    return (np if host else jnp).zeros(spec.shape, jnp.dtype(spec.dtype))


class OrbaxSource:
    """A tree that another program saved with Orbax, such as a Flax program."""

    is_named = False

    def __init__(self, folder: str):
        self.name = folder
        parts = {(): folder} if _is_tree(folder) else dict(_items_of(folder))
        self._places: dict[Path, tuple[str, Path]] = {}
        self.specs = {}
        for head, place in parts.items():
            for path, spec in orbax.describe(place).items():
                self.specs[(*head, *path)] = spec
                self._places[(*head, *path)] = (place, path)
        # Orbax gives the elements of lists integers, and the items of dicts text.
        self.containers = lists_in(self.specs)
        self.aliases: list[tuple[Path, Path]] = []
        json = contents_of(_json_items(folder) if () not in parts else {}, with_positions=False)
        self._values = json.leaves
        self.specs |= json.specs()
        self.containers |= json.containers

    def read(self, hows: Hows) -> dict[Path, Any]:
        values = {path: self._values[path] for path in hows if path in self._values}
        wanted = self._with_lists({p: how for p, how in hows.items() if p not in values})
        for place in {self._places[path][0] for path in wanted}:
            here = {p: self._places[p][1] for p in wanted if self._places[p][0] == place}
            try:
                read = orbax.read(place, {name: wanted[path] for path, name in here.items()})
            except Exception as error:
                _refuse_unreadable(place, self.name, error)
            values |= {path: read[name] for path, name in here.items() if path in hows}
        return values

    def _with_lists(self, hows: Hows) -> dict[Path, Any]:
        """The entries to read: of a list Orbax reads every element or none."""
        tops = {path[: _list_at(path)] for path in hows if _list_at(path) < len(path)}
        wanted = {
            path: np.ndarray
            for path in self._places
            if _list_at(path) < len(path) and path[: _list_at(path)] in tops
        }
        wanted.update(hows)
        return {p: None if self.specs[p].kind == VALUE else how for p, how in wanted.items()}


def _list_at(path: Path) -> int:
    """Where the first position in a list stands in a path, or its length."""
    return next((at for at, step in enumerate(path) if isinstance(step, int)), len(path))


class Renamed:
    """A source whose entries have new paths; ``problems`` has the rules that rename nothing."""

    def __init__(self, source: Source, rename: Rename):
        rules = RenameRules(rename)
        self.name, self.is_named = source.name, source.is_named
        self._moved = rules.moved(source.specs)
        self.specs = {new: source.specs[old] for new, old in self._moved.items()}
        places = {old: new for new, old in self._moved.items()}
        also = ((rules.new(other), places.get(old)) for other, old in _other_names(source))
        self.aliases = [(name, place) for name, place in also if name and place]
        containers = ((rules.new(path), kind) for path, kind in source.containers.items())
        self.containers = {path: kind for path, kind in containers if path}
        self.problems = rules.idle()
        self._source = source

    def read(self, hows: Hows) -> dict[Path, Any]:
        read = self._source.read({self._moved[path]: how for path, how in hows.items()})
        return {path: read[self._moved[path]] for path in hows}


def _other_names(source: Source) -> Iterator[tuple[Path, Path]]:
    """Pairs of another path and the stored path, for entries that were shared when saved."""
    for other, first in source.aliases:
        for path in source.specs:
            if path[: len(first)] == first:
                yield (*other, *path[len(first) :]), path


class Below:
    """A source whose entries lie below a name."""

    is_named = True

    def __init__(self, source: Source, name: str):
        self.name = source.name
        self.specs = {(name, *path): spec for path, spec in source.specs.items()}
        self.containers = {(name, *path): kind for path, kind in source.containers.items()}
        self.aliases = [((name, *path), (name, *other)) for path, other in source.aliases]
        self._source = source

    def read(self, hows: Hows) -> dict[Path, Any]:
        read = self._source.read({path[1:]: how for path, how in hows.items()})
        return {path: read.pop(path[1:]) for path in hows}


def _is_tree(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in ("_METADATA", "_sharding"))


def _items_of(folder: str) -> Iterator[tuple[Path, str]]:
    """The items of a folder that an Orbax CheckpointManager wrote; the only one has no name."""
    names = [name for name in sorted(os.listdir(folder)) if _is_tree(os.path.join(folder, name))]
    for name in names:
        yield () if names == ["default"] else (name,), os.path.join(folder, name)


def _json_items(folder: str) -> dict[str, Any]:
    """The plain values that an Orbax CheckpointManager wrote beside trees, by the item's name."""
    items = {}
    for name in sorted(os.listdir(folder)):
        file = os.path.join(folder, name, "metadata")
        if os.path.isfile(file) and not _is_tree(os.path.dirname(file)):
            items[name] = parse_json(file, read_json(file, inside=folder))
    return items


def open_checkpoint(path: Any, *, verify: bool = True) -> LinnetSource | OrbaxSource:
    """Opens a checkpoint of Linnet or Orbax; ``verify`` compares the checksums of all files first.

    What is not there, is no checkpoint or is damaged is refused; whole ones beside it are named.
    """
    folder = folders.find_replacement(folders.local_path(path))
    if not os.path.exists(folder):
        link = f": it is a link to {os.readlink(folder)}" if os.path.islink(folder) else ""
        raise CheckpointNotFoundError(f"There is no checkpoint {folder}{link}.{_offer(folder)}")
    if not os.path.isdir(folder):
        _refuse(folder, [os.path.basename(folder)])
    names = sorted(os.listdir(folder))
    if folders.MANIFEST in names:
        try:
            return LinnetSource(folder, verify=verify)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error}{_offer(folder)}") from error
    if folders.is_leftover(os.path.basename(folder)):
        raise DamagedCheckpointError(
            f"The checkpoint {folder} was not finished: the process that wrote it ended."
            f"{_offer(folder)}"
        )
    if not any(sign in names for sign in folders.SIGNS):
        _refuse(folder, names)
    try:
        source = OrbaxSource(folder)
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
    fix = "name a folder that io.save or Orbax wrote"
    if known:
        what = f"It holds {known[0]}."
        fix = "safetensors files are read by io.load_safetensors"
    elif steps:
        what = f"It holds the checkpoints {', '.join(steps)}."
        fix = "name one of them"
    else:
        what = f"It holds {first_names(names)}." if names else "It is empty."
        what = what if os.path.isdir(folder) else "It is a file."
    raise NotACheckpointError(
        f"{folder} is not a checkpoint of Linnet or Orbax. {what}\nFix: {fix}."
    )


def _offer(folder: str) -> str:
    """Names a whole checkpoint beside one that cannot be read."""
    other = last_whole(os.path.dirname(folder), os.path.basename(folder))
    if other:
        return f"\nFix: restore {other}, which is whole."
    return "\nFix: look for a copy elsewhere; there is no whole checkpoint beside it."


def last_whole(folder: str, but: str = "") -> str:
    """The path of the last checkpoint in a folder that looks whole, if any: the one with the
    highest number or, without numbers, the newest."""
    whole = [os.path.join(folder, name) for name in whole_checkpoints(folder) if name != but]
    return max(whole, key=_age, default="")


def _age(path: str) -> tuple[int, float]:
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
        signs = ("_METADATA", "_CHECKPOINT_METADATA")
        return any(os.path.isfile(os.path.join(folder, sign)) for sign in signs)
    try:
        return not manifest.complaint_about_sizes(folder, manifest.read(folder))
    except (DamagedCheckpointError, OSError):
        return False
