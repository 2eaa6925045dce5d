"""A Variable is written only in the trace it belongs to; elsewhere an error says where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import LinnetError, TraceContextError
from linnet.nnx.pytreelib import tracing
from tests.models import Count


class Block(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array([2.0, 3.0]))
        self.count = Count(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.w


class Model(nnx.Module):
    def __init__(self):
        self.block = Block()

    def __call__(self, x):
        return self.block(x)


WRITES = {
    ".value": lambda v, x: setattr(v, "value", x),
    "[...]": lambda v, x: v.__setitem__(..., x),
    "set_value": lambda v, x: v.set_value(x),
    "set_raw_value": lambda v, x: v.set_raw_value(x),
    "+=": lambda v, x: v.__iadd__(1),
    "set_metadata": lambda v, x: v.set_metadata(unit="steps"),
    "del_metadata": lambda v, x: v.del_metadata("hijax"),
    "copy_from": lambda v, x: v.copy_from(Count(x)),
    "nnx.update": lambda v, x: nnx.update({"n": v}, {"n": x}),
}


REMEDY = (
    "from a different trace level: it was made outside the function that JAX is tracing, so the "
    "write would be lost or leak a tracer.\n"
    "Fix: pass it (or the module that holds it) as an argument to an nnx transform, such as "
    "nnx.jit, which carries out the updates of its arguments, not of what the function captures; "
    "where jax.grad hands an argument through untraced, refresh it first with nnx.clone(...) or "
    "nnx.merge(..., copy=True)."
)


@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_every_change_from_another_trace_is_refused(change):
    model = Model()

    @jax.jit
    def f(x):
        change(model.block.count, x)

    with pytest.raises(TraceContextError) as error:
        f(1)
    assert str(error.value) == f"Cannot mutate Count at model.block.count {REMEDY}"
    assert isinstance(error.value, LinnetError)
    assert int(model.block.count.value) == 0


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: lambda x: jax.vmap(f)(x[None]),
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None]),
        lambda f: lambda x: jax.lax.cond(True, f, f, x),
        jax.checkpoint,
    ],
)
def test_captured_models_are_refused_by_every_transform(transform):
    model = Model()
    with pytest.raises(TraceContextError, match=r"Count at model\.block\.count from a different"):
        transform(model)(jnp.ones(2))


def grad_step(model, refresh):
    graphdef, params, nondiff = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, nondiff):
        inner = nnx.merge(graphdef, params, refresh(nondiff))
        loss = inner(jnp.ones(2)).sum()
        return loss, nnx.state(inner, Count)

    return jax.grad(loss_fn, has_aux=True)(params, nondiff)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_grad_needs_the_clone_that_the_guide_explains(wrap):
    model = Model()
    with pytest.raises(TraceContextError, match=r"Count at model\.block\.count .*[\s\S]*nnx.clone"):
        wrap(lambda model: grad_step(model, lambda nondiff: nondiff))(model)

    grads, updates = wrap(lambda model: grad_step(model, nnx.clone))(model)
    nnx.update(model, updates)
    np.testing.assert_array_equal(grads.block.w.value, [1.0, 1.0])
    assert int(model.block.count.value) == 1


def test_variables_of_an_ended_trace_are_refused():
    kept = []
    jax.jit(lambda x: kept.append(nnx.Param(x)))(1.0)
    with pytest.raises(TraceContextError) as error:
        kept[0].value = 3.0
    assert str(error.value) == (
        "Cannot mutate Param at kept[0] from a different trace level: it was made inside a "
        "function that JAX traced, and that trace has ended.\n"
        "Fix: return its value from the function and write that to a Variable made outside."
    )


def test_variables_made_or_passed_inside_may_change(leak_check):
    @jax.jit
    def f(model):
        y = model(jnp.ones(2))
        local = nnx.Variable(jnp.array(1.0))
        local += 1.0
        return y, model, local

    y, model, local = f(Model())
    np.testing.assert_array_equal(y, [2.0, 3.0])
    assert (int(model.block.count.value), float(local.value)) == (1, 2.0)
    model(jnp.ones(2))
    assert int(model.block.count.value) == 2


def test_the_check_can_be_bypassed():
    v = nnx.Variable(jnp.array(0))
    jax.jit(lambda x: v.set_raw_value(np.array(5), _unsafe_bypass_check=True))(1)
    assert int(v.value) == 5


def test_tokens_of_traces():
    seen = []

    def f(x):
        seen.append(tracing.current_trace())
        assert tracing.same_trace(seen[-1])
        return x

    assert tracing.current_trace() is tracing.EAGER
    jax.jit(f)(1.0)
    jax.jit(jax.vmap(f))(jnp.ones(2))
    f(1.0)
    assert [token == tracing.EAGER for token in seen] == [False, False, True]
    assert seen[0] != seen[1]
