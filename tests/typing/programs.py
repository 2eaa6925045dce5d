# pyright: strict, reportMissingTypeStubs=false
"""Programs whose types pyright must understand, without a complaint, in strict mode.

``assert_type`` compares what pyright infers; ``test_pyright.py`` runs it over this file.
"""

from typing import Any, assert_type

import jax
import optax

from linnet import nnx
from linnet.training import Loop
from tests.typing.arrays import ones


class Block(nnx.Module):
    def __init__(self, size: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(size, size, rngs=rngs)
        self.norm = nnx.LayerNorm(size, rngs=rngs)
        self.scale = nnx.Param(ones(1, size))
        self.steps = nnx.data(0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(nnx.relu(self.linear(x))) * self.scale.value

    @nnx.jit
    def twice(self, x: jax.Array) -> jax.Array:
        return self(self(x))


class Net(nnx.Module):
    def __init__(self, size: int, depth: int, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(size, rngs=rngs) for _ in range(depth)])
        self.heads = nnx.Dict[nnx.Linear](left=nnx.Linear(size, 1, rngs=rngs))

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.heads["left"](x)


@nnx.dataclass
class Point(nnx.Pytree):
    x: float
    label: str = nnx.static(default="")


@nnx.dataclass(kw_only=True)
class Named(nnx.Module):
    name: str
    size: int = 3


def instances() -> None:
    model = Net(4, 2, rngs=nnx.Rngs(0))
    assert_type(model, Net)
    assert_type(nnx.Rngs(0, dropout=1), nnx.Rngs)
    assert_type(model.blocks, nnx.List[Block])
    assert_type(model.blocks[0], Block)
    assert_type(model.blocks[0].linear, nnx.Linear)
    assert_type(model.blocks[1:], list[Block])
    assert_type(model.heads["left"], nnx.Linear)
    assert_type(model.blocks[0].scale, nnx.Param[jax.Array])
    assert_type(model.blocks[0].scale.value, jax.Array)
    assert_type(model.blocks[0].steps, int)
    assert_type(model(ones(1, 4), train=True), jax.Array)
    assert_type(Point(1.0, label="a"), Point)
    assert_type(Named(name="a").size, int)


def apart_and_together(model: Net) -> None:
    graphdef, state = nnx.split(model)
    assert_type(graphdef, nnx.GraphDef[Net])
    assert_type(state, nnx.State)
    assert_type(nnx.merge(graphdef, state), Net)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert_type(nnx.merge(graphdef, params, rest), Net)
    assert_type(nnx.clone(model), Net)
    assert_type(nnx.graphdef(model), nnx.GraphDef[Net])
    assert_type(nnx.state(model), nnx.State)
    assert_type(nnx.state(model, nnx.Param), nnx.State)
    params, rest = nnx.state(model, nnx.Param, nnx.BatchStat)
    assert_type(params, nnx.State)
    assert_type(nnx.eval_shape(lambda: Net(4, 2, rngs=nnx.Rngs(0))), Net)


def pure(parts: nnx.PureState[Net]) -> Net:
    graphdef, state = parts
    return nnx.merge(graphdef, state)


@nnx.jit
def forward(model: Net, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.jit(static_argnames="train", donate_argnums=0)
def chosen(model: Net, x: jax.Array, train: bool) -> tuple[jax.Array, int]:
    return model(x, train=train), 1


@nnx.vmap(in_axes=(None, 0))
def mapped(model: Net, x: jax.Array) -> jax.Array:
    return model(x)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scanned(x: jax.Array, block: Block) -> jax.Array:
    return block(x)


@nnx.remat
def again(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


def loss(model: Net, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def transforms(model: Net, x: jax.Array) -> None:
    assert_type(forward(model, x), jax.Array)
    assert_type(forward(model, x=x), jax.Array)
    assert_type(forward.jitted_fn.clear_cache(), None)
    assert_type(chosen(model, x, train=True), tuple[jax.Array, int])
    assert_type(mapped(model, x), jax.Array)
    assert_type(scanned(x, model.blocks[0]), jax.Array)
    assert_type(again(model.blocks[0], x), jax.Array)
    assert_type(model.blocks[0].twice(x), jax.Array)
    assert_type(nnx.value_and_grad(loss)(model, x), tuple[jax.Array, Any])
    parts = nnx.accumulate_gradients(loss, micro_batches=2)
    assert_type(parts(model, x), tuple[jax.Array, Any])
    assert_type(nnx.grad(loss)(model, x), Any)
    assert_type(nnx.jit(model)(x), jax.Array)


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def train() -> None:
    model = Net(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert_type(optimizer, nnx.Optimizer[Net])
    loop = Loop([ones(2, 4)], epochs=1, show="nothing")
    for batch in loop:
        assert_type(batch, jax.Array)
        loop.log(loss=train_step(model, optimizer, batch))
