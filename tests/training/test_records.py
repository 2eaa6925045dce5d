"""Files that a run leaves: event files as TensorBoard reads them, and pictures."""

import shutil
import struct
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from linnet import io
from linnet.errors import MissingPackageError, RecordError
from linnet.training import Loop, plot_curves, read_metrics
from linnet.training.records import Records
from tests.models import disk_full
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
    records.go_on_from(1)
    records.add(2, 0, 0.0, {"a": 20})
    records.close()
    assert read_metrics(tmp_path)["a"].tolist() == [1, 20]


def quiet(batches, folder, **options):
    return Loop(batches, folder=folder, show="nothing", **options)


@pytest.mark.parametrize("closes", [True, False])
def test_what_is_logged_after_the_last_step_joins_its_row(tmp_path, closes):
    loop = quiet([1, 2], tmp_path, tensorboard=True)
    for batch in loop:
        loop.log(loss=batch)
    loop.log(test=0.5)
    assert loop.last == {"loss": 2.0, "test": 0.5}
    if closes:
        loop.close()
    del loop
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == columns["loss"].tolist() == [1, 2]
    np.testing.assert_array_equal(columns["test"], [np.nan, 0.5])
    events = [(step, name, x) for file in events_in(tmp_path) for step, _, name, x in file]
    assert sorted(events) == [(1, "loss", 1.0), (2, "loss", 2.0), (2, "test", 0.5)]


def test_a_loop_that_is_left_and_gone_on_with_loses_no_row(tmp_path):
    loop = quiet([1, 2, 3, 4], tmp_path)
    for _ in range(2):
        for batch in loop:
            loop.log(loss=batch)
            if loop.step == 2:
                break
    assert read_metrics(tmp_path)["loss"].tolist() == [1, 2, 3, 4]


def test_a_second_loop_in_the_folder_is_told_of(tmp_path):
    first = quiet(range(9), tmp_path)
    with pytest.raises(RecordError) as caught:
        for batch in first:
            first.log(loss=batch)
            first.get_state()
            if batch == 3:
                for other in (second := quiet([70, 80], tmp_path)):
                    second.log(test=other)
    assert first.step == 5
    assert str(caught.value) == (
        f"{tmp_path / 'metrics.csv'} is not the file that this loop began: another loop writes "
        "there, and has moved the rows of this one to metrics.previous.csv, or somebody replaced "
        "it.\nFix: give each loop a folder of its own."
    )
    first.close()
    assert read_metrics(tmp_path)["test"].tolist() == [70, 80]
    assert read_metrics(tmp_path / "metrics.previous.csv")["loss"].tolist() == [0, 1, 2, 3]


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    loop = quiet([1], tmp_path)
    loop.log(loss=1)
    with monkeypatch.context() as patch:
        patch.setattr("linnet.training.records.csv.writer", disk_full)
        with pytest.raises(OSError, match="No space left") as caught:
            loop.get_state()
    assert caught.value.__notes__ == [
        f"Raised while {tmp_path / 'metrics.csv'} was written; its last rows may be missing.\n"
        "Fix: Loop(folder=...) takes a folder with room that can be written to."
    ]


def test_a_file_that_is_removed_is_begun_anew(tmp_path):
    loop = quiet(range(4), tmp_path / "run")
    for batch in loop:
        loop.log(loss=batch)
        loop.get_state()
        if batch == 1:
            shutil.rmtree(tmp_path / "run")
    columns = read_metrics(tmp_path / "run")
    assert columns["step"].tolist() == [2, 3, 4]
    assert columns["loss"].tolist() == [1, 2, 3]


def test_what_is_logged_and_saved_before_the_first_step_begins_the_run(tmp_path):
    for run in (1, 2):
        loop = quiet([5], tmp_path)
        loop.log(init=run)
        loop.get_state()
        for batch in loop:
            loop.log(loss=batch)
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == [0, 1]
    assert columns["init"][0] == 2
    assert read_metrics(tmp_path / "metrics.previous.csv")["init"][0] == 1


class Unwilling:
    """An iterator that cannot go to any position."""

    def get_state(self):
        return {"at": 1}

    def set_state(self, state):
        raise LookupError("no such position")


def test_a_restore_that_fails_leaves_the_rows_alone(tmp_path):
    loop = quiet(range(4), tmp_path)
    for batch in loop:
        loop.log(loss=batch)
        if loop.step == 2:
            io.save(tmp_path / "saved", loop=loop, other=Unwilling())
    again = quiet(range(4), tmp_path)
    with pytest.raises(LookupError):
        io.restore(tmp_path / "saved", loop=again, other=Unwilling())
    assert again.step == 0
    assert read_metrics(tmp_path)["loss"].tolist() == [0, 1, 2, 3]
    io.restore(tmp_path / "saved", {"loop": again}, rename={"other": None})
    for batch in again:
        again.log(loss=10 * batch)
    assert read_metrics(tmp_path)["loss"].tolist() == [0, 1, 20, 30]


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_row_that_was_cut_off_is_removed(tmp_path, cut):
    records = Records(tmp_path)
    for step in range(8, 13):
        records.add(step, 0, 1234567890.125, {"loss": step})
    records.close()
    file = tmp_path / "metrics.csv"
    file.write_bytes(file.read_bytes()[:-cut])
    records = Records(tmp_path)
    records.go_on_from(10)
    records.add(11, 0, 0.0, {"loss": 70})
    records.close()
    assert read_metrics(tmp_path)["step"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "step,loss\n1,2\n"])
def test_a_file_of_somebody_else_is_not_gone_on_with(tmp_path, text):
    file = tmp_path / "metrics.csv"
    file.write_text(text)
    loop = quiet(range(3), tmp_path)
    loop.set_state({"step": 1, "epoch": 0, "batch": 1})
    with pytest.raises(RecordError) as caught:
        list(loop)
    names = text.splitlines()[0].replace(",", ", ")
    assert str(caught.value) == (
        f"{file} holds no metrics of a loop: its columns are {names}.\n"
        "Fix: name the folder of a run; to begin one here, move the file away first."
    )
    assert file.read_text() == text
    with pytest.raises(RecordError, match=f"holds no metrics of a loop: its columns are {names}"):
        plot_curves(tmp_path)


def test_half_a_number_is_named(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,epoch,time,loss\n1,0,2.5,1e-")
    with pytest.raises(RecordError) as caught:
        read_metrics(tmp_path)
    assert str(caught.value) == (
        f"{file} has '1e-' in the column loss, which is no number.\n"
        "Fix: remove that row; a run that was killed while it wrote may have left half of one."
    )


def test_what_is_no_folder(tmp_path):
    with pytest.raises(RecordError) as caught:
        quiet([1], 3)
    assert str(caught.value) == (
        "Loop(folder=...) takes the path of a folder, but got the Python int 3.\n"
        "Fix: Loop(batches, folder='runs/first')."
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError) as caught:
        quiet([1], tmp_path / "file")
    assert caught.value.__notes__ == ["Fix: Loop(folder=...) takes a folder that can be made."]


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
    records.go_on_from(3)
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
