"""nnx.Stack does what the list of its layers does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import (
    AxisError,
    CarryError,
    FeatureError,
    LayerArgumentError,
    RngsError,
)
from tests.compare import assert_alike

DEPTH = 3
X = jax.random.normal(jax.random.key(0), (5, 4))


class Block(nnx.Module):
    """A layer with parameters, statistics, keys and something sown."""

    traces = 0

    def __init__(self, features=4, *, rngs):
        self.linear = nnx.Linear(features, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.table = jnp.ones(features)

    def __call__(self, x, scale=1.0, *, train=True, rngs=None):
        Block.traces += 1
        h = self.norm(self.linear(x) + self.table[None], use_running_average=not train)
        self.sow(nnx.Intermediate, "hidden", h)
        return x + scale * self.drop(h, deterministic=not train, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs, **options):
        self.blocks = nnx.Stack(functools.partial(Block, 4), DEPTH, rngs=rngs, **options)


def make(**options):
    return nnx.Stack(lambda rngs: Block(rngs=rngs), DEPTH, rngs=nnx.Rngs(0), **options)


def one_by_one(layers, x, *args, **kwargs):
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


OPTIONS = {
    "plain": {},
    "remat": {"remat": True},
    "policy": {"remat": jax.checkpoint_policies.dots_saveable},
    "unroll": {"unroll": 2},
    "unrolled": {"unroll": True, "remat": True},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@options
def test_a_call_is_a_loop_over_the_layers(options):
    stack = make(**options)
    layers = stack.to_list()
    scale = jnp.full((5, 4), 0.5)
    Block.traces = 0
    for _ in range(2):  # the second starts from the statistics and keys of the first
        got = stack(X, scale, train=True)
        assert Block.traces == 1
        assert_alike(got, one_by_one(layers, X, scale, train=True))
        Block.traces = 0
    # Statistics, counts of keys and what was sown are those of each layer.
    assert_alike(nnx.state(nnx.List(stack.to_list())), nnx.state(nnx.List(layers)))
    assert [sown.shape for sown in stack.stacked.hidden.value] == [(DEPTH, 5, 4)] * 2
    assert stack.stacked.drop.rngs.count.value.tolist() == [2] * DEPTH


@options
def test_training_matches_a_list(options):
    stack, listed = make(**options), nnx.List(make().to_list())

    def loss(model, x):
        call = model if isinstance(model, nnx.Stack) else functools.partial(one_by_one, model)
        return (call(x) ** 2).mean()

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        nnx.pop(model, nnx.Intermediate)
        return value, grads

    optimizers = [
        nnx.Optimizer(m, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param) for m in (stack, listed)
    ]
    Block.traces = 0
    for number in range(2):
        value, grads = step(stack, optimizers[0], X + number)
        assert Block.traces == (number == 0)
        Block.traces = 0
        want, want_grads = step(listed, optimizers[1], X + number)
        Block.traces = 0
        assert_alike(value, want)
        assert_alike(nnx.Stack.unstack_state(grads), want_grads, rtol=1e-4, atol=1e-4)
    assert_alike(nnx.state(nnx.List(stack.to_list())), nnx.state(listed), rtol=1e-4, atol=1e-4)


def test_the_layers_are_those_of_split_rngs_and_vmap():
    rngs, other = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
    stack = nnx.Stack(Block, DEPTH, rngs=rngs)

    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap
    def by_hand(rngs):
        return Block(rngs=rngs)

    assert_alike(nnx.state(stack.stacked), nnx.state(by_hand(other)), rtol=0, atol=0)
    assert_alike(nnx.state(rngs), nnx.state(other), rtol=0, atol=0)


def test_a_layer_that_keeps_its_rngs_keeps_its_own():
    class Noise(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs

        def __call__(self, x):
            return x + self.rngs.normal(x.shape)

    rngs = nnx.Rngs(0)
    stack = nnx.Stack(Noise, DEPTH, rngs=rngs)
    layers = stack.to_list()
    assert stack.stacked.rngs.default.key.shape == (DEPTH,)
    assert rngs.default.key.shape == ()
    assert int(rngs.default.count) == 1
    assert_alike(stack(X), one_by_one(layers, X))
    keys = [jax.random.key_data(layer.rngs()).tolist() for layer in layers]
    assert len(set(map(tuple, keys))) == DEPTH


def test_arguments_of_a_call():
    """Flags stay Python values, objects are updated, and each layer draws its own keys."""
    stack, rngs, other = make(), nnx.Rngs(7), nnx.Rngs(7)
    layers = stack.to_list()
    assert_alike(stack(X, train=False), one_by_one(layers, X, train=False))
    for remat in (False, True):
        stack.remat = remat
        assert_alike(stack(X, rngs=rngs), one_by_one(layers, X, rngs=other))
        assert_alike(nnx.state(rngs), nnx.state(other))
    assert int(rngs.default.count) == 2 * DEPTH


def test_scan_gives_and_takes_what_differs_from_layer_to_layer():
    stack = make(remat=True)
    layers = stack.to_list()
    scales = jnp.arange(1.0, DEPTH + 1)

    def step(layer, x, scale, shift, *, train):
        y = layer(x, scale, train=train) + shift
        return y, (y.mean(), scale)

    for reverse in (False, True):
        x = X
        means = [jnp.zeros(())] * DEPTH
        order = range(DEPTH)[::-1] if reverse else range(DEPTH)
        for number in order:
            x, (means[number], _) = step(layers[number], x, scales[number], 0.5, train=True)
        got, (got_means, got_scales) = stack.scan(step, X, scales, 0.5, reverse=reverse, train=True)
        assert_alike(got, x)
        assert_alike(got_means, jnp.stack(means))
        assert_alike(got_scales, scales)


# ---- under transforms ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "unroll", "has_barrier"),
    [(3, 1, False), (3, 2, True), (3, True, True), (1, 1, True)],
)
def test_remat_of_layers_that_share_no_loop(length, unroll, has_barrier):
    """Without a loop the compiler would merge both computations of a layer."""
    linear = functools.partial(nnx.Linear, 4, 4)
    stack = nnx.Stack(linear, length, rngs=nnx.Rngs(0), remat=True, unroll=unroll)
    grad = nnx.jit(nnx.grad(lambda stack: stack(X).sum()))
    assert ("optimization_barrier" in grad.lower(stack).as_text()) == has_barrier


def test_an_ensemble_of_stacks():
    keys = jax.random.split(jax.random.key(0), 2)

    def build(key):
        return nnx.Stack(functools.partial(nnx.Linear, 4, 4), DEPTH, rngs=nnx.Rngs(key))

    stacks = nnx.vmap(build)(keys)
    assert stacks.stacked.kernel.shape == (2, DEPTH, 4, 4)
    got = nnx.vmap(lambda stack, x: stack(x), in_axes=(0, None))(stacks, X)
    assert_alike(got, jnp.stack([build(key)(X) for key in keys]))
    with pytest.raises(AxisError) as error:
        stacks[0]
    assert str(error.value) == (
        "stacks (Stack) has 3 layers, but stacked.bias is float32[2,3,4].\n"
        "Fix: keep the layers' axis first; inside nnx.vmap other axes are gone."
    )


def test_a_stack_of_stacks():
    def inner(rngs):
        return nnx.Stack(Block, 2, rngs=rngs)

    stack = nnx.Stack(inner, DEPTH, rngs=nnx.Rngs(0))
    layers = [inner.to_list() for inner in stack.to_list()]
    Block.traces = 0
    got = stack(X)
    assert Block.traces == 1
    assert_alike(got, one_by_one([layer for inner in layers for layer in inner], X))
    assert stack.stacked.stacked.linear.kernel.shape == (DEPTH, 2, 4, 4)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_without_graph_updates(graph):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(False):
        stack = nnx.Stack(functools.partial(nnx.BatchNorm, 4), DEPTH, rngs=nnx.Rngs(0))
        layers = stack.to_list()
        assert_alike(stack(X), one_by_one(layers, X))
    assert_alike(nnx.state(nnx.List(stack.to_list())), nnx.state(nnx.List(layers)))


def test_variables_stored_as_refs():
    stack = nnx.with_vars(make(), ref=True, only=nnx.Not(nnx.RngState))
    plain = make()
    assert_alike(stack(X), plain(X))
    assert_alike(stack.stacked.norm.mean.value, plain.stacked.norm.mean.value)
    assert_alike(stack[1].linear.kernel.value, plain[1].linear.kernel.value)


def test_flags_views_and_captures():
    stack = make()
    stack.eval()
    assert stack.stacked.drop.deterministic
    assert stack[0].drop.deterministic
    view = nnx.view(stack, deterministic=False)
    assert not view.stacked.drop.deterministic
    assert view.stacked.linear.kernel is stack.stacked.linear.kernel
    out, sown = nnx.capture(stack, nnx.Intermediate)(X, train=False)
    assert_alike(out, stack(X, train=False))
    assert sown["stacked"]["hidden"].value[0].shape == (DEPTH, 5, 4)


class Counting(nnx.Module):
    """A layer whose ``set_view`` makes a Variable from its own shape and number."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.number = nnx.Variable(rngs.uniform())
        self.counts = None

    def __call__(self, x):
        if self.counts is not None:
            self.counts[...] += 1
        return self.linear(x)

    def set_view(self, counting=None):
        if counting:
            size = self.linear.kernel.shape[0]
            self.counts = nnx.Cache(jnp.full(size, self.number[...]), out_sharding=(None,))


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
@pytest.mark.parametrize("partition", [None, "layers"])
def test_a_view_makes_variables_for_each_layer(partition, graph):
    stack = nnx.Stack(Counting, DEPTH, rngs=nnx.Rngs(0), partition=partition)
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(False), nnx.use_eager_sharding(False):
        view = nnx.view(stack, counting=True)
        assert view.stacked.linear.kernel is stack.stacked.linear.kernel
        assert view.stacked.counts.out_sharding == (partition, None)
        start = jnp.broadcast_to(stack.stacked.number[:, None], (DEPTH, 4))
        assert_alike(view.stacked.counts.value, start)
        assert_alike(view(X), stack(X))
        assert_alike(view.stacked.counts.value, start + 1)
        assert stack.stacked.counts is None
        again = nnx.view(view, counting=False, only=lambda path, _: path == ("stacked",))
        assert again.stacked.counts is view.stacked.counts
        with pytest.raises(ValueError, match=r"Unused keys found in nnx\.view: \['counting'\]"):
            nnx.view(stack, counting=True, only=lambda path, _: path != ("stacked",))


