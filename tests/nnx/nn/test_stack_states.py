"""Stacks from lists of layers and back, their states, and layers that cannot be stacked."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import LayerArgumentError, StateMismatchError
from tests.compare import assert_alike
from tests.nnx.nn.test_stack import DEPTH, Block, X, make, one_by_one


def test_lists_and_states_there_and_back():
    layers = [Block(rngs=nnx.Rngs(number)) for number in range(DEPTH)]
    stack = nnx.Stack.from_list(layers, remat=True, unroll=2)
    assert (stack.remat, stack.unroll, stack.length) == (True, 2, DEPTH)
    listed, stacked = nnx.state(nnx.List(layers)), nnx.state(stack)
    assert_alike(nnx.state(nnx.List(stack.to_list())), listed, rtol=0, atol=0)
    assert_alike(nnx.Stack.unstack_state(stacked), listed, rtol=0, atol=0)
    assert_alike(nnx.Stack.stack_state(listed), stacked, rtol=0, atol=0)
    as_text = {str(number): state for number, state in listed.items()}
    assert_alike(nnx.Stack.stack_state(as_text), stacked, rtol=0, atol=0)

    # A checkpoint of either restores into the other, whatever that held before.
    other = nnx.Stack.from_list([Block(rngs=nnx.Rngs(9)), *map(nnx.clone, layers[1:])])
    nnx.update(other, nnx.Stack.stack_state(nnx.to_pure_dict(listed)))
    assert_alike(other(X, train=False), one_by_one(layers, X, train=False))
    del layers[0].table  # the copies do not depend on the layers


def test_states_of_shapes():
    abstract = nnx.eval_shape(make)
    listed = nnx.Stack.unstack_state(nnx.state(abstract))
    assert listed[2]["linear"]["kernel"].value == jax.ShapeDtypeStruct((4, 4), jnp.float32)
    again = nnx.Stack.stack_state(listed)
    assert again["stacked"]["linear"]["kernel"].value.shape == (DEPTH, 4, 4)
    assert abstract[0].linear.kernel.shape == (4, 4)


def test_sharding_metadata_gains_and_loses_the_axis():
    told = []

    def layer(rngs):
        metadata = {
            "out_sharding": (None, "model"),
            "eager_sharding": False,
            "on_add_axis": lambda v, axis, name: told.append(("add", axis, name)),
            "on_remove_axis": lambda v, axis, name: told.append(("remove", axis, name)),
        }
        return nnx.Linear(4, 4, use_bias=False, kernel_metadata=metadata, rngs=rngs)

    stack = nnx.Stack(layer, DEPTH, rngs=nnx.Rngs(0), partition="layers")
    assert told == [("add", 0, "layers")]
    assert stack.stacked.kernel.out_sharding == ("layers", None, "model")
    names = []
    stack.scan(lambda layer, x, _: (names.append(layer.kernel.out_sharding) or x, None), X)
    assert names == [(None, "model")]
    assert stack.stacked.kernel.out_sharding == ("layers", None, "model")
    assert stack[1].kernel.out_sharding == (None, "model")
    assert stack[1:].stacked.kernel.out_sharding == ("layers", None, "model")
    told.clear()
    layers = stack.to_list()
    assert told == [("remove", 0, "layers")] * DEPTH
    again = nnx.Stack.from_list(layers, partition="layers")
    assert told[DEPTH:] == [("add", 0, "layers")]
    assert again.stacked.kernel.out_sharding == ("layers", None, "model")
    unnamed = nnx.Stack(layer, DEPTH, rngs=nnx.Rngs(0))
    assert unnamed.stacked.kernel.out_sharding == (None, None, "model")


def test_layers_that_differ_are_listed():
    rngs = nnx.Rngs(0)
    layers = [
        nnx.Linear(4, 4, rngs=rngs),
        nnx.Linear(4, 3, use_bias=False, rngs=rngs),
        Block(rngs=rngs),
    ]
    with pytest.raises(LayerArgumentError) as error:
        nnx.Stack.from_list(layers)
    assert str(error.value) == (
        "Stack takes equal layers, but these differ:\n"
        "  - layers[0] and layers[1] at .bias: Param -> None\n"
        "  - layers[0] and layers[1] at .out_features: 4 -> 3\n"
        "  - layers[0] and layers[1] at .use_bias: True -> False\n"
        "  - layers[0] and layers[1] at .kernel: float32[4,4] -> float32[4,3]\n"
        "  - layers[0] and layers[2]: Linear -> Block\n"
        "Fix: build them with the same arguments, or keep them in an nnx.List."
    )


def test_layers_that_share_are_refused():
    rngs = nnx.Rngs(0)
    layers = [Block(rngs=rngs) for _ in range(2)]
    layers[1].linear.kernel = layers[0].linear.kernel
    with pytest.raises(LayerArgumentError) as error:
        nnx.Stack.from_list(layers)
    assert str(error.value) == (
        "Stack keeps the Variables of each layer apart, but layers[0].linear.kernel and "
        "layers[1].linear.kernel are the same.\n"
        "Fix: build the layers with Variables and rngs of their own (rngs.fork()), or pass what "
        "they share to the call."
    )


def test_states_that_differ_are_listed():
    listed = {0: {"a": jnp.ones(2)}, 1: {"a": jnp.ones(3), "b": X}}
    with pytest.raises(StateMismatchError) as error:
        nnx.Stack.stack_state(listed)
    assert str(error.value) == (
        "Only equal layers can be stacked, but these differ:\n"
        "  - [1].a: float32[3], but [0].a: float32[2]\n"
        "  - [1].b: float32[5,4], but [0].b: nothing\n"
        "Fix: restore them into an nnx.List."
    )
