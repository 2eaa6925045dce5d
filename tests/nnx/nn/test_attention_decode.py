"""MultiHeadAttention one position after another, with its cache of keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import CacheError, FeatureError, LayerArgumentError
from tests.models import InList

HALF = jnp.bfloat16
Q = jax.random.normal(jax.random.key(1), (2, 3, 4))
B = {"bias_init": jax.nn.initializers.normal(1.0)}


def build(**options):
    return nnx.MultiHeadAttention(2, 4, **options, rngs=nnx.Rngs(0))


def stepwise(layer, x, sizes):
    out, start = [], 0
    for size in sizes:
        out.append(layer(x[:, start : start + size]))
        start += size
    return jnp.concatenate(out, axis=1)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 1], [3]])
@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 1}, {"normalize_qk": True}], ids=["plain", "grouped", "norm"]
)
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_decoding_is_causal_attention(wrap, options, sizes):
    layer = build(decode=True, **B, **options)
    layer.init_cache((2, 4, 4))
    want = layer(Q, is_causal=True, decode=False)
    got = wrap(lambda layer, x: stepwise(layer, x, sizes))(layer, Q)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert layer.cache_index[...] == 3
    assert layer.cached_key.shape == (2, 4, layer.num_kv_heads, 2)
    assert (layer.cached_key[...][:, 3] == 0).all()


def test_a_cache_starts_empty_and_can_be_renewed():
    layer = build(decode=True)
    layer.init_cache((2, 3, 4), dtype=HALF)
    kinds = [type(v) for v in (layer.cached_key, layer.cached_value, layer.cache_index)]
    assert kinds == [nnx.Cache] * 3
    assert (layer.cached_key.dtype, layer.cache_index[...]) == (HALF, 0)
    first = layer(Q[:, :1])
    layer(Q[:, 1:2])
    layer.init_cache((2, 3, 4), dtype=HALF)
    np.testing.assert_array_equal(layer(Q[:, :1]), first)


def test_decode_can_be_chosen_by_the_call():
    layer = build()
    layer.init_cache((2, 3, 4))
    out = [layer(Q[:, n : n + 1], decode=True, is_causal=True) for n in range(3)]
    np.testing.assert_allclose(jnp.concatenate(out, axis=1), layer(Q, is_causal=True), atol=1e-6)


@pytest.mark.parametrize("mask", [[1, 0, 1], [[[1, 0, 1]]], [[[[1, 0, 1]]]]])
def test_a_mask_joins_what_the_cache_allows(mask):
    layer = build(decode=True)
    layer.init_cache((2, 3, 4))
    got = [layer(Q[:, n : n + 1], mask=jnp.array(mask)) for n in range(3)]
    want = layer(Q, mask=jnp.array([1, 0, 1])[None, None, None], is_causal=True, decode=False)
    np.testing.assert_allclose(got[2][:, 0], want[:, 2], atol=1e-6)


def test_a_cache_that_overflows_inside_jit_gives_nan():
    layer = build(decode=True)
    layer.init_cache((2, 2, 4))
    step = nnx.jit(lambda layer, x: layer(x))
    outs = [step(layer, Q[:, n : n + 1]) for n in range(3)]
    assert [bool(jnp.isnan(out).any()) for out in outs] == [False, False, True]


def test_views():
    layer = build(dropout_rate=0.5, dtype=HALF)
    view = nnx.view(layer, deterministic=True, decode=True, batch_size=2, max_length=3)
    assert (view.deterministic, view.decode) == (True, True)
    assert (view.cached_key.shape, view.cached_key.dtype) == ((2, 3, 2, 2), HALF)
    assert view.query.kernel is layer.query.kernel
    assert (layer.deterministic, layer.decode, layer.cached_key) == (None, None, None)
    assert view(Q[:, :1]).shape == (2, 1, 4)
    back = nnx.view(view, decode=False, batch_size=(2, 5), max_length=3)
    assert back(Q).shape == (2, 3, 4)
    assert nnx.view(layer, decode=True, batch_size=(2, 5), max_length=3).cached_key.shape[:2] == (
        2,
        5,
    )


WHERE = "model.blocks[1] (MultiHeadAttention)"


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (
            Q[:, :2],
            f"{WHERE}: the cache is full, 1 of its 2 positions are in use, and got 2 more.\n"
            "Fix: call init_cache with a longer length, or to start over.",
        ),
        (
            Q,
            f"{WHERE}: Autoregressive cache shape error, the cache has room for 2 positions in a "
            "batch of (2,), but got keys of shape (2, 3, 2, 2).\n"
            "Fix: call init_cache with the shape of the longest input.",
        ),
        (Q[:1, :1], "in a batch of (2,), but got keys of shape (1, 1, 2, 2)"),
        (Q[0, :1], "in a batch of (2,), but got keys of shape (1, 2, 2)"),
        (Q[:, :1], "expected a mask that broadcasts to (2, 2, 1, 2)"),
    ],
)
def test_a_cache_that_does_not_fit(x, text):
    model = InList(build(), build(decode=True))
    model.blocks[1].init_cache((2, 2, 4))
    model(Q[:, :1])
    options = {"mask": jnp.ones((1, 3))} if "mask" in text else {}
    with pytest.raises((CacheError, FeatureError)) as raised:
        model(x, **options)
    assert text in str(raised.value)
    assert model.blocks[1].cache_index[...] == 1


def test_half_of_a_cache():
    with pytest.raises(LayerArgumentError, match="but got batch_size=2 and max_length=None"):
        nnx.view(build(), decode=True, batch_size=2)


def test_a_cache_that_overflowed_under_jit_is_reported():
    model = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    model.init_cache((1, 2, 8))
    step = nnx.jit(lambda model, x: model(x))
    outputs = [step(model, jnp.ones((1, 1, 8))) for _ in range(3)]
    assert [bool(jnp.isnan(out).all()) for out in outputs] == [False, False, True]
    with pytest.raises(CacheError) as caught:
        model(jnp.ones((1, 1, 8)))
    assert str(caught.value) == (
        "model (MultiHeadAttention): the cache overflowed inside a compiled function: it got 3 "
        "positions and has room for 2, so the outputs since then are nan.\n"
        "Fix: call init_cache with a longer length, and do it again."
    )
