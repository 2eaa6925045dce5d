"""Programs over transforms: axes of arguments, prefixes, gradients, captured values, streams."""

import jax
import jax.numpy as jnp

from tests.against_flax.compare import program, same_on_both
from tests.models import call

PROGRAMS = {}


# ---- arguments given by name --------------------------------------------------------------------


@program(PROGRAMS)
def layers_made_with_rngs_by_name(f):
    nnx = f.nnx
    each = nnx.StateAxes({...: 0})

    class Stack(nnx.Module):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(each, each))
        def __init__(self, rngs):
            self.layer = nnx.Linear(2, 2, rngs=rngs)

        @nnx.scan(in_axes=(each, nnx.Carry), out_axes=nnx.Carry)
        def __call__(self, x):
            return self.layer(x)

    stack = Stack(rngs=nnx.Rngs(0))
    return stack(x=jnp.ones((1, 2))), nnx.state(stack)


@program(PROGRAMS)
def vmap_by_name(f):
    mapped = f.nnx.vmap(lambda x, y, z=2.0: x * y + z, in_axes=(0, None, None))
    return mapped(jnp.arange(3.0), y=jnp.arange(2.0)), mapped(y=jnp.ones(2), x=jnp.arange(2.0))


@program(PROGRAMS)
def vmap_by_name_along_one_axis(f):
    x = jnp.arange(6.0).reshape(2, 3)
    return f.nnx.vmap(lambda x, y: x * y, in_axes=1)(x, y=x)


@program(PROGRAMS)
def vmap_by_name_in_tree_mode(f):
    x = jnp.arange(6.0).reshape(2, 3)
    return f.nnx.vmap(lambda x, y: x * y, in_axes=(1,), graph=False)(x, y=x.T)


@program(PROGRAMS)
def scan_by_name(f):
    def step(x, total, by=2.0):
        return x * by, total + x

    axes = {"in_axes": (0, f.nnx.Carry, None), "out_axes": (0, f.nnx.Carry)}
    return f.nnx.scan(step, **axes)(total=jnp.array(1.0), x=jnp.arange(3.0))


@program(PROGRAMS)
def grad_by_name(f):
    nnx = f.nnx
    layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    loss = lambda x, model: (model(x) ** 2).sum()  # noqa: E731
    product = lambda x, y=3.0: x * y  # noqa: E731
    return (
        nnx.grad(loss, argnums=nnx.DiffState(1, nnx.Param))(jnp.ones((1, 2)), model=layer),
        nnx.grad(product, argnums=(0, 1))(2.0),
        nnx.grad(product, argnums=-1)(2.0, y=4.0),
        nnx.grad(product, argnums=-1, graph=False)(2.0, y=4.0),
    )


@program(PROGRAMS, raises=TypeError)
def an_argument_is_missing(f):
    return f.nnx.vmap(lambda x, y: x, in_axes=(0, 0))(jnp.ones(2))


# ---- prefixes -----------------------------------------------------------------------------------


def stacked_layers(nnx):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return nnx.Linear(2, 2, rngs=rngs)

    return make(nnx.Rngs(0))


@program(PROGRAMS)
def axes_from_a_state(f):
    axes = f.nnx.StateAxes(f.nnx.State({"kernel": 0, "bias": None}))
    value = f.nnx.Param(1)
    return axes.axes, axes.map_prefix(("kernel",), value), axes.map_prefix(("bias",), value)


@program(PROGRAMS, raises=ValueError)
def axes_from_a_state_without_the_path(f):
    return f.nnx.StateAxes(f.nnx.State({"kernel": 0})).map_prefix(("bias",), f.nnx.Param(1))


@program(PROGRAMS)
def vmap_with_axes_from_a_state(f):
    nnx = f.nnx
    model = stacked_layers(nnx)
    axes = nnx.StateAxes(jax.tree.map(lambda x: 0, nnx.state(model)))
    return nnx.vmap(call, in_axes=(axes, None))(model, jnp.ones((1, 2)))


@program(PROGRAMS)
def shardings_from_a_state(f):
    nnx = f.nnx
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    shardings = nnx.StateSharding(jax.tree.map(lambda x: here, nnx.state(model)))
    make = nnx.jit(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(1)), out_shardings=shardings)
    run = nnx.jit(call, in_shardings=(shardings, None))
    return nnx.state(make()), run(model, jnp.ones((1, 2)))


