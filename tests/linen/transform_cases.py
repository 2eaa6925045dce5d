"""Programs with lifted transforms, for any package with the API of Linen.

``transforms.json`` has what they give with Flax 0.12.8. It was written with
``python tests/linen/transform_cases.py flax tests/linen/transforms.json``, by an interpreter that
has Flax.
"""

import functools
import importlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

X = jnp.arange(1.0, 3.0)
X23 = jnp.arange(6.0).reshape(2, 3)
RNGS = {"params": jax.random.key(0), "noise": jax.random.key(1)}
SPLIT = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "noise": True}}
SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False, "noise": True}}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def modules(nn):
    """The modules that the cases are made of."""

    class Layer(nn.Module):
        size: int = 2

        @nn.compact
        def __call__(self, x, scale=1.0):
            w = self.param("w", jax.nn.initializers.normal(1.0), (self.size,))
            return x * w.sum() * scale

    class Noisy(nn.Module):
        """Returns the key of its parameter and one of another stream."""

        @nn.compact
        def __call__(self, x):
            k = self.param("k", jax.random.key_data)
            return x, (k, jax.random.key_data(self.make_rng("noise")))

    class NoisyStep(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            return Noisy()(carry)

    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            y = Layer()(carry + x)
            return y, y

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            n = self.variable("counts", "n", lambda: jnp.zeros(()))
            n.value = n.value + 1
            self.sow("intermediates", "x", x)
            return Layer()(x)

    class Heads(nn.Module):
        def setup(self):
            self.layer = Layer()

        def encode(self, x):
            return self.decode(x) + 1

        def decode(self, x):
            return self.layer(x)

    class SetupParam(nn.Module):
        def setup(self):
            self.w = self.param("w", jax.nn.initializers.normal(1.0), (2,))

        def __call__(self, x):
            return x * self.w.sum()

    class Holder(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x) + Layer(1)(x)

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, other, x):
            return other(x) + Layer()(x)

    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(jax.nn.initializers.normal(1.0), ("in", "out"))
            return x * self.param("k", init, (2, 3)).sum()

    class BoxedStep(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            return Boxed()(carry), None

    found = dict(locals())
    found.pop("nn")
    return type("Modules", (), found)


def in_module(nn, function):
    """A module whose call is a function of the module and its arguments."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return function(self, *args)

    return Model()


def run(nn, function, *args, rngs=RNGS, **kwargs):
    """What init and apply of such a module give."""
    model = in_module(nn, function)
    variables = model.init(rngs, *args)
    return model.init_with_output(rngs, *args), model.apply(variables, *args, rngs=rngs, **kwargs)


# ---- vmap ---------------------------------------------------------------------------------------


@case
def vmap_class(nn, m):
    return run(nn, lambda self, x: nn.vmap(m.Layer, **SPLIT)()(x), X)


@case
def vmap_twice_and_named(nn, m):
    def call(self, x):
        mapped = nn.vmap(m.Layer, **SPLIT)
        return mapped()(x), mapped()(x), mapped(name="own")(x)

    return run(nn, call, X)


@case
def vmap_root(nn, m):
    return nn.vmap(m.Layer, **SPLIT)(3).init_with_output(RNGS, X)


@case
def vmap_shared_parameters(nn, m):
    mapped = nn.vmap(m.Layer, variable_axes={"params": None}, split_rngs={"params": False})
    return run(nn, lambda self, x: mapped()(x), X)


@case
def vmap_keys(nn, m):
    def call(self, x):
        first = nn.vmap(m.Noisy, **SPLIT)()(x)
        second = nn.vmap(
            m.Noisy, variable_axes={"params": None}, split_rngs={"params": False, "noise": False}
        )()(x)
        return first, second, jax.random.key_data(self.make_rng("noise"))

    return run(nn, call, X)


@case
def vmap_other_axes(nn, m):
    mapped = nn.vmap(
        m.Layer, variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=1, out_axes=1
    )
    return run(nn, lambda self, x: mapped()(x), X23)


@case
def vmap_axis_size(nn, m):
    mapped = nn.vmap(m.Layer, axis_size=3, in_axes=None, **SPLIT)
    return run(nn, lambda self, x: mapped()(x), X)


@case
def vmap_nested(nn, m):
    return run(nn, lambda self, x: nn.vmap(nn.vmap(m.Layer, **SPLIT), **SPLIT)()(x), X23)


@case
def vmap_function_that_makes_modules(nn, m):
    def call(self, x):
        before = m.Layer()(x)
        inside = nn.vmap(lambda model, x: m.Layer()(x) + m.Layer()(x), **SPLIT)(self, x)
        return before, inside, m.Layer()(x)

    return run(nn, call, X)


@case
def vmap_module_as_argument(nn, m):
    def call(self, x):
        outer = m.Layer(name="outer")
        return nn.vmap(m.Pair, in_axes=(None, 0), **SPLIT)()(outer, x)

    return run(nn, call, X)


@case
def vmap_module_as_field(nn, m):
    def call(self, x):
        outer = m.Layer(name="outer")
        return nn.vmap(m.Holder, **SPLIT)(outer)(x)

    return run(nn, call, X)


@case
def vmap_adopted_field(nn, m):
    return nn.vmap(m.Holder, **SPLIT)(m.Layer()).init_with_output(RNGS, X)


@case
def vmap_methods(nn, m):
    def call(self, x):
        heads = nn.vmap(m.Heads, methods=["encode", "decode"], **SPLIT)()
        return heads.encode(x), heads.decode(x)

    return run(nn, call, X)


@case
def vmap_methods_with_options(nn, m):
    options = {
        "encode": {"in_axes": 0, **SPLIT},
        "decode": {"in_axes": None, "axis_size": 2, **SPLIT},
    }

    def call(self, x):
        heads = nn.vmap(m.Heads, methods=options)()
        return heads.encode(x), heads.decode(x)

    return run(nn, call, X)


@case
def vmap_setup_parameter(nn, m):
    return run(nn, lambda self, x: nn.vmap(m.SetupParam, **SPLIT)()(x), X)


@case
def vmap_other_collections(nn, m):
    mapped = nn.vmap(
        m.Counting,
        variable_axes={"params": 0, "counts": 0, "intermediates": 0},
        split_rngs={"params": True},
    )
    return run(nn, lambda self, x: mapped()(x), X, mutable=["counts", "intermediates"])


@case
def vmap_captures(nn, m):
    mapped = nn.vmap(
        m.Counting,
        variable_axes={"params": 0, "counts": None, "intermediates": 0},
        split_rngs={"params": True},
    )
    call = lambda self, x: mapped()(x)  # noqa: E731
    return run(nn, call, X, mutable=["counts"], capture_intermediates=True)


@case
def vmap_method_decorator(nn, m):
    class Model(nn.Module):
        @functools.partial(nn.vmap, **SPLIT)
        @nn.compact
        def __call__(self, x):
            return m.Layer()(x)

    return Model().init_with_output(RNGS, X)


@case
def vmap_metadata(nn, m):
    mapped = nn.vmap(m.Boxed, metadata_params={nn.PARTITION_NAME: "layers"}, **SPLIT)
    variables = in_module(nn, lambda self, x: mapped()(x)).init(RNGS, X)
    spec = nn.get_partition_spec(variables)["params"]["VmapBoxed_0"]["k"]
    return [*map(str, spec)], nn.unbox(variables) if hasattr(nn, "unbox") else variables


# ---- scan ---------------------------------------------------------------------------------------


@case
def scan_class(nn, m):
    return run(nn, lambda self, x: nn.scan(m.Step, **SPLIT)()(0.0, x), X)


@case
def scan_shared_parameters(nn, m):
    return run(nn, lambda self, x: nn.scan(m.Step, **SHARED)()(0.0, x), X)


@case
def scan_keys(nn, m):
    def call(self, x):
        out = nn.scan(m.NoisyStep, **SPLIT)()(0.0, x)
        return out, jax.random.key_data(self.make_rng("noise"))

    return run(nn, call, X)


@case
def scan_keys_of_shared_parameters(nn, m):
    return run(nn, lambda self, x: nn.scan(m.NoisyStep, **SHARED)()(0.0, x), X)


@case
def scan_keys_without_the_check(nn, m):
    scanned = nn.scan(m.NoisyStep, check_constancy_invariants=False, **SPLIT)
    return run(nn, lambda self, x: scanned()(0.0, x), X)


@case
def scan_keys_twice(nn, m):
    def call(self, x):
        step = nn.scan(m.NoisyStep, **SPLIT)()
        return step(0.0, x), step(0.0, x)

    return run(nn, call, X)


@case
def scan_length(nn, m):
    scanned = nn.scan(m.Step, length=3, in_axes=nn.broadcast, **SPLIT)
    return run(nn, lambda self, x: scanned()(x, 0.5), X)


@case
def scan_function(nn, m):
    def call(self, x):
        scanned = nn.scan(lambda model, c, _: (m.Layer()(c), None), length=3, **SPLIT)
        return scanned(self, x, None)

    return run(nn, call, X)


@case
def scan_axes_of_arguments(nn, m):
    class Both(nn.Module):
        @nn.compact
        def __call__(self, carry, x, b):
            return carry + x.sum() + b, (x, b * 2)

    def call(self, x):
        first = nn.scan(Both, in_axes=(1, nn.broadcast), out_axes=(1, nn.broadcast))
        second = nn.scan(Both, in_axes=(-1, nn.broadcast), out_axes=(-1, 0), reverse=True, unroll=2)
        return first()(0.0, x, 5.0), second()(0.0, x, 5.0)

    return run(nn, call, X23)


@case
def scan_reversed(nn, m):
    scanned = nn.scan(m.NoisyStep, reverse=True, **SPLIT)
    return run(nn, lambda self, x: scanned()(0.0, x), X)


@case
def scan_carried_variables(nn, m):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            n = self.variable("counts", "n", lambda: jnp.zeros(()))
            n.value = n.value + 1
            v = self.variable("values", "v", lambda: jnp.zeros(()))
            v.value = v.value + x
            return carry + n.value, n.value

    scanned = nn.scan(Step, variable_carry="counts", variable_axes={"values": 0})
    variables = {
        "counts": {"ScanStep_0": {"n": jnp.array(3.0)}},
        "values": {"ScanStep_0": {"v": jnp.zeros(2)}},
    }
    model = in_module(nn, lambda self, x: scanned()(0.0, x))
    return model.apply(variables, X, mutable=True)


@case
def scan_other_variable_axis(nn, m):
    scanned = nn.scan(m.Step, variable_axes={"params": 1}, split_rngs={"params": True})
    return run(nn, lambda self, x: scanned()(0.0, x), X)


@case
def scan_of_remat_and_remat_of_scan(nn, m):
    def call(self, x):
        inner = nn.scan(nn.remat(m.Step), **SPLIT)()(0.0, x)
        outer = nn.remat(nn.scan(m.Step, **SPLIT))()(0.0, x)
        return inner, outer

    return run(nn, call, X)


@case
def scan_of_vmap(nn, m):
    mapped = nn.vmap(m.NoisyStep, in_axes=(0, None), **SPLIT)
    return run(nn, lambda self, x: nn.scan(mapped, **SPLIT)()(jnp.zeros(2), x), X)


@case
def scan_of_scan(nn, m):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            return nn.scan(m.NoisyStep, **SPLIT)()(carry, x)

    return run(nn, lambda self, x: nn.scan(Outer, **SPLIT)()(0.0, x), X23)


@case
def scan_metadata(nn, m):
    scanned = nn.scan(
        m.BoxedStep,
        variable_axes={"params": 1},
        split_rngs={"params": True},
        metadata_params={nn.PARTITION_NAME: "layers"},
        length=3,
    )
    variables = in_module(nn, lambda self, x: scanned()(x, None)).init(RNGS, 1.0)
    spec = nn.get_partition_spec(variables)["params"]["ScanBoxedStep_0"]["Boxed_0"]["k"]
    return [*map(str, spec)], nn.unbox(variables) if hasattr(nn, "unbox") else variables


@case
def scan_data_transform(nn, m):
    double = lambda variables, rngs: (jax.tree.map(lambda v: 2 * v, variables), rngs)  # noqa: E731
    scanned = nn.scan(m.Step, data_transform=double, **SPLIT)
    variables = nn.scan(m.Step, **SPLIT)().init(RNGS, 0.0, X)
    return scanned().apply(variables, 0.0, X)


@case
def scan_module_as_argument(nn, m):
    def call(self, x):
        outer = m.Layer(name="outer")
        body = lambda model, c, x: (outer_of(model, c) + x, c)  # noqa: E731
        outer_of = lambda model, c: model(c)  # noqa: E731
        return nn.scan(body, variable_broadcast="params", split_rngs={"params": False})(
            outer, 1.0, x
        )

    return run(nn, call, X)


# ---- jit, remat, keys ---------------------------------------------------------------------------


@case
def jit_class(nn, m):
    def call(self, x):
        layer = nn.jit(m.Noisy)()
        return layer(x), layer(x), jax.random.key_data(layer.make_rng("noise"))

    return run(nn, call, X)


@case
def jit_function_and_method(nn, m):
    class Decorated(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return m.Layer()(x)

    def call(self, x):
        inside = nn.jit(lambda model, x: m.Layer()(x) + m.Layer()(x))(self, x)
        return inside, m.Layer()(x), Decorated()(x)

    return run(nn, call, X)


@case
def jit_static_arguments(nn, m):
    class Power(nn.Module):
        @nn.compact
        def __call__(self, x, n, negative=False):
            y = m.Layer()(x)
            for _ in range(n):
                y = y * x
            return -y if negative else y

    def call(self, x):
        lifted = nn.jit(Power, static_argnums=(2,), static_argnames=("negative",))
        return lifted()(x, 2), lifted()(x, 3, negative=True)

    return run(nn, call, X)


@case
def remat_class(nn, m):
    def call(self, x):
        layer = nn.remat(m.Noisy)()
        return layer(x), layer(x), jax.random.key_data(layer.make_rng("noise"))

    return run(nn, call, X)


@case
def remat_with_module_argument(nn, m):
    def call(self, x):
        outer = m.Layer(name="outer")
        outer(x)
        return nn.jit(m.Pair)()(outer, x), nn.remat(m.Pair)()(outer, x)

    return run(nn, call, X)


@case
def remat_gradient(nn, m):
    model = in_module(nn, lambda self, x: nn.remat(m.Layer)()(nn.remat(m.Layer)()(x)).sum())
    variables = model.init(RNGS, X)
    return jax.grad(lambda v: model.apply(v, X))(variables)


@case
def remat_static_argument(nn, m):
    class Chosen(nn.Module):
        @nn.compact
        def __call__(self, x, which):
            return m.Layer()(x) if which == "layer" else x

    return run(nn, lambda self, x: nn.remat(Chosen, static_argnums=(2,))()(x, "layer"), X)


@case
def remat_scan_class(nn, m):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return m.Noisy()(x)[0] + m.Layer()(x)

    return run(nn, lambda self, x: nn.remat_scan(Layer, lengths=(2, 3))()(x), X)


@case
def fold_rngs_class(nn, m):
    def call(self, x):
        layer = nn.fold_rngs(m.Noisy)()
        return layer(x), layer(x)

    return run(nn, call, X)


# ---- gradients ----------------------------------------------------------------------------------


@case
def vjp_of_variables_and_inputs(nn, m):
    def call(self, x):
        y, pullback = nn.vjp(lambda layer, x: layer(x), m.Layer(name="layer"), x)
        return y, pullback(jnp.ones_like(y))

    return run(nn, call, X)


@case
def vjp_with_second_output(nn, m):
    def call(self, x):
        fn = lambda layer, x: (layer(x), x)  # noqa: E731
        y, pullback, aux = nn.vjp(fn, m.Layer(name="layer"), x, has_aux=True)
        return y, pullback(jnp.ones_like(y)), aux

    return run(nn, call, X)


@case
def value_and_grad_of_inputs(nn, m):
    def call(self, x):
        layer = m.Layer(name="layer")
        both = nn.value_and_grad(lambda m, x: m(x).sum(), layer, x)
        aux = nn.value_and_grad(lambda m, x: (m(x).sum(), x), layer, x, has_aux=True)
        two = nn.grad(lambda m, x, y: (m(x) * y).sum(), layer, x, x)
        return both, aux, two

    return run(nn, call, X)


@case
def jvp_of_variables_and_inputs(nn, m):
    def call(self, x):
        layer = m.Layer(name="layer")
        layer(x)
        ones = {"params": jax.tree.map(jnp.ones_like, layer.variables["params"])}
        fn = lambda layer, x: layer(x)  # noqa: E731
        first = nn.jvp(fn, layer, (x,), (jnp.ones_like(x),), ones)
        return first, nn.jvp(fn, layer, (x,), (jnp.ones_like(x),), {})

    return run(nn, call, X)


@case
def custom_vjp_signs(nn, m):
    def call(self, x):
        fn = lambda layer, x: layer(x)  # noqa: E731

        def backward(pullback, cotangent):
            variables, *inputs = pullback(cotangent)
            return jax.tree.map(jnp.sign, variables), *inputs

        lifted = nn.custom_vjp(fn, lambda layer, x: nn.vjp(fn, layer, x), backward)
        return lifted(m.Layer(name="layer"), x).sum()

    model = in_module(nn, call)
    variables = model.init(RNGS, X)
    return jax.grad(model.apply, (0, 1))(variables, X)


@case
def custom_vjp_fixed_argument(nn, m):
    def call(self, x):
        def forward(layer, k, x):
            y, pullback = nn.vjp(lambda layer, x: layer(x) * k, layer, x)
            return y, (pullback, 7.0)

        def backward(k, residuals, cotangent):
            variables, *inputs = residuals[0](cotangent)
            return jax.tree.map(lambda g: g * 100 * k, variables), *inputs

        fn = lambda layer, k, x: layer(x) * k  # noqa: E731
        lifted = nn.custom_vjp(fn, forward, backward, nondiff_argnums=(1,))
        return lifted(m.Layer(name="layer"), 3, x).sum()

    model = in_module(nn, call)
    variables = model.init(RNGS, X)
    return jax.grad(model.apply)(variables, X)


# ---- loops and branches -------------------------------------------------------------------------


@case
def while_loop_with_counter(nn, m):
    class Count(nn.Module):
        @nn.compact
        def __call__(self, x):
            n = self.variable("counts", "n", lambda: jnp.zeros(()))
            n.value = n.value + 1
            return x

    def call(self, x):
        count = Count(name="count")
        count(x)
        body = lambda count, x: count(x) + 1  # noqa: E731
        test = lambda count, x: x.sum() < 9  # noqa: E731
        return nn.while_loop(test, body, count, x, carry_variables="counts")

    return run(nn, call, X, mutable=["counts"])


@case
def while_loop_keys(nn, m):
    def call(self, x):
        layer = m.Noisy(name="noisy")
        layer(x)

        def body(layer, state):
            n, keys = state
            return n + 1, keys.at[n].set(layer(x)[1][1])

        start = (0, jnp.zeros((3, 2), jnp.uint32))
        test = lambda layer, state: state[0] < 3  # noqa: E731
        return nn.while_loop(test, body, layer, start, split_rngs={"noise": True})

    return run(nn, call, X)


@case
def cond_both_ways(nn, m):
    def call(self, x, flag):
        noisy = m.Noisy(name="noisy")
        branch = lambda noisy, x: noisy(x)[1]  # noqa: E731
        return nn.cond(flag, branch, branch, noisy, x), noisy(x)[1]

    return run(nn, call, X, True), run(nn, call, X, False)


@case
def cond_that_makes_modules(nn, m):
    def call(self, x):
        true = lambda model, x: m.Layer(name="a")(x)  # noqa: E731
        false = lambda model, x: m.Layer(name="a")(x) * 2  # noqa: E731
        return nn.cond(True, true, false, self, x)

    return run(nn, call, X)


@case
def switch_over_setup(nn, m):
    class Model(nn.Module):
        def setup(self):
            self.heads = [m.Layer(1), m.Layer(2), m.Layer(3)]

        def __call__(self, x, i):
            branches = [lambda model, x, i=i: model.heads[i](x) for i in range(3)]
            if self.is_initializing():
                for branch in branches:
                    branch(self, x)
            return nn.switch(i, branches, self, x)

    variables = Model().init(RNGS, X, 0)
    return variables, [Model().apply(variables, X, i) for i in range(3)]


@case
def switch_keys(nn, m):
    def call(self, x, i):
        noisy = m.Noisy(name="noisy")
        branch = lambda noisy, x: noisy(x)[1]  # noqa: E731
        return nn.switch(i, [branch, branch, branch], noisy, x), noisy(x)[1]

    return [run(nn, call, X, i) for i in range(3)]


# ---- variables seen through a function ----------------------------------------------------------


def double(variables):
    return jax.tree.map(lambda v: 2 * v, variables)


def half(variables):
    return jax.tree.map(lambda v: v / 2, variables)


@case
def map_variables_init(nn, m):
    mapped = nn.map_variables(m.Layer, "params", double, half, init=True)
    return run(nn, lambda self, x: mapped()(x), X)


@case
def map_variables_mutable(nn, m):
    mapped = nn.map_variables(m.Layer, "params", double, half, mutable=True)
    return run(nn, lambda self, x: mapped()(x), X)


@case
def map_variables_keys(nn, m):
    def call(self, x):
        layer = nn.map_variables(m.Noisy, "params", init=True)()
        return layer(x), layer(x)

    return run(nn, call, X)


@case
def map_variables_state(nn, m):
    def results(**options):
        mapped = nn.map_variables(m.Counting, "counts", double, half, **options)
        return run(nn, lambda self, x: mapped()(x), X, mutable=["counts"])

    return results(init=True, mutable=True), results(mutable=True), results(init=True)


@case
def map_variables_function(nn, m):
    def call(self, x):
        layer = m.Layer(name="layer")
        return layer(x), nn.map_variables(lambda m, x: m(x), "params", double)(layer, x)

    return run(nn, call, X)


@case
def add_metadata_axis_class(nn, m):
    lifted = nn.add_metadata_axis(m.Boxed, {"params": 0}, {nn.PARTITION_NAME: "layers"})
    variables = in_module(nn, lambda self, x: lifted()(x)).init(RNGS, X)
    spec = nn.get_partition_spec(variables)["params"]["Map_variablesBoxed_0"]["k"]
    return [*map(str, spec)]


# ---- whose keys a compiled module draws ---------------------------------------------------------


def keyed(nn):
    """Modules whose parameters are the keys that they were made with."""

    class Key(nn.Module):
        count: int = 1

        @nn.compact
        def __call__(self, x):
            return x, [self.param(f"k{i}", jax.random.key_data) for i in range(self.count)]

    class Around(nn.Module):
        """Has a parameter, a module in a field and one of its own."""

        inner: nn.Module | None = None
        other: nn.Module | None = None

        @nn.compact
        def __call__(self, x, third=None):
            self.param("k", jax.random.key_data)
            for module in (self.inner, self.other, third, Key(name="own")):
                if module is not None:
                    module(x)
            return x

    return Key, Around


@case
def jit_keys_of_fields(nn, m):
    key, around = keyed(nn)

    def call(self, x):
        layer = nn.jit(around)(key(2), key(3), name="j")
        return layer(layer(x))

    return run(nn, call, X), nn.jit(around)(around(key()), key(2)).init(RNGS, X)


@case
def jit_keys_nested(nn, m):
    key, around = keyed(nn)
    jitted = nn.jit(around)

    def call(self, x):
        return jitted(jitted(key(name="k"), name="inner"), name="outer")(x)

    def remat_and_vmap(self, x):
        nn.jit(nn.remat(around))(key(), name="a")(x)
        nn.remat(nn.jit(around))(key(), name="b")(x)
        return nn.vmap(nn.jit(around), **SPLIT)(key(), name="c")(x)

    return run(nn, call, X), run(nn, remat_and_vmap, X)


@case
def jit_keys_of_arguments(nn, m):
    key, around = keyed(nn)

    class Parent(nn.Module):
        def setup(self):
            self.k = key()
            self.j = nn.jit(around)()

        def __call__(self, x):
            return self.j(x, self.k)

    class Method(nn.Module):
        def setup(self):
            self.k, self.h = key(2), key()

        @nn.jit
        def both(self, x, other):
            return self.k(x), other(x)

        def __call__(self, x):
            return self.both(x, self.h)

    def function(self, x):
        return nn.jit(lambda m, x, other: (key(name="in")(x), other(x)))(self, x, key(name="out"))

    return run(nn, function, X), Parent().init(RNGS, X), Method().init_with_output(RNGS, X)


@case
def jit_draws_from_every_stream(nn, m):
    def call(self, x):
        self.make_rng("noise")
        for rngs in (True, "params", "noise", False):
            nn.jit(lambda m, x: x, rngs=rngs)(self, x)
        return [jax.random.key_data(self.make_rng(name)) for name in ("params", "noise")]

    return in_module(nn, call).init_with_output(RNGS, X)


@case
def fold_rngs_keys(nn, m):
    key, around = keyed(nn)

    def call(self, x):
        nn.fold_rngs(lambda m, x: m(x))(key(name="other"), x)
        return nn.fold_rngs(around)(key(), name="f")(x)

    return run(nn, call, X)


def plain(tree):
    """A result as JSON: names of dicts, and numbers of arrays."""
    if hasattr(tree, "items"):
        return {key: plain(value) for key, value in sorted(tree.items())}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if tree is None or isinstance(tree, str):
        return tree
    return np.asarray(tree).tolist()


if __name__ == "__main__":
    linen = importlib.import_module(f"{sys.argv[1]}.linen")
    outcomes = {name: plain(f(linen, modules(linen))) for name, f in CASES.items()}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in outcomes.items())
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
