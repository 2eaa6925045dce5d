"""Programs on four devices, in one process of their own."""

import pytest

from tests.against_flax import device_programs
from tests.subprocesses import failures_of


@pytest.fixture(scope="module")
def failures():
    return failures_of(device_programs)


@pytest.mark.parametrize("name", device_programs.PROGRAMS)
@pytest.mark.xdist_group("devices")
def test_programs(name, failures):
    assert failures.get(name, "") == ""
