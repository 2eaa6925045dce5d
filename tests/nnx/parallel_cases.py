"""One small transformer trained in every parallel form on eight devices, against one device.

Run as a program; prints what went wrong, by case.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from linnet import nnx
from tests.subprocesses import Cases

CASES = case = Cases()

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 32, 16, 4, 8, 16, 4
TOKENS = np.random.default_rng(0).integers(0, WORDS, size=(BATCH, LENGTH + 1))


def make_mesh(*sizes, kind=AxisType.Auto):
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    model = Transformer(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train(step, model, optimizer, tokens, steps=STEPS):
    return [float(np.ravel(step(model, optimizer, tokens))[0]) for _ in range(steps)]


@functools.cache
def on_one_device():
    return train(nnx.jit(step), *build(), jnp.asarray(TOKENS))


def check(losses):
    np.testing.assert_allclose(losses, on_one_device(), rtol=2e-5)
    assert losses[-1] < losses[0] - 0.1


TENSOR = [
    (r"attention\.(query|key|value)\.kernel", (None, "model", None)),
    (r"attention\.out\.kernel", ("model",)),
    (r"up\.kernel", (None, "model")),
    (r"up\.bias", ("model",)),
    (r"down\.kernel", ("model",)),
    (r"embed\.embedding", (None, "model")),
    (r"head\.kernel", (None, "model")),
]


@case
def data_parallel():
    mesh = make_mesh(8)
    model, optimizer = build()
    whole = NamedSharding(mesh, P())
    for tree in (model, optimizer):
        nnx.update(tree, jax.device_put(nnx.state(tree), whole))
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
    check(train(nnx.jit(step), model, optimizer, tokens))
    assert model.blocks[0].up.kernel.value.sharding.is_fully_replicated


@case
def fsdp():
    mesh = make_mesh(8)
    model, optimizer = build()
    nnx.fsdp((model, optimizer), mesh, min_size=64)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
    check(train(nnx.jit(step), model, optimizer, tokens))
    assert model.blocks[0].up.kernel.value.sharding.spec == P(None, "data")


@case
def tensor_parallel():
    mesh = make_mesh(2, 4)
    model, optimizer = build()
    nnx.fsdp((model, optimizer), mesh, rules=TENSOR)  # nothing is as large as min_size
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P()))
    check(train(nnx.jit(step), model, optimizer, tokens))
    kernel = model.blocks[0].attention.query.kernel.value
    assert kernel.sharding.spec == P(None, "model"), kernel.sharding


@case
def fsdp_with_tensor_parallel():
    mesh = make_mesh(2, 4)
    model, optimizer = build()
    nnx.fsdp((model, optimizer), mesh, min_size=64, rules=TENSOR)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
    check(train(nnx.jit(step), model, optimizer, tokens))
    assert model.blocks[1].down.kernel.value.sharding.spec == P("model", "data")


def averaged_step(model, optimizer, tokens, axis):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    loss, grads = jax.lax.pmean((loss, grads), axis)
    optimizer.update(model, grads)
    return loss


@case
def pmap():
    @functools.partial(nnx.pmap, axis_name="data", in_axes=(None, None, 0), out_axes=None)
    def mapped(model, optimizer, tokens):
        return averaged_step(model, optimizer, tokens, "data")

    check(train(mapped, *build(), TOKENS.reshape(8, 2, -1)))


@case
def pmap_of_copies():
    @functools.partial(nnx.pmap, axis_name="data")
    def mapped(model, optimizer, tokens):
        return averaged_step(model, optimizer, tokens, "data")

    model, optimizer = build()
    for tree in (model, optimizer):
        nnx.update(tree, jax.tree.map(lambda x: jnp.stack([x] * 8), nnx.state(tree)))
    check(train(mapped, model, optimizer, TOKENS.reshape(8, 2, -1)))
    assert model.head.kernel.shape == (8, WIDTH, WORDS)


@case
def shard_map():
    mesh = make_mesh(8)
    for check_vma in (True, False):

        @nnx.jit
        @functools.partial(
            nnx.shard_map,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
        def mapped(model, optimizer, tokens):
            return averaged_step(model, optimizer, tokens, "data")

        model, optimizer = build()
        try:
            check(train(mapped, model, optimizer, TOKENS))
        except Exception as e:
            print(check_vma, type(e), str(e)[:1500])
    assert 0


@case
def explicit_axes():
    mesh = make_mesh(8, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        model, optimizer = build()
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
        check(train(nnx.jit(step), model, optimizer, tokens))


@case
def explicit_axes_with_fsdp():
    mesh = make_mesh(8, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        model, optimizer = build()
        nnx.fsdp((model, optimizer), mesh, min_size=64)
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
        check(train(nnx.jit(step), model, optimizer, tokens))


if __name__ == "__main__":
    CASES.run_on_devices(8)
