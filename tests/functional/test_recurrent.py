"""Steps of recurrent cells, cells along a sequence, and sequences turned round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional.recurrent import (
    flip_sequences,
    gru_step,
    keep_until,
    lstm_step,
    recurrence,
    simple_step,
    why_no_carry,
    why_no_pair,
)
from tests.models import normal

HALF = jnp.bfloat16


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


def test_the_sum_of_the_projections_may_come_alone():
    for got, want in (
        (lstm_step(C, H, joined(XS) + joined(HS), None), lstm_step(C, H, joined(XS), joined(HS))),
        (simple_step(H, XS[0] + HS[0], None), simple_step(H, XS[0], HS[0])),
    ):
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours, theirs)


# A cell along a sequence.


def project(params, carry):
    kernel, bias = params
    return carry[-1] @ kernel + bias.reshape((1,) * (carry[-1].ndim - 1) + (-1,))


def step_lstm(carry, inputs, hidden):
    c, h, output = lstm_step(*carry, inputs, hidden)
    return (c, h), output


def step_gru(carry, inputs, hidden):
    h, output = gru_step(*carry, inputs, hidden)
    return (h,), 2 * output


def step_swapped(carry, inputs, hidden):
    """The carry is nonlinear in itself, and one output is the state in another's place."""
    a, b = carry
    new = jnp.tanh(a * b + inputs)
    return (new, jnp.sin(hidden)), {"b": b, "a": new}


def loop_over_the_cell(project, step, params, inputs, carry, *, is_sum, reverse, unroll):
    def body(carry, x):
        return step(carry, x, project(params, carry))

    del is_sum
    return jax.lax.scan(body, carry, inputs, reverse=reverse, unroll=unroll)


def derivatives(run, order, params, inputs, carry):
    """Values, tangents and gradients, or both kinds of second derivatives."""
    primals = (params, inputs, carry)
    tangents = jax.tree.map(jnp.cos, primals)

    def loss(*primals):
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(run(*primals)))

    gradient = jax.grad(loss, (0, 1, 2))

    def size(*primals):
        return sum((x**2).sum() for x in jax.tree.leaves(gradient(*primals)))

    if order == 1:
        return jax.jvp(run, primals, tangents), gradient(*primals)
    return jax.jvp(gradient, primals, tangents)[1], jax.grad(size, (0, 1, 2))(*primals)


@pytest.mark.parametrize(
    ("order", "step", "gates", "states", "options"),
    [
        (1, step_lstm, 4, 2, {"is_sum": True, "reverse": True, "unroll": 2}),
        (1, step_gru, 3, 1, {"is_sum": False, "reverse": True, "unroll": 1}),
        (1, step_swapped, 1, 2, {"is_sum": False, "reverse": False, "unroll": 3}),
        (2, step_swapped, 1, 2, {"is_sum": False, "reverse": True, "unroll": 1}),
        (2, step_lstm, 4, 2, {"is_sum": True, "reverse": False, "unroll": 1}),
    ],
    ids=["sum", "gru", "swapped", "swapped twice", "sum twice"],
)
def test_recurrence_is_a_loop_over_the_cell(order, step, gates, states, options):
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        shapes = ((3, 3 * gates), (3 * gates,)), (5, 2, 3 * gates), ((2, 3),) * states
        is_shape = lambda x: isinstance(x[0], int)  # noqa: E731
        draw = lambda shape: jnp.asarray(random.normal(size=shape))  # noqa: E731
        primals = jax.tree.map(draw, shapes, is_leaf=is_shape)

        def compute(run):
            call = functools.partial(run, project, step, **options)
            return jax.jit(functools.partial(derivatives, call, order))(*primals)

        got, want = compute(recurrence), compute(loop_over_the_cell)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True])
def test_recurrence_over_no_steps_and_over_a_batch(reverse):
    params = normal(3, 12), normal(12)
    run = functools.partial(recurrence, project, step_lstm, is_sum=True, reverse=reverse)
    (c, h), outputs = run(params, jnp.zeros((0, 2, 12)), (C, H))
    assert (c == C).all()
    assert (h == H).all()
    assert outputs.shape == (0, 2, 3)
    gradient = jax.grad(lambda *primals: run(*primals)[0][1].sum(), (0, 1, 2))
    assert (gradient(params, jnp.zeros((0, 2, 12)), (C, H))[2][1] == 1).all()

    inputs = normal(2, 4, 2, 12)
    batched = jax.vmap(gradient, in_axes=(None, 0, None))(params, inputs, (C, H))
    for place in range(2):
        want = gradient(params, inputs[place], (C, H))
        got = jax.tree.map(lambda x: x[place], batched)  # noqa: B023
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# Sequences of different lengths.


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


@pytest.mark.parametrize("carries", [1, 2])
def test_a_carry_has_the_batch_of_the_input(carries):
    options = {"features": 3, "carries": carries, "made_by": "this"}
    assert why_no_carry((H,) * carries, jnp.ones((2, 5)), **options) is None
    what = ["an array", "a pair (c, h) of arrays"][carries - 1]
    got = ", ".join(["float32[2,3]"] * carries)
    text = (
        f"expected a carry that is {what} of shape (4, 3), but got {got}.\nFix: make it with this."
    )
    assert why_no_carry((H,) * carries, jnp.ones((4, 5)), **options) == text
    assert why_no_carry((H,) * (carries + 1), jnp.ones((2, 5)), **options) is not None


def test_two_directions_have_two_carries():
    assert why_no_pair((C, H)) is why_no_pair([None, None]) is None
    assert "but got float32[2,3].\nFix: pass" in str(why_no_pair(H))
    assert why_no_pair((C, H, H)) is not None
