"""Checkpoints of flax.training: files and Orbax folders, names, what is kept, what is refused."""

import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import config
from linnet.errors import (
    CheckpointArgumentError,
    CheckpointExistsError,
    InvalidCheckpointError,
    MissingStepError,
    MPARestoreDataCorruptedError,
    MPARestoreTargetRequiredError,
)
from linnet.training import checkpoints, orbax_utils
from linnet.training.checkpoints import restore_checkpoint, save_checkpoint
from linnet.training.train_state import TrainState
from tests.compare import assert_equal
from tests.models import disk_full

TREE = {"w": np.arange(3.0), "n": {"b": jnp.ones(2), "c": 3}, "l": [1, 2]}

# What Flax 0.12.8 wrote for {"w": float32[3], "n": [1, bfloat16[1, 2]]}.
WRITTEN_BY_FLAX = (
    b"\x82\xa1w\xc7\x19\x01\x93\x91\x03\xa7float32\xc4\x0c\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@"
    b"\xa1n\x82\xa10\x01\xa11\xc7\x13\x01\x93\x92\x01\x02\xa8bfloat16\xc4\x04\x80?\x80?"
)


@pytest.fixture(params=["orbax", "file"])
def kind(request):
    usual = config.flax_use_orbax_checkpointing
    config.update("flax_use_orbax_checkpointing", request.param == "orbax")
    yield request.param
    config.update("flax_use_orbax_checkpointing", usual)


@pytest.fixture
def files():
    usual = config.flax_use_orbax_checkpointing
    config.update("flax_use_orbax_checkpointing", False)
    yield
    config.update("flax_use_orbax_checkpointing", usual)


def names(folder):
    return sorted(os.listdir(folder))


def test_saving_and_restoring(kind, tmp_path):
    path = save_checkpoint(tmp_path, TREE, 1)
    assert path == str(tmp_path / "checkpoint_1")
    assert os.path.isdir(path) == (kind == "orbax")
    assert_equal(restore_checkpoint(tmp_path, TREE), TREE)
    assert_equal(restore_checkpoint(path, TREE), TREE)
    assert_equal(restore_checkpoint(tmp_path, None), {**TREE, "l": {"0": 1, "1": 2}})


@pytest.mark.parametrize(
    "wrong", [{"step": None}, {"step": "x"}, {"step": 1, "keep": None}, {"step": 1, "keep": 1.5}]
)
def test_what_is_no_step_or_no_number_to_keep(kind, tmp_path, wrong):
    with pytest.raises(CheckpointArgumentError) as caught:
        save_checkpoint(tmp_path, TREE, **wrong)
    step, keep = wrong["step"], wrong.get("keep", 1)
    assert str(caught.value) == (
        "save_checkpoint takes a number as step, and a whole number of checkpoints to keep, but "
        f"got step={step!r}, keep={keep!r}.\n"
        "Fix: save_checkpoint(folder, target, step, keep=3); keep=0 keeps all."
    )
    assert names(tmp_path) == []


def test_folders_of_other_programs_are_not_removed(kind, tmp_path):
    for name in ("checkpoint_0", "checkpoint_9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, TREE, step, keep=2, overwrite=True)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_2", "checkpoint_3", "checkpoint_9"]


def test_a_file_is_replaced_in_one_step(files, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, TREE, 1)

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, {"other": 1}, 1, overwrite=True)
    assert_equal(restore_checkpoint(tmp_path, TREE), TREE)


def test_an_error_of_orbax_names_the_checkpoint(tmp_path):
    path = save_checkpoint(tmp_path, TREE, 1)
    (tmp_path / "checkpoint_1" / "_METADATA").write_text("{")
    with pytest.raises(ValueError) as caught:
        restore_checkpoint(tmp_path, None)
    assert caught.value.__notes__ == [f"Raised while Orbax read the checkpoint {path}."]


