import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from linnet import io, nnx
from linnet.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointWriteError,
    NameMapError,
    UnstorableError,
)
from linnet.io import names
from linnet.io.weights import files as tensor_files

INDEX = "model.safetensors.index.json"


def arrays(count=4, size=16):
    return {f"layer.{n}": np.full(size, n, np.float32) for n in range(count)}


def read_back(path):
    return {name: x.tolist() for name, x in safetensors.numpy.load_file(path).items()}


def test_the_formats_own_library_reads_what_is_written(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    path = tmp_path / "x.safetensors"
    io.save_safetensors(path, model, metadata={"note": "ä"})
    assert read_back(path) == {
        "kernel": model.kernel[...].tolist(),
        "bias": model.bias[...].tolist(),
    }
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"note": "ä"}


def test_bytes_are_those_of_the_formats_own_library(tmp_path):
    tree = {"b": np.arange(3), "a": {"x": np.float32([1, 2]), "y": np.ones((2, 2), np.float16)}}
    path = tmp_path / "x.safetensors"
    io.save_safetensors(path, tree)
    flat = {"b": tree["b"], "a.x": tree["a"]["x"], "a.y": tree["a"]["y"]}
    assert path.read_bytes() == safetensors.numpy.save(flat)


def test_a_folder_gets_one_file_or_several_with_an_index(tmp_path):
    tree = arrays(12, 16)  # 64 bytes each
    io.save_safetensors(tmp_path / "one", tree)
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    io.save_safetensors(tmp_path / "many", tree, max_shard_bytes=256)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "many")) == [*shards, INDEX]
    # Layer 10 comes behind layer 9, as in the model.
    last = ["layer.10", "layer.11", "layer.8", "layer.9"]
    assert list(read_back(tmp_path / "many" / shards[2])) == last
    index = (tmp_path / "many" / INDEX).read_text()
    assert index == json.dumps(json.loads(index), indent=2, sort_keys=True) + "\n"
    assert json.loads(index)["metadata"] == {"total_size": 12 * 64}
    assert json.loads(index)["weight_map"]["layer.4"] == shards[1]
    loaded = io.load_safetensors(tmp_path / "many", {n: x * 0 - 1 for n, x in tree.items()}).model
    assert loaded.keys() == tree.keys()
    assert all((loaded[name] == tree[name]).all() for name in tree)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    tree = {"a": np.zeros(1), "b": np.zeros(100), "c": np.zeros(1)}
    io.save_safetensors(tmp_path, tree, max_shard_bytes=64)
    homes = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert len(set(homes.values())) == 3


def test_other_files_stay_and_an_older_model_goes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    io.save_safetensors(tmp_path, arrays(), max_shard_bytes=64)
    with pytest.raises(CheckpointExistsError, match=r"model.*is there already"):
        io.save_safetensors(tmp_path, arrays(), max_shard_bytes=64)
    io.save_safetensors(tmp_path, arrays(), max_shard_bytes=128, overwrite=True)
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(os.listdir(tmp_path)) == ["config.json", *shards, INDEX]
    io.save_safetensors(tmp_path, arrays(), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch):
    io.save_safetensors(tmp_path, arrays(), max_shard_bytes=64)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    written = []

    def fail(file):
        written.append(file.name)
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "flush", fail)
    with pytest.raises(CheckpointWriteError, match="could not be written: No space left on device"):
        io.save_safetensors(tmp_path, arrays(5), max_shard_bytes=128, overwrite=True)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_no_index_ever_names_files_of_two_models(tmp_path, monkeypatch):
    io.save_safetensors(tmp_path, arrays(), max_shard_bytes=64)
    real, calls = os.replace, []

    def replace_once(old, new):
        calls.append(new)
        if len(calls) > 1:
            raise KeyboardInterrupt
        real(old, new)

    monkeypatch.setattr(tensor_files.os, "replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        io.save_safetensors(tmp_path, arrays(4, 8), max_shard_bytes=64, overwrite=True)
    assert INDEX not in os.listdir(tmp_path)


UNSTORABLE = {
    "abstract": (
        lambda: {"x": jax.ShapeDtypeStruct((2,), jnp.float32)},
        "x is abstract: it has a shape and no value.",
    ),
    "plain value": (lambda: {"step": 3}, "step is int, and a safetensors file holds arrays."),
    "dtype": (
        lambda: {"a": {"x": jnp.zeros(2, jnp.int4)}},
        "a/x is int4[2], a dtype that safetensors files do not have.",
    ),
    "complex": (
        lambda: {"x": np.zeros(2, np.complex128)},
        "x is complex128[2], a dtype that safetensors files do not have.",
    ),
    "text": (
        lambda: {"x": np.array(["a"])},
        "x is str32[1], a dtype that safetensors files do not have.",
    ),
    "masked": (
        lambda: {"x": np.ma.masked_array([1.0, 2.0], [True, False])},
        "x is a masked array, and its mask would be lost.",
    ),
}


@pytest.mark.parametrize("case", UNSTORABLE)
def test_what_cannot_be_stored_is_named_and_nothing_is_written(case, tmp_path):
    make, text = UNSTORABLE[case]
    with pytest.raises(UnstorableError) as error:
        io.save_safetensors(tmp_path / "x.safetensors", make())
    assert str(error.value) == f"{text}\nFix: only=... to leave it out, or io.save."
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("__metadata__", "that is the name of the metadata"),
        ("n" * 4097, "a name has at most 4096 characters"),
        ("\ud800", "that has a lone surrogate in it"),
    ],
    ids=["metadata", "long", "half"],
)
def test_names_that_no_file_can_have_are_refused(name, why, tmp_path):
    with pytest.raises(UnstorableError) as error:
        io.save_safetensors(tmp_path / "x.safetensors", {name: np.ones(2)})
    assert str(error.value) == (
        f"{name[:100]} would be stored as {name[:100]!r}, and {why}.\n"
        "Fix: give it another name, or pass a map of names."
    )
    assert os.listdir(tmp_path) == []


