"""nnx.dot_product_attention: Flax's numbers, sown weights, and operands of any kind."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FeatureError, RngsError
from linnet.nnx.nn.attention import dot_product_attention_weights
from tests.digest import digest
from tests.nnx.nn.flax_cases import doubled

Q = jax.random.normal(jax.random.key(1), (2, 3, 4, 8))
K, V = (jax.random.normal(jax.random.key(n), (2, 5, 4, 8)) for n in (2, 3))
MASK = jnp.array([1, 0, 1, 1, 0])[None, None, None]
BIAS = jax.random.normal(jax.random.key(4), (1, 4, 3, 5))
DROPS = {"dropout_rng": jax.random.key(5), "dropout_rate": 0.5}


# The options, and Flax's output, weights, and output with two heads of keys and values.
CASES = {
    "plain": ({}, -4.31933, 0.66321, -6.55975),
    "mask": ({"mask": MASK}, 7.61217, -0.49764, -4.58535),
    "bias": ({"bias": BIAS}, -4.0318, -0.20345, -11.12559),
    "causal": ({"is_causal": True}, -2.96457, -0.62283, -21.48977),
    "dropout": (DROPS, 11.21676, 0.83114, -10.49999),
    "dropout of each head": (
        {"broadcast_dropout": False, **DROPS},
        -4.15719,
        -2.57803,
        -2.52163,
    ),
    "deterministic": (
        {"dropout_rate": 0.5, "deterministic": True},
        -4.31933,
        0.66321,
        -6.55975,
    ),
    "dtype": ({"dtype": jnp.bfloat16}, -4.32154, 0.66477, -6.53023),
    "precision": ({"precision": "highest"}, -4.31933, 0.66321, -6.55975),
    "promote_dtype": ({"promote_dtype": doubled}, -23.21274, 2.15137, -19.02154),
}


@pytest.mark.parametrize(("options", "output", "weights", "grouped"), CASES.values(), ids=CASES)
def test_numbers_of_flax(options, output, weights, grouped):
    tolerance = 0.05 if "dtype" in options else 1e-5
    got = [
        nnx.dot_product_attention(Q, K, V, **options),
        nnx.dot_product_attention(Q, K, V, **options, module=nnx.Module()),
        dot_product_attention_weights(Q, K, **options),
        nnx.dot_product_attention(Q, K[:, :, :2], V[:, :, :2], **options),
    ]
    assert {x.dtype for x in got} == {jnp.dtype(options.get("dtype", Q.dtype))}
    np.testing.assert_allclose(
        [digest(x) for x in got], [output, output, weights, grouped], rtol=tolerance, atol=tolerance
    )


def test_weights_are_sown_before_dropout():
    module = nnx.Module()
    nnx.dot_product_attention(Q, K, V, **DROPS, module=module)
    (weights,) = module.attention_weights.get_value()
    assert isinstance(module.attention_weights, nnx.Intermediate)
    np.testing.assert_allclose(weights, dot_product_attention_weights(Q, K), atol=1e-6)


def test_variables_and_numpy_arrays_are_operands():
    want = nnx.dot_product_attention(Q, K, V, bias=BIAS, mask=MASK)
    for kind in (nnx.Param, np.asarray):
        got = nnx.dot_product_attention(*map(kind, (Q, K, V)), bias=kind(BIAS), mask=kind(MASK))
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_integers_are_promoted():
    out = nnx.dot_product_attention(*((10 * x).astype(int) for x in (Q, K, V)))
    assert out.dtype == jnp.float32


def test_implementation_is_handed_on():
    with pytest.raises(ValueError, match="cuDNN's kernel was asked for, but there is no CUDA GPU"):
        nnx.dot_product_attention(Q, K, V, implementation="cudnn")
    got = nnx.dot_product_attention(Q, K, V, implementation="xla")
    assert (got == nnx.dot_product_attention(Q, K, V)).all()
    # Weights are asked for: the plain maths, whatever else was asked for.
    got = nnx.dot_product_attention(Q, K, V, implementation="cudnn", module=nnx.Module())
    np.testing.assert_allclose(got, nnx.dot_product_attention(Q, K, V), atol=1e-6)


def test_arguments_stand_in_the_order_of_flax_with_our_own_behind():
    names = " ".join(inspect.signature(nnx.dot_product_attention).parameters)
    assert names == (
        "query key value bias mask broadcast_dropout dropout_rng dropout_rate deterministic "
        "dtype precision module promote_dtype is_causal implementation key_lengths"
    )


@pytest.mark.parametrize("module", [None, nnx.Module()], ids=["plain", "sows"])
@pytest.mark.parametrize(
    ("operands", "options", "error", "text"),
    [
        ((Q, K, V[:, :3]), {}, FeatureError, "k, v lengths must match"),
        ((Q, K, V), {"mask": jnp.ones((3, 4))}, FeatureError, "expected a mask that broadcasts to"),
        ((Q, K, V), {"dropout_rate": 0.5}, RngsError, "is to drop weights (dropout_rate=0.5)"),
    ],
)
def test_bad_input(module, operands, options, error, text):
    with pytest.raises(error) as raised:
        nnx.dot_product_attention(*operands, **options, module=module)
    assert text in str(raised.value)
