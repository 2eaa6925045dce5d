"""Splitting, forking and reseeding. The literals are what Flax gives for the same seeds."""

import functools

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.nnx.streams import contents

NOISE_2 = [[3704974950, 1863054868], [2705940334, 2639757084]]
DEFAULT_2 = [[4165894930, 804218099], [1353695780, 2116000888]]
SPLIT = {"noise": (NOISE_2, [0, 0]), "default": (DEFAULT_2, [0, 0])}
FORKED = {"noise": ([507451445, 1853169794], 0), "default": ([1797259609, 2579123966], 0)}
NEVER_DRAWN = {"noise": ([0, 1], 0), "default": ([0, 0], 0)}
DRAWN_ONCE = {"noise": ([0, 1], 1), "default": ([0, 0], 1)}


class Model(nnx.Module):
    """Streams in an attribute and in a list, two of them under one tag."""

    def __init__(self):
        self.rngs = nnx.Rngs(0, noise=1)
        self.blocks = [nnx.Rngs(noise=7)]
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self):
        return self.rngs.noise.key.shape


def shapes(rngs):
    return {name: stream.key.shape for name, stream in rngs.items()}


@pytest.fixture
def rngs():
    return nnx.Rngs(0, noise=1)


# ---- in place -----------------------------------------------------------------------------------

IN_PLACE = {
    "split": (functools.partial(nnx.split_rngs, splits=2), SPLIT),
    "fork": (nnx.fork_rngs, FORKED),
    "fork(split=n)": (functools.partial(nnx.fork_rngs, split=2), SPLIT),
}
in_place = pytest.mark.parametrize(("derive", "want"), IN_PLACE.values(), ids=IN_PLACE)


@in_place
def test_as_a_function_with_backups(rngs, derive, want):
    backups = derive(rngs)
    assert contents(rngs) == want
    assert len(backups) == 2
    nnx.restore_rngs(backups)
    assert contents(rngs) == DRAWN_ONCE


@in_place
def test_as_a_context_manager(rngs, derive, want):
    streams = dict(rngs.items())
    with derive(rngs):
        assert contents(rngs) == want
        assert dict(rngs.items()) == streams
    assert contents(rngs) == DRAWN_ONCE


@in_place
def test_as_a_decorator(rngs, derive, want):
    @derive()
    def call(rngs, x, *, other):
        """What it does."""
        assert contents(rngs) == want
        assert other.default.key.shape == rngs.default.key.shape
        return x + 1

    other = nnx.Rngs(5)
    assert call(rngs, 1, other=other) == 2
    assert contents(rngs) == DRAWN_ONCE
    assert contents(other) == {"default": ([0, 5], 1)}
    assert (call.__name__, call.__doc__) == ("call", "What it does.")


@in_place
def test_around_a_function(rngs, derive, want):
    assert derive(contents)(rngs) == want
    assert derive(functools.partial(contents))(nnx.Rngs(0, noise=1)) == want
    assert contents(rngs) == DRAWN_ONCE


@in_place
def test_an_error_restores_the_streams(rngs, derive, want):
    @derive()
    def fail(rngs):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), derive(rngs):
        raise KeyError("inside")
    with pytest.raises(KeyError, match="inside"):
        fail(rngs)
    assert contents(rngs) == {"noise": ([0, 1], 2), "default": ([0, 0], 2)}


def test_a_decorated_method(rngs):
    class Layer(nnx.Module):
        def __init__(self):
            self.rngs = nnx.Rngs(3)

        @nnx.split_rngs(splits=4)
        def init(self, rngs):
            return shapes(rngs), shapes(self.rngs)

    layer = Layer()
    assert layer.init(rngs) == ({"noise": (4,), "default": (4,)}, {"default": (4,)})
    assert shapes(layer.rngs) == {"default": ()}


