"""Cursor: changes inside of trees, searches, operators, and what it refuses."""

import collections
import operator

import jax.numpy as jnp
import numpy as np
import pytest

from linnet import core, cursor as cursor_module, struct
from linnet.cursor import Cursor, CursorFindError, cursor, is_named_tuple

Pair = collections.namedtuple("Pair", "a b")


@struct.dataclass
class Node:
    x: int
    y: dict = struct.field(default_factory=dict)


def tree():
    return {
        "a": 1,
        "b": {"c": [2, 3], "t": (4, 5)},
        "n": Pair(1, {"q": 2}),
        "s": Node(1, {"k": 2}),
    }


def test_changes_of_every_container_leave_the_tree():
    data = tree()
    c = cursor(data)
    c["a"] = 10
    c["b"]["c"][0] = 20
    c["b"]["t"][-1] = 50
    c["n"].b["q"] = 7
    c["s"].x = 9
    c["s"].y["k"] += 9
    assert c.build() == {
        "a": 10,
        "b": {"c": [20, 3], "t": (4, 50)},
        "n": Pair(1, {"q": 7}),
        "s": Node(9, {"k": 11}),
    }
    assert data == tree()


def test_what_is_unchanged_is_shared():
    data = tree()
    assert cursor(data).build() is data
    changed = cursor(data)["a"].set(2)
    assert changed["b"] is data["b"]


def test_set_builds_from_the_root_and_keeps_changes():
    c = cursor(tree())
    c["a"] = 5
    assert c["b"]["c"][0].set(33)["b"] == {"c": [33, 3], "t": (4, 5)}
    assert (c.build()["a"], c.build()["b"]["c"]) == (5, [33, 3])
    assert c["b"].build() == {"c": [33, 3], "t": (4, 5)}
    assert cursor(3).set(4) == 4


def test_a_new_value_can_be_changed_further():
    c = cursor(tree())
    c["b"]["c"] = [7, 8]
    c["b"]["c"][0] = 1
    c["a"] = cursor([1])
    assert (c.build()["b"]["c"], c.build()["a"]) == ([1, 8], [1])


def test_new_keys_and_frozen_dicts():
    c = cursor(core.freeze({"a": {"b": 1}}))
    c["a"]["b"] = 3
    c["z"] = 4
    assert c.build() == core.freeze({"a": {"b": 3}, "z": 4})
    assert isinstance(c.build(), core.FrozenDict)


def test_fields_by_position_and_dataclass_fields_by_key():
    pair, node = cursor(Pair(1, 2)), cursor(Node(1))
    pair[0] = 5
    node["x"] = 5
    assert (pair.build(), node.build()) == (Pair(5, 2), Node(5))
    assert is_named_tuple(Pair(1, 2)) and not is_named_tuple((1, 2)) and not is_named_tuple(Pair)


@pytest.mark.parametrize(
    "name",
    "add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor lt le eq ne gt ge".split(),
)
def test_operators_work_on_the_value(name):
    function = getattr(operator, name)
    assert function(cursor(7), 2) == function(7, 2)
    assert function(2, cursor(7)) == function(2, 7)
    assert function(cursor(7), cursor(2)) == function(7, 2)


def test_other_functions_of_the_value():
    c = cursor(-3)
    assert (-c, +c, abs(c), ~c, divmod(c, 2), divmod(7, cursor(2))) == (
        3,
        -3,
        3,
        2,
        (-2, 1),
        (3, 1),
    )
    assert (round(cursor(2.567), 1), len(cursor([1, 2])), bool(cursor([]))) == (2.6, 2, False)
    np.testing.assert_array_equal(cursor(np.eye(2)) @ np.ones(2), np.ones(2))
    assert 2 in cursor([1, 2]) and "a" in cursor({"a": 1})
    assert [x.build() for x in cursor((1, 2))] == [1, 2]
    assert [x.build() for x in reversed(cursor([1, 2]))] == [2, 1]
    assert (str(cursor([1])), repr(cursor([1]))) == ("[1]", "Cursor([1], changes={})")


def test_apply_update_goes_top_down_and_stops_at_changes():
    seen = []

    def update(path, value):
        seen.append(path)
        return 0 if path == "b" else value * 2 if isinstance(value, int) else value

    c = cursor(tree())
    assert c.apply_update(update) is c
    assert c.build() == {"a": 2, "b": 0, "n": Pair(2, {"q": 4}), "s": Node(2, {"k": 4})}
    assert seen == ["a", "b", "n", "n/a", "n/b", "n/b/q", "s", "s/x", "s/y", "s/y/k"]


def test_searches_see_changes_made_before():
    c = cursor({"a": 1, "b": 2})
    c["a"] = 10
    assert c.find(lambda path, value: value == 10).set(11) == {"a": 11, "b": 2}
    assert c.apply_update(lambda path, value: value + 1).build() == {"a": 12, "b": 3}


def test_find_all_yields_places_and_does_not_look_into_them():
    c = cursor(tree())
    found = [x.build() for x in c.find_all(lambda path, x: isinstance(x, (int, list)))]
    assert found == [1, [2, 3], 4, 5, 1, 2, 1, 2]
    for place in c.find_all(lambda path, x: path.endswith("c")):
        place[0] = 77
    assert c.build()["b"]["c"] == [77, 3]


def test_find_wants_exactly_one():
    with pytest.raises(CursorFindError) as error:
        cursor(tree()).find(lambda path, value: False)
    assert str(error.value).startswith("No node meets the condition of Cursor.find.")
    with pytest.raises(CursorFindError) as error:
        cursor(tree()).find(lambda path, value: value in (2, 3))
    assert "the first two are at b/c/0 and b/c/1" in str(error.value)


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda c: c["b"]["q"], KeyError, "There is no key 'q' at 'b'."),
        (lambda c: c["s"].q, AttributeError, "The Node at 's' has no attribute 'q'."),
        (lambda c: c["b"]["c"][5], IndexError, "There is no entry 5 in a list of 2."),
        (lambda c: c["a"][0], TypeError, "The value at 'a' is a int and has no entries."),
        (lambda c: iter(c["b"]), NotImplementedError, "the value at 'b' is a dict"),
        (lambda c: c["b"]["c"][0:1], TypeError, "have positions, but got slice(0, 1, None)"),
        (hash, TypeError, "unhashable type: 'Cursor'"),
    ],
)
def test_errors_name_the_place(act, kind, text):
    with pytest.raises(kind) as error:
        act(cursor(tree()))
    assert text in str(error.value)


@pytest.mark.parametrize("leaf", [jnp.zeros(3), np.zeros(3), object()])
def test_a_leaf_is_set_as_a_whole(leaf):
    with pytest.raises(TypeError, match="at 'w' is a leaf: 1 cannot be set in it"):
        cursor({"w": leaf})["w"].__setitem__(1, 5.0)


def test_the_names_programs_import():
    assert cursor_module.TraverseTreeError(None, None).args
    assert isinstance(cursor(1), Cursor)
