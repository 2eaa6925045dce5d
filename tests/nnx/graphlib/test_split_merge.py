"""split, merge, state, clone, unpack, flatten and unflatten; sharing, cycles and tree mode."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import (
    FilterError,
    SharedReferenceError,
    StateMismatchError,
    TraceContextError,
)
from tests.models import Bag, Pair, param


def paths(state):
    return list(nnx.to_flat_state(state).paths)


@pytest.fixture
def model():
    return Bag(
        w=param(1.0, 2),
        mean=nnx.BatchStat(jnp.zeros(2)),
        layers=[Bag(w=param(2.0)), "label", (param(3.0), Pair(param(4.0), 5))],
        raw=jnp.ones(3),
        table={"b": np.zeros(1), "a": param(5.0)},
        size=2,
    )


ALL = [
    ("layers", 0, "w"),
    ("layers", 2, 0),
    ("layers", 2, 1, "left"),
    ("mean",),
    ("raw",),
    ("table", "a"),
    ("table", "b"),
    ("w",),
]


# ---- split and merge ----------------------------------------------------------------------------


def test_split_gives_structure_and_the_live_variables(model):
    graphdef, state = nnx.split(model)
    assert isinstance(graphdef, nnx.GraphDef)
    assert isinstance(state, nnx.State)
    assert paths(state) == ALL
    assert state.w is model.w
    assert state.raw is model.raw
    state.w.value = jnp.zeros(2)
    assert model.w.value.tolist() == [0, 0]


def test_merge_uses_the_variables_of_the_state(model):
    merged = nnx.merge(*nnx.split(model))
    assert merged is not model
    assert merged.w is model.w
    assert merged.layers is not model.layers
    assert merged.layers[1:2] == ["label"]
    assert merged.layers[2][1] == Pair(model.layers[2][1].left, 5)
    assert (type(merged.layers[2][1]), merged.size) == (Pair, 2)
    assert list(merged.table) == ["b", "a"]


def test_merge_can_copy_variables(model):
    merged = nnx.merge(*nnx.split(model), copy=True)
    assert merged.w is not model.w
    assert merged.w.value is model.w.value
    merged.w.value = jnp.zeros(2)
    assert model.w.value.tolist() == [1, 1]


def test_merge_does_not_run_constructors():
    class Loud(nnx.Module):
        def __init__(self):
            self.w = param()
            Loud.made = getattr(Loud, "made", 0) + 1

    nnx.merge(*nnx.split(Loud()))
    assert Loud.made == 1


def test_merge_makes_variables_from_plain_values(model):
    graphdef, state = nnx.split(model)
    merged = nnx.merge(graphdef, nnx.to_pure_dict(state))
    assert isinstance(merged.mean, nnx.BatchStat)
    assert merged.mean is not model.mean
    assert merged.mean.value is model.mean.value
    graphdef, state = nnx.split(Bag(w=nnx.Param(1.0, role="gate")))
    assert nnx.merge(graphdef, {"w": 2.0}).w.role == "gate"
    assert nnx.merge(graphdef, {"w": 2.0}, recreate_variables=False).w == 2.0


def test_merged_values_may_have_any_shape():
    graphdef = nnx.graphdef(Bag(w=param(1.0, 2)))
    merged = nnx.merge(graphdef, {"w": jnp.arange(12.0).reshape(3, 4)})
    assert merged.w.shape == (3, 4)
    assert merged.w[...].tolist() == jnp.arange(12.0).reshape(3, 4).tolist()


def test_states_of_several_filters_are_merged_in_any_order(model):
    graphdef, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    assert paths(stats) == [("mean",)]
    assert paths(rest) == [("raw",), ("table", "b")]
    assert paths(params) == [path for path in ALL if path not in paths(stats) + paths(rest)]
    merged = nnx.merge(graphdef, rest, params, stats)
    assert nnx.graphdef(merged) == graphdef
    assert merged.mean is model.mean


def test_split_refuses_filters_that_leave_something_over(model):
    with pytest.raises(FilterError) as error:
        nnx.split(model, nnx.Param)
    listed = "  - .mean\n  - .raw\n  - .table.b\n"
    assert listed in str(error.value)


@pytest.mark.parametrize(
    ("change", "expected", "lines"),
    [
        (lambda s: s.pop("w"), (2, 1), ["Missing:\n  - .w\n"]),
        (lambda s: s.update(x=1), (2, 3), ["Not in the graphdef:\n  - .x\n"]),
        (lambda s: s["layers"].clear(), (2, 1), ["Missing:\n  - .layers[0]\n"]),
        (
            lambda s: (s.pop("w"), s["layers"].update({3: 1, 4: {"q": 2}})),
            (2, 3),
            ["Missing:\n  - .w\n", "Not in the graphdef:\n  - .layers[3]\n  - .layers[4].q\n"],
        ),
    ],
)
def test_merge_lists_every_missing_and_every_extra_path(change, expected, lines):
    graphdef, state = nnx.split(Bag(w=param(), layers=[param()]))
    pure = nnx.to_pure_dict(state)
    change(pure)
    with pytest.raises(StateMismatchError) as error:
        nnx.merge(graphdef, pure)
    counts = f"expected {expected[0]} leaves, but got {expected[1]}: the state does not fit"
    assert f"Incorrect number of leaves, {counts} the graphdef." in str(error.value)
    assert all(line in str(error.value) for line in lines)
    assert "Fix: merge with the states that nnx.split gave, all of them" in str(error.value)


def test_merge_takes_a_graphdef():
    with pytest.raises(
        TypeError, match=r"^merge takes a GraphDef first, but got State\.\nFix: gra"
    ):
        nnx.merge(nnx.State({}))


@pytest.mark.parametrize(
    "root",
    [
        param,
        lambda: [param(), Bag(w=param())],
        lambda: {"a": param(), "b": (1, param())},
        lambda: Pair(param(), "x"),
        lambda: nnx.State({"a": {"b": param()}}),
        lambda: jnp.ones(2),
        lambda: (),
        lambda: 3,
        lambda: None,
    ],
)
def test_anything_can_be_the_root(root):
    root = root()
    merged = nnx.merge(*nnx.split(root))
    assert type(merged) is type(root)
    assert jax.tree.structure(merged) == jax.tree.structure(root)
    assert all(a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(root), strict=True))


@pytest.mark.parametrize("filters", [(nnx.Param, ...), (nnx.BatchStat, ...)])
def test_a_lone_variable_can_be_divided_by_filters(filters):
    variable = param()
    assert nnx.merge(*nnx.split(variable, *filters)) is variable


def test_split_and_merge_inside_jit_and_grad(model):
    @jax.jit
    def loss_and_grads(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, rest):
            merged = nnx.merge(graphdef, params, nnx.clone(rest))
            merged.mean[...] += 1
            return (merged.w[...] ** 2).sum(), nnx.state(merged, nnx.BatchStat)

        return jax.grad(loss, has_aux=True)(params, rest)

    grads, stats = loss_and_grads(model)
    assert grads.w.value.tolist() == [2, 2]
    nnx.update(model, stats)
    assert model.mean.value.tolist() == [1, 1]


def test_leaving_out_the_clone_raises_as_the_basics_page_says(model):
    @jax.jit
    def step(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, rest):
            merged = nnx.merge(graphdef, params, rest)
            merged.mean[...] += 1
            return merged.w[...].sum()

        return jax.grad(loss)(params, rest)

    text = r"Cannot mutate BatchStat at .*mean from a different trace(.|\n)*nnx\.clone\(\.\.\.\)"
    with pytest.raises(TraceContextError, match=text):
        step(model)


# ---- state, graphdef, variables -----------------------------------------------------------------


def test_state_selects_and_divides(model):
    assert paths(nnx.state(model)) == ALL
    assert paths(nnx.state(model, nnx.BatchStat)) == [("mean",)]
    stats, rest = nnx.state(model, nnx.BatchStat, nnx.PathContains("raw"))
    assert (paths(stats), paths(rest)) == ([("mean",)], [("raw",)])
    assert nnx.variables is nnx.state
    assert nnx.graphdef(model) == nnx.split(model)[0]


# ---- clone --------------------------------------------------------------------------------------


def test_clone_has_variables_of_its_own_and_shares_arrays(model):
    copied = nnx.clone(model)
    assert copied.w is not model.w
    assert copied.w.value is model.w.value
    assert copied.raw is model.raw


@pytest.mark.parametrize(
    "copied",
    [
        nnx.clone,
        lambda v: v.copy(),
        copy.copy,
        copy.deepcopy,
        lambda v: nnx.merge(*nnx.split(v), copy=True),
        lambda v: updated(nnx.Variable({"k": 0.0}), v),
    ],
)
def test_a_copy_of_a_variable_has_containers_of_its_own(copied):
    original = nnx.Variable({"k": 1.0})
    other = copied(original)
    other.value["k"] = 2.0
    assert (original.value["k"], other.value["k"]) == (1.0, 2.0)


def updated(variable, other):
    nnx.update(variable, nnx.state(other))
    return variable


def test_clone_can_share_variables(model):
    copied = nnx.clone(model, variables=False)
    assert copied is not model
    assert copied.layers[2][0] is model.layers[2][0]


def test_clone_can_copy_arrays_for_donation(model):
    model.layers.append(nnx.List([param(6.0)]))
    model.layers[-1].note = param(7.0)
    copied = nnx.clone(model, arrays=True)
    pairs = list(zip(jax.tree.leaves(copied), jax.tree.leaves(model), strict=True))
    assert all(a is not b for a, b in pairs)
    assert all(np.array_equal(a, b) for a, b in pairs)
    jax.jit(lambda m: jax.tree.map(jnp.negative, m), donate_argnums=0)(copied)
    assert model.w.value.tolist() == [1, 1]


def test_clone_refreshes_the_trace_of_a_state():
    state = nnx.State({"n": nnx.Variable(jnp.array(1.0))})

    @jax.jit
    def f():
        copied = nnx.clone(state)
        copied.n[...] += 1
        return copied.n[...]

    assert (f(), state.n[...]) == (2, 1)


# ---- sharing ------------------------------------------------------------------------------------


def test_shared_things_and_cycles_are_one_again():
    shared, inner, plain = param(), Bag(w=param()), [param()]
    root = Bag(a=shared, b=[shared, inner], c={"x": inner, "p": plain}, p=plain)
    root.me, inner.parent = root, root
    merged = nnx.merge(*nnx.split(root))
    assert merged.a is merged.b[0] is shared
    assert merged.b[1] is merged.c["x"] is not inner
    assert merged.c["p"] is merged.p is not plain
    assert merged.me is merged is merged.b[1].parent
    assert paths(nnx.state(root)) == [("a",), ("b", 1, "w"), ("c", "p", 0)]


def test_a_list_that_leads_back_to_a_dict_around_it_is_the_same_in_a_copy():
    table = {"w": param()}
    root = Bag(table=table)
    table["inner"] = Bag(items=[0, table])  # while it is built, the list holds an empty dict
    assert nnx.graphdef(nnx.clone(root)) == nnx.graphdef(root)
    assert nnx.graphdef(nnx.jit(lambda root: root)(root)) == nnx.graphdef(root)


def test_things_shared_between_several_roots_are_one_again():
    shared = param()
    first, second = nnx.clone((Bag(w=shared), {"w": [shared]}))
    assert first.w is second["w"][0]


def make_shared(kind):
    shared = param() if kind == "Variable" else Bag(w=param())
    return Bag(first=shared, deep=[1, {"second": shared}])


TREE_APIS = {
    "split": lambda m: nnx.split(m, graph=False),
    "state": lambda m: nnx.state(m, graph=False),
    "graphdef": lambda m: nnx.graphdef(m, graph=False),
    "clone": lambda m: nnx.clone(m, graph=False),
    "iter_graph": lambda m: list(nnx.iter_graph(m, graph=False)),
    "recursive_map": lambda m: nnx.recursive_map(lambda p, x: x, m, graph=False),
    "map": lambda m: nnx.map(lambda p, x: x, m, graph=False),
    "unpack": lambda m: nnx.unpack(m, graph=False),
}


@pytest.mark.parametrize("api", TREE_APIS)
@pytest.mark.parametrize("kind", ["Variable", "Bag"])
def test_tree_mode_refuses_sharing_and_names_both_paths(api, kind):
    model = make_shared(kind)
    with pytest.raises(SharedReferenceError) as error:
        TREE_APIS[api](model)
    first, second = sorted([".deep[1].second", ".first"])
    assert str(error.value).startswith(f"{kind} at {second} was already seen at {first}. ")
    assert f"does not support shared {kind} references" in str(error.value)
    assert "graph=True" in str(error.value)


def test_tree_mode_by_switch():
    with nnx.set_graph_mode(False), pytest.raises(ValueError, match="was already seen"):
        nnx.split(make_shared("Variable"))
    assert nnx.split(make_shared("Variable"), graph=True)
    with nnx.set_graph_mode(False):
        assert nnx.split(make_shared("Variable"), graph=True)


def test_tree_mode_refuses_cycles():
    root = Bag(part=Bag())
    root.part.parent = root
    text = r"^Bag at \.part\.parent was already seen at the root\. "
    with pytest.raises(SharedReferenceError, match=text):
        nnx.split(root, graph=False)


def test_tree_mode_stops_at_the_first_sharing_of_many():
    deep = param()
    for _ in range(40):
        deep = Bag(a=deep, b=deep)
    with pytest.raises(SharedReferenceError, match=r"was already seen at"):
        nnx.split(deep, graph=False)
    assert len(nnx.find_duplicates(deep)) == 40


def test_trees_are_the_same_in_both_modes(model):
    assert nnx.graphdef(model, graph=False) == nnx.graphdef(model, graph=True)
    assert nnx.merge(*nnx.split(model, graph=False)).w is model.w


# ---- GraphState ---------------------------------------------------------------------------------


def test_unpack_carries_the_structure_along(model):
    packed = nnx.unpack(model)
    assert isinstance(packed, nnx.GraphState)
    assert packed.w is packed["w"] is model.w
    assert sorted(packed) == ["layers", "mean", "raw", "table", "w"]
    assert nnx.merge(packed).w is model.w
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p))(packed)
    assert nnx.merge(doubled).w.value.tolist() == [2, 2]


def test_parts_of_one_unpack_merge_and_others_do_not(model):
    params, rest = nnx.unpack(model, nnx.Param, ...)
    assert paths(rest) == [("mean",), ("raw",), ("table", "b")]
    assert nnx.merge(rest, params).w is model.w
    assert nnx.merge(params, rest._state).mean is model.mean
    with pytest.raises(
        StateMismatchError, match=r"^merge got GraphStates with different graphdefs"
    ):
        nnx.merge(params, nnx.unpack(Bag(w=param())))


def test_graph_states_are_mutable_mappings():
    packed = nnx.unpack(Bag(w=param(1.0), v=param(2.0)))
    packed["w"], packed.v = param(3.0), param(4.0)
    merged = nnx.merge(packed)
    assert (merged.w.value, merged.v.value) == (3, 4)
    del packed["w"]
    assert len(packed) == 1
    with pytest.raises(AttributeError):
        _ = packed._missing


# ---- flatten and unflatten ----------------------------------------------------------------------


@pytest.mark.parametrize("with_paths", [True, False])
def test_flatten_lists_leaves_in_order_and_unflatten_is_the_way_back(model, with_paths):
    graphdef, flat = nnx.graphlib.flatten(model, with_paths=with_paths)
    if with_paths:
        assert list(flat.paths) == ALL
    leaves = flat.leaves if with_paths else flat
    assert leaves == nnx.state(model).flat_state().leaves
    rebuilt = nnx.graphlib.unflatten(graphdef, flat)
    assert rebuilt.w is model.w
    assert nnx.graphdef(rebuilt) == nnx.graphdef(model)
    assert nnx.unflatten(graphdef, flat, copy_variables=True).w is not model.w


def test_flatten_numbers_several_objects_together():
    shared = param()
    seen = nnx.graphlib.RefIndex()
    first = nnx.flatten({"a": shared}, ref_index=seen)
    second = nnx.flatten({"b": shared, "c": param()}, ref_index=seen)
    assert (len(seen), list(second[1].paths)) == (4, [("c",)])
    built = nnx.graphlib.IndexRef()
    a = nnx.unflatten(*first, index_ref=built)
    b = nnx.unflatten(*second, index_ref=built)
    assert a["a"] is b["b"] is shared
    assert len(built) == 4


# ---- merging a flat list ------------------------------------------------------------------------


def test_merge_takes_a_list_of_leaves_in_the_order_of_the_state(model):
    graphdef, state = nnx.split(model)
    merged = nnx.merge(graphdef, jax.tree.leaves(state))
    assert nnx.graphdef(merged) == graphdef
    assert nnx.compare_states(nnx.state(merged), state) == {}
    assert merged.w is not model.w


def test_merge_takes_a_list_of_variables_as_they_are(model):
    graphdef, state = nnx.split(model)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert nnx.merge(graphdef, variables).w is model.w
    assert nnx.merge(graphdef, variables, copy=True).w is not model.w


def test_a_list_of_leaves_crosses_jit():
    layers = [nnx.Param(jnp.full(1, float(n))) for n in range(12)]  # text would sort 10 before 2
    graphdef, state = nnx.split(layers)
    read = jax.jit(lambda leaves: [v.value for v in nnx.merge(graphdef, leaves)])
    assert [float(x[0]) for x in read(jax.tree.leaves(state))] == list(range(12))


def test_lists_that_do_not_fit():
    graphdef, state = nnx.split({"a": param(1.0), "b": param(2.0)})
    leaves = jax.tree.leaves(state)
    with pytest.raises(StateMismatchError) as caught:
        nnx.merge(graphdef, leaves[1:])
    assert str(caught.value) == (
        "Incorrect number of leaves, expected 2 leaves, but got 1. Expected in this order:\n"
        "  - .a\n  - .b\n"
        "Fix: pass jax.tree.leaves(state), with one leaf for each Variable; where Variables hold "
        "pytrees, pass the state itself."
    )
    with pytest.raises(
        StateMismatchError, match="Only one state can be passed as a list"
    ) as caught:
        nnx.merge(graphdef, leaves[:1], leaves[1:])
    assert "Fix: put all leaves in one list" in str(caught.value)


def test_merge_needs_a_state():
    graphdef, _ = nnx.split({"a": param(1.0)})
    with pytest.raises(
        TypeError, match=r"missing 1 required positional argument: 'state'"
    ) as error:
        nnx.merge(graphdef)
    assert "Fix: nnx.merge(graphdef, state)" in str(error.value)


@pytest.mark.parametrize(
    ("node", "path"),
    [({"a": param(1.0)}, "['a'].value"), (param(1.0), ".value"), (jnp.ones(2), "._state")],
)
def test_paths_of_a_graph_state_are_those_of_the_state(node, path):
    packed = nnx.unpack(node)
    assert [jax.tree_util.keystr(keys) for keys, _ in jax.tree.leaves_with_path(packed)] == [path]
    doubled = jax.tree.map(lambda x: 2 * x, packed)
    assert isinstance(doubled, nnx.GraphState)
    total = sum(float(jnp.sum(x)) for x in jax.tree.leaves(nnx.merge(doubled)))
    assert total == 2 * sum(float(jnp.sum(x)) for x in jax.tree.leaves(node))


def test_a_path_in_two_states_is_an_error():
    graphdef, params, rest = nnx.split(
        Bag(a=param(1.0), b=nnx.BatchStat(jnp.ones(1))), nnx.Param, ...
    )
    other = jax.tree.map(jnp.zeros_like, params)
    for states in ((params, rest, other), (rest, params, params)):
        with pytest.raises(StateMismatchError) as caught:
            nnx.merge(graphdef, *states)
        assert str(caught.value) == (
            "merge got several values for .a.\nFix: pass each part of the state once; "
            "nnx.merge_state(first, second) takes the later one."
        )
    assert nnx.merge(graphdef, rest, nnx.merge_state(params, other)).a.value == 0
