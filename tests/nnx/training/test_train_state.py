"""nnx.TrainState: a functional loop over a split model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import StateMismatchError

X = jnp.ones((1, 2))


@pytest.fixture
def parts():
    return nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_it_applies_the_model(parts):
    graphdef, params = parts
    train = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
    want = nnx.merge(graphdef, params)(X)
    for states in (("params",), (params,)):
        y, (graph, state) = train.apply(*states)(X)
        np.testing.assert_array_equal(y, want)
        assert graph == graphdef and set(state) == {"kernel", "bias"}
    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'parms'"):
        train.apply("parms")


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_steps_are_those_of_optax(parts, jit):
    graphdef, params = parts
    tx = optax.adam(0.1)
    train = nnx.TrainState.create(graphdef, params=params, tx=tx, step=5)

    @jit
    def step(train):
        grads = jax.grad(lambda params: train.apply(params)(X)[0].sum())(train.params)
        return train.apply_gradients(grads)

    after = step(step(train))
    assert (int(train.step), int(after.step)) == (5, 7)
    pure = params.to_pure_dict()
    opt_state = tx.init(pure)
    for _ in range(2):
        updates, opt_state = tx.update(jax.tree.map(jnp.ones_like, pure), opt_state, pure)
        pure = optax.apply_updates(pure, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after.params.to_pure_dict(), pure
    )


def test_subclasses_add_states():
    class WithStats(nnx.TrainState):
        other: nnx.State

    graphdef, params, other = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param, ...)
    train = WithStats.create(graphdef, params=params, tx=optax.sgd(0.1), other=other)
    y, (_, state) = train.apply("params", "other")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    assert y.shape == (2, 2)
    grads = jax.tree.map(jnp.ones_like, params)
    after = train.apply_gradients(grads, other=nnx.filter_state(state, nnx.BatchStat))
    assert int(after.step) == 1
    np.testing.assert_allclose(after.other.mean.value, [0.02, 0.03], rtol=1e-5)


def test_gradients_of_another_structure_are_refused(parts):
    graphdef, params = parts
    train = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
    with pytest.raises(StateMismatchError) as caught:
        train.apply_gradients({"kernel": params["kernel"].value[:1], "scale": X})
    assert str(caught.value) == (
        "The gradients are not those of the parameters.\n"
        "Missing:\n  - .bias.value\n  - .kernel.value\n"
        "Not optimized:\n  - .kernel\n  - .scale\n"
        "Fix: differentiate with respect to all of params, and pass what jax.grad returned."
    )


def test_parameters_for_annotations():
    class Own(nnx.TrainState[nnx.Linear]):
        batch_stats: nnx.State

    graphdef, params = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    empty = nnx.State({})
    train = Own.create(graphdef, params=params, tx=optax.sgd(0.1), batch_stats=empty)
    assert train.batch_stats is empty and isinstance(train, nnx.TrainState)
    assert nnx.TrainState[nnx.Linear].create(graphdef, params=params, tx=optax.sgd(0.1)).step == 0
