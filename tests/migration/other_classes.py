"""Linen modules of many kinds; the tests say which are converted and which are left."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet import linen as nn


class Flattening(nn.Module):
    """A convolutional network whose first dense layer sees as many numbers as an image leaves."""

    classes: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=4, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        x = nn.Dense(features=8)(x)
        return nn.Dense(features=self.classes)(nn.relu(x))


class Widths(nn.Module):
    features: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for width in self.features[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.features[-1])(x)


class ListOfLayers(nn.Module):
    width: int
    depth: int = 2

    def setup(self):
        self.first = nn.Dense(self.width)
        self.layers = [nn.Dense(self.width) for _ in range(self.depth)]
        self.norms = [nn.LayerNorm(), nn.LayerNorm()]

    def __call__(self, x):
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x


class Encoder(nn.Module):
    """A transformer's block, with positions that depend on the length of the input."""

    heads: int
    rate: float = 0.1

    @nn.compact
    def __call__(self, x, mask=None, *, train: bool = False):
        width = x.shape[-1]
        positions = self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], width))
        x = x + positions
        y = nn.LayerNorm(epsilon=1e-5)(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.heads,
            dropout_rate=self.rate,
            deterministic=not train,  # no dropout in evaluation
        )(y, mask=mask)
        x = x + nn.Dropout(self.rate)(y, deterministic=not train)
        y = nn.Dense(4 * width)(nn.LayerNorm()(x))
        y = nn.Dense(width)(nn.gelu(y))
        return x + nn.Dropout(self.rate, deterministic=not train)(y)


class Normed(nn.Module):
    """Constructors made with partial."""

    width: int
    norm: Callable[..., Any] = nn.LayerNorm

    @nn.compact
    def __call__(self, x, train: bool = True):
        dense = functools.partial(nn.Dense, use_bias=False, kernel_init=nn.initializers.he_normal())
        batch_norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.relu(batch_norm()(dense(self.width)(x)))
        x = nn.relu(batch_norm(name="second")(dense(self.width)(x)))
        return dense(2, name="out")(self.norm(use_bias=False)(x))


class BothWays(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        forward = nn.RNN(nn.SimpleCell(self.hidden))
        backward = nn.RNN(nn.OptimizedLSTMCell(self.hidden))
        x = nn.Bidirectional(forward, backward)(x)
        return nn.Dense(1)(x[:, -1])


class Chained(nn.Module):
    def setup(self):
        self.net = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4), nn.tanh])
        self.rnn = nn.RNN(nn.SimpleCell(3))

    def __call__(self, x):
        return self.rnn(self.net(x))


class ChainedOnTheSpot(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])(x)


class Average(nn.Module):
    """A collection of its own, and a parameter that is made in a call."""

    decay: float = 0.9

    @nn.compact
    def __call__(self, x, update: bool = True):
        mean = self.variable("averages", "mean", jnp.zeros, (x.shape[-1],))
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if update and not self.is_initializing():
            mean.value = self.decay * mean.value + (1 - self.decay) * x.mean(axis=0)
        self.sow("intermediates", "centred", x - mean.value[None])
        return (x - mean.value[None]) * scale[None]


class Feed(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train: bool):
        y = nn.Dense(2 * self.width)(x)
        y = nn.Dropout(0.5, deterministic=not train)(nn.gelu(y))
        return x + nn.Dense(self.width)(y)


class Recomputed(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(self.width, name="embed")(x)
        block = nn.remat(Feed, static_argnums=(2,))
        for i in range(self.depth):
            x = block(self.width, name=f"block_{i}")(x, train)
        return x


class Options(nn.Module):
    """Layers that some configurations have."""

    width: int
    norm: bool = True
    project: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        if self.norm:
            x = nn.LayerNorm()(x)
        if self.project:
            x = nn.Dense(3)(x)
        else:
            x = jnp.tanh(x)
        if x.shape[-1] != self.width:
            x = nn.Dense(self.width, name="back")(x)
        return nn.Dense(1)(x)


class Skips(nn.Module):
    """Down and up again, with connections across."""

    widths: Sequence[int] = (4, 6)

    @nn.compact
    def __call__(self, x):
        skips = []
        for width in self.widths:
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            skips.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        for width, skip in zip(reversed(self.widths), reversed(skips), strict=True):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2))(x)
            x = nn.relu(nn.Conv(width, (3, 3))(jnp.concatenate([x, skip], axis=-1)))
        return nn.Conv(1, (1, 1))(x)


