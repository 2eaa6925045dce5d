"""What Flax does in each of the programs of this folder, written down in `outcomes.json`.

usage: python -m tests.against_flax.outcomes write                       with Flax: writes the file
       python -m linnet -m tests.against_flax.outcomes compare [STEP]    on Linnet, as Flax

Comparing runs every program, or each STEP-th one, through Flax's names and prints what differs. An
outcome is the class of the error, or the structure of the result, a digest of it and its size.
"""

import hashlib
import importlib
import json
import sys
import types
from pathlib import Path

import flax
import flax.linen
import jax
import numpy as np

from tests.against_flax.compare import outcome

HERE = Path(__file__).parent
FILE = HERE / "outcomes.json"


def catalogues():
    """The programs, by file."""
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.against_flax.{path.stem}")
        if hasattr(module, "PROGRAMS"):
            yield path.stem, module.PROGRAMS


def digest(result):
    """The builtin classes of an error, or (structure, digest, size) of a result."""
    if isinstance(result, Exception):
        return " ".join(c.__name__ for c in type(result).__mro__ if c.__module__ == "builtins")
    leaves, tree = jax.tree.flatten(result)
    shapes, total, size = [], 0.0, 0.0
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, (str, bool)):
            shapes.append(repr(leaf))
            continue
        array = np.asarray(leaf)
        shapes.append(f"{array.dtype}{array.shape}")
        flat = np.nan_to_num(array.astype(np.complex128).ravel(), posinf=1e9, neginf=-1e9)
        weights = np.cos(np.arange(flat.size) + number)
        total += float(weights @ flat.real + weights @ flat.imag)
        size += float(np.abs(flat).sum())
    structure = hashlib.sha256(f"{tree} {shapes}".encode()).hexdigest()[:8]
    return [structure, float(f"{total:.7g}"), float(f"{size:.4g}")]


def same(want, found, structure_alone=False):
    if isinstance(want, str) or isinstance(found, str):
        errors = isinstance(want, str) and isinstance(found, str)
        return errors and want.split()[0] in found.split()
    close = abs(want[1] - found[1]) <= 1e-5 * max(1.0, want[2])
    return want[0] == found[0] and (close or structure_alone)


def run(step=1, wanted=lambda file, name: True):
    """File, name and outcome of each `step`-th program on what `import flax` gives here."""
    namespace = types.SimpleNamespace(nnx=flax.nnx, flax=flax)
    for file, programs in catalogues():
        for name in [name for name in programs if wanted(file, name)][::step]:
            yield file, name, digest(outcome(programs[name][0], namespace))


def compare(step=1):
    """Prints each program that does something else than what is written down; returns how many."""
    written = json.loads(FILE.read_text(encoding="utf-8"))
    # Numbers are those of one version of JAX; the structure is that of all.
    other_jax = written.pop("jax").split(".")[:2] != jax.__version__.split(".")[:2]
    count, different = 0, 0
    # Programs that came later are not in the file until it is written again.
    for file, name, found in run(step, lambda file, name: name in written.get(file, {})):
        count += 1
        if not same(written[file][name], found, other_jax):
            different += 1
            print(f"{file} {name}: Flax {written[file][name]}, here {found}", flush=True)
    print(f"{count - different} of {count} programs do what Flax does, on {flax.__file__}")
    return different


def write():
    outcomes = {}
    for file, name, found in run():
        outcomes.setdefault(file, {})[name] = found
    lines = [f' "jax": "{jax.__version__}"']
    for file, programs in outcomes.items():
        inner = ",\n".join(f'  "{name}": {json.dumps(found)}' for name, found in programs.items())
        lines.append(f' "{file}": {{\n{inner}}}')
    FILE.write_text("{\n" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1] == "write":
        write()
    else:
        sys.exit(bool(compare(*map(int, sys.argv[2:]))))
