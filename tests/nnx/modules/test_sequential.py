"""nnx.Sequential: modules and functions, one after the other."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import LayerArgumentError


class Scale(nnx.Module):
    def __init__(self, factor):
        self.factor = nnx.Param(jnp.float32(factor))

    def __call__(self, x):
        return x * self.factor


class Noise(nnx.Module):
    def __call__(self, x, *, rngs):
        return x + rngs


def test_layers_run_in_order():
    model = nnx.Sequential(Scale(2), lambda x: x + 1, Scale(3))
    assert model(1.0) == 9
    assert jax.jit(lambda m, x: m(x))(model, 1.0) == 9
    assert [float(x) for x in jax.tree.leaves(model)] == [2, 3]
    assert list(nnx.state(model).flat_state().paths) == [
        ("layers", 0, "factor"),
        ("layers", 2, "factor"),
    ]


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        (lambda x: (x, 2), lambda x, y: x - y, 1),
        (lambda x: {"b": 1, "a": x}, lambda a, b: a - b, 2),
        (lambda x: [x, 2], sum, 5),
    ],
    ids="tuple dict list".split(),
)
def test_tuples_are_passed_on_as_arguments_and_dicts_as_keywords(first, second, want):
    assert nnx.Sequential(first, second)(3) == want


def test_the_first_layer_gets_all_arguments():
    assert nnx.Sequential(lambda x, y, z: x + y + z)(1, 2, z=3) == 6


@pytest.mark.parametrize(
    ("args", "kwargs", "want"), [((3,), {}, 3), ((3, 4), {}, (3, 4)), ((), {"x": 3}, {"x": 3})]
)
def test_without_layers_the_input_comes_back(args, kwargs, want):
    assert nnx.Sequential()(*args, **kwargs) == want


def test_rngs_go_to_the_layers_that_take_them():
    model = nnx.Sequential(Noise(), lambda x: x * 2, lambda x, **kw: x + kw["rngs"], jnp.negative)
    assert model(1, rngs=10) == -32


def test_layers_can_be_changed_afterwards():
    model = nnx.Sequential(Scale(2))
    model.layers.append(Scale(5))
    model.layers[0] = lambda x: x - 1
    assert model(3.0) == 10


@pytest.mark.parametrize("layer", [3, "relu", None])
def test_a_layer_that_cannot_be_called_is_named(layer):
    model = nnx.Sequential(jnp.tanh, layer)
    with pytest.raises(LayerArgumentError) as error:
        model(1.0)
    assert str(error.value) == (
        "model.layers[1] is not callable: Sequential applies modules and functions, but got "
        f"{layer!r}.\nFix: pass the module or the function itself, such as nnx.relu."
    )
    assert isinstance(error.value, TypeError)


def test_a_list_of_layers_is_to_be_unpacked():
    model = nnx.Sequential([nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu])
    with pytest.raises(LayerArgumentError) as error:
        model(jnp.ones((1, 2)))
    assert str(error.value) == (
        "model.layers[0] is not callable: Sequential applies modules and functions, but got a list "
        "of 2.\nFix: nnx.Sequential(*layers)."
    )


def test_without_layers_the_input_is_the_output():
    empty = nnx.Sequential()
    assert empty() is None
    assert empty(3) == 3
    assert empty(3, 4) == (3, 4)
    assert empty(x=3) == {"x": 3}
