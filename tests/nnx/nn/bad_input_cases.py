"""Layers, each with a call that it must refuse, and what the error must say."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from linnet import nnx
from linnet.errors import (
    CacheError,
    FeatureError,
    LayerArgumentError,
    ModeError,
    RngsError,
    type_text,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, a call that it must refuse, and what the error must say."""

    name: str
    build: Any
    args: tuple
    wanted: str
    got: str
    kwargs: dict = dataclasses.field(default_factory=dict)
    error: type = FeatureError
    traced: bool = True

    def __str__(self):
        return self.name


CASES: list[Case] = []


def bad(name, build, *args, wanted, got, error=FeatureError, traced=True, **kwargs):
    CASES.append(Case(name, build, args, wanted, got, kwargs, error, traced))


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def linear(rngs):
    return nnx.Linear(3, 4, rngs=rngs)


def general(rngs):
    return nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=rngs)


def einsum(rngs):
    return nnx.Einsum("ab,bc->ac", (3, 4), rngs=rngs)


def embed(rngs):
    return nnx.Embed(3, 4, rngs=rngs)


# Features, ranks and dtypes.
SUM = "'ab,bc->ac' with a kernel of (3, 4), so that b = 3"
for name, build, x, wanted in (
    ("Linear: size", linear, ones(2, 5), "inputs whose last axis has size 3"),
    ("Linear: rank", linear, ones(), "at least 1 axis, the last of size 3"),
    ("LinearGeneral: size", general, ones(5, 3, 2), "inputs of size (2, 3) on axes (-2, -1)"),
    ("LinearGeneral: rank", general, ones(3), "inputs of size (2, 3) on axes (-2, -1)"),
    ("Einsum: size", einsum, ones(2, 5), SUM),
    ("Einsum: rank", einsum, ones(3), SUM),
    ("Embed: numbers that are no indices", embed, ones(2), "integers as indices"),
    ("Embed: truth values", embed, ones(2, dtype=bool), "integers as indices"),
):
    bad(name, build, x, wanted=wanted, got=type_text(x))
bad(
    "LinearGeneral: batch axis",
    lambda rngs: nnx.LinearGeneral(3, 4, batch_axis={0: 2}, rngs=rngs),
    ones(5, 3),
    wanted="batch axes {0: 2}",
    got="float32[5,3]",
)
bad(
    "Einsum: no equation",
    lambda rngs: nnx.Einsum(None, (3, 4), rngs=rngs),
    ones(2, 3),
    wanted="einsum_str",
    got="has no equation",
    error=LayerArgumentError,
)
bad(
    "Einsum: an equation of the call",
    lambda rngs: nnx.Einsum(None, (3, 4), rngs=rngs),
    ones(2, 3),
    einsum_str="ab,bcd->acd",
    wanted="'ab,bcd->acd' has 3 axes for the kernel",
    got="kernel_shape=(3, 4)",
    error=LayerArgumentError,
)
bad(
    "Embed.attend: size",
    embed,
    ones(2, 5),
    method="attend",
    wanted="inputs whose last axis has size 4",
    got="float32[2,5]",
)
for layer in (nnx.Conv, nnx.ConvTranspose):
    name = layer.__name__
    bad(
        f"{name}: size",
        lambda rngs, layer=layer: layer(3, 4, (2, 2), rngs=rngs),
        ones(1, 5, 5, 2),
        wanted="inputs whose last axis has size 3",
        got="float32[1,5,5,2]",
    )
    bad(
        f"{name}: rank",
        lambda rngs, layer=layer: layer(3, 4, (2, 2), rngs=rngs),
        ones(5, 3),
        wanted="at least 3 axes, the last of size 3",
        got="float32[5,3]",
    )
    bad(
        f"{name}: mask",
        lambda rngs, layer=layer: layer(3, 4, 2, mask=ones(2, 3), rngs=rngs),
        ones(5, 3),
        wanted="a mask of the kernel's shape (2, 3, 4)",
        got="float32[2,3]",
        error=LayerArgumentError,
    )

