"""The loop: batches in order, on the device, shown and recorded, left cleanly, gone on with."""

import itertools
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import DataError, RecordError, ShapeChangeWarning
from linnet.training import Loop, read_metrics
from linnet.training.displays import Display
from tests.subprocesses import run_program


def quiet(batches, **options):
    return Loop(batches, **{"show": "nothing", **options})


def steps_of(loop):
    return [(loop.step, loop.epoch, int(batch)) for batch in loop]


# ---- batches ------------------------------------------------------------------------------------


def test_once_through_by_default():
    loop = quiet([5, 6])
    assert steps_of(loop) == [(1, 0, 5), (2, 0, 6)]
    assert loop.stopped is None


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_epochs_and_steps(ahead):
    assert [b for *_, b in steps_of(quiet([5, 6], epochs=3, ahead=ahead))] == [5, 6] * 3
    assert [b for *_, b in steps_of(quiet([5, 6], steps=3, ahead=ahead))] == [5, 6, 5]
    assert [b for *_, b in steps_of(quiet([5, 6], steps=9, epochs=2, ahead=ahead))] == [5, 6] * 2


def test_a_function_gives_the_batches_of_an_epoch():
    loop = quiet(lambda epoch: iter([10 * epoch, 10 * epoch + 1]), epochs=2)
    assert [b for *_, b in steps_of(loop)] == [0, 1, 10, 11]


def test_an_endless_generator_is_read_no_further_than_needed():
    numbers = itertools.count()
    assert [b for *_, b in steps_of(quiet(numbers, steps=3, ahead=2))] == [0, 1, 2]
    assert next(numbers) == 3


def test_batches_are_asked_for_ahead_of_time():
    asked = []
    loop = quiet((asked.append(i) or i for i in range(5)), ahead=2)
    seen = [(int(batch), len(asked)) for batch in loop]
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: quiet(3), r"^A loop takes an iterable of batches, .* but got int\.\nFix: "),
        (lambda: quiet([]), r"^The batches given to the loop \(list\) are empty\.\nFix: "),
        (
            lambda: quiet(iter([1]), epochs=2),
            r"^Epoch 1 has no batches: the list_iterator given to the loop was used up before\.\n"
            r"Fix: .*Loop\(lambda epoch: make_batches\(epoch\), \.\.\.\)",
        ),
        (lambda: quiet("abc"), r"^A loop takes an iterable of batches, .* but got str\.\nFix: "),
        (
            lambda: quiet({"x": np.ones(2)}),
            r", but got dict \(one batch is a list of one: \[batch\]\)\.\nFix: Loop\(\[batch",
        ),
        (lambda: quiet(np.ones(())), r"^A loop takes .* but got ndarray\.\nFix: "),
        (
            lambda: quiet(lambda epoch: None),
            r"^The function given to the loop has to return an iterable of batches, but for epoch "
            r"0 it returned NoneType\.\nFix: return a list",
        ),
        (
            lambda: quiet(lambda epoch: [1][epoch:], epochs=2),
            r"^Epoch 1 has no batches: what the function given to the loop returns for it is "
            r"empty, or was used up before\.\nFix: make a new iterator in each call",
        ),
    ],
)
def test_no_batches(make, text):
    with pytest.raises(DataError, match=text):
        list(make())


def test_a_function_that_takes_no_epoch():
    with pytest.raises(TypeError, match="takes 0 positional arguments") as caught:
        list(quiet(lambda: [1]))
    assert caught.value.__notes__ == [
        "Raised by the function given to the loop, which is called with the number of an epoch, 0."
        "\nFix: Loop(lambda epoch: make_batches(epoch), ...)."
    ]


class Sequence:
    """What can be gone through by its items alone, as data sets of PyTorch can."""

    def __getitem__(self, number):
        return [5, 6][number]


class Stream:
    """A loader over a stream, which has no length."""

    def __len__(self):
        raise TypeError("a stream has no length")

    def __iter__(self):
        return iter([5, 6])


@pytest.mark.parametrize("source", [Sequence(), Stream(), lambda epoch: Sequence()])
def test_sources_without_a_length_or_an_iterator(source):
    assert [b for *_, b in steps_of(quiet(source, epochs=2))] == [5, 6] * 2


