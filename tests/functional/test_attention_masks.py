"""Masks for attention."""

import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import FeatureError
from linnet.functional.attention import (
    combine_masks,
    make_attention_mask,
    make_causal_mask,
    why_no_keys,
    why_not_broadcast,
    why_not_one_batch,
)


def test_a_causal_mask_lets_each_position_look_back():
    mask = make_causal_mask(jnp.ones((2, 3)))
    assert (mask.shape, mask.dtype) == ((2, 1, 3, 3), jnp.float32)
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tri(3), (2, 1, 3, 3)))


@pytest.mark.parametrize("extra", [1, 2])
def test_extra_axes_stand_in_front(extra):
    mask = make_causal_mask(jnp.ones(3), extra_batch_dims=extra, dtype=bool)
    assert (mask.shape, mask.dtype) == ((1,) * extra + (1, 3, 3), bool)
    np.testing.assert_array_equal(mask.reshape(3, 3), np.tri(3))
    queries, keys = jnp.array([[1, 0, 1], [0, 1, 1]]), jnp.array([[1, 1, 0, 1], [0, 1, 0, 0]])
    pair = make_attention_mask(queries, keys, extra_batch_dims=extra)
    assert pair.shape == (1,) * extra + (2, 1, 3, 4)
    np.testing.assert_array_equal(pair.reshape(2, 3, 4), queries[:, :, None] * keys[:, None])


def test_a_mask_from_padding():
    mask = make_attention_mask(jnp.array([[1, 0, 1]]), jnp.array([[1, 0]]))
    np.testing.assert_array_equal(mask[0, 0], [[1, 0], [0, 0], [1, 0]])


def test_a_mask_from_any_comparison():
    segments = jnp.array([0, 0, 1])
    mask = make_attention_mask(segments, segments, pairwise_fn=jnp.equal, dtype=bool)
    np.testing.assert_array_equal(mask[0], [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_masks_combine_and_broadcast():
    mask = combine_masks(jnp.array([[1.0, 0.0, 1.0]]), None, jnp.array([[True], [False]]))
    assert mask.dtype == jnp.float32
    np.testing.assert_array_equal(mask, [[1, 0, 1], [0, 0, 0]])
    assert combine_masks(jnp.array([2.0, 0.0]), dtype=bool).tolist() == [True, False]
    assert combine_masks() is None
    assert combine_masks(None, None) is None


@pytest.mark.parametrize(("a", "b"), [((1, 3), (3,)), ((1, 3), (1, 2)), ((2, 3), (3, 3))])
def test_masks_that_do_not_combine(a, b):
    with pytest.raises(FeatureError) as error:
        combine_masks(jnp.ones(a), None, jnp.ones(b))
    assert isinstance(error.value, AssertionError)  # as in Flax
    assert str(error.value).startswith(
        f"combine_masks: masks must have same rank and broadcast, but got {a}, {b}.\nFix: "
    )


def test_values_without_keys_are_told():
    x = jnp.ones((1, 2, 3))
    assert why_no_keys(None, None) is why_no_keys(x, None) is why_no_keys(x, x) is None
    assert str(why_no_keys(None, x)).startswith("got inputs_v and no inputs_k: `inputs_k` cannot")


@pytest.mark.parametrize("tells_batch", [False, True])
def test_inputs_of_several_batches_are_told(tells_batch):
    q, k, v = jnp.ones((2, 5, 3)), jnp.ones((2, 4, 3)), jnp.ones((2, 4, 6))
    assert why_not_one_batch(q, k, v, tells_batch=tells_batch) is None
    batch = "(2,), " if tells_batch else ""
    text = f"expected inputs of one batch, {batch}with as many keys as values, but got inputs_q of "
    for others in ((k[:1], v[:1]), (k, v[:1]), (k, v[:, :3])):
        assert str(why_not_one_batch(q, *others, tells_batch=tells_batch)).startswith(text)


def test_a_mask_that_does_not_broadcast_is_told():
    assert why_not_broadcast("mask", np.ones((1, 3)), (2, 4, 3)) is None
    text = (
        "expected a mask that broadcasts to (2, 4, 3): (batch, heads, queries, keys), but got one"
    )
    assert str(why_not_broadcast("mask", np.ones((2, 3)), (2, 4, 3))).startswith(text)
