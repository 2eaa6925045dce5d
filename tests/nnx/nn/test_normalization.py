"""Layers that normalise by the statistics of their input."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError, ModeError
from tests.compare import close
from tests.models import InList, refusal

X = 2 * jax.random.normal(jax.random.key(0), (2, 3, 4)) + 1
NORMAL = jax.nn.initializers.normal(1.0)
CLASSES = [nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm]
every = pytest.mark.parametrize("cls", CLASSES)


def build(cls, features=4, **options):
    if cls is nnx.GroupNorm:
        options = {"num_groups": 2, **options}
    return cls(features, rngs=nnx.Rngs(0), **options)


# Parameters.


@pytest.mark.parametrize(
    ("cls", "kinds"),
    [
        (
            nnx.BatchNorm,
            {"bias": "Param", "mean": "BatchStat", "scale": "Param", "var": "BatchStat"},
        ),
        (nnx.LayerNorm, {"bias": "Param", "scale": "Param"}),
        (nnx.RMSNorm, {"scale": "Param"}),
        (nnx.GroupNorm, {"bias": "Param", "scale": "Param"}),
        (nnx.InstanceNorm, {"bias": "Param", "scale": "Param"}),
    ],
)
def test_names_kinds_and_shapes(cls, kinds):
    flat = nnx.to_flat_state(nnx.state(build(cls)))
    assert {path[0]: type(leaf).__name__ for path, leaf in flat} == kinds
    assert {leaf.shape for _, leaf in flat} == {(4,)}


@every
def test_absent_parameters_are_none_and_draw_no_key(cls):
    rngs = nnx.Rngs(0)
    takes_bias = "use_bias" in inspect.signature(cls).parameters
    options = {"num_groups": 2} if cls is nnx.GroupNorm else {}
    if takes_bias:
        options["use_bias"] = False
    layer = cls(4, use_scale=False, rngs=rngs, **options)
    assert layer.scale is None
    assert getattr(layer, "bias", None) is None
    assert rngs.default.count[...] == 0
    assert layer(X).shape == X.shape


@every
def test_metadata_reaches_the_parameters(cls):
    options = {"scale_metadata": {"out_sharding": None, "note": "s"}}
    if cls is not nnx.RMSNorm:
        options["bias_metadata"] = {"note": "b"}
    layer = build(cls, **options)
    assert layer.scale.note == "s"
    assert cls is nnx.RMSNorm or layer.bias.note == "b"


# Numbers.


@every
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_statistics_are_taken_in_float32(cls, dtype):
    large = (X * 10_000).astype(dtype)  # the square of which float16 cannot hold
    got = build(cls, param_dtype=dtype, dtype=dtype)(large)
    assert got.dtype == dtype
    close(np.float32(got), build(cls)(large.astype(jnp.float32)), tolerance=0.02)


@every
def test_dtypes_are_never_mixed_in_silence(cls, strict_dtypes):
    assert build(cls, dtype=jnp.bfloat16)(X).dtype == jnp.bfloat16
    y = build(cls, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16


@every
def test_integers_and_numpy_arrays_are_taken(cls):
    numbers = np.arange(24).reshape(2, 3, 4)
    close(build(cls)(numbers), build(cls)(jnp.asarray(numbers, jnp.float32)))


@pytest.mark.parametrize("cls", [nnx.LayerNorm, nnx.RMSNorm])
def test_complex_numbers(cls):
    y = build(cls)(X + 1j * X**2)
    close(jnp.mean(jnp.abs(y) ** 2, -1), jnp.ones((2, 3)), tolerance=1e-4)


@every
def test_a_mask_hides_values_from_the_statistics(cls):
    mask = jnp.array([True, False, True])[None, :, None]  # broadcasts
    visible = X[:, jnp.array([0, 2])]
    hidden = X.at[:, 1].set(1e3)
    if cls in (nnx.LayerNorm, nnx.RMSNorm):
        mask, hidden = jnp.array([True, True, False, True]), X.at[..., 2].set(1e3)
        wanted = build(cls, 3)(X[..., jnp.array([0, 1, 3])])[..., :2]
        close(build(cls)(hidden, mask=mask)[..., :2], wanted)
    else:
        close(build(cls)(hidden, mask=mask)[:, jnp.array([0, 2])], build(cls)(visible))


def test_groups_stay_together_whichever_axes_are_reduced():
    y = build(nnx.GroupNorm, reduction_axes=[-1], epsilon=0.0)(X)
    pairs = y.reshape(2, 3, 2, 2)
    close(pairs.sum(-1), jnp.zeros((2, 3, 2)))
    close(jnp.abs(pairs), jnp.ones((2, 3, 2, 2)), tolerance=1e-4)


@pytest.mark.parametrize(
    ("cls", "axes"),
    [
        (nnx.LayerNorm, {"reduction_axes": (0, -1)}),
        (nnx.RMSNorm, {"reduction_axes": (0, -1)}),
        (nnx.BatchNorm, {}),
    ],
)
def test_a_mapped_axis_joins_the_statistics(cls, axes):
    layer, whole = build(cls, axis_name="batch"), build(cls, **axes)
    states = nnx.StateAxes({...: None})
    mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(states, 0), axis_name="batch")
    close(mapped(layer, X), whole(X))
    assert jax.tree.all(jax.tree.map(jnp.allclose, nnx.state(layer), nnx.state(whole)))


@every
def test_groups_of_devices_reach_the_collective(cls):
    groups = [[0, 1], [2, 3]]
    layer = build(cls, axis_name="batch", axis_index_groups=groups)
    graphdef, state = nnx.split(layer)
    jaxpr = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(X), axis_env=[("batch", 4)])(
        state
    )
    assert "axis_index_groups=((0, 1), (2, 3))" in str(jaxpr)
    assert str(jaxpr).count("psum") == 1


# BatchNorm's two ways.


def test_running_statistics_move_by_the_momentum():
    layer = build(nnx.BatchNorm, momentum=0.75)
    layer(X)
    rows = X.reshape(-1, 4)
    close(layer.mean[...], 0.25 * rows.mean(0))
    close(layer.var[...], 0.75 + 0.25 * rows.var(0))
    layer(X)
    close(layer.mean[...], 0.4375 * rows.mean(0))


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    layer = build(nnx.BatchNorm, use_running_average=True)
    layer.mean[...], layer.var[...] = jnp.full((4,), 2.0), jnp.full((4,), 9.0)
    close(layer(X), (X - 2) / 3, tolerance=1e-5)
    assert (layer.mean[...] == 2).all() and (layer.var[...] == 9).all()


@pytest.mark.parametrize(("flag", "moves"), [(True, False), (False, True)])
def test_the_call_overrides_the_layer(flag, moves):
    layer = build(nnx.BatchNorm, use_running_average=not flag)
    layer(X, flag)
    assert bool((layer.mean[...] != 0).any()) is moves


def test_train_and_eval_switch():
    model = InList(build(nnx.BatchNorm))
    model.eval()
    close(model(X), X, tolerance=1e-4)
    assert (model.blocks[0].mean[...] == 0).all()
    model.train()
    model(X)
    assert (model.blocks[0].mean[...] != 0).all()


def test_a_view_shares_the_statistics():
    layer = build(nnx.BatchNorm)
    view = nnx.view(layer, use_running_average=True)
    assert (view.use_running_average, layer.use_running_average) == (True, False)
    assert view.mean is layer.mean
    layer(X)
    close(view(X), layer(X, use_running_average=True))
    assert "use_running_average: bool | None = None" in nnx.view_info(layer)


def test_a_view_without_flags_changes_nothing():
    layer = build(nnx.BatchNorm, use_running_average=True)
    layer.set_view()
    assert layer.use_running_average is True


def test_statistics_keep_their_dtype():
    layer = build(nnx.BatchNorm)
    layer.mean.value, layer.var.value = jnp.zeros(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    layer(X)
    assert layer.mean.dtype == layer.var.dtype == jnp.bfloat16


def test_momentum_may_be_an_array():
    layer, other = (
        build(nnx.BatchNorm, momentum=jnp.float32(0.5)),
        build(nnx.BatchNorm, momentum=0.5),
    )
    layer(X), other(X)
    close(layer.mean[...], other.mean[...])


def test_one_trace_for_each_way():
    traces = []

    @nnx.jit
    def forward(layer, x):
        traces.append(layer.use_running_average)
        return layer(x)

    layer = build(nnx.BatchNorm)
    for switch in (layer.train, layer.eval, layer.train):
        switch()
        forward(layer, X), forward(layer, X)
    assert traces == [False, True]


# Bad input.


@every
def test_wrong_features(cls):
    model = InList(build(cls, 4))
    text = refusal(FeatureError, lambda: model(X[..., :3]))
    assert text == (
        f"model.blocks[0] ({cls.__name__}) expected 4 features on axis -1, but got 3 in "
        "float32[2,3,3].\nFix: build it with num_features=3, or for another feature axis."
    )


@every
def test_missing_axes(cls):
    model = InList(build(cls))
    assert refusal(FeatureError, lambda: model(jnp.float32(1))) == (
        f"model.blocks[0] ({cls.__name__}) works on axis -1, which float32[] does not have.\n"
        "Fix: give the input more axes, or build the layer for other axes."
    )


def test_missing_reduction_axis():
    model = InList(build(nnx.LayerNorm, reduction_axes=(0, 3)))
    assert "works on axis 3, which float32[2,3,4] does not have" in refusal(
        FeatureError, lambda: model(X)
    )


@every
@pytest.mark.parametrize(
    ("mask", "text", "fix"),
    [
        (jnp.ones((2, 3, 4)), "float32[2,3,4]", "make it a boolean array: mask.astype(bool)"),
        (jnp.ones(3, bool), "bool[3]", "give it the shape of the input, or 1 for axes it is the"),
        (jnp.ones((1, 2, 3, 4), bool), "bool[1,2,3,4]", "give it the shape of the input"),
    ],
)
def test_wrong_masks(cls, mask, text, fix):
    model = InList(build(cls))
    got = refusal(FeatureError, lambda: model(X, mask=mask))
    assert got.startswith(
        f"model.blocks[0] ({cls.__name__}) expected a boolean mask that broadcasts to "
        f"float32[2,3,4], but got {text}.\nFix: {fix}"
    )


def test_batch_norm_that_was_told_nothing():
    model = InList(build(nnx.BatchNorm, use_running_average=None))
    text = refusal(ModeError, lambda: model(X))
    assert text.startswith(
        "model.blocks[0] (BatchNorm) was not told whether to use its running average"
    )
    assert "Fix: call model.train() or model.eval()" in text
    assert model(X, use_running_average=True).shape == X.shape


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_groups": 2, "group_size": 2}, "got num_groups=2 and group_size=2"),
        ({"num_groups": None}, "got num_groups=None and group_size=None"),
        ({"num_groups": 3}, "Number of groups (3) does not divide the number of channels (4)"),
        ({"num_groups": 0}, "Number of groups (0) does not divide the number of channels (4)"),
        (
            {"num_groups": None, "group_size": 3},
            "Number of features (4) is not multiple of the group size (3)",
        ),
        ({}, "Number of groups (32) does not divide the number of channels (4)"),
    ],
)
def test_groups_that_do_not_fit(options, text):
    got = refusal(LayerArgumentError, lambda: nnx.GroupNorm(4, rngs=nnx.Rngs(0), **options))
    assert text in got and "\nFix: " in got


def test_group_norm_needs_the_last_axis_and_a_batch():
    model = InList(build(nnx.GroupNorm, reduction_axes=(1,)))
    assert refusal(FeatureError, lambda: model(X)) == (
        "model.blocks[0] (GroupNorm) takes its statistics over groups of the last axis, but "
        "reduction_axes=(1,) lack it.\nFix: add -1 to reduction_axes."
    )
    model = InList(build(nnx.GroupNorm))
    assert refusal(FeatureError, lambda: model(X[0, 0])).startswith(
        "model.blocks[0] (GroupNorm) expected an input of shape (batch, ..., 4), but got "
        "float32[4].\nFix: add a batch axis"
    )


def test_instance_norm_keeps_the_batch_axis():
    model = InList(build(nnx.InstanceNorm, 2, feature_axes=0))
    assert refusal(FeatureError, lambda: model(X)).startswith(
        "The channel axes cannot include the leading dimension, which is the batch: "
        "model.blocks[0] (InstanceNorm) has feature_axes=0 and got float32[2,3,4].\nFix: add"
    )
