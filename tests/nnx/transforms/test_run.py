"""What a run did to the Variables and arrays of its arguments, seen through the transforms."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from linnet import nnx
from linnet.errors import BranchError, CarryError
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
