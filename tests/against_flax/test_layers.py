"""Programs over layers: their numbers, parameters and refusals."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}


def input_of(*shape):
    return jax.random.normal(jax.random.key(1), shape)


def einsum(f, equation, kernel, bias, inputs, **arguments):
    noise = jax.nn.initializers.normal(1.0)
    layer = f.nnx.Einsum(equation, kernel, bias, bias_init=noise, rngs=f.nnx.Rngs(0), **arguments)
    return layer(input_of(*inputs)), f.nnx.state(layer)


@program(PROGRAMS)
def einsum_with_an_ellipsis_in_the_kernel(f):
    return einsum(f, "d...ab,bc...->ad...c", (5, 7, 6, 8), (6, 8, 7), (4, 6, 8, 2, 5))


@program(PROGRAMS)
def einsum_whose_bias_has_its_axes_in_another_order(f):
    return einsum(f, "d...ab,bc...->ad...c", (5, 7, 6), (7, 6), (4, 6, 2, 5))


@program(PROGRAMS)
def einsum_whose_ellipsis_is_wider_in_the_input(f):
    return einsum(f, "d...ab,bc...->ad...c", (5, 7, 8), (8, 7), (4, 6, 8, 2, 5))


@program(PROGRAMS)
def einsum_whose_ellipsis_is_empty(f):
    return einsum(f, "d...ab,bc...->ad...c", (5, 7), (7,), (4, 2, 5))


@program(PROGRAMS)
def einsum_with_an_ellipsis_in_the_kernel_alone(f):
    return einsum(f, "ab,b...->a...", (5, 7, 8), (7, 8), (4, 5))


@program(PROGRAMS)
def einsum_with_the_ellipsis_first(f):
    return einsum(f, "...a,...ab->...b", (3, 5, 7), (3, 7), (4, 3, 5))


@program(PROGRAMS, raises=TypeError)
def einsum_whose_bias_leaves_out_the_ellipsis(f):
    return einsum(f, "d...ab,bc...->ad...c", (5, 7, 6), (7,), (4, 6, 2, 5))


@program(PROGRAMS)
def einsum_with_ints_as_shapes(f):
    ones = jax.nn.initializers.ones
    return (
        einsum(f, "a,a->a", 4, None, (4,), kernel_init=ones),
        einsum(f, "ab,bc->ac", (5, 7), 7, (4, 5)),
    )


@program(PROGRAMS)
def einsum_with_another_equation_in_the_call(f):
    layer = f.nnx.Einsum("ab,bc->ac", (5, 7), rngs=f.nnx.Rngs(0))
    return layer(input_of(3, 4, 5), einsum_str="xab,bc->xac")


@program(PROGRAMS, raises=ValueError)
def einsum_of_a_kernel_with_too_few_axes(f):
    return einsum(f, "ab,bc...d->a...cd", (5, 7), None, (4, 5))


@program(PROGRAMS)
def dropout_under_a_mesh_with_explicit_axes(f):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(input_of(4, 8), NamedSharding(mesh, PartitionSpec("x")))
        layer = f.nnx.Dropout(0.5, rngs=f.nnx.Rngs(0))
        y = f.nnx.jit(lambda layer, x: layer(x))(layer, x)
    return y, str(y.sharding.spec), f.nnx.state(layer)


# ---- outputs in a sharding ----------------------------------------------------------------------

BATCH = PartitionSpec("x")
SHARDED = {
    "linear": (lambda nnx, r: nnx.Linear(3, 4, rngs=r), (2, 3)),
    "linear_general": (lambda nnx, r: nnx.LinearGeneral(3, (2, 2), rngs=r), (2, 3)),
    "einsum": (lambda nnx, r: nnx.Einsum("ab,bc->ac", (3, 4), (4,), rngs=r), (2, 3)),
    "conv": (lambda nnx, r: nnx.Conv(3, 4, (2,), rngs=r), (2, 5, 3)),
    "conv_transpose": (lambda nnx, r: nnx.ConvTranspose(3, 4, (2,), rngs=r), (2, 5, 3)),
    "embed": (lambda nnx, r: nnx.Embed(5, 4, rngs=r), None),
    "attention": (lambda nnx, r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r), (2, 5, 4)),
    "lora": (lambda nnx, r: nnx.LoRA(3, 2, 4, rngs=r), (2, 3)),
    "batch_norm": (lambda nnx, r: nnx.BatchNorm(3, rngs=r), (2, 3)),
    "layer_norm": (lambda nnx, r: nnx.LayerNorm(3, rngs=r), (2, 3)),
    "rms_norm": (lambda nnx, r: nnx.RMSNorm(3, rngs=r), (2, 3)),
    "group_norm": (lambda nnx, r: nnx.GroupNorm(4, num_groups=2, rngs=r), (2, 5, 4)),
    "lstm": (lambda nnx, r: nnx.RNN(nnx.LSTMCell(3, 4, rngs=r), rngs=r), (2, 5, 3)),
}
# Flax refuses these two without out_sharding; Linnet follows the input (docs/differences.md).
REFUSED_BY_FLAX = ("embed", "lstm")
TAKES_SHARDING = ("linear", "linear_general", "einsum", "conv", "embed", "attention")
for layer_name, (make, shape) in SHARDED.items():

    def sharded(f, out, make=make, shape=shape):
        """A layer called on an input that is sharded, asked for an output in a sharding."""
        mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(mesh):
            layer = make(f.nnx, f.nnx.Rngs(0))
            x = jnp.array([1, 3]) if shape is None else input_of(*shape)
            x = jax.device_put(x, NamedSharding(mesh, BATCH))
            y = layer(x, **({} if out is None else {"out_sharding": out}))
        return y, str(y.sharding.spec)

    asked = {"output": BATCH, "replicated": PartitionSpec()} if layer_name in TAKES_SHARDING else {}
    plain = {} if layer_name in REFUSED_BY_FLAX else {"input": None}
    for kind, out in {**plain, **asked}.items():
        entered = functools.partial(sharded, out=out)
        entered.__name__ = f"{layer_name}_with_a_sharded_{kind}"
        program(PROGRAMS)(entered)


test_programs = same_on_both(PROGRAMS)
