"""nnx.Stack as a list: its layers as copies, assigned, and borrowed to be changed."""

import contextlib

import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import DroppedWriteWarning, LayerArgumentError, TraceContextError
from tests.compare import assert_alike
from tests.nnx.nn.test_stack import DEPTH, Block, Model, X, make, one_by_one


def test_indices_and_slices():
    stack = make()
    layers = stack.to_list()
    assert len(stack) == DEPTH
    for index in (0, 2, -1, -DEPTH):
        assert_alike(nnx.state(stack[index]), nnx.state(_read_only(layers[index])))
    for index in (slice(1, None), slice(None, None, -1), slice(-2, 2), slice(0, 9)):
        part = stack[index]
        assert isinstance(part, nnx.Stack)
        assert len(part) == len(layers[index])
        assert_alike(part(X, train=False), one_by_one(layers[index], X, train=False))
    assert [type(layer) for layer in reversed(stack)] == [Block] * DEPTH


def _read_only(layer):
    return nnx.with_vars(layer, mutable=False)


def test_assigning_layers():
    stack = make()
    layers = [Block(rngs=nnx.Rngs(9 + number)) for number in range(DEPTH)]
    stack[-1] = layers[2]
    stack[:2] = layers[:2]
    assert_alike(nnx.state(nnx.List(stack.to_list())), nnx.state(nnx.List(layers)))
    layers[0].linear.bias[...] += 1.0  # the stack has copies
    assert_alike(stack[0].linear.bias.value, jnp.zeros(4))
    stack[0] = stack[1]
    assert_alike(stack[0].linear.kernel.value, layers[1].linear.kernel.value)
    stack[0:2] = make()[1:]
    assert_alike(nnx.state(stack[0]), nnx.state(make()[1]))


def test_iterating_lends_each_layer_for_its_turn():
    stack = make()
    layers = stack.to_list()
    x = X
    for layer in stack:
        x = layer.drop(layer.norm(x))
        layer.table = layer.table + 1
    want = X
    for layer in layers:
        want = layer.drop(layer.norm(want))
    assert_alike(x, want)
    assert stack.stacked.drop.rngs.count.value.tolist() == [1] * DEPTH
    assert_alike(stack.stacked.table, jnp.full((DEPTH, 4), 2.0))
    for layer in reversed(stack):
        layer.linear.bias.value = jnp.ones(4)
        break
    assert stack.stacked.linear.bias[:, 0].tolist() == [0.0, 0.0, 1.0]
    kernel = stack.stacked.linear.kernel.value
    for layer in stack:
        layer.linear(X)
    assert stack.stacked.linear.kernel.value is kernel  # reading copies nothing back


def test_iterating_inside_jit():
    stack, eager = make(), make().to_list()

    @nnx.jit
    def run(stack, x):
        for layer in stack:
            x = layer.drop(layer.norm(x))
        return x

    want = X
    for layer in eager:
        want = layer.drop(layer.norm(want))
    assert_alike(run(stack, X), want)
    assert_alike(nnx.state(nnx.List(stack.to_list())), nnx.state(nnx.List(eager)))


def test_a_loop_that_failed_writes_nothing_later():
    stack = make()
    held = iter(stack)
    next(held).linear.bias.value = jnp.ones(4)
    stack[0] = make()[1]
    want = nnx.clone(nnx.state(stack))
    with pytest.warns(DroppedWriteWarning) as told:
        del held  # as when a traceback that kept it is dropped
    assert str(told[0].message) == (
        "stack (Stack): a loop over the layers was left at layer 0, and the stack was changed "
        "before the layer was written. These changes of it are not kept:\n  - .linear.bias\n"
        "Fix: change a layer, or the stack, but not both, before leaving the loop."
    )
    assert_alike(nnx.state(stack), want, rtol=0, atol=0)
    held = iter(stack)
    next(held)
    stack[0] = make()[2]
    del held  # nothing was changed, and nothing is lost


