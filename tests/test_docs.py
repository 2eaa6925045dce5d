"""The Python programs on each page of docs/ run as they stand there, in order, as one program."""

from pathlib import Path

import pytest

from tests.subprocesses import run_program
from tests.test_readme import run_programs

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALONE = {"scaling.md"}  # pages that need another number of devices


def test_pages_are_found():
    assert DOCS / "refs.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_programs_of_a_page_run(page):
    if page.name not in ALONE:
        run_programs(page)
        return
    program = """
        import pathlib, sys
        from tests.test_readme import run_programs
        assert run_programs(pathlib.Path(sys.argv[1]))
        """
    run_program(program, page)
