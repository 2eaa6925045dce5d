"""Programs in which a cached call once gave wrong numbers, or could have: each must be right.

``same`` runs a function under ``nnx.jit`` and as it is, on two models built alike, with the same
changes between the calls. Every test of the first part runs with plans checked against a walk and
without. ``test_random_programs.py`` looks for what is missing here.
"""

import collections
import copy
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import TraceContextError
from tests.models import param
from tests.nnx.transforms.random_programs import checking_plans
from tests.nnx.transforms.random_worlds import (
    Node,
    Numbers,
    Wayward,
    Wilful,
    account,
    act,
    cell,
    helper,
    notebook,
    put_at_the_same_address,
)
from tests.nnx.transforms.stateful import Pair, Scale, counted
from tests.subprocesses import run_program


@pytest.fixture(params=[False, True], ids=["unchecked", "checked"])
def either_way(request):
    """Runs a test with plans checked against a walk, and without."""
    with checking_plans(request.param):
        yield


pytestmark = pytest.mark.usefixtures("either_way")


WARM = 3  # calls until everything is prepared


def run_both_ways(make, step, *changes, times=2):
    """Runs ``step`` on a model under ``nnx.jit`` and as it is; the models and results are equal.

    Args:
      make: builds the model, or a tuple of arguments.
      step: the function.
      *changes: called one after the other with the same arguments, between the calls.
      times: calls after each change; before the first change there are enough that the last ones
        find everything prepared.

    Returns:
      What ``step`` returned last before the first change, and after each.
    """
    jitted = nnx.jit(step)
    left, right = ([*made] if isinstance(made := make(), tuple) else [made] for _ in range(2))
    results = []
    for number, change in enumerate([lambda *_: None, *changes]):
        change(*left)
        change(*right)
        for _ in range(times if number else max(times, WARM)):
            got, want = jitted(*left), step(*right)
            found, wanted = (
                account({"result": result, "arguments": arguments})
                for result, arguments in ((got, left), (want, right))
            )
            assert found == wanted, f"after change {number}"
        results.append(want)
    return results


def node(**attributes):
    made = Node()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


# ---- 1. plain arrays ----------------------------------------------------------------------------

BELOW = {
    "a submodule": lambda inner: inner,
    "a list": lambda inner: [inner],
    "a dict": lambda inner: {"k": inner},
    "a tuple": lambda inner: (inner, 3),
    "an nnx.List": lambda inner: nnx.List([inner]),
    "an nnx.Dict": lambda inner: nnx.Dict(k=inner),
    "a submodule of a submodule": lambda inner: node(middle=inner, zone=jnp.zeros(2)),
}


def tables(x):
    """The object with a table, wherever it is."""
    while not hasattr(x, "table"):
        x = x.middle if isinstance(x, Node) else x["k" if isinstance(x, dict | nnx.Dict) else 0]
    return x


def with_table(below):
    """Arrays of both kinds, one of them in a block whose name comes before that of the others."""
    model = node(block=BELOW[below](node(table=jnp.ones(2), scale=param(2))), mask=jnp.zeros(2))
    model.offset, model.a = np.full(2, 5, np.float32), np.full(2, 7, np.float32)
    return model


@pytest.mark.parametrize("below", BELOW)
def test_plain_arrays_come_in_at_their_own_places(below):
    def read(m):
        return tables(m.block).table, m.mask, m.offset, m.a

    run_both_ways(lambda: with_table(below), read)


@pytest.mark.parametrize("below", BELOW)
def test_writes_of_plain_arrays_land_where_they_are_made(below):
    def step(m):
        tables(m.block).table = tables(m.block).table + 10
        m.offset = m.offset + 1
        return m.mask

    run_both_ways(lambda: with_table(below), step, times=3)


def test_plain_arrays_of_several_arguments_stay_apart():
    def make():
        return node(z=jnp.ones(2), a=node(y=jnp.zeros(2))), node(b=jnp.full(2, 3.0), a=jnp.ones(2))

    def step(one, other):
        other.b = other.b + one.z
        return one.a.y, other.a

    run_both_ways(make, step)


# ---- 2. tuples ----------------------------------------------------------------------------------


class Layers(NamedTuple):
    first: Any
    second: Any
    third: Any


TUPLES = {  # what is in it, and how it is made of that
    "a tuple": (lambda n: [Scale(n), Scale(n + 1), Scale(n)], tuple),
    "a named tuple": (lambda n: [Scale(n), Scale(n + 1), Scale(n)], Layers._make),
    "a module and a number": (lambda n: [Scale(2.0), n, 0], tuple),
    "a nested tuple": (lambda n: [(Scale(n), n, 1), 3, 0], tuple),
    "Variables": (lambda n: [param(n), param(n + 1), param(n)], tuple),
    "a list in a tuple": (lambda n: [[Scale(n)], n, 0], tuple),
    "arrays": (lambda n: [jnp.float32(n), jnp.float32(n + 1), 0], tuple),
}