def test_views_of_shapes_refs_and_ensembles():
    abstract = nnx.view(nnx.eval_shape(make), deterministic=True)
    assert abstract.stacked.drop.deterministic
    refs = nnx.with_vars(make(), ref=True, only=nnx.Not(nnx.RngState))
    view = nnx.view(refs, deterministic=True)
    assert view.stacked.drop.deterministic
    assert view.stacked.linear.kernel is refs.stacked.linear.kernel
    many = nnx.vmap(lambda key: nnx.Stack(Block, DEPTH, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 2)
    )
    assert nnx.view(many, deterministic=True).stacked.drop.deterministic


# ---- mistakes -----------------------------------------------------------------------------------


def test_a_layer_that_became_different_is_refused():
    model = Model(nnx.Rngs(0))
    text = (
        "model.blocks (Stack) holds equal layers, but the layer for position 1 differs from the "
        "others:\n  - .hidden: new (Intermediate)\n"
        "Fix: change the values of Variables only, or keep the layers in an nnx.List."
    )
    with pytest.raises(LayerArgumentError) as error, model.blocks.borrow(1) as layer:
        layer(X)
    assert str(error.value) == text
    with pytest.raises(LayerArgumentError) as error:
        model.blocks[1] = layer
    assert str(error.value) == text
    with pytest.raises(
        LayerArgumentError, match=r"\.linear\.kernel: float32\[4,4\] -> float32\[6,6\]"
    ):
        model.blocks[1] = Block(6, rngs=nnx.Rngs(0))


