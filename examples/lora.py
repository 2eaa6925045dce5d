"""LoRA: a frozen classifier of the digits 0 to 4 learns 5 to 9 through a few small matrices.

Shows: each `nnx.Linear` of a trained model put into an `nnx.LoRA`, and `nnx.freeze`, after which
the same training step leaves the base alone. The base is compared bit for bit; without the adapter
it knows what it knew. Training all of it instead learns the new digits, and forgets the old ones.

    python examples/lora.py [--steps 600] [--rank 4]
"""

import argparse

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from linnet import nnx
from linnet.training import Loop


def make_classifier(rngs: nnx.Rngs) -> nnx.Sequential:
    """Ten logits from 64 pixels."""
    return nnx.Sequential(
        nnx.Linear(64, 256, rngs=rngs),
        nnx.relu,
        nnx.Linear(256, 256, rngs=rngs),
        nnx.relu,
        nnx.Linear(256, 10, rngs=rngs),
    )


def add_adapters(model: nnx.Sequential, rank: int, rngs: nnx.Rngs) -> None:
    """Puts a low-rank map beside each linear layer, which begins by adding zero."""
    for position, layer in enumerate(model.layers):
        if isinstance(layer, nnx.Linear):
            model.layers[position] = nnx.LoRA(
                layer.in_features, rank, layer.out_features, base_module=layer, rngs=rngs
            )


def remove_adapters(model: nnx.Sequential) -> None:
    for position, layer in enumerate(model.layers):
        if isinstance(layer, nnx.LoRA):
            model.layers[position] = layer.base_module


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def fit(model, digits, steps: int, seed: int, title: str) -> None:
    """Trains what is not frozen on random batches of (images, labels)."""
    images, labels = digits
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    random = np.random.default_rng(seed)
    chosen = (random.integers(len(labels), size=64) for _ in range(steps))
    loop = Loop(((images[rows], labels[rows]) for rows in chosen), steps=steps, title=title)
    for batch in loop:
        loop.log(loss=train_step(model, optimizer, *batch))


@nnx.jit
def predict(model, images):
    return model(images).argmax(axis=-1)


def accuracy(model, digits) -> float:
    images, labels = digits
    return float(np.mean(predict(model, images) == labels))


def load() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Training and test parts of the digits 0 to 4 and 5 to 9."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train, test = (parts[0], parts[2]), (parts[1], parts[3])
    return {
        f"{name} {digits}": (images[chosen], labels[chosen])
        for name, (images, labels) in (("train", train), ("test", test))
        for digits, chosen in (("0-4", labels < 5), ("5-9", labels >= 5))
    }


def main(argv: list[str] | None = None) -> dict[str, float | bool]:
    parser = argparse.ArgumentParser(description="Fine-tunes a frozen classifier with LoRA.")
    parser.add_argument("--steps", type=int, default=600, help="of each training")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    digits, rngs = load(), nnx.Rngs(args.seed)
    model = make_classifier(rngs)
    fit(model, digits["train 0-4"], args.steps, args.seed, "base on 0-4")
    known_before = accuracy(model, digits["test 0-4"])
    new_before = accuracy(model, digits["test 5-9"])

    whole = nnx.clone(model)  # for comparison: all of it goes on training
    fit(whole, digits["train 5-9"], args.steps, args.seed, "all of it on 5-9")

    nnx.freeze(model)  # what is there now; the adapters come later, and train
    base = nnx.clone(model)
    add_adapters(model, args.rank, rngs)
    print(nnx.what_trains(model))
    fit(model, digits["train 5-9"], args.steps, args.seed, "adapter on 5-9")
    new_after = accuracy(model, digits["test 5-9"])
    adapter = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))

    remove_adapters(model)
    unchanged = not nnx.diff(nnx.state(model), nnx.state(base))
    known_after = accuracy(model, digits["test 0-4"])

    print(f"the base is unchanged, bit for bit: {unchanged}")
    print(f"{'test accuracy':32}     5-9     0-4")
    print(f"{'base':32} {new_before:7.3f} {known_before:7.3f}")
    print(f"{'base, adapter put in | taken out':32} {new_after:7.3f} {known_after:7.3f}")
    known, new = accuracy(whole, digits["test 0-4"]), accuracy(whole, digits["test 5-9"])
    print(f"{'all parameters trained on 5-9':32} {new:7.3f} {known:7.3f}")
    return {"new": new_after, "known": known_after, "unchanged": unchanged, "adapter": adapter}


if __name__ == "__main__":
    main()
