"""Parameters in half precision whose masters, in float32, the optimizer keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import PrecisionError
from tests.models import Net, params_of

POLICY = "params=bfloat16,masters=float32,compute=bfloat16,output=float32"
X = jnp.linspace(-1, 1, 12, dtype=jnp.bfloat16).reshape(4, 3)
KINDS = {
    "sgd": lambda: optax.sgd(1e-3),
    "adamw": lambda: optax.adamw(1e-4),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-4)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
}


def loss_of(model):
    return ((model(X) - 1) ** 2).mean()


def step(model, optimizer):
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def built(tx):
    model = Net()
    model.eval()  # statistics of four rows are too rough in half precision
    nnx.set_precision(model, POLICY)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def masters(optimizer):
    return nnx.pure(optimizer.opt_state.masters)


def by_hand(tx, steps):
    """The masters after some steps, with Optax and dicts alone."""
    model, _ = built(tx)
    graphdef, state, rest = nnx.split(model, nnx.Param, ...)
    copies = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.to_pure_dict(state))
    moments = tx.init(copies)
    for _ in range(steps):
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), copies)
        nnx.replace_by_pure_dict(state, narrow)
        grads = nnx.to_pure_dict(nnx.grad(loss_of)(nnx.merge(graphdef, state, rest)))
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        updates, moments = tx.update(grads, moments, copies)
        copies = optax.apply_updates(copies, updates)
    return copies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_masters_are_what_optax_makes_of_float32_copies(kind, compiled):
    model, optimizer = built(KINDS[kind]())
    run = nnx.jit(step) if compiled else step
    for _ in range(4):
        run(model, optimizer)
    want = by_hand(KINDS[kind](), 4)
    found = masters(optimizer)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    # Gradients in half precision are rounded elsewhere when they are compiled.
    close = {"rtol": 2e-2, "atol": 2e-5} if compiled else {"rtol": 1e-6}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, want)
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(p, m.astype(jnp.bfloat16)),
        params_of(model),
        found,
    )


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_small_updates_add_up(half, compiled):
    # One step of 1e-4 is less than half of the last place of a half near one.
    model = Net()
    nnx.set_precision(model, f"params={half},masters=float32")
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.full_like(x, -1e-4), nnx.state(model, nnx.Param))

    def update(model, optimizer):
        optimizer.update(model, grads)

    run = nnx.jit(update) if compiled else update
    for _ in range(100):
        run(model, optimizer)
    np.testing.assert_allclose(model.norm.scale[...].astype(np.float32), 1.01, atol=4e-3)
    np.testing.assert_allclose(masters(optimizer)["norm"]["scale"], 1.01, atol=1e-4)


def test_a_parameter_that_was_written_becomes_the_master():
    model, optimizer = built(optax.sgd(0.0))
    step(model, optimizer)
    kept = masters(optimizer)["hidden"]["kernel"]
    new = jnp.full((4, 2), 0.3, jnp.bfloat16)
    model.heads[0].kernel.value = new
    step(model, optimizer)
    np.testing.assert_array_equal(model.heads[0].kernel.value, new)
    np.testing.assert_array_equal(masters(optimizer)["heads"][0]["kernel"], new.astype(jnp.float32))
    np.testing.assert_array_equal(masters(optimizer)["hidden"]["kernel"], kept)


def test_wide_parameters_have_no_copy():
    model = Net()
    nnx.set_precision(model, "masters=float32")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    assert jax.tree.leaves(optimizer.opt_state.masters) == []
    other = Net()
    without = nnx.Optimizer(other, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(3):
        step(model, optimizer)
        step(other, without)
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(other))


def test_a_region_may_say_it_for_models_made_inside():
    with nnx.precision(POLICY):
        model = Net()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        step(model, optimizer)
    assert model.hidden.kernel.value.dtype == jnp.bfloat16
    assert masters(optimizer)["hidden"]["kernel"].dtype == jnp.float32


def test_another_transformation_keeps_the_masters():
    model, optimizer = built(optax.sgd(1e-3))
    step(model, optimizer)
    optimizer.tx = optax.sgd(0.0)
    before = masters(optimizer)
    step(model, optimizer)
    jax.tree.map(np.testing.assert_array_equal, masters(optimizer), before)


def test_the_state_is_split_merged_and_kept():
    model, optimizer = built(optax.adam(1e-3))
    step(model, optimizer)
    graphdef, state = nnx.split((model, optimizer))
    model2, optimizer2 = nnx.merge(graphdef, jax.tree.map(jnp.array, state))
    step(model, optimizer)
    step(model2, optimizer2)
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(model2))
    jax.tree.map(np.testing.assert_array_equal, masters(optimizer), masters(optimizer2))


def test_a_policy_that_comes_after_the_optimizer_is_refused():
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    nnx.set_precision(model, "params=bfloat16,masters=float32")
    with pytest.raises(PrecisionError) as caught:
        step(model, optimizer)
    assert str(caught.value) == (
        "The model has Policy(params=bfloat16, masters=float32), but the optimizer was built "
        "before and keeps no masters, so small updates would be lost.\n"
        "Fix: build the optimizer after nnx.set_precision."
    )
