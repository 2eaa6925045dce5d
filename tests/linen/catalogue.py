"""Every public layer of Linen, in at least two configurations: what the tests of layers run over.

An entry builds its layer from a namespace, Linnet's ``linen`` or Flax's, so that one table says
what is run on both. The tests fail for a public layer that has no entry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.digest import digest
from tests.models import normal


@dataclasses.dataclass(frozen=True)
class Entry:
    """One configuration of a layer.

    Args:
      layer: the name of the class.
      name: what is special about this configuration.
      build: makes the layer from the namespace.
      inputs: the positional arguments of a call.
      kwargs: its keyword arguments.
      mutable: the collections that a call may write.
      init: positional arguments of ``init`` where they are others than those of a call.
      method: the name of the method; by default the layer is called.
      mapped: whether the last input may be mapped over a new leading axis.
    """

    layer: str
    name: str
    build: Callable[[Any], Any]
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    mutable: tuple[str, ...] = ()
    init: tuple[Any, ...] | None = None
    method: str | None = None
    mapped: bool = True

    def __str__(self) -> str:
        return f"{self.layer}-{self.name}"

    def variables(self, nn: Any) -> Any:
        """What ``init`` makes from seed 0."""
        inputs = self.inputs if self.init is None else self.init
        return self.build(nn).init(KEYS, *inputs, method=self.method, **self.kwargs)

    def apply(self, nn: Any, variables: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The output and the collections that were written."""
        return self.build(nn).apply(
            variables,
            *(inputs or self.inputs),
            rngs={"dropout": jax.random.key(7), "carry": jax.random.key(8)},
            mutable=list(self.mutable),
            method=self.method,
            **{**self.kwargs, **kwargs},
        )


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
CATALOGUE: list[Entry] = []


def add(
    layer: str,
    name: str,
    build: Any,
    *inputs: Any,
    mutable: tuple[str, ...] = (),
    init: tuple[Any, ...] | None = None,
    method: str | None = None,
    mapped: bool = True,
    **kwargs: Any,
) -> None:
    """Adds one configuration."""
    CATALOGUE.append(Entry(layer, name, build, inputs, kwargs, mutable, init, method, mapped))


BF16 = jnp.bfloat16
X = normal(4, 3)
IMAGE = normal(2, 5, 4, 3)
SEQUENCE = normal(2, 5, 4)
NOISE = jax.nn.initializers.normal()
SPREAD = {"scale_init": NOISE, "bias_init": NOISE}


# Contractions.

add("Dense", "plain", lambda nn: nn.Dense(5), X)
add("Dense", "no-bias", lambda nn: nn.Dense(2, use_bias=False), X)
add("Dense", "bfloat16", lambda nn: nn.Dense(2, dtype=BF16), X)
add("Dense", "half-params", lambda nn: nn.Dense(2, param_dtype=jnp.float16), X)
add("Dense", "one-axis", lambda nn: nn.Dense(2, bias_init=NOISE), X[0])
add("Dense", "integers", lambda nn: nn.Dense(2), jnp.arange(6).reshape(2, 3))
add(
    "Dense",
    "own-dot-general",
    lambda nn: nn.Dense(2, dot_general=functools.partial(jax.lax.dot_general)),
    X,
)
add("DenseGeneral", "plain", lambda nn: nn.DenseGeneral((2, 5)), X)
add("DenseGeneral", "axes", lambda nn: nn.DenseGeneral(4, axis=(-2, -1)), normal(6, 2, 3))
add("DenseGeneral", "first-axes", lambda nn: nn.DenseGeneral((4, 2), axis=(1, 0)), normal(6, 2, 3))
add(
    "DenseGeneral",
    "batch",
    lambda nn: nn.DenseGeneral(4, axis=(-2, -1), batch_dims=0, bias_init=NOISE),
    normal(2, 5, 2, 3),
)
add("DenseGeneral", "bfloat16", lambda nn: nn.DenseGeneral(4, dtype=BF16, use_bias=False), X)
add("Einsum", "plain", lambda nn: nn.Einsum((3, 5), "ab,bc->ac"), X)
add(
    "Einsum",
    "ellipsis",
    lambda nn: nn.Einsum((3, 2, 4), "...b,bcd->c...d", bias_init=NOISE),
    X,
)
add("Einsum", "at-the-call", lambda nn: nn.Einsum((8, 2, 4)), normal(3, 5, 2), "nta,hab->nthb")
add("Einsum", "no-bias", lambda nn: nn.Einsum((3, 5), "ab,bc->ac", use_bias=False, dtype=BF16), X)
add("Embed", "plain", lambda nn: nn.Embed(5, 3), jnp.array([[0, 4], [2, 2]]))
add("Embed", "bfloat16", lambda nn: nn.Embed(5, 3, dtype=BF16), jnp.array([1, 3]))
add("Embed", "one-row", lambda nn: nn.Embed(1, 3), jnp.array([0, 0]))
add("Embed", "attends", lambda nn: nn.Embed(5, 4), SEQUENCE, method="attend")

