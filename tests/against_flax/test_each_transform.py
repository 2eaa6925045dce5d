"""Ten programs or more for each transform, as people write them."""

import jax
import jax.numpy as jnp

from tests.against_flax.compare import linear, same_on_both, stacked, table
from tests.models import call

PROGRAMS = {}
X = jnp.arange(6.0).reshape(2, 3) / 6


def counter(nnx, value=0.0):
    class Counter(nnx.Module):
        def __init__(self):
            self.count, self.w, self.calls = (
                nnx.Variable(jnp.array(value)),
                nnx.Param(jnp.ones(2)),
                0,
            )

        def __call__(self, x):
            self.count[...] += 1
            return (x * self.w).sum()

    return Counter()


def with_state(nnx, run, *models):
    """What a function returns, and the states of the models after it."""
    return run(*models), [nnx.state(model) for model in models]


def updated(nnx, model, **values):
    nnx.update(model, values)
    return model


def counted(model):
    model.count[...] += 1
    return model.w * model.count


# ---- jit ----------------------------------------------------------------------------------------


def structure_changed(model):
    model.new, model.calls = type(model.w)(jnp.ones(2)), model.calls + 1
    del model.count
    return model.w


def swapped(pair):
    pair["a"], pair["b"] = pair["b"], pair["a"]


def swap_in_jit(nnx):
    pair = nnx.Dict(a=linear(nnx, 0), b=linear(nnx, 1))
    nnx.jit(swapped)(pair)
    return nnx.state(pair)


def shared_in_jit(nnx):
    model, same = linear(nnx), []
    nnx.jit(lambda a, b: same.append(a is b))(model, model)
    return same


table(
    PROGRAMS,
    "jit",
    {
        "call": lambda nnx: nnx.jit(call)(linear(nnx), X),
        "state": lambda nnx: with_state(nnx, nnx.jit(counted), counter(nnx)),
        "twice": lambda nnx: with_state(
            nnx, lambda m: [nnx.jit(counted)(m) for _ in range(2)], counter(nnx)
        ),
        "structure": lambda nnx: with_state(nnx, nnx.jit(structure_changed), counter(nnx)),
        "swapped_parts": swap_in_jit,
        "made_inside": lambda nnx: nnx.state(nnx.jit(lambda: linear(nnx, 4))()),
        "static_argument": lambda nnx: nnx.jit(
            lambda m, x, flip: m(x[::-1] if flip else x), static_argnames="flip"
        )(linear(nnx), X, flip=True),
        "donated": lambda nnx: with_state(nnx, nnx.jit(counted, donate_argnums=0), counter(nnx)),
        "inside_jax_jit": lambda nnx: jax.jit(lambda x: nnx.jit(call)(linear(nnx), x))(X),
        "shared_twice": shared_in_jit,
        "bound_method": lambda nnx: nnx.jit(linear(nnx).__call__)(X),
        "lowered": lambda nnx: nnx.jit(call).lower(linear(nnx), X).compile()(linear(nnx), X),
        "partial": lambda nnx: nnx.cached_partial(nnx.jit(call), linear(nnx))(X),
        "branch_on_a_tracer": lambda nnx: nnx.jit(lambda m, x: m(x) if x[0, 0] > 0 else x)(
            linear(nnx), X
        ),
    },
    raises={"bound_method": ValueError, "branch_on_a_tracer": jax.errors.TracerBoolConversionError},
)

# ---- grad and value_and_grad --------------------------------------------------------------------


def squares(model, x=X):
    return (model(x) ** 2).mean()


def with_aux(model):
    y = model(X)
    return (y**2).mean(), {"y": y}


def square_norm(nnx, **options):
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    return nnx.grad(squares, **options)(norm), nnx.state(norm)