def failing(count):
    yield from range(count)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_batches_before_an_error_of_the_source_are_handed_out_first(ahead):
    loop = quiet(failing(3), ahead=ahead)
    found = []
    with pytest.raises(OSError, match=r"^the disk is gone$"):
        for batch in loop:
            found.append(int(batch))
    assert (found, loop.step) == ([0, 1, 2], 3)
    assert loop.get_state() == {"step": 3, "epoch": 0, "batch": 3}


def test_an_error_that_is_never_reached_is_not_raised():
    assert [b for *_, b in steps_of(quiet(failing(3), steps=3, ahead=9))] == [0, 1, 2]


def test_what_is_wrong_with_a_batch_is_raised_in_its_turn():
    found = []
    with pytest.raises(ValueError, match="dictionary keys") as caught:
        for batch in quiet([1, 2, {3: 1, "x": 2}]):
            found.append(int(batch))
    assert found == [1, 2]
    assert caught.value.__notes__ == ["Raised for batch 3 of epoch 0."]


@pytest.mark.parametrize("device", ["gpu", 0, jax.make_mesh((1,), ("data",))])
def test_what_is_no_device(device):
    with pytest.raises(DataError) as caught:
        quiet([1], device=device)
    assert str(caught.value) == (
        f"Loop(device=...) takes a device or a sharding, but got {device!r}.\n"
        "Fix: device=jax.devices()[0], or device=NamedSharding(mesh, PartitionSpec('data'))."
    )


def test_batches_of_ever_new_shapes_are_noticed_once():
    with pytest.warns(ShapeChangeWarning, match=r"The first 8 batches have 8 different shapes"):
        list(quiet([np.ones(n) for n in range(20)]))


def test_a_few_shapes_are_fine():
    list(quiet([np.ones(n % 3) for n in range(50)]))


# ---- what is logged -----------------------------------------------------------------------------


def test_one_row_a_step_and_columns_that_come_later(tmp_path):
    with quiet([1, 2, 3], folder=tmp_path) as loop:
        for batch in loop:
            loop.log(loss=jnp.float32(batch) / 2)
            loop.log(norm=1.0)
            if loop.step == 3:
                loop.log(accuracy=0.75)
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == [1, 2, 3]
    assert columns["loss"].tolist() == [0.5, 1.0, 1.5]
    assert columns["norm"].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(columns["accuracy"], [np.nan, np.nan, 0.75])
    assert loop.last == {"loss": 1.5, "norm": 1.0, "accuracy": 0.75}


def test_columns_that_come_after_rows_were_written(tmp_path):
    with quiet(range(200), folder=tmp_path) as loop:
        for _ in loop:
            loop.log(loss=loop.step)
            if loop.step == 150:
                loop.log(late=7)
    columns = read_metrics(tmp_path / "metrics.csv")
    assert columns["loss"].tolist() == list(range(1, 201))
    assert np.flatnonzero(~np.isnan(columns["late"])).tolist() == [149]


def test_the_display_is_drawn_by_the_clock_however_many_steps_there_are(monkeypatch):
    shown = []
    display = Display("", None)
    monkeypatch.setattr(display, "show", lambda step, metrics: shown.append((step, metrics)))
    monkeypatch.setattr("linnet.training.loop.make_display", lambda *_: display)
    monkeypatch.setattr("linnet.training.loop.time.monotonic", lambda: 0.0)
    loop = Loop(range(1000))
    for _ in loop:
        loop.log(loss=loop.step)
    assert shown == [(1000, {"loss": 1000.0})]


def test_a_new_run_in_the_same_folder_keeps_the_rows_of_the_last_one_apart(tmp_path):
    for run in (1, 2):
        loop = quiet(range(5), folder=tmp_path)
        for _ in loop:
            loop.log(loss=run * loop.step)
    assert read_metrics(tmp_path)["loss"].tolist() == [2, 4, 6, 8, 10]
    assert read_metrics(tmp_path / "metrics.previous.csv")["loss"].tolist() == [1, 2, 3, 4, 5]


def test_an_error_in_the_step_loses_no_row(tmp_path):
    with pytest.raises(ZeroDivisionError), quiet(range(5), folder=tmp_path) as loop:
        for _ in loop:
            loop.log(loss=loop.step)
            if loop.step == 3:
                raise ZeroDivisionError
    assert read_metrics(tmp_path)["loss"].tolist() == [1, 2, 3]


