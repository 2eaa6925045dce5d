"""Activation functions that keep only their input for the backward pass on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional import activations

X = jnp.linspace(-3.0, 3.0, 16)
PAIRS = {
    "gelu": (activations.gelu, jax.nn.gelu),
    "exact gelu": (
        functools.partial(activations.gelu, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
    ),
    "silu": (activations.silu, jax.nn.silu),
    "swish": (activations.swish, jax.nn.swish),
}


@pytest.fixture(params=[False, True], ids=["elsewhere", "on a GPU"])
def backend(request, monkeypatch):
    monkeypatch.setattr(activations, "on_gpu", lambda: request.param)
    return request.param


def residuals(function):
    """The arrays that the backward pass of a function keeps."""
    return jax.tree.leaves(jax.vjp(function, X)[1])


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_derivatives_are_those_of_jax(name, backend):
    ours, theirs = PAIRS[name]
    total = lambda f: lambda x: jnp.sum(f(x))  # noqa: E731
    for way in (
        lambda f: f(X),
        lambda f: jax.jit(f)(X),
        lambda f: jax.grad(total(f))(X),
        lambda f: jax.jit(jax.grad(total(f)))(X),
        lambda f: jax.jvp(f, (X,), (jnp.ones_like(X),))[1],
        lambda f: jax.vmap(jax.grad(jax.grad(f)))(X),
    ):
        np.testing.assert_allclose(way(ours), way(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_only_the_input_is_kept_on_a_gpu(name, backend):
    kept = residuals(PAIRS[name][0])
    if backend:
        assert len(kept) == 1
        np.testing.assert_array_equal(kept[0], X)
    else:
        assert len(kept) == len(residuals(PAIRS[name][1]))