# Normalisation.
NORMS = {
    "BatchNorm": lambda rngs: nnx.BatchNorm(3, use_running_average=False, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(3, rngs=rngs),
    "RMSNorm": lambda rngs: nnx.RMSNorm(3, rngs=rngs),
    "GroupNorm": lambda rngs: nnx.GroupNorm(3, 3, rngs=rngs),
    "InstanceNorm": lambda rngs: nnx.InstanceNorm(3, rngs=rngs),
}
for name, build in NORMS.items():
    bad(
        f"{name}: size",
        build,
        ones(2, 4, 5),
        wanted="3 features on axis -1",
        got="5 in float32[2,4,5]",
    )
    bad(f"{name}: rank", build, ones(), wanted="axis -1", got="float32[]")
    bad(
        f"{name}: mask",
        build,
        ones(2, 4, 3),
        mask=ones(3, 3, dtype=bool),
        wanted="a boolean mask that broadcasts to float32[2,4,3]",
        got="bool[3,3]",
    )
    bad(
        f"{name}: mask of numbers",
        build,
        ones(2, 4, 3),
        mask=ones(2, 4, 3),
        wanted="a boolean mask that broadcasts to float32[2,4,3]",
        got="float32[2,4,3]",
    )
bad(
    "BatchNorm: not told",
    lambda rngs: nnx.BatchNorm(3, use_running_average=None, rngs=rngs),
    ones(2, 3),
    wanted="running",
    got="use_running_average is None",
    error=ModeError,
)
bad(
    "GroupNorm: no batch",
    NORMS["GroupNorm"],
    ones(3),
    wanted="(batch, ..., 3)",
    got="float32[3]",
)
bad(
    "InstanceNorm: no batch",
    NORMS["InstanceNorm"],
    ones(3),
    wanted="cannot include the leading dimension",
    got="float32[3]",
)
for layer in (nnx.SpectralNorm, nnx.WeightNorm):
    bad(
        f"{layer.__name__}: the layer inside",
        lambda rngs, layer=layer: layer(nnx.Linear(3, 4, rngs=rngs), rngs=rngs),
        ones(2, 5),
        wanted="inputs whose last axis has size 3",
        got="float32[2,5]",
    )

# Random numbers.
bad(
    "Dropout: no keys",
    lambda rngs: nnx.Dropout(0.5),
    ones(2),
    wanted="rngs",
    got="no keys",
    error=RngsError,
)
bad(
    "Dropout: keys of another kind",
    lambda rngs: nnx.Dropout(0.5),
    ones(2),
    rngs=ones(2),
    wanted="an nnx.Rngs, an nnx.RngStream or a key",
    got="float32[2]",
    error=RngsError,
)
bad(
    "Dropout: not told",
    lambda rngs: nnx.Dropout(0.5, deterministic=None, rngs=rngs),
    ones(2),
    wanted="whether to drop entries",
    got="deterministic is None",
    error=ModeError,
)
bad(
    "Dropout: integers",
    lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    ones(2, dtype=jnp.int32),
    wanted="floating-point inputs",
    got="int32[2]",
)
bad(
    "Dropout: broadcast_dims",
    lambda rngs: nnx.Dropout(0.5, broadcast_dims=(2,), rngs=rngs),
    ones(2, 3),
    wanted="axis 2",
    got="float32[2,3]",
)


# Attention.
def attention(rngs, **options):
    return nnx.MultiHeadAttention(2, 4, in_kv_features=6, rngs=rngs, decode=False, **options)


def decoder(rngs, length=None):
    layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs)
    if length is not None:
        layer.init_cache((1, length, 4))
    return layer


def full(rngs):
    layer = decoder(rngs, 3)
    layer(ones(1, 2, 4))
    return layer


