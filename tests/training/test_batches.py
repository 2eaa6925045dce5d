"""Batches on their way to the device: what is copied, what stays, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import DataError
from linnet.training import Loop
from tests.subprocesses import run_program


def quiet(batches, **options):
    return Loop(batches, show="nothing", **options)


def test_arrays_are_put_on_the_device_and_text_stays():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.ones(2, np.float32)

    batch = {"x": np.ones(3), "tensor": Tensor(), "names": ["a", np.array(["b"])], "none": None}
    batch["word"] = np.str_("c")
    (found,) = quiet([batch])
    assert isinstance(found["x"], jax.Array)
    assert found["tensor"].tolist() == [1, 1]
    assert isinstance(found["tensor"], jax.Array)
    assert found["names"] == ["a", np.array(["b"])]
    assert found["none"] is None
    assert found["word"] is batch["word"]


def test_arrays_that_are_there_are_not_copied():
    x = jnp.ones(3)
    assert next(iter(quiet([x]))) is x


def test_batches_go_where_they_are_wanted():
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    (x,) = quiet([np.ones(4)], device=sharding)
    assert x.sharding == sharding


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (np.array([1, 2**31]), "int64 from 1 to 2147483648 would become int32"),
        (np.array([-(2**31) - 1, 5]), "int64 from -2147483649 to 5 would become int32"),
        (np.array([[2**32]], np.uint64), "uint64 from 4294967296 to 4294967296 would become uint3"),
        (np.int64(2**40), "int64 from 1099511627776 to 1099511627776 would become int32"),
        (2**40, "Python int 1099511627776 too large to convert to int32"),
    ],
)
def test_integers_that_jax_would_cut_are_refused(leaf, what):
    with pytest.raises(DataError) as caught:
        list(quiet([{"x": np.ones(2), "ids": [0, leaf]}]))
    assert isinstance(caught.value, OverflowError)
    first, fix = str(caught.value).splitlines()
    assert first.startswith(
        "batch['ids'][1] has integers that do not fit into 32 bits, and JAX has 64 bits switched "
        f"off: {what}"
    )
    assert fix.startswith("Fix: jax.config.update('jax_enable_x64', True)")
    assert caught.value.__notes__ == ["Raised for batch 1 of epoch 0."]


def test_wide_numbers_that_fit_are_taken():
    edges = np.array([-(2**31), 2**31 - 1])
    batch = (edges, np.array([2**32 - 1], np.uint64), np.float64(0.1), np.zeros((0, 3), int))
    ((ints, unsigned, real, empty),) = quiet([batch])
    assert (ints.dtype, ints.tolist()) == (jnp.int32, edges.tolist())
    assert (unsigned.dtype, unsigned.tolist()) == (jnp.uint32, [2**32 - 1])
    assert (real.dtype, float(real)) == (jnp.float32, float(np.float32(0.1)))
    assert (empty.dtype, empty.shape) == (jnp.int32, (0, 3))


def test_wide_integers_stay_whole_where_jax_has_64_bits():
    with jax.enable_x64(True):
        (found,) = quiet([np.array([2**40])])
    assert (found.dtype, found.tolist()) == (jnp.int64, [2**40])


def test_a_source_that_fills_one_array_again():
    memory = np.zeros(100, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    batch = memory[start : start + 16]  # aligned as JAX wants it, to be used without a copy

    def batches(epoch):
        for number in range(5):
            batch[:] = number
            yield {"x": batch}

    assert [float(found["x"][0]) for found in Loop(batches, show="nothing")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("leaf", "spec"), [(7, ("data",)), (np.ones(4), (None, "data"))])
def test_arrays_with_fewer_axes_than_a_sharding(leaf, spec):
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    with pytest.raises(DataError) as caught:
        list(quiet([{"x": leaf}], device=sharding))
    assert str(caught.value) == (
        f"batch['x'] has the shape {np.shape(leaf)}, which {sharding} cannot divide.\n"
        "Fix: drop the last, incomplete batch, choose a batch size that the devices divide, and "
        "leave numbers without axes out of the batch."
    )
    assert caught.value.__notes__ == ["Raised for batch 1 of epoch 0."]


def test_a_last_batch_that_the_devices_cannot_divide():
    program = """
        import jax, numpy as np
        from linnet.training import Loop
        mesh = jax.make_mesh((2,), ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        try:
            for batch in Loop([np.ones((4, 2)), np.ones((3, 2))], device=sharding, show="nothing"):
                print(batch.shape)
        except ValueError as error:
            print(type(error).__name__, str(error).split(", which")[0])
    """
    assert run_program(program, devices=2).stdout.splitlines() == [
        "(4, 2)",
        "DataError batch has the shape (3, 2)",
    ]
