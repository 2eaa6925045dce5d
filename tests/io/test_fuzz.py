"""Inputs made wrong at random: each is an error or the right content, in little memory, at once."""

import contextlib
import json
import random
import signal
import tracemalloc

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from mutations import mutated_json, mutated_msgpack, mutated_safetensors

from linnet import serialization
from linnet.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    SerializationError,
    TensorFileError,
    UnsafePathError,
)
from linnet.io.shared.files import parse_json
from linnet.io.weights.files import TensorFile, open_tensors
from linnet.io.weights.header import code_of

MOST_MEMORY = 16_000_000
MOST_SECONDS = 20

SHORT = [pytest.param(seed, 500, id=f"seed {seed}") for seed in range(2)]
LONG = [
    pytest.param(seed, 2500, marks=pytest.mark.slow, id=f"seed {seed}, long")
    for seed in range(100, 106)
]


@pytest.fixture
def guarded():
    """Runs a function on an input, and fails if it takes memory or time without bound."""

    def too_long(*_):
        raise TimeoutError("it hangs")

    def run(f, data, most_memory=MOST_MEMORY):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        signal.alarm(MOST_SECONDS)
        try:
            return f(data)
        finally:
            signal.alarm(0)
            assert tracemalloc.get_traced_memory()[1] - before < most_memory, data

    old = signal.signal(signal.SIGALRM, too_long)
    tracemalloc.start()
    yield run
    tracemalloc.stop()
    signal.signal(signal.SIGALRM, old)


# ---- safetensors --------------------------------------------------------------------------------

TENSORS = {
    "h.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "h.0.bias": np.arange(3, dtype=np.float16),
    "flags": np.array([True, False, True]),
    "count": np.array(7, np.int64),
    "nothing": np.zeros((0, 4), np.float64),
    "é": np.arange(4, dtype=np.uint8),
}
SAFETENSORS = [
    safetensors.numpy.save(TENSORS),
    safetensors.numpy.save(TENSORS, {"format": "pt", "note": '{["x"]}'}),
    safetensors.numpy.save({"x": np.ones(2, np.float32)}),
    safetensors.numpy.save({}),
]


def read_tensors(path):
    with contextlib.closing(TensorFile(str(path))) as file:
        return {name: (code_of(file.tensors[name].dtype), file.read(name)) for name in file.tensors}


@pytest.mark.parametrize(("seed", "count"), SHORT + LONG)
def test_mutated_safetensors_are_refused_or_read_right(seed, count, tmp_path, guarded):
    rng = random.Random(seed)
    path = tmp_path / "x.safetensors"
    accepted = 0
    for _ in range(count):
        data = mutated_safetensors(rng, SAFETENSORS)
        path.write_bytes(data)
        try:
            found = guarded(read_tensors, path)
        except TensorFileError as error:
            assert str(path) in str(error)
            continue
        accepted += 1
        # What is accepted is what the format's own library reads.
        theirs = dict(safetensors.deserialize(data))
        assert found.keys() == theirs.keys()
        for name, (code, array) in found.items():
            assert (code, list(array.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
            assert array.tobytes() == bytes(theirs[name]["data"])
    assert 0 < accepted < count / 2


# ---- msgpack ------------------------------------------------------------------------------------

TREE = {
    "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.int8)},
    "list": [1, -2.5, "text", b"bytes", None, True, 3 + 4j],
    "narrow": np.asarray(jnp.ones(3, jnp.bfloat16)),
    "scalar": np.float64(1.5),
    "deep": {"a": {"b": {"c": {"d": [[[]]]}}}},
}


def in_pieces(tree):
    """Bytes in which the arrays are written in pieces, as the large ones are."""
    pieces = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3},
              "chunks": {"0": np.arange(4.0), "1": np.arange(2.0)}}  # fmt: skip
    return serialization.msgpack_serialize({**tree, "large": pieces})


MSGPACK = [
    serialization.msgpack_serialize(TREE),
    in_pieces({"x": np.zeros(1)}),
    serialization.msgpack_serialize([1, [2, [3]]]),
    serialization.msgpack_serialize(np.arange(3)),
]


def assert_is_what_the_bytes_say(found, raw):
    """Compares a restored tree with the same bytes as msgpack alone reads them."""
    if isinstance(raw, dict) and "__msgpack_chunked_array__" in raw:
        assert isinstance(found, np.ndarray)
    elif isinstance(raw, dict):
        for (key, mine), (raw_key, theirs) in zip(found.items(), raw.items(), strict=True):
            assert_is_what_the_bytes_say(key, raw_key)
            assert_is_what_the_bytes_say(mine, theirs)
    elif isinstance(raw, list):
        assert len(found) == len(raw)
        for mine, theirs in zip(found, raw, strict=True):
            assert_is_what_the_bytes_say(mine, theirs)
    elif isinstance(raw, msgpack.ExtType) and raw.code in (1, 3):
        shape, dtype, data = msgpack.unpackb(raw.data)
        assert (list(found.shape), found.dtype.name, found.tobytes()) == (shape, dtype, data)
    elif isinstance(raw, msgpack.ExtType) and raw.code == 2:
        assert repr(found) == repr(complex(*msgpack.unpackb(raw.data)))
    else:
        assert repr(found) == repr(raw)


