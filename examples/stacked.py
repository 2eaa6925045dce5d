"""Scan over layers: a deep network that compiles as fast as a shallow one, and remat.

Shows: `nnx.Stack`, which holds equal layers as one, with a leading axis for the layers, and runs
them by scan, so that the compiler sees one layer, however many there are. With `remat=True` each
layer is computed again in the backward pass instead of being kept. A training step is compiled for
a list and for a stack, shallow and deep, without making a parameter (`nnx.eval_shape`), and time
and memory are compared. Then the deep stack is trained on scikit-learn's digits.

    python examples/stacked.py [--depths 8 48] [--steps 200]
"""

import argparse
import time

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from linnet import nnx
from linnet.training import Loop

WIDTH = 64


class Block(nnx.Module):
    """A residual block; it begins by adding nothing, so that a deep network trains well."""

    def __init__(self, *, rngs: nnx.Rngs):
        zeros = nnx.initializers.zeros
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=zeros, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """Ten logits from 64 pixels, through blocks in a list or in a stack."""

    def __init__(self, blocks: nnx.List | nnx.Stack, *, rngs: nnx.Rngs):
        self.blocks = blocks
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        if isinstance(self.blocks, nnx.Stack):
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def make(kind: str, depth: int, seed: int) -> tuple[Classifier, nnx.Optimizer]:
    """A model with its blocks in a "list", a "stack" or a "stack, remat", and its optimizer."""
    rngs = nnx.Rngs(seed)
    if kind == "list":
        blocks = nnx.List([Block(rngs=rngs) for _ in range(depth)])
    else:
        blocks = nnx.Stack(Block, depth, rngs=rngs, remat=kind == "stack, remat")
    model = Classifier(blocks, rngs=rngs)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def measure(kind: str, depth: int, images, labels) -> tuple[float, float]:
    """Seconds to compile a training step, and the megabytes it needs beside its arguments."""
    model, optimizer = nnx.eval_shape(lambda: make(kind, depth, seed=0))
    start = time.perf_counter()
    compiled = train_step.lower(model, optimizer, images, labels).compile()
    seconds = time.perf_counter() - start
    return seconds, compiled.memory_analysis().temp_size_in_bytes / 1e6


def compare(depths: list[int], images, labels) -> dict[tuple[str, int], tuple[float, float]]:
    """Prints a table of what was measured, and returns it."""
    print(f"a training step, {len(labels)} images   depth   compile s   memory MB")
    found = {}
    cases = [(kind, depth) for kind in ("list", "stack") for depth in depths]
    for kind, depth in (*cases, ("stack, remat", depths[-1])):
        seconds, memory = found[kind, depth] = measure(kind, depth, images, labels)
        print(f"{kind:32} {depth:7} {seconds:11.1f} {memory:11.1f}")
    return found


def fit(depth: int, steps: int, seed: int, images, labels) -> Classifier:
    """A deep stack, trained on random batches."""
    model, optimizer = make("stack, remat", depth, seed)
    random = np.random.default_rng(seed)
    chosen = (random.integers(len(labels), size=64) for _ in range(steps))
    loop = Loop(((images[rows], labels[rows]) for rows in chosen), steps=steps, title="stack")
    for batch in loop:
        loop.log(loss=train_step(model, optimizer, *batch))
    return model


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Compares a list of layers with a stack.")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 48])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    found = compare(args.depths, train, train_labels)
    shallow, deep = args.depths[0], args.depths[-1]
    for kind in ("list", "stack"):
        growth = found[kind, deep][0] / found[kind, shallow][0]
        print(f"{kind}: {deep} layers take {growth:.1f} times as long to compile as {shallow}")
    saved = found["stack", deep][1] / found["stack, remat", deep][1]
    print(f"remat: {saved:.0f} times less memory")

    model = fit(deep, args.steps, args.seed, train, train_labels)
    listed = nnx.clone(model)
    listed.blocks = nnx.List(model.blocks.to_list())
    logits = model(test)
    difference = float(jnp.abs(logits - listed(test)).max())
    accuracy = float(jnp.mean(logits.argmax(axis=-1) == test_labels))
    print(f"{deep} layers trained: test accuracy {accuracy:.3f}")
    print(f"the same layers as a list: logits differ by {difference:.1e} at most")
    return {"accuracy": accuracy, "saved": saved, "difference": difference}


if __name__ == "__main__":
    main()
