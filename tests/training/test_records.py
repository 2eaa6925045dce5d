"""Files that a run leaves: event files as TensorBoard reads them, and pictures."""

import struct
import sys

import numpy as np
import pytest

from linnet.errors import MissingPackageError
from linnet.training import Loop, plot_curves, read_metrics
from linnet.training.events import EventFile, checksum
from linnet.training.records import Records


def records_in(data):
    """The records of an event file, their checksums checked."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (checksum(data[:8]),)
        record = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (checksum(record),)
        found.append(record)
        data = data[16 + length :]
    return found


def test_the_checksum_is_the_masked_crc_32c():
    crc = 0xE3069283  # of "123456789", as RFC 3720 gives it
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert checksum(b"123456789") == masked


def test_an_event_file_holds_what_was_logged(tmp_path):
    events = EventFile(tmp_path)
    events.add(300, 12.5, {"loss": 0.25, "accuracy": 1.0})
    events.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    version, scalars = records_in(path.read_bytes())
    assert version[9:] == b"\x1a\x0dbrain.Event:2"
    time = b"\x09" + struct.pack("<d", 12.5)
    loss = b"\x0a\x04loss\x15" + struct.pack("<f", 0.25)
    accuracy = b"\x0a\x08accuracy\x15" + struct.pack("<f", 1.0)
    values = b"".join(b"\x0a" + bytes([len(v)]) + v for v in (loss, accuracy))
    assert scalars == time + b"\x10\xac\x02" + b"\x2a" + bytes([len(values)]) + values


def test_a_loop_writes_event_files_when_asked(tmp_path):
    with Loop([1, 2], folder=tmp_path, tensorboard=True, show="nothing") as loop:
        for batch in loop:
            loop.log(loss=batch)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert len(records_in(path.read_bytes())) == 3


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
