"""State dicts and msgpack bytes: the bytes are those that Flax 0.12.8 wrote for the same trees."""

import collections
import hashlib

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest

from linnet import io, nnx, serialization, struct
from linnet.errors import SerializationError
from tests.compare import identical

Pair = collections.namedtuple("Pair", "a b")


@struct.dataclass
class Record:
    x: object
    y: object = 2
    name: str = struct.field(pytree_node=False, default="q")


class Node(struct.PyTreeNode):
    w: object


ADAM = optax.adam(1e-3).init({"w": np.zeros(2, np.float32)})

# name -> (tree, its state dict, the bytes that Flax wrote)
TREES = {
    "dict": (
        {"a": 1, "b": [1, 2.5, "x", None, True]},
        {"a": 1, "b": {"0": 1, "1": 2.5, "2": "x", "3": None, "4": True}},
        b"\x82\xa1a\x01\xa1b\x85\xa10\x01\xa11\xcb@\x04\x00\x00\x00\x00\x00\x00\xa12\xa1x\xa13\xc0\xa14\xc3",
    ),
    "tuple": ((1, 2), {"0": 1, "1": 2}, b"\x82\xa10\x01\xa11\x02"),
    "empty tuple": ((), {}, b"\x80"),
    "empty list": ([], {}, b"\x80"),
    "named tuple": (Pair(1, 2), {"a": 1, "b": 2}, b"\x82\xa1a\x01\xa1b\x02"),
    "dataclass": (Record(1), {"x": 1, "y": 2}, b"\x82\xa1x\x01\xa1y\x02"),
    "integer keys": ({1: 2, 0: 3}, {"1": 2, "0": 3}, b"\x82\xa11\x02\xa10\x03"),
    "mixed keys": ({"a": 1, 3: 2}, {"a": 1, "3": 2}, b"\x82\xa1a\x01\xa13\x02"),
    "partial": (
        jax.tree_util.Partial(len),
        {"args": {}, "keywords": {}},
        b"\x82\xa4args\x80\xa8keywords\x80",
    ),
}

