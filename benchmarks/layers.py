"""Layers beside the same operations written by hand, and the size of their traces beside Flax's.

    python benchmarks/layers.py [--only NAME] [--repeats 100] [--inner 20]

eager    one call outside of jit at batch 8 and width 32: the layer, and jnp operations by hand on
         the same arrays, in one process, taking turns; the least of the rounds, in microseconds of
         CPU time. The aim is a ratio of at most 1.2 where the work by hand takes over 20.
traced   how many operations a trace of the call holds, those inside of other operations included;
         the aim is at most as many as Flax. Left out where Flax is not installed.
"""

import argparse
import importlib.util
import time

import jax
import jax.numpy as jnp
from jax import lax

from linnet import nnx

BATCH, WIDTH, LENGTH = 8, 32, 10
SLOW = 20  # microseconds; what takes less by hand is not compared
AIM = 1.2
ONLY_HERE = {"Stack of Linear"}  # layers that Flax does not have


def normal(*shape):
    return jax.random.normal(jax.random.key(0), shape)


ROWS, CARRY = normal(BATCH, WIDTH), normal(BATCH, WIDTH) * 0.5
SEQUENCE = normal(BATCH, LENGTH, WIDTH)
IMAGE = normal(BATCH, 8, 8, WIDTH)
INDICES = jnp.arange(BATCH)
CASES = {}


def case(name, build, *inputs):
    """Adds a layer: how it is built on a library, what it is called with, and (below the
    decorator) how to do the same by hand, given the layer, as a function of the inputs."""

    def add(by_hand):
        CASES[name] = (build, inputs, by_hand)

    return add


def arrays(layer, *names):
    return [getattr(layer, name)[...] for name in names]


@case("Linear", lambda nnx, r: nnx.Linear(WIDTH, WIDTH, rngs=r), ROWS)
def _(layer):
    kernel, bias = arrays(layer, "kernel", "bias")
    return lambda x: x @ kernel + bias


@case("LinearGeneral", lambda nnx, r: nnx.LinearGeneral(WIDTH, (4, 8), rngs=r), ROWS)
def _(layer):
    kernel, bias = arrays(layer, "kernel", "bias")
    return lambda x: jnp.einsum("bi,iho->bho", x, kernel) + bias


@case(
    "Einsum",
    lambda nnx, r: nnx.Einsum("bi,iho->bho", (WIDTH, 4, 8), (4, 8), rngs=r),
    ROWS,
)
def _(layer):
    kernel, bias = arrays(layer, "kernel", "bias")
    return lambda x: jnp.einsum("bi,iho->bho", x, kernel) + bias


@case("Embed", lambda nnx, r: nnx.Embed(WIDTH, WIDTH, rngs=r), INDICES)
def _(layer):
    (table,) = arrays(layer, "embedding")
    return lambda indices: jnp.take(table, indices, axis=0)


def convolve(x, kernel, padding="SAME"):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@case("Conv", lambda nnx, r: nnx.Conv(WIDTH, WIDTH, (3, 3), rngs=r), IMAGE)
def _(layer):
    kernel, bias = arrays(layer, "kernel", "bias")
    return lambda x: convolve(x, kernel) + bias


@case("ConvTranspose", lambda nnx, r: nnx.ConvTranspose(WIDTH, WIDTH, (3, 3), rngs=r), IMAGE)
def _(layer):
    kernel, bias = arrays(layer, "kernel", "bias")
    return lambda x: lax.conv_transpose(x, kernel, (1, 1), "SAME") + bias


def normalise(x, mean, variance, epsilon):
    return (x - mean) * lax.rsqrt(variance + epsilon)


@case("BatchNorm, training", lambda nnx, r: nnx.BatchNorm(WIDTH, rngs=r), ROWS)
def _(layer):
    scale, bias, *running = arrays(layer, "scale", "bias", "mean", "var")

    def by_hand(x):
        mean = x.mean(0)
        variance = (x * x).mean(0) - mean * mean
        running[0] = 0.99 * running[0] + 0.01 * mean
        running[1] = 0.99 * running[1] + 0.01 * variance
        return normalise(x, mean, variance, 1e-5) * scale + bias

    return by_hand