# Convolutions.

add("Conv", "plain", lambda nn: nn.Conv(2, (3, 3)), IMAGE)
add("Conv", "no-batch", lambda nn: nn.Conv(2, (3, 3), padding="VALID"), IMAGE[0])
add("Conv", "two-batches", lambda nn: nn.Conv(2, 3, use_bias=False), IMAGE)
add("Conv", "circular", lambda nn: nn.Conv(6, (3,), 2, "CIRCULAR", feature_group_count=3), IMAGE)
add("Conv", "reflect", lambda nn: nn.Conv(2, (3, 2), padding="REFLECT", kernel_dilation=2), IMAGE)
add(
    "Conv",
    "causal-masked",
    lambda nn: nn.Conv(2, (2,), padding="CAUSAL", mask=normal(2, 3, 2) > 0),
    IMAGE[0, 0],
    mapped=False,
)
add(
    "Conv",
    "numbers",
    lambda nn: nn.Conv(2, (3, 2), (2, 1), [(1, 2), 1], (2, 1), (1, 2), bias_init=NOISE),
    IMAGE,
)
add("Conv", "bfloat16", lambda nn: nn.Conv(2, (3, 3), dtype=BF16), IMAGE)
add("ConvLocal", "plain", lambda nn: nn.ConvLocal(2, (3, 3)), IMAGE)
add(
    "ConvLocal",
    "strides",
    lambda nn: nn.ConvLocal(4, (3, 2), (2, 1), "VALID", bias_init=NOISE),
    IMAGE,
)
add("ConvLocal", "circular", lambda nn: nn.ConvLocal(2, (3,), padding="CIRCULAR"), IMAGE[0])
add("ConvTranspose", "plain", lambda nn: nn.ConvTranspose(2, (3, 3)), IMAGE)
add(
    "ConvTranspose",
    "circular",
    lambda nn: nn.ConvTranspose(2, (3, 2), (2, 2), "CIRCULAR", transpose_kernel=True),
    IMAGE,
)
add(
    "ConvTranspose",
    "strides",
    lambda nn: nn.ConvTranspose(4, (3,), (2,), "VALID", (2,), bias_init=NOISE),
    IMAGE[0],
)
add("ConvTranspose", "no-batch", lambda nn: nn.ConvTranspose(2, (2, 2), (2, 2)), IMAGE[0])

# Normalisation.

