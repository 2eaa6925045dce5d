"""Comparing stored entries with wanted ones: what fits, what is listed, what was likely meant."""

import re

import pytest

from linnet.errors import RenameError
from linnet.io.shared.entries import Spec, fits
from linnet.io.shared.matching import StackedLayers, StoredValue, match, nearest, renamed


def array(*shape, dtype="float32"):
    return Spec("array", dtype, shape)


def flat(**entries):
    """A flat map from keywords; `__` stands for `/`."""
    return {
        tuple(int(s) if s.isdecimal() else s for s in name.split("__")): spec
        for name, spec in entries.items()
    }


def listed(found):
    return [str(problem) for problem in found.problems]


def test_equal_maps_match_entry_by_entry():
    entries = flat(m__a=array(2), m__b__0=array(3))
    found = match(entries, entries)
    assert found.problems == []
    assert found.origins == {path: StoredValue(path, spec) for path, spec in entries.items()}


def test_digits_and_integers_are_the_same_step_but_the_exact_one_is_preferred():
    stored = {("m", "0"): array(2), ("m", 0): array(3)}
    found = match({("m", 0): array(3)}, stored)
    assert found.origins[("m", 0)].path == ("m", 0)
    assert listed(found) == ["m/0: not wanted"]
    assert match({("m", 1): array(2)}, {("m", "1"): array(2)}).problems == []


@pytest.mark.parametrize(
    ("wanted", "stored", "lines"),
    [
        (flat(w=array(2)), {}, ["w: missing"]),
        ({}, flat(w=array(2)), ["w: not wanted"]),
        (
            flat(w=array(2, 3)),
            flat(w=array(2, 4)),
            ["w: expected float32[2, 3], found float32[2, 4]"],
        ),
        (
            flat(w=array(2)),
            flat(w=array(2, dtype="bfloat16")),
            ["w: expected float32[2], found bfloat16[2]"],
        ),
        (flat(w=array()), flat(w=Spec("value", "str")), ["w: expected float32[], found str"]),
        (
            flat(w=Spec("key", "key<fry>")),
            flat(w=Spec("key", "key<rbg>")),
            ["w: expected key<fry>[], found key<rbg>[]"],
        ),
        (
            flat(w=Spec("value", "int")),
            flat(w=Spec("value", "float")),
            ["w: expected int, found float"],
        ),
    ],
)
def test_each_problem_is_listed(wanted, stored, lines):
    found = match(wanted, stored)
    assert listed(found) == lines
    assert not found.origins


@pytest.mark.parametrize(
    ("wanted", "stored", "kind"),
    [
        (array(2, 3), array(3, 2), "shape"),
        (array(2), array(2, dtype="int32"), "dtype"),
        (array(2), Spec("value", "str"), "type"),
    ],
)
def test_problems_have_a_kind(wanted, stored, kind):
    (problem,) = match(flat(w=wanted), flat(w=stored)).problems
    assert (problem.kind, problem.path, problem.nearest) == (kind, "w", "")


@pytest.mark.parametrize(
    ("wanted", "stored", "expected"),
    [
        (Spec("key", "key<fry>", (3,)), array(3, 2, dtype="uint32"), True),
        (Spec("key", "key<fry>"), array(dtype="uint32"), False),
        (array(dtype="uint32"), Spec("value", "int"), True),
        (array(dtype="bfloat16"), Spec("value", "float"), True),
        (array(dtype="float32"), Spec("value", "int"), False),
        (array(1), Spec("value", "float"), False),
        (Spec("value", "int"), array(dtype="int32"), True),
        (Spec("value", "bool"), array(dtype="bool"), True),
        (Spec("any"), array(2), True),
    ],
)
def test_what_can_stand_for_what(wanted, stored, expected):
    assert fits(wanted, stored) is expected


def test_the_nearest_name_is_given_when_one_is_likely_meant():
    wanted = flat(m__decoder__kernel=array(2), m__far=array(1))
    stored = flat(m__decoder__kernels=array(2), m__zzzzzzzz=array(1))
    assert listed(match(wanted, stored)) == [
        "m/decoder/kernel: missing; did you mean m/decoder/kernels?",
        "m/far: missing",
        "m/decoder/kernels: not wanted; did you mean m/decoder/kernel?",
        "m/zzzzzzzz: not wanted",
    ]


def test_nearest_prefers_a_type_that_fits_and_gives_up_on_too_much():
    left = flat(layer_a__kernel=array(3), layer__b__kernel=array(2))
    assert nearest(flat(layer__kernel=array(2)), left) == {
        ("layer", "kernel"): ("layer", "b", "kernel")
    }
    many = {("layer", str(i)): array(2) for i in range(1000)}
    assert nearest(many, many) == {}


def test_the_state_form_of_flax_is_known_where_a_variable_stands():
    wanted = flat(m__w=array(2), m__cache__a=array(1))
    stored = flat(m__w__value=array(2), m__cache__value__a=array(1))
    variables = {("m", "w"): 2, ("m", "cache", "a"): 2}
    assert match(wanted, stored, variable_depths=variables).problems == []
    assert len(match(wanted, stored).problems) == 4


def test_aliases_lead_to_the_same_entry_both_ways():
    tied = [(("m", "head"), ("m", "embed"))]
    stored = flat(m__embed__w=array(2))
    assert match(flat(m__head__w=array(2)), stored, aliases=tied).problems == []
    both = flat(m__embed__w=array(2), m__head__w=array(2))
    assert match(stored, both, aliases=tied).problems == []
    assert listed(match(stored, both)) == ["m/head/w: not wanted"]