def test_every_stream_of_a_model_is_split_once():
    model = Model()
    model.again = model.rngs
    with nnx.split_rngs((model, [model]), splits=(2, 3)):
        assert shapes(model.rngs) == {"noise": (2, 3), "default": (2, 3)}
        assert shapes(model.blocks[0]) == {"noise": (2, 3)}
        assert model.again is model.rngs
    assert contents(model.rngs) == DRAWN_ONCE


def test_a_callable_module_is_not_a_function_to_decorate():
    class Plain(nnx.Module):
        def __call__(self):
            return 1

    for derive in (functools.partial(nnx.split_rngs, splits=2), nnx.fork_rngs):
        with derive(Plain()) as backups:
            assert len(backups) == 0
        with derive(Model()) as backups:
            assert len(backups) == 3
    assert isinstance(nnx.with_rngs(Plain(), fork=...), Plain)


@pytest.mark.parametrize(
    ("only", "split"),
    [
        ("noise", {"rngs.noise", "blocks.noise"}),
        (nnx.Not("noise"), {"rngs.default"}),
        (nnx.PathContains("rngs"), {"rngs.noise", "rngs.default"}),
        (("default", nnx.PathContains("blocks")), {"rngs.default", "blocks.noise"}),
        (nnx.RngStream, {"rngs.noise", "rngs.default", "blocks.noise"}),
        (nnx.RngState, {"rngs.noise", "rngs.default", "blocks.noise"}),
        (lambda path, stream: stream.tag == "default", {"rngs.default"}),
        (nnx.Param, set()),
        (False, set()),
    ],
)
def test_only_selects_streams(only, split):
    model = Model()
    with nnx.split_rngs(model, splits=4, only=only):
        found = {f"rngs.{name}" for name, shape in shapes(model.rngs).items() if shape}
        found |= {f"blocks.{name}" for name, shape in shapes(model.blocks[0]).items() if shape}
    assert found == split


def test_squeeze_drops_the_axis_again(rngs):
    with nnx.split_rngs(rngs, splits=1, squeeze=True, only="noise"):
        assert contents(rngs)["noise"] == (NOISE_2[0], 0)
        assert contents(rngs)["default"] == ([0, 0], 0)


@pytest.mark.parametrize("node", [[], [nnx.Rngs(0)]], ids=["decorator", "function"])
def test_squeeze_is_for_one_split(node):
    with pytest.raises(ValueError, match=r"splits=1, but got splits=2\.\nFix: leave out"):
        nnx.split_rngs(*node, splits=2, squeeze=True)


def test_fork_only_what_the_filters_select(rngs):
    with nnx.fork_rngs(rngs, split={"noise": 2}):
        assert contents(rngs) == {"noise": SPLIT["noise"], "default": ([0, 0], 0)}
    with nnx.fork_rngs(rngs, split={"noise": 3, ...: None}):
        assert shapes(rngs) == {"noise": (3,), "default": ()}
        assert contents(rngs)["default"] == FORKED["default"]


def test_a_stream_that_was_split_already_leaves_all_as_they_are(rngs):
    split = nnx.Rngs(1).split(2)
    with pytest.raises(ValueError, match=r"the stream 'default' holds keys of shape \(2,\)"):
        nnx.split_rngs((rngs, split), splits=2)
    assert contents(rngs) == DRAWN_ONCE
    assert shapes(split) == {"default": (2,)}


def test_streams_for_a_vmap(rngs):
    with nnx.split_rngs(rngs, splits=3):
        noise = jax.vmap(lambda r: r.noise.uniform(()))(rngs)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), 0), 3)
    assert noise.tolist() == [jax.random.uniform(jax.random.fold_in(k, 0)).item() for k in keys]


# ---- copies -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("values_only")
@in_place
def test_without_graph_updates_a_copy_is_returned(rngs, derive, want):
    copy = derive(rngs)
    assert contents(copy) == want
    assert contents(rngs) == DRAWN_ONCE
    assert copy.noise is not rngs.noise


@pytest.mark.usefixtures("values_only")
@in_place
def test_without_graph_updates_a_decorated_function_gets_copies(rngs, derive, want):
    @derive()
    def call(rngs):
        return rngs

    copy = call(rngs)
    assert contents(copy) == want
    assert contents(rngs) == DRAWN_ONCE


