"""Functions of objects over several devices. The cases run in one process of their own."""

import json
import subprocess
import sys

import pytest

from tests.nnx.transforms import device_cases


@pytest.fixture(scope="module")
def failures():
    program = [sys.executable, "-m", device_cases.__name__]
    done = subprocess.run(program, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", device_cases.CASES)
def test_on_four_devices(name, failures):
    assert failures.get(name, "") == ""
