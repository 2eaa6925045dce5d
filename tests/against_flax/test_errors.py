"""Mistakes that people make, which both libraries refuse with errors of one class.

What the errors say is asserted beside the code that raises them; here it is that programs which
catch Flax's errors catch Linnet's.
"""

import jax
import jax.numpy as jnp
import optax

from tests.against_flax.compare import program, same_on_both, table

PROGRAMS = {}
X = jnp.ones((2, 3))


def linear(nnx, ins=3, outs=3):
    return nnx.Linear(ins, outs, rngs=nnx.Rngs(0))


def net(nnx):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.drop(self.linear(x))

    return Net(nnx.Rngs(0))


# ---- what JAX itself refuses --------------------------------------------------------------------


def leaked(nnx):
    kept = []
    nnx.jit(lambda m: kept.append(m(X)))(linear(nnx))
    return kept[0] + 1


def leaked_to_a_model(nnx):
    model = linear(nnx)
    jax.jit(lambda x: setattr(model, "last", x))(X)
    return model.last + 1


def leaked_by_a_variable(nnx):
    model = linear(nnx)

    @jax.jit
    def write(x):
        model.bias[...] = x

    write(jnp.ones(3))
    return model.bias + 1


table(
    PROGRAMS,
    "jax",
    {
        "branch_on_a_parameter": lambda nnx: nnx.jit(lambda m: 1 if m.bias[0] > 0 else 2)(
            linear(nnx)
        ),
        "branch_in_grad": lambda nnx: nnx.grad(lambda m, n: m(X).sum() if n > 0 else 0.0)(
            linear(nnx), 1.0
        ),
        "branch_in_vmap": lambda nnx: nnx.vmap(
            lambda m, x: m(x) if x[0] > 0 else x, in_axes=(None, 0)
        )(linear(nnx), X),
        "loop_over_a_traced_number": lambda nnx: nnx.jit(lambda m, n: [m(X) for _ in range(n)])(
            linear(nnx), 3
        ),
        "shape_from_an_argument": lambda nnx: nnx.jit(lambda m, n: m(jnp.ones((n, 3))))(
            linear(nnx), 3
        ),
        "leaked_tracer": leaked,
        "leaked_to_a_model": leaked_to_a_model,
        "leaked_by_a_variable": leaked_by_a_variable,
        "numpy_of_a_tracer": lambda nnx: nnx.jit(lambda m: float(m(X).sum()))(linear(nnx)),
        "output_that_is_no_array": lambda nnx: nnx.jit(lambda m: "text")(linear(nnx)),
        "argument_that_is_no_array": lambda nnx: nnx.jit(lambda m, x: m(X))(linear(nnx), "text"),
    },
    raises={
        "branch_on_a_parameter": jax.errors.TracerBoolConversionError,
        "branch_in_vmap": jax.errors.TracerBoolConversionError,
        "loop_over_a_traced_number": jax.errors.TracerIntegerConversionError,
        "shape_from_an_argument": TypeError,
        "leaked_tracer": jax.errors.UnexpectedTracerError,
        "leaked_to_a_model": "TraceContextError",
        "leaked_by_a_variable": "TraceContextError",
        "numpy_of_a_tracer": jax.errors.ConcretizationTypeError,
        "output_that_is_no_array": TypeError,
        "argument_that_is_no_array": TypeError,
    },
)

# ---- rngs that are missing ----------------------------------------------------------------------

WITHOUT_RNGS = {
    "linear": lambda nnx: nnx.Linear(3, 3),
    "linear_general": lambda nnx: nnx.LinearGeneral(3, 3),
    "einsum": lambda nnx: nnx.Einsum("ab,bc->ac", (3, 3)),
    "conv": lambda nnx: nnx.Conv(3, 3, (3, 3)),
    "conv_transpose": lambda nnx: nnx.ConvTranspose(3, 3, (3, 3)),
    "embed": lambda nnx: nnx.Embed(5, 3),
    "batch_norm": lambda nnx: nnx.BatchNorm(3),
    "layer_norm": lambda nnx: nnx.LayerNorm(3),
    "attention": lambda nnx: nnx.MultiHeadAttention(2, 4),
    "lstm_cell": lambda nnx: nnx.LSTMCell(3, 3),
    "gru_cell": lambda nnx: nnx.GRUCell(3, 3),
    "lora": lambda nnx: nnx.LoRA(3, 2, 3),
    "of_its_own": lambda nnx: type(net(nnx))(),
}
table(PROGRAMS, "without_rngs", WITHOUT_RNGS, raises=dict.fromkeys(WITHOUT_RNGS, TypeError))

