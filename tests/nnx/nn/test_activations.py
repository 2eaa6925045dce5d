"""Activations: Flax's numbers; PReLU with every argument."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.digest import digest

X = 3 * jax.random.normal(jax.random.key(0), (2, 4))
CASES = [
    ("celu", {}, 8.42316),
    ("celu", {"alpha": 0.3}, 8.83732),
    ("elu", {}, 8.42316),
    ("elu", {"alpha": 0.5}, 8.67335),
    ("gelu", {}, 8.99723),
    ("gelu", {"approximate": False}, 8.99737),
    ("glu", {}, 4.80315),
    ("glu", {"axis": 0}, 3.5211),
    ("hard_sigmoid", {}, 1.39156),
    ("hard_silu", {}, 8.67239),
    ("hard_swish", {}, 8.67239),
    ("hard_tanh", {}, 1.35471),
    ("identity", {}, 7.44439),
    ("leaky_relu", {}, 8.90874),
    ("leaky_relu", {"negative_slope": 0.5}, 8.18396),
    ("log_sigmoid", {}, -0.87353),
    ("log_softmax", {}, 4.10242),
    ("log_softmax", {"axis": 0}, 1.5152),
    ("logsumexp", {"axis": -1}, 7.34068),
    ("relu", {}, 8.92353),
    ("relu6", {}, 8.88258),
    ("selu", {}, 8.49627),
    ("sigmoid", {}, 1.4005),
    ("silu", {}, 8.71327),
    ("soft_sign", {}, 1.15693),
    ("softmax", {}, 1.02652),
    ("softmax", {"axis": 0}, 2.21631),
    ("softplus", {}, 8.31792),
    ("standardize", {}, 2.31947),
    ("swish", {}, 8.71327),
    ("tanh", {}, 1.34316),
]


@pytest.mark.parametrize(("name", "kwargs", "want"), CASES)
def test_numbers_of_flax(name, kwargs, want):
    assert digest(getattr(nnx, name)(X, **kwargs)) == pytest.approx(want, abs=1e-5)


def test_one_hot():
    got = nnx.one_hot(jnp.array([1, 0]), 3, dtype=jnp.int32, axis=0)
    assert got.tolist() == [[0, 1], [1, 0], [0, 0]]


def doubled(args, **_):
    return tuple(2 * x for x in args)


V = jnp.array([-2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    ("layer", "want"),
    [
        (nnx.PReLU(), [-0.02, 0, 3]),
        (nnx.PReLU(0.25), [-0.5, 0, 3]),
        (nnx.PReLU(negative_slope_init=0.25, param_dtype=jnp.bfloat16), [-0.5, 0, 3]),
        (nnx.PReLU(0.25, promote_dtype=doubled), [-2, 0, 6]),
        (nnx.PReLU(jnp.array([1.0, 2.0, 3.0])), [-2, 0, 3]),
    ],
)
def test_prelu(layer, want):
    assert layer(V).tolist() == pytest.approx(want)
    assert list(nnx.state(layer)) == ["negative_slope"]


@pytest.mark.parametrize(
    ("kwargs", "x", "dtype"),
    [
        ({}, V, jnp.float32),
        ({}, V.astype(jnp.bfloat16), jnp.bfloat16),
        ({"dtype": jnp.bfloat16}, V, jnp.bfloat16),
        ({"dtype": jnp.float32}, V.astype(jnp.bfloat16), jnp.float32),
        ({"param_dtype": jnp.bfloat16}, V, jnp.float32),
        ({}, V.astype(jnp.int32), jnp.float32),
    ],
)
def test_prelu_dtypes(kwargs, x, dtype):
    got = nnx.PReLU(**kwargs)(x)
    assert got.dtype == dtype
    assert got.tolist() == pytest.approx([-0.02, 0, 3], rel=1e-2)


def test_prelu_parameter():
    layer = nnx.PReLU(0.5, param_dtype=jnp.bfloat16, negative_slope_metadata={"note": "slope"})
    slope = layer.negative_slope
    assert (slope.shape, slope.dtype, slope.note) == ((), jnp.bfloat16, "slope")
    grads = nnx.grad(lambda layer: layer(V).sum())(nnx.PReLU())
    assert grads["negative_slope"][...] == -2
