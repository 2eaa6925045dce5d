"""A page that sets Linen and NNX side by side: the NNX column, cell by cell."""

import jax
import jax.numpy as jnp
import optax
import flax.linen as nn
from typing import Any

# %%
from flax import nnx


class Block(nnx.Module):
    def __init__(self, in_features: int, out_features: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(in_features, out_features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        x = self.dropout(x)
        x = jax.nn.relu(x)
        return x


class Model(nnx.Module):
    def __init__(self, din: int, dmid: int, dout: int, rngs: nnx.Rngs):
        self.block = Block(din, dmid, rngs=rngs)
        self.linear = nnx.Linear(dmid, dout, rngs=rngs)

    def __call__(self, x):
        x = self.block(x)
        x = self.linear(x)
        return x


# %%
model = Model(784, 256, 10, rngs=nnx.Rngs(0))
assert model.linear.bias.value.shape == (10,)
assert model.block.linear.kernel.value.shape == (784, 256)
# %%
model.train()


@nnx.jit
def train_step(model, inputs, labels):

    def loss_fn(model):
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grads = nnx.grad(loss_fn)(model)
    _, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    nnx.update(model, nnx.merge_state(params, rest))


# %%
sample_x = jnp.ones((1, 784))
train_step(model, sample_x, jnp.ones((1,), dtype=jnp.int32))


# %%
class Counter(nnx.Variable):
    pass


class Block(nnx.Module):
    def __init__(self, in_features: int, out_features: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(in_features, out_features, rngs=rngs)
        self.batchnorm = nnx.BatchNorm(num_features=out_features, momentum=0.99, rngs=rngs)
        self.count = Counter(jnp.array(0))

    def __call__(self, x):
        x = self.linear(x)
        x = self.batchnorm(x)
        self.count.value += 1
        x = jax.nn.relu(x)
        return x


model = Block(4, 4, rngs=nnx.Rngs(0))
model.linear.kernel
model.batchnorm.mean
model.count
# %%
graphdef, params, batch_stats, count = nnx.split(model, nnx.Param, nnx.BatchStat, Counter)
params.keys()
batch_stats.keys()
count.keys()
model = nnx.merge(graphdef, params, batch_stats, count)


# %%
class AutoEncoder(nnx.Module):
    def __init__(self, in_dim: int, embed_dim: int, output_dim: int, rngs):
        self.encoder = nnx.Linear(in_dim, embed_dim, rngs=rngs)
        self.decoder = nnx.Linear(embed_dim, output_dim, rngs=rngs)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)

    def __call__(self, x):
        x = self.encode(x)
        x = self.decode(x)
        return x


model = AutoEncoder(784, 256, 784, rngs=nnx.Rngs(0))
# %%
z = model.encode(jnp.ones((1, 784)))


# %%
class RNNCell(nnx.Module):
    def __init__(self, input_size, hidden_size, rngs):
        self.linear = nnx.Linear(hidden_size + input_size, hidden_size, rngs=rngs)
        self.hidden_size = hidden_size

    def __call__(self, carry, x):
        x = jnp.concatenate([carry, x], axis=-1)
        x = self.linear(x)
        x = jax.nn.relu(x)
        return (x, x)

    def initial_state(self, batch_size: int):
        return jnp.zeros((batch_size, self.hidden_size))


# %%
class RNN(nnx.Module):
    def __init__(self, input_size: int, hidden_size: int, rngs: nnx.Rngs):
        self.hidden_size = hidden_size
        self.cell = RNNCell(input_size, self.hidden_size, rngs=rngs)

    def __call__(self, x):
        scan_fn = lambda carry, cell, x: cell(carry, x)
        carry = self.cell.initial_state(x.shape[0])
        carry, y = nnx.scan(scan_fn, in_axes=(nnx.Carry, None, 1), out_axes=(nnx.Carry, 1))(
            carry, self.cell, x
        )
        return y


x = jnp.ones((3, 12, 32))
model = RNN(x.shape[2], 64, rngs=nnx.Rngs(0))
y = model(x)


# %%
class Block(nnx.Module):
    def __init__(self, input_dim, features, rngs):
        self.linear = nnx.Linear(input_dim, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array):
        x = self.linear(x)
        x = self.dropout(x)
        x = jax.nn.relu(x)
        return x


class MLP(nnx.Module):
    def __init__(self, features, num_layers, rngs):

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create_block(rngs: nnx.Rngs):
            return Block(features, features, rngs=rngs)

        self.blocks = create_block(rngs)
        self.num_layers = num_layers

    def __call__(self, x):

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, model):
            x = model(x)
            return x

        return forward(x, self.blocks)


model = MLP(64, num_layers=5, rngs=nnx.Rngs(0))
# %%
from flax.training import train_state

model = nnx.Linear(784, 10, rngs=nnx.Rngs(0))
model.train()
graphdef, params, other_variables = nnx.split(model, nnx.Param, ...)


class TrainState(train_state.TrainState):
    other_variables: nnx.State


state = TrainState.create(
    apply_fn=graphdef.apply, params=params, other_variables=other_variables, tx=optax.adam(0.001)
)


@jax.jit
def train_step(state, inputs, labels):

    def loss_fn(params, other_variables):
        logits, (graphdef, new_state) = state.apply_fn(params, other_variables)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grads = jax.grad(loss_fn)(state.params, state.other_variables)
    state = state.apply_gradients(grads=grads)
    return state


# %%
sample_x = jnp.ones((1, 784))
train_step(state, sample_x, jnp.ones((1,), dtype=jnp.int32))
