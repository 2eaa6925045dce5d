"""What nnx.jit costs beside hand-written jax.jit, in one process, interleaved; medians of ratios.

Every row runs the same arithmetic twice: over live objects, and by hand over the flat arrays.
Times are CPU time of the process unless --wall is given, so that other work on the machine matters
less.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from linnet import nnx

ADAM = optax.adam(1e-3)


def forward(layer, h):
    """One block: a matrix product, a normalisation and an activation."""
    h = h @ layer["kernel"] + layer["bias"]
    mean = h.mean(-1, keepdims=True)
    variance = ((h - mean) ** 2).mean(-1, keepdims=True)
    return jax.nn.relu(
        (h - mean) * jax.lax.rsqrt(variance + 1e-6) * layer["scale"] + layer["shift"]
    )


def block_arrays(width, seed):
    kernel = jax.random.normal(jax.random.key(seed), (width, width)) * 0.1
    return {
        "kernel": kernel,
        "bias": jnp.zeros(width),
        "scale": jnp.ones(width),
        "shift": jnp.zeros(width),
    }


class Block(nnx.Module):
    def __init__(self, width, seed):
        for name, value in block_arrays(width, seed).items():
            setattr(self, name, nnx.Param(value))
        self.features, self.epsilon, self.dtype, self.activation = width, 1e-6, None, jax.nn.relu
        self.deterministic = False

    def __call__(self, h):
        return forward({n: getattr(self, n) for n in ("kernel", "bias", "scale", "shift")}, h)


class Mlp(nnx.Module):
    def __init__(self, width, depth):
        self.blocks = nnx.List([Block(width, i) for i in range(depth)])

    def __call__(self, h):
        for block in self.blocks:
            h = block(h)
        return h


class Slots(nnx.Module):
    """The state of an optimizer for one parameter."""

    def __init__(self, array):
        self.mu = nnx.OptVariable(jnp.zeros_like(array))
        self.nu = nnx.OptVariable(jnp.zeros_like(array))


class Adam(nnx.Module):
    """Adam over Optax, its state in Variables."""

    def __init__(self, model):
        self.tx = ADAM
        self.count = nnx.OptState(jnp.zeros((), jnp.int32))
        params = nnx.to_flat_state(nnx.state(model, nnx.Param))
        self.slots = nnx.List([Slots(variable.value) for variable in params.leaves])

    def update(self, model, grads):
        params = nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves
        grads = [g.value for g in nnx.to_flat_state(grads).leaves]
        mu = [slot.mu.value for slot in self.slots]
        nu = [slot.nu.value for slot in self.slots]
        state = (optax.ScaleByAdamState(self.count.value, mu, nu), optax.EmptyState())
        updates, (new, _) = self.tx.update(grads, state)
        self.count.value = new.count
        for variable, change in zip(params, updates, strict=True):
            variable.value = variable.value + change
        for slot, m, n in zip(self.slots, new.mu, new.nu, strict=True):
            slot.mu.value, slot.nu.value = m, n


def by_hand(width, depth, x, y):
    params = {f"l{i}": block_arrays(width, i) for i in range(depth)}
    box = [params, ADAM.init(params)]

    def loss(params):
        h = x
        for i in range(depth):
            h = forward(params[f"l{i}"], h)
        return ((h - y) ** 2).mean()

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def run():
        box[0], box[1], value = step(*box)
        return value

    return run


@nnx.jit
def train(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def train_with_rngs(model, optimizer, rngs, x, y):
    loss, grads = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


train_by_name = nnx.jit(train.fun)
train_donated = nnx.jit(train.fun, donate_argnums=(0, 1))


@nnx.jit
def train_pair(pair, batch):
    loss, grads = nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())(pair[0])
    pair[1].update(pair[0], grads)
    return loss


def data(width):
    return jax.random.normal(jax.random.key(0), (8, width)), jnp.ones((8, width))


def training_row(width, depth):
    x, y = data(width)
    model = Mlp(width, depth)
    optimizer = Adam(model)
    return by_hand(width, depth, x, y), lambda: train(model, optimizer, x, y)


def forms_row(width, depth, call):
    x, y = data(width)
    model = Mlp(width, depth)
    optimizer = Adam(model)
    return by_hand(width, depth, x, y), lambda: call(model, optimizer, x, y)


def fresh_rngs_row(width, depth):
    x, y = data(width)
    model = Mlp(width, depth)
    optimizer = Adam(model)
    seeds = iter(range(10**9))
    return (
        lambda: train(model, optimizer, x, y),
        lambda: train_with_rngs(model, optimizer, nnx.Rngs(next(seeds)), x, y),
    )


def flip_row(width, depth):
    x, y = data(width)
    model = Mlp(width, depth)
    optimizer = Adam(model)
    modes = iter([True, False] * 10**6)

    def flipped():
        model.eval() if next(modes) else model.train()
        return train(model, optimizer, x, y)

    return lambda: train(model, optimizer, x, y), flipped


def counter_row(leaves):
    class Leaf(nnx.Module):
        def __init__(self):
            self.kernel, self.bias = nnx.Param(jnp.ones((4, 4))), nnx.Param(jnp.ones(4))
            self.features, self.activation = 4, jax.nn.relu

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Leaf() for _ in range(leaves // 2)])
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    model = Model()
    flat = [*jax.tree.leaves(model), jnp.zeros((), jnp.int32)]

    @jax.jit
    def add_by_hand(arrays):
        return arrays[-1] + 1

    @nnx.jit
    def add(model):
        model.count[...] += 1

    def hand():
        flat[-1] = add_by_hand(flat)
        return flat[-1]

    def objects():
        add(model)
        return model.count.value

    return hand, objects


def recurrent_row(width, steps, outside=False):
    xs = jax.random.normal(jax.random.key(0), (steps, 8, width))
    arrays = block_arrays(width, 0)

    class Cell(nnx.Module):
        def __init__(self):
            self.block = Block(width, 0)

        def __call__(self, h, x):
            h = self.block(h + x)
            return h, h

    cell = Cell()

    def step(held, x):
        arrays, h = held
        h = forward(arrays, h + x)
        return (arrays, h), h

    def hand(arrays, xs):
        return jax.lax.scan(step, (arrays, jnp.zeros((8, width))), xs)[1]

    @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
    def scan(h, cell, x):
        return cell(h, x)

    def objects(cell, xs):
        return scan(jnp.zeros((8, width)), cell, xs)[1]

    if not outside:
        hand, objects = jax.jit(hand), nnx.jit(objects)
    return lambda: hand(arrays, xs), lambda: objects(cell, xs)


def control_row(width, api):
    """A branch or loop outside of jit, beside a jax.jit that was made once."""
    arrays, block = block_arrays(width, 0), Block(width, 0)
    x = jax.random.normal(jax.random.key(0), (8, width))
    flag = jnp.array(True)

    if api == "cond":
        hand = lambda flag, arrays, x: jax.lax.cond(flag, forward, lambda a, x: x, arrays, x)  # noqa: E731
        objects = lambda: nnx.cond(flag, lambda b, x: b(x), lambda b, x: x, block, x)  # noqa: E731
    elif api == "fori_loop":
        hand = lambda flag, arrays, x: jax.lax.fori_loop(0, 5, lambda _, x: forward(arrays, x), x)  # noqa: E731
        objects = lambda: nnx.fori_loop(0, 5, lambda _, c: (c[0], c[0](c[1])), (block, x))[1]  # noqa: E731
    else:
        hand = lambda flag, arrays, x: jax.lax.while_loop(  # noqa: E731
            lambda c: c[0] < 5, lambda c: (c[0] + 1, forward(arrays, c[1])), (0, x)
        )[1]
        objects = lambda: nnx.while_loop(  # noqa: E731
            lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1], c[1](c[2])), (0, block, x)
        )[2]
    hand = jax.jit(hand)
    return lambda: hand(flag, arrays, x), objects


def several_models_row(width, depth, count):
    x, y = data(width)
    hands = [by_hand(width, depth, x, y) for _ in range(count)]
    models = [Mlp(width, depth) for _ in range(count)]
    optimizers = [Adam(model) for model in models]

    def objects():
        return [train(m, o, x, y) for m, o in zip(models, optimizers, strict=True)]

    return lambda: [hand() for hand in hands], objects


ROWS = {
    "training step, depth 5": lambda: training_row(32, 5),
    "training step, depth 20": lambda: training_row(32, 20),
    "training step, depth 100": lambda: training_row(32, 100),
    "wide and flat: depth 2, width 512": lambda: training_row(512, 2),
    "many small modules: depth 60, width 4": lambda: training_row(4, 60),
    "recurrent: scan of 50 steps": lambda: recurrent_row(32, 50),
    "the same outside of jit": lambda: recurrent_row(32, 50, outside=True),
    "cond outside of jit (to one jax.jit)": lambda: control_row(32, "cond"),
    "fori_loop outside of jit (to one jax.jit)": lambda: control_row(32, "fori_loop"),
    "while_loop outside of jit (to one jax.jit)": lambda: control_row(32, "while_loop"),
    "four models through one function": lambda: several_models_row(32, 5, 4),
    "depth 20, arguments by name": lambda: forms_row(
        32, 20, lambda m, o, x, y: train_by_name(model=m, optimizer=o, x=x, y=y)
    ),
    "depth 20, model and optimizer donated": lambda: forms_row(32, 20, train_donated),
    "depth 20, a tuple of objects and a dict of arrays": lambda: forms_row(
        32, 20, lambda m, o, x, y: train_pair((m, o), {"x": x, "y": y})
    ),
    "one counter of 701 leaves": lambda: counter_row(700),
    "fresh Rngs every step (to the step without)": lambda: fresh_rngs_row(32, 20),
    "train/eval flip every step (to the step without)": lambda: flip_row(32, 20),
}


def measure(run, inner, clock):
    start = clock()
    for _ in range(inner):
        result = run()
    jax.block_until_ready(result)
    return (clock() - start) / inner


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--inner", type=int, default=20)
    parser.add_argument("--only", default="")
    parser.add_argument("--wall", action="store_true", help="wall time instead of CPU time")
    args = parser.parse_args()
    clock = time.perf_counter if args.wall else time.process_time
    print(f"{'':50}  by hand, us   linnet, us   ratio   first call")
    for name, make in ROWS.items():
        if args.only not in name:
            continue
        pair = make()
        first = [measure(run, 1, time.perf_counter) for run in pair]
        for run in pair:
            measure(run, 5, clock)
        rounds = [[measure(run, args.inner, clock) for run in pair] for _ in range(args.repeats)]
        hand, objects = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
        ratio = statistics.median(b / a for a, b in rounds)
        print(f"{name:50} {hand:12.0f} {objects:12.0f} {ratio:7.2f} {first[1] / first[0]:10.2f}")


if __name__ == "__main__":
    main()