def test_donated_and_traced_arrays_are_named(tmp_path):
    x = jnp.zeros(3)
    x.delete()
    with pytest.raises(UnstorableError, match="x was given away: its buffer was donated"):
        io.save_safetensors(tmp_path / "x.safetensors", {"x": x})
    with pytest.raises(UnstorableError, match="x is traced: nothing can be saved inside"):
        jax.jit(lambda x: io.save_safetensors(tmp_path / "x.safetensors", {"x": x}))(jnp.zeros(2))


def test_one_file_is_not_divided(tmp_path):
    with pytest.raises(UnstorableError, match=r"is one file, and max_shard_bytes asks for several"):
        io.save_safetensors(tmp_path / "x.safetensors", arrays(), max_shard_bytes=64)


def test_two_entries_of_one_name_are_refused(tmp_path):
    with pytest.raises(NameMapError) as error:
        io.save_safetensors(tmp_path / "x.safetensors", {"a.b": np.ones(1), "a": {"b": np.ones(1)}})
    assert "('a', 'b') and ('a.b',) would both be stored as a.b" in str(error.value)


REFUSED = {
    "text for bytes": (
        {"max_shard_bytes": "50KB"},
        "max_shard_bytes is a number of bytes, but got '50KB'.\n"
        "Fix: 5_000_000_000 for files of 5 GB.",
    ),
    "whole numbers": (
        {"dtype": "int8"},
        "dtype is for floating-point numbers, but got 'int8'.\nFix: dtype=jnp.bfloat16, or convert "
        "the weights yourself.",
    ),
    "no dtype": (
        {"dtype": "bf16"},
        "dtype is for floating-point numbers, but got 'bf16'.\nFix: dtype=jnp.bfloat16, or convert "
        "the weights yourself.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_would_lose_something_are_refused(case, tmp_path):
    options, text = REFUSED[case]
    with pytest.raises(UnstorableError) as error:
        io.save_safetensors(tmp_path / "new", {"x": jnp.full(2, 0.5)}, **options)
    assert str(error.value) == text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_the_name_of_a_file_is_left_alone(overwrite, tmp_path):
    place = tmp_path / "x.safetensors"
    place.mkdir()
    with pytest.raises(CheckpointExistsError) as error:
        io.save_safetensors(place, {"x": jnp.ones(2)}, overwrite=overwrite)
    assert str(error.value) == (
        f"{place} is a folder, and would be a file by its name.\nFix: save under another name."
    )
    assert list(place.iterdir()) == []


def test_a_slash_in_a_key_stays_one(tmp_path):
    nest = {"a": {"b/c": np.ones(2, np.float32)}}
    io.save_safetensors(tmp_path / "x.safetensors", nest)
    assert list(safetensors.numpy.load_file(tmp_path / "x.safetensors")) == ["a.b/c"]
    empty = {"a": {"b/c": np.zeros(2, np.float32)}}
    loaded = io.load_safetensors(tmp_path / "x.safetensors", empty).model
    assert loaded["a"]["b/c"].tolist() == [1, 1]


def test_metadata_is_text(tmp_path):
    with pytest.raises(UnstorableError, match=r"metadata maps text to text, but got \{'a': 1\}"):
        io.save_safetensors(tmp_path / "x.safetensors", arrays(), metadata={"a": 1})


def test_entries_without_a_name_in_the_map_are_listed(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    half = names.NameMap([names.Rule("w", "kernel", "out in -> in out")])
    with pytest.raises(CheckpointMismatchError) as error:
        io.save_safetensors(tmp_path / "x.safetensors", model, half)
    assert str(error.value).startswith(
        "The map has no name for 1 entries of the model; nothing was written:\n"
        "  - bias: float32[3]\nFix: add rules"
    )
    assert os.listdir(tmp_path) == []
    io.save_safetensors(tmp_path / "x.safetensors", model, half, only=nnx.PathContains("kernel"))
    assert read_back(tmp_path / "x.safetensors") == {"w": model.kernel[...].T.tolist()}


def test_dtype_converts_floating_point_numbers_only(tmp_path):
    tree = {"w": np.float32([0.1, 2.0]), "n": np.int32([1])}
    io.save_safetensors(tmp_path / "x.safetensors", tree, dtype=jnp.float16)
    read = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {name: x.dtype.name for name, x in read.items()} == {"w": "float16", "n": "int32"}
    assert read["w"].tolist() == np.float16([0.1, 2.0]).tolist()


BIAS_ADDED = names.NameMap(
    [names.Rule("w", "kernel", "out in -> in out"), names.Rule(["b1", "b2"], "bias", add=True)]
)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float16", 65504), ("float8_e4m3fn", 448), ("bfloat16", 1e38)]
)
def test_numbers_that_a_dtype_cannot_hold_are_refused(dtype, largest, tmp_path):
    x = np.array([largest, -largest, np.inf, np.nan, 0.1], np.float32)
    io.save_safetensors(tmp_path / "x.safetensors", {"x": x}, dtype=dtype)
    if dtype == "bfloat16":
        return
    with pytest.raises(UnstorableError) as error:
        io.save_safetensors(tmp_path / "y.safetensors", {"x": -x * 2}, dtype=dtype)
    assert str(error.value) == (
        f"x has numbers that are too large for {dtype}.\n"
        "Fix: dtype=jnp.bfloat16, or leave out dtype= and like=."
    )
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_added_tensors_are_written_as_one_and_zeros(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.bias[...] = jnp.arange(3.0)
    io.save_safetensors(tmp_path / "x.safetensors", model, BIAS_ADDED)
    read = read_back(tmp_path / "x.safetensors")
    assert (read["b1"], read["b2"]) == ([0, 1, 2], [0, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_like_keeps_summands_as_long_as_their_sum(dtype, tmp_path):
    added = names.NameMap([names.Rule(["u", "v"], "x", add=True)])
    first, second = (np.array([n, 0.1], jnp.dtype(dtype)) for n in (256, 1))
    original, new = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.numpy.save_file({"u": first, "v": second}, original)
    model = {"x": np.zeros(2, np.float32)}
    model = io.load_safetensors(original, model, added, cast=True).model
    io.save_safetensors(new, model, added, like=original)
    assert new.read_bytes() == original.read_bytes()
    model["x"][0] += 7
    io.save_safetensors(new, model, added, like=original, overwrite=True)
    assert np.asarray(safetensors.numpy.load_file(new)["v"], np.float32).tolist() == [0, 0]
    assert safetensors.numpy.load_file(new)["u"][0] == 264


def test_like_goes_with_nothing_that_it_says_itself(tmp_path):
    options = {"max_shard_bytes": 9, "dtype": "bfloat16", "metadata": {"a": "b"}}
    with pytest.raises(UnstorableError) as error:
        io.save_safetensors(tmp_path / "x", arrays(), like=tmp_path / "y", **options)
    assert str(error.value) == (
        "like gives the files, dtypes and metadata, so max_shard_bytes and dtype and metadata "
        "would change nothing.\nFix: leave out like, or these."
    )


def test_an_array_alone_goes_to_a_file_and_back(tmp_path):
    io.save_safetensors(tmp_path / "x.safetensors", jnp.arange(3))
    assert read_back(tmp_path / "x.safetensors") == {"value": [0, 1, 2]}
    loaded = io.load_safetensors(tmp_path / "x.safetensors", jnp.zeros(3, int)).model
    assert loaded.tolist() == [0, 1, 2]


def test_like_wants_the_tensors_of_the_original(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"kernel": np.zeros((2, 4), np.float32), "x": np.zeros(1)}, path)
    with pytest.raises(CheckpointMismatchError) as error:
        io.save_safetensors(tmp_path / "y.safetensors", model, like=path)
    assert str(error.value) == (
        "The model is not like the original; nothing was written:\n"
        f"  - x: {path} has it, and the model does not\n"
        f"  - bias: {path} does not have it\n"
        f"  - kernel: is float32[2, 3], but float32[2, 4] in {path}\n"
        "Fix: load it from there, with the same map, or leave out like=."
    )
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_like_keeps_dtype_order_metadata_and_shards(tmp_path):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    io.save_safetensors(tmp_path / "a", model, max_shard_bytes=20, dtype=jnp.bfloat16,
                        metadata={"b": "1", "a": "2"})  # fmt: skip
    loaded = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    io.load_safetensors(tmp_path / "a", loaded, cast=True)
    assert loaded.kernel.dtype == jnp.float32
    io.save_safetensors(tmp_path / "b", loaded, like=tmp_path / "a")
    files = sorted(os.listdir(tmp_path / "a"))
    assert sorted(os.listdir(tmp_path / "b")) == files
    assert len(files) == 3
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(CheckpointMismatchError, match="has several files; pass a folder"):
        io.save_safetensors(tmp_path / "x.safetensors", loaded, like=tmp_path / "a")
