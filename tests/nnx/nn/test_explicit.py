"""Every layer with explicit axes. The cases run in one process of their own."""

import pytest

from linnet import nnx
from tests.nnx.nn import explicit_cases
from tests.nnx.nn.catalogue import CATALOGUE
from tests.subprocesses import failures_of


@pytest.fixture(scope="module")
def failures():
    return failures_of(explicit_cases)


@pytest.mark.parametrize("name", explicit_cases.CASES)
def test_on_eight_devices(name, failures):
    assert failures.get(name, "") == ""


def test_every_layer_of_the_catalogue_has_a_case():
    missing = {entry.layer for entry in CATALOGUE} - explicit_cases.LAYERS
    assert missing == set()
    assert nnx.Linear in explicit_cases.LAYERS
