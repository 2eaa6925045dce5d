"""GraphDef: equal and hashed by structure, printed, passed around, applied."""

import copy
import functools
import pickle
import typing
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import StateMismatchError
from tests.models import Bag, Config, param
from tests.nnx.object_graphs import adder, half


class Other(Bag):
    pass


class Counter(nnx.Module):
    def __init__(self, step=1):
        self.step = step
        self.count = nnx.Variable(jnp.array(0))
        self.parts = [Bag(w=nnx.Param(jnp.array(2.0)))]

    def __call__(self, x):
        self.count[...] += self.step
        return x * self.parts[0].w

    def add(self, n, *, times=1):
        self.count[...] += n * times
        return self.count[...]


def graphdef(**attributes):
    return nnx.graphdef(Bag(**attributes))


# ---- equality -----------------------------------------------------------------------------------

SAME = {
    "values": lambda i: {"w": param(float(i), i + 1)},
    "arrays and numpy arrays": lambda i: {"w": jnp.ones(2) if i else np.zeros(3)},
    "closures": lambda i: {"f": adder(1)},
    "partials": lambda i: {"f": functools.partial(half, x=[1])},
    "lambdas with defaults": lambda i: {"f": lambda x, n=2: x},
    "lists": lambda i: {"dims": [1, [2, {"a": (3,)}]]},
    "sets": lambda i: {"s": {1, 2, 3} if i else {3, 2, 1}},
    "configs": lambda i: {"c": Config(1, ["a"])},
    "nan": lambda i: {"x": float("nan"), "xs": [float("nan")], "n": np.float32("nan")},
    "metadata": lambda i: {"w": param(role=[1], hook=adder(2))},
    "order of attributes": lambda i: {"a": 1, "b": 2} if i else {"b": 2, "a": 1},
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_graphdefs_of_equal_structures_are_equal(make):
    first, second = graphdef(**make(0)), graphdef(**make(1))
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second}) == 1


SHARED = param()
DIFFERENT = {
    "int and bool": ({"x": 1}, {"x": True}),
    "int and float": ({"x": 1}, {"x": 1.0}),
    "int and bool, nested": ({"x": [(1,)]}, {"x": [(True,)]}),
    "signs of zero": ({"x": 0.0}, {"x": -0.0}),
    "signs of zero, nested": ({"x": (0.0,)}, {"x": (-0.0,)}),
    "signs of zero, complex": ({"x": 0j}, {"x": -0j}),
    "signs of zero, numpy": ({"x": np.float32(0.0)}, {"x": np.float32(-0.0)}),
    "numpy scalars": ({"x": np.int32(1)}, {"x": np.int64(1)}),
    "list and tuple": ({"x": [1]}, {"x": (1,)}),
    "text and bytes": ({"x": "a"}, {"x": b"a"}),
    "closures": ({"f": adder(1)}, {"f": adder(2)}),
    "closures of 1 and True": ({"f": adder(1)}, {"f": adder(True)}),
    "partials": ({"f": functools.partial(half, 1)}, {"f": functools.partial(half, 2)}),
    "configs": ({"c": Config(1, [])}, {"c": Config(1, ["a"])}),
    "order in a dict": ({"d": {"a": 1, "b": 2}}, {"d": {"b": 2, "a": 1}}),
    "an attribute more": ({"x": 1}, {"x": 1, "y": None}),
    "names": ({"x": 1}, {"y": 1}),
    "kinds of Variables": ({"w": param()}, {"w": nnx.BatchStat(1.0)}),
    "Variable and array": ({"w": param()}, {"w": jnp.ones(())}),
    "metadata": ({"w": param(role=1)}, {"w": param(role=True)}),
    "classes": ({"m": Bag()}, {"m": Other()}),
    "length": ({"xs": [param()]}, {"xs": [param(), param()]}),
    "static and data": ({"x": 1}, {"x": nnx.data(1)}),
    "sharing": ({"a": SHARED, "b": SHARED}, {"a": param(), "b": param()}),
    "which is shared": (
        {"a": SHARED, "b": SHARED, "c": param()},
        {"a": SHARED, "b": param(), "c": SHARED},
    ),
    "bound methods": ({"f": Counter().add}, {"f": Counter().__call__}),
}


