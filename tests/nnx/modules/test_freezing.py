"""Freezing by path, module or filter, for gradients and optimizers alike, and how it is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import FilterError, StateMismatchError

X = jnp.arange(12.0).reshape(4, 3) / 12


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(3, 4, rngs=rngs)
        self.down = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class BlocksNormAndHead(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


def loss(model):
    return (model(X) ** 2).sum()


def paths(state):
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
PARAMS = {f"{name}.{part}" for name in LINEARS for part in ("kernel", "bias")}
PARAMS |= {"norm.scale", "norm.bias"}
STATS = {"norm.mean", "norm.var"}


def of(*prefixes):
    return {path for path in PARAMS if path.startswith(prefixes)}


CHOICES = {
    "path of a module": (lambda m: ["blocks.0"], of("blocks.0")),
    "path of a Variable": (lambda m: ["head.kernel"], {"head.kernel"}),
    "one step for any": (lambda m: ["blocks.*.up"], of("blocks.0.up", "blocks.1.up")),
    "any number of steps": (lambda m: ["**.bias"], {p for p in PARAMS if p.endswith("bias")}),
    "any number may be none": (lambda m: ["**.head"], of("head")),
    "part of a step": (lambda m: ["h?a*.k*"], {"head.kernel"}),
    "module": (lambda m: [m.blocks[1]], of("blocks.1")),
    "Variable": (lambda m: [m.head.bias], {"head.bias"}),
    "kind": (lambda m: [nnx.Param], PARAMS),
    "filter": (lambda m: [nnx.PathContains("down")], {p for p in PARAMS if "down" in p}),
    "several": (lambda m: ["head", m.norm], of("head", "norm") | STATS),
    "everything": (lambda m: [], PARAMS | STATS),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_chosen_is_frozen(choice):
    choose, want = CHOICES[choice]
    model = BlocksNormAndHead()
    nnx.freeze(model, *choose(model))
    assert paths(nnx.state(model, nnx.frozen)) == want
    assert paths(nnx.state(model, nnx.trainable)) == PARAMS - want
    nnx.unfreeze(model, *choose(model))
    assert paths(nnx.state(model, nnx.frozen)) == set()
    assert nnx.graphdef(model) == nnx.graphdef(BlocksNormAndHead())


@pytest.mark.parametrize("wrt", [None, nnx.Param, [nnx.Param, nnx.BatchStat]], ids=str)
def test_gradients_leave_out_what_is_frozen(wrt):
    model = BlocksNormAndHead()
    nnx.freeze(model, "blocks", "norm")
    grads = nnx.grad(loss, wrt=wrt)(model)
    assert paths(grads) == of("head")
    value, again = nnx.value_and_grad(loss, wrt=wrt)(model)
    assert paths(again) == of("head") and value > 0


def test_gradients_of_what_trains_are_the_same():
    thawed, model = BlocksNormAndHead(), BlocksNormAndHead()
    nnx.freeze(model, "blocks.0", "norm")
    want = nnx.grad(loss)(thawed)
    jax.tree.map(np.testing.assert_array_equal, nnx.grad(loss)(model).head, want.head)


def test_states_leave_out_what_is_frozen_too():
    model = BlocksNormAndHead()
    nnx.freeze(model, "blocks")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads = nnx.grad(lambda params, rest: loss(nnx.merge(graphdef, params, rest)))(params, rest)
    assert paths(grads) == PARAMS - of("blocks")


def test_a_variable_by_itself_is_asked_for_by_itself():
    weight = nnx.Param(jnp.array(3.0), frozen=True)
    assert float(nnx.grad(lambda w: w * w)(weight).value) == 6.0


def test_vjp_leaves_out_what_is_frozen():
    model = BlocksNormAndHead()
    nnx.freeze(model, "blocks", "norm")
    _, pull = nnx.vjp(loss, model)
    assert paths(pull(1.0)[0]) == of("head")


def trained_alone(model, step):
    """Which Variables a step changed."""
    before = nnx.to_flat_state(nnx.clone(nnx.state(model, nnx.Param)))
    step()
    after = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    return {
        ".".join(map(str, path))
        for path, old in before
        if not np.array_equal(old.value, after[path].value)
    }


@pytest.mark.parametrize("jit", [nnx.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("old_form", [True, False])
def test_the_optimizer_leaves_alone_what_is_frozen(jit, old_form):
    model = BlocksNormAndHead()
    nnx.freeze(model, "blocks", "norm")
    tx = optax.adamw(0.1, weight_decay=0.5)
    optimizer = nnx.Optimizer(model, tx, **({} if old_form else {"wrt": nnx.Param}))

    @jit
    def step(model, optimizer):
        grads = nnx.grad(loss)(model)
        optimizer.update(*([grads] if old_form else [model, grads]))

    assert trained_alone(model, lambda: step(model, optimizer)) == of("head")
    assert {path[-1] for path, _ in nnx.to_flat_state(nnx.state(optimizer, nnx.OptVariable))} == {
        "kernel",
        "bias",
    }


def test_gradients_of_frozen_variables_are_ignored_by_the_optimizer():
    """jax.grad differentiates all of its argument."""
    model = BlocksNormAndHead()
    nnx.freeze(model, "blocks")
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def pure_loss(params):
        return loss(nnx.merge(graphdef, params, nnx.clone(rest)))

    grads = jax.grad(pure_loss)(params)
    assert paths(grads) == PARAMS
    assert not trained_alone(model, lambda: optimizer.update(model, grads)) & of("blocks")


def test_tree_mode_keeps_the_type_of_the_argument():
    model = BlocksNormAndHead()
    nnx.freeze(model.blocks)
    grads = nnx.grad(lambda up: (up(X) ** 2).sum(), graph_updates=False)(model.blocks[0].up)
    assert type(grads) is nnx.Linear and bool((grads.kernel[...] != 0).any())


def test_it_stays_frozen_through_split_merge_clone_and_jit():
    model = BlocksNormAndHead()
    nnx.freeze(model, "head")
    for copy in (nnx.clone(model), nnx.merge(*nnx.split(model)), nnx.jit(lambda m: m)(model)):
        assert paths(nnx.state(copy, nnx.frozen)) == of("head")
    abstract = nnx.eval_shape(BlocksNormAndHead)
    nnx.freeze(abstract, "head")
    assert paths(nnx.state(abstract, nnx.frozen)) == of("head")


@pytest.mark.parametrize("frozen", ["head", "blocks"])
def test_loading_weights_neither_thaws_nor_freezes(frozen):
    model, source = BlocksNormAndHead(), BlocksNormAndHead()
    nnx.freeze(model, "head")
    nnx.freeze(source, frozen)
    source.head.kernel.value = jnp.full((3, 2), 7.0)
    source.head.kernel.set_metadata(note="new")
    nnx.update(model, nnx.state(source))
    assert paths(nnx.state(model, nnx.frozen)) == of("head")
    assert model.head.kernel.value[0, 0] == 7 and model.head.kernel.note == "new"


def test_freezing_later_retraces_once():
    model, traces = BlocksNormAndHead(), []

    @nnx.jit
    def step(model):
        traces.append(None)
        return nnx.grad(loss)(model)

    assert paths(step(model)) == PARAMS
    nnx.freeze(model, "blocks")
    assert paths(step(model)) == PARAMS - of("blocks")
    nnx.unfreeze(model)
    assert paths(step(model)) == PARAMS
    assert len(traces) == 2


def test_frozen_parameters_cost_no_backward_pass():
    model = BlocksNormAndHead()
    count = [str(nnx.make_jaxpr(nnx.grad(loss))(model)).count("dot_general")]
    nnx.freeze(model, "blocks", "norm")
    count.append(str(nnx.make_jaxpr(nnx.grad(loss))(model)).count("dot_general"))
    assert count[1] == 5 + 1 < count[0]  # forward, and the kernel of the head


def test_freezing_after_the_optimizer_was_built_is_refused():
    model = BlocksNormAndHead()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    nnx.freeze(model, "head")
    with pytest.raises(StateMismatchError) as caught:
        optimizer.update(model, nnx.grad(loss)(model))
    assert str(caught.value) == (
        "This is not the model that the optimizer was built for.\n"
        "No longer there, or frozen since:\n  - .head.bias\n  - .head.kernel\n"
        "Fix: build the optimizer after the model has taken its shape and what stays fixed is "
        "frozen, or pass the model that it was built for."
    )


NOTHING = {
    "a slip": (
        lambda m: "haed.kernel",
        "nnx.freeze: 'haed.kernel' selects nothing that could train.\n"
        "Fix: use a path of this model, such as 'head.kernel', ",
    ),
    "far off": (
        lambda m: "xyzzy",
        "'xyzzy' selects nothing that could train.\n"
        "Fix: use a path of this model, such as 'blocks', 'head', 'norm'.",
    ),
    "keys": (lambda m: "drop", "'drop' selects nothing that could train."),
    "another model": (
        lambda m: BlocksNormAndHead(),
        "nnx.freeze: BlocksNormAndHead selects nothing that could train.\n"
        "Fix: name a part of this model.",
    ),
    "kind": (lambda m: nnx.Cache, "'linnet.nnx.variablelib.variable.Cache'> selects nothing"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_selects_nothing_is_refused_and_nothing_is_frozen(name):
    choose, message = NOTHING[name]
    model = BlocksNormAndHead()
    with pytest.raises(FilterError) as caught:
        nnx.freeze(model, "head", choose(model))
    assert message in str(caught.value)
    assert paths(nnx.state(model, nnx.frozen)) == set()


def test_what_trains_is_told():
    model = BlocksNormAndHead()
    nnx.freeze(model, "blocks", "head.kernel")
    assert nnx.what_trains(model).splitlines() == [
        "frozen  .blocks[0].down  bias, kernel  Param      15 (60 B)",
        "frozen  .blocks[0].up    bias, kernel  Param      16 (64 B)",
        "frozen  .blocks[1].down  bias, kernel  Param      15 (60 B)",
        "frozen  .blocks[1].up    bias, kernel  Param      16 (64 B)",
        "-       .drop.rngs       count         RngCount   1 (4 B)",
        "-       .drop.rngs       key           RngKey     1 (8 B)",
        "trains  .head            bias          Param      2 (8 B)",
        "frozen  .head            kernel        Param      6 (24 B)",
        "trains  .norm            bias, scale   Param      6 (24 B)",
        "-       .norm            mean, var     BatchStat  6 (24 B)",
        "8 of 76 parameters train (10.5 %).",
    ]
    assert nnx.what_trains(model, depth=1).splitlines()[0] == (
        "frozen  .blocks  bias, kernel  Param      62 (248 B)"
    )
    assert "trains  .norm            mean, var     BatchStat" in nnx.what_trains(model, wrt=...)