def test_a_loop_that_is_never_closed_loses_no_row(tmp_path):
    loop = quiet(range(5), folder=tmp_path)
    iterator = iter(loop)
    next(iterator)
    loop.log(loss=9)
    del loop, iterator
    assert read_metrics(tmp_path)["loss"].tolist() == [9]


@pytest.mark.parametrize(("value", "text"), [(jnp.ones(2), r"\(2,\)"), ("high", "str")])
def test_metrics_must_be_numbers(value, text):
    message = (
        rf"loop\.log\(loss=\.\.\.\) takes a single number, but got {text}\.\nFix: take its mean"
    )
    with pytest.raises(RecordError, match=message), quiet([1]) as loop:
        for _ in loop:
            loop.log(loss=value)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (jnp.array(1j), r"complex64\[\]"),
        (jax.random.key(0), r"key<fry>\[\]"),
        (np.array("x"), "<U1"),
    ],
)
def test_metrics_must_be_real_and_a_wrong_one_takes_none_with_it(value, got, tmp_path):
    with quiet([1, 2, 3], folder=tmp_path) as loop:
        for _ in loop:
            if loop.step == 2:
                with pytest.raises(RecordError, match=rf"\(bad=\.\.\.\) takes a real .* got {got}"):
                    loop.log(good=9, bad=value)
            else:
                loop.log(good=loop.step)
    assert read_metrics(tmp_path)["good"].tolist() == [1, 3]


def test_a_number_that_cannot_be_written_takes_none_with_it(tmp_path):
    loop = quiet([1, 2], folder=tmp_path)
    donated = jnp.float32(1)
    loop.log(huge=10**400)
    loop.log(norm=3, gone=donated)
    loop.log(loss=2)
    donated.delete()
    with pytest.raises(OverflowError) as caught:
        _ = loop.last
    assert caught.value.__notes__ == ["Raised for what was logged at step 0: huge."]
    with pytest.raises(RuntimeError, match="deleted") as caught:
        _ = loop.last
    assert caught.value.__notes__ == ["Raised for what was logged at step 0: norm, gone."]
    assert loop.last == {"loss": 2.0}


def test_traced_values_are_not_logged(tmp_path):
    loop = quiet([1], folder=tmp_path)

    @jax.jit
    def step(x):
        loop.log(loss=x)

    with pytest.raises(RecordError) as caught:
        step(1.0)
    assert str(caught.value) == (
        "loop.log(loss=...) takes a number that is known, but got a traced value, float32[]: it "
        "was called inside a function that JAX transforms.\n"
        "Fix: return the number from that function, and log it outside."
    )
    assert loop.last == {}


@pytest.mark.parametrize("name", ["step", "epoch", "time"])
def test_the_columns_of_the_loop_itself_are_taken(name, tmp_path):
    loop = quiet([1, 2], folder=tmp_path)
    for _ in loop:
        loop.log(loss=loop.step)
        with pytest.raises(RecordError) as caught:
            loop.log(norm=1, **{name: 70})
        state = loop.get_state()
    assert str(caught.value) == (
        f"loop.log({name}=...) has the name of a column that the loop writes itself; these are "
        f"step, epoch, time.\nFix: give it another name, such as my_{name}."
    )
    assert loop.last == {"loss": 2.0}
    again = quiet([1, 2, 3], folder=tmp_path)
    again.set_state(state)
    for _ in again:
        again.log(loss=again.step)
    columns = read_metrics(tmp_path)
    assert list(columns) == ["step", "epoch", "time", "loss"]
    assert columns["step"].tolist() == columns["loss"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [None, "a dtype of another library"])
def test_numbers_of_other_libraries_are_read_by_numpy(dtype):
    class Tensor:
        shape = ()

        def __array__(self, dtype=None, copy=None):
            return np.array(0.5)

    tensor = Tensor()
    if dtype:
        tensor.dtype = object()
    loop = quiet([1])
    loop.log(loss=tensor, norm=jnp.bfloat16(2), right=np.bool_(True))
    assert loop.last == {"loss": 0.5, "norm": 2.0, "right": 1.0}


def test_any_other_name_will_do(tmp_path):
    with quiet([1], folder=tmp_path) as loop:
        for _ in loop:
            loop.log(self=1, value=2)
    assert loop.last == {"self": 1.0, "value": 2.0}


# ---- leaving ------------------------------------------------------------------------------------


