"""Loop: gives batches to a training step, shows its progress and records what is logged.

The step stays the user's own function. Batches are copied to the device ahead of time, and logged
arrays are read when they are ready, so that the loop waits for the device only when many logged
steps are unread. Loops of several processes stop together; ``agreement`` tells how.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import itertools
import operator
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from linnet.errors import DataError, RecordError, ShapeChangeWarning, name_some, type_text
from linnet.io.shared.entries import is_count
from linnet.io.shared.objects import position_methods
from linnet.io.shared.processes import are_several
from linnet.training.agreement import Agreement, first_reason
from linnet.training.batches import Shapes, gives_batches, put_on_device, source_text
from linnet.training.displays import Display, Silence, make_display
from linnet.training.records import FIXED, Records

_SECONDS_BETWEEN_REFRESHES = 0.2
_MOST_PENDING = 64
_MANY_SHAPES = 8

B = TypeVar("B")  # a batch


class _Position(NamedTuple):
    """How far the batches were read."""

    epoch: int
    batch: int  # the number of the last batch that was read, from 1 on in each epoch
    source_state: Any = None


class _Placed(NamedTuple):
    """A batch on its device."""

    batch: Any
    shapes: Shapes
    position: _Position


class Loop(Generic[B]):
    """Gives batches to a training step, shows progress and records metrics.

    Args:
      batches: any iterable of batches (a list, a Grain or PyTorch loader, a generator), or a
        function that gives one for the number of an epoch, counted from 0.
      epochs: how often to go through them. Without ``steps``, 1.
      steps: stop after this many steps.
      folder: where ``metrics.csv`` is written; nothing is written without it. A run that begins
        anew keeps that of an earlier one as ``metrics.previous.csv``.
      tensorboard: write event files for TensorBoard there too; needs tensorboardX.
      ahead: how many batches are put on the device ahead of time.
      device: a device or a sharding for them, as for ``jax.device_put``. With a sharding over the
        devices of several processes, each gives its own part of the batch, as for
        ``jax.make_array_from_process_local_data``.
      show: ``"bar"``, ``"lines"``, ``"nothing"``, or ``"auto"``: a bar on a terminal, else lines.
      title: what is shown before the bar.

    Attributes:
      step: how many batches were handed out, this one included.
      epoch: the number of the current epoch, counted from 0.
      stopped: why the loop ended early (``"SIGINT"``, ``"SIGTERM"``, what ``stop`` was given), or
        None.

    With several processes (``jax.distributed``) each makes a loop, and all take the same number of
    steps. The first one shows the progress and writes the records. When one is asked to stop, by a
    signal or ``stop``, all leave after the same step, one or two later, with the same ``stopped``.

    Raises:
      DataError: there are no batches, they are not iterable, a run that is continued had more, one
        process has fewer than another, integers of 64 bits do not fit into the 32 that JAX has,
        ``epochs``, ``steps`` or ``ahead`` is no count, or ``device`` is neither a device nor a
        sharding. What is wrong with a batch is raised when its turn comes, after the batches before
        it.
      ProcessMismatchError: processes are at different steps.
      MissingPackageError: event files are asked for and tensorboardX is not installed.
      ValueError: ``show`` is none of its values.

    Example:
      >>> from linnet.training import Loop
      >>> total = 0
      >>> with Loop([1, 2, 3], epochs=2, show="nothing") as loop:
      ...     for batch in loop:
      ...         total += batch
      ...         loop.log(total=total)
      >>> int(total), loop.step, loop.last["total"]
      (12, 6, 12.0)
    """

    def __init__(
        self,
        batches: Iterable[B] | Callable[[int], Iterable[B]],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        folder: str | Path | None = None,
        tensorboard: bool = False,
        ahead: int = 2,
        device: Any = None,
        show: str = "auto",
        title: str = "training",
    ):
        _check_arguments(batches, epochs, steps, ahead, device)
        self._batches = batches
        self._epochs = 1 if epochs is None and steps is None else epochs
        self._steps = steps
        self._ahead = ahead
        self._device = device
        self.step = 0
        self.epoch = 0
        self.stopped: str | None = None
        self._in_epoch = 0
        self._source_state: Any = None
        # An iterator without a position can be read once. `_read` is how far it was.
        self._is_one_pass = isinstance(batches, Iterator) and not position_methods(batches)
        self._read: _Position | None = None
        self._waiting: collections.deque[_Placed] = collections.deque()  # what was read ahead
        self._failure: Exception | None = None
        self._is_left = False  # whether it was iterated over, and not told to stop since
        self._is_moved = False  # whether another position was set since the last batch
        self._asked: str | None = None  # a reason to stop that other processes have yet to hear
        self._total = self._count_steps()
        self._agreement = Agreement() if are_several() else None
        is_first = jax.process_index() == 0
        total = self._total
        self._display = make_display(show, title, total) if is_first else Silence(title, total)
        self._records = Records(folder, tensorboard) if is_first else Records(None)
        self._pending: collections.deque[Any] = collections.deque()
        self._refreshed = 0.0
        self._shapes: set[Shapes] = set()
        # What was logged is written also if the loop is left by an error and never closed.
        self._finish = weakref.finalize(self, _finish, self._pending, self._records, self._display)
        if tensorboard:  # tensorboardX closes its files at exit: finish before that
            atexit.register(self._finish)

    def _count_steps(self) -> int | None:
        if isinstance(self._batches, Sized) and self._epochs is not None:
            # A loader over a stream may have a length that only raises.
            with contextlib.suppress(TypeError, NotImplementedError):
                total = len(self._batches) * self._epochs
                return total if self._steps is None else min(total, self._steps)
        return self._steps

    # ---- batches --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[B]:
        self._display.start(self.step)
        self._is_moved = False
        if self._is_left:  # an earlier reason to stop no longer counts
            self.stopped = self._asked = None
        self._is_left = False
        self._records.begin()
        with Interrupts(self._interrupted):
            try:
                ahead = self._look_ahead()
                while self.stopped is None and (found := next(ahead, None)) is not None:
                    (batch, shapes, position), has_next = found
                    if self._agreement is not None:
                        if self._agreement.hear():
                            self.stopped = first_reason(self._asked)
                        else:
                            self._agreement.tell(self.step + 1, has_next, self._asked is not None)
                    self.step += 1
                    self.epoch, self._in_epoch, self._source_state = position
                    if shapes not in self._shapes:
                        self._notice_shapes(shapes)
                    yield batch
                    now = time.monotonic()
                    if now - self._refreshed > _SECONDS_BETWEEN_REFRESHES:
                        self._refreshed = now
                        self._drain(wait=False)
                        self._display.show(self.step, self._records.last)
                    if self.step == self._steps:
                        break
                    if self._is_moved:
                        self._is_moved = False
                        ahead = self._look_ahead()
                if self._agreement is not None:
                    self._agreement.hear()
                    self.stopped = self.stopped or first_reason(self._asked)
            finally:
                self._is_left = True
                if not self._is_one_pass:
                    self._forget_ahead()
                self.close()

    def _look_ahead(self) -> Iterator[tuple[_Placed, bool]]:
        """Yields batches with their positions, and whether there is another one.

        Up to ``ahead`` more are being copied to the device. An error is raised when its turn comes,
        after the batches before it.
        """
        ahead = self._ahead if self._agreement is None else max(self._ahead, 1)
        waiting = self._waiting
        try:
            for batch in self._on_device() if self._failure is None else ():
                waiting.append(batch)
                if len(waiting) > ahead:
                    yield waiting.popleft(), bool(waiting)
        except Exception as error:
            self._failure = error
        while waiting:
            yield waiting.popleft(), bool(waiting)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _forget_ahead(self) -> None:
        self._waiting.clear()
        self._read = self._failure = None

    def _on_device(self) -> Iterator[_Placed]:
        taken = self.step + len(self._waiting)
        left = None if self._steps is None else max(self._steps - taken, 0)
        for batch, position in itertools.islice(self._all_batches(), left):
            try:
                placed, shapes = put_on_device(batch, self._device)
            except Exception as error:
                error.add_note(f"Raised for batch {position.batch} of epoch {position.epoch}.")
                raise
            yield _Placed(placed, shapes, position)

    def _all_batches(self) -> Iterator[tuple[Any, _Position]]:
        """Yields each remaining batch with its position."""
        start = self._read or _Position(self.epoch, self._in_epoch)
        state = self._source_state
        for epoch in itertools.count(start.epoch):
            if self._epochs is not None and epoch >= self._epochs:
                return
            source = self._source_of(epoch)
            iterator = iter(source)
            methods = position_methods(iterator) or position_methods(source)
            used = number = start.batch if epoch == start.epoch else 0
            if used and state is not None and methods is not None:
                methods.write(state)
            elif self._read is None:
                self._skip(iterator, used, epoch)
            for number, batch in enumerate(iterator, used + 1):
                if self._is_one_pass:
                    self._read = _Position(epoch, number)
                yield batch, _Position(epoch, number, methods and methods.read())
            if number == 0:
                self._refuse_empty(epoch)

    def _source_of(self, epoch: int) -> Any:
        if not callable(self._batches):
            return self._batches
        try:
            source = self._batches(epoch)
        except TypeError as error:
            error.add_note(
                f"Raised by the {type(self._batches).__name__} given to the loop, which is called "
                f"with the number of an epoch, {epoch}.\n"
                "Fix: Loop(lambda epoch: make_batches(epoch), ...)."
            )
            raise
        if not gives_batches(source):
            raise DataError(
                f"The {type(self._batches).__name__} given to the loop has to return an iterable "
                f"of batches, but for epoch {epoch} it returned {source_text(source)}.\n"
                "Fix: return a list, a loader or an iterator."
            )
        return source

    def _skip(self, iterator: Iterator[Any], used: int, epoch: int) -> None:
        """Takes the batches from an iterator that were used before the loop was continued."""
        found = sum(1 for _ in itertools.islice(iterator, used))
        if found < used:
            raise DataError(
                f"The loop continues after step {self.step}, batch {used} of epoch {epoch}, but "
                f"the {type(self._batches).__name__} given to it has {found} batches there.\n"
                "Fix: give it the batches that the run began with, or begin a new run, without "
                "set_state."
            )

    def _refuse_empty(self, epoch: int) -> None:
        if epoch == 0:
            raise DataError(
                f"The batches given to the loop ({type(self._batches).__name__}) are empty.\n"
                "Fix: look at what makes them; a loader that drops its last, incomplete batch "
                "gives nothing if the data set is smaller than a batch."
            )
        if callable(self._batches):
            raise DataError(
                f"Epoch {epoch} has no batches: what the {type(self._batches).__name__} given to "
                "the loop returns for it is empty, or was used up before.\n"
                "Fix: make a new iterator in each call: Loop(lambda epoch: iter(batches), ...)."
            )
        raise DataError(
            f"Epoch {epoch} has no batches: the {type(self._batches).__name__} given to the loop "
            "was used up before.\n"
            "Fix: pass a list or a loader, which can be gone through again, or a function that "
            "gives the batches of an epoch: Loop(lambda epoch: make_batches(epoch), ...)."
        )

    def _notice_shapes(self, shapes: Shapes) -> None:
        if len(self._shapes) >= _MANY_SHAPES:
            return
        self._shapes.add(shapes)
        if len(self._shapes) == _MANY_SHAPES and self.step < 2 * _MANY_SHAPES:
            examples = "; ".join(str(shapes) for shapes in itertools.islice(self._shapes, 3))
            warnings.warn(
                f"The first {self.step} batches have {_MANY_SHAPES} different shapes, such as "
                f"{examples}. A jitted step compiles again for each.\n"
                "Fix: pad to a few sizes, or drop the last, incomplete batch.",
                ShapeChangeWarning,
                stacklevel=4,
            )

    # ---- what happens in a step -----------------------------------------------------------------

    def log(self, /, **metrics: Any) -> None:
        """Records numbers of this step, without waiting for them.

        Args:
          **metrics: scalars by name; arrays that are still being computed are read later.

        Raises:
          RecordError: one of them is not a single real number, or has the name of a column that
            the loop writes itself. Nothing is recorded then.
        """
        for name, value in metrics.items():
            if name in FIXED:
                raise RecordError(
                    f"loop.log({name}=...) has the name of a column that the loop writes itself; "
                    f"these are {', '.join(FIXED)}.\n"
                    f"Fix: give it another name, such as my_{name}."
                )
            if isinstance(value, (int, float)):
                continue
            if getattr(value, "shape", None) != ():
                raise RecordError(
                    f"loop.log({name}=...) takes a single number, but got "
                    f"{getattr(value, 'shape', type(value).__name__)}.\n"
                    "Fix: take its mean first, or read it out of the metric with compute()."
                )
            if isinstance(value, Tracer):
                raise RecordError(
                    f"loop.log({name}=...) takes a number that is known, but got a traced value, "
                    f"{type_text(value)}: it was called inside a function that JAX transforms.\n"
                    "Fix: return the number from that function, and log it outside."
                )
            if not _may_be_real(getattr(value, "dtype", None)):
                raise RecordError(
                    f"loop.log({name}=...) takes a real number, but got {type_text(value)}.\n"
                    "Fix: log its real part or its absolute value, or leave it out."
                )
        self._pending.append((self.step, self.epoch, time.time(), metrics))
        if len(self._pending) > _MOST_PENDING:  # so that the host does not run far ahead
            jax.block_until_ready(self._pending[0][3])
            self._drain(wait=False)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._display.say(text)

    def stop(self, reason: str = "stopped") -> None:
        """Ends the loop after this step; with several processes, when all know of it.

        Iterating over the loop again continues with the next batch.

        Args:
          reason: what ``stopped`` is to say.
        """
        self._is_left = False
        if self._agreement is None:
            self.stopped = reason
        else:
            self._asked = self._asked or reason

    def _interrupted(self, name: str) -> None:
        self.stop(name)
        if self._agreement is None:
            self._display.say(f"{name}: leaving after this step. Once more: leave at once.")
        else:
            where = f"process {jax.process_index()} of {jax.process_count()}"
            print(f"{name} in {where}: all leave soon. Once more: leave at once.", flush=True)

    @property
    def last(self) -> dict[str, float]:
        """The newest value of everything that was logged; waits for it."""
        self._drain(wait=True)
        return dict(self._records.last)

    def _drain(self, wait: bool) -> None:
        _drain(self._pending, self._records, wait)

    # ---- leaving and coming back ----------------------------------------------------------------

    def close(self) -> None:
        """Writes what is left and ends the display; also called when the loop ends."""
        self._drain(wait=True)
        self._display.show(self.step, self._records.last)
        _finish(self._pending, self._records, self._display)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """The position of the loop, for a checkpoint; ``set_state`` continues from there.

        What was logged until now is written, so that a run that is killed later and continued from
        here has lost none of it.
        """
        self._drain(wait=True)
        self._records.flush(everything=True)
        state = {"step": self.step, "epoch": self.epoch, "batch": self._in_epoch}
        return state if self._source_state is None else {**state, "source": self._source_state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from the position of another run; the batches that it used are skipped.

        Inside the loop, the next batch is the one after that position.

        Args:
          state: what ``get_state`` gave. Rows of ``metrics.csv`` after that step are removed when
            the loop goes on.

        Raises:
          DataError: it is no such state, or the loop has begun to read an iterator, which cannot
            go back.
        """
        names = ("step", "epoch", "batch")
        try:
            numbers = [operator.index(state[name]) for name in names]
        except (TypeError, KeyError, IndexError):
            numbers = [-1]
        if min(numbers) < 0:
            raise DataError(
                f"The state of a loop has whole numbers from 0 on for {', '.join(names)}, but got "
                f"{state!r}.\nFix: loop.set_state(state), with what loop.get_state() returned."
            )
        if self._read is not None:
            raise DataError(
                f"The {type(self._batches).__name__} given to the loop has been read up to batch "
                f"{self._read.batch} of epoch {self._read.epoch}, and cannot go to another "
                "position.\n"
                "Fix: pass a list, a loader or a function that gives the batches of an epoch, or "
                "make a new loop."
            )
        self._drain(wait=True)
        self.step, self.epoch, self._in_epoch = numbers
        self._is_moved = True
        self._source_state = state.get("source")
        self._forget_ahead()
        self._records.go_on_from(self.step)


