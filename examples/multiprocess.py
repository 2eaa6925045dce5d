"""Several processes: FSDP over two of them, one killed, gone on with, and moved to another mesh.

Shows: `jax.distributed` with `nnx.fsdp`; a `Loop` in each process that reads its own part of the
data; `io.Manager`, through which all processes save. Two processes of four virtual CPU devices
train on this machine. One of them is killed (SIGKILL), the other one ends, both start again from
the last checkpoint, and all losses are those of a run that nobody killed, bit for bit. Then one
process of eight devices goes on from the middle of that run, also on a mesh of another shape.

    python examples/multiprocess.py [--steps 32] [--kills 1]

On a cluster the part below "a process of the run" is the whole program: one process for each host,
`jax.distributed.initialize()` without arguments, and a folder that all hosts share.
"""

import argparse
import itertools
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from linnet import io, nnx
from linnet.training import Loop, read_metrics

FEATURES, WIDTH, BATCH = 16, 64, 32
SAVE_EVERY = 4
MOST_STEPS_BETWEEN_KILLS = 9
HEARTBEAT = 5  # seconds after which a process that says nothing counts as dead


# ---- a process of the run ------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(FEATURES, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.up(x))))


@nnx.jit
def train_step(model, optimizer, metrics, x, y):
    loss, grads = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    metrics.update(values=loss)
    return loss


def own_batches():
    """The rows of each batch that this process reads; all processes together read all rows."""
    mine = np.split(np.arange(BATCH), jax.process_count())[jax.process_index()]
    for number in itertools.count():
        x = np.stack([np.random.default_rng([number, row]).normal(size=FEATURES) for row in mine])
        yield np.float32(x), np.float32(np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3])


def train(folder: Path, steps: int, mesh: jax.sharding.Mesh) -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.metrics.Average()
    rules = [(r"up\.kernel", (None, "model")), (r"down\.kernel", ("model",))]
    rules = rules if "model" in mesh.axis_names else []
    nnx.fsdp((model, optimizer, metrics), mesh, min_size=WIDTH, rules=rules)

    rows = NamedSharding(mesh, PartitionSpec("data"))
    loop = Loop(
        lambda epoch: own_batches(), steps=steps, folder=folder, device=rows, show="nothing"
    )
    run = {"model": model, "optimizer": optimizer, "metrics": metrics, "loop": loop}
    with io.Manager(folder / "checkpoints", keep_last=None) as manager:
        if manager.latest() is not None:
            manager.restore(**run)
        devices = f"{jax.process_count()} x {jax.local_device_count()} devices"
        loop.say(f"begins after step {loop.step}, on {devices}, mesh {dict(mesh.shape)}")
        for x, y in loop:
            loop.log(loss=train_step(model, optimizer, metrics, x, y))
            loop.say(f"step {loop.step}")
            if loop.step % SAVE_EVERY == 0 or loop.stopped:
                manager.save(loop.step, **run)
    average = float(metrics.compute())
    loop.say(f"ends after step {loop.step}, {loop.stopped or 'finished'}: mean loss {average:.4f}")


def process(args: argparse.Namespace) -> None:
    """One process: `number` of `processes`, with its share of eight devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // args.processes)
    # Each start would compile the same programs again.
    jax.config.update("jax_compilation_cache_dir", str(args.folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            args.address,
            args.processes,
            args.number,
            initialization_timeout=60,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    names = ("data", "model")[: len(args.mesh)]
    mesh = jax.make_mesh(tuple(args.mesh), names, axis_types=(AxisType.Auto,) * len(names))
    with jax.set_mesh(mesh):
        train(args.folder, args.steps, mesh)


# ---- what a cluster's scheduler does: start processes, and start them again ----------------------


def start(folder: Path, steps: int, processes: int = 2, mesh: tuple[int, ...] = (8,)):
    """Starts the processes of a run; they print to `process_N.log` in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = []
    for number in range(processes):
        command = [sys.executable, "-W", "ignore", __file__, "--number", str(number)]
        command += ["--processes", str(processes), "--address", address, "--steps", str(steps)]
        command += ["--folder", str(folder), "--mesh", *map(str, mesh)]
        with (folder / f"process_{number}.log").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return started