def test_a_train_state(kind, tmp_path):
    def state(value):
        params = {"w": jnp.full(2, value)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    saved = state(2.0).apply_gradients(grads={"w": jnp.ones(2)})
    save_checkpoint(tmp_path, saved, 5)
    found = restore_checkpoint(tmp_path, state(0.0))
    assert int(found.step) == 1
    assert_equal(found.params, saved.params)
    assert_equal(found.opt_state, saved.opt_state)


def test_files_are_those_of_flax(files, tmp_path):
    tree = {"w": np.arange(3, dtype=np.float32), "n": [1, jnp.ones((1, 2), jnp.bfloat16)]}
    path = save_checkpoint(tmp_path, tree, 7)
    assert pathlib.Path(path).read_bytes() == WRITTEN_BY_FLAX
    assert_equal(restore_checkpoint(tmp_path, tree), tree)
    assert names(tmp_path) == ["checkpoint_7"]


def test_the_last_ones_are_kept(kind, tmp_path):
    for step in range(4):
        save_checkpoint(tmp_path, {"a": np.ones(1)}, step, keep=2)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    assert checkpoints.latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint_3")
    assert checkpoints.available_steps(tmp_path) == [2, 3]


def test_overwriting_goes_back(kind, tmp_path):
    for step in (3, 4, 5):
        save_checkpoint(tmp_path, {"a": np.ones(1)}, step, keep=3)
    save_checkpoint(tmp_path, {"a": np.zeros(1)}, 4, keep=3, overwrite=True)
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]
    assert restore_checkpoint(tmp_path, None)["a"] == 0


@pytest.mark.parametrize(
    ("steps", "keep", "kept"),
    [
        (range(10), 1, [1, 4, 7, 9]),
        (range(2, 12), 1, [2, 5, 8, 11]),
        (range(12), 2, [1, 4, 7, 10, 11]),
    ],
)
def test_some_in_between_are_kept(files, tmp_path, steps, keep, kept):
    for step in steps:
        save_checkpoint(tmp_path, {"a": 1}, step, keep=keep, keep_every_n_steps=3)
    assert checkpoints.available_steps(tmp_path) == kept


def test_older_steps_are_refused(files, tmp_path):
    save_checkpoint(tmp_path, TREE, 2)
    for step in (1, 2, 1.5):
        with pytest.raises(InvalidCheckpointError) as error:
            save_checkpoint(tmp_path, TREE, step)
        assert str(tmp_path / f"checkpoint_{step}") in str(error.value)
    assert names(tmp_path) == ["checkpoint_2"]


def test_a_folder_is_not_replaced_unasked(tmp_path):
    save_checkpoint(tmp_path, TREE, 2)
    with pytest.raises(CheckpointExistsError, match="checkpoint_2 is there already"):
        save_checkpoint(tmp_path, TREE, 2)


def test_what_was_just_saved_stays(tmp_path):
    save_checkpoint(tmp_path, {"a": np.ones(1)}, 5)
    save_checkpoint(tmp_path, {"a": np.ones(1)}, 3)
    assert "checkpoint_3" in names(tmp_path)


def test_prefixes_and_fractions_of_steps(files, tmp_path):
    for step in (0.5, 1.5, 10.0):
        save_checkpoint(tmp_path, {"a": 1}, step, prefix="best_", keep=9)
    assert checkpoints.available_steps(tmp_path, "best_", float) == [0.5, 1.5, 10.0]
    assert checkpoints.latest_checkpoint(tmp_path, "best_") == str(tmp_path / "best_10.0")
    assert checkpoints.latest_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="invalid literal"):
        checkpoints.available_steps(tmp_path, "best_")


def test_leftovers_are_no_checkpoints(tmp_path):
    for name in (
        "checkpoint_1",
        "checkpoint_10",
        "checkpoint_20.linnet-tmp",
        "checkpoint_30.orbax-checkpoint-tmp-3",
        "checkpoint_tmp",
        "checkpoint_7_gda",
        "other_5",
    ):
        (tmp_path / name).touch()
    assert checkpoints.available_steps(tmp_path) == [1, 10]


