"""Sampling from logits: which classes are left, and how often each is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional.sampling import keep_top_k, keep_top_p, sample_logits

CHANCES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = jnp.log(jnp.asarray(CHANCES, jnp.float32))


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.3, [1]), (0.5, [1, 3]), (0.8, [1, 3, 4]), (0.0, [1]), (1.0, [0, 1, 2, 3, 4])],
)
def test_the_smallest_set_of_that_mass_is_kept(p, kept):
    left = jnp.isfinite(keep_top_p(LOGITS, p))
    assert list(np.flatnonzero(left)) == kept


def test_each_row_has_its_own_mass():
    left = jnp.isfinite(keep_top_p(jnp.stack([LOGITS, LOGITS]), jnp.array([0.3, 0.8])))
    assert left.sum(-1).tolist() == [1, 3]


def test_the_k_largest_are_kept():
    assert list(np.flatnonzero(jnp.isfinite(keep_top_k(LOGITS, 2)))) == [1, 3]
    assert keep_top_k(LOGITS, 9) is LOGITS


@pytest.mark.parametrize(
    ("options", "chances"),
    [
        ({}, CHANCES),
        ({"temperature": 0.5}, CHANCES**2),
        ({"top_k": 3}, CHANCES * [0, 1, 0, 1, 1]),
        ({"top_p": 0.6}, CHANCES * [0, 1, 0, 1, 0]),
        ({"top_p": 0.5, "top_k": 1}, CHANCES * [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_classes_are_drawn_as_often_as_they_should(options, chances):
    many = jnp.broadcast_to(LOGITS, (4000, 5))
    drawn = jax.jit(lambda key: sample_logits(many, key, **options))(jax.random.key(0))
    counts = np.bincount(drawn, minlength=5) / 4000
    np.testing.assert_allclose(counts, chances / chances.sum(), atol=0.03)


def test_without_a_key_the_most_likely_class_is_taken():
    assert int(sample_logits(LOGITS.astype(jnp.bfloat16), None, top_k=2)) == 1
