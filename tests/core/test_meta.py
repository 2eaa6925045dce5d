"""Boxes around values: names of axes that follow the axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet import errors, linen as nn
from linnet.core import meta

MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
BOX = meta.Partitioned(jnp.ones((2, 3)), ("data", None))
LAYERS = {meta.PARTITION_NAME: "layers"}


def test_partitioned_is_a_pytree_around_its_value():
    assert [x.shape for x in jax.tree.leaves(BOX)] == [(2, 3)]
    (path,) = [p for p, _ in jax.tree_util.tree_leaves_with_path(BOX)]
    assert jax.tree_util.keystr(path) == ".value"
    assert BOX.get_partition_spec() == PartitionSpec("data", None)
    assert BOX.get_sharding(MESH) == NamedSharding(MESH, PartitionSpec("data", None))
    assert BOX.unbox() is BOX.value and BOX.replace_boxed(3) == meta.Partitioned(3, ("data", None))
    assert repr(meta.Partitioned(1, ("a",))) == "Partitioned(value=1, names=('a',), mesh=None)"


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (0, ("layers", "data", None)),
        (1, ("data", "layers", None)),
        (2, ("data", None, "layers")),
        (4, ("data", None, None, None, "layers")),
        (-1, ("data", None, "layers")),
    ],
)
def test_an_axis_is_added_and_removed(index, names):
    box = BOX.add_axis(index, LAYERS)
    assert box.names == names
    if index < 3:
        assert box.remove_axis(index, LAYERS).names == BOX.names


def test_errors_of_axes():
    with pytest.raises(errors.PartitioningUnspecifiedError, match="has no name for it"):
        BOX.add_axis(0, {})
    with pytest.raises(
        AssertionError, match=r"the names \('data', None\) was to be removed as 'lay"
    ):
        BOX.remove_axis(0, LAYERS)


def test_trees():
    tree = {"w": BOX, "b": jnp.zeros(2), "n": 3, "l": [meta.Partitioned(1.0, ())]}
    plain = meta.unbox(tree)
    assert plain["w"] is BOX.value and plain["l"] == [1.0] and plain["n"] == 3
    assert meta.map_axis_meta(lambda box: box.names, tree)["w"] == ("data", None)
    back = meta.replace_boxed(tree, {**plain, "w": 5})
    assert back["w"] == meta.Partitioned(5, ("data", None)) and back["b"] is plain["b"]
    assert meta.add_axis(tree, 0, LAYERS)["w"].names == ("layers", "data", None)
    assert meta.remove_axis({"w": BOX}, 0, {meta.PARTITION_NAME: "data"})["w"].names == (None,)
    specs = meta.get_partition_spec(tree)
    assert specs["w"] == PartitionSpec("data", None) and specs["b"] == PartitionSpec()
    assert specs["n"] is None
    abstract = jax.eval_shape(lambda: {"w": BOX})
    assert meta.get_partition_spec(abstract) == {"w": PartitionSpec("data", None)}
    shardings = meta.get_sharding({"w": BOX, "b": jnp.zeros(2)}, MESH)
    assert shardings["b"] == NamedSharding(MESH, PartitionSpec())


def test_boxes_in_boxes():
    tree = {"x": meta.Partitioned(meta.Partitioned(jnp.ones(2), ("a",)), ("b",))}
    assert meta.unbox(tree)["x"].shape == (2,)
    assert meta.replace_boxed(tree, {"x": 7})["x"].value == meta.Partitioned(7, ("a",))


def test_the_constraint_counts_under_a_mesh():
    def constraints(box):
        return str(jax.make_jaxpr(lambda x: box.replace_boxed(x).unbox())(jnp.ones((2, 3)))).count(
            "sharding_constraint"
        )

    assert constraints(BOX) == 0 and not meta.global_mesh_defined()
    assert constraints(BOX.replace(mesh=MESH)) == 1
    with jax.set_mesh(MESH):
        assert constraints(BOX) == 1 and meta.global_mesh_defined()
        assert meta.get_global_mesh().axis_names == ("data", "model")
    placed = BOX.replace(mesh=MESH)
    assert placed.unbox().sharding.spec == PartitionSpec("data", None)
    assert placed.unbox(apply_constraint=False) is BOX.value


def test_metadata_of_nnx():
    metadata = BOX.to_nnx_metadata()
    assert sorted(metadata) == ["mesh", "out_sharding", "value"]
    assert metadata["out_sharding"] == ("data", None) and BOX.names == ("data", None)
    assert meta.Partitioned.from_nnx_metadata({**metadata, "other": 1}).names == BOX.names


def test_parameters_are_taken_out_of_their_boxes():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            ones = nn.with_partitioning(jax.nn.initializers.ones, ("data", "model"))
            kernel = self.param("kernel", ones, (3, 4))
            boxed = self.param("boxed", ones, (3, 4), unbox=False)
            mean = self.variable("stats", "mean", lambda: meta.Partitioned(jnp.zeros(3), ("data",)))
            mean.value = mean.value + 1
            return type(kernel), type(boxed), type(mean.value)

    x = jnp.ones((2, 3))
    (kernel, boxed, mean), variables = Model().init_with_output(jax.random.key(0), x)
    assert boxed is meta.Partitioned and kernel is mean is type(x)
    assert variables["params"]["kernel"].names == ("data", "model")
    assert variables["stats"]["mean"].names == ("data",)
    _, updates = Model().apply(variables, x, mutable=["stats"])
    assert updates["stats"]["mean"].value.tolist() == [2, 2, 2]
    assert updates["stats"]["mean"].names == ("data",)
    # Variables without their boxes will do.
    assert Model().apply(nn.unbox(variables), x, mutable=["stats"])[0][0] is type(x)
    with pytest.raises(errors.ScopeParamShapeError, match=r"has shape \(2, 4\)"):
        Model().apply(jax.tree.map(lambda a: a[:2], variables), x, mutable=["stats"])
