"""Programs over the bridge whose names and numbers Flax was asked for.

A case is a function of ``nnx`` and ``nn``: Linnet's, or Flax's when the table of expected values
was made, by ``python -m tests.nnx.bridge.cases flax``. ``outcome`` turns what it returns into the
paths and shapes of its arrays, and one number that changes when an entry changes.
"""

import functools
import importlib
import json
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.digest import paths_and_digest

X = jnp.arange(6.0).reshape(2, 3)
CASES: dict[str, Callable[[Any, Any], Any]] = {}


def case(function):
    assert function.__name__ not in CASES
    CASES[function.__name__] = function
    return function


def key(seed):
    return jax.random.key(seed)


def plain(value):
    """States, Variables, boxes and keys as plain containers and arrays."""
    if hasattr(value, "to_pure_dict"):
        return plain(value.to_pure_dict())
    if hasattr(value, "get_metadata") and hasattr(value, "get_value"):
        return plain(value.get_value())
    if hasattr(value, "unbox"):
        names = getattr(value, "names", None) or getattr(value, "metadata", {}).get("out_sharding")
        return {type(value).__name__: plain(value.unbox()), "names": str(names)}
    if hasattr(value, "items"):
        return {str(k): plain(item) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value) % 1000
    return value


def outcome(function, nnx, nn):
    """The paths and shapes of what a case returns, and a digest; or the builtins an error is of."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        try:
            out = plain(function(nnx, nn))
        except Exception as error:
            return [" ".join(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")]
    return paths_and_digest(out)


# ---- models -------------------------------------------------------------------------------------


@functools.cache
def linen_models(nn):
    class Net(nn.Module):
        """Parameters, running statistics, a counter, dropout, something sown, two methods."""

        @nn.compact
        def __call__(self, x, train=True):
            x = nn.Dense(2, name="up")(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            count = self.variable("counts", "n", lambda: jnp.zeros(()))
            if self.is_mutable_collection("counts"):
                count.value += 1
            self.sow("intermediates", "h", x)
            return nn.Dropout(0.5, deterministic=not train)(x)

        def double(self, x):
            return 2 * x

        @nn.compact
        def tail(self, x, *, factor=1.0):
            return factor * nn.Dense(2, name="up")(x)

    class Keys(nn.Module):
        """What make_rng gives for each stream."""

        @nn.compact
        def __call__(self, x):
            self.param("w", nn.initializers.ones, (1,))
            streams = [s for s in ("params", "dropout", "default", "noise") if self.has_rng(s)]
            return {s: [self.make_rng(s), self.make_rng(s)] for s in streams}

    class Parts(nn.Module):
        """Submodules and variables of setup."""

        def setup(self):
            self.a = nn.Dense(3)
            self.layers = [nn.Dense(3), nn.Dense(2)]
            self.w = self.param("w", nn.initializers.normal(), (3,))
            self.extra = self.variable(
                "other", "tree", lambda: {"p": jnp.ones(2), "q": jnp.ones(1)}
            )

        def __call__(self, x):
            x = self.a(x) * self.w
            for layer in self.layers:
                x = layer(x)
            return x

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            def body(mdl, carry, _):
                return nn.Dense(3, name="dense")(carry), None

            scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scan(self, x, None)[0]

    return types.SimpleNamespace(Net=Net, Keys=Keys, Parts=Parts, Scanned=Scanned)


@functools.cache
def nnx_models(nnx):
    class Count(nnx.Variable):
        pass

    class Net(nnx.Module):
        """Parameters in a list, shared and with metadata, statistics, a counter, dropout."""

        def __init__(self, size, *, rngs):
            self.layers = nnx.List([nnx.Linear(3, size, rngs=rngs), nnx.Linear(size, 2, rngs=rngs)])
            self.again = self.layers[0]
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(2), unit="m")
            self.count = Count(jnp.zeros(()))
            self.calls = 0

        def __call__(self, x):
            self.count[...] += 1
            self.calls += 1
            for layer in self.layers:
                x = layer(x)
            return self.drop(self.norm(x)) * self.scale[...]

        def calls_so_far(self):
            return self.calls

    class Keys(nnx.Module):
        def __init__(self, *, rngs):
            self.rngs = rngs
            self.first = nnx.Param(rngs.params.normal((2,)) if "params" in rngs else jnp.zeros(2))

        def __call__(self, x):
            return {name: [s.key[...], s.count[...], s()] for name, s in self.rngs.items()}

    class Plain(nnx.Module):
        def __init__(self, size, factor=1.0):
            self.w = nnx.Param(jnp.full((size,), factor))

        def __call__(self, x):
            return x * self.w[...]

    class Linen(nnx.Module):
        """Linen modules inside, with their variables made in the constructor."""

        def __init__(self, nn, *, rngs):
            ToNNX = nnx.bridge.ToNNX
            self.dense = ToNNX(nn.Dense(2), rngs=rngs).lazy_init(X)
            self.norm = ToNNX(nn.BatchNorm(use_running_average=False), rngs=rngs)
            self.norm.lazy_init(jnp.ones((2, 2)))
            self.drop = ToNNX(nn.Dropout(0.5, deterministic=False), rngs=rngs)
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.linear(self.norm(self.dense(x))))

    return types.SimpleNamespace(Count=Count, Net=Net, Keys=Keys, Plain=Plain, Linen=Linen)


def to_nnx(nnx, nn, name="Net", rngs=None, **kwargs):
    rngs = nnx.Rngs(0, dropout=1) if rngs is None else rngs
    model = nnx.bridge.ToNNX(getattr(linen_models(nn), name)(), rngs=rngs)
    return model.lazy_init(X, **kwargs)


def step_of(nnx, model, loss):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    return lambda: step(model, optimizer, X)


# ---- Linen in NNX -------------------------------------------------------------------------------


@case
def to_nnx_state(nnx, nn):
    return nnx.state(to_nnx(nnx, nn))


@case
def to_nnx_state_of_setup(nnx, nn):
    model = to_nnx(nnx, nn, "Parts")
    return nnx.state(model), model(X), model.layers_1["kernel"], [type(model.w).__name__]


@case
def to_nnx_types(nnx, nn):
    flat = nnx.to_flat_state(nnx.state(to_nnx(nnx, nn)))
    return {"/".join(path): type(v).__name__ for path, v in flat}


@case
def to_nnx_immutable_by_default(nnx, nn):
    return to_nnx(nnx, nn)(X)


@case
def to_nnx_evaluation(nnx, nn):
    model = to_nnx(nnx, nn)
    return model(X, train=False), nnx.state(model)


@case
def to_nnx_mutable(nnx, nn):
    model = to_nnx(nnx, nn)
    outs = [model(X, mutable=["batch_stats", "counts"]) for _ in range(3)]
    return outs, nnx.state(model)


@case
def to_nnx_all_mutable(nnx, nn):
    model = to_nnx(nnx, nn)
    outs = [model(X, mutable=True) for _ in range(2)]
    return outs, model.h, model.n, model.BatchNorm_0["mean"]


@case
def to_nnx_methods(nnx, nn):
    model = to_nnx(nnx, nn)
    cls = linen_models(nn).Net
    return [
        model.double(X),
        model(X, method="double"),
        model(X, method=cls.double),
        model.tail(X, factor=3.0),
        model(X, method=lambda module, x: module.double(x) + 1),
    ]


@case
def to_nnx_unknown_method(nnx, nn):
    return to_nnx(nnx, nn)(X, method="nothing")


@case
def to_nnx_unknown_attribute(nnx, nn):
    return to_nnx(nnx, nn).nothing


@case
def to_nnx_fields_are_no_attributes(nnx, nn):
    return nnx.bridge.ToNNX(nn.Dense(3)).features


@case
def to_nnx_before_init(nnx, nn):
    try:
        return nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))(X)
    except Exception as error:
        return type(error).__name__


@case
def to_nnx_init_of_a_method(nnx, nn):
    cls = linen_models(nn).Net
    models = [nnx.bridge.ToNNX(cls(), rngs=nnx.Rngs(0)) for _ in range(4)]
    nnx.bridge.lazy_init(models[0].tail, X)
    models[1].lazy_init(X, method="tail", factor=2.0)
    models[2].lazy_init(X, method=cls.tail)
    assert nnx.bridge.lazy_init(models[3].__call__, X) == models[3].__call__
    return [nnx.state(model) for model in models]


@case
def to_nnx_init_again(nnx, nn):
    model = to_nnx(nnx, nn, "Parts")
    first = jax.tree.map(jnp.copy, plain(nnx.state(model)))
    return first, nnx.state(model.lazy_init(X))


@case
def to_nnx_init_of_a_function(nnx, nn):
    return nnx.bridge.lazy_init(lambda x: x, X)


@case
def to_nnx_keys(nnx, nn):
    streams = [
        nnx.Rngs(0),
        nnx.Rngs(0, dropout=1),
        nnx.Rngs(params=2, noise=3),
        nnx.Rngs(0, params=1),
    ]
    models = [to_nnx(nnx, nn, "Keys", rngs) for rngs in streams]
    return [[m(X), m(X), nnx.state(m)] for m in models], [list(r) for r in streams]


@case
def to_nnx_key(nnx, nn):
    model = to_nnx(nnx, nn, "Keys", key(3))
    return model(X), nnx.state(model)


@case
def to_nnx_keys_at_call(nnx, nn):
    model = nnx.bridge.ToNNX(linen_models(nn).Keys())
    rngs = nnx.Rngs(0, dropout=5)
    model.lazy_init(X, rngs=rngs)
    return model(X), model(X, rngs=rngs), model(X, rngs=key(4)), rngs.dropout.count


@case
def to_nnx_without_keys(nnx, nn):
    try:
        return nnx.bridge.ToNNX(linen_models(nn).Keys()).lazy_init(X)
    except Exception as error:
        return type(error).__name__


@case
def to_nnx_dropout_reseeded(nnx, nn):
    model = nnx.bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=nnx.Rngs(dropout=0))
    model.lazy_init(X)
    outs = [model(X), model(X)]
    nnx.reseed(model, dropout=0)
    return outs, model(X)


@case
def to_nnx_written_variables(nnx, nn):
    model = nnx.bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(X)
    model.bias[...] = jnp.ones(2)
    first = model(X)
    model.kernel = nnx.Param(jnp.ones((3, 2)))
    return first, model(X)


@case
def to_nnx_shared(nnx, nn):
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.bridge.ToNNX(nn.Dense(3), rngs=rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    model = nnx.bridge.lazy_init(Twice(nnx.Rngs(0)), X)
    return nnx.state(model), model(X), nnx.jit(lambda m, x: m(x))(model, X), nnx.clone(model)(X)


@case
def to_nnx_in_a_model(nnx, nn):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.bridge.ToNNX(nn.Dense(4), rngs=rngs)
            self.second = nnx.bridge.ToNNX(linen_models(nn).Net(), rngs=rngs)
            self.third = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, x):
            return self.third(self.second(self.first(x), train=False))

    model = nnx.bridge.lazy_init(Model(nnx.Rngs(0)), X)
    return nnx.state(model), model(X)


@case
def to_nnx_split_merge(nnx, nn):
    model = to_nnx(nnx, nn)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda x: x + 1, params)
    return nnx.merge(graphdef, params, rest)(X, train=False)


@case
def to_nnx_jit(nnx, nn):
    model = to_nnx(nnx, nn)
    step = nnx.jit(lambda m, x: m(x, mutable=["batch_stats", "counts"]))
    return [step(model, X) for _ in range(3)], nnx.state(model)


@case
def to_nnx_grad(nnx, nn):
    model = to_nnx(nnx, nn)
    return nnx.grad(lambda m: (m(X, mutable=["batch_stats"]) ** 2).sum())(model), nnx.state(model)


@case
def to_nnx_trained(nnx, nn):
    model = to_nnx(nnx, nn)
    step = step_of(nnx, model, lambda m, x: (m(x, mutable=["batch_stats"]) ** 2).mean())
    return [step() for _ in range(4)], nnx.state(model)


@case
def to_nnx_vmap(nnx, nn):
    def make(k):
        return nnx.bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(k)).lazy_init(X)

    models = nnx.vmap(make)(jax.random.split(key(0), 4))
    out = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(models, X)
    one = make(key(1))
    shared = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(one, jnp.stack([X, X + 1]))
    return nnx.state(models), out, shared


@case
def to_nnx_scan(nnx, nn):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.bridge.ToNNX(nn.Dense(3), rngs=rngs)
            self.drop = nnx.bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=rngs)

        def __call__(self, x):
            return self.drop(self.dense(x))

    make = nnx.vmap(lambda rngs: nnx.bridge.lazy_init(Block(rngs), X))
    blocks = make(nnx.Rngs(0).split(3))
    scan = nnx.scan(lambda c, m: m(c), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return scan(X, blocks), nnx.state(blocks)


@case
def to_nnx_remat(nnx, nn):
    model = to_nnx(nnx, nn)
    run = nnx.remat(lambda m, x: m(x, train=False))
    return run(model, X), nnx.grad(lambda m: (run(m, X) ** 2).sum())(model)


@case
def to_nnx_eval_shape(nnx, nn):
    model = nnx.eval_shape(lambda: to_nnx(nnx, nn))
    return {
        "/".join(p): str(v.get_value()) for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


@case
def to_nnx_of_a_lifted_module(nnx, nn):
    model = to_nnx(nnx, nn, "Scanned")
    return nnx.state(model), model(X), nnx.jit(lambda m, x: m(x))(model, X)


@case
def to_nnx_attention_with_a_cache(nnx, nn):
    model = nnx.bridge.ToNNX(nn.MultiHeadDotProductAttention(2, decode=True), rngs=nnx.Rngs(0))
    x = jnp.sin(jnp.arange(32.0)).reshape(1, 4, 8)
    nnx.jit(nnx.bridge.lazy_init)(model, x)
    step = nnx.jit(lambda m, x: m(x, mutable=["cache"]))
    outs = [step(model, x[:, i : i + 1]) for i in range(3)]
    return outs, model.cache_index, model.cached_key


# ---- metadata -----------------------------------------------------------------------------------


def boxed(nn, logical):
    wrap = nn.with_logical_partitioning if logical else nn.with_partitioning
    rules = {"rules": (("a", "x"), ("b", None))} if logical else {}
    return nn.Dense(2, kernel_init=wrap(nn.initializers.normal(), ("a", "b"), **rules))


def metadata_of(variable):
    metadata = {**variable.get_metadata()}
    metadata["linen_meta_type"] = metadata["linen_meta_type"].__name__
    return {name: str(value) for name, value in sorted(metadata.items())}


@case
def to_nnx_partitioned(nnx, nn):
    found = []
    with nnx.use_eager_sharding(False):
        for logical in (False, True):
            model = nnx.bridge.ToNNX(boxed(nn, logical), rngs=nnx.Rngs(0)).lazy_init(X)
            attrs = {"kernel": model.kernel, "bias": model.bias}
            back = nnx.bridge.variables.nnx_attrs_to_linen_vars(attrs)
            found.append([metadata_of(model.kernel), model(X), back])
    return found


@case
def to_nnx_partitioned_on_a_mesh(nnx, nn):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    with mesh, nnx.use_eager_sharding(False):
        model = nnx.bridge.ToNNX(boxed(nn, False), rngs=nnx.Rngs(0)).lazy_init(X)
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
        return model(X), str(specs["kernel"].get_value())


@case
def to_linen_metadata(nnx, nn):
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            init = nnx.initializers.normal()
            self.a = nnx.Linear(
                3, 2, kernel_init=nnx.with_partitioning(init, ("i", "o")), rngs=rngs
            )
            with_box = nnx.bridge.with_partitioning(init, ("i", "o"))
            self.b = nnx.Linear(2, 2, kernel_init=with_box, rngs=rngs)

        def __call__(self, x):
            return self.b(self.a(x))

    with nnx.use_eager_sharding(False):
        model = nnx.bridge.to_linen(Model)
        variables = model.init(key(0), X)
        bare = nnx.bridge.to_linen(Model, metadata_fn=None).init(key(0), X)
        specs = jax.tree.map(str, nn.get_partition_spec(variables), is_leaf=lambda x: x is None)
        return variables, bare, model.apply(variables, X), specs


@case
def to_linen_metadata_fn(nnx, nn):
    def as_partitioned(variable):
        return nn.Partitioned(variable.get_value(), ("n",) * variable.get_value().ndim)

    model = nnx.bridge.to_linen(nnx.Linear, 3, 2, metadata_fn=as_partitioned)
    variables = model.init(key(0), X)
    return variables, model.apply(variables, X)


@case
def metadata_both_ways(nnx, nn):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nnx.with_metadata(nnx.initializers.ones, unit="m")
            return nnx.bridge.to_linen(nnx.Linear, 3, 2, kernel_init=init)(x)

    model = nnx.bridge.ToNNX(Inner(), rngs=nnx.Rngs(0)).lazy_init(X)
    kernel = model.ToLinen_0["kernel"]
    return model(X), kernel.unit, type(kernel).__name__


@case
def variables_by_collection(nnx, nn):
    variables = {
        "params": {"a": {"w": jnp.ones(2)}, "b": nn.Partitioned(jnp.ones(1), (None,))},
        "batch_stats": {"a": {"m": jnp.zeros(3)}},
        "my_collection": {"z": (jnp.ones(1), jnp.zeros(2))},
    }
    with nnx.use_eager_sharding(False):
        attrs = nnx.bridge.variables.linen_vars_to_nnx_attrs(variables)
        kinds = [type(attrs["a"][n]).__name__ for n in "wm"] + [type(attrs["z"]).__name__]
        return attrs, kinds, nnx.bridge.variables.nnx_attrs_to_linen_vars(attrs)


@case
def registered_collection(nnx, nn):
    class Special(nnx.Variable):
        pass

    nnx.register_variable_name("special_things", Special, overwrite=True)
    variable = nnx.bridge.variables.to_nnx_var("special_things", jnp.ones(2))
    return type(variable) is Special, nnx.bridge.variables.nnx_attrs_to_linen_vars({"s": variable})


@case
def same_path_in_two_collections(nnx, nn):
    variables = {"params": {"a": jnp.ones(1)}, "batch_stats": {"a": jnp.ones(2)}}
    return nnx.bridge.variables.linen_vars_to_nnx_attrs(variables)


@case
def no_collection_for_an_array(nnx, nn):
    return nnx.bridge.variables.nnx_attrs_to_linen_vars({"a": jnp.ones(1)})


@case
def nnx_meta_of_another_type(nnx, nn):
    box = nnx.bridge.NNXMeta(nnx.BatchStat, jnp.ones(2), {})
    return nnx.bridge.variables.to_nnx_var("params", box)


# ---- NNX in Linen -------------------------------------------------------------------------------

STREAMS = {"params": 0, "dropout": 1}


def rngs_of(**seeds):
    return {name: key(seed) for name, seed in seeds.items()}


def run_to_linen(nnx, *args, mutable=("batch_stats", "Count"), **kwargs):
    model = nnx.bridge.to_linen(*args, **kwargs)
    variables = model.init(rngs_of(**STREAMS), X)
    out = model.apply(variables, X, rngs=rngs_of(dropout=2), mutable=list(mutable))
    return variables, out


@case
def to_linen_net(nnx, nn):
    return run_to_linen(nnx, nnx_models(nnx).Net, 4)


@case
def to_linen_all_mutable(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Net, 4)
    variables = model.init(rngs_of(**STREAMS), X)
    return model.apply(variables, X, rngs=rngs_of(dropout=2), mutable=True)


@case
def to_linen_several_steps(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Net, size=4)
    variables = model.init(rngs_of(**STREAMS), X)
    outs = []
    for seed in range(3):
        mutable = ["batch_stats", "Count"]
        out, updates = model.apply(variables, X, rngs=rngs_of(dropout=seed), mutable=mutable)
        variables = {**variables, **updates}
        outs.append(out)
    return outs, variables


@case
def to_linen_immutable(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Net, 4)
    return model.apply(model.init(rngs_of(**STREAMS), X), X, rngs=rngs_of(dropout=2))


@case
def to_linen_static_data_begins_anew(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Net, 4)
    variables = model.init(rngs_of(**STREAMS), X)
    _, updates = model.apply(variables, X, rngs=rngs_of(dropout=2), mutable=True)
    return model.apply({**variables, **updates}, nnx_method="calls_so_far")


@case
def to_linen_from_a_partial(nnx, nn):
    cls = nnx_models(nnx).Net
    return run_to_linen(nnx, functools.partial(cls, 4)), run_to_linen(
        nnx, lambda *, rngs: cls(5, rngs=rngs)
    )


@case
def to_linen_class_itself(nnx, nn):
    model = nnx.bridge.ToLinen(nnx.Linear, args=(3, 2), kwargs={"use_bias": False})
    variables = model.init(key(0), X)
    return variables, model.apply(variables, X)


@case
def to_linen_without_keys(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Plain, 3, factor=2.0, skip_rng=True)
    return model.init(key(0), X), model.init({}, X), model.apply(model.init({}, X), X)


@case
def to_linen_keys(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Keys)
    runs = [model.init_with_output(rngs_of(**s), X) for s in (STREAMS, {"params": 3})]
    variables = runs[0][1]
    for streams in ({}, {"params": 1}, {"dropout": 1}, {"default": 4, "noise": 5}):
        runs.append(model.apply(variables, X, rngs=rngs_of(**streams)))
    return runs


@case
def to_linen_key_missing(nnx, nn):
    return nnx.bridge.to_linen(nnx.Linear, 3, 2).init(rngs_of(dropout=0), X)


@case
def to_linen_stream_missing(nnx, nn):
    return nnx.bridge.to_linen(nnx.Dropout, 0.5).init(rngs_of(params=0), X)


@case
def to_linen_stream_missing_in_apply(nnx, nn):
    model = nnx.bridge.to_linen(nnx.Dropout, 0.5)
    return model.apply(model.init(rngs_of(**STREAMS), X), X)


@case
def to_linen_methods(nnx, nn):
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(rngs.params.normal((3,)))

        def __call__(self, x):
            return x * self.w[...]

        def add(self, x, *, more=0):
            return x + self.w[...] + more

    model = nnx.bridge.to_linen(Model)
    variables = model.init(key(0), X, nnx_method="add")
    return [
        variables,
        model.apply(variables, X, nnx_method="add", more=1),
        model.apply(variables, X, nnx_method=Model.add),
        model.bind(variables).add(X, more=2),
        model.apply(variables, X, nnx_method=lambda m, x: m.add(m(x))),
    ]


@case
def to_linen_unknown_method(nnx, nn):
    model = nnx.bridge.to_linen(nnx.Linear, 3, 2)
    return model.apply(model.init(key(0), X), X, nnx_method="nothing")


@case
def to_linen_unknown_attribute(nnx, nn):
    return nnx.bridge.to_linen(nnx.Linear, 3, 2).nothing


@case
def to_linen_in_a_model(nnx, nn):
    to_linen = nnx.bridge.to_linen

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = to_linen(nnx.Linear, 3, 4)(x)
            x = to_linen(nnx.Linear, 4, 4, name="second")(x)
            x = to_linen(nnx.BatchNorm, 4)(nn.Dense(4)(x))
            x = to_linen(nnx.Dropout, 0.5)(x)
            return nnx.bridge.ToLinen(nnx.Linear, args=(4, 1))(x)

    model = Model()
    variables = model.init(rngs_of(**STREAMS), X)
    return variables, model.apply(variables, X, rngs=rngs_of(dropout=2), mutable=["batch_stats"])


@case
def to_linen_shared(nnx, nn):
    class Model(nn.Module):
        def setup(self):
            self.layer = nnx.bridge.to_linen(nnx.Linear, 3, 3)
            self.count = nnx.bridge.to_linen(nnx_models(nnx).Net, 4)

        def __call__(self, x):
            return self.layer(self.layer(x)), self.count(x), self.count(x)

    model = Model()
    variables = model.init(rngs_of(**STREAMS), X)
    mutable = ["batch_stats", "Count"]
    return variables, model.apply(variables, X, rngs=rngs_of(dropout=2), mutable=mutable)


@case
def to_linen_jit_grad(nnx, nn):
    model = nnx.bridge.to_linen(nnx_models(nnx).Net, 4)
    variables = model.init(rngs_of(**STREAMS), X)

    @jax.jit
    def step(variables, rng):
        def loss(params):
            given = {**variables, "params": params}
            mutable = ["batch_stats", "Count"]
            out, updates = model.apply(given, X, rngs={"dropout": rng}, mutable=mutable)
            return (out**2).sum(), updates

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    return step(variables, key(3))


@case
def to_linen_vmap(nnx, nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            lifted = nn.vmap(
                nnx.bridge.ToLinen,
                variable_axes={"params": 0, "batch_stats": 0, "Count": 0},
                split_rngs={"params": True, "dropout": True},
            )
            return lifted(nnx_models(nnx).Net, args=(4,))(x)

    model, x = Model(), jnp.stack([X, X + 1, X + 2])
    variables = jax.jit(model.init)(rngs_of(**STREAMS), x)
    mutable = ["batch_stats", "Count"]
    run = jax.jit(lambda v, x: model.apply(v, x, rngs=rngs_of(dropout=2), mutable=mutable))
    return variables, run(variables, x)


@case
def to_linen_scan(nnx, nn):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = nnx.bridge.to_linen(nnx.Linear, 3, 3)(x)
            return nnx.bridge.to_linen(nnx.Dropout, 0.5)(x), x.sum()

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            splits = {"params": True, "dropout": True}
            scanned = nn.scan(Body, variable_axes={"params": 0}, split_rngs=splits, length=3)
            return scanned()(x, None)

    model = Model()
    variables = jax.jit(model.init)(rngs_of(**STREAMS), X)
    return variables, jax.jit(lambda v: model.apply(v, X, rngs=rngs_of(dropout=2)))(variables)


@case
def to_linen_remat_and_jit(nnx, nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            first = nn.remat(nnx.bridge.ToLinen)(nnx.Linear, args=(3, 2))(x)
            return first + nn.jit(nnx.bridge.ToLinen)(nnx.Linear, args=(3, 2))(x)

    model = Model()
    variables = model.init(key(0), X)
    grads = jax.grad(lambda p: (model.apply({"params": p}, X) ** 2).sum())(variables["params"])
    return variables, model.apply(variables, X), grads


@case
def to_linen_missing_variables(nnx, nn):
    model = nnx.bridge.to_linen(nnx.Linear, 3, 2)
    return model.apply({"params": {"bias": jnp.ones(2)}}, X)


@case
def to_linen_attention(nnx, nn):
    x = jnp.sin(jnp.arange(32.0)).reshape(1, 4, 8)
    model = nnx.bridge.to_linen(nnx.MultiHeadAttention, 2, 8, 8, decode=False)
    variables = model.init(key(0), x)
    return variables, model.apply(variables, x)


@case
def linen_in_nnx_in_linen(nnx, nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nnx.bridge.to_linen(nnx_models(nnx).Linen, nn)(nn.Dense(3)(x))

    model = Model()
    variables = model.init(rngs_of(**STREAMS), X)
    out = model.apply(variables, X, rngs=rngs_of(dropout=2), mutable=["batch_stats"])
    step = jax.jit(lambda v: model.apply(v, X, rngs=rngs_of(dropout=2), mutable=["batch_stats"]))
    return variables, out, step(variables)


@case
def nnx_in_linen_in_nnx(nnx, nn):
    class Middle(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nnx.bridge.to_linen(nnx_models(nnx).Net, 4)(x)
            return nn.Dense(2)(x) + self.param("b", nn.initializers.ones, (2,))

    model = nnx.bridge.ToNNX(Middle(), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)
    outs = [model(X, mutable=["batch_stats", "Count"]) for _ in range(2)]
    jitted = nnx.jit(lambda m, x: m(x, mutable=["batch_stats", "Count"]))(model, X)
    grads = nnx.grad(lambda m: (m(X) ** 2).sum())(model)
    return outs, jitted, nnx.state(model), grads


# ---- nnx.bridge.functional and nnx.bridge.Module ------------------------------------------------


@case
def functional(nnx, nn):
    layer = nnx.bridge.functional(nnx.Linear)(3, out_features=2)
    state = layer.init(rngs=nnx.Rngs(0))
    out, (_, after) = layer.apply(state)(X)
    return state, out, after, layer.args, list(layer.kwargs)


@case
def functional_before_init(nnx, nn):
    return nnx.bridge.functional(nnx.Linear)(3, 2).apply({})


@functools.cache
def bridge_models(nnx, nn):
    bridge = nnx.bridge

    class Dense(bridge.Module):
        features: int
        use_bias: bool = True

        @bridge.compact
        def __call__(self, x):
            shape = (x.shape[-1], self.features)
            x = x @ self.param("w", nn.initializers.lecun_normal(), shape)
            if self.use_bias:
                x = x + self.param("b", nn.initializers.normal(), (self.features,))
            return x

    class Setup(bridge.Module):
        def setup(self):
            self.a, self.b = Dense(4), Dense(2, use_bias=False)
            self.rest = [Dense(3), Dense(2)]
            self.table = {"x": Dense(2)}
            self.scale = self.param("scale", nn.initializers.normal(), (2,))

        def __call__(self, x):
            x = self.b(self.a(x)) * self.scale
            for layer in self.rest:
                x = layer(x)
            return self.table["x"](x)

        def other(self, x):
            return self.a(x)

    class Compact(bridge.Module):
        size: int = 3

        @bridge.compact
        def __call__(self, x):
            x = Dense(4)(x)
            x = self.helper(x)
            named = Dense(3, name="named")
            x = named(named(x))
            count = self.variable("counts", "n", lambda: jnp.zeros(()))
            if not self.is_initializing():
                count[...] += 1
            keys = [self.make_rng("dropout"), self.make_rng(), self.make_rng("dropout")]
            return x, keys, type(bridge.current_module()).__name__

        def helper(self, x):
            return Dense(self.size)(x)

    class Mixed(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 2, rngs=rngs))(x)
            x = bridge.nnx_in_bridge_mdl(lambda r: nnx.Linear(2, 2, rngs=r), name="second")(x)
            x = bridge.linen_in_bridge_mdl(nn.Dense(2))(x)
            x = bridge.linen_in_bridge_mdl(nn.BatchNorm(use_running_average=False), name="n")(x)
            x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Dropout(0.5, rngs=rngs))(x)
            return bridge.linen_in_bridge_mdl(nn.Dropout(0.5, deterministic=False))(x)

    class MixedSetup(bridge.Module):
        def setup(self):
            self.linen = bridge.linen_in_bridge_mdl(nn.Dense(2))
            self.nnx = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(2, 2, rngs=rngs))

        def __call__(self, x):
            return self.nnx(self.linen(x))

    return types.SimpleNamespace(
        Dense=Dense, Setup=Setup, Compact=Compact, Mixed=Mixed, MixedSetup=MixedSetup
    )


def run_bridge(model, rngs=0, apply_rngs=1):
    variables = model.init(rngs, X)
    return variables, model.apply(variables, X, rngs=apply_rngs, mutable=True)


@case
def module_dense(nnx, nn):
    model = bridge_models(nnx, nn).Dense(4)
    seeds = (0, key(0), {"params": key(1)}, nnx.Rngs(0), nnx.Rngs(1, params=2))
    variables = [model.init(rngs, X) for rngs in seeds]
    return variables, model.apply(variables[0], X), model.init_with_output(3, X)


@case
def module_setup(nnx, nn):
    model = bridge_models(nnx, nn).Setup()
    variables = model.init(0, X)
    other = model.apply(variables, X, method="other"), model.init(0, X, method=type(model).other)
    return run_bridge(model), other, model.apply(variables, X, method=lambda m, x: m.other(x) + 1)


@case
def module_compact(nnx, nn):
    model = bridge_models(nnx, nn).Compact()
    streams = {"dropout": key(1), "default": key(2)}
    return run_bridge(model), run_bridge(model, nnx.Rngs(0, dropout=1), streams)


@case
def module_mixed(nnx, nn):
    return run_bridge(bridge_models(nnx, nn).Mixed())


@case
def module_mixed_setup(nnx, nn):
    return run_bridge(bridge_models(nnx, nn).MixedSetup())


@case
def module_field(nnx, nn):
    bridge, Dense = nnx.bridge, bridge_models(nnx, nn).Dense

    class Model(bridge.Module):
        layer: Dense

        @bridge.compact
        def __call__(self, x):
            return self.layer(x)

    return run_bridge(Model(Dense(3)))


@case
def module_own_constructor(nnx, nn):
    class Model(nnx.bridge.Module):
        def __init__(self, n):
            self.w = nnx.Param(jnp.full(n, 2.0))

        def __call__(self, x):
            return x * self.w

    return run_bridge(Model(3))


@case
def module_jit_grad(nnx, nn):
    model = bridge_models(nnx, nn).Dense(2)
    variables = jax.jit(lambda k: model.init(k, X))(key(0))
    loss = jax.jit(lambda p: (model.apply({"params": p}, X) ** 2).sum())
    return variables, jax.value_and_grad(loss)(variables["params"])


@case
def module_transforms_inside(nnx, nn):
    bridge, Dense = nnx.bridge, bridge_models(nnx, nn).Dense

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            y = nnx.jit(lambda m, x: m(x))(Dense(3), x)

            def make(rngs):
                keys = jax.random.split(rngs(), 4)
                return nnx.vmap(lambda k: nnx.Linear(3, 2, rngs=nnx.Rngs(k)))(keys)

            stack = bridge.nnx_in_bridge_mdl(make)
            return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(stack, y)

    return run_bridge(Model())


@case
def module_unbound(nnx, nn):
    return bridge_models(nnx, nn).Dense(2)(X)


@case
def module_unbound_rng(nnx, nn):
    return bridge_models(nnx, nn).Dense(2).make_rng("params")


@case
def module_without_keys(nnx, nn):
    return bridge_models(nnx, nn).Dense(2).init(None, X)


@case
def module_unknown_method(nnx, nn):
    return bridge_models(nnx, nn).Dense(2).init(0, X, method="nothing")


@case
def module_interop_outside(nnx, nn):
    return nnx.bridge.linen_in_bridge_mdl(nn.Dense(2))


@case
def module_context(nnx, nn):
    found = []

    class Inner(nnx.bridge.Module):
        def setup(self):
            entry = nnx.bridge.current_context()
            found.append([type(entry.module).__name__, entry.in_compact])

        @nnx.bridge.compact
        def __call__(self, x):
            entry = nnx.bridge.current_context()
            found.append([type(entry.module).__name__, entry.in_compact])
            return x

    class Outer(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            return Inner()(x)

    Outer().init(0, X)
    stack = nnx.bridge.module.MODULE_CONTEXT.module_stack
    return found, len(stack), nnx.bridge.current_module() is None, list(nnx.bridge.AttrPriority)


if __name__ == "__main__":
    package = sys.argv[1]
    libraries = [importlib.import_module(f"{package}.{name}") for name in ("nnx", "linen")]
    table = {name: outcome(function, *libraries) for name, function in CASES.items()}
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items()]
    print("{\n" + ",\n".join(rows) + "\n}")
