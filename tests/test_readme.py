"""The Python programs in README.md run as they stand there, in order, as one program."""

import re
from pathlib import Path

import jax

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_programs(page: Path) -> int:
    """Runs the Python programs of a page and returns how many there are."""
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    namespace = {"__name__": page.stem}
    with jax.numpy_rank_promotion("allow"):  # a reader has JAX's own defaults
        for block in blocks:
            lines_above = text.count("\n", 0, block.start(1))
            code = compile("\n" * lines_above + block[1], str(page), "exec")
            exec(code, namespace)
    return len(blocks)


def test_readme_programs_run():
    assert run_programs(README), "README.md has no Python example"