STATS = ("batch_stats",)
TRAINS = {"use_running_average": False}
add("BatchNorm", "trains", lambda nn: nn.BatchNorm(**TRAINS), X, mutable=STATS)
add("BatchNorm", "evaluates", lambda nn: nn.BatchNorm(), X, use_running_average=True)
add(
    "BatchNorm",
    "momentum",
    lambda nn: nn.BatchNorm(momentum=0.5, use_fast_variance=False, **TRAINS, **SPREAD),
    IMAGE,
    mutable=STATS,
)
add(
    "BatchNorm",
    "masked",
    lambda nn: nn.BatchNorm(axis=1, dtype=BF16, **TRAINS),
    IMAGE,
    mutable=STATS,
    mask=IMAGE > -1,
    mapped=False,
)
add("LayerNorm", "plain", lambda nn: nn.LayerNorm(), X)
add("LayerNorm", "no-scale", lambda nn: nn.LayerNorm(use_scale=False, bias_init=NOISE), X)
add("LayerNorm", "axes", lambda nn: nn.LayerNorm(reduction_axes=(1, 2), **SPREAD), SEQUENCE)
add(
    "LayerNorm",
    "two-feature-axes",
    lambda nn: nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1), **SPREAD),
    SEQUENCE,
)
add("LayerNorm", "half-input", lambda nn: nn.LayerNorm(), X.astype(BF16))
add("LayerNorm", "bfloat16", lambda nn: nn.LayerNorm(dtype=BF16, param_dtype=BF16), X)
add(
    "LayerNorm",
    "half-reductions",
    lambda nn: nn.LayerNorm(dtype=BF16, force_float32_reductions=False),
    X.astype(BF16),
)
add("LayerNorm", "masked", lambda nn: nn.LayerNorm(), X, mask=X > -1, mapped=False)
add("RMSNorm", "plain", lambda nn: nn.RMSNorm(), X)
add("RMSNorm", "rows", lambda nn: nn.RMSNorm(reduction_axes=0, scale_init=NOISE), X)
add("RMSNorm", "bfloat16", lambda nn: nn.RMSNorm(dtype=BF16), X)
add("GroupNorm", "groups", lambda nn: nn.GroupNorm(2), SEQUENCE)
add("GroupNorm", "sizes", lambda nn: nn.GroupNorm(None, 4, **SPREAD), SEQUENCE)
add("GroupNorm", "axes", lambda nn: nn.GroupNorm(2, reduction_axes=(-2, -1)), normal(2, 3, 5, 4))
add("InstanceNorm", "plain", lambda nn: nn.InstanceNorm(), SEQUENCE)
add("InstanceNorm", "axis", lambda nn: nn.InstanceNorm(feature_axes=1, **SPREAD), SEQUENCE)
UPDATES = {"update_stats": True}
add("SpectralNorm", "plain", lambda nn: nn.SpectralNorm(nn.Dense(5)), X, mutable=STATS, **UPDATES)
add(
    "SpectralNorm",
    "keeps",
    lambda nn: nn.SpectralNorm(nn.Conv(4, (3, 3)), n_steps=3, collection_name="norms"),
    IMAGE,
    update_stats=False,
)
add("WeightNorm", "plain", lambda nn: nn.WeightNorm(nn.Dense(5)), X)
add(
    "WeightNorm",
    "no-scale",
    lambda nn: nn.WeightNorm(nn.Conv(4, (3, 3)), use_scale=False, feature_axes=(-2, -1)),
    IMAGE,
)
add(
    "WeightNorm",
    "all-variables",
    lambda nn: nn.WeightNorm(nn.Dense(5), feature_axes=None, variable_filter=None),
    X,
)

# Attention.

MASK = jnp.tril(jnp.ones((1, 1, 5, 5)))
add("MultiHeadDotProductAttention", "self", lambda nn: nn.MultiHeadDotProductAttention(2), SEQUENCE)
add(
    "MultiHeadDotProductAttention",
    "cross",
    lambda nn: nn.MultiHeadDotProductAttention(2, qkv_features=8, out_features=6, use_bias=False),
    SEQUENCE,
    normal(2, 3, 7),
    normal(2, 3, 6),
    mapped=False,
)
add(
    "MultiHeadDotProductAttention",
    "masked",
    lambda nn: nn.MultiHeadDotProductAttention(2, out_kernel_init=NOISE, out_bias_init=NOISE),
    SEQUENCE,
    mask=MASK,
)
add("MultiHeadAttention", "self", lambda nn: nn.MultiHeadAttention(4, bias_init=NOISE), SEQUENCE)
add(
    "MultiHeadAttention",
    "drops",
    lambda nn: nn.MultiHeadAttention(2, dropout_rate=0.5, deterministic=False, normalize_qk=True),
    SEQUENCE,
)
add(
    "MultiHeadAttention",
    "drops-each",
    lambda nn: nn.MultiHeadAttention(2, dropout_rate=0.3, broadcast_dropout=False),
    SEQUENCE,
    deterministic=False,
    dropout_rng=jax.random.key(3),
)
add(
    "MultiHeadAttention",
    "decodes",
    lambda nn: nn.MultiHeadAttention(2, decode=True),
    SEQUENCE[:, :1],
    init=(SEQUENCE,),
    mutable=("cache",),
)
add(
    "MultiHeadAttention",
    "sows",
    lambda nn: nn.MultiHeadAttention(2),
    SEQUENCE,
    mutable=("intermediates",),
    sow_weights=True,
)
add("MultiHeadAttention", "bfloat16", lambda nn: nn.MultiHeadAttention(2, dtype=BF16), SEQUENCE)
add("SelfAttention", "plain", lambda nn: nn.SelfAttention(2), SEQUENCE)
add(
    "SelfAttention",
    "still",
    lambda nn: nn.SelfAttention(2, dropout_rate=0.5),
    SEQUENCE,
    MASK,
    True,
    mapped=False,
)

