"""One program a layer and option: its outputs, gradients, and state after the call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}

KEY = jax.random.key(7)


def numbers(*shape, dtype=jnp.float32):
    return jax.random.normal(KEY, shape).astype(dtype)


def layers(prefix, table):
    """Enters a program for each layer of a table: how to make it, and what it is called with."""
    for name, (make, *inputs) in table.items():
        run = functools.partial(run_layer, make=make, inputs=inputs)
        run.__name__ = f"{prefix}_{name}"
        program(PROGRAMS)(run)


def run_layer(f, make, inputs):
    """The output, the state after it, and the gradients of what trains and of the first input."""
    nnx = f.nnx
    layer = make(nnx, nnx.Rngs(0, dropout=1))
    call = inputs[-1] if isinstance(inputs[-1], dict) else {}
    inputs = [x for x in inputs if x is not call]
    out = layer(*inputs, **call)

    def loss(layer, x):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(layer(x, *inputs[1:], **call)))

    if not jnp.issubdtype(inputs[0].dtype, jnp.floating):
        return out, nnx.state(layer), nnx.grad(loss)(layer, *inputs[:1])
    argnums = (nnx.DiffState(0, nnx.Param), 1)
    return out, nnx.state(layer), nnx.grad(loss, argnums=argnums)(layer, inputs[0])


def of(name, *args, **options):
    """A layer made with keys."""
    return lambda nnx, rngs: getattr(nnx, name)(*args, **options, rngs=rngs)


ones, normal = jax.nn.initializers.ones, jax.nn.initializers.normal(0.3)
X = numbers(2, 3)
IMAGE = numbers(2, 6, 6, 4)
ROWS = numbers(2, 5, 6)

layers(
    "linear",
    {
        "plain": (of("Linear", 3, 4), X),
        "without_bias": (of("Linear", 3, 4, use_bias=False), X),
        "of_a_vector": (of("Linear", 3, 4), numbers(3)),
        "of_a_batch_of_batches": (of("Linear", 3, 4), numbers(2, 5, 3)),
        "in_bfloat16": (of("Linear", 3, 4, dtype=jnp.bfloat16), X),
        "with_parameters_in_float16": (of("Linear", 3, 4, param_dtype=jnp.float16), X),
        "with_initializers": (of("Linear", 3, 4, kernel_init=normal, bias_init=ones), X),
        "with_precision": (of("Linear", 3, 4, precision="highest"), X),
        "accumulating_in_float32": (
            of("Linear", 3, 4, dtype=jnp.bfloat16, preferred_element_type=jnp.float32),
            X,
        ),
        "general_over_two_axes": (
            of("LinearGeneral", (3, 4), (2, 5), axis=(-2, -1)),
            numbers(2, 3, 4),
        ),
        "general_over_the_first_axis": (of("LinearGeneral", 3, 4, axis=0), numbers(3, 2)),
        "general_with_a_batch_axis": (
            of("LinearGeneral", 3, 4, batch_axis={0: 2}, axis=-1),
            numbers(2, 3),
        ),
        "general_without_bias": (of("LinearGeneral", 3, (2, 2), use_bias=False), X),
        "einsum_with_bias": (of("Einsum", "bi,ijk->bjk", (3, 2, 4), (2, 4)), X),
        "einsum_in_the_call": (of("Einsum", "ab,bc->ac", (3, 4)), X, {"einsum_str": "ab,bc->ca"}),
        "embedding": (of("Embed", 5, 4), jnp.array([[0, 4], [2, 2]])),
        "embedding_in_bfloat16": (of("Embed", 5, 4, dtype=jnp.bfloat16), jnp.array([3, 1])),
        "embedding_of_one_entry": (of("Embed", 1, 4), jnp.array([0, 0])),
        "embedding_with_initializer": (of("Embed", 5, 4, embedding_init=normal), jnp.array([3])),
    },
)


@program(PROGRAMS)
def linear_attending_to_an_embedding(f):
    embed = f.nnx.Embed(5, 4, rngs=f.nnx.Rngs(0))
    return embed.attend(numbers(2, 4)), f.nnx.grad(lambda e: (e.attend(numbers(2, 4)) ** 2).sum())(
        embed
    )


@program(PROGRAMS, raises=TypeError)
def linear_of_wrong_size(f):
    return f.nnx.Linear(3, 4, rngs=f.nnx.Rngs(0))(numbers(2, 5))


@program(PROGRAMS, raises=ValueError)
def embedding_of_floats(f):
    return f.nnx.Embed(3, 4, rngs=f.nnx.Rngs(0))(numbers(2))


@program(PROGRAMS)
def linear_with_promotion_of_its_own(f):
    def promote(args, dtype=None, **options):
        return [None if x is None else x.astype(jnp.float16) for x in args]

    layer = f.nnx.Linear(3, 4, promote_dtype=promote, rngs=f.nnx.Rngs(0))
    return layer(X)


@program(PROGRAMS)
def linear_with_metadata(f):
    layer = f.nnx.Linear(
        3, 4, kernel_metadata={"note": "k"}, bias_metadata={"note": "b"}, rngs=f.nnx.Rngs(0)
    )
    return layer.kernel.note, layer.bias.note, layer(X)


layers(
    "conv",
    {
        "two_axes": (of("Conv", 4, 6, (3, 3)), IMAGE),
        "one_axis": (of("Conv", 6, 3, 3), ROWS),
        "of_one_example": (of("Conv", 4, 6, (3, 3)), numbers(6, 6, 4)),
        "with_stride": (of("Conv", 4, 6, (3, 3), strides=2), IMAGE),
        "valid": (of("Conv", 4, 6, (3, 3), padding="VALID"), IMAGE),
        "causal": (of("Conv", 6, 3, (3,), padding="CAUSAL"), ROWS),
        "circular": (of("Conv", 4, 6, (3, 3), padding="CIRCULAR"), IMAGE),
        "reflect": (of("Conv", 4, 6, (3, 3), padding="REFLECT"), IMAGE),
        "padded_by_numbers": (of("Conv", 4, 6, (3, 3), padding=((1, 2), (0, 1))), IMAGE),
        "padded_by_one_number": (of("Conv", 4, 6, (3, 3), padding=1), IMAGE),
        "in_groups": (of("Conv", 4, 6, (3, 3), feature_group_count=2), IMAGE),
        "depthwise": (of("Conv", 4, 8, (3, 3), feature_group_count=4, use_bias=False), IMAGE),
        "dilated": (of("Conv", 4, 6, (3, 3), kernel_dilation=2), IMAGE),
        "with_dilated_input": (of("Conv", 4, 6, (3, 3), input_dilation=2, padding=1), IMAGE),
        "with_a_mask": (
            of("Conv", 6, 3, (2,), mask=jnp.tile(jnp.array([1.0, 0])[:, None, None], (1, 6, 3))),
            ROWS,
        ),
        "in_bfloat16": (of("Conv", 4, 6, (3, 3), dtype=jnp.bfloat16), IMAGE),
        "transposed": (of("ConvTranspose", 4, 6, (3, 3), strides=(2, 2)), IMAGE),
        "transposed_valid": (of("ConvTranspose", 4, 6, (2, 2), padding="VALID"), IMAGE),
        "transposed_circular": (
            of("ConvTranspose", 6, 3, (3,), strides=2, padding="CIRCULAR"),
            ROWS,
        ),
        "transposed_kernel": (of("ConvTranspose", 4, 6, (3, 3), transpose_kernel=True), IMAGE),
        "transposed_dilated": (of("ConvTranspose", 6, 3, (3,), kernel_dilation=2), ROWS),
    },
)


@program(PROGRAMS, raises=AssertionError)
def conv_in_groups_that_do_not_divide(f):
    return f.nnx.Conv(4, 6, (3, 3), feature_group_count=3, rngs=f.nnx.Rngs(0))(IMAGE)


@program(PROGRAMS, raises=RuntimeError)
def conv_with_an_unknown_padding(f):
    return f.nnx.Conv(4, 6, (3, 3), padding="WRONG", rngs=f.nnx.Rngs(0))(IMAGE)


layers(
    "norm",
    {
        "batch": (of("BatchNorm", 3), numbers(4, 3)),
        "batch_with_running_averages": (of("BatchNorm", 3, use_running_average=True), X),
        "batch_told_in_the_call": (of("BatchNorm", 3), X, {"use_running_average": True}),
        "batch_with_momentum": (of("BatchNorm", 4, momentum=0.5, epsilon=1e-2), IMAGE),
        "batch_over_another_axis": (of("BatchNorm", 6, axis=1), IMAGE),
        "batch_without_scale_and_bias": (of("BatchNorm", 3, use_scale=False, use_bias=False), X),
        "batch_slow_variance": (of("BatchNorm", 3, use_fast_variance=False), numbers(4, 3)),
        "batch_with_a_mask": (
            of("BatchNorm", 3),
            numbers(4, 3),
            {"mask": jnp.array([[True], [True], [False], [True]])},
        ),
        "batch_in_bfloat16": (of("BatchNorm", 3, dtype=jnp.bfloat16), numbers(4, 3)),
        "layer": (of("LayerNorm", 3), X),
        "layer_without_bias": (of("LayerNorm", 3, use_bias=False, epsilon=1e-2), X),
        "layer_over_two_axes": (
            of("LayerNorm", 6, reduction_axes=(1, 2), feature_axes=-1),
            ROWS,
        ),
        "layer_in_bfloat16": (of("LayerNorm", 3, dtype=jnp.bfloat16), X),
        "layer_with_a_mask": (
            of("LayerNorm", 4),
            numbers(2, 4),
            {"mask": jnp.array([[True, True, False, True]])},
        ),
        "rms": (of("RMSNorm", 3), X),
        "rms_without_scale": (of("RMSNorm", 3, use_scale=False), X),
        "rms_with_initializer": (of("RMSNorm", 3, scale_init=normal, epsilon=1e-3), X),
        "group": (of("GroupNorm", 4, num_groups=2), IMAGE),
        "group_by_size": (of("GroupNorm", 6, num_groups=None, group_size=3), ROWS),
        "group_slow_variance": (of("GroupNorm", 4, num_groups=2, use_fast_variance=False), IMAGE),
        "instance": (of("InstanceNorm", 4), IMAGE),
        "instance_without_scale": (of("InstanceNorm", 4, use_scale=False), IMAGE),
        "weight": (lambda nnx, rngs: nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs), X),
        "weight_without_scale": (
            lambda nnx, rngs: nnx.WeightNorm(
                nnx.Linear(3, 4, rngs=rngs), use_scale=False, rngs=rngs
            ),
            X,
        ),
    },
)


@program(PROGRAMS)
def norm_spectral(f):
    nnx = f.nnx
    rngs = nnx.Rngs(0)
    layer = nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), n_steps=2, rngs=rngs)
    outs = [layer(X, update_stats=True), layer(X, update_stats=False)]
    return outs, nnx.state(layer)


@program(PROGRAMS)
def norm_batch_in_train_and_eval(f):
    norm = f.nnx.BatchNorm(3, rngs=f.nnx.Rngs(0))
    outs = [norm(numbers(4, 3)), norm(2 * numbers(4, 3))]
    norm.eval()
    outs.append(norm(X))
    norm.train()
    return [*outs, norm(X)], f.nnx.state(norm)


@program(PROGRAMS, raises=ValueError)
def norm_batch_not_told(f):
    return f.nnx.BatchNorm(3, use_running_average=None, rngs=f.nnx.Rngs(0))(X)


@program(PROGRAMS, raises=ValueError)
def norm_group_that_does_not_divide(f):
    return f.nnx.GroupNorm(5, num_groups=2, rngs=f.nnx.Rngs(0))


@program(PROGRAMS)
def norm_across_a_mapped_axis(f):
    norm = f.nnx.BatchNorm(3, axis_name="batch", rngs=f.nnx.Rngs(0))
    run = f.nnx.vmap(lambda norm, x: norm(x), in_axes=(None, 0), axis_name="batch")
    out = run(norm, numbers(2, 4, 3))
    return out, f.nnx.state(norm)


def heads(nnx, rngs, **options):
    return nnx.MultiHeadAttention(2, 6, rngs=rngs, **{"decode": False, **options})


MASK = jnp.tril(jnp.ones((5, 5), bool))[None, None]

layers(
    "attention",
    {
        "plain": (heads, ROWS),
        "with_a_mask": (heads, ROWS, {"mask": MASK}),
        "cross": (heads, ROWS, numbers(2, 3, 6)),
        "of_three_inputs": (heads, ROWS, numbers(2, 3, 6), numbers(2, 3, 6) * 2),
        "with_other_features": (functools.partial(heads, qkv_features=8, out_features=3), ROWS),
        "without_bias": (functools.partial(heads, use_bias=False), ROWS),
        "with_normalized_queries": (functools.partial(heads, normalize_qk=True), ROWS),
        "with_initializers": (
            functools.partial(heads, kernel_init=normal, out_bias_init=ones),
            ROWS,
        ),
        "in_bfloat16": (functools.partial(heads, dtype=jnp.bfloat16), ROWS),
        "with_deterministic_dropout": (
            functools.partial(heads, dropout_rate=0.5, deterministic=True),
            ROWS,
        ),
        "with_dropout": (
            functools.partial(heads, dropout_rate=0.5, deterministic=False),
            ROWS,
        ),
        "with_dropout_for_each_head": (
            functools.partial(
                heads, dropout_rate=0.5, deterministic=False, broadcast_dropout=False
            ),
            ROWS,
        ),
    },
)


@program(PROGRAMS)
def attention_decoding_step_by_step(f):
    nnx = f.nnx
    layer = heads(nnx, nnx.Rngs(0), decode=True)
    layer.init_cache((2, 5, 6))
    outs = [layer(ROWS[:, n : n + 1]) for n in range(3)]
    return outs, nnx.state(layer, nnx.Cache)


@program(PROGRAMS, raises=ValueError)
def attention_without_a_cache(f):
    return heads(f.nnx, f.nnx.Rngs(0), decode=True)(ROWS[:, :1])


@program(PROGRAMS)
def attention_weights_kept(f):
    layer = heads(f.nnx, f.nnx.Rngs(0))
    layer(ROWS, sow_weights=True)
    return f.nnx.pop(layer, f.nnx.Intermediate)


@program(PROGRAMS)
def attention_functions(f):
    nnx = f.nnx
    query, key, value = numbers(2, 5, 2, 3), numbers(2, 4, 2, 3), numbers(2, 4, 2, 3) + 1
    bias = numbers(2, 2, 5, 4)
    return (
        nnx.dot_product_attention(query, key, value),
        nnx.dot_product_attention(query, key, value, bias),
        nnx.dot_product_attention(query, key, value, mask=bias > 0),
        nnx.nn.attention.dot_product_attention_weights(query, key, bias=bias),
        nnx.make_attention_mask(jnp.arange(3) > 0, jnp.arange(4) > 1),
        nnx.make_causal_mask(jnp.ones((2, 3))),
        nnx.combine_masks(nnx.make_causal_mask(jnp.ones((2, 3))), None, jnp.zeros((2, 1, 3, 3))),
    )


@program(PROGRAMS)
def attention_with_a_function_of_its_own(f):
    def attend(query, key, value, **options):
        return query + value * sorted(options).index("mask")

    return heads(f.nnx, f.nnx.Rngs(0), attention_fn=attend)(ROWS)


@program(PROGRAMS, raises=ValueError)
def attention_with_features_that_do_not_divide(f):
    return f.nnx.MultiHeadAttention(4, 6, rngs=f.nnx.Rngs(0))


def cell(nnx, rngs, kind, **options):
    """A cell as a layer that returns its output and the new carry."""
    made = getattr(nnx, kind)(6, 4, rngs=rngs, **options)

    class Run(nnx.Module):
        def __init__(self):
            self.cell = made

        def __call__(self, x):
            carry = self.cell.initialize_carry(x.shape, nnx.Rngs(3))
            for _ in range(2):
                carry, y = self.cell(carry, x)
            return y, carry

    return Run()


def rnn(nnx, rngs, kind="LSTMCell", **options):
    made = getattr(nnx, kind)(6, 4, rngs=rngs)
    return nnx.RNN(made, rngs=rngs, **options)


layers(
    "recurrent",
    {
        "simple_cell": (functools.partial(cell, kind="SimpleCell"), numbers(2, 6)),
        "simple_cell_residual": (
            functools.partial(cell, kind="SimpleCell", residual=True),
            numbers(2, 6),
        ),
        "lstm_cell": (functools.partial(cell, kind="LSTMCell"), numbers(2, 6)),
        "optimized_lstm_cell": (functools.partial(cell, kind="OptimizedLSTMCell"), numbers(2, 6)),
        "gru_cell": (functools.partial(cell, kind="GRUCell"), numbers(2, 6)),
        "lstm_cell_with_initializers": (
            functools.partial(cell, kind="LSTMCell", kernel_init=normal, carry_init=ones),
            numbers(2, 6),
        ),
        "rnn": (rnn, ROWS),
        "rnn_of_gru_cells": (functools.partial(rnn, kind="GRUCell"), ROWS),
        "rnn_time_first": (functools.partial(rnn, time_major=True), numbers(5, 2, 6)),
        "rnn_reversed": (functools.partial(rnn, reverse=True, keep_order=True), ROWS),
        "rnn_with_carry": (functools.partial(rnn, return_carry=True), ROWS),
        "rnn_of_shorter_sequences": (
            functools.partial(rnn, return_carry=True),
            ROWS,
            {"seq_lengths": jnp.array([2, 5])},
        ),
        "rnn_both_ways": (
            lambda nnx, rngs: nnx.Bidirectional(
                rnn(nnx, rngs), rnn(nnx, rngs, "GRUCell"), rngs=rngs
            ),
            ROWS,
        ),
    },
)


@program(PROGRAMS)
def recurrent_flipped_sequences(f):
    return f.nnx.nn.recurrent.flip_sequences(
        ROWS, jnp.array([2, 5]), num_batch_dims=1, time_major=False
    )


def dropped(nnx, rngs, *args, **options):
    return nnx.Dropout(*args, rngs=rngs, **options)


layers(
    "dropout",
    {
        "half": (functools.partial(dropped, rate=0.5), X),
        "of_another_stream": (functools.partial(dropped, rate=0.5, rng_collection="params"), X),
        "along_an_axis": (functools.partial(dropped, rate=0.5, broadcast_dims=(1,)), ROWS),
        "deterministic": (functools.partial(dropped, rate=0.5, deterministic=True), X),
        "of_nothing": (functools.partial(dropped, rate=0.0), X),
        "of_all": (functools.partial(dropped, rate=1.0), X),
        "told_in_the_call": (functools.partial(dropped, rate=0.5), X, {"deterministic": True}),
    },
)


@program(PROGRAMS)
def dropout_with_keys_in_the_call(f):
    layer = f.nnx.Dropout(0.5)
    return layer(X, rngs=f.nnx.Rngs(dropout=3)), layer(X, rngs=f.nnx.Rngs(3)), layer(X, rngs=KEY)


@program(PROGRAMS)
def dropout_in_train_and_eval(f):
    model = f.nnx.Sequential(dropped(f.nnx, f.nnx.Rngs(0), 0.5), dropped(f.nnx, f.nnx.Rngs(1), 0.2))
    first = model(X)
    model.eval()
    return first, model(X), f.nnx.state(model)


@program(PROGRAMS)
def dropout_draws_a_new_mask_each_time(f):
    layer = dropped(f.nnx, f.nnx.Rngs(0), 0.5)
    return [layer(X) for _ in range(3)], f.nnx.state(layer)


@program(PROGRAMS, raises=ValueError)
def dropout_without_keys(f):
    return f.nnx.Dropout(0.5)(X)


@program(PROGRAMS)
def dropout_with_the_same_keys_for_two(f):
    rngs = f.nnx.Rngs(0)
    return [dropped(f.nnx, rngs, 0.5)(X) for _ in range(2)]


def with_b(nnx, rngs, make):
    """A layer of low rank whose second factor is no longer zero."""
    layer = make(nnx, rngs)
    for _, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.LoRAParam):
            variable[...] = jnp.full(variable.shape, 0.3)
    return layer


layers(
    "lora",
    {
        "at_first": (of("LoRA", 3, 2, 4), X),
        "of_rank_one": (functools.partial(with_b, make=of("LoRA", 3, 1, 4)), X),
        "around_a_layer": (
            functools.partial(
                with_b,
                make=lambda nnx, rngs: nnx.LoRA(
                    3, 2, 4, base_module=nnx.Linear(3, 4, rngs=rngs), rngs=rngs
                ),
            ),
            X,
        ),
        "around_a_function": (
            functools.partial(
                with_b, make=lambda nnx, rngs: nnx.LoRA(3, 2, 3, base_module=jnp.sin, rngs=rngs)
            ),
            X,
        ),
        "with_initializers": (of("LoRA", 3, 2, 4, a_initializer=ones, b_initializer=normal), X),
        "in_bfloat16": (functools.partial(with_b, make=of("LoRA", 3, 2, 4, dtype=jnp.bfloat16)), X),
        "linear": (functools.partial(with_b, make=of("LoRALinear", 3, 4, lora_rank=2)), X),
        "linear_without_bias": (
            functools.partial(with_b, make=of("LoRALinear", 3, 4, lora_rank=2, use_bias=False)),
            X,
        ),
    },
)


@program(PROGRAMS)
def lora_of_another_kind(f):
    nnx = f.nnx
    layer = nnx.LoRALinear(3, 4, lora_rank=2, lora_param_type=nnx.Param, rngs=nnx.Rngs(0))
    adapters = nnx.state(nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0)), nnx.LoRAParam)
    return nnx.state(layer, nnx.Param), nnx.state(layer, nnx.LoRAParam), adapters


@program(PROGRAMS)
def lora_trained_alone(f):
    nnx = f.nnx
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    filtered = nnx.DiffState(0, nnx.LoRAParam)
    for _ in range(2):
        grads = nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=filtered)(layer)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(layer, nnx.LoRAParam), grads)
        nnx.update(layer, params)
    return nnx.state(layer)


# ---- pooling and activations --------------------------------------------------------------------

WINDOWS = {
    "max": lambda nnx: nnx.max_pool(IMAGE, (2, 2), strides=(2, 2)),
    "max_same": lambda nnx: nnx.max_pool(IMAGE, (3, 3), strides=(2, 2), padding="SAME"),
    "average": lambda nnx: nnx.avg_pool(IMAGE, (2, 2), strides=(2, 2)),
    "average_same": lambda nnx: nnx.avg_pool(IMAGE, (3, 3), strides=(2, 2), padding="SAME"),
    "average_without_padding": lambda nnx: nnx.avg_pool(
        IMAGE, (3, 3), strides=(2, 2), padding="SAME", count_include_pad=False
    ),
    "min": lambda nnx: nnx.min_pool(IMAGE, (2, 2)),
    "of_one_axis": lambda nnx: nnx.max_pool(ROWS, (2,), strides=(1,)),
    "padded_by_numbers": lambda nnx: nnx.max_pool(IMAGE, (2, 2), padding=((1, 0), (0, 1))),
    "of_its_own": lambda nnx: nnx.pool(IMAGE, 0.0, jax.lax.add, (2, 2), (2, 2), "VALID"),
    "of_one_example": lambda nnx: nnx.avg_pool(IMAGE[0], (2, 2), strides=(2, 2)),
}
for name, window in WINDOWS.items():

    def pooled(f, window=window):
        return window(f.nnx)

    pooled.__name__ = f"pool_{name}"
    program(PROGRAMS)(pooled)

ACTIVATIONS = (
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid "
    "log_softmax logsumexp relu relu6 selu sigmoid silu soft_sign softmax softplus standardize "
    "swish tanh identity"
)
for name in ACTIVATIONS.split():

    def activated(f, name=name):
        apply = getattr(f.nnx, name)
        x = numbers(3, 4) * 3
        return apply(x), jax.grad(lambda x: apply(x).sum())(x)

    activated.__name__ = f"activation_{name}"
    program(PROGRAMS)(activated)


@program(PROGRAMS)
def activation_with_a_parameter(f):
    layer = f.nnx.PReLU(0.3)
    return layer(X), f.nnx.state(layer), f.nnx.grad(lambda m: m(X).sum())(layer)


@program(PROGRAMS)
def activation_of_labels(f):
    return f.nnx.one_hot(jnp.array([0, 2, 5]), 4), f.nnx.one_hot(jnp.array([1]), 3, axis=0)


# ---- initializers -------------------------------------------------------------------------------

INITIALIZERS = {
    "constant": lambda i: i.constant(3.0),
    "delta_orthogonal": lambda i: i.delta_orthogonal(),
    "glorot_normal": lambda i: i.glorot_normal(),
    "glorot_uniform": lambda i: i.glorot_uniform(in_axis=-2, out_axis=-1),
    "he_normal": lambda i: i.he_normal(),
    "he_uniform": lambda i: i.he_uniform(),
    "kaiming_normal": lambda i: i.kaiming_normal(),
    "lecun_normal": lambda i: i.lecun_normal(),
    "lecun_uniform": lambda i: i.lecun_uniform(),
    "normal": lambda i: i.normal(0.02),
    "ones_init": lambda i: i.ones_init(),
    "orthogonal": lambda i: i.orthogonal(),
    "truncated_normal": lambda i: i.truncated_normal(0.1),
    "uniform": lambda i: i.uniform(0.5),
    "variance_scaling": lambda i: i.variance_scaling(2.0, "fan_avg", "uniform"),
    "xavier_uniform": lambda i: i.xavier_uniform(),
    "zeros_init": lambda i: i.zeros_init(),
}


@program(PROGRAMS)
def initializers(f):
    drawn = {}
    for name, make in INITIALIZERS.items():
        shape = (3, 3, 2, 2) if name == "delta_orthogonal" else (4, 3)
        drawn[name] = make(f.nnx.initializers)(KEY, shape, jnp.float32)
    return drawn


assert np.isfinite(X).all()

test_programs = same_on_both(PROGRAMS)
