"""explain_retrace says which path and field made a function trace again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from linnet import nnx
from tests.nnx.transforms.stateful import Pair, Scale, ScaleNormNoise


def step(model, x, *rest, **named):
    return x


def reason(jitted, first, second):
    """The text after two calls, each a tuple of arguments or a function that makes it."""
    for args in (first, second):
        jitted(*(args() if callable(args) else args))
    start = f"{jitted.__name__} was traced 2 times. The last time because "
    text = nnx.explain_retrace(jitted)
    assert text.startswith(start)
    return text.removeprefix(start)


def after(model, change):
    """Arguments whose model is changed when they are made."""

    def make():
        change(model)
        return (model, 1.0)

    return make


def test_before_any_trace_and_after_the_first():
    jitted = nnx.jit(step)
    assert nnx.explain_retrace(jitted) == "step was traced 0 times."
    jitted(Scale(), 1.0)
    jitted(Scale(), 2.0)
    assert nnx.explain_retrace(jitted) == "step was traced 1 time."


def test_a_flag_deep_in_the_model():
    net = ScaleNormNoise()
    text = reason(nnx.jit(step), (net, 1.0), after(net, lambda net: net.eval()))
    assert text == (
        "model.noise.deterministic: False -> True; model.norm.use_running_average: False -> True"
    )


def test_another_learning_rate():
    model, other = (Pair(optax.adam(rate), None) for rate in (1e-3, 1e-2))
    text = reason(nnx.jit(step), (model, 1.0), (other, 1.0))
    assert text.startswith("model.a.update.")
    assert text.endswith("step_size: -0.001 -> -0.01")


@dataclasses.dataclass(frozen=True)
class Config:
    sizes: tuple
    name: str = "a"


def make_function(rate):
    return lambda x: x * rate


STATICS = {
    "number": (1, 2, "model.a: 1 -> 2"),
    "type": (1, True, "model.a: 1 -> True"),
    "list": ([1], [1, 2], "model.a: [1] -> [1, 2]"),
    "nested": ({"k": [1, (2,)]}, {"k": [1, (3,)]}, "model.a.k[1][0]: 2 -> 3"),
    "dataclass": (Config((1, 2)), Config((1, 3)), "model.a.sizes[1]: 2 -> 3"),
    "closure": (make_function(0.1), make_function(0.2), "model.a.rate: 0.1 -> 0.2"),
    "partial": (functools.partial(max, 1), functools.partial(max, 2), "model.a.args[0]: 1 -> 2"),
    "function": (make_function(1), after, "model.a: make_function.<locals>.<lambda> -> after"),
    "long": ("x" * 200, "y", "model.a: '" + "x" * 79 + "... -> 'y'"),
}


@pytest.mark.parametrize("name", STATICS)
def test_a_static_attribute(name):
    old, new, text = STATICS[name]
    assert reason(nnx.jit(step), (Pair(old, 0), 1.0), (Pair(new, 0), 1.0)) == text


CHANGES = {
    "model.new: new (Scale)": lambda model: setattr(model, "new", Scale()),
    "model.new: new (3)": lambda model: setattr(model, "new", 3),
    "model.new: new (an array)": lambda model: setattr(model, "new", jnp.ones(2)),
    "model.again: new (a shared reference)": lambda model: setattr(model, "again", model.a),
    "model.b: removed": lambda model: delattr(model, "b"),
    "model.a: Scale -> ScaleNormNoise": lambda model: setattr(model, "a", ScaleNormNoise()),
    "model.a: Scale -> None": lambda model: setattr(model, "a", None),
    "model.b.w: Param -> Variable": lambda m: setattr(m.b, "w", nnx.Variable(jnp.zeros(()))),
    "model.b.w metadata role: nothing -> 'gate'": lambda m: m.b.w.set_metadata(role="gate"),
    "model.b.w: float32[] -> float32[3]": lambda model: setattr(model.b.w, "value", jnp.ones(3)),
}


@pytest.mark.parametrize("text", CHANGES)
def test_a_change_of_structure(text):
    model = Pair(Scale(), Scale())
    assert reason(nnx.jit(step), (model, 1.0), after(model, CHANGES[text])) == text


ARGUMENTS = {
    "x: float32[2] -> float32[3]": (jnp.ones(2), jnp.ones(3)),
    "x: float32[2] -> int32[2]": (jnp.ones(2), jnp.ones(2, jnp.int32)),
    "x: float32[] -> float32[] (weakly typed)": (jnp.zeros(()), 1.0),
    "x.k: float32[2] -> float32[3]": ({"k": jnp.ones(2)}, {"k": jnp.ones(3)}),
    "x: removed; x.k: new": (jnp.ones(2), {"k": jnp.ones(2)}),
    "x: no object -> Scale": (jnp.ones(2), Scale()),
}


@pytest.mark.parametrize("text", ARGUMENTS)
def test_another_plain_argument(text):
    old, new = ARGUMENTS[text]
    assert reason(nnx.jit(lambda m, x: 0.0), (Scale(), old), (Scale(), new)) == text


def test_arguments_without_a_name_of_their_own():
    text = reason(nnx.jit(step), (0.0, 0.0, jnp.ones(2)), (0.0, 0.0, jnp.ones(3)))
    assert text == "[2]: float32[2] -> float32[3]"


def test_arguments_passed_by_name():
    jitted = nnx.jit(step)
    jitted(0.0, 0.0, y=jnp.ones(2))
    jitted(0.0, 0.0, y=jnp.ones(3))
    assert nnx.explain_retrace(jitted).endswith("because y: float32[2] -> float32[3]")


def test_static_arguments():
    jitted = nnx.jit(lambda x, n: x, static_argnames="n")
    assert reason(jitted, (1.0, 2), (1.0, 3)) == "static argument n: 2 -> 3"


def test_settings():
    jitted = nnx.jit(step)
    jitted(Scale(), 1.0)
    with jax.default_matmul_precision("float32"):
        jitted(Scale(), 1.0)
    text = "because a setting of JAX or nnx changed, or a cache was cleared"
    assert nnx.explain_retrace(jitted).endswith(text)


def test_the_nearest_earlier_trace_is_compared():
    jitted, net = nnx.jit(step), ScaleNormNoise()
    jitted(net, jnp.ones(2))
    net.eval()
    jitted(net, jnp.ones(3))
    net.train()
    jitted(net, jnp.ones(4))
    net.eval()
    jitted(net, jnp.ones(4))
    assert nnx.explain_retrace(jitted).endswith("because x: float32[3] -> float32[4]")


def test_a_long_list_is_cut():
    old, new = Pair(list(range(6)), 0), Pair(list(range(1, 7)), 0)
    text = reason(nnx.jit(step), (old, 1.0), (new, 1.0))
    assert text.endswith("model.a[3]: 3 -> 4; and 2 more")


def test_methods_and_partials_are_looked_through():
    class Model(nnx.Module):
        @nnx.jit
        def run(self, x):
            return x

    model = Model()
    model.run(1.0)
    assert nnx.explain_retrace(model.run) == "run was traced 1 time."
    jitted = nnx.jit(Scale())
    jitted(1.0)
    assert nnx.explain_retrace(jitted) == "__call__ was traced 1 time."


def test_only_what_jit_made_can_be_explained():
    with pytest.raises(TypeError, match=r"takes a function made by nnx.jit, but got .*step"):
        nnx.explain_retrace(functools.partial(step, 1))
