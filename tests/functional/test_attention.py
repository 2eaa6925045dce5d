"""Attention as a function of arrays: the maths, and which implementation runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import FeatureError, RngsError
from linnet.functional import attention
from linnet.functional.attention import (
    attention_weights,
    dot_product_attention,
    drop_weights,
    why_not_fused,
)
from tests.models import normal

HALF, HOPPER = jnp.bfloat16, (9, 0)


def operands(batch=(2,), queries=3, keys=5, heads=4, key_heads=4, depth=8, dtype=jnp.float32):
    shapes = [(queries, heads, depth), (keys, key_heads, depth), (keys, key_heads, depth)]
    return [normal(*batch, *shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def by_hand(query, key, value, bias=0.0, mask=True, is_causal=False):
    """Attention in NumPy, in float64, with every key and value head repeated."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = query.shape[-2] // key.shape[-2]
    key, value = (np.repeat(x, groups, axis=-2) for x in (key, value))
    scores = np.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(query.shape[-1])
    scores = scores + np.asarray(bias, np.float64)
    allowed = np.broadcast_to(np.asarray(mask, bool), scores.shape)
    if is_causal:
        allowed = allowed & np.tri(*scores.shape[-2:], dtype=bool)
    scores = np.where(allowed, scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("...hqk,...khd->...qhd", weights, value)


FORMS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal with fewer keys": ({"keys": 2}, {"is_causal": True}),
    "two groups": ({"key_heads": 2}, {}),
    "one head for all": ({"key_heads": 1}, {"is_causal": True}),
    "mask": ({}, {"mask": normal(2, 4, 3, 5) > 0}),
    "mask for groups": ({"key_heads": 2}, {"mask": normal(2, 4, 3, 5) > 0}),
    "mask of numbers": ({}, {"mask": (normal(1, 1, 3, 5) > 0).astype(int)}),
    "mask of two axes": ({}, {"mask": normal(3, 5) > 0}),
    "mask and causal": ({}, {"mask": normal(2, 1, 1, 5) > 0, "is_causal": True}),
    "nothing to look at": ({}, {"mask": jnp.zeros((1, 1, 3, 5), bool)}),
    "bias": ({}, {"bias": normal(1, 4, 3, 5)}),
    "bias and mask": ({}, {"bias": normal(3, 5), "mask": normal(2, 1, 3, 5) > 0}),
    "no batch": ({"batch": ()}, {"is_causal": True}),
    "two batch axes": ({"batch": (2, 3)}, {"mask": normal(3, 1, 3, 5) > 0}),
}


@pytest.mark.parametrize(("shapes", "options"), FORMS.values(), ids=FORMS)
def test_it_is_what_numpy_computes(shapes, options):
    arrays = operands(**shapes)
    arrays[2] = arrays[2][..., :6]
    np.testing.assert_allclose(
        dot_product_attention(*arrays, **options), by_hand(*arrays, **options), atol=2e-6
    )


def test_half_precision_computes_its_softmax_in_float32():
    arrays = operands(keys=301, dtype=HALF)
    got = dot_product_attention(*arrays)
    assert got.dtype == HALF
    np.testing.assert_allclose(got.astype(jnp.float32), by_hand(*arrays), atol=4e-3)


def test_weights_sum_to_one_and_keep_the_dtype():
    query, key, _ = operands(key_heads=2, dtype=HALF)
    weights = attention_weights(query, key)
    assert (weights.shape, weights.dtype) == ((2, 4, 3, 5), HALF)
    np.testing.assert_allclose(weights.astype(jnp.float32).sum(-1), 1, atol=0.01)


def test_masked_keys_get_no_gradient():
    query, key, value = operands()
    mask = jnp.arange(5) < 3

    def loss(key, value):
        return (dot_product_attention(query, key, value, mask=mask) ** 2).sum()

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(key, value):
        assert (gradient[:, 3:] == 0).all()
        assert (gradient[:, :3] != 0).all()


