"""What nnx.Optimizer and metrics cost beside Optax and sums by hand.

First the equations that an update traces to; by hand means tx.update, optax.apply_updates and a
count of steps. Then whole steps under jit, in one process, interleaved: the least CPU time of each,
and the ratio. Compilation is not counted.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import optax

from linnet import nnx

WIDTH, DEPTH = 32, 20
TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-3),
    "adamw with a schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
    "muon": optax.contrib.muon(1e-3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 2),
}


class Mlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def pure(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def equations(jaxpr):
    """The equations of a jaxpr and of all inside of it."""
    parts = [x for e in jaxpr.eqns for x in jax.tree.leaves([*e.params.values()])]
    inner = [getattr(part, "jaxpr", part) for part in parts]
    return len(jaxpr.eqns) + sum(equations(part) for part in inner if hasattr(part, "eqns"))


def traced(tx):
    """The equations of one update by hand and through an optimizer."""
    model = Mlp()
    params = pure(model)
    graphdef, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def by_hand(params, opt_state, step, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, step + 1

    def objects(state, grads):
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    hand = jax.make_jaxpr(by_hand)(params, tx.init(params), jnp.uint32(0), params)
    return equations(hand.jaxpr), equations(jax.make_jaxpr(objects)(state, params).jaxpr)


X = jax.random.normal(jax.random.key(0), (8, WIDTH))


def loss(model):
    return (model(X) ** 2).mean()


def hand_step(tx, metrics):
    """A step over nested dicts, with the sums of a metric if asked for."""
    model = Mlp()
    graphdef, params = nnx.graphdef(model), pure(model)

    @jax.jit
    def step(params, opt_state, count, sums):
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        sums = (sums[0] + value, sums[1] + 1) if metrics else sums
        return optax.apply_updates(params, updates), opt_state, count + 1, sums, value

    now = [params, tx.init(params), jnp.uint32(0), (jnp.float32(0), jnp.int32(0))]

    def run():
        *now[:], value = step(*now)
        return value

    return run


def object_step(tx, metrics, freeze=()):
    """The same step over live objects."""
    model = Mlp()
    for part in freeze:
        nnx.freeze(model, part)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    average = nnx.metrics.Average() if metrics else None

    @nnx.jit
    def step(model, optimizer, average):
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        if average is not None:
            average.update(values=value)
        return value

    return lambda: step(model, optimizer, average)


ADAM = TRANSFORMATIONS["adam"]
STEPS = {
    "sgd": (lambda: hand_step(optax.sgd(0.1), False), lambda: object_step(optax.sgd(0.1), False)),
    "adam": (lambda: hand_step(ADAM, False), lambda: object_step(ADAM, False)),
    "adam and an average": (lambda: hand_step(ADAM, True), lambda: object_step(ADAM, True)),
    "adam, half frozen (to none frozen)": (
        lambda: object_step(ADAM, False),
        lambda: object_step(ADAM, False, [f"layers.{i}" for i in range(DEPTH // 2)]),
    ),
}


def least(run, inner):
    start = time.process_time()
    for _ in range(inner):
        value = run()
    jax.block_until_ready(value)
    return (time.process_time() - start) / inner * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--inner", type=int, default=20)
    args = parser.parse_args()
    print(f"{'equations of an update':36} by hand   linnet")
    for name, tx in TRANSFORMATIONS.items():
        hand, objects = traced(tx)
        print(f"  {name:34} {hand:7} {objects:8}")
    print(f"\n{'a step, depth 20, width 32':36} by hand, us   linnet, us   ratio")
    for name, (make_hand, make_objects) in STEPS.items():
        hand, objects = make_hand(), make_objects()
        times = [(least(hand, args.inner), least(objects, args.inner)) for _ in range(args.repeats)]
        best = [min(column) for column in zip(*times[1:], strict=True)]
        print(f"  {name:34} {best[0]:11.0f} {best[1]:12.0f} {best[1] / best[0]:7.2f}")


if __name__ == "__main__":
    main()