def leaves_of(layers):
    """What is in a nest of lists and tuples."""
    if isinstance(layers, list | tuple):
        return [leaf for item in layers for leaf in leaves_of(item)]
    return [layers]


def numbers(layers):
    """The numbers in a nest of lists, tuples and layers."""
    return [
        leaf(1.0) if isinstance(leaf, Scale) else jnp.asarray(leaf, jnp.float32)
        for leaf in leaves_of(layers)
    ]


def replaced(holds, kind, n, kept):
    """A change that drops a tuple and makes another one, at the same address if that can be.

    What was in the tuple is kept alive, so that only the tuple itself tells them apart.
    """
    elements, make = TUPLES[kind]
    get, put = PLACES[holds]

    def change(model):
        inside = elements(n)
        kept.extend(leaves_of(get(model)))
        put_at_the_same_address(lambda: get(model), lambda x: put(model, x), lambda: make(inside))

    return change


PLACES = {
    "an attribute": (lambda m: m.layers, lambda m, x: setattr(m, "layers", x)),
    "an nnx.List": (lambda m: m.items[0], lambda m, x: m.items.__setitem__(0, x)),
    "an nnx.Dict": (lambda m: m.named["k"], lambda m, x: m.named.__setitem__("k", x)),
    "a list": (lambda m: m.plain[0], lambda m, x: m.plain.__setitem__(0, x)),
}


@pytest.mark.parametrize("holds", PLACES)
@pytest.mark.parametrize("kind", TUPLES)
def test_a_tuple_that_was_replaced_counts(kind, holds):
    def make():
        model = node(layers=None, items=nnx.List([None]), named=nnx.Dict(k=None))
        model.plain = [None, Scale(9.0)]
        replaced(holds, kind, 1, kept)(model)
        return model

    kept = []
    changes = [replaced(holds, kind, n, kept) for n in range(2, 5)]
    run_both_ways(make, lambda m: numbers(PLACES[holds][0](m)), *changes, times=1)


# ---- 3. hyperparameters -------------------------------------------------------------------------

RATES = {
    "an array": lambda h, n: h.__setitem__("learning_rate", jnp.float32(n)),
    "another Variable": lambda h, n: h.__setitem__("learning_rate", nnx.OptArray(jnp.float32(n))),
    "the value": lambda h, n: setattr(h["learning_rate"], "value", jnp.float32(n)),
}


def with_a_rate():
    model = node(w=param(1))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.125)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def descend(model, optimizer):
    optimizer.update(model, nnx.grad(lambda m: m.w * 2.0)(model))
    return model.w.value


@pytest.mark.parametrize("how", RATES)
def test_a_hyperparameter_that_was_replaced_counts(how):
    def change(n):
        return lambda model, optimizer: RATES[how](optimizer.opt_state.hyperparams, n)

    results = run_both_ways(with_a_rate, descend, change(0.5), change(0.25), times=1)
    assert np.allclose(results, [0.25, -0.75, -1.25])


REACH = {
    "by a shallow copy": lambda optimizer: copy.copy(optimizer).opt_state.hyperparams,
    "by iter_graph": lambda optimizer: next(
        x for path, x in nnx.iter_graph(optimizer) if path[-1:] == ("hyperparams",)
    ),
    "as a leaf of a tree": lambda optimizer: next(
        x
        for x in jax.tree.leaves(optimizer, is_leaf=lambda x: isinstance(x, dict))
        if isinstance(x, dict) and "learning_rate" in x
    ),
    "kept from before the first call": lambda optimizer: optimizer.kept,
}


@pytest.mark.parametrize("how", REACH)
def test_hyperparameters_count_however_they_are_reached(how):
    model = node(w=param(1))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.125)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kept = types.SimpleNamespace(kept=optimizer.opt_state.hyperparams)
    if how != "kept from before the first call":
        optimizer = nnx.clone(optimizer)
        kept = optimizer

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda m: m.w * 2.0)(model))

    for _ in range(3):
        step(model, optimizer)
    REACH[how](kept)["learning_rate"] = nnx.OptArray(jnp.float32(1.0))
    before = float(model.w.value)
    step(model, optimizer)
    assert float(model.w.value) == before - 2