def _check_arguments(batches: Any, epochs: Any, steps: Any, ahead: Any, device: Any) -> None:
    if not callable(batches) and not gives_batches(batches):
        raise DataError(
            "A loop takes an iterable of batches, or a function from the epoch to one, but got "
            f"{source_text(batches)}.\nFix: Loop([batch, ...]), Loop(loader)."
        )
    counts = {"epochs": epochs, "steps": steps, "ahead": ahead}
    for name, count in counts.items():
        if not is_count(count) and (count is not None or name == "ahead"):
            what = "batches ahead" if name == "ahead" else name
            raise DataError(
                f"Loop takes a number of {what}, an integer of at least 0, but got {count!r}."
                f"\nFix: {name}=3, or leave it out."
            )
    if isinstance(device, str | int | Mesh):
        raise DataError(
            f"Loop(device=...) takes a device or a sharding, but got {device!r}.\n"
            "Fix: device=jax.devices()[0], or "
            "device=NamedSharding(mesh, PartitionSpec('data'))."
        )


def _drain(pending: Any, records: Records, wait: bool) -> None:
    """Records what is ready, in order."""
    while pending:
        step, epoch, when, metrics = pending[0]
        if not wait and not all(map(_is_ready, metrics.values())):
            break
        try:
            # Faster than float(value) by far, for an array.
            numbers = {name: float(np.asarray(value)) for name, value in metrics.items()}
        except Exception as error:
            pending.popleft()  # what comes after it is not to be lost with it
            error.add_note(f"Raised for what was logged at step {step}: {name_some(metrics)}.")
            raise
        records.add(step, epoch, when, numbers)
        pending.popleft()
    records.flush()


def _is_ready(value: Any) -> bool:
    is_ready = getattr(value, "is_ready", None)  # arrays of JAX have it, though not by its stubs
    return is_ready is None or is_ready()


def _finish(pending: Any, records: Records, display: Display) -> None:
    with contextlib.suppress(RuntimeError):  # an array whose computation failed
        _drain(pending, records, wait=True)
    records.close()
    display.stop()


@functools.cache
def _may_be_real(dtype: Any) -> bool:
    try:
        real = (np.bool_, np.integer, np.floating)
        return dtype is None or any(jnp.issubdtype(dtype, scalar_type) for scalar_type in real)
    except TypeError:  # a dtype of another library, whose values NumPy may read
        return True


class Interrupts:
    """While entered, announces the first SIGINT or SIGTERM; the second one acts at once.

    A signal that the program ignores stays ignored, as Ctrl-C is in a program that a shell started
    in the background; so does one with a handler outside Python.
    """

    def __init__(self, announce: Callable[[str], Any]):
        self._announce = announce
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: Any) -> None:
        self.__exit__()
        self._announce(signal.Signals(number).name)