def test_a_layer_is_read_only_after_a_loop_was_left():
    stack = make()
    for layer in stack:
        layer.table = layer.table + 1
        with stack.borrow(1) as other:
            other.table = other.table + 2
        break
    assert_alike(stack.stacked.table[:, 0], jnp.array([2.0, 3.0, 1.0]))
    with pytest.raises(TraceContextError, match="is read-only"):
        layer.linear.bias[...] = 1.0


def swap(stack):
    with stack.borrow(0) as first, stack.borrow(1) as second:
        one, two = first.linear.kernel[...], second.linear.kernel[...]
        first.linear.kernel[...], second.linear.kernel[...] = two, one


def add_in_pairs(stack):
    for number, layer in enumerate(stack):
        for other_number, other in enumerate(stack):
            if other_number != number:
                other.linear.kernel[...] += layer.linear.kernel[...]
                other.table = other.table + 1
        # What the inner loop did to other layers is no reason to refuse this.
        layer.linear.bias[...] += 1.0


@pytest.mark.parametrize("ref", [False, True], ids=["plain", "refs"])
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("change", [swap, add_in_pairs])
def test_several_layers_can_be_borrowed(change, jit, ref):
    class Layers(nnx.List):
        """A list that can be used as a stack is."""

        borrow = contextlib.contextmanager(lambda self, index: iter([self[index]]))

    stack = make()
    layers = Layers(stack.to_list())
    change(layers)
    if ref:
        stack = nnx.with_vars(stack, ref=True, only=nnx.Param)
    jit(change)(stack)
    assert_alike(nnx.to_pure_dict(nnx.Stack.unstack_state(nnx.state(stack))), pure(layers))


def pure(layers):
    return nnx.to_pure_dict(nnx.state(nnx.List(list(layers))))


def once_more(stack, layer):
    with stack.borrow(0) as again:
        again.linear.bias[...] = 5.0
        again.linear.kernel[...] = 6.0


def assign(stack, layer):
    stack[0] = make()[1]


def write_to_the_stack(stack, layer):
    stack.stacked.linear.kernel[...] = jnp.full((DEPTH, 4, 4), 9.0)


def replace_in_the_stack(stack, layer):
    stack.stacked.linear.kernel = nnx.Param(jnp.full((DEPTH, 4, 4), 9.0))


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("write", [once_more, assign, write_to_the_stack, replace_in_the_stack])
def test_two_writes_of_one_variable_are_refused(write, jit):
    model = Model(nnx.Rngs(0))

    def run(model):
        with model.blocks.borrow(0) as layer:
            write(model.blocks, layer)
            layer.linear.kernel[...] += 1.0

    with pytest.raises(LayerArgumentError) as error:
        jit(run)(model)
    assert str(error.value) == (
        "model.blocks (Stack): these were changed in layer 0 while it was borrowed and at the same "
        "time in the stack, or in the layer borrowed once more:\n  - .linear.kernel\n"
        "Fix: end the block of stack.borrow, or the turn of the loop, before changing them "
        "elsewhere."
    )


@pytest.mark.parametrize("ref", [False, True], ids=["plain", "refs"])
def test_writes_of_other_variables_are_merged(ref):
    stack = make()
    if ref:
        stack = nnx.with_vars(stack, ref=True, only=nnx.Param)
    with stack.borrow(0) as layer:
        once_more(stack, layer)
        stack.stacked.table = stack.stacked.table + 1
        stack.stacked.norm.scale[1] = 3.0
        layer.norm.bias[...] += 1.0
        layer.norm.scale[...] = 2.0  # the stack was changed in another layer there
    assert_alike(stack.stacked.linear.bias[:, 0], jnp.array([5.0, 0.0, 0.0]))
    assert_alike(stack.stacked.table[:, 0], jnp.full(3, 2.0))
    assert_alike(stack.stacked.norm.bias[:, 0], jnp.array([1.0, 0.0, 0.0]))
    assert_alike(stack.stacked.norm.scale[:, 0], jnp.array([2.0, 3.0, 1.0]))
    refused = pytest.raises(LayerArgumentError, match=r"more:\n  - \.linear\.bias\nFix")
    with refused, stack.borrow(0) as layer:
        stack.stacked.linear.bias[0] = 8.0
        layer.linear.bias[...] = 7.0
    assert_alike(stack.stacked.linear.bias[:, 0], jnp.array([8.0, 0.0, 0.0]))
    assert_alike(stack.stacked.linear.kernel[0], jnp.full((4, 4), 6.0))


