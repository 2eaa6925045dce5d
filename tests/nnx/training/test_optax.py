"""Every kind of Optax transformation in an optimizer, beside Optax by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from tests.compare import assert_close
from tests.models import Net, counted, params_of

STEPS = 3


PARAMS = params_of(Net())
GRADS = [jax.tree.map(lambda x, s=step: jnp.sin(s + x), PARAMS) for step in range(STEPS)]


def labels(params):
    return jax.tree.map_with_path(
        lambda path, _: "bias" if path[-1].key == "bias" else "rest", params
    )


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)
TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.01),
    "adamw with a schedule": optax.adamw(SCHEDULE),
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.01)),
    "multi_transform by function": optax.multi_transform(
        {"bias": optax.sgd(0.1), "rest": optax.adam(0.01)}, labels
    ),
    "multi_transform by name": optax.multi_transform(
        {"slow": optax.sgd(0.01), "fast": optax.adam(0.01)},
        {"hidden": "slow", "norm": "slow", "heads": {0: "fast"}},
    ),
    "masked": optax.masked(
        optax.sgd(0.1), lambda params: jax.tree.map(lambda x: x.ndim == 2, params)
    ),
    "partition": optax.partition(
        {"bias": optax.set_to_zero(), "rest": optax.sgd(0.1, momentum=0.9)}, labels
    ),
    "muon": optax.contrib.muon(0.01),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "MultiSteps": optax.MultiSteps(optax.adam(0.01), every_k_schedule=2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.01), max_consecutive_errors=2),
}


def by_hand(tx):
    """The parameters after the steps with Optax alone, and its state."""

    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = PARAMS, tx.init(PARAMS)
    for grads in GRADS:
        params, opt_state = step(params, opt_state, grads)
    return params, opt_state


def values(opt_state):
    return jax.tree.map(lambda v: v.value, opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def update(model, optimizer, grads):
    return optimizer.update(model, grads)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_it_does_what_optax_does_by_hand(name):
    tx, model = TRANSFORMATIONS[name], Net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step, traces = counted(update, nnx.jit)
    for grads in GRADS:
        step(model, optimizer, grads)
    assert len(traces) == 1
    params, opt_state = by_hand(tx)
    assert_close(params_of(model), params)
    assert_close(values(optimizer.opt_state), opt_state)
    assert int(optimizer.step.value) == STEPS and optimizer.step.value.dtype == jnp.uint32


def test_apply_if_finite_skips_a_step():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    tx = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = params_of(model)
    nnx.jit(update)(model, optimizer, jax.tree.map(lambda x: x * jnp.nan, before))
    assert_close(params_of(model), before)
    assert int(optimizer.opt_state.total_notfinite.value) == 1
    assert int(optimizer.step.value) == 1


def test_extra_arguments_reach_optax():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params, opt_state = params_of(model), tx.init(params_of(model))
    step = nnx.jit(
        lambda model, optimizer, grads, value: optimizer.update(model, grads, value=value)
    )
    for value in (1.0, 1.0, 2.0):
        step(model, optimizer, params, jnp.array(value))
        _, opt_state = jax.jit(tx.update)(params, opt_state, params, value=jnp.array(value))
    assert float(optimizer.opt_state[1].scale.value) == float(opt_state[1].scale) < 1


def test_lbfgs_takes_states_among_its_extra_arguments():
    model, tx = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.lbfgs(linesearch=None)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = params_of(model)
    opt_state = tx.init(params)

    def loss(model):
        return (model(jnp.ones((1, 3))) ** 2).sum()

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads, value=value, grad=grads, value_fn=loss)

    graphdef = nnx.graphdef(model)

    @jax.jit
    def by_hand(params, opt_state):
        grads = jax.grad(lambda params: loss(nnx.merge(graphdef, params)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(2):
        step(model, optimizer)
        params, opt_state = by_hand(params, opt_state)
    assert_close(params_of(model), params)


def test_optax_sees_plain_named_arrays():
    seen = []

    def init(params):
        seen.append(params)
        return {"count": jnp.zeros((), jnp.int32)}

    def update(grads, state, params=None, **extra):
        seen.extend([grads, params, extra])
        return grads, state

    model = Net()
    tx = optax.GradientTransformationExtraArgs(init, update)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.clone(nnx.state(model, nnx.Param))
    updates = optimizer.update(model, grads, note=grads, number=3)
    want = jax.tree.structure(PARAMS)
    assert [jax.tree.structure(tree) for tree in seen[:3]] == [want] * 3
    assert all(isinstance(leaf, jax.Array) for tree in seen[:3] for leaf in jax.tree.leaves(tree))
    assert jax.tree.structure(seen[3]["note"]) == want and seen[3]["number"] == 3
    assert type(updates) is nnx.State
    assert_close(updates.to_pure_dict(), grads.to_pure_dict())


def state_labels(params):
    return nnx.map_state(lambda path, _: "bias" if path[-1] == "bias" else "rest", params)


def state_mask(params):
    return nnx.map_state(lambda path, _: path[-1] == "kernel", params)


def labels_by_attribute(params):
    wanted = params.hidden.bias
    return jax.tree.map(lambda x: "bias" if x is wanted else "rest", params)


PARTS: Any = {"bias": optax.sgd(0.1), "rest": optax.adam(0.01)}
BY_STATES = {
    "labels of a function": lambda state: (
        optax.multi_transform(PARTS, state_labels),
        optax.multi_transform(PARTS, labels),
    ),
    "labels": lambda state: (
        optax.multi_transform(PARTS, state_labels(state)),
        optax.multi_transform(PARTS, labels),
    ),
    "labels from flat": lambda state: (
        optax.multi_transform(
            PARTS, lambda params: nnx.from_flat_state(nnx.to_flat_state(state_labels(params)))
        ),
        optax.multi_transform(PARTS, labels),
    ),
    "labels by attribute": lambda state: (
        optax.multi_transform(PARTS, labels_by_attribute),
        optax.multi_transform(
            PARTS, lambda params: nnx.to_pure_dict(labels_by_attribute(nnx.State(params)))
        ),
    ),
    "mask": lambda state: (
        optax.adamw(0.1, weight_decay=0.5, mask=state_mask(state)),
        optax.adamw(0.1, weight_decay=0.5, mask=nnx.to_pure_dict(state_mask(state))),
    ),
    "masked": lambda state: (
        optax.masked(optax.sgd(0.1), state_mask),
        optax.masked(optax.sgd(0.1), nnx.to_pure_dict(state_mask(state))),
    ),
}


@pytest.mark.parametrize("name", BY_STATES)
def test_masks_and_labels_may_be_states(name):
    results = []
    for tx in BY_STATES[name](nnx.state(Net(), nnx.Param)):
        model = Net()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step, traces = counted(update, nnx.jit)
        for grads in GRADS:
            step(model, optimizer, grads)
        assert len(traces) == 1
        graphdef, state = nnx.split(optimizer)
        assert nnx.merge(graphdef, state).transformation == optimizer.transformation
        results.append((params_of(model), jax.tree.leaves(nnx.state(optimizer))))
    assert_close(*results)


def test_an_error_of_a_transformation_is_its_own():
    def wrong(params):
        raise ValueError(f"labels of a {type(params).__name__}")

    with pytest.raises(ValueError, match="labels of a dict"):
        nnx.Optimizer(Net(), optax.multi_transform(PARTS, wrong), wrt=nnx.Param)


FRESH = {
    "adam": lambda: optax.adam(1e-3),
    "schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "multi_transform": lambda: optax.multi_transform(
        {"bias": optax.sgd(0.1), "rest": optax.sgd(0.2)}, labels
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_but_equal_optimizer_does_not_retrace(name):
    model = Net()
    step, traces = counted(update, nnx.jit)
    for grads in GRADS[:3]:
        step(model, nnx.Optimizer(model, FRESH[name](), wrt=nnx.Param), grads)
    assert len(traces) == 1


OTHER = {
    "a number": (optax.sgd(0.1), optax.sgd(0.2)),
    "a schedule": (optax.sgd(optax.constant_schedule(0.1)), optax.sgd(lambda count: 0.2)),
    "MultiSteps": (optax.MultiSteps(optax.sgd(0.1), 1), optax.MultiSteps(optax.sgd(0.2), 1)),
    "a class": (optax.sgd(0.1), optax.chain(optax.sgd(0.1), optax.scale(2.0))),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_transformation_retraces(name):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    step, traces = counted(update, nnx.jit)
    grads = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    for tx, rate in zip(OTHER[name], (0.1, 0.2), strict=True):
        before = model.bias.value
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step(model, optimizer, grads)
        np.testing.assert_allclose(before - model.bias.value, [rate] * 2, rtol=1e-5)
    assert len(traces) == 2


def test_the_transformation_can_be_replaced():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    other = optax.sgd(0.2)
    optimizer.tx = other
    assert optimizer.tx is other
    nnx.jit(update)(model, optimizer, {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)})
    np.testing.assert_allclose(model.bias.value, [-0.2] * 2, rtol=1e-5)


@pytest.mark.parametrize(
    "set_rate",
    [
        lambda rate, new: setattr(rate, "value", new),
        lambda rate, new: rate.__setitem__(..., new),
        lambda rate, new: setattr(rate, "value", jnp.array(new)),
    ],
    ids=["value", "index", "array"],
)
def test_another_learning_rate_does_not_retrace(set_rate):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step, traces = counted(update, nnx.jit)
    grads = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    step(model, optimizer, grads)
    for rate in (0.2, 0.4):
        before = model.bias.value
        set_rate(optimizer.opt_state.hyperparams["learning_rate"], rate)
        step(model, optimizer, grads)
        np.testing.assert_allclose(before - model.bias.value, [rate] * 2, rtol=1e-5)
    assert len(traces) == 1


def equations(jaxpr):
    parts = [
        part for equation in jaxpr.eqns for part in jax.tree.leaves([*equation.params.values()])
    ]
    inner = [getattr(part, "jaxpr", part) for part in parts]
    return len(jaxpr.eqns) + sum(equations(part) for part in inner if hasattr(part, "eqns"))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_update_traces_to_what_optax_and_a_count_of_steps_trace_to(name):
    tx, model = TRANSFORMATIONS[name], Net()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def hand(params, opt_state, step, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, step + 1

    graphdef, state = nnx.split((model, optimizer))

    def update(state, grads):
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    by_hand = jax.make_jaxpr(hand)(PARAMS, tx.init(PARAMS), jnp.uint32(0), PARAMS)
    assert equations(jax.make_jaxpr(update)(state, PARAMS).jaxpr) == equations(by_hand.jaxpr)