@pytest.mark.parametrize(("seed", "count"), SHORT + LONG)
def test_mutated_msgpack_is_refused_or_read_right(seed, count, guarded):
    rng = random.Random(seed)
    accepted = 0
    for _ in range(count):
        data = mutated_msgpack(rng, MSGPACK)
        try:
            found = guarded(serialization.msgpack_restore, data)
        except SerializationError:
            continue
        accepted += 1
        assert_is_what_the_bytes_say(found, msgpack.unpackb(data, strict_map_key=False))
    assert 0 < accepted < count * 0.8


def array_bytes(shape, dtype, data):
    inside = msgpack.packb((shape, dtype, data))
    return msgpack.packb(msgpack.ExtType(1, inside))


# Msgpack has no references, so the nearest thing to a cycle is a nest without end.
HOSTILE_MSGPACK = {
    "nest without end": (b"\x91" * 100_000, "bytes of a serialized tree: StackError"),
    "maps without end": (b"\x81\xa1a" * 100_000, "bytes of a serialized tree: StackError"),
    "list of 4 billion": (b"\xdd\xff\xff\xff\xff", "4294967295 exceeds max_array_len"),
    "map of 4 billion": (b"\xdf\xff\xff\xff\xff", "4294967295 exceeds max_map_len"),
    "text of 4 GB": (b"\xdb\xff\xff\xff\xff", "incomplete input"),
    "extension of 4 GB": (b"\xc9\xff\xff\xff\xff\x01", "exceeds max_ext_len"),
    "lists that promise much": (
        b"".join(b"\xdd" + (50_000).to_bytes(4, "big") for _ in range(900)) + b"\xc0" * 60_000,
        "incomplete input",
    ),
    "array of great size": (array_bytes([2**40], "float32", b"x"), "but 1 bytes of it are there"),
    "array whose size wraps round": (
        array_bytes([2**32, 2**32], "float32", b""),
        "An array is said to be float32[4294967296, 4294967296], but 0 bytes of it are there",
    ),
    "negative shape": (array_bytes([-1, -4], "int8", b"abcd"), "has the shape [-1, -4], which is"),
    "array of objects": (array_bytes([1], "object", bytes(8)), "said to be object[1]"),
    "unknown dtype": (array_bytes([1], "nosuch", b"x"), "data type 'nosuch' not understood"),
    "dtype that is parsed": (array_bytes([1], ",nt64", b"x"), "dtype ',nt64', which is no dtype"),
    "structured dtype": (array_bytes([1], "i1,i1", b"xy"), "dtype 'i1,i1', which is no dtype"),
    "no dtype": (array_bytes([1], None, bytes(8)), "dtype None, which is no dtype"),
    "something behind it": (b"\x01\x02", "unpack(b) received extra data"),
    "nothing": (b"", "Unpack failed: incomplete input"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE_MSGPACK)
def test_hostile_msgpack_is_refused_in_little_memory(case, guarded):
    data, text = HOSTILE_MSGPACK[case]
    with pytest.raises(SerializationError) as error:
        # Msgpack makes room for 10,000 items a list, in at most 1,024 lists inside each other.
        guarded(serialization.msgpack_restore, data, most_memory=100_000_000)
    assert text in str(error.value)


# ---- indexes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "count"), SHORT[:1] + LONG[:1])
def test_mutated_indexes_are_refused_or_read_right(seed, count, tmp_path, guarded):
    names = {"a": "one.safetensors", "b.c": "two.safetensors"}
    for tensor, name in names.items():
        safetensors.numpy.save_file({tensor: np.ones(2, np.float32)}, tmp_path / name)
    path = tmp_path / "model.safetensors.index.json"
    right = [
        json.dumps({"metadata": {"total_size": 16}, "weight_map": names}, indent=2).encode(),
        json.dumps({"weight_map": names, "metadata": {"deep": [[{"x": [1.5, None]}]]}}).encode(),
    ]
    rng = random.Random(seed)

    def read(data):
        path.write_bytes(data)
        with open_tensors(path) as files:
            return {name: files.read(name).tolist() for name in files.tensors}

    accepted = 0
    for _ in range(count):
        data = mutated_json(rng, right)
        try:
            found = guarded(read, data)
        except (DamagedCheckpointError, UnsafePathError, CheckpointNotFoundError) as error:
            assert str(tmp_path) in str(error)
            continue
        accepted += 1
        assert found == {"a": [1.0, 1.0], "b.c": [1.0, 1.0]}
        assert parse_json("x", data) == json.loads(data)
    assert 0 < accepted < count
