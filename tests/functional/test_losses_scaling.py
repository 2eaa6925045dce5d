"""Loss scaling: the scaled loss, its gradients, and the scale of the next step."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from linnet.functional import losses


def test_a_scaled_loss_keeps_the_loss_itself():
    scaled = losses.scaled_loss(lambda x: (x.sum(), "aux"), 65536.0, has_aux=True)
    large, (loss, aux) = scaled(jnp.full(2, 3.0, jnp.float16))
    assert (large.dtype, float(large)) == (jnp.float32, 6 * 65536)  # no float16 is as large
    assert (loss.dtype, float(loss), aux) == (jnp.float16, 6.0, "aux")


def test_gradients_that_float16_flushes_to_zero_survive():
    def loss(x):
        return (x.astype(jnp.float16) * jnp.float16(1e-4)).astype(jnp.float32).sum() * 1e-5

    x = jnp.ones(2)
    assert jax.grad(loss)(x).tolist() == [0, 0]
    grads = jax.grad(losses.scaled_loss(loss, 65536.0), has_aux=True)(x)[0]
    assert jnp.allclose(losses.unscaled(grads, 65536.0), 1e-9, rtol=0.01)


def test_gradients_come_in_float32_and_averaged():
    grads = {"half": jnp.array([8.0], jnp.bfloat16), "full": jnp.array([16.0])}
    got = losses.unscaled(grads, 8.0)
    assert {name: (g.dtype, float(g[0])) for name, g in got.items()} == {
        "half": (jnp.float32, 1.0),
        "full": (jnp.float32, 2.0),
    }
    average = jax.vmap(lambda g: losses.unscaled(g, 2.0, "batch"), axis_name="batch")
    assert average(jnp.array([2.0, 6.0])).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("tree", "want"),
    [
        ((), True),
        ({"a": jnp.ones(2), "n": jnp.ones(2, jnp.int32)}, True),
        ([jnp.array([1.0, jnp.nan])], False),
        ([jnp.ones(1), jnp.array(-jnp.inf, jnp.float16)], False),
    ],
)
def test_finite(tree, want):
    assert bool(losses.all_finite(tree)) is want
    assert bool(jax.jit(losses.all_finite)(tree)) is want


LARGEST, TINY = float(jnp.finfo(jnp.float32).max), float(losses.SMALLEST)


@pytest.mark.parametrize(
    ("scale", "steps", "finite", "minimum", "want"),
    [
        (8.0, 0, True, TINY, (8.0, 1)),
        (8.0, 1, True, TINY, (8.0, 2)),
        (8.0, 2, True, TINY, (24.0, 0)),
        (8.0, 2, False, TINY, (2.0, 0)),
        (8.0, 1, False, 3.0, (3.0, 0)),
        (2.0**127, 2, True, TINY, (LARGEST, 0)),
        (TINY, 1, False, TINY, (TINY, 0)),
        (TINY * 8, 1, False, None, (TINY * 2, 0)),
    ],
)
def test_the_next_scale(scale, steps, finite, minimum, want):
    growth = SimpleNamespace(
        growth_factor=3.0, backoff_factor=0.25, growth_interval=2, minimum_scale=minimum
    )
    got = losses.next_scale(scale, steps, jnp.array(finite), growth)
    assert (float(got[0]), int(got[1])) == want
    assert (got[0].dtype, got[1].dtype) == (jnp.float32, jnp.int32)


def test_a_choice_leaves_alone_what_did_not_move():
    same, old = jnp.ones(2), jnp.zeros(2)
    got = losses.where_finite(jnp.array(True), [same, same], [same, old])
    assert got[0] is same
    assert got[1].tolist() == [1, 1]
