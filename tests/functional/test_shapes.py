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
