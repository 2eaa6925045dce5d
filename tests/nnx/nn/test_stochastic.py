"""Dropout: where its keys come from, when it drops, what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import (
    FeatureError,
    LayerArgumentError,
    MissingStreamKeyError,
    ModeError,
    RngsError,
)
from tests.models import InList, refusal

X = jnp.ones((2, 4))
KEY = jax.random.key(0)
# Flax 0.12.8, rate 0.5: the fork of nnx.Rngs(0), the key 0 itself, and nnx.Rngs(0) at the call.
FORK = [[2, 0, 2, 0], [2, 2, 2, 0]]
OF_KEY = [[0, 0, 2, 2], [0, 2, 2, 0]]
AT_CALL = [[0, 2, 2, 2], [2, 0, 0, 2]]


# Keys.


@pytest.mark.parametrize(
    "rngs",
    [
        lambda: nnx.Rngs(0),
        lambda: nnx.Rngs(dropout=0),
        lambda: nnx.Rngs(params=7, dropout=0),
        lambda: nnx.Rngs(0).dropout,
        lambda: nnx.RngStream(0, tag="any"),
    ],
)
def test_the_layer_keeps_a_fork(rngs):
    given = rngs()
    layer = nnx.Dropout(0.5, rngs=given)
    assert isinstance(layer.rngs, nnx.RngStream)
    stream = given if isinstance(given, nnx.RngStream) else given["dropout"]
    assert (int(stream.count[...]), int(layer.rngs.count[...])) == (1, 0)
    assert layer.rngs.tag == stream.tag
    np.testing.assert_array_equal(layer(X), FORK)
    assert (int(stream.count[...]), int(layer.rngs.count[...])) == (1, 1)


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0)], ids=["new", "old"])
def test_a_key_becomes_a_stream(key):
    layer = nnx.Dropout(0.5, rng_collection="noise", rngs=key)
    assert layer.rngs.tag == "noise"
    np.testing.assert_array_equal(layer(X), AT_CALL)


@pytest.mark.parametrize(
    ("rngs", "want"),
    [
        (lambda: KEY, OF_KEY),
        (lambda: jax.random.PRNGKey(0), OF_KEY),
        (lambda: nnx.Rngs(0), AT_CALL),
        (lambda: nnx.Rngs(dropout=0), AT_CALL),
        (lambda: nnx.Rngs(0).dropout, AT_CALL),
        (lambda: nnx.RngKey(KEY), OF_KEY),
    ],
)
@pytest.mark.parametrize("own", [None, 5])
def test_keys_at_the_call_come_first(rngs, want, own):
    layer = nnx.Dropout(0.5, rngs=own if own is None else nnx.Rngs(own))
    np.testing.assert_array_equal(layer(X, rngs=rngs()), want)
    assert own is None or layer.rngs.count[...] == 0


def test_every_call_draws_anew():
    layer = nnx.Dropout(0.3, rngs=nnx.Rngs(5))
    dropped = [np.argwhere(np.asarray(layer(X)) == 0).tolist() for _ in range(2)]
    assert dropped == [[[1, 2]], [[0, 2], [1, 0]]]


@pytest.mark.parametrize(("rate", "want"), [(0.0, 1), (1.0, 0), (0, 1), (1, 0)])
def test_no_key_is_drawn_where_none_is_needed(rate, want):
    np.testing.assert_array_equal(nnx.Dropout(rate)(X), jnp.full_like(X, want))
    layer = nnx.Dropout(rate, rngs=nnx.Rngs(0))
    layer(X)
    assert layer.rngs.count[...] == 0


def test_the_state_is_the_stream():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert nnx.to_flat_state(nnx.state(layer)).paths == (("rngs", "count"), ("rngs", "key"))
    assert nnx.Dropout(0.5).rngs is None


def test_a_stack_of_layers_drops_differently():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def build(rngs):
        return nnx.Dropout(0.5, rngs=rngs)

    y = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(build(nnx.Rngs(0)), jnp.ones(64))
    assert (y[0] != y[1]).any()


# Modes.


def test_train_and_eval_switch():
    model = InList(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    model.eval()
    np.testing.assert_array_equal(model(X), X)
    model.train()
    np.testing.assert_array_equal(model(X), FORK)


@pytest.mark.parametrize("flag", [True, False, None])
def test_the_call_overrides_the_layer(flag):
    layer = nnx.Dropout(0.5, deterministic=flag, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X, deterministic=True), X)
    np.testing.assert_array_equal(layer(X, deterministic=False), FORK)


def test_a_view_shares_the_stream():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    still = nnx.view(layer, deterministic=True)
    np.testing.assert_array_equal(still(X), X)
    assert still.rngs.count is layer.rngs.count
    assert layer.deterministic is False
    still.set_view()
    assert still.deterministic is True
    assert "deterministic: bool | None = None" in nnx.view_info(layer)


# Numbers.


def test_the_mean_is_kept():
    y = nnx.Dropout(0.3, rngs=nnx.Rngs(0))(jnp.ones((1000, 100)))
    assert abs(float(y.mean()) - 1) < 0.01
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(0.7)}


def test_broadcast_dims_share_one_draw():
    y = nnx.Dropout(0.5, broadcast_dims=[0, -1], rngs=nnx.Rngs(0))(jnp.ones((3, 50, 4)))
    np.testing.assert_array_equal(y, jnp.broadcast_to(y[:1, :, :1], y.shape))
    assert len(np.unique(y)) == 2


def test_a_rate_may_be_an_array():
    np.testing.assert_array_equal(nnx.Dropout(jnp.float32(0.5), rngs=nnx.Rngs(0))(X), FORK)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_the_dtype_is_kept(dtype):
    assert nnx.Dropout(0.3, rngs=nnx.Rngs(0))(X.astype(dtype)).dtype == dtype


# Bad input.


def test_training_without_keys():
    model = InList(nnx.Dropout(0.5))
    text = refusal(RngsError, lambda: model(X))
    assert text == (
        "model.blocks[0] (Dropout) drops entries (`deterministic` is False), but has no keys: "
        "no rngs argument was provided to Dropout in the constructor or in the call.\n"
        "Fix: build it with rngs=nnx.Rngs(0), pass rngs= to the call, or call model.eval()."
    )
    with pytest.raises(ValueError, match="no keys"):
        model(X)


def test_a_mode_that_nobody_chose():
    model = InList(nnx.Dropout(0.5, deterministic=None))
    assert refusal(ModeError, lambda: model(X)) == (
        "model.blocks[0] (Dropout) was not told whether to drop entries: deterministic is "
        "None in the constructor and in the call.\nFix: call model.train() or model.eval(), "
        "nnx.view(model, deterministic=True), or pass deterministic= to either."
    )


@pytest.mark.parametrize(
    ("rngs", "got"),
    [
        (0, "the Python int 0"),
        ("dropout", "the Python str 'dropout'"),
        (jnp.ones(2), "float32[2]"),
    ],
)
def test_what_is_no_source_of_keys(rngs, got):
    text = f"rngs must be an nnx.Rngs, an nnx.RngStream or a key, but got {got}.\nFix: pass nnx."
    model = InList(nnx.Dropout(0.5))
    assert text in refusal(RngsError, lambda: nnx.Dropout(0.5, rngs=rngs))
    call = refusal(TypeError, lambda: model(X, rngs=rngs))
    assert call.startswith("model.blocks[0] (Dropout): " + text)


def test_a_stream_that_is_not_there():
    rngs = nnx.Rngs(params=0)
    for call in (lambda: nnx.Dropout(0.5, rngs=rngs), lambda: nnx.Dropout(0.5)(X, rngs=rngs)):
        assert "No RngStream named 'dropout'" in refusal(MissingStreamKeyError, call)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_that_is_no_probability(rate):
    assert refusal(LayerArgumentError, lambda: nnx.Dropout(rate)) == (
        f"Dropout sets entries to zero with a probability, but got rate={rate}.\n"
        "Fix: choose a rate between 0 and 1."
    )


def test_inputs_that_do_not_fit():
    model = InList(nnx.Dropout(0.5, broadcast_dims=(2,), rngs=nnx.Rngs(0)))
    assert refusal(FeatureError, lambda: model(jnp.ones((2, 4), int))) == (
        "model.blocks[0] (Dropout) expected floating-point inputs, but got int32[2,4].\n"
        "Fix: convert them first, x.astype(float)."
    )
    assert refusal(FeatureError, lambda: model(X)) == (
        "model.blocks[0] (Dropout) draws once along axis 2, which float32[2,4] does not have."
        "\nFix: choose other broadcast_dims."
    )