# ---- models in the wrong place ------------------------------------------------------------------


def captured_and_written(nnx, lift):
    model = net(nnx)
    return lift(lambda x: model(x) + 1)(X)


def full_cache(nnx):
    attention = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((1, 2, 4))
    return [attention(jnp.ones((1, 1, 4))) for _ in range(2)]


def slots_first(nnx):
    class Slots:
        __slots__ = ("a",)

    class Both(Slots, nnx.Module):
        __slots__ = ("b",)

    return Both()


table(
    PROGRAMS,
    "models",
    {
        "captured_in_jit": lambda nnx: captured_and_written(nnx, nnx.jit),
        "captured_in_grad": lambda nnx: captured_and_written(
            nnx, lambda f: nnx.grad(lambda x: f(x).sum())
        ),
        "captured_in_vmap": lambda nnx: captured_and_written(nnx, nnx.vmap),
        "captured_in_remat": lambda nnx: captured_and_written(nnx, nnx.remat),
        "mapped_but_not_stacked": lambda nnx: nnx.vmap(lambda m, x: m(x))(linear(nnx), X),
        "with_dropout_mapped_but_not_stacked": lambda nnx: nnx.vmap(lambda m, x: m(x))(net(nnx), X),
        "a_cache_that_is_full": full_cache,
        "with_slots": slots_first,
        "called_with_a_wrong_size": lambda nnx: net(nnx)(jnp.ones((2, 5))),
        "given_to_jax_numpy": lambda nnx: jnp.sin(linear(nnx)),
        "with_an_argument_too_many": lambda nnx: linear(nnx)(X, X, X),
        "with_an_unknown_attribute": lambda nnx: linear(nnx).kernle,
        "with_an_unknown_argument": lambda nnx: nnx.Linear(3, 3, biass=True, rngs=nnx.Rngs(0)),
        "updated_by_gradients_of_another": lambda nnx: nnx.Optimizer(
            linear(nnx), optax.sgd(0.1), wrt=nnx.Param
        ).update(
            linear(nnx),
            nnx.grad(lambda m: m(X).sum())(nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))),
        ),
    },
    raises={
        "captured_in_jit": "TraceContextError",
        "captured_in_grad": "TraceContextError",
        "captured_in_vmap": "TraceContextError",
        "captured_in_remat": "TraceContextError",
        "mapped_but_not_stacked": ValueError,
        "with_dropout_mapped_but_not_stacked": ValueError,
        "with_slots": TypeError,
        "called_with_a_wrong_size": TypeError,
        "given_to_jax_numpy": TypeError,
        "with_an_argument_too_many": TypeError,
        "with_an_unknown_attribute": AttributeError,
        "with_an_unknown_argument": TypeError,
        "updated_by_gradients_of_another": ValueError,
    },
)


@program(PROGRAMS)
def what_a_program_catches(f):
    """The classes by which people catch these errors."""
    nnx, found = f.nnx, []
    for run, kinds in (
        (lambda: nnx.Linear(3, 3), (TypeError,)),
        (lambda: nnx.Rngs(params=0).dropout(), (AttributeError,)),
        (lambda: nnx.split(net(nnx), nnx.Param), (ValueError,)),
        (lambda: linear(nnx)(jnp.ones((1, 7))), (TypeError,)),
        (lambda: nnx.Dict(a=1)["b"], (KeyError,)),
    ):
        try:
            run()
        except kinds as error:
            found.append([isinstance(error, kind) for kind in kinds])
    return found


test_programs = same_on_both(PROGRAMS)
