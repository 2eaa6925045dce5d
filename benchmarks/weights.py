"""Loading safetensors files: memory beyond the model, and time beside the format's own library.

    python benchmarks/weights.py [--megabytes 512] [--layers 8] [--reps 5]

Each row runs in a process of its own: the peak of resident memory while loading, less what was
resident before and less the size of the model, in units of the largest tensor of file or model
(the aim: at most 1). The stored matrices are (out, in) and the model's (in, out), as with PyTorch.
The allocator is told to give freed memory back at once, or its habits would be measured.

listed    an abstract model with a list of layers
stacked   an abstract model with its layers stacked, in units of one layer's tensor; two slabs of
          half a megabyte on their way to the device come on top
fused     query, key and value are one tensor in the file and three in the model
bfloat16  stored in half the size, converted to float32
live      a model with weights, which stay until all new ones are there: one model more
library   safetensors.numpy.load_file, then transposed copies on the device one by one

Then times of `listed` and `library` in one process, in turns; the least of the repeats counts.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from linnet import io
from linnet.io import names

FLOAT = np.dtype(np.float32)
LISTED = names.NameMap([names.Rule("layers.*.weight", "layers/*", "out in -> in out")])
FUSED = names.NameMap(
    [names.Rule("layers.*.weight", [f"layers/*/{n}" for n in "qkv"], "(h d)+ w -> w h d")]
)


def shapes(row: str, layers: int, size: int):
    """An abstract model of square matrices."""
    one = jax.ShapeDtypeStruct((size, size), FLOAT)
    if row == "stacked":
        return {"layers": jax.ShapeDtypeStruct((layers, size, size), FLOAT)}
    if row == "fused":
        part = jax.ShapeDtypeStruct((size, 8, size // 24), FLOAT)
        return {"layers": [dict.fromkeys("qkv", part) for _ in range(layers)]}
    return {"layers": [one] * layers}


def load(row: str, path: str, layers: int, size: int):
    if row == "library":
        from safetensors.numpy import load_file

        return [jnp.asarray(x.T) for x in load_file(path).values()]
    model = shapes(row, layers, size)
    if row == "live":
        model = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), model)
    return io.load_safetensors(path, model, FUSED if row == "fused" else LISTED, cast=True).model


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(row: str, path: str, layers: int, size: int) -> None:
    """Prints peak memory above what was resident before, in bytes."""
    jax.block_until_ready(load(row, path, layers, size))  # what JAX and Python need once
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    loaded = jax.block_until_ready(load(row, path, layers, size))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    print(json.dumps({"beyond": peak - before, "arrays": len(jax.tree.leaves(loaded))}))


def write(path: Path, layers: int, size: int, dtype) -> None:
    row = np.random.default_rng(0).normal(size=size).astype(np.float32)
    tree = {f"layers.{n}.weight": np.tile(row, (size, 1)).astype(dtype) for n in range(layers)}
    io.save_safetensors(path, tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        row, path, layers, size = args.measure
        measure(row, path, int(layers), int(size))
        return

    size = int((args.megabytes * 1e6 / args.layers / 4) ** 0.5) // 48 * 48
    tensor = 4 * size * size
    model = tensor * args.layers
    print(f"{args.layers} matrices of {tensor / 1e6:.0f} MB, {model / 1e6:.0f} MB in all")
    with tempfile.TemporaryDirectory() as folder:
        paths = {dtype: f"{folder}/{dtype}.safetensors" for dtype in ("float32", "bfloat16")}
        for dtype, path in paths.items():
            write(Path(path), args.layers, size, jnp.dtype(dtype))
        print(f"{'':10} MB beyond the model   in largest tensors")
        for row in ("listed", "stacked", "fused", "bfloat16", "live", "library"):
            path = paths["bfloat16" if row == "bfloat16" else "float32"]
            command = [
                sys.executable,
                __file__,
                "--measure",
                row,
                path,
                str(args.layers),
                str(size),
            ]
            env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
            out = subprocess.run(
                command, check=True, capture_output=True, text=True, env=env
            ).stdout
            beyond = json.loads(out.splitlines()[-1])["beyond"] - model
            print(f"{row:10} {beyond / 1e6:19.1f}   {beyond / tensor:18.2f}")
        best = {}
        for _ in range(args.reps + 1):
            for row in ("listed", "library"):
                start = time.perf_counter(), time.process_time()
                jax.block_until_ready(load(row, paths["float32"], args.layers, size))
                spent = time.perf_counter() - start[0], time.process_time() - start[1]
                best[row] = tuple(map(min, best.get(row, spent), spent))
        ratios = [a / b for a, b in zip(best["listed"], best["library"], strict=True)]
        print(f"time of linnet over library: wall {ratios[0]:.2f}, CPU {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
