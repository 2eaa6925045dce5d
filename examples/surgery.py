"""Model surgery: a trained network is cut, grown, frozen, tied, adapted and loaded in part.

Shows: a model is a Python object, so most of this is assignment, and what is compiled notices. Each
operation is a function here, and what it did is printed: the accuracy on scikit-learn's digits, or
the number of parameters.

    python examples/surgery.py [--steps 300]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from linnet import nnx

WIDTH = 64
Data = tuple[np.ndarray, np.ndarray]


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, depth: int, classes: int, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(WIDTH, classes, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def predict(model, images):
    return model(images).argmax(axis=-1)


def load() -> tuple[Data, Data]:
    """Images and labels to train on, and others to test on."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    return (parts[0], parts[2]), (parts[1], parts[3])


def fit(model: Net, data: Data, steps: int) -> Net:
    """Trains what is not frozen."""
    # After the surgery: an optimizer is built for the parameters that there are.
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    random = np.random.default_rng(0)
    images, labels = data
    for _ in range(steps):
        rows = random.integers(len(labels), size=64)
        train_step(model, optimizer, images[rows], labels[rows])
    return model


def accuracy(model: Net, data: Data) -> float:
    images, labels = data
    return float(np.mean(np.asarray(predict(model, images)) == labels))


def parameters(model, what=nnx.Param) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, what)))


def replace_the_head(model: Net, rngs: nnx.Rngs) -> Net:
    """Two classes on blocks that do not train any more."""
    model = nnx.clone(model)
    model.head = nnx.Linear(WIDTH, 2, rngs=rngs)
    nnx.freeze(model, "blocks")
    return model


def replace_a_block(model: Net, rngs: nnx.Rngs) -> Net:
    """A list edit: the second block goes, and one that adds nothing yet comes."""
    model = nnx.clone(model)
    del model.blocks[1]
    block = Block(rngs=rngs)
    block.down.kernel[...] = jnp.zeros((WIDTH, WIDTH))
    model.blocks.insert(1, block)
    return model


def share_blocks(model: Net) -> Net:
    """One block in every place."""
    model = nnx.clone(model)
    model.blocks[1:] = [model.blocks[0]] * (len(model.blocks) - 1)
    return model


def add_lora(model: Net, rngs: nnx.Rngs) -> Net:
    """A copy in which each linear layer, wherever it is, has a low-rank map beside it."""

    def adapt(path, node):
        if not isinstance(node, nnx.Linear):
            return node
        return nnx.LoRA(node.in_features, 2, node.out_features, base_module=node, rngs=rngs)

    return nnx.recursive_map(adapt, nnx.clone(model))


def load_blocks(model: Net, rngs: nnx.Rngs) -> Net:
    """A new model, deeper and for two classes, that begins with the blocks of another."""
    deeper = Net(len(model.blocks) + 1, 2, rngs=rngs)
    nnx.update(deeper, nnx.state(model, nnx.PathContains("blocks")))
    return deeper


def prune(model: Net, share: float) -> Net:
    """A copy whose kernels have lost the smallest of their weights: split by filters and merge."""
    graphdef, kernels, rest = nnx.split(model, nnx.PathContains("kernel"), ...)

    def keep_large(x):
        return jnp.where(jnp.abs(x) < jnp.quantile(jnp.abs(x), share), 0, x)

    return nnx.merge(graphdef, jax.tree.map(keep_large, kernels), rest, copy=True)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Cuts, grows and joins trained models.")
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    rngs, (train, test), steps = nnx.Rngs(args.seed), load(), args.steps
    parity, parity_test = ((images, labels % 2) for images, labels in (train, test))
    model = fit(Net(3, 10, rngs=rngs), train, steps)
    before = nnx.clone(model)
    found = {"base": accuracy(model, test)}
    print(f"base: accuracy {found['base']:.3f}, {parameters(model):,} parameters")

    headed = replace_the_head(model, rngs)
    print(nnx.what_trains(headed, depth=1))
    found["head"] = accuracy(fit(headed, parity, steps), parity_test)
    print(f"odd or even, by the new head alone: {found['head']:.3f}")

    replaced = replace_a_block(model, rngs)
    found["block"] = accuracy(replaced, test)
    again = accuracy(fit(replaced, train, steps), test)
    print(f"a block replaced: {found['block']:.3f}, trained again {again:.3f}")

    tied = fit(share_blocks(model), train, steps)
    found["shared"] = parameters(tied)
    print(f"one block shared: {found['shared']:,} parameters, {accuracy(tied, test):.3f}")

    adapted = add_lora(model, rngs)
    found["lora"] = parameters(adapted, nnx.LoRAParam)
    same = accuracy(adapted, test)
    print(f"LoRA on each linear layer: {found['lora']:,} new parameters, {same:.3f} as yet")

    few, nets = steps // 10, (load_blocks(model, rngs), Net(4, 2, rngs=rngs))
    loaded, fresh = (accuracy(fit(net, parity, few), parity_test) for net in nets)
    print(f"odd or even in {few} steps: with loaded blocks {loaded:.3f}, all new {fresh:.3f}")

    found["pruned"] = accuracy(prune(model, 0.5), test)
    print(f"half of the weights set to zero: {found['pruned']:.3f}")
    found["unchanged"] = not nnx.diff(nnx.state(model), nnx.state(before))
    print(f"the base itself is unchanged: {found['unchanged']}")
    return found


if __name__ == "__main__":
    main()
