"""Programs over Linen's Module whose names and numbers Flax was asked for.

A case is a function of the module ``nn``: Linnet's, or Flax's when the table of expected values was
made, by ``python -m tests.linen.module_cases flax.linen``. ``outcome`` turns what it returns
into the paths and shapes of its arrays, and one number that changes when an entry changes.
"""

import dataclasses
import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from tests.digest import paths_and_digest

KEY = jax.random.key(0)
X = jnp.ones((2, 3))
CASES: dict[str, Callable[[Any], Any]] = {}


def case(function):
    CASES[function.__name__] = function
    return function


def outcome(function, nn):
    """The paths and shapes of what a case returns, and a digest; or the name of its error."""
    try:
        out = function(nn)
    except Exception as error:
        return [type(error).__name__]
    return paths_and_digest(out)


def layers(nn):
    """A dense layer and a dropout, written with Module alone."""

    class Dense(nn.Module):
        features: int
        use_bias: bool = True

        @nn.compact
        def __call__(self, x):
            shape = (x.shape[-1], self.features)
            y = x @ self.param("kernel", jax.nn.initializers.lecun_normal(), shape)
            if self.use_bias:
                y = y + self.param("bias", jax.nn.initializers.normal(), (1, self.features))
            return y

    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)

    class Around(nn.Module):
        inner: Any

        @nn.compact
        def __call__(self, x):
            return Dense(2)(self.inner(x))

    class Through(nn.Module):
        inner: Any

        def __call__(self, x):
            return self.inner(x)

    return Dense, Drop, Around, Through


# ---- submodules and their names -----------------------------------------------------------------


