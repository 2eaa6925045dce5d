import pytest

from linnet.io.names import NameMap, Rule
from linnet.io.names.applying import apply_map, rule_paths


def planned(names, shapes, aliases=None):
    units, unnamed = apply_map(names, shapes, aliases or {})
    return {
        unit.stored: [(t.path, t.index, t.shape) for t in unit.targets] for unit in units
    }, unnamed


LAYERS = NameMap([Rule("h.*.w", "h/*/w", "a b -> b a"), Rule("h.*.b", "h/*/b")])


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (
            {("h", 0, "w"): (2, 3), ("h", 1, "w"): (2, 3)},
            {
                ("h.0.w",): [(("h", 0, "w"), (), (2, 3))],
                ("h.1.w",): [(("h", 1, "w"), (), (2, 3))],
            },
        ),
        (
            {("h", "stacked", "w"): (2, 2, 3)},
            {
                ("h.0.w",): [(("h", "stacked", "w"), (0,), (2, 3))],
                ("h.1.w",): [(("h", "stacked", "w"), (1,), (2, 3))],
            },
        ),
        (
            {("h", "w"): (2, 2, 3)},
            {
                ("h.0.w",): [(("h", "w"), (0,), (2, 3))],
                ("h.1.w",): [(("h", "w"), (1,), (2, 3))],
            },
        ),
    ],
    ids=["listed", "stacked", "scanned by hand"],
)
def test_layers_are_found_listed_or_stacked(shapes, wanted):
    assert planned(LAYERS, shapes) == (wanted, [])


def test_stacks_of_lists_have_one_index_and_one_step():
    names = NameMap([Rule("h.*.p.*.w", "h/*/p/*/w", "a -> a")])
    units, unnamed = planned(names, {("h", "stacked", "p", 1, "w"): (2, 3)})
    assert list(units) == [("h.0.p.1.w",), ("h.1.p.1.w",)]
    assert unnamed == []


def test_nested_stacks_have_two_indices():
    names = NameMap([Rule("h.*.p.*.w", "h/*/p/*/w", "a -> a")])
    path = ("h", "stacked", "p", "stacked", "w")
    units, unnamed = planned(names, {path: (2, 2, 3)})
    assert units[("h.1.p.0.w",)] == [(path, (1, 0), (3,))]
    assert (len(units), unnamed) == (4, [])


def test_the_first_rule_that_the_model_fits_is_used():
    names = NameMap(
        [Rule("w", "w", "(a b) c -> c a b"), Rule("w", "w", "a c -> c a"), Rule("w", "other")]
    )
    assert planned(names, {("w",): (2, 3, 4)})[0] == {("w",): [(("w",), (), (2, 3, 4))]}
    units, _ = apply_map(names, {("w",): (2, 3)}, {})
    assert units[0].rule is names.rules[1]
    assert planned(names, {("other",): (1,)})[0] == {("w",): [(("other",), (), (1,))]}
    # Once an entry has its tensor, no other rule gives it another.
    assert planned(names, {("w",): (2, 3), ("other",): (1,)})[1] == [("other",)]


def test_entries_that_no_rule_names_or_fits_are_returned():
    shapes = {("h", 0, "w"): (2,), ("h", 0, "b"): (2,), ("x",): ()}
    units, unnamed = planned(LAYERS, shapes)
    assert list(units) == [("h.0.b",)]
    assert unnamed == [("h", 0, "w"), ("x",)]


def test_a_rule_with_several_paths_wants_all_of_them():
    names = NameMap([Rule("a", ["x", "y"], "n+ -> n")])
    assert planned(names, {("x",): (2,)}) == ({}, [("x",)])
    assert planned(names, {("x",): (2,), ("y",): (3,)})[1] == []


def test_shared_entries_are_found_under_each_path():
    names = NameMap([Rule("head", "head/w")])
    units, unnamed = planned(names, {("embed", "w"): (2,)}, {("head", "w"): ("embed", "w")})
    assert units == {("head",): [(("embed", "w"), (), (2,))]}
    assert unnamed == []


def test_paths_of_a_stored_tensor_are_told():
    assert rule_paths(LAYERS, "h.3.w") == ["h/3/w"]
    assert rule_paths(LAYERS, "h.w") == rule_paths(LAYERS, "other") == []