REACHED = {
    "an attribute": lambda optimizer: optimizer.opt_state,
    "a copy that shares them": lambda optimizer: copy.copy(optimizer).opt_state,
    "its state for pickle": lambda optimizer: optimizer.__getstate__()[0]["opt_state"],
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("how", REACHED)
def test_hyperparameters_may_be_reached_in_any_way(how, early):
    model, optimizer = with_a_rate()
    reached = REACHED[how](optimizer) if early else None
    step = nnx.jit(descend)
    for _ in range(WARM):
        step(model, optimizer)
    hyperparams = (reached or REACHED[how](optimizer)).hyperparams
    for rate in (0.5, 0.25):
        hyperparams["learning_rate"] = nnx.OptArray(jnp.float32(rate))
        before = model.w.value
        step(model, optimizer)
        assert before - model.w.value == 2 * rate


@pytest.mark.parametrize("goes_to", ["an argument", "the output"])
def test_a_state_that_a_function_puts_elsewhere_counts(goes_to):
    model, optimizer = with_a_rate()
    step = nnx.jit(descend)
    for _ in range(WARM):
        step(model, optimizer)

    @nnx.jit
    def share(model, optimizer):
        if goes_to == "an argument":
            model.best = optimizer.opt_state
            return None
        return nnx.Dict(best=optimizer.opt_state)

    best = (share(model, optimizer) or model).best
    for _ in range(WARM):
        step(model, optimizer)
    best.hyperparams["learning_rate"] = nnx.OptArray(jnp.float32(0.5))
    before = model.w.value
    step(model, optimizer)
    assert before - model.w.value == 1


# ---- 4. streams that nobody used yet ------------------------------------------------------------


def draw(*rngs):
    return [jax.random.key_data(x()) for x in rngs]


def shared_rngs():
    rngs = nnx.Rngs(0)
    return rngs, rngs


def rngs_and_holder():
    rngs = nnx.Rngs(0)
    return rngs, node(rngs=rngs)


REACHED_TWICE = {
    "two arguments": (shared_rngs, draw),
    "argument and attribute": (rngs_and_holder, lambda rngs, m: draw(rngs, m.rngs)),
    "attribute and argument": (
        lambda: rngs_and_holder()[::-1],
        lambda m, rngs: draw(rngs, m.rngs),
    ),
    "two attributes": (
        lambda: (node(a=(rngs := nnx.Rngs(0)), b=node(rngs=rngs)),),
        lambda m: draw(m.a, m.b.rngs),
    ),
    "two models": (
        lambda: (node(rngs=(rngs := nnx.Rngs(0))), node(rngs=rngs)),
        lambda a, b: draw(a.rngs, b.rngs),
    ),
    "a list": (lambda: ([nnx.Rngs(0)] * 2,), lambda both: draw(*both)),
    "a stream of it": (
        lambda: ((rngs := nnx.Rngs(0)), node(stream=rngs.default)),
        lambda rngs, m: draw(rngs, m.stream),
    ),
}


@pytest.mark.parametrize("how", REACHED_TWICE)
def test_rngs_that_nobody_used_are_one_however_they_are_reached(how):
    make, step = REACHED_TWICE[how]
    run_both_ways(make, step)


@pytest.mark.parametrize("warm", [False, True])
def test_fresh_rngs_passed_twice_are_one(warm):
    step = nnx.jit(lambda model, a, b: (model.w.value, draw(a, b)))
    model = node(w=param(1))
    for seed in range(3):
        rngs, wanted = nnx.Rngs(seed), nnx.Rngs(seed)
        if warm:
            rngs(), wanted()
        got = step(model, rngs, rngs)[1]
        assert [x.tolist() for x in got] == [x.tolist() for x in draw(wanted, wanted)]
        assert rngs.default.count.value == wanted.default.count.value


# ---- 5. classes ---------------------------------------------------------------------------------


class Exact(nnx.Module):
    def __init__(self):
        self.w = param(2)
        self.inner = None

    def __call__(self):
        return self.w * 1


class Rounded(Exact):
    def __call__(self):
        return self.w * 100


def set_class(cls):
    return lambda m: setattr(m, "__class__", cls)


def set_inner_class(cls):
    return lambda m: setattr(m.inner, "__class__", cls)


def test_another_class_counts():
    def make():
        model = Exact()
        model.inner = Exact()
        return model

    changes = [set_class(Rounded), set_inner_class(Rounded), set_class(Exact)]
    results = run_both_ways(make, lambda m: m() + m.inner(), *changes, times=1)
    assert [float(x) for x in results] == [4, 202, 400, 202]


def test_a_class_that_is_set_inside_is_carried_out_or_refused():
    model = Exact()

    def step(m):
        m.__class__ = Rounded

    try:
        nnx.jit(step)(model)
    except Exception:
        assert type(model) is Exact
    else:
        assert type(model) is Rounded


def test_the_class_of_a_variable_that_is_set_inside_is_carried_out():
    def turn(m):
        m.w.__class__ = nnx.BatchStat if type(m.w) is nnx.Param else nnx.Param

    model = node(w=param(1))
    variable, step = model.w, nnx.jit(turn)
    for cls in (nnx.BatchStat, nnx.Param, nnx.BatchStat):
        step(model)
        assert type(variable) is cls and model.w is variable


# ---- 6. values that are pytrees -----------------------------------------------------------------


def cached():
    value = {"k": jnp.zeros(2), "deep": {"l": [jnp.ones(2), jnp.ones(3)]}}
    return node(cache=nnx.Cache(value), w=param(1))


ITEMS = {
    "value": lambda m: m.cache.value.__setitem__("k", m.cache.value["k"] + 1),
    "raw_value": lambda m: m.cache.raw_value.__setitem__("k", m.cache.raw_value["k"] + 1),
    "the Variable": lambda m: m.cache.__setitem__("k", m.cache["k"] + 1),
    "deep inside": lambda m: m.cache.value["deep"]["l"].__setitem__(0, m.w + jnp.full(2, 5.0)),
    "a new entry": lambda m: m.cache.value.__setitem__("new", jnp.ones(2)),
    "an entry less": lambda m: m.cache.value.pop("k", None),
    "a longer list": lambda m: m.cache.value["deep"]["l"].append(jnp.ones(1)),
    "an update": lambda m: m.cache.value.update(k=jnp.full(2, 7.0), more=jnp.ones(1)),
}
WITHIN = {
    "jit": lambda f: f,
    "remat": nnx.remat,
    "grad": lambda f: lambda m: nnx.grad(lambda m: (f(m), m.w * 2.0)[1])(m).w.value,
}


def keep(how, model):
    ITEMS[how](model)


@pytest.mark.parametrize(
    ("how", "within"),
    [*((how, "jit") for how in ITEMS), ("value", "remat"), ("value", "grad")],
)
def test_a_change_inside_a_value_is_kept(how, within):
    want, got = cached(), cached()
    jitted = nnx.jit(WITHIN[within](functools.partial(keep, how)))
    for _ in range(WARM + 1):
        ITEMS[how](want)
        jitted(got)
        assert account({"m": got}) == account({"m": want})


@pytest.mark.parametrize("how", ITEMS)
def test_a_change_inside_a_value_between_calls_counts(how):
    run_both_ways(
        cached, lambda m: jax.tree.map(lambda x: x + 1, m.cache.value), ITEMS[how], ITEMS[how]
    )


# ---- 7. functions that read globals -------------------------------------------------------------

HOLDS = {
    "the function": lambda f: f,
    "a tuple": lambda f: (f, 3),
    "a list": lambda f: [f],
    "a dict": lambda f: {"act": f},
    "a partial": functools.partial,
    "a closure": lambda f: lambda x: f(x) + 1,
}


def function_in(held):
    held = held.get("act") if isinstance(held, dict) else held
    return held[0] if isinstance(held, list | tuple) else held


def edited_helper(space):
    """Runs the helper's cell again after it was edited."""
    space["helper"] = types.FunctionType((lambda x: x - 100).__code__, space, "helper")


RUN_AGAIN = {
    "a number": lambda space: space.update(rate=50),
    "a helper": edited_helper,
    "what a helper reads": lambda space: space.update(shift=70),
    "all": lambda space: (space.update(rate=5, shift=7), cell(helper, space)),
}


@pytest.mark.parametrize(
    ("cells", "holds"),
    [
        *((cells, "the function") for cells in RUN_AGAIN),
        *(("a helper", how) for how in list(HOLDS)[1:]),
    ],
)
def test_cells_of_a_notebook_that_were_run_again_count(cells, holds):
    spaces: dict[int, Any] = {}

    def make():
        model, space = node(w=param(1)), notebook(2)
        spaces[id(model)] = space
        model.act = HOLDS[holds](space["act"])
        return model

    def change(model):
        space = spaces[id(model)]
        RUN_AGAIN[cells](space)
        model.act = HOLDS[holds](cell(act, space))

    def step(m):
        return function_in(m.act)(m.w.value)

    results = run_both_ways(make, step, change, times=1)
    assert results[0] != results[1]


def test_the_same_cells_run_again_do_not_trace_again():
    space, model = notebook(2), node(w=param(1))
    model.act = space["act"]
    step, traces = counted(lambda m: m.act(m.w.value))
    jitted = nnx.jit(step)
    jitted(model)
    for _ in range(3):
        cell(act, space)
        model.act = space["act"]
        jitted(model)
    assert len(traces) == 1


# ---- 8. writes that do not pass through __setattr__ ---------------------------------------------


AROUND = {  # not noticed, as docs/compiled.md says
    "vars": lambda m, value: vars(m).__setitem__("x", value),
    "object.__setattr__": lambda m, value: object.__setattr__(m, "x", value),
    "__dict__.update": lambda m, value: m.__dict__.update(x=value),
}
OWN_WAY = {
    "__setstate__": (Node, lambda m, value: m.__setstate__(node(x=value).__getstate__())),
    "by object": (Wayward, lambda m, value: setattr(m, "x", value)),
    "by __dict__": (Wilful, lambda m, value: setattr(m, "x", value)),
}
WRITTEN = {
    "Variables": param,
    "objects": Scale,
    "arrays": jnp.float32,
    "numbers": lambda n: n,
    "another kind": lambda n: param(n) if n % 2 else n,
}


def check_noticed(make, write, written):
    def change(n):
        def change(model):
            kept.append(model.x)  # so that nothing but the write itself tells
            write(model, WRITTEN[written](n))

        return change

    kept = []
    run_both_ways(make, lambda m: numbers(m.x), change(2), change(3), times=1)


@pytest.mark.parametrize("written", [name for name in WRITTEN if name != "arrays"])
@pytest.mark.parametrize("how", AROUND)
def test_a_write_around_setattr_is_found_by_the_check(how, written):
    model, run = node(x=WRITTEN[written](1)), nnx.jit(lambda m: numbers(m.x))
    with checking_plans(True):
        for _ in range(2):
            run(model)
        AROUND[how](model, WRITTEN[written](2))
        with pytest.raises(AssertionError, match="something changed unannounced"):
            run(model)


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("how", OWN_WAY)
def test_a_write_of_a_classs_own_counts(how, written):
    cls, write = OWN_WAY[how]

    def make():
        model = cls()
        model.x = WRITTEN[written](1)
        return model

    check_noticed(make, write, written)


# ---- 10. settings at construction ---------------------------------------------------------------


@pytest.mark.parametrize("first_use", ["eager", "argument", "attribute"])
def test_rngs_keep_the_implementation_they_were_made_under(first_use):
    with jax.default_prng_impl("rbg"):
        rngs, wanted = nnx.Rngs(0), nnx.RngStream(0, tag="default")
    use = {
        "eager": rngs,
        "argument": lambda: nnx.jit(lambda rngs: rngs())(rngs),
        "attribute": lambda: nnx.jit(lambda m: m.rngs())(node(rngs=rngs)),
    }
    got = use[first_use]()
    assert got.dtype == wanted.key.dtype
    assert Numbers(got) == Numbers(wanted())
    assert rngs.default.key.dtype == wanted.key.dtype


DEVICES = """
import jax
from linnet import nnx
from tests.nnx.transforms.random_worlds import Node

def holder(rngs):
    made = Node()
    made.rngs = rngs
    return made

second = jax.devices()[1]
draw = nnx.jit(lambda m: m.rngs())
for use in (lambda r: r(), nnx.jit(lambda r: r()), lambda r: draw(holder(r))):
    with jax.default_device(second):
        rngs = nnx.Rngs(0)
    use(rngs)
    print(rngs.default.key.value.devices() == {second})
"""


def test_rngs_keep_the_device_they_were_made_under():
    done = run_program(DEVICES, devices=2)
    assert done.stdout.split() == ["True"] * 3


# ---- arguments ----------------------------------------------------------------------------------


def test_the_same_model_twice_and_in_another_order():
    step = nnx.jit(lambda a, b: (a(1.0), b(1.0)))
    one, other = Scale(2.0), Scale(3.0)
    results = [[float(x) for x in step(*pair)] for pair in ((one, other), (other, one), (one, one))]
    assert results == [[2, 3], [3, 2], [2, 2]]
    assert [int(m.count.value) for m in (one, other)] == [4, 2]


def test_what_becomes_shared_between_arguments_counts():
    def share(one, other):
        other.b = one.b

    def unshare(one, other):
        other.b = Scale(7.0)

    def step(one, other):
        return one.b(1.0), other.b(1.0)

    make = lambda: (Pair(None, Scale(2.0)), Pair(None, Scale(3.0)))  # noqa: E731
    run_both_ways(make, step, share, unshare)


@pytest.mark.parametrize("turned", [False, True])
def test_an_object_beside_one_that_holds_it_is_the_same_as_inside(turned):
    inner, stranger = Scale(2.0), Scale(5.0)
    holder = Pair(inner, Scale(3.0))

    @nnx.jit
    def step(one, other):
        scale, pair = (other, one) if turned else (one, other)
        return scale(1.0), pair.a(1.0)

    for scale in (stranger, inner) * WARM + (stranger,) * WARM + (inner,) * WARM:
        before = int(scale.count.value), int(inner.count.value)
        step(*((holder, scale) if turned else (scale, holder)))
        drawn = 2 if scale is inner else 1
        assert scale.count.value == before[0] + drawn
        assert inner.count.value == before[1] + drawn


@pytest.mark.parametrize("metadata", [{}, {"unit": "steps"}], ids=["value", "metadata"])
def test_a_variable_that_is_initialised_again(metadata):
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(()))

    @nnx.jit
    def count(counter):
        counter.n[...] += 1
        return counter.n[...], counter.n.has_metadata("unit")

    counter = Counter()
    for _ in range(4):
        count(counter)
    for _ in range(2):
        counter.n.__init__(jnp.full((), 100.0), **metadata)
        assert count(counter) == (101.0, bool(metadata))
        assert counter.n[...] == 101.0