Q, KV = ones(1, 3, 4), ones(1, 5, 6)
for name, args, wanted, got in (
    ("inputs_q", (ones(1, 3, 5), KV), "inputs_q of shape (..., length, 4)", "float32[1,3,5]"),
    ("inputs_k", (Q, ones(1, 5, 7)), "inputs_k of shape (..., length, 6)", "float32[1,5,7]"),
    ("inputs_v", (Q, KV, Q), "inputs_v of shape (..., length, 6)", "float32[1,3,4]"),
    ("rank", (ones(4), KV), "inputs_q of shape (..., length, 4)", "float32[4]"),
    ("no inputs_k", (Q, None, KV), "`inputs_k` cannot be None", "got inputs_v and no inputs_k"),
    ("batch", (Q, ones(2, 5, 6)), "inputs of one batch, (1,)", "inputs_k (2, 5, 6)"),
    ("lengths", (Q, KV, ones(1, 4, 6)), "as many keys as values", "inputs_v (1, 4, 6)"),
):
    bad(f"MultiHeadAttention: {name}", attention, *args, wanted=wanted, got=got)
bad(
    "MultiHeadAttention: mask",
    attention,
    Q,
    KV,
    mask=ones(1, 1, 3, 3),
    wanted="a mask that broadcasts to (1, 2, 3, 5)",
    got="(1, 1, 3, 3)",
)
bad(
    "MultiHeadAttention: no keys",
    lambda rngs: attention(rngs, dropout_rate=0.5, deterministic=False, keep_rngs=False),
    Q,
    KV,
    wanted="'rngs' must be provided",
    got="has no keys",
    error=RngsError,
)
bad(
    "MultiHeadAttention: not told",
    lambda rngs: attention(rngs, dropout_rate=0.5),
    Q,
    KV,
    wanted="whether to drop weights",
    got="deterministic is None",
    error=ModeError,
)
bad(
    "MultiHeadAttention: no cache",
    decoder,
    ones(1, 1, 4),
    wanted="init_cache",
    got="cache not initialized",
    error=CacheError,
)
bad(
    "MultiHeadAttention: a full cache",
    full,
    ones(1, 2, 4),
    wanted="2 of its 3 positions are in use",
    got="got 2 more",
    error=CacheError,
    traced=False,  # how full it is is not known while tracing
)
bad(
    "MultiHeadAttention: a cache without a length",
    decoder,
    (4,),
    method="init_cache",
    wanted="a shape (..., length, features)",
    got="(4,)",
    error=CacheError,
    traced=False,  # a shape is an argument
)
bad(
    "MultiHeadAttention: the cache of another batch",
    lambda rngs: decoder(rngs, 3),
    ones(2, 1, 4),
    wanted="a batch of (1,)",
    got="(2, 1, 2, 2)",
    error=CacheError,
)

# Recurrent layers.
for layer in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell):
    name = layer.__name__
    is_pair = "LSTM" in name
    carry = (ones(2, 4),) * 2 if is_pair else ones(2, 4)
    kind = "a pair (c, h) of arrays" if is_pair else "an array"

    def build(rngs, layer=layer):
        return layer(3, 4, rngs=rngs)

    bad(
        f"{name}: size",
        build,
        carry,
        ones(2, 5),
        wanted="inputs whose last axis has size 3",
        got="float32[2,5]",
    )
    bad(
        f"{name}: carry",
        build,
        jax.tree.map(lambda x: x[:, :3], carry),
        ones(2, 3),
        wanted=f"a carry that is {kind} of shape (2, 4)",
        got="float32[2,3]",
    )
    bad(
        f"{name}: number of carries",
        build,
        (ones(2, 4),) * 3,
        ones(2, 3),
        wanted=f"a carry that is {kind} of shape (2, 4)",
        got="float32[2,4], float32[2,4], float32[2,4]",
    )
    bad(
        f"{name}: a carry that is drawn",
        lambda rngs, layer=layer: layer(3, 4, carry_init=jax.nn.initializers.normal(), rngs=rngs),
        (2, 3),
        method="initialize_carry",
        wanted="RNGs must be provided",
        got="carry_init draws",
        error=RngsError,
        traced=False,  # a shape is an argument
    )


