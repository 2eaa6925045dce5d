"""The trace of a layer holds no more operations than Flax's.

The numbers are those of Flax 0.12.8 on JAX 0.10.2: equations of the jaxpr of a call, state in and
out, those inside of other equations included.
"""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.layers import count_equations
from linnet import nnx
from tests.nnx.nn.catalogue import CATALOGUE, SEQUENCE, Attends, Entry, decoder

IN_FLAX = {
    "Linear-plain": 3,
    "Linear-no-bias": 1,
    "Linear-bfloat16": 6,
    "LayerNorm-plain": 18,
    "LayerNorm-no-scale": 16,
    "BatchNorm-trains": 26,
    "BatchNorm-evaluates": 10,
    "BatchNorm-momentum": 26,
    "RMSNorm-plain": 12,
    "RMSNorm-rows": 12,
    "GroupNorm-groups": 23,
    "GroupNorm-sizes": 23,
    "InstanceNorm-plain": 18,
    "InstanceNorm-axis": 18,
    "SpectralNorm-plain": 29,
    "SpectralNorm-keeps": 59,
    "WeightNorm-plain": 11,
    "WeightNorm-no-scale": 9,
    "Dropout-plain": 21,
    "Dropout-rows": 22,
    "Dropout-still": 0,
    "Dropout-no-keys": 19,
    "LoRA-alone": 2,
    "LoRA-base": 6,
    "LoRALinear-plain": 6,
    "LoRALinear-random": 6,
    "LinearGeneral-plain": 3,
    "LinearGeneral-axes-and-batch": 3,
    "Einsum-plain": 3,
    "Einsum-no-bias": 2,
    "Embed-plain": 7,
    "Embed-bfloat16": 8,
    "Conv-plain": 3,
    "Conv-circular": 9,
    "Conv-causal-masked": 10,
    "ConvTranspose-plain": 3,
    "ConvTranspose-circular": 13,
    "PReLU-plain": 4,
    "PReLU-bfloat16": 6,
    "MultiHeadAttention-self": 30,
    "MultiHeadAttention-grouped": 30,
    "LSTMCell-plain": 29,
    "OptimizedLSTMCell-plain": 15,
    "GRUCell-plain": 17,
    "SimpleCell-plain": 6,
    "RNN-lstm": 38,
    "Bidirectional-gru": 51,
    "LSTMCell-hard": 47,
    "OptimizedLSTMCell-hard": 33,
    "GRUCell-relu": 19,
    "SimpleCell-relu": 8,
    "RNN-lengths": 85,
    "Bidirectional-time-major": 47,
    "MultiHeadAttention-one-position": 71,
    "MultiHeadAttention-drops-and-normalizes": 93,
    "MultiHeadAttention-masked": 38,
    "Embed-attends": 2,
}


def attention(**options):
    return lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs, **options)


HEADS = nnx.MultiHeadAttention
MASK = jnp.ones((2, 1, 5, 5), bool)
DROPS = attention(qkv_features=16, dropout_rate=0.5, deterministic=False, normalize_qk=True)
CASES = [
    *CATALOGUE,
    Entry(HEADS, "one-position", decoder, (SEQUENCE[:, :1],)),
    Entry(HEADS, "drops-and-normalizes", DROPS, (SEQUENCE,), {"is_causal": True}),
    Entry(HEADS, "masked", attention(), (SEQUENCE,), {"mask": MASK}),
    Entry(nnx.Embed, "attends", lambda rngs: Attends(5, 4, rngs=rngs), (SEQUENCE,)),
]
COMPARED = [case for case in CASES if str(case) in IN_FLAX]
ONLY_HERE = {nnx.Stack, nnx.RoPE}  # the second is newer than the Flax that was measured


def traced_size(entry):
    graphdef, state = nnx.split(entry.build(nnx.Rngs(0)))
    flags = {k: v for k, v in entry.kwargs.items() if not isinstance(v, jax.Array)}
    arrays = {k: v for k, v in entry.kwargs.items() if k not in flags}

    def call(state, inputs, arrays):
        layer = nnx.merge(graphdef, state)
        return layer(*inputs, **arrays, **flags), nnx.state(layer)

    return count_equations(jax.make_jaxpr(call)(state, entry.inputs, arrays).jaxpr)


@pytest.mark.parametrize("entry", COMPARED, ids=str)
def test_no_larger_than_in_flax(entry):
    assert traced_size(entry) <= IN_FLAX[str(entry)]


def test_every_layer_that_flax_has_is_compared():
    assert set(map(str, COMPARED)) == set(IN_FLAX)
    assert {e.layer for e in COMPARED} == {e.layer for e in CATALOGUE} - ONLY_HERE
