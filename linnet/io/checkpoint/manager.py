"""Manager: the checkpoints of one run, saved in the background, with the last and the best kept."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from linnet.errors import (
    CheckpointArgumentError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    NotACheckpointError,
    misfit_text,
)
from linnet.io.checkpoint import manifest, orbax, sources
from linnet.io.checkpoint.restoring import restore_from
from linnet.io.checkpoint.saving import Saving, items_to_save
from linnet.io.shared import folders
from linnet.io.shared.entries import is_count, text_of
from linnet.io.shared.matching import Rename
from linnet.io.shared.objects import Restored, contents_of, items_of_call
from linnet.io.shared.processes import agree, are_several, by_first, in_all

# Managers with a save under way. Held here, they finish it even if the program drops them.
_busy: dict[Manager, None] = {}


def _finish_all() -> None:
    for manager in list(_busy):
        try:
            manager._leave()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)


# A program may end without closing its manager. Threads can be started until these functions have
# run and not after, so ``atexit`` would be too late for Orbax.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)


@functools.cache
def _turn_of(folder: str) -> Any:
    """The lock that threads of this process hold while they save to a folder."""
    return threading.RLock()


class Manager:
    """Keeps the checkpoints of a run in one folder, each in a folder named by its step.

    ``save`` returns when the arrays are copied; writing goes on in the background. A process may
    end at any moment: what is there under its own name is whole. Threads may share a Manager.

    Of several processes (``jax.distributed``) each makes a Manager of the same folder, on a file
    system that they share, and all call each of its methods, in the same order. Each writes its own
    shards; the first one does the rest, and says which steps there are. An error in one of them is
    raised in all.

    Args:
      folder: the folder of the run; it is made when first saved to.
      keep_last: how many of those saved last to keep; None keeps all. Of those from before this
        Manager was made, the ones with the highest steps count as saved last.
      keep_best: how many of those with the best score to keep besides.
      best: which score is the best, ``"min"`` or ``"max"``.
      background: save in the background; otherwise ``save`` returns when all is on the disk.

    Raises:
      CheckpointArgumentError: ``keep_last`` or ``keep_best`` is no such number, or ``best`` is
        neither of the two.

    Example:
      >>> import tempfile
      >>> from linnet import io, nnx
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> with io.Manager(tempfile.mkdtemp(), keep_last=2, keep_best=1) as manager:
      ...     for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
      ...         manager.save(step, model=model, score=loss)
      ...     manager.wait()
      ...     manager.steps(), manager.latest(), manager.best()
      ([1, 2, 3], 3, 1)
      >>> manager.restore(model=model).step
      3
    """

    def __init__(
        self,
        folder: Any,
        *,
        keep_last: int | None = 3,
        keep_best: int = 0,
        best: str = "min",
        background: bool = True,
    ):
        keeps = (keep_last is None or is_count(keep_last, least=1)) and is_count(keep_best)
        if not keeps or best not in ("min", "max"):
            raise CheckpointArgumentError(
                "Manager keeps at least the last checkpoint, and best is 'min' or 'max', but got "
                f"keep_last={keep_last!r}, keep_best={keep_best!r}, best={best!r}.\n"
                "Fix: io.Manager(folder, keep_last=3, keep_best=1, best='min')."
            )
        self.folder = folders.local_path(folder)
        self.keep_last, self.keep_best, self.best_is = keep_last, keep_best, best
        self.background = background
        self._turn = _turn_of(self.folder)
        self._lock = contextlib.ExitStack()
        self._is_locked = False
        self._writer: orbax.Writer | None = None
        self._saving: tuple[int, float | None] | None = None
        self._removal: threading.Thread | None = None
        self._kept: dict[int, float | None] | None = None  # scores by step, from the first save on
        weakref.finalize(self, self._lock.close)

    # ---- saving ---------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        items: Mapping[str, Any] | None = None,
        *,
        score: Any = None,
        overwrite: bool = False,
        **named: Any,
    ) -> None:
        """Saves items under a step; ``step`` itself is saved with them.

        A save to this folder that is still going on, also of another Manager, is waited for first,
        and its error is raised here. What has just been saved is kept, whatever its number: a run
        may go back to an earlier step.

        Args:
          step: the number of the step.
          items: what to save, by name.
          score: a number that says how good the model is.
          overwrite: replace the checkpoint of that step, if there is one.
          **named: more items, as for ``linnet.io.save``.

        Raises:
          CheckpointExistsError: there is a checkpoint of that step.
          CheckpointWriteError: this or the last checkpoint could not be written; the newest whole
            one is named.
          CheckpointBusyError: another process saves to this folder.
          UnstorableError: an item holds something that cannot be saved; its path is named.
          CheckpointArgumentError: the step is no whole number, or the score no number.
          ProcessMismatchError: the processes save different things, or different steps; they are
            listed.
        """
        step = _step(step)
        try:
            score = None if score is None else float(score)
        except (TypeError, ValueError) as error:
            raise CheckpointArgumentError(
                f"A score is one number, but got {score!r}.\nFix: score=float(loss)."
            ) from error
        with self._turn:
            saving = in_all(lambda: Saving(items_to_save(items, named), step, score))
            saving.check_processes()
            for manager in [*_busy]:
                if manager.folder == self.folder:
                    manager._finish()
            path = by_first(lambda: self._prepare(step, saving.nbytes, overwrite))
            writer = self._writer = self._writer or orbax.Writer()
            self._saving = (step, score)
            _busy[self] = None
            try:
                in_all(lambda: writer.start(path, saving.tree, saving.finish))
            except Exception as error:
                self._fail(error)
            if not self.background:
                self.wait()

    def _prepare(self, step: int, nbytes: int, overwrite: bool) -> str:
        """Makes room for the checkpoint of a step; returns the path to write it to."""
        path = self._path(step)
        last_good = lambda: sources.last_whole(self.folder)  # noqa: E731
        folders.prepare(path, nbytes, overwrite=overwrite, last_good=last_good)
        if not self._is_locked:
            lock = os.path.join(self.folder, folders.LOCK)
            self._lock.enter_context(folders.locked(lock, self.folder, shared=True))
            self._is_locked = True
        if self._kept is None:
            folders.remove_leftovers(self.folder)
            self._kept = self._scores()
        return path + folders.REPLACEMENT if overwrite and os.path.lexists(path) else path

    def wait(self) -> None:
        """Waits until the last checkpoint is on the disk, and removes those that are not kept.

        Raises:
          CheckpointWriteError: it could not be written; the newest whole one is named.
        """
        with self._turn:
            self._finish()
            if self._removal is not None:
                self._removal.join()

    def _finish(self) -> None:
        """Waits for the last save; what is not kept is put away, and removed in the background."""
        if self._writer is None or self._saving is None:
            return
        try:
            in_all(self._writer.wait)
        except Exception as error:
            self._fail(error)
        step, score = self._saving
        self._done()
        by_first(lambda: self._settle(step, score))

    def _settle(self, step: int, score: float | None) -> None:
        path = self._path(step)
        new = path + folders.REPLACEMENT
        folders.replace(new if os.path.lexists(new) else path, path)
        assert self._kept is not None
        self._kept.pop(step, None)  # becomes the newest
        self._kept[step] = score
        self._remove_old(self._kept)

    def _fail(self, error: Exception) -> NoReturn:
        """Cleans up after a save that went wrong, and says what there still is."""
        assert self._writer is not None and self._saving is not None
        path = self._path(self._saving[0])
        self._done()
        self._writer.abandon()
        self._writer = None  # its threads may still be busy; the next save gets a new one
        if isinstance(error, CheckpointWriteError):
            raise error
        raise folders.write_error(path, error, sources.last_whole(self.folder)) from error

    def _done(self) -> None:
        self._saving = None
        _busy.pop(self, None)

    def _remove_old(self, scores: dict[int, float | None]) -> None:
        if self.keep_last is None:
            return
        kept = {*list(scores)[-self.keep_last :], *self._ranked(scores)[: self.keep_best]}
        away = []
        for step in [step for step in scores if step not in kept]:
            del scores[step]
            with contextlib.suppress(FileNotFoundError):
                away.append(folders.put_away(self._path(step)))
        if away:
            remove = lambda: [folders.remove_tree(path) for path in away]  # noqa: E731
            self._removal = threading.Thread(target=remove)
            self._removal.start()

    # ---- looking --------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of all checkpoints that look whole."""
        return by_first(lambda: sorted(self._whole()))

    def latest(self) -> int | None:
        """The highest step whose checkpoint looks whole, or None.

        Damaged higher ones are named in a warning.
        """
        whole, numbered = by_first(lambda: [sorted(self._whole()), sorted(self._numbered())])
        newest = max(whole, default=None)
        for step in sorted({*numbered} - {*whole}, reverse=True):
            if newest is None or step > newest:
                _warn(self._path(step), "its files are not what was written", newest)
        return newest

    def best(self) -> int | None:
        """The step with the best score, or None where none was given."""
        return by_first(lambda: next(iter(self._ranked(self._scores())), None))

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, str(step))

    def _numbered(self) -> set[int]:
        return _steps_among(folders.checkpoint_names(self.folder))

    def _whole(self) -> set[int]:
        return _steps_among(sources.whole_checkpoints(self.folder))

    def _scores(self) -> dict[int, float | None]:
        """The scores of Linnet's own checkpoints, in the order of their steps."""
        paths = {step: folders.find_replacement(self._path(step)) for step in sorted(self._whole())}
        ours = {step: path for step, path in paths.items() if manifest.is_in(path)}
        return {step: manifest.read(path).score for step, path in ours.items()}

    def _ranked(self, scores: Mapping[int, float | None]) -> list[int]:
        """Steps from the best score to the worst; of equal ones the newer is better."""
        sign = 1 if self.best_is == "min" else -1
        known = {s: x for s, x in scores.items() if x is not None and not math.isnan(x)}
        return sorted(known, key=lambda step: (sign * known[step], -step))

    # ---- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        items: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        rename: Rename | None = None,
        verify: bool = True,
        **named: Any,
    ) -> Restored:
        """Restores the whole checkpoint of the highest step, or that of one step.

        Args:
          step: the step; without it the highest, and where that is damaged the next lower one, with
            a warning that names the damaged one.
          items: what to restore into, by name.
          strict, rename, verify: as for ``linnet.io.restore``.
          **named: more items.

        Returns:
          The items, as from ``linnet.io.restore``; the step is among them.

        Raises:
          CheckpointNotFoundError: there is no checkpoint, or none of that step.
          DamagedCheckpointError: that of the step, or every one there is, is damaged.
          CheckpointMismatchError: it holds something else; every entry is listed, and nothing was
            changed.
          ProcessMismatchError: the processes ask for different steps, or for different entries.
        """
        asked = None if step is None else _step(step)
        wanted = items_of_call(items, named, "manager.restore(model=model)")
        self.wait()
        agree(
            "The processes of this run do not restore the same",
            lambda: {"step": str(asked), **_types_of(wanted)},
            "name the same step, and build the same model, in all processes.",
        )
        # One process compares the checksums and chooses the step, whatever the others can see.
        step, damaged = by_first(lambda: self._choose(asked, verify))
        for bad, text in damaged:
            _warn(self._path(bad), text, step)

        def read() -> Restored:
            source = sources.open_checkpoint(self._path(step), verify=False)
            return restore_from(source, wanted, strict=strict, rename=rename)

        restored = in_all(read)
        restored.setdefault("step", step)
        return restored

    def _choose(self, asked: int | None, verify: bool) -> tuple[int, list[tuple[int, str]]]:
        """The step to restore, and newer ones that are damaged, with what is wrong."""
        if asked is None:
            return self._newest(verify)
        if asked not in self._numbered():
            there = ", ".join(map(str, sorted(self._whole()))) or "none"
            raise CheckpointNotFoundError(
                f"There is no checkpoint of step {asked} in {self.folder}; there are {there}.\n"
                "Fix: name one of these, or none to get the newest."
            )
        sources.open_checkpoint(self._path(asked), verify=verify)
        return asked, []

    def _newest(self, verify: bool) -> tuple[int, list[tuple[int, str]]]:
        damaged: dict[int, str] = {}
        for step in sorted(self._numbered(), reverse=True):
            try:
                sources.open_checkpoint(self._path(step), verify=verify)
            except (DamagedCheckpointError, NotACheckpointError) as error:
                damaged[step] = str(error).splitlines()[0]
                continue
            return step, list(damaged.items())
        if damaged:
            lists = {f"Every checkpoint in {self.folder} is damaged": damaged.values()}
            fix = "start again, or restore from a copy."
            raise DamagedCheckpointError(misfit_text(lists, fix=fix, most=len(damaged)))
        raise CheckpointNotFoundError(
            f"There is no checkpoint in {self.folder}.\n"
            "Fix: ask with manager.latest() first, which is None before the first save."
        )

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the last save, and lets other processes save to the folder."""
        with self._turn:
            try:
                self.wait()
            finally:
                self._release()

    def _leave(self) -> None:
        """Closes without waiting for other processes, as this one may have failed alone."""
        if not are_several():
            self.close()
            return
        # Orbax's threads finish the save with those of the other processes. Old checkpoints are
        # removed after the next save.
        self._done()
        self._release()

    def _release(self) -> None:
        """Closes the writer, and gives up the lock of the folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._lock.close()
        self._is_locked = False

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *error: Any) -> None:
        if error and error[0] is not None:
            self._leave()
        else:
            self.close()


def _steps_among(names: Iterable[str]) -> set[int]:
    return {int(name) for name in names if name.isascii() and name.isdecimal()}


def _types_of(wanted: Mapping[str, Any]) -> dict[str, str]:
    specs = contents_of(wanted, with_positions=False).specs()
    return {text_of(path): str(spec) for path, spec in specs.items()}


def _step(step: Any) -> int:
    is_one = hasattr(step, "__index__") and type(step) is not bool and np.shape(step) == ()
    if not is_one or int(step) < 0:
        got = repr(step) if isinstance(step, int | float | str) else f"a {type(step).__name__}"
        raise CheckpointArgumentError(
            f"A step is a whole number from 0 on, but got {got}.\n"
            "Fix: manager.save(step, model=model), manager.restore(step, model=model)."
        )
    return int(step)


def _warn(path: str, reason: str, instead: int | None) -> None:
    other = f"; step {instead} is used instead" if instead is not None else ""
    warnings.warn(
        f"{path} is damaged and passed over{other}: {reason}",
        DamagedCheckpointWarning,
        stacklevel=3,
    )
