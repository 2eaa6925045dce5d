"""A byte-level GPT learns to write Python from the standard library's own source.

Shows: attention with a causal mask, a loss that never holds the logits of a whole batch, a loop
with a schedule, evaluation on text that was held out, and sampling with the key/value cache. The
measure to beat is a bigram model, which knows how often each byte follows each other byte.

    python examples/gpt.py [--steps 800] [--prompt "def read("]
"""

import argparse
import sysconfig
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from linnet import nnx
from linnet.training import Loop, plot_curves

CONTEXT, WIDTH, DEPTH, HEADS = 64, 96, 3, 4
BATCH = 32


class Block(nnx.Module):
    """Attention and a small network, each added to what comes in."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Logits for the byte that follows each byte."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.bytes = nnx.Embed(256, WIDTH, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def hidden(self, text, places):
        """What goes into the last layer."""
        x = self.bytes(text) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, text, places):
        return self.bytes.attend(self.hidden(text, places))


def read_source(most_bytes: int, most_held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library to train on, and bytes of other files that are held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[::10]
    parts = []
    for chosen, most in (
        ([f for f in files if f not in held_out], most_bytes),
        (held_out, most_held_out),
    ):
        text = b"".join(f.read_bytes() for f in chosen)[:most]
        parts.append(np.frombuffer(text, np.uint8))
    return parts[0], parts[1]


def windows(text: np.ndarray, steps: int, seed: int):
    """Batches of random pieces of the text, one byte longer than the context."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        yield text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def loss_of(model: GPT, text):
    places = jnp.broadcast_to(jnp.arange(CONTEXT), text[:, 1:].shape)
    return nnx.losses.chunked_softmax_cross_entropy(
        model.hidden(text[:, :-1], places),
        model.bytes.embedding[...],
        text[:, 1:],
        transposed=True,
        reduction="mean",
    )


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, text):
    loss, grads = nnx.value_and_grad(loss_of)(model, text)
    optimizer.update(model, grads)
    return loss


eval_step = nnx.jit(loss_of)


def bigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Nats a byte of a model that counts pairs of bytes."""
    counts = np.full((256, 256), 0.01)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    chances = counts / counts.sum(1, keepdims=True)
    return float(-np.log(chances[held_out[:-1], held_out[1:]]).mean())


def sample(model: GPT, prompt: bytes, temperature: float = 0.6, seed: int = 0) -> bytes:
    """Goes on with a prompt until the context is full."""
    text = jnp.asarray(list(prompt[: CONTEXT - 1]))
    options = {"temperature": temperature, "rngs": nnx.Rngs(sample=seed)}
    return prompt + bytes(nnx.generate(model, text, CONTEXT - len(text), **options).tolist())


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains, samples, and returns the losses on held-out text, in nats a byte."""
    parser = argparse.ArgumentParser(description="Trains a small GPT on the standard library.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--bytes", type=int, default=2_000_000, help="how much text to train on")
    parser.add_argument("--held-out", type=int, default=200_000, help="and how much to test on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="def read(")
    parser.add_argument("--folder", default="runs/gpt")
    args = parser.parse_args(argv)
    start = time.perf_counter()

    train, held_out = read_source(args.bytes, args.held_out)
    model = GPT(rngs=nnx.Rngs(args.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10, args.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    batches = windows(train, args.steps, args.seed)
    with Loop(batches, steps=args.steps, folder=args.folder, title="gpt") as loop:
        for text in loop:
            loop.log(loss=train_step(model, optimizer, text))

    found = float(np.mean([eval_step(model, text) for text in windows(held_out, 50, seed=1)]))
    bigram = bigram_loss(train, held_out)
    print(f"curves: {plot_curves(args.folder)}")
    print(f"held-out text, nats a byte: bigram model {bigram:.3f}, GPT {found:.3f}")
    print(f"margin {bigram - found:.3f}, in {time.perf_counter() - start:.0f} s. A sample:\n")
    print(sample(model, args.prompt.encode()).decode(errors="replace"))
    return {"bigram": bigram, "gpt": found}


if __name__ == "__main__":
    main()
