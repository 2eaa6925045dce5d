"""Static values with arrays in them, and mappings: compiled functions see them as they are now."""

import collections
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import UnequalCopyWarning
from linnet.nnx.pytreelib import statics
from tests.models import param
from tests.nnx.object_graphs import ArraySettings, user_dict
from tests.nnx.transforms.stateful import counted
from tests.nnx.transforms.test_right_before_fast import WARM, either_way, node, run_both_ways  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("either_way"),
    pytest.mark.filterwarnings("ignore::linnet.errors.HiddenDataWarning"),
]


@dataclasses.dataclass
class Tables:
    table: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class FrozenTables:
    table: Any
    scale: Any


def both(n):
    return np.float32([n, n + 1]), jnp.float32([n, n])


# Ways to hold a NumPy array and one of JAX in a static value, and how to read them.
WITH_ARRAYS = {
    "an object with an equality": (ArraySettings, lambda x: (x.table, x.scale)),
    "UserDict": (user_dict, lambda x: (x["table"], x["scale"])),
    "UserList": (lambda n: collections.UserList(both(n)), tuple),
    "ChainMap": (
        lambda n: collections.ChainMap(dict(zip("ab", both(n), strict=True))),
        lambda x: (x["a"], x["b"]),
    ),
    "a dataclass": (lambda n: Tables(*both(n)), lambda x: (x.table, x.scale)),
    "a frozen dataclass": (lambda n: FrozenTables(*both(n)), lambda x: (x.table, x.scale)),
    "a namespace": (
        lambda n: types.SimpleNamespace(a=both(n)[0], b=both(n)[1]),
        lambda x: (x.a, x.b),
    ),
    "a deque": (lambda n: collections.deque(both(n)), tuple),
    "a list in a dataclass": (
        lambda n: Tables([both(n)[0]], both(n)[1]),
        lambda x: (x.table[0], x.scale),
    ),
    "a proxy": (
        lambda n: types.MappingProxyType(dict(zip("ab", both(n), strict=True))),
        lambda x: (x["a"], x["b"]),
    ),
    "a list of objects": (lambda n: [ArraySettings(n)], lambda x: (x[0].table, x[0].scale)),
    "a partial": (lambda n: functools.partial(max, *both(n)), lambda x: x.args),
}
with_arrays = pytest.mark.parametrize(("hold", "read"), WITH_ARRAYS.values(), ids=WITH_ARRAYS)


@with_arrays
def test_arrays_in_a_static_value(hold, read):
    def make():
        return node(held=nnx.static(hold(1)), w=param())

    def step(model):
        table, scale = read(model.held)
        return model.w[...] + jnp.asarray(table) * scale

    def write(model):
        read(model.held)[0][1] = 7

    run_both_ways(make, step, write, lambda model: setattr(model, "held", nnx.static(hold(3))))


@with_arrays
def test_a_static_value_that_was_set_later_counts(hold, read):
    """What looks at values that can change in place looks at the new one then."""

    def make():
        return node(held=None, w=param(), inner=node(w=param(), other=1))

    def step(model):
        found = [x for x in (model.held, model.inner.other) if type(x) not in (int, type(None))]
        return model.w[...] + sum(jnp.asarray(read(x)[0]).sum() for x in found)

    def put(n):
        return lambda model: setattr(model, "held", nnx.static(hold(n)))

    def put_inside(model):
        model.inner.other = nnx.static(hold(4))

    def write(model):
        read(model.held)[0][1] += 7

    def write_inside(model):
        read(model.inner.other)[0][0] += 7

    changes = [put(1), write, put(1), write, write, put(2), put_inside, write_inside, write]
    run_both_ways(make, step, *changes)


def test_metadata_that_was_set_later_counts():
    def change(model):
        model.w.set_metadata("config", Tables([1], 2))

    def write(model):
        model.w.config.table[0] += 3

    def step(model):
        return model.w[...] * (model.w.config.table[0] if model.w.has_metadata("config") else 9)

    run_both_ways(lambda: node(w=param()), step, change, write, write, change, write)


class Labelled(np.ndarray):
    """An array with an attribute."""


def labelled(n):
    made = np.float32([n, n + 1]).view(Labelled)
    made.label = [n]
    return made


SUBCLASSES = {
    "masked": lambda n: np.ma.array([n, n + 1.0]),
    "with an attribute": labelled,
    "records": lambda n: np.rec.array([(n, 1.0)], dtype=[("a", np.float32), ("b", np.float32)]),
}


@pytest.mark.parametrize("make", SUBCLASSES.values(), ids=SUBCLASSES)
def test_subclasses_of_arrays_in_a_static_value(make):
    def text(x):
        return f"{x.tolist()} {getattr(x, 'label', '')} {getattr(x, 'mask', '')}"

    seen = []
    step = nnx.jit(lambda model: seen.append(text(model.held.table)) or model.w[...])
    model = node(held=Tables(make(1), 0), w=param())
    for _ in range(WARM):
        step(model)
    assert seen == [text(make(1))]
    changes = [lambda x: x.fill(5)]
    if hasattr(make(1), "label"):
        changes.append(lambda x: x.label.append(2))
    if hasattr(make(1), "mask"):
        changes.append(lambda x: x.__setitem__(0, np.ma.masked))
    for change in changes:
        change(model.held.table)
        step(model), step(model)
        assert seen[-1] == text(model.held.table)
    assert len(seen) == 1 + len(changes)


