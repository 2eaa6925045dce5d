"""StateAxes and prefixes: which axis each array of the arguments gets."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import AxisError, FilterError, SharedReferenceError
from linnet.nnx.filterlib import PathIn
from tests.nnx.transforms.stateful import Count, Pair


def test_state_axes_is_a_mapping_from_filters():
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    assert axes.filters == (nnx.Param, ...)
    assert axes.axes == (0, None)
    assert list(axes.items()) == [(nnx.Param, 0), (..., None)]
    assert axes[nnx.Param] == 0
    assert list(axes) == [nnx.Param, ...]
    assert len(axes) == 2
    assert (
        repr(axes)
        == "StateAxes({<class 'linnet.nnx.variablelib.variable.Param'>: 0, Ellipsis: None})"
    )


def test_state_axes_are_equal_by_filters_and_axes_in_order():
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    assert axes == nnx.StateAxes([(nnx.Param, 0), (..., None)])
    assert hash(axes) == hash(nnx.StateAxes([(nnx.Param, 0), (..., None)]))
    assert axes != nnx.StateAxes({nnx.Param: 1, ...: None})
    assert axes != nnx.StateSharding({nnx.Param: 0, ...: None})


def test_the_first_filter_that_selects_decides():
    axes = nnx.StateAxes({nnx.PathContains("b"): 2, nnx.Param: 1, ...: 0})
    assert axes.map_prefix(("a",), nnx.Param(1.0)) == 1
    assert axes.map_prefix(("b",), nnx.Param(1.0)) == 2
    assert axes.map_prefix(("c",), Count(1.0)) == 0
    with pytest.raises(
        ValueError, match=r"has no filter for \.a\.w \(Param\)\.\nFix: add `...: va"
    ):
        nnx.StateAxes({Count: 0}).map_prefix(("a", "w"), nnx.Param(1.0))


def test_something_that_is_no_filter():
    with pytest.raises(FilterError, match=r"Not a filter: 3\.5 \(float\)"):
        nnx.StateAxes({3.5: 0})


class Mixed(nnx.Module):
    """Two kinds of Variables and an array, each with the axis of size 3 elsewhere."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(6.0).reshape(2, 3))
        self.n = Count(jnp.arange(3.0))
        self.x = jnp.arange(3.0) * 10


def total(m):
    return m.w.sum() + m.n + m.x


WANT = [3.0 + 0.0, 5.0 + 11.0, 7.0 + 22.0]


PREFIXES = {
    "state axes": lambda m: nnx.StateAxes({nnx.Param: 1, ...: 0}),
    "by path": lambda m: nnx.StateAxes({nnx.PathContains("w"): -1, ...: 0}),
    "prefix": lambda m: nnx.prefix(m, {nnx.Param: 1, ...: 0}),
}


@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.parametrize("updates", [True, False])
def test_axes_of_an_object(name, updates):
    m = Mixed()
    mapped = nnx.vmap(total, in_axes=(PREFIXES[name](m),), graph_updates=updates)
    assert mapped(m).tolist() == WANT


def test_axes_by_path_inside_containers_and_states():
    axes = nnx.StateAxes({nnx.PathContains("w"): 1, ...: 0})
    mapped = nnx.vmap(lambda pair: total(pair["m"][0]), in_axes=({"m": axes},))
    assert mapped({"m": [Mixed()]}).tolist() == WANT
    state = nnx.state(Mixed(), nnx.Variable)
    mapped = nnx.vmap(lambda s: s.w.sum() + s.n, in_axes=(axes,))
    assert mapped(state).tolist() == [3.0, 6.0, 9.0]


def test_axes_by_path_of_a_state_that_is_returned():
    axes = nnx.StateAxes({nnx.PathContains("a"): 1, ...: 0})
    values = {"a": jnp.zeros((2,)), "b": jnp.zeros((2,))}

    def make(x):
        return {"first": nnx.State({n: nnx.Param(v + x) for n, v in values.items()}), "a": x}

    named = {nnx.PARTITION_NAME: "layers"}
    for transform in (
        nnx.vmap(make, out_axes={"first": axes, "a": 0}, transform_metadata=named),
        nnx.scan(make, in_axes=0, out_axes={"first": axes, "a": 0}),
    ):
        out = transform(jnp.arange(3.0))["first"]
        assert (out["a"].shape, out["b"].shape) == ((2, 3), (3, 2))
        assert out["a"][0].tolist() == out["b"][:, 0].tolist() == [0.0, 1.0, 2.0]
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    specs = nnx.StateSharding({nnx.PathContains("a"): place, ...: None})
    out = nnx.jit(make, out_shardings={"first": specs, "a": None})(0.0)["first"]
    assert out["a"].value.sharding == place and out["b"].value.sharding != place


@pytest.mark.parametrize(
    ("in_axes", "second"),
    [
        (0, jnp.ones((3, 2))),
        ((0, 0), jnp.ones((3, 2))),
        ([0, 0], jnp.ones((3, 2))),
        ((0, 0), {"y": jnp.ones(3)}),
        ((0, {"y": 1, "z": None}), {"y": jnp.ones((2, 3)), "z": 5.0}),
    ],
    ids=str,
)
def test_one_entry_for_all_arguments_or_a_prefix_of_each(in_axes, second):
    assert nnx.vmap(lambda a, b: a, in_axes=in_axes)(jnp.arange(3.0), second).tolist() == [0, 1, 2]


