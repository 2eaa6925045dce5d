"""Which objects and options hold code of the libraries alone."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.nnx.transforms.library_code import is_of_libraries
from linnet.nnx.transforms.plan import definition_of

RNGS = nnx.Rngs(0)
UserTuple = collections.namedtuple("UserTuple", "x")


class UserLayer(nnx.Linear):
    """A layer of the user's."""


class UserParam(nnx.Param):
    """A kind of Variable of the user's, which may have hooks."""


@jax.tree_util.register_pytree_node_class
class UserPytree(list):
    def tree_flatten(self):
        return list(self), None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(parts)


def user_function(x):
    return x


def with_attribute(value):
    layer = nnx.Linear(2, 2, rngs=RNGS)
    layer.more = value
    return layer


KNOWN = {
    "linear": nnx.Linear(2, 2, rngs=RNGS),
    "recurrent": nnx.RNN(nnx.OptimizedLSTMCell(2, 2, rngs=RNGS)),
    "stack": nnx.Stack(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 2, rngs=RNGS),
    "attention": nnx.MultiHeadAttention(2, 4, rngs=RNGS),
    "sequential": nnx.Sequential(nnx.Linear(2, 2, rngs=RNGS), jax.nn.gelu, jnp.tanh),
    "dtypes": nnx.Linear(2, 2, dtype=jnp.bfloat16, param_dtype="float32", rngs=RNGS),
    "initializer": nnx.Linear(
        2, 2, kernel_init=jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal"), rngs=RNGS
    ),
    "partial": with_attribute(functools.partial(jax.nn.elu, alpha=0.5)),
    "containers": with_attribute((1, "a", [2.0, None], {"b": {3}})),
    "arrays": with_attribute(np.ones(2)),
}
UNKNOWN = {
    "class": UserLayer(2, 2, rngs=RNGS),
    "variable": with_attribute(UserParam(jnp.ones(()))),
    "hook": with_attribute(nnx.Param(jnp.ones(()), on_get_value=lambda _, x: x)),
    "function": with_attribute(user_function),
    "function of another library": with_attribute(np.random.default_rng),
    "builtin function": with_attribute(math.sin),
    "function in a container": with_attribute([{"a": user_function}]),
    "function in a partial": with_attribute(functools.partial(jax.tree.map, user_function)),
    "compiled function": with_attribute(jax.jit(user_function)),
    "function in a function of JAX": with_attribute(jax.vmap(user_function)),
    "bound method": with_attribute(UserLayer(2, 2, rngs=RNGS).__call__),
    "object": with_attribute(object()),
    "named tuple": with_attribute(UserTuple(1)),
    "pytree": with_attribute(UserPytree([jnp.ones(2)])),
    "inner": nnx.Sequential(nnx.Linear(2, 2, rngs=RNGS), UserLayer(2, 2, rngs=RNGS)),
}


@pytest.mark.parametrize("layer", KNOWN.values(), ids=KNOWN)
def test_known(layer):
    assert is_of_libraries([definition_of(layer)], [])


@pytest.mark.parametrize("layer", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown(layer):
    assert not is_of_libraries([definition_of(layer)], [])


@pytest.mark.parametrize(
    ("option", "known"),
    [
        (None, True),
        (nnx.StateAxes({nnx.Param: 0, ...: nnx.Carry}), True),
        (nnx.StateAxes({UserParam: 0}), False),
        (nnx.PathContains("x"), False),
        (jnp.float32, True),
        (float, True),
        (user_function, False),
    ],
)
def test_options(option, known):
    assert is_of_libraries([], [1, option]) is known


def test_a_function_under_the_name_of_another_is_no_function_of_the_library(monkeypatch):
    layer = with_attribute(jax.nn.relu)
    assert is_of_libraries([definition_of(layer)], [])
    monkeypatch.setattr(jax.nn, "softplus", functools.wraps(jax.nn.softplus)(user_function))
    layer = with_attribute(jax.nn.softplus)
    assert not is_of_libraries([definition_of(layer)], [])
