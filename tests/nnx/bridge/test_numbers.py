"""Trees, random keys and numbers of bridged modules are those of Flax 0.12.8."""

import json
from pathlib import Path

import pytest

from linnet import linen, nnx
from tests.nnx.bridge.cases import CASES, outcome

EXPECTED = json.loads(Path(__file__).with_name("numbers.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_same_as_flax(name):
    wanted, got = EXPECTED[name], outcome(CASES[name], nnx, linen)
    if isinstance(wanted[0], str):  # it fails, with an error that a program catches as there
        assert wanted[0].split()[0] in got[0].split()
    else:
        assert got[0] == wanted[0]
        assert got[1:] == pytest.approx(wanted[1:], abs=2e-3)
