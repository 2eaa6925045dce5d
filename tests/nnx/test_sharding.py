"""Sharding by rule. The cases run in one process of their own."""

import pytest

from tests.nnx import sharding_cases as cases


@pytest.mark.parametrize("name", cases.CASES)
def test_on_eight_devices(name, failures):
    assert failures.get(name, "") == ""
