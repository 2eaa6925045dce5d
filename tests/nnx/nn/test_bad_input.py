"""What a layer cannot take: the error names its place, what it wanted, what it got, and the fix.

Every layer stands deep inside a model here, and is given one thing wrong, eagerly and in a trace.
"""

import re

import jax
import pytest

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError, RngsError
from linnet.nnx.nn.attention import dot_product_attention_weights
from tests.nnx.nn.bad_input_cases import CASES, ones
from tests.nnx.nn.catalogue import CATALOGUE


class Block(nnx.Module):
    def __init__(self, proj):
        self.proj = proj

    def __call__(self, *args, method="__call__", **kwargs):
        return getattr(self.proj, method)(*args, **kwargs)


class Model(nnx.Module):
    def __init__(self, proj):
        self.blocks = [Block(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), Block(proj)]

    def __call__(self, *args, **kwargs):
        return self.blocks[1](*args, **kwargs)


def refuse(case, run):
    model = Model(case.build(nnx.Rngs(0)))
    with pytest.raises(case.error) as error:
        run(model, *case.args, **case.kwargs)
    text = str(error.value)
    assert "model.blocks[1].proj" in text
    said, fix = text.split("Fix: ")
    assert case.wanted in text
    assert case.got in said
    assert fix.strip()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_is_refused(case):
    refuse(case, lambda model, *args, **kwargs: model(*args, **kwargs))


@pytest.mark.parametrize("case", [case for case in CASES if case.traced], ids=str)
def test_a_call_is_refused_while_tracing(case):
    method = case.kwargs.get("method", "__call__")
    equation = {k: v for k, v in case.kwargs.items() if k == "einsum_str"}

    @nnx.jit
    def run(model, args, kwargs):
        return model(*args, method=method, **equation, **kwargs)

    moving = {k: v for k, v in case.kwargs.items() if k not in ("method", "einsum_str")}
    refuse(case, lambda model, *args, **_: run(model, args, moving))


# ---- constructors and functions, which have no place in a model ---------------------------------

RNGS = nnx.Rngs(0)
LINEAR = nnx.Linear(3, 4, rngs=RNGS)
CELL = nnx.GRUCell(3, 4, rngs=RNGS)
Q = ones(1, 3, 2, 4)


def options(function, *args, **kwargs):
    return lambda: function(*args, **kwargs)