def test_stop_ends_it_after_the_step():
    loop = quiet(range(9))
    for _ in loop:
        if loop.step == 4:
            loop.stop("early stopping")
    assert (loop.step, loop.stopped) == (4, "early stopping")


def test_a_loop_that_was_stopped_goes_on():
    loop = quiet(range(6))
    found = []
    for batch in loop:
        found.append(int(batch))
        if loop.step == 2:
            loop.stop("a look at the model")
    assert (found, loop.stopped) == ([0, 1], "a look at the model")
    found += [int(batch) for batch in loop]
    assert (found, loop.stopped) == ([0, 1, 2, 3, 4, 5], None)


def test_a_loop_that_is_stopped_beforehand_gives_no_batch():
    loop = quiet(range(6))
    loop.stop("no time is left")
    assert steps_of(loop) == []
    assert (loop.step, loop.stopped) == (0, "no time is left")


@pytest.fixture
def usual_signals():
    """Signals as in a program in the foreground, wherever the tests run."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_step(number, capsys):
    before = signal.getsignal(number)
    loop = quiet(range(9))
    done = []
    for _ in loop:
        if loop.step == 3:
            signal.raise_signal(number)
        done.append(loop.step)
    assert done == [1, 2, 3]
    assert loop.stopped == number.name
    assert signal.getsignal(number) is before
    assert f"{number.name}: leaving after this step" in capsys.readouterr().out


@pytest.mark.usefixtures("usual_signals")
def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = quiet(range(3))
    for _ in loop:
        signal.raise_signal(signal.SIGINT)
    assert (loop.step, loop.stopped) == (3, None)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("usual_signals")
def test_a_second_signal_acts_at_once():
    loop = quiet(range(9))
    with pytest.raises(KeyboardInterrupt):
        for _ in loop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert loop.step == 1


def test_another_thread_may_run_it():
    found = []
    thread = threading.Thread(target=lambda: found.extend(steps_of(quiet([1, 2]))))
    thread.start()
    thread.join()
    assert len(found) == 2


# ---- coming back --------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", range(1, 7))
@pytest.mark.parametrize("batches", [[1, 2, 3], lambda epoch: iter([1, 2, 3])])
def test_going_on_gives_the_batches_that_are_left(stop, batches, tmp_path):
    def run(until, state):
        loop = quiet(batches, epochs=2, folder=tmp_path)
        if state is not None:
            loop.set_state(state)
        found = []
        for batch in loop:
            found.append((loop.step, loop.epoch, int(batch)))
            loop.log(loss=batch)
            if loop.step == stop:
                state = loop.get_state()
            if loop.step == until:
                break
        loop.close()
        return found, state

    whole, state = run(min(stop + 1, 6), None)
    rest, _ = run(6, state)
    assert whole[:stop] + rest == steps_of(quiet(batches, epochs=2))
    assert read_metrics(tmp_path)["step"].tolist() == [1, 2, 3, 4, 5, 6]


class Source:
    """A loader that knows where it is and is not to be read from the start."""

    def __init__(self, names):
        self.at, self.read, self.names = 0, [], names
        setattr(self, names[0], lambda: {"at": self.at})
        setattr(self, names[1], lambda state: setattr(self, "at", state["at"]))

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            self.read.append(self.at)
            yield self.at
        self.at = 0


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
def test_a_source_that_knows_its_place_is_asked_to_go_there(names):
    loop = quiet(Source(names), ahead=3)
    for _ in loop:
        if loop.step == 2:
            state = loop.get_state()
            break
    assert state == {"step": 2, "epoch": 0, "batch": 2, "source": {"at": 2}}
    again = Source(names)
    loop = quiet(again)
    loop.set_state(state)
    assert [b for *_, b in steps_of(loop)] == again.read == [3, 4, 5]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("make", [range, lambda count: iter(range(count))])
def test_a_loop_that_is_left_goes_on_where_it_was(ahead, make):
    loop = quiet(make(20), steps=12, ahead=ahead)
    found = []
    for _ in range(4):
        for batch in loop:
            found.append(int(batch))
            if loop.step % 5 == 0:
                break
    assert found == list(range(12))
    assert loop.get_state() == {"step": 12, "epoch": 0, "batch": 12}


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_an_error_that_was_read_ahead_is_kept_for_its_turn(ahead):
    loop = quiet(failing(4), ahead=ahead)
    for _ in loop:
        if loop.step == 2:
            break
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in loop:
            found.append(int(batch))
    assert found == [2, 3]


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_a_loop_goes_back_while_it_runs(ahead, tmp_path):
    loop = quiet(range(5), ahead=ahead, folder=tmp_path)
    found, state = [], None
    for batch in loop:
        found.append((loop.step, int(batch)))
        loop.log(loss=10 * len(found))
        if loop.step == 2 and state is None:
            state = loop.get_state()
        if len(found) == 4:
            loop.set_state(state)
    assert found == [(1, 0), (2, 1), (3, 2), (4, 3), (3, 2), (4, 3), (5, 4)]
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == [1, 2, 3, 4, 5]
    assert columns["loss"].tolist() == [10, 20, 50, 60, 70]


def test_a_loop_over_an_iterator_cannot_go_back():
    loop = quiet(iter(range(5)), ahead=1)
    state = loop.get_state()
    found = []
    for batch in loop:
        found.append(int(batch))
        if loop.step == 2:
            with pytest.raises(DataError) as caught:
                loop.set_state(state)
            assert str(caught.value) == (
                "The range_iterator given to the loop has been read up to batch 3 of epoch 0, and "
                "cannot go to another position.\nFix: pass a list, a loader or a function that "
                "gives the batches of an epoch, or make a new loop."
            )
            assert loop.step == 2
    assert found == [0, 1, 2, 3, 4]


def test_going_on_with_fewer_batches_than_were_used():
    loop = quiet([1, 2, 3], epochs=2)
    loop.set_state({"step": 10, "epoch": 1, "batch": 5})
    with pytest.raises(DataError) as caught:
        list(loop)
    assert str(caught.value) == (
        "The loop continues after step 10, batch 5 of epoch 1, but the list given to it has 3 "
        "batches there.\nFix: give it the batches that the run began with, or begin a new run, "
        "without set_state."
    )
    assert loop.get_state() == {"step": 10, "epoch": 1, "batch": 5}


def test_going_on_after_more_epochs_than_are_asked_for_ends_at_once():
    loop = quiet([1, 2, 3], epochs=2)
    loop.set_state({"step": 10, "epoch": 3, "batch": 1})
    assert steps_of(loop) == []
    assert loop.step == 10


@pytest.mark.parametrize(
    "state",
    [None, {}, {"step": 1, "epoch": 0}, {"step": "1", "epoch": 0, "batch": 1}, [1, 2, 3],
     {"step": -1, "epoch": 0, "batch": 0}],
)  # fmt: skip
def test_what_is_no_state(state):
    loop = quiet([1, 2])
    with pytest.raises(DataError) as caught:
        loop.set_state(state)
    assert str(caught.value) == (
        "The state of a loop has whole numbers from 0 on for step, epoch, batch, but got "
        f"{state!r}.\nFix: loop.set_state(state), with what loop.get_state() returned."
    )
    assert loop.step == 0
    loop.set_state({name: np.int64(1) for name in ("step", "epoch", "batch")})
    assert loop.get_state() == {"step": 1, "epoch": 1, "batch": 1}


# ---- a whole program ----------------------------------------------------------------------------


def test_a_program_that_is_told_to_end_ends_well(tmp_path):
    program = """
        import os, signal, sys
        from linnet.training import Loop
        with Loop(range(1000), folder=sys.argv[1], title="run") as loop:
            for _ in loop:
                loop.log(loss=1 / loop.step)
                if loop.step == 20:
                    signal.raise_signal(signal.SIGTERM)
        print("left after", loop.step, loop.stopped)
    """
    done = run_program(program, tmp_path)
    assert done.stdout.splitlines()[-1] == "left after 20 SIGTERM"
    assert "SIGTERM: leaving after this step. Once more: leave at once." in done.stdout
    assert len(read_metrics(tmp_path)["loss"]) == 20


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": -1}, {"epochs": 1.5}, {"epochs": True}, {"steps": -1}, {"steps": "3"},
     {"ahead": -1}, {"ahead": None}],
)  # fmt: skip
def test_numbers_of_epochs_and_steps(wrong):
    ((name, value),) = wrong.items()
    what = "batches ahead" if name == "ahead" else name
    with pytest.raises(DataError) as caught:
        Loop([1, 2], show="nothing", **wrong)
    assert str(caught.value) == (
        f"Loop takes a number of {what}, an integer of at least 0, but got {value!r}.\n"
        f"Fix: {name}=3, or leave it out."
    )
