"""Same seed, same trees, same numbers, and traces that are no larger: the catalogue beside Flax.

The numbers in ``flax_layers.json`` are those of Flax 0.12.8 on JAX 0.10.2. Variables are the same
bit for bit, but for weights that a layer normalises while they are made. Outputs may differ in the
last places: outside of ``jax.jit`` a layer here runs as one compiled operation, and attention
scales the scores instead of the queries and takes its softmax in float32. In
``tests/against_flax`` bits are compared.
"""

import json
from pathlib import Path

import pytest

from benchmarks.layers import count_equations
from linnet import linen
from tests.linen.catalogue import CATALOGUE, gradients, summary, traced

FLAX = json.loads((Path(__file__).parent / "flax_layers.json").read_text())
entries = pytest.mark.parametrize("entry", CATALOGUE, ids=str)


def assert_summaries_alike(found, wanted, tolerance=1e-5):
    assert list(found) == list(wanted)
    for path, (shape, dtype, digest) in wanted.items():
        assert found[path][:2] == [shape, dtype], path
        loose = 0.05 if dtype == "bfloat16" else tolerance
        assert found[path][2] == pytest.approx(digest, rel=loose, abs=loose), path


@entries
def test_variables_outputs_and_operations_are_those_of_flax(entry):
    wanted = FLAX[str(entry)]
    half = "bfloat16" in str(entry) or "half" in str(entry)
    tolerance = 0.05 if half else 1e-4 if "Attention" in entry.layer else 1e-5
    variables = entry.variables(linen)
    assert_summaries_alike(summary(variables), wanted["variables"])
    out, new = entry.apply(linen, variables)
    assert_summaries_alike(summary(out), wanted["output"], tolerance)
    assert_summaries_alike(summary(new), wanted["written"], tolerance)
    size = count_equations(traced(entry, linen, variables).jaxpr)
    assert size <= wanted["operations"]
    if "gradients" in wanted:
        assert_summaries_alike(
            summary(gradients(entry, linen, variables)), wanted["gradients"], 1e-4
        )


def test_there_are_many_and_all_are_compared():
    assert set(FLAX) == set(map(str, CATALOGUE))
    assert len(CATALOGUE) >= 60
