"""A variational autoencoder of handwritten digits, and what its likelihood bound is worth.

Shows: a model with random numbers of its own and several methods, a step over live objects, and the
training loop. The pixels of scikit-learn's digits are taken as ink or paper, so that the bound
(ELBO) can be held against a model of independent pixels, both in nats an image.

    python examples/vae.py [--steps 3000] [--latents 8]

Written to runs/vae/: metrics.csv, curves.png, and samples.png with test images, what the model
makes of them, and new ones.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from linnet import nnx
from linnet.training import Loop, plot_curves


class VAE(nnx.Module):
    """Images of 64 pixels from a few normally distributed numbers."""

    def __init__(self, latents: int, width: int = 256, *, rngs: nnx.Rngs):
        self.encoder = nnx.Sequential(
            nnx.Linear(64, width, rngs=rngs), nnx.relu, nnx.Linear(width, 2 * latents, rngs=rngs)
        )
        self.decoder = nnx.Sequential(
            nnx.Linear(latents, width, rngs=rngs), nnx.relu, nnx.Linear(width, 64, rngs=rngs)
        )
        self.noise = rngs.fork()  # draws new numbers at every call, under jit too
        self.latents = latents

    def encode(self, images):
        mean, log_std = jnp.split(self.encoder(images), 2, axis=-1)
        return mean, log_std

    def __call__(self, images):
        """Logits of the pixels of images like these, and their latent distributions."""
        mean, log_std = self.encode(images)
        latents = mean + jnp.exp(log_std) * self.noise.normal(mean.shape)
        return self.decoder(latents), mean, log_std

    def sample(self, count: int):
        """New images: the chance of ink in each pixel."""
        return nnx.sigmoid(self.decoder(self.noise.normal((count, self.latents))))


def negative_elbo(model: VAE, images):
    """Nats an image: what reconstruction misses, and how far latents are from their prior."""
    logits, mean, log_std = model(images)
    missed = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=-1)
    divergence = 0.5 * (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std).sum(axis=-1)
    return jnp.mean(missed + divergence)


@nnx.jit
def train_step(model: VAE, optimizer: nnx.Optimizer, images):
    loss, grads = nnx.value_and_grad(negative_elbo)(model, images)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model: VAE, images):
    """The bound with 32 samples an image, to tell it well."""
    return -negative_elbo(model, jnp.tile(images, (32, 1)))


def independent_pixels(train, test) -> float:
    """Nats an image of a model that knows each pixel's frequency and nothing else."""
    ink = (train.sum(axis=0) + 1) / (len(train) + 2)
    return float(np.mean(np.sum(np.log(np.where(test == 1, ink, 1 - ink)), axis=1)))


def batches(images, size: int, seed: int, epoch: int):
    """The images of an epoch in a new order; what does not fill a batch is left for another."""
    order = np.random.default_rng([seed, epoch]).permutation(len(images))
    for start in range(0, len(images) - size + 1, size):
        yield images[order[start : start + size]]


def draw(model: VAE, images, path: Path) -> None:
    """Three rows: images, what the model makes of them, and new ones."""
    logits, _, _ = model(images)
    rows = [images, nnx.sigmoid(logits), model.sample(len(images))]
    figure = Figure(figsize=(len(images), 3.3))
    axes = figure.subplots(3, len(images))
    for line, row, title in zip(axes, rows, ("test", "again", "new"), strict=True):
        line[0].set_title(title, loc="left")
        for axis, image in zip(line, np.asarray(row), strict=True):
            axis.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axis.axis("off")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Trains a variational autoencoder on digits.")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--latents", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/vae"))
    args = parser.parse_args(argv)

    pixels, labels = load_digits(return_X_y=True)
    ink = (pixels > 7).astype(np.float32)
    train, test = train_test_split(ink, test_size=0.2, stratify=labels, random_state=0)

    model = VAE(args.latents, rngs=nnx.Rngs(args.seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loop = Loop(
        lambda epoch: batches(train, 128, args.seed, epoch),
        steps=args.steps,
        folder=args.folder,
        title="vae",
    )
    for images in loop:
        loop.log(loss=train_step(model, optimizer, images))
        if loop.step % 200 == 0:
            loop.log(test_loss=-evaluate(model, test))

    elbo, baseline = float(evaluate(model, test)), independent_pixels(train, test)
    draw(model, test[:12], args.folder / "samples.png")
    plot_curves(args.folder)
    print(f"log-likelihood of a test image: at least {elbo:.2f} nats (ELBO)")
    print(f"{'by a model of independent pixels:':40} {baseline:.2f} nats")
    print(f"Look at {args.folder}/samples.png and curves.png.")
    return {"elbo": elbo, "baseline": baseline}


if __name__ == "__main__":
    main()