class Experts(nn.Module):
    count: int
    width: int

    @nn.compact
    def __call__(self, x):
        gates = nn.softmax(nn.Dense(self.count, name="gate")(x))
        outputs = jnp.stack([nn.Dense(self.width)(x) for _ in range(self.count)], axis=-1)
        return jnp.sum(outputs * gates[:, None], axis=-1)


class Heads(nn.Module):
    """Attention written by hand."""

    heads: int
    size: int

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        qkv = nn.DenseGeneral((3, self.heads, self.size), use_bias=False, name="qkv")(x)
        query, key, value = (jnp.squeeze(part, 2) for part in jnp.split(qkv, 3, axis=2))
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) / self.size**0.5)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        y = y.reshape(batch, length, self.heads * self.size)
        return nn.Dense(width, name="out")(y)


class Base(nn.Module):
    width: int

    def activate(self, x):
        return nn.silu(x)


class Derived(Base):
    out: int = 2

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.out)(self.activate(nn.Dense(self.width)(x)))


class Tied(nn.Module):
    """An embedding used twice, and layers that a scan runs over."""

    vocabulary: int
    width: int

    def setup(self):
        self.embed = nn.Embed(self.vocabulary, self.width)
        self.norm = nn.RMSNorm()

    def __call__(self, tokens):
        return self.embed.attend(self.norm(self.embed(tokens)))

    def embedded(self, tokens):
        return self.embed(tokens)


class Around(nn.Module):
    """A module is passed to the constructor."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(self.inner(x))


class Twins(nn.Module):
    """Equal networks with parameters of their own, for the same inputs."""

    width: int
    count: int = 2

    @nn.compact
    def __call__(self, x):
        several = nn.vmap(
            Widths,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=self.count,
        )
        return several((self.width, 1))(x).min(axis=0)


class Patches(nn.Module):
    """The shape of a parameter depends on the size of the images."""

    patch: int
    width: int
    classes: int

    @nn.compact
    def __call__(self, images):
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, padding="VALID", name="embedding")(images)
        n, h, w, c = x.shape
        x = jnp.reshape(x, [n, h * w, c])
        token = self.param("token", nn.initializers.zeros, (1, 1, c))
        x = jnp.concatenate([jnp.tile(token, [n, 1, 1]), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], x.shape[2]))
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, deterministic=True)(y, y)
        return nn.Dense(self.classes, name="head")(x[:, 0])


class Mapped(nn.Module):
    """Left: a lifted vmap whose size its input says."""

    @nn.compact
    def __call__(self, x):
        dense = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return dense(3)(x)


class Gated(nn.Module):
    """Left: the GRU of NNX has one bias less."""

    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.GRUCell(3))(x)


class Weighted(nn.Module):
    """Left: weight normalisation keeps its parameters otherwise."""

    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(3))(x)


class Nested(nn.Module):
    """Left: a function inside makes layers."""

    @nn.compact
    def __call__(self, x):
        def layer(x, width):
            return nn.relu(nn.Dense(width)(x))

        return layer(layer(x, 4), 2)


class Looking(nn.Module):
    """Left: it reads its own variables."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(2)(x)
        return y * len(jax.tree.leaves(self.variables["params"]))


class UsesLeft(nn.Module):
    """Left: what it uses was left."""

    @nn.compact
    def __call__(self, x):
        return Nested()(nn.Dense(3)(x))


class Hidden(nn.Module):
    """Left: a flag of a layer that another layer calls."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=not train)])(x)


class Appended(nn.Module):
    depth: int

    def setup(self):
        layers = []
        for _ in range(self.depth):
            layers.append(nn.Dense(4))
        self.layers = layers
        self.out = nn.Dense(1)

    def __call__(self, x):
        for layer in self.layers:
            x = x + nn.tanh(layer(x))
        return self.out(x)
