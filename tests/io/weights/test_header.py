import contextlib
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tensor_bytes import entry, header_bytes

from linnet.errors import DamagedCheckpointError, TensorFileError
from linnet.io.shared.entries import Spec
from linnet.io.weights import header as tensor_header
from linnet.io.weights.files import TensorFile

EIGHT = bytes(8)
ONE = '{"dtype":"U8","shape":[],"data_offsets":[0,1]}'

# What is wrong, the file, what the error says.
HOSTILE = {
    "empty file": (b"", "it has 0 bytes, too few for a header"),
    "no header": (b"\x02\x00", "it has 2 bytes, too few for a header"),
    "huge header": (b"\xff" * 8 + b"{}", "said to have 18446744073709551615 bytes; 100000000 are"),
    "header beyond the file": (
        header_bytes("{}", length=99),
        "its header is said to have 99 bytes, but the file has 10",
    ),
    "not text": (header_bytes(b"{\xff\xfe}"), "its header is not UTF-8 text"),
    "a list": (header_bytes("[]"), "its header begins with '[]', not with a brace"),
    "a space first": (header_bytes(" {}"), "its header begins with ' {}', not with a brace"),
    "empty header": (header_bytes(""), "its header begins with '', not with a brace"),
    "two headers": (header_bytes("{}{}"), "its header goes on with '{}' after its end"),
    "no end": (header_bytes('{"a"'), "its header has no colon after 'a'"),
    "no colon": (header_bytes('{"a" {}}'), "its header has no colon after 'a'"),
    "no comma": (
        header_bytes(f'{{"a":{ONE}"b"}}', b"\0"),
        "its header goes on with '\"' after the entry of 'a'",
    ),
    "no name": (header_bytes("{1:2}"), "its header has '1:2}' at 1, where the name of a tensor"),
    "long name": (header_bytes({"n" * 5000: entry()}, EIGHT), "of at most 4096 characters"),
    "lone surrogate": (header_bytes(r'{"\ud800":{}}'), "surrogates not allowed"),
    "bad escape": (header_bytes(r'{"\x":{}}'), "Invalid \\escape"),
    "entry is a number": (header_bytes('{"a":1}'), "its header has '1}' as the entry of 'a'"),
    "entry in an entry": (header_bytes('{"a":{"b":{}}}'), "as the entry of 'a'"),
    "deep nesting": (
        header_bytes('{"a":{"shape":' + "[" * 3000 + "]" * 900 + "}}"),
        "the entry of 'a' is no JSON",
    ),
    "deep objects": (header_bytes('{"a":' * 50_000), "as the entry of 'a'"),
    "long entry": (
        header_bytes('{"a":{"shape":[%s]}}' % ("1," * 4000 + "1")),
        "the entry of 'a' has 80",
    ),
    "duplicate name": (
        header_bytes(f'{{"a":{ONE},"a":{ONE}}}', b"\0"),
        "its header has 'a' twice",
    ),
    "duplicate metadata": (
        header_bytes('{"__metadata__":{},"__metadata__":{}}'),
        "its header has '__metadata__' twice",
    ),
    "duplicate field": (
        header_bytes('{"a":{"dtype":"F32","dtype":"F32"}}'),
        "the entry of 'a' has 'dtype' twice",
    ),
    "field missing": (header_bytes({"a": {"dtype": "F32"}}), "the entry of 'a' has dtype, not dty"),
    "nothing in it": (header_bytes({"a": {}}), "the entry of 'a' has nothing, not dtype, shape"),
    "field too much": (
        header_bytes({"a": {**entry(), "x": 1}}, EIGHT),
        "has dtype, shape, data_offsets, x, not dtype, shape, data_offsets",
    ),
    "unknown dtype": (header_bytes({"a": entry(dtype="F31")}, EIGHT), "the unknown dtype 'F31'"),
    "dtype is a list": (header_bytes({"a": entry(dtype=[])}, EIGHT), "the unknown dtype '[]'"),
    "negative shape": (header_bytes({"a": entry((-2,))}, EIGHT), "said to have the shape [-2]"),
    "fractional shape": (header_bytes({"a": entry((2.0,))}, EIGHT), "to have the shape [2.0]"),
    "boolean shape": (header_bytes({"a": entry((True,))}, EIGHT), "to have the shape [True]"),
    "shape of text": (header_bytes({"a": entry(("2",))}, EIGHT), "to have the shape ['2']"),
    "infinite shape": (
        header_bytes('{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', EIGHT),
        "said to have the shape [inf]",
    ),
    "too many axes": (header_bytes({"a": entry((1,) * 65, (0, 4))}, EIGHT), "the shape [1, 1, 1"),
    "huge shape": (
        header_bytes({"a": entry((2**40,))}, EIGHT),
        "'a' is said to be F32[1099511627776], which takes 4398046511104 bytes, but to lie at "
        "[0, 8], which are 8",
    ),
    "shape beyond any memory": (
        header_bytes({"a": entry((2**62, 2**62))}, EIGHT),
        "'a' is said to have the shape [4611686018427387904, 4611686018427387904]",
    ),
    "huge shape of nothing": (
        header_bytes({"a": entry((0, 2**62), (0, 0))}),
        "'a' is said to have the shape [0, 4611686018427387904]",
    ),
    "shape beyond 64 bits": (header_bytes({"a": entry((2**63,))}, EIGHT), "shape [922337203685477"),
    "shape that wraps round": (
        header_bytes({"a": entry((2**32, 2**32), (0, 0))}),
        "'a' is said to have the shape [4294967296, 4294967296]",
    ),
    "dtype that lies": (
        header_bytes({"a": entry(dtype="F64")}, EIGHT),
        "'a' is said to be F64[2], which takes 16 bytes, but to lie at [0, 8], which are 8",
    ),
    "negative offsets": (header_bytes({"a": entry(offsets=(-8, 0))}, EIGHT), "to lie at [-8, 0]"),
    "offsets turned round": (header_bytes({"a": entry(offsets=(8, 0))}, EIGHT), "lie at [8, 0]"),
    "three offsets": (header_bytes({"a": entry(offsets=(0, 4, 8))}, EIGHT), "lie at [0, 4, 8]"),
    "overlap": (
        header_bytes({"a": entry(), "b": entry((1,), (4, 8))}, EIGHT),
        "'b' and 'a' overlap at byte 4",
    ),
    "the same bytes twice": (
        header_bytes({"a": entry(), "b": entry()}, EIGHT),
        "overlap at byte 0",
    ),
    "gap": (
        header_bytes({"a": entry((1,), (0, 4)), "b": entry((1,), (8, 12))}, bytes(12)),
        "no tensor has the bytes 4 to 8",
    ),
    "begins late": (header_bytes({"a": entry(offsets=(4, 12))}, bytes(12)), "the bytes 0 to 4"),
    "cut off": (
        header_bytes({"a": entry()}, bytes(7)),
        "its tensors take 8 bytes and it holds 7; it was cut off",
    ),
    "goes on": (
        header_bytes({"a": entry()}, bytes(9)),
        "its tensors take 8 bytes and it holds 9; it goes on behind them",
    ),
    "data without tensors": (header_bytes("{}", b"x"), "take 0 bytes and it holds 1"),
    "metadata is a list": (header_bytes('{"__metadata__":[]}'), "as the entry of '__metadata__'"),
    "metadata of numbers": (
        header_bytes('{"__metadata__":{"a":1}}'),
        "__metadata__ has '1}' where text should be",
    ),
    "metadata twice": (
        header_bytes('{"__metadata__":{"a":"1","a":"2"}}'),
        "__metadata__ has 'a' twice",
    ),
    "comma at the end": (header_bytes(f'{{"a":{ONE},}}', b"\0"), "where the name of a tensor"),
    "comma at the end of metadata": (
        header_bytes('{"__metadata__":{"a":"1",}}'),
        "__metadata__ has '}' where text should be",
    ),
    "metadata that goes on": (
        header_bytes('{"__metadata__":{"a":"1" "b"}}'),
        "__metadata__ goes on with '\"b\"}' after '1'",
    ),
    "boolean that is neither": (
        header_bytes({"a": entry((2,), (0, 2), "BOOL")}, b"\x01\x02"),
        "'a' is boolean and has the value 2",
    ),
}  # fmt: skip


