"""The functional way: `nnx.split` and `nnx.merge` with plain `jax.jit`, `jax.grad` and Optax.

Shows: a model taken apart into its structure and its arrays, parameters on one side and running
statistics on the other; a pure step puts it together inside and returns what changed. The same
model is then trained with `nnx.jit` over live objects, and both give the same bits. The task is to
tell two interleaved spirals apart.

    python examples/functional_loop.py [--steps 600]
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from linnet import nnx


class MLP(nnx.Module):
    """One logit a point; `norm` keeps running statistics, which are state but not parameters."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(2, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.mid = nnx.Linear(width, width, rngs=rngs)
        self.down = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = jnp.sin(self.norm(self.up(x)))
        x = nnx.relu(self.mid(x))
        return self.down(x)[:, 0]


def spirals(key, count: int):
    """Points on two interleaved noisy spirals, and which spiral (0 or 1) each is on."""
    key_turn, key_side, key_noise = jax.random.split(key, 3)
    turn = 3 * jnp.pi * jnp.sqrt(jax.random.uniform(key_turn, (count,)))
    side = jax.random.bernoulli(key_side, shape=(count,)).astype(jnp.float32)
    angle = turn + side * jnp.pi
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1) * turn[:, None] / 3
    return points + 0.05 * jax.random.normal(key_noise, points.shape), side


def loss_of(model: MLP, points, side):
    return optax.sigmoid_binary_cross_entropy(model(points), side).mean()


def train_functionally(model: MLP, points, side, steps: int) -> None:
    """Arrays in, arrays out; the model is brought up to date at the end."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    tx = optax.adam(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, rest, opt_state):
        def loss_fn(params):
            model = nnx.merge(graphdef, params, rest, copy=True)  # its own Variables, to write to
            loss = loss_of(model, points, side)
            return loss, nnx.state(model, nnx.Not(nnx.Param))  # the new running statistics

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, loss

    for step in range(1, steps + 1):
        params, rest, opt_state, loss = train_step(params, rest, opt_state)
        if step == 1 or step % max(1, steps // 5) == 0:
            print(f"step {step:5d}   loss {loss:.4f}")
    nnx.update(model, params, rest)


def train_objects(model: MLP, points, side, steps: int) -> None:
    """The same with live objects, which the step changes in place."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_of)(model, points, side)
        optimizer.update(model, grads)
        return loss

    for _ in range(steps):
        train_step(model, optimizer)


def accuracy(model: MLP, points, side) -> float:
    model.eval()  # use the running statistics
    return float(jnp.mean((model(points) > 0) == (side > 0.5)))


def main(argv: list[str] | None = None) -> dict[str, float | bool]:
    parser = argparse.ArgumentParser(description="Fits a small network to two spirals, twice.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    points, side = spirals(jax.random.key(0), 1000)
    functional, live = (MLP(64, rngs=nnx.Rngs(args.seed)) for _ in range(2))
    train_functionally(functional, points, side, args.steps)
    train_objects(live, points, side, args.steps)

    different = nnx.diff(nnx.state(functional), nnx.state(live))
    unseen = accuracy(functional, *spirals(jax.random.key(1), 1000))
    print(f"accuracy on unseen points {unseen:.3f} (guessing: 0.5)")
    print(f"nnx.jit over live objects gives the same bits: {not different}")
    return {"unseen": unseen, "same": not different}


if __name__ == "__main__":
    main()