@case(
    "BatchNorm, evaluation",
    lambda nnx, r: nnx.BatchNorm(WIDTH, use_running_average=True, rngs=r),
    ROWS,
)
def _(layer):
    scale, bias, mean, variance = arrays(layer, "scale", "bias", "mean", "var")
    return lambda x: normalise(x, mean, variance, 1e-5) * scale + bias


@case("LayerNorm", lambda nnx, r: nnx.LayerNorm(WIDTH, rngs=r), ROWS)
def _(layer):
    scale, bias = arrays(layer, "scale", "bias")

    def by_hand(x):
        mean = x.mean(-1, keepdims=True)
        variance = (x * x).mean(-1, keepdims=True) - mean * mean
        return normalise(x, mean, variance, 1e-6) * scale + bias

    return by_hand


@case("RMSNorm", lambda nnx, r: nnx.RMSNorm(WIDTH, rngs=r), ROWS)
def _(layer):
    (scale,) = arrays(layer, "scale")
    return lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


@case("GroupNorm", lambda nnx, r: nnx.GroupNorm(WIDTH, 4, rngs=r), ROWS)
def _(layer):
    scale, bias = arrays(layer, "scale", "bias")

    def by_hand(x):
        groups = x.reshape(BATCH, 4, -1)
        mean = groups.mean(-1, keepdims=True)
        variance = (groups * groups).mean(-1, keepdims=True) - mean * mean
        return normalise(groups, mean, variance, 1e-6).reshape(x.shape) * scale + bias

    return by_hand


@case("InstanceNorm", lambda nnx, r: nnx.InstanceNorm(WIDTH, rngs=r), SEQUENCE)
def _(layer):
    scale, bias = arrays(layer, "scale", "bias")

    def by_hand(x):
        mean = x.mean(1, keepdims=True)
        variance = (x * x).mean(1, keepdims=True) - mean * mean
        return normalise(x, mean, variance, 1e-6) * scale + bias

    return by_hand


@case(
    "SpectralNorm",
    lambda nnx, r: nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=r), rngs=r),
    ROWS,
)
def _(layer):
    weight, bias = arrays(layer.layer_instance, "kernel", "bias")
    held = [weight, layer.batch_stats["kernel", "u"][...], None]

    def unit(x):
        return x / jnp.sqrt((x * x).sum() + 1e-12)

    def by_hand(x):
        weight, u, _ = held
        v = unit(u @ weight.T)
        u = unit(v @ weight)
        sigma = (v @ weight @ u.T)[0, 0]
        held[:] = weight / jnp.where(sigma == 0, 1, sigma), u, sigma
        return x @ held[0] + bias

    return by_hand


@case("WeightNorm", lambda nnx, r: nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=r), rngs=r), ROWS)
def _(layer):
    weight, bias = arrays(layer.layer_instance, "kernel", "bias")
    held, scale = [weight], layer.scales[("kernel",)]

    def by_hand(x):
        weight = held[0]
        held[0] = weight * lax.rsqrt((weight * weight).sum(0, keepdims=True) + 1e-12) * scale
        return x @ held[0] + bias

    return by_hand


@case("Dropout", lambda nnx, r: nnx.Dropout(0.5, rngs=r), ROWS)
def _(layer):
    key, count = layer.rngs.key[...], [layer.rngs.count[...]]

    def by_hand(x):
        mask = jax.random.bernoulli(jax.random.fold_in(key, count[0]), 0.5, x.shape)
        count[0] = count[0] + 1
        return jnp.where(mask, x / 0.5, 0)

    return by_hand


@case("PReLU", lambda nnx, r: nnx.PReLU(), ROWS)
def _(layer):
    (slope,) = arrays(layer, "negative_slope")
    return lambda x: jnp.where(x >= 0, x, slope * x)


@case("LoRA", lambda nnx, r: nnx.LoRA(WIDTH, 4, WIDTH, rngs=r), ROWS)
def _(layer):
    a, b = arrays(layer, "lora_a", "lora_b")
    return lambda x: x @ a @ b