def read_all(path):
    """The tensors, their values and the metadata of a file."""
    with contextlib.closing(TensorFile(str(path))) as file:
        return file.tensors, {name: file.read(name) for name in file.tensors}, file.metadata


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_with_its_path_and_reason(case, tmp_path):
    data, expected = HOSTILE[case]
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(data)
    with pytest.raises(TensorFileError) as error:
        read_all(path)
    text = str(error.value)
    assert text.startswith(f"{path} is damaged or was not made by a safetensors library: ")
    assert expected in text
    assert text.endswith("Fix: download or write it again.")
    assert isinstance(error.value, DamagedCheckpointError)


@pytest.mark.parametrize("case", ["huge header", "huge shape", "deep objects", "cut off"])
def test_refusal_takes_no_memory(case, tmp_path):
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(HOSTILE[case][0])
    tracemalloc.start()
    try:
        with pytest.raises(TensorFileError):
            TensorFile(str(path))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_large_header_of_brackets_is_refused_in_little_memory_and_time(tmp_path):
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(header_bytes('{"a":{"shape":[' + "[]," * 1_000_000 + "[]]}}"))
    tracemalloc.start()
    try:
        with pytest.raises(TensorFileError, match="the entry of 'a' has 3000"):
            TensorFile(str(path))
        # The bytes, the text, and the entry cut out of it.
        assert tracemalloc.get_traced_memory()[1] < 5 * path.stat().st_size
    finally:
        tracemalloc.stop()


