"""while_loop and fori_loop over objects. What they share with scan is in test_carry.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import CarryError, DroppedWriteWarning, TraceContextError
from tests.nnx.transforms.stateful import Count, Noise, Norm, Pair, Scale, counted, values


def double(model):
    model.w[...] *= 2
    return model


def add(i, model):
    model.w[...] += i
    return model


@pytest.mark.parametrize("updates", [True, False])
def test_while_loop_reads_objects_in_its_condition(updates):
    model = Scale(1.0)
    out = nnx.while_loop(lambda m: m.w < 10, double, model, graph_updates=updates)
    assert out is model
    assert values(model) == {("w",): 16.0, ("count",): 0}


def test_values_are_those_of_plain_jax():
    start = (0, jnp.float32(0.5))
    want = jax.lax.while_loop(lambda c: c[1] < 50, lambda c: (c[0] + 1, 3 * c[1]), start)
    weight = nnx.Param(jnp.float32(0.5))

    def body(c):
        c[1][...] *= 3
        return c[0] + 1, c[1]

    steps, same = nnx.while_loop(lambda c: c[1] < 50, body, (0, weight))
    assert same is weight
    assert (int(steps), float(weight.value)) == (int(want[0]), float(want[1]))
    total = nnx.fori_loop(2, 6, lambda i, c: c * i, 1)
    assert total == jax.lax.fori_loop(2, 6, lambda i, c: c * i, 1) == 120


def test_the_condition_may_be_a_variable():
    class Flagged(nnx.Module):
        def __init__(self):
            self.go = nnx.Variable(jnp.bool_(True))

    def stop(m):
        m.go[...] = False
        return m

    for updates in (True, False):
        model = Flagged()
        nnx.while_loop(lambda m: m.go, stop, model, graph_updates=updates)
        assert not model.go.value


def test_no_round_changes_nothing():
    model = Scale(1.0)
    assert nnx.while_loop(lambda m: False, double, model) is model
    assert nnx.fori_loop(3, 3, add, model) is model
    assert values(model) == values(Scale(1.0))


@pytest.mark.parametrize("unroll", [None, 1, 2, True])
@pytest.mark.parametrize("updates", [True, False])
def test_fori_loop(unroll, updates):
    model = Scale(1.0)
    assert nnx.fori_loop(0, 4, add, model, unroll=unroll, graph_updates=updates) is model
    assert model.w.value == 7.0


def test_fori_loop_with_bounds_that_are_traced():
    model = Scale(1.0)
    step = nnx.jit(lambda n, m: nnx.fori_loop(0, n, add, m))
    assert step(3, model) is model
    assert model.w.value == 4.0


def test_running_means_and_keys_as_in_a_python_loop():
    pair = Pair(Norm(), Noise(nnx.Rngs(0)))
    eager = nnx.clone(pair)
    body = lambda i, c: (c[0], c[0].b(c[0].a(c[1])))  # noqa: E731
    x = jnp.arange(3.0)
    _, out = nnx.fori_loop(0, 3, body, (pair, x))
    for _ in range(3):
        x = eager.b(eager.a(x))
    np.testing.assert_allclose(out, x, rtol=1e-5)
    for path, value in values(eager).items():
        np.testing.assert_allclose(values(pair)[path], value, rtol=1e-5)


def test_arrays_in_attributes_go_round():
    class WithArray(nnx.Module):
        def __init__(self):
            self.x = jnp.float32(1)

    def body(i, m):
        m.x = m.x * 2
        return m

    model = WithArray()
    nnx.fori_loop(0, 3, body, model)
    assert model.x == 8.0
    nnx.while_loop(lambda m: m.x < 30, lambda m: body(0, m), model)
    assert model.x == 32.0


def test_two_traces_of_the_body_at_most():
    body, runs = counted(add)
    nnx.fori_loop(0, 3, body, Scale(1.0))
    assert len(runs) == 2
    body, runs = counted(lambda i, c: (c[0], c[1] + c[0].w))
    nnx.fori_loop(0, 3, body, (Scale(), jnp.float32(0)))
    assert len(runs) == 1


def test_variables_that_are_only_read_do_not_go_round():
    def f(model, big):
        return nnx.fori_loop(0, 3, lambda i, c: (add(i, c[0]), c[1]), (model, big))

    big = nnx.Param(jnp.zeros((5, 7)))
    jaxpr = nnx.make_jaxpr(f)(Scale(), big)
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name in ("while", "scan")]
    assert (5, 7) not in [x.aval.shape for x in loop.outvars]


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_refs_are_read_and_written(storage):
    model = nnx.with_vars(Scale(1.0), **storage)
    nnx.while_loop(lambda m: m.w < 10, double, model)
    nnx.fori_loop(0, 4, add, model)
    assert model.w.value == 22.0
    assert isinstance(model.w.raw_value, jax.Ref)


def test_under_jit_grad_and_vmap():
    def power(model, x):
        model, y = nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1])), (model, x))
        return y

    model = Scale(2.0)
    assert nnx.grad(power)(model, jnp.float32(5)).w.value == 60.0
    assert model.count.value == 3
    stack = nnx.vmap(Scale)(jnp.arange(1.0, 4.0))
    assert nnx.jit(nnx.vmap(power))(stack, jnp.ones(3)).tolist() == [1.0, 8.0, 27.0]
    assert stack.count.value.tolist() == [3, 3, 3]


# ---- bad input ----------------------------------------------------------------------------------


def add_attribute(model):
    model.extra = Count(jnp.int32(0))
    return model


def set_static(model):
    model.mode = "other"
    return model


def remove(model):
    del model.count
    return model


CHANGES = {
    "new": (add_attribute, r"init_val\.extra: new \(Count\)"),
    "static": (set_static, r"init_val\.mode: 'first' -> 'other'"),
    "removed": (remove, r"init_val\.count: removed"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("api", ["while_loop", "fori_loop"])
def test_structure_cannot_change_in_a_loop(name, api):
    change, text = CHANGES[name]
    model = Scale()
    model.mode = "first"
    message = f"nnx.{api}: the body changes the structure of its value: {text}.\nFix: change only"
    with pytest.raises(CarryError, match=message):
        if api == "while_loop":
            nnx.while_loop(lambda m: True, change, model)
        else:
            nnx.fori_loop(0, 3, lambda i, m: change(m), model)
    assert (model.mode, values(model)) == ("first", values(Scale()))


def test_without_graph_updates_structure_stays():
    model = Scale()
    with pytest.raises(CarryError, match=r"a step changes the structure .* init_val\.extra: new"):
        nnx.fori_loop(0, 3, lambda i, m: add_attribute(m), model, graph_updates=False)
    assert not hasattr(model, "extra")


def test_the_condition_cannot_change_structure():
    model = Scale(1.0)
    message = (
        r"nnx.while_loop: cond_fun changes the structure of its value: init_val\.extra: new "
        r"\(Count\)\.\nFix: let cond_fun only read"
    )
    with pytest.raises(CarryError, match=message):
        nnx.while_loop(lambda m: add_attribute(m).w < 10, double, model)
    assert values(model) == values(Scale(1.0))


def test_what_the_condition_writes_is_dropped():
    model = Scale(1.0)
    with pytest.warns(DroppedWriteWarning, match=r"drops what cond_fun writes to init_val\.w: the"):
        nnx.while_loop(lambda m: double(m).w < 10, double, model)
    assert float(model.w) == 8.0  # 2 * 4 < 10, and 2 * 8 is not


def test_a_captured_model_cannot_be_written():
    model = Scale()
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        nnx.fori_loop(0, 3, lambda i, x: model(x), jnp.float32(1))
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        nnx.while_loop(lambda x: x < 10, model.__call__, jnp.float32(1))
    assert model.count.value == 0


def test_a_captured_model_can_be_read():
    model = Scale(2.0)
    assert nnx.fori_loop(0, 3, lambda i, x: x * model.w, 1.0) == 8.0


def test_after_an_error_objects_are_as_before():
    def fails(model):
        double(model)
        raise RuntimeError("stop")

    model = Scale(1.0)
    with pytest.raises(RuntimeError, match="stop"):
        nnx.while_loop(lambda m: True, fails, model)
    assert values(model) == values(Scale(1.0))
