"""Same seed, same numbers: every layer of the catalogue gives what Flax gives."""

import collections

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.digest import digest
from tests.nnx.nn.catalogue import CATALOGUE
from tests.nnx.nn.flax_numbers import FLAX

KEY = jax.dtypes.prng_key
# Sequential has no numbers of its own, and those of RoPE are in test_rotary.py.
OF_LINNET_ALONE = {"Stack", "Sequential", "RoPE"}


def digest_of_state(layer):
    leaves = {"/".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(layer))}
    values = [nnx.as_pure(leaves[name]) for name in sorted(leaves)]
    values = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, KEY) else x for x in values]
    return digest(*values) if values else 0.0


@pytest.mark.parametrize("entry", [e for e in CATALOGUE if str(e) in FLAX], ids=str)
def test_state_and_output_are_those_of_flax(entry):
    before, output, after = FLAX[str(entry)]
    layer = entry.build(nnx.Rngs(0))
    assert digest_of_state(layer) == pytest.approx(before, rel=1e-12, abs=2e-5)
    found = digest(*jax.tree.leaves(layer(*entry.inputs, **entry.kwargs)))
    assert found == pytest.approx(output, rel=1e-6, abs=2e-5)
    assert digest_of_state(layer) == pytest.approx(after, rel=1e-12, abs=2e-5)


def test_every_layer_is_compared_in_two_configurations():
    compared = collections.Counter(e.layer.__name__ for e in CATALOGUE if str(e) in FLAX)
    layers = {e.layer.__name__ for e in CATALOGUE} - OF_LINNET_ALONE
    assert [name for name in sorted(layers) if compared[name] < 2] == []
