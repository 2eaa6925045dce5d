"""Layers of Linen on both libraries: the same variables and, compiled, the same outputs, by bits.

What may differ in the last place: weights that a layer normalises, and attention, which scales the
scores instead of the queries, and whose softmax is in float32.
"""

import warnings

import flax.linen
import jax
import numpy as np
import pytest

from linnet import linen
from tests.linen.catalogue import CATALOGUE, leaves_of

NORMALISED = ("SpectralNorm", "WeightNorm")


def run(entry, nn):
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        variables = entry.variables(nn)
        return variables, jax.jit(lambda v: entry.apply(nn, v))(variables)


# For `outcomes`, which has what Flax does written down.
PROGRAMS = {
    str(entry): (lambda f, entry=entry: run(entry, f.flax.linen), None) for entry in CATALOGUE
}


@pytest.mark.parametrize("entry", CATALOGUE, ids=str)
def test_same_bits(entry):
    (theirs, their_out), (ours, our_out) = run(entry, flax.linen), run(entry, linen)
    in_bits = entry.layer not in NORMALISED
    assert_same(ours, theirs, in_bits)
    assert_same(our_out, their_out, in_bits and "Attention" not in entry.layer)


def assert_same(found, wanted, in_bits):
    found, wanted = leaves_of(found), leaves_of(wanted)
    assert list(found) == list(wanted)
    for path, want in wanted.items():
        one, other = np.asarray(found[path]), np.asarray(want)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        if in_bits:
            assert one.tobytes() == other.tobytes(), path
        else:
            half = str(one.dtype) == "bfloat16"
            close = {"rtol": 0.03, "atol": 0.03} if half else {"rtol": 1e-5, "atol": 1e-6}
            np.testing.assert_allclose(one.astype("f4"), other.astype("f4"), **close)
