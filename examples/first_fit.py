"""Fits a small network to two spirals, with Linnet's modules under JAX's own transforms.

The model is an ordinary Python object. `nnx.split` takes it apart into its structure (`graphdef`)
and its arrays, and `nnx.merge` puts it together again inside the pure function that JAX
differentiates.

    python examples/first_fit.py [--steps 600]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import optax

from linnet import nnx


class Linear(nnx.Module):
    """Affine map of the last axis."""

    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(rngs.normal((din, dout)) / jnp.sqrt(din))
        self.bias = nnx.Param(jnp.zeros((1, dout)))

    def __call__(self, x):
        return x @ self.kernel + self.bias


class MLP(nnx.Module):
    """Two hidden layers; one logit a point."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(2, width, rngs=rngs)
        self.mid = Linear(width, width, rngs=rngs)
        self.down = Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = jnp.sin(self.up(x))
        x = jax.nn.relu(self.mid(x))
        return self.down(x)[:, 0]


def spirals(key, count: int):
    """Points on two interleaved noisy spirals, and which spiral (0 or 1) each is on."""
    key_turn, key_side, key_noise = jax.random.split(key, 3)
    turn = 3 * jnp.pi * jnp.sqrt(jax.random.uniform(key_turn, (count,)))
    side = jax.random.bernoulli(key_side, shape=(count,)).astype(jnp.float32)
    angle = turn + side * jnp.pi
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1) * turn[:, None] / 3
    return points + 0.05 * jax.random.normal(key_noise, points.shape), side


def accuracy(model: MLP, points, side):
    return jnp.mean((model(points) > 0) == (side > 0.5))


def fit(steps: int) -> float:
    """Trains for `steps` steps and returns the accuracy on points not seen in training."""
    points, side = spirals(jax.random.key(0), 1000)
    unseen_points, unseen_side = spirals(jax.random.key(1), 1000)

    model = MLP(64, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    tx = optax.adam(1e-3)
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state):
        def loss_fn(params):
            logits = nnx.merge(graphdef, params)(points)
            return optax.sigmoid_binary_cross_entropy(logits, side).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(1, steps + 1):
        params, opt_state, loss = train_step(params, opt_state)
        if step == 1 or step % max(1, steps // 10) == 0:
            nnx.update(model, params)
            seen = accuracy(model, points, side)
            print(f"step {step:5d}   loss {loss:.4f}   accuracy {seen:.3f}")

    nnx.update(model, params)
    return float(accuracy(model, unseen_points, unseen_side))


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Fits a small network to two spirals.")
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args(argv).steps

    start = time.perf_counter()
    unseen = fit(steps)
    print(f"accuracy on unseen points {unseen:.3f}, in {time.perf_counter() - start:.1f} s")
    return unseen


if __name__ == "__main__":
    main()
