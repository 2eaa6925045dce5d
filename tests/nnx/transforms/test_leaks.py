"""Traced arrays that are put into static values: a warning names the place."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import HiddenDataWarning
from tests.models import Bag


@dataclasses.dataclass
class Stats:
    mean: object = 0.0


def put_into_a_dataclass(model, x):
    model.held = Stats()
    model.held.mean = x


def put_into_a_namespace(model, x):
    model.held = types.SimpleNamespace(inner=(1, types.SimpleNamespace(x=x)))


def put_into_a_partial(model, x):
    model.held = functools.partial(jnp.add, x)


def close_over(model, x):
    model.held = lambda y: x + y


@dataclasses.dataclass(slots=True)
class Slots:
    last: object = None
    scratch: object = dataclasses.field(default=None, compare=False)


def put_into_slots(model, x):
    model.held = Slots(x)


PLACES = {
    "dataclass with slots": put_into_slots,
    "dataclass": put_into_a_dataclass,
    "namespace": put_into_a_namespace,
    "partial": put_into_a_partial,
    "function": close_over,
}
FIX = "Fix: keep it in a Variable or in an attribute of a module."


def model():
    return Bag(inner=Bag(w=nnx.Param(jnp.ones(2)), held=None))


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_a_traced_array_in_a_static_value_is_named(put):
    run = nnx.jit(lambda model, x: put(model.inner, x))
    with pytest.warns(HiddenDataWarning) as caught:
        run(model(), jnp.ones(3))
    [warning] = caught
    assert str(warning.message) == (
        "nnx.jit: model.inner.held is static, and holds a traced float32[3] now. Arrays in static "
        "values are not brought out of the call, and JAX raises UnexpectedTracerError where this "
        f"one is used.\n{FIX}"
    )
    assert warning.filename == __file__


def test_a_traced_array_in_metadata_is_named():
    run = nnx.jit(lambda model: model.inner.w.set_metadata(mask=model.inner.w > 0))
    with pytest.warns(HiddenDataWarning, match=r"metadata 'mask' of model\.inner\.w is static"):
        run(model())


def test_a_traced_array_in_a_static_element_of_a_list_is_named():
    found = model()
    found.inner.list = [Slots(), jnp.ones(2)]
    run = nnx.jit(lambda model, x: setattr(model.inner.list[0], "last", x))
    with pytest.warns(HiddenDataWarning, match=r"model\.inner\.list\[0\] is static"):
        run(found, jnp.ones(3))


def test_a_traced_array_in_a_module_that_is_returned_is_named():
    run = nnx.jit(lambda x: Bag(w=nnx.Param(x), held=Stats(x)))
    with pytest.warns(HiddenDataWarning, match=r"the output\.held is static"):
        run(jnp.ones(3))


def test_what_was_there_before_is_not_named_again():
    @nnx.jit
    def run(model, x):
        model.held = Stats(x)

        def loss(model):
            model.inner.flag = True
            return model.inner.w.sum() * model.held.mean.sum()

        grads = nnx.grad(loss)(model)
        model.held = None
        return grads

    assert run(model(), jnp.ones(2))["inner"]["w"].tolist() == [2, 2]


def test_a_field_that_the_equality_leaves_out_is_not_named():
    found = model()
    found.held = Slots()

    def run(model, x):
        model.held.scratch = x
        model.inner.count = getattr(model.inner, "count", 0) + 1

    for number in range(3):
        nnx.jit(run)(found, jnp.ones(2))
        assert (found.inner.count, found.held.scratch) == (number + 1, None)


def test_a_gradient_names_it_too():
    def loss(model):
        put_into_a_dataclass(model, model.inner.w * 2)
        return model.inner.w[0]

    with pytest.warns(HiddenDataWarning, match=r"nnx\.grad: model\.held is static"):
        nnx.grad(loss)(model())


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_an_array_that_is_not_traced_may_be_static(put):
    found = model()
    put(found.inner, jnp.ones(3))
    nnx.jit(lambda model: setattr(model.inner, "flag", True))(found)
    assert found.inner.flag


def test_what_is_taken_back_before_the_end_is_no_leak():
    def run(model, x):
        put_into_a_dataclass(model, x)
        y = model.held.mean * 2
        model.held = None
        return y

    assert nnx.jit(run)(model(), jnp.ones(2)).tolist() == [2, 2]
