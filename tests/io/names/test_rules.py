import re

import numpy as np
import pytest

from linnet.errors import NameMapError
from linnet.io.names import NameMap, Rule
from linnet.io.names.rules import MisfitError


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# The rule, the shapes of the model's tensors, those of the stored ones, and how the model's are
# made of the stored ones with plain NumPy.
CASES = {
    "as it is": (Rule("a", "a"), [(2, 3)], [(2, 3)], lambda a: [a]),
    "scalar": (Rule("a", "a"), [()], [()], lambda a: [a]),
    "transposed": (
        Rule("a", "a", "out in -> in out"), [(2, 3)], [(3, 2)], lambda a: [a.T],
    ),
    "flipped": (
        Rule("a", "a", "out in x -> x in out", flip=("x",)),
        [(5, 2, 3)], [(3, 2, 5)], lambda a: [a.transpose(2, 1, 0)[::-1]],
    ),
    "split": (
        Rule("a", ["q", "k"], "(h d)+ w -> w h d"),
        [(4, 2, 3), (4, 1, 3)], [(9, 4)],
        lambda a: [a[:6].reshape(2, 3, 4).transpose(2, 0, 1),
                   a[6:].reshape(1, 3, 4).transpose(2, 0, 1)],
    ),
    "split in the middle": (
        Rule("a", ["x", "y"], "w b+ c -> c b w"),
        [(2, 3, 4), (2, 5, 4)], [(4, 8, 2)],
        lambda a: [a[:, :3].transpose(2, 1, 0), a[:, 3:].transpose(2, 1, 0)],
    ),
    "interleaved": (
        Rule("a", ["q", "k", "v"], "(h part d) w -> w h d"),
        [(4, 2, 5)] * 3, [(30, 4)],
        lambda a: list(a.reshape(2, 3, 5, 4).transpose(1, 3, 0, 2)),
    ),
    "joined": (
        Rule(["a", "b"], "x", "out in -> in out+"),
        [(2, 6)], [(3, 2), (3, 2)], lambda a, b: [np.concatenate([a.T, b.T], 1)],
    ),
    "joined in proportion": (
        Rule(["q", "k", "v"], "x", "(h d) w -> w (h d)+", sizes={"d": 2}, portions=(4, 1, 1)),
        [(5, 12)], [(8, 5), (2, 5), (2, 5)],
        lambda q, k, v: [np.concatenate([q.T, k.T, v.T], 1)],
    ),
    "joined and interleaved": (
        Rule(["a", "b"], "x", "w c -> (c part) w"),
        [(6, 2)], [(2, 3), (2, 3)],
        lambda a, b: [np.stack([a.T, b.T], 1).reshape(6, 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rule_does_what_numpy_does_and_back(case):
    rule, shapes, stored_shapes, by_hand = CASES[case]
    assert rule.stored_shapes(shapes) == stored_shapes
    stored = [numbers(*shape) + n * 100 for n, shape in enumerate(stored_shapes)]
    ours = rule.load(stored, shapes)
    assert [array.shape for array in ours] == shapes
    for mine, wanted in zip(ours, by_hand(*stored), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    for back, was in zip(rule.store(ours), stored, strict=True):
        np.testing.assert_array_equal(back, was)


def test_added_tensors_go_back_into_the_first():
    rule = Rule(["ih", "hh"], ["i", "f"], "gate+ -> gate", add=True)
    assert rule.stored_shapes([(2,), (2,)]) == [(4,), (4,)]
    first, second = numbers(4), numbers(4) * 10
    parts = rule.load([first, second], [(2,), (2,)])
    assert [part.tolist() for part in parts] == [[0, 11], [22, 33]]
    assert [back.tolist() for back in rule.store(parts)] == [[0, 11, 22, 33], [0, 0, 0, 0]]


def test_parts_of_different_width_are_a_misfit():
    with pytest.raises(MisfitError):
        Rule("a", ["q", "k"], "(h d)+ w -> w h d").stored_shapes([(4, 2, 3), (5, 2, 3)])


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda: Rule("a.*", "a"), "stored names and paths want the same number of *"),
        (lambda: Rule([], "a"), "stored names and paths want the same number of *"),
        (lambda: Rule("a", ["b", "c"], "x -> x"), "several paths, and then only, the left side"),
        (lambda: Rule("a", ["b", "c"]), "several paths, and then only, the left side"),
        (lambda: Rule("a", "b", "x+ -> x"), "several paths, and then only, the left side"),
        (lambda: Rule(["a", "b"], "c", "x -> x"), "several stored names, and then only, the right"),
        (lambda: Rule("a", "b", "x -> x+"), "several stored names, and then only, the right"),
        (lambda: Rule(["a", "b"], "c", "x -> x+", portions=(1,)), "several stored names, and then"),
        (lambda: Rule("a", "b", "x y -> y x", flip=("z",)), "no axis is called z"),
        (lambda: Rule("a", "b", "x y -> y x", sizes={"head": 2}), "no axis is called head"),
        (lambda: Rule("a", "b", flip=("x",)), "no axis is called x"),
    ],
)
def test_rule_whose_parts_do_not_fit_is_refused(rule, why):
    with pytest.raises(NameMapError, match=re.escape(why)) as error:
        rule()
    assert str(error.value).startswith("The rule ")
    assert str(error.value).endswith("Fix: see linnet.io.names.Rule.")


TWO = NameMap(
    [Rule("~h.*.a", "h/*/a"), Rule("~h.*.b", ["h/*/b/x", "h/*/b/y"], "n+ -> n"), Rule("c", "c")],
    prefixes=("", "model."),
    ignored=("~h.*.mask",),
    tied={"head": "~c"},
)


def test_paths_are_renamed_below_a_path_and_one_after_the_other():
    mine = TWO.with_paths({"h": "blocks", "blocks/*/b": "blocks/*/deep/b"})
    assert [rule.paths for rule in mine.rules] == [
        ("blocks/*/a",),
        ("blocks/*/deep/b/x", "blocks/*/deep/b/y"),
        ("c",),
    ]
    assert [rule.stored for rule in mine.rules] == [rule.stored for rule in TWO.rules]


def test_paths_can_be_left_out():
    assert [rule.paths for rule in TWO.with_paths({"h/*/b/x": None}).rules] == [("h/*/a",), ("c",)]


def test_renaming_a_path_that_is_not_there_is_an_error():
    with pytest.raises(NameMapError) as error:
        TWO.with_paths({"H": "blocks"})
    assert str(error.value).startswith("The map has no path 'H'; it has h/*/a, h/*/b/x, h/*/b/y, c")


@pytest.mark.parametrize(
    ("found", "prefix"),
    [
        (["h.0.a", "h.1.a", "c"], ""),
        (["model.h.0.a", "model.h.1.a", "c"], "model."),
        (["x"], ""),
        ([], ""),
    ],
)
def test_the_prefix_is_the_one_that_most_names_have(found, prefix):
    chosen = TWO.for_names(found)
    assert chosen.rules[0].stored == (f"{prefix}h.*.a",)
    assert chosen.tied == {"head": f"{prefix}c"}
    assert chosen.is_ignored(f"{prefix}h.17.mask")
    assert not chosen.is_ignored("h.1.2.mask")


def test_a_given_prefix_is_the_only_one():
    assert TWO.with_prefix("x.").for_names(["h.0.a"]).rules[0].stored == ("x.h.*.a",)


def test_a_map_that_says_nothing_of_prefixes_has_the_given_one_everywhere():
    plain = NameMap([Rule("a.*", "a/*"), Rule("b", "b")], ignored=("m",), tied={"c": "b"})
    found = plain.with_prefix("net.").for_names([])
    assert [rule.stored for rule in found.rules] == [("net.a.*",), ("net.b",)]
    assert found.tied == {"net.c": "net.b"}
    assert found.is_ignored("net.m")