def prefixes(nnx, **mode):
    graph = {"graph": mode.get("graph", True)}
    model, x = stacked_layers(nnx), jnp.ones((1, 2))
    axes = nnx.prefix(model, {nnx.Param: 0, ...: None}, **graph)
    other = nnx.prefix(model, {nnx.PathContains("kernel"): 1, ...: 0}, **graph)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = nnx.prefix(model, {...: here}, **graph)

    def make(key):
        return nnx.Linear(2, 2, rngs=nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 3)
    scanned = nnx.scan(
        lambda x, model: model(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, **mode
    )
    return (
        nnx.vmap(call, in_axes=(axes, None), **mode)(model, x),
        nnx.state(nnx.vmap(make, out_axes=other, **mode)(keys)),
        scanned(x, model),
        nnx.state(nnx.jit(make, out_shardings=shardings, **mode)(keys[0])),
    )


@program(PROGRAMS)
def prefixes_in_tree_mode(f):
    return prefixes(f.nnx, graph=False)


@program(PROGRAMS)
def prefixes_without_graph_updates(f):
    return prefixes(f.nnx, graph_updates=False)


# ---- gradients ----------------------------------------------------------------------------------


@program(PROGRAMS)
def a_variable_twice_in_a_dict(f):
    nnx = f.nnx
    v = nnx.Param(jnp.array(3.0))
    product = lambda d: d["a"][...] * d["b"][...]  # noqa: E731
    one = nnx.grad(product)({"a": v, "b": v})
    return one, nnx.grad(product, graph_updates=False)({"a": v, "b": v})


@program(PROGRAMS)
def a_model_and_its_kernel_in_a_dict(f):
    nnx = f.nnx
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    loss = lambda d: (d["a"](jnp.ones((1, 1))) * d["k"][...]).sum()  # noqa: E731
    return nnx.grad(loss)({"a": layer, "k": layer.kernel})


@program(PROGRAMS)
def gradients_in_tree_mode_are_a_model(f):
    nnx = f.nnx
    norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda m: m(jnp.ones((2, 1))).sum(), graph=False)(norm)
    return type(grads).__name__, nnx.state(grads), nnx.state(norm)


@program(PROGRAMS, raises=ValueError)
def diff_state_in_tree_mode(f):
    nnx = f.nnx
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    argnums = nnx.DiffState(0, nnx.Param)
    return nnx.grad(lambda m: m(jnp.ones((1, 1))).sum(), graph=False, argnums=argnums)(layer)


@program(PROGRAMS)
def new_attributes_in_tree_mode(f):
    nnx = f.nnx
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    @nnx.jit(graph=False)
    def change(layer):
        layer.new, layer.flag = nnx.Param(jnp.ones(2)), 3
        layer.bias[...] += 1.0

    change(layer)
    return hasattr(layer, "new"), hasattr(layer, "flag"), nnx.state(layer)


@program(PROGRAMS, raises=ValueError)
def an_input_returned_in_tree_mode(f):
    return f.nnx.jit(lambda v: v, graph=False)(f.nnx.Param(jnp.ones(2)))


def custom_gradients(nnx, **mode):
    a, b = nnx.Param(jnp.array(2.0)), nnx.BatchStat(jnp.array(1.0))

    @nnx.custom_vjp(**mode)
    def run(a, b, x):
        b[...] = b[...] + a[...] * x
        return a[...] * x

    def forward(a, b, x):
        return run(a, b, x), (a[...], x)

    def backward(residuals, g, updates_g):
        assert updates_g[0] is None
        assert updates_g[2] is None
        written = updates_g[1][...]
        return nnx.Param(g * residuals[1] + written * 10), nnx.BatchStat(written), g * residuals[0]

    run.defvjp(forward, backward)
    loss = lambda a, b, x: run(a, b, x) + 5 * b[...]  # noqa: E731
    return nnx.grad(loss, argnums=(0, 1, 2), **mode)(a, b, jnp.array(3.0)), b


@program(PROGRAMS)
def custom_gradients_in_tree_mode(f):
    return custom_gradients(f.nnx, graph=False)


@program(PROGRAMS)
def custom_gradients_without_graph_updates(f):
    return custom_gradients(f.nnx, graph_updates=False)


# ---- random streams -----------------------------------------------------------------------------


def streams(nnx, **mode):
    rngs = nnx.Rngs(0, dropout=1)
    count = nnx.BatchStat(jnp.array(0.0))

    @nnx.split_rngs(splits=3, **mode)
    @nnx.vmap(in_axes=(0, None), **mode)
    def draw(rngs, count):
        count[...] += 1.0
        return rngs.normal((2,))

    @nnx.fork_rngs(split={"dropout": 2}, **mode)
    def fork(rngs):
        return nnx.state(rngs)

    @nnx.jit(**mode)
    @nnx.split_rngs(splits=2, only="dropout", **mode)
    def inner(rngs):
        return nnx.state(rngs, nnx.RngKey)["dropout"]["key"][...]

    made = [nnx.state(rngs)]
    if mode:
        made.append(nnx.state(nnx.split_rngs(rngs, splits=1, squeeze=True, **mode)))
        made.append(nnx.state(nnx.fork_rngs(rngs, **mode)))
    return draw(rngs, count), count, fork(rngs), inner(rngs), made, nnx.state(rngs)


