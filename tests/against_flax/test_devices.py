"""Programs on four devices, in one process of their own."""

import pytest

from tests.against_flax import device_programs as cases


@pytest.mark.parametrize("name", cases.PROGRAMS)
@pytest.mark.xdist_group("devices")
def test_programs(name, failures):
    assert failures.get(name, "") == ""
