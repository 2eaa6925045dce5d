"""What an editor knows of programs: pyright over ``programs.py`` and ``mistakes.py``."""

import importlib.util
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.subprocesses import run_python

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]


needs_pyright = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed; .[dev] has it"
)


@pytest.fixture(scope="module")
def reported():
    """The rules that pyright names, by file and line."""
    files = [HERE / name for name in ("programs.py", "mistakes.py")]
    options = ["--pythonpath", sys.executable, "--outputjson"]
    run = run_python("-m", "pyright", *options, *files, folder=PROJECT, check=False)
    assert run.stdout.startswith("{"), run.stdout + run.stderr
    found = defaultdict(lambda: defaultdict(set))
    for complaint in json.loads(run.stdout)["generalDiagnostics"]:
        line = complaint["range"]["start"]["line"] + 1
        found[Path(complaint["file"]).name][line].add(complaint.get("rule", complaint["message"]))
    return found


@needs_pyright
def test_programs_are_understood(reported):
    assert not reported["programs.py"], dict(reported["programs.py"])


@needs_pyright
def test_every_mistake_is_reported(reported):
    lines = (HERE / "mistakes.py").read_text(encoding="utf-8").splitlines()
    expected = {
        number: found[1]
        for number, line in enumerate(lines, 1)
        if (found := re.search(r"# mistake: (\w+)", line))
    }
    assert len(expected) > 30
    missing = [
        lines[n - 1] for n, rule in expected.items() if rule not in reported["mistakes.py"][n]
    ]
    assert not missing, "not reported:\n" + "\n".join(missing)
    also = {n: rules for n, rules in reported["mistakes.py"].items() if rules and n not in expected}
    assert not also, f"reported without being a mistake: {also}"


def test_the_programs_run():
    from tests.typing import programs

    programs.instances()
    model = programs.Net(4, 2, rngs=programs.nnx.Rngs(0))
    programs.apart_and_together(model)
    programs.train()
