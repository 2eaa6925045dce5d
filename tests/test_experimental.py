"""The old path of NNX."""

import linnet.experimental.nnx as old
from linnet import nnx
from linnet.experimental.nnx import Linear


def test_it_is_nnx():
    assert Linear is nnx.Linear
    assert set(old.__all__) == set(nnx.__all__)
    assert old.graphlib is nnx.graphlib
