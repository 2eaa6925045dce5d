"""The checkpoints of a run: which are kept, which is taken, and what passes over damage."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import bits, names_in, training

from linnet import io, nnx
from linnet.errors import (
    CheckpointArgumentError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    DamagedCheckpointWarning,
)
from tests.models import OneOfEverything


def cut(path):
    """Takes a byte off the largest file of a checkpoint."""
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def flip(path, name="d"):
    """Changes one bit of a data file."""
    file = max((path / "ocdbt.process_0" / name).iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


@pytest.fixture
def three(tmp_path):
    """A folder with checkpoints of three steps."""
    with io.Manager(tmp_path, keep_last=None) as manager:
        for step in (1, 2, 10):
            manager.save(step, x=jnp.full(3000, step), note=f"step {step}")
    return tmp_path


@pytest.mark.parametrize("background", [True, False])
def test_save_and_restore_the_latest(tmp_path, background):
    with io.Manager(tmp_path / "run", background=background) as manager:
        assert manager.latest() is None and manager.steps() == []
        for step in range(2):
            model, optimizer = training(step)
            manager.save(step, model=model, optimizer=optimizer)
        other = training(7)
        restored = manager.restore(model=other[0], optimizer=other[1])
        assert restored.step == manager.latest() == 1
        assert bits(other) == bits((model, optimizer))
        manager.restore(0, model=other[0])
        assert bits(other[0]) == bits(training(0)[0])
    assert names_in(tmp_path / "run") == ["0", "1"]


def test_what_is_saved_in_the_background_is_what_was_there_at_the_call(tmp_path):
    model, host = OneOfEverything(3), np.ones(500_000)
    big = jnp.ones(1_000_000)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with io.Manager(tmp_path) as manager:
        manager.save(0, model=model, host=host, big=big)
        host[:] = 7
        big = add(add(big))
        for variable in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable)):
            if isinstance(variable, nnx.Param):
                variable[...] = variable[...] * 0
        restored = manager.restore(0, model=OneOfEverything(), host=host, big=...)
    assert bits(restored.model) == bits(OneOfEverything(3))
    assert restored.host.max() == 1 and restored.big.max() == 1 and big.max() == 3


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep_last": 2}, [4, 5]),
        ({"keep_last": None}, [0, 1, 2, 3, 4, 5]),
        ({"keep_last": 1, "keep_best": 2}, [1, 3, 5]),
        ({"keep_last": 1, "keep_best": 2, "best": "max"}, [0, 4, 5]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, options, left):
    scores = [9.0, 1.0, float("nan"), 1.0, 5.0, None]
    with io.Manager(tmp_path, **options) as manager:
        for step, score in enumerate(scores):
            manager.save(step, x=step, score=score)
        manager.wait()
        assert manager.steps() == left
        assert names_in(tmp_path) == sorted([".linnet-lock", *map(str, left)])
        if "keep_best" in options:
            assert manager.best() == (0 if options.get("best") == "max" else 3)


def test_a_new_manager_of_the_same_folder_goes_on(three):
    with io.Manager(three, keep_last=2) as manager:
        assert (manager.steps(), manager.latest(), manager.best()) == ([1, 2, 10], 10, None)
        manager.save(11, x=jnp.zeros(3000))
        manager.wait()
        assert manager.steps() == [10, 11]


def test_a_step_is_replaced_only_when_told(three):
    with io.Manager(three, keep_last=None) as manager:
        with pytest.raises(CheckpointExistsError, match="2 is there already"):
            manager.save(2, x=0)
        manager.save(2, x=0, overwrite=True)
        assert manager.restore(2).x == 0
        assert manager.steps() == [1, 2, 10]


@pytest.mark.parametrize("harm", [cut, flip])
def test_a_damaged_checkpoint_is_passed_over_and_named(three, harm):
    harm(three / "10")
    manager = io.Manager(three)
    with pytest.warns(DamagedCheckpointWarning) as caught:
        restored = manager.restore(x=...)
    assert restored.step == 2 and restored.x[0] == 2
    text = str(caught[0].message)
    assert f"{three / '10'} is damaged and passed over; step 2 is used instead: " in text
    with pytest.raises(DamagedCheckpointError) as error:
        manager.restore(10, x=...)
    assert f"The checkpoint {three / '10'} is damaged: " in str(error.value)
    assert f"Fix: restore {three / '2'}, which is whole." in str(error.value)


def test_latest_passes_over_what_is_plainly_damaged(three):
    cut(three / "10")
    (three / "11").mkdir()
    with pytest.warns(DamagedCheckpointWarning) as caught:
        assert io.Manager(three).latest() == 2
    told = [str(warning.message).split(" is damaged")[0] for warning in caught]
    assert told == [str(three / "11"), str(three / "10")]


def test_when_all_are_damaged_each_is_named(three):
    for step in (1, 2, 10):
        flip(three / str(step))
    with pytest.raises(DamagedCheckpointError) as caught:
        io.Manager(three).restore(x=...)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"Every checkpoint in {three} is damaged:"
    assert [line.split()[3] for line in lines[1:4]] == [str(three / s) for s in ("10", "2", "1")]


def test_nothing_to_restore_is_an_error_that_says_so(tmp_path, three):
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint in .*new"):
        io.Manager(tmp_path / "new").restore(x=...)
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint of step 3 in .*; there are 1, 2, 10"
    ):
        io.Manager(three).restore(3)


def test_a_checkpoint_of_another_model_is_no_damage(three):
    with pytest.raises(CheckpointMismatchError, match="model: not saved; there are note, step, x"):
        io.Manager(three).restore(model=OneOfEverything())


def test_what_other_programs_put_there_is_left_alone(three):
    (three / "20").mkdir()
    (three / "20" / "model.safetensors").write_bytes(b"")
    (three / "notes.txt").write_text("mine")
    with io.Manager(three, keep_last=1) as manager:
        with pytest.warns(DamagedCheckpointWarning, match="20 is damaged.*safetensors"):
            assert manager.restore(x=...).step == 10
        manager.save(11, x=0)
    assert names_in(three) == ["11", "20", "notes.txt"]


def test_a_second_manager_of_a_folder_waits_for_the_first(tmp_path):
    for step in range(3):
        manager = io.Manager(tmp_path)  # as when a cell of a notebook runs again
        manager.save(step, x=jnp.full(1_000_000, step))
    manager.close()
    assert manager.steps() == [0, 1, 2]
    assert all(io.restore(tmp_path / str(s)).x[-1] == s for s in range(3))


def test_threads_may_share_a_manager(tmp_path):
    manager, failures = io.Manager(tmp_path, keep_last=3), []

    def save(first):
        try:
            for step in range(first, first + 4):
                manager.save(step, x=jnp.full(5000, step))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(first,)) for first in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager.close()
    assert not failures
    assert names_in(tmp_path) == sorted(map(str, manager.steps())) and len(manager.steps()) == 3
    assert all((io.restore(tmp_path / str(s)).x == s).all() for s in manager.steps())


def test_the_step_is_known_of_what_plain_orbax_saved(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "7", {"x": jnp.arange(3)})
    restored = io.Manager(tmp_path).restore(x=jnp.zeros(3, int))
    assert restored.step == 7 and restored.x.tolist() == [0, 1, 2]


def test_leftovers_of_ended_processes_are_removed_at_the_next_save(three):
    for name in ("12.orbax-checkpoint-tmp", "1.linnet-removed", "2.linnet-new"):
        (three / name).mkdir()
    (three / "13.linnet-new").mkdir()  # it was to replace 13, which was away already
    with io.Manager(three, keep_last=None) as manager:
        assert manager.steps() == [1, 2, 10]
        manager.save(14, x=0)
    assert names_in(three) == ["1", "10", "13", "14", "2"]


@pytest.mark.parametrize("step", [-1, True, 1.5, "3", np.arange(2)], ids=str)
def test_a_step_is_a_whole_number(three, step):
    manager = io.Manager(three)
    for call in (manager.save, manager.restore):
        with pytest.raises(
            CheckpointArgumentError, match="A step is a whole number from 0 on, but"
        ):
            call(step, x=1)


@pytest.mark.parametrize("kind", [int, np.int64, jnp.asarray])
def test_a_step_may_be_an_array_and_a_keyword(three, kind):
    with io.Manager(three, keep_last=None) as manager:
        manager.save(kind(4), x=1)
        assert manager.restore(kind(4), x=0).step == 4
        assert manager.restore(step=kind(2), x=...).x[0] == 2
        manager.save(step=kind(5), x=1)
    assert manager.steps() == [1, 2, 4, 5, 10]


def test_a_run_that_goes_back_keeps_what_it_saves(three):
    with io.Manager(three, keep_last=2) as manager:
        manager.restore(2, x=...)
        for step, left in [(3, [3, 10]), (4, [3, 4])]:
            manager.save(step, x=jnp.zeros(3))
            manager.wait()
            assert manager.steps() == left


@pytest.mark.parametrize("score", ["good", jnp.ones(2)], ids=str)
def test_a_score_is_a_number(tmp_path, score):
    with pytest.raises(CheckpointArgumentError, match=r"A score is one number, but got .*\nFix: "):
        io.Manager(tmp_path).save(1, x=1, score=score)


def test_what_is_kept_may_be_counted_by_numpy(tmp_path):
    with io.Manager(tmp_path, keep_last=np.int64(2), keep_best=np.int32(0)) as manager:
        for step in range(3):
            manager.save(step, x=step)
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize(
    "options",
    [{"keep_last": 0}, {"keep_best": -1}, {"best": "most"}, {"keep_last": "3"},
     {"keep_best": 1.5}, {"keep_last": True}],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    text = r"Manager keeps at least the last checkpoint.*\nFix: io\.Manager\("
    with pytest.raises(CheckpointArgumentError, match=text):
        io.Manager(tmp_path, **options)
