"""Normalisation, dropout and low-rank layers give what Flax gives, parameter by parameter."""

import numpy as np
import pytest

from linnet import nnx
from tests.nnx.nn.norm_cases import CASES, figures
from tests.nnx.nn.norm_numbers import NUMBERS

# Flax rounds the normalised weight to 16 bits before it is scaled.
ROUNDED = {"WeightNorm half the bits"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_seed_same_numbers(case):
    dtype, before, after = NUMBERS[case.name]
    got_before, got_after, got_dtype = figures(case.build(nnx.Rngs(0)), case)
    assert got_dtype == dtype
    # Bit for bit on one version of JAX; another may round a normal number the other way.
    np.testing.assert_array_max_ulp(np.float32(got_before), np.float32(before), maxulp=1)
    tolerance = 2e-2 if dtype == "bfloat16" or case.name in ROUNDED else 3e-6
    np.testing.assert_allclose(got_after, after, atol=tolerance, rtol=tolerance)


def test_every_number_has_its_case():
    assert sorted(NUMBERS) == sorted(case.name for case in CASES)