def test_a_write_to_a_copy_is_refused():
    stack = make()
    lent = list(stack)
    for copy in (stack[0], stack[:2].stacked, lent[0]):
        with pytest.raises(TraceContextError) as error:
            copy.linear.bias.value = jnp.ones(4)
        assert str(error.value) == (
            "Param at copy.linear.bias is read-only: it was made with mutable=False.\n"
            "Fix: write to the original (for stack[i] of an nnx.Stack: `with stack.borrow(i) as "
            "layer:`), or make a copy with nnx.with_vars(..., mutable=True)."
        )
    assert_alike(stack[0](X, train=False), stack.to_list()[0](X, train=False))


def test_nothing_takes_the_place_of_data_in_a_copy():
    stack = nnx.Stack(Listed, DEPTH, rngs=nnx.Rngs(0))
    before = nnx.clone(nnx.state(stack))
    with stack.borrow(0) as lent:
        pass
    for copy in (stack[0], stack[1:].stacked, lent):
        with pytest.raises(TraceContextError) as error:
            copy.block.linear.bias = nnx.Param(jnp.ones(4))
        assert str(error.value) == (
            "copy.block.linear.bias is read-only: it belongs to a copy out of an nnx.Stack, which "
            "would not get what is put there.\n"
            "Fix: write to the layer in `with stack.borrow(i) as layer:`, or give the stack a "
            "whole one, stack[i] = layer; stack.to_list() makes copies that can be changed."
        )
        with pytest.raises(TraceContextError, match=r"copy\.block\.linear is read-only"):
            copy.block.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        with pytest.raises(TraceContextError, match=r"copy\.block\.table is read-only"):
            copy.block.table = jnp.zeros(4)
        with pytest.raises(TraceContextError, match=r"copy\.block\.table is read-only"):
            del copy.block.table
        with pytest.raises(TraceContextError, match=r"copy\.parts\[-1\] is read-only"):
            copy.parts[-1] = nnx.Param(jnp.zeros(2))
    with pytest.raises(TraceContextError, match=r"table is read-only"):
        nnx.jit(lambda block: setattr(block, "table", block.table + 1))(stack[0].block)
    with pytest.raises(TraceContextError, match=r"is read-only: it was made with mutable=False"):
        stack[:2][0] = stack.to_list()[1]
    with pytest.raises(TraceContextError, match=r"stacked is read-only"):
        stack[:2].stacked = stack.stacked
    assert_alike(nnx.state(stack), before, rtol=0, atol=0)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.block = Block(rngs=rngs)
        self.parts = nnx.List([nnx.Param(jnp.ones(2))])


def test_a_copy_can_be_used_and_copied():
    stack = make()
    copy = stack[0]
    copy.eval()
    copy.label = "first"
    copy(X, train=False)
    (sown,) = nnx.pop(copy, nnx.Intermediate)["hidden"].value
    assert sown.shape == (5, 4)
    for other in (nnx.clone(copy), nnx.view(copy), stack.to_list()[0]):
        other.linear.bias = nnx.Param(jnp.ones(4))
        assert_alike(other.linear.bias.value, jnp.ones(4))
    other.drop.rngs.count[...] = 4
    stack[1] = other
    assert_alike(stack.stacked.linear.bias[1], jnp.ones(4))
    with stack.borrow(2) as layer:
        layer.linear.bias = nnx.Param(jnp.full(4, 2.0))
    assert_alike(stack.stacked.linear.bias[:, 0], jnp.array([0.0, 1.0, 2.0]))
