"""Models without arrays: nnx.eval_shape, and jax.eval_shape of a constructor."""

import functools

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError


class Linear(nnx.Module):
    def __init__(self, din, dout, rngs):
        self.w = nnx.Param(rngs.normal((din, dout)), names=("in", "out"))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.scale = jnp.full((dout,), 2.0, jnp.float32)
        self.width = dout

    def __call__(self, x):
        self.calls[...] += 1
        self.width += 1
        return x @ self.w * self.scale[None]


class Stack(nnx.Module):
    def __init__(self, size):
        rngs = nnx.Rngs(0)
        self.layers = [Linear(size, size, rngs) for _ in range(3)]
        self.rngs = rngs


class Tied(nnx.Module):
    def __init__(self):
        self.a = Linear(2, 2, nnx.Rngs(0))
        self.b = self.a


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def layer():
    return Linear(2, 3, nnx.Rngs(0))


@pytest.mark.parametrize("eval_shape", [nnx.eval_shape, jax.eval_shape], ids=["nnx", "jax"])
def test_a_model_too_big_to_build(eval_shape):
    model = eval_shape(lambda: Stack(10**6))
    assert type(model) is Stack
    assert len(model.layers) == 3
    layer = model.layers[2]
    assert type(layer.w) is nnx.Param
    assert layer.w.value == struct(10**6, 10**6)
    assert layer.w.names == ("in", "out")
    assert layer.scale == struct(10**6)
    assert layer.width == 10**6
    assert model.rngs.default.key.value.dtype == jax.random.key(0).dtype
    assert repr(model).startswith(
        "Stack( # BatchStat: 3 (12 B), Param: 3,000,000,000,000 (12.0 TB), RngState: 2 (12 B), "
    )


def test_the_counts_that_the_first_seed_prints():
    class Bare(nnx.Module):
        def __init__(self, size):
            self.kernel = nnx.Param(jnp.zeros((size, size)))
            self.bias = nnx.Param(jnp.zeros(size))

    init = jax.jit(Bare, static_argnums=0)
    model = jax.eval_shape(functools.partial(init, 8190))
    first, *rest = str(model).splitlines()
    assert first == "Bare( # Param: 67,084,290 (268.3 MB)"
    assert rest[:2] == [
        "  bias=Param( # 8,190 (32.8 KB)",
        "    value=ShapeDtypeStruct(shape=(8190,), dtype=float32)",
    ]


def test_a_call_on_shapes_changes_nothing(layer):
    out = nnx.eval_shape(lambda m, x, *, k: (m(x), k), layer, struct(4, 2), k=jnp.ones(2))
    assert out == (struct(4, 3), struct(2))
    assert layer.calls.value == 0
    assert layer.width == 3


def test_rngs_as_an_argument_are_not_drawn_from():
    rngs = nnx.Rngs(0)
    model = nnx.eval_shape(functools.partial(Linear, 2, 3), rngs)
    assert model.w.value == struct(2, 3)
    assert rngs.default.count.value == 0


def test_modules_in_and_out_of_any_pytree(layer):
    out = nnx.eval_shape(lambda models: {"same": models, "n": 3}, [layer, (layer.w, 2.0)])
    assert out["same"][0] is not layer
    assert out["same"][0].w.value == struct(2, 3)
    assert out["same"][1][0] is out["same"][0].w
    assert out["n"].shape == ()


def test_an_abstract_model_is_filled(layer):
    abstract = nnx.eval_shape(lambda: Linear(2, 3, nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    assert graphdef == nnx.graphdef(layer)
    filled = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state))
    assert filled(jnp.ones((1, 2))).tolist() == [[2, 2, 2]]
    nnx.update(abstract, nnx.state(layer))
    assert abstract.w.value is layer.w.value


def test_sharing_survives():
    tied = nnx.eval_shape(Tied)
    assert tied.a is tied.b
    assert tied.a.w is tied.b.w


@pytest.mark.parametrize(
    "arguments", [(Tied,), (lambda m: None, Tied())], ids=["result", "argument"]
)
def test_sharing_in_tree_mode(arguments):
    with pytest.raises(SharedReferenceError, match=r"\.b was already seen at .*\.a\. tree-mode ev"):
        nnx.eval_shape(*arguments, graph=False)
    with nnx.set_graph_mode(False), pytest.raises(SharedReferenceError, match="eval_shape"):
        nnx.eval_shape(*arguments)
    if len(arguments) == 1:
        nnx.eval_shape(*arguments, graph=True, graph_updates=False)


def test_an_error_inside_is_the_programs_own(layer):
    with pytest.raises(TypeError, match="contracting dimensions"):
        nnx.eval_shape(lambda m: m(jnp.ones((4, 5))), layer)
    assert layer.calls.value == 0


def test_no_tracer_stays_behind(layer, leak_check):
    model = nnx.eval_shape(lambda m: (m(jnp.ones((1, 2))), m)[1], layer)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
