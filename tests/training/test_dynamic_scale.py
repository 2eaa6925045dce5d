"""DynamicScale: what it gives for the cases that Flax 0.12.8 was asked."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from linnet import struct
from linnet.training.dynamic_scale import DynamicScale, DynamicScaleResult

X = jnp.array([1.0, 2.0])


def square(x):
    return (x**2).sum()


def test_fields_and_defaults():
    state = DynamicScale()
    assert isinstance(state, struct.PyTreeNode)
    assert [f.name for f in dataclasses.fields(state)] == [
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "fin_steps",
        "scale",
        "minimum_scale",
    ]
    assert dataclasses.astuple(state) == (2.0, 0.5, 2000, 0, 65536.0, jnp.finfo("float32").tiny)
    assert jax.tree.leaves(state) == [0, 65536.0]
    assert state.replace(scale=2.0).scale == 2.0


def test_a_result_by_name_and_by_place():
    result = DynamicScale().value_and_grad(square)(X)
    assert isinstance(result, DynamicScaleResult)
    state, finite, value, grad = result
    assert (state, finite, value, grad) == tuple(getattr(result, n) for n in result._fields)
    assert result._fields == ("dynamic_scale", "finite", "aux", "grad")
    assert (bool(finite), float(value), grad.tolist()) == (True, 5.0, [2, 4])
    assert (int(state.fin_steps), float(state.scale)) == (1, 65536)


@pytest.mark.parametrize(
    ("fun", "options", "args", "aux", "grad"),
    [
        (lambda x: (square(x), {"a": 3 * x}), {"has_aux": True}, (X,), (5, {"a": [3, 6]}), [2, 4]),
        (lambda x, y: (x * y).sum(), {"argnums": 1}, (X, 2 * X), 10, [1, 2]),
        (lambda x, y: (x * y).sum(), {"argnums": (0, 1)}, (X, 2 * X), 10, ([2, 4], [1, 2])),
        (lambda t: square(t["a"]), {}, ({"a": X, "b": X},), 5, {"a": [2, 4], "b": [0, 0]}),
    ],
)
def test_forms_of_call(fun, options, args, aux, grad):
    result = DynamicScale().value_and_grad(fun, **options)(*args)
    assert jax.tree.map(lambda x: x.tolist(), (result.aux, result.grad)) == (aux, grad)


@pytest.mark.parametrize(
    ("dtype", "value", "grad"), [(jnp.bfloat16, 0.200195, 0.10009766), (jnp.float32, 0.2, 0.1)]
)
def test_gradients_are_in_float32(dtype, value, grad):
    result = DynamicScale().value_and_grad(lambda x: (x * 0.1).sum())(jnp.ones(2, dtype))
    assert result.aux.dtype == dtype
    assert result.grad.dtype == jnp.float32
    assert jnp.allclose(result.aux, value, rtol=1e-3)
    assert jnp.allclose(result.grad, grad)


def test_the_loss_is_told_also_where_the_scaled_one_overflows():
    result = DynamicScale().value_and_grad(square)(X.astype(jnp.float16))
    assert (bool(result.finite), float(result.aux)) == (False, 5.0)
    assert result.grad.tolist() == [jnp.inf, jnp.inf]


def test_a_run_of_steps():
    inputs = [1, 1, 1, 1, 1, jnp.inf, 1, jnp.inf, jnp.nan, jnp.inf, 1, 1, 1]
    scales = [8, 8, 24, 24, 24, 6, 6, 1.5, 1.5, 1.5, 1.5, 1.5, 4.5]
    counts = [1, 2, 0, 1, 2, 0, 1, 0, 0, 0, 1, 2, 0]
    state = DynamicScale(3.0, 0.25, 2, scale=8.0, minimum_scale=1.5)
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(1)
        return state.value_and_grad(square)(x)

    got = []
    for x in inputs:
        state, finite, _, grad = step(state, jnp.array([float(x)]))
        assert bool(finite) == (x == 1)
        assert not finite or grad.tolist() == [2]
        got.append((float(state.scale), int(state.fin_steps)))
    assert got == list(zip(scales, counts, strict=True))
    assert len(traces) <= 2  # Python numbers at first, arrays from then on


def test_gradients_are_averaged_over_an_axis():
    def run(x):
        result = DynamicScale().value_and_grad(lambda w: (w * x).sum(), axis_name="batch")(X)
        return result.finite, result.aux, result.grad, result.dynamic_scale.scale

    xs = jnp.array([[1.0, 2.0], [3.0, jnp.inf]])
    finite, aux, grad, scale = jax.vmap(run, axis_name="batch")(xs)
    assert finite.tolist() == [False, False]
    assert aux.tolist() == [5.0, jnp.inf]
    assert grad.tolist() == [[2, jnp.inf]] * 2
    assert scale.tolist() == [32768, 32768]