@pytest.mark.parametrize(("first", "second"), DIFFERENT.values(), ids=DIFFERENT)
def test_graphdefs_tell_structures_apart(first, second):
    assert graphdef(**first) != graphdef(**second)
    assert graphdef(**first) == graphdef(**first)
    assert graphdef(**first) != "graphdef"


@pytest.mark.parametrize(
    "grow",
    [
        lambda bag: bag.dims.append(2),
        lambda bag: bag.table["deep"].add(3),
        lambda bag: bag.config.names.append("b"),
        lambda bag: bag.layers[1].append("x"),
    ],
)
def test_a_static_container_that_grew_changes_the_graphdef_but_not_the_one_taken_before(grow):
    bag = Bag(
        dims=[1], table={"deep": {1}}, config=Config(1, ["a"]), layers=[param(), ["y"], Bag()]
    )
    twin = copy.deepcopy(bag)
    before, state = nnx.split(bag)
    grow(bag)
    assert nnx.graphdef(bag) != before
    assert before == nnx.graphdef(twin)
    merged = nnx.merge(before, state)
    assert (merged.dims, merged.table, merged.layers[1]) == ([1], {"deep": {1}}, ["y"])


@pytest.mark.parametrize("dump", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_graphdefs_can_be_pickled_and_merged_elsewhere(dump):
    bag = Bag(w=param(3.0), dims=[1], f=half, inner=nnx.List([param(), "x"]), a=nnx.static(1))
    bag.me, bag.own = bag, bag.set_attributes
    before, state = nnx.split(bag)
    after = dump.loads(dump.dumps(before))
    merged = nnx.merge(after, state)
    assert (merged.me is merged, merged.own.__self__ is merged) == (True, True)
    assert (merged.dims, merged.f(4)) == ([1], 2)
    assert after == before
    assert hash(after) == hash(before)


def test_deepcopies_of_graphdefs_are_equal():
    before = graphdef(w=param(), f=half)
    assert copy.deepcopy(before) == before


# ---- use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [True, False], ids=["static argument", "ordinary argument"])
def test_graphdefs_go_through_jit_either_way(static):
    traces = []

    def f(graphdef, state):
        traces.append(1)
        model = nnx.merge(graphdef, state)
        model.count[...] += 1
        return nnx.split(model)

    jitted = jax.jit(f, static_argnums=0) if static else jax.jit(f)
    graphdef, state = jitted(*nnx.split(Counter()))
    assert nnx.merge(graphdef, state).count[...] == 1
    jitted(*nnx.split(Counter()))
    assert len(traces) == 1
    jitted(*nnx.split(Counter(step=2)))
    assert len(traces) == 2


def test_a_graphdef_has_no_leaves():
    assert jax.tree.leaves(nnx.graphdef(Counter())) == []


def test_a_graphdef_is_an_ordinary_static_attribute():
    inner = nnx.graphdef(Counter())
    bag = nnx.clone(Bag(inner=inner))
    assert bag.inner == inner
    assert graphdef(inner=inner) != graphdef(inner=nnx.graphdef(Counter(2)))


def test_a_graphdef_prints_classes_static_values_kinds_and_sharing():
    shared = nnx.Param(1.0, role="gate")
    bag = Bag(inner=Other(n=2), w=shared, again=[shared, "x"], size=3)
    assert repr(nnx.graphdef(bag)) == (
        "GraphDef(\n"
        "  Bag( # number 0\n"
        "    again=list( # number 1\n"
        "      0=Param( # number 2\n"
        "        role='gate'\n"
        "      ),\n"
        "      1='x'\n"
        "    ),\n"
        "    inner=Other( # number 3\n"
        "      n=2\n"
        "    ),\n"
        "    w=<the same as number 2>,\n"
        "    size=3\n"
        "  )\n"
        ")"
    )


def test_nodes_attributes_and_leaves_are_listed():
    p = param()
    graphdef = nnx.graphdef(Bag(a=p, b=Other(x=p, raw=jnp.ones(1)), n=1))
    assert [(node.type, node.index) for node in graphdef.nodes] == [
        ("Bag", 0),
        ("Param", 1),
        ("Other", 2),
        ("NodeRef", 1),
    ]
    assert graphdef.attributes == [
        ("a", "node"),
        ("b", "node"),
        ("raw", "leaf"),
        ("x", "node"),
        ("n", "static"),
    ]
    assert graphdef.num_leaves == 2


def test_the_constructor_takes_the_arguments_of_flax():
    graphdef = nnx.graphdef(Bag(a=param(), n=1))
    nodes = graphdef.definition
    assert nnx.GraphDef(nodes, graphdef.attributes, graphdef.num_leaves) == graphdef
    assert nnx.GraphDef(nodes=nodes, attributes=[], num_leaves=9).num_leaves == 1


# ---- apply and call -----------------------------------------------------------------------------


@pytest.fixture(params=["apply", "call"])
def proxy(request):
    return lambda graphdef, state: (
        graphdef.apply(state) if request.param == "apply" else nnx.call((graphdef, state))
    )


def test_calling_returns_the_output_and_the_object_taken_apart_again(proxy):
    graphdef, state = nnx.split(Counter())
    out, (graphdef, state) = proxy(graphdef, state)(3.0)
    assert out == 6
    out, (graphdef, state) = proxy(graphdef, state).add(5, times=2)
    assert out == 11
    assert nnx.merge(graphdef, state).count[...] == 11


def test_parts_are_reached_by_attribute_and_position(proxy):
    class Outer(nnx.Module):
        def __init__(self):
            self.counters = [Counter(), Counter()]
            self.table = nnx.Dict(a=Counter())

    pair = nnx.split(Outer())
    out, pair = proxy(*pair).counters[1].add(3)
    assert out == 3
    out, pair = proxy(*pair).table["a"].add(4)
    assert out == 4
    merged = nnx.merge(*pair)
    assert [int(c.count[...]) for c in (*merged.counters, merged.table.a)] == [0, 3, 4]


def test_apply_is_pure_under_jit():
    graphdef, state = nnx.split(Counter())
    out, new = jax.jit(lambda state: graphdef.apply(state).add(2))(state)
    assert (out, nnx.merge(*new).count[...], state.count[...]) == (2, 2, 0)


def test_apply_takes_several_states_and_a_change_of_structure():
    class Growing(nnx.Module):
        def __init__(self):
            self.w, self.mean = param(), nnx.BatchStat(jnp.zeros(()))

        def grow(self) -> Any:
            self.extra = param(7.0)

    graphdef, params, rest = nnx.split(Growing(), nnx.Param, ...)
    _, (grown, state) = graphdef.apply(params, rest).grow()
    assert grown != graphdef
    assert nnx.merge(grown, state).extra.value == 7


def test_apply_refuses_a_state_that_does_not_fit():
    graphdef, state = nnx.split(Counter())
    del state["count"]
    with pytest.raises(StateMismatchError, match=r"Missing:\n  - \.count\n"):
        graphdef.apply(state)(1.0)


def test_parameters_for_annotations():
    graphdef, state = nnx.split(nnx.List[nnx.Param]([nnx.Param(1)]))
    assert typing.get_args(nnx.GraphDef[nnx.Linear]) == (nnx.Linear,)
    assert nnx.PureState[nnx.Linear] == tuple[nnx.GraphDef[nnx.Linear], nnx.State]
    assert graphdef == nnx.graphdef(nnx.List([nnx.Param(1)]))
    assert type(nnx.merge(graphdef, state)) is nnx.List
