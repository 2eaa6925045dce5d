"""CPU time of importing the libraries, each run in a process of its own.

    python benchmarks/import_time.py [--runs 15]

A process imports jax first, and the time of the library's import is taken alone, so that what is
measured is what the library adds. The runs take turns and the least of each is shown: noise only
ever adds.
"""

import argparse
import importlib.util
import os
import subprocess
import sys

LIBRARIES = ["linnet.nnx", "linnet.linen", "flax.nnx", "flax.linen"]

PROGRAM = """
import time
start = time.process_time()
import jax
middle = time.process_time()
import {library}
print(middle - start, time.process_time() - middle)
"""


def cpu_seconds(library: str) -> list[float]:
    """The CPU time of `import jax`, and of the library's import after it, in a new process."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    command = [sys.executable, "-c", PROGRAM.format(library=library)]
    printed = subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout
    return [float(number) for number in printed.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of importing the libraries.")
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs

    libraries = LIBRARIES
    if importlib.util.find_spec("flax") is None:
        libraries = [name for name in libraries if not name.startswith("flax")]
        print("flax is not installed: left out")

    for library in libraries:  # writes the bytecode, warms the disk cache
        cpu_seconds(library)
    times: dict[str, list[float]] = {name: [] for name in ["jax", *libraries]}
    for _ in range(runs):
        for library in libraries:
            of_jax, of_library = cpu_seconds(library)
            times["jax"].append(of_jax)
            times[library].append(of_library)

    print(f"CPU seconds, least of {runs} runs; libraries after import jax")
    for name, values in times.items():
        print(f"import {name:14s} {min(values):6.3f}")


if __name__ == "__main__":
    main()
