"""The folders that checkpoints live in: free space and permissions, renames, leftovers, locks.

A checkpoint is written to a temporary folder beside its own, which is renamed when all of it is on
the disk, and it is removed by renaming it away first. So a folder under its own name is complete,
whatever process was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from linnet.errors import (
    CheckpointArgumentError,
    CheckpointBusyError,
    CheckpointExistsError,
    CheckpointWriteError,
)
from linnet.io.shared.files import flush_path

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl: Any = None

MANIFEST = "linnet.json"  # the file that a checkpoint of linnet.io has
# Files of Orbax: what it says of a tree, of the sharding of its arrays, and of a whole checkpoint.
ORBAX_TREE = "_METADATA"
ORBAX_SHARDING = "_sharding"
ORBAX_CHECKPOINT = "_CHECKPOINT_METADATA"
_ORBAX_SIGNS = (ORBAX_TREE, "manifest.ocdbt", ORBAX_CHECKPOINT, "checkpoint")
UNFINISHED = ".orbax-checkpoint-tmp"
UNFINISHED_FILE = ".linnet-tmp"  # of a checkpoint that is one file
REPLACEMENT = ".linnet-new"
REMOVED = ".linnet-removed"
LOCK = ".linnet-lock"

_HINTS = {
    errno.ENOSPC: "make room on the disk, or save somewhere else",
    errno.EDQUOT: "make room in your quota, or save somewhere else",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EEXIST: "name a folder; a part of the path is a file",
    errno.ENOTDIR: "name a folder; a part of the path is a file",
    errno.EROFS: "save to a folder that can be written to",
    errno.EACCES: "save to a folder that you may write to, or change its permissions",
    errno.EPERM: "save to a folder that you may write to, or change its permissions",
}
# What systems answer that open or flush files alone.
_NO_FLUSH_OF_FOLDERS = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
}


def local_path(path: Any) -> str:
    """The absolute path of a folder, refused if it is not one of a file system."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)):
        raise CheckpointArgumentError(
            f"A checkpoint is a folder, whose path is text or a pathlib.Path, but got {path!r}.\n"
            "Fix: io.save('runs/first', model=model)."
        )
    if isinstance(text, bytes) or "://" in text:
        raise CheckpointWriteError(
            f"Checkpoints are folders of a file system, but got {text!r}.\n"
            "Fix: mount the bucket, or copy the folder to it or from it."
        )
    return os.path.abspath(os.path.expanduser(text))


def is_leftover(name: str) -> bool:
    """Whether what has that name was being written or removed when a process ended."""
    return UNFINISHED in name or name.endswith((UNFINISHED_FILE, REPLACEMENT, REMOVED))


def has_orbax_sign(folder: str) -> bool:
    """Whether a folder has a file by which checkpoints of Orbax are recognized."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in _ORBAX_SIGNS)


def write_error(path: str, error: BaseException, last_good: str = "") -> CheckpointWriteError:
    """The error for a checkpoint that could not be written; names the last good one."""
    number = _error_number(error)
    reason = os.strerror(number) if number else f"{type(error).__name__}: {error}"
    hint = _HINTS.get(number or 0, "see the error above")
    kept = f"The last checkpoint, {last_good}, is as it was.\n" if last_good else ""
    text = f"The checkpoint {path} could not be written: {reason}.\n{kept}Fix: {hint}."
    return CheckpointWriteError(number, text)


def _error_number(error: BaseException | None) -> int | None:
    """The ``errno`` of an error, read from its text where Orbax has passed on only the text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        text = str(error)
        for number in _HINTS:
            if os.strerror(number) in text or f"OS error {number}:" in text:
                return number
        error = error.__cause__ or error.__context__
    return None


def prepare(
    path: str,
    nbytes: int,
    *,
    overwrite: bool,
    last_good: Callable[[], str] = str,
    is_checkpoint: bool = True,
) -> None:
    """Makes sure that a checkpoint of ``nbytes`` can be written, before anything is."""
    # `last_good` finds the newest whole checkpoint, to be named in an error. A checkpoint replaces
    # nothing but a checkpoint; for weights and exports the caller has looked at what is there.
    if is_checkpoint and not _may_be_replaced(path):
        raise CheckpointExistsError(
            f"{path} is there already, and is not a checkpoint: it is not replaced.\n"
            "Fix: save under another name, or remove it yourself."
        )
    if os.path.lexists(path) and not overwrite:
        raise CheckpointExistsError(
            f"{path} is there already.\n"
            "Fix: save under another name, or pass overwrite=True to replace it."
        )
    parent = os.path.dirname(path)
    try:
        _make_folders(parent)
        trial = os.path.join(parent, f".linnet-trial-{os.getpid()}-{threading.get_ident()}")
        os.mkdir(trial)
        os.rmdir(trial)
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise write_error(path, error, last_good()) from error
    if free < nbytes:
        lack = OSError(
            errno.ENOSPC, f"{nbytes / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free"
        )
        raise write_error(path, lack, last_good()) from lack


