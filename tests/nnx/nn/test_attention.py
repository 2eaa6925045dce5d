"""MultiHeadAttention: Flax's numbers, every argument, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import CacheError, FeatureError, LayerArgumentError, ModeError, RngsError
from tests.digest import digest
from tests.models import InList, drawn_key
from tests.nnx.nn.flax_cases import doubled

NORMAL = jax.nn.initializers.normal(1.0)
HALF = jnp.bfloat16
Q = jax.random.normal(jax.random.key(1), (2, 3, 4))
K, V = (jax.random.normal(jax.random.key(n), (2, 5, 4)) for n in (2, 3))
WIDE = jax.random.normal(jax.random.key(4), (2, 5, 6))
B = {"bias_init": NORMAL}
DROPS = {"dropout_rate": 0.5, "deterministic": False}


def tripled(*args, **kwargs):
    return 3 * jax.lax.dot_general(*args, **kwargs)


def average(query, key, value, **_):
    return jnp.broadcast_to(value.mean(1, keepdims=True), query.shape)


def build(rngs=None, **options):
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return nnx.MultiHeadAttention(**{"num_heads": 2, "in_features": 4, **options}, rngs=rngs)


# What is special, constructor, inputs, call, and Flax's parameters and output.
CASES = [
    ("self", {}, (Q,), {}, -1.02692, 0.51546),
    ("cross", B, (Q, K), {}, 5.40574, 0.56264),
    ("cross with values", B, (Q, K, V), {}, 5.40574, -0.02889),
    ("mask", B, (Q,), {"mask": jnp.array([1, 0, 1])[None, None, None]}, 5.40574, -0.53902),
    ("causal", B, (Q,), {"is_causal": True}, 5.40574, 1.2761),
    ("causal cross", B, (Q, K), {"is_causal": True}, 5.40574, 3.78584),
    ("heads", {"num_heads": 4, **B}, (Q,), {}, 5.40574, -2.33493),
    ("in_features", {"in_features": 6, **B}, (WIDE,), {}, -0.91103, 12.50817),
    ("qkv_features", {"qkv_features": 6, **B}, (Q,), {}, 1.20163, 0.42001),
    ("out_features", {"out_features": 3, **B}, (Q,), {}, 0.67897, -0.80673),
    ("num_kv_heads", {"num_heads": 4, "num_kv_heads": 2, **B}, (Q,), {}, -4.41633, 3.23476),
    ("in_kv_features", {"in_kv_features": 6, **B}, (Q, WIDE), {}, 0.6846, 0.07341),
    ("dtype", {"dtype": HALF, **B}, (Q,), {}, 5.40574, 0.29254),
    ("param_dtype", {"param_dtype": HALF, **B}, (Q,), {}, 0.30337, 1.15741),
    ("precision", {"precision": "highest", **B}, (Q,), {}, 5.40574, 0.26917),
    ("dropout", {**DROPS, **B}, (Q,), {}, 5.40574, 6.51711),
    (
        "dropout of each head",
        {"broadcast_dropout": False, **DROPS, **B},
        (Q,),
        {},
        5.40574,
        -1.42818,
    ),
    (
        "deterministic",
        {"dropout_rate": 0.5, "deterministic": True, **B},
        (Q,),
        {},
        5.40574,
        0.26917,
    ),
    (
        "keep_rngs",
        {"keep_rngs": False, **DROPS, **B},
        (Q,),
        {"rngs": nnx.Rngs(5)},
        5.40574,
        -1.63358,
    ),
    ("kernel_init", {"kernel_init": NORMAL}, (Q,), {}, -1.76152, -3.98223),
    ("out_kernel_init", {"out_kernel_init": NORMAL}, (Q,), {}, -1.89456, 0.91111),
    ("out_bias_init", {"out_bias_init": NORMAL}, (Q,), {}, 0.69642, 0.9883),
    ("use_bias", {"use_bias": False, **B}, (Q,), {}, -2.58793, -1.00042),
    ("attention_fn", {"attention_fn": average, **B}, (Q,), {}, 5.40574, -0.0999),
    ("normalize_qk", {"normalize_qk": True, **B}, (Q,), {}, -1.08045, 3.42869),
    ("qkv_promote_dtype", {"qkv_promote_dtype": doubled, **B}, (Q,), {}, 5.40574, -11.87255),
    ("out_promote_dtype", {"out_promote_dtype": doubled, **B}, (Q,), {}, 5.40574, 0.13099),
    (
        "ln_promote_dtype",
        {"ln_promote_dtype": doubled, "normalize_qk": True, **B},
        (Q,),
        {},
        -1.08045,
        3.75985,
    ),
    ("qkv_dot_general", {"qkv_dot_general": tripled, **B}, (Q,), {}, 5.40574, -7.61619),
    ("out_dot_general", {"out_dot_general": tripled, **B}, (Q,), {}, 5.40574, -0.13818),
    (
        "qkv_dot_general_cls",
        {"qkv_dot_general_cls": lambda: tripled, **B},
        (Q,),
        {},
        5.40574,
        -7.61619,
    ),
    (
        "out_dot_general_cls",
        {"out_dot_general_cls": lambda: tripled, **B},
        (Q,),
        {},
        5.40574,
        -0.13818,
    ),
]


@pytest.mark.parametrize(
    ("options", "inputs", "call", "parameters", "output"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_numbers_of_flax(options, inputs, call, parameters, output):
    layer = build(**options)
    out = layer(*inputs, **call)
    values = [v[...] for _, v in sorted(nnx.to_flat_state(nnx.state(layer, nnx.Param)))]
    tolerance = 0.05 if HALF in (out.dtype, options.get("param_dtype")) else 5e-5
    got = digest(*values), digest(out)
    np.testing.assert_allclose(got, (parameters, output), rtol=tolerance, atol=tolerance)


def test_parameters_bit_for_bit():
    rngs = nnx.Rngs(0)
    init = {"kernel_init": NORMAL, "bias_init": NORMAL, "normalize_qk": True}
    layer = build(rngs, dropout_rate=0.1, num_kv_heads=1, **init)
    drawn = [layer.query, layer.key, layer.value]
    for number, part in enumerate(drawn):
        for offset, value in enumerate((part.kernel[...], part.bias[...])):
            want = NORMAL(drawn_key(2 * number + offset), (value.size,))
            assert (value.ravel() == want).all()
    assert (layer.out.kernel[...].ravel() == NORMAL(drawn_key(8), (16,))).all()
    assert (layer.rngs.key[...] == drawn_key(10)).all()
    assert rngs.default.count[...] == 11


def test_names_shapes_and_attributes():
    layer = build(qkv_features=8, out_features=6, num_kv_heads=1, in_kv_features=5)
    state = nnx.state(layer)
    shapes = {(a, b): state[a][b].shape for a in state for b in state[a]}
    assert shapes == {
        ("query", "kernel"): (4, 2, 4),
        ("query", "bias"): (2, 4),
        ("key", "kernel"): (5, 1, 4),
        ("key", "bias"): (1, 4),
        ("value", "kernel"): (5, 1, 4),
        ("value", "bias"): (1, 4),
        ("out", "kernel"): (2, 4, 6),
        ("out", "bias"): (6,),
    }
    absent = ("query_ln", "key_ln", "rngs", "cached_key", "cached_value", "cache_index")
    assert [getattr(layer, name) for name in absent] == [None] * 6
    assert (layer.head_dim, layer.qkv_features, layer.in_kv_features) == (4, 8, 5)
    assert build(normalize_qk=True).query_ln.bias is None


def test_metadata():
    names = ("kernel", "bias", "query_ln_scale", "key_ln_scale")
    given = {f"{name}_metadata": {"note": name} for name in names}
    layer = build(**given, normalize_qk=True)
    for part in (layer.query, layer.key, layer.value, layer.out):
        assert (part.kernel.note, part.bias.note) == ("kernel", "bias")
    assert (layer.query_ln.scale.note, layer.key_ln.scale.note) == names[2:]
    out = {"out_kernel_metadata": {"note": "K"}, "out_bias_metadata": {"note": "B"}}
    layer = build(**given, **out)
    assert (layer.out.kernel.note, layer.out.bias.note, layer.query.kernel.note) == (
        *"KB",
        "kernel",
    )


def test_precision_reaches_every_contraction():
    text = jax.jit(build(precision="highest")).lower(Q).as_text()
    assert text.count("stablehlo.dot_general") == 6
    assert text.count("precision = [HIGHEST, HIGHEST]") == 6


def test_shardings():
    layer = build(attention_fn=lambda query, *_, **__: query)
    seen = []
    layer.attention_fn = lambda *xs, **_: seen.extend(map(jax.typeof, xs)) or xs[0]
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((1, 1), ("a", "b"), axis_types=kinds)):
        out = layer(Q, qkv_sharding=jax.P("a", None, "b"), out_sharding=jax.P("b"))
        assert [str(x) for x in seen] == ["float32[2@a,3,2@b,2]"] * 3
        assert str(jax.typeof(out)) == "float32[2@b,3,4]"


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_number_of_batch_axes(batch):
    layer = build(**B)
    x = jnp.broadcast_to(Q[0], (*batch, 3, 4))
    want = layer(Q[:1], is_causal=True)[0]
    got = layer(x, is_causal=True)
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), atol=1e-6)


# Weights, implementations and attention functions of one's own.


def test_weights_are_sown_before_dropout():
    layer = build(**DROPS)
    want = build()(Q)
    layer(Q, sow_weights=True)
    layer(Q, sow_weights=True)
    first, second = layer.attention_weights.get_value()
    assert first.shape == (2, 2, 3, 3)
    np.testing.assert_allclose(first.sum(-1), 1, atol=1e-6)
    assert (first == second).all()
    out, sown = nnx.capture(build(), nnx.Intermediate)(Q, sow_weights=True)
    np.testing.assert_allclose(out, want, atol=1e-6)
    assert (sown["attention_weights"].get_value()[0] == first).all()


def test_implementation_is_handed_on():
    seen = []

    def attention(query, *_, **options):
        seen.append(options.get("implementation", "by itself"))
        return query

    for implementation in (None, "xla"):
        build(attention_fn=attention, implementation=implementation)(Q)
    assert seen == ["by itself", "xla"]
    with pytest.raises(ValueError, match="cuDNN's kernel was asked for"):
        build(implementation="cudnn")(Q)


def test_attention_functions_of_older_programs():
    def attention(query, key, value, *, mask, dropout_rng, dropout_rate, broadcast_dropout,
                  deterministic, dtype, precision, module):  # fmt: skip
        assert (mask, dropout_rng, dropout_rate, module) == (None, None, 0.0, None)
        assert deterministic and broadcast_dropout
        return nnx.dot_product_attention(query, key, value, dtype=dtype, precision=precision)

    layer = build(attention_fn=attention)
    np.testing.assert_allclose(layer(Q), build()(Q), atol=1e-6)
    with pytest.raises(TypeError, match="is_causal"):
        layer(Q, is_causal=True)
    partial = build(attention_fn=functools.partial(nnx.dot_product_attention, is_causal=True))
    assert partial(Q).shape == (2, 3, 4)


# Dropout and its keys.


@pytest.mark.parametrize("rngs", [nnx.Rngs(5), nnx.Rngs(dropout=5), nnx.Rngs(5).dropout])
def test_keys_of_the_call(rngs):
    layer = build(**DROPS)
    want = build(keep_rngs=False, **DROPS)(Q, rngs=key_of(5))
    np.testing.assert_allclose(layer(Q, rngs=rngs), want, atol=1e-6)
    assert layer.rngs.count[...] == 0


def key_of(seed):
    return jax.random.fold_in(jax.random.key(seed), 0)


def test_the_layers_own_keys_go_on():
    layer = build(**DROPS)
    first, second = layer(Q), layer(Q)
    assert not jnp.allclose(first, second)
    assert layer.rngs.count[...] == 2
    still = layer(Q, deterministic=True)
    np.testing.assert_allclose(still, build()(Q), atol=1e-6)
    assert layer.rngs.count[...] == 2


def test_train_and_eval():
    layer = build(dropout_rate=0.5)
    layer.eval()
    np.testing.assert_allclose(layer(Q), build()(Q), atol=1e-6)
    layer.train()
    assert not jnp.allclose(layer(Q), build()(Q))


# Bad input.


WHERE = "model.blocks[1] (MultiHeadAttention)"


@pytest.mark.parametrize(
    ("options", "inputs", "call", "error", "text"),
    [
        (
            {},
            (WIDE,),
            {},
            FeatureError,
            f"{WHERE} expected inputs_q of shape (..., length, 4), but got float32[2,5,6].\n"
            "Fix: build it with another in_features, or move the feature axis last.",
        ),
        ({}, (Q[0, 0],), {}, FeatureError, "expected inputs_q of shape (..., length, 4), but got"),
        (
            {},
            (Q, WIDE),
            {},
            FeatureError,
            "expected inputs_k of shape (..., length, 4), but got float32[2,5,6].\n"
            "Fix: build it with another in_kv_features",
        ),
        ({}, (Q, K, WIDE), {}, FeatureError, "expected inputs_v of shape (..., length, 4)"),
        (
            {},
            (Q, None, K),
            {},
            FeatureError,
            f"{WHERE} got inputs_v and no inputs_k: `inputs_k` cannot be None if `inputs_v` is not "
            "None.\nFix: pass both as inputs_k alone if they are the same",
        ),
        (
            {},
            (Q, K),
            {"mask": jnp.ones((2, 1, 3, 3))},
            FeatureError,
            f"{WHERE} expected a mask that broadcasts to (2, 2, 3, 5): (batch, heads, queries, "
            "keys), but got one of shape (2, 1, 3, 3).\nFix: give it these axes",
        ),
        (
            {"dropout_rate": 0.5},
            (Q,),
            {},
            ModeError,
            f"{WHERE} was not told whether to drop weights: dropout_rate is 0.5, and deterministic "
            "is None in the constructor and in the call.\nFix: call model.train() or model.eval()",
        ),
        (
            {"keep_rngs": False, **DROPS},
            (Q,),
            {},
            RngsError,
            f"{WHERE} drops weights, but has no keys: it was built with keep_rngs=False, and "
            "'rngs' must be provided to the call.\nFix: pass rngs=nnx.Rngs(0) to the call",
        ),
        (
            DROPS,
            (Q,),
            {"rngs": "key"},
            RngsError,
            f"{WHERE}: rngs must be an nnx.Rngs, an nnx.RngStream or a key, but got",
        ),
        (
            {"decode": True},
            (Q,),
            {},
            CacheError,
            f"{WHERE}: Autoregressive cache not initialized.\nFix: call init_cache(inputs.shape) "
            "first, with the longest length, or pass decode=False.",
        ),
    ],
)
def test_bad_input(options, inputs, call, error, text):
    model = InList(build(), build(**options))
    with pytest.raises(error) as raised:
        model(*inputs, **call)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"num_heads": 3},
            "MultiHeadAttention: Memory dimension (4) must be divisible by 'num_heads' heads (3).\n"
            "Fix: choose qkv_features as a multiple of num_heads.",
        ),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            "MultiHeadAttention: num_heads (4) must be divisible by num_kv_heads (3).\n"
            "Fix: choose num_kv_heads as a divisor of num_heads.",
        ),
        ({"num_heads": 0}, "'num_heads' heads (0)"),
        ({"num_kv_heads": 4}, "num_heads (2) must be divisible by num_kv_heads (4)"),
    ],
)
def test_numbers_of_heads_that_do_not_divide(options, text):
    with pytest.raises(LayerArgumentError) as raised:
        build(**options)
    assert text in str(raised.value)


def test_no_stream_for_dropout():
    with pytest.raises(AttributeError, match="No RngStream named 'dropout'"):
        build(nnx.Rngs(params=0), dropout_rate=0.5)