@pytest.mark.parametrize(("broadcast", "drawn"), [(True, (1, 1, 3, 5)), (False, (2, 4, 3, 5))])
def test_dropout_of_weights(broadcast, drawn):
    query, key, value = operands()
    dropout_key = jax.random.key(7)
    keep = np.asarray(jax.random.bernoulli(dropout_key, 0.75, drawn))
    weights = np.asarray(attention_weights(query, key)) * keep / 0.75
    want = np.einsum("...hqk,...khd->...qhd", weights, value)
    options = {"dropout_rate": 0.25, "broadcast_dropout": broadcast}
    got = dot_product_attention(query, key, value, dropout_key=dropout_key, **options)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_all_weights_can_be_dropped():
    weights = drop_weights(jnp.ones((1, 2, 2)), jax.random.key(0), rate=1.0)
    assert (weights == 0).all()


def equations(jaxpr):
    """The operations of a traced function, those inside calls in place of the calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("jit", "pjit"):
            yield from equations(equation.params["jaxpr"].jaxpr)
        else:
            yield equation


def test_precision_reaches_both_contractions():
    arrays = operands()
    traced = jax.make_jaxpr(lambda *xs: dot_product_attention(*xs, precision="highest"))(*arrays)
    dots = [e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general"]
    assert [e.params["precision"][0] for e in dots] == [jax.lax.Precision.HIGHEST] * 2


def test_it_traces_to_no_more_operations_than_flax():
    assert len(list(equations(jax.make_jaxpr(dot_product_attention)(*operands()).jaxpr))) <= 18


# Which implementation runs.


def reason(capability=HOPPER, drops=False, **shapes):
    arrays = operands(**{"queries": 128, "keys": 128, "depth": 64, "dtype": HALF, **shapes})
    return why_not_fused(*arrays, drops=drops, capability=capability)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": jnp.float16},
        {"key_heads": 1},
        {"batch": ()},
        {"batch": (2, 3)},
        {"queries": 2},
        {"keys": 64, "queries": 64},
        {"depth": 256},
        {"depth": 128, "capability": (8, 0)},
    ],
    ids=str,
)
def test_the_fused_kernel_takes(options):
    assert reason(**options) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capability": None}, "there is no CUDA GPU of compute capability 8.0 or later"),
        ({"capability": (7, 5)}, "there is no CUDA GPU of compute capability 8.0 or later"),
        ({"dtype": jnp.float32}, "it computes in bfloat16 or float16, and got float32"),
        ({"drops": True}, "it cannot drop weights"),
        ({"depth": 12}, "it wants one depth for all, a multiple of 8 up to 256, and got 12 and 12"),
        ({"depth": 264}, "a multiple of 8 up to 256, and got 264 and 264"),
        ({"depth": 136, "capability": (8, 9)}, "a multiple of 8 up to 128, and got 136 and 136"),
        ({"queries": 127}, "it wants an even number of queries and of keys"),
        ({"keys": 127}, "one of them at least 64, and got 128 and 127"),
        ({"queries": 2, "keys": 62}, "one of them at least 64, and got 2 and 62"),
        ({"batch": (0,)}, "it wants an even number of queries and of keys"),
    ],
    ids=str,
)
def test_the_fused_kernel_does_not_take(options, text):
    assert text in reason(**options)


def test_mixed_dtypes_and_other_value_depths_are_not_fused():
    query, key, value = operands(queries=64, keys=64, dtype=HALF)
    mixed = why_not_fused(query, key, value.astype(jnp.float16), drops=False, capability=HOPPER)
    assert mixed.endswith("got bfloat16, float16")
    narrow = why_not_fused(query, key, value[..., :4], drops=False, capability=HOPPER)
    assert narrow.endswith("got 8 and 4")


@pytest.fixture
def hopper(monkeypatch):
    """A GPU whose kernel notes what it was given, and knows no row that may look nowhere."""
    calls = []

    def kernel(query, key, value, bias, mask, *, is_causal, implementation, key_value_seq_lengths):
        assert implementation == "cudnn"
        optional = (bias, mask, key_value_seq_lengths)
        shapes = [None if x is None else x.shape for x in optional]
        calls.append((query.shape, *(shapes if shapes[2] else shapes[:2])))
        out = dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=is_causal,
            implementation="xla",
            key_lengths=key_value_seq_lengths,
        )
        allowed = attention._allowed(mask, is_causal, query.shape[1], key.shape[1])
        if mask is None:
            return out
        looks = allowed.any(-1, keepdims=True).swapaxes(1, 2)
        return out * jnp.where(looks, 1.0, jnp.inf).astype(out.dtype)

    def on_the_gpu(*arrays, cuda, default):
        return cuda(*arrays)

    monkeypatch.setattr(attention, "gpu_capability", lambda: HOPPER)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_the_gpu)
    monkeypatch.setattr(
        attention, "_fused_where_it_runs", attention._fused_where_it_runs.__wrapped__
    )
    return calls


LONG = {"queries": 64, "keys": 64, "dtype": HALF}
FUSED = {
    "plain": ({}, {}, ((2, 64, 4, 8), None, None)),
    "causal": ({"key_heads": 2}, {"is_causal": True}, ((2, 64, 4, 8), None, None)),
    "mask": ({}, {"mask": normal(64) > 0}, ((2, 64, 4, 8), None, (1, 1, 64, 64))),
    "mask of heads": (
        {"key_heads": 2},
        {"mask": normal(2, 4, 64, 64) > 0, "is_causal": True},
        ((2, 64, 4, 8), None, (2, 4, 64, 64)),
    ),
    "blind rows": (
        {},
        {"mask": normal(1, 1, 64, 1) > 0},
        ((2, 64, 4, 8), None, (1, 1, 64, 64)),
    ),
    "bias": ({}, {"bias": normal(4, 1, 64)}, ((2, 64, 4, 8), (1, 4, 64, 64), None)),
    "no batch": (
        {"batch": ()},
        {"mask": normal(64, 64) > 0},
        ((1, 64, 4, 8), None, (1, 1, 64, 64)),
    ),
    "two batch axes": (
        {"batch": (2, 3)},
        {"mask": normal(3, 1, 64, 64) > 0},
        ((6, 64, 4, 8), None, (6, 1, 64, 64)),
    ),
    "lengths, one query": (
        {"queries": 1, "keys": 65},
        {"key_lengths": np.array([3, 65])},
        ((2, 1, 4, 8), None, None, (2,)),
    ),
    "one length for all": (
        {"batch": (2, 3)},
        {"key_lengths": 5},
        ((6, 64, 4, 8), None, None, (6,)),
    ),
    "lengths and a mask": (
        {},
        {"key_lengths": np.array([3, 64]), "mask": normal(64) > 0},
        ((2, 64, 4, 8), None, (2, 1, 64, 64)),
    ),
}


@pytest.mark.parametrize(("shapes", "options", "given"), FUSED.values(), ids=FUSED)
def test_the_fused_kernel_runs_by_itself_with_the_same_numbers(hopper, shapes, options, given):
    arrays = operands(**{**LONG, **shapes})

    def loss(arrays, implementation):
        out = dot_product_attention(*arrays, **options, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum(), out

    @functools.partial(jax.jit, static_argnums=1)
    def run(arrays, implementation):
        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(arrays, implementation)
        return [x.astype(jnp.float32) for x in (out, *gradients)]

    want = run(arrays, "xla")
    assert not hopper
    for implementation in (None, "cudnn"):
        got = run(arrays, implementation)
        assert hopper.pop() == given
        for a, b, tolerance in zip(got, want, (0.02, 0.1, 0.1, 0.1), strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance)


def test_lengths_are_a_mask_that_leaves_out_the_keys_behind():
    query, key, value = operands(batch=(2,), queries=3, keys=5)
    mask = np.arange(5) < np.array([2, 5])[:, None, None, None]
    want = dot_product_attention(query, key, value, mask=mask)
    got = dot_product_attention(query, key, value, key_lengths=jnp.array([2, 5]))
    np.testing.assert_array_equal(got, want)
    both = dot_product_attention(query, key, value, mask=mask, key_lengths=4)
    also = dot_product_attention(query, key, value, mask=mask & (np.arange(5) < 4))
    np.testing.assert_array_equal(both, also)


def test_an_unsupported_form_falls_back(hopper):
    query, key, value = operands(**LONG)
    arrays = [x.astype(jnp.float32) for x in (query, key, value)]
    np.testing.assert_allclose(dot_product_attention(*arrays), by_hand(*arrays), atol=2e-6)
    dot_product_attention(query, key, value, dropout_key=jax.random.key(0), dropout_rate=0.5)
    assert not hopper


def test_a_function_compiled_for_another_device_takes_the_plain_maths(monkeypatch):
    arrays = operands(**LONG)
    want = dot_product_attention(*arrays)
    monkeypatch.setattr(attention, "gpu_capability", lambda: HOPPER)
    monkeypatch.setattr(attention, "_cudnn", lambda query, *_, **__: jnp.zeros_like(query))
    np.testing.assert_array_equal(jax.jit(dot_product_attention)(*arrays), want)
    np.testing.assert_array_equal(dot_product_attention(*arrays), want)


@pytest.mark.parametrize(
    ("backend", "device", "capability"),
    [
        ("cpu", object(), None),
        ("gpu", type("Cuda", (), {"compute_capability": "9.0"}), HOPPER),
        ("gpu", type("Rocm", (), {"compute_capability": "gfx90a"}), None),
        ("gpu", object(), None),
    ],
)
def test_capability_of_the_device(monkeypatch, backend, device, capability):
    attention.gpu_capability.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert attention.gpu_capability() == capability
    attention.gpu_capability.cache_clear()


# Bad input.

Q, K, V = operands()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ((Q, K[0], V), "q, k, v must have same rank, at least 3: (..., length, heads, depth)"),
        ((Q[0, 0], K[0, 0], V[0, 0]), "at least 3: (..., length, heads, depth), but got (4, 8),"),
        ((Q, K[:1], V[:1]), "q, k, v batch dims must match, but got (2, 3, 4, 8), (1, 5, 4, 8)"),
        ((Q, K[:, :3], V), "k, v lengths must match, but got"),
        ((Q, K[:, :, :3], V[:, :, :3]), "the number of query heads must be a multiple of it"),
        ((Q, K[:, :, :2], V), "k and v must have the same number of heads"),
        ((Q[..., :4], K, V), "q and k must have the same depth, but got (2, 3, 4, 4)"),
    ],
)
def test_shapes_that_do_not_fit(arrays, text):
    with pytest.raises(FeatureError) as error:
        dot_product_attention(*arrays)
    assert isinstance(error.value, AssertionError)  # as from the attention of Linen in Flax
    assert text in str(error.value)
    assert str(error.value).endswith("Fix: give all three the axes (..., length, heads, depth).")


@pytest.mark.parametrize("what", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (3, 1, 3, 5), (1, 2, 4, 3, 5)])
def test_masks_and_biases_that_do_not_broadcast(what, shape):
    with pytest.raises(FeatureError) as error:
        dot_product_attention(Q, K, V, **{what: jnp.ones(shape)})
    assert str(error.value) == (
        f"dot_product_attention expected a {what} that broadcasts to (2, 4, 3, 5): (batch, heads, "
        f"queries, keys), but got one of shape {shape}.\nFix: give it these axes, of size 1 where "
        f"all are alike; {what}[:, None] adds one for the heads."
    )


def test_dropout_without_a_key():
    with pytest.raises(RngsError, match=r"is to drop weights \(dropout_rate=0.5\), but has no key"):
        dot_product_attention(Q, K, V, dropout_rate=0.5)


def test_an_implementation_that_cannot_be_had():
    with pytest.raises(ValueError, match="cuDNN's kernel was asked for, but there is no CUDA GPU"):
        dot_product_attention(Q, K, V, implementation="cudnn")
    with pytest.raises(
        ValueError, match="has the implementations 'xla' and 'cudnn', but got 'tpu'"
    ):
        dot_product_attention(Q, K, V, implementation="tpu")