# What Flax wrote for single leaves.
LEAVES = {
    "none": (None, b"\xc0"),
    "bytes": (b"ab", b"\xc4\x02ab"),
    "large": (2**63, b"\xcf\x80\x00\x00\x00\x00\x00\x00\x00"),
    "complex": (
        1 + 2j,
        b"\xc7\x13\x02\x92\xcb?\xf0\x00\x00\x00\x00\x00\x00\xcb@\x00\x00\x00\x00\x00\x00\x00",
    ),
    "int32": (
        np.arange(3, dtype=np.int32),
        b"\xc7\x17\x01\x93\x91\x03\xa5int32\xc4\x0c\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00",
    ),
    "bfloat16": (
        jnp.ones(2, jnp.bfloat16),
        b"\xc7\x12\x01\x93\x91\x02\xa8bfloat16\xc4\x04\x80?\x80?",
    ),
    "float8": (
        jnp.ones(2, jnp.float8_e4m3fn),
        b"\xc7\x15\x01\x93\x91\x02\xadfloat8_e4m3fn\xc4\x0288",
    ),
    "int4": (jnp.ones(3, jnp.int4), b"\xc7\r\x01\x93\x91\x03\xa4int4\xc4\x03\x01\x01\x01"),
    "no elements": (np.zeros((0, 3)), b"\xc7\x0e\x01\x93\x92\x00\x03\xa7float64\xc4\x00"),
    "flags": (np.array([True]), b"\xc7\x0b\x01\x93\x91\x01\xa4bool\xc4\x01\x01"),
    "no axes": (
        np.array(3.5),
        b"\xc7\x14\x01\x93\x90\xa7float64\xc4\x08\x00\x00\x00\x00\x00\x00\x0c@",
    ),
    "scalar": (np.float32(2), b"\xd8\x03\x93\x90\xa7float32\xc4\x04\x00\x00\x00@"),
    "waves": (
        np.complex64(1 + 2j),
        b"\xc7\x16\x03\x93\x90\xa9complex64\xc4\x08\x00\x00\x80?\x00\x00\x00@",
    ),
    "dates": (
        np.array(["2020-01-01"], "datetime64[D]"),
        b"\xc7\x1b\x01\x93\x91\x01\xaddatetime64[D]\xc4\x08VG\x00\x00\x00\x00\x00\x00",
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_give_the_state_dicts_and_bytes_of_flax(name):
    tree, state, data = TREES[name]
    assert serialization.to_state_dict(tree) == state
    assert list(serialization.to_state_dict(tree)) == list(state)
    assert serialization.to_bytes(tree) == data
    assert serialization.from_bytes(None, data) == state
    restored = serialization.from_bytes(tree, data)
    assert type(restored) is type(tree)
    assert jax.tree.leaves(serialization.to_state_dict(restored)) == jax.tree.leaves(state)


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_give_the_bytes_of_flax(name):
    leaf, data = LEAVES[name]
    assert serialization.to_bytes(leaf) == data
    assert serialization.msgpack_serialize(leaf) == data
    leaf = np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
    assert identical(leaf, serialization.msgpack_restore(data))


def test_a_train_state_gives_the_bytes_of_flax():
    data = serialization.to_bytes(ADAM)
    assert hashlib.sha256(data).hexdigest()[:16] == "cbf33a7994c37d05"
    restored = serialization.from_bytes(ADAM, data)
    assert type(restored[0]) is type(ADAM[0]) and restored[0].mu["w"].tolist() == [0.0, 0.0]


def test_serialize_sorts_keys_unless_it_is_in_place():
    tree = {"b": 1, "a": jnp.ones(1)}
    sorted_bytes = serialization.msgpack_serialize(tree)
    assert isinstance(tree["a"], jax.Array)
    assert list(serialization.msgpack_restore(sorted_bytes)) == ["a", "b"]
    in_place = serialization.msgpack_serialize(tree, in_place=True)
    assert in_place == b"\x82\xa1b\x01\xa1a\xc7\x11\x01\x93\x91\x01\xa7float32\xc4\x04\x00\x00\x80?"
    assert isinstance(tree["a"], np.ndarray)
    assert serialization.msgpack_serialize({1: 2, 0: 3}) == b"\x82\x00\x03\x01\x02"


def test_large_arrays_are_written_in_the_pieces_of_flax(monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 16)
    tree = {
        "a": np.arange(10, dtype=np.int32).reshape(2, 5),
        "b": np.ones(2, np.float32),
        "c": jnp.arange(6.0),
    }
    data = serialization.to_bytes(tree)
    assert hashlib.sha256(data).hexdigest()[:16] == "9f622410adf3c7fc"
    back = serialization.from_bytes(tree, data)
    assert all(identical(np.asarray(tree[name]), back[name]) for name in tree)
    assert identical(
        tree["a"], serialization.msgpack_restore(serialization.msgpack_serialize(tree["a"]))
    )


def test_large_arrays_in_a_list_stay_whole_as_flax_wants_them(monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 2)
    data = serialization.msgpack_serialize({"a": [{"b": np.arange(3, dtype=np.int8)}]})
    assert data == bytes.fromhex("81a161 91 81a162 c70d01 9391 03a4696e7438 c403000102")
    assert serialization.msgpack_restore(data)["a"][0]["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_every_kind_are_written_as_flax_does(kind):
    assert serialization.to_bytes({"a": kind(b"x")}) == bytes.fromhex("81a161 c40178")


def test_big_endian_arrays_keep_their_numbers():
    data = serialization.to_bytes(np.array([1.5, 2.0], ">f4"))
    assert serialization.msgpack_restore(data).tolist() == [1.5, 2.0]


def test_weights_that_flax_wrote_go_into_a_model():
    model, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    data = serialization.to_bytes(nnx.to_pure_dict(nnx.state(model)))
    io.load_tree(serialization.msgpack_restore(data), model=other)
    np.testing.assert_array_equal(other.kernel[...], model.kernel[...])
    pure = serialization.from_bytes(nnx.to_pure_dict(nnx.state(other)), data)
    assert set(pure) == {"bias", "kernel"}


# ---- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "state", "text"),
    [
        (
            {"a": 1, "b": 2},
            {"a": 1},
            r"keys \['b'\] which are not present in state dict at path \.; that has \['a'\]",
        ),
        (
            [1, 2],
            {"0": 1},
            r"The size of the list and the state dict do not match, got 2 and 1 at path \.",
        ),
        ((1, 2), {"0": 1, "1": 2, "2": 3}, r"got 2 and 3 at path \."),
        (
            Pair(1, 2),
            {"a": 1},
            r"field names .* do not match, got \['a'\] and \['a', 'b'\] at path \.",
        ),
        (
            Record(1),
            {"x": 1},
            r"Missing field y in state dict while restoring an instance of Record, at path \.",
        ),
        (
            Record(1),
            {"x": 1, "y": 2, "z": 3},
            r'Unknown field\(s\) "z" .* while restoring an instance of Record at path \.',
        ),
        ({"k": [Record(1)]}, {"k": {"0": {"x": 1}}}, r"Missing field y .* at path \./k/0"),
        ({"k": [{"q": {"z": 1}}]}, {"k": {"0": {"q": {}}}}, r"at path \./k/0/q"),
        (
            {"a": {"b": 1}},
            {"a": None},
            r"A dict is restored from a dict, but the state dict has a NoneType at path \./a",
        ),
        ({"a": [1]}, {"a": 3}, r"A list is restored from a dict, .* has a int at path \./a"),
        (Record(1), 3, r"Got a int in state dict while restoring an instance of Record"),
    ],
)
def test_a_state_dict_of_another_structure_is_refused_by_path(target, state, text):
    with pytest.raises(ValueError, match=text) as caught:
        serialization.from_state_dict(target, state)
    assert isinstance(caught.value, SerializationError)
    assert serialization.current_path() == ""


@pytest.mark.parametrize("target", [{"b": 1}, [1, 2], Pair(1, 2), {"a": {"b": 1}}], ids=str)
def test_another_structure_has_a_repair(target):
    with pytest.raises(
        SerializationError, match=r"at path \..*\nFix: give a target with the struc"
    ):
        serialization.from_bytes(target, serialization.to_bytes({"a": 1}))
    with pytest.raises(
        SerializationError, match=r"serialized tree: .*\nFix: read the whole file\."
    ):
        serialization.from_bytes(target, serialization.to_bytes({"a": 1})[:-1])


def test_more_keys_than_wanted_are_ignored_and_the_name_starts_the_path():
    assert serialization.from_state_dict({"a": 0}, {"a": 1, "c": 2}) == {"a": 1}
    with pytest.raises(SerializationError, match="at path root/a"):
        serialization.from_state_dict({"a": {"b": 1}}, {"a": {}}, name="root")


def test_the_old_form_of_named_tuples_is_read():
    old = {"name": "Pair", "fields": {"0": "a", "1": "b"}, "values": {"0": 5, "1": 6}}
    assert serialization.from_state_dict(Pair(1, 2), old) == Pair(5, 6)


def test_partial_arguments_are_restored():
    partial = jax.tree_util.Partial(max, 1, key=2)
    restored = serialization.from_state_dict(partial, {"args": {"0": 5}, "keywords": {"key": 7}})
    assert (restored.args, restored.keywords, restored.func) == ((5,), {"key": 7}, max)


class Box:
    def __init__(self, v):
        self.v = v


def test_types_register_themselves():
    assert not serialization.is_serializable(Box)

    def from_state(box, state):
        inside = serialization.from_state_dict(box.v, state["v"], name="v")
        return Box((inside, serialization.current_path()))

    serialization.register_serialization_state(Box, lambda box: {"v": box.v}, from_state)
    assert serialization.is_serializable(Box) and serialization.is_serializable(Box(1))
    assert serialization.to_state_dict({"q": [Box(1)]}) == {"q": {"0": {"v": 1}}}
    restored = serialization.from_state_dict({"q": [Box(1)]}, {"q": {"0": {"v": 3}}})
    assert restored["q"][0].v == (3, "./q/0")
    with pytest.raises(SerializationError, match='handler for "Box" is already registered'):
        serialization.register_serialization_state(Box, lambda box: {}, from_state)
    serialization.register_serialization_state(Box, lambda box: {0: 1}, from_state, override=True)
    with pytest.raises(SerializationError, match=r"must only have string keys, .* Box has \[0\]"):
        serialization.to_state_dict(Box(1))


@pytest.mark.parametrize(
    ("kind", "expected"), [(Record, True), (dict, True), (list, True), (int, False), (Pair, False)]
)
def test_is_serializable(kind, expected):
    assert serialization.is_serializable(kind) is expected


def test_keys_with_one_text_are_refused():
    with pytest.raises(SerializationError, match=r"unique string representation: {'1'}"):
        serialization.to_state_dict({1: 1, "1": 2})


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": [object()]}, "can not serialize 'object' object at 'a/0'"),
        ({"a": nnx.State({})}, "can not serialize 'State' object at 'a'.\nFix: .*to_pure_dict"),
        (jax.random.key(0), "can not serialize the PRNG key at ''.\nFix: jax.random.key_data"),
        ({"s": np.array(["a"])}, "Object and structured dtypes not supported .* at 's' is <U1"),
        ({"s": np.array([None])}, "at 's' is object"),
        ({"m": np.ma.masked_array([1], [1])}, "the masked array at 'm': its mask would be lost"),
        ({"s": np.zeros(2, [("a", "i4")])}, "Object and structured dtypes not supported"),
        ({"n": 2**70}, "the integer at 'n': 1180591620717411303424 has more than 64 bits"),
        (collections.OrderedDict(a=1), "can not serialize 'OrderedDict' object"),
    ],
)
def test_what_cannot_be_written_is_refused_by_path(tree, text):
    with pytest.raises(SerializationError, match=text):
        serialization.to_bytes(tree)