def test_a_captured_variable_is_not_initialised_again_in_a_trace():
    model = nnx.Dict(n=nnx.Variable(jnp.zeros(())))

    @nnx.jit
    def leak(x):
        model.n.__init__(x)

    with pytest.raises(TraceContextError, match=r"Cannot mutate Variable at model\.n from a diff"):
        leak(1.0)
    assert model.n[...] == 0.0


# ---- static values that change in place ---------------------------------------------------------


@dataclasses.dataclass
class Settings:
    """Compared by its fields, and without a hash."""

    shift: int = 0
    inner: list[int] = dataclasses.field(default_factory=list)


class Shifted(nnx.Module):
    def __init__(self, hold):
        self.settings, self.calls = hold(Settings()), 0

    def found(self):
        """The settings, in whatever they are held."""
        held = self.settings
        if isinstance(held, functools.partial):
            return held.args[0]
        if isinstance(held, dict):
            return held["settings"]
        return held if isinstance(held, Settings) else held[0]


HOLDERS = {
    "attribute": lambda settings: settings,
    "list": lambda settings: [settings],
    "tuple": lambda settings: (settings, 1),
    "dict": lambda settings: {"settings": settings},
    "partial": lambda settings: functools.partial(max, settings),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_compiled_function_keeps_static_values_as_they_were(hold):
    shift = nnx.jit(lambda model, x: x + model.found().shift)
    first, second = Shifted(hold), Shifted(hold)
    assert shift(first, jnp.zeros(2)).tolist() == [0, 0]
    first.found().shift = 5
    assert shift(first, jnp.zeros(2)).tolist() == [5, 5]
    # For the second model the first function is compiled again, for another shape.
    assert shift(second, jnp.zeros(3)).tolist() == [0, 0, 0]
    assert shift(second, jnp.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_two_models_do_not_come_to_share_a_static_value(hold):
    @nnx.jit
    def count(model):
        model.calls += 1

    first, second = Shifted(hold), Shifted(hold)
    held = [first.settings, second.settings]
    for _ in range(3):
        count(first), count(second)
    assert (first.calls, second.calls) == (3, 3)
    assert [first.settings is held[0], second.settings is held[1]] == [True, True]
    first.found().shift = 5
    assert second.found().shift == 0


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_write_into_a_static_value_reaches_its_own_model(hold):
    def write(model):
        model.found().shift = model.found().shift % 3 + 1
        model.found().inner.append(model.found().shift)
        return jnp.float32(model.found().shift)

    for step in (write, nnx.jit(write)):
        models = [Shifted(hold) for _ in range(3)]
        for calls in range(1, 5):
            for model in models:
                assert step(model) == (calls - 1) % 3 + 1
        for model in models:
            assert model.found() == Settings(1, [1, 2, 3, 1])
        models[0].found().shift = 2
        assert [step(model) for model in models] == [3, 2, 2]


def closing_over(settings):
    return lambda x: x + settings["shift"]


class Closing(nnx.Module):
    def __init__(self):
        self.shift = closing_over({"shift": 0})
        self.w = nnx.Param(jnp.ones(2))


def test_a_new_trace_calls_the_functions_of_its_own_model():
    shift = nnx.jit(lambda model, x: model.shift(x))
    first, second = Closing(), Closing()
    for _ in range(3):
        assert shift(first, jnp.zeros(2)).tolist() == [0, 0]
    first.shift.__closure__[0].cell_contents["shift"] = 5
    for size in (3, 3, 2, 4):
        assert shift(second, jnp.zeros(size)).tolist() == [0] * size


def test_what_was_traced_after_a_closure_changed_serves_no_other_model():
    """The function of the first model has the key from before its closure changed."""
    shift = nnx.jit(lambda model, x: model.shift(x))
    first = Closing()
    with checking_plans(False):  # the check raises for such a change
        for _ in range(3):
            shift(first, jnp.zeros(2))
        first.shift.__closure__[0].cell_contents["shift"] = 5
        for size in (3, 4):  # traced now, for a new shape
            assert shift(first, jnp.zeros(size)).tolist() == [5] * size
    for size in (3, 4, 2):
        assert shift(Closing(), jnp.zeros(size)).tolist() == [0] * size


@dataclasses.dataclass
class Choice:
    """Its own equality takes 1, True and 1.0 for the same."""

    value: Any = 1


@dataclasses.dataclass(frozen=True)
class FrozenChoice:
    value: Any = 1


class Choices(list):
    """A list of a class of its own."""


class Table(dict):
    """A dict of a class of its own."""


CHOICES = {
    "dataclass": Choice,
    "frozen dataclass": FrozenChoice,
    "namespace": lambda value: types.SimpleNamespace(value=value),
    "dict": lambda value: Table(value=value),
    "deque": lambda value: collections.deque([value]),
    "list": lambda value: Choices([value]),
    "mapping proxy": lambda value: types.MappingProxyType({"value": value}),
}


def chosen(choice):
    if isinstance(choice, collections.abc.Mapping):
        return choice["value"]
    return choice[0] if isinstance(choice, (list, collections.deque)) else choice.value


@pytest.mark.parametrize("make", CHOICES.values(), ids=CHOICES)
def test_static_values_that_python_calls_equal_are_told_apart(make):
    scale = nnx.jit(lambda model: jnp.asarray(chosen(model.choice)))
    for value in (1, True, 1.0, 0.0, -0.0, [1], [True]):
        found = scale(nnx.Dict(choice=nnx.static(make(value))))
        want = jnp.asarray(value)
        assert found.dtype == want.dtype
        assert jnp.signbit(found).tolist() == jnp.signbit(want).tolist()


@pytest.mark.parametrize("make", CHOICES.values(), ids=CHOICES)
def test_a_list_inside_a_static_value_is_of_its_own_model(make):
    @nnx.jit
    def grow(model):
        chosen(model.choice).append(len(chosen(model.choice)))
        return jnp.zeros(len(chosen(model.choice)))

    models = [nnx.Dict(choice=nnx.static(make([]))) for _ in range(2)]
    for size in range(1, 4):
        for model in models:
            assert grow(model).shape == (size,)
    chosen(models[0].choice).clear()
    assert [grow(model).shape for model in models] == [(1,), (4,)]


class Penalised(nnx.Module):
    """A layer that adds to a list which all layers of a model have."""

    def __init__(self, losses):
        self.w, self.losses = nnx.Param(jnp.ones(2)), losses

    def __call__(self, x):
        self.losses.append(jnp.sum(self.w[...] ** 2))
        return x * self.w


def penalised(depth=3):
    losses = []
    return nnx.Dict(losses=losses, layers=nnx.List([Penalised(losses) for _ in range(depth)]))


def losses_of(model, x):
    for layer in model.layers:
        x = layer(x)
    total = sum(model.losses)
    model.losses.clear()
    return total + 0 * x.sum()


@pytest.mark.parametrize(
    "way",
    [
        nnx.jit,
        lambda f: nnx.jit(nnx.remat(f)),
        lambda f: lambda *args: nnx.value_and_grad(f)(*args)[0],
        lambda f: lambda *args: nnx.cond(True, f, f, *args),
    ],
    ids=["jit", "remat", "value_and_grad", "cond"],
)
def test_an_empty_list_that_layers_share_is_one_inside(way):
    model, run = penalised(), way(losses_of)
    for _ in range(WARM + 1):
        assert float(run(model, jnp.ones(2))) == 6
        assert all(layer.losses is model.losses for layer in model.layers)
    assert model.losses == []


@pytest.mark.parametrize("copied", [nnx.clone, lambda x: nnx.merge(*nnx.split(x)), copy.deepcopy])
def test_a_copy_has_one_list_where_the_model_has_one(copied):
    found = copied(penalised())
    assert all(layer.losses is found.losses for layer in found.layers)


def test_a_shared_static_value_that_is_given_up_counts():
    model = penalised()
    run = nnx.jit(lambda model: (model.layers[0](jnp.ones(2)), len(model.losses))[1])
    run(model)
    assert [int(run(model)) for _ in range(WARM)] == [2, 3, 4]
    model.layers[0].losses = list(model.losses)
    assert [int(run(model)) for _ in range(WARM)] == [4, 4, 4]
    assert len(model.layers[0].losses) == 7
    model.layers[0].losses = model.losses
    assert [int(run(model)) for _ in range(WARM)] == [5, 6, 7]


def own_logs(model):
    for layer in model.layers:
        layer.losses = []


def copy_one(model):
    model.layers[0].losses = list(model.losses)


@pytest.mark.parametrize("give_up", [own_logs, copy_one])
@pytest.mark.parametrize("way", [nnx.jit, nnx.remat, lambda f: nnx.grad(lambda m: (f(m), 0.0)[1])])
def test_sharing_that_a_function_gives_up_for_an_equal_value_is_given_up(way, give_up):
    model, other = penalised(), penalised()
    way(give_up)(model)
    give_up(other)

    def grow(model):
        model.layers[0].losses.append(1)
        return [len(holder.losses) for holder in (model, *model.layers)]

    step = nnx.jit(grow)
    for _ in range(WARM):
        assert [int(x) for x in step(model)] == grow(other)
    for some in (model, other):
        assert [layer.losses is model.losses for layer in model.layers] == [
            layer.losses is other.losses for layer in other.layers
        ]
        assert some.layers[0].losses is not some.losses


@pytest.mark.parametrize("way", [nnx.jit, nnx.remat, nnx.grad])
def test_sharing_that_a_function_begins_is_with_the_value_outside(way):
    @dataclasses.dataclass
    class Settings:
        rate: float = 1.0

    settings = Settings()
    model = nnx.Dict(layer=nnx.Dict(settings=None), settings=settings, w=nnx.Param(jnp.ones(())))

    def share(model):
        model.layer.settings = model.settings
        return model.w * model.layer.settings.rate

    run = way(share)
    for _ in range(WARM + 1):
        run(model)
        assert model.settings is model.layer.settings is settings
        assert float(nnx.jit(share)(model)) == settings.rate
        settings.rate += 1


def test_a_value_that_a_function_returns_in_a_new_module_is_that_of_the_argument():
    model = penalised()
    run = nnx.jit(lambda model: nnx.Dict(first=model.losses, second=nnx.Dict(log=model.losses)))
    for _ in range(WARM):
        made = run(model)
        assert made.first is made.second.log is model.losses


def test_what_becomes_shared_is_named_as_the_cause_of_a_trace():
    model = nnx.Dict(first=[1], second=[1], w=nnx.Param(jnp.ones(2)))
    run = nnx.jit(lambda model: model.w * len(model.first))
    run(model)
    model.second = model.first
    run(model)
    assert "model.second: is now the value of an attribute before it" in nnx.explain_retrace(run)
    model.second = [1]
    run(model)
    assert run.traces.count == 2


def test_a_static_value_may_contain_itself():
    def make():
        ring = types.SimpleNamespace(turns=0)
        ring.next = ring
        return nnx.Dict(ring=nnx.static(ring))

    @nnx.jit
    def turn(model):
        model.ring.next.turns += 1
        return jnp.asarray(model.ring.next.next.turns)

    first, second = make(), make()
    assert [int(turn(first)) for _ in range(3)] == [1, 2, 3]
    assert turn(second) == 1
    assert first.ring.next is first.ring


class Uncopyable:
    """It has an equality, no hash, and cannot be copied; only its attributes tell a change."""

    def __init__(self):
        self.value = 1

    def __eq__(self, other):
        return isinstance(other, Uncopyable)

    __hash__ = None

    def __deepcopy__(self, memo):
        raise TypeError("it holds a file")


def test_a_change_of_a_static_value_that_cannot_be_copied_counts():
    model = nnx.Dict(choice=nnx.static(Uncopyable()))
    scale = nnx.jit(lambda model, x: model.choice.value * x)
    for value in (1, 1, 1, 2, 2, 3):
        model.choice.value = value
        assert scale(model, jnp.ones(())) == value


@pytest.mark.parametrize(
    "hold",
    [lambda x: [x, nnx.Param(jnp.ones(2))], lambda x: {"a": x, "b": nnx.Param(jnp.ones(2))}],
    ids=["list", "dict"],
)
def test_a_container_keeps_the_static_values_that_did_not_change(hold):
    class Holder(nnx.Module):
        def __init__(self):
            self.held, self.calls = hold(Settings()), 0

    @nnx.jit
    def count(model):
        model.calls += 1

    models = [Holder(), Holder()]
    found = [dict(enumerate(m.held)) if isinstance(m.held, list) else dict(m.held) for m in models]
    for _ in range(3):
        for model in models:
            count(model)
    for model, before in zip(models, found, strict=True):
        for key, value in before.items():
            assert model.held[key] is value


def test_metadata_that_a_function_sets_is_each_variables_own():
    @nnx.jit
    def tag(model):
        model.kernel.set_metadata(tags=["seen"])

    models = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2)]
    for model in models:
        tag(model)
    models[0].kernel.tags.append("first")
    assert models[1].kernel.tags == ["seen"]


