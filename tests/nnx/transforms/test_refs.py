"""Programs over Variables that are stored as JAX refs; each gives what it gives without refs."""

import jax
import jax.numpy as jnp
import optax
import pytest

from linnet import nnx
from tests.compare import assert_close

X, Y = jnp.ones((4, 2)), jnp.ones((4, 3))
MODES = pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}], ids=str)
KINDS = pytest.mark.parametrize("kind", [{"hijax": True}, {"ref": True}], ids=str)


def made(**kind):
    with nnx.var_defaults(**(kind or {"ref": False})):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        count = nnx.Variable(jnp.array(0))
    return model, optimizer, count


def error(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def values(tree):
    return nnx.as_pure(nnx.state(tree))


def train(model, optimizer, count, **mode):
    @nnx.jit(**mode)
    def step(model, optimizer, count, x, y):
        def loss(model, count):
            count[...] += 1
            return error(model, x, y)

        value, grads = nnx.value_and_grad(loss, **mode)(model, count)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, count, X, Y)) for _ in range(3)]


@MODES
@KINDS
def test_a_training_step(kind, mode):
    plain, stored = made(), made(**kind)
    assert_close(train(*stored, **mode), train(*plain, **mode))
    assert_close(values(stored[:2]), values(plain[:2]))
    assert int(stored[2]) == 3
    assert stored[0].kernel.get_metadata(next(iter(kind))) is True


@KINDS
def test_a_step_by_hand_under_plain_jax(kind):
    (model, optimizer, _), (plain, plain_optimizer, count) = made(**kind), made()
    train(plain, plain_optimizer, count)

    @jax.jit
    def step(model, optimizer, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params: error(nnx.merge(graphdef, params, rest), x, y)  # noqa: E731
        grads = jax.grad(loss)(nnx.vars_as(params, hijax=False, ref=False))
        optimizer.update(model, grads)

    for _ in range(3):
        step(model, optimizer, X, Y)
    assert_close(values(model), values(plain))


@KINDS
def test_a_step_that_captures_the_model(kind):
    (model, optimizer, _), (plain, plain_optimizer, count) = made(**kind), made()
    want = train(plain, plain_optimizer, count)

    @jax.jit
    def step(x, y):
        read_only = nnx.with_vars(model, mutable=False)
        loss, grads = jax.value_and_grad(lambda m: error(m, x, y))(read_only)
        optimizer.update(model, grads)
        return loss

    assert_close([float(step(X, Y)) for _ in range(3)], want)
    assert_close(values(model), values(plain))


@KINDS
def test_read_only_copies_hold_values(kind):
    model = made(**kind)[0]
    copy = nnx.with_vars(model, mutable=False)
    assert isinstance(copy.kernel.get_raw_value(), jax.Array)
    model.bias[...] += 1
    assert copy.bias.value.tolist() == [0, 0, 0]
    again = nnx.with_vars(copy, mutable=True)
    assert not isinstance(again.kernel.get_raw_value(), jax.Array)
    nnx.jit(lambda m: m.bias.set_value(jnp.ones(3)))(again)
    assert again.bias.value.tolist() == [1, 1, 1]


def test_a_compiled_function_may_make_a_variable_mutable_and_write_it():
    v = nnx.Variable(jnp.zeros(()), mutable=False)

    @nnx.jit
    def write(v):
        v.set_metadata(mutable=True)
        v[...] += 1
        v.set_metadata(mutable=False)

    write(v)
    assert (v.value, v.mutable) == (1, False)


@MODES
@KINDS
def test_jit_takes_and_returns_them(kind, mode):
    @nnx.jit(**mode)
    def make(x):
        with nnx.var_defaults(**kind):
            return nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Variable(x)

    model, v = make(jnp.array(2.0))
    assert_close(model(X), made()[0](X))
    v[...] += 1

    @nnx.jit(**mode)
    def double(v):
        v[...] *= 2

    for _ in range(3):
        double(v)
    assert float(v) == 24.0
    if not mode:
        assert nnx.jit(lambda v: v)(v) is v


def sums(v, **mode):
    def step(v, x):
        v[...] += x
        return v, x

    def each(i, v):
        v[...] += i
        return v

    def add(v):
        v[...] += 1

    nnx.scan(step, **mode)(v, jnp.arange(3.0))
    nnx.fori_loop(0, 4, each, v, **mode)
    nnx.cond(True, add, lambda v: None, v, **mode)
    return float(v)


@MODES
@KINDS
def test_loops_and_branches(kind, mode):
    assert sums(nnx.Variable(jnp.array(0.0), **kind), **mode) == 10.0


@MODES
@KINDS
def test_vmap_and_grad(kind, mode):
    v = nnx.Param(jnp.arange(3.0), **kind)

    def f(v):
        v[...] += 1
        return v * 2

    assert nnx.vmap(f, **mode)(v).tolist() == [2.0, 4.0, 6.0]
    assert v.value.tolist() == [1.0, 2.0, 3.0]
    grads = nnx.grad(lambda v: (v[...] ** 2).sum(), **mode)(v)
    assert grads[...].tolist() == [2.0, 4.0, 6.0]
