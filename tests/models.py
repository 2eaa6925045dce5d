"""Objects and functions that tests of many folders use."""

import dataclasses
import errno
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from linnet import nnx


class Bag(nnx.Module):
    """A module with any attributes, and methods to store or to call."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)

    def method(self):
        return self

    def read(self):
        return self.w[...]

    def add(self, x):
        return self.w[...] + x


class InList(nnx.Module):
    """Layers in a list, the last of which is called, so that an error has a path to name."""

    def __init__(self, *layers):
        self.blocks = nnx.List(layers)

    def __call__(self, *args, **kwargs):
        return self.blocks[-1](*args, **kwargs)


class Net(nnx.Module):
    """An ordinary model: a layer, running statistics, dropout, and a list with the last layer."""

    def __init__(self, seed=0, *, sizes=(3, 4, 2), momentum=0.99):
        rngs = nnx.Rngs(seed)
        inputs, hidden, outputs = sizes
        self.hidden = nnx.Linear(inputs, hidden, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, momentum=momentum, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(hidden, outputs, rngs=rngs)])

    def __call__(self, x):
        return self.heads[0](self.drop(nnx.relu(self.norm(self.hidden(x)))))


class Count(nnx.Variable):
    """A kind of Variable that is no parameter."""


class CountingLinear(nnx.Pytree):
    """A product with a weight, which counts its calls."""

    def __init__(self, din, dout, *, rngs):
        self.din, self.dout = din, dout
        self.w = nnx.Param(rngs.uniform((din, dout)))
        self.count = Count(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return x @ self.w


class OneOfEverything(nnx.Module):
    """A list, running statistics, random streams, a Variable that holds a dict, and an array."""

    def __init__(self, seed=0, width=4, depth=2):
        rngs = nnx.Rngs(seed, dropout=jax.random.key(seed, impl="rbg"))
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = Count(
            {
                "calls": jnp.array(seed),
                "recent": (jnp.zeros(2), np.arange(3, dtype=np.int32) + seed),
            }
        )
        self.table = nnx.data(np.arange(4, dtype=np.float32) + seed)
        self.width = width

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


@dataclasses.dataclass
class Config:
    """Equality and no hash, as many programs have it."""

    width: int
    names: list = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    left: Any
    right: Any


def param(value=1.0, *shape, **metadata):
    return nnx.Param(jnp.full(shape, value, jnp.float32), **metadata)


def normal(*shape, seed=0, dtype=jnp.float32):
    """Normal numbers to feed a layer with."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def numpy_normal(*shape, seed=0):
    """Normal numbers that NumPy draws."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_mesh(*sizes, kind=AxisType.Auto):
    """Devices in one or two axes, ``data`` and ``model``."""
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def drawn_key(count):
    """What ``Rngs(0)`` gives for a draw, of which there were ``count`` before."""
    return jax.random.fold_in(jax.random.key(0), count)


def disk_full(*args):
    """Fails as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def params_of(model):
    """The parameters of a model as nested dicts."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def through_tree_map(tree):
    """What JAX rebuilds from the leaves."""
    return jax.tree.map(lambda x: x, tree)


def call(model, x):
    return model(x)


def refusal(error, call):
    """The text of the error that a call raises."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def counted(f, jit=lambda f: f):
    """The function and a list that grows by one with each run of its body, that is each trace.

    With ``jit``, the function is compiled by it.
    """
    runs = []

    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        runs.append(None)
        return f(*args, **kwargs)

    return jit(wrapper), runs