def test_tuples_and_unsortable_keys_need_to_bytes():
    with pytest.raises(TypeError, match="can not serialize 'tuple' object at ''"):
        serialization.msgpack_serialize((1, 2))
    with pytest.raises(
        SerializationError, match=r"cannot be sorted.*\nFix: serialization.to_bytes"
    ):
        serialization.msgpack_serialize({"a": 1, 3: 2})


def array(*parts, code=1):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(parts)))


def pieces(shape, *chunks):
    numbered = {
        str(i): msgpack.ExtType(1, msgpack.packb(([c], "int8", b"x" * c)))
        for i, c in enumerate(chunks)
    }
    return msgpack.packb({"__msgpack_chunked_array__": True, "shape": shape, "chunks": numbered})


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x82\xa1a\x01",
        b"\x01\x02",
        b"",
        "text",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\x90\x01",
        array([2], "float32", b"abcd"),
        array([-1], "float32", b"abcd"),
        array([2**40, 2**40], "float32", b""),
        array([True], "int8", b"a"),
        array(1, "int8", b"a"),
        array([1], "object", b"12345678"),
        array([1], "O", b"12345678"),
        array([1], "no such type", b"a"),
        array([1], 5, b"a"),
        array([1], "int8", "a"),
        array([1], "int8"),
        array(1, code=2),
        pieces({"0": 5}, 2, 2),
        pieces({"0": -1}, 1),
        pieces({"1": 1}, 1),
        pieces(3, 1),
        pieces({}),
    ],
    ids=repr,
)
def test_bytes_that_are_no_tree_are_refused(data):
    with pytest.raises(SerializationError):
        serialization.msgpack_restore(data)


def test_unknown_extensions_come_back_as_they_are():
    data = msgpack.packb(msgpack.ExtType(9, b"a"))
    assert serialization.msgpack_restore(data) == msgpack.ExtType(9, b"a")


@pytest.mark.parametrize("write", [serialization.to_bytes, serialization.msgpack_serialize])
@pytest.mark.parametrize("container", [dict, list])
def test_a_tree_that_holds_itself_is_refused(container, write):
    tree = container()
    tree.append(tree) if container is list else tree.update(a={"b": tree})
    with pytest.raises(SerializationError) as error:
        write(tree)
    assert str(error.value) == (
        "The tree holds itself, or containers inside each other without end.\n"
        "Fix: serialize the parts of it one by one."
    )
