"""Options of layers that the catalogue leaves out: replacements, boxes, policies, decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import linen as nn, nnx

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 3))
SEQUENCE = jax.random.normal(KEY, (2, 5, 4))


def test_promote_dtype_takes_arrays_and_returns_them():
    x, none, y = nn.dtypes.promote_dtype(jnp.ones(1, jnp.int32), None, jnp.ones(1, jnp.float16))
    assert (x.dtype, none, y.dtype) == (jnp.float16, None, jnp.float16)
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        nn.dtypes.promote_dtype(x, dtype=jnp.int32)


def test_a_replaced_promotion_gets_inputs_and_parameters():
    seen = []

    def promote(*args, dtype=None, inexact=True):
        seen.append((len(args), dtype))
        return [None if x is None else x.astype(jnp.bfloat16) for x in args]

    y, _ = nn.Dense(2, promote_dtype=promote).init_with_output(KEY, X)
    assert (y.dtype, seen) == (jnp.bfloat16, [(3, None)])


@pytest.mark.parametrize("layer", [nn.Dense, nn.DenseGeneral], ids=lambda layer: layer.__name__)
def test_boxed_parameters_keep_their_box(layer):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    variables = layer(2, kernel_init=init).init(KEY, X)
    kernel = variables["params"]["kernel"]
    assert (kernel.names, kernel.value.shape) == (("in", "out"), (3, 2))
    plain = layer(2).init(KEY, X)
    np.testing.assert_array_equal(kernel.value, plain["params"]["kernel"])
    unboxed = nn.unbox(variables)
    np.testing.assert_array_equal(layer(2).apply(variables, X), layer(2).apply(unboxed, X))


def test_contractions_can_be_replaced():
    seen = []

    def counted(*args, **kwargs):
        seen.append(args[2])
        return jax.lax.dot_general(*args, **kwargs)

    nn.Dense(2, dot_general=counted).init(KEY, X)
    nn.Dense(2, dot_general_cls=lambda: counted).init(KEY, X)
    nn.MultiHeadAttention(2, qkv_dot_general=counted, out_dot_general=counted).init(KEY, SEQUENCE)
    assert len(seen) == 6


def test_einsums_of_attention_can_be_replaced():
    q = jax.random.normal(KEY, (2, 5, 2, 4))
    seen = []

    def counted(*args, **kwargs):
        seen.append(args[0])
        return jnp.einsum(*args, **kwargs)

    want = nn.dot_product_attention(q, q, q)
    options = {"qk_attn_weights_einsum": counted, "attn_weights_value_einsum": counted}
    np.testing.assert_allclose(nn.dot_product_attention(q, q, q, **options), want, rtol=1e-5)
    assert len(seen) == 2
    by_contraction = nn.dot_product_attention(
        q, q, q, einsum_dot_general=functools.partial(jax.lax.dot_general)
    )
    np.testing.assert_allclose(by_contraction, want, rtol=1e-5)
    layer = nn.MultiHeadAttention(2, qk_attn_weights_einsum_cls=lambda: counted)
    layer.init(KEY, SEQUENCE)
    assert len(seen) == 3


def test_the_precision_policy_counts():
    variables = nn.Dense(2).init(KEY, X)
    with nnx.precision("compute=bfloat16"):
        assert nn.Dense(2).apply(variables, X).dtype == jnp.bfloat16
        assert nn.Dense(2, dtype=jnp.float32).apply(variables, X).dtype == jnp.float32


def test_decoding_step_by_step_gives_what_a_causal_mask_gives():
    layer = nn.MultiHeadAttention(2, decode=True)
    variables = layer.init(KEY, SEQUENCE)
    mask = nn.make_causal_mask(SEQUENCE[..., 0])
    plain = nn.MultiHeadAttention(2)
    want = plain.apply({"params": variables["params"]}, SEQUENCE, mask=mask)
    steps = []
    for i in range(5):
        y, cache = layer.apply(variables, SEQUENCE[:, i : i + 1], mutable="cache")
        variables = {**variables, **cache}
        steps.append(y)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), want, atol=1e-5)
    assert int(variables["cache"]["cache_index"]) == 5


def test_statistics_over_a_mapped_axis():
    layer = nn.BatchNorm(use_running_average=False, axis_name="batch", momentum=0.0)
    x = jax.random.normal(KEY, (2, 4, 3))
    variables = layer.init(KEY, x[0])

    def apply(x):
        return layer.apply(variables, x, mutable="batch_stats")

    y, new = jax.vmap(apply, axis_name="batch")(x)
    whole = nn.BatchNorm(use_running_average=False, momentum=0.0)
    want, stats = whole.apply(variables, x.reshape(8, 3), mutable="batch_stats")
    np.testing.assert_allclose(y.reshape(8, 3), want, atol=1e-5)
    np.testing.assert_allclose(
        new["batch_stats"]["mean"][0], stats["batch_stats"]["mean"], atol=1e-6
    )


def test_first_carries():
    cell = nn.LSTMCell(5, carry_init=nn.initializers.normal())
    c, h = cell.initialize_carry(KEY, (4, 3))
    np.testing.assert_allclose([c.sum(), h.sum()], [-0.010555094, -0.119779944], rtol=1e-5)
    assert jax.tree.map(jnp.shape, nn.ConvLSTMCell(2, (3,)).initialize_carry(KEY, (1, 4, 3))) == (
        (1, 4, 2),
        (1, 4, 2),
    )
    assert nn.ConvLSTMCell(2, (3, 3)).num_feature_axes == 3


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(),
        nn.RMSNorm(),
        nn.GroupNorm(num_groups=2),
        nn.BatchNorm(use_running_average=False),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_masks_of_numbers_count_as_boolean_ones(layer, dtype):
    x, key = jnp.arange(24.0).reshape(4, 6) ** 1.5, jax.random.key(0)
    mask = x % 5 > 1
    want, _ = layer.init_with_output(key, x, mask=mask)
    got, _ = layer.init_with_output(key, x, mask=mask.astype(dtype) * 2)
    np.testing.assert_array_equal(got, want)
