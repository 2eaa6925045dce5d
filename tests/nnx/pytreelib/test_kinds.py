"""What a value is to the object model."""

from collections import OrderedDict, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx, struct
from linnet.nnx.pytreelib import kinds
from tests.models import Bag, Pair


@struct.dataclass
class Node:
    x: object
    name: str = struct.field(pytree_node=False, default="n")


VALUES = [
    (1, "STATIC"),
    (None, "STATIC"),
    ("text", "STATIC"),
    (print, "STATIC"),
    (Bag, "STATIC"),
    (jax.ShapeDtypeStruct((2,), jnp.float32), "STATIC"),
    (jnp.ones(2), "ARRAY"),
    (np.ones(2), "ARRAY"),
    (jax.random.key(0), "ARRAY"),
    (jax.new_ref(jnp.ones(2)), "ARRAY"),
    (nnx.Param(1.0), "VARIABLE"),
    (Bag(), "OBJECT"),
    (nnx.List([]), "OBJECT"),
    ([], "LIST"),
    ({}, "DICT"),
    ((), "TUPLE"),
    (Pair(1, 2), "TUPLE"),
    (OrderedDict(), "PYTREE"),
    (Node(1), "PYTREE"),
    (Bag().method, "METHOD"),
]


@pytest.mark.parametrize(("value", "kind"), VALUES, ids=lambda x: type(x).__name__)
def test_kinds(value, kind):
    expected = getattr(kinds, kind)
    assert kinds.kind_of(value) == expected
    assert kinds.kind_of(value) == expected  # from the memory


def test_tracers_are_arrays():
    seen = []
    jax.jit(lambda x: seen.append(kinds.kind_of(x)))(1.0)
    assert seen == [kinds.ARRAY]


X = jnp.ones(1)
P = nnx.Param(X)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (1, []),
        ([1, {"a": (2, None)}], []),
        ([], []),
        (Bag.method, []),
        (X, [X]),
        ([1, {"a": (P, "text")}], [P]),
        (Pair(1, [X]), [X]),
        (OrderedDict(a=[P]), [P]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_data_inside(value, data):
    assert kinds.holds_data(value) == bool(data)
    found = kinds.data_inside(value)
    assert len(found) == len(data)
    assert all(a is b for a, b in zip(found, data, strict=True))


def test_methods_of_modules_hold_data_and_others_do_not():
    bag = Bag()
    assert kinds.bound_owner(bag.method) is bag
    assert kinds.holds_data([bag.method])
    assert kinds.data_inside(bag.method) == [bag.method]
    assert not kinds.holds_data("text".upper)


def test_registered_types_count_as_data():
    @nnx.register_data_type
    class Handle:
        pass

    handle = Handle()
    assert nnx.is_data(handle)
    assert kinds.data_inside([handle]) == [handle]


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ([5, 6], [(0, 5), (1, 6)]),
        ((5,), [(0, 5)]),
        ({"a": 5, 3: 6}, [("a", 5), (3, 6)]),
        (Pair(5, 6), [("left", 5), ("right", 6)]),
        (OrderedDict(b=5, a=6), [("b", 5), ("a", 6)]),
        (Node(5), [("x", 5)]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_items_of_containers(value, items):
    assert list(kinds.container_items(value, kinds.kind_of(value))) == items


def test_one_level_puts_back_together():
    node = Node({"deep": 1})
    items, structure = kinds.one_level(node)
    assert items == [("x", {"deep": 1})]
    assert structure.unflatten([7]) == Node(7)


def test_keys_in_one_order_for_all():
    assert kinds.sort_keys(["b", "a"]) == ["a", "b"]
    assert kinds.sort_keys([10, 9]) == [9, 10]
    mixed = ["b", 10, "a", 9, None, ("x",)]
    assert kinds.sort_keys(mixed) == kinds.sort_keys(reversed(mixed))
    ordered = kinds.sort_keys(mixed)
    assert ordered.index(9) < ordered.index(10)


def test_places_come_before_what_they_hold_and_are_entered_once():
    shared = [1]
    tree = {"b": shared, "a": {"c": shared}}
    paths = [path for path, _ in kinds.places(tree)]
    assert paths == [(), ("a",), ("a", "c"), ("a", "c", 0), ("b",)]
    paths = [path for path, _ in kinds.places(tree, kinds.items_of, breadth_first=True)]
    assert paths == [(), ("b",), ("a",), ("b", 0), ("a", "c")]
    paths = [path for path, _ in kinds.places(tree, every_path=True)]
    assert paths == [(), ("a",), ("a", "c"), ("a", "c", 0), ("b",), ("b", 0)]


def test_every_path_ends_where_a_container_holds_itself():
    loop = [nnx.Param(1.0)]
    loop.append(loop)
    assert nnx.find_duplicates({"a": loop, "b": loop}) == [[("a", 0), ("b", 0)]]


def test_places_look_for_the_owner_of_a_method_where_it_stands_itself():
    net = nnx.List([nnx.Param(1.0)])
    held = {"a": net.append, "b": net}
    assert [path for path, x in kinds.places(held) if x is net] == [("b",)]
    assert [path for path, x in kinds.places([net.append]) if x is net] == [(0, "__self__")]
    assert not [path for path, x in kinds.places([net.append], methods=False) if x is net]


@pytest.mark.parametrize(
    "entries", [{None: 1, "a": 2}, {"k": X, 1: P}, {(1, "a"): P, ("a", 1): [None, 2]}]
)
def test_a_defaultdict_has_keys_of_any_type(entries):
    model = Bag(w=P, held=defaultdict(int, entries))
    count = nnx.jit(lambda model: model.w * len(model.held))
    for number in range(3):
        assert float(count(model)[0]) == 2 + number
        assert list(model.held) == [*entries, *range(10, 10 + number)]
        model.held[10 + number] = X
    assert not kinds.holds_data(defaultdict(int, a=None))
