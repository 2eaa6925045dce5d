"""Axis names on Variables, and the shardings made from them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from linnet import nnx

KEY = jax.random.key(0)


class Model(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(jax.nn.initializers.ones, ("rows", None))
        self.made = nnx.Param(init(KEY, (2, 3)))
        self.named = nnx.Param(jnp.ones((2, 2)), sharding_names=("rows", "columns"))
        self.bare = nnx.BatchStat(jnp.ones(2))
        self.number = nnx.Variable(1.0)
        self.array = jnp.ones(2)
        self.width = 3


SPECS = {
    "made": PartitionSpec("rows", None),
    "named": PartitionSpec("rows", "columns"),
    "bare": PartitionSpec(),
    "number": None,
    "array": PartitionSpec(),
}


@pytest.fixture
def mesh():
    return jax.make_mesh((1, 1), ("rows", "columns"))


def values(tree):
    found = {
        name: tree[name] if isinstance(tree, nnx.State) else getattr(tree, name) for name in SPECS
    }
    return {name: v.value if isinstance(v, nnx.Variable) else v for name, v in found.items()}


def test_with_partitioning_puts_the_names_on_the_variable(mesh):
    init = nnx.with_partitioning(jax.nn.initializers.ones, ("rows", None), mesh, unit="m")
    param = nnx.Param(init(KEY, (2, 3)))
    assert param.value.tolist() == [[1, 1, 1]] * 2
    assert (param.out_sharding, param.mesh, param.unit) == (("rows", None), mesh, "m")
    assert not nnx.Param(nnx.with_partitioning(jax.nn.initializers.ones, ())(KEY, ())).has_metadata(
        "mesh"
    )


@pytest.mark.parametrize("tree", [Model, lambda: nnx.state(Model())], ids=["module", "state"])
def test_specs_stand_in_the_place_of_arrays(tree):
    tree = tree()
    specs = nnx.get_partition_spec(tree)
    assert type(specs) is type(tree)
    assert values(specs) == SPECS
    assert type(specs.made) is nnx.Param
    assert specs.made.out_sharding == ("rows", None)


@pytest.mark.parametrize("tree", [Model, lambda: nnx.state(Model())], ids=["module", "state"])
def test_shardings_stand_in_the_place_of_arrays(tree, mesh):
    shardings = nnx.get_named_sharding(tree(), mesh)
    want = {name: spec and NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    want |= {name: NamedSharding(mesh, PartitionSpec()) for name in ("bare", "array")}
    assert values(shardings) == want


@pytest.mark.parametrize("name", ["out_sharding", "sharding_names", "sharding"])
def test_every_name_of_the_names(name):
    specs = nnx.get_partition_spec({"w": nnx.Param(jnp.ones(2), **{name: ("rows",)})})
    assert specs["w"].value == PartitionSpec("rows")
    ready = nnx.get_partition_spec(nnx.Param(jnp.ones(2), **{name: PartitionSpec("rows")}))
    assert ready.value == PartitionSpec("rows")


def test_abstract_models_have_shardings_too(mesh):
    shardings = nnx.get_named_sharding(nnx.eval_shape(Model), mesh)
    assert shardings.named.value == NamedSharding(mesh, SPECS["named"])


def test_the_name_of_the_name():
    assert nnx.PARTITION_NAME == "partition_name"
