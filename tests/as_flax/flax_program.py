"""A program for Flax, which knows nothing of Linnet: `python -m linnet` runs it, and so does Flax.

It goes through what the introductions to NNX and to moving from Linen show: modules and their
state, training, surgery, stacked layers, shared references, abstract models; and in Linen compact
and setup modules, batch statistics, dropout, a train state, scanned layers. The numbers are those
of Flax 0.12.8.
"""

import functools
import io
import pickle
from typing import Any

import flax
import flax.core.meta
import flax.linen as nn
import flax.linen.partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, nnx, serialization, struct, traverse_util
from flax.core import FrozenDict, freeze, unfreeze
from flax.core.frozen_dict import FrozenDict as SameFrozenDict
from flax.experimental import nnx as older
from flax.linen import initializers
from flax.linen.module import merge_param
from flax.nnx.nn.linear import default_kernel_init
from flax.training import common_utils, train_state
from flax.typing import Dtype

X = jnp.linspace(-1, 1, 12).reshape(4, 3)
Y = X[:, :2] * X[:, 1:]
FOUND = {}


def note(name, value):
    FOUND[name] = [round(float(np.sum(leaf)), 4) for leaf in jax.tree.leaves(value)]


# ---- NNX ----------------------------------------------------------------------------------------


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(default_kernel_init(rngs.params(), (din, dout)))
        self.b = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(jnp.array(0, jnp.uint32))
        self.din, self.dout = din, dout

    def __call__(self, x):
        self.count.value += 1
        return x @ self.w + self.b[None]


class Mlp(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.first = Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.second = Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.drop(self.norm(self.first(x)))))


def objects_and_training():
    model = Mlp(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    note("losses", [step(model, optimizer, X, Y) for _ in range(5)])
    model.eval()
    note("evaluated", model(X))
    assert model.first.count.value == 6
    graphdef, params, counts, rest = nnx.split(model, nnx.Param, Count, ...)
    note("params", params)
    again = nnx.merge(graphdef, params, counts, rest)
    assert (again(X) == model(X)).all() and again.second.count.value == 8
    assert isinstance(model, nnx.Module) and older.Linear is nnx.Linear


class LoraParam(nnx.Param):
    pass


class Lora(nnx.Module):
    def __init__(self, linear: Linear, rank: int, rngs: nnx.Rngs):
        self.linear = linear
        self.a = LoraParam(jax.random.normal(rngs(), (linear.din, rank)))
        self.b = LoraParam(jnp.ones((rank, linear.dout)))

    def __call__(self, x):
        return self.linear(x) + x @ self.a @ self.b


def surgery_and_filters():
    model = Mlp(rngs=nnx.Rngs(1))
    model.first = Lora(model.first, 2, nnx.Rngs(2))
    model.eval()
    note("adapted", model(X))
    trained = nnx.state(model, LoraParam)
    assert set(dict(trained.flat_state())) == {("first", "a"), ("first", "b")}
    nnx.update(model, jax.tree.map(jnp.zeros_like, trained))
    note("adapted to nothing", model(X))
    grads = nnx.grad(lambda m: m(X).sum(), argnums=nnx.DiffState(0, LoraParam))(model)
    note("gradients", grads)


def stacked_and_shared():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return nnx.Linear(3, 3, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return nnx.tanh(layer(x))

    stack = make(nnx.Rngs(0))
    assert stack.kernel.value.shape == (3, 3, 3)
    note("stack", forward(X, stack))

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 3, rngs=rngs)
            self.same = self.embed

    tied = nnx.merge(*nnx.split(Tied(nnx.Rngs(0))))
    assert tied.embed is tied.same
    abstract = nnx.eval_shape(lambda: Mlp(rngs=nnx.Rngs(0)))
    assert abstract.first.w.value.shape == (3, 8)
    copied = pickle.loads(pickle.dumps(nnx.to_pure_dict(nnx.state(tied))))
    note("tied", copied)


# ---- Linen --------------------------------------------------------------------------------------


class Block(nn.Module):
    features: int
    train: bool | None = None
    dtype: Dtype | None = None

    @nn.compact
    def __call__(self, x, train=None):
        train = merge_param("train", self.train, train)
        x = nn.Dense(self.features, kernel_init=initializers.xavier_uniform(), dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(nn.relu(x))


class Classifier(nn.Module):
    features: int = 8

    def setup(self):
        self.block = Block(self.features)
        self.head = nn.Dense(2, name="head")

    def __call__(self, x, train: bool):
        return self.head(self.block(x, train))


class TrainState(train_state.TrainState):
    batch_stats: Any


def a_train_state():
    model = Classifier()
    variables = model.init(jax.random.key(0), X, train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1, momentum=0.9),
    )

    @jax.jit
    def step(state, key):
        def loss_fn(params):
            out, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                X,
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return jnp.mean((out - Y) ** 2), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        return state.replace(batch_stats=updates["batch_stats"]), loss

    losses = []
    for number in range(4):
        state, loss = step(state, jax.random.fold_in(jax.random.key(1), number))
        losses.append(loss)
    note("linen losses", losses)
    note("linen state", (state.params, state.batch_stats))
    file = io.BytesIO(serialization.to_bytes(state))
    back = serialization.from_bytes(state, file.getvalue())
    assert jax.tree.all(jax.tree.map(np.array_equal, back.params, state.params))
    assert int(back.step) == 4
    flat = traverse_util.flatten_dict(unfreeze(freeze(state.params)), sep="/")
    assert "head/kernel" in flat and SameFrozenDict is FrozenDict
    assert isinstance(freeze(state.params), FrozenDict)


def scanned_layers_with_names():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = nn.with_partitioning(initializers.lecun_normal(), ("in", "out"))
            return nn.tanh(nn.Dense(3, kernel_init=init)(x)), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Layer),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return layers()(x, None)[0]

    variables = Deep().init(jax.random.key(0), X)
    (kernel,) = jax.tree.leaves(
        variables, is_leaf=lambda leaf: isinstance(leaf, flax.core.meta.Partitioned)
    )[1:]
    assert isinstance(kernel, nn.Partitioned) and kernel.names == ("layers", "in", "out")
    note("scanned", Deep().apply(nn.unbox(variables), X))
    with nn_partitioning.axis_rules([("in", None), ("out", "model")]):
        mesh_axes = nn_partitioning.logical_to_mesh_axes(("in", "out"))
        assert tuple(mesh_axes) == (None, "model")


