"""What is saved by whom and where: odd items, arguments that are none, folders that are taken."""

import os
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import names_in

from linnet import io, nnx
from linnet.errors import (
    CheckpointArgumentError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    NotACheckpointError,
    RenameError,
    UnstorableError,
)


class Empty(nnx.Module):
    """A module that holds nothing."""


# ---- odd items ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "item", [b"x", [], {"a": ()}, 2**70, 1j, "\udc80", {"\udc80": 1}, None], ids=str
)
def test_a_value_that_orbax_cannot_hold_can_be_the_only_one(tmp_path, item):
    io.save(tmp_path / "a", x=item)
    assert io.restore(tmp_path / "a").x == item
    assert io.restore(tmp_path / "a", x=item).x == item


@pytest.mark.parametrize(
    ("items", "read"),
    [
        (
            {"name": "x", "notes": {"a": "y", "b": None}},
            {"name": "x", "notes": {"a": "y", "b": None}},
        ),
        ({"data": b"x"}, {"nothing": None}),
        ({"step": 3, "name": "x"}, {"step": 3, "name": "x"}),
        ({"array": np.arange(3)}, {"array": np.arange(3)}),
    ],
    ids=["texts", "bytes", "numbers", "arrays"],
)
def test_a_save_logs_no_warning_and_orbax_reads_it(tmp_path, caplog, items, read):
    io.save(tmp_path / "a", items)
    with io.Manager(tmp_path / "m") as manager:
        manager.save(1, items)
        manager.save(2, {"array": np.arange(3)})  # the same writer with arrays
        manager.save(3, items)
        manager.wait()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    for folder in (tmp_path / "a", tmp_path / "m" / "1", tmp_path / "m" / "3"):
        restored = io.restore(folder)
        for name, value in items.items():
            np.testing.assert_equal(restored[name], value)
        with ocp.PyTreeCheckpointer() as checkpointer:
            np.testing.assert_equal(checkpointer.restore(folder), read)


def test_a_model_without_variables_can_be_the_only_item(tmp_path):
    model = Empty()
    with io.Manager(tmp_path) as manager:
        manager.save(3, model=model)
        restored = manager.restore(model=model)
    assert restored.model is model and restored.step == 3


@pytest.mark.parametrize("make", [jnp.zeros, np.zeros])
def test_arrays_without_elements_come_back_as_they_were(tmp_path, make):
    io.save(tmp_path / "a", x=make((2, 0), jnp.bfloat16))
    for x in (
        io.restore(tmp_path / "a").x,
        io.restore(tmp_path / "a", x=make((2, 0), "bfloat16")).x,
    ):
        assert isinstance(x, jax.Array) is (make is jnp.zeros)
        assert x.shape == (2, 0) and x.dtype == jnp.bfloat16


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_no_keys_at_all_come_back_as_keys(tmp_path, impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)[:0]
    io.save(tmp_path / "a", keys=keys)
    for items in ({}, {"keys": keys}):
        found = io.restore(tmp_path / "a", items)["keys"]
        assert found.dtype == keys.dtype and found.shape == (0,)


@pytest.mark.parametrize(
    "dtype", ["uint4", "uint2", "int4", "int2", "float8_e4m3", "float4_e2m1fn"]
)
@pytest.mark.parametrize("host", [True, False])
def test_dtypes_that_orbax_does_not_know_come_back_bit_for_bit(tmp_path, dtype, host):
    x = np.array([[0, 1, 2], [3, 1, 0]]).astype(jnp.dtype(dtype))
    item = x if host else jnp.asarray(x)
    like = item[::-1]
    io.save(tmp_path / "a", x=item)
    for found in (io.restore(tmp_path / "a").x, io.restore(tmp_path / "a", x=like).x):
        assert isinstance(found, jax.Array) is not host
        assert found.dtype == x.dtype and np.asarray(found).tobytes() == x.tobytes()
    with pytest.raises(
        CheckpointMismatchError, match=rf"x: expected uint8.*, found {dtype}\[2, 3\]"
    ):
        io.restore(tmp_path / "a", x=np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize("number", [np.int64(5), np.float32(0.1), np.bool_(True), np.array(5)])
def test_numbers_of_numpy_come_back_as_numbers(tmp_path, number):
    io.save(tmp_path / "a", step=number)
    for items in ({}, {"step": number}):
        found = io.restore(tmp_path / "a", items).step
        assert type(found) is type(number) and found.dtype == number.dtype and found == number


def itself():
    """A list that holds itself."""
    loop = [1]
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"a": ...}, "x/a is ..., which stands for whatever was saved, and only restoring knows."),
        (np.ma.masked_array([1, 2], [0, 1]), "x is a masked array, and its mask would be lost."),
        (itself(), "x holds itself, or containers inside each other without end."),
    ],
    ids=range(3),
)
def test_what_would_be_lost_is_refused_by_path(tmp_path, item, text):
    with pytest.raises(UnstorableError, match=re.escape(text) + r"\nFix: "):
        io.save(tmp_path / "a", x=item, other=1)
    assert not list(tmp_path.iterdir())


