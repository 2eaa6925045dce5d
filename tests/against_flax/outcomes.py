"""What Flax does in each of the programs of this folder, written down in `outcomes.json`.

usage: python -m tests.against_flax.outcomes write [FILE ...]    with Flax: writes that file
       python -m tests.against_flax.outcomes add FILE ...        adds what differs on this processor
       python -m linnet -m tests.against_flax.outcomes compare [SHARE [FILE ...]]

Comparing runs the programs on Linnet, as Flax, and prints what differs: all of them or those of
some files, and of these a SHARE, such as 1/4 for the first of four processes. The programs of
`device_programs` run only by that name, on four devices. An outcome is the class of the error, or
the structure of the result, a digest of it and its size. A few programs have a list of outcomes:
Adam makes a step of the same length of a gradient that is zero but for rounding, so that a training
run depends on the instructions of the processor (AVX2 or AVX-512), on Flax and here alike.
"""

import hashlib
import importlib
import json
import math
import sys
import time
import types
from pathlib import Path

import flax
import flax.linen
import jax
import numpy as np

from tests.against_flax.compare import outcome

HERE = Path(__file__).parent
FILE = HERE / "outcomes.json"


def catalogues(files=()):
    """The programs, by file."""
    for name in files or sorted(path.stem for path in HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.against_flax.{name}")
        if hasattr(module, "PROGRAMS"):
            yield name, module.PROGRAMS


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


def same(want, found, tolerance=1e-5):
    """Whether two outcomes agree; ``tolerance`` is in parts of the size of the result.

    What is wanted may be a list of outcomes, of which one has to agree.
    """
    if isinstance(want, list) and isinstance(want[0], list):
        return any(same(one, found, tolerance) for one in want)
    if isinstance(want, str) or isinstance(found, str):
        errors = isinstance(want, str) and isinstance(found, str)
        return errors and want.split()[0] in found.split()
    return want[0] == found[0] and abs(want[1] - found[1]) <= tolerance * max(1.0, want[2])


def chosen(files=()):
    """File, name and function of the programs."""
    for file, programs in catalogues(files):
        for name, (function, _) in programs.items():
            yield file, name, function


def run(function):
    """The outcome of a program on what `import flax` gives here."""
    return digest(outcome(function, types.SimpleNamespace(nnx=flax.nnx, flax=flax)))


def compare(share="1/1", *files):
    """Prints each program that does something else than what is written down; returns how many."""
    written = json.loads(FILE.read_text(encoding="utf-8"))
    # Numbers are those of one version of JAX; the structure is that of all.
    other_jax = written.pop("jax").split(".")[:2] != jax.__version__.split(".")[:2]
    # Attention of Linen in half precision differs in the last place: its softmax is in float32.
    half = {name for name in written["test_linen_layers"] if "bfloat16" in name}
    count, different = 0, 0
    number, shares = map(int, share.split("/"))
    for file, name, function in list(chosen(files))[number - 1 :: shares]:
        count += 1
        want, found = written.get(file, {}).get(name), run(function)
        tolerance = math.inf if other_jax else 1e-3 if name in half else 1e-5
        if want is None:
            different += 1
            print(f"{file} {name}: not in {FILE.name}; write it again", flush=True)
        elif not same(want, found, tolerance):
            different += 1
            print(f"{file} {name}: Flax {want}, here {found}", flush=True)
    seconds = time.process_time()
    print(f"{count - different} of {count} programs do what Flax does, in {seconds:.0f} s of CPU")
    return different


def write(*files, adding=False):
    outcomes = json.loads(FILE.read_text(encoding="utf-8")) if files else {}
    if not adding:
        outcomes |= {"jax": jax.__version__} | {file: {} for file in files}
    for file, name, function in chosen(files):
        known, found = outcomes.setdefault(file, {}).get(name), run(function)
        if known is None:
            outcomes[file][name] = found
        elif not same(known, found):
            outcomes[file][name] = [*(known if isinstance(known[0], list) else [known]), found]
    lines = [f' "jax": "{outcomes.pop("jax")}"']
    for file, programs in sorted(outcomes.items()):
        inner = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in programs.items()
        )
        lines.append(f' "{file}": {{\n{inner}}}')
    FILE.write_text("{\n" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if "device_programs" in sys.argv:
        jax.config.update("jax_num_cpu_devices", 4)
    match sys.argv[1:]:
        case ["write", *files]:
            write(*files)
        case ["add", *files]:
            write(*files, adding=True)
        case ["compare", *choice]:
            sys.exit(bool(compare(*choice)))
