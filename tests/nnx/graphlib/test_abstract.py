"""A model that has shapes and no values says so, and where, when it is asked to compute."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import AbstractValueError


class Scale(nnx.Module):
    def __init__(self):
        self.by = nnx.Param({"a": jnp.ones(2), "b": 1.0})

    def __call__(self, x):
        return x * self.by.value["a"]


class LayersEmbedAndScale(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
        self.embed = nnx.Embed(4, 2, rngs=rngs)
        self.scale = Scale()

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


X = jnp.ones((1, 2))
FIX = (
    "Fix: give it values with nnx.update(model, state) or a checkpoint (io.restore), or build the "
    "model for real; nnx.eval_shape(f, model) computes with shapes alone."
)


@pytest.fixture
def model():
    return nnx.eval_shape(lambda: LayersEmbedAndScale(nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model: model(X),
            "model.layers[0].kernel has only a shape and a dtype, float32[2,3]",
        ),
        (lambda model: model.layers[0](X), "Param at model.layers[0].kernel has only a shape"),
        (lambda model: model.embed(jnp.array([1])), "Param at model.embed.embedding has only a sh"),
        (
            lambda model: model.scale(X),
            "Param at model.scale.by has only a shape and a dtype, float",
        ),
        (nnx.jit(lambda model: model(X)), "model.embed.embedding has only a shape and a dtype"),
        (
            nnx.grad(lambda model: model(X).sum()),
            "model.layers[1].mean has only a shape and a dtype",
        ),
        (nnx.vmap(lambda m: m(X), in_axes=None, axis_size=2), "model.layers[0].kernel has only"),
        (nnx.remat(lambda model: model(X)), "has only a shape and a dtype"),
    ],
    ids=["module", "layer", "embedding", "tree", "jit", "grad", "vmap", "remat"],
)
def test_the_variable_is_named(model, call, text):
    with pytest.raises(AbstractValueError) as caught:
        call(model)
    assert text in str(caught.value)
    assert str(caught.value).endswith(FIX)
    assert isinstance(caught.value, TypeError)


def test_how_many_there_are(model):
    with pytest.raises(AbstractValueError, match=r"no value to compute with \(nor have 1 others\)"):
        model.layers[0](X)
    with pytest.raises(AbstractValueError, match=r"no value to compute with\.\n"):
        model.embed(jnp.array([0]))


def test_under_a_precision_policy(model):
    nnx.set_precision(model, "compute=bfloat16")
    with pytest.raises(AbstractValueError, match=r"Param at model\.layers\[0\]\.kernel has only"):
        model(X)


def test_values_mend_it(model):
    whole = LayersEmbedAndScale(nnx.Rngs(0))
    nnx.update(model, nnx.state(whole))
    assert (model(X) == whole(X)).all()


def test_other_errors_are_left_alone(model):
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        model()
    assert type(caught.value) is TypeError
    with pytest.raises(TypeError) as caught:
        nnx.jit(lambda model: jnp.sum(jax.ShapeDtypeStruct((), "float32")))(
            LayersEmbedAndScale(nnx.Rngs(0))
        )
    assert not isinstance(caught.value, AbstractValueError)


def test_a_missing_attribute_says_that_there_is_no_value(model):
    with pytest.raises(
        AttributeError, match=r"model\.embed\.embedding has no .* 'sum'.* no value\."
    ):
        model.embed.embedding.sum()


def test_shapes_still_flow_through(model):
    assert nnx.eval_shape(lambda model: model(X), model) == jax.ShapeDtypeStruct((1, 3), "float32")
