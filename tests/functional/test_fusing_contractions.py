"""JAX's contractions are looked up when they are called, and a stand-in for one is noticed."""

import functools
import os
import pickle
import types

import jax
import jax.numpy as jnp
import pytest

from linnet.functional import fusing
from linnet.functional.fusing import JAX_FUNCTIONS, are_intercepted, is_written_by_jax
from tests.functional.interceptors import in_their_code, under_their_names

X = jnp.arange(4.0).reshape(2, 2)


def mine(x):
    return x


def from_file(path):
    return types.FunctionType(mine.__code__.replace(co_filename=path), {})


FOLDER = os.path.dirname(jax.__file__)
BY_JAX = [jnp.tanh, jax.nn.sigmoid, jax.nn.relu, jax.lax.dot_general, jnp.einsum, jnp.matmul]
NOT_BY_JAX = {
    "mine": mine,
    "compiled": jax.jit(mine),
    "recomputed": jax.checkpoint(mine),
    "differentiated": jax.custom_jvp(mine),
    "disguised": functools.wraps(jnp.tanh)(mine),
    "partly mine": functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
    "an object": max,
    "a neighbour": from_file(os.path.join(FOLDER + "typing", "decorators.py")),
}


@pytest.mark.parametrize("function", BY_JAX)
def test_functions_that_jax_wrote(function):
    assert is_written_by_jax(function)


@pytest.mark.parametrize("function", NOT_BY_JAX.values(), ids=NOT_BY_JAX)
def test_functions_that_jax_did_not_write(function):
    assert not is_written_by_jax(function)


@pytest.mark.parametrize("intercepted", [under_their_names, in_their_code])
def test_stand_ins_are_noticed_while_they_are_there(intercepted):
    assert not are_intercepted()
    with intercepted(print):
        assert are_intercepted()
    assert not are_intercepted()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (jax.lax, "dot_general"),
        (jax.lax, "conv_general_dilated"),
        (jax.lax, "conv_transpose"),
        (jnp, "einsum"),
        (jnp, "matmul"),
        (jnp, "dot"),
        (jnp, "tensordot"),
        (jax.nn, "dot_product_attention"),
    ],
)
def test_each_is_noticed(monkeypatch, module, name):
    monkeypatch.setattr(module, name, functools.wraps(getattr(module, name))(mine))
    assert are_intercepted()
    assert are_intercepted([JAX_FUNCTIONS[name]])
    assert not are_intercepted([own for own in JAX_FUNCTIONS.values() if own.name != name])


def test_a_stand_in_that_was_there_first_is_never_taken_for_the_original(monkeypatch):
    monkeypatch.setattr(jnp, "einsum", mine)
    found = fusing._own(jnp, "einsum")
    monkeypatch.undo()
    assert are_intercepted([found])


CALLS = {
    "dot_general": lambda f: f(X, X, (((1,), (0,)), ((), ()))),
    "einsum": lambda f: f("ab,bc->ac", X, X),
    "conv_general_dilated": lambda f: f(X[None], X[None], (1,), "SAME"),
}


@pytest.mark.parametrize(("name", "call"), CALLS.items(), ids=CALLS)
def test_they_are_looked_up_when_they_are_called(name, call):
    function = getattr(fusing, name)
    seen = []
    want = call(function)
    with under_their_names(seen.append):
        got = call(function)
    assert seen == [name]
    assert (got == jnp.cos(want)).all()
    assert (call(function) == want).all()
    assert pickle.loads(pickle.dumps(function)) is function
