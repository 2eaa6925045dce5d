"""More programs for transforms that people meet less often, ten or more for each family."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from tests.against_flax.compare import linear, same_on_both, stacked, table
from tests.models import call

PROGRAMS = {}
X = jnp.arange(6.0).reshape(2, 3) / 6 - 0.3
TREE, QUIET = {"graph": False, "graph_updates": False}, {"graph_updates": False}


def loss(model, x=X):
    return (model(x) ** 2).mean()


def checking(nnx):
    """A module that counts its calls and checks its input."""

    class Checking(nnx.Module):
        def __init__(self):
            self.w, self.calls = nnx.Param(jnp.ones(3) * 2), nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            checkify.check(jnp.all(x > -0.2), "too low")
            return x * self.w

    return Checking()


# ---- checkify -----------------------------------------------------------------------------------


def report(error):
    """The message of an error without the place in the program."""
    found = error.get()
    return None if found is None else found.splitlines()[0].partition(" (")[0]


def checked(nnx, run, *args, **options):
    error, out = nnx.checkify(run, **options)(*args)
    return report(error), out


def checked_model(nnx, x, wrap=lambda run: run, **options):
    model = checking(nnx)
    error, out = wrap(nnx.checkify(call, **options))(model, x)
    return report(error), out, nnx.state(model)


def checked_scan(nnx, last):
    @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(model, total, x):
        checkify.check(x < 2, "x is {x}", x=x)
        return total + x, model.w[...] * x

    return checked(nnx, step, checking(nnx), 0.0, jnp.array([0.0, 1.0, last]))


def checked_dropout(nnx):
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))
    outs = [checked(nnx, call, layer, X) for _ in range(2)]
    return outs, nnx.state(layer)


def thrown(nnx):
    error, _ = nnx.checkify(call)(checking(nnx), -X)
    error.throw()


table(
    PROGRAMS,
    "checkify",
    {
        "of_a_module_that_passes": lambda nnx: checked_model(nnx, X + 1),
        "of_a_module_that_fails": lambda nnx: checked_model(nnx, X - 1),
        "without_graph_updates": lambda nnx: checked_model(nnx, X - 1, **QUIET),
        "in_tree_mode": lambda nnx: checked_model(nnx, X - 1, **TREE),
        "inside_jit": lambda nnx: checked_model(nnx, X - 1, wrap=nnx.jit),
        "of_a_jitted_function": lambda nnx: checked(nnx, nnx.jit(call), checking(nnx), X - 1),
        "of_not_a_number": lambda nnx: checked(
            nnx, lambda m, x: jnp.log(m(x)), linear(nnx), X - 5, errors=checkify.float_checks
        )[0],
        "of_a_division": lambda nnx: checked(
            nnx, lambda x, y: x / y, X, 0.0 * X, errors=checkify.div_checks
        )[0],
        "of_an_index": lambda nnx: checked(
            nnx, lambda x, n: x[n], X, 7, errors=checkify.index_checks
        )[0],
        "of_errors_that_are_not_asked_for": lambda nnx: checked(
            nnx, lambda x: (checkify.check(x > 2, "no"), x)[1], 1.0, errors=checkify.nan_checks
        ),
        "of_gradients": lambda nnx: checked(
            nnx, nnx.grad(lambda m: (m.w * 2).sum()), checking(nnx), errors=checkify.float_checks
        ),
        "around_a_scan_that_passes": lambda nnx: checked_scan(nnx, 1.5),
        "around_a_scan_that_fails": lambda nnx: checked_scan(nnx, 3.0)[0],
        "around_vmap": lambda nnx: checked(
            nnx, nnx.vmap(call, in_axes=(None, 0)), linear(nnx), X, errors=checkify.float_checks
        ),
        "returns_a_new_module": lambda nnx: nnx.state(checked(nnx, lambda: linear(nnx))[1]),
        "draws_keys": checked_dropout,
        "thrown": thrown,
    },
    raises={"thrown": ValueError},
)

# ---- make_jaxpr ---------------------------------------------------------------------------------


def sizes(jaxpr):
    """How many inputs and outputs, and the types of the outputs."""
    outs = [[list(aval.shape), str(aval.dtype)] for aval in jaxpr.out_avals]
    return len(jaxpr.jaxpr.invars), len(jaxpr.jaxpr.outvars), outs


def evaluated(jaxpr, *args):
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(args))


def writing(model, x):
    model.calls[...] += 1
    return model.w * x


def looked_at(nnx):
    model = checking(nnx)
    nnx.make_jaxpr(writing, **QUIET)(model, 1.0)
    return nnx.state(model)


def primitives(jaxpr):
    return sorted({str(equation.primitive) for equation in jaxpr.jaxpr.eqns})


table(
    PROGRAMS,
    "make_jaxpr",
    {
        "of_a_function": lambda nnx: sizes(nnx.make_jaxpr(jnp.sin, **QUIET)(X)),
        "of_two_outputs": lambda nnx: sizes(
            nnx.make_jaxpr(lambda x: (x, {"y": jnp.sin(x).sum()}), **QUIET)(X)
        ),
        "of_a_model": lambda nnx: sizes(nnx.make_jaxpr(call, **QUIET)(linear(nnx), X)),
        "of_a_model_in_tree_mode": lambda nnx: sizes(nnx.make_jaxpr(call, **TREE)(linear(nnx), X)),
        "evaluated": lambda nnx: evaluated(
            nnx.make_jaxpr(call, **TREE)(linear(nnx), X), linear(nnx), X
        )[0],
        "of_a_model_that_writes": lambda nnx: sizes(
            nnx.make_jaxpr(writing, **QUIET)(checking(nnx), jnp.ones(3))
        ),
        "leaves_the_model_alone": looked_at,
        "with_a_static_argument": lambda nnx: sizes(
            nnx.make_jaxpr(lambda x, n: x[:n], static_argnums=1, **QUIET)(X, 1)
        ),
        "of_gradients": lambda nnx: sizes(
            nnx.make_jaxpr(nnx.grad(loss, **TREE), **TREE)(linear(nnx))
        ),
        "of_shapes": lambda nnx: sizes(
            nnx.make_jaxpr(call, **TREE)(linear(nnx), jax.ShapeDtypeStruct((5, 3), jnp.float32))
        ),
        "as_a_decorator": lambda nnx: sizes(nnx.make_jaxpr(**QUIET)(lambda x: x * 2)(X)),
        "primitives": lambda nnx: primitives(
            nnx.make_jaxpr(lambda x: jnp.sin(x) * jnp.cos(x), **QUIET)(X)
        ),
        "of_a_new_model": lambda nnx: sizes(nnx.make_jaxpr(lambda: linear(nnx), **QUIET)()),
        "of_a_wrong_shape": lambda nnx: nnx.make_jaxpr(call, **TREE)(linear(nnx), jnp.ones((2, 5))),
    },
    raises={"of_a_wrong_shape": TypeError},
)

# ---- custom_vjp ---------------------------------------------------------------------------------


def of_output(g, mode):
    """The gradient of the output, which with graph updates comes with those of the inputs."""
    return g if mode else g[1]


def straight_through(nnx, **mode):
    """Rounds forward, and passes the gradient on as if nothing had been done."""
    rounded = nnx.custom_vjp(lambda x: jnp.round(x) + 0, **mode)
    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (of_output(g, mode),))
    return nnx.value_and_grad(lambda x: (rounded(x) ** 2).sum(), **mode)(X * 10)


def clipped(nnx, wrap=lambda run: run, **mode):
    """The identity, with gradients cut off at one half."""
    identity = nnx.custom_vjp(lambda x: x, **mode)
    identity.defvjp(lambda x: (x, ()), lambda _, g: (jnp.clip(of_output(g, mode), -0.5, 0.5),))
    return wrap(nnx.grad(lambda x: (identity(x) ** 3).sum(), **mode))(X * 3)


def own_gradients(nnx, wrap=lambda run: run, **mode):
    """A model whose gradients are written by hand."""

    @nnx.custom_vjp(**mode)
    def run(model, x):
        return (model.kernel * x).sum()

    def forward(model, x):
        return run(model, x), (model.kernel[...], x)

    def backward(residuals, g):
        kernel, x = residuals
        g = of_output(g, mode)
        if not mode:
            made = nnx.State({"kernel": nnx.Param(g * x * 2), "bias": nnx.Param(jnp.zeros(3))})
        else:
            made = nnx.clone(linear(nnx))
            made.kernel[...], made.bias[...] = g * x * 2, jnp.zeros(3)
        return made, g * kernel

    run.defvjp(forward, backward)
    grads = wrap(nnx.grad(run, argnums=(0, 1), **mode))(linear(nnx), jnp.ones((3, 3)))
    return jax.tree.leaves(grads[0]), grads[1]


def not_differentiated(nnx, **mode):
    """An argument that is no number, in the first place."""
    run = nnx.custom_vjp(lambda act, x: act(x), nondiff_argnums=(0,), **mode)
    run.defvjp(lambda act, x: (act(x), x), lambda act, x, g: (act(of_output(g, mode) * x),))
    return nnx.grad(lambda x: run(jnp.tanh, x).sum(), **mode)(X)


def by_diff_state(nnx):
    """Only the kernel of a model has a gradient."""
    kernels = nnx.DiffState(0, lambda path, value: path[-1] == "kernel")

    @nnx.custom_vjp(nondiff_argnums=(kernels,))
    def run(model):
        return model(X).sum()

    def forward(model):
        return run(model), ()

    def backward(_, gradients):
        return (nnx.State({"kernel": nnx.Param(jnp.full((3, 3), 2 * gradients[1]))}),)

    run.defvjp(forward, backward)
    return nnx.grad(run, argnums=kernels)(linear(nnx))


def counting(nnx, **mode):
    """A state that changes forward is kept."""
    count = nnx.BatchStat(jnp.array(0.0))

    @nnx.custom_vjp(**mode)
    def run(count, x):
        count[...] += 1
        return x * 2

    def forward(count, x):
        return run(count, x), ()

    def backward(_, g):
        return nnx.BatchStat(jnp.zeros(())), of_output(g, mode) * 5

    run.defvjp(forward, backward)
    return nnx.grad(run, argnums=1, **mode)(count, 3.0), count


def never_defined(nnx):
    return nnx.grad(nnx.custom_vjp(jnp.sin))(1.0)


table(
    PROGRAMS,
    "custom_vjp",
    {
        "straight_through": straight_through,
        "straight_through_in_tree_mode": lambda nnx: straight_through(nnx, **TREE),
        "straight_through_without_graph_updates": lambda nnx: straight_through(nnx, **QUIET),
        "clipped": clipped,
        "clipped_in_tree_mode": lambda nnx: clipped(nnx, **TREE),
        "clipped_under_jit": lambda nnx: clipped(nnx, wrap=nnx.jit),
        "clipped_under_vmap": lambda nnx: clipped(nnx, wrap=nnx.vmap),
        "clipped_under_jax_jit": lambda nnx: clipped(nnx, wrap=jax.jit, **TREE),
        "of_a_model": own_gradients,
        "of_a_model_in_tree_mode": lambda nnx: own_gradients(nnx, **TREE),
        "of_a_model_without_graph_updates": lambda nnx: own_gradients(nnx, **QUIET),
        "of_a_model_under_jit": lambda nnx: own_gradients(nnx, wrap=nnx.jit),
        "of_a_function_as_argument": not_differentiated,
        "of_a_function_as_argument_in_tree_mode": lambda nnx: not_differentiated(nnx, **TREE),
        "of_kernels_alone": by_diff_state,
        "that_counts": counting,
        "that_counts_in_tree_mode": lambda nnx: counting(nnx, **TREE),
        "never_defined": never_defined,
    },
    raises={"never_defined": ValueError},
)

# ---- vjp and jvp --------------------------------------------------------------------------------


def pulled(nnx, run, *args, **mode):
    out, pull = nnx.vjp(run, *args, **mode)
    return out, jax.tree.leaves(pull(jax.tree.map(jnp.ones_like, out)))


def pushed(nnx, **mode):
    model = linear(nnx)
    tangent = jax.tree.map(jnp.ones_like, nnx.clone(model))
    return nnx.jvp(call, (model, X), (tangent, jnp.zeros_like(X)), **mode)


def pulled_state(nnx, **mode):
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    out, pull = nnx.vjp(call, norm, X, **mode)
    return out, nnx.state(norm), pull(jnp.ones_like(out))[1]


table(
    PROGRAMS,
    "vjp",
    {
        "of_a_model": lambda nnx: pulled(nnx, call, linear(nnx), X, **TREE),
        "of_two_models": lambda nnx: pulled(
            nnx, lambda a, b: b(a(X)), linear(nnx), linear(nnx, 1), **QUIET
        ),
        "of_a_dict": lambda nnx: pulled(
            nnx, lambda d: {"s": d["m"](X).sum(), "x": d["x"]}, {"m": linear(nnx), "x": X}, **TREE
        ),
        "state_changes": lambda nnx: pulled_state(nnx, **QUIET),
        "state_changes_in_tree_mode": lambda nnx: pulled_state(nnx, **TREE),
        "inside_jit": lambda nnx: nnx.jit(lambda m: pulled(nnx, call, m, X, **TREE), **TREE)(
            linear(nnx)
        ),
        "with_aux_of_a_model": lambda nnx: nnx.vjp(
            lambda m: (m(X), {"n": 3}), linear(nnx), has_aux=True, **TREE
        )[2],
    },
)
table(
    PROGRAMS,
    "jvp",
    {
        "of_a_model": lambda nnx: pushed(nnx, **TREE),
        "of_a_model_without_graph_updates": lambda nnx: pushed(nnx, **QUIET),
        "of_a_product": lambda nnx: nnx.jvp(jnp.multiply, (X, X), (X, X), **TREE),
        "of_grad": lambda nnx: nnx.jvp(jax.grad(lambda x: (x**3).sum()), (X,), (X,), **TREE),
        "inside_jit": lambda nnx: jax.jit(lambda x: nnx.jvp(jnp.sin, (x,), (x,), **TREE))(X),
        "with_too_few_tangents": lambda nnx: nnx.jvp(jnp.multiply, (X, X), (X,), **TREE),
    },
    raises={"with_too_few_tangents": TypeError},
)

# ---- jit_partial --------------------------------------------------------------------------------


def counter(nnx, start=0.0):
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(start))

    return Counter()


def count_by(counter, by):
    counter.count[...] += by
    return counter.count * 2


def partial_counts(nnx, **options):
    model = counter(nnx)
    step = nnx.jit_partial(count_by, model, **options)
    return [step(1.0), step(2.0)], nnx.state(model)


def partial_trains(nnx, **mode):
    model = linear(nnx)

    def step(model, x):
        grads = nnx.grad(lambda params: loss(nnx.merge(graphdef, params)))(nnx.state(model))
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), grads))
        return loss(model, x)

    graphdef = nnx.graphdef(model)
    run = nnx.jit_partial(step, model, **mode)
    return [run(X) for _ in range(3)], nnx.state(model)


table(
    PROGRAMS,
    "jit_partial",
    {
        "counts": lambda nnx: partial_counts(nnx, **QUIET),
        "counts_in_tree_mode": lambda nnx: partial_counts(nnx, **TREE),
        "calls_a_model": lambda nnx: nnx.jit_partial(call, linear(nnx), **QUIET)(X),
        "of_two_models": lambda nnx: nnx.jit_partial(
            lambda a, b, x: b(a(x)), linear(nnx), linear(nnx, 1), **QUIET
        )(X),
        "with_keywords": lambda nnx: nnx.jit_partial(
            lambda m, x, by: m(x) * by, linear(nnx), **QUIET
        )(X, by=3.0),
        "with_a_static_argument": lambda nnx: nnx.jit_partial(
            lambda m, x, n: m(x) * n, linear(nnx), static_argnums=2, **QUIET
        )(X, 3),
        "donated": lambda nnx: partial_counts(nnx, donate_argnums=0, **QUIET),
        "trains": lambda nnx: partial_trains(nnx, **QUIET),
        "trains_in_tree_mode": lambda nnx: partial_trains(nnx, **TREE),
        "of_arrays": lambda nnx: nnx.jit_partial(jnp.multiply, X, **QUIET)(X),
    },
)

# ---- streams and axes ---------------------------------------------------------------------------


def ensemble(nnx, **options):
    make = nnx.split_rngs(**options)(nnx.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs)))
    rngs = nnx.Rngs(0, dropout=1)
    return nnx.state(make(rngs)), nnx.state(rngs)


def noisy(nnx):
    return nnx.Sequential(linear(nnx), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1)))


def several_masks(nnx):
    """One model, another mask for each example."""
    model = noisy(nnx)
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})
    run = nnx.split_rngs(splits=2)(nnx.vmap(call, in_axes=(axes, 0)))
    return run(model, X), run(model, X), nnx.state(model)


def axes_of_kinds(nnx):
    model = stacked(nnx)
    nnx.update(model, {"bias": jnp.ones(3)})
    axes = nnx.StateAxes({nnx.PathContains("kernel"): 0, ...: None})
    return nnx.vmap(call, in_axes=(axes, None))(model, X)


def carried_statistics(nnx):
    """Layers that are scanned, and a counter that goes from step to step."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.calls = nnx.Linear(3, 3, rngs=rngs), nnx.BatchStat(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.linear(x)

    made = nnx.StateAxes({nnx.BatchStat: None, ...: 0})
    carried = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: 0})
    blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block, out_axes=made))(nnx.Rngs(0))
    run = nnx.scan(lambda block, x: block(x), in_axes=(carried, nnx.Carry), out_axes=nnx.Carry)
    return run(blocks, X), nnx.state(blocks)