def test_what_a_killed_process_left_is_removed_by_the_next_save(files, tmp_path):
    for name in ("checkpoint_1.0.linnet-tmp", "checkpoint_20.linnet-tmp", "other_5.linnet-tmp"):
        (tmp_path / name).touch()
    save_checkpoint(tmp_path, TREE, 21)
    assert names(tmp_path) == ["checkpoint_21", "other_5.linnet-tmp"]


def test_a_write_that_fails_leaves_what_was_there(files, tmp_path, monkeypatch):
    save_checkpoint(tmp_path, TREE, 1)

    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OSError, match="checkpoint_2 could not be written: No space left on device"):
        save_checkpoint(tmp_path, TREE, 2)
    assert checkpoints.available_steps(tmp_path) == [1]
    assert_equal(restore_checkpoint(tmp_path, TREE), TREE)


def test_without_a_checkpoint_the_target_comes_back(tmp_path):
    assert restore_checkpoint(tmp_path, TREE) is TREE
    assert restore_checkpoint(tmp_path / "nowhere", TREE) is TREE
    with pytest.raises(ValueError, match="Matching checkpoint not found") as error:
        restore_checkpoint(tmp_path, TREE, step=3)
    assert isinstance(error.value, MissingStepError)
    assert "has no checkpoint" in str(error.value)


def test_a_step_is_chosen(files, tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, {"a": step}, step, keep=2)
    assert restore_checkpoint(tmp_path, None, step=1) == {"a": 1}
    with pytest.raises(MissingStepError, match="has checkpoint_1, checkpoint_2"):
        restore_checkpoint(tmp_path, None, step=3)


def test_another_thread_writes(kind, tmp_path):
    manager = checkpoints.AsyncManager()
    for step in range(3):
        save_checkpoint(tmp_path, {"a": np.ones(1)}, step, keep=2, async_manager=manager)
    manager.wait_previous_save()
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]
    manager.save_async(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.wait_previous_save()


def test_a_given_checkpointer(files, tmp_path):
    import orbax.checkpoint as ocp

    own = ocp.PyTreeCheckpointer()
    path = checkpoints.save_checkpoint_multiprocess(tmp_path, TREE, 1, orbax_checkpointer=own)
    assert os.path.isdir(path)
    assert_equal(restore_checkpoint(tmp_path, TREE, orbax_checkpointer=own), TREE)
    some = restore_checkpoint(tmp_path, {"w": np.zeros(3)}, orbax_transforms={})
    np.testing.assert_array_equal(some["w"], TREE["w"])


def test_a_checkpoint_of_the_other_kind_in_the_way(files, tmp_path, monkeypatch):
    """It is put away, not removed, before the new one has its name."""
    import orbax.checkpoint as ocp

    class Failing(ocp.PyTreeCheckpointer):
        def save(self, *args, **kwargs):
            disk_full()

    own = ocp.PyTreeCheckpointer()
    save_checkpoint(tmp_path, TREE, 1)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, TREE, 1, overwrite=True, orbax_checkpointer=Failing())
    assert_equal(restore_checkpoint(tmp_path, TREE), TREE)
    path = save_checkpoint(tmp_path, TREE, 1, overwrite=True, orbax_checkpointer=own)
    assert os.path.isdir(path)
    assert names(tmp_path) == ["checkpoint_1"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_through", disk_full)
        with pytest.raises(OSError, match="checkpoint_1 could not be written"):
            save_checkpoint(tmp_path, TREE, 1, overwrite=True)
    assert os.path.isdir(path)
    save_checkpoint(tmp_path, TREE, 1, overwrite=True)
    assert os.path.isfile(path)
    assert names(tmp_path) == ["checkpoint_1"]


def test_arrays_that_other_processes_wrote(files, tmp_path):
    save_checkpoint(tmp_path, {"w": {"k": "//GDAPlaceholder:w/k"}, "b": 2}, 1)
    with pytest.raises(MPARestoreTargetRequiredError):
        restore_checkpoint(tmp_path, None)
    target = {"w": {"k": np.ones(2)}, "b": 0}
    with pytest.raises(MPARestoreDataCorruptedError):
        restore_checkpoint(tmp_path, target)
    found = restore_checkpoint(tmp_path, target, allow_partial_mpa_restoration=True)
    assert_equal(found, {"w": {"k": np.ones(2)}, "b": 2})


@pytest.mark.parametrize(
    ("given", "signed", "wanted"),
    [
        (["f_11", "f_2", "f_1", "a"], True, ["a", "f_1", "f_2", "f_11"]),
        (["1.5", "1.25", "-3", "-10", "1e3"], True, ["-10", "-3", "1.25", "1.5", "1e3"]),
        (["f_1e-5", "f_0.5", "f_-1", "f_+2"], True, ["f_-1", "f_1e-5", "f_0.5", "f_+2"]),
        (["f-1", "f-10", "f-2"], False, ["f-1", "f-2", "f-10"]),
        (["f-1", "f-10", "f-2"], True, ["f-10", "f-2", "f-1"]),
    ],
)
def test_natural_sort(given, signed, wanted):
    assert checkpoints.natural_sort(given, signed) == wanted


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("gs://a//b/../c", "gs://a/c"), ("/a//b/../c", "/a/c"), ("a/./b", "a/b"), ("", ".")],
)
def test_safe_normpath(path, wanted):
    assert checkpoints.safe_normpath(path) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {"Dense_1": {"k": 1}, "Conv_2": 2, "Dense_10": 3},
            {"Conv_0": 2, "Dense_0": {"k": 1}, "Dense_1": 3},
        ),
        (
            {"Net_3": {"named": {"Dense_5": 1}}, "0": 4},
            {"0": 4, "Net_0": {"named": {"Dense_0": 1}}},
        ),
        (5, 5),
    ],
)
def test_convert_pre_linen(given, wanted):
    assert checkpoints.convert_pre_linen(given) == wanted


