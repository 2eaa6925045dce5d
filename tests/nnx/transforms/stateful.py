"""Small models with every kind of state, and a way to count traces."""

import jax
import jax.numpy as jnp

from linnet import nnx
from tests.compare import is_key
from tests.models import Count as Count, counted as counted


class Scale(nnx.Module):
    """Multiplies by a weight and counts its calls."""

    def __init__(self, w=2.0):
        self.w = nnx.Param(jnp.asarray(w, jnp.float32))
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.w


class Norm(nnx.Module):
    """Keeps a running mean, as batch normalisation does."""

    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(()))
        self.use_running_average = False

    def __call__(self, x):
        if self.use_running_average:
            return x - self.mean
        mean = x.mean()
        self.mean[...] = 0.5 * self.mean + 0.5 * mean
        return x - mean


class Noise(nnx.Module):
    """Adds noise from a stream of its own, as dropout does."""

    def __init__(self, rngs):
        self.rngs = rngs.dropout.fork()
        self.deterministic = False

    def __call__(self, x):
        return x if self.deterministic else x + jax.random.normal(self.rngs(), x.shape)


class ScaleNormNoise(nnx.Module):
    """A weight, a counter, a running mean and a stream of keys."""

    def __init__(self, seed=0, w=2.0):
        self.scale = Scale(w)
        self.norm = Norm()
        self.noise = Noise(nnx.Rngs(seed))

    def __call__(self, x):
        return self.noise(self.norm(self.scale(x)))


class Pair(nnx.Module):
    """Two places for anything."""

    def __init__(self, a, b=None):
        self.a = a
        self.b = b


def values(tree):
    """The arrays of a tree of objects by path, as plain numbers; keys as their data."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(tree)):
        value = variable.get_value()
        found[path] = (jax.random.key_data(value) if is_key(value) else value).tolist()
    return found
