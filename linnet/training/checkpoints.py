"""Checkpoints as ``flax.training.checkpoints`` names and keeps them: one file or folder for a step.

With the setting ``flax_use_orbax_checkpointing``, which is on by default, or with a checkpointer of
Orbax, a checkpoint is a folder that Orbax writes; otherwise it is a file of msgpack bytes. Either
is written under another name first and renamed when all of it is on the disk. Both kinds are read,
whoever wrote them. New programs use ``linnet.io``, which checks what it reads.
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from linnet import config, serialization, traverse_util
from linnet.errors import (
    CheckpointArgumentError,
    CheckpointExistsError,
    InvalidCheckpointError,
    MissingStepError,
    MPACheckpointingRequiredError,
    MPARestoreDataCorruptedError,
    MPARestoreTargetRequiredError,
    name_some,
)
from linnet.io.checkpoint.orbax import describe
from linnet.io.shared import folders
from linnet.io.shared.files import open_to_read, write_through
from linnet.io.shared.processes import by_first
from linnet.nnx.pytreelib.locate import outer_level
from linnet.training import orbax_utils

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SIGNED = re.compile(f"([-+]?{_NUMBER})")
_UNSIGNED = re.compile(f"({_NUMBER})")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9.+-]+://")
_PLACEHOLDER = "//GDAPlaceholder:"  # of an array that was written to another file


class AsyncManager:
    """Writes checkpoints in another thread, one after another.

    Args:
      max_workers: how many threads there are.

    Example:
      >>> import tempfile, numpy as np
      >>> from linnet.training import checkpoints
      >>> folder, manager = tempfile.mkdtemp(), checkpoints.AsyncManager()
      >>> path = checkpoints.save_checkpoint(folder, {"w": np.ones(2)}, 1, async_manager=manager)
      >>> manager.wait_previous_save()
      >>> checkpoints.latest_checkpoint(folder) == path
      True
    """

    def __init__(self, max_workers: int = 1):
        self.executor = ThreadPoolExecutor(max_workers=max_workers)
        self.save_future: Future[Any] | None = None

    def wait_previous_save(self) -> None:
        """Waits until the checkpoint is written; raises what went wrong."""
        running, self.save_future = self.save_future, None
        if running is not None:
            running.result()

    def save_async(self, task: Callable[[], Any]) -> None:
        """Runs a task in another thread, when the one before it has ended.

        Args:
          task: a function without arguments.
        """
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)


# ---- names --------------------------------------------------------------------------------------


def natural_sort(file_list: Iterable[str], signed: bool = True) -> list[str]:
    """Sorts names by the numbers in them.

    Args:
      file_list: the names.
      signed: a sign before a number belongs to it.

    Returns:
      The sorted names.

    Example:
      >>> from linnet.training import checkpoints
      >>> checkpoints.natural_sort(["step_10", "step_9", "step_1e3"])
      ['step_9', 'step_10', 'step_1e3']
    """
    return sorted(file_list, key=lambda name: _sort_key(name, _SIGNED if signed else _UNSIGNED))


def _sort_key(name: str, number: re.Pattern[str]) -> list[Any]:
    # The parts of a split are text and numbers in turn.
    return [float(part) if i % 2 else part for i, part in enumerate(number.split(name))]


def safe_normpath(path: str) -> str:
    """Normalizes a path, also one that begins with a scheme such as ``gs://``.

    Args:
      path: the path.

    Returns:
      The path without empty steps and without ``..``.

    Example:
      >>> from linnet.training import checkpoints
      >>> checkpoints.safe_normpath("gs://bucket//runs/../last")
      'gs://bucket/last'
    """
    found = _SCHEME.match(path)
    scheme = found.group() if found else ""
    return scheme + os.path.normpath(path[len(scheme) :])


def _step_of(name: str, prefix: str) -> float | None:
    rest = name.removeprefix(prefix)
    if not name.startswith(prefix) or _SIGNED.fullmatch(rest) is None:
        return None
    return float(rest)


def _checkpoints(ckpt_dir: Any, prefix: str) -> list[str]:
    """The names of the whole checkpoints in a folder, by step."""
    names = folders.checkpoint_names(os.fspath(ckpt_dir))
    return natural_sort(name for name in names if _step_of(name, prefix) is not None)


def latest_checkpoint(ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_") -> str | None:
    """The path of the checkpoint with the highest step.

    Args:
      ckpt_dir: the folder.
      prefix: what names of checkpoints begin with.

    Returns:
      The path; None where there is no checkpoint.

    Example:
      >>> from linnet.training import checkpoints
      >>> checkpoints.latest_checkpoint("/nowhere") is None
      True
    """
    names = _checkpoints(ckpt_dir, prefix)
    return os.path.join(ckpt_dir, names[-1]) if names else None


def available_steps(
    ckpt_dir: str | os.PathLike[str], prefix: str = "checkpoint_", step_type: type = int
) -> list[int | float]:
    """The steps of the checkpoints in a folder.

    Args:
      ckpt_dir: the folder.
      prefix: what names of checkpoints begin with.
      step_type: what the steps are, ``int`` or ``float``.

    Returns:
      The steps, sorted.

    Raises:
      ValueError: a step is not of that type.

    Example:
      >>> import pathlib, tempfile
      >>> from linnet.training import checkpoints
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> _ = [(folder / f"checkpoint_{step}").touch() for step in (20, 3)]
      >>> checkpoints.available_steps(folder)
      [3, 20]
    """
    return [step_type(name.removeprefix(prefix)) for name in _checkpoints(ckpt_dir, prefix)]


# ---- saving -------------------------------------------------------------------------------------


def save_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    target: Any,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    orbax_checkpointer: Any = None,
) -> str:
    """Saves a tree as the checkpoint of a step, and removes old checkpoints.

    Args:
      ckpt_dir: the folder; it is made if it is missing.
      target: the tree: dicts, lists, tuples, train states and other registered types.
      step: the step.
      prefix: what the name of the checkpoint begins with.
      keep: how many of the last checkpoints to keep.
      overwrite: replace the checkpoint of this step, and remove those of later steps.
      keep_every_n_steps: besides those, keep checkpoints that are at least so many steps apart.
      async_manager: writes in another thread.
      orbax_checkpointer: a checkpointer of Orbax that writes the folder.

    Returns:
      The path of the checkpoint.

    Raises:
      InvalidCheckpointError: there is a file for this step or a later one.
      CheckpointExistsError: there is a folder for this step.
      MPACheckpointingRequiredError: an array has parts in other processes, and it is no Orbax
        checkpoint.
      CheckpointArgumentError: ``step`` or ``keep`` is no number.

    Example:
      >>> import tempfile, numpy as np
      >>> from linnet.training import checkpoints
      >>> folder = tempfile.mkdtemp()
      >>> for step in range(4):
      ...     path = checkpoints.save_checkpoint(folder, {"w": np.ones(2)}, step, keep=2)
      >>> checkpoints.available_steps(folder)
      [2, 3]
      >>> checkpoints.restore_checkpoint(folder, {"w": np.zeros(2)})
      {'w': array([1., 1.])}
    """
    if async_manager is not None:
        async_manager.wait_previous_save()
    _check_numbers(step, keep)
    folder = safe_normpath(os.fspath(ckpt_dir))
    path = os.path.join(folder, f"{prefix}{step}")
    by_orbax = config.flax_use_orbax_checkpointing or orbax_checkpointer is not None
    _check_step(folder, path, step, prefix, overwrite, by_orbax)
    state = serialization.to_state_dict(target)
    if by_orbax:
        write = _orbax_writer(path, state, overwrite, orbax_checkpointer)
    else:
        write = _file_writer(path, state, step)

    def save() -> None:
        write()
        by_first(lambda: _remove_others(folder, path, prefix, keep, overwrite, keep_every_n_steps))
        by_first(lambda: _remove_unfinished(folder, prefix))

    os.makedirs(folder, exist_ok=True)
    if async_manager is not None:
        async_manager.save_async(save)
    else:
        save()
    return path


def save_checkpoint_multiprocess(
    ckpt_dir: str | os.PathLike[str],
    target: Any,
    step: int | float,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    gda_manager: Any = None,
    orbax_checkpointer: Any = None,
) -> str:
    """``save_checkpoint`` under the name for several processes; all of them call it.

    Arrays with parts in several processes are written by Orbax.

    Args:
      ckpt_dir, target, step, prefix, keep, overwrite, keep_every_n_steps, async_manager,
        orbax_checkpointer: as for ``save_checkpoint``.
      gda_manager: ignored; accepted because Flax takes it.

    Returns:
      The path of the checkpoint.

    Example:
      >>> import tempfile, numpy as np
      >>> from linnet.training import checkpoints
      >>> folder = tempfile.mkdtemp()
      >>> path = checkpoints.save_checkpoint_multiprocess(folder, {"w": np.ones(2)}, 1)
      >>> path == checkpoints.latest_checkpoint(folder)
      True
    """
    return save_checkpoint(
        ckpt_dir,
        target,
        step,
        prefix,
        keep,
        overwrite,
        keep_every_n_steps,
        async_manager,
        orbax_checkpointer,
    )


def _check_numbers(step: Any, keep: Any) -> None:
    try:
        float(step)
        operator.index(keep)
    except (TypeError, ValueError) as error:
        raise CheckpointArgumentError(
            "save_checkpoint takes a number as step, and a whole number of checkpoints to keep, "
            f"but got step={step!r}, keep={keep!r}.\n"
            "Fix: save_checkpoint(folder, target, step, keep=3); keep=0 keeps all."
        ) from error


def _check_step(
    folder: str, path: str, step: Any, prefix: str, overwrite: bool, by_orbax: bool
) -> None:
    if overwrite:
        return
    steps = [_step_of(name, prefix) for name in _checkpoints(folder, prefix)]
    if by_orbax and float(step) in steps:
        raise CheckpointExistsError(
            f"{path} is there already.\n"
            "Fix: save another step, or pass overwrite=True to replace it and later ones."
        )
    if not by_orbax and any(old is not None and old >= float(step) for old in steps):
        raise InvalidCheckpointError(path, step)


def _orbax_writer(path: str, state: Any, overwrite: bool, given: Any) -> Callable[[], None]:
    import orbax.checkpoint as ocp

    checkpointer = given or ocp.PyTreeCheckpointer()

    def write() -> None:
        # A file of the same name is in Orbax's way.
        away = folders.put_away(path) if overwrite and os.path.isfile(path) else ""
        save_args = orbax_utils.save_args_from_target(state)
        try:
            checkpointer.save(_absolute(path), state, save_args=save_args, force=overwrite)
        except BaseException:
            if away and not os.path.lexists(path):
                os.rename(away, path)
            raise
        if away:
            folders.remove_tree(away)

    return write


def _absolute(path: str) -> str:
    """The path as Orbax wants it."""
    return path if _SCHEME.match(path) else os.path.abspath(path)


def _file_writer(path: str, state: Any, step: Any) -> Callable[[], None]:
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise MPACheckpointingRequiredError(path, step)
    data = serialization.msgpack_serialize(state, in_place=True)
    new = path + folders.UNFINISHED_FILE

    def write_first() -> None:
        away = ""
        try:
            write_through(new, data)
            if os.path.isdir(path):  # a file cannot take the place of a folder
                away = folders.put_away(path)
            os.replace(new, path)
            folders.flush_folder(os.path.dirname(path))
        except OSError as error:
            raise folders.write_error(path, error) from error
        if away:
            folders.remove_tree(away)

    return lambda: by_first(write_first)


def _remove_others(
    folder: str, path: str, prefix: str, keep: int, overwrite: bool, every: int | None
) -> None:
    """Removes checkpoints that are not to be kept, and never the one just written."""
    own = os.path.basename(path)
    names = [
        name
        for name in _checkpoints(folder, prefix)
        if name == own or not _is_foreign(os.path.join(folder, name))
    ]
    if own in names and overwrite:
        for name in names[names.index(own) + 1 :]:
            _remove(folder, name)
        names = names[: names.index(own) + 1]
    last_kept = -float("inf")
    for name in names[:-keep] if keep > 0 else []:
        step = _step_of(name, prefix) or 0.0
        # As in Flax, `keep_every_n_steps` does not keep step 0.
        if every and step and step - last_kept >= every:
            last_kept = step
        elif name != own:
            _remove(folder, name)


def _remove_unfinished(folder: str, prefix: str) -> None:
    """Removes files of this prefix that a process was writing when it ended."""
    # Files of another prefix are left: another program may be writing them.
    for name in os.listdir(folder):
        whole = name.removesuffix(folders.UNFINISHED_FILE)
        if whole != name and _step_of(whole, prefix) is not None:
            folders.remove_tree(os.path.join(folder, name))


def _is_foreign(path: str) -> bool:
    """Whether a folder has the name of a checkpoint and holds something else."""
    return os.path.isdir(path) and bool(os.listdir(path)) and not folders.has_orbax_sign(path)


def _remove(folder: str, name: str) -> None:
    folders.remove_tree(folders.put_away(os.path.join(folder, name)))


# ---- restoring ----------------------------------------------------------------------------------


def restore_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    target: Any,
    step: int | float | None = None,
    prefix: str = "checkpoint_",
    parallel: bool = True,
    gda_manager: Any = None,
    allow_partial_mpa_restoration: bool = False,
    orbax_checkpointer: Any = None,
    orbax_transforms: dict[str, Any] | None = None,
) -> Any:
    """Restores a tree from the last checkpoint in a folder, or from that of a step.

    Args:
      ckpt_dir: the folder, or the path of one checkpoint.
      target: a tree like the one that was saved, or a part of it; with None, nested dicts are
        returned. Entries that a checkpoint of Orbax does not have are kept, with a warning.
      step: the step; by default the last one.
      prefix: what names of checkpoints begin with.
      parallel, gda_manager: ignored; accepted because Flax takes it.
      allow_partial_mpa_restoration: arrays that a file leaves to other files, which old programs
        wrote in several processes, are taken from the target.
      orbax_checkpointer: a checkpointer of Orbax that reads the folder.
      orbax_transforms: transformations that Orbax applies to what it reads.

    Returns:
      The tree, or the target itself where there is no checkpoint.

    Raises:
      MissingStepError: there is no checkpoint of that step.
      SerializationError: what was saved does not have the structure of the target.
      MPARestoreTargetRequiredError: the file leaves arrays to other files, and there is no target
        to take them from.
      MPARestoreDataCorruptedError: the file leaves arrays to other files, and
        ``allow_partial_mpa_restoration`` is not set.

    Example:
      >>> from linnet.training import checkpoints
      >>> checkpoints.restore_checkpoint("/nowhere", {"w": 1})
      {'w': 1}
    """
    folder = safe_normpath(os.fspath(ckpt_dir))
    if step is not None:
        path: str | None = os.path.join(folder, f"{prefix}{step}")
        path = folders.find_replacement(path)
        if not os.path.exists(path):
            raise MissingStepError(
                f"Matching checkpoint not found: there is no {path}; {folder} has "
                f"{', '.join(_checkpoints(folder, prefix)) or 'no checkpoint'}.\n"
                "Fix: restore one of those, or leave out step for the last one."
            )
    elif os.path.isfile(folder) or folders.has_orbax_sign(folder):
        path = folder
    else:
        path = latest_checkpoint(folder, prefix)
    if path is None:
        return target
    if os.path.isdir(path):
        return _restore_orbax(path, target, orbax_checkpointer, orbax_transforms)
    with open_to_read(path) as file:
        state = serialization.msgpack_restore(file.readall())
    own = None if target is None else serialization.to_state_dict(target)
    state = _filled(state, own, "", path, step, allow_partial_mpa_restoration)
    return state if target is None else serialization.from_state_dict(target, state)


def _restore_orbax(path: str, target: Any, given: Any, transforms: Any) -> Any:
    import orbax.checkpoint as ocp

    path = _absolute(path)
    options: dict[str, Any] = {}
    if target is not None:
        state = serialization.to_state_dict(target)
        how = jax.tree.map(_as_stored, state, orbax_utils.restore_args_from_target(state))
        changes = orbax_utils.maybe_construct_transformations(state, transforms)
        options = {"item": state, "restore_args": how}
        if changes or transforms is not None or not _is_whole(path, state):
            # With transformations, even none, Orbax reads what the target has, and keeps the rest.
            options["transforms"] = changes
    with warnings.catch_warnings():
        # Where no sharding is given, the one that was saved counts.
        warnings.filterwarnings("ignore", message="Sharding info not provided")
        try:
            restored = (given or ocp.PyTreeCheckpointer()).restore(path, **options)
        except Exception as error:
            error.add_note(f"Raised while Orbax read the checkpoint {path}.")
            raise
    return restored if target is None else serialization.from_state_dict(target, restored)


def _as_stored(leaf: Any, how: Any) -> Any:
    """For a Python number, which says nothing of the stored value, no type to restore."""
    return type(how)() if isinstance(leaf, int | float | complex) else how


def _is_whole(path: str, state: Any) -> bool:
    """Whether target and checkpoint have the same entries; warns of those of the target alone."""
    if not isinstance(state, dict):
        return True
    wanted = {keys for keys, x in traverse_util.flatten_dict(state).items() if x is not None}
    stored = set(describe(path))
    kept = sorted(wanted - stored)
    if kept:
        names = name_some(map("/".join, kept), 5, " and others")
        warnings.warn(
            f"{path} has no {names}: the values of the target are kept.\n"
            "Fix: restore into a target with the names that were saved, or give orbax_transforms.",
            stacklevel=outer_level(),
        )
    return wanted == stored


def _filled(node: Any, like: Any, key: str, path: str, step: Any, from_target: bool) -> Any:
    """A state in which placeholders for arrays of other files are the target's arrays."""
    if isinstance(node, dict):
        inner = like if isinstance(like, Mapping) else {}
        return {
            k: _filled(child, inner.get(k), f"{key}/{k}", path, step, from_target)
            for k, child in node.items()
        }
    if not isinstance(node, str) or not node.startswith(_PLACEHOLDER):
        return node
    if like is None:
        raise MPARestoreTargetRequiredError(path, step, key)
    if not from_target:
        raise MPARestoreDataCorruptedError(step, path)
    return like


# ---- parameters saved before Linen --------------------------------------------------------------


def convert_pre_linen(params: Any) -> Any:
    """Renumbers parameters that were saved before Linen: the modules of each class from 0 on.

    Args:
      params: nested dicts of parameters.

    Returns:
      Nested dicts with the names that Linen gives.

    Example:
      >>> from linnet.training import checkpoints
      >>> checkpoints.convert_pre_linen({"Conv_0": 1, "Dense_1": 2, "Conv_2": 3})
      {'Conv_0': 1, 'Conv_1': 3, 'Dense_0': 2}
    """
    if not isinstance(params, Mapping):
        return params
    counts: dict[str, int] = {}
    renamed = {}
    for name in natural_sort(params):
        class_name, mark, number = name.rpartition("_")
        new = name
        if mark and number.isdecimal():
            new = f"{class_name}_{counts.setdefault(class_name, 0)}"
            counts[class_name] += 1
        renamed[new] = convert_pre_linen(params[name])
    return renamed
