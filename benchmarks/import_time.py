"""CPU time of importing the libraries, each run in a process of its own.

    python benchmarks/import_time.py [--runs 15]

The runs are interleaved and the least of each is taken: noise only ever adds. CPU time is user plus
system time of the whole process, so a bare `import jax` is measured too and subtracted.
"""

import argparse
import importlib.util
import os
import resource
import subprocess
import sys

ROWS = {
    "import jax": "import jax",
    "import jax, linnet.nnx": "import jax; import linnet.nnx",
    "import jax, linnet.linen": "import jax; import linnet.linen",
    "import jax, flax.nnx": "import jax; import flax.nnx",
    "import jax, flax.linen": "import jax; import flax.linen",
}


def cpu_seconds(program: str) -> float:
    """User plus system time of one fresh interpreter that runs `program`."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of importing the libraries.")
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs

    rows = dict(ROWS)
    if importlib.util.find_spec("flax") is None:
        rows = {name: program for name, program in rows.items() if "flax" not in name}
        print("flax is not installed: left out")

    for program in rows.values():  # writes the bytecode, warms the disk cache
        cpu_seconds(program)
    times = {name: [] for name in rows}
    for _ in range(runs):
        for name, program in rows.items():
            times[name].append(cpu_seconds(program))

    best = {name: min(values) for name, values in times.items()}
    jax_alone = best["import jax"]
    print(f"CPU seconds, least of {runs} runs")
    for name, seconds in best.items():
        print(f"{name:26s} {seconds:6.3f}   over jax alone {seconds - jax_alone:+7.3f}")


if __name__ == "__main__":
    main()
