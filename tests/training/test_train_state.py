"""The train state of functional loops, over dicts and over split models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import StateMismatchError, TransformationError
from linnet.training import train_state


def created(params, tx=None):
    tx = tx or optax.sgd(0.1)
    return train_state.TrainState.create(apply_fn=lambda p, x: x, params=params, tx=tx)


def test_a_train_state_takes_steps():
    state = created({"w": jnp.ones(2)})
    after = state.apply_gradients(grads={"w": jnp.ones(2)})
    assert (state.step, after.step) == (0, 1) and type(after.step) is int
    np.testing.assert_allclose(after.params["w"], [0.9, 0.9])
    assert state.params["w"].tolist() == [1, 1]
    assert len(jax.tree.leaves(state)) == 2  # the step and w
    assert after.replace(step=7).step == 7


def test_a_train_state_over_a_split_model_trains_under_jit():
    class TrainState(train_state.TrainState):
        other_variables: nnx.State

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    graphdef, params, other_variables = nnx.split(model, nnx.Param, ...)
    state = TrainState.create(
        apply_fn=graphdef.apply,
        params=params,
        other_variables=other_variables,
        tx=optax.sgd(0.1),
    )
    x, labels = jnp.ones((2, 4)), jnp.array([0, 2])
    traces = []

    @jax.jit
    def train_step(state):
        traces.append(None)

        def loss_fn(params, other_variables):
            logits, _ = state.apply_fn(params, other_variables)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.other_variables)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(5):
        state, loss = train_step(state)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and int(state.step) == 5
    assert len(traces) <= 2  # the first step is a Python number


def test_a_collection_is_overwritten_with_its_gradient():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"s": jnp.ones(1)}}
    state = created(params, optax.adam(0.1))
    assert set(state.opt_state[0].mu) == {"w"}
    grads = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"s": jnp.full(1, 7.0)}}
    after = state.apply_gradients(grads=grads)
    np.testing.assert_allclose(after.params["params"]["w"], [0.9, 0.9], rtol=1e-5)
    assert after.params["_overwrite_with_gradient"]["s"].tolist() == [7]


def test_gradients_of_another_structure_are_refused():
    state = created({"dense": {"w": jnp.ones(2), "b": jnp.ones(1)}})
    with pytest.raises(StateMismatchError) as caught:
        state.apply_gradients(grads={"dense": {"w": jnp.ones(3), "v": jnp.ones(1)}})
    assert str(caught.value) == (
        "The gradients are not those of the parameters.\n"
        "Missing:\n  - .dense.b\n"
        "Not optimized:\n  - .dense.v\n"
        "Of another shape:\n  - .dense.w: the gradient is (3,), the parameter (2,)\n"
        "Fix: differentiate with respect to all of params, and pass what jax.grad returned."
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        state.apply_gradients(grads=state.params, foo=3)


@pytest.mark.parametrize(("tx", "got"), [(None, "NoneType"), (optax.adam, "adam")])
def test_what_is_no_transformation(tx, got):
    with pytest.raises(TransformationError) as caught:
        train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    assert str(caught.value) == (
        "TrainState takes an Optax transformation with init and update as tx, but got "
        f"{got}.\nFix: TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))."
    )
