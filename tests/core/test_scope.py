"""Scopes: variables at a place, names, random keys, and functions of a scope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import config, core, errors, nnx
from linnet.core import DenyList, FrozenDict, scope as scopes
from linnet.core.scope import LazyRng, Scope

KEY = jax.random.key(0)


def numbers(key):
    return np.asarray(jax.random.key_data(key)).tolist()


# ---- random keys: what Flax 0.12.8 gives --------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "separated", "expected"),
    [
        ((), False, [0, 0]),
        ((1,), False, [1428664606, 3351135085]),
        ((2,), False, [3456700291, 3873160899]),
        ((0,), False, [1582770048, 702645809]),
        (("a", 1), False, [4125457573, 1401183132]),
        (("a", 2), False, [1678162372, 3293046106]),
        ((), True, [0, 0]),
        ((1,), True, [1543086838, 3704909070]),
        (("a", 1), True, [444147915, 1923737313]),
        (("Dense_0", "kernel", 300), True, [302187374, 3381465047]),
    ],
)
def test_lazy_rng_folds_as_flax_does(suffix, separated, expected):
    with config.temp_flip_flag("fix_rng_separator", separated):
        assert numbers(LazyRng.create(KEY, *suffix).as_jax_rng()) == expected


def test_lazy_rng_is_a_pytree_and_grows():
    rng = LazyRng.create(LazyRng.create(KEY, "a"), "b", 3)
    assert rng.suffix == ("a", "b", 3)
    (leaf,), treedef = jax.tree.flatten(rng)
    assert jax.tree.unflatten(treedef, [leaf]) == LazyRng(leaf, ("a", "b", 3))
    cleared = rng.clear_suffix()
    assert cleared.suffix == () and numbers(cleared.rng) == numbers(rng.as_jax_rng())
    with pytest.raises(
        ValueError, match=r"Only names and numbers can be folded into a key, not 1.5"
    ):
        LazyRng.create(KEY, 1.5).as_jax_rng()


def test_the_switch_separates_names():
    join, split = LazyRng.create(KEY, "ab", "c"), LazyRng.create(KEY, "a", "bc")
    assert numbers(join.as_jax_rng()) == numbers(split.as_jax_rng())
    with config.temp_flip_flag("fix_rng_separator", True):
        assert numbers(join.as_jax_rng()) != numbers(split.as_jax_rng())


def test_make_rng_counts_by_path_and_falls_back_to_params():
    scope = core.bind({}, rngs={"params": KEY})
    drawn = [numbers(scope.make_rng(name)) for name in ("params", "dropout", "params")]
    by_count = [numbers(LazyRng.create(KEY, n).as_jax_rng()) for n in (1, 2, 3)]
    assert drawn == by_count
    child = scope.push("child")
    first = numbers(child.make_rng())
    assert first == numbers(LazyRng.create(KEY, "child", 1).as_jax_rng())
    # The same child, made again, goes on counting; rewound with its keys it starts again.
    again = scope.rewound().push("child")
    assert numbers(again.make_rng()) == numbers(LazyRng.create(KEY, "child", 2).as_jax_rng())
    assert numbers(child.rewound(rewind_rngs=True).make_rng()) == first
    assert scope.has_rng("params") and not scope.has_rng("dropout")


def test_make_rng_without_a_key():
    scope = core.bind({}, rngs={"noise": KEY}).push("encoder")
    with pytest.raises(errors.InvalidRngError) as caught:
        scope.make_rng("dropout")
    assert str(caught.value) == (
        'Scope "/encoder" needs a random key for "dropout", but the streams given are: \'noise\'.\n'
        'Fix: pass rngs={"dropout": jax.random.key(0)} to init or apply; inside a lifted '
        "transform, name it in split_rngs too."
    )


# ---- variables ----------------------------------------------------------------------------------


def test_children_see_their_part_and_write_into_the_parent():
    given = {"params": {"w": 1, "sub": {"b": 2}}, "stats": {"m": 1.0}}
    scope = core.bind(given, mutable=["stats"])
    child = scope.push("sub")
    assert child.get_variable("params", "b") == 2
    assert child.get_variable("params", "zz", 3) == 3
    assert child.variables() == {"params": {"b": 2}}
    child.put_variable("stats", "q", 5)
    assert child.has_variable("stats", "q") and not child.has_variable("none", "q")
    assert scope.mutable_variables() == {"stats": {"m": 1.0, "sub": {"q": 5}}}
    assert given["stats"] == {"m": 1.0}, "the caller's dict is not changed"
    assert not child.is_collection_empty("params") and child.is_collection_empty("none")
    assert child.is_mutable_collection("stats") and not child.is_mutable_collection("params")


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({}, errors.ScopeCollectionNotFound),
        ({"params": {}}, errors.ScopeCollectionNotFound),
        ({"params": {"a": {"w": 1}}}, errors.ScopeParamNotFoundError),
        ({"params": {"b": {}}}, errors.ScopeParamNotFoundError),
    ],
)
def test_a_collection_is_empty_if_it_has_nothing_at_any_place(variables, error):
    child = core.bind(variables).push("b")
    assert child.is_collection_empty("params") == (error is errors.ScopeCollectionNotFound)
    with pytest.raises(error, match='"/b"'):
        child.param("w", lambda key: 1)


def test_reading_makes_no_empty_collections():
    scope = core.bind({}, mutable=True)
    child = scope.push("a").push("b")
    assert child.get_variable("params", "w") is None and child.is_collection_empty("params")
    assert scope.variables() == {}


def test_a_dict_is_written_into_the_dict_that_children_hold():
    scope = core.bind({"cache": {"sub": {"k": 1, "v": 2}}}, mutable=True)
    child = scope.push("sub")
    assert child.get_variable("cache", "k") == 1
    scope.put_variable("cache", "sub", {"k": 5})
    assert child.get_variable("cache", "k") == 5 and child.get_variable("cache", "v") == 2


def test_variable_and_param():
    scope = core.bind({}, rngs={"params": KEY}, mutable=True)
    assert scope.param("w", lambda key, n: jnp.full(n, 2.0), 3).tolist() == [2, 2, 2]
    count = scope.variable("counts", "n", lambda start: start, 1)
    count.value += 1
    assert count.value == 2 and count.is_mutable()
    assert scope.variables()["counts"] == {"n": 2}
    with pytest.raises(ValueError, match='Duplicate use of scope name: "w" in scope "/"'):
        scope.param("w", lambda key: 1)
    # A name is taken in one collection; a child takes it in all of them.
    scope.variable("other", "n", lambda: 1)
    with pytest.raises(ValueError, match='Duplicate use of scope name: "n"'):
        scope.push("n")


@pytest.mark.parametrize(
    ("variables", "use", "error", "text"),
    [
        (
            {},
            lambda s: s.param("w", lambda key: 1),
            errors.ScopeCollectionNotFound,
            '"w" was asked of the collection "params" in scope "/enc", but the collection is '
            "empty, and the variable cannot be made.\nFix: pass the collection to apply, or "
            'mutable=["params"] with an init_fn; inside a lifted transform, name it in '
            "variable_axes or variable_broadcast.",
        ),
        (
            {"params": {"enc": {"b": 1}}},
            lambda s: s.param("w", lambda key: 1),
            errors.ScopeParamNotFoundError,
            'There is no parameter "w" in scope "/enc", and "params" is not mutable, so that none '
            "can be made.\nFix: apply the module to the variables of its own init; a module that "
            "changed since needs new ones.",
        ),
        (
            {"params": {"enc": {"w": np.ones((2, 3))}}},
            lambda s: s.param("w", lambda key: jnp.ones((3, 2))),
            errors.ScopeParamShapeError,
            'Parameter "w" in scope "/enc" has shape (2, 3), but its initializer gives shape '
            "(3, 2).\nFix: apply the module with the sizes and inputs it was initialized with, or "
            "initialize it anew.",
        ),
        (
            {"stats": {"enc": {"b": 1}}},
            lambda s: s.variable("stats", "m", lambda: 1),
            errors.ScopeVariableNotFoundError,
            'There is no variable "m" in collection "stats" of scope "/enc".\nFix: pass the '
            "variable to apply, or give an initializer and make the collection mutable: "
            'mutable=["stats"].',
        ),
        (
            {"stats": {"enc": {"b": 1}}},
            lambda s: s.put_variable("stats", "b", 2),
            errors.ModifyScopeVariableError,
            'Variable "b" in scope "/enc" cannot be written: its collection "stats" is not mutable '
            "in this call.\n"
            'Fix: out, updates = module.apply(variables, ..., mutable=["stats"]).',
        ),
        (
            {},
            lambda s: s.get_flag("deterministic"),
            ValueError,
            'The scope "/enc" has no flag "deterministic"; it has none.\n'
            "Fix: give a default, or the flag to init or apply.",
        ),
    ],
)
def test_errors_name_the_place(variables, use, error, text):
    with pytest.raises(error) as caught:
        use(core.bind(variables).push("enc"))
    assert str(caught.value) == text


def test_shapes_are_compared_leaf_by_leaf_and_dtypes_are_not():
    tree = {"a": np.ones(2), "b": np.ones(3)}
    scope = core.bind({"params": {"w": tree, "i": np.ones(2, int)}})
    with pytest.raises(errors.ScopeParamShapeError, match=r"has shape \(3,\).*gives shape \(4,\)"):
        scope.param("w", lambda key: {"a": jnp.ones(2), "b": jnp.ones(4)})
    assert scope.param("i", lambda key: jnp.ones(2)).dtype == int


def test_flags_names_and_the_end_of_a_scope():
    scope = Scope({}, flags={"a": 1})
    assert scope.push("x").get_flag("a") == 1 and scope.has_flag("a")
    assert scope.get_flag("b", 3) == 3
    assert [scope.push(prefix="Foo").name for _ in range(2)] == ["Foo0", "Foo1"]
    assert scope.default_name("Foo") == "Foo2" and scope.name_reserved("Foo0")
    assert scope.push("Foo0", reuse=True).path == ("Foo0",)
    assert scope.push("Foo0", reuse=True).push("y").path_text == "/Foo0/y"
    with pytest.raises(TypeError, match=r'Names in scope "/" are text, but got 3 \(int\)'):
        scope.reserve(3)
    with scope.temporary():
        pass
    assert scope.invalid
    text = 'The scope "/" is no longer valid: the call that it belonged to is over'
    for use in (scope.make_rng, scope.push, lambda: scope.put_variable("a", "b", 1)):
        with pytest.raises(errors.InvalidScopeError, match=text):
            use()


def test_a_tracer_that_would_leak_is_refused():
    scope = core.bind({}, mutable=True).push("enc")

    @jax.jit
    def inner(x):
        scope.put_variable("stats", "m", x)
        return x

    with pytest.raises(errors.JaxTransformError) as caught:
        inner(1.0)
    assert str(caught.value).startswith(
        '"m" of collection "stats" in scope "/enc" was made or written inside a JAX transform'
    )
    # Reading, drawing keys and writing what is no tracer of the inner trace are fine.
    rngs = core.bind({"params": {"w": 2.0}}, rngs={"params": KEY}, mutable=True)
    assert jax.grad(lambda x: x * rngs.param("w", lambda key: 2.0))(1.0) == 2


# ---- functions of a scope -----------------------------------------------------------------------


def model(scope, x, *, scale=1):
    w = scope.param("w", jax.nn.initializers.normal(), (2,))
    count = scope.variable("counts", "n", jnp.zeros, ())
    count.value += 1

    def shifted(scope, x, by=0):
        return scope.param("k", jax.nn.initializers.ones, ()) * x + by

    out = [scope.child(shifted, "named")(x), scope.child(shifted)(x), scope.child(shifted, by=5)(x)]
    return w * scale, [float(o) for o in out], dict(scope.flags)


def test_init_and_apply():
    (w, out, flags), variables = core.init(model)(KEY, 1.0)
    assert type(variables) is dict and flags == {"initializing": True} and out == [1, 1, 6]
    np.testing.assert_allclose(w, [0.00076142, -0.01615746], rtol=1e-4)
    assert sorted(variables["params"]) == ["named", "shifted_0", "shifted_1", "w"]
    assert variables["counts"]["n"] == 1
    (_, _, flags), updates = core.apply(model, mutable=["counts"])(variables, 1.0, scale=2)
    assert updates == {"counts": {"n": 2}} and flags == {}
    with pytest.raises(errors.ModifyScopeVariableError):
        core.apply(model)(variables, 1.0)


def test_a_frozen_dict_can_be_returned():
    with config.temp_flip_flag("return_frozendict", True):
        variables = core.init(lambda s: s.param("w", lambda key: 1))(KEY)[1]
    assert isinstance(variables, FrozenDict)


@pytest.mark.parametrize("variables", [{"params": 3}, {3: {}}, 3, None, {"params": {3: 1}}])
def test_variables_are_dicts_of_dicts(variables):
    with pytest.raises(errors.ApplyScopeInvalidVariablesTypeError, match="a dict of collections"):
        core.apply(lambda scope: 1)(variables)


def test_a_layer_of_params_too_many():
    with pytest.raises(
        errors.ApplyScopeInvalidVariablesStructureError, match=r"have a \"params\" layer too many"
    ):
        core.apply(lambda scope: 1)({"params": {"params": {}}})


@pytest.mark.parametrize(
    ("rngs", "shown"),
    [
        (3, r"3 \(int\)"),
        ({"a": jnp.ones(2)}, r"\{'a': float32\[2\]\}"),
        ({3: KEY}, r"\{3: key<fry>\[\]\}"),
        (jax.random.split(KEY), r"key<fry>\[2\]"),
    ],
)
def test_keys_are_checked(rngs, shown):
    with pytest.raises(ValueError, match=f"The first argument of init should be .* got {shown}"):
        core.init(lambda scope: 1)(rngs)
    with pytest.raises(ValueError, match=f"The rngs given to apply should be .* got {shown}"):
        core.apply(lambda scope: 1)({}, rngs=rngs)


def test_old_keys_are_taken():
    out = core.apply(lambda s: s.make_rng())({}, rngs=jax.random.PRNGKey(7))
    assert out.tolist() == [3162605422, 448796902]


def test_lazy_init_computes_nothing_that_variables_do_not_need():
    seen = []

    def dense(scope, x, train):
        jax.debug.callback(lambda: seen.append(1))
        kernel = scope.param("kernel", jax.nn.initializers.normal(), (x.shape[-1], 2))
        scope.param("zeros", lambda key: jnp.zeros_like(x))
        assert train is True
        return x @ kernel

    shape = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    lazy = core.lazy_init(dense)(KEY, shape, train=True)
    eager = core.init(dense)(KEY, jnp.ones((8, 3)), train=True)[1]
    jax.tree.map(np.testing.assert_array_equal, lazy, eager)
    with pytest.raises(errors.LazyInitError) as caught:
        core.lazy_init(lambda s, x: s.param("w", lambda key: x.sum()))(KEY, shape)
    assert str(caught.value) == (
        "A variable could not be computed from the inputs given to lazy_init: ['params']['w'], "
        "float32[], depends on one of the arguments without values (float32[8, 3]).\n"
        "Fix: pass arrays, not jax.ShapeDtypeStruct, for the arguments that it depends on."
    )


# ---- filters ------------------------------------------------------------------------------------

FILTERS = [True, False, "a", ("a", "b"), ["b"], DenyList("a"), DenyList(["a", "c"])]
NAMES = ("a", "b", "c", "d")


def taken(filter_like):
    return {name for name in NAMES if scopes.in_filter(filter_like, name)}


@pytest.mark.parametrize("a", FILTERS, ids=str)
@pytest.mark.parametrize("b", FILTERS, ids=str)
def test_filters_combine_like_sets(a, b):
    assert taken(scopes.union_filters(a, b)) == taken(a) | taken(b)
    assert taken(scopes.intersect_filters(a, b)) == taken(a) & taken(b)
    assert taken(scopes.subtract_filters(a, b)) == taken(a) - taken(b)


def test_filters_alone():
    assert scopes.union_filters("a", ["b"]) == {"a", "b"}
    assert scopes.subtract_filters(True, "a") == DenyList("a")
    assert scopes.filter_to_set(["a", "b"]) == {"a", "b"} and scopes.filter_to_set(False) == set()
    assert [scopes.is_filter_empty(f) for f in (True, False, [], "a", DenyList(True))] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert scopes.group_collections({"a": 1, "b": 2, "c": 3}, ["a", True, "b"]) == (
        {"a": 1},
        {"b": 2, "c": 3},
        {},
    )
    with pytest.raises(AssertionError, match="more names than can be listed"):
        scopes.filter_to_set(DenyList("a"))
    for use in (
        lambda: scopes.in_filter(3, "a"),
        lambda: scopes.filter_to_set(3),
        lambda: scopes.is_filter_empty(None),
    ):
        with pytest.raises(
            errors.InvalidFilterError, match=r"is no filter of collections\.\nFix: "
        ):
            use()


@pytest.mark.parametrize("inside", [False, True])
def test_a_state_of_nnx_among_the_variables_stays_as_it_was(inside):
    """A mapping that is no dict is copied before a scope writes to it, and keeps its type."""
    given = nnx.State({"n": jnp.array(5)})
    variables = {"counts": {"part": given} if inside else given}

    def count(scope):
        scope = scope.push("part") if inside else scope
        scope.put_variable("counts", "n", scope.get_variable("counts", "n") + 1)

    _, updates = core.apply(count, mutable="counts")(variables)
    found = updates["counts"]["part"] if inside else updates["counts"]
    assert isinstance(found, nnx.State)
    assert (int(found["n"]), int(given["n"])) == (6, 5)
