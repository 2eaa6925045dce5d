"""Variables: kinds, values, attributes, copies and printing."""

import copy
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from tests.models import Bag, Count

# ---- kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (nnx.Param, nnx.Variable),
        (nnx.BatchStat, nnx.Variable),
        (nnx.Cache, nnx.Variable),
        (nnx.Intermediate, nnx.Variable),
        (nnx.Perturbation, nnx.Intermediate),
        (nnx.OptState, nnx.Variable),
        (nnx.OptArray, nnx.OptState),
        (nnx.OptVariable, nnx.OptState),
        (Count, nnx.Variable),
    ],
)
def test_kinds(kind, base):
    v = kind(1.0)
    assert issubclass(kind, base)
    assert v.type is v.var_type is type(v) is kind


def test_slips_of_the_pen_resolve():
    assert nnx.BatchStats is nnx.BatchStat
    assert nnx.Intermediates is nnx.Intermediate
    assert nnx.VariableState is nnx.Variable


def test_kinds_with_a_constructor_and_methods_of_their_own():
    built = []

    class Scaled(nnx.Param):
        unit = "m"

        def __init__(self, value, factor):
            built.append(factor)
            super().__init__(jnp.asarray(value), factor=factor)

        @property
        def scaled(self):
            return self.value * self.factor

        @scaled.setter
        def scaled(self, new):
            self.value = new / self.factor

    v = Scaled([1.0, 2.0], 10.0)
    v.scaled = jnp.array([30.0, 40.0])
    for other in (v, v.copy(), jax.tree.map(lambda x: x, v), jax.jit(lambda v: v)(v)):
        assert type(other) is Scaled
        assert other.unit == "m"
        assert other.scaled.tolist() == [30.0, 40.0]
    assert built == [10.0]


def test_kinds_take_a_type_argument():
    v = nnx.Param[jax.Array](jnp.ones(2))
    assert type(v) is nnx.Param


# ---- the value -------------------------------------------------------------------------------


def by_value(v, x):
    v.value = x


def by_ellipsis(v, x):
    v[...] = x


def by_set_value(v, x):
    v.set_value(x)


def by_raw_value(v, x):
    v.set_raw_value(x)


def by_raw_attribute(v, x):
    v.raw_value = x


WRITES = [by_value, by_ellipsis, by_set_value, by_raw_value, by_raw_attribute]


@pytest.mark.parametrize("write", WRITES)
def test_every_way_to_write_and_read(write):
    v, new = nnx.Variable(jnp.zeros(2)), jnp.array([1.0, 2.0])
    write(v, new)
    assert v.value is v[...] is v.get_value() is v.raw_value is v.get_raw_value() is new


def test_reading_and_writing_a_part():
    v = nnx.Variable(jnp.arange(4.0))
    v[1] = 9.0
    v[2:] += 10.0
    v.set_value(-1.0, index=0)
    np.testing.assert_array_equal(v.value, [-1.0, 9.0, 12.0, 13.0])
    assert float(v.get_value(index=3)) == 13.0
    v[:] = 0.0
    np.testing.assert_array_equal(v.value, np.zeros(4))


def test_augmented_assignment_of_the_value():
    v = nnx.Variable(jnp.array(1))
    v.value += 1
    v[...] += 1
    v[...] *= 2
    assert int(v.value) == 6


def test_writing_a_variable_writes_its_value():
    v, other = nnx.Param(jnp.zeros(2)), nnx.Cache(jnp.ones(2))
    for write in (by_value, by_ellipsis, by_set_value):
        write(v, other)
        assert v.value is other.value


def test_assigning_value_takes_any_shape_and_dtype():
    v = nnx.Variable(jnp.zeros(2))
    v.value = jnp.array([[1]])
    assert (v.shape, v.dtype) == ((1, 1), jnp.int32)
    assert v.value.tolist() == [[1]]


@pytest.mark.parametrize(
    "new", [2, 2.0, np.float32(2), np.full(3, 2.0), jnp.array(2), np.full(3, 2), True]
)
def test_ellipsis_keeps_shape_and_dtype(new):
    v = nnx.Variable(jnp.zeros(3, jnp.bfloat16))
    v[...] = new
    assert isinstance(v.value, jax.Array)
    assert (v.shape, v.dtype) == ((3,), jnp.bfloat16)
    np.testing.assert_array_equal(v.value, jnp.full(3, int(np.ravel(new)[0]), jnp.bfloat16))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ellipsis_with_keys_and_lists(wrap):
    def fill(v, new):
        v[...] = new
        return v

    keys = wrap(fill)(nnx.Variable(jax.random.split(jax.random.key(0), 3)), jax.random.key(1))
    assert jax.random.key_data(keys.value).tolist() == [[0, 1]] * 3
    assert fill(nnx.Variable(jnp.zeros(3)), [1, 2, 3]).value.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("index", [..., slice(2)], ids=["all", "part"])
