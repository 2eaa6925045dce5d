"""What Linen models cost, beside Flax's and beside JAX by hand, in one process, interleaved.

A model of blocks, each with a Dense layer and a LayerNorm: a training step with Adam and
TrainState, ``init``, an eager call, and the time to trace a call and ``init``; then blocks that are
scanned and rematerialised, and a wide choice of layers. Times are CPU time, the least of several
runs: noise only ever adds. Without Flax its columns are left out.
"""

import argparse
import importlib
import importlib.util
import time

import jax
import jax.numpy as jnp
import optax

WIDTH = 32
X = jax.random.normal(jax.random.key(0), (8, WIDTH))
Y = jax.random.normal(jax.random.key(1), (8, WIDTH))
KEY = jax.random.key(2)
ADAM = optax.adam(1e-3)


def step_by_hand(depth):
    """A training step over a nested dict."""
    params = {
        f"block_{i}": {
            "kernel": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) * 0.1,
            "bias": jnp.zeros(WIDTH),
            "scale": jnp.ones(WIDTH),
            "shift": jnp.zeros(WIDTH),
        }
        for i in range(depth)
    }

    def forward(params, h):
        for p in params.values():
            h = h @ p["kernel"] + p["bias"]
            mean = h.mean(-1, keepdims=True)
            variance = ((h - mean) ** 2).mean(-1, keepdims=True)
            h = (h - mean) * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["shift"]
            h = jax.nn.relu(h)
        return h

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(lambda p: ((forward(p, x) - y) ** 2).mean())(params)
        updates, opt_state = ADAM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    now = [params, ADAM.init(params)]

    def run():
        *now[:], loss = step(*now, X, Y)
        return loss

    return run


def models(nn, depth):
    """The models, by name."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, h):
            return nn.relu(nn.LayerNorm()(nn.Dense(WIDTH)(h)))

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, h):
            for _ in range(depth):
                h = Block()(h)
            return h

    class Step(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            return Block()(h), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, h):
            for _ in range(depth // 10):
                scanned = nn.scan(
                    nn.remat(Step),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=10,
                )
                h, _ = scanned()(h, None)
            return h

    class Various(nn.Module):
        @nn.compact
        def __call__(self, h):
            h = h.reshape((2, 4, WIDTH))
            for _ in range(depth // 10):
                h = h + nn.MultiHeadDotProductAttention(2)(nn.RMSNorm()(h))
                h = h + nn.Conv(WIDTH, (3,))(nn.GroupNorm(4)(h))
                h = h + nn.RNN(nn.LSTMCell(WIDTH))(h)
            return h

    return {"blocks": Blocks(), "scanned": Scanned(), "various": Various()}


def linen_step(package, model):
    """A training step with TrainState."""
    train_state = importlib.import_module(f"{package}.training.train_state")
    params = model.init(KEY, X)["params"]
    now = [train_state.TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)]

    @jax.jit
    def step(state, x, y):
        def loss_fn(params):
            return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def run():
        now[0], loss = step(now[0], X, Y)
        return loss

    return run


def rows_of(package, depth):
    """What to measure, by row, and how often a run repeats it."""
    found = models(importlib.import_module(f"{package}.linen"), depth)
    rows = {"training step": (linen_step(package, found["blocks"]), 20)}
    blocks, variables = found["blocks"], found["blocks"].init(KEY, X)
    rows["init"] = (lambda: blocks.init(KEY, X), 1)
    rows["eager call"] = (lambda: blocks.apply(variables, X), 1)
    for name, model in found.items():
        made = jax.eval_shape(model.init, KEY, X)
        # A function of its own each time, or JAX would find the trace in its cache.
        rows[f"trace {name}"] = (
            lambda model=model, made=made: jax.eval_shape(lambda v: model.apply(v, X), made),
            1,
        )
        rows[f"trace init of {name}"] = (
            lambda model=model: jax.eval_shape(lambda key: model.init(key, X), KEY),
            1,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    packages = ["linnet"] + ["flax"] * (importlib.util.find_spec("flax") is not None)
    columns = {package: rows_of(package, options.depth) for package in packages}
    columns["by hand"] = {"training step": (step_by_hand(options.depth), 20)}
    times = {}
    for run in range(options.runs + 1):  # the first one compiles
        for row in columns["linnet"]:
            for column, rows in columns.items():
                if row in rows:
                    function, repeats = rows[row]
                    start = time.process_time()
                    for _ in range(repeats):
                        out = function()
                    jax.block_until_ready(out)
                    spent = (time.process_time() - start) / repeats
                    if run:
                        times.setdefault((row, column), []).append(spent)
    print(f"{options.depth} blocks; ms of CPU time, least of {options.runs}")
    print(f"{'':24s}" + "".join(f"{column:>10s}" for column in columns) + "  to the last")
    for row in columns["linnet"]:
        found = {c: min(times[row, c]) for c in columns if (row, c) in times}
        cells = [f"{1e3 * found[c]:10.2f}" if c in found else " " * 10 for c in columns]
        print(f"{row:24s}" + "".join(cells) + f"{found['linnet'] / [*found.values()][-1]:9.2f}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
