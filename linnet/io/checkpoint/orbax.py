"""The one place of ``linnet.io`` that calls Orbax: trees of arrays to a folder and back.

Orbax does the work in its own background thread. Before it renames the finished folder, it calls
``finalize``; there the manifest is added, so it is part of the same atomic step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.io.shared.entries import Path, Spec, is_key, lists_in, nest_containers, value_at
from linnet.io.shared.files import parse_json, read_json
from linnet.io.shared.folders import ORBAX_CHECKPOINT, remove_tree
from linnet.nnx.pytreelib.kinds import key_name

_MARK = {"linnet": "with a manifest"}


@functools.cache
def orbax() -> ModuleType:
    import orbax.checkpoint

    return orbax.checkpoint


@functools.cache
def _handler_class() -> tuple[Any, Any]:
    """Orbax's handler with ``finish`` called at the end, and the class of its arguments."""
    ocp: Any = orbax()

    class Handler(ocp.handlers.AsyncCheckpointHandler):
        def __init__(self) -> None:
            # Weights hardly compress, and trying takes longer than writing them.
            self.trees = ocp.PyTreeCheckpointHandler(use_compression=False)
            self.folder = ""
            self.has_arrays = False
            self.finish: Callable[[str], None] = lambda folder: None

        async def async_save(self, directory: Any, args: Any) -> Any:
            self.folder, self.finish = os.fspath(directory), args.finish
            leaves = jax.tree_util.tree_leaves(args.tree)
            self.has_arrays = not all(isinstance(leaf, str) for leaf in leaves)
            return await self.trees.async_save(directory, args=ocp.args.PyTreeSave(args.tree))

        def save(self, directory: Any, args: Any) -> None:
            raise NotImplementedError

        restore = save

        def finalize(self, directory: Any) -> None:
            # It merges files of arrays (numbers count as such), and warns if there are none.
            if self.has_arrays:
                self.trees.finalize(directory)
            self.finish(os.fspath(directory))

        def close(self) -> None:
            self.trees.close()

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class SaveTree(ocp.args.CheckpointArgs):
        tree: Any
        finish: Any

    # What is written is Orbax's own format, and says so. (Set after the registration, which wants
    # a name for each handler.)
    Handler.typestr = ocp.PyTreeCheckpointHandler.typestr
    return Handler, SaveTree


# Orbax counts its saves for the whole process: of two that begin at the same time, each would wait
# for the folder of the other, and give up after minutes.
_beginning = threading.Lock()


@contextlib.contextmanager
def _short_intervals() -> Iterator[None]:
    """Shortens the interpreter's switch interval for a while."""
    # Orbax starts its threads while the program still waits, and each of them may keep it waiting
    # for a whole interval.
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 20)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class Writer:
    """Writes one tree at a time in the background."""

    def __init__(self) -> None:
        ocp: Any = orbax()
        self._handler = _handler_class()[0]()
        self._checkpointer = ocp.AsyncCheckpointer(self._handler)
        self.wait = self._checkpointer.wait_until_finished  # raises what went wrong
        self.close = self._checkpointer.close

    def start(self, folder: str, tree: Mapping[str, Any], finish: Callable[[str], None]) -> None:
        """Copies the arrays of a tree, and goes on writing to ``folder`` in the background."""
        with _beginning, _short_intervals():
            args = _handler_class()[1](tree, finish)
            self._checkpointer.save(folder, args=args, custom_metadata=_MARK)

    def abandon(self) -> None:
        """Removes the unfinished folder of a failed save."""
        if self._handler.folder:
            remove_tree(self._handler.folder)


def is_marked(folder: str) -> bool:
    """Whether a ``Writer`` wrote a folder, by the metadata that Orbax keeps of it."""
    path = os.path.join(folder, ORBAX_CHECKPOINT)
    try:
        found = parse_json(path, read_json(path))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("custom_metadata") == _MARK


@functools.cache
def _is_known(dtype: Any) -> bool:
    """Whether Orbax can write arrays of a dtype."""
    import tensorstore

    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return True


def as_written(leaf: Any) -> Any:
    """The leaf as Orbax can write it; arrays of dtypes it does not know become 8-bit integers."""
    if not hasattr(leaf, "dtype"):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = np.asarray(leaf)
        leaf = leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))
    if _is_known(leaf.dtype) or is_key(leaf):
        return leaf
    is_signed = jnp.issubdtype(leaf.dtype, jnp.signedinteger)
    return reinterpreted(leaf, np.dtype(np.int8 if is_signed else np.uint8))


def reinterpreted(array: Any, dtype: Any) -> Any:
    """Converts between 8-bit integers and a dtype that Orbax does not know, either way."""
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    if jnp.issubdtype(array.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        return array.astype(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)


def read(folder: str, wanted: Mapping[Path, Any]) -> dict[Path, Any]:
    """Reads entries of a tree that Orbax wrote, and no others."""
    # `wanted` maps a name to its placement: np.ndarray (an array on the host), a sharding (an array
    # on devices) or None (as it was saved). Of a list it names every element or none.
    if not wanted:
        return {}
    ocp: Any = orbax()
    with warnings.catch_warnings():
        # Orbax advises to give a sharding; where there is none, what was saved decides.
        warnings.simplefilter("ignore")
        tree = ocp.PyTreeCheckpointHandler().restore(
            _epath(folder),
            args=ocp.args.PyTreeRestore(
                item=nest_containers(dict.fromkeys(wanted, 0), lists_in(wanted)),
                restore_args=nest_containers(
                    {p: _restore_args(placement) for p, placement in wanted.items()},
                    lists_in(wanted),
                ),
                partial_restore=True,
            ),
        )
    return {path: value_at(tree, path) for path in wanted}


def _restore_args(placement: Any) -> Any:
    ocp: Any = orbax()
    if placement is None:
        return ocp.RestoreArgs()
    if placement is np.ndarray:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=placement)


def _epath(folder: str) -> Any:
    from etils import epath

    return epath.Path(folder)


def describe(folder: str) -> dict[Path, Spec]:
    """The types of the entries of a tree that any program saved with Orbax, by path."""
    metadata = orbax().PyTreeCheckpointHandler().metadata(_epath(folder))
    tree = getattr(metadata, "tree", metadata)
    is_leaf = lambda x: hasattr(x, "directory") or x is None  # noqa: E731
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    found: dict[Any, Spec] = {tuple(map(key_name, steps)): _spec(leaf) for steps, leaf in leaves}
    return found


def _spec(metadata: Any) -> Spec:
    type_name = type(metadata).__name__
    if metadata is None:
        return Spec("value", "NoneType")
    if type_name == "StringMetadata":
        return Spec("value", "str")
    dtype = np.dtype(metadata.dtype)
    if type_name == "ScalarMetadata":
        plain_types = {"b": "bool", "i": "int", "u": "int", "f": "float"}
        return Spec("value", plain_types.get(dtype.kind, dtype.name))
    return Spec("array", dtype.name, tuple(metadata.shape))
