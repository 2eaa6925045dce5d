"""State and FlatState: nested and flat mappings of Variables, divided, merged, made pure."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FilterError, MissingEntryError, StateMismatchError
from tests.models import param


@pytest.fixture
def state():
    return nnx.State(
        {
            "layers": {0: {"w": param(1.0, 2)}, 10: {"w": param(2.0, 2)}, 2: {"w": param(3.0, 2)}},
            "mean": nnx.BatchStat(jnp.zeros(2)),
            "raw": jnp.ones(2),
        }
    )


PATHS = (
    ("layers", 0, "w"),
    ("layers", 2, "w"),
    ("layers", 10, "w"),
    ("mean",),
    ("raw",),
)


def values(state):
    return [np.asarray(x).ravel()[0].item() for x in jax.tree.leaves(state)]


# ---- access -------------------------------------------------------------------------------------


def test_entries_are_items_and_attributes(state):
    assert state["layers"][0]["w"] is state.layers[0].w
    assert isinstance(state.layers, nnx.State)
    assert isinstance(state.layers[0], nnx.State)
    assert (list(state), len(state), "mean" in state) == (["layers", "mean", "raw"], 3, True)


def test_writing_through_a_part_changes_the_whole(state):
    state.layers[0].w = param(9.0)
    state["layers"][0]["extra"] = {"deep": 1}
    state.new = nnx.State({"a": 2})
    assert state["layers"][0]["w"].value == 9
    assert state.layers[0].extra.deep == 1
    assert state.new.a == 2
    del state.layers[0].extra, state["new"]
    assert "extra" not in state.layers[0]
    assert "new" not in state


def test_a_state_copies_the_mappings_it_is_given_but_not_the_leaves():
    inner = {"w": param()}
    state = nnx.State({"a": inner})
    state.a.b = 1
    assert "b" not in inner
    assert state.a.w is inner["w"]
    assert nnx.State([("x", 1)])["x"] == 1


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda s: s.missing, r"No attribute 'missing' in State; it has 'layers', 'mean', 'raw'\."),
        (lambda s: nnx.State({}).missing, r"No attribute 'missing' in State; it has no entries\."),
        (lambda s: delattr(s, "missing"), r"No attribute 'missing' in State\."),
    ],
)
def test_missing_attributes_are_named_with_those_there_are(state, use, text):
    with pytest.raises(AttributeError, match=text):
        use(state)


def test_missing_keys_are_key_errors(state):
    with pytest.raises(KeyError, match="missing"):
        state["missing"]


def test_missing_keys_are_named_with_those_there_are():
    layers = nnx.state(nnx.List([nnx.Param(1.0) for _ in range(12)]))
    with pytest.raises(MissingEntryError) as caught:
        layers["3"]
    assert str(caught.value) == (
        "No entry '3' in State; it has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more.\n"
        "Fix: the key is the integer 3; nnx.restore_int_paths turns text into integers."
    )
    with pytest.raises(MissingEntryError, match=r"^No entry '12' in State; it has 0, .* 2 more\.$"):
        layers["12"]
    with pytest.raises(KeyError, match=r"^No entry 'a' in State; it has no entries\.$"):
        nnx.State({})["a"]
    assert "3" not in layers
    assert 3 in layers
    assert layers.get("3", "none") == "none"


def test_states_compare_by_content():
    p = param(1.0, 2)
    assert nnx.State({"a": {"b": p}}) == nnx.State({"a": {"b": p}}) == {"a": {"b": p}}
    assert nnx.State({"a": 1}) != nnx.State({"a": 2})
    assert nnx.State({"a": 1}) != 1
    with pytest.raises(TypeError):
        hash(nnx.State({}))


def test_states_print_as_nested_mappings():
    assert repr(nnx.State({"a": {"b": 1}, 0: 2})) == (
        "State({\n  'a': {\n    'b': 1\n  },\n  0: 2\n})"
    )
    assert repr(nnx.to_flat_state({"a": {"b": 1}})) == "FlatState([\n  (('a', 'b'), 1)\n])"


# ---- as a pytree --------------------------------------------------------------------------------


def test_leaves_come_in_the_order_of_keys_whatever_the_order_of_insertion(state):
    assert values(state) == [1, 3, 2, 0, 1]
    shuffled = nnx.State({key: state[key] for key in ("raw", "mean", "layers")})
    assert values(shuffled) == [1, 3, 2, 0, 1]
    assert jax.tree.structure(shuffled) == jax.tree.structure(state)


def test_tree_map_gives_a_state_with_variables_of_the_same_kinds(state):
    doubled = jax.tree.map(lambda x: x * 2, state)
    assert isinstance(doubled, nnx.State)
    assert isinstance(doubled.mean, nnx.BatchStat)
    assert isinstance(doubled.layers[2], nnx.State)
    assert values(doubled) == [2, 6, 4, 0, 2]
    assert values(state) == [1, 3, 2, 0, 1]


def test_states_pass_through_jit_and_grad(state):
    assert values(jax.jit(lambda s: jax.tree.map(jnp.negative, s))(state)) == [-1, -3, -2, 0, -1]
    loss = lambda s: (s.layers[0].w[...] * s.layers[2].w[...]).sum()  # noqa: E731
    grads = jax.grad(loss)(state)
    assert grads.layers[0].w.value.tolist() == [3, 3]
    assert grads.mean.value.tolist() == [0, 0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_independent(state, duplicate):
    copied = duplicate(state)
    copied.mean.value = jnp.ones(2)
    copied.layers[0].w = 0
    assert values(state) == [1, 3, 2, 0, 1]
    assert isinstance(copied, nnx.State)


# ---- flat ---------------------------------------------------------------------------------------


def test_flat_state_lists_paths_in_order(state):
    flat = state.flat_state()
    assert flat.paths == PATHS == nnx.to_flat_state(state).paths
    assert flat.leaves[3] is state.mean
    assert (len(flat), flat[3]) == (5, (("mean",), state.mean))
    assert flat[1:3].paths == PATHS[1:3]
    assert dict(flat)[("raw",)] is state.raw


@pytest.mark.parametrize(
    "back",
    [
        lambda s: nnx.from_flat_state(s.flat_state()),
        lambda s: nnx.State.from_flat_path(dict(s.flat_state())),
        lambda s: s.flat_state().to_nested_state(),
        lambda s: nnx.from_flat_state(reversed(list(s.flat_state()))),
    ],
)
def test_flat_states_go_back_to_nested_ones(state, back):
    nested = back(state)
    assert nested.flat_state().paths == PATHS
    assert nested.layers[10].w is state.layers[10].w


def test_from_flat_state_makes_the_class_asked_for():
    assert nnx.from_flat_state({("a", "b"): 1}, cls=dict) == {"a": {"b": 1}}


def test_merge_state_refuses_entries_below_a_leaf():
    below = nnx.State({"m": {"a": {"b": nnx.Param(2.0)}}})
    with pytest.raises(TypeError, match=r"^\.m\.a is a leaf of one state, and not of a later one"):
        nnx.merge_state(nnx.State({"m": {"a": nnx.Param(1.0)}}), below)
    merged = nnx.merge_state(nnx.State({"a": nnx.Param(1.0)}), {"a": {}})
    assert isinstance(merged["a"], nnx.Param)


def test_a_leaf_takes_the_place_of_an_empty_dict():
    assert nnx.from_flat_state([(("a",), {}), (("a",), 1)], cls=dict) == {"a": 1}


@pytest.mark.parametrize("order", [1, -1])
def test_a_path_below_a_leaf_is_refused(order):
    pairs = [(("a",), 1), (("a", "b"), 2)][::order]
    with pytest.raises(ValueError, match=r"^\.a\.b lies below \.a, which is a leaf .*\nFix: leave"):
        nnx.from_flat_state(pairs)


def test_flat_states_are_pytrees_and_can_be_divided_and_merged(state):
    flat = state.flat_state()
    params, rest = flat.split(nnx.Param, ...)
    assert (params.paths, rest.paths) == (PATHS[:3], PATHS[3:])
    assert flat.filter(nnx.BatchStat).paths == (("mean",),)
    assert [f.paths for f in flat.filter(nnx.BatchStat, nnx.Cache)] == [(("mean",),), ()]
    assert nnx.FlatState.merge(rest, params).paths == PATHS
    assert values(jax.tree.map(lambda x: x + 1, flat)) == [2, 4, 3, 1, 2]
    with pytest.raises(FilterError, match=r"  - \.mean\n  - \.raw\n"):
        flat.split(nnx.Param)


# ---- dividing, merging, mapping -----------------------------------------------------------------


def test_split_state_divides_exhaustively(state):
    params, rest = nnx.split_state(state, nnx.Param, ...)
    assert (params.flat_state().paths, rest.flat_state().paths) == (PATHS[:3], PATHS[3:])
    assert state.split(...).flat_state().paths == PATHS
    with pytest.raises(FilterError, match=r"Non-exhaustive filters.*\n  - \.mean\n  - \.raw\nFix:"):
        state.split(nnx.Param)


def test_filter_state_leaves_out_the_rest(state):
    assert nnx.filter_state(state, nnx.BatchStat).flat_state().paths == (("mean",),)
    first, second = state.filter(nnx.BatchStat, nnx.PathContains(2))
    assert first.flat_state().paths == (("mean",),)
    assert second.flat_state().paths == (("layers", 2, "w"),)


def test_merge_state_merges_deeply_and_later_states_win(state):
    first, second = nnx.State({"a": {"x": 1, "y": 2}}), nnx.State({"a": {"y": 3}, "b": 4})
    assert nnx.merge_state(first, second) == {"a": {"x": 1, "y": 3}, "b": 4}
    assert nnx.State.merge(second, first) == {"a": {"x": 1, "y": 2}, "b": 4}
    assert first | second == {"a": {"x": 1, "y": 3}, "b": 4}
    assert first == {"a": {"x": 1, "y": 2}}
    assert type(nnx.merge_state({"a": 1}, {"b": 2}, cls=dict)) is dict
    parts = nnx.split_state(state, nnx.Param, ...)
    assert nnx.merge_state(*reversed(parts)).flat_state().paths == PATHS


def test_subtraction_leaves_the_paths_the_other_has_not(state):
    rest = state - nnx.State({"layers": {0: {"w": 0}}, "raw": 0})
    assert rest.flat_state().paths == (("layers", 2, "w"), ("layers", 10, "w"), ("mean",))
    assert (nnx.State({"a": 1}) - nnx.State({"a": 2})) == {}


def test_map_state_is_given_paths_and_leaves(state):
    seen = []
    mapped = state.map(lambda path, leaf: seen.append((path, leaf)) or len(path))
    assert seen == list(state.flat_state())
    assert nnx.to_flat_state(mapped).leaves == [3, 3, 3, 1, 1]
    assert nnx.map_state(lambda path, leaf: 0, {"a": {"b": 1}}) == {"a": {"b": 0}}


# ---- pure dicts ---------------------------------------------------------------------------------


def test_to_pure_dict_gives_plain_nested_dicts_of_values(state):
    pure = nnx.to_pure_dict(state)
    assert type(pure) is type(pure["layers"]) is type(pure["layers"][10]) is dict
    assert pure["layers"][2]["w"] is state.layers[2].w.value
    assert pure["raw"] is state.raw
    assert state.to_pure_dict(extract_fn=type)["mean"] is nnx.BatchStat


def test_to_pure_dict_reads_refs():
    state = nnx.State({"w": nnx.Param(jnp.ones(2), ref=True)})
    assert isinstance(nnx.to_pure_dict(state)["w"], jax.Array)


def test_replace_by_pure_dict_takes_values_over_and_keeps_kinds(state):
    mean = state.mean
    state.replace_by_pure_dict({"mean": jnp.full(2, 5.0), "layers": {2: {"w": np.float32([6, 6])}}})
    assert values(state) == [1, 6, 2, 5, 1]
    assert isinstance(state.mean, nnx.BatchStat)
    assert mean.value.tolist() == [0, 0]


def test_replace_by_pure_dict_accepts_keys_that_came_back_as_text(state):
    nnx.replace_by_pure_dict(state, {"layers": {"10": {"w": jnp.full(2, 7.0)}}})
    assert values(state) == [1, 3, 7, 0, 1]


def test_replace_by_pure_dict_works_for_variables_that_hold_a_dict():
    state = nnx.State({"v": nnx.Variable({"a": jnp.ones(2), "b": [jnp.ones(1)]})})
    pure = jax.tree.map(lambda x: x * 3, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    assert state.v.value["a"].tolist() == [3, 3]
    assert state.v.value["b"][0].tolist() == [3]


def test_replace_by_pure_dict_lists_everything_that_does_not_fit_and_changes_nothing(state):
    with pytest.raises(StateMismatchError) as error:
        state.replace_by_pure_dict(
            {
                "mean": jnp.zeros(3),
                "raw": jnp.ones(2, jnp.int32),
                "layers": {0: {"w": jnp.full(2, 9.0), "b": 1}},
                "other": {"x": 2},
            }
        )
    assert str(error.value) == (
        "key in pure_dict not available in state, or of another type:\n"
        "  - .layers[0].b: not in the state\n"
        "  - .other.x: not in the state\n"
        "  - .mean: expected float32[2], got float32[3]\n"
        "  - .raw: expected float32[2], got int32[2]\n"
        "Fix: rename or convert these entries, or pass replace_fn."
    )
    assert values(state) == [1, 3, 2, 0, 1]


def test_replace_by_pure_dict_with_a_function_of_its_own(state):
    state.replace_by_pure_dict({"raw": "text"}, replace_fn=lambda old, new: (old.shape, new))
    assert state.raw == ((2,), "text")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"0": 1, "10": {"2": 3}}, {0: 1, 10: {2: 3}}),
        ({"-1": 1, "a1": 2, "": 3, "1.0": 4}, {-1: 1, "a1": 2, "": 3, "1.0": 4}),
        ({0: 1, "٣": 2, "-": 3}, {0: 1, "٣": 2, "-": 3}),
    ],
)
def test_restore_int_paths_turns_digits_back_into_integers(before, after):
    restored = nnx.restore_int_paths(before)
    assert restored == after
    assert [type(key) for key in restored] == [type(key) for key in after]


# ---- comparing -----------------------------------------------------------------------------------


def test_comparing_equal_states_finds_nothing(state):
    state.key, state.nan = nnx.Variable(jax.random.key(1)), jnp.float32("nan")
    assert nnx.compare_states(state, nnx.clone(state)) == {}
    assert nnx.compare_states(state, copy.deepcopy(state)) == {}


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (("mean",), nnx.BatchStat(jnp.array([0.0, 1.0]))),
        (("mean",), nnx.BatchStat(jnp.zeros(3))),
        (("mean",), nnx.BatchStat(jnp.zeros(2, jnp.int32))),
        (("mean",), nnx.Param(jnp.zeros(2))),
        (("mean",), nnx.BatchStat(jnp.zeros(2), role="x")),
        (("mean",), jnp.zeros(2)),
        (("raw",), jnp.ones((2, 1))),
        (("raw",), 1),
    ],
)
def test_comparing_names_the_path_and_both_leaves(state, path, other):
    changed = nnx.from_flat_state({**dict(state.flat_state()), path: other})
    found = nnx.compare_states(state, changed)
    assert list(found) == [path]
    assert found[path][0] is dict(state.flat_state())[path]
    assert found[path][1] is other


def test_comparing_shows_what_only_one_has():
    assert nnx.compare_states({"a": 1, "b": {"c": 2}}, {"a": 1, "d": 3}) == {
        ("b", "c"): (2, None),
        ("d",): (None, 3),
    }


def test_paths_grouped_by_value():
    axes = nnx.State({"a": {"b": 0}, "c": None, "d": nnx.Param(0)})
    filters = nnx.statelib.create_path_filters(axes)
    path_in = nnx.filterlib.PathIn
    assert filters == {path_in(("a", "b"), ("d",)): 0, path_in(("c",)): None}
    assert nnx.StateAxes(filters)


def test_states_can_be_subscripted():
    assert nnx.State[str, int] is nnx.State
    assert nnx.GraphState[int] is nnx.GraphState


def test_diff_is_a_state_of_the_entries_that_the_other_lacks():
    first = nnx.State({"a": nnx.Param(1.0), "b": {"c": nnx.Param(2.0), "d": nnx.Param(3.0)}})
    second = {"a": nnx.Param(9.0), "b": {"c": nnx.Param(9.0)}, "z": nnx.Param(9.0)}
    found = nnx.statelib.diff(first, second)
    assert isinstance(found, nnx.State)
    assert list(found.flat_state()) == [(("b", "d"), first["b"]["d"])]
    assert len(nnx.diff(first, first)) == 0
    assert nnx.diff({"a": 1, "b": 2}, {"a": 3}).to_pure_dict() == {"b": 2}
