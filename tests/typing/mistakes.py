# pyright: strict, reportMissingTypeStubs=false
"""Mistakes that pyright must report, each on the line that says so, with that rule."""

import jax
import optax

from linnet import nnx
from linnet.training import Loop
from tests.typing.arrays import ones
from tests.typing.programs import Block, Named, Net, Point, chosen, forward, mapped, scanned


def instances(model: Net, x: jax.Array) -> None:
    Net("4", 2, rngs=nnx.Rngs(0))  # mistake: reportArgumentType
    Net(4, 2)  # mistake: reportCallIssue
    Net(4, 2, rngs=nnx.Rngs(0), layers=3)  # mistake: reportCallIssue
    nnx.Linear(4, "5", rngs=nnx.Rngs(0))  # mistake: reportArgumentType
    nnx.Linear(4, 5, bias=False, rngs=nnx.Rngs(0))  # mistake: reportCallIssue
    model.blokcs  # mistake: reportAttributeAccessIssue  # noqa: B018
    model.blocks[0].linaer  # mistake: reportAttributeAccessIssue  # noqa: B018
    model.blocks[0].linear.kernle  # mistake: reportAttributeAccessIssue  # noqa: B018
    model.blocks[0].linear("x")  # mistake: reportArgumentType
    model.blocks.append(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))  # mistake: reportArgumentType
    model(x, trian=True)  # mistake: reportCallIssue
    model.blocks[0].steps = "one"  # mistake: reportAttributeAccessIssue
    Point("1.0")  # mistake: reportArgumentType
    Named("a")  # mistake: reportCallIssue


def apart_and_together(model: Net) -> None:
    graphdef, state = nnx.split(model)
    nnx.merge(state, graphdef)  # mistake: reportCallIssue
    nnx.merge(graphdef, state).block  # mistake: reportAttributeAccessIssue  # noqa: B018
    nnx.clone(model).block  # mistake: reportAttributeAccessIssue  # noqa: B018
    block: Block = nnx.merge(graphdef, state)  # mistake: reportAssignmentType
    del block


def transforms(model: Net, x: jax.Array) -> None:
    forward(model)  # mistake: reportCallIssue
    forward(x, model)  # mistake: reportArgumentType
    forward(model, x).shpe  # mistake: reportAttributeAccessIssue  # noqa: B018
    chosen(model, x, trian=True)  # mistake: reportCallIssue
    mapped(model, x, x)  # mistake: reportCallIssue
    scanned(x, model)  # mistake: reportArgumentType
    model.blocks[0].twice(x, x)  # mistake: reportCallIssue
    nnx.jit(forward, static_argnum=0)  # mistake: reportCallIssue
    nnx.vmap(forward, in_axis=0)  # mistake: reportCallIssue
    nnx.grad(forward)(x)  # mistake: reportCallIssue
    nnx.remat(forward)("model", x)  # mistake: reportArgumentType


def train(model: Net) -> None:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    other: nnx.Optimizer[Block] = optimizer  # mistake: reportAssignmentType
    for batch in Loop([ones(2)], epochs=1):
        batch.shpe  # mistake: reportAttributeAccessIssue  # noqa: B018
    Loop(3)  # mistake: reportArgumentType
    del other
