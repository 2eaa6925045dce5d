"""A recurrent network on the adding problem, which cannot be solved without memory.

Shows: `nnx.RNN` around a cell, sequences of different lengths in one batch, and data made while
training runs. Each sequence is a row of random numbers, two of which are marked: the answer is
their sum. The last number is never marked, so a model without memory can do no better than to
answer with the mean.

    python examples/recurrent.py [--steps 2000] [--cell lstm] [--length 40]

Written to runs/recurrent/: metrics.csv and curves.png.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet import nnx
from linnet.training import Loop, plot_curves

CELLS = {"gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell, "simple": nnx.SimpleCell}


class Adder(nnx.Module):
    """Reads a sequence and answers with one number, from what the cell holds at its end."""

    def __init__(self, cell: nnx.RNNCellBase, *, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(cell, return_carry=True)
        self.answer = nnx.Linear(cell.hidden_features, 1, rngs=rngs)

    def __call__(self, sequences, lengths):
        carry, _ = self.rnn(sequences, seq_lengths=lengths)
        hidden = jax.tree.leaves(carry)[-1]  # an LSTM carries a memory cell too
        return self.answer(hidden)[:, 0]


def make_batch(random: np.random.Generator, count: int, longest: int):
    """Sequences of (number, mark), padded to the longest, their lengths, and the answers."""
    lengths = random.integers(longest // 2, longest + 1, size=count)
    numbers = random.uniform(size=(count, longest)).astype(np.float32)
    marks = np.zeros_like(numbers)
    rows = np.arange(count)
    marks[rows, random.integers(0, lengths // 2)] = 1
    marks[rows, random.integers(lengths // 2, lengths - 1)] = 1
    return np.stack([numbers, marks], axis=-1), lengths, (numbers * marks).sum(axis=1)


def squared_error(model: Adder, sequences, lengths, answers):
    return jnp.mean((model(sequences, lengths) - answers) ** 2)


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(squared_error)(model, *batch)
    optimizer.update(model, grads)
    return loss


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Trains a recurrent network to add.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cell", choices=CELLS, default="gru")
    parser.add_argument("--length", type=int, default=40, help="of the longest sequences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="runs/recurrent")
    args = parser.parse_args(argv)

    rngs = nnx.Rngs(args.seed)
    model = Adder(CELLS[args.cell](2, 32, rngs=rngs), rngs=rngs)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    random = np.random.default_rng(args.seed)
    data = (make_batch(random, 64, args.length) for _ in range(args.steps))
    loop = Loop(data, steps=args.steps, folder=args.folder, title=args.cell)
    for batch in loop:
        loop.log(error=train_step(model, optimizer, batch))

    test = make_batch(np.random.default_rng(12345), 2000, args.length)
    error = float(nnx.jit(squared_error)(model, *test))
    baseline = float(np.var(test[2]))
    plot_curves(args.folder)
    print(f"squared error on new sequences {error:.5f}")
    print(f"{'without memory':30} {baseline:.5f}, {baseline / error:.0f} times as much")
    return {"error": error, "baseline": baseline}


if __name__ == "__main__":
    main()
