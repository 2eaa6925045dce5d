"""What a Variable carries beside its value: entries, hooks, and what initializers add."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.nnx.variablelib.metadata import Metadata

KEY = jax.random.key(0)


# ---- entries -----------------------------------------------------------------------------------


def test_metadata_by_keyword():
    v = nnx.Param(jnp.ones(2), unit="m", rngs=7, dtype="mine")
    assert (v.unit, v.rngs, v.dtype) == ("m", 7, "mine")
    assert v.get_metadata("unit") == "m"
    assert v.get_metadata("nothing", 3) == 3
    assert v.has_metadata("unit")
    assert not v.has_metadata("nothing")
    assert v.get_metadata(exclude_required=True) == {"unit": "m", "rngs": 7, "dtype": "mine"}
    storage = {"hijax": False, "ref": False, "eager_sharding": True}
    assert v.get_metadata() == {"unit": "m", "rngs": 7, "dtype": "mine"} | storage
    with pytest.raises(KeyError, match="nothing"):
        v.get_metadata("nothing")


def test_the_dict_of_metadata_is_a_copy():
    v = nnx.Param(1, unit="m")
    v.get_metadata()["unit"] = "s"
    assert v.unit == "m"


def test_setting_and_deleting():
    v = nnx.Param(1, unit="m")
    v.set_metadata(unit="s", note=1)
    v.set_metadata("note", 2)
    v.unit = "h"
    assert v.get_metadata(exclude_required=True) == {"unit": "h", "note": 2}
    v.del_metadata("note")
    assert not v.has_metadata("note")
    v.set_metadata({"other": 3})
    assert v.get_metadata(exclude_required=True) == {"other": 3}
    with pytest.raises(KeyError, match="note"):
        v.del_metadata("note")


@pytest.mark.parametrize(("args", "kwargs"), [(("a", 1), {"b": 2}), (("a", 1, 2), {})])
def test_set_metadata_refuses_a_mixture(args, kwargs):
    v = nnx.Param(1)
    with pytest.raises(TypeError) as error:
        v.set_metadata(*args, **kwargs)
    assert str(error.value) == (
        "set_metadata takes one mapping, a name and a value, or keywords; "
        f"got {len(args)} positional and {len(kwargs)} keyword arguments."
    )


def test_copies_do_not_share_later_changes():
    v = nnx.Param(1, unit="m")
    other = v.copy()
    other.set_metadata(unit="s")
    assert (v.unit, other.unit) == ("m", "s")


@pytest.mark.parametrize("name", ["out_sharding", "sharding", "sharding_names"])
def test_axis_names_under_each_of_their_names(name):
    def entry(v):
        return v.get_metadata(exclude_required=True)

    v = nnx.Param(jnp.ones((2, 3)), eager_sharding=False, **{name: ("a", "b")})
    assert v.sharding_names == v.out_sharding == v.get_metadata(name) == ("a", "b")
    assert v.has_metadata(name)
    assert entry(v) == {"out_sharding": ("a", "b")}
    v.set_metadata(**{name: ("x", None)})
    assert entry(v) == {"out_sharding": ("x", None)}
    assert entry(v.copy(**{name: None})) == {"out_sharding": None}
    v.del_metadata(name)
    assert (v.sharding_names, entry(v)) == (None, {})


# ---- hooks -------------------------------------------------------------------------------------


def add_one(variable, value):
    return value + 1


def times_ten(variable, value):
    return value * 10


class Hooked(nnx.Variable):
    def on_get_value(self, value):
        return value + 1

    def on_set_value(self, value):
        return value * 10

    def on_create_value(self, value):
        return value - 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nnx.Variable(
            x,
            on_get_value=add_one,
            on_set_value=times_ten,
            on_create_value=lambda variable, value: value - 1,
        ),
        Hooked,
    ],
    ids=["keyword", "class"],
)
def test_hooks_run_on_every_way_in_and_out(make):
    v = make(jnp.array(5.0))
    assert float(v.raw_value) == 4.0
    assert [float(v.value), float(v[...]), float(v.get_value()), float(v + 0)] == [5.0] * 4
    for write in (
        lambda x: setattr(v, "value", x),
        lambda x: v.__setitem__(..., x),
        v.set_value,
    ):
        write(jnp.array(2.0))
        assert (float(v.raw_value), float(v.value)) == (20.0, 21.0)
        v.set_raw_value(jnp.array(0.0))
        assert float(v.value) == 1.0


def test_augmented_assignment_runs_both_hooks():
    v = Hooked(jnp.array(3.0))
    v[...] += 1
    assert float(v.raw_value) == 40.0
    v += 1
    assert float(v.raw_value) == 420.0


@pytest.mark.parametrize(
    ("value", "index"),
    [(jnp.arange(3.0), 0), (np.arange(3.0), 0), ({0: 0.0, 1: 1.0}, 0), ([0.0, 1.0], 0)],
    ids=["array", "numpy", "dict", "list"],
)
def test_hooks_see_the_part_that_is_read_or_written(value, index):
    v = nnx.Variable(value, on_get_value=add_one, on_set_value=times_ten)
    assert v[1] == 2.0
    v[index] = 3.0
    assert (v.raw_value[index], v.raw_value[1]) == (30.0, 1.0)


def test_hooks_in_sequence_each_take_the_result_of_the_one_before():
    v = nnx.Variable(
        jnp.array(1.0),
        on_get_value=(add_one, times_ten),
        on_set_value=[times_ten, add_one],
        on_create_value=[add_one, add_one],
    )
    assert (float(v.raw_value), float(v.value)) == (3.0, 40.0)
    v.value = jnp.array(1.0)
    assert float(v.raw_value) == 11.0


def test_a_keyword_wins_over_the_class():
    v = Hooked(jnp.array(5.0), on_get_value=times_ten)
    assert (float(v.raw_value), float(v.value)) == (4.0, 40.0)


def test_hooks_get_the_variable():
    v = nnx.Variable(2.0, scale=3.0, on_get_value=lambda variable, value: value * variable.scale)
    assert v.value == 6.0
    v.scale = 4.0
    assert v.value == 8.0


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        nnx.clone,
        lambda v: pickle.loads(pickle.dumps(v)),
        lambda v: jax.tree.map(lambda x: x, v),
        lambda v: nnx.merge(*nnx.split(v), copy=True),
    ],
)
def test_copying_runs_no_hook(duplicate):
    v = Hooked(jnp.array(5.0))
    assert float(duplicate(v).raw_value) == float(v.raw_value) == 4.0


def test_hooks_run_while_tracing():
    @jax.jit
    def f(v):
        v[...] = v * 2
        return v.value, v

    read, v = f(Hooked(jnp.array(5.0)))
    assert (float(read), float(v.raw_value)) == (101.0, 100.0)


@pytest.mark.parametrize("change", ["add_axis", "remove_axis"])
def test_axis_hooks(change):
    calls = []

    class Named(nnx.Variable):
        def on_add_axis(self, index, name):
            calls.append(("class", index, name))

        on_remove_axis = on_add_axis

    def hook(variable, index, name):
        calls.append((type(variable).__name__, index, name))

    getattr(nnx.Param(1.0), change)(0, "x")
    getattr(Named(1.0), change)(1, "y")
    getattr(nnx.Param(1.0, **{f"on_{change}": hook}), change)(2, "z")
    getattr(nnx.Param(1.0, **{f"on_{change}": [hook, hook]}), change)(3, None)
    assert calls == [("class", 1, "y"), ("Param", 2, "z"), ("Param", 3, None), ("Param", 3, None)]


# ---- initializers ------------------------------------------------------------------------------


def test_with_metadata_adds_entries_and_hooks():
    init = nnx.with_metadata(
        jax.nn.initializers.ones, on_get_value=add_one, on_create_value=times_ten, role="gate"
    )
    boxed = init(KEY, (2,))
    assert isinstance(boxed, nnx.VariableMetadata)
    v = nnx.Param(boxed, unit="m")
    assert (v.role, v.unit) == ("gate", "m")
    np.testing.assert_array_equal(v.raw_value, [10.0, 10.0])
    np.testing.assert_array_equal(v.value, [11.0, 11.0])
    assert init.__name__ == jax.nn.initializers.ones.__name__


def test_what_wins_between_initializer_and_variable():
    init = nnx.with_metadata(jax.nn.initializers.ones, on_get_value=add_one, role="gate")
    v = nnx.Param(init(KEY, (1,)), on_get_value=times_ten, role="up")
    assert (v.role, float(v[0])) == ("gate", 10.0)


def test_an_initializer_chooses_the_storage():
    init = nnx.with_metadata(jax.nn.initializers.ones, hijax=True, eager_sharding=False)
    v = nnx.Param(init(KEY, (1,)))
    assert (v.hijax, v.eager_sharding) == (True, False)
    assert isinstance(v.raw_value, jax.Ref)
    assert nnx.Param(init(KEY, (1,)), hijax=False).hijax is False


def test_with_metadata_nests():
    inner = nnx.with_metadata(
        jax.nn.initializers.ones, on_get_value=add_one, on_create_value=add_one, a=1, b=1
    )
    v = nnx.Param(nnx.with_metadata(inner, on_get_value=times_ten, b=2)(KEY, (1,)))
    assert (v.a, v.b) == (1, 2)
    assert (float(v.raw_value[0]), float(v[0])) == (2.0, 20.0)


# ---- the mapping itself ------------------------------------------------------------------------


def test_metadata_compares_and_hashes_by_content():
    a, b = Metadata({"x": 1, "y": [2]}), Metadata({"y": [2], "x": 1})
    assert a == b
    assert hash(a) == hash(b)
    assert a != Metadata({"x": True, "y": [2]})
    assert a != Metadata({"x": 1})
    assert a != {"x": 1, "y": [2]}
    assert a.replaced({}) is a
    assert a.replaced({"x": 5}) == Metadata({"x": 5, "y": [2]})
    assert pickle.loads(pickle.dumps(a)) == a
    assert copy.deepcopy(a) == a.snapshot() == a
    assert a.snapshot()["y"] is not a["y"]
    plain = Metadata({"x": 1, "y": (2,)})
    assert copy.deepcopy(plain) is plain.snapshot() is plain


def test_equal_hooks_made_twice_do_not_retrace():
    traces = []

    def make():
        return nnx.Variable(jnp.zeros(2), on_get_value=lambda variable, value: value + 1)

    @jax.jit
    def f(v):
        traces.append(1)
        return v.value

    f(make())
    np.testing.assert_array_equal(f(make()), [1.0, 1.0])
    assert len(traces) == 1


def test_a_list_that_grows_later_is_noticed():
    v = nnx.Variable(jnp.ones(2), axes=[0])
    count_axes = jax.jit(lambda v: v * len(v.axes))
    graphdef = nnx.graphdef(v)
    assert count_axes(v).tolist() == [1.0, 1.0]
    v.axes.append(1)
    assert count_axes(v).tolist() == [2.0, 2.0]
    assert nnx.graphdef(v) != graphdef


@pytest.mark.parametrize(
    "duplicate",
    [
        nnx.clone,
        copy.deepcopy,
        lambda v: v.copy(),
        jax.jit(lambda v: v),
        lambda v: jax.tree.map(lambda x: x, v),
        lambda v: nnx.merge(*nnx.split(v), copy=True),
    ],
)
def test_copies_do_not_meet_in_a_list(duplicate):
    v = nnx.Variable(jnp.ones(2), axes=[0], table={"a": [1]})
    other = duplicate(v)
    other.axes.append(1)
    other.table["a"].append(2)
    assert (v.axes, v.table) == ([0], {"a": [1]})
    assert (duplicate(v).axes, duplicate(v).table) == ([0], {"a": [1]})


@pytest.mark.parametrize("storage", [{}, {"ref": True}])
def test_a_hook_that_creates_may_read_and_write_the_value(storage):
    seen = []

    def doubled(variable, value):
        seen.append(np.asarray(variable.value))
        variable.value = value * 3
        seen.append(np.asarray(variable.value))
        return value * 2

    variable = nnx.Param(jnp.ones(2), on_create_value=doubled, **storage)
    np.testing.assert_array_equal(seen, [[1, 1], [3, 3]])
    np.testing.assert_array_equal(variable.value, [2, 2])
