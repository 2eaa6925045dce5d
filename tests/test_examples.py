"""The examples run and learn."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_first_fit_learns(capsys):
    example = runpy.run_path(str(EXAMPLES / "first_fit.py"))
    assert example["main"](["--steps", "200"]) > 0.9
    assert "accuracy on unseen points" in capsys.readouterr().out