table(
    PROGRAMS,
    "grad",
    {
        "model": lambda nnx: nnx.grad(squares)(linear(nnx)),
        "value": lambda nnx: nnx.value_and_grad(squares)(linear(nnx)),
        "aux": lambda nnx: nnx.grad(with_aux, has_aux=True)(linear(nnx)),
        "value_and_aux": lambda nnx: nnx.value_and_grad(with_aux, has_aux=True)(linear(nnx)),
        "state_changes": square_norm,
        "without_graph_updates": lambda nnx: square_norm(nnx, graph_updates=False)[1],
        "input": lambda nnx: nnx.grad(squares, argnums=1)(linear(nnx), X),
        "both": lambda nnx: nnx.grad(squares, argnums=(0, 1))(linear(nnx), X),
        "by_path": lambda nnx: nnx.grad(
            squares, argnums=nnx.DiffState(0, nnx.PathContains("bias"))
        )(linear(nnx)),
        "of_grad": lambda nnx: nnx.grad(
            lambda m: sum((g**2).sum() for g in jax.tree.leaves(nnx.grad(squares)(m)))
        )(linear(nnx)),
        "two_models": lambda nnx: nnx.grad(lambda a, b: (b(a(X)) ** 2).mean(), argnums=(0, 1))(
            linear(nnx, 0), linear(nnx, 1)
        ),
        "of_a_method": lambda nnx: nnx.grad(lambda m: m(X).sum())(linear(nnx)),
        "not_a_scalar": lambda nnx: nnx.grad(lambda m: m(X))(linear(nnx)),
        "of_integers": lambda nnx: nnx.grad(lambda x: x * 2)(3),
        "inside_jit": lambda nnx: nnx.jit(nnx.value_and_grad(squares))(linear(nnx)),
        "argnums_out_of_range": lambda nnx: nnx.grad(squares, argnums=3)(linear(nnx)),
    },
    raises={"not_a_scalar": TypeError, "of_integers": TypeError, "argnums_out_of_range": TypeError},
)

# ---- vjp, jvp, custom_vjp -----------------------------------------------------------------------


def pulled(nnx, f, *args, **options):
    out, pull = nnx.vjp(f, *args, **(options or {"graph": False}))
    return out, pull(jnp.ones_like(out))


def own_backward(nnx, f=jnp.sin, nondiff=False):
    if nondiff:
        run = nnx.custom_vjp(lambda n, x: x * n, nondiff_argnums=(0,), graph=False)
        run.defvjp(lambda n, x: (run(n, x), x), lambda n, x, g: (g * n * 10,))
        return nnx.grad(lambda x: run(3, x), graph=False)(2.0)
    run = nnx.custom_vjp(f)
    run.defvjp(lambda x: (run(x), x), lambda x, g: (g[1] * 3.0,))
    return run(2.0), nnx.grad(run)(2.0)


def own_backward_of_a_model(nnx):
    @nnx.custom_vjp
    def run(model, x):
        return model(x).sum()

    def forward(model, x):
        return run(model, x), (model.kernel[...], x)

    def backward(residuals, gradients):
        (of_model, _), g = gradients
        of_model = jax.tree.map(lambda leaf: jnp.full(leaf.shape, g), of_model)
        return of_model, residuals[1] * g

    run.defvjp(forward, backward)
    return nnx.grad(run, argnums=(0, 1))(linear(nnx), X)


table(
    PROGRAMS,
    "vjp",
    {
        "of_a_function": lambda nnx: pulled(nnx, jnp.sin, X),
        "of_a_model_in_tree_mode": lambda nnx: nnx.state(
            pulled(nnx, call, linear(nnx), X, graph=False)[1][0]
        ),
        "of_a_model_without_updates": lambda nnx: jax.tree.leaves(
            pulled(nnx, call, linear(nnx), X, graph_updates=False)[1]
        ),
        "with_aux": lambda nnx: nnx.vjp(lambda x: (x * 2, x + 1), X, has_aux=True, graph=False)[2],
        "of_two_arguments": lambda nnx: pulled(nnx, jnp.multiply, X, X + 1),
        "jvp_of_a_function": lambda nnx: nnx.jvp(jnp.sin, (X,), (jnp.ones_like(X),), graph=False),
        "jvp_with_aux": lambda nnx: nnx.jvp(
            lambda x: (x**2, x), (X,), (jnp.ones_like(X),), has_aux=True, graph=False
        ),
        "jvp_of_two_arguments": lambda nnx: nnx.jvp(
            jnp.multiply, (X, X), (X, jnp.ones_like(X)), graph=False
        ),
        "custom": own_backward,
        "custom_under_jit": lambda nnx: own_backward(nnx, nnx.jit(lambda x: x**2)),
        "custom_with_static_arguments": lambda nnx: own_backward(nnx, nondiff=True),
        "custom_of_a_model": own_backward_of_a_model,
    },
)

