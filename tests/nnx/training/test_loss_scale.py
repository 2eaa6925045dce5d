"""LossScale: scaled losses over live modules, and steps that are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from tests.compare import assert_equal

X = jnp.array([[1.0, 2.0]])


def build(**options):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return model, optimizer, nnx.LossScale(**options)


def step(model, optimizer, loss_scale, x):
    loss, grads = loss_scale.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    return loss, loss_scale.update(optimizer, model, grads)


def plain_step(model, optimizer, _, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss, True


def arrays(*objects):
    return jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(objects)))


@pytest.mark.parametrize("transform", [nnx.jit, lambda f: f], ids=["jit", "eager"])
def test_finite_steps_are_those_without_scaling(transform):
    scaled, plain = build(), build()
    for _ in range(3):
        loss, finite = transform(step)(*scaled, X)
        want, _ = transform(plain_step)(*plain, X)
        assert bool(finite)
        assert jnp.allclose(loss, want)
    got, want = arrays(*scaled[:2]), arrays(*plain[:2])
    close = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-6)), got, want)
    assert jax.tree.all(close)
    assert int(scaled[1].step) == 3
    assert (float(scaled[2].scale), int(scaled[2].fin_steps)) == (65536, 3)


@pytest.mark.parametrize("transform", [nnx.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_step_that_is_not_finite_changes_the_scale_alone(transform, bad):
    model, optimizer, loss_scale = build()
    run = transform(step)
    run(model, optimizer, loss_scale, X)
    before = arrays(model, optimizer)
    _, finite = run(model, optimizer, loss_scale, X * bad)
    assert not bool(finite)
    assert_equal(arrays(model, optimizer), before)
    assert (float(loss_scale.scale), int(loss_scale.fin_steps)) == (32768, 0)
    _, finite = run(model, optimizer, loss_scale, X)
    assert bool(finite)
    assert int(optimizer.step) == 2


def test_a_run_of_steps_is_compiled_once():
    traces = []

    @nnx.jit
    def run(*args):
        traces.append(1)
        return step(*args)

    objects = build(
        scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2, minimum_scale=1.5
    )
    got = []
    for x in (1, 1, 1, jnp.inf, jnp.inf, 1):
        run(*objects, X * x)
        got.append((float(objects[2].scale), int(objects[2].fin_steps)))
    assert got == [(8, 1), (8, 2), (24, 0), (6, 0), (1.5, 0), (1.5, 1)]
    assert len(traces) == 1


def test_half_precision_trains_where_plain_gradients_vanish():
    def train(loss_scale):
        model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
        nnx.set_precision(model, "mixed_float16")
        optimizer = nnx.Optimizer(model, optax.adam(0.1, eps=0.0), wrt=nnx.Param)

        @nnx.jit
        def run(model, optimizer, loss_scale):
            def loss(model):
                return model(X).mean() * 1e-8, {"note": jnp.ones(())}

            if loss_scale is None:
                (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(model)
                optimizer.update(model, grads)
            else:
                (value, aux), grads = loss_scale.value_and_grad(loss, has_aux=True)(model)
                loss_scale.update(optimizer, model, grads)
            return value, aux, grads

        value, aux, grads = run(model, optimizer, loss_scale)
        assert (value.dtype, float(aux["note"])) == (jnp.float32, 1.0)
        return grads.kernel[...].ravel()

    assert train(None).tolist() == [0, 0]
    assert jnp.allclose(train(nnx.LossScale()), 1e-8 * X[0], rtol=0.01)


def test_arguments_of_value_and_grad_and_of_update():
    model, _, loss_scale = build()

    def loss(model, x):
        return model(x).sum()

    chosen = nnx.DiffState(0, nnx.PathContains("bias"))
    _, grads = loss_scale.value_and_grad(loss, argnums=chosen)(model, X)
    assert list(grads) == ["bias"]
    assert grads.bias[...].tolist() == [1]
    averaged = nnx.vmap(
        lambda model, x: loss_scale.value_and_grad(loss, axis_name="batch")(model, x)[1],
        in_axes=(None, 0),
        axis_name="batch",
    )(model, jnp.stack([X, 3 * X]))
    assert averaged.kernel[...].tolist() == [[[2], [4]]] * 2
    keeper = nnx.ModelAndOptimizer(model, optax.sgd(1.0))
    before = model.bias[...]
    _, grads = loss_scale.value_and_grad(loss)(model, X)
    assert bool(loss_scale.update(keeper, grads))
    assert jnp.allclose(model.bias[...], before - 1)


def test_it_is_saved_with_the_rest():
    loss_scale = nnx.LossScale(4.0)
    graphdef, state = nnx.split(loss_scale)
    assert sorted(nnx.to_flat_state(state).paths) == [("fin_steps",), ("scale",)]
    restored = nnx.merge(graphdef, jax.tree.map(lambda x: x + 1, state))
    assert (float(restored.scale), int(restored.fin_steps)) == (5, 1)
    assert nnx.state(loss_scale, nnx.OptState)


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), np.float32(0)])
def test_a_scale_is_positive_and_finite(scale):
    with pytest.raises(ValueError) as caught:
        nnx.LossScale(scale)
    assert str(caught.value) == (
        f"LossScale got scale={scale}, which is not positive and finite: losses are multiplied by "
        "it and gradients divided.\nFix: nnx.LossScale(65536.0)."
    )
