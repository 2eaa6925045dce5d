"""Containers and bound methods on their way through JAX, and what stands in for arrays there."""

import copy
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from tests.models import Bag, Pair, param, through_tree_map

# ---- bound methods ------------------------------------------------------------------------------

COPIES = {
    "tree.map": through_tree_map,
    "clone": nnx.clone,
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "recursive_map": lambda m: nnx.recursive_map(lambda path, x: x, m),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "cloudpickle": lambda m: cloudpickle.loads(cloudpickle.dumps(m)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_stored_method_of_its_own_is_bound_to_the_copy(duplicate):
    bag = Bag(w=param())
    bag.f = bag.read
    copied = duplicate(bag)
    assert copied.f.__self__ is copied
    assert bag.f.__self__ is bag


@pytest.mark.parametrize(
    "duplicate",
    [f for name, f in COPIES.items() if name != "copy"],
    ids=[name for name in COPIES if name != "copy"],
)
def test_own_methods_in_containers_are_bound_to_the_copy(duplicate):
    bag = Bag(w=param())
    bag.fs = [bag.read, {"add": (bag.add, 1)}]
    copied = duplicate(bag)
    assert copied.fs[0].__self__ is copied
    assert copied.fs[1]["add"][0].__self__ is copied
    assert copied.fs[1]["add"][1] == 1


def test_a_method_of_a_part_follows_that_part():
    bag = Bag(part=Bag(w=param()))
    bag.a_read = bag.part.read
    copied = nnx.clone(bag)
    assert copied.a_read.__self__ is copied.part
    assert list(nnx.state(bag).flat_state().paths) == [("part", "w")]
    assert nnx.merge(*nnx.split(bag, graph=False)).a_read.__self__ is not bag.part


def test_a_method_sees_traced_values_under_jit():
    bag = Bag(w=param(2.0))
    bag.f = bag.read
    assert jax.grad(lambda m: m.f() ** 2)(bag).w.value == 4


def test_methods_of_a_module_above_do_not_send_jax_round_in_circles():
    outer = Bag(w=param(), part=Bag())
    outer.part.callback, outer.part.callbacks = outer.read, [1, outer.add]
    rebuilt = through_tree_map(outer)
    assert rebuilt.part.callback.__self__ is rebuilt.part.callbacks[1].__self__ is outer
    assert jax.tree.structure(rebuilt) == jax.tree.structure(outer)
    copied = nnx.clone(outer)
    assert copied.part.callback.__self__ is copied


def test_a_stored_method_prints_by_its_name():
    bag = Bag()
    bag.f, bag.fs = bag.read, [bag.add]
    assert "f=<bound method Bag.read>," in repr(bag)
    assert "<bound method Bag.add>" in repr(bag)


def test_printing_a_cycle_through_a_named_tuple_ends():
    bag = Bag()
    bag.pair = Pair(bag, 1)
    assert repr(bag) == "Bag(\n  pair=Pair(left=..., right=1)\n)"


# ---- other things in the place of arrays --------------------------------------------------------


def mixed_model():
    return Bag(
        w=param(1.0, 2),
        raw=jnp.ones(2),
        stats={"z": jnp.ones(2), "name": "norm", "a": [np.ones(2), "x", None]},
        items=[jnp.ones(2), 3, (jnp.ones(2), "y")],
        n=1,
    )


@pytest.mark.parametrize(
    "stand_in",
    [
        None,
        0,
        (2, 3),
        "axis",
        jax.sharding.PartitionSpec("x"),
        jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_leaves_can_be_replaced_by_anything_and_put_back(stand_in):
    model = mixed_model()
    leaves, structure = jax.tree.flatten(model)
    replaced = jax.tree.map(lambda x: stand_in, model)
    assert replaced.stats == {"z": stand_in, "name": "norm", "a": [stand_in, "x", None]}
    assert replaced.items == [stand_in, 3, (stand_in, "y")]
    assert (replaced.raw, replaced.n, replaced.w.value) == (stand_in, 1, stand_in)
    back = jax.tree.map(lambda _, x: x, replaced, model, is_leaf=lambda x: x is stand_in)
    assert jax.tree.structure(back) == structure
    assert [a is b for a, b in zip(jax.tree.leaves(back), leaves, strict=True)] == [True] * 6


def test_a_tree_of_axes_works_as_in_axes():
    model = Bag(w=param(1.0, 3), stats={"mean": jnp.arange(3.0), "name": "x"})
    axes = jax.tree.map(lambda x: 0, model)
    out = jax.vmap(lambda m: m.w[...] + m.stats["mean"], in_axes=(axes,))(model)
    assert out.tolist() == [1, 2, 3]


def test_a_tree_of_shardings_works_as_in_shardings():
    model = Bag(w=param(1.0, 2), items=[jnp.ones(2), "name"])
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shardings = jax.tree.map(lambda x: device, model)
    out = jax.jit(lambda m: m.w[...] + m.items[0], in_shardings=(shardings,))(model)
    assert out.tolist() == [2, 2]


@pytest.mark.parametrize("duplicate", [through_tree_map, nnx.clone])
def test_dicts_keep_their_order(duplicate):
    model = Bag(layers={"z": param(), "note": 1, "a": param()}, d=nnx.Dict(z=param(), n=1, a=2))
    copied = duplicate(model)
    assert list(copied.layers) == ["z", "note", "a"]
    assert list(copied.d) == ["z", "n", "a"]


# ---- static elements among the data -------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [jnp.ones(2), "label", 3],
        (jnp.ones(2), None, "label"),
        {"b": jnp.ones(2), "a": "label"},
        [1, [jnp.ones(2), {"x": "deep", "w": jnp.zeros(1)}], (2, 3)],
    ],
    ids="list tuple dict nested".split(),
)
def test_static_elements_are_structure_and_arrays_are_leaves(value):
    bag = Bag(x=value)
    leaves = jax.tree.leaves(bag)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    rebuilt = jax.tree.unflatten(jax.tree.structure(bag), leaves).x
    assert str(rebuilt) == str(value)
    assert jax.jit(lambda bag: bag.x[0])(Bag(x=[jnp.ones(()), "label"])) == 1


@pytest.mark.parametrize(("one", "other"), [(1, True), (0.0, -0.0), ("a", "b"), ([1], [1, 1])])
def test_static_elements_are_told_apart(one, other):
    first, second = (Bag(x=[jnp.ones(1), value]) for value in (one, other))
    assert jax.tree.structure(first) != jax.tree.structure(second)
    assert jax.tree.structure(first) == jax.tree.structure(nnx.clone(first))


def test_a_list_that_changed_while_it_held_stand_ins_is_sorted_anew():
    axes = jax.tree.map(lambda x: 0, Bag(x=[jnp.ones(1), "label"]))
    axes.x.append(jnp.ones(2))
    assert [np.shape(leaf) for leaf in jax.tree.leaves(axes)] == [(2,)]


def test_data_forces_every_element_and_keeps_order():
    bag = Bag(x=nnx.data({"z": jnp.ones(1), "n": 1, "a": [{"y": 2, "x": 3}]}))
    assert jax.tree_util.keystr(jax.tree.leaves_with_path(bag)[0][0]) == ".x['a'][0]['x']"
    assert [int(leaf) for leaf in jax.tree.map(jnp.sum, jax.tree.leaves(bag))] == [3, 2, 1, 1]
    rebuilt = through_tree_map(bag)
    assert list(rebuilt.x) == ["z", "n", "a"]
    assert list(rebuilt.x["a"][0]) == ["y", "x"]
    assert jax.tree.structure(rebuilt) == jax.tree.structure(bag)
