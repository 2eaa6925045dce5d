"""The key/value cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional.attention import dot_product_attention, extend_cache, why_full

Q, K, V = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 6, 2, 4)), jnp.float32)


def decode(sizes, length=6, dtype=jnp.float32):
    """Attention over the sequence in pieces of these sizes, through a cache."""
    cache = (jnp.zeros((2, length, 2, 4), dtype),) * 2
    index = jnp.zeros((), jnp.int32)
    pieces, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        query, *cache, index, mask = extend_cache(Q[:, part], K[:, part], V[:, part], *cache, index)
        pieces.append(dot_product_attention(query, *cache, mask=mask))
        start += size
    assert index == start
    return jnp.concatenate(pieces, axis=1)


@pytest.mark.parametrize("sizes", [[1] * 6, [6], [3, 1, 2]])
@pytest.mark.parametrize("length", [6, 9])
def test_pieces_through_a_cache_are_causal_attention(sizes, length):
    want = dot_product_attention(Q, K, V, is_causal=True)
    np.testing.assert_allclose(decode(sizes, length), want, atol=1e-6)


def test_a_cache_keeps_its_dtype():
    new, cache = Q[:, :1], jnp.zeros((2, 3, 2, 4), jnp.bfloat16)
    _, key, value, *_ = extend_cache(new, new, new, cache, cache, jnp.array(0))
    assert key.dtype == value.dtype == jnp.bfloat16


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_full_cache_gives_nan(wrap):
    new, cache = Q[:, :2], jnp.zeros((2, 3, 2, 4))
    query, *_ = wrap(extend_cache)(new, new, new, cache, cache, jnp.array(2))
    assert jnp.isnan(query).all()
    query, *_ = wrap(extend_cache)(new, new, new, cache, cache, jnp.array(1))
    assert (query == new).all()


def test_a_cache_is_full_when_the_next_positions_do_not_fit():
    assert why_full(jnp.array(3), 1, 4) is None
    text = "the cache is full, 3 of its 4 positions are in use, and got 2 more."
    assert why_full(jnp.array(3), 2, 4) == text


def test_whether_a_cache_is_full_is_not_known_in_a_trace():
    assert jax.jit(lambda index: jnp.array(why_full(index, 2, 1) is None))(jnp.array(3))
