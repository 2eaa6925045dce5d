"""Several processes that save and restore one sharded model together."""

import re

import pytest

from linnet import io
from linnet.errors import CheckpointMismatchError
from linnet.io.shared.processes import agree, by_first, gather, in_all, replicated
from tests.subprocesses import run_together

PROGRAM = """
import os
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from linnet import io, nnx
from linnet.errors import CheckpointNotFoundError
from linnet.io.shared.processes import gather

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
numbers = np.arange(32.0, dtype=np.float32).reshape(8, 4)

def global_array(sharding, numbers=numbers):
    return jax.make_array_from_callback(numbers.shape, sharding, lambda at: numbers[at])

def check(array, sharding):
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        assert (np.asarray(shard.data) == numbers[shard.index]).all()

# What is gathered may be longer than one piece, and of another length in each process.
assert gather("ab" * 4000 * number) == ["", "ab" * 4000]

model = nnx.Dict(w=nnx.Param(global_array(rows)))
io.save(folder + "/a", model=model, step=3)
shape = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=columns)
other = nnx.Dict(w=nnx.Param(shape))
assert io.restore(folder + "/a", model=other).step == 3
check(other.w[...], columns)
print("exists:", error_of(lambda: io.save(folder + "/a", model=model)))
io.save(folder + "/a", model=model, step=4, overwrite=True)

# What every process has for itself is written once: keys, counters, arrays of the host.
key = jax.random.key(7, impl="rbg")
own = {"rngs": nnx.Rngs(3), "key": key, "count": jnp.arange(3), "host": np.ones(2), "plain": "x"}
manager = io.Manager(folder + "/run", keep_last=2)
assert manager.latest() is None and manager.best() is None and manager.steps() == []
try:
    manager.restore(model=other)
except CheckpointNotFoundError as error:
    print("empty:", str(error).splitlines()[0])
for step in range(4):
    own["rngs"].params()
    manager.save(step, model=model, own=own, score=1 + abs(step - 2))
none = jax.random.key(0, impl="rbg")
fresh = {**own, "rngs": nnx.Rngs(0), "key": none, "count": jnp.zeros(3, int)}
restored = manager.restore(model=other, own=fresh)
assert restored.step == 3
check(other.w[...], columns)
assert int(fresh["rngs"].default.count[...]) == int(own["rngs"].default.count[...]) == 4
assert (jax.random.key_data(restored.own["key"]) == jax.random.key_data(key)).all()
assert restored.own["count"].tolist() == [0, 1, 2] and restored.own["plain"] == "x"

# A key of all processes comes back as one.
whole = NamedSharding(mesh, P())
everywhere = jax.random.wrap_key_data(global_array(whole, np.arange(2, dtype=np.uint32)))
manager.save(3, key=nnx.Variable(everywhere), overwrite=True)
empty = jax.random.wrap_key_data(global_array(whole, np.zeros(2, np.uint32)))
found = nnx.Variable(empty)
with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"))):
    manager.restore(key=found)
assert np.asarray(jax.random.key_data(found[...])).tolist() == [0, 1]
assert found[...].sharding.device_set == set(jax.devices())

# The first process says which steps there are, whatever the others see.
listed = os.listdir
if number == 1:
    os.listdir = lambda path=".": [name for name in listed(path) if name != "3"]
assert (manager.steps(), manager.latest(), manager.best()) == ([2, 3], 3, 2)
assert manager.restore(key=found).step == 3
os.listdir = listed

# Each process goes on where its own data were.
class Reader:
    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state

reader = Reader({"at": 10 + number, "shards": [number] * (1 + number), "raw": b"x", "all": 2})
manager.save(4, reader=reader, other=Reader({"at": 1}), model=model)
again, same = Reader(), Reader()
manager.restore(reader=again, other=same, model=other)
assert again.state == reader.state and same.state == {"at": 1}

# Processes that do not agree are told so.
print("step:", error_of(lambda: manager.save(5 + number, model=model)))
print("value:", error_of(lambda: manager.save(5, model=model, at=10 * number)))
print("array:", error_of(lambda: manager.save(5, model=model, x=jnp.full(2, number))))
wide = nnx.Linear(2, 2 + number, rngs=nnx.Rngs(0))
print("model:", error_of(lambda: manager.save(5, model=wide)))
print("restored:", error_of(lambda: manager.restore(2 + number, key=found)))
what = "text" if number == 0 else object()
print("type:", error_of(lambda: manager.save(5, model=model, what=what)))
manager.save(5, model=model)
manager.close()

# An error in one process alone leaves its block without waiting for the others.
try:
    with io.Manager(folder + "/failed") as manager:
        manager.save(1, model=model)
        raise KeyError("in the block")
except KeyError:
    pass
assert io.Manager(folder + "/failed").restore(model=other).step == 1
print("all well", flush=True)
"""


def line(output, name):
    return output.split(f"\n{name}: ", 1)[1]


def test_two_processes_save_and_restore_together(tmp_path):
    first, second = run_together(PROGRAM, tmp_path)
    for output in (first, second):
        exists = f"CheckpointExistsError: {tmp_path / 'a'} is there already.\n"
        assert line(output, "exists").startswith(exists)
        empty = f"There is no checkpoint in {tmp_path / 'run'}.\n"
        assert line(output, "empty").startswith(empty)
        assert line(output, "step").startswith(
            "ProcessMismatchError: The processes of this run do not save the same:\n"
            "  - step: 5 in process 0, 6 in process 1\n"
            "Fix: build the model from the same seed"
        )
        assert "  - at: 0 in process 0, 10 in process 1\n" in line(output, "value")
        here = r"int32\[2\] with the checksum \d+ in process"
        assert re.search(rf"  - x: {here} 0, {here} 1\n", line(output, "array"))
        differ = line(output, "model")
        assert "  - model/bias: float32[2] with the checksum " in differ
        assert "in process 0, float32[3] with the checksum " in differ
        assert line(output, "restored").startswith(
            "ProcessMismatchError: The processes of this run do not restore the same:\n"
            "  - step: 2 in process 0, 3 in process 1\nFix: name the same step"
        )
        assert line(output, "type").startswith("UnstorableError: what is a object")
    assert "It was raised in process 0 of 2." in line(second, "exists")
    assert "It was raised in process 0 of 2." not in first
    assert "It was raised in process 1 of 2." in line(first, "type")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["4", "5"]
    assert io.restore(tmp_path / "a").step == 4
    check_positions(io.Manager(tmp_path / "run"))


class Reader:
    state = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def check_positions(manager):
    """One process does not know which position of two to take; it gets the first if it wants."""
    reader, other = Reader(), Reader()
    with pytest.raises(CheckpointMismatchError) as caught:
        manager.restore(4, reader=reader, other=other, model=...)
    told = "  - reader: saved with a position for each of 2 processes; this run has 1\n"
    assert told in str(caught.value)
    assert "  - other" not in str(caught.value)
    manager.restore(4, reader=reader, other=other, model=..., strict=False)
    assert reader.state == {"at": 10, "shards": [0], "raw": b"x", "all": 2}
    assert other.state == {"at": 1}


def test_a_single_process_is_the_first_and_all():
    done = []
    assert by_first(lambda: done.append(1) or 7) == in_all(lambda: 7) == 7
    assert gather({"a": 1}) == [{"a": 1}]
    for run in (by_first, in_all):
        with pytest.raises(KeyError):
            run(lambda: {}["x"])
    agree("This never differs", lambda: {"step": "1"}, "this.")
    assert replicated(done) is done == [1]
