"""Lifted transforms of functions of scopes: keys, groups, scopes inside each other, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import core, nnx
from linnet.core import lift
from linnet.core.packing import Lifted
from linnet.errors import InvalidScopeError, ModifyScopeVariableError
from linnet.typing import In, Out

RNGS = {"params": jax.random.key(0), "other": jax.random.key(1)}
SPLIT = {"variable_axes": {True: 0}, "split_rngs": {"params": True}}
ONES = jnp.ones(2)


def draw(scope, *_):
    return [jax.random.key_data(scope.make_rng("params")) for _ in range(2)]


def record_key(scope, state):
    n, found = state
    return n + 1, found.at[n].set(jax.random.key_data(scope.make_rng("params")))


def run(function, variables=None, mutable=True):
    return core.apply(function, mutable=mutable)(variables or {}, rngs=RNGS)


def keys(function):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), run(function)[0])


# The first four keys of the root scope, whole and split in two, as Flax 0.12.8 gives them.
FIRST = [1428664606, 3351135085]
SECOND = [3456700291, 3873160899]
THIRD = [2411773124, 4124888837]
FOURTH = [4278980902, 1922873063]
FIRST_SPLIT = [[58147272, 3331382373], [2456923375, 1475677105]]
SECOND_SPLIT = [[1601249043, 231280760], [3000265626, 3704303680]]
THIRD_SPLIT = [[3477626000, 3906448004], [2804797987, 3018678673]]
FOURTH_SPLIT = [[3442520742, 2664758560], [718863089, 3946383432]]


def test_remat_goes_on_counting():
    assert keys(lambda s: [lift.remat(draw)(s), lift.remat(draw)(s)]) == [
        [FIRST, SECOND],
        [THIRD, FOURTH],
    ]


@pytest.mark.parametrize("transform", [lambda f: f, lift.checkpoint, lift.jit])
def test_a_state_in_a_collection_stays_one(transform):
    def body(scope):
        assert isinstance(scope.get_variable("stats", "seen"), nnx.State)
        scope.put_variable("stats", "n", ONES)

    variables = {"stats": {"seen": nnx.State({"mean": ONES}), "n": 0 * ONES}}
    stats = run(transform(body), variables, mutable="stats")[1]["stats"]
    assert isinstance(stats["seen"], nnx.State) and stats["seen"]["mean"].tolist() == [1, 1]
    assert stats["n"].tolist() == [1, 1]


def test_vmap_splits_keys():
    mapped = lift.vmap(draw, **SPLIT)
    assert keys(lambda s: [mapped(s, ONES), mapped(s, ONES)]) == [
        [FIRST_SPLIT, SECOND_SPLIT],
        [THIRD_SPLIT, FOURTH_SPLIT],
    ]


def test_vmap_shares_keys():
    mapped = lift.vmap(draw, {True: 0}, {"params": False})
    assert keys(lambda s: mapped(s, ONES)) == [[FIRST] * 2, [SECOND] * 2]


def test_vmap_of_a_child_splits_before_the_path_is_folded_in():
    mapped = lift.vmap(lambda s, x: draw(s.push("b")), **SPLIT)
    assert keys(lambda s: mapped(s.push("a"), ONES)) == [
        [[3762350207, 2942601724], [1266493242, 1196913515]],
        [[869146535, 830229655], [1946538309, 2895561541]],
    ]


def test_draws_around_a_transform():
    mapped = lift.vmap(draw, **SPLIT)

    def around(scope):
        before = jax.random.key_data(scope.make_rng("params"))
        inside = mapped(scope, ONES)
        return before, inside, jax.random.key_data(scope.make_rng("params"))

    assert keys(around) == (FIRST, [SECOND_SPLIT, THIRD_SPLIT], FOURTH)


def test_nested_vmap():
    mapped = lift.vmap(lift.vmap(draw, **SPLIT), **SPLIT)
    assert keys(lambda s: mapped(s, jnp.ones((2, 2))))[0] == [
        [[33249009, 2269929881], [3218328906, 211281141]],
        [[3832945530, 766585994], [1859293294, 1576437303]],
    ]


@pytest.mark.parametrize(
    ("split", "check", "wanted"),
    [
        (True, True, [THIRD_SPLIT, FOURTH_SPLIT]),
        (False, True, [[THIRD] * 2, [FOURTH] * 2]),
        (True, False, [FIRST_SPLIT, SECOND_SPLIT]),
    ],
)
def test_scan_draws_in_the_second_trace(split, check, wanted):
    scanned = lift.scan(
        lambda s, c, x: (c, draw(s)),
        variable_axes={True: 0},
        split_rngs={"params": split},
        check_constancy_invariants=check,
    )
    assert keys(lambda s: scanned(s, 0.0, ONES))[1] == wanted


@pytest.mark.parametrize(("split", "wanted"), [(True, FIRST_SPLIT), (False, [FIRST] * 2)])
def test_while_loop_keys(split, wanted):
    def loop(scope):
        start = (0, jnp.zeros((2, 2), jnp.uint32))
        test = lambda scope, state: state[0] < 2  # noqa: E731
        return lift.while_loop(test, record_key, scope, start, split_rngs={"params": split})

    assert keys(loop)[1] == wanted


def test_remat_scan_keys():
    start = (0, jnp.zeros((4, 2), jnp.uint32))
    assert keys(lambda s: lift.remat_scan(record_key, (2, 2))(s, start))[1] == [
        [2698775544, 3146647213],
        [1923007582, 527047624],
        [555422074, 67690981],
        [2876444769, 887433184],
    ]


def test_branches_count_one_after_another():
    assert keys(lambda s: lift.cond(True, draw, draw, s)) == [FIRST, SECOND]
    assert keys(lambda s: lift.cond(False, draw, draw, s)) == [THIRD, FOURTH]
    assert keys(lambda s: lift.switch(1, [draw, draw], s)) == [THIRD, FOURTH]


def test_map_variables_keys():
    assert keys(lift.map_variables(draw, "params")) == [FIRST, SECOND]
    assert keys(lift.map_variables(draw, "params", init=True)) == [THIRD, FOURTH]


@pytest.mark.parametrize("transform", [lift.jit, lift.fold_rngs])
def test_keys_do_not_depend_on_the_path_inside(transform):
    assert keys(transform(draw)) == keys(draw) == [FIRST, SECOND]
    pushed = keys(lambda s: [transform(draw)(s.push(name)) for name in "ab"])
    assert pushed == [[FIRST, SECOND]] * 2
    drawn = keys(lambda s: [transform(draw)(s), transform(draw)(s)])
    assert drawn[0] != drawn[1]


# ---- several scopes -----------------------------------------------------------------------------


def write(scope, value):
    scope.put_variable("state", "x", value)


def test_scopes_inside_one_another_and_beside_one_another():
    def both(scopes, x):
        write(scopes["inner"], x)
        write(scopes["outer"], 2 * x)
        write(scopes["beside"], 3 * x)
        return scopes["outer"].variables()["state"]

    def call(scope):
        outer = scope.push("outer")
        scopes = {"inner": outer.push("inner"), "outer": outer, "beside": scope.push("beside")}
        return lift.jit(both)(scopes, 1.0)

    seen, variables = run(call)
    assert sorted(seen) == ["inner", "x"]
    found = jax.tree.map(float, variables["state"])
    assert found == {"outer": {"inner": {"x": 1.0}, "x": 2.0}, "beside": {"x": 3.0}}


def test_one_scope_given_twice_is_one():
    def both(scopes, x):
        write(scopes[0], x)
        return scopes[1].get_variable("state", "x")

    assert float(run(lambda s: lift.remat(both)([s, s], 3.0))[0]) == 3.0


def test_no_scope_at_all():
    assert float(lift.jit(lambda scopes, x: 2 * x)([], 2.0)) == 4.0


def test_gradients_for_each_scope():
    def product(scopes, x):
        return x * scopes[0].get_variable("params", "w") * scopes[1].get_variable("params", "w")

    def call(scope):
        _, pullback = lift.vjp(product, [scope.push("a"), scope.push("b")], 5.0)
        return pullback(1.0)

    variables = {"params": {"a": {"w": 2.0}, "b": {"w": 3.0}}}
    (a, b), x = run(call, variables, mutable=False)
    assert (float(a["params"]["w"]), float(b["params"]["w"]), float(x)) == (15.0, 10.0, 6.0)


# ---- what is seen and written inside ------------------------------------------------------------


def test_only_lifted_collections_are_seen_and_written():
    def inside(scope, x):
        seen = sorted(scope.variables())
        with pytest.raises(ModifyScopeVariableError):
            write(scope, x)
        return len(seen)

    variables = {"params": {"w": 1.0}, "state": {"x": 1.0}}
    mapped = lift.vmap(inside, {"params": None}, {}, out_axes=None)
    out, after = run(lambda s: mapped(s, ONES), variables)
    assert (out, after) == (1, variables)


def test_axes_of_what_goes_in_and_comes_out():
    def inside(scope, x):
        write(scope, x)
        return scope.get_variable("params", "w")

    mapped = lift.vmap(inside, {"params": In(1), "state": Out(0)}, {})
    variables = {"params": {"w": jnp.arange(4.0).reshape(2, 2)}}
    out, after = core.apply(lambda s: mapped(s, ONES), mutable="state")(variables)
    np.testing.assert_array_equal(out, [[0, 2], [1, 3]])
    np.testing.assert_array_equal(after["state"]["x"], ONES)


def test_scopes_end_with_the_transform():
    kept = []
    run(lambda s: lift.remat(lambda s, x: kept.append(s))(s, 1.0))
    with pytest.raises(InvalidScopeError):
        kept[0].push("a")


def test_collections_that_only_pass_through():
    def step(scope, carry, x):
        return carry + scope.get_variable("fixed", "n"), None

    scanned = lift.scan(step, variable_carry=("fixed", "counts"))
    variables = {"fixed": {"n": 2.0}}
    out = core.apply(lambda s: scanned(s, 0.0, ONES), mutable="counts")(variables)
    assert (float(out[0][0]), out[1]) == (4.0, {})


def test_swapped_collections():
    def both(scope):
        scope.put_variable("a", "n", 5)
        return scope.get_variable("a", "v"), scope.get_variable("b", "v")

    out, after = run(lift.swap_collection(both, "a", "b"), {"a": {"v": 1}, "b": {"v": 2}})
    assert (out, after) == ((2, 1), {"a": {"v": 1}, "b": {"v": 2, "n": 5}})


def test_pack_by_hand():
    def summed(fn):
        def inner(scope_fn, repack_fn, variable_groups, rng_groups, x):
            scope = scope_fn(jax.tree.map(jnp.sum, variable_groups), rng_groups)
            return fn(scope, x), repack_fn(scope)

        return lift.pack(inner, ["params"], ["state"], ["params"], name="summed")

    def use(scope, x):
        write(scope, x)
        return x * scope.get_variable("params", "w"), scope.path_text

    variables = {"params": {"w": jnp.arange(3.0)}}
    out, after = core.apply(lambda s: summed(use)(s, 2.0), mutable="state")(variables)
    assert (float(out[0]), out[1], after) == (6.0, "/summed()", {"state": {"x": 2.0}})
    with pytest.raises(NotImplementedError, match="lifted with summed takes no keyword arguments"):
        run(lambda s: summed(use)(s, x=2.0))


def test_only_scopes_are_scopes():
    with pytest.raises(TypeError, match=r"lifted with jit takes a scope, .* but got int"):
        lift.jit(draw)(3)


def test_flags_and_names_inside():
    def inside(scope, x):
        assert scope.get_flag("initializing") and scope.name == "a" and scope.path == ("a",)
        return scope.path_text

    init = core.init(lambda s: lift.fold_rngs(inside)(s.push("a"), 1.0))
    assert init(jax.random.key(0))[0] == "/fold_rngs(a)"


def test_counting_draws():
    scope = core.bind({}, rngs=RNGS)
    lifted = Lifted(scope, [True], [True], [True], "test")
    scope.make_rng("params")
    scope.push("a").push("b").make_rng("other")
    assert lifted.draws() == 2
