"""Sharding by rule. The cases run in one process of their own."""

import pytest

from tests.nnx import sharding_cases
from tests.subprocesses import failures_of


@pytest.fixture(scope="module")
def failures():
    return failures_of(sharding_cases)


@pytest.mark.parametrize("name", sharding_cases.CASES)
def test_on_eight_devices(name, failures):
    assert failures.get(name, "") == ""
