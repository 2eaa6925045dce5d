"""What a run did to the Variables and arrays of its arguments, seen through the transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from linnet import nnx
from linnet.errors import BranchError, CarryError, DroppedWriteWarning
from tests.nnx.transforms.stateful import Count, Pair


def two():
    return Pair(nnx.Param(jnp.float32(1)), nnx.Param(jnp.float32(2)))


def swap(pair):
    pair.a, pair.b = pair.b, pair.a
    return pair


def renew(pair):
    pair.a = nnx.Param(pair.a * 10)
    return pair


def alias(pair):
    pair.a = pair.b
    return pair


def nothing(pair):
    return pair


WAYS = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "grad": lambda f: lambda pair: nnx.grad(lambda p: (p.b * 1.0, f(p)), has_aux=True)(pair)[1],
    "cond": lambda f: lambda pair: nnx.cond(True, f, f, pair),
}


@pytest.mark.parametrize("name", WAYS)
def test_variables_that_change_places_keep_their_identity(name):
    pair = two()
    a, b = pair.a, pair.b
    WAYS[name](swap)(pair)
    assert pair.a is b
    assert pair.b is a
    WAYS[name](alias)(pair)
    assert pair.a is pair.b is a
    assert (float(a.value), float(b.value)) == (1.0, 2.0)


@pytest.mark.parametrize("name", WAYS)
def test_a_variable_that_replaces_another_is_new(name):
    pair = two()
    old = pair.a
    WAYS[name](renew)(pair)
    assert pair.a is not old
    assert (float(pair.a.value), float(old.value)) == (10.0, 1.0)


@pytest.mark.parametrize("change", [swap, renew, alias])
def test_loops_and_branches_notice_all_of_these(change):
    pair = two()
    before = (pair.a, pair.b)
    with pytest.raises(CarryError, match="changes the structure of its value: "):
        nnx.while_loop(lambda p: p.a < 3, change, pair)
    if change is alias:
        message = (
            r"puts a Param that stands elsewhere too in the place of the Param at .*\.a, which"
        )
        for mode in ({}, {"graph_updates": False}):
            with pytest.raises(CarryError, match=message):
                nnx.fori_loop(0, 3, lambda i, p: change(p), pair, **mode)
            with pytest.raises(CarryError, match=message):
                nnx.scan(lambda p, x: (change(p), x), **mode)(pair, jnp.arange(3.0))
    with pytest.raises(BranchError, match="changes the structure of its operands differently"):
        nnx.cond(True, change, nothing, pair)
    assert (pair.a, pair.b) == before


class Holder(nnx.Module):
    def __init__(self):
        self.x = jnp.arange(3.0)
        self.inner = [jnp.arange(3.0) * 10, {"y": jnp.arange(3.0) * 100}]


def test_arrays_change_wherever_they_stand():
    def f(m):
        m.x = m.x + 1
        m.inner[1]["y"] = m.inner[1]["y"] + m.x
        return m.x

    holder = Holder()
    inner = holder.inner
    assert nnx.vmap(f)(holder).tolist() == [1.0, 2.0, 3.0]
    assert holder.inner is inner
    assert inner[0].tolist() == [0.0, 10.0, 20.0]
    assert inner[1]["y"].tolist() == [1.0, 102.0, 203.0]
    nnx.scan(f, in_axes=0, out_axes=0)(holder)
    assert holder.x.tolist() == [2.0, 3.0, 4.0]
    nnx.fori_loop(0, 2, lambda i, m: (f(m), m)[1], holder)
    assert holder.x.tolist() == [4.0, 5.0, 6.0]
    assert inner[1]["y"].tolist() == [10.0, 114.0, 218.0]


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan])
def test_an_array_and_a_variable_take_each_others_place(transform):
    def f(m):
        m.x = Count(m.x * 2)
        m.inner[0] = m.inner[0] + 1
        return 0.0

    holder = Holder()
    transform(f, in_axes=0, out_axes=0)(holder)
    assert isinstance(holder.x, Count)
    assert holder.x.value.tolist() == [0.0, 2.0, 4.0]
    assert holder.inner[0].tolist() == [1.0, 11.0, 21.0]


def test_only_what_changed_leaves_the_function():
    pair = two()
    big = nnx.Param(jnp.zeros((5, 7)))

    def f(pair, big):
        return nnx.vmap(lambda p, b, x: p.a[...].sum() * x, in_axes=(None, None, 0))(
            pair, big, jnp.ones(3)
        )

    jaxpr = nnx.make_jaxpr(f)(pair, big)
    assert [a.shape for a in jaxpr.out_avals] == [(3,)]


def product(x, y=2.0, *, z=1.0):
    return x * y * z


@pytest.mark.parametrize(
    ("in_axes", "args", "kwargs", "expected"),
    [
        ((0, None), (jnp.arange(3.0),), {"y": jnp.arange(2.0)}, [[0, 0], [0, 1], [0, 2]]),
        ((0, None), (), {"y": jnp.ones(2), "x": jnp.arange(2.0)}, [[0, 0], [1, 1]]),
        ((0, None), (jnp.arange(3.0),), {}, [0, 2, 4]),
        ((0,), (jnp.arange(3.0),), {"y": jnp.arange(3.0)}, [0, 1, 4]),
        (1, (jnp.ones((1, 2)),), {"y": jnp.arange(2.0).reshape(1, 2)}, [[0], [1]]),
        (0, (jnp.arange(2.0),), {"z": jnp.arange(2.0)}, [0, 2]),
    ],
    ids=["by name", "all by name", "default", "no entry", "one axis for all", "keyword-only"],
)
def test_arguments_by_name_take_the_axes_of_their_parameters(in_axes, args, kwargs, expected):
    assert nnx.vmap(product, in_axes=in_axes)(*args, **kwargs).tolist() == expected


def test_layers_are_made_with_rngs_by_name():
    class Stack(nnx.Module):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(nnx.StateAxes({...: 0}), nnx.StateAxes({...: 0})))
        def __init__(self, rngs):
            self.layer = nnx.Linear(2, 4, rngs=rngs)

    kernels = Stack(rngs=nnx.Rngs(0)).layer.kernel
    assert kernels.shape == (3, 2, 4)
    for kernel, key in zip(kernels, jax.random.split(nnx.Rngs(0)(), 3), strict=True):
        assert (kernel == nnx.Linear(2, 4, rngs=nnx.Rngs(key)).kernel[...]).all()


def test_grad_of_an_argument_given_by_name_or_left_out():
    assert float(nnx.grad(product, argnums=1)(5.0, y=3.0)) == 5.0
    assert float(nnx.grad(product)(y=3.0, x=2.0, z=4.0)) == 12.0
    assert [float(g) for g in nnx.grad(product, argnums=(0, 1))(5.0)] == [2.0, 5.0]
    assert float(nnx.grad(lambda x, y=3.0: x * y, argnums=-1)(2.0)) == 2.0
    assert float(nnx.grad(lambda x, y=3.0: x * y, argnums=-1, graph=False)(2.0)) == 3.0
    layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    wrt = nnx.DiffState(1, nnx.Param)
    grads = nnx.grad(lambda x, model: model(x).sum(), argnums=wrt)(jnp.ones((1, 2)), model=layer)
    assert grads["bias"][...].tolist() == [1.0]


def test_scan_with_arguments_by_name_and_defaults():
    def step(x, total, by=2.0):
        return x * by, total + x

    axes = {"in_axes": (0, nnx.Carry, None), "out_axes": (0, nnx.Carry)}
    stacked, total = nnx.scan(step, **axes)(total=jnp.array(1.0), x=jnp.arange(3.0))
    assert stacked.tolist() == [0, 2, 4]
    assert float(total) == 4.0


def test_pmap_and_shard_map_with_arguments_by_name():
    assert nnx.pmap(product, in_axes=(0, None))(jnp.ones(1), y=jnp.arange(2.0)).tolist() == [[0, 1]]
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
    sharded = nnx.shard_map(product, mesh=mesh, **specs)
    assert sharded(jnp.ones(2), y=jnp.arange(2.0)).tolist() == [0, 1]


def test_an_argument_that_is_missing_is_named():
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        nnx.vmap(lambda x, y: x, in_axes=(0, 0))(jnp.ones(2))


# ---- values that are changed in place ------------------------------------------------------------


class Tracker(nnx.Module):
    """A weight, and a Variable with a dict and a list that are changed in place."""

    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))
        self.stats = nnx.Variable({"seen": 0, "layers": [jnp.zeros(2)]})

    def seen(self):
        return int(self.stats.value["seen"]), self.stats.value["layers"][0].tolist()


def track(tracker, x=1.0):
    stats = tracker.stats.value
    stats["seen"] += 1
    stats["layers"][0] = stats["layers"][0] + 1
    return tracker.w * jnp.mean(x) * stats["seen"]


def three_times(i, tracker):
    track(tracker)
    return tracker


LOOPS = {
    "fori_loop": lambda m: nnx.fori_loop(0, 3, three_times, m),
    "fori_loop of a number": lambda m: nnx.fori_loop(0, jnp.array(3), three_times, m),
    "while_loop": lambda m: nnx.while_loop(
        lambda m: m.stats.value["seen"] < 3, lambda m: three_times(0, m), m
    ),
    "scan with a carry": lambda m: nnx.scan(
        lambda m, x: (three_times(0, m), x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
    )(m, jnp.ones(3)),
    "accumulate_gradients": lambda m: nnx.accumulate_gradients(track, micro_batches=3)(
        m, jnp.ones(3)
    ),
    "gradient of a loop": nnx.grad(lambda m: (nnx.fori_loop(0, 3, three_times, m), m.w * 1.0)[1]),
    "vmap of a loop": lambda m: nnx.vmap(
        lambda m, x: (nnx.fori_loop(0, 3, three_times, m), x)[1], in_axes=(None, 0)
    )(m, jnp.ones(2)),
}


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["outside", "jit"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_changes_what_is_in_a_variable_once_a_step(loop, wrap):
    tracker = Tracker()
    run = wrap(lambda m: (loop(m), None)[1])
    run(tracker)
    assert tracker.seen() == (3, [3, 3])
    tracker.stats.value["seen"] = 0  # the second call knows what the first one wrote
    run(tracker)
    assert tracker.seen() == (3, [6, 6])


def test_the_mean_of_losses_that_count():
    loss, grads = nnx.accumulate_gradients(track, micro_batches=3)(Tracker(), jnp.ones(3))
    assert float(loss) == (2 + 4 + 6) / 3
    assert float(grads["w"].value) == 2


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["outside", "jit"])
def test_what_a_scan_writes_into_a_broadcast_value_is_dropped_with_a_warning(wrap):
    tracker = Tracker()
    scan = nnx.scan(track, in_axes=(None, 0), out_axes=0)
    with pytest.warns(DroppedWriteWarning, match=r"tracker\.stats"):
        assert wrap(scan)(tracker, jnp.ones(3)).tolist() == [2, 2, 2]
    assert tracker.seen() == (0, [0, 0])


def test_what_a_condition_writes_into_a_value_is_dropped_with_a_warning():
    tracker = Tracker()

    def write(m):
        m.w[...] += 1
        return m

    with pytest.warns(DroppedWriteWarning, match=r"init_val\.stats"):
        nnx.while_loop(lambda m: (track(m), m.w < 5)[1], write, tracker)
    assert tracker.seen() == (0, [0, 0])
    assert float(tracker.w) == 5


@pytest.mark.parametrize(
    "way",
    [
        nnx.grad,
        lambda f: lambda m: nnx.vjp(f, m),
        lambda f: lambda m: nnx.jvp(f, (m,), (nnx.state(m, nnx.Param),)),
        nnx.checkify,
        nnx.remat,
        nnx.jit,
    ],
    ids=["grad", "vjp", "jvp", "checkify", "remat", "jit"],
)
def test_an_error_leaves_values_that_are_changed_in_place_as_they_were(way):
    def fail(tracker):
        track(tracker)
        raise OSError

    tracker = Tracker()
    with pytest.raises(OSError):
        way(fail)(tracker)
    assert tracker.seen() == (0, [0, 0])


class Hits(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))
        self.hits = nnx.Variable(np.zeros(2, np.float32))

    def __call__(self, x):
        self.hits.value[0] += 1
        return self.w * x


@pytest.mark.parametrize(
    ("api", "loop"),
    [
        ("fori_loop", lambda m: nnx.fori_loop(0, 3, lambda i, m: (m(1.0), m)[1], m)),
        ("scan", lambda m: nnx.scan(lambda m, x: m(x), in_axes=(None, 0))(m, jnp.ones(3))),
    ],
)
def test_a_numpy_array_from_outside_of_a_loop_cannot_be_changed_in_place(api, loop):
    hits = Hits()
    with pytest.raises(ValueError, match="read-only") as error:
        loop(hits)
    module, arrays = error.value.__notes__[:2]
    assert module.startswith("This was in the call of hits (Hits)")
    assert arrays == (
        f"nnx.{api} may run its function several times, or once for many steps, so a NumPy array "
        "from outside cannot be changed in place in it.\n"
        "Fix: put a new array in its place, or keep an array of JAX in a Variable."
    )
    assert hits.hits.value.tolist() == [0, 0]


def test_a_gradient_changes_a_numpy_array_in_place_as_python_does():
    hits = Hits()
    nnx.grad(lambda m: m(3.0))(hits)
    assert hits.hits.value.tolist() == [1, 0]


@pytest.mark.parametrize(
    "way", [nnx.remat, nnx.checkify, nnx.jit], ids=["remat", "checkify", "jit"]
)
def test_constants_that_are_written_become_arrays(way):
    pair = Pair(nnx.Variable(jnp.ones(())), jnp.ones(()))

    def write(pair):
        pair.a.value, pair.b, pair.new = jnp.array(0.0), jnp.array(2.0), nnx.Variable(jnp.array(3))

    way(write)(pair)
    found = (pair.a.value, pair.b, pair.new.value)
    assert all(isinstance(x, jax.Array) for x in found)
    assert [(x.item(), str(x.dtype)) for x in found] == [
        *((0, "float32"), (2, "float32"), (3, "int32"))
    ]
