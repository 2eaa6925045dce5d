"""Programs over layers: their numbers, parameters and refusals."""

import jax
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


@program(PROGRAMS)
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


@program(PROGRAMS)
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


test_programs = same_on_both(PROGRAMS)
