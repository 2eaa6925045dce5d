"""Every public layer, in at least two configurations: what the matrix of tests runs over.

A file of layers adds its entries with ``add``; ``test_matrix.py`` fails for a public layer that
has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet import nnx
from tests.models import normal


@dataclasses.dataclass(frozen=True)
class Entry:
    """One configuration of a layer.

    Args:
      layer: the class.
      name: what is special about this configuration.
      build: makes the layer from ``nnx.Rngs``.
      inputs: the positional arguments of a call.
      kwargs: its keyword arguments.
      mapped: whether the first input may be mapped over its leading axis with vmap.
    """

    layer: type
    name: str
    build: Callable[[nnx.Rngs], Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    mapped: bool = True

    def __str__(self) -> str:
        return f"{self.layer.__name__}-{self.name}"


CATALOGUE: list[Entry] = []


class Attends(nnx.Embed):
    """An embedding that is called as the last layer of a model."""

    def __call__(self, query):
        return self.attend(query)


def add(
    layer: type, name: str, build: Any, *inputs: Any, mapped: bool = True, **kwargs: Any
) -> None:
    """Adds one configuration."""
    CATALOGUE.append(Entry(layer, name, build, inputs, kwargs, mapped))


X = normal(4, 3)

add(nnx.Linear, "plain", lambda rngs: nnx.Linear(3, 5, rngs=rngs), X)
add(nnx.Linear, "no-bias", lambda rngs: nnx.Linear(3, 2, use_bias=False, rngs=rngs), X)
add(
    nnx.Linear,
    "bfloat16",
    lambda rngs: nnx.Linear(3, 2, dtype=jnp.bfloat16, rngs=rngs),
    X,
)
add(nnx.LayerNorm, "plain", lambda rngs: nnx.LayerNorm(3, rngs=rngs), X)
add(nnx.LayerNorm, "no-scale", lambda rngs: nnx.LayerNorm(3, use_scale=False, rngs=rngs), X)

IMAGE = normal(2, 3, 4)
EVALUATES = {"use_running_average": True}
SPREAD = {"scale_init": jax.nn.initializers.normal(), "bias_init": jax.nn.initializers.normal()}

add(nnx.BatchNorm, "trains", lambda rngs: nnx.BatchNorm(3, rngs=rngs), X)
add(nnx.BatchNorm, "evaluates", lambda rngs: nnx.BatchNorm(3, rngs=rngs, **EVALUATES), X)
add(nnx.BatchNorm, "momentum", lambda rngs: nnx.BatchNorm(3, momentum=0.5, rngs=rngs, **SPREAD), X)
add(nnx.RMSNorm, "plain", lambda rngs: nnx.RMSNorm(3, rngs=rngs), X)
add(nnx.RMSNorm, "rows", lambda rngs: nnx.RMSNorm(3, reduction_axes=0, rngs=rngs), X)
add(nnx.GroupNorm, "groups", lambda rngs: nnx.GroupNorm(4, 2, rngs=rngs), IMAGE)
add(nnx.GroupNorm, "sizes", lambda rngs: nnx.GroupNorm(4, None, 4, rngs=rngs, **SPREAD), IMAGE)
add(nnx.InstanceNorm, "plain", lambda rngs: nnx.InstanceNorm(4, rngs=rngs), IMAGE)
add(
    nnx.InstanceNorm,
    "axis",
    lambda rngs: nnx.InstanceNorm(3, feature_axes=1, rngs=rngs, **SPREAD),
    IMAGE,
)


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    """A layer to wrap in another."""
    return nnx.Linear(3, 5, rngs=rngs)


# Not mapped: the two below write the parameters, which the test of vmap broadcasts.
add(
    nnx.SpectralNorm,
    "plain",
    lambda rngs: nnx.SpectralNorm(linear(rngs), rngs=rngs),
    X,
    mapped=False,
)
add(
    nnx.SpectralNorm,
    "keeps",
    lambda rngs: nnx.SpectralNorm(linear(rngs), n_steps=3, update_stats=False, rngs=rngs),
    X,
    mapped=False,
)
add(nnx.WeightNorm, "plain", lambda rngs: nnx.WeightNorm(linear(rngs), rngs=rngs), X, mapped=False)
add(
    nnx.WeightNorm,
    "no-scale",
    lambda rngs: nnx.WeightNorm(linear(rngs), use_scale=False, feature_axes=0, rngs=rngs),
    X,
    mapped=False,
)
add(nnx.Dropout, "plain", lambda rngs: nnx.Dropout(0.5, rngs=rngs), X)
add(nnx.Dropout, "rows", lambda rngs: nnx.Dropout(0.3, broadcast_dims=(-1,), rngs=rngs), X)
add(nnx.Dropout, "still", lambda rngs: nnx.Dropout(0.5, deterministic=True, rngs=rngs), X)
add(nnx.Dropout, "no-keys", lambda rngs: nnx.Dropout(0.5), X, rngs=jax.random.key(0))
add(nnx.LoRA, "alone", lambda rngs: nnx.LoRA(3, 2, 5, rngs=rngs), X)
add(nnx.LoRA, "base", lambda rngs: nnx.LoRA(3, 2, 5, base_module=linear(rngs), rngs=rngs), X)
add(nnx.LoRALinear, "plain", lambda rngs: nnx.LoRALinear(3, 5, lora_rank=2, rngs=rngs), X)
add(
    nnx.LoRALinear,
    "random",
    lambda rngs: nnx.LoRALinear(
        3, 5, lora_rank=2, b_initializer=jax.nn.initializers.normal(), rngs=rngs
    ),
    X,
)

add(nnx.LinearGeneral, "plain", lambda rngs: nnx.LinearGeneral(3, (2, 5), rngs=rngs), X)
add(
    nnx.LinearGeneral,
    "axes-and-batch",
    lambda rngs: nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), batch_axis={0: 2}, rngs=rngs),
    normal(2, 5, 2, 3),
)
add(nnx.Einsum, "plain", lambda rngs: nnx.Einsum("ab,bc->ac", (3, 5), (5,), rngs=rngs), X)
add(nnx.Einsum, "no-bias", lambda rngs: nnx.Einsum("...b,bcd->c...d", (3, 2, 4), rngs=rngs), X)
add(nnx.Embed, "plain", lambda rngs: nnx.Embed(5, 3, rngs=rngs), jnp.array([[0, 4], [2, 2]]))
add(
    nnx.Embed,
    "bfloat16",
    lambda rngs: nnx.Embed(5, 3, dtype=jnp.bfloat16, rngs=rngs),
    jnp.array([1, 3]),
)
IMAGE = normal(2, 5, 4, 3)
add(nnx.Conv, "plain", lambda rngs: nnx.Conv(3, 2, (3, 3), rngs=rngs), IMAGE)
add(
    nnx.Conv,
    "circular",
    lambda rngs: nnx.Conv(3, 6, 3, 2, padding="CIRCULAR", feature_group_count=3, rngs=rngs),
    IMAGE,
)
add(
    nnx.Conv,
    "causal-masked",
    lambda rngs: nnx.Conv(3, 2, 2, padding="CAUSAL", mask=normal(2, 3, 2) > 0, rngs=rngs),
    IMAGE[0, 0],
)
add(nnx.ConvTranspose, "plain", lambda rngs: nnx.ConvTranspose(3, 2, (3, 3), rngs=rngs), IMAGE)
add(
    nnx.ConvTranspose,
    "circular",
    lambda rngs: nnx.ConvTranspose(
        3, 2, (3, 2), 2, padding="CIRCULAR", transpose_kernel=True, rngs=rngs
    ),
    IMAGE,
)
add(nnx.PReLU, "plain", lambda rngs: nnx.PReLU(), X)
add(nnx.PReLU, "bfloat16", lambda rngs: nnx.PReLU(0.3, dtype=jnp.bfloat16), X)

SEQUENCE = normal(2, 5, 4)
CARRY = normal(4, 5, seed=1)

add(
    nnx.MultiHeadAttention,
    "self",
    lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
    SEQUENCE,
)
add(
    nnx.MultiHeadAttention,
    "grouped",
    lambda rngs: nnx.MultiHeadAttention(
        4, 4, qkv_features=8, num_kv_heads=2, decode=False, rngs=rngs
    ),
    SEQUENCE,
)
for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell):
    add(
        cell,
        "plain",
        lambda rngs, cell=cell: cell(3, 5, rngs=rngs),
        (CARRY, CARRY),
        X,
        mapped=False,
    )
for cell in (nnx.GRUCell, nnx.SimpleCell):
    add(cell, "plain", lambda rngs, cell=cell: cell(3, 5, rngs=rngs), CARRY, X, mapped=False)
add(nnx.RNN, "lstm", lambda rngs: nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs)), SEQUENCE)
add(
    nnx.Bidirectional,
    "gru",
    lambda rngs: nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(4, 3, rngs=rngs)), nnx.RNN(nnx.GRUCell(4, 3, rngs=rngs))
    ),
    SEQUENCE,
)


def decoder(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
    """Attention with a cache that has room for a few calls."""
    layer = nnx.MultiHeadAttention(2, 4, num_kv_heads=1, decode=True, rngs=rngs)
    layer.init_cache((SEQUENCE.shape[0], 4 * SEQUENCE.shape[1], 4))
    return layer


def recurrent(rngs: nnx.Rngs, **options: Any) -> nnx.RNN:
    """A recurrent network over a sequence."""
    return nnx.RNN(nnx.GRUCell(4, 3, rngs=rngs), **options)


add(nnx.MultiHeadAttention, "decodes", decoder, SEQUENCE)

add(nnx.RoPE, "plain", lambda rngs: nnx.RoPE(), SEQUENCE)
add(nnx.RoPE, "tables", lambda rngs: nnx.RoPE(100.0, SEQUENCE.shape[-1], 64), SEQUENCE)
add(
    nnx.MultiHeadAttention,
    "drops",
    lambda rngs: nnx.MultiHeadAttention(
        2, 4, 16, dropout_rate=0.5, deterministic=False, normalize_qk=True, rngs=rngs
    ),
    SEQUENCE,
    is_causal=True,
)
for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell):
    add(
        cell,
        "hard",
        lambda rngs, cell=cell: cell(3, 5, gate_fn=jax.nn.hard_sigmoid, rngs=rngs),
        (CARRY, CARRY),
        X,
        mapped=False,
    )
for cell in (nnx.GRUCell, nnx.SimpleCell):
    add(
        cell,
        "relu",
        lambda rngs, cell=cell: cell(3, 5, activation_fn=jax.nn.relu, rngs=rngs),
        CARRY,
        X,
        mapped=False,
    )
add(
    nnx.RNN,
    "lengths",
    lambda rngs: recurrent(rngs, reverse=True, keep_order=True, return_carry=True),
    SEQUENCE,
    seq_lengths=jnp.arange(1, SEQUENCE.shape[0] + 1),
)
add(
    nnx.Bidirectional,
    "time-major",
    lambda rngs: nnx.Bidirectional(
        recurrent(rngs), recurrent(rngs), time_major=True, return_carry=True, merge_fn=jnp.add
    ),
    SEQUENCE,
)


def residual(rngs: nnx.Rngs) -> nnx.Sequential:
    """A layer with parameters, statistics and keys, to be stacked."""
    return nnx.Sequential(
        nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
    )


add(nnx.Stack, "unrolled", lambda rngs: nnx.Stack(residual, 3, rngs=rngs, unroll=3), X)
add(nnx.Stack, "remat", lambda rngs: nnx.Stack(residual, 2, rngs=rngs, remat=True), X)