DTYPES = "bool uint8 int8 int16 uint16 float16 int32 uint32 float32 float64 int64 uint64".split()


def some_tensors():
    rng = np.random.default_rng(0)
    tensors = {f"z.{name}": rng.integers(0, 2, (2, 3)).astype(name) for name in DTYPES}
    tensors["a.scalar"] = np.array(7.0, np.float32)
    tensors["nothing"] = np.zeros((0, 3), np.float32)
    tensors['odd "name"\n\x01é'] = np.arange(3, dtype=np.float32)
    return tensors


# One text only: the library writes several in an order of its own.
@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"a b": 'x"\\y{}[]\né'}])
def test_headers_are_those_of_the_formats_own_library(metadata, tmp_path):
    tensors = some_tensors()
    wanted = safetensors.numpy.save(tensors, metadata or None)
    specs = {n: Spec("array", t.dtype.name, t.shape) for n, t in tensors.items()}
    arranged = tensor_header.arrange(specs)
    head = tensor_header.encode(arranged, metadata)
    assert head + b"".join(tensors[t.name].tobytes() for t in arranged) == wanted
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(wanted)
    found, values, found_metadata = read_all(path)
    assert found_metadata == metadata
    assert found == {t.name: t for t in arranged}
    for name, tensor in tensors.items():
        assert (values[name].dtype, values[name].shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(values[name], tensor)


NARROW = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_dtypes_come_back_bit_for_bit(dtype, tmp_path):
    array = np.asarray(jnp.array([0.5, 1.0, 2.0, 4.0], dtype))
    specs = {"x": Spec("array", dtype, (4,))}
    path = tmp_path / "narrow.safetensors"
    path.write_bytes(tensor_header.encode(tensor_header.arrange(specs), {}) + array.tobytes())
    tensors, values, _ = read_all(path)
    assert (values["x"].dtype, tensors["x"].spec) == (jnp.dtype(dtype), specs["x"])
    assert values["x"].tobytes() == array.tobytes()
    # The format's own library agrees on what the code means.
    with safetensors.safe_open(path, "np") as theirs:
        assert theirs.get_slice("x").get_dtype() == tensor_header.code_of(dtype)


def test_names_and_dtypes_that_the_format_does_not_have():
    assert (tensor_header.code_of("bfloat16"), tensor_header.code_of("int4")) == ("BF16", "")
    assert tensor_header.why_no_name("__metadata__") == "that is the name of the metadata"
    assert tensor_header.why_no_name("kernel") == ""


@pytest.mark.parametrize("length", [640, 1152])
def test_a_header_whose_length_looks_like_a_pickle_is_read(length, tmp_path):
    path = tmp_path / "x.safetensors"
    data = header_bytes(f'{{"a":{ONE}}}'.ljust(length), b"\x07")
    assert data[:2] in (b"\x80\x02", b"\x80\x04")
    path.write_bytes(data)
    assert read_all(path)[1]["a"].item() == 7


def test_numbers_of_less_than_a_byte_are_named(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_bytes({"a": entry((4,), (0, 2), "F4")}, b"ab"))
    with pytest.raises(TensorFileError) as error:
        read_all(path)
    assert str(error.value) == (
        f"{path} holds 'a' as F4, less than a byte a number, which Linnet does not read.\n"
        "Fix: convert it to F8_E4M3 or BF16 first."
    )


def test_whitespace_and_any_order_of_members_are_read(tmp_path):
    header = ' \n"b" : { "data_offsets" : [ 4 , 8 ] , "shape":[1],"dtype":"F32"} ,\t"a":%s  }   '
    path = tmp_path / "spaced.safetensors"
    first = '{"dtype":"F32","shape":[],"data_offsets":[0,4]}'
    path.write_bytes(header_bytes("{" + header % first, np.float32([1, 2]).tobytes()))
    tensors, values, _ = read_all(path)
    assert list(tensors) == ["a", "b"]
    assert (values["a"].item(), values["b"].tolist()) == (1.0, [2.0])


def test_a_file_cut_off_after_it_was_opened_is_an_error(tmp_path):
    path = tmp_path / "short.safetensors"
    path.write_bytes(safetensors.numpy.save({"x": np.ones(1000, np.float32)}))
    with contextlib.closing(TensorFile(str(path))) as file, open(path, "r+b") as other:
        other.truncate(500)
        with pytest.raises(TensorFileError, match="it was cut off while it was read"):
            file.read("x")
