"""Whole programs, written for Flax's Linen, run unchanged, to the same losses and variables.

``run`` tells how ``flax.json`` was made.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.subprocesses import run_program

EXPECTED = json.loads((Path(__file__).parent / "flax.json").read_text())
RUN = "from linnet.__main__ import main; main(['-m', 'tests.programs.linen.run', *sys.argv[1:]])"


@pytest.mark.parametrize("name", EXPECTED)
def test_program_gives_the_losses_and_variables_of_flax(name):
    done = run_program(f"import sys; {RUN}", name, XLA_FLAGS="--xla_backend_optimization_level=0")
    got, want = json.loads(done.stdout)[name], EXPECTED[name]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=2e-5, atol=1e-6)
    shapes = {path: shape for path, (shape, _) in want["variables"].items()}
    assert {path: shape for path, (shape, _) in got["variables"].items()} == shapes
    sums = {path: total for path, (_, total) in want["variables"].items()}
    assert {path: total for path, (_, total) in got["variables"].items()} == pytest.approx(
        sums, rel=2e-5, abs=1e-6
    )
