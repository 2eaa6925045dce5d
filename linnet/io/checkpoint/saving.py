"""Saving live objects to a folder: what is checked, what Orbax writes, and in which order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import UnstorableError
from linnet.io.checkpoint import manifest, orbax, sources
from linnet.io.checkpoint.manifest import Manifest, Position, StoredEntry
from linnet.io.shared import folders
from linnet.io.shared.entries import (
    Path,
    Spec,
    at_or_below,
    raw_data,
    storage_names,
    text_of,
)
from linnet.io.shared.files import SURROGATE
from linnet.io.shared.objects import Contents, contents_of, items_of_call, why_not_stored
from linnet.io.shared.processes import agree, are_several, by_first, gather, in_all, replicated
from linnet.traverse_util import unflatten_dict


class Saving:
    """What one save will write: the tree for Orbax, and the manifest."""

    def __init__(
        self, items: Mapping[str, Any], step: int | None = None, score: float | None = None
    ):
        self.contents = contents_of(items, with_positions=True)
        self.positions: dict[Path, list[Position]] = {}  # of iterators, where processes differ
        self.step, self.score = step, score
        leaves = self.contents.leaves
        for path in self.contents.wildcards:
            _refuse(path, "is ..., which stands for whatever was saved, and only restoring knows")
        self.specs = self.contents.specs()
        for path, leaf in leaves.items():
            if text := why_not_stored(leaf, _why_not_in_checkpoint):
                _refuse(path, text)
        in_tree = [path for path, leaf in leaves.items() if _in_tree(path, leaf, self.contents)]
        self.names = storage_names(in_tree)
        # An array that each process has on its own devices is written as one of all processes.
        arrays: dict[Any, Any] = {
            self.names[path]: orbax.as_written(replicated(leaves[path])) for path in in_tree
        }
        # Orbax refuses a tree with nothing in it.
        self.tree = unflatten_dict(arrays or {("nothing",): None})
        self.nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves.values())

    def check_processes(self) -> None:
        """Refuses a save in which the processes of a run pass different items, values or steps.

        Iterators alone may be at another position in each: they read different parts of the data.
        """
        self._compare_positions()
        agree(
            "The processes of this run do not save the same",
            self._facts,
            "build the model from the same seed and settings in all processes, and save what "
            "belongs to one process alone in a file of its own.",
        )

    def _compare_positions(self) -> None:
        if not are_several():
            return
        own = {}
        for top in self.contents.iterators:
            leaves = at_or_below(top, self.contents.leaves)
            if all(self.specs[path].is_value for path in leaves):
                own[top] = manifest.position_to_json(
                    (leaves, at_or_below(top, self.contents.containers))
                )
        # Where the processes have different iterators, `agree` will list them.
        tops = [list(top) for top in own]
        everywhere = gather([tops, list(own.values())])
        if any(theirs != tops for theirs, _ in everywhere):
            return
        for number, top in enumerate(own):
            positions = [found[number] for _, found in everywhere]
            if any(position != positions[0] for position in positions):
                self.positions[top] = [manifest.position_from_json(x) for x in positions]

    def _facts(self) -> dict[str, str]:
        contents = self.contents
        facts = {"step": str(self.step), "score": str(self.score)}
        facts |= {text_of(p): _fact(self.specs[p], leaf) for p, leaf in contents.leaves.items()}
        facts |= {
            f"the container {text_of(p)}": container for p, container in contents.containers.items()
        }
        facts |= {text_of(p): f"tied to {text_of(q)}" for p, q in contents.aliases}
        for top in self.positions:
            for path in at_or_below(top, contents.leaves):
                facts.pop(text_of(path))
            for path in at_or_below(top, contents.containers):
                facts.pop(f"the container {text_of(path)}")
        return facts

    def finish(self, folder: str) -> None:
        """Adds the manifest to the unfinished folder; called in Orbax's background thread."""
        specs, contents = self.specs, self.contents
        entries = {
            path: StoredEntry(
                specs[path],
                self.names.get(path, ()),
                leaf if specs[path].is_value else None,
                isinstance(leaf, np.ndarray | np.generic),
                type(contents.holders[path]).__name__ if path in contents.holders else "",
                isinstance(leaf, np.generic),
            )
            for path, leaf in contents.leaves.items()
        }
        # The step is in the manifest alone: plain Orbax sees it in the name of the folder, and has
        # one thread less to start while the program waits.
        if self.step is not None and "step" not in contents.items:
            entries["step",] = StoredEntry(Spec("value", "int"), value=self.step)
        facts = Manifest(entries, contents.containers, contents.aliases, self.score)
        manifest.write(folder, dataclasses.replace(facts, positions=self.positions))


