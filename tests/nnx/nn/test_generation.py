"""Generation beside the same model without a cache, which reads all tokens again for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import LayerArgumentError, RngsError
from linnet.nnx.nn import generation

VOCABULARY, WIDTH = 11, 8


class Writer(nnx.Module):
    def __init__(self, rngs, **options):
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(32, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            [nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, **options) for _ in range(2)]
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.words(tokens) + self.places(positions)
        for layer in self.layers:
            x = x + self.dropout(layer(x, is_causal=True))
        return self.out(x)


@pytest.fixture(scope="module")
def model():
    return Writer(nnx.Rngs(0))


PROMPT = jnp.array([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])


def by_hand(model, tokens, count):
    """Greedy, all tokens read again for each new one."""
    plain = nnx.view(model, deterministic=True, decode=False)
    for _ in range(count):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        best = jnp.argmax(plain(tokens, positions)[:, -1], axis=-1)
        tokens = jnp.concatenate([tokens, best[:, None]], axis=1)
    return tokens[:, -count:]


def test_it_goes_on_as_without_a_cache(model):
    want = by_hand(model, PROMPT, 6)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    np.testing.assert_array_equal(nnx.generate(model, PROMPT, 6), want)
    np.testing.assert_array_equal(nnx.generate(model, PROMPT, 6, cache_length=20), want)
    assert nnx.generate(model, PROMPT, 6).dtype == jnp.int32
    assert model.layers[0].cached_key is None and model.dropout.deterministic is False
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, nnx.Param))


class Block(nnx.Module):
    def __init__(self, rngs, **options):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, **options)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.attention(self.norm(x), is_causal=True))


class Deep(nnx.Module):
    def __init__(self, rngs, blocks):
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = blocks
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.words(tokens) + self.places(positions)
        if isinstance(self.blocks, nnx.Stack):
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.out(x)


@pytest.mark.parametrize("depth", [2, 3])  # 2 is the size of the batch too
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"partition": "layers"}], ids=str)
def test_blocks_in_a_stack_generate_what_a_list_of_them_does(depth, options):
    stack = nnx.Stack(Block, depth, rngs=nnx.Rngs(1), **options)
    stacked, listed = Deep(nnx.Rngs(0), stack), Deep(nnx.Rngs(0), nnx.List(stack.to_list()))
    want = by_hand(listed, PROMPT, 6)
    assert len(np.unique(want)) > 2
    np.testing.assert_array_equal(nnx.generate(listed, PROMPT, 6), want)
    np.testing.assert_array_equal(nnx.generate(stacked, PROMPT, 6), want)
    drawn, drawn_too = (
        nnx.generate(model, PROMPT, 6, temperature=2.0, rngs=nnx.Rngs(0))
        for model in (listed, stacked)
    )
    np.testing.assert_array_equal(drawn, drawn_too)
    assert stack.stacked.attention.cached_key is None
    assert stack.stacked.dropout.deterministic is False


def test_stacks_in_a_stack_generate_too():
    stack = nnx.Stack(lambda rngs: nnx.Stack(Block, 2, rngs=rngs), 3, rngs=nnx.Rngs(1))
    blocks = [block for inner in stack.to_list() for block in inner.to_list()]
    want = nnx.generate(Deep(nnx.Rngs(0), nnx.List(blocks)), PROMPT, 6)
    np.testing.assert_array_equal(nnx.generate(Deep(nnx.Rngs(0), stack), PROMPT, 6), want)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_prompt_may_have_any_length(model, length):
    prompt = PROMPT[:1, :length]
    np.testing.assert_array_equal(nnx.generate(model, prompt[0], 3), by_hand(model, prompt, 3)[0])


def test_one_new_token(model):
    np.testing.assert_array_equal(nnx.generate(model, PROMPT, 1), by_hand(model, PROMPT, 1))


def test_a_sequence_ends_after_a_stop_token(model):
    want = np.array(by_hand(model, PROMPT, 6))
    stop = int(want[0, 2])
    for row in want:
        ends = np.flatnonzero(row == stop)
        row[ends[0] + 1 if len(ends) else 6 :] = 99
    got = nnx.generate(model, PROMPT, 6, stop_tokens=[stop], pad_token=99)
    np.testing.assert_array_equal(got, want)


def test_draws_follow_the_key(model):
    def draw(seed, **options):
        rngs = nnx.Rngs(sample=seed)
        return nnx.generate(model, PROMPT, 6, temperature=1.5, rngs=rngs, **options).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert draw(0, top_k=1) == draw(1, top_p=1e-6) == by_hand(model, PROMPT, 6).tolist()
    key = nnx.Rngs(sample=0).sample()
    options = {"temperature": 1.5, "rngs": key}
    assert nnx.generate(model, PROMPT, 6, **options).tolist() == draw(0)


def test_another_temperature_or_mass_compiles_nothing(model):
    compiled = nnx.nn.generation._compiled()
    for temperature in (0.5, 0.7, 0.9):
        options = {"top_p": temperature, "rngs": nnx.Rngs(0)}
        nnx.generate(model, PROMPT, 3, temperature=temperature, **options)
        if temperature == 0.5:
            before = compiled.jitted_fn._cache_size()
    assert compiled.jitted_fn._cache_size() == before


def test_a_call_of_ones_own(model):
    def reversed_logits(model, tokens, positions):
        return -model(tokens, positions)

    got = nnx.generate(model, PROMPT, 1, call=reversed_logits)
    positions = jnp.broadcast_to(jnp.arange(5), PROMPT.shape)
    logits = nnx.view(model, deterministic=True)(PROMPT, positions)
    np.testing.assert_array_equal(got[:, 0], jnp.argmin(logits[:, -1], axis=-1))


def test_a_single_row_on_a_gpu_is_computed_with_others(model, monkeypatch):
    want = nnx.generate(model, PROMPT[:1], 4)
    monkeypatch.setattr("linnet.functional.linear.on_gpu", lambda: True)
    nnx.nn.generation._compiled().clear_cache()
    np.testing.assert_array_equal(nnx.generate(model, PROMPT[:1], 4), want)
    nnx.nn.generation._compiled().clear_cache()


@pytest.mark.parametrize(
    ("prompt", "count", "options", "text"),
    [
        (jnp.zeros((2, 0), jnp.int32), 3, {}, r"not empty, but got int32\[2,0\]"),
        (jnp.ones((2, 3)), 3, {}, r"integers of shape \(batch, length\) or \(length,\)"),
        (jnp.int32(3), 3, {}, r"but got int32\[\]"),
        (PROMPT, 0, {}, "takes max_new_tokens from 1 on, but got 0"),
        (PROMPT, 3, {"top_k": 0}, "takes top_k from 1 on, but got 0"),
        (PROMPT, 3, {"cache_length": 7}, "needs room for 8 positions.*got cache_length=7"),
    ],
)
def test_arguments_that_do_not_fit(model, prompt, count, options, text):
    with pytest.raises(LayerArgumentError, match=text):
        nnx.generate(model, prompt, count, **options)


def test_draws_need_keys(model):
    with pytest.raises(RngsError, match=r"at temperature 0.5, but has no keys.\nFix: pass rngs="):
        nnx.generate(model, PROMPT, 3, temperature=0.5)


def test_a_model_without_a_cache():
    class Plain(nnx.Module):
        def __call__(self, tokens):
            return jax.nn.one_hot(tokens, 4)

    with pytest.raises(LayerArgumentError, match=r"found no layer with a cache in Plain\.\nFix:"):
        nnx.generate(Plain(), PROMPT, 3)


def test_which_models_get_positions():
    def with_mask(tokens, mask=None):
        assert mask is None

    def with_positions(tokens, positions=None):
        assert positions == 1

    def with_places(tokens, places):
        assert places == 1

    def with_any(tokens, *more):
        assert more == (1,)

    for model in (with_mask, with_positions, with_places, with_any):
        generation._model_call(model)(model, 0, 1)
