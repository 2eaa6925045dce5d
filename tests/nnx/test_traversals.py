"""Nested mappings flattened to paths and back."""

import types

import pytest
from hypothesis import given, strategies as st

from linnet import nnx
from linnet.nnx.traversals import (
    empty_node,
    flatten_mapping,
    flatten_to_sequence,
    unflatten_mapping,
)

NESTED = {"a": {"b": 1, "c": {}}, "d": 2}

TREES = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
)


def test_flattening():
    assert flatten_mapping(NESTED) == {("a", "b"): 1, ("d",): 2}
    assert flatten_to_sequence(NESTED) == [(("a", "b"), 1), (("d",), 2)]
    assert flatten_mapping({}) == flatten_mapping({}, keep_empty_nodes=True) == {}


def test_empty_mappings_can_be_kept():
    flat = flatten_mapping(NESTED, keep_empty_nodes=True)
    assert flat == {("a", "b"): 1, ("a", "c"): empty_node, ("d",): 2}
    assert repr(empty_node) == "empty_node"
    assert unflatten_mapping(flat) == NESTED


def test_paths_as_text():
    flat = flatten_mapping({"a": {"b": 1, 3: 2}}, sep="/")
    assert flat == {"a/b": 1, "a/3": 2}
    assert unflatten_mapping(flat, sep="/") == {"a": {"b": 1, "3": 2}}


def test_a_leaf_may_be_a_mapping():
    stop = lambda path, value: path == ("a",)  # noqa: E731
    assert flatten_mapping(NESTED, is_leaf=stop) == {("a",): {"b": 1, "c": {}}, ("d",): 2}
    assert flatten_to_sequence(NESTED, is_leaf=stop)[0] == (("a",), {"b": 1, "c": {}})
    assert unflatten_mapping({("a",): {"b": 1}, ("d",): 2}) == {"a": {"b": 1}, "d": 2}


def test_any_mapping_will_do():
    p = nnx.Param(1)
    assert flatten_mapping(types.MappingProxyType({"a": types.MappingProxyType({"b": 1})})) == {
        ("a", "b"): 1
    }
    assert flatten_mapping(nnx.State({"a": {"p": p}}))["a", "p"] is p
    assert unflatten_mapping([(("a", "b"), 1), (("c",), 2)]) == {"a": {"b": 1}, "c": 2}


@given(st.dictionaries(st.text("abc", min_size=1), TREES, max_size=3))
def test_there_and_back(tree):
    assert unflatten_mapping(flatten_mapping(tree, keep_empty_nodes=True)) == tree
    by_text = flatten_mapping(tree, keep_empty_nodes=True, sep="/")
    assert unflatten_mapping(by_text, sep="/") == tree


@pytest.mark.parametrize("flatten", [flatten_mapping, flatten_to_sequence])
def test_what_is_no_mapping_is_refused(flatten):
    with pytest.raises(TypeError) as error:
        flatten([1])
    assert str(error.value) == (
        f"{flatten.__name__} takes nested mappings, but got list.\n"
        "Fix: pass a dict, or nnx.to_pure_dict(nnx.state(model)) for a model."
    )


@pytest.mark.parametrize(
    ("flat", "culprit"),
    [
        ({("a",): 1, ("a", "b"): 2}, ("a", "b")),
        ({("a", "b"): 2, ("a",): 1}, ("a",)),
        ({("a",): {}, ("a", "b", "c"): 2}, ("a", "b", "c")),
        ([(("a",), 1), (("a",), 2)], ("a",)),
        ({(): 1}, ()),
    ],
)
def test_leaves_that_stand_in_each_other_s_way(flat, culprit):
    with pytest.raises(ValueError) as error:
        unflatten_mapping(flat)
    assert str(error.value) == (
        f"Cannot place the leaf at {culprit!r}: another leaf stands there, above it or "
        "below it.\nFix: give each leaf a path of its own."
    )
