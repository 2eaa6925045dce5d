"""The loop: batches in order, on the device, shown and recorded, left cleanly, gone on with."""

import io
import itertools
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import DataError, RecordError, ShapeChangeWarning
from linnet.training import Loop, loop as loops, read_metrics
from linnet.training.loop import Display
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


def test_arrays_are_put_on_the_device_and_text_stays():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.ones(2, np.float32)

    batch = {"x": np.ones(3), "tensor": Tensor(), "names": ["a", np.array(["b"])], "none": None}
    (found,) = quiet([batch])
    assert isinstance(found["x"], jax.Array)
    assert found["tensor"].tolist() == [1, 1]
    assert isinstance(found["tensor"], jax.Array)
    assert found["names"] == ["a", np.array(["b"])]
    assert found["none"] is None


def test_arrays_that_are_there_are_not_copied():
    x = jnp.ones(3)
    assert next(iter(quiet([x]))) is x


def test_batches_go_where_they_are_wanted():
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    (x,) = quiet([np.ones(4)], device=sharding)
    assert x.sharding == sharding


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
    ],
)
def test_no_batches(make, text):
    with pytest.raises(DataError, match=text):
        list(make())


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


# ---- leaving ------------------------------------------------------------------------------------


def test_stop_ends_it_after_the_step():
    loop = quiet(range(9))
    for _ in loop:
        if loop.step == 4:
            loop.stop("early stopping")
    assert (loop.step, loop.stopped) == (4, "early stopping")


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


# ---- displays -----------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loops.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_now_and_then_and_at_the_end(clock, capsys):
    lines = loops.make_display("lines", "digits", 640)
    lines.start(0)
    for step in range(1, 641):
        clock[0] += 1 / 32
        if step % 10 == 0:
            lines.show(step, {"loss": 1 / step, "accuracy": 0.5})
    lines.stop()
    assert capsys.readouterr().out.splitlines() == [
        "digits  step 160/640  loss 0.00625  accuracy 0.5  32 steps/s  0:15 left",
        "digits  step 320/640  loss 0.003125  accuracy 0.5  32 steps/s  0:10 left",
        "digits  step 480/640  loss 0.002083  accuracy 0.5  32 steps/s  0:05 left",
        "digits  step 640/640  loss 0.001563  accuracy 0.5  32 steps/s  0:00 left",
    ]


def test_lines_without_an_end_in_sight(clock, capsys):
    lines = loops.make_display("lines", "run", None)
    lines.start(7)
    for step in (8, 12):  # the first is spent on compiling
        clock[0] += 10
        lines.show(step, {})
    assert capsys.readouterr().out == "run  step 8\nrun  step 12  0.4 steps/s\n"


@pytest.mark.parametrize(("total", "count"), [(None, "3"), (100, "3/100")])
def test_the_last_line_comes_wherever_a_run_ends(clock, capsys, total, count):
    lines = loops.make_display("lines", "run", total)
    lines.start(0)
    lines.show(3, {"loss": 0.5})
    assert capsys.readouterr().out == ""
    lines.stop()
    assert capsys.readouterr().out == f"run  step {count}  loss 0.5\n"


def test_long_times_have_hours(clock, capsys):
    lines = loops.make_display("lines", "run", 20_000)
    lines.start(0)
    for step in (1, 21):
        clock[0] += 10
        lines.show(step, {})
    assert "step 21/20000  2 steps/s  2:46:30 left" in capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "kind"), [(True, loops.Bar), (False, loops.Lines)])
def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, terminal, kind):
    monkeypatch.setattr(loops.sys, "stdout", io.StringIO())
    monkeypatch.setattr(loops.sys.stdout, "isatty", lambda: terminal, raising=False)
    assert type(loops.make_display("auto", "run", 3)) is kind


def test_the_bar_shows_numbers_and_what_is_said(capsys):
    with Loop(range(30), show="bar", title="digits") as loop:
        for _ in loop:
            loop.log(loss=1 / loop.step)
            if loop.step == 10:
                loop.say("half [way] there")
    shown = capsys.readouterr().out
    assert "half [way] there" in shown
    assert "digits" in shown
    assert "30/30" in shown
    assert "loss 0.03333" in shown


def test_an_unknown_display():
    with pytest.raises(ValueError, match="A loop cannot show 'graph'"):
        Loop([], show="graph")


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


def test_a_source_that_fills_one_array_again():
    memory = np.zeros(100, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    batch = memory[start : start + 16]  # aligned as JAX wants it, to be used without a copy

    def batches(epoch):
        for number in range(5):
            batch[:] = number
            yield {"x": batch}

    assert [float(found["x"][0]) for found in Loop(batches, show="nothing")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"epochs": 1.5}, {"steps": -1}, {"steps": "3"}])
def test_numbers_of_epochs_and_steps(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(DataError) as caught:
        Loop([1, 2], show="nothing", **wrong)
    assert str(caught.value) == (
        f"Loop takes a number of {name}, an integer of at least 0, but got {value!r}.\n"
        f"Fix: {name}=3, or leave it out."
    )
