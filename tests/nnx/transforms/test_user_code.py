"""The version of the user's code changes whenever the code does, and it is read again only then."""

import collections
import contextlib
import dataclasses
import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from linnet import nnx
from linnet.nnx.transforms.plan import definition_of
from linnet.nnx.transforms.user_code import CodeRead, UserCode


def _method(self, x, times=2, *, plus=0):
    return helper(x) * times + plus + len(x)  # noqa: F821


def _helper(x):
    return rate if limit is None else table[0]  # noqa: F821


def _closed_over(value):
    def inner(self):
        return value

    return inner


class CodeWorld:
    """A class of modules and a function, with globals of their own that a test changes."""

    def __init__(self):
        self.globals = {"rate": 2.0, "limit": None, "table": (1,)}
        self.globals["helper"] = self.function(_helper)
        of_base = {"__module__": __name__, "shift": 1}
        self.base = type("Base", (nnx.Module,), dict(of_base))
        self.other_base = type("OtherBase", (nnx.Module,), {**of_base, "shift": 2})
        wrapped = self.function(lambda self: rate)  # noqa: F821

        @functools.wraps(wrapped)
        def wrapper(self):
            return wrapped(self)

        members = {
            "__module__": __name__,
            "method": self.function(_method, defaults=(2,)),
            "closure": _closed_over(1),
            "static": staticmethod(_closed_over(2)),
            "property": property(_closed_over(3)),
            "wrapped": wrapper,
            "partial": functools.partial(wrapped),
            "scale": 1.0,
            "nothing": None,
            "sizes": (1, 2),
        }
        self.cls = type("Model", (self.base,), members)
        self.user = self.function(lambda model, x: model.method(x))
        self.model = self.cls()

    def function(self, like, defaults=None):
        return types.FunctionType(like.__code__, self.globals, like.__name__, defaults)

    def method(self):
        return vars(self.cls)["method"]

    def cell(self):
        return vars(self.cls)["closure"].__closure__[0]


def _set(name, value):
    return lambda world: setattr(world.cls, name, value)


def _set_global(name, value):
    return lambda world: world.globals.__setitem__(name, value)


def _set_part(name, value):
    return lambda world: setattr(world.method(), name, value)


def _wrap_another(world):
    vars(world.cls)["wrapped"].__closure__[0].cell_contents = world.function(_helper)


def _delete(name):
    return lambda world: name in vars(world.cls) and delattr(world.cls, name)


CODE_CHANGES = {
    "nothing": lambda world: None,
    "a global": _set_global("rate", 3.0),
    "a global back": _set_global("rate", 2.0),
    "a global of another type": _set_global("rate", 2),
    "a global becomes None": _set_global("rate", None),
    "a global goes": lambda world: world.globals.pop("rate", None),
    "a builtin is shadowed": _set_global("len", None),
    "a helper": lambda world: world.globals.update(helper=world.function(_method)),
    "a global becomes a list": lambda world: world.globals.update(table=[1]),
    "a list grows": lambda world: (
        world.globals["table"] == [1] and world.globals["table"].append(2)
    ),
    "a class attribute": _set("scale", 2.0),
    "a class attribute of another type": _set("scale", 1),
    "a class attribute becomes a dict": lambda world: setattr(world.cls, "scale", {"a": 1}),
    "a dict of a class": lambda world: (
        type(world.cls.scale) is dict and world.cls.scale.update(a=2)
    ),
    "a new attribute": _set("more", 1),
    "an operator": _set("__add__", _closed_over(1)),
    "a new attribute that is None": _set("more", None),
    "None goes": _delete("nothing"),
    "an attribute goes": _delete("more"),
    "an attribute gets another name": lambda world: (
        type.__delattr__(world.base, "shift"),
        setattr(world.base, "moved", 1),
    ),
    "an attribute of a base": lambda world: setattr(world.base, "shift", 2),
    "another base": lambda world: setattr(world.cls, "__bases__", (world.other_base,)),
    "code": _set_part("__code__", _helper.__code__),
    "defaults": _set_part("__defaults__", (3,)),
    "a default that is a list": lambda world: setattr(world.method(), "__defaults__", ([1],)),
    "a list of defaults grows": lambda world: (
        world.method().__defaults__ == ([1],) and world.method().__defaults__[0].append(1)
    ),
    "defaults of keywords": lambda world: setattr(world.method(), "__kwdefaults__", {"plus": 1}),
    "a default of a keyword": lambda world: (
        world.method().__kwdefaults__ and world.method().__kwdefaults__.update(plus=2)
    ),
    "an attribute of a function": _set_part("mark", 1),
    "another attribute of a function": _set_part("mark", 2),
    "a closure": lambda world: setattr(world.cell(), "cell_contents", 5),
    "a closure over a list": lambda world: setattr(world.cell(), "cell_contents", [5]),
    "an empty closure": lambda world: delattr(world.cell(), "cell_contents"),
    "another property": _set("property", property(_closed_over(4))),
    "another wrapped function": _wrap_another,
    "another class": lambda world: setattr(world.model, "__class__", world.base),
}