def test_scope_leaves_other_items_alone_and_open_paths_take_all():
    stored = flat(m__a=array(2), m__b=array(3), opt__mu=array(2), step=Spec("value", "int"))
    assert match(flat(m__a=array(2), m__b=array(3)), stored, scope=["m"]).problems == []
    found = match(
        {}, stored, wildcard_paths=[("opt",), ("step",), ("lost",)], scope=["opt", "step"]
    )
    assert list(found.origins) == [("opt", "mu"), ("step",)]
    assert listed(found) == ["lost: missing"]


# ---- layers that are stacked, and listed ones ---------------------------------------------------


@pytest.mark.parametrize("stacked", ["m__layers__w", "m__layers__stacked__w"])
def test_a_stack_restores_into_a_list_and_back(stacked):
    one = flat(**{stacked: array(3, 4, 5)})
    three = {("m", "layers", i, "w"): array(4, 5) for i in range(3)}
    (stack,) = one
    apart = match(three, one)
    assert apart.problems == []
    assert apart.origins[("m", "layers", 1, "w")] == StoredValue(stack, array(4, 5), (1,))
    together = match(one, three)
    assert together.problems == []
    assert together.origins[stack] == StackedLayers(
        tuple(StoredValue(p, s) for p, s in three.items())
    )


def test_the_state_form_of_flax_is_taken_apart_and_stacked_too():
    one = flat(m__w__value=array(2, 5))
    two = {("m", i, "w"): array(5) for i in range(2)}
    assert match(two, one, variable_depths=dict.fromkeys(two, 3)).problems == []
    stored = {("m", str(i), "w", "value"): array(5) for i in range(2)}
    assert match(flat(m__w=array(2, 5)), stored, variable_depths={("m", "w"): 2}).problems == []


def test_stacks_in_stacks_take_the_outer_axis_first():
    whole = flat(m__w=array(2, 3, 5))
    listed_layers = {("m", i, j, "w"): array(5) for i in range(2) for j in range(3)}
    found = match(listed_layers, whole)
    assert found.problems == []
    assert found.origins[("m", 1, 2, "w")].index == (1, 2)
    back = match(whole, listed_layers)
    assert back.problems == []
    source = back.origins[("m", "w")]
    assert [len(layer.layers) for layer in source.layers] == [3, 3]
    assert source.layers[1].layers[2].path == ("m", 1, 2, "w")


@pytest.mark.parametrize(
    ("count", "lines"),
    [
        (2, ["m/w: layers [2] of the stack are not wanted"]),
        (4, ["m/3/w: missing"]),
    ],
)
def test_another_number_of_layers_is_listed(count, lines):
    three = flat(m__w=array(3, 5))
    other = {("m", i, "w"): array(5) for i in range(count)}
    found = match(other, three)
    assert listed(found) == lines
    back = match(three, other)
    assert listed(back) == [f"m/w: expected float32[3, 5], found float32[{count}, 5]"]


def test_layers_that_differ_are_not_stacked():
    stored = flat(m__0__w=array(4), m__1__w=array(5))
    found = match(flat(m__w=array(2, 4)), stored)
    assert [p.kind for p in found.problems] == ["missing", "extra", "extra"]


# ---- renaming -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "rename", "expected"),
    [
        ("m/enc/w", {"m/enc": "m/net"}, "m/net/w"),
        ("m/encoder/w", {"m/enc": "m/net"}, "m/encoder/w"),
        ("m/enc/w", {"m/enc/w": "m/kernel"}, "m/kernel"),
        ("m/a/w", {"m/*/w": "m/*/kernel"}, "m/a/kernel"),
        ("m/a/b/w", {"m/*/w": "m/*/kernel"}, "m/a/b/w"),
        ("m/block_3/w", {"m/block_*": "m/blocks/*"}, "m/blocks/3/w"),
        ("opt/mu/enc/w", {"**/enc/**": "**/net/**"}, "opt/mu/net/w"),
        ("enc/w", {"**/enc/**": "**/net/**"}, "net/w"),
        ("m/a/gamma", {"**/gamma": "**/scale"}, "m/a/scale"),
        ("w", {"**": "model/**"}, "model/w"),
        ("net/w", {"net": "model", "**/w": "**/kernel"}, "model/kernel"),
        ("m/block_3/w", {re.compile(r"block_(\d+)"): r"blocks/\1"}, "m/blocks/3/w"),
        ("m/a\\b/w", {"m/a\\b": "m/c\\d"}, "m/c\\d/w"),
    ],
)
def test_renamed(path, rename, expected):
    moved, _ = renamed([tuple(path.split("/"))], rename)
    assert moved == {tuple(expected.split("/")): tuple(path.split("/"))}


def test_none_leaves_entries_out():
    moved, idle = renamed(flat(m__a=array(2), m__old__b=array(2)), {"m/old": None})
    assert list(moved) == [("m", "a")] and idle == []


def test_a_rule_that_renames_nothing_is_listed():
    _, idle = renamed(flat(m__encoder=array(2)), {"m/encodr": "m/net"})
    text = "m/encodr: renames nothing in the checkpoint; did you mean m/encoder?"
    assert [str(problem) for problem in idle] == [text]


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        ({"a": "c", "b": "c"}, "rename gives two entries the path c: a and b"),
        ({"a": 3}, "got 'a': 3"),
        ({3: "a"}, "got 3: 'a'"),
        ({"*/*": "*"}, "'*/*' has 2 stars and '*' has 1"),
    ],
)
def test_rules_that_are_none_are_refused(rename, text):
    with pytest.raises(RenameError, match=re.escape(text)):
        renamed([("a",), ("b",)], rename)