def forked(nnx, **options):
    rngs = nnx.Rngs(0, dropout=1)

    @nnx.fork_rngs(**options)
    def draw(rngs):
        return nnx.state(rngs), rngs.dropout.key[...]

    return draw(rngs), nnx.state(rngs)


def split_by_hand(nnx):
    rngs = nnx.Rngs(0, dropout=1)
    backups = nnx.split_rngs(rngs, splits=2, only="dropout")
    inside = nnx.state(rngs)
    nnx.restore_rngs(backups)
    return inside, nnx.state(rngs)


def split_in_a_block(nnx):
    rngs = nnx.Rngs(0)
    with nnx.split_rngs(rngs, splits=3):
        inside = nnx.vmap(lambda rngs: rngs.normal((2,)))(rngs)
    return inside, rngs.normal((2,)), nnx.state(rngs)


table(
    PROGRAMS,
    "streams",
    {
        "of_an_ensemble": lambda nnx: ensemble(nnx, splits=3),
        "forked_in_part": lambda nnx: forked(nnx, split={"dropout": 3}),
        "forked": forked,
        "forked_into_many": lambda nnx: forked(nnx, split=2),
        "masks_for_each_example": several_masks,
        "axes_of_kinds": axes_of_kinds,
        "carried_statistics": carried_statistics,
        "split_by_hand": split_by_hand,
        "split_in_a_block": split_in_a_block,
        "split_by_name": lambda nnx: nnx.state(
            nnx.Rngs(0, dropout=1).split({"dropout": (2, 3), ...: 2})
        ),
        "split_in_tree_mode": lambda nnx: nnx.state(
            nnx.split_rngs(noisy(nnx), splits=2, **TREE), nnx.RngState
        ),
        "squeezed": lambda nnx: nnx.split_rngs(splits=1, squeeze=True)(nnx.state)(nnx.Rngs(0)),
        "axes_without_the_filter": lambda nnx: nnx.vmap(
            call, in_axes=(nnx.StateAxes({nnx.BatchStat: 0}), None)
        )(stacked(nnx), X),
    },
    raises={"axes_without_the_filter": ValueError},
)

