"""Taking a model and its Adam state apart and together again: split, merge, state, update, clone.

    python benchmarks/state_api.py [--libs linnet.nnx,flax.nnx] [--blocks 58] [--reps 31]

The same classes are built on every library in one process: 58 blocks of a linear layer and a norm,
an output layer, and an optimizer with both moments of every parameter and a step count: 703 leaves.
Each layer also has the static attributes that real layers carry. The calls of the libraries are
interleaved and medians are printed, in milliseconds, twice:

same object    the call is repeated on one object, as a program with a long-lived model does
fresh object   the object was merged just before (not timed), so nothing about it can be known yet

The garbage collector runs between the timed calls, not in them.
"""

import argparse
import gc
import importlib
import importlib.util
import itertools
import statistics
import time

import jax
import jax.numpy as jnp

WIDTH = 8


def build(nnx, blocks: int):
    """A model and its optimizer as one module, from the parts of `nnx` that every version has."""

    class Linear(nnx.Module):
        def __init__(self, kind, din, dout):
            self.kernel = kind(jnp.ones((din, dout)))
            self.bias = kind(jnp.zeros((dout,)))
            self.in_features = din
            self.out_features = dout
            self.use_bias = True
            self.dtype = None
            self.param_dtype = jnp.float32
            self.precision = None
            self.kernel_init = jax.nn.initializers.lecun_normal
            self.bias_init = jax.nn.initializers.zeros
            self.dot_general = jax.lax.dot_general

    class Norm(nnx.Module):
        def __init__(self, kind, features):
            self.scale = kind(jnp.ones((features,)))
            self.bias = kind(jnp.zeros((features,)))
            self.num_features = features
            self.epsilon = 1e-6
            self.axis = -1
            self.use_fast_variance = True
            self.dtype = None
            self.param_dtype = jnp.float32
            self.scale_init = jax.nn.initializers.ones
            self.bias_init = jax.nn.initializers.zeros

    class Block(nnx.Module):
        def __init__(self, kind):
            self.linear = Linear(kind, WIDTH, WIDTH)
            self.norm = Norm(kind, WIDTH)
            self.activation = jax.nn.relu

    class Model(nnx.Module):
        def __init__(self, kind):
            self.blocks = nnx.List([Block(kind) for _ in range(blocks)])
            self.head = Linear(kind, WIDTH, 1)

    class Adam(nnx.Module):
        def __init__(self):
            self.step = nnx.OptState(jnp.zeros((), jnp.uint32))
            self.mu = Model(nnx.OptState)
            self.nu = Model(nnx.OptState)
            self.learning_rate = 1e-3
            self.wrt = nnx.Param

    class Training(nnx.Module):
        def __init__(self):
            self.model = Model(nnx.Param)
            self.optimizer = Adam()

    return Training()


def operations(nnx, training):
    """The parts of the object, and each operation as a function of the object it is done to."""
    graphdef, state = nnx.split(training)
    # Two sets of other arrays: what is written is never what the object holds already.
    states = itertools.cycle([jax.tree.map(jnp.copy, state) for _ in range(2)])
    table = {
        "split": nnx.split,
        "merge": lambda _: nnx.merge(graphdef, state),
        "state": nnx.state,
        "update": lambda node: nnx.update(node, next(states)),
        "clone": nnx.clone,
        "jax.tree.leaves": jax.tree.leaves,
    }
    return graphdef, state, table


def milliseconds(operation, node) -> float:
    gc.collect(0)
    start = time.perf_counter()
    result = operation(node)
    elapsed = time.perf_counter() - start
    del result  # freed outside the timed part
    return 1e3 * elapsed


def measure(libraries: dict, reps: int, *, fresh: bool) -> dict[str, dict[str, float]]:
    """Medians as {operation: {library: ms}}; the libraries take turns."""
    times: dict[str, dict[str, list[float]]] = {}
    for rep in range(-2, reps):
        for name, (nnx, training, (graphdef, state, table)) in libraries.items():
            for label, operation in table.items():
                node = nnx.merge(graphdef, state) if fresh else training
                elapsed = milliseconds(operation, node)
                if rep >= 0:  # the first rounds warm up
                    times.setdefault(label, {}).setdefault(name, []).append(elapsed)
    return {
        label: {name: statistics.median(values) for name, values in row.items()}
        for label, row in times.items()
    }


def show(title: str, medians: dict[str, dict[str, float]], names: list[str]) -> None:
    first, *others = names
    heads = [f"{name:>12s}" for name in names] + [f"{other}/{first}" for other in others]
    print(f"\n{title:16s} " + "   ".join(heads))
    for label, row in medians.items():
        cells = [f"{row[name]:12.3f}" for name in names]
        cells += [f"{row[other] / row[first]:{len(other + first)}.1f}x" for other in others]
        print(f"{label:16s} " + "   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of split, merge, state, update, clone.")
    parser.add_argument("--libs", default="linnet.nnx,flax.nnx")
    parser.add_argument("--blocks", type=int, default=58)
    parser.add_argument("--reps", type=int, default=31)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    libraries = {}
    for name in args.libs.split(","):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            print(f"{name} is not installed: left out")
            continue
        nnx = importlib.import_module(name)
        training = build(nnx, args.blocks)
        libraries[name] = nnx, training, operations(nnx, training)
        print(f"{name}: {len(jax.tree.leaves(nnx.state(training)))} leaves")

    gc.disable()
    for title, fresh in (("same object", False), ("fresh object", True)):
        show(f"{title}, ms", measure(libraries, args.reps, fresh=fresh), list(libraries))


if __name__ == "__main__":
    main()
