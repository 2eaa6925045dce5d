"""A training run that resumes where it was killed: python killed_run.py FOLDER STEPS.

It prints `step N` for each step, and at the end a digest of everything that it holds.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import bits

from linnet import io, nnx
from tests.models import Net


class Ballast(nnx.Variable):
    """Something large that changes in every step, so that saving takes a while."""


class NetWithBallast(Net):
    def __init__(self):
        super().__init__(sizes=(4, 16, 2))
        self.ballast = Ballast(jnp.zeros(500_000))

    def __call__(self, x):
        self.ballast[...] += x.mean()
        return super().__call__(x)


class Batches:
    """An endless stream of batches that knows its position, as Grain's iterators do."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        noise = np.random.default_rng(self.position)
        return jnp.asarray(noise.normal(size=(8, 4)), jnp.float32)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


@nnx.jit
def train_step(model, optimizer, metrics, x):
    def loss_fn(model):
        return jnp.mean((model(x) - x[:, :2]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(values=loss)


def main(folder: str, steps: int) -> None:
    model = NetWithBallast()
    items = {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param),
        "metrics": nnx.metrics.Average(),
        "extra_keys": nnx.Rngs(noise=jax.random.key(7, impl="rbg")),
    }
    batches = Batches()
    done = 0
    with io.Manager(folder, keep_last=2) as manager:
        if manager.latest() is not None:
            done = manager.restore(**items, batches=batches).step
        print("resumed at", done, flush=True)
        for step in range(done + 1, steps + 1):
            train_step(model, items["optimizer"], items["metrics"], next(batches))
            items["extra_keys"].noise()
            manager.save(step, **items, batches=batches)
            print("step", step, flush=True)
    everything = {"position": batches.position, **bits(items)}
    print("digest", hashlib.sha256(repr(sorted(everything.items())).encode()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