# Recurrence.

CARRY = normal(4, 5, seed=1)
PAIR = (CARRY, normal(4, 5, seed=2))
for cell in ("LSTMCell", "OptimizedLSTMCell"):
    add(cell, "plain", lambda nn, cell=cell: getattr(nn, cell)(5), PAIR, X)
    add(
        cell,
        "hard",
        lambda nn, cell=cell: getattr(nn, cell)(5, jax.nn.hard_sigmoid, bias_init=NOISE),
        PAIR,
        X,
    )
    add(cell, "bfloat16", lambda nn, cell=cell: getattr(nn, cell)(5, dtype=BF16), PAIR, X)
for cell in ("GRUCell", "MGUCell", "SimpleCell"):
    add(cell, "plain", lambda nn, cell=cell: getattr(nn, cell)(5), CARRY, X)
    add(
        cell,
        "relu",
        lambda nn, cell=cell: getattr(nn, cell)(5, activation_fn=jax.nn.relu),
        CARRY,
        X,
    )
add("GRUCell", "bias", lambda nn: nn.GRUCell(5, bias_init=NOISE), CARRY, X)
add("MGUCell", "no-reset", lambda nn: nn.MGUCell(5, reset_gate=False), CARRY, X)
add("SimpleCell", "residual", lambda nn: nn.SimpleCell(5, residual=True), CARRY, X)
MAPS = (normal(2, 5, 4, 6, seed=1), normal(2, 5, 4, 6, seed=2))
add("ConvLSTMCell", "plain", lambda nn: nn.ConvLSTMCell(6, (3, 3)), MAPS, IMAGE)
add("ConvLSTMCell", "no-bias", lambda nn: nn.ConvLSTMCell(6, (2, 3), use_bias=False), MAPS, IMAGE)
add("RNN", "lstm", lambda nn: nn.RNN(nn.LSTMCell(3)), SEQUENCE)
add(
    "RNN",
    "lengths",
    lambda nn: nn.RNN(nn.GRUCell(3), reverse=True, keep_order=True, return_carry=True),
    SEQUENCE,
    seq_lengths=jnp.array([2, 5]),
)
add("RNN", "reverse", lambda nn: nn.RNN(nn.GRUCell(3), reverse=True), SEQUENCE)
add(
    "RNN",
    "time-major",
    lambda nn: nn.RNN(nn.SimpleCell(3), time_major=True, unroll=2),
    SEQUENCE,
    return_carry=True,
)
add(
    "RNN",
    "drawn-carry",
    lambda nn: nn.RNN(nn.LSTMCell(3, carry_init=NOISE)),
    SEQUENCE,
    init_key=jax.random.key(5),
)
add(
    "RNN",
    "images",
    lambda nn: nn.RNN(nn.ConvLSTMCell(2, (3,)), return_carry=True),
    IMAGE,
)
add(
    "Bidirectional",
    "gru",
    lambda nn: nn.Bidirectional(nn.RNN(nn.GRUCell(3)), nn.RNN(nn.GRUCell(3))),
    SEQUENCE,
)
add(
    "Bidirectional",
    "lengths",
    lambda nn: nn.Bidirectional(
        nn.RNN(nn.LSTMCell(3)), nn.RNN(nn.LSTMCell(3)), jnp.add, return_carry=True
    ),
    SEQUENCE,
    seq_lengths=jnp.array([2, 5]),
)