ARGUMENTS = {
    "Linear: a size with a fraction": (
        options(nnx.Linear, 3 / 2, 4, rngs=RNGS),
        LayerArgumentError,
        "Linear wants whole numbers as sizes, but got (1.5, 4) as the shape of a parameter.",
    ),
    "Conv: a negative size": (
        options(nnx.Conv, 3, -4, 2, rngs=RNGS),
        LayerArgumentError,
        "Conv wants whole numbers as sizes, but got (2, 3, -4) as the shape of a parameter.",
    ),
    "LinearGeneral: axes": (
        options(nnx.LinearGeneral, (2, 3), 4, rngs=RNGS),
        LayerArgumentError,
        "LinearGeneral wants one entry of in_features for each axis, but got in_features=(2, 3) "
        "and axis=(-1,).",
    ),
    "LinearGeneral: batch axes": (
        options(nnx.LinearGeneral, 3, 4, batch_axis={1: 2}, rngs=RNGS),
        LayerArgumentError,
        "LinearGeneral takes leading axes as batch axes, but got batch_axis={1: 2}.",
    ),
    "Einsum: operands": (
        options(nnx.Einsum, "ab->a", (3, 4), rngs=RNGS),
        LayerArgumentError,
        "Einsum: An einsum of inputs and kernel was expected, but got 'ab->a'.",
    ),
    "Einsum: kernel": (
        options(nnx.Einsum, "ab,bc->ac", (3, 4, 5), rngs=RNGS),
        LayerArgumentError,
        "Einsum: 'ab,bc->ac' has 2 axes for the kernel, but kernel_shape=(3, 4, 5).",
    ),
    "Einsum: bias": (
        options(nnx.Einsum, "ab,bc->ac", (3, 4), (5,), rngs=RNGS),
        LayerArgumentError,
        "Einsum: the kernel gives 'ab,bc->ac' output axes of size (4,), but bias_shape=(5,).",
    ),
    "Conv: groups": (
        options(nnx.Conv, 3, 4, 3, feature_group_count=2, rngs=RNGS),
        LayerArgumentError,
        "Conv divides its features into feature_group_count=2 groups, but got in_features=3 and "
        "out_features=4.",
    ),
    "Conv: the name of a padding": (
        options(nnx.Conv, 3, 4, 3, padding="SOME", rngs=RNGS),
        LayerArgumentError,
        "Conv: padding must be one of SAME, VALID, SAME_LOWER, CIRCULAR, REFLECT, CAUSAL, a "
        "number, or a sequence of 1 that are numbers or pairs (before, after), but got 'SOME'.",
    ),
    "Conv: too few pairs": (
        options(nnx.Conv, 3, 4, (3, 3), padding=((1, 1),), rngs=RNGS),
        LayerArgumentError,
        "or 2 of them that are numbers or pairs (before, after), but got ((1, 1),).",
    ),
    "Conv: too many strides": (
        options(nnx.Conv, 3, 4, (3, 3), (1, 2, 3), rngs=RNGS),
        LayerArgumentError,
        "Conv: strides must be a number or 2 of them, but got (1, 2, 3).",
    ),
    "Conv: causal in two directions": (
        options(nnx.Conv, 3, 4, (3, 3), padding="causal", rngs=RNGS),
        LayerArgumentError,
        "Conv: CAUSAL padding is for one axis, but the kernel moves over 2.",
    ),
    "ConvTranspose: the name of a padding": (
        options(nnx.ConvTranspose, 3, 4, 3, padding="REFLECT", rngs=RNGS),
        LayerArgumentError,
        "ConvTranspose: padding must be one of SAME, VALID, SAME_LOWER, CIRCULAR, a number, or a "
        "sequence of 1 that are numbers or pairs (before, after), but got 'REFLECT'.",
    ),
    "ConvTranspose: SAME_LOWER with strides": (
        options(nnx.ConvTranspose, 3, 4, 3, 2, padding="SAME_LOWER", rngs=RNGS),
        LayerArgumentError,
        "ConvTranspose: SAME_LOWER padding is not defined for a transposed convolution with "
        "strides of 2.",
    ),
    "GroupNorm: groups": (
        options(nnx.GroupNorm, 3, 2, rngs=RNGS),
        LayerArgumentError,
        "Number of groups (2) does not divide the number of channels (3) of GroupNorm.",
    ),
    "GroupNorm: both": (
        options(nnx.GroupNorm, 4, 2, 2, rngs=RNGS),
        LayerArgumentError,
        "GroupNorm got num_groups=2 and group_size=2.",
    ),
    "SpectralNorm: no matrix": (
        options(
            nnx.SpectralNorm, nnx.Conv(3, 4, 3, rngs=RNGS), error_on_non_matrix=True, rngs=RNGS
        ),
        LayerArgumentError,
        "SpectralNorm was given a layer whose kernel is float32[3,3,4].",
    ),
    "SpectralNorm: no layer": (
        options(nnx.SpectralNorm, "linear", rngs=RNGS),
        LayerArgumentError,
        "SpectralNorm applies a layer, but got 'linear'.",
    ),
    "WeightNorm: no layer": (
        options(nnx.WeightNorm, 3, rngs=RNGS),
        LayerArgumentError,
        "WeightNorm applies a layer, but got 3.",
    ),
    "WeightNorm: axes": (
        options(nnx.WeightNorm, LINEAR, feature_axes=5, rngs=RNGS),
        LayerArgumentError,
        "WeightNorm expected weights with axes 5, but kernel is float32[3,4].",
    ),
    "WeightNorm: axes without scales": (
        options(nnx.WeightNorm, LINEAR, feature_axes=5, use_scale=False, rngs=RNGS),
        LayerArgumentError,
        "WeightNorm expected weights with axes 5, but kernel is float32[3,4].",
    ),
    "WeightNorm: weight without axes": (
        options(nnx.WeightNorm, nnx.PReLU(), variable_filter=nnx.Param, rngs=RNGS),
        LayerArgumentError,
        "WeightNorm expected weights with axes -1, but negative_slope is float32[].",
    ),
    "Dropout: rate": (
        options(nnx.Dropout, 1.5),
        LayerArgumentError,
        "Dropout sets entries to zero with a probability, but got rate=1.5.",
    ),
    "Dropout: no rate": (
        options(nnx.Dropout, RNGS),
        LayerArgumentError,
        "Dropout sets entries to zero with a probability, but got rate=Rngs(",
    ),
    "MultiHeadAttention: heads": (
        options(nnx.MultiHeadAttention, 3, 4, rngs=RNGS),
        LayerArgumentError,
        "Memory dimension (4) must be divisible by 'num_heads' heads (3).",
    ),
    "MultiHeadAttention: key heads": (
        options(nnx.MultiHeadAttention, 4, 4, num_kv_heads=3, rngs=RNGS),
        LayerArgumentError,
        "num_heads (4) must be divisible by num_kv_heads (3).",
    ),
    "MultiHeadAttention: rate": (
        options(nnx.MultiHeadAttention, 2, 4, dropout_rate=-0.1, rngs=RNGS),
        LayerArgumentError,
        "MultiHeadAttention sets entries to zero with a probability, but got dropout_rate=-0.1.",
    ),
    "MultiHeadAttention: half a cache": (
        options(nnx.view, nnx.MultiHeadAttention(2, 4, rngs=RNGS), batch_size=3),
        LayerArgumentError,
        "MultiHeadAttention makes a cache from batch_size and max_length, but got batch_size=3 "
        "and max_length=None.",
    ),
    "RNN: no cell": (
        options(nnx.RNN, LINEAR),
        LayerArgumentError,
        "RNN runs a cell such as nnx.LSTMCell, but got a Linear.",
    ),
    "Bidirectional: cells": (
        options(nnx.Bidirectional, nnx.RNN(CELL), CELL),
        LayerArgumentError,
        "Bidirectional runs an RNN in each direction, but got a GRUCell, which is a cell.",
    ),
    "LoRA: rank": (
        options(nnx.LoRA, 3, 0, 4, rngs=RNGS),
        LayerArgumentError,
        "LoRA is a map of rank 1 or more, but got lora_rank=0.",
    ),
    "dot_product_attention: rank": (
        options(nnx.dot_product_attention, *(ones(3, 4),) * 3),
        FeatureError,
        "q, k, v must have same rank, at least 3: (..., length, heads, depth), but got (3, 4)",
    ),
    "dot_product_attention: batch": (
        options(nnx.dot_product_attention, Q, *(ones(2, 3, 2, 4),) * 2),
        FeatureError,
        "q, k, v batch dims must match, but got (1, 3, 2, 4), (2, 3, 2, 4)",
    ),
    "dot_product_attention: heads": (
        options(nnx.dot_product_attention, ones(1, 3, 3, 4), Q, Q),
        FeatureError,
        "the number of query heads must be a multiple of it, but got (1, 3, 3, 4), (1, 3, 2, 4)",
    ),
    "dot_product_attention: mask": (
        options(nnx.dot_product_attention, Q, Q, Q, mask=ones(3, 2)),
        FeatureError,
        "dot_product_attention expected a mask that broadcasts to (1, 2, 3, 3): (batch, heads, "
        "queries, keys), but got one of shape (3, 2).",
    ),
    "dot_product_attention: bias": (
        options(nnx.dot_product_attention, Q, Q, Q, bias=ones(3, 2)),
        FeatureError,
        "dot_product_attention expected a bias that broadcasts to (1, 2, 3, 3)",
    ),
    "dot_product_attention: no key": (
        options(nnx.dot_product_attention, Q, Q, Q, dropout_rate=0.5),
        RngsError,
        "dot_product_attention is to drop weights (dropout_rate=0.5), but has no key.",
    ),
    "dot_product_attention: implementation": (
        options(nnx.dot_product_attention, Q, Q, Q, implementation="fast"),
        ValueError,
        "dot_product_attention has the implementations 'xla' and 'cudnn', but got 'fast'.",
    ),
    "dot_product_attention_weights: depth": (
        options(dot_product_attention_weights, Q, ones(1, 3, 2, 5)),
        FeatureError,
        "q and k must have the same depth, but got (1, 3, 2, 4), (1, 3, 2, 5)",
    ),
    "combine_masks: rank": (
        options(nnx.combine_masks, ones(2, 3), ones(3)),
        FeatureError,
        "combine_masks: masks must have same rank and broadcast, but got (2, 3), (3,).",
    ),
    "combine_masks: size": (
        options(nnx.combine_masks, ones(2, 3), None, ones(2, 4)),
        FeatureError,
        "combine_masks: masks must have same rank and broadcast, but got (2, 3), (2, 4).",
    ),
    "make_attention_mask: batch": (
        options(nnx.make_attention_mask, ones(2, 3), ones(4, 3)),
        FeatureError,
        "make_attention_mask expected (..., queries) and (..., keys) whose other axes are alike, "
        "but got (2, 3) and (4, 3).",
    ),
    "make_attention_mask: rank": (
        options(nnx.make_attention_mask, ones(), ones(3)),
        FeatureError,
        "whose other axes are alike, but got () and (3,).",
    ),
    "make_causal_mask: rank": (
        options(nnx.make_causal_mask, 3),
        FeatureError,
        "make_causal_mask expected an array of shape (..., length), but got 3.",
    ),
    "max_pool: rank": (
        options(nnx.max_pool, ones(2, 3), (2, 2)),
        FeatureError,
        "A window of (2, 2) needs inputs with at least 3 axes, the last for the features, but got "
        "float32[2, 3].",
    ),
    "min_pool: window": (
        options(nnx.min_pool, ones(2, 2, 3), 2),
        FeatureError,
        "window_shape must be a sequence, one size for each axis, but got 2.",
    ),
    "avg_pool: padding": (
        options(nnx.avg_pool, ones(2, 2, 3), (2, 2), padding="SOME"),
        LayerArgumentError,
        "padding must be one of SAME, VALID, SAME_LOWER, a number, or 2 of them that are numbers "
        "or pairs (before, after), but got 'SOME'.",
    ),
    "pool: strides": (
        options(nnx.pool, ones(2, 2, 3), 0.0, jax.lax.add, (2, 2), (1,), "VALID"),
        LayerArgumentError,
        "strides must be a number or 2 of them, but got (1,).",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_do_not_fit(name):
    call, kind, said = ARGUMENTS[name]
    with pytest.raises(kind) as error:
        call()
    assert said in str(error.value)
    assert str(error.value).count("Fix: ") == 1


BUILT = {entry.layer: entry for entry in CATALOGUE}
WITHOUT_KEYS = (nnx.PReLU, nnx.Dropout, nnx.RNN, nnx.Bidirectional, nnx.RoPE)


@pytest.mark.parametrize("layer", [x for x in BUILT if x not in WITHOUT_KEYS])
@pytest.mark.parametrize("rngs", [0, "params"])
def test_a_layer_is_not_built_without_keys(layer, rngs):
    with pytest.raises(RngsError) as error:
        BUILT[layer].build(rngs)
    assert re.search(f"from rngs, but got .*{rngs!r}", str(error.value))
    assert "Fix: pass rngs=nnx.Rngs(0)" in str(error.value)