@case("LoRALinear", lambda nnx, r: nnx.LoRALinear(WIDTH, WIDTH, lora_rank=4, rngs=r), ROWS)
def _(layer):
    kernel, bias = arrays(layer, "kernel", "bias")
    a, b = arrays(layer.lora, "lora_a", "lora_b")
    return lambda x: x @ kernel + bias + x @ a @ b


def attention_by_hand(layer, drop=lambda weights: weights):
    parts = [arrays(part, "kernel", "bias") for part in (layer.query, layer.key, layer.value)]
    out, out_bias = arrays(layer.out, "kernel", "bias")

    def by_hand(x):
        q, k, v = (jnp.einsum("bli,ihd->blhd", x, kernel) + bias for kernel, bias in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(q.shape[-1]), k)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", drop(jax.nn.softmax(scores)), v)
        return jnp.einsum("blhd,hdo->blo", mixed, out) + out_bias

    return by_hand


case(
    "MultiHeadAttention",
    lambda nnx, r: nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=r),
    SEQUENCE,
)(attention_by_hand)


@case(
    "MHA with dropout",
    lambda nnx, r: nnx.MultiHeadAttention(
        4, WIDTH, decode=False, dropout_rate=0.5, deterministic=False, rngs=r
    ),
    SEQUENCE,
)
def _(layer):
    key, count = layer.rngs.key[...], [layer.rngs.count[...]]

    def drop(weights):
        draw = jax.random.fold_in(key, count[0])
        mask = jax.random.bernoulli(draw, 0.5, (1, 1, *weights.shape[2:]))
        count[0] = count[0] + 1
        return jnp.where(mask, weights / 0.5, 0)

    return attention_by_hand(layer, drop)


def lstm(c, gates):
    i, f, g, o = gates
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


@case("LSTMCell", lambda nnx, r: nnx.LSTMCell(WIDTH, WIDTH, rngs=r), (CARRY, CARRY), ROWS)
def _(layer):
    of_input = [arrays(part, "kernel")[0] for part in (layer.ii, layer.if_, layer.ig, layer.io)]
    of_hidden = [
        arrays(part, "kernel", "bias") for part in (layer.hi, layer.hf, layer.hg, layer.ho)
    ]

    def by_hand(carry, x):
        c, h = carry
        pairs = zip(of_input, of_hidden, strict=True)
        return lstm(c, [x @ w + h @ u + b for w, (u, b) in pairs])

    return by_hand


@case(
    "OptimizedLSTMCell",
    lambda nnx, r: nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=r),
    (CARRY, CARRY),
    ROWS,
)
def _(layer):
    (of_input,) = arrays(layer.dense_i, "kernel")
    of_hidden, bias = arrays(layer.dense_h, "kernel", "bias")

    def by_hand(carry, x):
        c, h = carry
        return lstm(c, jnp.split(x @ of_input + h @ of_hidden + bias, 4, axis=-1))

    return by_hand


def gru_by_hand(layer):
    of_input, bias = arrays(layer.dense_i, "kernel", "bias")
    (of_hidden,) = arrays(layer.dense_h, "kernel")

    def by_hand(h, x):
        xr, xz, xn = jnp.split(x @ of_input + bias, 3, axis=-1)
        hr, hz, hn = jnp.split(h @ of_hidden, 3, axis=-1)
        z = jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        h = (1 - z) * n + z * h
        return h, h

    return by_hand


case("GRUCell", lambda nnx, r: nnx.GRUCell(WIDTH, WIDTH, rngs=r), CARRY, ROWS)(gru_by_hand)


@case("SimpleCell", lambda nnx, r: nnx.SimpleCell(WIDTH, WIDTH, rngs=r), CARRY, ROWS)
def _(layer):
    of_input, bias = arrays(layer.dense_i, "kernel", "bias")
    (of_hidden,) = arrays(layer.dense_h, "kernel")

    def by_hand(h, x):
        h = jnp.tanh(x @ of_input + bias + h @ of_hidden)
        return h, h

    return by_hand