def helpers_of_linen():
    @struct.dataclass
    class Totals:
        loss: jax.Array
        name: str = struct.field(pytree_node=False, default="all")

        def add(self, loss):
            return self.replace(loss=self.loss + loss)

    note("struct", jax.jit(functools.reduce, static_argnums=0)(Totals.add, [1.0, 2.0], Totals(0.0)))
    note("one-hot", common_utils.onehot(jnp.array([0, 2]), 3))
    note("replicated", jax_utils.unreplicate(jax_utils.replicate({"a": X})))
    note("gru", nn.RNN(nn.GRUCell(4)).init_with_output(jax.random.key(0), X[None])[0])
    attention = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=4)
    note("attention", attention.init_with_output(jax.random.key(0), X[None])[0])


EXPECTED = {
    "losses": [1.2229, 0.5948, 0.4345, 0.5427, 0.5666],
    "evaluated": [-1.3431],
    "params": [0.0, 1.0231, -0.0343, 7.9607, 0.0459, -0.7259],
    "adapted": [2.1527],
    "adapted to nothing": [2.6813],
    "gradients": [0.0, 0.0],
    "stack": [0.2384],
    "tied": [-1.7087],
    "linen losses": [0.4359, 1.1794, 1.3403, 0.364],
    "linen state": [-1.2788, 6.6936, 0.0, 1.4695, 0.6672, 0.6882, -0.0078, 7.75],
    "scanned": [0.7548],
    "struct": [3.0],
    "one-hot": [2.0],
    "replicated": [0.0],
    "gru": [1.9248],
    "attention": [0.5173],
}


def main():
    for program in (
        objects_and_training,
        surgery_and_filters,
        stacked_and_shared,
        a_train_state,
        scanned_layers_with_names,
        helpers_of_linen,
    ):
        program()
    assert FOUND.keys() == EXPECTED.keys()
    for name, found in FOUND.items():
        assert np.allclose(found, EXPECTED[name], rtol=1e-3, atol=1e-3), (name, found)
    print(len(FOUND), "results as in Flax", flax.__version__)


if __name__ == "__main__":
    main()
