"""The name of a mapped axis in the sharding metadata of Variables."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from linnet import nnx
from linnet.errors import AxisError
from tests.nnx.transforms.stateful import Count, Pair

LAYERS = {nnx.PARTITION_NAME: "layers"}


def named(shape, *names, kind=nnx.Param, key="out_sharding"):
    return kind(jnp.zeros(shape), eager_sharding=False, **{key: names})


def names_of(variable):
    return variable.get_metadata()["out_sharding"]


def test_the_key_is_what_programs_spell_out():
    assert nnx.PARTITION_NAME == "partition_name"


@pytest.mark.parametrize(
    ("out_axes", "want"),
    [
        (0, ("layers", "a", "b")),
        (1, ("a", "layers", "b")),
        (2, ("a", "b", "layers")),
        (-1, ("a", "b", "layers")),
        (-2, ("a", "layers", "b")),
        (None, ("a", "b")),
    ],
)
@pytest.mark.parametrize("key", ["out_sharding", "sharding", "sharding_names"])
@pytest.mark.parametrize("updates", [True, False])
def test_new_variables_get_the_name_where_they_are_stacked(out_axes, want, key, updates):
    make = nnx.vmap(
        lambda x: (x, Pair(named((2, 4), "a", "b", key=key), None)),
        out_axes=(0, out_axes),
        transform_metadata=LAYERS,
        graph_updates=updates,
    )
    _, pair = make(jnp.arange(3.0))
    assert names_of(pair.a) == want
    assert len(want) == pair.a.ndim


def test_names_may_leave_out_the_last_axes():
    make = nnx.vmap(
        lambda x: named((2, 4, 5), "a"), out_axes=-1, transform_metadata=LAYERS, axis_size=3
    )
    assert names_of(make(jnp.arange(3.0))) == ("a", None, None, "layers")


def test_partition_specs_and_lists_stay_what_they_are():
    spec = PartitionSpec("a")
    make = lambda x: nnx.Param(jnp.zeros(2), out_sharding=spec, eager_sharding=False)  # noqa: E731
    mapped = nnx.vmap(make, transform_metadata=LAYERS)
    assert names_of(mapped(jnp.arange(3.0))) == PartitionSpec("layers", "a")


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        (None, ("a",)),
        ({"other": 1}, ("a",)),
        ({nnx.PARTITION_NAME: None}, (None, "a")),
    ],
)
def test_no_name_and_none_for_a_name(metadata, want):
    mapped = nnx.vmap(lambda x: named((2,), "a"), transform_metadata=metadata)
    assert names_of(mapped(jnp.arange(3.0))) == want


def test_variables_without_names_are_left_alone():
    mapped = nnx.vmap(nnx.Param, transform_metadata=LAYERS)
    assert "out_sharding" not in mapped(jnp.arange(3.0)).get_metadata()


def seen_inside(transform, axes, pair):
    """The names inside a mapped function that also writes, and returns one of its arguments."""
    seen = []

    def f(pair):
        seen.append((names_of(pair.a), names_of(pair.b)))
        pair.a[...] += 1
        return pair

    out = transform(f, in_axes=(axes,), out_axes=axes, transform_metadata=LAYERS)(pair)
    assert out is pair
    return seen[-1]


@pytest.mark.parametrize(
    ("axis", "names"), [(0, ("layers", "x")), (1, ("x", "layers")), (-1, ("x", "layers"))]
)
@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan])
def test_inside_the_axis_and_its_name_are_gone(transform, axis, names):
    pair = Pair(named((3, 3), *names), named((3, 3), "q", "r", kind=Count))
    axes = nnx.StateAxes({nnx.Param: axis, ...: nnx.Carry if transform is nnx.scan else None})
    assert seen_inside(transform, axes, pair) == (("x",), ("q", "r"))
    assert (names_of(pair.a), names_of(pair.b)) == (names, ("q", "r"))
    assert pair.a.value.tolist() == [[1.0] * 3] * 3


@pytest.mark.parametrize("out_axes", [0, 1, -1])
def test_scan_names_what_it_stacks(out_axes):
    scanned = nnx.scan(
        lambda c, x: (c, named((2,), "b")),
        out_axes=(nnx.Carry, out_axes),
        transform_metadata=LAYERS,
    )
    _, made = scanned(0.0, jnp.arange(3.0))
    assert names_of(made) == (("b", "layers") if out_axes else ("layers", "b"))


@pytest.mark.parametrize(("axis", "want"), [(0, ("layers", "z")), (1, ("z", "layers"))])
def test_new_attributes_are_named_too(axis, want):
    def f(pair):
        pair.b = named((2,), "z")

    pair = Pair(named((3, 3), *(("layers", "x") if axis == 0 else ("x", "layers"))), None)
    nnx.vmap(f, in_axes=axis, transform_metadata=LAYERS)(pair)
    assert names_of(pair.b) == want


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize(
    ("axes", "names", "want"),
    [
        (0, ("layers", "x"), ("layers", "q")),
        (nnx.StateAxes({nnx.Param: 1, ...: None}), ("x", "layers"), ("q", "layers")),
    ],
    ids=["axis", "state axes"],
)
def test_the_decorator_under_a_transform(axes, names, want, updates):
    seen = []

    @nnx.vmap(in_axes=(axes, None), out_axes=axes, graph_updates=updates)
    @nnx.transform_metadata(in_axes=(axes, None), out_axes=axes, partition="layers")
    def f(pair, x):
        seen.append(names_of(pair.a))
        return Pair(named((2,), "q"), None)

    pair = Pair(named((3, 3), *names), None)
    made = f(pair, 1.0)
    assert (seen, names_of(pair.a), names_of(made.a)) == ([("x",)], names, want)
    assert made.a.ndim == 2


def test_the_decorator_under_scan_and_as_a_function():
    f = nnx.transform_metadata(
        lambda c, pair: (c, Pair(named((2,), "q"), None)),
        in_axes=(nnx.Carry, 0),
        out_axes=(nnx.Carry, 0),
        partition="layers",
    )
    _, made = nnx.scan(f, in_axes=(nnx.Carry, 0))(0.0, Pair(named((3, 3), "layers", "x"), None))
    assert names_of(made.a) == ("layers", "q")


def test_hooks_are_told():
    log = []
    hooks = {
        "on_add_axis": lambda v, axis, name: log.append(("add", axis, name)),
        "on_remove_axis": lambda v, axis, name: log.append(("remove", axis, name)),
    }
    nnx.vmap(lambda v: v * 1, in_axes=1, transform_metadata=LAYERS)(
        nnx.Param(jnp.zeros((2, 3)), **hooks)
    )
    assert log == [("remove", 1, "layers"), ("add", 1, "layers")]
    log.clear()
    nnx.vmap(lambda x: nnx.Param(x, **hooks), transform_metadata=LAYERS)(jnp.arange(3.0))
    assert log == [("add", 0, "layers")]


MISNAMED = (
    r"transform_metadata: axis 1 of pair\.b should be named 'layers', but "
    r"out_sharding=\('x', 'other'\) has 'other' there\.\nFix: put 'layers'"
)


@pytest.mark.parametrize("way", ["argument", "decorator", "alone"])
def test_another_name_stands_there(way):
    pair = Pair(named((3, 3), "x", "layers"), named((3, 3), "x", "other"))
    f = lambda pair: None  # noqa: E731
    if way == "argument":
        f = nnx.vmap(f, in_axes=1, transform_metadata=LAYERS)
    else:
        f = nnx.transform_metadata(f, in_axes=1, partition="layers")
        f = nnx.vmap(f, in_axes=1) if way == "decorator" else f
    with pytest.raises(AxisError, match=MISNAMED):
        f(pair)
    assert (names_of(pair.a), names_of(pair.b)) == (("x", "layers"), ("x", "other"))


def test_too_few_names():
    with pytest.raises(AxisError, match=r"out_sharding=\('x',\) has None there"):
        nnx.vmap(lambda v: None, in_axes=1, transform_metadata=LAYERS)(named((3, 3), "x"))


def test_after_an_error_the_names_are_back():
    @nnx.transform_metadata(in_axes=0, partition="layers")
    def fails(pair):
        raise RuntimeError("stop")

    pair = Pair(named((3, 3), "layers", "x"), None)
    for f in (fails, nnx.vmap(fails)):
        with pytest.raises(RuntimeError, match="stop"):
            f(pair)
        assert names_of(pair.a) == ("layers", "x")


def test_shared_references_are_allowed_unless_refused():
    shared = named((3, 3), "layers", "x")
    seen = []
    f = lambda pair: seen.append(names_of(pair.a))  # noqa: E731
    nnx.transform_metadata(f, in_axes=0, partition="layers")(Pair(shared, shared))
    assert seen == [("x",)]
    with pytest.raises(ValueError, match="was already seen at"):
        nnx.transform_metadata(f, in_axes=0, partition="layers", graph=False)(Pair(shared, shared))


def test_under_jit_and_eval_shape():
    make = nnx.vmap(lambda x: named((2,), "a"), transform_metadata=LAYERS)
    assert names_of(nnx.jit(make)(jnp.arange(3.0))) == ("layers", "a")
    made = nnx.eval_shape(make, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert names_of(made) == ("layers", "a")
