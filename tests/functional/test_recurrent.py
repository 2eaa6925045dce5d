"""Steps of recurrent cells, and sequences turned round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional.recurrent import (
    flip_sequences,
    gru_step,
    keep_until,
    lstm_step,
    simple_step,
)

HALF = jnp.bfloat16


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


C, H = normal(2, 3, seed=1), normal(2, 3, seed=2)
XS = [normal(2, 3, seed=n) for n in range(3, 7)]
HS = [normal(2, 3, seed=n) for n in range(7, 11)]


def joined(gates):
    return jnp.concatenate(gates, axis=-1)


@pytest.mark.parametrize("pack", [joined, tuple, list])
def test_lstm(pack):
    i, f, g, o = (np.asarray(x + h) for x, h in zip(XS, HS, strict=True))
    want_c = sigmoid(f) * C + sigmoid(i) * np.tanh(g)
    c, h, output = lstm_step(C, H, pack(XS), pack(HS))
    np.testing.assert_allclose(c, want_c, atol=1e-6)
    np.testing.assert_allclose(h, sigmoid(o) * np.tanh(want_c), atol=1e-6)
    assert (h == output).all()


@pytest.mark.parametrize("pack", [joined, tuple])
def test_gru(pack):
    (xr, xz, xn), (hr, hz, hn) = (list(map(np.asarray, gates[:3])) for gates in (XS, HS))
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    want = (1 - z) * np.tanh(xn + r * hn) + z * H
    h, output = gru_step(H, pack(XS[:3]), pack(HS[:3]))
    np.testing.assert_allclose(h, want, atol=1e-6)
    assert (h == output).all()


@pytest.mark.parametrize("residual", [False, True])
def test_simple(residual):
    h, output = simple_step(H, XS[0], HS[0], activation_fn=jnp.sin, residual=residual)
    np.testing.assert_allclose(h, np.sin(XS[0] + HS[0] + (H if residual else 0)), atol=1e-6)
    assert (h == output).all()


def test_gates_and_activations_can_be_chosen():
    options = {"gate_fn": jax.nn.relu, "activation_fn": jnp.sin}
    c, _, _ = lstm_step(C, H, tuple(XS), tuple(HS), **options)
    i, f, g, _ = (x + h for x, h in zip(XS, HS, strict=True))
    np.testing.assert_allclose(c, jax.nn.relu(f) * C + jax.nn.relu(i) * jnp.sin(g), atol=1e-6)
    h, _ = gru_step(H, tuple(XS[:3]), tuple(HS[:3]), **options)
    z = jax.nn.relu(XS[1] + HS[1])
    n = jnp.sin(XS[2] + jax.nn.relu(XS[0] + HS[0]) * HS[2])
    np.testing.assert_allclose(h, (1 - z) * n + z * H, atol=1e-6)


def test_a_carry_keeps_its_dtype_and_the_output_that_of_the_gates():
    half = H.astype(HALF)
    c, h, output = lstm_step(half, half, tuple(XS), tuple(HS))
    assert (c.dtype, h.dtype, output.dtype) == (HALF, HALF, jnp.float32)
    for step in (gru_step(half, tuple(XS[:3]), tuple(HS[:3])), simple_step(half, XS[0], HS[0])):
        assert [x.dtype for x in step] == [HALF, jnp.float32]
    carry, output = simple_step(H, XS[0].astype(HALF), HS[0].astype(HALF))
    assert (carry.dtype, output.dtype) == (jnp.float32, HALF)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("features", [(), (4,)])
def test_flipped_sequences(batch, time_major, features):
    length = 5
    lengths = jnp.asarray(np.random.default_rng(0).integers(0, length + 1, batch))
    x = np.asarray(normal(*batch, length, *features))
    want = x.copy()
    for place in np.ndindex(batch):
        n = int(lengths[place])
        want[place] = np.concatenate([x[place][:n][::-1], x[place][n:][::-1]])
    if time_major:
        x, want = (np.moveaxis(a, len(batch), 0) for a in (x, want))
    got = flip_sequences(jnp.asarray(x), lengths, len(batch), time_major)
    np.testing.assert_array_equal(got, want)
    whole = flip_sequences(jnp.asarray(x), None, len(batch), time_major)
    np.testing.assert_array_equal(whole, np.flip(x, 0 if time_major else len(batch)))


def test_sequences_that_have_ended_keep_their_carry():
    new = {"c": jnp.ones((2, 3)), "h": jnp.ones((2, 1, 1))}
    old = jax.tree.map(jnp.zeros_like, new)
    got = keep_until(jnp.array(1), jnp.array([2, 1]), new, old)
    assert got["c"].tolist() == [[1] * 3, [0] * 3]
    assert got["h"].ravel().tolist() == [1, 0]
