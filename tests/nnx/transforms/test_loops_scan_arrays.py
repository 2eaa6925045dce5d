"""Scans over plain arrays: the carry in any place, any axes, all options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from tests.compare import numbers

XS = jnp.arange(1.0, 5.0)


SUM = (10.0, [0.0, 1.0, 3.0, 6.0])
PLAIN = {
    "default": (lambda c, x: (c + x, c), {}, (0.0, XS), SUM),
    "carry last": (
        lambda x, c: (c, c + x),
        {"in_axes": [0, nnx.Carry], "out_axes": (0, nnx.Carry)},
        (XS, 0.0),
        SUM[::-1],
    ),
    "carry in the middle": (
        lambda x, c, y: (c, c + x * y, x),
        {"in_axes": (0, nnx.Carry, None), "out_axes": (0, nnx.Carry, 0)},
        (XS, 0.0, 1.0),
        (SUM[1], SUM[0], XS.tolist()),
    ),
    "carry alone": (lambda c, x: c + x, {"out_axes": nnx.Carry}, (0.0, XS), 10.0),
    "no carry": (lambda x: x * 2, {"in_axes": 0, "out_axes": 0}, (XS,), [2.0, 4.0, 6.0, 8.0]),
    "nothing scanned": (
        lambda c: c + 1,
        {"in_axes": nnx.Carry, "out_axes": nnx.Carry, "length": 5},
        (0.0,),
        5.0,
    ),
    "everything carried": (
        lambda a, b: (a + b, b),
        {"in_axes": nnx.Carry, "out_axes": nnx.Carry, "length": 3},
        (1.0, 2.0),
        (7.0, 2.0),
    ),
    "carry in a container": (
        lambda d, x: ((d["c"] + x,), d["k"]),
        {"in_axes": ({"c": nnx.Carry, "k": None}, 0), "out_axes": ((nnx.Carry,), 0)},
        ({"c": 0.0, "k": 7.0}, XS),
        ((10.0,), [7.0] * 4),
    ),
    "a tree": (
        lambda c, x: ({"a": c["a"] + x, "b": c["b"] * 2}, None),
        {},
        ({"a": 0.0, "b": 1.0}, XS),
        ({"a": 10.0, "b": 16.0}, None),
    ),
    "several axes": (
        lambda c, x, y, z: (c + x, (y * z, x)),
        {"in_axes": (nnx.Carry, 0, 1, None), "out_axes": (nnx.Carry, (-1, 0))},
        (0.0, jnp.arange(3.0), jnp.arange(6.0).reshape(2, 3), 10.0),
        (3.0, ([[0.0, 10.0, 20.0], [30.0, 40.0, 50.0]], [0.0, 1.0, 2.0])),
    ),
    "last axis": (
        lambda c, x: (c, x),
        {"in_axes": (nnx.Carry, -1), "out_axes": (nnx.Carry, 1)},
        (0.0, jnp.arange(6.0).reshape(2, 3)),
        (0.0, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    ),
    "reverse": (
        lambda c, x: (c + x, c),
        {"reverse": True},
        (0.0, XS),
        (10.0, [9.0, 7.0, 4.0, 0.0]),
    ),
    "unroll": (lambda c, x: (c + x, c), {"unroll": 3}, (0.0, XS), SUM),
    "unroll all": (lambda c, x: (c + x, c), {"unroll": True}, (0.0, XS), SUM),
    "split transpose": (lambda c, x: (c + x, c), {"_split_transpose": True}, (0.0, XS), SUM),
    "length": (lambda c, x: (c + x, c), {"length": 4}, (0.0, XS), SUM),
    "no steps": (lambda c, x: (c + x, c), {}, (1.0, jnp.zeros(0)), (1.0, [])),
    "weak carry": (lambda c, x: (c + x, c), {}, (0, XS), SUM),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("updates", [True, False])
def test_arrays(name, updates):
    f, options, args, want = PLAIN[name]
    assert numbers(nnx.scan(f, graph_updates=updates, **options)(*args)) == want


def test_values_are_those_of_plain_jax():
    body = lambda c, x: (jnp.sin(c + x), c * x)  # noqa: E731
    want = jax.lax.scan(body, 0.5, XS, reverse=True)
    got = nnx.scan(body, reverse=True)(0.5, XS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_arguments_by_name_take_their_place():
    assert numbers(nnx.scan(lambda c, x: (c + x, c))(x=XS, c=0.0)) == SUM