def test_another_shape_is_refused_with_the_name(index):
    model = Bag(block=Bag(w=nnx.Param(jnp.array([2.0, 3.0]))))
    with pytest.raises(ValueError, match="broadcast") as error:
        model.block.w[index] = jnp.ones((2, 2))
    assert error.value.__notes__ == [
        "This was a write to Param at model.block.w, which holds float32[2]."
    ]
    np.testing.assert_array_equal(model.block.w.value, [2.0, 3.0])


def test_ellipsis_warns_where_numbers_are_cut_off():
    v = nnx.Variable(jnp.array([1, 2]))
    with pytest.warns(FutureWarning, match="cannot safely cast value from dtype=float32"):
        v[...] = jnp.array([2.5, 3.5])
    assert v.dtype == jnp.int32


def test_a_numpy_buffer_is_not_shared():
    buffer = np.ones(512, np.float32)
    v = nnx.Variable(jnp.zeros(512))
    v[...] = buffer
    buffer[:] = 7.0
    assert float(v.value.sum()) == 512.0


def test_writing_a_part_of_a_numpy_value_leaves_the_old_array():
    old = np.zeros(2)
    v = nnx.Variable(old)
    v[0] = 1.0
    assert (old.tolist(), v.value.tolist()) == ([0.0, 0.0], [1.0, 0.0])
    v[1] = jnp.array(3.0)
    assert v.value.tolist() == [1.0, 3.0]

    @jax.jit
    def traced(x):
        inner = nnx.Variable(np.zeros(2))
        inner[1] = x
        return inner.value

    assert traced(4.0).tolist() == [0.0, 4.0]


WEAK, STRONG = jnp.array(1.0), jnp.array(1.0, jnp.float32)


@pytest.mark.parametrize(
    ("old", "new", "weak"),
    [
        (WEAK, 2.0, True),
        (WEAK, 2, True),
        (WEAK, np.float32(2), True),
        (WEAK, jnp.array(1), True),
        (WEAK, STRONG, False),
        (STRONG, WEAK, True),
        (STRONG, 2.0, False),
        (STRONG, np.float32(2), False),
    ],
)
def test_weak_type_is_kept_where_jax_keeps_it(old, new, weak):
    v = nnx.Variable(old)
    v[...] = new
    assert (v.dtype, v.weak_type) == (jnp.float32, weak)
    v[...] += 1
    assert v.weak_type == weak


def test_pytree_values():
    v = nnx.Variable({"a": jnp.array(1.0), "b": [jnp.zeros(2), 3]})
    before = v.value
    v["a"] += 1
    assert (float(v["a"]), float(before["a"])) == (2.0, 1.0)
    assert v["b"] is before["b"]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(v)] == [
        ".value['a']",
        ".value['b'][0]",
        ".value['b'][1]",
    ]
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(v)
    assert (float(doubled["a"]), int(doubled["b"][1])) == (4.0, 6)


def test_list_values_and_values_without_parts():
    items = nnx.Variable([1, 2])
    items[0] += 10
    assert items.value == [11, 2]
    number = nnx.Variable(1)
    number[...] += 1
    number.value += 1
    assert number.value == 3
    with pytest.raises(TypeError, match="does not support item assignment"):
        nnx.Variable((1, 2))[0] = 5


def test_a_variable_of_a_function_is_called():
    assert nnx.Variable(lambda x, *, y: x + y)(1, y=2) == 3


# ---- attributes --------------------------------------------------------------------------------


def test_unknown_attributes_speak_of_the_variable():
    class Net(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((2, 3)), role="gate")

    net = Net()
    with pytest.raises(AttributeError) as error:
        _ = net.kernel.rol
    assert str(error.value) == (
        "Param at net.kernel has no attribute or metadata 'rol', and its value (float32[2,3]) has "
        "none of that name. Did you mean 'role'?"
    )
    assert not hasattr(net.kernel, "nothing_like_it")
    with pytest.raises(AttributeError, match=r"its value \(dict\) has none of that name\.$"):
        _ = nnx.Variable({}).nothing_like_it


def test_unknown_attributes_cannot_be_set():
    v = nnx.Param(1.0)
    with pytest.raises(AttributeError) as error:
        v.role = "gate"
    assert str(error.value) == (
        "Cannot set attribute 'role' of Param at v: a Variable has a value and metadata.\n"
        "Fix: variable.set_metadata(role=value), or variable.value = value."
    )
    with pytest.raises(AttributeError, match="no setter"):
        v.shape = (1,)


# ---- copies ------------------------------------------------------------------------------------


