"""The stages of a jitted function: traced, lowered, compiled, and shapes alone."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.transforms import plan
from tests.models import call
from tests.nnx.transforms.stateful import Count, Pair, Scale, ScaleNormNoise, counted


def test_a_compiled_function_updates_live_objects():
    model, other = Scale(), Scale(5.0)
    compiled = nnx.jit(call).lower(model, 1.0).compile()
    assert model.count.value == 0
    assert [float(compiled(model, 1.0)), float(compiled(other, 1.0))] == [2, 5]
    assert model.count.value == other.count.value == 1
    assert "HloModule" in compiled.as_text()


def test_a_compiled_function_does_not_walk_its_objects_again(monkeypatch):
    model = Scale()
    compiled = nnx.jit(call).lower(model, 1.0).compile()
    for _ in range(2):
        compiled(model, 1.0)
    monkeypatch.setattr(Walk, "_object", None)
    monkeypatch.setattr(plan, "CHECK_PLANS", False)
    assert compiled(model, 2.0) == 4
    assert model.count.value == 3


def test_a_compiled_function_takes_fresh_objects_and_used_rngs():
    compiled = nnx.jit(lambda model, rngs: model(rngs.normal()) * 0 + 1).lower(Scale(), nnx.Rngs(0))
    compiled = compiled.compile()
    for seed in range(3):
        rngs = nnx.Rngs(seed)
        assert compiled(Scale(), rngs) == 1
        assert rngs.default.count.value == 1


def test_a_compiled_function_is_called_without_static_arguments():
    jitted = nnx.jit(lambda n, model, x, m: model(x) * n * m, static_argnums=0, static_argnames="m")
    compiled = jitted.lower(3, Scale(), 1.0, m=2).compile()
    assert compiled(Scale(), 2.0) == 24
    with pytest.raises(TypeError, match="static arguments are left out of the call"):
        compiled(3, Scale(), 2.0)


def test_a_compiled_function_refuses_another_structure():
    net = ScaleNormNoise()
    compiled = nnx.jit(call).lower(net, jnp.ones(2)).compile()
    net.eval()
    message = (
        "This compiled function is for other arguments: model.noise.deterministic: False -> True"
    )
    with pytest.raises(TypeError, match=message):
        compiled(net, jnp.ones(2))
    assert net.scale.count.value == 0


def test_a_compiled_function_with_donated_arguments():
    model = Scale()
    compiled = nnx.jit(call, donate_argnums=0).lower(model, 1.0).compile()
    old = model.w.value
    assert compiled(model, 1.0) == 2
    assert old.is_deleted()
    assert model.w.value == 2


def test_lowering_an_abstract_model():
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    compiled = nnx.jit(call).lower(nnx.eval_shape(Scale), shape).compile()
    assert compiled(Scale(3.0), jnp.array(2.0)) == 6


def test_traced_goes_on_to_compiled():
    traced = nnx.jit(call).trace(Scale(), 1.0)
    assert "mul" in str(traced.jaxpr)
    assert "stablehlo.multiply" in traced.lower().as_text()
    assert traced.lower().compile()(Scale(4.0), 1.0) == 4


@pytest.mark.parametrize("hijax", [False, True])
def test_eval_shape_changes_nothing(hijax):
    shared = nnx.Param(jnp.ones(2), hijax=hijax)
    pair = Pair([shared, shared], Count(jnp.zeros(3)))
    pair.a.append(pair)

    @nnx.jit
    def step(pair):
        pair.b[...] += 1
        pair.new = 1
        return pair, pair.a[0] * 2

    copy, out = step.eval_shape(pair)
    assert out == jax.ShapeDtypeStruct((2,), jnp.float32)
    assert copy.a[0] is copy.a[1]
    assert copy.a[2] is copy
    assert copy.b.value == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert copy.new == 1
    assert copy is not pair
    assert pair.b.value.tolist() == [0, 0, 0]
    assert not hasattr(pair, "new")


def test_clear_cache_traces_again():
    step, traces = counted(call)
    jitted, model = nnx.jit(step), Scale()
    for _ in range(2):
        jitted(model, 1.0)
        jitted.clear_cache()
    assert len(traces) == 2
    assert model.count.value == 2