def run_by_hand(step, reverse=False):
    def by_hand(xs):
        start = jnp.zeros((BATCH, WIDTH))
        ys = lax.scan(step, start, jnp.swapaxes(xs, 0, 1), reverse=reverse)[1]
        return jnp.swapaxes(ys, 0, 1)

    return by_hand


def recurrent(nnx, rngs):
    return nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))


@case("RNN of GRUCell", recurrent, SEQUENCE)
def _(layer):
    return run_by_hand(gru_by_hand(layer.cell))


@case(
    "Bidirectional",
    lambda nnx, r: nnx.Bidirectional(recurrent(nnx, r), recurrent(nnx, r)),
    SEQUENCE,
)
def _(layer):
    forward = run_by_hand(gru_by_hand(layer.forward_rnn.cell))
    backward = run_by_hand(gru_by_hand(layer.backward_rnn.cell), reverse=True)
    return lambda xs: jnp.concatenate([forward(xs), backward(xs)], axis=-1)


@case(
    "Sequential",
    lambda nnx, r: nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, rngs=r), nnx.relu, nnx.Linear(WIDTH, WIDTH, rngs=r)
    ),
    ROWS,
)
def _(layer):
    (first, a), (last, b) = (arrays(layer.layers[n], "kernel", "bias") for n in (0, 2))
    return lambda x: jax.nn.relu(x @ first + a) @ last + b


@case(
    "Stack of Linear",
    lambda nnx, r: nnx.Stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), 4, rngs=r),
    ROWS,
)
def _(layer):
    parts = [arrays(part, "kernel", "bias") for part in layer.to_list()]

    def by_hand(x):
        for kernel, bias in parts:
            x = x @ kernel + bias
        return x

    return by_hand


def measure(call, inputs, inner):
    start = time.process_time()
    for _ in range(inner):
        out = call(*inputs)
    jax.block_until_ready(out)
    return (time.process_time() - start) / inner * 1e6


def eager_times(name, repeats, inner):
    """The least time by hand and of the layer, in microseconds."""
    build, inputs, by_hand = CASES[name]
    layer = build(nnx, nnx.Rngs(0))
    calls = by_hand(layer), layer
    first = [call(*inputs) for call in calls]
    same = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=1e-4)), *first)
    assert jax.tree.all(same), f"{name}: not the same numbers by hand"
    rounds = [[measure(call, inputs, inner) for call in calls] for _ in range(repeats)]
    return [min(column) for column in zip(*rounds[1:], strict=True)]


def count_equations(jaxpr):
    """How many operations a trace holds, those inside of other operations included."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                total += count_equations(getattr(value, "jaxpr", value))
    return total


def is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def traced_size(library, name):
    """The size of the trace of one call, state in and out."""
    build, inputs, _ = CASES[name]
    graphdef, state = library.split(build(library, library.Rngs(0)))

    def call(state, inputs):
        layer = library.merge(graphdef, state)
        return layer(*inputs), library.state(layer)

    return count_equations(jax.make_jaxpr(call)(state, inputs).jaxpr)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--inner", type=int, default=20)
    args = parser.parse_args()
    peer = None
    if importlib.util.find_spec("flax"):
        from flax import nnx as peer
    else:
        print("flax is not installed: its traces are left out\n")
    print(f"{'':24}{'eager, us':>20}{'':10}{'traced':>14}")
    print(f"{'':24}{'by hand':>10}{'linnet':>10}{'ratio':>10}{'linnet':>8}{'flax':>8}")
    misses = []
    for name in CASES:
        if args.only not in name:
            continue
        hand, layer = eager_times(name, args.repeats, args.inner)
        size = traced_size(nnx, name)
        peer_size = traced_size(peer, name) if peer and name not in ONLY_HERE else ""
        row = f"{name:24}{hand:10.1f}{layer:10.1f}{layer / hand:10.2f}{size:8}{peer_size:>8}"
        missed = (hand > SLOW and layer / hand > AIM) or (peer_size and size > peer_size)
        print(row + ("  *" if missed else ""), flush=True)
        misses += [name] * bool(missed)
    print(f"\n* {len(misses)} of the layers above miss the aim" if misses else "\nall meet the aim")


if __name__ == "__main__":
    main()