# The rest.

add("Dropout", "plain", lambda nn: nn.Dropout(0.5, deterministic=False), X)
add("Dropout", "rows", lambda nn: nn.Dropout(0.3, (-1,)), X, deterministic=False)
add("Dropout", "still", lambda nn: nn.Dropout(0.5), X, deterministic=True)
add("Dropout", "key", lambda nn: nn.Dropout(0.5), X, False, jax.random.key(3), mapped=False)
add("Dropout", "all", lambda nn: nn.Dropout(1.0), X, deterministic=False)
add("PReLU", "plain", lambda nn: nn.PReLU(), X)
add("PReLU", "half-input", lambda nn: nn.PReLU(negative_slope_init=0.3), X.astype(BF16))
add("Sequential", "plain", lambda nn: nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(2)]), X)
add(
    "Sequential",
    "several-outputs",
    lambda nn: nn.Sequential(
        [nn.Dense(4), lambda x: (x, x), lambda x, y: {"inputs": x * y}, nn.Dense(2)]
    ),
    X,
)
META = ("_overwrite_with_gradient",)
for op in ("Fp8DotGeneralOp", "Fp8DirectDotGeneralOp", "NANOOFp8DotGeneralOp"):
    add(
        op,
        "dense",
        lambda nn, op=op: nn.Dense(16, dot_general_cls=getattr(nn, op)),
        normal(16, 16),
        mutable=META,
    )
    add(
        op,
        "short-history",
        lambda nn, op=op: nn.Dense(
            16,
            dot_general_cls=functools.partial(getattr(nn, op), amax_history_length=3),
            dtype=BF16,
        ),
        normal(16, 16) * 100,
        mutable=META,
    )
for equation in ("ab,bc->ac", "ab,cb->ca"):
    add(
        "Fp8Einsum",
        equation[:5],
        lambda nn: nn.Fp8Einsum(amax_history_length=4),
        equation,
        normal(16, 16),
        normal(16, 16, seed=1),
        mutable=META,
        mapped=False,
    )


def leaves_of(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their paths, sorted."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in found}


def summary(tree: Any) -> dict[str, list[Any]]:
    """For each array its shape, dtype and a digest of its values."""
    return {
        path: [list(x.shape), str(x.dtype), digest(jnp.asarray(x, jnp.float32))]
        for path, x in leaves_of(tree).items()
    }


def gradients(entry: Entry, nn: Any, variables: Any) -> Any:
    """Those of the sum of the squared outputs, in the variables."""

    def loss(variables: Any) -> Any:
        out, _ = entry.apply(nn, variables)
        return sum((jnp.asarray(x, jnp.float32) ** 2).sum() for x in jax.tree.leaves(out))

    return jax.grad(loss, allow_int=True)(variables)


def traced(entry: Entry, nn: Any, variables: Any) -> Any:
    """The traced program of a call, with its arrays as arguments."""
    flags, arrays = {}, {}
    for name, value in entry.kwargs.items():
        (arrays if isinstance(value, jax.Array) else flags)[name] = value
    keys = {"dropout": jax.random.key(7)}
    inputs = [x if isinstance(x, (str, bool)) else None for x in entry.inputs]
    given = [x for x in entry.inputs if not isinstance(x, (str, bool))]

    def call(variables: Any, given: Any, keys: Any, arrays: Any) -> Any:
        values = iter(given)
        args = [next(values) if x is None else x for x in inputs]
        return entry.build(nn).apply(
            variables,
            *args,
            rngs=keys,
            mutable=list(entry.mutable),
            method=entry.method,
            **arrays,
            **flags,
        )

    return jax.make_jaxpr(call)(variables, given, keys, arrays)
