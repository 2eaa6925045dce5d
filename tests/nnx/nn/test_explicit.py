"""Every layer with explicit axes. The cases run in one process of their own."""

import pytest

from linnet import nnx
from tests.nnx.nn import explicit_cases as cases
from tests.nnx.nn.catalogue import CATALOGUE


@pytest.mark.parametrize("name", cases.CASES)
def test_on_eight_devices(name, failures):
    assert failures.get(name, "") == ""


def test_every_layer_of_the_catalogue_has_a_case():
    missing = {entry.layer for entry in CATALOGUE} - cases.LAYERS
    assert missing == set()
    assert nnx.Linear in cases.LAYERS
