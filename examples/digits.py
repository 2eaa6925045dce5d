"""A convolutional network learns to read handwritten digits, in a few seconds.

Shows: a model with BatchNorm and Dropout, metrics, the training loop, checkpoints (run it again and
it goes on, or says that it is finished), a summary table, and pictures of what happened.

    python examples/digits.py [--epochs 20] [--seed 0] [--fresh]

Everything is written to runs/digits/: checkpoint/, metrics.csv, curves.png, predictions.png and
model.html (the model to click through, in any browser).
"""

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import optax
import treescope
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from linnet import io, nnx
from linnet.training import Loop, plot_curves
from linnet.training.records import pyplot

BATCH = 64


class Network(nnx.Module):
    """Two convolutions and a linear layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.linear = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        return self.linear(self.dropout(x.reshape(x.shape[0], -1)))


def loss_fn(model: Network, images, labels):
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, images, labels):
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, images, labels)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model: Network, metrics: nnx.MultiMetric, images, labels):
    loss, logits = loss_fn(model, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)
    return logits.argmax(-1)


class Digits:
    """1,797 images of 8 by 8 pixels, four fifths to learn from; the split is always the same."""

    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
        split = train_test_split(
            images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
        )
        self.images, self.test_images, self.labels, self.test_labels = split
        self.batches_per_epoch = len(self.labels) // BATCH

    def batches(self, seed: int, epoch: int):
        order = np.random.default_rng([seed, epoch]).permutation(len(self.labels))
        for chosen in order[: self.batches_per_epoch * BATCH].reshape(-1, BATCH):
            yield self.images[chosen], self.labels[chosen]


def evaluate(model: Network, digits: Digits):
    """The network's answers for the test images, and its loss and accuracy there."""
    model.eval()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    answers = eval_step(model, metrics, digits.test_images, digits.test_labels)
    model.train()
    return np.asarray(answers), {k: float(v) for k, v in metrics.compute().items()}


def draw_predictions(path: Path, digits: Digits, answers: np.ndarray) -> None:
    """Test images with the answer and the truth, mistakes first."""
    plt = pyplot()
    order = np.argsort(answers == digits.test_labels, kind="stable")[:50]
    figure, axes = plt.subplots(5, 10, figsize=(10, 6))
    for axis, n in zip(axes.flat, order, strict=True):
        answer, truth = answers[n], digits.test_labels[n]
        axis.imshow(digits.test_images[n, :, :, 0], cmap="gray_r")
        color = "tab:green" if answer == truth else "tab:red"
        axis.set_title(f"{answer} ({truth})", color=color, fontsize=10)
        axis.axis("off")
    figure.suptitle("predicted (true)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def train(digits: Digits, args: argparse.Namespace) -> tuple[Network, Loop]:
    """Trains, or goes on with training; the checkpoint is as new as the last epoch."""
    folder, checkpoint = Path(args.folder), Path(args.folder) / "checkpoint"
    steps = args.epochs * digits.batches_per_epoch
    model = Network(rngs=nnx.Rngs(args.seed))
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3), wrt=nnx.Param)
    batches = lambda epoch: digits.batches(args.seed, epoch)  # noqa: E731
    loop = Loop(batches, epochs=args.epochs, steps=steps, folder=folder, title="digits")
    saved = {"model": model, "optimizer": optimizer, "loop": loop}
    if checkpoint.exists():
        io.restore(checkpoint, saved)
        done = "Already finished" if loop.step >= steps else "Going on"
        print(f"{done}: {checkpoint} is at step {loop.step} of {steps}.")
    else:
        print(nnx.tabulate(model, digits.images[:BATCH]))
    with loop:
        for images, labels in loop:
            loop.log(loss=train_step(model, optimizer, images, labels))
            if loop.step % digits.batches_per_epoch == 0:
                _, found = evaluate(model, digits)
                loop.log(test_loss=found["loss"], test_accuracy=found["accuracy"])
                io.save(checkpoint, saved, overwrite=True)
    return model, loop


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains, writes what there is to see, and returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="runs/digits")
    parser.add_argument("--fresh", action="store_true", help="start over")
    args = parser.parse_args(argv)
    if args.fresh:
        shutil.rmtree(args.folder, ignore_errors=True)

    start, folder, digits = time.perf_counter(), Path(args.folder), Digits()
    model, loop = train(digits, args)
    answers, found = evaluate(model, digits)
    if loop.stopped:
        print(f"Left at step {loop.step} ({loop.stopped}). Run it again to go on.")
        return {"step": loop.step, "accuracy": found["accuracy"]}
    plot_curves(folder)
    draw_predictions(folder / "predictions.png", digits, answers)
    (folder / "model.html").write_text(treescope.render_to_html(model))
    wrong = int((answers != digits.test_labels).sum())
    print(
        f"Finished: {found['accuracy']:.2%} of {len(answers)} test images are right, {wrong} wrong "
        f"({time.perf_counter() - start:.0f} s).\n"
        f"Look at {folder}/predictions.png, curves.png and model.html.\n"
        f"Next: --fresh to start over, --epochs {2 * args.epochs} to train on, --seed for another "
        "start, or read the other examples."
    )
    return {"step": loop.step, "accuracy": found["accuracy"]}


if __name__ == "__main__":
    main()
