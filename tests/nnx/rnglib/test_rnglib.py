"""Streams of keys. The literals are what Flax gives for the same seeds."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SharedNoiseWarning
from tests.nnx.streams import contents, key_data

LOGITS = np.log([0.1, 0.2, 0.7]).astype(np.float32)
SHAPE = {"shape": (3,)}
DRAWS = {
    "ball": {"d": 2, "shape": (3,)},
    "bernoulli": {"p": 0.3, "shape": (5,)},
    "beta": {"a": 2.0, "b": 3.0, "shape": (3,)},
    "binomial": {"n": 5.0, "p": 0.4, "shape": (3,)},
    "bits": SHAPE,
    "categorical": {"logits": LOGITS, "shape": (5,)},
    "cauchy": SHAPE,
    "chisquare": {"df": 2.0, "shape": (3,)},
    "choice": {"a": 10, "shape": (3,)},
    "dirichlet": {"alpha": np.ones(3, np.float32), "shape": (2,)},
    "double_sided_maxwell": {"loc": 0.0, "scale": 1.0, "shape": (3,)},
    "exponential": SHAPE,
    "f": {"dfnum": 2.0, "dfden": 3.0, "shape": (3,)},
    "gamma": {"a": 2.0, "shape": (3,)},
    "generalized_normal": {"p": 2.0, "shape": (3,)},
    "geometric": {"p": 0.3, "shape": (3,)},
    "gumbel": SHAPE,
    "laplace": SHAPE,
    "loggamma": {"a": 2.0, "shape": (3,)},
    "logistic": SHAPE,
    "lognormal": SHAPE,
    "maxwell": SHAPE,
    "multinomial": {"n": 4.0, "p": np.array([0.5, 0.5], np.float32)},
    "multivariate_normal": {"mean": np.zeros(2), "cov": np.eye(2)},
    "normal": SHAPE,
    "orthogonal": {"n": 2},
    "pareto": {"b": 2.0, "shape": (3,)},
    "permutation": {"x": 5},
    "poisson": {"lam": 3.0, "shape": (3,)},
    "rademacher": SHAPE,
    "randint": {"shape": (4,), "minval": 0, "maxval": 100},
    "rayleigh": {"scale": 1.0, "shape": (3,)},
    "t": {"df": 2.0, "shape": (3,)},
    "triangular": {"left": 0.0, "mode": 0.5, "right": 1.0, "shape": (3,)},
    "truncated_normal": {"lower": -1.0, "upper": 1.0, "shape": (3,)},
    "uniform": SHAPE,
    "wald": {"mean": 1.0, "shape": (3,)},
    "weibull_min": {"scale": 1.0, "concentration": 2.0, "shape": (3,)},
}
INITIALIZERS = dict.fromkeys(
    "glorot_normal glorot_uniform he_normal he_uniform kaiming_normal kaiming_uniform "
    "lecun_normal lecun_uniform xavier_normal xavier_uniform".split(),
    ((), (2, 3)),
) | {
    "variance_scaling": ((2.0, "fan_out", "uniform"), (2, 3)),
    "delta_orthogonal": ((), (3, 2, 2)),
}


# ---- keys ---------------------------------------------------------------------------------------


def test_keys_of_a_seed():
    rngs = nnx.Rngs(0)
    assert key_data(rngs()) == [1797259609, 2579123966]
    assert key_data(rngs()) == [928981903, 3453687069]
    np.testing.assert_allclose(
        rngs.normal((2, 3)),
        [[1.2956359, 1.3550105, -0.40960556], [-0.77188545, 0.38094172, 0.01888919]],
        rtol=1e-6,
    )
    assert contents(rngs) == {"default": ([0, 0], 3)}


def test_named_streams_and_the_default_behind_them():
    rngs = nnx.Rngs(0, params=1, dropout=jax.random.key(2))
    assert key_data(rngs.params()) == [507451445, 1853169794]
    assert key_data(rngs.dropout()) == [1821159224, 3364244817]
    assert rngs.other is rngs.default
    assert key_data(rngs.other()) == [1797259609, 2579123966]
    assert key_data(rngs["params"]()) == [1948878966, 4237131848]
    assert key_data(rngs["other"]()) == [928981903, 3453687069]


def test_rngs_read_like_a_mapping():
    rngs = nnx.Rngs(0, params=1)
    assert list(rngs) == ["params", "default"]
    assert len(rngs) == 2
    assert "params" in rngs
    assert "other" not in rngs
    assert dict(rngs.items()) == {"params": rngs.params, "default": rngs.default}


def test_a_stream_counts_the_keys_it_gave():
    stream = nnx.RngStream(5, tag="noise")
    first, second = stream(), stream()
    assert int(stream.count.value) == 2
    assert first == jax.random.fold_in(jax.random.key(5), 0)
    assert second == jax.random.fold_in(jax.random.key(5), 1) == stream.last()
    assert (stream.tag, stream.key.tag, stream.count.tag) == ("noise",) * 3
    assert (type(stream.key), type(stream.count)) == (nnx.RngKey, nnx.RngCount)


@pytest.mark.parametrize(
    "seed",
    [
        3,
        np.int64(3),
        jnp.array(3),
        jax.random.key(3),
        jax.random.PRNGKey(3),
        nnx.RngStream(3, tag="other"),
        nnx.RngKey(jax.random.key(3)),
    ],
    ids=lambda seed: type(seed).__name__,
)
def test_what_a_stream_is_made_from(seed):
    assert contents(nnx.Rngs(seed)) == {"default": ([0, 3], 0)}
    assert contents(nnx.Rngs(noise=seed)) == {"noise": ([0, 3], 0)}


def test_rngs_from_a_mapping_and_from_other_rngs():
    want = {"a": ([0, 1], 0), "b": ([0, 2], 0)}
    assert contents(nnx.Rngs({"a": 1}, b=2)) == want
    assert contents(nnx.Rngs(nnx.Rngs(a=1, b=2))) == want
    assert contents(nnx.Rngs()) == {}


@pytest.mark.parametrize("seed", ["a", 1.5, [("a", 1)], True, np.ones(3)], ids=str)
def test_a_seed_that_is_none(seed):
    with pytest.raises(ValueError, match=r"Invalid rng value: .*\nFix: nnx.Rngs\(0\)"):
        nnx.Rngs(seed)


def test_unknown_stream_without_a_default():
    rngs = nnx.Rngs(params=0, dropout=1)
    message = (
        r"No RngStream named '{}' found in Rngs; there are: params, dropout.\n"
        r"Fix: nnx.Rngs\(..., {}=seed\), or give a default"
    )
    with pytest.raises(AttributeError, match=message.format("noise", "noise")):
        rngs.noise()
    with pytest.raises(KeyError, match=message.format("noise", "noise")):
        rngs["noise"]
    for draw in (rngs, lambda: rngs.normal((2,))):
        with pytest.raises(AttributeError, match=message.format("default", "default")):
            draw()
    with pytest.raises(AttributeError, match="there are: none"):
        nnx.Rngs().noise  # noqa: B018
    assert not hasattr(rngs, "_private")


# ---- derived streams ----------------------------------------------------------------------------


@pytest.fixture
def rngs():
    return nnx.Rngs(0, noise=1)


NOISE_2 = [[3704974950, 1863054868], [2705940334, 2639757084]]
DEFAULT_2 = [[4165894930, 804218099], [1353695780, 2116000888]]


def test_fork_takes_a_new_key_for_each_stream(rngs):
    forked = rngs.fork()
    assert contents(forked) == {
        "noise": ([507451445, 1853169794], 0),
        "default": ([1797259609, 2579123966], 0),
    }
    assert contents(rngs) == {"noise": ([0, 1], 1), "default": ([0, 0], 1)}
    assert forked.noise is not rngs.noise


def test_split_gives_different_keys(rngs):
    split = rngs.split(2)
    assert contents(split) == {"noise": (NOISE_2, [0, 0]), "default": (DEFAULT_2, [0, 0])}
    assert contents(rngs) == {"noise": ([0, 1], 1), "default": ([0, 0], 1)}
    assert rngs.split((2, 3)).noise.key.shape == (2, 3)


def test_broadcast_repeats_one_key(rngs):
    repeated = rngs.broadcast(2)
    assert contents(repeated)["noise"] == ([[507451445, 1853169794]] * 2, [0, 0])
    assert contents(repeated)["default"] == ([[1797259609, 2579123966]] * 2, [0, 0])
    assert contents(rngs) == {"noise": ([0, 1], 1), "default": ([0, 0], 1)}
    assert rngs.broadcast((2, 3)).noise.count.shape == (2, 3)


@pytest.mark.parametrize("derive", ["split", "broadcast"])
def test_streams_that_no_filter_selects_keep_their_key_and_count_anew(rngs, derive):
    first = rngs()
    derived = getattr(rngs, derive)({"noise": 2})
    assert derived.noise.key.shape == (2,)
    assert contents(derived)["default"] == ([0, 0], 0)
    assert derived() == first
    assert contents(rngs) == {"noise": ([0, 1], 1), "default": ([0, 0], 1)}


def test_the_first_filter_that_selects_a_stream_decides(rngs):
    split = rngs.split({"noise": 2, nnx.RngStream: (4, 5), ...: 3})
    assert {name: s.key.shape for name, s in split.items()} == {"noise": (2,), "default": (4, 5)}
    assert rngs.split({nnx.Any("noise", "default"): 6}).default.key.shape == (6,)


def test_the_older_form_of_split(rngs):
    forked = rngs.fork(split={"noise": 2})
    assert contents(forked) == {
        "noise": (NOISE_2, [0, 0]),
        "default": ([1797259609, 2579123966], 0),
    }
    assert nnx.RngStream(1, tag="noise").fork(split=2).key.shape == (2,)


def test_a_split_stream_gives_no_key():
    stream = nnx.Rngs(0).split(3)
    with pytest.raises(ValueError) as error:
        stream()
    assert str(error.value) == (
        "fold_in accepts a single key, but the stream 'default' holds keys of shape (3,): it was "
        "split for nnx.vmap or nnx.scan.\nFix: draw inside the mapped function, or restore the "
        "stream with nnx.restore_rngs(backups)."
    )
    assert stream.default.count.value.tolist() == [0, 0, 0]


# ---- samples ------------------------------------------------------------------------------------


def test_every_distribution_is_in_the_table():
    public = {name for name in dir(nnx.Rngs) if name[0] != "_"}
    assert public & set(dir(jax.random)) == {*DRAWS, "split"}
    assert public & set(dir(jax.nn.initializers)) - set(DRAWS) == set(INITIALIZERS)
    assert {*DRAWS, *INITIALIZERS} <= set(dir(nnx.RngStream))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_jax_random_with_the_next_key(name):
    rngs = nnx.Rngs(42)
    rngs()
    key = jax.random.fold_in(jax.random.key(42), 1)
    with jax.numpy_rank_promotion("allow"):  # some of jax.random needs it
        got = getattr(rngs, name)(**DRAWS[name])
        want = getattr(jax.random, name)(key, **DRAWS[name])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("uniform", [0.530260801, 0.313362122, 0.901530266]),
        ("normal", [0.0759255365, -0.486342639, 1.29032063]),
        ("randint", [24, 11, 19, 81]),
        ("permutation", [1, 3, 0, 2, 4]),
        ("truncated_normal", [0.0518069193, -0.325016558, 0.752485693]),
        ("categorical", [2, 2, 0, 2, 0]),
        ("exponential", [0.755577624, 0.37594822, 2.31800604]),
    ],
)
def test_samples_of_a_seed(name, want):
    np.testing.assert_allclose(getattr(nnx.Rngs(42), name)(**DRAWS[name]), want, rtol=1e-6)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_an_initializer_draws_its_own_keys(name):
    options, shape = INITIALIZERS[name]
    rngs = nnx.Rngs(params=0)
    init = getattr(rngs.params, name)(*options)
    want = getattr(jax.nn.initializers, name)(*options)
    for count in range(2):
        key = jax.random.fold_in(jax.random.key(0), count)
        np.testing.assert_array_equal(init(shape, jnp.float32), want(key, shape, jnp.float32))
    assert int(rngs.params.count.value) == 2


def test_weights_of_a_seed():
    np.testing.assert_allclose(
        nnx.Rngs(0).lecun_normal()((2, 3)),
        [[0.756729901, -0.685700536, -0.568833709], [-0.875760496, -0.659942746, 0.449350864]],
        rtol=1e-6,
    )


# ---- as part of models and transforms -----------------------------------------------------------


def test_rngs_are_a_pytree_with_the_paths_of_the_seed(rngs):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(rngs)]
    streams = [".default", ".noise"]
    assert paths == [
        f"{stream}{part}" for stream in streams for part in (".count.value", ".key.value")
    ]
    state = nnx.state(rngs)
    assert [(path, v.tag) for path, v in state.flat_state()] == [
        ((name, part), name) for name in ("default", "noise") for part in ("count", "key")
    ]


@pytest.mark.parametrize("selects", ["noise", nnx.WithTag("noise"), nnx.PathContains("noise")])
def test_filters_find_a_stream_by_its_tag(rngs, selects):
    assert list(nnx.state({"rngs": rngs}, selects)["rngs"]) == ["noise"]
    assert list(nnx.state(rngs, nnx.RngKey)["noise"]) == ["key"]
    assert nnx.state(rngs, nnx.Not(nnx.RngState)) == nnx.State({})


def test_keys_drawn_under_jit_are_those_drawn_outside(rngs):
    drawn, counted = jax.jit(lambda r: (r(), r))(rngs)
    assert contents(rngs)["default"] == ([0, 0], 0)
    assert drawn == rngs()
    assert contents(counted) == contents(rngs)


def test_abstract_and_cloned_rngs(rngs):
    assert nnx.eval_shape(lambda: nnx.Rngs(0)).default.key.value.dtype == jax.random.key(0).dtype
    copied = nnx.clone(rngs)
    assert copied() == rngs()
    assert copied.noise() == rngs.noise()


# ---- noise that a vmap shares -------------------------------------------------------------------

X = jnp.arange(3.0)
PAIRS = jnp.ones((2, 3))


def draw(rngs, x):
    return x + rngs.normal(())


def draw_thrice(rngs, x):
    return x + rngs.normal(()) + rngs.normal(()) + rngs.noise.normal(())


def slope(rngs, x):
    return jax.grad(lambda x: x * nnx.clone(rngs).normal(()))(x)


SHARED = {
    "vmap": lambda: jax.vmap(draw, (None, 0))(nnx.Rngs(0), X),
    "several draws": lambda: jax.vmap(draw_thrice, (None, 0))(nnx.Rngs(0, noise=1), X),
    "vmap in jit": lambda: jax.jit(jax.vmap(draw, (None, 0)))(nnx.Rngs(0), X),
    "vmap of grad": lambda: jax.vmap(slope, (None, 0))(nnx.Rngs(0), X),
    "inner vmap": lambda: jax.vmap(jax.vmap(draw, (None, 0)))(nnx.Rngs(0).split(2), PAIRS),
    "outer vmap": lambda: jax.vmap(jax.vmap(draw), (None, 0))(nnx.Rngs(0).split(3), PAIRS),
    "both vmaps": lambda: jax.vmap(jax.vmap(draw, (None, 0)), (None, 0))(nnx.Rngs(0), PAIRS),
    "fork inside": lambda: jax.vmap(lambda r, x: draw(r.fork(), x), (None, 0))(nnx.Rngs(0), X),
}
UNSHARED = {
    "no transform": lambda: draw(nnx.Rngs(0), X),
    "mapped keys": lambda: jax.vmap(draw)(nnx.Rngs(0).split(3), X),
    "broadcast() says so": lambda: jax.vmap(draw)(nnx.Rngs(0).broadcast(3), X),
    "jit": lambda: jax.jit(draw)(nnx.Rngs(0), X),
    "mapped keys in jit": lambda: jax.jit(jax.vmap(draw))(nnx.Rngs(0).split(3), X),
    "mapped keys of grad": lambda: jax.vmap(slope)(nnx.Rngs(0).split(3), X),
    "mapped keys twice": lambda: jax.vmap(jax.vmap(draw))(nnx.Rngs(0).split((2, 3)), PAIRS),
    "jit in vmap": lambda: jax.vmap(jax.jit(draw))(nnx.Rngs(0).split(3), X),
    "keys as arguments": lambda: jax.vmap(lambda k: nnx.Rngs(k).normal(()))(
        jax.random.split(jax.random.key(0), 3)
    ),
    "vmap without a draw": lambda: jax.vmap(lambda r, x: x, (None, 0))(nnx.Rngs(0), X),
}


@pytest.mark.parametrize("program", SHARED.values(), ids=SHARED)
def test_shared_noise_is_announced_once(program, leak_check):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert program().size
    (warning,) = caught
    assert warning.category is SharedNoiseWarning
    assert str(warning.message) == (
        "The random stream 'default' is broadcast by a vmap, so every example draws the same "
        "numbers. Give each its own with nnx.split_rngs(splits=n) or rngs.split(n) and map over "
        "axis 0 of the streams; if the same numbers are wanted, rngs.broadcast(n) says so."
    )
    assert warning.filename == __file__


@pytest.mark.parametrize("program", UNSHARED.values(), ids=UNSHARED)
def test_no_warning_where_nothing_is_shared(program):
    assert program().size


def test_every_vmap_that_shares_is_announced():
    for _ in range(2):
        with pytest.warns(SharedNoiseWarning):
            np.testing.assert_array_equal(np.diff(SHARED["vmap"]()), [1, 1])


def test_dir_shows_the_streams_and_public_methods():
    names = set(dir(nnx.Rngs(0, dropout=1)))
    assert {"default", "dropout", "split", "fork", "items", "uniform", "__call__"} <= names
    assert not [name for name in names if name.startswith("_") and not name.startswith("__")]
    assert {"key", "count", "tag", "last"} <= set(dir(nnx.RngStream(0, tag="dropout")))
