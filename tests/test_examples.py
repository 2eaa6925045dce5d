"""The examples run and learn, in small settings."""

import dataclasses
import runpy
import shlex
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@dataclasses.dataclass
class Run:
    """A short run of an example, and what must come of it."""

    name: str
    arguments: str
    shows: str
    between: dict[str, tuple[float, float]]
    writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


RUNS = [
    Run(
        "gpt",
        "--steps 20 --bytes 20000 --held-out 2000",
        shows="A sample:\n\ndef read(",
        between={"bigram": (2.4, 3.6), "gpt": (2.5, 5)},
        writes=("runs/gpt/metrics.csv", "runs/gpt/curves.png"),
    ),
    Run(
        "functional_loop",
        "--steps 120",
        shows="nnx.jit over live objects gives the same bits: True",
        between={"unseen": (0.95, 1), "same": (True, True)},
    ),
    Run(
        "lora",
        "--steps 300",
        shows="the base is unchanged, bit for bit: True",
        between={
            "new": (0.8, 1),
            "known": (0.95, 1),
            "unchanged": (True, True),
            "adapter": (4392, 4392),
        },
    ),
    Run(
        "recurrent",
        "--steps 150 --length 10",
        shows="squared error on new sequences",
        between={"error": (0, 0.05), "baseline": (0.15, 0.18)},
        writes=("runs/recurrent/metrics.csv", "runs/recurrent/curves.png"),
    ),
    Run(
        "stacked",
        "--depths 4 --steps 40",
        shows="4 layers trained: test accuracy",
        between={"accuracy": (0.85, 1), "saved": (2, 20), "difference": (0, 1e-4)},
    ),
    Run(
        "surgery",
        "--steps 60",
        shows="the base itself is unchanged: True",
        between={
            "base": (0.85, 1),
            "head": (0.7, 1),
            "block": (0, 0.9),
            "shared": (9098, 9098),
            "lora": (1684, 1684),
            "pruned": (0.6, 1),
            "unchanged": (True, True),
        },
    ),
    Run(
        "vae",
        "--steps 200 --latents 4",
        shows="by a model of independent pixels:        -25.22 nats",
        between={"elbo": (-22, -15), "baseline": (-25.23, -25.21)},
        writes=("runs/vae/metrics.csv", "runs/vae/curves.png", "runs/vae/samples.png"),
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_example_does_what_it_says(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # a reader has JAX's own defaults
        example = runpy.run_path(str(EXAMPLES / f"{run.name}.py"))
        result = example["main"](shlex.split(run.arguments))
    assert result.keys() == run.between.keys()
    for name, (low, high) in run.between.items():
        assert low <= result[name] <= high, f"{name} is {result[name]}"
    assert run.shows in capsys.readouterr().out
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written == set(run.writes)


def test_digits_is_left_gone_on_with_and_finished(tmp_path, monkeypatch, capsys):
    digits = runpy.run_path(str(EXAMPLES / "digits.py"))

    def run(*arguments):
        with jax.numpy_rank_promotion("allow"):
            result = digits["main"]([*arguments, "--folder", str(tmp_path)])
        return result, capsys.readouterr().out

    first, shown = run("--epochs", "1")
    assert first["step"] == 22
    assert "BatchNorm" in shown
    assert "Finished: " in shown
    second, shown = run("--epochs", "3")
    assert f"Going on: {tmp_path}/checkpoint is at step 22 of 66." in shown
    assert second["step"] == 66
    assert second["accuracy"] > 0.85
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 67))]
    again, shown = run("--epochs", "3")
    assert f"Already finished: {tmp_path}/checkpoint is at step 66 of 66." in shown
    assert again == second
    assert "Next: --fresh to start over" in shown
    fresh, shown = run("--epochs", "1", "--fresh")
    assert fresh == first
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"checkpoint", "metrics.csv", "curves.png", "predictions.png", "model.html"}


@pytest.mark.parametrize("name", FILES)
def test_an_example_says_how_to_run_it_and_is_in_the_table(name):
    assert f"    python examples/{name}" in (EXAMPLES / name).read_text(encoding="utf-8")
    assert f"`python examples/{name}" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
