"""One small transformer trained in every parallel form on eight devices, against one device.

Run as a program; prints what went wrong, by case.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from linnet import nnx
from tests.models import make_mesh
from tests.subprocesses import Cases

CASES = case = Cases()

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 32, 16, 4, 8, 16, 3
TOKENS = np.random.default_rng(0).integers(0, WORDS, size=(BATCH, LENGTH + 1))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask, out_sharding):
        x = x + self.attention(self.norm(x), mask=mask, out_sharding=out_sharding)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))), out_sharding=out_sharding)


class Transformer(nnx.Module):
    def __init__(self, depth, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens, out_sharding=None):
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask, out_sharding)
        return self.head(self.norm(x))


def build(depth=2):
    model = Transformer(depth, nnx.Rngs(0))
    # Not adam, which does not notice a factor in the gradients.
    return model, nnx.Optimizer(model, optax.sgd(0.3, momentum=0.9), wrt=nnx.Param)


def loss_of(model, tokens, out_sharding=None):
    logits = model(tokens[:, :-1], out_sharding)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train(step, model, optimizer, tokens):
    return [float(np.ravel(step(model, optimizer, tokens))[0]) for _ in range(STEPS)]


def compiled_step(model, optimizer, tokens):
    """The step compiled for these, and its collectives."""
    compiled = nnx.jit(step).lower(model, optimizer, tokens).compile()
    return compiled, nnx.collectives(compiled)


@functools.cache
def on_one_device(depth):
    made = build(depth)
    stepping, report = compiled_step(*made, jnp.asarray(TOKENS))
    assert report.entries == () and report.bytes == 0 and str(report) == "no collectives"
    return train(stepping, *made, jnp.asarray(TOKENS))


def check(losses, depth=2):
    np.testing.assert_allclose(losses, on_one_device(depth), rtol=2e-5)
    assert losses[-1] < losses[0] - 0.1, losses


def along_data(mesh, x=TOKENS):
    return jax.device_put(x, NamedSharding(mesh, P("data")))


BLOCKS = [
    (r"attention\.(query|key|value)\.kernel", (None, "model", None)),
    (r"attention\.out\.kernel", ("model",)),
    (r"up\.kernel", (None, "model")),
    (r"up\.bias", ("model",)),
    (r"down\.kernel", ("model",)),
]
TENSOR = [
    *BLOCKS,
    (r"embed\.embedding", (None, "model")),
    (r"head\.kernel", (None, "model")),
]


def shapes_of(variables):
    """Shapes with their axes in order of size, since XLA may transpose."""
    return sorted(tuple(sorted(x.shape)) for x in jax.tree.leaves(variables))


def shapes_in(report, operation):
    found = [re.search(r"\[(.*)\]", kind)[1] for kind in report.types(operation)]
    return sorted(tuple(sorted(int(n) for n in text.split(",") if n)) for text in found)


def check_reduced(report, model, times=1):
    """Checks that gradients and the loss are reduced, and nothing else.

    Where XLA has reduce-scatters, which it has not on the CPU, they would count here too.
    """
    assert not report.types("reduce-scatter")
    want = sorted([(), *shapes_of(nnx.state(model, nnx.Param))] * times)
    assert shapes_in(report, "all-reduce") == want, report


@case
def data_parallel():
    mesh = make_mesh(8)
    model, optimizer = build()
    nnx.fsdp((model, optimizer), mesh)  # nothing is as large as min_size
    assert model.blocks[0].up.kernel.value.sharding.is_fully_replicated
    stepping, report = compiled_step(model, optimizer, along_data(mesh))
    check(train(stepping, model, optimizer, along_data(mesh)))
    assert set(report.rows) == {"all-reduce"}, report
    check_reduced(report, model)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert report.bytes == 4 + size


@case
def fsdp():
    mesh = make_mesh(8)
    model, optimizer = build()
    done = nnx.fsdp((model, optimizer), mesh, min_size=64)
    stepping, report = compiled_step(model, optimizer, along_data(mesh))
    check(train(stepping, model, optimizer, along_data(mesh)))
    assert model.blocks[0].up.kernel.value.sharding.spec == P(None, "data")
    assert set(report.rows) == {"all-gather", "all-reduce"}, report
    check_reduced(report, model)
    sharded = [x for x in done.entries if x.path.startswith("[0]") and tuple(x.spec)]
    assert len(sharded) == 16
    # Once each: the backward pass uses what was gathered for the forward pass.
    assert shapes_in(report, "all-gather") == sorted(tuple(sorted(x.shape)) for x in sharded)
    gather = next(x for x in report.entries if "head" in x.where and x.operation == "all-gather")
    assert gather.where in ("model.head.kernel", "jit(step)/jvp(Transformer)/head/dot_general")
    assert gather.types == (f"f32[{WIDTH},{WORDS}]",) and gather.count == 1
    assert gather.bytes == 4 * WIDTH * WORDS


@case
def tensor_parallel():
    mesh = make_mesh(2, 4)
    model, optimizer = build()
    nnx.fsdp((model, optimizer), mesh, rules=TENSOR)
    check(train(nnx.jit(step), model, optimizer, jax.device_put(TOKENS, NamedSharding(mesh, P()))))
    assert model.blocks[0].attention.query.kernel.value.sharding.spec == P(None, "model")


@case
def fsdp_with_tensor_parallel():
    mesh = make_mesh(2, 4)
    model, optimizer = build()
    nnx.fsdp((model, optimizer), mesh, min_size=64, rules=TENSOR)
    check(train(nnx.jit(step), model, optimizer, along_data(mesh)))
    assert model.blocks[1].down.kernel.value.sharding.spec == P("model", "data")


def averaged_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    loss, grads = jax.lax.pmean((loss, grads), "data")
    optimizer.update(model, grads)
    return loss


@case
def pmap():
    mapped = nnx.pmap(averaged_step, axis_name="data", in_axes=(None, None, 0), out_axes=None)
    check(train(mapped, *build(), TOKENS.reshape(8, 2, -1)))


@case
def pmap_of_copies():
    model, optimizer = build(depth=1)
    for tree in (model, optimizer):
        nnx.update(tree, jax.tree.map(lambda x: np.stack([x] * 8), nnx.state(tree)))
    mapped = nnx.pmap(averaged_step, axis_name="data")
    check(train(mapped, model, optimizer, TOKENS.reshape(8, 2, -1)), depth=1)
    np.testing.assert_array_equal(model.head.kernel[0], model.head.kernel[7])


@case
def shard_map_with_the_sum_of_gradients_by_hand():
    mesh = make_mesh(8)
    mapped = nnx.shard_map(
        averaged_step,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=False,  # otherwise the gradients of what is whole are summed already
    )
    check(train(nnx.jit(mapped), *build(depth=1), TOKENS), depth=1)


@case
def shard_map_with_the_mean_in_the_loss():
    mesh = make_mesh(8)

    def mean_loss(model, tokens):
        return jax.lax.pmean(loss_of(model, tokens), "data")

    @nnx.jit
    @functools.partial(nnx.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    def mapped(model, optimizer, tokens):
        loss, grads = nnx.value_and_grad(mean_loss)(model, tokens)
        optimizer.update(model, grads)
        return loss

    check(train(mapped, *build(depth=1), TOKENS), depth=1)


@case
def explicit_axes():
    mesh = make_mesh(8, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        check(train(nnx.jit(step), *build(), along_data(mesh)))


@case
def explicit_axes_with_tensor_parallel():
    mesh = make_mesh(2, 4, kind=AxisType.Explicit)

    def sharded_step(model, optimizer, tokens):
        loss, grads = nnx.value_and_grad(lambda model: loss_of(model, tokens, P("data")))(model)
        optimizer.update(model, grads)
        return loss

    with jax.set_mesh(mesh):
        model, optimizer = build()
        nnx.fsdp((model, optimizer), mesh, rules=BLOCKS)
        check(train(nnx.jit(sharded_step), model, optimizer, along_data(mesh)))
        assert model.blocks[0].up.kernel.value.sharding.spec == P(None, "model")


@case
def explicit_axes_with_fsdp():
    mesh = make_mesh(8, kind=AxisType.Explicit)

    def gathered(model):
        graphdef, state = nnx.split(model)
        return nnx.merge(graphdef, jax.tree.map(lambda x: jax.sharding.reshard(x, P()), state))

    def gathering_step(model, optimizer, tokens):
        loss = lambda model, tokens: loss_of(gathered(model), tokens)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        return loss

    with jax.set_mesh(mesh):
        model, optimizer = build(depth=1)
        nnx.fsdp((model, optimizer), mesh, min_size=64)
        check(train(nnx.jit(gathering_step), model, optimizer, along_data(mesh)), depth=1)
        assert model.blocks[0].up.kernel.value.sharding.spec == P(None, "data")
        try:
            nnx.jit(step)(model, optimizer, along_data(mesh))
        except Exception as error:
            assert "produces an illegally sharded result" in str(error), error
            note = "".join(error.__notes__)
            assert "in the call of model.blocks[0].attention.out (LinearGeneral)" in note, note
            assert "Fix: say how the result is sharded (out_sharding=" in note, note
        else:
            raise AssertionError


@case
def tensor_parallelism_reduces_activations():
    mesh = make_mesh(1, 8)
    model = nnx.Sequential(
        nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(0)),
        nnx.gelu,
        nnx.Linear(64, 16, use_bias=False, rngs=nnx.Rngs(1)),
    )
    rules = [(r"layers\[0\]", (None, "model")), (r"layers\[2\]", ("model",))]
    nnx.fsdp(model, mesh, rules=rules)
    report = nnx.collectives(lambda model, x: model(x), model, jnp.ones((4, 16)))
    assert report.rows == {"all-reduce": (1, 1, 4 * 16 * 4)}
    assert str(report) == (
        "operation   count  arrays  bytes per device\nall-reduce  1      1       256"
    )


# ---- micro-batches ------------------------------------------------------------------------------


def accumulating_step(count):
    def step(model, optimizer, tokens):
        loss, grads = nnx.accumulate_gradients(loss_of, micro_batches=count)(model, tokens)
        optimizer.update(model, grads)
        return loss

    return nnx.jit(step)


@case
def micro_batches_give_the_same_losses():
    mesh = make_mesh(4, 2)
    model, optimizer = build(depth=1)
    nnx.fsdp((model, optimizer), mesh, min_size=64, rules=TENSOR)
    check(train(accumulating_step(4), model, optimizer, along_data(mesh)), depth=1)


@case
def micro_batches_stay_on_their_devices():
    mesh = make_mesh(4)
    model, optimizer = build(depth=1)
    nnx.fsdp((model, optimizer), mesh, min_size=64)
    # With fewer examples XLA sends activations in place of parameters, which are larger then.
    tokens = along_data(mesh, np.tile(TOKENS, (4, 1)))
    stepping = accumulating_step(4)
    report = nnx.collectives(stepping.lower(model, optimizer, tokens))
    assert set(report.rows) == {"all-gather", "all-reduce"}, report
    # Gradients are reduced in each of four rounds; gathering is done before the loop.
    check_reduced(report, model, times=4)
    params = shapes_of(nnx.state(model, nnx.Param))
    assert shapes_in(report, "all-gather") == [x for x in params if np.prod(x) >= 64]
    check(train(stepping, model, optimizer, tokens), depth=1)
    assert model.blocks[0].up.kernel.value.sharding.spec == P(None, "data")


@case
def micro_batches_under_explicit_axes():
    mesh = make_mesh(4, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        check(train(accumulating_step(4), *build(depth=1), along_data(mesh)), depth=1)


# ---- a pipeline ---------------------------------------------------------------------------------


class Layer(nnx.Module):
    """A layer with statistics and random numbers, which micro-batches go through in order."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, scale, flag=True):
        assert isinstance(flag, bool)
        return x + scale * self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.stack = nnx.Stack(Layer, 8, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)


