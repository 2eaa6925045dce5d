"""What a run did to the Variables and arrays of its arguments, seen through the transforms."""

import jax.numpy as jnp
import pytest

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
        nnx.fori_loop(0, 3, lambda i, p: change(p), pair)
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
