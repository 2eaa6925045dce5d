"""A training run that is killed at random moments ends like one that never was."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import environment

from linnet.io.checkpoint import sources

RUN = Path(__file__).with_name("killed_run.py")


def start(folder, steps):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", RUN, folder, str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def finish(folder, steps):
    """Lets a run go to its end; returns the digest of all that it holds."""
    process = start(folder, steps)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out.splitlines()[-1]


def check_all(folder):
    """Every checkpoint under its own name is whole, to the last byte."""
    found = [entry for entry in folder.iterdir() if entry.name.isdecimal()]
    for entry in found:
        sources.open_checkpoint(entry, verify=True)
    return len(found)


def kill_at_random(folder, steps, random_, duration):
    """Starts a run and kills it: while it starts, or a moment after its first step.

    ``duration`` is how long a whole run takes, in seconds.

    Returns whether a checkpoint was being written, or None if the run was over already.
    """
    process = start(folder, steps)
    try:
        if random_.random() < 0.2:
            time.sleep(random_.uniform(0.1, 0.5) * duration)
        else:
            line = "-"
            while line and not line.startswith("step"):
                line = process.stdout.readline()
            time.sleep(random_.uniform(0.0, 0.4))
        over = process.poll() is not None
    finally:
        process.kill()
        process.communicate()
    if over:
        assert process.returncode == 0
        return None
    return any(".orbax-checkpoint-tmp" in entry.name for entry in folder.iterdir())


def killed_run(folder, kills, seed):
    """Compares a run that is killed many times with one that is not.

    Returns how many of the kills came while a checkpoint was being written.
    """
    steps = 15 * kills
    whole, killed = folder / "whole", folder / "killed"
    begin = time.monotonic()
    want = finish(whole, steps)
    duration = time.monotonic() - begin
    killed.mkdir()
    random_ = random.Random(seed)
    outcomes = []
    while len(outcomes) < kills:
        outcome = kill_at_random(killed, steps, random_, duration)
        check_all(killed)
        assert outcome is not None, "the run is too short to be killed that often"
        outcomes.append(outcome)
    assert finish(killed, steps) == want
    assert check_all(killed) == 2
    assert sorted(entry.name for entry in killed.iterdir()) == [str(steps - 1), str(steps)]
    return sum(outcomes)


def test_a_run_that_was_killed_twice_ends_like_one_that_was_not(tmp_path):
    killed_run(tmp_path, kills=2, seed=1)


@pytest.mark.slow
def test_a_run_that_was_killed_thirty_times_ends_like_one_that_was_not(tmp_path, capsys):
    while_saving = killed_run(tmp_path, kills=30, seed=2)
    with capsys.disabled():
        print(f"\n30 kills, {while_saving} of them while a checkpoint was being written")
    assert while_saving >= 5
