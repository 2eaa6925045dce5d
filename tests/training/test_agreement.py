"""Loops of several processes: one batch of many parts, one writer, and one step to stop at."""

import csv

from linnet.training import read_metrics
from tests.subprocesses import run_together

PROGRAM = """
import itertools, os, signal
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from linnet import nnx
from linnet.io.shared.processes import gather
from linnet.training import Loop

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, P("data"))

def batches(count=None):
    for n in itertools.islice(itertools.count(), count):
        yield np.full((2, 3), 10 * n + number, np.float32)

@jax.jit
def mean(x):
    return x.mean()

def run(act=lambda loop: None, name="", count=None, **options):
    where = {"folder": f"{folder}/{name}"} if name else {}
    loop = Loop(batches(count), device=rows, show="nothing", **where, **options)
    for batch in loop:
        assert batch.shape == (4, 3) and batch.sharding == rows
        loop.log(mean=mean(batch))
        act(loop)
        last = loop.step, loop.stopped
    if "steps" not in options:
        assert last == (loop.step, loop.stopped), "the step that is the last one knows it"
    return gather((loop.step, loop.stopped, loop.last["mean"]))

def when(step, who, action):
    return lambda loop: action(loop) if (loop.step, number) == (step, who) else None

def agreed(results):
    assert results[0] == results[1], results
    return tuple(results[0]) if isinstance(results[0], list) else results[0]

# Each process reads its own part; all take the same steps.
with jax.set_mesh(mesh):
    assert agreed(run(steps=5, name="plain")) == (5, None, 40.5)
for ahead in (0, 1, 7):
    assert agreed(run(count=4, ahead=ahead)) == (4, None, 30.5)
local = [jnp.full(2, number)]
((whole,),) = (list(Loop(local, device=rows, show="nothing")),)
assert whole.shape == (4,) and float(whole.sum()) == 2.0
assert list(Loop([whole], device=rows, show="nothing"))[0] is whole

# A signal to one process, or a call of stop in one, stops all at the same step.
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
kill = lambda what: lambda loop: os.kill(os.getpid(), what)
for who in (0, 1):
    step, why, _ = agreed(run(when(3, who, kill(signal.SIGTERM)), f"signal_{who}"))
    assert (step, why) == (5, "SIGTERM"), (step, why)
assert agreed(run(when(2, 0, kill(signal.SIGINT))))[:2] == (4, "SIGINT")
assert agreed(run(when(2, 1, lambda loop: loop.stop("well trained"))))[:2] == (4, "well trained")
assert agreed(run(lambda loop: loop.stop(str(number))))[:2] == (3, "0")
assert agreed(run(when(4, 1, lambda loop: loop.stop("late")), steps=4))[:2] == (4, "late")

# What does not fit together is an error in all of them.
print("data:", error_of(lambda: run(count=3 + number)))

def elsewhere():
    loop = Loop(batches(), device=rows, show="nothing")
    loop.set_state({"step": number, "epoch": 0, "batch": 0})
    for batch in loop:
        pass

print("steps:", error_of(elsewhere))

# Metrics of all processes.
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
nnx.fsdp(metrics, mesh)

@nnx.jit
def update(metrics, x):
    labels = (x[:, 0] > 5).astype(int)
    metrics.update(loss=x, logits=jnp.stack([x[:, 0] * 0, x[:, 0] - 0.5], -1), labels=labels)

loop = Loop(batches(2), device=rows, show="nothing", folder=folder + "/metrics")
for batch in loop:
    update(metrics, batch)
    loop.log(**metrics.compute())
    loop.say(f"said at step {loop.step}")
assert agreed(gather(loop.last)) == {"loss": 5.5, "accuracy": 0.75}, loop.last
loop.close()
print("all well", flush=True)
"""


def test_loops_of_two_processes_go_and_stop_together(tmp_path):
    first, second = run_together(PROGRAM, tmp_path)
    for output in (first, second):
        assert (
            "data: DataError: After step 3 the batches of process 0 are used up, and other "
            "processes have more; their next step would wait forever.\nFix: give every process"
            in output
        )
        assert (
            "steps: ProcessMismatchError: The loops of this run are not at the same step: "
            "process 0 at step 1, process 1 at step 2.\nFix: restore the same checkpoint" in output
        )
    told = "SIGTERM in process {} of 2: all leave soon. Once more: leave at once."
    assert [told.format(n) in output for n in (0, 1) for output in (first, second)] == [
        *(True, False),
        *(False, True),
    ]
    assert "said at step 2" in first
    assert "said at step 2" not in second
    # One process writes, each step once.
    for name, steps in (("plain", 5), ("signal_0", 5), ("signal_1", 5), ("metrics", 2)):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["metrics.csv"]
        with (tmp_path / name / "metrics.csv").open() as file:
            assert [row["step"] for row in csv.DictReader(file)] == [
                str(n) for n in range(1, steps + 1)
            ]
    assert read_metrics(tmp_path / "plain")["mean"].tolist() == [0.5, 10.5, 20.5, 30.5, 40.5]
