"""A page that sets Linen and NNX side by side: the Linen column, cell by cell."""

import jax
import jax.numpy as jnp
import optax
import flax.linen as nn
from typing import Any

# %%
import flax.linen as nn


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, training: bool):
        x = nn.Dense(self.features)(x)
        x = nn.Dropout(0.5, deterministic=not training)(x)
        x = jax.nn.relu(x)
        return x


class Model(nn.Module):
    dmid: int
    dout: int

    @nn.compact
    def __call__(self, x, training: bool):
        x = Block(self.dmid)(x, training)
        x = nn.Dense(self.dout)(x)
        return x


# %%
model = Model(256, 10)
sample_x = jnp.ones((1, 784))
variables = model.init(jax.random.key(0), sample_x, training=False)
params = variables["params"]
assert params["Dense_0"]["bias"].shape == (10,)
assert params["Block_0"]["Dense_0"]["kernel"].shape == (784, 256)


# %%
@jax.jit
def train_step(key, params, inputs, labels):

    def loss_fn(params):
        logits = model.apply({"params": params}, inputs, training=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grads = jax.grad(loss_fn)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params


# %%
train_step(jax.random.key(0), params, sample_x, jnp.ones((1,), dtype=jnp.int32))


# %%
class Block(nn.Module):
    features: int

    def setup(self):
        self.dense = nn.Dense(self.features)
        self.batchnorm = nn.BatchNorm(momentum=0.99)
        self.count = self.variable("counter", "count", lambda: jnp.zeros((), jnp.int32))

    @nn.compact
    def __call__(self, x, training: bool):
        x = self.dense(x)
        x = self.batchnorm(x, use_running_average=not training)
        self.count.value += 1
        x = jax.nn.relu(x)
        return x


x = jax.random.normal(jax.random.key(0), (2, 4))
model = Block(4)
variables = model.init(jax.random.key(0), x, training=True)
variables["params"]["dense"]["kernel"].shape
variables["batch_stats"]["batchnorm"]["mean"].shape
variables["counter"]["count"]
# %%
params, batch_stats, counter = (variables["params"], variables["batch_stats"], variables["counter"])
params.keys()
batch_stats.keys()
counter.keys()
variables = {"params": params, "batch_stats": batch_stats, "counter": counter}


# %%
class AutoEncoder(nn.Module):
    embed_dim: int
    output_dim: int

    def setup(self):
        self.encoder = nn.Dense(self.embed_dim)
        self.decoder = nn.Dense(self.output_dim)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)

    def __call__(self, x):
        x = self.encode(x)
        x = self.decode(x)
        return x


model = AutoEncoder(256, 784)
variables = model.init(jax.random.key(0), x=jnp.ones((1, 784)))
# %%
z = model.apply(variables, x=jnp.ones((1, 784)), method="encode")


# %%
class RNNCell(nn.Module):
    hidden_size: int

    @nn.compact
    def __call__(self, carry, x):
        x = jnp.concatenate([carry, x], axis=-1)
        x = nn.Dense(self.hidden_size)(x)
        x = jax.nn.relu(x)
        return (x, x)

    def initial_state(self, batch_size: int):
        return jnp.zeros((batch_size, self.hidden_size))


# %%
class RNN(nn.Module):
    hidden_size: int

    @nn.compact
    def __call__(self, x):
        rnn = nn.scan(
            RNNCell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )(self.hidden_size)
        carry = rnn.initial_state(x.shape[0])
        carry, y = rnn(carry, x)
        return y


x = jnp.ones((3, 12, 32))
model = RNN(64)
variables = model.init(jax.random.key(0), x=jnp.ones((3, 12, 32)))
y = model.apply(variables, x=jnp.ones((3, 12, 32)))


# %%
class Block(nn.Module):
    features: int
    training: bool

    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(self.features)(x)
        x = nn.Dropout(0.5)(x, deterministic=not self.training)
        x = jax.nn.relu(x)
        return (x, None)


class MLP(nn.Module):
    features: int
    num_layers: int

    @nn.compact
    def __call__(self, x, training: bool):
        ScanBlock = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers
        )
        y, _ = ScanBlock(self.features, training)(x, None)
        return y


model = MLP(64, num_layers=5)
# %%
from flax.training import train_state

sample_x = jnp.ones((1, 784))
model = nn.Dense(features=10)
params = model.init(jax.random.key(0), sample_x)["params"]
state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.001))


@jax.jit
def train_step(key, state, inputs, labels):

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, inputs, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grads = jax.grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state


# %%
train_step(jax.random.key(0), state, sample_x, jnp.ones((1,), dtype=jnp.int32))
