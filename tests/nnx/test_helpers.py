"""``nnx.helpers``: names of older programs."""

import pytest

from linnet import nnx


def by_keyword(a, *, b=1): ...
def others(a, **kwargs): ...
def by_position(a, b, /): ...
def both(a, b): ...


@pytest.mark.parametrize(
    ("function", "has"),
    [(by_keyword, True), (others, False), (by_position, False), (both, True), (nnx.Linear, False)],
)
def test_keyword_arguments(function, has):
    assert nnx.helpers.has_keyword_arg(function, "b") is has


def test_a_layer_takes_rngs_by_keyword():
    assert nnx.helpers.has_keyword_arg(nnx.Linear, "rngs")
    assert nnx.helpers.TrainState is nnx.TrainState
