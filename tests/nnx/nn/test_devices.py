"""Layers over several devices. The cases run in one process of their own."""

import pytest

from tests.nnx.nn import device_cases
from tests.subprocesses import failures_of


@pytest.fixture(scope="module")
def failures():
    return failures_of(device_cases)


@pytest.mark.parametrize("name", device_cases.CASES)
def test_on_four_devices(name, failures):
    assert failures.get(name, "") == ""
