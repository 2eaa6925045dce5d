"""What nnx.jit does on four devices. Run as a program; prints what went wrong, by case."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from linnet import nnx
from linnet.errors import SharedReferenceError
from tests.nnx.transforms.stateful import Count
from tests.subprocesses import Cases

CASES = case = Cases()


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.arange(8.0))
        self.b = nnx.Param(jnp.zeros(8))
        self.count = Count(jnp.zeros((), jnp.int32))


def setup():
    mesh = jax.make_mesh((4,), ("data",))
    return NamedSharding(mesh, P("data")), NamedSharding(mesh, P())


def spec(variable):
    return variable.value.sharding.spec


def step(layer, x):
    layer.w[...] += x
    layer.count[...] += 1
    return layer.w * 2


@case
def state_sharding_places_variables_by_filter():
    split, whole = setup()
    shardings = nnx.StateSharding({nnx.PathContains("w"): split, ...: whole})
    jitted = nnx.jit(step, in_shardings=(shardings, whole), out_shardings=split)
    layer = Layer()
    for n in (1, 2):
        out = jitted(layer, jnp.ones(8))
        assert spec(layer.w) == P("data")
        assert spec(layer.count) == P()
        assert out.sharding.spec == P("data")
        assert layer.count.value == n
    assert out.tolist() == [2 * (i + 2.0) for i in range(8)]
    assert spec(layer.b) == P()  # nothing wrote to it


@case
def what_is_only_read_is_left_in_its_sharding():
    split, whole = setup()
    shardings = nnx.StateSharding({nnx.Param: split, ...: whole})
    layer = Layer()
    layer.extra = nnx.data(jnp.ones(8))
    jitted = nnx.jit(lambda layer: layer.w.sum(), in_shardings=(shardings,))
    for _ in range(3):
        assert jitted(layer) == 28.0
        assert spec(layer.w) == spec(layer.b) == P("data")
        assert spec(layer.count) == layer.extra.sharding.spec == P()
    assert jitted.jitted_fn._cache_size() <= 2  # where the model was, and where it is now


@case
def without_graph_updates_only_what_changed_moves():
    split, _ = setup()

    def write(layer):
        layer.b[...] += 1

    for mode in ({"graph": False}, {"graph_updates": False}):
        layer = Layer()
        prefix = nnx.prefix(layer, {nnx.Param: split, ...: None}, graph=mode.get("graph", True))
        nnx.jit(write, in_shardings=(prefix,), **mode)(layer)
        assert spec(layer.b) == P("data")
        assert not hasattr(layer.w.value.sharding, "spec")


@case
def shardings_of_outputs_alone_leave_the_arguments_where_the_compiler_put_them():
    split, _ = setup()

    def write(layer):
        layer.w[...] += 1
        return layer.w * 2

    layer = Layer()
    nnx.jit(write, out_shardings=split)(layer)
    assert spec(layer.w) == P("data")
    assert spec(layer.b) == spec(layer.count) == P()  # on every device, as Flax leaves them
    for mode in ({"graph": False}, {"graph_updates": False}):
        layer = Layer()
        nnx.jit(write, out_shardings=split, **mode)(layer)
        assert spec(layer.w) == P("data")
        assert not hasattr(layer.b.value.sharding, "spec")


@case
def a_model_that_is_returned_has_one_sharding():
    split, whole = setup()
    by_kind = nnx.StateSharding({nnx.Param: split, ...: whole})
    same = nnx.jit(lambda layer: layer, in_shardings=(by_kind,), out_shardings=by_kind)
    layer = Layer()
    assert same(layer) is layer
    assert spec(layer.w) == P("data")
    for given in ({}, {"in_shardings": (whole,)}):
        try:
            nnx.jit(lambda layer: {"m": layer}, **given, out_shardings=split)(layer)
        except SharedReferenceError as error:
            text = str(error)
        assert text.startswith("Param comes into nnx.jit at layer.b with the sharding ")
        assert " and goes out at the output.m.b with NamedSharding(" in text
        assert "Fix: give the same sharding in in_shardings and out_shardings" in text


@case
def one_sharding_for_a_whole_module():
    _, whole = setup()
    layer = Layer()
    nnx.jit(step, in_shardings=whole)(layer, jnp.ones(8))
    assert len(layer.w.value.sharding.device_set) == 4
    assert layer.w.value.tolist() == [i + 1.0 for i in range(8)]


@case
def new_modules_come_out_sharded():
    split, whole = setup()
    by_kind = nnx.StateSharding({nnx.Param: split, Count: whole})
    layer = nnx.jit(Layer, out_shardings=by_kind)()
    assert spec(layer.w) == spec(layer.b) == P("data")
    assert spec(layer.count) == P()
    assert layer.w.value.tolist() == list(range(8))


@case
def outputs_take_a_tree_of_shardings():
    split, whole = setup()
    shardings = {"layer": nnx.StateSharding({...: whole}), "x": split}
    out = nnx.jit(lambda x: {"layer": Layer(), "x": x}, out_shardings=shardings)(jnp.ones(8))
    assert out["x"].sharding.spec == P("data")
    assert spec(out["layer"].w) == P()


@case
def static_arguments_have_no_sharding():
    split, whole = setup()
    jitted = nnx.jit(
        lambda n, layer, x: layer.w * x * n, static_argnums=0, in_shardings=(whole, split)
    )
    assert jitted(3, Layer(), jnp.ones(8)).tolist() == [3.0 * i for i in range(8)]


@case
def arguments_by_name_are_left_where_they_are():
    _, whole = setup()
    jitted = nnx.jit(lambda layer, *, x: layer.w + x, in_shardings=(whole,))
    assert jitted(Layer(), x=jnp.ones(8)).tolist() == [i + 1.0 for i in range(8)]


@case
def donated_modules_keep_their_shardings():
    split, whole = setup()
    shardings = nnx.StateSharding({nnx.Param: split, ...: whole})
    jitted = nnx.jit(step, donate_argnums=0, in_shardings=(shardings, whole), out_shardings=whole)
    layer = Layer()
    jitted(layer, jnp.ones(8))
    placed = layer.b.value
    jitted(layer, jnp.ones(8))
    assert placed.is_deleted()
    assert spec(layer.w) == spec(layer.b) == P("data")
    assert layer.w.value.tolist() == [i + 2.0 for i in range(8)]


@case
def arrays_sharded_beforehand_stay_sharded():
    split, _ = setup()
    layer = Layer()
    layer.w.value = jax.device_put(layer.w.value, split)
    jitted = nnx.jit(step)
    for _ in range(2):
        jitted(layer, jax.device_put(jnp.ones(8), split))
    assert spec(layer.w) == P("data")
    assert layer.w.value.tolist() == [i + 2.0 for i in range(8)]


@case
def another_sharding_is_a_reason_to_trace_again():
    split, whole = setup()
    jitted = nnx.jit(lambda layer, x: x)
    for sharding in (whole, split, split):
        jitted(Layer(), jax.device_put(jnp.ones(8), sharding))
    text = "<lambda> was traced 2 times. The last time because x: another sharding"
    assert nnx.explain_retrace(jitted) == text


@case
def compiled_functions_take_sharded_modules():
    split, whole = setup()
    shardings = nnx.StateSharding({nnx.PathContains("w"): split, ...: whole})
    layer = Layer()
    jitted = nnx.jit(step, in_shardings=(shardings, whole), out_shardings=split)
    jitted(layer, x := jax.device_put(jnp.ones(8), whole))
    compiled = jitted.lower(layer, x).compile()
    compiled(layer, x)
    assert layer.w.value.tolist() == [i + 2.0 for i in range(8)]


if __name__ == "__main__":
    case.run_on_four_devices()
