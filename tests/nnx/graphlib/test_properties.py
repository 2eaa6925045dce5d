"""Laws of split, merge, clone, update and the pytree, over random object graphs."""

import copy

import cloudpickle
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from linnet import nnx
from linnet.errors import path_string
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.attributes import data_children
from tests.nnx.object_graphs import (
    ARRAYS,
    KINDS,
    STATICS,
    Count,
    Leaf,
    Node,
    at,
    graphs,
    portrait,
    reachable,
    refill,
    variables,
)


def ids(things):
    return {id(thing) for thing in things}


def objects(root):
    return [x for x in reachable(root) if isinstance(x, Node | Leaf)]


@given(graphs())
def test_merge_gives_an_isomorphic_graph_with_the_same_variables(graph):
    want = portrait(graph)
    merged = nnx.merge(*nnx.split(graph))
    assert portrait(merged) == want
    assert ids(variables(merged)) == ids(variables(graph))
    assert not ids(objects(merged)) & ids(objects(graph))
    assert portrait(graph) == want


COPIES = {
    "clone": nnx.clone,
    "clone with arrays": lambda graph: nnx.clone(graph, arrays=True),
    "merge": lambda graph: nnx.merge(*nnx.split(graph), copy=True),
    "map": lambda graph: nnx.map(lambda path, x: copy.copy(x), graph),
    "unflatten": lambda graph: nnx.unflatten(*nnx.flatten(graph), copy_variables=True),
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda graph: cloudpickle.loads(cloudpickle.dumps(graph)),
}


@given(graphs())
def test_copies_are_isomorphic_and_have_nothing_in_common(graph):
    want, originals = portrait(graph), ids(reachable(graph))
    for name, duplicate in COPIES.items():
        copied = duplicate(graph)
        assert portrait(copied) == want, name
        assert not ids(reachable(copied)) & originals, name


@given(graphs())
def test_recursive_map_with_the_identity_rebuilds_the_graph_around_its_variables(graph):
    rebuilt = nnx.recursive_map(lambda path, x: x, graph)
    assert portrait(rebuilt) == portrait(graph)
    assert ids(variables(rebuilt)) == ids(variables(graph))


@given(graphs())
def test_isomorphic_graphs_have_equal_graphdefs_whatever_their_values(graph):
    graphdef, copied = nnx.graphdef(graph), nnx.clone(graph)
    refill(copied)
    for other in (graph, copied, nnx.merge(*nnx.split(graph)), copy.deepcopy(graph)):
        assert nnx.graphdef(other) == graphdef
        assert hash(nnx.graphdef(other)) == hash(graphdef)


def change_static(draw, obj):
    obj.a = draw(STATICS)


def change_kind(draw, obj):
    obj.b = draw(KINDS)(draw(ARRAYS))


def remove(draw, obj):
    if vars(obj):
        delattr(obj, draw(st.sampled_from(sorted(vars(obj)))))


def unshare(draw, obj):
    for name, value in vars(obj).items():
        if isinstance(value, nnx.Variable):
            setattr(obj, name, copy.copy(value))
            return


def share(draw, obj):
    obj.c = obj.d = nnx.Param(jnp.ones(2))


def grow_a_container(draw, obj):
    for value in vars(obj).values():
        if type(value) in (list, dict):
            value.insert(0, 1) if type(value) is list else value.setdefault("new", 1)
            return


def change_metadata(draw, obj):
    for value in vars(obj).values():
        if isinstance(value, nnx.Variable):
            value.set_metadata(role=draw(st.sampled_from([1, True, 1.0])))


CHANGES = [change_static, change_kind, remove, unshare, share, grow_a_container, change_metadata]


@given(graphs(marks=False), st.data())
def test_graphdefs_are_equal_exactly_when_structures_are(graph, data):
    changed = nnx.clone(graph)
    target = data.draw(st.integers(0, len(objects(changed)) - 1))
    data.draw(st.sampled_from(CHANGES))(data.draw, objects(changed)[target])
    same = portrait(changed, values=False) == portrait(graph, values=False)
    assert (nnx.graphdef(changed) == nnx.graphdef(graph)) is same


@given(graphs())
def test_update_with_the_values_of_a_copy_makes_equal_and_keeps_every_object(graph):
    copied = nnx.clone(graph)
    refill(copied)
    before = [id(x) for x in reachable(graph)]
    nnx.update(graph, nnx.state(copied))
    assert portrait(graph) == portrait(copied)
    refill(copied)
    nnx.update(graph, nnx.to_pure_dict(nnx.state(copied)))
    assert portrait(graph) == portrait(copied)
    assert [id(x) for x in reachable(graph)] == before


@given(graphs())
def test_every_variable_has_one_path_that_leads_to_it(graph):
    flat = nnx.to_flat_state(nnx.state(graph))
    assert len(set(flat.paths)) == len(flat)
    assert all(at(graph, path) is leaf for path, leaf in flat)
    found = [id(leaf) for leaf in flat.leaves if isinstance(leaf, nnx.Variable)]
    assert sorted(found) == sorted(ids(variables(graph)))


FILTERS = [nnx.Param, nnx.BatchStat, Count, "noise", nnx.PathContains("a"), nnx.Not(nnx.Param)]


@given(graphs(), st.lists(st.sampled_from(FILTERS), max_size=3), st.randoms())
def test_filters_divide_the_leaves_and_states_merge_in_any_order(graph, filters, random):
    graphdef, *states = nnx.split(graph, *filters, ...)
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    paths = [path for part in flat for path in part]
    assert sorted(map(str, paths)) == sorted(map(str, nnx.to_flat_state(nnx.state(graph)).paths))
    for position, part in enumerate(flat[:-1]):
        earlier = nnx.Any(*filters[:position])
        wanted = nnx.All(filters[position], nnx.Not(earlier))
        assert all(wanted(path, leaf) for path, leaf in part.items())
    random.shuffle(states)
    assert portrait(nnx.merge(graphdef, *states)) == portrait(graph)


