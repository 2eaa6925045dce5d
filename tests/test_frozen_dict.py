"""FrozenDict, and functions for dicts that may be one."""

import copy
import pickle

import jax
import pytest

from linnet import core, serialization
from linnet.core import FrozenDict, freeze, unfreeze

NESTED = {"b": 1, "a": {"c": 2, "z": [1, {"q": 1}]}}


def test_reads_as_a_mapping_whose_dicts_are_frozen_too():
    frozen = FrozenDict(NESTED)
    assert list(frozen) == ["b", "a"] and len(frozen) == 2 and "a" in frozen
    assert isinstance(frozen["a"], FrozenDict) and frozen["a"]["c"] == 2
    assert isinstance(dict(frozen.items())["a"], FrozenDict)
    assert isinstance(list(frozen.values())[1], FrozenDict)
    assert frozen.get("zz", 3) == 3 and frozen.get("zz") is None
    assert str(frozen.keys()) == "frozen_dict_keys(['b', 'a'])"
    assert str(FrozenDict(a=1).values()) == "frozen_dict_values([1])"
    with pytest.raises(KeyError):
        frozen["zz"]


def test_it_is_a_copy_and_cannot_be_set():
    given = {"a": {"c": 1}}
    frozen = FrozenDict(given)
    given["a"]["c"] = 5
    assert frozen["a"]["c"] == 1
    with pytest.raises(ValueError, match="FrozenDict is immutable; its entry 'x' cannot be set"):
        frozen["x"] = 1
    unfrozen = frozen.unfreeze()
    unfrozen["a"]["c"] = 7
    assert frozen["a"]["c"] == 1


def test_equality_and_hash_do_not_depend_on_the_order():
    one, other = freeze({"a": 1, "b": {"c": 2}}), freeze({"b": {"c": 2}, "a": 1})
    assert one == other and hash(one) == hash(other) and {one: 3}[other] == 3
    assert one == {"a": 1, "b": {"c": 2}} and one != freeze({"a": 1}) and one != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(FrozenDict(NESTED))


def test_pytree_with_sorted_keys():
    frozen = FrozenDict(NESTED)
    leaves, treedef = jax.tree.flatten(frozen)
    assert leaves == [2, 1, 1, 1]
    assert treedef == jax.tree.structure(freeze({"a": NESTED["a"], "b": 1}))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen)]
    assert paths == ["['a']['c']", "['a']['z'][0]", "['a']['z'][1]['q']", "['b']"]
    doubled = jax.tree.map(lambda a, b: a + b, frozen, frozen)
    assert isinstance(doubled, FrozenDict) and doubled["a"]["c"] == 4


def test_copy_pop_and_pickle():
    frozen = FrozenDict(NESTED)
    assert frozen.copy({"b": 3, "n": {"x": 1}}) == {**NESTED, "b": 3, "n": {"x": 1}}
    rest, value = frozen.pop("a")
    assert rest == {"b": 1} and value == NESTED["a"] and isinstance(value, FrozenDict)
    for copied in (pickle.loads(pickle.dumps(frozen)), copy.copy(frozen), copy.deepcopy(frozen)):
        assert copied == frozen and isinstance(copied, FrozenDict)


def test_functions_take_dicts_and_frozen_dicts():
    plain = {"a": 1}
    assert core.copy(plain, {"b": 2}) == {"a": 1, "b": 2} and plain == {"a": 1}
    assert isinstance(core.copy(freeze(plain), {"b": 2}), FrozenDict)
    assert core.pop(plain, "a") == ({}, 1) and plain == {"a": 1}
    assert core.pop(freeze(plain), "a") == (FrozenDict(), 1)
    assert unfreeze(plain) == plain and unfreeze(plain) is not plain
    assert type(unfreeze({"a": FrozenDict({"b": 1})})["a"]) is dict
    assert unfreeze(3) == 3
    with pytest.raises(TypeError, match=r"Expected a FrozenDict or a dict, but got 3 \(int\)"):
        core.copy(3)
    with pytest.raises(TypeError, match="Expected a FrozenDict or a dict"):
        core.pop([1], "a")


def test_text():
    text = "FrozenDict({\n    b: 1,\n    a: {\n        c: 2,\n        z: [1, {'q': 1}],\n    },\n})"
    assert repr(FrozenDict(NESTED)) == str(FrozenDict(NESTED)) == text
    assert repr(FrozenDict()) == "FrozenDict({})"
    assert core.pretty_repr({"a": {"b": 1}}, 2) == "{\n  a: {\n    b: 1,\n  },\n}"
    assert core.pretty_repr({"a": {}}) == "{\n    a: {},\n}"
    assert core.pretty_repr("x") == "'x'"


def test_serialization_gives_it_back():
    frozen = FrozenDict({"a": {"b": 1}})
    state = serialization.to_state_dict(frozen)
    assert state == {"a": {"b": 1}} and type(state) is dict and type(state["a"]) is dict
    restored = serialization.from_state_dict(frozen, {"a": {"b": 2}})
    assert restored == freeze({"a": {"b": 2}}) and isinstance(restored, FrozenDict)