# ---- arguments ----------------------------------------------------------------------------------


def test_items_without_a_name_are_refused(tmp_path):
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    io.save(tmp_path / "a", model=model)
    manager = io.Manager(tmp_path / "run")
    text = r"Items have names: expected a mapping .*, but got a Linear\.\nFix: {}\.$"
    for call, fix in [
        (lambda: io.save(tmp_path / "b", model), r"io\.save\(path, model=model\)"),
        (lambda: manager.save(1, model), r"io\.save\(path, model=model\)"),
        (lambda: io.restore(tmp_path / "a", model), r"io\.restore\(path, model=model\)"),
        (lambda: io.load_tree({}, model), r"io\.load_tree\(tree, model=model\)"),
        (lambda: manager.restore(1, model), r"manager\.restore\(model=model\)"),
    ]:
        with pytest.raises(CheckpointArgumentError, match=text.format(fix)):
            call()
    with pytest.raises(CheckpointArgumentError, match=r"nested dicts, but got a Linear\.\nFix: "):
        io.load_tree(model, model=model)
    with pytest.raises(RenameError, match=r"or None, but got 'kernel'\.\nFix: rename="):
        io.restore(tmp_path / "a", model=model, rename="kernel")


@pytest.mark.parametrize("path", [None, 3, "", b"a"])
def test_a_path_is_text(path):
    text = rf"path is text or a pathlib\.Path, but got {re.escape(repr(path))}\.\nFix: "
    for call in (lambda: io.save(path, x=1), lambda: io.restore(path), lambda: io.Manager(path)):
        with pytest.raises(CheckpointArgumentError, match=text):
            call()


# ---- folders ------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "main.py").write_text("print()")
    (tmp_path / "file").write_text("text")
    with io.Manager(tmp_path / "run") as manager:
        manager.save(1, x=1)
    for name in ("project", "file", "run"):
        text = f"{tmp_path / name} is there already, and is not a checkpoint: it is not replaced."
        with pytest.raises(CheckpointExistsError, match=re.escape(text) + r"\nFix: .*yourself\."):
            io.save(tmp_path / name, x=1, overwrite=True)
    assert names_in(tmp_path) == ["file", "project", "run"]
    assert names_in(tmp_path / "project") == ["main.py"] and names_in(tmp_path / "run") == ["1"]


def test_an_empty_folder_and_a_damaged_checkpoint_are_replaced_when_told(tmp_path):
    (tmp_path / "a").mkdir()
    io.save(tmp_path / "a", x=1, overwrite=True)
    (tmp_path / "a" / "linnet.json").write_text("")
    io.save(tmp_path / "a", x=2, overwrite=True)
    assert io.restore(tmp_path / "a").x == 2


def test_links_that_lead_nowhere_and_files_are_called_by_their_name(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError, match=r"link: it is a link to .*gone\.\nFix: "):
        io.restore(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotACheckpointError, match=r"Orbax\. It is a file\.\nFix: "):
        io.restore(tmp_path / "file")


def test_of_checkpoints_without_a_number_the_newest_is_offered(tmp_path):
    for age, name in enumerate(["b", "a", "c9", "c10"]):
        io.save(tmp_path / name, x=1)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    with pytest.raises(CheckpointNotFoundError, match=r"Fix: restore .*/b, which is whole"):
        io.restore(tmp_path / "d")


# ---- threads ------------------------------------------------------------------------------------


def test_threads_save_to_their_own_folders_at_the_same_time(tmp_path):
    interval = sys.getswitchinterval()
    gate, failures = threading.Barrier(4), []

    def save(number):
        try:
            gate.wait()
            for step in range(3):
                io.save(tmp_path / f"{number}-{step}", x=jnp.full((50,), number))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number in range(4):
        for step in range(3):
            assert (io.restore(tmp_path / f"{number}-{step}").x == number).all()
    assert len(names_in(tmp_path)) == 12
    assert sys.getswitchinterval() == interval