@given(graphs(), st.sampled_from(FILTERS))
def test_pop_takes_what_state_shows_and_leaves_the_rest(graph, which):
    wanted = dict(nnx.to_flat_state(nnx.state(graph, which)))
    before, everything = portrait(graph), ids(variables(graph))
    try:
        popped = nnx.pop(graph, which)
    except ValueError as error:
        assert "nnx.pop cannot remove the " in str(error)
        assert portrait(graph) == before
        return
    assert {path: id(x) for path, x in nnx.to_flat_state(popped)} == {
        path: id(x) for path, x in wanted.items()
    }
    assert ids(variables(graph)) == everything - ids(wanted.values())


@given(graphs(shared=False, methods=False))
def test_jax_puts_a_tree_back_together(tree):
    leaves, structure = jax.tree.flatten(tree)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert portrait(rebuilt) == portrait(tree)
    assert jax.tree.structure(rebuilt) == structure
    assert hash(jax.tree.structure(rebuilt)) == hash(structure)


@given(graphs(shared=False, methods=False, marks=False))
def test_a_tree_and_its_state_have_the_same_leaves(tree):
    state_leaves = jax.tree.leaves(nnx.state(tree))
    leaves = jax.tree.leaves(tree)
    assert sorted(map(id, leaves)) == sorted(map(id, state_leaves))


@given(graphs(shared=False, methods=False))
def test_copies_of_a_tree_have_its_structure_in_either_mode(tree):
    copied = nnx.clone(tree, graph=False)
    for graph in (True, False):
        assert nnx.graphdef(copied, graph=graph) == nnx.graphdef(tree, graph=graph)
    assert jax.tree.structure(copied) == jax.tree.structure(tree)


@given(graphs(marks=False), graphs(marks=False))
def test_two_graphs_have_equal_graphdefs_when_their_structures_are(first, second):
    same = portrait(first, values=False) == portrait(second, values=False)
    assert (nnx.graphdef(first) == nnx.graphdef(second)) is same


@given(graphs(shared=False, methods=False), st.sampled_from([None, (2, 3), "axis", 0]))
def test_a_tree_may_hold_anything_in_place_of_arrays_and_go_back(tree, stand_in):
    leaves, structure = jax.tree.flatten(tree)
    replaced = jax.tree.unflatten(structure, [stand_in] * len(leaves))
    back = jax.tree.map(lambda _, x: x, replaced, tree, is_leaf=lambda x: x is stand_in)
    assert portrait(back) == portrait(tree)
    assert jax.tree.structure(back) == structure


@given(graphs())
def test_tree_mode_refuses_exactly_the_graphs_that_share(graph):
    groups = nnx.find_duplicates(graph)
    if not groups:
        merged = nnx.merge(*nnx.split(graph, graph=False))
        assert ids(variables(merged)) == ids(variables(graph))
        return
    with pytest.raises(ValueError, match="was already seen at") as error:
        nnx.split(graph, graph=False)
    names = [[path_string(path) or "the root" for path in paths] for paths in groups]
    pairs = [(second, first) for first, second, *_ in names]
    assert any(f"at {b} was already seen at {a}." in str(error.value) for b, a in pairs)


@given(graphs())
def test_find_duplicates_lists_places_of_one_thing(graph):
    for paths in nnx.find_duplicates(graph):
        assert len(set(paths)) == len(paths) > 1
        assert len({id(at(graph, path)) for path in paths}) == 1


@given(graphs())
def test_iter_graph_meets_everything_once(graph):
    kinds = nnx.Variable | nnx.Pytree
    seen = [(path, x) for path, x in nnx.iter_graph(graph) if isinstance(x, kinds)]
    assert all(at(graph, path) is x for path, x in seen)
    wanted = [id(x) for x in reachable(graph) if isinstance(x, kinds)]
    assert sorted(id(x) for _, x in seen) == sorted(wanted)


@given(graphs(marks=False))  # a number that is marked as data is a leaf of the walk alone
def test_the_walk_meets_leaves_in_the_order_of_the_other_traversal(graph):
    walk = Walk(True, "test")
    walk.flatten(graph)
    places = kinds.places(graph, data_children)
    leaves = [x for _, x in places if kinds.kind_of(x) in (kinds.VARIABLE, kinds.ARRAY)]
    is_first = [all(x is not y for y in leaves[:n]) for n, x in enumerate(leaves)]
    is_array = [kinds.kind_of(x) == kinds.ARRAY for x in leaves]
    expected = [
        x for x, first, array in zip(leaves, is_first, is_array, strict=True) if first or array
    ]
    assert list(map(id, walk.leaves)) == list(map(id, expected))


@given(graphs(marks=False), st.data())
def test_an_update_context_changes_the_original_as_the_copy_was_changed(graph, data):
    with nnx.update_context("law"):
        with nnx.split_context("law") as ctx:
            outside = ctx.split(graph)
        with nnx.merge_context("law", inner=True) as ctx:
            inside = ctx.merge(*outside)
        refill(inside)
        for obj in objects(inside):
            data.draw(st.sampled_from(CHANGES))(data.draw, obj)
        want = portrait(inside)
        with nnx.split_context("law") as ctx:
            changed = ctx.split(inside)
        with nnx.merge_context("law", inner=False) as ctx:
            merged = ctx.merge(*changed)
    assert merged is graph
    assert portrait(graph) == want
