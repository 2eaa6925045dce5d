"""Static values as keys: equal when they behave alike, told apart when not, safe from change."""

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import gc
import pickle
import threading
import weakref
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

from linnet import nnx
from linnet.nnx.pytreelib import statics
from linnet.nnx.pytreelib.statics import StaticValue, key_of
from tests.models import Bag, Config
from tests.nnx.object_graphs import HashedOptions


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def scaled(rate, *, offset=0):
    return lambda x: x * rate + offset


def recursive():
    def countdown(n):
        return countdown(n - 1) if n else 0

    return countdown


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_copies_have_equal_keys(value):
    other = pickle.loads(pickle.dumps(value))
    assert key_of(value) == key_of(other)
    assert hash(key_of(value)) == hash(key_of(other))
    assert StaticValue(value) == StaticValue(other)
    assert repr(StaticValue(value).thaw()) == repr(value)


@given(PLAIN, PLAIN)
def test_keys_are_equal_exactly_where_the_text_is(a, b):
    assert (key_of(a) == key_of(b)) == (repr(a) == repr(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({1}, frozenset({1})),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Color.RED, Color.BLUE),
        (np.float32(1), np.float64(1)),
        (np.dtype("float32"), np.dtype("float16")),
        (int, float),
        (Config(1, []), Config(1, [2])),
        (scaled(1.0), scaled(2.0)),
        (scaled(1), scaled(True)),
        (scaled(1.0), scaled(1.0, offset=1)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, 1), functools.partial(min, 1)),
        (functools.partial(max, key=1), functools.partial(max, key=2)),
        (lambda x, y=1: x, lambda x, y=2: x),
        (lambda x, *, y=1: x, lambda x, *, y=2: x),
    ],
)
def test_different_behaviour_means_different_keys(a, b):
    assert key_of(a) != key_of(b)
    assert StaticValue(a) != StaticValue(b)