def test_elements_of_arrays_of_objects_count():
    table = np.array([([1],)], dtype=[("x", object)])
    before = statics.key_of((table,))
    table["x"][0].append(2)
    assert statics.key_of((table,)) != before


def test_the_order_of_an_ordered_dict_counts_wherever_it_is():
    class Own(collections.OrderedDict):
        pass

    for hold in (lambda x: Tables(x, 0), lambda x: x, lambda x: nnx.static([x])):
        for cls in (collections.OrderedDict, Own):
            model = node(held=hold(cls(a=1, b=2)), w=param())
            step = nnx.jit(lambda model, read: read(model), static_argnums=1)

            def found(model):
                held = model.held[0] if isinstance(model.held, list) else model.held
                return held.table if isinstance(held, Tables) else held

            def first(model):
                return model.w[...] * next(iter(found(model).values()))

            for _ in range(WARM):
                assert float(step(model, first)) == 1
            found(model).move_to_end("a")
            assert float(step(model, first)) == 2


@with_arrays
def test_a_static_value_with_arrays_that_nothing_changes_stays_what_it_is(hold, read):
    model = node(held=nnx.static(hold(1)), w=param())
    held, scale = model.held, read(model.held)[1]
    step, runs = counted(lambda model: model.w[...] * read(model.held)[1])
    calls = [
        nnx.jit(step),
        nnx.remat(lambda model: model.w[...].sum()),
        lambda model: nnx.cond(True, lambda m: m.w[...], lambda m: m.w[...] + 1, model),
        lambda model: nnx.fori_loop(0, 2, lambda _, m: m, model),
        lambda model: nnx.scan(lambda m, x: (m, x), in_axes=(nnx.Carry, 0))(model, jnp.ones(2)),
    ]
    for run in calls:
        for _ in range(WARM):
            run(model)
        assert model.held is held
        assert read(model.held)[1] is scale
    assert len(runs) == 1


@with_arrays
def test_a_write_into_an_array_of_a_static_value_is_kept(hold, read):
    def step(model):
        read(model.held)[0][0] += 2
        return model.w[...]

    run_both_ways(lambda: node(held=nnx.static(hold(1)), w=param()), step)


def test_large_tables_that_cannot_be_written_are_compared_by_identity():
    table = np.zeros(3)
    table.flags.writeable = False
    view = table[:2]
    assert statics.key_of((table,)) != statics.key_of((table.copy(),))
    assert statics.key_of((view,)) == statics.key_of((view.copy(),))
    assert not statics.can_change((table,)) and statics.can_change((view,))


def test_an_object_that_is_not_equal_to_its_copy_is_named_once():
    class Table:
        def __init__(self):
            self.rows = np.ones(3, np.float32)

        def __eq__(self, other):
            return self.rows == other.rows

        __hash__ = None

    step, runs = counted(lambda model: model.w[...] * model.table.rows)
    step, model = nnx.jit(step), node(table=Table(), w=param())
    with pytest.warns(UnequalCopyWarning) as caught:
        step(model)
    assert [str(w.message) for w in caught] == [
        "A Table that a module or a static argument holds is not equal to a copy of itself: "
        "Table.__eq__ fails or returns something else than a bool, or nothing can copy it. "
        "Nothing that is compiled for it can be used again, so every call traces and compiles.\n"
        "Fix: let Table.__eq__ return a bool, or hold what is in the Table in attributes of the "
        "module."
    ]
    model.table.rows[0] = 5
    assert step(model).tolist() == [5.0, 1.0, 1.0]
    assert len(runs) == 2


MAPPINGS = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": lambda: collections.defaultdict(int),
}


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_keeps_the_order_of_its_keys(make):
    class Steps(nnx.Module):
        def __init__(self):
            self.steps = make()
            self.steps["scale"], self.steps["add"] = param(2.0), param(3.0)
            self.inside = [self.steps["add"], {"z": make() | {"y": 1.0, "x": param(1.0)}}]

        def __call__(self, x):
            for name, step in self.steps.items():
                x = x * step if name == "scale" else x + step
            return x

    def call(model, x=1.0):
        return model(x)

    model = Steps()
    cls = type(model.steps)
    assert [float(f(model)) for f in (call, nnx.jit(call), jax.jit(call), nnx.remat(call))] == [
        5
    ] * 4
    assert float(nnx.cond(True, call, lambda m: 0.0, model)) == 5
    assert nnx.vmap(call, in_axes=(None, 0))(model, jnp.ones(2)).tolist() == [5, 5]
    assert float(nnx.grad(call)(model)["steps"]["scale"][...]) == 1
    leaves, structure = jax.tree.flatten(model)
    copies = nnx.clone(model), nnx.merge(*nnx.split(model)), structure.unflatten(leaves)
    for other in (*copies, jax.tree.map(lambda x: x, model)):
        assert type(other.steps) is cls and list(other.steps) == ["scale", "add"]
        assert list(other.inside[1]["z"]) == ["y", "x"]
        assert getattr(other.steps, "default_factory", int) is int
    assert jax.tree.structure(model) == jax.tree.structure(Steps())
