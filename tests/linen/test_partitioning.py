"""Names of axes in a collection beside the variables; expected values are those of Flax 0.12.8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from linnet import linen as nn
from linnet.linen import partitioning

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


class Dense(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        normal, shape = jax.nn.initializers.normal(), (x.shape[-1], self.features)
        kernel = partitioning.param_with_axes("kernel", normal, shape, axes=("embed", "mlp"))
        mean = partitioning.variable_with_axes(
            "stats", "mean", jnp.zeros, (self.features,), axes=("mlp",), module=self
        )
        mean.value = mean.value + 1
        return x @ kernel


class Step(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return Dense()(carry), None


def names(variables, collection="params"):
    return jax.tree.map(
        tuple,
        partitioning.get_axis_names(variables[f"{collection}_axes"]).unfreeze(),
        is_leaf=lambda x: isinstance(x, P),
    )


def test_names_stand_beside_the_variables():
    variables = Dense().init(KEY, X)
    assert variables["params_axes"] == {
        "kernel_axes": partitioning.AxisMetadata(names=("embed", "mlp"))
    }
    assert names(variables) == {"kernel": ("embed", "mlp")}
    assert names(variables, "stats") == {"mean": ("mlp",)}
    assert jax.tree.leaves(variables["params_axes"]) == []
    np.testing.assert_allclose(variables["params"]["kernel"][0, 0], 0.00076142, rtol=1e-4)
    _, updates = Dense().apply(variables, X, mutable=["stats"])
    assert updates["stats"]["mean"].tolist() == [2, 2, 2] and list(updates) == ["stats"]


def test_scanned_modules_gain_a_name():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "stats": 0}
            layers = partitioning.scan_with_axes(
                Step,
                variable_axes=axes,
                split_rngs={"params": True},
                length=2,
                axes_collections=("params", "stats"),
            )
            return layers()(x, None)[0]

    variables = Model().init(KEY, X)
    scope = "Map_variablesMap_variablesScanStep_0"
    assert names(variables) == {scope: {"Dense_0": {"kernel": ("layers", "embed", "mlp")}}}
    assert names(variables, "stats") == {scope: {"Dense_0": {"mean": ("layers", "mlp")}}}
    assert variables["params"][scope]["Dense_0"]["kernel"].shape == (2, 3, 3)
    out, updates = Model().apply(variables, X, mutable=["stats"])
    assert out.shape == (2, 3)
    assert updates["stats"][scope]["Dense_0"]["mean"].tolist() == [[2] * 3] * 2


def test_mapped_and_rematerialized_modules():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            many = partitioning.vmap_with_axes(
                Dense,
                variable_axes={"params": 1, "stats": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=4,
                partitioning_axis_names={"params": "stack"},
            )
            return partitioning.remat(Chosen, static_argnums=(1,))()(x, True), many()(x)

    class Chosen(nn.Module):
        @nn.compact
        def __call__(self, x, flag):
            return Dense()(x) if flag else x

    variables = Model().init(KEY, X)
    assert names(variables) == {
        "Core_remat_staticChosen_0": {"Dense_0": {"kernel": ("embed", "mlp")}},
        "Map_variablesVmapDense_0": {"kernel": ("embed", "stack", "mlp")},
    }


def test_rules_and_constraints():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    rules = (("embed", None), ("mlp", "model"))
    with partitioning.axis_rules(rules), jax.set_mesh(mesh):
        assert partitioning.get_axis_rules() == nn.get_logical_axis_rules() == rules
        assert partitioning.logical_to_mesh_axes(("embed", "mlp")) == P(None, "model")
        traced = str(jax.make_jaxpr(Dense().init)(KEY, X))
    assert traced.count("sharding_constraint") == 3  # the kernel, and the mean read and written
    assert str(jax.make_jaxpr(Dense().init)(KEY, X)).count("sharding_constraint") == 0
    assert partitioning.ScanIn(0).axis == 0 and partitioning.ScanOut(1).axis == 1


def test_errors():
    class Nameless(nn.Module):
        @nn.compact
        def __call__(self):
            return partitioning.param_with_axes("w", jax.nn.initializers.ones, (3,))

    class Renamed(nn.Module):
        @nn.compact
        def __call__(self, name):
            return partitioning.param_with_axes("w", jax.nn.initializers.ones, (3,), axes=(name,))

    with pytest.raises(ValueError, match='"w" was made without names for its axes'):
        Nameless().init(KEY)
    variables = Renamed().init(KEY, "embed")
    with pytest.raises(
        ValueError, match=r"are named \('mlp',\), but were named \('embed',\) before"
    ):
        Renamed().apply(variables, "mlp", mutable=["params_axes"])
    for call in (partitioning.param_with_axes, partitioning.variable_with_axes):
        with pytest.raises(AssertionError, match="was called outside of all modules"):
            call("a", "b", jnp.zeros, axes=("x",))
