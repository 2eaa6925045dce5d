"""Dropout as a function of a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional.dropout import dropout

KEY = jax.random.key(0)


def test_it_drops_where_the_key_says():
    keep = jax.random.bernoulli(KEY, 0.75, (3, 4))
    got = dropout(jnp.full((3, 4), 3.0), KEY, rate=0.25)
    np.testing.assert_array_equal(got, np.where(keep, 4.0, 0.0))


@pytest.mark.parametrize("axes", [(0,), [-1], (0, 1)])
def test_one_draw_holds_along_an_axis(axes):
    x = jnp.ones((4, 5, 6))
    got = np.asarray(dropout(x, KEY, rate=0.5, broadcast_dims=axes))
    for axis in axes:
        np.testing.assert_array_equal(got, np.repeat(got.take([0], axis), x.shape[axis], axis))
    assert set(np.unique(got)) == {0, 2}


@pytest.mark.parametrize(("rate", "factor"), [(0.0, 1), (1.0, 0)])
def test_the_ends_need_no_key(rate, factor):
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(dropout(x, None, rate=rate), factor * x)


def test_gradients_pass_where_values_do():
    x = jnp.arange(1.0, 9.0)
    gradient = jax.grad(lambda x: dropout(x, KEY, rate=0.5).sum())(x)
    np.testing.assert_array_equal(gradient, np.where(dropout(x, KEY, rate=0.5) == 0, 0, 2))