def make():
    return Count(jnp.array([1.0, 2.0]), unit="steps")


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda v: v.copy(),
        lambda v: v.replace(),
        lambda v: v.to_state(),
        copy.copy,
        copy.deepcopy,
        lambda v: pickle.loads(pickle.dumps(v)),
        lambda v: cloudpickle.loads(cloudpickle.dumps(v)),
        lambda v: jax.tree.map(lambda x: x, v),
        nnx.clone,
    ],
)
@pytest.mark.parametrize("storage", [{}, {"ref": True}, {"hijax": True}], ids=str)
def test_copies_are_equal_and_independent(duplicate, storage):
    v = Count(jnp.array([1.0, 2.0]), unit="steps", **storage)
    other = duplicate(v)
    assert type(other) is Count
    assert other is not v
    assert other.get_metadata() == v.get_metadata()
    np.testing.assert_array_equal(other.value, [1.0, 2.0])
    if storage and other.raw_value is v.raw_value:
        return  # a pytree's leaves are the refs themselves
    other[...] += 1.0
    np.testing.assert_array_equal(v.value, [1.0, 2.0])


def test_shallow_copies_share_arrays_and_deep_ones_do_not():
    v = make()
    assert v.copy().value is v.value
    deep = copy.deepcopy(v)
    assert deep.value.unsafe_buffer_pointer() != v.value.unsafe_buffer_pointer()


def test_copy_with_other_parts():
    v = make()
    other = v.copy(jnp.zeros(3), unit="epochs", note=1)
    assert (other.shape, other.unit, other.note) == ((3,), "epochs", 1)
    assert v.replace(nnx.Param(5)).value == 5
    assert (v.shape, v.unit, v.has_metadata("note")) == ((2,), "steps", False)


def test_a_local_kind_goes_through_cloudpickle():
    class Local(nnx.Variable):
        pass

    other = cloudpickle.loads(cloudpickle.dumps(Local(jnp.ones(2), on_get_value=lambda v, x: -x)))
    assert type(other).__name__ == "Local"
    np.testing.assert_array_equal(other.value, [-1.0, -1.0])


@pytest.mark.parametrize("method", ["copy_from", "update_from_state"])
def test_taking_over_value_and_metadata(method):
    v, other = make(), Count(jnp.zeros(3), note=1, hijax=True)
    getattr(v, method)(other)
    assert v.get_metadata(exclude_required=True) == {"note": 1}
    assert (v.shape, v.hijax) == ((3,), False)
    assert v.value is not other.raw_value


def test_copy_from_another_kind_is_refused():
    v = make()
    with pytest.raises(
        ValueError, match=r"^Count at v can copy from another Count, but got Param\.\nFix"
    ):
        v.copy_from(nnx.Param(1.0))
    v.copy_from(v)
    assert v.unit == "steps"


def test_from_metadata():
    v = Count.from_metadata(3, {"unit": "steps"})
    assert (type(v), v.value, v.unit, v.hijax, v.ref) == (Count, 3, "steps", False, False)


# ---- as a pytree and in print --------------------------------------------------------------------


def test_a_variable_is_a_pytree_of_its_value():
    v = make()
    ((path, leaf),) = jax.tree.leaves_with_path(v)
    assert jax.tree_util.keystr(path) == ".value"
    assert leaf is v.value
    moved = jax.tree.map(lambda x: x + 1, v)
    assert (type(moved), moved.unit, moved.value.tolist()) == (Count, "steps", [2.0, 3.0])
    assert jax.tree.structure(v) != jax.tree.structure(Count(1.0, unit="epochs"))
    assert jax.tree.structure(v) != jax.tree.structure(nnx.Param(1.0, unit="steps"))


def test_metadata_decides_about_a_retrace():
    traces = []

    @jax.jit
    def f(v):
        traces.append(v.unit)
        return v * 2

    f(make())
    f(make())
    f(Count(jnp.zeros(2), unit="epochs"))
    assert traces == ["steps", "epochs"]


def test_repr():
    assert repr(make()) == (
        "Count( # 2 (8 B)\n  value=Array([1., 2.], dtype=float32),\n  unit='steps'\n)"
    )
    assert repr(nnx.Variable(None)) == "Variable(\n  value=None\n)"
    assert repr(nnx.Param(1, hijax=True, eager_sharding=False)) == (
        "Param( # 1 (4 B)\n"
        f"  value={nnx.Param(1, hijax=True).value!r},\n"
        "  hijax=True,\n"
        "  eager_sharding=False\n)"
    )


@pytest.mark.parametrize(("storage", "shown"), [("hijax", "Array"), ("ref", "ArrayRef")])
def test_repr_of_stored_refs(storage, shown):
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((2, 5)), **{storage: True})
            self.count = Count(jnp.array([0]))

    assert repr(Net()) == (
        "Net( # Count: 1 (4 B), Param: 10 (40 B), Total: 11 (44 B)\n"
        "  w=Param( # 10 (40 B)\n"
        f"    value={shown}(shape=(2, 5), dtype=dtype('float32')),\n"
        f"    {storage}=True\n"
        "  ),\n"
        "  count=Count( # 1 (4 B)\n"
        "    value=Array([0], dtype=int32)\n"
        "  )\n)"
    )
    assert "value=Array([1., 1.], dtype=float32)" in repr(nnx.Param(jnp.ones(2), **{storage: True}))
