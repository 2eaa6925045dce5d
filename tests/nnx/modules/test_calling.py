"""An error in the call of a module says in which module it was, and what that module holds."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import FeatureError


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return self.linear(x) * self.scale[None]


class TwoBlocks(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(nnx.Rngs(0)) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def notes(error):
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("This was in")]


@pytest.fixture
def model():
    return TwoBlocks()


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(jnp.ones((1, 2))),
        nnx.jit(lambda model: model(jnp.ones((1, 2)))),
        nnx.grad(lambda model: model(jnp.ones((1, 2))).sum()),
    ],
    ids=["as it is", "jit", "grad"],
)
def test_the_innermost_module_is_named_once(model, call):
    model.blocks[1].linear.kernel.value = jnp.ones((3, 2, 2))
    with pytest.raises(TypeError) as caught:
        call(model)
    assert notes(caught.value) == [
        "This was in the call of model.blocks[1].linear (Linear), which holds bias float32[2], "
        "kernel float32[3,2,2]."
    ]


def test_errors_of_the_program_itself(model):
    model.blocks[0].scale.value = jnp.ones(3)
    with pytest.raises((TypeError, ValueError)) as caught:
        model(jnp.ones((1, 2)))
    assert notes(caught.value) == [
        "This was in the call of model.blocks[0] (Block), which holds scale float32[3]."
    ]

    class Odd(nnx.Module):
        def __call__(self, x):
            raise ValueError("my own")

    odd = Odd()
    with pytest.raises(ValueError, match="my own") as caught:
        odd(1)
    assert notes(caught.value) == ["This was in the call of odd (Odd)."]


def test_errors_that_know_their_place_get_no_note(model):
    with pytest.raises(FeatureError, match=r"^model\.blocks\[0\]\.linear \(Linear\)") as caught:
        model(jnp.ones((1, 3)))
    assert notes(caught.value) == []


def test_under_a_precision_policy(model):
    nnx.set_precision(model, "compute=bfloat16")
    model.blocks[1].linear.kernel.value = jnp.ones((3, 2, 2))
    with pytest.raises(TypeError) as caught:
        model(jnp.ones((1, 2)))
    assert notes(caught.value)[0].startswith("This was in the call of model.blocks[1].linear (Lin")


def test_a_branch_of_python_on_a_traced_value():
    class Gate(nnx.Module):
        def __call__(self, x):
            return x if x.sum() > 0 else -x

    gate = Gate()
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        nnx.jit(lambda gate, x: gate(x))(gate, jnp.ones(2))
    assert notes(caught.value) == ["This was in the call of gate (Gate)."]
    assert any("nnx.jit: x is traced" in note for note in caught.value.__notes__)
