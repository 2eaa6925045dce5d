"""What Flax does in each of the programs of this folder, written down in `outcomes.json`.

usage: python -m tests.against_flax.outcomes write [FILE ...]    with Flax: writes that file
       python -m linnet -m tests.against_flax.outcomes compare [quick | all | FILE [SHARD SHARDS]]
       python -m linnet -m tests.against_flax.outcomes time [FILE ...]    writes `long.json`

Comparing runs the programs on Linnet, as Flax, and prints what differs: all of them, the quick
ones, or those of one FILE; of SHARDS processes each runs its share. The programs of
`device_programs` run only by that name, on four devices. `long.json` lists the programs that take
more than 0.5 seconds of CPU, the shortest of a file left out. An outcome is the class of the error,
or the structure of the result, a digest of it and its size.
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
FILE, LONG = HERE / "outcomes.json", HERE / "long.json"


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
    """Whether two outcomes agree; ``tolerance`` is in parts of the size of the result."""
    if isinstance(want, str) or isinstance(found, str):
        errors = isinstance(want, str) and isinstance(found, str)
        return errors and want.split()[0] in found.split()
    return want[0] == found[0] and abs(want[1] - found[1]) <= tolerance * max(1.0, want[2])


def run(files=(), skipped=(), shard=0, shards=1):
    """File, name and outcome of programs on what `import flax` gives here."""
    namespace = types.SimpleNamespace(nnx=flax.nnx, flax=flax)
    chosen = [
        (file, name, function)
        for file, programs in catalogues(files)
        for name, (function, _) in programs.items()
        if [file, name] not in skipped
    ]
    for file, name, function in chosen[shard::shards]:
        yield file, name, digest(outcome(function, namespace))


def compare(which="all", shard=0, shards=1):
    """Prints each program that does something else than what is written down; returns how many."""
    written = json.loads(FILE.read_text(encoding="utf-8"))
    skipped = json.loads(LONG.read_text(encoding="utf-8")) if which == "quick" else []
    # Numbers are those of one version of JAX; the structure is that of all.
    other_jax = written.pop("jax").split(".")[:2] != jax.__version__.split(".")[:2]
    # Attention of Linen in half precision differs in the last place: its softmax is in float32.
    half = {name for name in written["test_linen_layers"] if "bfloat16" in name}
    count, different = 0, 0
    files = [] if which in ("quick", "all") else [which]
    for file, name, found in run(files, skipped, int(shard), int(shards)):
        count += 1
        want = written.get(file, {}).get(name)
        if want is None:
            different += 1
            print(f"{file} {name}: not in {FILE.name}; write it again", flush=True)
        elif not same(want, found, math.inf if other_jax else 1e-3 if name in half else 1e-5):
            different += 1
            print(f"{file} {name}: Flax {want}, here {found}", flush=True)
    seconds = time.process_time()
    print(f"{count - different} of {count} programs do what Flax does, in {seconds:.0f} s of CPU")
    return different


def write_long(*files):
    """Writes down which programs take long."""
    seconds, start = {}, time.process_time()
    for file, name, _ in run(files):
        seconds.setdefault(file, {})[name] = time.process_time() - start
        start = time.process_time()
    known = json.loads(LONG.read_text(encoding="utf-8")) if files else []
    long = [pair for pair in known if pair[0] not in files] + [
        [file, name]
        for file, programs in seconds.items()
        for name, taken in programs.items()
        if taken > max(0.5, min(programs.values()))
    ]
    lines = ",\n".join(f" {json.dumps(pair)}" for pair in sorted(long))
    LONG.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write(*files):
    outcomes = json.loads(FILE.read_text(encoding="utf-8")) if files else {}
    outcomes |= {"jax": jax.__version__} | {file: {} for file in files}
    for file, name, found in run(files):
        outcomes.setdefault(file, {})[name] = found
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
        case ["time", *files]:
            write_long(*files)
        case ["compare", *choice]:
            sys.exit(bool(compare(*choice)))