MISTAKES = {
    "no layers": (
        lambda model: nnx.Stack.from_list([]),
        LayerArgumentError,
        "Stack wants at least one layer, but got length=0.\n"
        "Fix: leave the stack out of the model where there are no layers.",
    ),
    "an empty slice": (
        lambda model: model.blocks[2:2],
        LayerArgumentError,
        "Stack wants at least one layer, but got length=0.",
    ),
    "no such layer": (
        lambda model: model.blocks[3],
        IndexError,
        "model.blocks (Stack) has 3 layers, but got [3].",
    ),
    "a slice of another length": (
        lambda model: model.blocks.__setitem__(slice(0, 2), [Block(rngs=nnx.Rngs(0))]),
        LayerArgumentError,
        "model.blocks (Stack): a slice of 2 layers cannot take 1; a stack keeps its length.\n"
        "Fix: nnx.Stack.from_list(layers) makes a new stack.",
    ),
    "not rngs": (
        lambda model: nnx.Stack(Block, 2, rngs=0),
        RngsError,
        "Stack draws the keys of its layers from rngs, but got the Python int 0.\n"
        "Fix: pass rngs=nnx.Rngs(0), or the rngs your own constructor was given.",
    ),
    "a layer in place of its class": (
        lambda model: nnx.Stack(Block(rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0)),
        LayerArgumentError,
        "Stack makes its layers, and wants what makes one, but got a Block.\n"
        "Fix: nnx.Stack(Block, length, rngs=rngs); for arguments, lambda rngs: Block(..., "
        "rngs=rngs); nnx.Stack.from_list(layers) for layers that there are.",
    ),
    "a factory without rngs": (
        lambda model: nnx.Stack(dict, 2, rngs=nnx.Rngs(0)),
        LayerArgumentError,
        "Stack calls layer_factory(rngs=rngs), but <class 'dict'> does not take rngs.\n"
        "Fix: lambda rngs: Layer(..., rngs=rngs), or leave rngs out if it needs none.",
    ),
    "an input that does not fit": (
        lambda model: model.blocks(jnp.ones((2, 7))),
        FeatureError,
        "model.blocks.stacked.linear (Linear) expected inputs whose last axis has size 4, but got "
        "float32[2,7].",
    ),
    "an output of another type": (
        lambda model: model.blocks(X.astype(jnp.int32)),
        CarryError,
        "nnx.Stack: the carry through model.blocks.stacked (Block) changes from int32[5,4] to "
        "float32[5,4].\nFix: keep shape and dtype, for example with .astype(...).",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    make_it, kind, text = MISTAKES[mistake]
    model = Model(nnx.Rngs(0))
    with pytest.raises(kind) as error:
        make_it(model)
    assert text in str(error.value)


@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_the_input_may_have_another_dtype_than_the_layers_return(given, dtype):
    stack = nnx.Stack(
        lambda rngs: nnx.Linear(4, 4, dtype=dtype, rngs=rngs), DEPTH, rngs=nnx.Rngs(0)
    )
    x = want = X.astype(given)
    for layer in stack.to_list():
        want = layer(want)
    for out in (stack(x), nnx.jit(lambda stack, x: stack(x))(stack, x)):
        assert out.dtype == want.dtype
        np.testing.assert_allclose(out, want, rtol=0.02 if dtype else 1e-5)


def test_a_layer_with_more_outputs():
    cells = nnx.Stack(functools.partial(nnx.SimpleCell, 4, 4), DEPTH, rngs=nnx.Rngs(0))
    with pytest.raises(CarryError) as error:
        cells(X, X)
    assert str(error.value) == (
        "cells.stacked (SimpleCell) is one of a stack, where each layer takes what the one before "
        "returns, but it takes x and returns ('x', 'x').\n"
        "Fix: stack.scan(f, x) for layers with more outputs, with f(layer, x, _) returning x and "
        "the rest."
    )
    carry, outputs = cells.scan(lambda cell, carry, _, x: cell(carry, x), X, None, X)
    assert outputs.shape == (DEPTH, 5, 4)
    assert_alike(outputs[-1], carry)