# The change that another one needs before it.
FOLLOWS_ON = {
    "a global back": "a global",
    "a list grows": "a global becomes a list",
    "a dict of a class": "a class attribute becomes a dict",
    "an attribute goes": "a new attribute",
    "a list of defaults grows": "a default that is a list",
    "a default of a keyword": "defaults of keywords",
    "another attribute of a function": "an attribute of a function",
}


@given(st.lists(st.sampled_from(sorted(CODE_CHANGES)), max_size=8))
def test_versions_are_those_of_code_that_is_read_anew(changes):
    world = CodeWorld()
    code, keys = UserCode(world.user), {}
    for change in ["nothing", *changes]:
        with contextlib.suppress(AttributeError, ValueError):  # some follow only on others
            CODE_CHANGES[change](world)
        for _ in range(2):
            version = code.version([world.model], [])
            anew = CodeRead((world.user,), [definition_of(world.model)], [])
            assert (version is not None) == anew.is_known
            if anew.is_known:
                assert keys.setdefault(version, anew.key()) == anew.key()


def test_code_is_read_once_while_nothing_changes():
    world = CodeWorld()
    code = UserCode(world.user)
    for _ in range(4):
        nnx.jit(lambda model: None)(world.model)  # the definition stays the same object
    before = code.version([world.model], [])
    for change in ("a global", "an attribute of a base", "a closure"):
        CODE_CHANGES[change](world)
        version, last = code.version([world.model], []), code._last
        assert version not in (before, None)
        assert code.version([world.model], []) == version and code._last is last
        before = version


@pytest.mark.parametrize("change", sorted(set(CODE_CHANGES) - {"nothing"}))
def test_each_change_of_code_is_noticed(change):
    world, code_change = CodeWorld(), CODE_CHANGES[change]
    if change in FOLLOWS_ON:
        CODE_CHANGES[FOLLOWS_ON[change]](world)
    code = UserCode(world.user)
    before = code.version([world.model], [])
    code_change(world)
    after = code.version([world.model], [])
    assert after is None or after != before


def test_the_same_code_has_the_same_version():
    one, other = CodeWorld(), CodeWorld()
    other.cls, other.model = one.cls, one.cls()
    code = UserCode(one.user)
    first = code.version([one.model], [])
    assert code.version([other.model], []) == first
    CODE_CHANGES["a global"](one)
    second = code.version([one.model], [])
    CODE_CHANGES["a global back"](one)
    assert code.version([one.model], []) == first != second
    code.forget()
    assert code.version([one.model], []) not in (first, second)


# ---- code that reads what may change unnoticed ---------------------------------------------------


@dataclasses.dataclass
class Settings:
    rate: float = 1.0


class Act:
    def __call__(self, x):
        return x * RATE


class Constants:
    rate = 1.0


class Now:
    def __get__(self, obj, cls=None):
        return RATE


def helped(x, rate=1.0):
    return x * rate


def unchanged():
    return GATE.deterministic


RATE = 1.0
SETTINGS, SPACE, TABLE = Settings(), types.SimpleNamespace(rate=1.0), {"rate": 1.0}
PAIR, ARRAY, MODULE = ({"rate": 1.0},), np.ones(1, np.float32), types.ModuleType("settings")
ORDERED = collections.OrderedDict(rate=1.0)
GATE = nnx.Dropout(0.5, deterministic=True)
MODULE.rate = 1.0

QUEUE, DRAW = collections.deque([1.0]), np.random.default_rng(0)
STATE = nnx.State({"rate": nnx.Param(jnp.ones(1))})
PARTIAL = functools.partial(lambda x, rate: x * rate, rate=1.0)


@jax.custom_vjp
def by_rule(x):
    return x


by_rule.defvjp(lambda x: (x, None), lambda _, g: (g * RATE,))


@functools.lru_cache
def cached():
    return {"rate": 1.0}


@functools.singledispatch
def by_type(x):
    return 0.0


@by_type.register
def _(x: int):
    return RATE


