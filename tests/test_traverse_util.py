"""Flat dicts and traversals. The values were seen on Flax."""

import collections

import jax
import pytest

from linnet import struct, traverse_util
from linnet.nnx import traversals
from linnet.traverse_util import ModelParamTraversal, TraverseAttr, t_identity

NESTED = {"a": {"b": 1, "e": {}}, "d": 3}
DATA = {"a": {"b": 1, "c": 2}, "d": [3, 4], "e": (5, 6)}
Pair = collections.namedtuple("Pair", "x y")


def test_flat_dicts():
    assert traverse_util.flatten_dict(NESTED) == {("a", "b"): 1, ("d",): 3}
    flat = traverse_util.flatten_dict(NESTED, keep_empty_nodes=True)
    assert flat == {("a", "b"): 1, ("a", "e"): traverse_util.empty_node, ("d",): 3}
    assert traverse_util.unflatten_dict(flat) == NESTED
    assert traverse_util.flatten_dict(NESTED, True, None, ".").keys() == {"a.b", "a.e", "d"}
    assert traverse_util.unflatten_dict({"a/b": 1}, sep="/") == {"a": {"b": 1}}


def test_the_names_of_nnx_are_the_same_thing():
    assert traversals.empty_node is traverse_util.empty_node
    assert jax.tree.leaves(traverse_util.empty_node) == []


def test_flattening_a_list_is_refused():
    message = (
        "flatten_dict takes nested mappings, but got list.\n"
        "Fix: pass a dict, or nnx.to_pure_dict(nnx.state(model)) for a model."
    )
    for expected in (TypeError, AssertionError):
        with pytest.raises(expected) as error:
            traverse_util.flatten_dict([1])  # pyright: ignore[reportArgumentType]
        assert str(error.value) == message


def test_a_map_that_knows_the_path():
    mapped = traverse_util.path_aware_map(lambda path, x: (path, x), NESTED)
    assert mapped == {"a": {"b": (("a", "b"), 1), "e": {}}, "d": (("d",), 3)}


@pytest.mark.parametrize(
    ("traversal", "selected", "updated"),
    [
        (t_identity["a"]["b"], [1], {**DATA, "a": {"b": 10, "c": 2}}),
        (t_identity["d"].each(), [3, 4], {**DATA, "d": [30, 40]}),
        (t_identity["a"].each(), [1, 2], {**DATA, "a": {"b": 10, "c": 20}}),
        (t_identity["e"][1], [6], {**DATA, "e": (5, 60)}),
        (t_identity["e"][0:1], [5], {**DATA, "e": (50, 6)}),
        (t_identity["d"][-1], [4], {**DATA, "d": [3, 40]}),
        (t_identity["d"].tree().filter(lambda x: x > 3), [4], {**DATA, "d": [3, 40]}),
        (
            t_identity["a"].merge(t_identity["b"], t_identity["c"]),
            [1, 2],
            {**DATA, "a": {"b": 10, "c": 20}},
        ),
    ],
)
def test_traversals(traversal, selected, updated):
    before = repr(DATA)
    assert list(traversal.iterate(DATA)) == selected
    assert traversal.update(lambda x: x * 10, DATA) == updated
    assert traversal.set([x * 10 for x in selected], DATA) == updated
    assert repr(DATA) == before


def test_a_slice_of_a_list_is_updated_whole():
    assert t_identity[0:2].update(lambda xs: [sum(xs)], [1, 2, 3]) == [3, 3]


def test_attributes():
    @struct.dataclass
    class Point:
        x: float
        y: float

    class Plain:
        x = 1

    point = Point(1.0, 2.0)  # pyright: ignore[reportCallIssue]
    assert TraverseAttr("x").update(lambda x: x + 1, point) == Point(2.0, 2.0)  # pyright: ignore[reportCallIssue]
    assert t_identity["p"].x.update(lambda x: x + 1, {"p": Pair(1, 2)}) == {"p": Pair(2, 2)}
    plain = Plain()
    assert TraverseAttr("x").update(lambda x: x + 1, plain).x == 2
    assert plain.x == 1
    assert t_identity[1].update(lambda x: 9, Pair(1, 2)) == Pair(1, 9)


def test_parameters_by_path():
    params = {"y": {"kernel": 3, "none": {}}, "x": {"kernel": 1, "bias": 2}}
    kernels = ModelParamTraversal(lambda path, _: path in ("/x/kernel", "/y/kernel"))
    assert list(kernels.iterate(params)) == [1, 3]
    assert kernels.update(lambda x: x + 10, params) == {
        "x": {"bias": 2, "kernel": 11},
        "y": {"kernel": 13, "none": {}},
    }
    with pytest.raises(ValueError, match="goes through nested dicts, but got list"):
        list(kernels.iterate([1]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "Not enough values provided: the traversal selects 2 parts, but got 1 values.\n"),
        ([1, 2, 3], "Too many values provided: the traversal selects 2 parts, but got 3 values.\n"),
    ],
)
def test_values_that_do_not_match(values, message):
    with pytest.raises(ValueError) as error:
        t_identity.each().set(values, [0, 0])
    assert str(error.value) == message + "Fix: give one value for each part."


def test_each_needs_a_container():
    with pytest.raises(ValueError) as error:
        t_identity.each().update(abs, 3)
    assert str(error.value) == (
        "Only the entries of a list, tuple or dict can be traversed, but got int.\n"
        "Fix: select a container first: t_identity[key].each()."
    )


def test_traversals_have_no_private_attributes():
    with pytest.raises(AttributeError, match="'TraverseId' object has no attribute '_nope'"):
        t_identity._nope  # noqa: B018
    with pytest.raises(TypeError, match="abstract"):
        traverse_util.Traversal()  # pyright: ignore[reportAbstractUsage]
