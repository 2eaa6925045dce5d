"""What is a leaf of a state: None, numbers and text, foreign pytrees, registered data types."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from tests.models import Bag, Pair, param


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    array: object
    other: object = None
    size: int = dataclasses.field(default=3, metadata={"static": True})


@nnx.register_data_type
class DataBox(Box): ...


jax.tree_util.register_dataclass(DataBox, ["array", "other"], ["size"])


def paths(node, **options):
    return list(nnx.to_flat_state(nnx.state(node, **options)).paths)


class Optional(nnx.Module):
    b: nnx.Data[jax.Array | None]

    def __init__(self):
        self.w, self.b = param(1.0, 2), None


@pytest.mark.parametrize("graph", [True, False])
def test_none_in_a_data_attribute_has_no_entry(graph):
    graphdef, state = nnx.split(Optional(), graph=graph)
    assert list(state) == ["w"]
    merged = nnx.merge(graphdef, state)
    assert merged.b is None
    assert nnx.graphdef(merged, graph=graph) == graphdef
    merged.b = jnp.ones(3)
    assert paths(merged, graph=graph) == [("b",), ("w",)]


def test_a_pure_dict_without_the_missing_entry_is_loaded():
    model = Optional()
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, {"w": jnp.zeros(2)})
    nnx.update(model, state)
    assert model.w.value.tolist() == [0, 0]


def test_none_inside_marked_containers_has_no_entry():
    bag = Bag(b=nnx.data(None), c=nnx.data({"x": None, "y": jnp.ones(1)}), d=nnx.data([None]))
    for graph in (True, False):
        assert paths(bag, graph=graph) == [("c", "y")]
    merged = nnx.merge(*nnx.split(bag))
    assert (merged.b, merged.c["x"], merged.d) == (None, None, [None])


@pytest.mark.parametrize("value", ["abc", 3, np.dtype("float32")])
def test_an_attribute_marked_as_data_is_a_leaf_whatever_it_holds(value):
    bag = Bag(d=nnx.data(value))
    for graph in (True, False):
        assert nnx.state(bag, graph=graph)["d"] == value


def test_elements_that_are_no_data_are_static_in_graph_mode_and_leaves_in_tree_mode():
    bag = Bag(d=nnx.data({"s": "abc", "i": 3, "n": None, "a": jnp.ones(1)}), e=nnx.data([1, "x"]))
    assert paths(bag) == [("d", "a")]
    assert paths(bag, graph=False) == [("d", "a"), ("d", "i"), ("d", "s"), ("e", 0), ("e", 1)]
    for graph in (True, False):
        merged = nnx.merge(*nnx.split(bag, graph=graph))
        assert (merged.d["s"], merged.d["i"], merged.e) == ("abc", 3, [1, "x"])
        assert nnx.graphdef(merged) == nnx.graphdef(bag)
        assert jax.tree.structure(merged) == jax.tree.structure(bag)


def test_plain_containers_list_their_numbers_in_tree_mode_only():
    tree = {"a": 1, "b": [param(), 2.5, "x", None, Bag(n=4, l=[5, jnp.ones(1)])]}
    in_tree = [("a",), ("b", 0), ("b", 1), ("b", 2), ("b", 4, "l", 1)]
    assert paths(tree, graph=False) == in_tree
    assert list(nnx.graphlib.flatten(tree, graph=False)[1].paths) == in_tree
    assert paths(tree) == [("b", 0), ("b", 4, "l", 1)]
    for graph in (True, False):
        merged = nnx.merge(*nnx.split(tree, graph=graph))
        assert (merged["a"], merged["b"][1:4], merged["b"][4].l[0]) == (1, [2.5, "x", None], 5)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("leaf", [1, 2.5, "x", np.ones(2), jnp.ones(2), param()])
def test_a_bare_leaf_is_its_own_state(leaf, graph):
    graphdef, state = nnx.split(leaf, graph=graph)
    assert state is leaf
    assert nnx.merge(graphdef, state) is leaf


def test_none_alone_has_an_empty_state():
    graphdef, state = nnx.split(None)
    assert (len(state), nnx.merge(graphdef, state)) == (0, None)


@pytest.mark.parametrize("cls", [Box, DataBox])
def test_a_registered_pytree_has_an_entry_for_each_array(cls):
    tree = {"k": cls(jnp.ones(2)), "v": cls(param(), jnp.zeros(1)), "none": cls(None)}
    for graph in (True, False):
        assert paths(tree, graph=graph) == [("k", "array"), ("v", "array"), ("v", "other")]
    graphdef, state = nnx.split(tree)
    merged = nnx.merge(graphdef, state)
    assert merged["v"].array is tree["v"].array
    assert (type(merged["none"]), merged["none"].size) == (cls, 3)


def test_elements_of_a_pytree_that_are_no_data_are_static_in_graph_mode():
    bag = Bag(b=nnx.data(Box(jnp.ones(2), "text")), c=nnx.data(Box(3, [2.5, param()])))
    assert paths(bag) == [("b", "array"), ("c", "other", 1)]
    in_tree = [("b", "array"), ("b", "other"), ("c", "array"), ("c", "other", 0), ("c", "other", 1)]
    assert paths(bag, graph=False) == in_tree
    merged = nnx.merge(*nnx.split(bag))
    assert (merged.b.other, merged.c.array, merged.c.other[0]) == ("text", 3, 2.5)


def test_registered_data_types_are_data_and_others_are_not():
    assert nnx.is_data(DataBox(1))
    assert not nnx.is_data(Box(1))
    assert nnx.state(Bag(x=DataBox(jnp.ones(2)), y=DataBox(None)))["x"]["array"].tolist() == [1, 1]


def test_update_writes_into_registered_pytrees():
    tree = {"k": DataBox(param(1.0, 2), jnp.ones(1))}
    variable = tree["k"].array
    nnx.update(tree, {"k": {"array": jnp.zeros(2), "other": jnp.full(1, 7.0)}})
    assert tree["k"].array is variable
    assert variable.value.tolist() == [0, 0]
    assert tree["k"].other.tolist() == [7]


def test_named_tuples_keep_their_static_fields():
    graphdef, state = nnx.split({"n": Pair(jnp.ones(1), 3), "m": Pair(1, None)})
    assert list(state.flat_state().paths) == [("n", "left")]
    merged = nnx.merge(graphdef, state)
    assert (merged["n"].right, merged["m"]) == (3, Pair(1, None))


@pytest.mark.parametrize("element", [[], None, {"x": None}], ids=str)
def test_a_copy_keeps_the_mark_of_a_container_with_elements_that_are_no_data(element):
    bag = Bag(b=nnx.data(Pair(element, param(1.0))))
    copied = nnx.clone(bag, graph=False)
    for graph in (True, False):
        assert nnx.graphdef(copied, graph=graph) == nnx.graphdef(bag, graph=graph)
