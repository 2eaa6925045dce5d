"""Objects and functions that tests of many folders use."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

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


class Pair(NamedTuple):
    left: Any
    right: Any


class Count(nnx.Variable):
    """A kind of Variable that is no parameter."""


def param(value=1.0, *shape, **metadata):
    return nnx.Param(jnp.full(shape, value, jnp.float32), **metadata)


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