def _fact(spec: Spec, leaf: Any) -> str:
    """The type and value of a leaf as text, which is compared between processes."""
    if spec.is_value:
        return repr(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return f"{spec}, {getattr(leaf.sharding, 'spec', leaf.sharding)}"
    return f"{spec} with the checksum {zlib.crc32(np.asarray(raw_data(leaf)).tobytes())}"


def _why_not_in_checkpoint(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic) and not _is_numeric(leaf.dtype):
        return f"is a NumPy array of dtype {leaf.dtype}; a checkpoint holds numbers and booleans"
    return ""


def _refuse(path: Path, text: str) -> NoReturn:
    raise UnstorableError(f"{text_of(path)} {text}.\nFix: save it elsewhere, or leave it out.")


def _is_numeric(dtype: Any) -> bool:
    number = jnp.issubdtype(dtype, np.number) and dtype.itemsize <= 8 + 8 * (dtype.kind == "c")
    return number or dtype == np.bool_


def _in_tree(path: Path, leaf: Any, contents: Contents) -> bool:
    """Whether an entry is in the Orbax tree; otherwise the manifest alone holds it."""
    if hasattr(leaf, "shape"):
        return 0 not in leaf.shape
    if any(path[:end] in contents.iterators for end in range(1, len(path) + 1)):
        return False
    if isinstance(leaf, int):
        return -(2**63) <= leaf < 2**63
    if isinstance(leaf, str):
        return not SURROGATE.search(leaf)
    return leaf is None or isinstance(leaf, float)


def save(
    path: Any,
    items: Mapping[str, Any] | None = None,
    /,
    *,
    overwrite: bool = False,
    **named: Any,
) -> None:
    """Saves models, optimizers, metrics, arrays, plain values and iterators' positions.

    The checkpoint appears when all of it is on the disk, and plain Orbax can open it. Of several
    processes all call it, with the same items; each writes its own shards.

    Args:
      path: the folder to write.
      items: what to save, by name; for names that are no keywords.
      overwrite: replace the checkpoint that is there; the old one goes when the new one is whole.
      **named: more items: ``model=model, optimizer=optimizer, step=step``.

    Raises:
      CheckpointExistsError: something is there, without ``overwrite`` or other than a checkpoint.
      CheckpointWriteError: there is no room or no permission; what was there before is intact.
      CheckpointBusyError: another process is saving there.
      UnstorableError: an item holds something that cannot be saved; its path is named.
      ProcessMismatchError: the processes of a run save different things; they are listed.

    Example:
      >>> import tempfile
      >>> from linnet import io, nnx
      >>> folder = tempfile.mkdtemp() + "/first"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> io.save(folder, model=model, step=7)
      >>> fresh = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> io.restore(folder, model=fresh).step
      7
      >>> bool((fresh.kernel[...] == model.kernel[...]).all())
      True
    """
    folder = folders.local_path(path)
    saving = in_all(lambda: Saving(items_to_save(items, named)))
    saving.check_processes()
    parent, name = os.path.split(folder)
    old = folder if os.path.lexists(folder) else ""
    last_good = lambda: old or sources.last_whole(parent)  # noqa: E731
    new = folder + folders.REPLACEMENT if overwrite else folder
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            folders.prepare(folder, saving.nbytes, overwrite=overwrite, last_good=last_good)
            lock = os.path.join(parent, f".{name}{folders.LOCK}")
            stack.enter_context(folders.locked(lock, folder))
            if overwrite:
                folders.settle_replacement(folder)

        by_first(begin)
        writer = orbax.Writer()
        try:
            in_all(lambda: writer.start(new, saving.tree, saving.finish))
            in_all(writer.wait)
        except Exception as error:
            writer.abandon()
            raise folders.write_error(folder, error, last_good()) from error
        writer.close()
        by_first(lambda: folders.replace(new, folder))


def items_to_save(items: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a call; refuses none at all, and names that are no text."""
    both = items_of_call(items, named, "io.save(path, model=model)")
    if not both:
        raise UnstorableError("There is nothing to save.\nFix: io.save(path, model=model).")
    bad = [name for name in both if not isinstance(name, str)]
    if bad:
        raise UnstorableError(
            f"The name of an item is text, but got {bad[0]!r}.\n"
            "Fix: io.save(path, {'model': model})."
        )
    return both
