"""What a training loop with progress and records costs beside a bare `for`, in one process.

Both run the same jitted step over the same batches; the difference is the loop's. CPU time of the
process unless --wall is given.
"""

import argparse
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from linnet.training import Loop


@jax.jit
def step(w, x):
    w = w - 0.01 * x.T @ jnp.tanh(x @ w)
    return w, (w**2).mean()


def bare(batches):
    w = jnp.ones((64, 64))
    for x in batches:
        w, loss = step(w, x)
    return jax.block_until_ready(loss)


def with_loop(batches, **options):
    w = jnp.ones((64, 64))
    with Loop(batches, show="nothing", **options) as loop:
        for x in loop:
            w, loss = step(w, x)
            if options:
                loop.log(loss=loss)
    return jax.block_until_ready(loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--wall", action="store_true")
    args = parser.parse_args()
    clock = time.perf_counter if args.wall else time.process_time
    batches = [jnp.ones((8, 64))] * args.steps

    def fresh(folder):
        return tempfile.mkdtemp(dir=folder)

    def seconds(run):
        start = clock()
        run()
        return clock() - start

    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "bare loop": lambda: bare(batches),
            "batches through Loop": lambda: with_loop(batches),
            "and the loss logged to metrics.csv": lambda: with_loop(batches, folder=fresh(folder)),
            "and to an event file": lambda: with_loop(
                batches, folder=fresh(folder), tensorboard=True
            ),
        }
        times = {name: [] for name in rows}
        for repeat in range(args.repeats + 1):
            for name, run in rows.items():
                spent = seconds(run)
                if repeat:  # the first round compiles
                    times[name].append(spent)
    base = times["bare loop"]
    print(f"{'':36} us/step   over the bare loop")
    for name, spent in times.items():
        extra = statistics.median(b - a for a, b in zip(base, spent, strict=True)) / args.steps
        print(
            f"{name:36} {statistics.median(spent) / args.steps * 1e6:7.1f} {extra * 1e6:12.1f} us"
        )


if __name__ == "__main__":
    main()
