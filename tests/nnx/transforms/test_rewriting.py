"""A program that is rewritten before it is compiled gives the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.extend.core import jaxpr_as_fun

from linnet import nnx
from linnet.nnx.transforms import rewriting


def scatters(program):
    """How many scatters into rows of more than one element a program has."""
    found = 0
    for eqn in program.eqns:
        shape = eqn.invars[0].aval.shape if eqn.invars else ()
        found += eqn.primitive.name == "scatter-add" and shape[-1] > 1
        inner = [getattr(p, "jaxpr", p) for p in eqn.params.values()]
        found += sum(scatters(p) for p in inner if hasattr(p, "eqns"))
    return found


def loss(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


@settings(max_examples=20)
@given(dtype=st.sampled_from(["float32", "bfloat16"]), seed=st.integers(0, 1000))
def test_the_gradient_of_a_loss_over_labels_is_the_same(dtype, seed):
    shape, classes = (2, 3), 5
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(*shape, classes)), dtype)
    labels = jnp.asarray(rng.integers(-2 * classes, 2 * classes, shape), jnp.int32)
    program = jax.make_jaxpr(jax.value_and_grad(loss))(logits, labels)
    new = rewriting.with_fewer_passes(program)
    assert scatters(program.jaxpr) == 1
    assert scatters(new.jaxpr) == 0
    for found, expected in zip(
        jaxpr_as_fun(new)(logits, labels),
        jaxpr_as_fun(program)(logits, labels),
        strict=True,
    ):  # bit for bit while nothing is fused
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: jnp.zeros((3, 4)).at[:, 1].add(x),  # one index for all rows
        lambda x, i: jnp.ones((3, 4)).at[jnp.arange(3), i].add(x),  # not zeros
        lambda x, i: jax.grad(lambda y: jnp.take_along_axis(y, i[:, None], 1, mode="clip").sum())(
            jnp.ones((3, 4))
        ),
        lambda x, i: jax.grad(
            lambda y: jnp.take_along_axis(y, jnp.stack([i, i], 1), 1).sum()  # two in each row
        )(jnp.ones((3, 4))),
    ],
)
def test_another_scatter_is_left_alone(function):
    program = jax.make_jaxpr(function)(jnp.ones(3), jnp.arange(3))
    assert rewriting.with_fewer_passes(program) is program


def test_programs_inside_loops_are_rewritten():
    def accumulated(logits, labels):
        def body(total, x):
            return total + jax.grad(loss)(logits, x), None

        return jax.lax.scan(body, jnp.zeros_like(logits), labels)[0]

    logits, labels = jnp.ones((3, 4)), jnp.array([[0, 1, 2], [3, 3, 3]])
    program = jax.make_jaxpr(accumulated)(logits, labels)
    new = rewriting.with_fewer_passes(program)
    assert (scatters(program.jaxpr), scatters(new.jaxpr)) == (1, 0)
    [found], [expected] = jaxpr_as_fun(new)(logits, labels), jaxpr_as_fun(program)(logits, labels)
    np.testing.assert_array_equal(found, expected)


def test_a_training_step_is_rewritten_where_there_is_a_gpu(monkeypatch):
    def train():
        model = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x, y):
            value, grads = nnx.value_and_grad(lambda m: loss(m(x), y))(model)
            optimizer.update(model, grads)
            return value

        x, y = jnp.ones((3, 4)), jnp.array([0, 4, 2])
        values = [float(step(model, optimizer, x, y)) for _ in range(3)]
        return scatters(step.trace(model, optimizer, x, y).jaxpr.jaxpr), values, model.kernel[...]

    monkeypatch.setattr(rewriting, "rewrites", lambda: False)
    before, values, kernel = train()
    monkeypatch.setattr(rewriting, "rewrites", lambda: True)
    after, same_values, same_kernel = train()
    assert (before, after) == (1, 0)
    np.testing.assert_allclose(values, same_values, rtol=1e-6)
    np.testing.assert_allclose(kernel, same_kernel, rtol=1e-6)
