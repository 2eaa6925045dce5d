"""Generation beside the same model without a cache, which reads all tokens again for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError, RngsError
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


def drawn(**options):
    return {"temperature": 1.0, "rngs": nnx.Rngs(0), **options}


TWO_ROWS = "one number or one for each row of the prompt, of which there are 2"
HEAT = (
    f"takes a temperature that is 0, or above it for every row, {TWO_ROWS}, but got %s.\n"
    "Fix: temperature=0 takes the most likely token, 1 draws as the model predicts."
)
MASS = (
    f"takes a top_p above 0 and up to 1, {TWO_ROWS}, but got %s.\n"
    "Fix: top_p=0.9 draws among tokens that together have nine tenths of the probability."
)
WHOLE = (
    "nnx.generate takes whole numbers for %s, but got %s.\n"
    "Fix: pass an int; inside jax.jit or nnx.jit, one that is static there."
)
GREEDY = (
    "nnx.generate got %s, which says what to draw among, but at temperature 0 it takes the most "
    "likely token each time.\nFix: pass temperature=1.0 and rngs=nnx.Rngs(0), or leave %s out."
)
RAGGED = (
    "nnx.generate takes a prompt of integers of shape (batch, length) or (length,), but got rows "
    "of the lengths [1, 2].\n"
    "Fix: pass an array of integers; prompts of different lengths in calls of their own."
)
NEGATIVE = (
    "nnx.generate takes tokens from 0 on, but the prompt has -1.\n"
    "Fix: leave out what fills up shorter prompts; those of one length go in one call."
)
UNKNOWN = (
    "nnx.generate got the token %s in the prompt, but Writer knows 11 tokens, and its largest "
    "nnx.Embed has 32 vectors.\n"
    "Fix: use the tokenizer that the model was trained with, or a larger vocabulary."
)
MISTAKES = {
    "empty": (jnp.zeros((2, 0), jnp.int32), 3, {}, "not empty, but got int32[2,0]"),
    "floats": (
        jnp.ones((2, 3)),
        3,
        {},
        "integers of shape (batch, length) or (length,), not empty",
    ),
    "scalar": (jnp.int32(3), 3, {}, "but got int32[]"),
    "ragged": ([[1, 2], [3]], 3, {}, RAGGED),
    "ragged arrays": ([jnp.array([1, 2]), jnp.array([3])], 3, {}, RAGGED),
    "text": ("Once", 3, {}, "(length,), but Value 'Once' with dtype <U4 is not a valid JAX array"),
    "negative token": ([[1, -1]], 3, {}, NEGATIVE),
    "unknown token": ([[1, 32]], 3, {}, UNKNOWN % 32),
    "large token": (np.array([2**40]), 3, {}, UNKNOWN % 2**40),
    "no new tokens": (
        PROMPT,
        0,
        {},
        "takes max_new_tokens from 1 on, but got 0.\nFix: give a larger number.",
    ),
    "half a token": (PROMPT, 2.5, {}, WHOLE % ("max_new_tokens", "the Python float 2.5")),
    "float tokens": (PROMPT, jnp.array(3.0), {}, WHOLE % ("max_new_tokens", "float32[]")),
    "short cache": (
        PROMPT,
        3,
        {"cache_length": 7},
        "nnx.generate needs room for 8 positions, those of the prompt and 3 more, but got "
        "cache_length=7.\nFix: leave it out",
    ),
    "float cache": (
        PROMPT,
        3,
        {"cache_length": 8.0},
        WHOLE % ("cache_length", "the Python float 8.0"),
    ),
    "no top_k": (PROMPT, 3, drawn(top_k=0), "takes top_k from 1 on, but got 0"),
    "float top_k": (PROMPT, 3, drawn(top_k=1.5), WHOLE % ("top_k", "the Python float 1.5")),
    "greedy top_k": (PROMPT, 3, {"top_k": 3}, GREEDY % ("top_k=3", "top_k")),
    "greedy top_p": (PROMPT, 3, {"top_p": 0.5}, GREEDY % ("top_p=0.5", "top_p")),
    "cold": (PROMPT, 3, drawn(temperature=-0.5), HEAT % -0.5),
    "nan": (PROMPT, 3, drawn(temperature=float("nan")), HEAT % "nan"),
    "hot": (PROMPT, 3, drawn(temperature=np.inf), HEAT % "inf"),
    "no temperature": (PROMPT, 3, drawn(temperature=None), HEAT % "the Python NoneType None"),
    "temperature as text": (PROMPT, 3, drawn(temperature="1"), HEAT % "the Python str '1'"),
    "one row greedy": (PROMPT, 3, drawn(temperature=jnp.array([1.0, 0.0])), HEAT % [1.0, 0.0]),
    "three rows": (PROMPT, 3, drawn(temperature=[1.0, 2.0, 3.0]), HEAT % [1.0, 2.0, 3.0]),
    "no mass": (PROMPT, 3, drawn(top_p=0.0), MASS % 0.0),
    "much mass": (PROMPT, 3, drawn(top_p=1.5), MASS % 1.5),
    "nan mass": (PROMPT, 3, drawn(top_p=jnp.nan), MASS % "nan"),
    "half a stop": (
        PROMPT,
        3,
        {"stop_tokens": [1, 2.5]},
        WHOLE % ("stop_tokens", "the Python float 2.5"),
    ),
    "stop as text": (
        PROMPT,
        3,
        {"stop_tokens": "."},
        WHOLE % ("stop_tokens", "the Python str '.'"),
    ),
    "half a pad": (PROMPT, 3, {"pad_token": 0.5}, WHOLE % ("pad_token", "the Python float 0.5")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_arguments_that_do_not_fit(model, mistake):
    prompt, count, options, text = MISTAKES[mistake]
    rngs = options.get("rngs")
    with pytest.raises(LayerArgumentError) as error:
        nnx.generate(model, prompt, count, **options)
    assert text in str(error.value)
    assert "\nFix: " in str(error.value)
    assert rngs is None or int(rngs.default.count) == 0


def test_numbers_may_come_in_several_forms(model):
    want = nnx.generate(model, PROMPT, 3).tolist()
    for zero in (0, np.float32(0.0), jnp.zeros(()), [0.0, 0.0]):
        assert nnx.generate(model, PROMPT.tolist(), np.int64(3), temperature=zero).tolist() == want
    stop = want[0][1]
    stopped = nnx.generate(model, PROMPT, 3, stop_tokens=[stop]).tolist()
    for one in (stop, np.int32(stop), jnp.array(stop), {stop}, np.array([stop])):
        assert nnx.generate(model, PROMPT, 3, stop_tokens=one).tolist() == stopped
    warm = nnx.generate(model, PROMPT, 3, **drawn(temperature=0.5, top_p=0.9)).tolist()
    rows = drawn(temperature=np.array([0.5, 0.5]), top_p=[0.9, 0.9])
    assert nnx.generate(model, PROMPT, 3, **rows).tolist() == warm
    # Nothing says that the tokens of the prompt are among the classes.
    nnx.generate(model, [[31]], 1)


def test_traced_numbers_are_not_checked(model):
    @nnx.jit
    def run(model, prompt, temperature, top_p, rngs):
        options = {"temperature": temperature, "top_p": top_p, "top_k": 4, "rngs": rngs}
        return nnx.generate(model, prompt, 3, **options)

    want = nnx.generate(model, PROMPT, 3, **drawn(temperature=0.5, top_p=0.9, top_k=4))
    np.testing.assert_array_equal(run(model, PROMPT, 0.5, 0.9, nnx.Rngs(0)), want)
    run(model, jnp.array([[1, 99]]), -1.0, 2.0, nnx.Rngs(0))
    with pytest.raises(LayerArgumentError) as error:
        nnx.jit(lambda model, count: nnx.generate(model, PROMPT, count))(model, 3)
    assert str(error.value) == WHOLE % ("max_new_tokens", "int32[]")


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        (lambda logits: (logits, None), "a tuple of 2"),
        (lambda logits: {"logits": logits}, "a dict"),
        (lambda logits: logits[:, -1], "float32[2,11]"),
    ],
)
def test_a_model_that_returns_no_logits(model, returns, text):
    def call(model, tokens, positions):
        return returns(model(tokens, positions))

    with pytest.raises(LayerArgumentError) as error:
        nnx.generate(model, PROMPT, 3, call=call)
    assert str(error.value) == (
        "nnx.generate takes logits of shape (batch, length, classes) for a batch of 2, but the "
        f"call of Writer returned {text}.\n"
        "Fix: pass call=f with a function that returns the logits alone, such as\n"
        "def f(model, tokens, positions): return model(tokens, positions)[0]"
    )


def test_logits_of_the_last_token_alone_will_do(model):
    def call(model, tokens, positions):
        return model(tokens, positions)[:, -1:]

    want = nnx.generate(model, PROMPT, 3)
    np.testing.assert_array_equal(nnx.generate(model, PROMPT, 3, call=call), want)


def test_a_model_with_a_mask_of_its_own():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs)

        def __call__(self, tokens):
            mask = nnx.make_causal_mask(tokens)
            return self.words.attend(self.attention(self.words(tokens), mask=mask))

    with pytest.raises(FeatureError) as error:
        nnx.generate(Masked(nnx.Rngs(0)), PROMPT, 3)
    assert str(error.value) == (
        "self.attention (MultiHeadAttention) expected a mask that broadcasts to (2, 2, 5, 8): "
        "(batch, heads, queries, keys), but got one of shape (2, 1, 5, 5). The keys are the 8 "
        "positions of the cache.\n"
        "Fix: leave a causal mask out and pass is_causal=True, which the cache knows; another mask "
        "has to be one for all positions of the cache."
    )


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