def test_how_orbax_is_told():
    target = {"a": np.ones(3), "b": jnp.ones(2), "c": 3, "e": None}
    saved = orbax_utils.save_args_from_target(target)
    assert [type(saved[k]).__name__ for k in "abc"] == ["SaveArgs"] * 3
    restored = orbax_utils.restore_args_from_target(target)
    assert (restored["a"].restore_type, restored["a"].dtype) == (np.ndarray, np.float64)
    assert restored["b"].sharding == target["b"].sharding
    assert (restored["c"].restore_type, restored["e"]) == (int, None)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    assert orbax_utils.restore_args_from_target(target, mesh)["b"].sharding.mesh == mesh
    assert orbax_utils.maybe_construct_transformations(target, {"a": 1}) == {"a": 1}
    assert list(orbax_utils.maybe_construct_transformations(target, None)) == ["e"]
    assert not orbax_utils.is_multi_device_array(target["b"])


def test_a_target_that_is_not_all_of_a_checkpoint(kind, tmp_path):
    saved = {"params": {"w": jnp.ones(2)}, "step": 3, "list": [jnp.zeros(1), 2.5]}
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    part = restore_checkpoint(tmp_path, {"params": {"w": jnp.zeros(2)}})
    assert part["params"]["w"].tolist() == [1, 1] and part.keys() == {"params"}
    assert restore_checkpoint(tmp_path, {"list": [0, 0]})["list"][1] == 2.5
    assert restore_checkpoint(tmp_path, {"params": {"w": 0}})["params"]["w"].tolist() == [1, 1]


def test_entries_that_a_checkpoint_lacks_are_kept_with_a_warning(tmp_path):
    path = checkpoints.save_checkpoint(tmp_path, {"params": {"w": jnp.ones(2)}}, 1)
    target = {"params": {"w": jnp.zeros(2), "new": jnp.zeros(1)}, "more": 5}
    text = re.escape(f"{path} has no more, params/new: the values of the target are kept.\nFix: ")
    with pytest.warns(UserWarning, match=text):
        found = restore_checkpoint(tmp_path, target)
    assert found["params"]["w"].tolist() == [1, 1] and found["params"]["new"].tolist() == [0]
    assert found["more"] == 5
