"""Linen's variables load into NNX models that are built alike, and back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import errors, io, linen as nn, nnx, serialization
from linnet.training.train_state import TrainState

X = jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4)
RENAME = {
    "Dense_0": "up",
    "BatchNorm_0": "norm",
    "MultiHeadDotProductAttention_0": "attention",
    "Dense_1": "down",
}


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        x = nn.MultiHeadDotProductAttention(2)(x)
        return nn.Dense(2)(x)


class Twin(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.down = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(self.attention(self.norm(self.up(x)))))


@pytest.fixture(scope="module")
def variables():
    made = jax.jit(LinenModel().init)(jax.random.key(0), X)
    stats = jax.tree.map(lambda x: x + 0.5, made["batch_stats"])
    return {**made, "batch_stats": stats}


def assert_same(model, variables):
    want = LinenModel().apply(variables, X)
    np.testing.assert_allclose(model(X), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        model.norm.mean[...], variables["batch_stats"]["BatchNorm_0"]["mean"]
    )


def test_from_memory(variables):
    model = Twin(nnx.Rngs(1))
    restored = io.load_linen(variables, model, rename=RENAME)
    assert restored.model is model
    assert restored.problems == []
    assert_same(model, variables)


def test_from_msgpack(variables, tmp_path):
    stored = serialization.to_bytes(variables)
    model = Twin(nnx.Rngs(1))
    io.load_linen(stored, model, rename=RENAME)
    assert_same(model, variables)
    file = tmp_path / "model.msgpack"
    file.write_bytes(stored)
    model = Twin(nnx.Rngs(2))
    io.load_linen(file, model, rename=RENAME)
    assert_same(model, variables)


def test_from_orbax(variables, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", variables)
    model = nnx.eval_shape(lambda: Twin(nnx.Rngs(0)))
    model.drop.rngs = None
    io.load_linen(tmp_path / "theirs", model, rename=RENAME)
    assert_same(model, variables)


def test_from_a_checkpoint_of_linnet(variables, tmp_path):
    io.save(tmp_path / "ours", variables=variables)
    model = Twin(nnx.Rngs(1))
    io.load_linen(tmp_path / "ours", model, rename=RENAME)
    assert_same(model, variables)


def test_from_a_train_state(variables):
    state = TrainState.create(
        apply_fn=None, params=variables["params"], tx=optax.adam(1e-3)
    )  # with moments, which are left out
    stored = {**serialization.to_state_dict(state), "batch_stats": variables["batch_stats"]}
    model = Twin(nnx.Rngs(1))
    io.load_linen(stored, model, rename=RENAME)
    assert_same(model, variables)


def test_parameters_alone_and_in_boxes():
    layer = nn.Dense(2, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, "a")))
    params = layer.init(jax.random.key(0), X)["params"]
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    io.load_linen(params, model)
    np.testing.assert_array_equal(model.kernel[...], params["kernel"].value)


def test_lists_of_setup():
    class Linen(nn.Module):
        def setup(self):
            self.layers = [nn.Dense(4), nn.Dense(4)]

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    class Listed(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    variables = Linen().init(jax.random.key(0), X)
    model = Listed(nnx.Rngs(0))
    io.load_linen(variables, model)
    for number, layer in enumerate(model.layers):
        want = variables["params"][f"layers_{number}"]["kernel"]
        np.testing.assert_array_equal(layer.kernel[...], want)
    back = io.linen_variables(model, rename={"layers/*": "layers_*"})
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), back, dict(variables)))


def test_a_cell_with_names_that_python_keeps_for_itself():
    x, carry = jnp.ones((1, 3)), (jnp.ones((1, 4)), jnp.zeros((1, 4)))
    cell = nn.LSTMCell(4)
    variables = cell.init(jax.random.key(0), carry, x)
    model = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(1))
    io.load_linen(variables, model)
    np.testing.assert_allclose(model(carry, x)[1], cell.apply(variables, carry, x)[1], rtol=1e-6)


def test_there_and_back(variables):
    model = Twin(nnx.Rngs(1))
    back = io.linen_variables(model, rename={new: old for old, new in RENAME.items()})
    assert jax.tree.structure(back) == jax.tree.structure(dict(variables))
    np.testing.assert_allclose(LinenModel().apply(back, X), model(X), rtol=1e-5, atol=1e-6)
    other = Twin(nnx.Rngs(2))
    io.load_linen(back, other, rename=RENAME)
    np.testing.assert_array_equal(other(X), model(X))


def test_what_does_not_fit(variables):
    model = Twin(nnx.Rngs(1))
    before = model.up.kernel[...]
    less = {old: new for old, new in RENAME.items() if old != "Dense_1"}
    with pytest.raises(errors.CheckpointMismatchError, match=r"nothing was changed") as caught:
        io.load_linen(variables, model, rename=less)
    assert {p.path for p in caught.value.problems} >= {"model/down/bias", "model/Dense_1/bias"}
    np.testing.assert_array_equal(model.up.kernel[...], before)
    restored = io.load_linen(variables, model, rename=less, strict=False)
    assert len(restored.problems) == len(caught.value.problems)
    np.testing.assert_array_equal(model.up.kernel[...], variables["params"]["Dense_0"]["kernel"])
    with pytest.raises(errors.CheckpointMismatchError, match=r"Dense_9: renames nothing"):
        io.load_linen(variables, model, rename={**RENAME, "Dense_9": "x"})
    with pytest.raises(errors.CheckpointMismatchError, match=r"upp: renames nothing"):
        io.linen_variables(model, rename={"upp": "Dense_0"})
    missing = {"params": variables["params"]}
    with pytest.raises(errors.CheckpointMismatchError, match=r"model/norm/mean: missing"):
        io.load_linen(missing, model, rename=RENAME)


def test_arguments_of_no_use(tmp_path):
    with pytest.raises(
        errors.CheckpointArgumentError, match=r"but got a int\.\nFix: io\.load_linen"
    ):
        io.load_linen(3, nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    both = {"params": {"a": jnp.ones(1)}, "batch_stats": {"a": jnp.ones(1)}}
    text = re.escape("has a in two collections: batch_stats/a and params/a")
    with pytest.raises(errors.CheckpointArgumentError, match=text):
        io.load_linen(both, nnx.BatchNorm(1, rngs=nnx.Rngs(0)))
    with pytest.raises(errors.CheckpointNotFoundError):
        io.load_linen(tmp_path / "nothing", nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
