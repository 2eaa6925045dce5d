"""Shapes and axes, beside what NumPy says of them."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from linnet.functional import shapes

sizes = st.lists(st.sampled_from([1, 2, 3]), max_size=3).map(tuple)


def broadcast(*all_shapes):
    try:
        return np.broadcast_shapes(*all_shapes)
    except ValueError:
        return None


@given(sizes, sizes)
def test_broadcasting(one, other):
    together = broadcast(one, other)
    assert shapes.broadcast_together(one, other) == (together is not None)
    assert shapes.broadcasts_to(one, other) == (together == other)


def test_axes():
    assert shapes.positive_axes(-1, 3) == (2,) and shapes.positive_axes((0, -2), 3) == (0, 1)
    assert shapes.missing_axes(2, 2) == [2] and shapes.missing_axes((0, -2, -3), 2) == [-3]
    assert shapes.missing_axes((), 0) == []


def test_rank():
    assert shapes.with_rank(jnp.ones((2, 3)), 4).shape == (1, 1, 2, 3)
    assert shapes.with_rank(jnp.ones((2, 3)), 1).shape == (2, 3)


def test_the_axes_that_are_wanted_are_told():
    text = shapes.too_few_axes(jnp.ones((2, 3)), 2, "for the features", what="inputs with ")
    assert text == (
        "expected inputs with at least 3 axes, the last for the features, but got float32[2,3].\n"
        "Fix: keep the feature axis, also where it has size 1; kernel_size says how many axes (2 "
        "here) the kernel moves over."
    )
    assert shapes.too_few_axes(3.0, 0, "of size 3") == (
        "expected at least 1 axis, the last of size 3, but got the Python float 3.0.\n"
        "Fix: keep the feature axis, also where it has size 1."
    )
    assert shapes.shape_of([[1, 2]]) == shapes.shape_of(jnp.ones((1, 2))) == (1, 2)
