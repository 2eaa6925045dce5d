"""Linen's variables load into NNX models that are built alike, and back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import errors, io, linen as nn, nnx, serialization
from linnet.training.train_state import TrainState
from tests.compare import assert_equal

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


def assert_loaded(model, variables):
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
    assert_loaded(model, variables)


def test_from_msgpack(variables, tmp_path):
    stored = serialization.to_bytes(variables)
    model = Twin(nnx.Rngs(1))
    io.load_linen(stored, model, rename=RENAME)
    assert_loaded(model, variables)
    file = tmp_path / "model.msgpack"
    file.write_bytes(stored)
    model = Twin(nnx.Rngs(2))
    io.load_linen(file, model, rename=RENAME)
    assert_loaded(model, variables)


def test_from_orbax(variables, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", variables)
    model = nnx.eval_shape(lambda: Twin(nnx.Rngs(0)))
    model.drop.rngs = None
    io.load_linen(tmp_path / "theirs", model, rename=RENAME)
    assert_loaded(model, variables)


def test_from_a_checkpoint_of_linnet(variables, tmp_path):
    io.save(tmp_path / "ours", variables=variables)
    model = Twin(nnx.Rngs(1))
    io.load_linen(tmp_path / "ours", model, rename=RENAME)
    assert_loaded(model, variables)


def test_from_a_train_state(variables):
    state = TrainState.create(
        apply_fn=None, params=variables["params"], tx=optax.adam(1e-3)
    )  # with moments, which are left out
    stored = {**serialization.to_state_dict(state), "batch_stats": variables["batch_stats"]}
    model = Twin(nnx.Rngs(1))
    io.load_linen(stored, model, rename=RENAME)
    assert_loaded(model, variables)


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
    for rename in (None, {"layers/*": "layers_*"}):
        assert_equal(io.linen_variables(model, rename=rename), dict(variables))


def filled(variables):
    """Other numbers of the same shapes, all different."""
    leaves, tree = jax.tree.flatten(dict(variables))
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    return tree.unflatten(
        jnp.sin(jnp.arange(start, start + leaf.size, dtype=leaf.dtype).reshape(leaf.shape))
        for start, leaf in zip(starts, leaves, strict=False)
    )


@pytest.mark.parametrize("name", ["LSTMCell", "OptimizedLSTMCell", "SimpleCell", "GRUCell"])
def test_cells(name):
    """NNX has a name that Python allows for ``if``, or the gates side by side."""
    x, carry = jnp.ones((1, 3)), jnp.full((1, 4), 0.5)
    carry = (carry, carry - 1.0) if "LSTM" in name else carry
    cell = getattr(nn, name)(4)
    variables = filled(cell.init(jax.random.key(0), carry, x))
    if name == "GRUCell":  # for which NNX has no place
        with pytest.raises(errors.CheckpointMismatchError, match=r"model/hn/bias: not wanted"):
            io.load_linen(variables, nnx.GRUCell(3, 4, rngs=nnx.Rngs(1)))
        variables["params"]["hn"]["bias"] *= 0
    model = getattr(nnx, name)(3, 4, rngs=nnx.Rngs(1))
    io.load_linen(variables, model, rename={"hn/bias": None} if name == "GRUCell" else None)
    np.testing.assert_allclose(model(carry, x)[1], cell.apply(variables, carry, x)[1], rtol=1e-6)
    assert_equal(io.linen_variables(model), variables)


def test_gates_that_are_missing():
    cell = nn.OptimizedLSTMCell(4)
    x, carry = jnp.ones((1, 3)), (jnp.ones((1, 4)), jnp.ones((1, 4)))
    params = dict(cell.init(jax.random.key(0), carry, x)["params"])
    del params["ho"]
    with pytest.raises(errors.CheckpointMismatchError) as caught:
        io.load_linen(params, nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(1)))
    paths = {problem.path for problem in caught.value.problems}
    gates = {f"model/{gate}/{leaf}" for gate in ("hi", "hf", "hg") for leaf in ("kernel", "bias")}
    assert paths == gates | {"model/dense_h/kernel", "model/dense_h/bias"}


def test_scanned_layers_dicts_and_own_collections():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4)(x), None

    class Linen(nn.Module):
        def setup(self):
            self.heads = {"left": nn.Dense(4), "far_right": nn.Dense(4)}
            self.blocks = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )()
            self.steps_taken = self.variable("run_counts", "steps_taken", lambda: jnp.zeros(()))

        def __call__(self, x):
            x, _ = self.blocks(self.heads["left"](x), None)
            self.steps_taken.value += 1
            return self.heads["far_right"](x)

    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.Dense_0 = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.Dense_0(x)

    class RunCounts(nnx.Variable):
        pass

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.heads = nnx.Dict(
                left=nnx.Linear(4, 4, rngs=rngs), far_right=nnx.Linear(4, 4, rngs=rngs)
            )
            self.blocks = nnx.Stack(Inner, 3, rngs=rngs)
            self.steps_taken = RunCounts(jnp.ones(()))

        def __call__(self, x):
            return self.heads["far_right"](self.blocks(self.heads["left"](x)))

    variables = filled(Linen().init(jax.random.key(0), X))
    model = Model(nnx.Rngs(0))
    io.load_linen(variables, model)
    want, _ = Linen().apply(variables, X, mutable=["run_counts"])
    np.testing.assert_allclose(model(X), want, rtol=1e-5)
    assert model.steps_taken == variables["run_counts"]["steps_taken"]
    assert_equal(io.linen_variables(model), variables)
    renamed = io.linen_variables(model, rename={"heads": "ends", "blocks": "body"})["params"]
    assert set(renamed) == {"ends_left", "ends_far_right", "body"}
    assert set(renamed["body"]) == {"Dense_0"}


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
