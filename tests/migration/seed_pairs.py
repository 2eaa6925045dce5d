"""The Linen sides of a guide's comparisons between Linen and NNX, in our own words."""

import jax
import jax.numpy as jnp
import optax

import linnet.linen as nn
from linnet.training import train_state

# ---- a module and its submodule -----------------------------------------------------------------


class Block(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, training: bool):
        x = nn.Dense(self.features)(x)
        x = nn.Dropout(0.5, deterministic=not training)(x)
        return jax.nn.relu(x)


class Model(nn.Module):
    dmid: int
    dout: int

    @nn.compact
    def __call__(self, x, training: bool):
        x = Block(self.dmid)(x, training)
        return nn.Dense(self.dout)(x)


# ---- variables ----------------------------------------------------------------------------------

model = Model(8, 3)
sample = jnp.ones((1, 6))
variables = model.init(jax.random.key(0), sample, training=False)
params = variables["params"]
assert params["Dense_0"]["bias"].shape == (3,)
assert params["Block_0"]["Dense_0"]["kernel"].shape == (6, 8)

# ---- a step -------------------------------------------------------------------------------------


@jax.jit
def train_step(key, params, inputs, labels):
    def loss_fn(params):
        logits = model.apply(
            {"params": params},
            inputs,
            training=False,  # as in the guide, but without dropout
            rngs={"dropout": key},
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grads = jax.grad(loss_fn)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params


# ---- collections --------------------------------------------------------------------------------


class Counting(nn.Module):
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
        return jax.nn.relu(x)


x = jax.random.normal(jax.random.key(0), (2, 4))
counting = Counting(4)
counted = counting.init(jax.random.key(0), x, training=True)
assert counted["params"]["dense"]["kernel"].shape == (4, 4)
assert counted["batch_stats"]["batchnorm"]["mean"].shape == (4,)
weights, stats, counter = (counted["params"], counted["batch_stats"], counted["counter"])
assert list(weights.keys()) == ["batchnorm", "dense"] or list(weights.keys()) == [
    "dense",
    "batchnorm",
]
assert list(stats.keys()) == ["batchnorm"]
assert list(counter.keys()) == ["count"]
counted = {"params": weights, "batch_stats": stats, "counter": counter}

# ---- several methods ----------------------------------------------------------------------------


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
        return self.decode(x)


auto = AutoEncoder(3, 6)
auto_variables = auto.init(jax.random.key(0), x=jnp.ones((1, 6)))
z = auto.apply(auto_variables, x=jnp.ones((1, 6)), method="encode")
assert z.shape == (1, 3)

# ---- a scan over time ---------------------------------------------------------------------------


class RNNCell(nn.Module):
    hidden_size: int

    @nn.compact
    def __call__(self, carry, x):
        x = jnp.concatenate([carry, x], axis=-1)
        x = nn.Dense(self.hidden_size)(x)
        x = jax.nn.relu(x)
        return x, x

    def initial_state(self, batch_size: int):
        return jnp.zeros((batch_size, self.hidden_size))


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


sequence = jnp.ones((3, 5, 2))
recurrent = RNN(4)
recurrent_variables = recurrent.init(jax.random.key(0), x=jnp.ones((3, 5, 2)))
y = recurrent.apply(recurrent_variables, x=sequence)
assert y.shape == (3, 5, 4)

# ---- a scan over layers -------------------------------------------------------------------------


class Layer(nn.Module):
    features: int
    training: bool

    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(self.features)(x)
        x = nn.Dropout(0.5)(x, deterministic=not self.training)
        x = jax.nn.relu(x)
        return x, None


class MLP(nn.Module):
    features: int
    num_layers: int

    @nn.compact
    def __call__(self, x, training: bool):
        ScanBlock = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )

        y, _ = ScanBlock(self.features, training)(x, None)
        return y


mlp = MLP(4, num_layers=5)

# ---- TrainState ---------------------------------------------------------------------------------

dense = nn.Dense(features=3)
dense_params = dense.init(jax.random.key(0), sample)["params"]

state = train_state.TrainState.create(
    apply_fn=dense.apply,
    params=dense_params,
    tx=optax.adam(1e-1),
)


@jax.jit
def state_step(key, state, inputs, labels):
    def loss_fn(params):
        logits = state.apply_fn(
            {"params": params},
            inputs,  # the images
            rngs={"dropout": key},
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grads = jax.grad(loss_fn)(state.params)

    state = state.apply_gradients(grads=grads)

    return state


labels = jnp.ones((1,), dtype=jnp.int32)
for i in range(3):
    state = state_step(jax.random.key(i), state, sample, labels)
