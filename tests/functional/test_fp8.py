"""Contractions in 8 bits: scales, histories, rounding, and what the backward pass gives.

Expected numbers are those of Flax 0.12.8.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional import fp8

E4, E5 = jnp.float8_e4m3fn, jnp.float8_e5m2
X = jnp.array([0.3, -7.7, 900.0])
SCALE, HISTORY = jnp.array([2.0]), jnp.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("amax", "scale", "margin", "want"),
    [
        (0.0, 4.0, 0, 4.0),
        (2.0, 4.0, 0, 0.00446429),
        (2.0, 1.0, 1, 0.00892857),
        (jnp.inf, 4.0, 1, 4.0),
        (jnp.nan, 1.0, 0, 1.0),
    ],
)
def test_scales(amax, scale, margin, want):
    found = fp8.compute_scale(jnp.float32(amax), jnp.float32(scale), 448.0, margin)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_rounding_and_its_range():
    found = fp8.quantize(jnp.append(X, -jnp.inf), E4, SCALE, jnp.float32)
    assert found.dtype == E4
    np.testing.assert_array_equal(found.astype(float), [0.15625, -3.75, 448, -448])
    np.testing.assert_array_equal(fp8.qdq(X, E4, SCALE, jnp.float32), [0.3125, -7.5, 896])


def test_operands_are_rounded_and_the_next_meta_comes_as_gradient():
    out, back = jax.vjp(lambda *args: fp8.in_qdq(jnp.float32, E4, *args), X, SCALE, HISTORY)
    np.testing.assert_allclose(out, [0.29464287, -3.0, 3.0], rtol=1e-6)
    gradient, scale, history = back(jnp.array([0.1, 0.2, 0.3]))
    np.testing.assert_array_equal(gradient, jnp.array([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(scale, [0.00669643], rtol=1e-6)
    np.testing.assert_array_equal(history, [900.0, 3.0, 1.0])


def test_gradients_of_outputs_are_rounded():
    out, back = jax.vjp(lambda *args: fp8.out_qdq(jnp.float32, E5, *args), X, SCALE, HISTORY)
    np.testing.assert_array_equal(out, X)
    gradient, scale, history = back(jnp.array([0.1, 0.2, 0.3]))
    np.testing.assert_allclose(gradient, [0.09375, 0.1875, 0.32142857], rtol=1e-6)
    np.testing.assert_allclose(scale, [5.231585e-05], rtol=1e-6)
    np.testing.assert_allclose(history, [0.3, 3.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("lhs", "rhs", "dimensions"),
    [
        ((4, 5), (5, 6), (((1,), (0,)), ((), ()))),
        ((3, 4, 5), (4, 6, 3), (((1,), (0,)), ((0,), (2,)))),
        ((3, 4, 5), (4, 5, 2), (((2, 1), (1, 0)), ((), ()))),
    ],
)
def test_contractions_are_near_those_in_full(lhs, rhs, dimensions, dtype):
    """Forward, and the gradients of both operands, whatever axes are contracted."""
    x, y = (jax.random.normal(jax.random.key(i), s).astype(dtype) for i, s in enumerate((lhs, rhs)))
    meta = {}
    for name in ("lhs", "rhs", "grad"):
        meta[f"{name}_scale"], meta[f"{name}_amax_history"] = jnp.ones(1), jnp.zeros(4)

    def in_8_bits(x, y):
        return fp8.fp8_scaled_dot_general(x, y, dimensions, quantize_compute_type=dtype, **meta)

    def in_full(x, y):
        return jax.lax.dot_general(x, y, dimensions)

    out, back = jax.vjp(in_8_bits, x, y)
    want, full_back = jax.vjp(in_full, x, y)
    assert out.dtype == dtype
    for found, wanted in zip((out, *back(out)), (want, *full_back(want)), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
        assert jnp.linalg.norm(found - wanted) < 0.2 * jnp.linalg.norm(
            wanted
        )  # two bits of mantissa


def test_derivatives_are_in_the_highest_precision():
    def contract(x):
        return fp8.dot_general_with_precision(x, x, (((1,), (0,)), ((), ())))

    text = str(jax.make_jaxpr(jax.grad(lambda x: contract(x).sum()))(jnp.ones((2, 2))))
    assert text.count("HIGHEST") == 4
    assert text.count("DEFAULT") in (0, 2)