def wait(started: list[subprocess.Popen], seconds: float = 240) -> list[int]:
    """Waits for all processes; when one has failed, the others have a moment to end, too."""
    end = time.monotonic() + seconds
    while any(one.poll() is None for one in started) and time.monotonic() < end:
        if any(one.poll() for one in started):
            end = min(end, time.monotonic() + 2 * HEARTBEAT)
        time.sleep(0.05)
    for one in started:
        one.kill()
    return [one.wait() for one in started]


def said(folder: Path, *beginnings: str) -> list[str]:
    """The lines of the first process that begin so."""
    lines = (folder / "process_0.log").read_text().splitlines()
    return [line for line in lines if line.startswith(beginnings)]


def finish(folder: Path, started: list[subprocess.Popen]) -> list[float]:
    """Waits for the end of a run; returns the losses of all its steps."""
    codes = wait(started)
    if any(codes):
        raise RuntimeError(f"The processes ended with {codes}; see {folder}/process_0.log.")
    print("    " + "\n    ".join(said(folder, "begins", "ends")))
    return read_metrics(folder)["loss"].tolist()


def kill_one(folder: Path, steps: int, chance: random.Random) -> None:
    """Starts a run, and kills one of its processes after some steps, or before the first."""
    started = start(folder, steps)
    if chance.random() < 0.1:
        time.sleep(chance.uniform(0, 5))
    else:
        after = chance.randint(1, MOST_STEPS_BETWEEN_KILLS)
        end = time.monotonic() + 120
        while len(said(folder, "step ")) < after and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
    victim = chance.randrange(len(started))
    started[victim].kill()
    killed = time.monotonic()
    codes = wait(started)
    seconds = time.monotonic() - killed
    last = (said(folder, "step ") or ["its start"])[-1]
    saving = " while saving" if list(folder.glob("checkpoints/*.orbax-checkpoint-tmp*")) else ""
    print(f"    process {victim} killed at {last}{saving}; the other ended {seconds:.1f} s later")
    if not all(codes):
        raise RuntimeError(f"The processes ended with {codes}: the run was over already.")


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Trains in two processes, and kills one of them.")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/multiprocess"))
    parser.add_argument("--number", type=int, help="be this process of a run; the rest is for it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mesh", type=int, nargs="+", default=[8])
    parser.add_argument("--address")
    args = parser.parse_args(argv)
    if args.number is not None:
        process(args)
        return {}

    shutil.rmtree(args.folder, ignore_errors=True)
    print("Two processes of four devices, from start to end:")
    whole, killed = args.folder / "whole", args.folder / "killed"
    want = finish(whole, start(whole, args.steps))

    print("The same, with one of them killed, and both started again:")
    chance = random.Random(args.seed)
    for _ in range(args.kills):
        kill_one(killed, args.steps, chance)
    found = finish(killed, start(killed, args.steps))
    last = args.steps // SAVE_EVERY * SAVE_EVERY
    ends = [io.restore(folder / f"checkpoints/{last}") for folder in (whole, killed)]
    same = want == found and jax.tree.all(jax.tree.map(jnp.array_equal, *map(dict, ends)))
    print(f"losses and all that was saved are the same, bit for bit: {same}")

    middle = args.steps // 2 // SAVE_EVERY * SAVE_EVERY
    print(f"One process of eight devices, from step {middle}, on two meshes:")
    runs = {}
    for mesh in ((8,), (2, 4)):
        folder = args.folder / f"mesh_{len(mesh)}"
        shutil.copytree(whole / f"checkpoints/{middle}", folder / f"checkpoints/{middle}")
        runs[folder] = start(folder, args.steps, processes=1, mesh=mesh)
    losses = [finish(folder, started) for folder, started in runs.items()]
    difference = float(np.abs(np.subtract(losses, want[middle:])).max())
    print(f"losses differ from those of two processes by {difference:.1e} at most")
    return {"same": same, "steps": len(found), "difference": difference}


if __name__ == "__main__":
    main()
