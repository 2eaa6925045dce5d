"""A model trained in every parallel form. The cases run in one process of their own."""

import pytest

from tests.nnx import parallel_cases
from tests.subprocesses import failures_of


@pytest.fixture(scope="module")
def failures():
    return failures_of(parallel_cases)


@pytest.mark.parametrize("name", parallel_cases.CASES)
def test_on_eight_devices(name, failures):
    assert failures.get(name, "") == ""