BODIES = {
    "a number": lambda self, x: x * RATE,
    "a dataclass": lambda self, x: x * SETTINGS.rate,
    "a namespace": lambda self, x: x * SPACE.rate,
    "a dict": lambda self, x: x * TABLE["rate"],
    "an ordered dict": lambda self, x: x * ORDERED["rate"],
    "a dict in a tuple": lambda self, x: x * PAIR[0]["rate"],
    "an array of NumPy": lambda self, x: x * ARRAY,
    "a class": lambda self, x: x * Constants.rate,
    "a module": lambda self, x: x * MODULE.rate,
    "a helper": lambda self, x: helped(x),
    "an object": lambda self, x: Act()(x),
    "a part of a method": functools.partialmethod(lambda self, k, x: x * k * RATE, 1.0),
    "a descriptor": lambda self, x: x * self.now,
    "a flag": lambda self, x: x if GATE.deterministic else x * 2,
    "a flag by a helper": lambda self, x: x if unchanged() else x * 2,
    "globals()": lambda self, x: x * globals()["RATE"],
    "a deque": lambda self, x: x * QUEUE[0],
    "random numbers": lambda self, x: x * (DRAW.normal() * 0 + RATE),
    "a state": lambda self, x: x * STATE["rate"][...],
    "a rule for derivatives": lambda self, x: jax.grad(lambda y: by_rule(y).sum())(x),
    "a cached function": lambda self, x: x * cached()["rate"],
    "a function for a type": lambda self, x: x * by_type(1),
    "a partial": lambda self, x: PARTIAL(x),
    "the environment": lambda self, x: x * float(__import__("os").environ.get("TESTED_RATE", 1)),
}


def change_everything(monkeypatch):
    for thing in (SETTINGS, SPACE, MODULE, Constants):
        monkeypatch.setattr(thing, "rate", 2.0)
    for table in (TABLE, ORDERED, PAIR[0]):
        monkeypatch.setitem(table, "rate", 2.0)
    monkeypatch.setattr(f"{__name__}.RATE", 2.0)
    monkeypatch.setattr(GATE, "deterministic", False)
    monkeypatch.setattr(helped, "__defaults__", (2.0,))
    monkeypatch.setenv("TESTED_RATE", "2")
    monkeypatch.setitem(PARTIAL.keywords, "rate", 2.0)
    monkeypatch.setitem(cached(), "rate", 2.0)
    QUEUE[0], STATE["rate"].value = 2.0, jnp.full(1, 2.0)
    ARRAY[:] = 2.0


@pytest.fixture
def changed(monkeypatch):
    yield lambda: change_everything(monkeypatch)
    ARRAY[:] = 1.0
    QUEUE[0], STATE["rate"].value = 1.0, jnp.ones(1)


def layer_with(body):
    def make(self, rngs):
        self.w = nnx.Param(jnp.ones(1))

    members = {"__module__": __name__, "__init__": make, "__call__": body}
    if body is BODIES["a descriptor"]:
        members["now"] = Now()
    return type("Layer", (nnx.Module,), members)


