"""Metrics and optimizers over several devices. The cases run in one process of their own."""

import pytest

from tests.nnx.training import device_cases as cases


@pytest.mark.parametrize("name", cases.CASES)
def test_on_four_devices(name, failures):
    assert failures.get(name, "") == ""
