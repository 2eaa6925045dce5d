"""nnx.List and nnx.Dict: containers with an identity, sorted element by element."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import StaticDataError
from tests.models import Bag, param


def leaves(tree):
    return [float(x) for x in jax.tree.leaves(tree)]


def paths(tree):
    return list(nnx.state(tree).flat_state().paths)


# ---- List ---------------------------------------------------------------------------------------


def test_list_behaves_as_a_list():
    values = nnx.List([1, 2, 3])
    values.append(4)
    values.insert(0, 0)
    values.extend([5, 6])
    values += [7]
    assert list(values) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (len(values), values[-1], values[1:3], 3 in values) == (8, 7, [1, 2], True)
    assert (values.index(3), values.count(3), next(reversed(values))) == (3, 1, 7)
    assert values.pop() == 7
    assert values.pop(0) == 0
    values.remove(3)
    del values[0]
    values[-1] = 60
    values[:2] = ["a", "b", "c"]
    del values[1:]
    assert list(values) == ["a"]
    values.clear()
    assert list(values) == []


@pytest.mark.parametrize("use", [lambda v: v[3], lambda v: v.__setitem__(3, 0), lambda v: v.pop(3)])
def test_list_refuses_positions_that_are_not_there(use):
    with pytest.raises(IndexError):
        use(nnx.List([1]))


def test_lists_add_to_a_new_list():
    first = nnx.List([1])
    joined = operator.add(first, [2])
    assert isinstance(joined, nnx.List)
    assert (list(joined), list(first)) == ([1, 2], [1])


def test_list_elements_are_sorted_one_by_one():
    values = nnx.List([param(1), "label", jnp.float32(2), [param(3), "x"], None, jnp.tanh])
    assert leaves(values) == [1, 2, 3]
    assert paths(values) == [(0,), (2,), (3, 0)]
    copied = nnx.clone(values)
    assert (copied[1], copied[3][1], copied[4], copied[5]) == ("label", "x", None, jnp.tanh)
    assert nnx.graphdef(copied) == nnx.graphdef(values)


def test_list_positions_are_in_order_beyond_ten():
    values = nnx.List(param(i) for i in range(12))
    values.note = param(99)
    assert leaves(values) == [*range(12), 99]
    assert paths(values)[9:] == [(9,), (10,), (11,), ("note",)]
    assert [float(v.value) for v in nnx.clone(values)] == list(range(12))


def test_marks_of_elements_move_with_them():
    values = nnx.List([nnx.data(1), nnx.static(2), 3])
    assert leaves(values) == [1]
    values.insert(0, "first")
    assert leaves(values) == [1]
    values[1] = 10
    assert leaves(values) == [10]
    del values[1]
    assert leaves(values) == []
    values[0:1] = [nnx.data(5), nnx.data(6)]
    assert leaves(values) == [5, 6]
    assert list(values) == [5, 6, 2, 3]


def test_static_elements_refuse_data():
    with pytest.raises(StaticDataError, match=r"^List\[0\] is static, but got data: Param\.\nFix:"):
        nnx.List([nnx.static(param())])
    values = nnx.List([nnx.static(1)])
    values[0] = param()
    with pytest.raises(StaticDataError, match=r"^List\[0\] is static, but got data: Param\.\nFix:"):
        nnx.split(values)


def test_a_list_has_attributes_too():
    class Stack(nnx.List):
        def __init__(self, layers, name):
            super().__init__(layers)
            self.name = name
            self.scale = param(7)

    stack = nnx.clone(Stack([param(1)], "s"))
    assert (type(stack), stack.name, leaves(stack)) == (Stack, "s", [1, 7])
    del stack.scale
    assert leaves(stack) == [1]


def test_list_prints_its_elements():
    assert repr(nnx.List([1, "a"])) == "List([\n  1,\n  'a'\n])"
    assert repr(nnx.List()) == "List([])"


# ---- Dict ---------------------------------------------------------------------------------------


def test_dict_behaves_as_a_dict():
    table = nnx.Dict({"b": 1}, a=2)
    assert nnx.Dict([("b", 1), ("a", 2)]) == table == {"b": 1, "a": 2}
    assert (list(table), len(table), "a" in table, table.get("c")) == (["b", "a"], 2, True, None)
    table["c"] = 3
    table.update(d=4)
    assert table.pop("b") == 1
    assert table.setdefault("e", 5) == 5
    del table["a"]
    assert dict(table.items()) == {"c": 3, "d": 4, "e": 5}
    assert dict(table | {"c": 0}) == {"c": 0, "d": 4, "e": 5}
    assert isinstance(table | {}, nnx.Dict)
    with pytest.raises(KeyError):
        table["a"]


def test_dict_entries_are_attributes():
    table = nnx.Dict(w=param(1))
    assert table.w is table["w"]
    table.name = "heads"
    assert table["name"] == "heads"
    del table.name
    assert "name" not in table


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda d: d.missing, r"No entry 'missing' in Dict: 'a', 'b'\."),
        (lambda d: nnx.Dict().missing, r"No entry 'missing' in Dict: nothing\."),
        (lambda d: delattr(d, "missing"), r"No entry 'missing' in Dict\."),
    ],
)
def test_missing_entries_are_named_with_those_there_are(use, text):
    with pytest.raises(AttributeError, match=text):
        use(nnx.Dict(a=1, b=2))


def test_dict_values_are_sorted_one_by_one_and_leaves_come_in_the_order_of_keys():
    table = nnx.Dict(z=param(1), label="x", a=jnp.float32(2), n=nnx.data(3))
    assert leaves(table) == [2, 3, 1]
    assert leaves(nnx.state(table)) == [2, 3, 1]
    assert list(nnx.clone(table)) == ["z", "label", "a", "n"]


def test_dict_keys_may_be_anything():
    table = nnx.Dict({1: param(1), (2, "b"): param(2), "c": param(3)})
    assert sorted(map(str, paths(table))) == ["('c',)", "((2, 'b'),)", "(1,)"]
    assert [float(v.value) for v in nnx.clone(table).values()] == [1, 2, 3]


def test_deleting_an_entry_drops_its_mark():
    table = nnx.Dict(x=nnx.static(1))
    with pytest.raises(StaticDataError, match=r"^Dict\.x is static, but got data: Param"):
        table.x = nnx.static(param())
    del table["x"]
    table.x = param(2)
    assert leaves(table) == [2]


def test_dict_prints_its_entries():
    assert repr(nnx.Dict({"b": 1}, a=2)) == "Dict({\n  'b': 1,\n  'a': 2\n})"


# ---- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda p: nnx.List([p]), lambda p: nnx.Dict(x=p)])
def test_containers_are_objects_that_can_be_shared(make):
    shared = make(param())
    bag = Bag(a=shared, b=[shared])
    copied = nnx.clone(bag)
    assert copied.a is copied.b[0] is not shared
    with pytest.raises(ValueError, match=r"at \.b\[0\] was already seen at \.a\."):
        nnx.split(bag, graph=False)


@pytest.mark.parametrize("make", [lambda p: nnx.List([p, 1]), lambda p: nnx.Dict(x=p, n=1)])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_containers_can_be_copied_and_pickled(make, duplicate):
    container = make(param(2))
    copied = duplicate(container)
    assert type(copied) is type(container)
    assert leaves(copied) == [2]
    assert nnx.graphdef(copied) == nnx.graphdef(container)
    copied.clear()
    assert leaves(container) == [2]


@pytest.mark.parametrize("make", [nnx.List, nnx.Dict])
def test_containers_are_modules_and_hashable_by_identity(make):
    container = make()
    assert isinstance(container, nnx.Module)
    assert len({container, make()}) == 2
    assert jax.jit(lambda x, c: x + len(c), static_argnums=1)(1, container) == 1


def test_containers_nest():
    bag = Bag(d=nnx.Dict(layers=nnx.List([nnx.Dict(w=param(4), n=1)])))
    assert paths(bag) == [("d", "layers", 0, "w")]
    assert jax.tree_util.keystr(jax.tree.leaves_with_path(bag)[0][0]) == ".d.layers[0].w.value"
    assert nnx.clone(bag).d.layers[0].n == 1