# ---- capture ------------------------------------------------------------------------------------


def sower(nnx, w=2.0):
    class Sower(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.asarray(w))

        def __call__(self, x):
            y = self.perturb("p", self.w * x)
            self.sow(nnx.Intermediate, "y", y)
            return y

    return Sower()


def nested(nnx):
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = nnx.List([sower(nnx), sower(nnx, 3.0)])

        def __call__(self, x):
            for part in self.inner:
                x = part(x)
            self.sow(nnx.Intermediate, "last", x)
            return x

        def half(self, x):
            return self(x) / 2

    return Outer()


def captured(nnx, run, *args, kinds=("Intermediate",), **options):
    return nnx.capture(run, *[getattr(nnx, kind) for kind in kinds], **options)(*args)


def captured_when_training(nnx):
    model = nested(nnx)

    @nnx.jit
    def step(model, x):
        def loss(model):
            out, found = nnx.capture(model, nnx.Intermediate)(x)
            return (out**2).sum(), found

        return nnx.grad(loss, has_aux=True)(model)

    return step(model, X)


def captured_twice(nnx):
    model = nested(nnx)
    run = nnx.capture(model, nnx.Intermediate)
    return run(X), run(2 * X), nnx.state(model)


def captured_broadcast(nnx, **mode):
    mapped = nnx.vmap(call, in_axes=(None, 0), **mode)
    return captured(nnx, mapped, sower(nnx), X)