# ---- remat --------------------------------------------------------------------------------------


def noisy(nnx):
    return nnx.Sequential(linear(nnx), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1)), linear(nnx, 1))


def remat_of_methods(nnx):
    class Net(nnx.Module):
        def __init__(self):
            self.one = linear(nnx)

        @nnx.remat
        def __call__(self, x):
            return jnp.tanh(self.one(x))

    return nnx.value_and_grad(squares)(Net())


table(
    PROGRAMS,
    "remat",
    {
        "call": lambda nnx: nnx.remat(call)(linear(nnx), X),
        "grad": lambda nnx: nnx.grad(nnx.remat(squares))(linear(nnx)),
        "state": lambda nnx: with_state(nnx, nnx.remat(counted), counter(nnx)),
        "method": remat_of_methods,
        "dropout": lambda nnx: with_state(nnx, nnx.grad(nnx.remat(squares)), noisy(nnx)),
        "policy": lambda nnx: nnx.grad(
            nnx.remat(squares, policy=jax.checkpoint_policies.everything_saveable)
        )(linear(nnx)),
        "static_argument": lambda nnx: nnx.remat(lambda m, n: m(X) * n, static_argnums=1)(
            linear(nnx), 3
        ),
        "as_a_decorator_with_options": lambda nnx: nnx.remat(prevent_cse=False)(call)(
            linear(nnx), X
        ),
        "inside_jit": lambda nnx: nnx.jit(nnx.remat(call))(linear(nnx), X),
        "inside_scan": lambda nnx: nnx.scan(
            nnx.remat(lambda x, m: m(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(X, stacked(nnx)),
    },
)

# ---- vmap ---------------------------------------------------------------------------------------


def made_along(nnx, **options):
    keys = jax.random.split(jax.random.key(0), 3)
    return nnx.state(nnx.vmap(lambda key: nnx.Linear(2, 3, rngs=nnx.Rngs(key)), **options)(keys))


def vmap_of_methods(nnx):
    class Net(nnx.Module):
        def __init__(self):
            self.one = linear(nnx)

        @nnx.vmap(in_axes=(None, 0))
        def __call__(self, x):
            return self.one(x)

    return Net()(X)


table(
    PROGRAMS,
    "vmap",
    {
        "stacked": lambda nnx: nnx.vmap(call, in_axes=(0, None))(stacked(nnx), X),
        "stacked_and_mapped": lambda nnx: nnx.vmap(call)(stacked(nnx), jnp.stack([X] * 3)),
        "broadcast": lambda nnx: nnx.vmap(call, in_axes=(None, 0))(linear(nnx), X),
        "made": made_along,
        "made_along_the_second_axis": lambda nnx: made_along(nnx, out_axes=1),
        "axes_by_filter": lambda nnx: nnx.vmap(
            call, in_axes=(nnx.StateAxes({"bias": None, ...: 0}), None)
        )(
            updated(nnx, stacked(nnx), bias=jnp.ones(3)),
            X,
        ),
        "method": vmap_of_methods,
        "collective": lambda nnx: nnx.vmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")(X),
        "state": lambda nnx: with_state(
            nnx,
            nnx.vmap(counted),
            updated(nnx, counter(nnx), count=jnp.arange(3.0), w=jnp.ones((3, 2))),
        ),
        "of_vmap": lambda nnx: nnx.vmap(nnx.vmap(call, in_axes=(None, 0)), in_axes=(0, None))(
            stacked(nnx), X
        ),
        "out_axes": lambda nnx: nnx.vmap(lambda x: (x, x.sum()), out_axes=(1, 0))(X),
        "broadcast_output": lambda nnx: nnx.vmap(lambda x: 3.0, out_axes=None)(X),
        "different_sizes": lambda nnx: nnx.vmap(lambda x, y: x + y)(jnp.ones(2), jnp.ones(3)),
        "batched_output_without_axis": lambda nnx: nnx.vmap(lambda x: x, out_axes=None)(X),
        "broadcast_state_that_changes": lambda nnx: nnx.vmap(
            lambda m, x: (m.count.set_value(m.count + x), x)[1], in_axes=(None, 0)
        )(counter(nnx), jnp.arange(2.0)),
    },
    raises={
        "different_sizes": ValueError,
        "batched_output_without_axis": ValueError,
        "broadcast_state_that_changes": ValueError,
    },
)

# ---- pmap and shard_map, on one device ----------------------------------------------------------


def sharded(nnx, f, *args, **options):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return nnx.shard_map(f, mesh=mesh, **options)(*args)


spec = jax.sharding.PartitionSpec

table(
    PROGRAMS,
    "pmap",
    {
        "function": lambda nnx: nnx.pmap(jnp.sin)(X[None]),
        "model": lambda nnx: nnx.pmap(call, in_axes=(None, 0))(linear(nnx), X[None]),
        "stacked": lambda nnx: nnx.pmap(call)(stacked(nnx, 1), X[None]),
        "made": lambda nnx: nnx.state(
            nnx.pmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 1)
            )
        ),
        "collective": lambda nnx: nnx.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(X[None]),
        "state": lambda nnx: with_state(
            nnx,
            nnx.pmap(counted),
            updated(nnx, counter(nnx), count=jnp.zeros(1), w=jnp.ones((1, 2))),
        ),
        "gradients": lambda nnx: nnx.pmap(nnx.grad(squares))(stacked(nnx, 1), X[None]),
        "axes_by_filter": lambda nnx: nnx.pmap(call, in_axes=(nnx.StateAxes({...: 0}), None))(
            stacked(nnx, 1), X
        ),
        "static_argument": lambda nnx: nnx.pmap(lambda x, n: x * n, static_broadcasted_argnums=1)(
            X[None], 3
        ),
        "too_many": lambda nnx: nnx.pmap(jnp.sin)(jnp.ones((1000, 2))),
    },
    raises={"too_many": ValueError},
)
table(
    PROGRAMS,
    "shard_map",
    {
        "function": lambda nnx: sharded(nnx, jnp.sin, X, in_specs=spec("d"), out_specs=spec("d")),
        "model": lambda nnx: sharded(
            nnx, call, linear(nnx), X, in_specs=(spec(), spec("d")), out_specs=spec("d")
        ),
        "specs_by_filter": lambda nnx: sharded(
            nnx,
            call,
            linear(nnx),
            X,
            in_specs=(nnx.StateSharding({"kernel": spec(None, "d"), ...: spec("d")}), spec()),
            out_specs=spec(None, "d"),
        ),
        "state": lambda nnx: with_state(
            nnx,
            lambda m: sharded(nnx, counted, m, in_specs=spec(), out_specs=spec()),
            counter(nnx),
        ),
        "collective": lambda nnx: sharded(
            nnx, lambda x: jax.lax.psum(x, "d"), X, in_specs=spec("d"), out_specs=spec()
        ),
        "gradients": lambda nnx: sharded(
            nnx,
            nnx.grad(squares),
            linear(nnx),
            X,
            in_specs=(spec(), spec()),
            out_specs=spec(),
        ),
        "made": lambda nnx: nnx.state(
            sharded(nnx, lambda: linear(nnx), in_specs=(), out_specs=spec())
        ),
        "inside_jit": lambda nnx: nnx.jit(
            lambda m, x: sharded(nnx, call, m, x, in_specs=(spec(), spec()), out_specs=spec())
        )(linear(nnx), X),
        "index": lambda nnx: sharded(
            nnx, lambda x: x + jax.lax.axis_index("d"), X, in_specs=spec("d"), out_specs=spec("d")
        ),
        "unknown_axis": lambda nnx: sharded(
            nnx, jnp.sin, X, in_specs=spec("other"), out_specs=spec()
        ),
    },
    raises={"unknown_axis": ValueError},
)

# ---- scan ---------------------------------------------------------------------------------------


def cumulative(nnx, **options):
    @nnx.scan(**options)
    def step(total, x):
        return total + x, total * x

    return step(jnp.array(1.0), jnp.arange(4.0))


def scan_with_state(nnx):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(model, x):
        return model, model(x)

    model, outs = step(counter(nnx), X[:, :2])
    return outs, nnx.state(model)


def scan_broadcasting(nnx):
    model = counter(nnx)

    @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(model, total, x):
        return total + x.sum(), (model.w * x).sum()

    return step(model, 0.0, X[:, :2]), nnx.state(model)


def scan_over_layers_with_dropout(nnx):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.drop = nnx.Linear(3, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(nnx.relu(self.linear(x)))

    make = nnx.split_rngs(splits=3)(nnx.vmap(Block))
    blocks = make(nnx.Rngs(0, dropout=1))
    run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return run(X, blocks), nnx.state(blocks)


table(
    PROGRAMS,
    "scan",
    {
        "plain": cumulative,
        "reversed": lambda nnx: cumulative(nnx, reverse=True),
        "unrolled": lambda nnx: cumulative(nnx, unroll=2),
        "layers": lambda nnx: nnx.scan(
            lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(X, stacked(nnx)),
        "layers_with_outputs": lambda nnx: nnx.scan(
            lambda x, m: (m(x), x.sum()), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
        )(X, stacked(nnx)),
        "layers_with_dropout": scan_over_layers_with_dropout,
        "gradients": lambda nnx: nnx.grad(
            lambda m: nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                X, m
            ).sum()
        )(stacked(nnx)),
        "state": scan_with_state,
        "broadcast": scan_broadcasting,
        "along_the_second_axis": lambda nnx: nnx.scan(
            lambda c, x: (c + x.sum(), x * 2), in_axes=(nnx.Carry, 1), out_axes=(nnx.Carry, 1)
        )(0.0, X),
        "length": lambda nnx: nnx.scan(
            lambda c: (c * 2, c), length=4, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0)
        )(1.0),
        "without_a_carry": lambda nnx: nnx.scan(lambda x: x * 2, in_axes=0, out_axes=0)(X),
        "carry_of_another_type": lambda nnx: nnx.scan(lambda c, x: (c[None], x))(X, X),
        "different_lengths": lambda nnx: nnx.scan(
            lambda c, x, y: c, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry
        )(0.0, jnp.ones(2), jnp.ones(3)),
    },
    raises={"carry_of_another_type": TypeError, "different_lengths": ValueError},
)

# ---- loops and branches -------------------------------------------------------------------------


def add_one(model):
    model.count[...] += 1
    return model


table(
    PROGRAMS,
    "while_loop",
    {
        "number": lambda nnx: nnx.while_loop(lambda x: x < 10, lambda x: x * 2 + 1, 1),
        "state": lambda nnx: nnx.state(
            nnx.while_loop(lambda m: m.count[...] < 5, add_one, counter(nnx))
        ),
        "pair": lambda nnx: nnx.while_loop(
            lambda v: v[0] < 3, lambda v: (v[0] + 1, v[1] * 2), (0, jnp.ones(2))
        ),
        "model_and_input": lambda nnx: nnx.while_loop(
            lambda v: v[2] < 3, lambda v: (v[0], v[0](v[1]), v[2] + 1), (linear(nnx), X, 0)
        )[1],
        "never": lambda nnx: nnx.while_loop(lambda x: x < 0, lambda x: x + 1, 3),
        "inside_jit": lambda nnx: nnx.state(
            nnx.jit(lambda m: nnx.while_loop(lambda m: m.count[...] < 5, add_one, m))(counter(nnx))
        ),
        "new_attribute": lambda nnx: nnx.while_loop(
            lambda m: m.count[...] < 2,
            lambda m: (setattr(m, "n", jnp.ones(1)), add_one(m))[1],
            counter(nnx),
        ),
        "another_shape": lambda nnx: nnx.while_loop(lambda x: x.sum() < 3, lambda x: x[None], X),
        "stream": lambda nnx: nnx.state(
            nnx.while_loop(
                lambda v: v[1] < 3, lambda v: (v[0], v[1] + v[0].uniform(())), (nnx.Rngs(0), 0.0)
            )[0]
        ),
        "optimizing": lambda nnx: nnx.while_loop(
            lambda v: v[1] < 3, lambda v: (v[0] - 0.1 * jax.grad(jnp.sum)(v[0]), v[1] + 1), (X, 0)
        ),
    },
    raises={"new_attribute": ValueError, "another_shape": TypeError},
)
table(
    PROGRAMS,
    "fori_loop",
    {
        "number": lambda nnx: nnx.fori_loop(0, 5, lambda i, x: x + i, 0),
        "state": lambda nnx: nnx.state(nnx.fori_loop(0, 3, lambda i, m: add_one(m), counter(nnx))),
        "from_two": lambda nnx: nnx.fori_loop(2, 5, lambda i, x: x * i, 1),
        "none": lambda nnx: nnx.fori_loop(3, 3, lambda i, x: x * i, 1),
        "model": lambda nnx: nnx.fori_loop(0, 2, lambda i, v: (v[0], v[0](v[1])), (linear(nnx), X))[
            1
        ],
        "unrolled": lambda nnx: nnx.fori_loop(0, 4, lambda i, x: x + i, 0, unroll=2),
        "traced_bound": lambda nnx: nnx.jit(lambda n: nnx.fori_loop(0, n, lambda i, x: x + i, 0))(
            4
        ),
        "gradient": lambda nnx: nnx.grad(
            lambda m: nnx.fori_loop(0, 2, lambda i, v: (v[0], v[0](v[1])), (m, X))[1].sum()
        )(linear(nnx)),
        "stream": lambda nnx: nnx.fori_loop(
            0, 3, lambda i, v: (v[0], v[1] + v[0].normal(())), (nnx.Rngs(0), 0.0)
        )[1],
        "another_shape": lambda nnx: nnx.fori_loop(0, 2, lambda i, x: x[None], X),
    },
    raises={"another_shape": TypeError},
)


def branch(nnx, condition, **options):
    model = counter(nnx)
    out = nnx.cond(condition, counted, lambda m: m.w * 5, model, **options)
    return out, nnx.state(model)


def switched(nnx, index):
    model = counter(nnx)
    branches = [lambda m, x: m.w * x, lambda m, x: counted(m) + x, lambda m, x: -m.w]
    return nnx.switch(index, branches, model, 3.0), nnx.state(model)


table(
    PROGRAMS,
    "cond",
    {
        "true": lambda nnx: branch(nnx, True),
        "false": lambda nnx: branch(nnx, False),
        "traced": lambda nnx: nnx.jit(lambda c: branch(nnx, c)[0])(jnp.array(True)),
        "arrays": lambda nnx: nnx.cond(X.sum() > 0, jnp.sin, jnp.cos, X),
        "models": lambda nnx: nnx.cond(False, call, lambda m, x: m(2 * x), linear(nnx), X),
        "gradient": lambda nnx: nnx.grad(
            lambda m: nnx.cond(True, lambda m: m(X).sum(), lambda m: 0.0, m)
        )(linear(nnx)),
        "without_graph_updates": lambda nnx: branch(nnx, True, graph_updates=False),
        "different_outputs": lambda nnx: nnx.cond(True, lambda x: x, lambda x: x[0], X),
        "different_structures": lambda nnx: nnx.cond(
            True, lambda m: setattr(m, "n", jnp.ones(1)), lambda m: None, counter(nnx)
        ),
        "of_streams": lambda nnx: nnx.cond(
            True, lambda r: r.normal(()), lambda r: 0.0, nnx.Rngs(0)
        ),
        "nothing": lambda nnx: nnx.cond(True, lambda: 1, lambda: 2),
    },
    raises={"different_outputs": TypeError, "different_structures": TypeError},
)
table(
    PROGRAMS,
    "switch",
    {
        "first": lambda nnx: switched(nnx, 0),
        "second": lambda nnx: switched(nnx, 1),
        "clamped": lambda nnx: switched(nnx, 7),
        "below": lambda nnx: switched(nnx, -1),
        "traced": lambda nnx: nnx.jit(lambda i: switched(nnx, i)[0])(jnp.array(2)),
        "of_models": lambda nnx: nnx.switch(
            1, [lambda ms, x: ms[0](x), lambda ms, x: ms[1](x)], [linear(nnx), linear(nnx, 1)], X
        ),
        "one_branch": lambda nnx: nnx.switch(0, [jnp.sin], X),
        "no_branch": lambda nnx: nnx.switch(0, [], X),
        "different_outputs": lambda nnx: nnx.switch(0, [lambda x: x, lambda x: x.sum()], X),
        "gradient": lambda nnx: nnx.grad(
            lambda m: nnx.switch(1, [lambda m: 0.0, lambda m: m(X).sum()], m)
        )(linear(nnx)),
    },
    raises={"no_branch": ValueError, "different_outputs": TypeError},
)

# ---- eval_shape, make_jaxpr, checkify -----------------------------------------------------------


def shape_of(x):
    return [x.shape, str(x.dtype)]


def abstract_then_loaded(nnx):
    model = nnx.eval_shape(lambda: linear(nnx))
    graphdef, shapes = nnx.split(model)
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    return nnx.merge(graphdef, params)(X)


def checked(nnx, value):
    from jax.experimental import checkify

    def run(model, x):
        checkify.check(x > 0, "must be positive")
        return counted(model) * x

    model = counter(nnx)
    error, out = nnx.checkify(run)(model, jnp.array(value))
    return str(error.get()).partition("(")[0], out, nnx.state(model)


table(
    PROGRAMS,
    "eval_shape",
    {
        "made": lambda nnx: shape_of(nnx.eval_shape(lambda: linear(nnx)).kernel),
        "called": lambda nnx: shape_of(nnx.eval_shape(call, linear(nnx), X)),
        "of_shapes": lambda nnx: shape_of(
            nnx.eval_shape(call, linear(nnx), jax.ShapeDtypeStruct((5, 3), jnp.float32))
        ),
        "changes_nothing": lambda nnx: with_state(
            nnx, lambda m: shape_of(nnx.eval_shape(counted, m)), counter(nnx)
        )[1],
        "then_loaded": abstract_then_loaded,
        "of_a_state": lambda nnx: jax.tree.map(
            shape_of, nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: linear(nnx))))
        ),
        "of_streams": lambda nnx: nnx.eval_shape(lambda: nnx.Rngs(0)).default.key.shape,
        "abstract_called": lambda nnx: nnx.eval_shape(lambda: linear(nnx))(X),
        "wrong_shape": lambda nnx: nnx.eval_shape(call, linear(nnx), jnp.ones((2, 7))),
        "partial": lambda nnx: shape_of(
            nnx.eval_shape(lambda seed: linear(nnx, 0, 2, 5), 1).kernel
        ),
    },
    raises={"abstract_called": TypeError, "wrong_shape": TypeError},
)
table(
    PROGRAMS,
    "checkify",
    {
        "passes": lambda nnx: checked(nnx, 1.0),
        "fails": lambda nnx: checked(nnx, -1.0)[0],
        "jaxpr_counts_outputs": lambda nnx: len(
            nnx.make_jaxpr(lambda x: (x, jnp.sin(x)), graph_updates=False)(X).jaxpr.outvars
        ),
        "jaxpr_of_a_model_in_tree_mode": lambda nnx: len(
            nnx.make_jaxpr(call, graph=False, graph_updates=False)(linear(nnx), X).jaxpr.invars
        ),
    },
)

test_programs = same_on_both(PROGRAMS)