@case
def compact_names(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(1)(Dense(2, name="out")(Dense(4)(x)))

    return Model().init_with_output(KEY, X)


@case
def setup_names(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.first = Dense(4)
            self.layers = [Dense(2), Dense(3)]
            self.nested = (Dense(1), (Dense(2),))
            self.table = {"x": Dense(1), "y": [Dense(2)]}
            self.w = self.param("w", jax.nn.initializers.normal(), (1, 2))
            self.count = self.variable("counts", "n", jnp.zeros, ())

        def __call__(self, x):
            self.count.value += 1
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            x = self.nested[1][0](self.nested[0](x))
            return self.table["y"][0](self.table["x"](x)) * self.w

    model = Model()
    out, variables = model.init_with_output(KEY, X)
    kinds = [type(getattr(model.bind(variables), name)).__name__ for name in ("layers", "table")]
    again = model.apply(variables, X, mutable=["counts"])
    return out, variables, kinds, again, model.apply(variables, X, mutable=nn.DenyList("params"))


@case
def setup_and_compact_in_one_class(nn):
    Dense, *_ = layers(nn)

    class Inner(nn.Module):
        def setup(self):
            self.a = Dense(2)
            self.w = self.param("w", jax.nn.initializers.normal(), (1, 2))

        @nn.compact
        def __call__(self, x):
            bias = self.param("b", jax.nn.initializers.normal(), (1, 3))
            return Dense(3)(self.a(x) * self.w) + bias

        def other(self, x):
            return self.a(x)

    class Model(nn.Module):
        def setup(self):
            self.m = Inner()

        def __call__(self, x):
            return self.m(self.m(x)), self.m.other(x)

    return Model().init_with_output(KEY, X), Inner().init(KEY, X, method="other")


@case
def a_module_used_twice(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = Dense(3)
            return dense(dense(x))

    return Model().init_with_output(KEY, X)


@case
def passed_from_outside(nn):
    Dense, _, Around, _ = layers(nn)
    named = Around(Dense(3, name="foo")).init(KEY, X)
    return Around(Dense(3)).init(KEY, X), named, Around(Around(Dense(3))).init(KEY, X)


@case
def passed_in_a_compact_method(nn):
    Dense, _, Around, _ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = Dense(3)
            return Around(dense)(x) + Around(Dense(3, name="bar"))(x) + Around(inner=dense)(x)

    return Model().init_with_output(KEY, X)


@case
def passed_in_setup(nn):
    Dense, _, Around, _ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.d = Dense(3)
            self.i, self.j, self.k = Around(self.d), Around(Dense(3)), Around(inner=self.d)

        def __call__(self, x):
            return self.i(x) + self.j(x) + self.k(x)

    return Model().init_with_output(KEY, X)


@case
def passed_in_lists_and_dicts(nn):
    Dense, *_ = layers(nn)

    class Chain(nn.Module):
        layers: Any
        table: Any = None

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x if self.table is None else self.table["a"](x)

    class InCompact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Chain([Dense(2), Dense(3)])(x)

    class InSetup(nn.Module):
        def setup(self):
            self.chain = Chain([Dense(2), jnp.tanh, Dense(3)], {"a": Dense(1)})

        def __call__(self, x):
            return self.chain(x)

    dense = Dense(3)
    models = [Chain((Dense(2), Dense(3)), {"a": Dense(4)}), Chain([dense, dense]), InCompact()]
    return [model.init_with_output(KEY, X) for model in [*models, InSetup()]]


@case
def the_same_module_in_several_places(nn):
    Dense, _, _, Through = layers(nn)

    class FirstTaker(nn.Module):
        def setup(self):
            dense = Dense(3)
            self.i, self.j, self.k = Through(dense), Through(dense), dense

        def __call__(self, x):
            return self.j(self.i(self.k(x)))

    class NamedFirst(nn.Module):
        def setup(self):
            dense = Dense(3, name="dd")
            self.k, self.l = Through(dense), [dense, Through(Through(Dense(3)))]

        def __call__(self, x):
            return self.l[1](self.k(x))

    class Two(nn.Module):
        a: Any
        b: Any

        @nn.compact
        def __call__(self, x):
            return self.a(self.b(x)) + Dense(3, name="q")(x)

    class Again(nn.Module):
        a: Any

        def setup(self):
            self.b, self.c = self.a, [self.a]

        def __call__(self, x):
            return self.b(x) + self.c[0](x)

    class Repeated(nn.Module):
        def setup(self):
            self.layers = [Dense(3)] * 2

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    dense = Dense(3)
    pairs = [Two(dense, dense), Two(dense, Through(dense)), Two(Through(dense), dense)]
    models = [FirstTaker(), NamedFirst(), *pairs, Again(dense), Repeated()]
    return [model.init_with_output(KEY, X) for model in models]


@case
def factories_functions_and_arguments(nn):
    Dense, *_ = layers(nn)

    class Made(nn.Module):
        make: Any

        @nn.compact
        def __call__(self, x):
            return self.make()(self.make(name="z")(x))

    class Calls(nn.Module):
        fn: Any

        @nn.compact
        def __call__(self, x):
            return self.fn(x)

    class Closure(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = Dense(3)
            return Calls(lambda y: dense(1 * y))(x) + Calls(lambda y: Dense(3)(1 * y))(x)

    class Methods(nn.Module):
        def setup(self):
            self.d = Dense(3)
            self.f, self.g = Calls(self.d.__call__), Calls(self.helper)

        def helper(self, x):
            return self.d(x)

        def __call__(self, x):
            return self.f(x) + self.g(x)

    class TakesLayer(nn.Module):
        @nn.compact
        def __call__(self, x, layer):
            return layer(x)

    class GivesLayer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return TakesLayer()(x, Dense(3))

    models = [Made(functools.partial(Dense, 3)), Closure(), Methods(), GivesLayer()]
    return [model.init_with_output(KEY, X) for model in models]


@case
def submodules_made_in_helpers(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def helper(self, x):
            return Dense(2)(x)

        @nn.nowrap
        def make(self):
            return Dense(4)

        @nn.compact
        def __call__(self, x):
            return self.make()(self.helper(x) + self.helper(x))

    return Model().init_with_output(KEY, X)


@case
def super_calls(nn):
    Dense, *_ = layers(nn)

    class Base(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(2)(x)

    class Derived(Base):
        @nn.compact
        def __call__(self, x):
            return Dense(1)(super().__call__(x)) + Dense(1)(x)

    return Derived().init_with_output(KEY, X)


@case
def two_compact_methods(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def a(self, x):
            return Dense(3, name="a")(x)

        @nn.compact
        def b(self, x):
            return Dense(2, name="b")(self.a(x))

        def twice(self, x):
            return self.a(self.a(x))

    return [Model().init_with_output(KEY, X, method=m) for m in ("a", "b", "twice")]


@case
def copies_of_submodules(nn):
    Dense, *_ = layers(nn)

    class Compact(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = Dense(3)
            copied = dense.copy()
            return dense(x) + copied(x), copied.name

    class Setup(nn.Module):
        def setup(self):
            self.d = Dense(3)
            self.e, self.f = self.d.copy(), self.d.clone(features=2)

        def __call__(self, x):
            return self.d(x) + self.e(x), self.f(x)

    class Field(nn.Module):
        base: Any

        @nn.compact
        def __call__(self, x):
            return self.base(x) + self.base.copy(name="c1")(x) + self.base.copy()(x)

    return [model.init_with_output(KEY, X) for model in (Compact(), Setup(), Field(Dense(3)))]


def _collision(name):
    def enter(make):
        def run(nn):
            return make(nn, layers(nn)[0])().init(KEY, X)

        CASES[f"collision_{name}"] = run

    return enter


@_collision("of_explicit_names")
def _explicit(nn, Dense):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(3, name="d")(Dense(3, name="d")(x))

    return Model


@_collision("with_a_param")
def _with_param(nn, Dense):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("d", jax.nn.initializers.zeros, (1,))
            return Dense(3, name="d")(x)

    return Model


@_collision("of_params")
def _params(nn, Dense):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("d", jax.nn.initializers.zeros, (1,))
            return self.param("d", jax.nn.initializers.zeros, (1,))

    return Model


@_collision("in_two_collections_is_none")
def _collections(nn, Dense):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("d", jax.nn.initializers.zeros, (1,))
            return self.variable("stats", "d", jnp.zeros, (1,)).value

    return Model


@_collision("with_an_automatic_name")
def _automatic(nn, Dense):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(3, name="Dense_1")(x) + Dense(3)(x) + Dense(3)(x)

    return Model


@_collision("of_an_attribute_set_twice")
def _twice(nn, Dense):
    class Model(nn.Module):
        def setup(self):
            self.a = Dense(3)
            self.a = Dense(4)

        def __call__(self, x):
            return self.a(x)

    return Model


@_collision("with_an_element_of_a_list")
def _element(nn, Dense):
    class Model(nn.Module):
        def setup(self):
            self.a = [Dense(3)]
            self.a_0 = Dense(4)

        def __call__(self, x):
            return self.a[0](x)

    return Model


@_collision("with_a_field_is_none")
def _field(nn, Dense):
    class Model(nn.Module):
        d: int = 3

        @nn.compact
        def __call__(self, x):
            return Dense(3, name="d")(x)

    return Model


# ---- random keys --------------------------------------------------------------------------------


def _noisy(nn):
    _, Drop, *_ = layers(nn)

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            drop = Drop()
            keys = [self.make_rng("dropout"), self.make_rng("dropout"), self.make_rng()]
            return Drop()(x), drop(x), drop(x), keys, self.make_rng("noise")

    class Model(nn.Module):
        def setup(self):
            self.m, self.drops = Inner(), [Drop(), Drop()]
            self.key = self.make_rng("dropout")

        def __call__(self, x):
            first, again = self.m(x), self.m(x)
            drops = [drop(x) for drop in self.drops]
            return first, again, drops, self.key, self.make_rng("dropout")

    return Model()


STREAMS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}


@case
def keys_by_path_and_count(nn):
    model = _noisy(nn)
    return model.init_with_output(STREAMS, X), model.apply({}, X, rngs=STREAMS)


@case
def keys_fall_back_to_params(nn):
    return _noisy(nn).apply({}, X, rngs=jax.random.key(3))


@case
def keys_of_the_old_kind(nn):
    return _noisy(nn).apply({}, X, rngs={"params": jax.random.PRNGKey(7)})


@case
def keys_of_a_bound_module(nn):
    _, Drop, _, Through = layers(nn)
    bound = Through(Drop()).bind({}, rngs=STREAMS)
    return bound(X), bound(X), bound.inner(X), bound.make_rng("dropout")


@case
def keys_of_shared_modules(nn):
    _, Drop, _, Through = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            drop = Drop(name="d")
            return drop(x), Through(drop)(x), Through(drop)(x), Through(Drop())(x)

    return Model().apply({}, X, rngs=STREAMS)


# ---- init and apply -----------------------------------------------------------------------------


@case
def methods(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.a, self.b = Dense(2), Dense(3)

        def encode(self, x):
            return self.a(x)

        def __call__(self, x):
            return self.b(self.encode(x))

    model = Model()
    variables = model.init(KEY, X)
    ways = ["encode", Model.encode, model.encode, lambda self, x: self.encode(x) + 1]
    free = nn.apply(lambda m, x: m.encode(x), model)(variables, X)
    made = nn.init_with_output(lambda m, x: m.encode(x), model)(KEY, X)
    return [model.apply(variables, X, method=way) for way in ways], free, made, variables


@case
def sown_values(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            sown = self.sow("intermediates", "h", x), self.sow("intermediates", "h", x + 1)
            add = {"reduce_fn": lambda a, b: a + b, "init_fn": lambda: 0.0}
            self.sow("stats", "sum", x.sum(), **add)
            return Dense(2)(x), sown

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = Model()
            return inner(x), inner(x)

    model, twice = Model(), Twice()
    variables = model.init(KEY, X)
    given = {"params": variables["params"], "stats": {"sum": 3.0}}
    return (
        variables,
        model.apply(variables, X),
        model.apply(variables, X, mutable=["intermediates", "stats"]),
        model.apply(given, X, mutable="stats"),
        model.init(KEY, X, mutable=True),
        twice.init(KEY, X, mutable=["params", "intermediates"]),
    )


@case
def perturbations(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = self.perturb("h", Dense(2)(x))
            return self.perturb("z", Dense(1)(h), collection="other")

    model = Model()
    variables = model.init(KEY, X)
    params = {"params": variables["params"]}

    def loss(perturbations):
        return model.apply({**params, "perturbations": perturbations}, X).sum()

    return (
        variables,
        model.apply(params, X),
        jax.grad(loss)(variables["perturbations"]),
        loss({"h": jnp.ones((2, 2))}),
        model.apply(params, X, mutable=["perturbations"]),
        model.init(KEY, X, mutable=["params"]),
    )


@case
def a_perturbation_is_missing(nn):
    class Model(nn.Module):
        def __call__(self, x):
            return self.perturb("h", x)

    return Model().apply({"perturbations": {}}, X)


@case
def captured_intermediates(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.a, self.b = Dense(2), Dense(1)

        def encode(self, x):
            return self.a(x)

        def __call__(self, x):
            return self.b(self.encode(x))

    model = Model()
    variables = model.init(KEY, X)
    return (
        model.apply(variables, X, capture_intermediates=True),
        model.apply(variables, X, capture_intermediates=lambda m, name: name == "encode"),
        model.apply(variables, X, capture_intermediates=True, mutable=["stats"]),
        model.init(KEY, X, capture_intermediates=True),
    )


@case
def intercepted_methods(nn):
    Dense, *_ = layers(nn)
    log = []

    def named(tag):
        def interceptor(next_fun, args, kwargs, context):
            name = f"{tag} {type(context.module).__name__}.{context.method_name}"
            log.append(f"{name} {len(args)} {sorted(kwargs)}")
            return next_fun(*args, **kwargs)

        return interceptor

    def plus(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        return out + 1 if context.method_name == "__call__" else out

    class Model(nn.Module):
        def setup(self):
            self.a = Dense(2)

        def encode(self, x, *, k=1):
            return self.a(x)

        def __call__(self, x):
            return self.encode(x, k=2)

    model = Model()
    variables = model.init(KEY, X)
    with nn.intercept_methods(named("one")), nn.intercept_methods(named("two")):
        model.apply(variables, X)
    with nn.intercept_methods(plus):
        return log, model.apply(variables, X)


@case
def lazy_init(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            y = Dense(2)(x)
            return Dense(1)(y) if train else y

    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    model = Model()
    return model.lazy_init(KEY, shape), model.lazy_init(STREAMS, X, train=True)


@case
def transformed_from_outside(nn):
    Dense, _, Around, _ = layers(nn)
    model = Around(Dense(3))
    variables = jax.jit(model.init)(KEY, X)
    many = jax.vmap(model.init, in_axes=(0, None))(jax.random.split(KEY, 2), X)
    return variables, jax.jit(model.apply)(variables, X), many


@case
def transformed_inside_without_writes(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.d = Dense(3)

        def __call__(self, x):
            return jax.jit(lambda y: self.d(1 * y))(x), jax.grad(lambda y: self.d(y).sum())(x)

    variables = Model().init(KEY, X, method=lambda m, x: m.d(x))
    bound = Model().bind(variables)
    return Model().apply(variables, X), jax.vmap(lambda y: bound.d(y[None]))(X)


@case
def shared_scopes(nn):
    Dense, *_ = layers(nn)

    class Low(nn.Module):
        n: int = 2

        def setup(self):
            self.a = Dense(self.n)
            self.w = self.param("w", jax.nn.initializers.normal(), (1, 2))

        def __call__(self, x):
            return self.a(x) * self.w

    class Wrap(nn.Module):
        base: Any

        def setup(self):
            nn.share_scope(self, self.base)

        @nn.compact
        def __call__(self, x):
            return self.base(x) + Dense(2, name="extra")(x)

    class Outer(nn.Module):
        def setup(self):
            self.low = Low()
            nn.share_scope(self, self.low)
            self.d = Dense(2)

        def __call__(self, x):
            return self.low(x) + self.d(x)

    class InCompact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Wrap(Low())(x)

    class Siblings(nn.Module):
        def setup(self):
            self.a, self.b = Low(), Low(3)
            nn.share_scope(self.a, self.b)

        def __call__(self, x):
            return self.a(x)

    models = [Wrap(Low()), Outer(), InCompact(), Siblings()]
    return [model.init_with_output(KEY, X) for model in models]


@case
def shared_scopes_collide(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        inner: Any

        def setup(self):
            nn.share_scope(self, self.inner)

        @nn.compact
        def __call__(self, x):
            return self.inner(x), Dense(4)(x)

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(3)(x)

    return Model(Inner()).init(KEY, X)


@case
def compact_name_scopes(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.s = Dense(3)

        @nn.compact_name_scope
        def up(self, x):
            return Dense(3)(self.s(x))

        @nn.compact_name_scope
        def down(self, x, *, scale=1.0):
            return Dense(2)(Dense(2)(x)) * scale, self.make_rng("dropout")

        def __call__(self, x):
            return self.down(self.up(self.up(x)), scale=2.0)

    model = Model()
    out, variables = model.init_with_output(STREAMS, X)
    captured = model.apply(variables, X, method="up", capture_intermediates=True)
    return out, variables, model.init(KEY, X, method="up"), model.bind(variables).up(X), captured


# ---- classes ------------------------------------------------------------------------------------


@case
def fields(nn):
    Dense, *_ = layers(nn)

    class A(nn.Module):
        a: int
        b: int = 2

    class B(A):
        c: int = 3

    class KeywordOnly(nn.Module, kw_only=True):
        a: int = 1
        b: int

    class After(KeywordOnly):
        c: int
        d: int = 3

    T = TypeVar("T")

    class General(nn.Module, Generic[T]):
        a: int

        @nn.compact
        def __call__(self, x):
            return Dense(self.a)(x)

    class PostInit(nn.Module):
        a: int

        def __post_init__(self):
            self.doubled = 2 * self.a
            super().__post_init__()

        def __call__(self):
            return self.doubled

    class Fields(nn.Module):
        a: int = dataclasses.field(default=3)
        b: Any = dataclasses.field(default_factory=dict)
        d: int = dataclasses.field(init=False, default=7)

        def __call__(self):
            return self.a, type(self.b).__name__, self.d

    class Default(nn.Module):
        m: nn.Module = Dense(3)

        def __call__(self, x):
            return self.m(x)

    return (
        [f.name for f in dataclasses.fields(B)],
        [
            A(1) == A(1),
            A(1) == A(2),
            A(1) == B(1),
            hash(A(1)) == hash(A(1)),
            A(1) == A(1, name="x"),
        ],
        [KeywordOnly(b=4).b, After(5, b=2).c, dataclasses.replace(A(1), a=4).a],
        General[int](3).init(KEY, X),
        [PostInit(2).apply({}), PostInit(2).doubled],
        Fields(b={"a": 1}).apply({}),
        Default().init(KEY, X),
    )


@case
def properties_and_other_methods(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        def setup(self):
            self.a, self._q = Dense(2), 5

        @property
        def width(self):
            return self.a.features

        @functools.cached_property
        def cached(self):
            return self._q + 1

        @classmethod
        def make(cls):
            return cls()

        @staticmethod
        def add(x):
            return x + 1

        def __len__(self):
            return 4

        def __getitem__(self, i):
            return i

        def __call__(self, x):
            return self.a(x), self.width, self.cached, self.add(1)

    variables = Model().init(KEY, X)
    bound = Model().bind(variables)
    plain = [bound.width, bound.cached, len(bound), bound[3], Model.add(3), Model.make() == Model()]
    return plain, bound(X)


@case
def attributes_are_frozen_containers(nn):
    class Model(nn.Module):
        a: Any

        def setup(self):
            self.b = {"x": [1, {"y": 2}]}

        def __call__(self):
            values = self.a, self.a[0], self.b, self.b["x"], self.b["x"][1]
            return [type(value).__name__ for value in values]

    return Model([[1], 2]).apply({}), type(Model([1]).a).__name__


@case
def wrapped_weights(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, update):
            x = nn.SpectralNorm(nn.Dense(4))(x, update_stats=update)
            x = nn.WeightNorm(nn.Dense(3), feature_axes=-1)(x)
            return nn.WeightNorm(nn.Dense(2, name="d"), use_scale=False)(x)

    variables = Model().init(KEY, X, True)
    return variables, Model().apply(variables, X, True, mutable=["batch_stats"])


@case
def sown_with_a_sum_in_a_scan(nn):
    class Step(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            self.sow("sums", "x", x, reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
            self.sow("intermediates", "carry", carry)
            return nn.Dense(3)(carry) + x, carry

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"intermediates": 0, "sums": 0}
            step = nn.scan(Step, axes, variable_broadcast="params", split_rngs={"params": False})
            return step()(jnp.zeros(3), x)

    variables = Model().init(KEY, X)
    params = {"params": variables["params"]}
    return variables, Model().apply(params, X, mutable=["sums", "intermediates"])


@case
def statistics_over_a_mapped_axis(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            axes = {"params": None, "batch_stats": None}
            mapped = nn.vmap(nn.BatchNorm, axes, {"params": False}, axis_name="rows")
            return mapped(use_running_average=not train, axis_name="rows")(x)

    x = jnp.arange(6.0).reshape(2, 3)
    variables = Model().init(KEY, x)
    trained, written = Model().apply(variables, x, mutable=["batch_stats"])
    return variables, trained, written, Model().apply(variables, x, train=False)


@case
def tied_embedding(nn):
    class Head(nn.Module):
        embed: Any

        @nn.compact
        def __call__(self, x):
            return self.embed.attend(x) + self.param("bias", nn.initializers.ones, (1, 5))

    class Model(nn.Module):
        def setup(self):
            self.embed = nn.Embed(5, 3)
            self.head = Head(self.embed)

        def __call__(self, tokens):
            return self.head(self.embed(tokens))

    return Model().init_with_output(KEY, jnp.array([1, 2]))


@case
def every_form_of_mutable(nn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            for col in ("a", "b"):
                n = self.variable(col, "n", lambda: jnp.zeros(()))
                n.value += self.is_mutable_collection(col) and 1
            return n.value

    class Reading(nn.Module):
        @nn.compact
        def __call__(self):
            return [self.is_mutable_collection(col) for col in ("a", "b", "params")]

    forms = ("a", ["a"], ("a", "b"), {"b"}, True, False, [])
    both = Model().init(KEY)
    return Model().apply(both, mutable=True), [Reading().apply(both, mutable=m) for m in forms]


@case
def something_else_as_a_key(nn):
    return nn.Dense(2).init(jax.random.split(KEY), X)


@case
def a_field_called_name(nn):
    class Model(nn.Module):
        name: int = 3

    return Model()


@case
def texts(nn):
    Dense, *_ = layers(nn)

    class Model(nn.Module):
        a: int
        f: Any = jnp.tanh
        inner: Any = None

        def setup(self):
            self.d = Dense(3)

        def __call__(self, x):
            return self.d(x)

    model = Model(1, inner=Dense(2))
    bound = model.bind(model.init(KEY, X))
    before = repr(bound)
    bound.d  # noqa: B018 - runs setup
    return [repr(Model(1)), repr(Dense(3, name="x")), before, repr(bound), repr(bound.d)]


if __name__ == "__main__":
    library = importlib.import_module(sys.argv[1])
    lines = (f" {json.dumps(name)}: {json.dumps(outcome(f, library))}" for name, f in CASES.items())
    print("{\n" + ",\n".join(lines) + "\n}")