def test_graph_updates_may_be_turned_off_for_a_call(rngs):
    assert contents(nnx.split_rngs(rngs, splits=2, graph_updates=False)) == SPLIT
    assert contents(nnx.fork_rngs(rngs, graph_updates=False))["noise"][1] == 0


def test_a_shared_stream_in_tree_mode(rngs):
    with pytest.raises(ValueError, match=r"Rngs at \[1\] was already seen at \[0\]"):
        nnx.split_rngs([rngs, rngs], splits=2, graph=False)


WITH = {
    "split": ({"split": 2}, SPLIT),
    "split some": (
        {"split": {"noise": 2}},
        {"noise": SPLIT["noise"], "default": NEVER_DRAWN["default"]},
    ),
    "fork": ({"fork": ...}, FORKED),
    "fork some": (
        {"fork": "noise"},
        {"noise": FORKED["noise"], "default": NEVER_DRAWN["default"]},
    ),
    "broadcast": (
        {"broadcast": 2},
        {name: ([key] * 2, [0, 0]) for name, (key, _) in FORKED.items()},
    ),
    "split some, broadcast the rest": (
        {"split": {"noise": 2}, "broadcast": 3},
        {"noise": SPLIT["noise"], "default": ([FORKED["default"][0]] * 3, [0] * 3)},
    ),
    "split some, fork the rest": (
        {"split": {"noise": 2}, "fork": ...},
        {"noise": SPLIT["noise"], "default": FORKED["default"]},
    ),
    "broadcast some, fork the rest": (
        {"broadcast": {"noise": 2}, "fork": True},
        {"noise": ([FORKED["noise"][0]] * 2, [0, 0]), "default": FORKED["default"]},
    ),
    "only": (
        {"split": 2, "only": "noise"},
        {"noise": SPLIT["noise"], "default": NEVER_DRAWN["default"]},
    ),
    "nothing": ({}, NEVER_DRAWN),
}


@pytest.mark.parametrize("how", ["function", "decorator", "around", "values only"])
@pytest.mark.parametrize(("options", "want"), WITH.values(), ids=WITH)
def test_with_rngs(rngs, options, want, how):
    if how == "decorator":
        got = nnx.with_rngs(**options)(contents)(rngs)
    elif how == "around":
        got = nnx.with_rngs(contents, **options)(rngs)
    else:
        mode = {"graph": False, "graph_updates": False} if how == "values only" else {}
        got = contents(nnx.with_rngs(rngs, **options, **mode))
    assert got == want
    moved = {name: int(want[name] != NEVER_DRAWN[name]) for name in want}
    assert {name: int(s.count.value) for name, s in rngs.items()} == moved


def test_with_rngs_copies_the_model_and_keeps_its_other_variables():
    model = Model()
    copy = nnx.with_rngs(model, split={"noise": 2})
    assert shapes(copy.rngs) == {"noise": (2,), "default": ()}
    assert shapes(copy.blocks[0]) == {"noise": (2,)}
    assert shapes(model.rngs) == {"noise": (), "default": ()}
    assert copy.w is model.w


def test_a_stream_named_by_two_rules(rngs):
    with pytest.raises(ValueError) as error:
        nnx.with_rngs([rngs], split={"noise": 2}, broadcast={"noise": 3}, fork="noise")
    assert str(error.value) == (
        "The RngStream at [0].noise matches multiple rules:\n"
        "  - split matches filter 'noise'\n"
        "  - broadcast matches filter 'noise'\n"
        "  - fork matches filter 'noise'\n"
        "Fix: name each stream once; `...` stands for those that nothing else names."
    )
    assert contents(rngs) == NEVER_DRAWN


# ---- reseed -------------------------------------------------------------------------------------


def test_streams_of_one_tag_get_different_keys():
    model = Model()
    model.rngs.noise()
    nnx.reseed(model, noise=9)
    assert contents(model.blocks[0]) == {"noise": ([2822284597, 2722679661], 0)}
    assert contents(model.rngs) == {"noise": ([143080583, 4281670255], 0), "default": ([0, 0], 0)}


