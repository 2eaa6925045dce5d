"""iter_graph, iter_children, find_duplicates, map and recursive_map."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import FilterError
from tests.models import Bag, Pair, param


def values(tree):
    return [float(x) for x in jax.tree.leaves(tree)]


@pytest.fixture
def model():
    return Bag(
        w=param(1.0), layers=nnx.List([Bag(v=param(2.0)), "label"]), raw=jnp.float32(3.0), size=4
    )


# ---- iter_graph and iter_children ---------------------------------------------------------------


def test_iter_graph_visits_what_is_inside_before_what_it_is_in(model):
    seen = list(nnx.iter_graph(model))
    assert [path for path, _ in seen] == [
        ("layers", 0, "v"),
        ("layers", 0),
        ("layers", 1),
        ("layers",),
        ("raw",),
        ("size",),
        ("w",),
        (),
    ]
    found = dict(seen)
    assert found[()] is model
    assert found[("layers", 0, "v")] is model.layers[0].v
    assert (found[("size",)], found[("layers", 1)]) == (4, "label")


def test_iter_graph_visits_shared_things_and_cycles_once():
    shared, plain = param(), [param()]
    bag = Bag(a=shared, b=[shared], c=plain, d=plain)
    bag.me = bag
    visited = [path for path, _ in nnx.iter_graph(bag)]
    assert visited == [("a",), ("b",), ("c", 0), ("c",), ()]


def test_iter_graph_finds_an_object_that_only_a_method_leads_to():
    owner = Bag(w=param())
    bag = Bag(f=owner.method)
    bag.own = bag.method
    found = dict(nnx.iter_graph(bag, graph=False))
    assert list(found) == [("f", "__self__", "w"), ("f", "__self__"), ("f",), ("own",), ()]
    assert found[("f", "__self__")] is owner


@pytest.mark.parametrize("root", [[1, {"a": param()}], (param(),), param(), 3])
def test_iter_graph_takes_anything(root):
    assert list(nnx.iter_graph(root))[-1] == ((), root)


def test_iter_children_gives_objects_and_variables_and_does_not_look_into_plain_containers(model):
    model.stack, model.numbers, model.again = [param()], [1, 2], model.w
    model.objects, model.empty = nnx.Dict(a=param()), nnx.List()
    for graph in (True, False):
        children = dict(nnx.iter_children(model, graph=graph))
        assert list(children) == ["again", "empty", "layers", "objects", "w"]
        assert children["again"] is children["w"] is model.w
    assert [key for key, _ in nnx.iter_children([param(), [param()], 3, model])] == [0, 3]


# ---- find_duplicates ----------------------------------------------------------------------------


def test_find_duplicates_lists_the_places_of_each_shared_thing():
    p, inner = param(), Bag(w=param())
    tree = {"a": p, "b": [p, inner], "c": Bag(x=inner, y=p)}
    assert nnx.find_duplicates(tree) == [
        [("a",), ("b", 0), ("c", "y")],
        [("b", 1), ("c", "x")],
    ]
    assert nnx.find_duplicates(tree, only=nnx.Param) == [[("a",), ("b", 0), ("c", "y")]]
    assert nnx.find_duplicates(tree, only=nnx.PathContains("b")) == [[("b", 1), ("c", "x")]]


def test_find_duplicates_enters_a_shared_object_once():
    p = param()
    inner = Bag(x=p, y=p)
    assert nnx.find_duplicates({"a": inner, "b": inner}) == [
        [("a",), ("b",)],
        [("a", "x"), ("a", "y")],
    ]


def test_find_duplicates_sees_variables_in_a_shared_list_and_the_end_of_a_cycle():
    plain = [param()]
    bag = Bag(a=plain, b=plain)
    assert nnx.find_duplicates(bag) == [[("a", 0), ("b", 0)]]
    bag.b, bag.me = [], bag
    assert nnx.find_duplicates(bag) == [[(), ("me",)]]


def test_a_stored_method_is_not_a_second_place_of_its_owner():
    bag = Bag(part=Bag(w=param()))
    bag.own, bag.a_method = bag.method, bag.part.method
    assert nnx.find_duplicates(bag) == []
    assert nnx.split(bag, graph=False)


def test_find_duplicates_refuses_what_is_no_filter():
    with pytest.raises(FilterError, match="Not a filter: 3"):
        nnx.find_duplicates(Bag(), only=3)


# ---- map ----------------------------------------------------------------------------------------


def test_map_rebuilds_an_object_from_its_leaves(model):
    seen = []

    def f(path, x):
        seen.append(path)
        return x.value * 10 if isinstance(x, nnx.Variable) else x

    mapped = nnx.map(f, model)
    assert seen == [("layers", 0, "v"), ("raw",), ("w",)]
    assert values(mapped) == [20, 3, 10]
    assert values(model) == [2, 3, 1]
    assert isinstance(mapped.w, nnx.Param)
    assert (mapped.layers[1], mapped.size) == ("label", 4)


def test_map_keeps_variables_that_are_returned_and_metadata_of_those_that_are_not():
    bag = Bag(a=nnx.Param(1.0, role="gate"), b=param())
    mapped = nnx.map(lambda path, x: x if path == ("b",) else 5.0, bag)
    assert mapped.b is bag.b
    assert (mapped.a.value, mapped.a.role) == (5.0, "gate")
    plain = nnx.map(lambda path, x: 5.0, bag, recreate_variables=False)
    assert (plain.a, plain.b) == (5.0, 5.0)


def test_map_keeps_sharing_and_takes_states_and_lone_variables():
    shared = param(2.0)
    mapped = nnx.map(lambda path, x: x.value + 1, {"a": shared, "b": shared})
    assert mapped["a"] is mapped["b"]
    assert mapped["a"].value == 3
    assert nnx.map(lambda path, x: -x.value, shared).value == -2
    state = nnx.map(lambda path, x: x.value * 2, nnx.State({"a": {"b": param(3.0)}}))
    assert state.a.b.value == 6


# ---- recursive_map ------------------------------------------------------------------------------


def test_recursive_map_goes_from_the_leaves_up(model):
    seen = []
    nnx.recursive_map(lambda path, x: seen.append((path, type(x))) or x, model)
    assert seen == [
        (("layers", 0, "v"), nnx.Param),
        (("layers", 0), Bag),
        (("layers", 1), str),
        (("layers",), nnx.List),
        (("raw",), type(model.raw)),
        (("size",), int),
        (("w",), nnx.Param),
        ((), Bag),
    ]


def test_recursive_map_replaces_pieces_and_hands_rebuilt_ones_up(model):
    def f(path, x):
        if isinstance(x, nnx.Variable):
            return nnx.Param(x.value * 2)
        if isinstance(x, Bag):
            x.size = 9
        return x

    mapped = nnx.recursive_map(f, model)
    assert mapped is not model
    assert values(mapped) == [4, 3, 2]
    assert (mapped.size, mapped.layers[0].size) == (9, 9)
    assert (model.size, values(model), hasattr(model.layers[0], "size")) == (4, [2, 3, 1], False)


def test_recursive_map_can_replace_modules_and_static_values():
    class Double(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

    def f(path, x):
        return Double(x) if isinstance(x, Bag) and path == ("a",) else x + 1 if x == 1 else x

    mapped = nnx.recursive_map(f, Bag(a=Bag(n=1), xs=[1, (1, 2)], t=Pair(1, 0)))
    assert isinstance(mapped.a, Double)
    assert mapped.a.inner.n == 2
    assert (mapped.xs, mapped.t) == ([2, (2, 2)], Pair(2, 0))


def test_recursive_map_keeps_sharing_and_cycles_and_maps_each_thing_once():
    shared, calls = param(), []
    bag = Bag(a=shared, b=[shared])
    bag.me = bag

    def f(path, x):
        calls.append(path)
        return nnx.Param(x.value + 1) if isinstance(x, nnx.Variable) else x

    mapped = nnx.recursive_map(f, bag)
    assert calls == [("a",), ("b",), ()]
    assert mapped.a is mapped.b[0]
    assert mapped.me is mapped is not bag
    assert mapped.a.value == 2


def test_in_a_tree_a_list_in_two_places_becomes_two():
    items = [param()]
    same = [items]
    calls = []
    for graph in (True, False):
        mapped = nnx.recursive_map(
            lambda path, x: calls.append(path) or x, same + same, graph=graph
        )
        assert (mapped[0] is mapped[1]) is graph
        items[0] = jnp.ones(2)
    assert calls == [(0, 0), (0,), (), (0, 0), (0,), (1, 0), (1,), ()]


def test_recursive_map_goes_deeper_than_python_calls_itself():
    deep = [param()]
    for _ in range(5000):
        deep = [deep]
    assert len(list(nnx.iter_graph(nnx.recursive_map(lambda path, x: x, deep)))) == 5002


def test_children_of_a_pytree_that_share_a_key():
    @jax.tree_util.register_pytree_with_keys_class
    class Alike:
        def __init__(self, *items):
            self.items = items

        def tree_flatten_with_keys(self):
            return [(jax.tree_util.GetAttrKey("same"), item) for item in self.items], None

        @classmethod
        def tree_unflatten(cls, _, items):
            return cls(*items)

    def values(alike):
        return [float(item.value) for item in alike.items]

    alike = Alike(param(1.0), param(2.0))
    assert values(nnx.recursive_map(lambda path, value: value, alike)) == [1.0, 2.0]
    graphdef, state = nnx.split(alike)
    assert [path for path, _ in nnx.to_flat_state(state)] == [(0,), (1,)]
    assert values(nnx.merge(graphdef, state)) == [1.0, 2.0]

    @nnx.jit
    def double_the_second(holder):
        holder.alike.items[1][...] *= 2

    holder = Bag(alike=nnx.data(alike))
    for _ in range(3):
        double_the_second(holder)
    assert values(holder.alike) == [1.0, 16.0]


def test_recursive_map_over_plain_containers_keeps_their_types_and_order():
    tree = {"z": [1, 2], "a": (3,), "p": Pair(4, nnx.State({"s": 5}))}
    mapped = nnx.recursive_map(lambda path, x: x * 10 if isinstance(x, int) else x, tree)
    assert mapped == {"z": [10, 20], "a": (30,), "p": Pair(40, nnx.State({"s": 50}))}
    assert list(mapped) == ["z", "a", "p"]
