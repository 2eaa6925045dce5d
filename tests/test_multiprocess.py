"""Two processes that train together, one of which is killed or told to stop, at random moments."""

import runpy
import signal
import time
from pathlib import Path

import jax
import pytest

from linnet import io
from linnet.training import read_metrics

ROOT = Path(__file__).parents[1]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return runpy.run_path(str(ROOT / "examples" / "multiprocess.py"))


def check(example, folder, kills, steps, seed):
    """Runs the example; the run that was killed ends like the one that was not."""
    arguments = ["--kills", str(kills), "--steps", str(steps), "--seed", str(seed)]
    with jax.numpy_rank_promotion("allow"):
        result = example["main"]([*arguments, "--folder", str(folder)])
    assert result["same"] is True
    assert result["steps"] == steps
    assert result["difference"] < 1e-5
    # What is there under its own name is whole, and nothing else is left.
    saved = folder / "killed" / "checkpoints"
    every = example["SAVE_EVERY"]
    assert sorted(int(path.name) for path in saved.iterdir()) == [*range(every, steps + 1, every)]
    assert io.Manager(saved).restore().step == steps


def test_a_run_with_three_kills_ends_like_one_without(example, tmp_path, capsys):
    check(example, tmp_path, kills=3, steps=32, seed=0)
    shown = capsys.readouterr().out
    assert shown.count(" killed at ") == 3
    assert "the same, bit for bit: True" in shown

    # A signal to one process ends both, at the same step, which is saved.
    folder = tmp_path / "stopped"
    started = example["start"](folder, 1000)
    end = time.monotonic() + 60
    while len(example["said"](folder, "step ")) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)
    assert example["wait"](started, 30) == [0, 0]
    (last,) = example["said"](folder, "ends")
    step = int(last.split()[3].removesuffix(","))
    assert f"ends after step {step}, SIGTERM: mean loss" in last
    restored = io.Manager(folder / "checkpoints").restore()
    assert restored.step == restored.loop["step"] == step
    losses = [read_metrics(tmp_path / name)["loss"] for name in ("stopped", "whole")]
    both = min(map(len, losses))
    assert len(losses[0]) == step
    assert losses[0][:both].tolist() == losses[1][:both].tolist()


@pytest.mark.slow
def test_a_run_with_thirty_kills_ends_like_one_without(example, tmp_path, capsys):
    check(example, tmp_path, kills=30, steps=300, seed=1)
    shown = capsys.readouterr().out
    assert shown.count(" killed at ") == 30
    assert shown.count(" while saving") >= 3