X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


def train_deep(apply, mesh=None, place=lambda x: x):
    model = Deep(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    if mesh is not None:
        nnx.fsdp((model, optimizer), mesh, axis="stage", rules=[("stacked", ("stage",))])

    @nnx.jit
    def step(model, optimizer, x):
        def loss_of(model):
            return ((model.head(apply(model.stack, x)) - x[:, :1]) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    compiled = step.lower(model, optimizer, place(X)).compile()
    losses = [float(compiled(model, optimizer, place(X))) for _ in range(3)]
    return losses, model, nnx.collectives(compiled)


def in_turn(stack, x):
    outs = [stack(x[i::4], jnp.float32(0.5), flag=False) for i in range(4)]
    return jnp.stack(outs, 1).reshape(x.shape)


@case
def a_pipeline_trains_as_the_stack_does():
    want, expected, _ = train_deep(in_turn)
    expected = jax.tree.leaves(nnx.to_pure_dict(nnx.state(expected, (nnx.Param, nnx.BatchStat))))
    for names, sizes in [(("stage",), (4,)), (("data", "stage"), (2, 4))]:
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
        batch = NamedSharding(mesh, P("data") if "data" in names else P())

        def apply(stack, x, mesh=mesh):
            scale = jnp.float32(0.5)
            return nnx.pipeline(stack, x, scale, flag=False, mesh=mesh, micro_batches=4)

        losses, model, report = train_deep(apply, mesh, lambda x, to=batch: jax.device_put(x, to))
        np.testing.assert_allclose(losses, want, rtol=1e-5)
        state = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))
        for got, other in zip(jax.tree.leaves(state), expected, strict=True):
            np.testing.assert_allclose(got, other, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(model.stack.stacked.drop.rngs.count, [12] * 8)
        kernel = model.stack.stacked.up.kernel
        assert kernel.value.sharding.spec == P("stage") and kernel.out_sharding == ("stage",)
        # Seven rounds forward and seven back; nothing gathers the layers.
        assert report.rows["collective-permute"][0] == 14
        assert "all-gather" not in report.rows and "all-to-all" not in report.rows


@case
def a_stack_is_cut_by_fsdp_through_its_layers():
    mesh = make_mesh(8)
    stack = nnx.Stack(functools.partial(nnx.Linear, 8, 8), 16, rngs=nnx.Rngs(0))
    want = stack(jnp.asarray(X))
    nnx.fsdp(stack, mesh, min_size=16)
    assert stack.stacked.kernel.out_sharding == (None, "data")
    assert stack.stacked.bias.out_sharding == (None, "data")
    np.testing.assert_allclose(stack(along_data(mesh, X)), want, rtol=1e-5, atol=1e-6)
    nnx.fsdp(stack, mesh, rules=[("kernel", ("data",))])
    np.testing.assert_allclose(stack(along_data(mesh, X)), want, rtol=1e-5, atol=1e-6)
    assert stack.stacked.kernel.out_sharding == ("data",)
    assert stack[3].kernel.get_metadata("out_sharding") in ((), None)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles in half the time
    CASES.run_on_devices(8)