BAD = {
    "too few": ((0,), r"in_axes has 1 entries for 2 positional arguments: \(0,\)\.\nFix: give one"),
    "too many": ((0, 0, 0), "in_axes has 3 entries for 2 positional arguments"),
    "other structure": ((0, {"c": 0}), "does not fit the structure of what it is for"),
    "out of range": ((0, 2), r"axis 2 is out of range for b\.y: float32\[3,2\]\.\nFix: choose"),
    "negative": ((0, -3), r"axis -3 is out of range for b\.y"),
    "no axis": ((0, "x"), r"'x' is not an axis for b\.y\.\nFix: give an integer, or None"),
    "carry": ((0, nnx.Carry), r"Carry'> is not an axis for b\.y"),
    "state axes": ((0, nnx.StateAxes({...: 0})), r"StateAxes\({Ellipsis: 0}\) is not an axis for"),
    "unequal": ((0, 1), r"different sizes:\n  - a: 3\n  - b\.y: 2\nFix: make them equal"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_axes(name):
    in_axes, message = BAD[name]
    with pytest.raises(AxisError, match=message):
        nnx.vmap(lambda a, b: a, in_axes=in_axes)(jnp.arange(3.0), {"y": jnp.ones((3, 2))})


def test_unequal_sizes_inside_objects_are_listed_with_paths_and_sizes():
    pair = Pair(nnx.Param({"u": jnp.ones(3), "v": jnp.ones(4)}), [Count(jnp.ones(5))])
    message = r"sizes:\n  - model\.a\.v: 4\n  - model\.b\[0\]: 5\n  - model\.a\.u: 3\n  - x: 3\n"
    with pytest.raises(AxisError, match=message):
        nnx.vmap(lambda model, x: x)(pair, jnp.ones(3))


def test_a_prefix_object_that_lacks_something():
    m = Mixed()
    prefix = nnx.prefix(Pair(m.w, None), {...: 0})
    message = r"The axes given as Pair have nothing at \.n\.\nFix: make them with nnx\.prefix from "
    with pytest.raises(AxisError, match=message):
        nnx.vmap(total, in_axes=(prefix,))(m)


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan])
def test_one_variable_treated_in_two_ways(transform, updates):
    w = nnx.Param(jnp.arange(3.0))
    axes = (nnx.StateAxes({...: 0}), nnx.StateAxes({...: None}))
    message = (
        r"Param at b\.a was already seen at a\.a, and .* to treat it in two ways: 0 and None"
        r"\.\nFix: give both places the same axis, or pass a copy \(nnx\.clone\)"
    )
    f = transform(lambda a, b: a.a * 1, in_axes=axes, out_axes=0, graph_updates=updates)
    with pytest.raises(SharedReferenceError, match=message):
        f(Pair(w, None), Pair(w, None))


def test_one_variable_treated_alike_in_two_arguments():
    w = nnx.Param(jnp.arange(3.0))

    def f(a, b):
        a.a[...] += 1
        return b.b * 1

    axes = (0, nnx.StateAxes({nnx.Param: 0, ...: None}))
    assert nnx.vmap(f, in_axes=axes)(Pair(w, None), Pair(None, w)).tolist() == [1, 2, 3]
    assert w.value.tolist() == [1, 2, 3]


def test_axes_and_shardings_from_a_state():
    axes = nnx.StateAxes(nnx.State({"a": {"w": 0, "b": None}, "c": 0}))
    assert axes.axes == (None, 0)
    assert axes.filters == (PathIn(("a", "b")), PathIn(("a", "w"), ("c",)))
    assert axes.map_prefix(("a", "w"), nnx.Param(0)) == 0
    assert axes.map_prefix(("a", "b"), nnx.Param(0)) is None
    with pytest.raises(ValueError, match=r"has no filter for \.other \(Param\)\.\nFix: add"):
        axes.map_prefix(("other",), nnx.Param(0))
    assert nnx.StateSharding(nnx.State({"c": nnx.Param("x")})).shardings == ("x",)


@pytest.mark.parametrize("graph", [True, False])
def test_axes_from_a_state_or_prefix_beside_the_model(graph):
    model = Pair(nnx.Param(jnp.arange(3.0)), nnx.Param(jnp.array(2.0)))
    run = lambda in_axes: nnx.vmap(  # noqa: E731
        lambda m: m.a * m.b, in_axes=(in_axes,), graph=graph
    )(model).tolist()
    assert run(nnx.StateAxes(nnx.State({"a": 0, "b": None}))) == [0, 2, 4]
    assert run(nnx.prefix(model, {nnx.PathContains("a"): 0, ...: None}, graph=graph)) == [0, 2, 4]


@pytest.mark.parametrize("graph", [True, False])
def test_a_prefix_says_where_a_new_model_goes(graph):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    make = lambda n=1.0: Pair(nnx.Param(jnp.full(2, n)), nnx.Param(jnp.full(2, n)))  # noqa: E731
    shardings = nnx.prefix(make(), {...: here}, graph=graph)
    made = nnx.jit(make, out_shardings=shardings, graph=graph)()
    assert made.a[...].sharding == here
    axes = nnx.prefix(make(), {nnx.PathContains("a"): 1, ...: 0}, graph=graph)
    stack = nnx.vmap(make, out_axes=axes, graph=graph)(jnp.arange(3.0))
    assert stack.a[...].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert stack.b[...].tolist() == [[0, 0], [1, 1], [2, 2]]
