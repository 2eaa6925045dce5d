"""RoPE and attention over it; numbers of Flax 0.12.12, and decoding against the whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError
from tests import compare

X = jnp.arange(1.0, 9.0).reshape(1, 2, 4)
TABLES = functools.partial(nnx.RoPE, embedding_size=4, max_seq_len=3)
close = functools.partial(compare.close, tolerance=1e-5)
KEY = jax.random.key(0)
QUERY, KEYS, VALUES = (
    jax.random.normal(jax.random.fold_in(KEY, i), (2, 3, 2, 4)) for i in range(3)
)


def digest(x):
    return float((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum())


@pytest.mark.parametrize("make", [nnx.RoPE, TABLES], ids=["plain", "tables"])
def test_pairs_of_features_are_turned(make):
    rope = make()
    close(rope(X)[0], [[1, 2, 3, 4], [-3.188786, 5.919702, 7.98947, 8.059599]])
    turned = [-1.984111, 1.959901, 2.462378, 4.0198]
    for positions in ([1, 0], [[1, 0]]):
        close(rope(X, jnp.array(positions))[0], [turned, [5, 6, 7, 8]])
    close(rope(X, jnp.array([7, 0]))[0, 0], [-1.217057, 1.715331, 2.918694, 4.13009])
    close(rope(X, jnp.array([0.5, 0]))[0, 0], [-0.560694, 1.979975, 3.112173, 4.00995])
    assert rope(X.astype(jnp.bfloat16)).dtype == jnp.float32


def test_another_base_and_what_is_kept():
    close(nnx.RoPE(theta=100.0)(X)[0, 1], [-3.188786, 5.171358, 7.98947, 8.559034])
    kept = nnx.state(TABLES())
    assert set(kept) == {"cached_sin", "cached_cos"} and not nnx.state(nnx.RoPE())
    close(kept["cached_cos"].value, [[1, 1], [0.540302, 0.99995], [-0.416147, 0.9998]])
    close(kept["cached_sin"].value, [[0, 0], [0.841471, 0.01], [0.909297, 0.019999]])
    assert type(kept["cached_cos"]) is nnx.Variable


@pytest.mark.parametrize("make", [nnx.RoPE, TABLES], ids=["plain", "tables"])
def test_attention_over_turned_queries_and_keys(make):
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=make())
    close(digest(attend(QUERY, KEYS, VALUES)), -5.427778)
    close(digest(attend(QUERY, KEYS, VALUES, is_causal=True)), -1.521398)
    close(digest(attend(QUERY[:, :2], KEYS, VALUES)), -0.520047)
    close(digest(attend(QUERY, KEYS[:, :, :1], VALUES[:, :, :1])), -4.006629)


def test_distances_alone_count():
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    want = attend(QUERY, KEYS, VALUES)
    positions = jnp.array([[5, 6, 7], [100, 101, 102]])
    close(attend(QUERY, KEYS, VALUES, input_positions=positions), want)
    swapped = attend(
        QUERY[:, ::-1], KEYS[:, ::-1], VALUES[:, ::-1], input_positions=jnp.array([2, 1, 0])
    )
    close(swapped[:, ::-1], want)


def layer(rope, **options):
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    options = {"decode": False, **options}
    return nnx.MultiHeadAttention(2, 8, attention_fn=attend, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("make", [nnx.RoPE, TABLES], ids=["plain", "tables"])
@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_several_heads_and_the_cache(make, transform):
    x = jax.random.normal(KEY, (2, 3, 8))
    call = transform(lambda model, x, **options: model(x, **options))
    close(digest(call(layer(make()), x)), 2.033101)
    whole = transform(lambda model, x: model(x, is_causal=True))(layer(make()), x)
    close(digest(whole), 9.77045)
    decoder = layer(make(), decode=True)
    decoder.init_cache((2, 3, 8))
    steps = [call(decoder, x[:, :2]), call(decoder, x[:, 2:])]
    close(jnp.concatenate(steps, axis=1), whole)


def test_positions_given_to_the_layer():
    x = jax.random.normal(KEY, (2, 3, 8))
    model = layer(nnx.RoPE())
    close(model(x, input_positions=jnp.array([4, 5, 6])), model(x))
    assert not np.allclose(model(x, input_positions=jnp.array([0, 5, 6])), model(x))


def test_an_attention_function_with_free_arguments_gets_no_positions():
    def attend(*args, **kwargs):
        assert "input_positions" not in kwargs
        return nnx.dot_product_attention(*args, **kwargs)

    model = nnx.MultiHeadAttention(2, 8, attention_fn=attend, decode=True, rngs=nnx.Rngs(0))
    model.init_cache((2, 3, 8))
    assert model(jnp.ones((2, 1, 8))).shape == (2, 1, 8)


REFUSED = {
    "odd size": (
        lambda: nnx.RoPE(embedding_size=3, max_seq_len=2),
        LayerArgumentError,
        "RoPE turns pairs of features, but got embedding_size=3.\nFix: pass an even size",
    ),
    "half of the tables": (
        lambda: nnx.RoPE(embedding_size=4),
        LayerArgumentError,
        "RoPE got embedding_size=4 and max_seq_len=None.\nFix: give both",
    ),
    "odd input": (
        lambda: nnx.RoPE()(jnp.ones((1, 2, 3))),
        FeatureError,
        "RoPE expected inputs of shape (..., length, an even size), but got float32[1,2,3].\nFix: ",
    ),
    "too long": (
        lambda: TABLES()(jnp.ones((1, 5, 4))),
        FeatureError,
        "has tables for 3 positions of size 4, but got float32[1,5,4].\nFix: build it with another",
    ),
    "other positions": (
        lambda: nnx.RoPE()(X, jnp.arange(3)),
        FeatureError,
        "got positions of shape (3,) for float32[1,2,4].\nFix: give one position for each entry, "
        "in the shape (2,) or (1, 2).",
    ),
    "a layer without positions": (
        lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))(
            jnp.ones((1, 2, 8)), input_positions=jnp.arange(2)
        ),
        LayerArgumentError,
        "got input_positions, which its attention_fn does not take.\nFix: leave them out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
