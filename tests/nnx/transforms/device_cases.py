"""What shard_map and pmap do on four devices. Run as a program; prints what went wrong, by case."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from linnet import nnx
from linnet.errors import AxisError, SharedReferenceError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Pair, Scale, counted, values
from tests.subprocesses import Cases

CASES = case = Cases()


def layers(count=4):
    return nnx.vmap(Scale)(jnp.arange(float(count)))


def mesh(shape=(4,), names=("i",)):
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def message(error, f, *args):
    try:
        f(*args)
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


# ---- shard_map ----------------------------------------------------------------------------------


SPLIT = P("i")


def sharded(f, in_specs=SPLIT, out_specs=SPLIT, **options):
    return nnx.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, **options)


@case
def shard_map_runs_on_parts_and_writes():
    for updates in (True, False):
        model = layers(8)
        weight = model.w
        f = sharded(lambda m, x: m(x) + m.w.shape[0], graph_updates=updates)
        assert f(model, jnp.ones(8)).tolist() == [2.0 + i for i in range(8)]
        assert values(model)["count",] == [1] * 8
        assert model.w is weight
        assert model.count.value.sharding.spec == P("i")


@case
def shard_map_takes_specs_by_filter():
    def f(m, x):
        m.count[...] += jax.lax.psum(m.w.sum(), "i").astype(jnp.int32)
        return m.w * x

    model = Scale()
    model.w.value = jnp.arange(8.0)
    by_kind = nnx.StateSharding({nnx.Param: P("i"), ...: P()})
    out = sharded(f, in_specs=(by_kind, P()))(model, 2.0)
    assert out.tolist() == [2.0 * i for i in range(8)]
    assert model.count.value == 28


@case
def shard_map_gives_new_objects_and_attributes():
    def f(m, x):
        m.extra = nnx.Param(x * 2)
        m.mode = "changed"
        return m, Pair(m.w, nnx.Param(x + 1))

    model = layers(8)
    same, made = sharded(f)(model, jnp.arange(8.0))
    assert same is model
    assert made.a is model.w
    assert made.b.value.tolist() == [1.0 + i for i in range(8)]
    assert (model.extra.value.tolist(), model.mode) == ([2.0 * i for i in range(8)], "changed")


@case
def shard_map_out_specs_by_filter():
    f = lambda x: Pair(nnx.Param(x), Count(jax.lax.psum(x.sum(), "i")))  # noqa: E731
    specs = nnx.StateSharding({nnx.Param: P("i"), ...: P()})
    pair = sharded(f, out_specs=specs)(jnp.arange(8.0))
    assert values(pair) == {("a",): [float(i) for i in range(8)], ("b",): 28.0}


@case
def shard_map_under_jit_and_grad():
    model = layers(8)
    x = jnp.arange(8.0)
    grads = nnx.grad(lambda m: sharded(call)(m, x).sum())(model)
    assert grads.w.value.tolist() == x.tolist()
    f, runs = counted(call)
    step = nnx.jit(sharded(f))
    for _ in range(2):
        step(model, x)
    assert len(runs) == 2  # once for the form of the output, once to run
    assert model.count.value.tolist() == [3] * 8


@case
def shard_map_options_and_decorator():
    @nnx.shard_map(mesh=mesh(), in_specs=P("i"), out_specs=P(), check_vma=False)
    def first(x):
        return x.sum()

    assert (float(first(jnp.arange(8.0))), first.__name__) == (1.0, "first")
    f = sharded(lambda x: x.sum(), out_specs=P())
    assert "which require replication" in message(ValueError, f, jnp.arange(8.0))
    two = mesh((2, 2), ("i", "j"))
    f = nnx.shard_map(
        lambda x: jax.lax.psum(x, "i"), mesh=two, in_specs=P("i"), out_specs=P(), axis_names={"i"}
    )
    assert f(jnp.arange(4.0)).tolist() == [2.0, 4.0]


@case
def shard_map_refuses():
    model = layers(7)
    text = message(AxisError, sharded(call), model, jnp.ones(7))
    assert "nnx.shard_map: axis 0 of model.count has size 7, which does not go into equal" in text
    assert "on the 4 devices of i.\nFix: pad it" in text
    assert model.count.value.tolist() == [0] * 7
    model = layers(8)
    text = message(SharedReferenceError, sharded(lambda m: m.w, graph_updates=False), model)
    assert "which needs graph updates" in text
    f = sharded(lambda a, b: None, in_specs=(P("i"), P()))
    text = message(SharedReferenceError, f, model, model)
    assert "at b.count was already seen at a.count" in text
    assert "in two ways: P('i',) and P()" in text or "PartitionSpec" in text
    text = message(SharedReferenceError, sharded(lambda m: m, out_specs=P()), model)
    assert "goes out at the output.count along" in text
    text = message(ValueError, lambda: sharded(model.__call__))
    assert "nnx.shard_map does not support bound methods" in text


# ---- pmap ---------------------------------------------------------------------------------------


@case
def pmap_maps_and_writes():
    for updates in (True, False):
        model = layers()
        weight = model.w
        f = nnx.pmap(call, graph_updates=updates)
        assert f(model, jnp.ones(4)).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert model.count.value.tolist() == [1] * 4
        assert model.w is weight


@case
def pmap_axes():
    model = layers()
    model.count.value = jnp.int32(0)
    by_kind = nnx.StateAxes({nnx.Param: 0, ...: None})
    out = nnx.pmap(call, in_axes=(by_kind, None))(model, 2.0)
    assert (out.tolist(), int(model.count.value)) == ([0.0, 2.0, 4.0, 6.0], 1)
    make = nnx.pmap(lambda x: Pair(nnx.Param(x * jnp.ones(2)), None), out_axes=1)
    assert values(make(jnp.arange(4.0))) == {("a",): [[0, 1, 2, 3]] * 2}
    back = nnx.Param(jnp.arange(8.0).reshape(2, 4))

    def double(v):
        v[...] *= 2

    nnx.pmap(double, in_axes=1)(back)
    assert back.value.tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]


@case
def pmap_options_and_decorators():
    @nnx.pmap
    def plus(x):
        return x + 1

    @nnx.pmap(axis_name="i", devices=jax.devices()[:2], axis_size=2, backend="cpu")
    def mean(x):
        return jax.lax.pmean(x, "i")

    assert plus.__name__ == "plus"
    assert plus(jnp.arange(4.0)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert mean(jnp.arange(2.0)).tolist() == [0.5, 0.5]
    times = lambda x, k, y: x * k + y  # noqa: E731
    for static, axes in ((1, 0), ((1,), (0, None, 0)), (-2, 0)):
        f = nnx.pmap(times, in_axes=axes, static_broadcasted_argnums=static)
        assert f(jnp.arange(4.0), 3, jnp.ones(4)).tolist() == [1.0, 4.0, 7.0, 10.0]


@case
def pmap_donates():
    model = layers()
    step = nnx.pmap(call, donate_argnums=0)
    step(model, jnp.ones(4))
    old = model.count.value
    step(model, jnp.ones(4))
    assert (old.is_deleted(), model.count.value.tolist()) == (True, [2] * 4)
    assert model.w.value.tolist() == [0.0, 1.0, 2.0, 3.0]


@case
def pmap_compiles_once():
    runs = []

    @nnx.pmap
    def step(model, x):
        runs.append(None)
        return call(model, x)

    model = layers()
    for _ in range(2):  # after the first, the model is spread over the devices
        step(model, jnp.ones(4))
    before = len(runs)
    for _ in range(3):
        step(model, jnp.ones(4))
    assert len(runs) == before
    assert model.count.value.tolist() == [5] * 4


@case
def pmap_structure_identity_and_names():
    def f(m, x):
        m.extra = nnx.Param(x)
        return m, Pair(m.w, nnx.Param(x, out_sharding=("a",), eager_sharding=False))

    model = layers()
    same, made = nnx.pmap(f, transform_metadata={nnx.PARTITION_NAME: "dev"})(
        model, jnp.arange(8.0).reshape(4, 2)
    )
    assert same is model
    assert made.a is model.w
    assert model.extra.shape == (4, 2)
    assert made.b.get_metadata()["out_sharding"] == ("dev", "a")


@case
def pmap_refuses():
    text = message(AxisError, nnx.pmap(call), layers(), jnp.ones(3))
    assert "different sizes:\n  - x: 3\n  - model.count: 4\n  - model.w: 4\n" in text
    text = message(AxisError, nnx.pmap(call, in_axes=(0, 2)), layers(), jnp.ones(4))
    assert "nnx.pmap: axis 2 is out of range for x: float32[4]" in text
    broadcast = nnx.StateAxes({nnx.Param: 0, ...: None})

    def differ(model):
        model.count[...] += model.w.astype(jnp.int32)

    model = layers()
    model.count.value = jnp.int32(0)
    text = message(AxisError, nnx.pmap(differ, in_axes=broadcast), model)
    assert "nnx.pmap: model.count is broadcast, but was given a value that differs" in text
    f = nnx.pmap(call, static_broadcasted_argnums=7)
    assert "nnx.pmap: static argument 7 is out of range" in message(ValueError, f, layers(), 1.0)
    assert "does not support bound" in message(ValueError, nnx.pmap, layers().__call__)


if __name__ == "__main__":
    case.run_on_four_devices()
