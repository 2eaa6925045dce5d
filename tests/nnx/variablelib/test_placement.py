"""Variables over several devices. The cases run in one process of their own."""

import pytest

from tests.nnx.variablelib import placement_cases
from tests.subprocesses import failures_of


@pytest.fixture(scope="module")
def failures():
    return failures_of(placement_cases)


@pytest.mark.parametrize("name", placement_cases.CASES)
def test_on_eight_devices(name, failures):
    assert failures.get(name, "") == ""
