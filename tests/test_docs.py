"""The Python programs on each page of docs/ run as they stand there, in order, as one program."""

from pathlib import Path

import pytest

from tests.test_readme import run_programs

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def test_pages_are_found():
    assert DOCS / "refs.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_programs_of_a_page_run(page):
    run_programs(page)
