"""Moving averages of models: values beside those of Flax 0.12.8, sharing, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FilterError, StateMismatchError


class Model(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.array([1.0, 2.0]))
        self.seen = nnx.BatchStat(jnp.array([4, 5]))
        self.mean = nnx.BatchStat(jnp.array([1.0, 1.0]))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


@pytest.fixture
def model():
    return Model()


def moved(model):
    model.weight.value = jnp.array([5.0, 5.0])
    model.seen.value = jnp.array([8, 9])
    model.drop.rngs()
    return model


def test_the_average_moves_towards_the_model(model):
    ema = nnx.EMA(model, 0.9)
    moved(model)
    ema.update(model)
    np.testing.assert_allclose(ema.params.weight.value, [1.4, 2.3], rtol=1e-6)
    ema.update(nnx.state(model))
    np.testing.assert_allclose(ema.params.weight.value, [1.76, 2.57], rtol=1e-6)
    assert ema.params.mean.value.tolist() == [1, 1]
    assert (ema.decay, ema.filter, ema.graph) == (0.9, ..., None)


def test_what_cannot_be_averaged_is_taken_over(model):
    ema = nnx.EMA(model, 0.9)
    ema.update(moved(model))
    assert ema.params.seen.value.tolist() == [8, 9]
    assert int(ema.params.drop.rngs["count"].value) == 1
    assert jnp.issubdtype(ema.params.drop.rngs["key"].value.dtype, jax.dtypes.prng_key)


def test_dtypes_stay():
    ema = nnx.EMA({"a": nnx.Param(jnp.zeros(2, jnp.bfloat16))}, 0.5)
    ema.update({"a": nnx.Param(jnp.ones(2, jnp.bfloat16))})
    assert (
        ema.params["a"].value.dtype == jnp.bfloat16 and ema.params["a"].value.tolist() == [0.5] * 2
    )


def test_the_model_and_the_average_share_nothing(model):
    ema = nnx.EMA(model, 0.5, only=nnx.Param)
    assert list(ema.params) == ["weight"] and ema.params.weight is not model.weight
    moved(model)
    assert ema.params.weight.value.tolist() == [1, 2]
    ema.update(model)
    assert model.weight.value.tolist() == [5, 5]


def test_apply_to_gives_a_model_of_averages(model):
    ema = nnx.EMA(model, 0.5, only=nnx.Param)
    ema.update(moved(model))
    smooth = ema.apply_to(model)
    assert type(smooth) is Model and smooth is not model
    assert smooth.weight is ema.params.weight and smooth.weight.value.tolist() == [3.0, 3.5]
    assert smooth.mean is model.mean and model.weight.value.tolist() == [5, 5]


def test_it_updates_in_place_under_jit(model):
    ema, traces = nnx.EMA(model, 0.5, only=nnx.Param), []
    kept = ema.params.weight

    @nnx.jit
    def step(model, ema):
        traces.append(None)
        model.weight[...] += 1.0
        ema.update(model)

    for _ in range(2):
        step(model, ema)
    assert ema.params.weight is kept and len(traces) == 1
    np.testing.assert_allclose(kept.value, [2.25, 3.25])


def test_bad_input(model):
    with pytest.raises(ValueError, match=r"EMA got decay=1.5, which is not between 0 and 1.\nFix"):
        nnx.EMA(model, 1.5)
    with pytest.raises(TypeError) as caught:
        nnx.EMA({"a": [jnp.ones(2)]}, 0.5)
    assert "EMA only supports Variable leaves, got ArrayImpl at path .a[0]." in str(caught.value)
    ema = nnx.EMA(model, 0.5, only=nnx.Param)
    other = nnx.Dict(weight=nnx.Param(jnp.ones(3)), bias=nnx.Param(jnp.ones(3)))
    for use in (ema.update, ema.apply_to):
        with pytest.raises(StateMismatchError) as caught:
            use(other)
        assert str(caught.value) == (
            "These are not the Variables that the EMA was made for.\n"
            "New:\n  - .bias\n"
            "Of another type:\n  - .weight: expected float32[2], got float32[3]\n"
            "Fix: pass the model that the EMA was made for, or make another EMA."
        )
    with pytest.raises(StateMismatchError, match=r"Missing:\n  - .weight"):
        ema.update({})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: nnx.EMA(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 0.9, only=nnx.BatchStat),
            "EMA: only=BatchStat selects nothing in this Linear, so there is nothing to average. "
            "It has Param.\n",
        ),
        (
            lambda: nnx.EMA({}, 0.9),
            "EMA: only=Ellipsis selects nothing in this dict, so there is nothing to average. "
            "It has no Variables.\n",
        ),
    ],
)
def test_an_average_of_nothing_is_refused(make, text):
    with pytest.raises(FilterError) as caught:
        make()
    fix = "Fix: pass a filter for the Variables to average, such as only=nnx.Param."
    assert str(caught.value) == text + fix