def captured_in_steps(nnx, place, **mode):
    """A module that is broadcast to, or carried through, the steps of a scan."""
    axes = {"in_axes": (place, 0), "out_axes": 0 if place is None else (nnx.Carry, 0)}
    step = call if place is None else lambda model, x: (model, model(x))
    return captured(nnx, nnx.scan(step, **axes, **mode), sower(nnx), X)


def perturbed(nnx):
    model = nested(nnx)
    _, perturbations = captured(nnx, model, X, kinds=("Perturbation",))

    def loss(model, perturbations):
        out, found = nnx.capture(model, nnx.Intermediate, init=perturbations)(X)
        return (out**2).sum(), found

    return nnx.grad(loss, argnums=1, has_aux=True)(model, perturbations)


table(
    PROGRAMS,
    "capture",
    {
        "of_nested_modules": lambda nnx: captured(nnx, nested(nnx), X),
        "of_two_kinds": lambda nnx: captured(
            nnx, nested(nnx), X, kinds=("Intermediate", "Perturbation")
        ),
        "of_every_method": lambda nnx: captured(
            nnx, nested(nnx), X, kinds=(), method_outputs=nnx.Intermediate
        ),
        "of_another_method": lambda nnx: captured(nnx, nested(nnx).half, X),
        "inside_jit": lambda nnx: nnx.jit(lambda m, x: captured(nnx, m, x))(nested(nnx), X),
        "when_training": captured_when_training,
        "twice": captured_twice,
        "of_a_broadcast_module": lambda nnx: captured_broadcast(nnx, **QUIET),
        "of_a_broadcast_module_in_tree_mode": lambda nnx: captured_broadcast(nnx, **TREE),
        "of_a_module_broadcast_to_steps": lambda nnx: captured_in_steps(nnx, None, **QUIET),
        "of_a_module_broadcast_in_tree_mode": lambda nnx: captured_in_steps(nnx, None, **TREE),
        "of_a_carried_module": lambda nnx: captured_in_steps(nnx, nnx.Carry, **QUIET),
        "perturbed": perturbed,
        "around_cond": lambda nnx: captured(
            nnx,
            lambda m, x: nnx.cond(True, call, call, m, x),
            sower(nnx),
            X,
        ),
        "around_remat": lambda nnx: captured(nnx, nnx.remat(call), sower(nnx), X),
    },
    raises={
        "of_a_broadcast_module": ValueError,
        "of_a_broadcast_module_in_tree_mode": ValueError,
        "of_a_module_broadcast_to_steps": TypeError,
        "of_a_module_broadcast_in_tree_mode": TypeError,
        "of_a_carried_module": TypeError,
    },
)

assert np.isfinite(X).all()

test_programs = same_on_both(PROGRAMS)
