"""Parameter trees, names, random keys and numbers of Linen modules are those of Flax 0.12.8."""

import json
from pathlib import Path

import pytest

from linnet import config, linen as nn
from tests.linen.module_cases import CASES, outcome

EXPECTED = json.loads(Path(__file__).with_name("module_numbers.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_same_as_flax(name):
    wanted, got = EXPECTED[name], outcome(CASES[name], nn)
    assert got[0] == wanted[0]
    assert got[1:] == pytest.approx(wanted[1:], abs=2e-3)


def test_names_of_adopted_modules_can_be_kept():
    from_outside = CASES["passed_from_outside"]
    with config.temp_flip_flag("preserve_adopted_names", True):
        names = outcome(from_outside, nn)[0]
    assert [n for n in names if n.startswith("1/")] == [
        "1/params/Dense_0/bias[1, 2]",
        "1/params/Dense_0/kernel[3, 2]",
        "1/params/foo/bias[1, 3]",
        "1/params/foo/kernel[3, 3]",
    ]
