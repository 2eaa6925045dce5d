"""A model trained in every parallel form. The cases run in one process of their own."""

from tests.nnx import parallel_cases
from tests.subprocesses import failures_of


def test_on_eight_devices():
    # One test for all cases: workers that share the cases would each run all of them.
    failures = failures_of(parallel_cases)
    assert not failures, "\n".join(f"{name}:\n{text}" for name, text in failures.items())
