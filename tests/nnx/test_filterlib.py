"""The filter language: what each filter selects, how filters divide, and what is no filter."""

import pickle

import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import FilterError
from linnet.nnx import filterlib
from linnet.nnx.filterlib import HasTag, PathIn, to_predicate


class Special(nnx.Param):
    pass


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(1))
        self.special = Special(jnp.ones(1))
        self.stats = nnx.Dict(mean=nnx.BatchStat(jnp.ones(1)), var=nnx.BatchStat(jnp.ones(1)))
        self.blocks = [nnx.Cache(jnp.ones(1)), nnx.Param(jnp.ones(1), tag="frozen")]
        self.raw = jnp.ones(1)


KERNEL, SPECIAL, RAW = ("kernel",), ("special",), ("raw",)
MEAN, VAR = ("stats", "mean"), ("stats", "var")
CACHE, FROZEN = ("blocks", 0), ("blocks", 1)
ALL = {KERNEL, SPECIAL, RAW, MEAN, VAR, CACHE, FROZEN}

SELECTED = [
    (nnx.Param, {KERNEL, SPECIAL, FROZEN}),
    (Special, {SPECIAL}),
    (nnx.Variable, ALL - {RAW}),
    (nnx.OfType(nnx.BatchStat), {MEAN, VAR}),
    (..., ALL),
    (True, ALL),
    (None, set()),
    (False, set()),
    (nnx.Everything(), ALL),
    (nnx.Nothing(), set()),
    ("frozen", {FROZEN}),
    ("unknown", set()),
    (nnx.WithTag("frozen"), {FROZEN}),
    (HasTag(), {FROZEN}),
    (nnx.PathContains("stats"), {MEAN, VAR}),
    (nnx.PathContains(1), {FROZEN}),
    (nnx.PathContains("sta"), set()),
    (nnx.PathContains("sta", exact=False), {MEAN, VAR}),
    (nnx.PathContains(0, exact=False), {CACHE}),
    (nnx.PathPattern("stats"), {MEAN, VAR}),
    (nnx.PathPattern("blocks.1"), {FROZEN}),
    (nnx.PathPattern("*"), ALL),
    (nnx.PathPattern("*.m*n"), {MEAN}),
    (nnx.PathPattern("**.[0-9]"), {CACHE, FROZEN}),
    (nnx.PathPattern("**.kernel"), {KERNEL}),
    (nnx.PathPattern("stat"), set()),
    (nnx.PathPattern("kernel.deeper"), set()),
    (PathIn(KERNEL, MEAN), {KERNEL, MEAN}),
    ([nnx.BatchStat, "frozen"], {MEAN, VAR, FROZEN}),
    ((nnx.Cache, Special), {CACHE, SPECIAL}),
    ([], set()),
    (nnx.Any(nnx.Cache, Special), {CACHE, SPECIAL}),
    (nnx.Any(), set()),
    (nnx.All(nnx.Param, nnx.PathContains("blocks")), {FROZEN}),
    (nnx.All(), ALL),
    (nnx.Not(nnx.Variable), {RAW}),
    (nnx.Not(...), set()),
    (nnx.All(nnx.Param, nnx.Not([Special, "frozen"])), {KERNEL}),
    (lambda path, value: path[-1] == "var", {VAR}),
    (lambda path, value: hasattr(value, "tag"), {FROZEN}),
]


@pytest.mark.parametrize(("which", "wanted"), SELECTED)
def test_filters_select(which, wanted):
    model = Model()
    assert set(nnx.state(model, which).flat_state().paths) == wanted
    _, chosen, rest = nnx.split(model, which, ...)
    assert set(chosen.flat_state().paths) == wanted
    assert set(rest.flat_state().paths) == ALL - wanted
    assert set(nnx.filter_state(nnx.state(model), which).flat_state().paths) == wanted


@pytest.mark.parametrize(
    ("which", "text"),
    [
        (..., "Everything()"),
        (False, "Nothing()"),
        ("a", "WithTag('a')"),
        (nnx.Not("a"), "Not(WithTag('a'))"),
        (["a", "b"], "Any(WithTag('a'), WithTag('b'))"),
        (nnx.PathContains("a"), "PathContains('a')"),
        (nnx.PathContains("a", exact=False), "PathContains('a', exact=False)"),
        (PathIn(("a", 0)), "PathIn(('a', 0))"),
        (HasTag(), "HasTag()"),
        (int, "OfType(<class 'int'>)"),
    ],
)
def test_filters_print_and_are_equal_by_content(which, text):
    predicate = to_predicate(which)
    assert repr(predicate) == text
    again = pickle.loads(pickle.dumps(predicate))
    assert predicate == again
    assert hash(predicate) == hash(again)


def test_filters_of_different_kind_or_content_are_unequal():
    kinds = [nnx.Any("a"), nnx.All("a"), nnx.Not("a"), nnx.Any("a", "b"), nnx.WithTag("a")]
    kinds += [nnx.Everything(), nnx.Nothing(), HasTag(), nnx.OfType(int), nnx.PathContains("a")]
    kinds += [nnx.PathContains("a", exact=False), PathIn(("a",)), PathIn(("b",))]
    assert len(set(kinds)) == len(kinds)
    assert PathIn(("a",), ("b",)) == PathIn(("b",), ("a",))


@pytest.mark.parametrize("wrong", [3, 1.5, {"a": 1}, object()], ids=["int", "float", "dict", "obj"])
@pytest.mark.parametrize(
    "use",
    [
        lambda f: nnx.state(Model(), f),
        lambda f: nnx.split(Model(), f, ...),
        lambda f: nnx.pop(Model(), f),
        nnx.Not,
        lambda f: nnx.Any(nnx.Param, [f]),
        lambda f: nnx.filter_state(nnx.State({"a": 1}), f),
    ],
)
def test_what_is_no_filter_is_refused_with_what_is(use, wrong):
    with pytest.raises(FilterError) as error:
        use(wrong)
    assert str(error.value).startswith(f"Not a filter: {wrong!r} ({type(wrong).__name__}).\nFix: ")
    assert "nnx.Param, a tag (str), `...`" in str(error.value)


@pytest.mark.parametrize("everything", [..., True])
def test_a_filter_for_everything_comes_last(everything):
    with pytest.raises(FilterError) as error:
        nnx.split(Model(), nnx.BatchStat, everything, nnx.Param)
    assert "`...` or `True` can only be used as the last filter" in str(error.value)
    assert f"{everything!r} stands at position 1 before" in str(error.value)
    assert str(error.value).endswith("Fix: move it to the end.")


def test_filters_for_everything_may_end_the_list_twice():
    assert len(filterlib.filters_to_predicates([nnx.Param, ..., True])) == 3


def test_the_first_filter_that_selects_gets_the_value():
    _, special, params, rest = nnx.split(Model(), Special, nnx.Param, ...)
    assert set(special.flat_state().paths) == {SPECIAL}
    assert set(params.flat_state().paths) == {KERNEL, FROZEN}
    assert set(rest.flat_state().paths) == {RAW, MEAN, VAR, CACHE}


def test_filters_that_leave_something_over_are_refused_with_all_paths():
    with pytest.raises(FilterError) as error:
        nnx.split(Model(), nnx.Param, nnx.Cache)
    text = str(error.value)
    assert text.startswith("Non-exhaustive filters, got a non-empty remainder: ")
    assert "  - .raw\n  - .stats.mean\n  - .stats.var\nFix: add a filter" in text
