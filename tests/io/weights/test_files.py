import json
import os

import numpy as np
import pytest
import safetensors.numpy
from tensor_bytes import entry, header_bytes

from linnet.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NotACheckpointError,
    TensorFileError,
    UnsafePathError,
)
from linnet.io.weights import files as tensor_files
from linnet.io.weights.files import open_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    """A folder with two files and an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, folder / FIRST)
    safetensors.numpy.save_file({"b.c": np.arange(3)}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b.c": SECOND})
    return folder


def write_index(folder, weight_map, **more):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **more}))


@pytest.mark.parametrize("name", ["", INDEX], ids=["folder", "index"])
def test_sharded_model_is_read_as_one(sharded, name):
    with open_tensors(sharded / name) as files:
        assert {n: t.spec.shape for n, t in files.tensors.items()} == {"a": (2,), "b.c": (3,)}
        assert files.read("b.c").tolist() == [0, 1, 2]
        assert files.read("b.c", (2,)).item() == 2


@pytest.mark.parametrize("name", ["model.safetensors", "adapter.safetensors"])
def test_a_folder_with_one_file_is_that_file(tmp_path, name):
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    with open_tensors(tmp_path) as files:
        assert files.path == str(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".hidden", "a\\b",
     "C:x", "a\0b", "a\ud800", "a" * 256],
)  # fmt: skip
def test_index_that_names_a_path_is_refused_before_anything_is_opened(sharded, name, monkeypatch):
    safetensors.numpy.save_file({"a": np.ones(2)}, sharded.parent / "outside.safetensors")
    write_index(sharded, {"a": name, "b.c": SECOND})
    monkeypatch.setattr(tensor_files, "TensorFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(UnsafePathError) as error:
        open_tensors(sharded)
    assert str(error.value) == (
        f"{sharded / INDEX} names the file {name[:100]!r}, which is not the plain name of a file "
        "beside it.\nFix: do not load this; ask whoever made it."
    )


def test_a_link_out_of_the_folder_is_refused(sharded):
    outside = sharded.parent / "secret"
    os.rename(sharded / FIRST, outside)
    os.symlink(outside, sharded / FIRST)
    with pytest.raises(UnsafePathError) as error:
        open_tensors(sharded)
    assert str(error.value) == (
        f"{sharded / FIRST} leads to {outside}, outside of its folder.\n"
        "Fix: if you trust it, copy it into the folder, or name the file itself."
    )


def test_links_inside_the_folder_and_of_the_hugging_face_cache_are_followed(sharded):
    os.rename(sharded / FIRST, sharded / "real")
    os.symlink("real", sharded / FIRST)
    blobs, snapshot = sharded.parent / "repo/blobs", sharded.parent / "repo/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    os.rename(sharded / SECOND, blobs / "0123")
    for name in ("real", FIRST):
        os.rename(sharded / name, snapshot / name)
    os.rename(sharded / INDEX, blobs / "4567")
    os.symlink("../../blobs/0123", snapshot / SECOND)
    os.symlink("../../blobs/4567", snapshot / INDEX)
    with open_tensors(snapshot) as files:
        assert files.read("a").tolist() == [1.0, 1.0]
        assert files.read("b.c").tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_link_is_followed_where_the_user_names_it_and_not_where_a_folder_has_it(sharded, name):
    folder = sharded.parent / "links"
    folder.mkdir()
    target = sharded / (INDEX if name == INDEX else FIRST)
    os.symlink(target, folder / name)
    with pytest.raises(UnsafePathError, match=f"{name} leads to {target}, outside of its folder"):
        open_tensors(folder)
    if name != INDEX:
        with open_tensors(folder / name) as files:
            assert list(files.tensors) == ["a"]


@pytest.mark.parametrize("name", [FIRST, INDEX])
def test_a_pipe_is_refused_and_does_not_hang(sharded, name):
    os.unlink(sharded / name)
    os.mkfifo(sharded / name)
    with pytest.raises(UnsafePathError, match=f"{name} is not a regular file"):
        open_tensors(sharded)


BAD_INDEXES = {
    "not JSON": ("{", "is not proper JSON: Expecting property name"),
    "a list": ("[]", "has no weight_map from the names of tensors to the names of files"),
    "no map": ('{"metadata": {}}', "has no weight_map"),
    "map of numbers": ('{"weight_map": {"a": 1}}', "has no weight_map"),
    "map of lists": ('{"weight_map": {"a": ["x"]}}', "has no weight_map"),
    "duplicate key": (
        '{"weight_map": {"a": "x", "a": "y"}}',
        "is not proper JSON: it has the key 'a' twice",
    ),
    "constant": ('{"weight_map": {}, "metadata": NaN}', "NaN is no JSON"),
    "long number": ('{"metadata": %s}' % ("9" * 500), "it has a number of 500 digits"),
    "deep nesting": ("[" * 9_000, "is nested more than 50 deep"),
    "many lists": ("[" + "[]," * 20_000 + "[]]", "has 20002 lists and objects; 10000 are allowed"),
    "not text": (b"\xff\xfe\xfd", "is not proper JSON"),
    "many files": (
        json.dumps({"weight_map": {str(n): str(n) for n in range(10_001)}}),
        "names 10001 files; 10000 are allowed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_bad_index_is_refused(case, sharded):
    text, expected = BAD_INDEXES[case]
    (sharded / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedCheckpointError) as error:
        open_tensors(sharded)
    assert str(error.value).startswith(str(sharded / INDEX))
    assert expected in str(error.value)


def test_an_index_of_great_size_is_not_read(sharded):
    with open(sharded / INDEX, "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedCheckpointError, match="has 1099511627776 bytes; 33554432 are"):
        open_tensors(sharded)


def test_index_and_files_have_to_agree(sharded):
    write_index(sharded, {"a": FIRST, "b.c": FIRST})
    with pytest.raises(TensorFileError, match=rf"says that b.c is in {FIRST}, but it is not"):
        open_tensors(sharded)
    write_index(sharded, {"a": FIRST, "b.c": SECOND})
    safetensors.numpy.save_file({"a": np.ones(2), "x": np.ones(2)}, sharded / FIRST)
    with pytest.raises(TensorFileError, match=rf"{FIRST} holds x, which .*{INDEX} does not name"):
        open_tensors(sharded)


def test_a_missing_shard_is_named(sharded):
    os.unlink(sharded / SECOND)
    message = f"{INDEX} names {SECOND}, and there is no such file.\nFix: download or copy all files"
    with pytest.raises(CheckpointNotFoundError, match=message):
        open_tensors(sharded)


def test_nothing_is_left_open_when_a_shard_is_refused(sharded):
    before = len(os.listdir("/proc/self/fd"))
    (sharded / SECOND).write_bytes(header_bytes({"a": entry()}, b""))
    with pytest.raises(TensorFileError, match=SECOND):
        open_tensors(sharded)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pickles_are_never_opened(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for magic, tool in ((b"PK\x03\x04rest", "PyTorch"), (b"\x80\x02}q\x00.....", "pickle")):
        path.write_bytes(magic)
        with pytest.raises(NotACheckpointError) as error:
            open_tensors(path)
        assert f"{path} is a {tool} file, which can run any code when it is opened" in str(
            error.value
        )
        assert "Fix: in PyTorch, load it with weights_only=True" in str(error.value)


def test_what_is_not_there_or_ambiguous_is_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=f"There is no {tmp_path}/none.\nFix: check"):
        open_tensors(tmp_path / "none")
    with pytest.raises(NotACheckpointError, match=r"it holds nothing\.\nFix: name the folder"):
        open_tensors(tmp_path)
    for name in ("a", "b"):
        safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(NotACheckpointError) as error:
        open_tensors(tmp_path)
    assert "holds a.safetensors, b.safetensors and none of them is model.safetensors" in str(
        error.value
    )


@pytest.mark.parametrize("size", [3, (1 << 18) + 5])
def test_equality_of_tensors_is_by_bytes(tmp_path, size):
    a = np.arange(size, dtype=np.float32)
    b = a.copy()
    b[-1] += 1
    safetensors.numpy.save_file(
        {"a": a, "same": a, "b": b, "short": a[1:], "int": a.view(np.int32)},
        tmp_path / "x.safetensors",
    )
    with open_tensors(tmp_path) as files:
        assert [files.are_equal("a", n) for n in ("same", "b", "short", "int")] == [
            True, False, False, False,
        ]  # fmt: skip
