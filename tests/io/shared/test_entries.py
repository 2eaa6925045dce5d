"""Paths of entries: as text, as names in a format that knows text alone, as nested containers."""

import pytest

from linnet.errors import DamagedCheckpointError
from linnet.io.shared.entries import (
    encode_value,
    first_names,
    is_list_index,
    lists_in,
    nest_containers,
    steps_as_text,
    storage_names,
    text_of,
)


def test_text_and_folding_treat_integers_and_digits_alike():
    assert text_of(("model", "layers", 0, "kernel")) == "model/layers/0/kernel"
    assert steps_as_text(("a", 0)) == steps_as_text(("a", "0")) == ("a", "0")


def test_the_first_names_of_many_are_shown():
    assert first_names(["a", "b", "c"], 2) == "a, b, ..."
    assert first_names(["a", "b", "c"], 3) == "a, b, c"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(b"ab", {"bytes": "YWI="}), (float("inf"), {"float": "inf"}), (1.5, 1.5)],
)
def test_plain_values_as_json(value, encoded):
    assert encode_value(value) == encoded


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, True), (12, True), ("3", True), (-1, False), ("a", False), ("", False)],
)
def test_is_position(step, expected):
    assert is_list_index(step) is expected


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ([("a", 0), ("a", 1)], [("a", "0"), ("a", "1")]),
        ([("a", 0), ("a", "0")], [("a", "0"), ("a", "0%2")]),
        ([("a.b",), ("a", "b")], [("a.b",), ("a", "b%2")]),
        ([(0,), ("0", "k")], [("0",), ("0%2", "k")]),
        ([("0", "k"), (0,)], [("0", "k"), ("0%2",)]),
        ([("a/b",), ("..",), ("",), ("50%",)], [("a%2Fb",), ("%2E%2E",), ("%",), ("50%25",)]),
        ([("a", 0), ("a", "0"), ("a", "0%2")], [("a", "0"), ("a", "0%2"), ("a", "0%252")]),
    ],
)
def test_storage_names_are_unique_and_harmless(paths, names):
    found = storage_names(paths)
    assert list(found.values()) == names
    joined = [".".join(name) for name in found.values()]
    assert len(set(joined)) == len(joined)
    assert not any(
        "/" in step or step in ("", ".", "..") for name in found.values() for step in name
    )


@pytest.mark.parametrize(
    ("values", "containers", "top", "nested"),
    [
        ({(): 1}, {}, (), 1),
        ({("a", 0): 1, ("a", "b"): 2}, {}, (), {"a": {0: 1, "b": 2}}),
        ({("a", 1): 1, ("a", 0): 2}, {("a",): "list", ("c",): "list"}, (), {"a": [2, 1], "c": []}),
        ({("a", 0, 0): 1}, {("a",): "tuple", ("a", 0): "list"}, ("a",), ([1],)),
        ({}, {("a",): "dict", ("a", "b"): "tuple"}, ("a",), {"b": ()}),
        ({("a",): 1, ("b",): 2}, {("a",): "list"}, (), {"a": 1, "b": 2}),
    ],
)
def test_nest(values, containers, top, nested):
    assert nest_containers(values, containers, top) == nested


def test_lists_are_where_integers_are():
    values = {("a", 1, "x"): 1, ("a", 0, "x"): 2, ("b", "0"): 3}
    assert nest_containers(values, lists_in(values)) == {"a": [{"x": 2}, {"x": 1}], "b": {"0": 3}}


@pytest.mark.parametrize("turned", [False, True])
def test_a_value_where_a_container_has_to_be_is_refused(turned):
    values = dict([(("m", "x"), 1), (("m", "x", "y", 0), 2)][:: -1 if turned else 1])
    with pytest.raises(DamagedCheckpointError) as error:
        nest_containers(values, {}, ("m",))
    assert str(error.value) == (
        "The manifest has a value at m/x and another one below it, at m/x/y/0."
    )