def recurrent(rngs, **options):
    return nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs), **options)


for name, args, kwargs, wanted, got in (
    ("size", (ones(2, 5, 4),), {}, "inputs whose last axis has size 3", "float32[2,4]"),
    ("rank", (ones(3),), {}, "inputs of shape (..., time, features)", "float32[3]"),
    (
        "lengths",
        (ones(2, 5, 3),),
        {"seq_lengths": ones(3, dtype=jnp.int32)},
        "seq_lengths to be integers of shape (2,)",
        "int32[3]",
    ),
    (
        "lengths that are not integers",
        (ones(2, 5, 3),),
        {"seq_lengths": ones(2)},
        "seq_lengths to be integers of shape (2,)",
        "float32[2]",
    ),
    (
        "carry",
        (ones(2, 5, 3),),
        {"initial_carry": ones(2, 3)},
        "a carry that is an array of shape (2, 4)",
        "float32[2,3]",
    ),
):
    bad(f"RNN: {name}", recurrent, *args, wanted=wanted, got=got, **kwargs)
    if name != "carry":
        bad(
            f"Bidirectional: {name}",
            lambda rngs: nnx.Bidirectional(recurrent(rngs), recurrent(rngs)),
            *args,
            wanted=wanted,
            got=got,
            **kwargs,
        )
bad(
    "Bidirectional: carry",
    lambda rngs: nnx.Bidirectional(recurrent(rngs), recurrent(rngs)),
    ones(2, 5, 3),
    initial_carry=ones(2, 4),
    wanted="initial_carry to be a pair",
    got="float32[2,4]",
)

# Layers around others.
bad(
    "LoRA: size",
    lambda rngs: nnx.LoRA(3, 2, 4, rngs=rngs),
    ones(2, 5),
    wanted="inputs whose last axis has size 3",
    got="float32[2,5]",
)
bad(
    "LoRA: a base that cannot be called",
    lambda rngs: nnx.LoRA(3, 2, 4, base_module="linear", rngs=rngs),
    ones(2, 3),
    wanted="must be callable",
    got="'linear'",
    error=LayerArgumentError,
)
bad(
    "LoRA: a base of another size",
    lambda rngs: nnx.LoRA(3, 2, 4, base_module=nnx.Linear(3, 5, rngs=rngs), rngs=rngs),
    ones(2, 3),
    wanted="expected it to have shape (2, 4)",
    got="float32[2,5]",
)
bad(
    "LoRALinear: size",
    lambda rngs: nnx.LoRALinear(3, 4, lora_rank=2, rngs=rngs),
    ones(2, 5),
    wanted="inputs whose last axis has size 3",
    got="float32[2,5]",
)
for value in (None, "x"):
    bad(
        f"PReLU: {value!r}",
        lambda rngs: nnx.PReLU(),
        value,
        wanted="an array of numbers",
        got=repr(value),
        traced=False,  # it cannot be traced
    )
bad(
    "Sequential: something that cannot be called",
    lambda rngs: nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), "relu"),
    ones(2, 3),
    wanted="modules and functions",
    got="layers[1]",
    error=LayerArgumentError,
)
bad(
    "Sequential: a layer inside",
    lambda rngs: nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)),
    ones(2, 3),
    wanted="inputs whose last axis has size 3",
    got="float32[2,4]",
)
bad(
    "Stack: a layer inside",
    lambda rngs: nnx.Stack(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 2, rngs=rngs),
    ones(2, 4),
    wanted="inputs whose last axis has size 3",
    got="float32[2,4]",
)
