"""Every layer under every transform does what it does without."""

import collections
import inspect

import jax
import jax.numpy as jnp
import pytest

from linnet import linen
from tests.compare import assert_alike
from tests.linen.catalogue import CATALOGUE, gradients

NO_LAYERS = {"Module", "RNNCellBase"}


def two_of_each():
    """The first two configurations of each layer; the second is left to `make test-all`."""
    counts = collections.Counter()
    for entry in CATALOGUE:
        counts[entry.layer] += 1
        if counts[entry.layer] <= 2:
            marks = [pytest.mark.slow] if counts[entry.layer] == 2 else []
            yield pytest.param(entry, marks=marks, id=str(entry))


entries = pytest.mark.parametrize("entry", list(two_of_each()))


def test_every_public_layer_is_in_the_catalogue_in_two_configurations():
    layers = {
        value.__name__
        for name, value in vars(linen).items()
        if inspect.isclass(value) and issubclass(value, linen.Module) and name not in NO_LAYERS
    }
    found = collections.Counter(entry.layer for entry in CATALOGUE)
    assert {layer for layer in layers if found[layer] < 2} == set()
    assert len(set(map(str, CATALOGUE))) == len(CATALOGUE)


@entries
def test_jit_matches_eager_and_nothing_leaks(entry):
    variables = entry.variables(linen)
    want = entry.apply(linen, variables)
    with jax.checking_leaks():
        assert_alike(jax.jit(lambda v: entry.apply(linen, v))(variables), want, 1e-4, 1e-4)


@entries
def test_eval_shape_matches_the_output(entry):
    variables = jax.eval_shape(lambda: entry.variables(linen))
    made = entry.variables(linen)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), variables)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), made)
    abstract = jax.eval_shape(lambda v: entry.apply(linen, v), variables)
    want = entry.apply(linen, made)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert shapes == jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), want)


@entries
def test_gradients_are_finite_and_the_same_when_recomputed(entry):
    variables = entry.variables(linen)
    if not jax.tree.leaves(variables):
        return
    plain = jax.jit(lambda v: gradients(entry, linen, v))(variables)
    recomputed = _Recomputed(entry)
    again = jax.jit(lambda v: gradients(recomputed, linen, v))(variables)
    floats = [g for g in jax.tree.leaves(plain) if g.dtype != jax.dtypes.float0]
    assert all(jnp.isfinite(jnp.asarray(g, jnp.float32)).all() for g in floats)
    assert_alike(
        [g for g in jax.tree.leaves(again) if g.dtype != jax.dtypes.float0], floats, 1e-4, 1e-4
    )


class _Recomputed:
    """An entry whose call keeps nothing for the backward pass."""

    def __init__(self, entry):
        self.entry = entry

    def apply(self, nn, variables):
        return jax.checkpoint(lambda v: self.entry.apply(nn, v))(variables)


@entries
def test_vmap_over_the_input_matches_one_by_one(entry):
    if not entry.mapped:
        return
    variables = entry.variables(linen)
    *rest, x = entry.inputs
    another = x + 1 if jnp.issubdtype(x.dtype, jnp.inexact) else x
    got = jax.vmap(lambda x: entry.apply(linen, variables, *rest, x))(jnp.stack([x, another]))
    want = entry.apply(linen, variables, *rest, another)
    assert_alike(jax.tree.map(lambda y: y[1], got), want, 1e-4, 1e-4)
