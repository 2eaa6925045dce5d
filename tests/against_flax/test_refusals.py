"""Programs over what transforms refuse, take and leave behind, each in the three modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}
XS = jnp.arange(3.0)
MODES = {
    "in graph mode": {},
    "without graph updates": {"graph_updates": False},
    "in tree mode": {"graph": False},
}


AS_JAX = {name: mode for name, mode in MODES.items() if mode}


def in_every_mode(function=None, modes=MODES, refused=()):
    """Enters a function of ``nnx`` and a mode once for each mode, and says which refuse it."""
    if function is None:
        return functools.partial(in_every_mode, modes=modes, refused=refused)

    def enter(name, mode):
        def run(f):
            return function(f.nnx, **mode)

        run.__name__ = f"{function.__name__} {name}"
        program(PROGRAMS, ValueError if name in refused else None)(run)

    for name, mode in modes.items():
        enter(name, mode)
    return function


def as_jax(function=None, refused=()):
    """Enters a function for the modes without graph updates."""
    return in_every_mode(function, AS_JAX, refused)


def param(nnx, value=1.0):
    return nnx.Param(jnp.asarray(value))


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))


P = jax.sharding.PartitionSpec


# ---- what is returned ---------------------------------------------------------------------------


@in_every_mode(refused=AS_JAX)
def jit_returns_its_argument(nnx, **mode):
    v = param(nnx)
    return nnx.jit(lambda v: v, **mode)(v) is v


@in_every_mode(refused=AS_JAX)
def eval_shape_returns_its_argument(nnx, **mode):
    return nnx.eval_shape(lambda v: v, param(nnx), **mode).shape


@in_every_mode(refused=AS_JAX)
def eval_shape_of_one_variable_twice(nnx, **mode):
    v = param(nnx)
    return nnx.eval_shape(lambda a, b: a[...] + b[...], v, v, **mode).shape


@as_jax(refused=AS_JAX)
def jit_partial_returns_its_argument(nnx, **mode):
    return nnx.jit_partial(lambda v: v, param(nnx), **mode)()


@in_every_mode(refused=MODES)
def jit_returns_what_it_captured(nnx, **mode):
    v = param(nnx)
    return nnx.jit(lambda x: {"v": v}, **mode)(1.0)


@in_every_mode(refused=MODES)
def vmap_returns_a_captured_module(nnx, **mode):
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx.state(nnx.vmap(lambda x: layer, **mode)(XS))


@in_every_mode(refused=MODES)
def scan_returns_what_it_captured(nnx, **mode):
    v = param(nnx)
    return nnx.scan(lambda c, x: (c, v), **mode)(0.0, XS)


@in_every_mode(refused=MODES)
def shard_map_returns_what_it_captured(nnx, **mode):
    v, x = param(nnx), jnp.ones(2)
    return nnx.shard_map(lambda x: v, mesh=mesh(), in_specs=(P(),), out_specs=P(), **mode)(x)


@in_every_mode(refused=AS_JAX)
def remat_returns_what_it_captured(nnx, **mode):
    v = param(nnx, 2.0)
    return nnx.remat(lambda x: v, **mode)(1.0)


@in_every_mode(refused=AS_JAX)
def cond_returns_what_it_captured(nnx, **mode):
    v = param(nnx, 2.0)
    return nnx.cond(True, lambda x: v, lambda x: v, 1.0, **mode)


@in_every_mode(refused=AS_JAX)
def grad_returns_what_it_captured(nnx, **mode):
    v = param(nnx, 2.0)
    return nnx.grad(lambda x: (x, v), has_aux=True, **mode)(1.0)


@in_every_mode(refused=["in graph mode"])
def a_captured_variable_becomes_an_attribute(nnx, **mode):
    v, layer = param(nnx), nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    @nnx.jit(**mode)
    def add(layer):
        layer.new = v

    add(layer)
    return hasattr(layer, "new")


@in_every_mode
def jit_returns_a_clone_of_what_it_captured(nnx, **mode):
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    return nnx.state(nnx.jit(lambda: nnx.clone(layer), **mode)())


@in_every_mode(refused=MODES)
def one_new_variable_along_two_axes(nnx, **mode):
    def make(x):
        v = nnx.Param(x)
        return v, v

    return nnx.vmap(make, out_axes=(0, 1), **mode)(jnp.ones((3, 2)))


@in_every_mode(refused=MODES)
def a_bound_method_given_to_eval_shape(nnx, **mode):
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx.eval_shape(layer.__call__, jnp.ones((1, 2)), **mode)


@program(PROGRAMS)
def jaxprs_without_graph_updates(f):
    nnx = f.nnx

    def change(v, x):
        v[...] += x
        return v[...] * 2, nnx.Param(x)

    def add(layer):
        layer.new, layer.flag = nnx.Param(jnp.ones(2)), 3

    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    jaxpr = nnx.make_jaxpr(change, graph_updates=False)(param(nnx), 1.0).jaxpr
    nnx.make_jaxpr(add, graph_updates=False)(layer)
    return len(jaxpr.invars), len(jaxpr.outvars), hasattr(layer, "new"), hasattr(layer, "flag")


@program(PROGRAMS, raises=ValueError)
def a_jaxpr_of_one_variable_twice(f):
    v = param(f.nnx)
    return f.nnx.make_jaxpr(lambda a, b: a[...] + b[...], graph_updates=False)(v, v)


# ---- prefixes -----------------------------------------------------------------------------------


@in_every_mode(refused=["in graph mode", "without graph updates"])
def a_module_as_in_axes(nnx, **mode):
    model, axes = nnx.Dict(a=param(nnx, XS)), nnx.Dict(a=nnx.Param(0))
    return nnx.vmap(lambda m: m.a[...], in_axes=(axes,), **mode)(model)


@in_every_mode(refused=["in graph mode", "without graph updates"])
def a_module_as_out_axes_of_scan(nnx, **mode):
    axes = (nnx.Carry, nnx.Dict(a=nnx.Param(0)))
    step = lambda c, x: (c, nnx.Dict(a=nnx.Param(x)))  # noqa: E731
    return nnx.state(nnx.scan(step, out_axes=axes, **mode)(0.0, XS)[1])


@in_every_mode(refused=["in graph mode", "without graph updates"])
def a_module_as_in_specs(nnx, **mode):
    model, specs = nnx.Dict(a=param(nnx, XS)), nnx.Dict(a=nnx.Param(P("a")))
    options = {"mesh": mesh(), "in_specs": (specs,), "out_specs": P("a")}
    return nnx.shard_map(lambda m: m.a[...], **options, **mode)(model)


@in_every_mode(refused=MODES)
def a_variable_as_in_axes(nnx, **mode):
    return nnx.vmap(lambda v: v[...], in_axes=(nnx.Param(0),), **mode)(param(nnx, XS))


@in_every_mode(refused=MODES)
def a_variable_as_out_axes(nnx, **mode):
    return nnx.vmap(nnx.Param, out_axes=nnx.Param(0), **mode)(XS)


@in_every_mode(refused=MODES)
def a_dict_of_filters_as_in_axes(nnx, **mode):
    model = nnx.Dict(a=param(nnx, XS))
    return nnx.vmap(lambda m: m.a[...], in_axes=({...: 0},), **mode)(model)


@as_jax(refused=AS_JAX)
def diff_state(nnx, **mode):
    wrt = nnx.DiffState(0, nnx.Param)
    return nnx.grad(lambda v: v[...] ** 2, argnums=wrt, **mode)(param(nnx))


# ---- scan and loops -----------------------------------------------------------------------------


@in_every_mode(refused=MODES)
def two_carries(nnx, **mode):
    axes = (nnx.Carry, nnx.Carry)
    step = lambda a, b: (a, b)  # noqa: E731
    return nnx.scan(step, in_axes=axes, out_axes=axes, length=2, **mode)(0.0, 1.0)


@in_every_mode(refused=MODES)
def a_carry_that_does_not_come_out(nnx, **mode):
    return nnx.scan(lambda c, x: (c, x), out_axes=(0, 0), **mode)(0.0, XS)


@in_every_mode(refused=MODES)
def a_broadcast_argument_comes_out(nnx, **mode):
    axes = {"in_axes": (nnx.Carry, None, 0), "out_axes": (nnx.Carry, None)}

    def step(c, v, x):
        v[...] += x
        return c, v

    return nnx.scan(step, **axes, **mode)(0.0, param(nnx), XS)


@in_every_mode
def variables_and_modules_as_carry(nnx, **mode):
    v, layer = param(nnx, 0.0), nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def step(c, x):
        c[0][...] += x
        c[1].bias[...] -= x
        return c, c[0][...] * 2

    out, doubles = nnx.scan(step, **mode)((v, layer), XS)
    return out[0] is v, v, doubles, nnx.state(layer)


def loops(nnx, change, **mode):
    def step(d, x):
        change(d)
        return d, x

    def body(state):
        change(state[0])
        return state[0], state[1] + 1

    def each(i, d):
        change(d)
        return d

    make = lambda: nnx.Dict(a=param(nnx, 0.0), b=param(nnx, 1.0))  # noqa: E731
    return {
        "scan": lambda: nnx.state(nnx.scan(step, **mode)(make(), XS)[0]),
        "while": lambda: nnx.state(
            nnx.while_loop(lambda s: s[1] < 3, body, (make(), 0), **mode)[0]
        ),
        "fori": lambda: nnx.state(nnx.fori_loop(0, 3, each, make(), **mode)),
    }


def swap(d):
    d.a, d.b = d.b, d.a


@in_every_mode(refused=AS_JAX)
def scan_swaps_variables(nnx, **mode):
    return loops(nnx, swap, **mode)["scan"]()


@in_every_mode(refused=MODES)
def while_loop_swaps_variables(nnx, **mode):
    return loops(nnx, swap, **mode)["while"]()


@in_every_mode(refused=AS_JAX)
def fori_loop_swaps_variables(nnx, **mode):
    return loops(nnx, swap, **mode)["fori"]()


@in_every_mode(refused=AS_JAX)
def fori_loop_replaces_a_variable(nnx, **mode):
    def replace(d):
        d.a = nnx.Param(d.a[...] + d.b[...])

    return loops(nnx, replace, **mode)["fori"]()


@in_every_mode(refused=MODES)
def while_loop_changes_a_flag(nnx, **mode):
    def change(d):
        d.flag = 3

    return loops(nnx, change, **mode)["while"]()


@program(PROGRAMS, raises=ValueError)
def scan_adds_an_attribute_to_its_carry(f):
    def add(d):
        d.new = param(f.nnx)

    return loops(f.nnx, add, graph_updates=False)["scan"]()


@in_every_mode
def a_condition_that_writes(nnx, **mode):
    def cond(v):
        v[...] += 1
        return v[...] < 3

    def body(v):
        v[...] += 1
        return v

    return nnx.while_loop(cond, body, param(nnx, 0.0), **mode)


# ---- captured values ----------------------------------------------------------------------------


@in_every_mode
def only_what_was_sown_comes_out(nnx, **mode):
    class Adds(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "y", x)
            self.new, self.flag = nnx.Param(x), 3
            return x

    model = Adds()
    out = nnx.capture(nnx.jit(lambda m, x: m(x), **mode), nnx.Intermediate)(model, jnp.ones(2))
    return out, hasattr(model, "new"), hasattr(model, "flag")


@in_every_mode
def captures_so_far(nnx, **mode):
    found = []

    class Watches(nnx.Module):
        def __call__(self, x):
            found.append(hasattr(self, "__captures__"))
            if not found[-1]:
                return x
            self.sow(nnx.Intermediate, "x", x)
            self.sow(nnx.Intermediate, "x", x + 1)
            x = self.perturb("p", x)
            kinds = [type(v).__name__ for v in self.__captures__]
            found.append([kinds, [sorted(v.get_value()) for v in self.__captures__]])
            return x * self.__captures__[0]["x"][1]

    model = Watches()
    call = nnx.jit(lambda m, x: m(x), **mode)
    y = nnx.capture(call, nnx.Intermediate, nnx.Perturbation)(model, jnp.array(3.0))[0]
    model(1.0)
    return y, found, hasattr(model, "__captures__")


# ---- shardings ----------------------------------------------------------------------------------


def spec(x):
    value = x[...] if hasattr(x, "get_metadata") else x
    return str(value.sharding.spec) if hasattr(value.sharding, "spec") else "none"


def sharded(nnx, kind, **mode):
    make = lambda: nnx.Dict(a=param(nnx, jnp.ones((2, 2))), b=nnx.BatchStat(jnp.ones(2)))  # noqa: E731
    values = {nnx.Param: kind(P("a")), ...: kind(P())}
    if mode:
        return make, nnx.prefix(make(), values, graph=mode.get("graph", True))
    return make, nnx.StateSharding(values)


def named(spec):
    return jax.sharding.NamedSharding(mesh(), spec)


@in_every_mode
def jit_leaves_its_arguments_in_their_shardings(nnx, **mode):
    make, shardings = sharded(nnx, named, **mode)
    model = make()
    step = nnx.jit(lambda m: m.a[...].sum(), in_shardings=(shardings,), **mode)
    return [step(model) for _ in range(3)], spec(model.a), spec(model.b)


@in_every_mode
def jit_writes_in_shardings(nnx, **mode):
    make, shardings = sharded(nnx, named, **mode)
    model = make()

    def step(m):
        m.a[...] += 1
        return m.a[...] * 2

    jitted = nnx.jit(step, in_shardings=(shardings,), out_shardings=named(P(None, "a")), **mode)
    out = jitted(model)
    return out, spec(out), spec(model.a), spec(model.b)


@in_every_mode
def jit_makes_a_sharded_model(nnx, **mode):
    make, shardings = sharded(nnx, named, **mode)
    model, x = nnx.jit(
        lambda: (make(), jnp.ones(2)), out_shardings=(shardings, named(P("a"))), **mode
    )()
    return spec(model.a), spec(model.b), spec(x)


@program(PROGRAMS)
def jit_returns_its_argument_in_its_shardings(f):
    make, shardings = sharded(f.nnx, named)
    model = make()
    same = f.nnx.jit(lambda m: m, in_shardings=(shardings,), out_shardings=shardings)
    return same(model) is model, spec(model.a), spec(model.b)


@program(PROGRAMS, raises=ValueError)
def jit_returns_its_argument_in_other_shardings(f):
    make, shardings = sharded(f.nnx, named)
    return spec(f.nnx.jit(lambda m: m, out_shardings=shardings)(make()).a)


@in_every_mode
def shard_map_leaves_its_arguments_in_their_specs(nnx, **mode):
    make, specs = sharded(nnx, lambda spec: spec, **mode)
    model = make()
    options = {"mesh": mesh(), "in_specs": (specs,), "out_specs": P("a")}
    out = nnx.shard_map(lambda m: m.a[...] * 2, **options, **mode)(model)
    return out, spec(out), spec(model.a), spec(model.b)


# ---- refs ---------------------------------------------------------------------------------------


@in_every_mode
def jit_counts_in_a_ref(nnx, **mode):
    v = nnx.Variable(jnp.array(1.0), ref=True)

    @nnx.jit(**mode)
    def count(v):
        v[...] += 1
        return v[...] * 2

    return [count(v) for _ in range(3)], v[...]


@program(PROGRAMS)
def hijax_variables_are_updated_by_jax(f):
    nnx = f.nnx
    v, w = (nnx.Variable(jnp.array(float(n)), hijax=True) for n in range(2))

    @jax.jit
    def count(v):
        v[...] += 1
        w[...] += v[...]

    count(v)
    count(v)
    return v[...], w[...]


@program(PROGRAMS)
def a_training_step_over_hijax_variables(f):
    nnx = f.nnx
    x, y = jnp.ones((3, 2)), jnp.ones((3, 2))
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @jax.jit
    def step(model, optimizer, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params):
            return jnp.mean((nnx.merge(graphdef, params, rest)(x) - y) ** 2)

        optimizer.update(model, jax.grad(loss)(nnx.vars_as(params, hijax=False)))

    for _ in range(2):
        step(model, optimizer, x, y)
    return nnx.state(model), optimizer.step[...]


test_programs = same_on_both(PROGRAMS)
