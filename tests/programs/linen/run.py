"""Runs the programs beside it and prints, as JSON, the losses and variables that each ends with.

    export XLA_FLAGS=--xla_backend_optimization_level=0
    python -m linnet -m tests.programs.linen.run [NAME ...]
    python -m tests.programs.linen.run > tests/programs/linen/flax.json

The first runs them on Linnet, unchanged; the second on Flax. Both have two devices. The flag is for
time: nearly all of it goes into compiling.
"""

import importlib
import json
import sys
import time

import jax
import numpy as np

PROGRAMS = ("resnet", "transformer", "seq2seq", "vae", "ppo")


def summary(tree):
    """Shape and sum of absolute values of each array, by its path."""
    return {
        "/".join(str(getattr(key, "key", key)) for key in path): [
            list(np.shape(leaf)),
            float(np.sum(np.abs(np.asarray(leaf, np.float64)))),
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def run(name):
    """What one program gives."""
    start = time.process_time()
    losses, variables = importlib.import_module(f"tests.programs.linen.{name}").main()
    print(f"{name}: {time.process_time() - start:.1f} s", file=sys.stderr)
    return {"losses": losses, "variables": summary(variables)}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    names = sys.argv[1:]
    print(json.dumps({name: run(name) for name in names or PROGRAMS}, indent=1))
