"""Saving and restoring a 500 MB model: linnet.io beside plain Orbax, in one process.

    python benchmarks/storage.py [--megabytes 500] [--reps 5] [--folder DIR]

Both save the same weights to the same disk and take turns. The least of the repeated times is
printed with its ratio, then the ratio of the medians and that of the CPU time of all threads.
Orbax runs as its documents show it: ``StandardCheckpointer`` with the pure dict of the model,
restored into shapes with shardings. Linnet saves and restores the model itself, with checksums
written and compared. Printed for each:

save      until everything is on the disk
blocked   how long a save in the background keeps the program waiting
restore   into a live model (Orbax: into shapes)
abstract  into a model that has shapes only

Memory is measured in a process of its own for each row: the peak above what was resident before.
"""

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from linnet import io, nnx

WIDTH = 1024


class Model(nnx.Module):
    """Layers of four megabytes and some small ones."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    @classmethod
    def of(cls, megabytes: int):
        return cls(megabytes * 1_000_000 // (4 * WIDTH * WIDTH), nnx.Rngs(0))


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class Orbax:
    """Plain Orbax on the pure dict of a model."""

    def __init__(self, model, folder: Path):
        self.model = model
        self.path = folder / "orbax"
        self.checkpointer = ocp.StandardCheckpointer()

    def save(self):
        self.start()
        self.checkpointer.wait_until_finished()

    def start(self):
        self.checkpointer.save(self.path, nnx.to_pure_dict(nnx.state(self.model)))

    def finish(self):
        self.checkpointer.wait_until_finished()

    def restore(self):
        tree = nnx.to_pure_dict(nnx.state(self.model))
        names = {str(i): layer for i, layer in tree["layers"].items()}
        shapes = shapes_of({**tree, "layers": names})
        jax.block_until_ready(self.checkpointer.restore(self.path, shapes))

    abstract = restore


class Linnet:
    """linnet.io on the model itself."""

    def __init__(self, model, folder: Path):
        self.model, self.folder = model, folder
        self.path = folder / "linnet"
        self.manager = io.Manager(folder / "managed", keep_last=None)

    def save(self):
        io.save(self.path, model=self.model)

    def start(self):
        self.manager.save(0, model=self.model)

    def finish(self):
        self.manager.wait()
        shutil.rmtree(self.folder / "managed" / "0")

    def restore(self):
        io.restore(self.path, model=self.model)
        jax.block_until_ready(nnx.state(self.model))

    def abstract(self):
        shapes = shapes_of(nnx.state(self.model))
        model = nnx.merge(nnx.graphdef(self.model), shapes)
        io.restore(self.path, model=model)
        jax.block_until_ready(nnx.state(model))


LIBRARIES = {"orbax": Orbax, "linnet": Linnet}
ROWS = ("save", "blocked", "restore", "abstract")


def timed(operation) -> tuple[float, float]:
    # What came before is on the disk and out of the way.
    gc.collect()
    os.sync()
    time.sleep(0.1)
    wall, cpu = time.perf_counter(), time.process_time()
    operation()
    return time.perf_counter() - wall, time.process_time() - cpu


def times(libraries: dict, reps: int) -> dict:
    """Wall and CPU times, as {row: {library: [(wall, cpu), ...]}}."""
    all_times: dict = {row: {name: [] for name in libraries} for row in ROWS}
    for rep in range(reps + 1):
        for row in ROWS:
            for name, library in libraries.items():
                if row == "blocked":
                    shutil.rmtree(library.path, ignore_errors=True)
                    found = timed(library.start)
                    library.finish()
                    if name == "linnet":
                        library.save()
                else:
                    if row == "save":
                        shutil.rmtree(library.path, ignore_errors=True)
                    found = timed(getattr(library, row))
                if rep:  # the first round warms up
                    all_times[row][name].append(found)
    return all_times


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure_memory(name: str, row: str, megabytes: int, folder: Path) -> None:
    """Prints the peak of one operation above what was resident before, in MB."""
    model = Model.of(megabytes)
    library = LIBRARIES[name](model, folder)
    if row == "save":
        # What is loaded late is no cost of this save.
        LIBRARIES[name](Model(1, nnx.Rngs(0)), folder / "small").save()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    getattr(library, row)()
    print((resident("VmHWM") - before) / 1e6)


def memory(name: str, row: str, megabytes: int, folder: Path) -> float:
    command = [sys.executable, __file__, "--memory", name, row, "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--megabytes", str(megabytes)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Saving and restoring beside plain Orbax.")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--memory", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.memory:
        measure_memory(*args.memory, args.megabytes, args.folder)
        return

    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        model = Model.of(args.megabytes)
        size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
        print(f"a model of {size / 1e6:.0f} MB, least of {args.reps}; {os.cpu_count()} cores")
        found = times({name: make(model, folder) for name, make in LIBRARIES.items()}, args.reps)
        print(
            f"{'':10s} {'orbax s':>9s} {'linnet s':>9s} {'ratio':>6s} {'medians':>8s} {'CPU':>6s}"
        )
        for row, by_library in found.items():
            walls = {n: [wall for wall, _ in pairs] for n, pairs in by_library.items()}
            cpus = {n: min(cpu for _, cpu in pairs) for n, pairs in by_library.items()}
            orbax, linnet = min(walls["orbax"]), min(walls["linnet"])
            medians = {n: statistics.median(times) for n, times in walls.items()}
            print(
                f"{row:10s} {orbax:9.3f} {linnet:9.3f} {linnet / orbax:6.2f} "
                f"{medians['linnet'] / medians['orbax']:8.2f} {cpus['linnet'] / cpus['orbax']:6.2f}"
            )
        del model
        print(f"{'peak':10s} {'orbax MB':>9s} {'linnet MB':>9s} {'ratio':>6s}")
        for row in ("restore", "abstract", "save"):
            if row == "save":
                for name in LIBRARIES:
                    shutil.rmtree(folder / name, ignore_errors=True)
            orbax, linnet = (memory(name, row, args.megabytes, folder) for name in LIBRARIES)
            ratio = (size / 1e6 + linnet) / (size / 1e6 + orbax)
            print(f"{row:10s} {orbax:9.0f} {linnet:9.0f} {ratio:6.2f}  (with the model itself)")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