MAKERS = {
    "closure": lambda: scaled(0.1, offset=[1, {"a": 2}]),
    "nested closure": lambda: scaled(scaled(2)),
    "recursive function": recursive,
    "partial": lambda: functools.partial(scaled(3), 1, b=[2]),
    "function with attributes": lambda: functools.wraps(scaled)(scaled(1)),
    "unhashable dataclass": lambda: Config(1, ["a", "b"]),
    "set": lambda: {1, "a", (2, 3)},
    "nan": lambda: [float("nan"), complex("nan")],
    "numpy scalar": lambda: np.float32(2.5),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_things_made_twice_alike_have_equal_keys(make):
    assert key_of(make()) == key_of(make())
    assert hash(key_of(make())) == hash(key_of(make()))


def test_arrays_variables_and_modules_are_compared_by_identity():
    class Net(nnx.Module):
        pass

    for thing, twin in [
        (jnp.ones(2), jnp.ones(2)),
        (np.ones(2), np.ones(2)),
        (nnx.Param(1.0), nnx.Param(1.0)),
        (Net(), Net()),
    ]:
        assert key_of(scaled(thing)) == key_of(scaled(thing))
        assert key_of(scaled(thing)) != key_of(scaled(twin))
        assert (key_of([thing]) == key_of([twin])) == isinstance(thing, np.ndarray)


def test_bound_methods():
    class Box:
        def get(self):
            return self

    one, two = Box(), Box()
    assert key_of(one.get) == key_of(one.get)
    assert key_of(one.get) != key_of(two.get)


def test_containers_that_hold_themselves():
    loop = [1]
    loop.append(loop)
    other = [1]
    other.append(other)
    assert key_of(loop) == key_of(other)
    assert key_of(loop) != key_of([1, [1, [1]]])


def test_objects_that_cannot_be_compared_or_copied():
    class Sealed:
        def __eq__(self, other):
            raise RuntimeError("not today")

        def __deepcopy__(self, memo):
            raise RuntimeError("never")

        __hash__ = None

    sealed = Sealed()
    assert key_of(sealed) == key_of(sealed)
    assert key_of(sealed) != key_of(Sealed())


CHANGES = {
    "list": ([1], lambda x: x.append(2)),
    "dict in a tuple": (({"a": [1]},), lambda x: x[0]["a"].append(2)),
    "set": ({1}, lambda x: x.add(2)),
    "dataclass": (Config(1, []), lambda x: x.names.append(2)),
    "namespace of argparse": (argparse.Namespace(a=1), lambda x: setattr(x, "a", True)),
    "attribute beside the fields": (Config(1, []), lambda x: setattr(x, "later", 1)),
}
# These are their own keys: only the hash in a key tells that they changed.
CHANGES_OF_HASH = {
    "object with a hash": (HashedOptions(1), lambda x: setattr(x, "size", 2)),
    "list of objects with a hash": ([HashedOptions(1)], lambda x: setattr(x[0], "size", 2)),
}
ALL_CHANGES = {**CHANGES, **CHANGES_OF_HASH}


@pytest.mark.parametrize(("value", "change"), CHANGES.values(), ids=CHANGES)
def test_a_later_change_does_not_reach_the_key(value, change):
    value, before = copy.deepcopy(value), key_of(copy.deepcopy(value))
    key, whole = key_of(value), StaticValue(value)
    change(value)
    assert key == before
    assert key != key_of(value)
    assert whole != StaticValue(value)


def test_thawed_containers_are_each_holder_s_own():
    original = {"a": [1, (2, [3])], "f": scaled}
    static = StaticValue(original)
    original["a"].append(4)
    first, second = static.thaw(), static.thaw()
    first["a"][1][1].append(5)
    assert second == {"a": [1, (2, [3])], "f": scaled}
    pair = (1, 2)
    assert StaticValue(pair).thaw() is pair


def test_static_prints_compares_and_pickles_as_its_value():
    static = StaticValue([1, "a"])
    assert repr(static) == "[1, 'a']"
    assert pickle.loads(pickle.dumps(static)) == static
    assert hash(static) == hash(StaticValue([1, "a"]))
    assert static != [1, "a"]


@pytest.mark.parametrize(
    "values", [[1, "a", None], [0.0, -0.0, 1.5], [[1], {"a": 2}, scaled, 1j, float("inf")], []]
)
def test_pack_and_unpack(values):
    packed, types = statics.pack_statics(values)
    assert repr(statics.unpack_statics(packed)) == repr(values)
    assert types == tuple(map(type, values))
    assert statics.pack_statics(copy.deepcopy(values)) == (packed, types)
    hash((packed, types))


def test_types_that_stand_for_themselves():
    class ByIdentity:
        pass

    assert statics.type_needs_no_key(int)
    assert statics.type_needs_no_key(Color)
    assert statics.type_needs_no_key(ByIdentity)
    assert not statics.type_needs_no_key(float)
    assert not statics.type_needs_no_key(list)
    assert not statics.type_needs_no_key(Config)


def test_what_a_function_closes_over_counts_although_its_hash_fails():
    class Rate:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return self.value == other.value

        def __hash__(self):
            raise ValueError("not now")

    def model(rate):
        made = nnx.Module()
        made.scale = lambda x: x * rate.value
        return made

    run = nnx.jit(lambda model, x: model.scale(x))
    assert [run(model(Rate(value)), 3.0) for value in (1, 2, 1)] == [3, 6, 3]


def test_functions_are_not_kept_alive():
    def make():
        big = bytearray(10)
        return lambda x: (x, big), lambda x: x

    functions = make()
    for function in functions:
        statics.static_value(function)
    alive = [weakref.ref(function) for function in functions]
    del functions, function
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


# ---- what it is for ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_equal_static_attributes_do_not_retrace(make):
    traces = []

    @jax.jit
    def f(net):
        traces.append(1)
        return net.w * 2

    for _ in range(2):
        f(Bag(w=nnx.Param(jnp.ones(2)), extra=make()))
    assert len(traces) == 1


@pytest.mark.parametrize(("value", "change"), ALL_CHANGES.values(), ids=ALL_CHANGES)
def test_a_key_shows_a_change(value, change):
    value = copy.deepcopy(value)
    key = key_of(value)
    assert statics.can_change(value)
    assert key_of(value) == key
    change(value)
    assert key_of(value) != key


@pytest.mark.parametrize("holder", ["module", "Variable"])
@pytest.mark.parametrize(("value", "change"), ALL_CHANGES.values(), ids=ALL_CHANGES)
def test_a_value_is_watched_that_was_set_after_the_record_was_made(holder, value, change):
    model = Bag(w=nnx.Param(jnp.ones(2), extra=None), extra=None)

    def number_of_what_is_there(model):
        values = model.extra, model.w.get_metadata("extra")
        text = "".join(f"{value!r} {getattr(value, '__dict__', '')}" for value in values)
        return jnp.uint32(zlib.crc32(text.encode()))

    look = nnx.jit(number_of_what_is_there)
    for _ in range(2):
        held = copy.deepcopy(value)
        if holder == "module":
            model.extra = held
        else:
            model.w.set_metadata(extra=held)
        for _ in range(3):
            assert look(model) == number_of_what_is_there(model)
        change(held)
        assert look(model) == number_of_what_is_there(model)


@pytest.mark.parametrize(("value", "change"), ALL_CHANGES.values(), ids=ALL_CHANGES)
def test_changed_static_attributes_retrace(value, change):
    traces = []

    @jax.jit
    def f(net):
        traces.append(1)
        return net.w * 2

    net = Bag(w=nnx.Param(jnp.ones(2)), extra=copy.deepcopy(value))
    f(net)
    change(net.extra)
    f(net)
    f(net)
    assert len(traces) == 2


# ---- what has to be looked at again --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    inside: object


@pytest.mark.parametrize("part", [1, 0.5, "a", None, int, Color.RED, np.float32(1), scaled])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, (x,)),
        Frozen,
        lambda x: functools.partial(scaled, x, key=x),
    ],
)
def test_what_cannot_change(part, wrap):
    assert not statics.can_change(wrap(part))


