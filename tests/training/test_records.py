"""Files that a run leaves: event files as TensorBoard reads them, and pictures."""

import struct
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from linnet.errors import MissingPackageError
from linnet.training import Loop, plot_curves, read_metrics
from linnet.training.records import Records
from tests.subprocesses import run_program


def events_in(folder):
    """The event files of a folder: for each, its scalars as (step, time, name, value)."""
    files = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        events = []
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
        assert events[0].file_version == "brain.Event:2"
        files.append(
            [(e.step, e.wall_time, v.tag, v.simple_value) for e in events for v in e.summary.value]
        )
    return files


def test_an_event_file_holds_what_was_logged(tmp_path):
    records = Records(tmp_path, tensorboard=True)
    records.add(300, 0, 12.5, {"loss": 0.25, "accuracy": 1.0})
    records.close()
    assert events_in(tmp_path) == [[(300, 12.5, "loss", 0.25), (300, 12.5, "accuracy", 1.0)]]


def test_a_loop_writes_event_files_when_asked(tmp_path):
    for run in (1, 2):  # in the same second
        with Loop([1, 2], folder=tmp_path, tensorboard=True, show="nothing") as loop:
            for batch in loop:
                loop.log(loss=run * batch)
    scalars = [[(step, name, value) for step, _, name, value in f] for f in events_in(tmp_path)]
    assert scalars == [[(1, "loss", 1.0), (2, "loss", 2.0)], [(1, "loss", 2.0), (2, "loss", 4.0)]]


def test_all_rows_up_to_a_checkpoint_are_in_the_file_before_it(tmp_path):
    loop = Loop([5, 6, 7], folder=tmp_path, show="nothing")
    for batch in loop:
        loop.log(a=batch)
        position = loop.get_state()
        assert read_metrics(tmp_path)["a"].tolist() == [5, 6, 7][: loop.step]
        loop.log(b=-batch)  # of the same step, whose row is in the file already
        loop.get_state()
        assert read_metrics(tmp_path)["b"].tolist() == [-5, -6, -7][: loop.step]
        if loop.step == 2:
            after_two = position
    found = read_metrics(tmp_path)
    assert [found[name].tolist() for name in ("step", "a", "b")] == [
        [1, 2, 3],
        [5, 6, 7],
        [-5, -6, -7],
    ]
    again = Loop([5, 6, 8], folder=tmp_path, show="nothing")
    again.set_state(after_two)
    for batch in again:
        again.log(a=batch)
    assert read_metrics(tmp_path)["a"].tolist() == [5, 6, 8]


def test_rows_in_an_open_file_are_forgotten(tmp_path):
    records = Records(tmp_path)
    for step in (1, 2, 3):
        records.add(step, 0, 0.0, {"a": step})
    records.flush(everything=True)
    records.forget_after(1)
    records.add(2, 0, 0.0, {"a": 20})
    records.close()
    assert read_metrics(tmp_path)["a"].tolist() == [1, 20]


def test_a_loop_that_is_not_asked_writes_no_event_file(tmp_path):
    for options in ({"folder": tmp_path}, {"tensorboard": True}):
        with Loop([1], show="nothing", **options) as loop:
            for batch in loop:
                loop.log(loss=batch)
    assert events_in(tmp_path) == []


def test_a_program_that_fails_without_closing_its_loop_loses_no_event(tmp_path):
    program = """
        import sys, tempfile
        from linnet.training import Loop
        held = tempfile.TemporaryDirectory()  # has work of its own at exit
        loop = Loop(range(9), folder=sys.argv[1], tensorboard=True, show="nothing")
        batches = iter(loop)  # alive until the end
        for _ in range(3):
            loop.log(loss=next(batches))
        raise ZeroDivisionError
    """
    done = run_program(program, tmp_path, check=False)
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError"
    ((*events,),) = events_in(tmp_path)
    assert [(step, value) for step, _, _, value in events] == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_without_tensorboardx_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingPackageError) as caught:
        Loop([1, 2], folder=tmp_path / "run", tensorboard=True, show="nothing")
    assert str(caught.value) == (
        "Loop(tensorboard=True) needs tensorboardX, which is not installed.\n"
        "Fix: pip install 'linnet[examples]', or pip install tensorboardX."
    )
    assert not (tmp_path / "run").exists()
    with Loop([1, 2], folder=tmp_path, show="nothing") as loop:  # which does not need it
        for batch in loop:
            loop.log(loss=batch)
    assert read_metrics(tmp_path)["loss"].tolist() == [1, 2]


def test_rows_after_a_step_are_forgotten(tmp_path):
    records = Records(tmp_path)
    for step in range(1, 6):
        records.add(step, 0, 0.0, {"loss": step})
    records.close()
    records = Records(tmp_path)
    records.forget_after(3)
    records.add(4, 0, 0.0, {"loss": 40, "norm": 1})
    records.close()
    columns = read_metrics(tmp_path)
    assert columns["loss"].tolist() == [1, 2, 3, 40]
    np.testing.assert_array_equal(columns["norm"], [np.nan] * 3 + [1])
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,epoch,time,loss,norm"


def test_numbers_are_read_back_exactly(tmp_path):
    values = [1 / 3, 1e-30, float("inf"), -7.0]
    records = Records(tmp_path)
    for step, value in enumerate(values):
        records.add(step, 0, 0.0, {"x": value})
    records.close()
    assert read_metrics(tmp_path)["x"].tolist() == values


@pytest.mark.parametrize("steps", [10, 200])
def test_curves_are_drawn(tmp_path, steps):
    records = Records(tmp_path)
    for step in range(steps):
        records.add(step, 0, 0.0, {"loss": 1 / (step + 1)})
        if step % 5 == 0:
            records.add(step, 0, 0.0, {"test_loss": 2 / (step + 1), "accuracy": 0.5})
    records.close()
    path = plot_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"Fix: pip install 'linnet\[examples\]'"):
        plot_curves(tmp_path)
