"""A variational autoencoder of small pictures: crosses at random places."""

import json

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from flax.core import FrozenDict, freeze, unfreeze
from flax.training import train_state

SIZE, LATENTS, BATCH, STEPS = 8, 4, 32, 60


@flax.struct.dataclass
class Posterior:
    mean: jax.Array
    logvar: jax.Array
    kind: str = flax.struct.field(pytree_node=False, default="normal")

    def kl(self):
        """The divergence from the standard normal distribution."""
        inner = 1 + self.logvar - jnp.square(self.mean) - jnp.exp(self.logvar)
        return -0.5 * jnp.sum(inner, axis=-1)


class Encoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2, name="conv")(x))
        x = nn.relu(nn.Dense(32, name="fc")(x.reshape((x.shape[0], -1))))
        x = nn.Dropout(0.05)(x, deterministic=not self.has_rng("dropout"))
        mean = nn.Dense(self.latents, name="mean")(x)
        return Posterior(mean, nn.Dense(self.latents, name="logvar")(x))


class Decoder(nn.Module):
    widths: tuple[int, ...] = (32, 4 * 4 * 8)

    def setup(self):
        self.layers = [nn.Dense(width) for width in self.widths]
        self.up = nn.ConvTranspose(1, (3, 3), strides=(2, 2))
        self.tone = self.param("tone", nn.initializers.zeros, (SIZE, SIZE, 1))

    def __call__(self, z):
        for layer in self.layers:
            z = nn.relu(layer(z))
        return self.up(z.reshape((*z.shape[:-1], 4, 4, 8))) + self.tone[None]


class VAE(nn.Module):
    latents: int = LATENTS

    def setup(self):
        self.encoder = Encoder(self.latents)
        self.decoder = Decoder()
        self.seen = self.variable("counts", "seen", lambda: jnp.zeros((), jnp.int32))

    def __call__(self, x):
        posterior = self.encoder(x)
        if not self.is_initializing():
            self.seen.value += x.shape[0]
        return self.decoder(self.reparameterize(posterior)), posterior

    def reparameterize(self, posterior):
        noise = jax.random.normal(self.make_rng("noise"), posterior.mean.shape)
        return posterior.mean + noise * jnp.exp(0.5 * posterior.logvar)

    def encode(self, x):
        return self.encoder(x)

    def generate(self, z):
        return nn.sigmoid(self.decoder(z))


class TrainState(train_state.TrainState):
    counts: FrozenDict


def crosses(seed):
    """Batches of crosses of random place and reach."""
    rng = np.random.default_rng(seed)
    grid = np.arange(SIZE)
    while True:
        row, column = rng.integers(1, SIZE - 1, size=(2, BATCH, 1, 1))
        reach = rng.integers(1, 4, size=(BATCH, 1, 1))
        down, across = np.abs(grid[None, :, None] - row), np.abs(grid[None, None] - column)
        near = ((down == 0) & (across <= reach)) | ((across == 0) & (down <= reach))
        yield near[..., None].astype(np.float32)


def loss_of(logits, x, posterior):
    bits = optax.sigmoid_binary_cross_entropy(logits, x).sum(axis=(1, 2, 3))
    return jnp.mean(bits) + jnp.mean(posterior.kl())


@jax.jit
def train_step(state, x, key):
    noise, dropout = jax.random.split(jax.random.fold_in(key, state.step))

    def loss_fn(params):
        (logits, posterior), updates = state.apply_fn(
            {"params": params, "counts": state.counts},
            x,
            rngs={"noise": noise, "dropout": dropout},
            mutable=["counts"],
        )
        return loss_of(logits, x, posterior), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, counts=freeze(updates["counts"])), loss


def main():
    model, batches = VAE(), crosses(0)
    keys = dict(zip(("params", "noise"), jax.random.split(jax.random.key(0)), strict=True))
    counts, params = freeze(model.init(keys, next(batches))).pop("params")
    state = TrainState.create(
        apply_fn=model.apply,
        params=unfreeze(params),
        tx=optax.adam(3e-3),
        counts=counts["counts"],
    )
    losses = []
    for _ in range(STEPS):
        state, loss = train_step(state, next(batches), jax.random.key(1))
        losses.append(float(loss))
    assert losses[-1] < 0.75 * losses[0]
    assert int(state.counts["seen"]) == STEPS * BATCH

    stored = serialization.to_bytes(state)
    blank = jax.tree_util.tree_map(jnp.zeros_like, state)
    state = serialization.from_bytes(blank, stored)
    variables = {"params": state.params, "counts": state.counts}
    x = next(crosses(1))
    posterior = model.apply(variables, x, method="encode")
    pictures = model.apply(variables, posterior.mean, method=model.generate)
    drawn = model.apply(variables, jnp.zeros((1, LATENTS)), method=VAE.generate)
    losses += [float(posterior.kl().mean()), float(jnp.mean((pictures - x) ** 2))]
    losses.append(float(drawn.mean()))
    table = model.tabulate(keys, x, console_kwargs={"width": 200, "force_terminal": False})
    assert "encoder/conv" in table
    assert "reparameterize" not in table
    return losses, {"params": state.params, "counts": state.counts}


if __name__ == "__main__":
    print(json.dumps(main()[0]))