@pytest.mark.parametrize("part", [[1], {"a": 1}, {1}, Config(1, [])], ids=str)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (1, (x,)),
        Frozen,
        lambda x: functools.partial(max, x),
        lambda x: functools.partial(max, key=x),
    ],
)
def test_what_can_change(part, wrap):
    assert statics.can_change(wrap(part))


@dataclasses.dataclass(frozen=True)
class Derived:
    size: int
    area: int = dataclasses.field(init=False)


def test_a_module_holds_a_frozen_dataclass_with_a_field_that_was_never_set():
    model = Bag(w=nnx.Param(jnp.ones(2)), extra=Derived(3))
    scale = nnx.jit(lambda model: model.w * model.extra.size)
    for _ in range(3):
        assert scale(model).tolist() == [3, 3]


def test_a_name_that_is_not_bound_yet():
    def make():
        f = lambda: later  # noqa: E731
        key = key_of(f)
        later = 1
        return key, key_of(f)

    before, after = make()
    assert before == make()[0]
    assert before != after


def test_named_tuples():
    pair = collections.namedtuple("pair", "a b")
    other = collections.namedtuple("other", "a b")
    assert key_of(pair(1, [2])) == key_of(pair(1, [2]))
    assert key_of(pair(1, [2])) != key_of(other(1, [2]))


def test_deep_copies_keep_functions_of_jax():
    attributes = {"act": [jax.nn.relu, jnp.tanh, (scaled, 1)]}
    copied = copy.deepcopy(attributes)
    assert copied["act"][0] is jax.nn.relu and copied["act"][1] is jnp.tanh
    assert copied["act"] is not attributes["act"]


class WithLock:
    """It has an equality and no hash, and nothing can copy it."""

    __slots__ = ("lock", "size")

    def __init__(self):
        self.lock, self.size = threading.Lock(), 1

    def __eq__(self, other):
        return self.size == other.size

    __hash__ = None


@pytest.mark.parametrize(
    "view", [dict.keys, dict.values, dict.items, collections.OrderedDict.items]
)
def test_a_view_of_a_dict_changes_with_the_dict(view):
    labels = collections.OrderedDict(cat=0)
    model = Bag(w=nnx.Param(jnp.ones(2)), classes=view(labels))
    count = nnx.jit(lambda model: model.w * len(model.classes))
    for number in range(4):
        assert count(model).tolist() == [number + 1] * 2
        labels[number] = number


def test_what_nothing_can_copy_is_compared_by_what_is_in_it():
    data = bytearray(b"ab")
    model = Bag(w=nnx.Param(jnp.ones(2)), lock=WithLock(), data=memoryview(data))
    read = nnx.jit(lambda model: model.w * (10 * model.lock.size + model.data[0]))
    for number in range(4):
        data[0] = number
        assert read(model).tolist() == [10 * model.lock.size + number] * 2
        model.lock.size = number
        assert read(model).tolist() == [11 * number] * 2
    assert read.traces.count == 8


def test_a_method_of_a_dict_changes_with_the_dict():
    rates = {"slow": 1.0}
    model = Bag(w=nnx.Param(jnp.ones(2)), rate=rates.get)
    scale = nnx.jit(lambda model: model.w * model.rate("slow"))
    for rate in (1.0, 1.0, 1.0, 2.0, 3.0):
        rates["slow"] = rate
        assert scale(model).tolist() == [rate, rate]
    assert not statics.can_change(len)
    assert key_of("a".join) == key_of("a".join) != key_of("b".join)


def test_what_an_optimizer_holds_is_not_compared_in_every_call():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert not statics.can_change(optimizer.transformation)
