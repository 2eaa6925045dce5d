"""Runs the programs beside it and prints, as JSON, the losses and variables that each ends with.

    export XLA_FLAGS=--xla_backend_optimization_level=0
    python -m tests.programs.linen.run linnet [NAME ...]
    python -m tests.programs.linen.run flax > tests/programs/linen/flax.json

The first runs them on Linnet, with ``flax`` in their import lines replaced; the second, in an
environment that has Flax, as they are. Both have two devices. The flag is for time: nearly all of
it goes into compiling.
"""

import json
import re
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np

FOLDER = Path(__file__).parent
PROGRAMS = ("resnet", "transformer", "seq2seq", "vae", "ppo")


def on_linnet(source):
    """The text of a program that imports Linnet in the place of Flax."""
    source = re.sub(r"^import flax$", "import linnet as flax", source, flags=re.MULTILINE)
    return re.sub(r"^(import|from) flax\b", r"\1 linnet", source, flags=re.MULTILINE)


def summary(tree):
    """Shape and sum of absolute values of each array, by its path."""
    return {
        "/".join(str(getattr(key, "key", key)) for key in path): [
            list(np.shape(leaf)),
            float(np.sum(np.abs(np.asarray(leaf, np.float64)))),
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def run(library, name):
    """What one program gives."""
    path = FOLDER / f"{name}.py"
    source = path.read_text()
    if library == "linnet":
        source = on_linnet(source)
    module = sys.modules[name] = types.ModuleType(name)  # where dataclasses look for their types
    start = time.process_time()
    exec(compile(source, path, "exec"), vars(module))
    losses, variables = module.main()
    print(f"{name}: {time.process_time() - start:.1f} s", file=sys.stderr)
    return {"losses": losses, "variables": summary(variables)}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    library, *names = sys.argv[1:]
    print(json.dumps({name: run(library, name) for name in names or PROGRAMS}, indent=1))