def _make_folders(path: str) -> None:
    """Makes a folder and those above it, and flushes the ones that got a new entry."""
    above = os.path.dirname(path)
    if os.path.isdir(path) or above == path:
        return
    _make_folders(above)
    os.makedirs(path, exist_ok=True)
    flush_folder(above)


def _may_be_replaced(path: str) -> bool:
    """Whether nothing, an empty folder or a checkpoint, whole or not, is there."""
    if not os.path.lexists(path):
        return True
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    return not names or MANIFEST in names or has_orbax_sign(path)


def replace(new: str, path: str) -> None:
    """Renames a finished folder to its final name, in place of an older one if there is one."""
    away = ""
    try:
        if new != path:
            # For a moment neither has the final name; `find_replacement` finds the new one then.
            away = put_away(path) if os.path.lexists(path) else ""
            os.rename(new, path)
        flush_folder(os.path.dirname(path))
    except OSError as error:
        raise write_error(path, error) from error
    if away:
        remove_tree(away)


def settle_replacement(path: str) -> None:
    """Finishes the replacement of a folder by a process that ended in the middle of it."""
    new = path + REPLACEMENT
    if find_replacement(path) == new:
        os.rename(new, path)
    for leftover in (new, path + REMOVED, new + UNFINISHED, path + UNFINISHED):
        remove_tree(leftover)


def find_replacement(path: str) -> str:
    """The path or, where a process ended while replacing it, the path of the replacement."""
    new = path + REPLACEMENT
    return new if not os.path.lexists(path) and os.path.isdir(new) else path


def checkpoint_names(folder: str) -> set[str]:
    """The names in a folder, without leftovers; a replacement has the name it is about to get."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return set()
    new = {name.removesuffix(REPLACEMENT) for name in names if name.endswith(REPLACEMENT)}
    return {name for name in names | new if not is_leftover(name)}


def put_away(path: str) -> str:
    """Renames a checkpoint that is to be removed: a half-removed one never has a valid name."""
    away = path + REMOVED
    remove_tree(away)
    os.rename(path, away)
    return away


def remove_leftovers(folder: str) -> None:
    """Removes what ended processes left in a folder."""
    for name in filter(is_leftover, os.listdir(folder)):
        path = os.path.join(folder, name)
        original = path.removesuffix(REPLACEMENT)
        if name.endswith(REPLACEMENT) and not os.path.lexists(original):
            os.rename(path, original)
        else:
            remove_tree(path)


def remove_tree(path: str) -> None:
    """Removes a folder or file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def flush_folder(folder: str) -> None:
    """Makes renames in a folder last through a loss of power, where its file system can."""
    try:
        flush_path(folder)
    except OSError as error:
        if error.errno not in _NO_FLUSH_OF_FOLDERS:
            raise


@dataclasses.dataclass
class _Held:
    """A lock file that this process has locked."""

    descriptor: int
    holders: int = 0


_held: dict[str, _Held] = {}  # by the path of the lock file
_guard = threading.Lock()


@contextlib.contextmanager
def locked(path: str, what: str, *, shared: bool = False) -> Iterator[None]:
    """Keeps other processes from saving to ``what`` by a lock file at ``path``."""
    # The system lifts the lock when this process ends. With `shared`, other threads of this process
    # may hold it as well.
    if fcntl is None:
        yield
        return
    with _guard:
        if path not in _held:
            _held[path] = _Held(_lock_file(path, what))
        elif not shared:
            _refuse_busy(what, "another thread of this process")
        held = _held[path]
        held.holders += 1
    try:
        yield
    finally:
        with _guard:
            held.holders -= 1
            if not held.holders:
                del _held[path]
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                os.close(held.descriptor)


def _lock_file(path: str, what: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise write_error(what, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            _refuse_busy(what, f"another process ({owner or 'unknown'})", error)
        with contextlib.suppress(FileNotFoundError):
            # Whoever had it may have removed the file in between.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        os.close(descriptor)


def _refuse_busy(what: str, who: str, error: OSError | None = None) -> NoReturn:
    raise CheckpointBusyError(
        f"{what} is being saved to by {who}.\n"
        "Fix: give each run a folder of its own, or end the other one first."
    ) from error
