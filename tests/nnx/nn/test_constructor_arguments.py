"""Every constructor argument of every layer has an effect: on its Variables or on what it computes.

An argument that a layer takes and forgets, and one that is missing in the table below, fails.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from linnet import nnx
from tests.nnx.nn.catalogue import CATALOGUE
from tests.nnx.nn.flax_cases import doubled

HALF = jnp.bfloat16
ONES = jax.nn.initializers.ones
NOTE = {"note": "a note"}


def double_dot(*args, **kwargs):
    return 2 * lax.dot_general(*args, **kwargs)


class NoisyCell(nnx.GRUCell):
    """A cell that draws in every step."""

    def __call__(self, carry, inputs):
        carry, y = super().__call__(carry, inputs)
        return carry, y + jax.random.normal(self.rngs(), y.shape)


def sharded(rngs):
    metadata = {"out_sharding": (None, "model"), "eager_sharding": False}
    return nnx.Linear(3, 3, kernel_metadata=metadata, rngs=rngs)


@dataclasses.dataclass
class Made:
    """An object that is made anew in every trace."""

    make: Callable[[], Any]


def made(layer, *args, **kwargs):
    return Made(lambda: layer(*args, rngs=nnx.Rngs(0), **kwargs))


def network(cell):
    return Made(lambda: nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0))))


# What an argument of this name is varied to, where a row says nothing else.
VALUES: dict[str, Any] = {
    "activation_fn": jax.nn.relu,
    "axis_index_groups": [[0], [1]],
    "axis_name": "mapped",
    "bias_init": ONES,
    "deterministic": True,
    "dot_general": double_dot,
    "dot_general_cls": lambda: double_dot,
    "dtype": HALF,
    "epsilon": 0.1,
    "feature_axes": 1,
    "in_features": 5,
    "kernel_dilation": 2,
    "kernel_init": ONES,
    "num_features": 5,
    "out_features": 5,
    "param_dtype": HALF,
    "precision": "highest",
    "preferred_element_type": jnp.float32,
    "promote_dtype": doubled,
    "recurrent_kernel_init": ONES,
    "reduction_axes": (1, 2),
    "return_carry": True,
    "scale_init": jax.nn.initializers.zeros,
    "time_major": True,
    "use_bias": False,
    "use_fast_variance": False,
    "use_scale": False,
}


# And what it is varied beside.
BESIDE: dict[str, dict[str, Any]] = {"preferred_element_type": {"dtype": HALF}}


@dataclasses.dataclass
class Row:
    """How a layer is built and called, what its arguments are varied to, and beside what else."""

    built: dict[str, Any]
    inputs: tuple[Any, ...]
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)

    def value(self, name: str) -> Any:
        """Another value than the one the layer is built with."""
        if name in self.values:
            return self.values[name]
        if name.endswith("metadata"):
            return NOTE
        return Made(lambda: nnx.Rngs(1)) if name == "rngs" else VALUES[name]


def ones(*shape):
    return jnp.ones(shape)


IMAGE = ones(2, 4, 4, 3)
NORM = {
    "axis_index_groups": {"axis_name": "mapped"},
    "rngs": {"scale_init": jax.nn.initializers.normal()},
}
WEIGHTS = {"dropout_rate": 0.5, "deterministic": False}


def cell_row(**values):
    return Row(
        {"in_features": 3, "hidden_features": 4},
        (ones(2, 3),),
        {
            "hidden_features": 5,
            "gate_fn": jax.nn.hard_sigmoid,
            "carry_init": ONES,
            "keep_rngs": True,
            **values,
        },
        call=lambda cell, x: cell(cell.initialize_carry(x.shape, nnx.Rngs(0)), x),
    )


def with_axis(layer, *inputs):
    """Calls a layer for one entry of a mapped axis."""
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    double = jax.tree.map(lambda x: jnp.stack([x, x]), (nnx.state(layer, nnx.BatchStat), inputs))
    params = nnx.state(layer, nnx.Param)
    mapped = nnx.merge(nnx.graphdef(layer), params, double[0])
    run = nnx.vmap(lambda layer, *inputs: layer(*inputs), in_axes=(axes, 0), axis_name="mapped")
    return run(mapped, *double[1])


ROWS: dict[type, Row] = {
    nnx.Linear: Row({"in_features": 3, "out_features": 4}, (ones(2, 3),)),
    nnx.LinearGeneral: Row(
        {"in_features": 3, "out_features": 4},
        (ones(3, 3),),
        {"axis": 0, "batch_axis": {0: 3}},
    ),
    nnx.Einsum: Row(
        {"einsum_str": "ab,bc->ac", "kernel_shape": (3, 4), "bias_shape": (4,)},
        (ones(2, 3),),
        {
            "einsum_str": "ab,bc->ca",
            "kernel_shape": (5, 4),
            "bias_shape": None,
            "einsum_op": lambda *args, **kwargs: 2 * jnp.einsum(*args, **kwargs),
        },
    ),
    nnx.Embed: Row(
        {"num_embeddings": 3, "features": 4},
        (jnp.arange(2),),
        {"num_embeddings": 5, "features": 5, "embedding_init": ONES},
    ),
    nnx.Conv: Row(
        {"in_features": 3, "out_features": 3, "kernel_size": (2, 2)},
        (IMAGE,),
        {
            "kernel_size": (3, 3),
            "strides": 2,
            "padding": "VALID",
            "input_dilation": 2,
            "feature_group_count": 3,
            "mask": jnp.zeros((2, 2, 3, 3)),
            "conv_general_dilated": lambda *a, **k: 2 * lax.conv_general_dilated(*a, **k),
        },
        {"input_dilation": {"padding": "VALID"}},
    ),
    nnx.ConvTranspose: Row(
        {"in_features": 3, "out_features": 3, "kernel_size": (2, 2)},
        (IMAGE,),
        {
            "kernel_size": (3, 3),
            "strides": 2,
            "padding": "VALID",
            "mask": jnp.zeros((2, 2, 3, 3)),
            "transpose_kernel": True,
        },
    ),
    nnx.BatchNorm: Row(
        {"num_features": 3},
        (ones(2, 3, 3),),
        {"use_running_average": True, "axis": 1, "momentum": 0.5},
        NORM,
        call=with_axis,
    ),
    nnx.LayerNorm: Row({"num_features": 3}, (ones(2, 3, 3),), beside=NORM, call=with_axis),
    nnx.RMSNorm: Row(
        {"num_features": 3},
        (ones(2, 3, 3),),
        beside=NORM,
        without_effect=("use_fast_variance",),  # the mean is taken as 0, so there is one way only
        call=with_axis,
    ),
    nnx.GroupNorm: Row(
        {"num_features": 4, "num_groups": 2},
        (ones(2, 3, 4),),
        {"num_groups": 4, "group_size": 4, "reduction_axes": -1},
        {**NORM, "group_size": {"num_groups": None, "group_size": 2}},
        call=with_axis,
    ),
    nnx.InstanceNorm: Row({"num_features": 3}, (ones(2, 3, 3),), beside=NORM, call=with_axis),
    nnx.SpectralNorm: Row(
        {"layer_instance": made(nnx.Linear, 3, 4)},
        (ones(2, 3),),
        {
            "layer_instance": made(nnx.Linear, 3, 5),
            "n_steps": 2,
            "error_on_non_matrix": True,
            "update_stats": False,
        },
        {"error_on_non_matrix": {"layer_instance": made(nnx.Conv, 3, 4, 2)}},
    ),
    nnx.WeightNorm: Row(
        {"layer_instance": made(nnx.Linear, 3, 4)},
        (ones(2, 3),),
        {
            "layer_instance": made(nnx.Linear, 3, 5),
            "feature_axes": 0,
            "variable_filter": nnx.PathContains("bias"),
        },
        {"rngs": {"scale_init": jax.nn.initializers.normal()}},
    ),
    nnx.Dropout: Row(
        {"rate": 0.5},
        (ones(2, 3),),
        {"rate": 0.3, "broadcast_dims": (0,), "rng_collection": "noise"},
        {"rng_collection": {"rngs": Made(lambda: nnx.Rngs(0, noise=1))}},
    ),
    nnx.MultiHeadAttention: Row(
        {"num_heads": 4, "in_features": 8},
        (ones(2, 3, 8), ones(2, 3, 8), ones(2, 3, 8)),
        {
            "num_heads": 2,
            "in_features": 4,
            "qkv_features": 16,
            "num_kv_heads": 2,
            "in_kv_features": 5,
            "broadcast_dropout": False,
            "dropout_rate": 0.5,
            "out_kernel_init": ONES,
            "out_bias_init": ONES,
            "attention_fn": lambda query, key, value, **_: query,
            "decode": True,
            "normalize_qk": True,
            "qkv_promote_dtype": doubled,
            "out_promote_dtype": doubled,
            "ln_promote_dtype": doubled,
            "qkv_dot_general": double_dot,
            "out_dot_general": double_dot,
            "qkv_dot_general_cls": lambda: double_dot,
            "out_dot_general_cls": lambda: double_dot,
            "keep_rngs": False,
            "implementation": "cudnn",
        },
        {
            "broadcast_dropout": WEIGHTS,
            "deterministic": {"dropout_rate": 0.5, "deterministic": False},
            "dropout_rate": {"deterministic": False},
            "keep_rngs": WEIGHTS,
            "ln_promote_dtype": {"normalize_qk": True},
            "query_ln_scale_metadata": {"normalize_qk": True},
            "key_ln_scale_metadata": {"normalize_qk": True},
        },
    ),
    nnx.LSTMCell: cell_row(),
    nnx.OptimizedLSTMCell: cell_row(),
    nnx.GRUCell: cell_row(),
    nnx.SimpleCell: cell_row(residual=True),
    nnx.RNN: Row(
        {"cell": made(nnx.GRUCell, 3, 4)},
        (ones(3, 3, 3),),
        {
            "cell": made(nnx.SimpleCell, 3, 4),
            "reverse": True,
            "keep_order": True,
            "unroll": 3,
            "state_axes": nnx.StateAxes({...: 0}),
            "broadcast_rngs": nnx.RngState,
        },
        {
            "keep_order": {"reverse": True},
            "broadcast_rngs": {"cell": made(NoisyCell, 3, 4, keep_rngs=True)},
        },
    ),
    nnx.Bidirectional: Row(
        {"forward_rnn": network(nnx.GRUCell), "backward_rnn": network(nnx.GRUCell)},
        (ones(3, 3, 3),),
        {
            "forward_rnn": network(nnx.SimpleCell),
            "backward_rnn": network(nnx.SimpleCell),
            "merge_fn": jnp.add,
        },
    ),
    nnx.LoRA: Row(
        {"in_features": 3, "lora_rank": 2, "out_features": 4},
        (ones(2, 3),),
        {
            "lora_rank": 1,
            "base_module": made(nnx.Linear, 3, 4),
            "a_initializer": ONES,
            "b_initializer": ONES,
            "lora_param_type": nnx.Param,
        },
    ),
    nnx.LoRALinear: Row(
        {"in_features": 3, "out_features": 4, "lora_rank": 2},
        (ones(2, 3),),
        {
            "lora_rank": 1,
            "lora_dtype": HALF,
            "lora_param_dtype": HALF,
            "a_initializer": ONES,
            "b_initializer": ONES,
            "lora_param_type": nnx.Param,
            "lora_promote_dtype": doubled,
        },
    ),
    nnx.PReLU: Row({}, (ones(2),), {"negative_slope_init": 0.5}),
    nnx.RoPE: Row(
        {"embedding_size": 8, "max_seq_len": 8},
        (ones(2, 5, 8),),
        {"theta": 100.0, "embedding_size": 4, "max_seq_len": 6},
        call=lambda layer, x: layer(x[..., : 2 * layer.cached_sin.shape[-1]]),
    ),
    nnx.Stack: Row(
        {"layer_factory": lambda rngs: nnx.Linear(3, 3, rngs=rngs), "length": 3},
        (ones(2, 3),),
        {
            "layer_factory": lambda rngs: nnx.LayerNorm(3, rngs=rngs),
            "length": 2,
            "remat": True,
            "unroll": 3,
            "partition": "layers",
        },
        {"partition": {"layer_factory": sharded}},
    ),
}


def parameters_of(layer: type) -> list[str]:
    found = inspect.signature(layer.__init__).parameters.values()
    return [p.name for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD]


class Failed(Exception):
    """A layer could not be built or called."""


def observed(layer: type, row: Row, given: dict[str, Any]) -> str:
    """All that can be seen of a layer from outside: its Variables, and the trace of a call."""
    if "rngs" in parameters_of(layer):
        given = {"rngs": Made(lambda: nnx.Rngs(0)), **given}
    variables = []

    def build_and_call(*inputs):
        made = {k: v.make() if isinstance(v, Made) else v for k, v in given.items()}
        built = layer(**made)
        for path, leaf in nnx.to_flat_state(nnx.state(built)):
            metadata = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else None
            variables.append((path, type(leaf).__name__, jnp.shape(leaf), metadata))
        return (
            nnx.as_pure(nnx.state(built)),
            row.call(built, *inputs),
            nnx.as_pure(nnx.state(built)),
        )

    try:
        trace = nnx.make_jaxpr(build_and_call)(*row.inputs)
    except (ValueError, NotImplementedError) as error:
        raise Failed(str(error)) from error
    # Addresses differ from run to run, and so does what JAX computes and drops.
    return re.sub(r"0x[0-9a-f]+|\n *_:[^\n]*", "", f"{variables}\n{trace}\n{trace.consts}")


@functools.cache
def unchanged(layer: type) -> str:
    return observed(layer, ROWS[layer], ROWS[layer].built)


CASES = [(layer, name) for layer in ROWS for name in parameters_of(layer)]


def test_every_layer_is_here():
    assert {entry.layer for entry in CATALOGUE} == set(ROWS)


@pytest.mark.parametrize("layer", ROWS)
def test_the_same_arguments_give_the_same_layer(layer):
    row = ROWS[layer]
    assert observed(layer, row, row.built) == unchanged(layer)


@pytest.mark.parametrize(("layer", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_an_argument_has_an_effect(layer, name):
    row = ROWS[layer]
    beside = {**BESIDE.get(name, {}), **row.beside.get(name, {})}
    given = {**row.built, **beside}
    before = observed(layer, row, given) if beside else unchanged(layer)
    try:
        after = observed(layer, row, {**given, name: row.value(name)})
    except Failed as refused:  # an argument may also make a call impossible
        after = str(refused)
    assert (before != after) == (name not in row.without_effect)
