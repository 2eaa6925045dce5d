"""Without Flax there is nothing to compare with: `make test-flax` has it."""

import importlib.util

collect_ignore_glob = ["*"] if importlib.util.find_spec("flax") is None else []


def pytest_terminal_summary(terminalreporter):
    """Prints how many programs do the same on both libraries."""
    counts = {
        outcome: sum(
            "against_flax" in report.nodeid for report in terminalreporter.getreports(outcome)
        )
        for outcome in ("passed", "failed")
    }
    if any(counts.values()):
        total = sum(counts.values())
        terminalreporter.write_line(f"{counts['passed']} of {total} programs agree with Flax.")
