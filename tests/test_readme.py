"""The Python programs in README.md run as they stand there, in order, as one program."""

import re
from pathlib import Path

import jax

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_readme_programs_run():
    text = README.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, "README.md has no Python example"

    namespace = {"__name__": "readme"}
    with jax.numpy_rank_promotion("allow"):  # a reader has JAX's own defaults
        for block in blocks:
            lines_above = text.count("\n", 0, block.start(1))
            code = compile("\n" * lines_above + block[1], str(README), "exec")
            exec(code, namespace)