@pytest.mark.parametrize(
    "seed",
    [3, jax.random.key(3), nnx.Rngs(3).default, nnx.Rngs(3)["any"]],
    ids=["seed", "key", "stream", "item"],
)
def test_reseed_from_a_seed_a_key_or_a_stream(rngs, seed):
    nnx.reseed(rngs, default=seed, unknown=1)
    assert contents(rngs) == {"noise": ([0, 1], 0), "default": ([3716834203, 3481239269], 0)}
    assert not isinstance(seed, nnx.RngStream) or int(seed.count.value) == 0


def test_reseed_keeps_the_streams_and_their_variables(rngs):
    key, stream = rngs.noise.key, rngs.noise
    nnx.reseed([rngs], noise=1)
    assert rngs.noise is stream
    assert rngs.noise.key is key


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_match_shape_splits_the_new_key(shape):
    rngs = nnx.Rngs(0).split(shape)
    nnx.reseed(rngs, policy="match_shape", default=3)
    keys, counts = contents(rngs)["default"]
    flat = keys if len(shape) == 1 else keys[0]
    assert flat == [[732048474, 698085531], [1439985689, 1586930987]]
    assert jnp.shape(jnp.asarray(counts)) == shape


def test_a_policy_of_ones_own():
    seen = []

    def policy(path, key, shape):
        seen.append((path, shape))
        return jnp.broadcast_to(key, shape)

    rngs = nnx.Rngs(0).split(2)
    nnx.reseed([rngs], policy=policy, default=3)
    assert seen == [((0, "default"), (2,))]
    assert contents(rngs)["default"] == ([[3716834203, 3481239269]] * 2, [0, 0])


def test_split_streams_are_refused_by_default(rngs):
    split = nnx.Rngs(0).split(2)
    with pytest.raises(ValueError) as error:
        nnx.reseed([rngs, split], default=3)
    assert str(error.value) == (
        "Cannot reseed the stream at [1].default: it holds keys of shape (2,).\n"
        'Fix: policy="match_shape" if every key shall be different, or a function of '
        "(path, key, shape)."
    )
    assert contents(rngs) == NEVER_DRAWN


def test_an_unknown_policy(rngs):
    with pytest.raises(ValueError, match='"scalars_only", "match_shape" or a callable, got 1'):
        nnx.reseed(rngs, policy=1, default=3)


@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}], ids=str)
@pytest.mark.parametrize("how", ["split_rngs", "fork_rngs"])
def test_without_graph_updates_a_copy_has_the_new_streams(mode, how):
    options = {**mode, **({"splits": 3} if how == "split_rngs" else {"split": {"default": 3}})}
    rngs = nnx.Rngs(0)
    copied = getattr(nnx, how)({"rngs": rngs, "v": (v := nnx.Param(jnp.array(1.0)))}, **options)
    assert copied["rngs"].default.key.shape == (3,)
    assert (rngs.default.key.shape, int(rngs.default.count[...])) == ((), 1)
    assert copied["v"] is v

    @getattr(nnx, how)(**options)
    @nnx.vmap(in_axes=(0, None), **mode)
    def draw(rngs, v):
        v[...] += 1.0
        return rngs.normal()

    assert len(set(draw(rngs, v).tolist())) == 3
    assert float(v[...]) == 2.0
    assert rngs.default.key.shape == ()


@pytest.mark.parametrize("how", ["split", "broadcast"])
def test_a_stream_with_none_is_left_alone(how):
    rngs = nnx.Rngs(params=0, dropout=1, other=2)
    new = getattr(rngs, how)({"params": 5, "dropout": None})
    assert [new[name].key.shape for name in ("params", "dropout", "other")] == [(5,), (), ()]
    assert new.dropout.key[...] == rngs.dropout.key[...]
    assert [int(rngs[name].count[...]) for name in ("params", "dropout")] == [1, 0]