def test_modules_that_a_function_returns_share_no_static_value():
    make = nnx.jit(lambda x: nnx.Dict(x=x, settings=nnx.static(Settings())))
    first, second = make(jnp.ones(())), make(jnp.ones(()))
    first.settings.shift = 3
    assert second.settings.shift == 0


READ, LEVELS, SPACE = {"rate": 1.0}, [1.0], types.SimpleNamespace(rate=1.0)


def levelled(x, level=1.0):
    return x * level


def readers():
    def reads_a_dict(x):
        return x * READ["rate"]

    def reads_a_list(x):
        return x * LEVELS[0]

    def reads_a_namespace(x):
        return x * SPACE.rate

    def calls_a_helper(x):
        return levelled(x)

    return reads_a_dict, reads_a_list, reads_a_namespace, calls_a_helper


@pytest.mark.parametrize("which", range(4))
def test_a_function_that_is_defined_again_counts_with_what_it_reads(which, monkeypatch):
    step = nnx.jit(lambda m, x: m.f(x))
    model = Node()
    model.f = readers()[which]
    assert [float(step(model, 1.0)) for _ in range(3)] == [1.0, 1.0, 1.0]
    monkeypatch.setitem(READ, "rate", 2.0)
    LEVELS[0] = 2.0
    monkeypatch.setattr(SPACE, "rate", 2.0)
    monkeypatch.setattr(levelled, "__defaults__", (2.0,))
    model.f = readers()[which]
    assert float(step(model, 1.0)) == 2.0
    fresh = Node()
    fresh.f = readers()[which]
    assert float(step(fresh, 1.0)) == 2.0
    LEVELS[0] = 1.0


def test_ranges_of_the_same_numbers_are_told_apart():
    step = nnx.jit(lambda m: m.steps.stop)
    one, other = Node(), Node()
    one.steps, other.steps = range(0, 3, 2), range(0, 4, 2)
    assert [int(step(one)), int(step(other))] == [3, 4]


def test_what_is_written_to_an_object_before_it_is_taken_out_reaches_it():
    def step(model):
        inner = model.inner
        inner.a, inner.n = inner.a + 1, 5
        inner.v[...] += 1
        inner.items.append(7)
        model.inner = None

    for run in (step, nnx.jit(step)):
        model, inner = Node(), Node()
        inner.a, inner.n, inner.v = jnp.array(0.0), 0, nnx.Variable(jnp.array(0.0))
        inner.items = nnx.static([1])
        model.inner = inner
        run(model)
        assert (float(inner.a), float(inner.v[...]), inner.n, inner.items) == (1, 1, 5, [1, 7])
        assert model.inner is None