@program(PROGRAMS)
def streams_with_graph_updates(f):
    return streams(f.nnx)


@program(PROGRAMS)
def streams_in_tree_mode(f):
    return streams(f.nnx, graph=False)


@program(PROGRAMS)
def streams_without_graph_updates(f):
    return streams(f.nnx, graph_updates=False)


@program(PROGRAMS)
def streams_that_are_left_alone(f):
    nnx = f.nnx
    rngs = nnx.Rngs(params=0, dropout=1, other=2)
    broadcast = rngs.broadcast({"params": 5, "dropout": None})
    divided = rngs.split({"dropout": None, ...: 2})
    return nnx.state(broadcast), nnx.state(divided), nnx.state(rngs)


# ---- captured values ----------------------------------------------------------------------------


def sower(nnx, w):
    class Sower(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(jnp.asarray(w))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "y", self.w * x)
            return self.w * x

        def feature(self, x):
            self.sow(nnx.Intermediate, "feature", x)
            return x

    return Sower(w)


@program(PROGRAMS)
def capture_as_a_decorator(f):
    nnx = f.nnx

    @nnx.capture(nnx.Intermediate, method_outputs=nnx.Intermediate)
    def run(model, x):
        return model(x)

    return run(sower(nnx, 2.0), jnp.array(3.0))


@program(PROGRAMS)
def capture_a_bound_method_that_sows_its_name(f):
    nnx = f.nnx
    model = sower(nnx, 2.0)
    named = nnx.capture(model.feature, nnx.Intermediate, method_outputs=nnx.Intermediate)
    by_closure = nnx.capture(lambda _, x: model(x), nnx.Intermediate)
    return named(jnp.array(3.0)), by_closure(model, jnp.array(3.0)), hasattr(model, "y")


def capture_around(nnx, **mode):
    x, stack = jnp.array(3.0), sower(nnx, jnp.arange(3.0))
    jitted = nnx.jit(call, **mode)
    mapped = nnx.vmap(call, in_axes=(0, None), **mode)
    axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
    scanned = nnx.scan(lambda model, x: model(x) + 1.0, **axes, **mode)
    return (
        nnx.capture(jitted, nnx.Intermediate)(sower(nnx, 2.0), x),
        nnx.capture(mapped, nnx.Intermediate)(stack, x),
        nnx.capture(scanned, nnx.Intermediate)(stack, x),
        nnx.state(stack),
    )


@program(PROGRAMS)
def capture_around_transforms(f):
    return capture_around(f.nnx)


@program(PROGRAMS)
def capture_around_transforms_in_tree_mode(f):
    return capture_around(f.nnx, graph=False)


@program(PROGRAMS)
def capture_around_transforms_without_graph_updates(f):
    return capture_around(f.nnx, graph_updates=False)


@program(PROGRAMS)
def perturbations_around_vmap(f):
    nnx = f.nnx

    class Square(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.arange(3.0))

        def __call__(self, x):
            return (self.perturb("p", x * self.w) ** 2).sum()

    model, x = Square(), jnp.array(3.0)
    mapped = nnx.vmap(call, in_axes=(0, None), graph=False)
    _, perturbations = nnx.capture(mapped, nnx.Perturbation)(model, x)

    def loss(model, perturbations):
        return nnx.capture(mapped, init=perturbations)(model, x).sum()

    return perturbations, nnx.grad(loss, argnums=1, graph=False)(model, perturbations)


# ---- loops --------------------------------------------------------------------------------------


@program(PROGRAMS)
def arrays_of_a_carried_object(f):
    nnx = f.nnx

    class Total(nnx.Pytree):
        def __init__(self):
            self.a = jnp.array(0.0)

    def add(total, x):
        total.a = total.a + x
        return total, total.a

    def run(**mode):
        total, sums = nnx.scan(add, **mode)(Total(), jnp.arange(3.0))
        last = nnx.fori_loop(0, 3, lambda i, total: add(total, i)[0], Total(), **mode)
        return total.a, sums, last.a

    return run(), run(graph=False), run(graph_updates=False)


test_programs = same_on_both(PROGRAMS)
