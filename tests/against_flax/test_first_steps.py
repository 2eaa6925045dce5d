"""Programs over the first pages of the documents."""

import jax.numpy as jnp
import optax

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}


@program(PROGRAMS)
def linear_and_its_state(f):
    layer = f.nnx.Linear(2, 3, rngs=f.nnx.Rngs(0))
    return layer(jnp.ones((1, 2))), f.nnx.state(layer)


@program(PROGRAMS)
def three_steps_of_training(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(4, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.two = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.two(self.drop(nnx.relu(self.one(x))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [train(model, optimizer, jnp.ones((3, 4))) for _ in range(3)]
    return losses, nnx.state(model, nnx.Param)


@program(PROGRAMS, raises=TypeError)
def a_linear_without_rngs(f):
    return f.nnx.Linear(2, 3)


test_programs = same_on_both(PROGRAMS)
