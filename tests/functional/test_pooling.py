"""Pooling: Flax's numbers, gradients, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from linnet import nnx
from linnet.errors import FeatureError
from linnet.functional import pooling
from tests.digest import digest

X = jax.random.normal(jax.random.key(0), (2, 5, 6, 3))
PAIRS = ((1, 0), (0, 1))
CASES = [
    ("avg_pool", {}, 2.05194),
    ("avg_pool", {"strides": (2, 2)}, 0.71107),
    ("avg_pool", {"padding": "SAME", "strides": (2, 1)}, -1.6971),
    ("avg_pool", {"padding": "SAME_LOWER"}, -0.36218),
    ("avg_pool", {"padding": PAIRS}, -0.35728),
    ("avg_pool", {"padding": "SAME", "count_include_pad": False}, -1.96988),
    ("avg_pool", {"padding": PAIRS, "count_include_pad": False}, -0.1224),
    ("max_pool", {}, 3.90844),
    ("max_pool", {"strides": (2, 2)}, -1.11707),
    ("max_pool", {"padding": "SAME", "strides": (2, 1)}, -0.17296),
    ("max_pool", {"padding": PAIRS}, 2.19161),
    ("min_pool", {}, 0.59833),
    ("min_pool", {"strides": (2, 2)}, 1.47309),
    ("min_pool", {"padding": "same", "strides": (2, 1)}, -0.62436),
    ("min_pool", {"padding": PAIRS}, 1.14571),
]


@pytest.mark.parametrize(("name", "kwargs", "want"), CASES)
def test_numbers_of_flax(name, kwargs, want):
    got = getattr(nnx, name)(X, (2, 3), **kwargs)
    assert digest(got) == pytest.approx(want, abs=1e-5)


NAMES = ["avg_pool", "max_pool", "min_pool"]


@pytest.mark.parametrize("name", NAMES)
def test_batch_axes_are_alike(name):
    function = getattr(pooling, name)
    want = function(X, (2, 2), padding="SAME")
    assert (function(X[0], (2, 2), padding="SAME") == want[0]).all()
    assert (function(X[None], (2, 2), padding="SAME")[0] == want).all()
    assert (function(X[None], (2, 2), 1, ((0, 1), (0, 1)))[0] == want).all()


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("avg_pool", [2, 3, 1.75, 5, 6, 3.25, 3.25, 3.75, 2]),
        ("max_pool", [4, 5, 5, 7, 8, 8, 7, 8, 8]),
        ("min_pool", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float32, jnp.bfloat16])
def test_dtypes(name, want, dtype):
    got = getattr(pooling, name)(
        jnp.arange(9, dtype=dtype).reshape(3, 3, 1), (2, 2), padding="SAME"
    )
    assert got.ravel().tolist() == want
    whole = name == "avg_pool" and jnp.issubdtype(dtype, jnp.integer)
    assert got.dtype == (jnp.float32 if whole else dtype)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_means_without_the_padding(dtype):
    x = jnp.arange(9, dtype=dtype).reshape(3, 3, 1)
    got = pooling.avg_pool(x, (2, 2), padding="SAME", count_include_pad=False)
    assert got.ravel().tolist() == [2, 3, 3.5, 5, 6, 6.5, 6.5, 7.5, 8]
    assert got.dtype == jnp.float32


def test_gradients():
    x = jnp.array([1.0, 3.0, 2.0])[:, None]
    grads = {
        name: jax.grad(lambda x, name=name: getattr(pooling, name)(x, (2,)).sum())(x)
        .ravel()
        .tolist()
        for name in NAMES
    }
    assert grads == {"avg_pool": [0.5, 1, 0.5], "max_pool": [0, 2, 0], "min_pool": [1, 0, 1]}


def test_any_reduction():
    got = nnx.pool(X, 1.0, lax.mul, (2, 1), None, "VALID")
    np.testing.assert_allclose(got, X[:, :-1] * X[:, 1:], rtol=1e-6)


def test_numpy_arrays_and_keywords():
    got = nnx.max_pool(inputs=np.asarray(X), window_shape=[2, 2], strides=[2, 2], padding=0)
    assert (got == nnx.max_pool(X, (2, 2), (2, 2))).all()


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        (
            (X[0, 0], (2, 2)),
            FeatureError,
            "A window of (2, 2) needs inputs with at least 3 axes, the last for the features, but "
            "got float32[6, 3].\n"
            "Fix: keep the feature axis, also where it has size 1, or give the window fewer axes.",
        ),
        (
            (X, 2),
            FeatureError,
            "window_shape must be a sequence, one size for each axis, but got 2.\n"
            "Fix: window_shape=(2, 2) for images.",
        ),
        (
            (X, (2, 2), (1,)),
            ValueError,
            "strides must be a number or 2 of them, but got (1,).\n"
            "Fix: give one entry for each axis that the window moves over.",
        ),
        (
            (X, (2, 2), None, "CIRCULAR"),
            ValueError,
            "padding must be one of SAME, VALID, SAME_LOWER, a number, or 2 of them that are "
            "numbers or pairs (before, after), but got 'CIRCULAR'.\n"
            "Fix: for one pixel of zeros on all sides, padding=1.",
        ),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_input(name, args, kind, text):
    with pytest.raises(kind) as error:
        getattr(pooling, name)(*args)
    assert str(error.value) == text