class Stepping(nnx.Module):
    """A cell that calls a layer."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, carry, x):
        return carry, self.layer(x)

    def initialize_carry(self, shape, rngs=None, carry_init=None):
        return jnp.zeros(1)

    @property
    def num_feature_axes(self):
        return 1


def stack_of(cls):
    return nnx.Stack(cls, 1, rngs=nnx.Rngs(0))


def rnn_of(cls):
    rnn = nnx.RNN(Stepping(cls(nnx.Rngs(0))))
    return lambda x: rnn(x[None])[0]


def scan_of(cls):
    layer, walk = cls(nnx.Rngs(0)), nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)
    return lambda x: walk(layer, x[None])[0]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("run", [stack_of, rnn_of, scan_of])
def test_what_the_code_reads_counts_as_it_is_now(run, body, changed):
    apply, x = run(layer_with(BODIES[body])), jnp.ones(1)
    assert [apply(x).item() for _ in range(3)] == [1, 1, 1]
    changed()
    assert [apply(x).item() for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("body", ["a number", "a helper", "a class", "a partial"])
def test_code_that_reads_what_cannot_change_is_known(body):
    code = UserCode(nnx.relu)
    assert code.version([layer_with(BODIES[body])(nnx.Rngs(0))], []) is not None


class Trainer:
    rate = 1.0

    def step(self, x):
        return x * self.rate


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: jax.Array

    def scaled(self):
        return self.x * RATE


def test_methods_partials_and_pytrees_count_as_they_are_now(changed, monkeypatch):
    trainer, x, table = Trainer(), jnp.ones(1), {"rate": 1.0}
    by_table = functools.partial(lambda x, table: x * table["rate"], table=table)
    over = functools.partial(nnx.scan, in_axes=0, out_axes=0)
    method, partial, batches = over(trainer.step), over(by_table), over(lambda b: b.scaled())

    def results():
        return [method(x).item(), partial(x).item(), batches(Batch(x)).item()]

    assert [results() for _ in range(3)] == [[1, 1, 1]] * 3
    trainer.rate, table["rate"] = 2.0, 2.0
    changed()
    assert [results() for _ in range(3)] == [[2, 2, 2]] * 3


def test_equal_functions_with_cells_of_their_own():
    def make():
        rate = 1.0

        def put(value):
            nonlocal rate
            rate = value

        return lambda x: x * rate, put

    (first, _), (second, put) = make(), make()
    models = [layer_with(lambda self, x: self.f(x))(nnx.Rngs(0)) for _ in range(2)]
    models[0].f, models[1].f = first, second
    walk, x = nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0), jnp.ones(1)
    assert [walk(model, x).item() for model in models * 3] == [1] * 6
    put(2.0)
    assert [walk(model, x).item() for model in models] == [1, 2]


def test_a_filter_among_the_axes_counts_as_it_is_now(changed):
    layer = layer_with(lambda self, x: x * self.w.sum())(nnx.Rngs(0))
    layer.w.value = jnp.ones(2)
    axes = nnx.StateAxes({lambda path, value: RATE == 2: 0, ...: None})
    walk, x = nnx.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0), jnp.ones(2)
    assert [walk(layer, x).tolist() for _ in range(3)] == [[2, 2]] * 3
    changed()
    assert walk(layer, x).tolist() == [1, 1]


def test_what_is_unknown_is_not_kept_alive():
    other = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    rnn = nnx.RNN(nnx.SimpleCell(2, 2, activation_fn=lambda x, other=other: x, rngs=nnx.Rngs(0)))
    rnn(jnp.ones((1, 1, 2)))
    gone = weakref.ref(other)
    del other, rnn
    gc.collect()
    assert gone() is None


def gated(z):
    return z * RATE


def test_functions_that_a_cell_holds_count_as_they_are_now(changed):
    box = [1.0]
    cells = [
        nnx.SimpleCell(2, 2, activation_fn=f, rngs=nnx.Rngs(0))
        for f in (gated, lambda z: z * box[0])
    ]
    rnns, x = list(map(nnx.RNN, cells)), jnp.ones((1, 1, 2))
    before = [[float(rnn(x).sum()) for _ in range(3)][-1] for rnn in rnns]
    changed()
    box[0] = 2.0
    assert [float(rnn(x).sum()) for rnn in rnns] == pytest.approx([2 * y for y in before])


def scaled_by_rate(f):
    @functools.wraps(f)
    def wrapper(self, x):
        return f(self, x) * RATE

    return wrapper


def test_a_decorator_counts_with_what_it_reads(changed):
    apply = stack_of(layer_with(scaled_by_rate(lambda self, x: x)))
    assert [apply(jnp.ones(1)).item() for _ in range(3)] == [1, 1, 1]
    changed()
    assert apply(jnp.ones(1)).item() == 2


def test_a_class_that_type_made_counts(monkeypatch):
    cls = layer_with(lambda self, x: x * self.rate)
    cls.rate = 1.0
    cls.__module__ = "abc"  # as ``type`` says where a metaclass calls it
    apply = stack_of(cls)
    assert [apply(jnp.ones(1)).item() for _ in range(3)] == [1, 1, 1]
    monkeypatch.setattr(cls, "rate", 2.0)
    assert apply(jnp.ones(1)).item() == 2


STEPS = 0


def test_code_that_writes_globals_runs_as_it_is(monkeypatch):
    def count(self, x):
        global STEPS  # noqa: PLW0603
        STEPS += 1
        return x * STEPS

    monkeypatch.setattr(f"{__name__}.STEPS", 0)
    layer = stack_of(layer_with(count))
    results = [layer(jnp.ones(1)).item() for _ in range(3)]
    assert results == sorted(set(results))


def test_layers_of_the_library_are_known():
    code = UserCode(nnx.relu)
    known = [
        nnx.RNN(nnx.LSTMCell(2, 3, rngs=nnx.Rngs(0))),
        nnx.SimpleCell(2, 3, activation_fn=nnx.relu, rngs=nnx.Rngs(0)),
        nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Dropout(0.5)),
        nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
        Stepping(nnx.Embed(3, 2, rngs=nnx.Rngs(0))),
    ]
    assert all(code.version([model], [1, "a", None, jnp.tanh]) is not None for model in known)


@nnx.dataclass
class Scaled(nnx.Module):
    layer: nnx.Linear
    rate: float = 2.0

    def __call__(self, x):
        return self.layer(x) * self.rate


def test_modules_that_are_dataclasses_are_known():
    model = Scaled(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert UserCode(nnx.relu).version([model], []) is not None
