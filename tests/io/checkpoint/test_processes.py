"""Several processes that save and restore one sharded model together."""

import socket
import subprocess
import sys

import pytest
from programs import environment

from linnet import io
from linnet.io.shared.processes import by_first

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

number, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, number)
from linnet import io, nnx
from linnet.errors import CheckpointExistsError

mesh = jax.make_mesh((jax.device_count(),), ("x",))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
numbers = np.arange(32.0, dtype=np.float32).reshape(8, 4)
whole = jax.make_array_from_callback((8, 4), rows, lambda at: numbers[at])
model = nnx.Dict(w=nnx.Param(whole))

def check(node, sharding):
    assert node.w[...].sharding == sharding
    for shard in node.w[...].addressable_shards:
        assert (np.asarray(shard.data) == numbers[shard.index]).all()

io.save(folder + "/a", model=model, step=3)
shape = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=columns)
other = nnx.Dict(w=nnx.Param(shape))
assert io.restore(folder + "/a", model=other).step == 3
check(other, columns)

try:
    io.save(folder + "/a", model=model)
except CheckpointExistsError as error:
    print("refused:", str(error).splitlines()[0], getattr(error, "__notes__", ""), flush=True)
io.save(folder + "/a", model=model, step=4, overwrite=True)

with io.Manager(folder + "/run", keep_last=2) as manager:
    for step in range(4):
        manager.save(step, model=model)
    assert manager.restore(model=other).step == 3
    check(other, columns)
print("all well", flush=True)
"""


@pytest.mark.slow
def test_two_processes_save_and_restore_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = environment(XLA_FLAGS="--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    both = [
        subprocess.Popen(
            [*command, str(number), address, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=flags,
        )
        for number in (0, 1)
    ]
    results = [process.communicate(timeout=240) for process in both]
    for process, (out, errors) in zip(both, results, strict=True):
        assert process.returncode == 0, errors
        assert out.endswith("all well\n")
    assert f"refused: {tmp_path / 'a'} is there already.\n" in results[0][0].replace(" \n", "\n")
    raised_there = "is there already. ['It was raised in process 0 of 2.']"
    assert raised_there in results[1][0]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["2", "3"]
    assert io.restore(tmp_path / "a").step == 4


def test_a_single_process_is_the_first():
    done = []
    by_first(lambda: done.append(1))
    with pytest.raises(KeyError):
        by_first(lambda: {}["x"])
    assert done == [1]
