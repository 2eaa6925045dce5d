"""What transforms refuse, in graph mode, without graph updates and in tree mode."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import (
    AxisError,
    CapturedObjectError,
    CarryError,
    DroppedWriteWarning,
    SharedReferenceError,
    TraceContextError,
)
from tests.nnx.transforms.stateful import Pair

GRAPH, WITHOUT_UPDATES, TREE = {}, {"graph_updates": False}, {"graph": False}
MODES = pytest.mark.parametrize("mode", [GRAPH, WITHOUT_UPDATES, TREE], ids=str)
AS_JAX = pytest.mark.parametrize("mode", [WITHOUT_UPDATES, TREE], ids=str)
XS = jnp.arange(3.0)


def param(value=1.0):
    return nnx.Param(jnp.asarray(value))


# ---- what was captured --------------------------------------------------------------------------

MESH = jax.sharding.Mesh(jax.devices()[:1], ("x",))
ALL = jax.sharding.PartitionSpec()

RETURNING = {
    "jit": lambda f, **mode: nnx.jit(f, **mode)(1.0),
    "vmap": lambda f, **mode: nnx.vmap(f, **mode)(XS),
    "pmap": lambda f, **mode: nnx.pmap(f, **mode)(jnp.ones(1)),
    "scan": lambda f, **mode: nnx.scan(lambda c, x: (c, f(x)), **mode)(0.0, XS),
    "shard_map": lambda f, **mode: nnx.shard_map(
        f, mesh=MESH, in_specs=(ALL,), out_specs=ALL, **mode
    )(jnp.ones(1)),
}
WITHOUT_UPDATES_ONLY = {
    "grad": lambda f, **mode: nnx.grad(lambda x: (x, f(x)), has_aux=True, **mode)(1.0),
    "vjp": lambda f, **mode: nnx.vjp(lambda x: (x, f(x)), 1.0, has_aux=True, **mode),
    "remat": lambda f, **mode: nnx.remat(f, **mode)(1.0),
    "cond": lambda f, **mode: nnx.cond(True, f, f, 1.0, **mode),
    "switch": lambda f, **mode: nnx.switch(0, [f, f], 1.0, **mode),
}


@MODES
@pytest.mark.parametrize("name", RETURNING)
def test_a_captured_variable_is_not_returned(name, mode):
    captured = param()
    place = r"the output(\[1\])?\.v"
    message = (
        rf"nnx.{name}: {place} is a Param that the function captured from outside; the caller "
        r"would get another one with the same values\.\n"
        r"Fix: pass the Param as an argument, use it outside as it is, or give out nnx\.clone"
    )
    with pytest.raises(CapturedObjectError, match=message):
        RETURNING[name](lambda x: {"v": captured}, **mode)


@AS_JAX
@pytest.mark.parametrize("name", WITHOUT_UPDATES_ONLY)
def test_without_updates_no_transform_returns_a_captured_variable(name, mode):
    captured = Pair(param())
    with pytest.raises(CapturedObjectError, match=rf"nnx.{name}: the output.*\.a is a Param that"):
        WITHOUT_UPDATES_ONLY[name](lambda x: captured, **mode)


def test_with_graph_updates_others_give_out_copies():
    captured = param(2.0)
    for run in WITHOUT_UPDATES_ONLY.values():
        out = [x for x in jax.tree.leaves(run(lambda x: captured), is_leaf=is_param) if is_param(x)]
        assert float(out[0]) == 2.0
        assert out[0] is not captured


def is_param(x):
    return isinstance(x, nnx.Param)


def test_a_captured_object_or_attribute():
    captured, model, variable = Pair(jnp.ones(2)), Pair(param()), param()
    with pytest.raises(TraceContextError, match=r"nnx.jit: the output is a Pair that the function"):
        nnx.jit(lambda: captured)()
    with pytest.raises(ValueError, match=r"nnx.jit: model\.b is a Param that the function capt"):
        nnx.jit(lambda model: setattr(model, "b", variable))(model)
    assert model.b is None


@MODES
def test_clones_and_copies_of_what_was_captured_go_out(mode):
    captured = Pair(param(3.0))
    out = nnx.jit(lambda: nnx.clone(captured), **mode)()
    assert float(out.a) == 3.0
    assert nnx.eval_shape(lambda: captured, **mode).a.shape == ()


# ---- what came in -------------------------------------------------------------------------------


@AS_JAX
@pytest.mark.parametrize(
    ("name", "run"),
    {
        "jit": lambda v, **mode: nnx.jit(lambda v: v, **mode)(v),
        "eval_shape": lambda v, **mode: nnx.eval_shape(lambda v: v, v, **mode),
        "remat": lambda v, **mode: nnx.remat(lambda v: v, **mode)(v),
        "cond": lambda v, **mode: nnx.cond(True, lambda v: v, lambda v: v, v, **mode),
        "make_jaxpr": lambda v, **mode: nnx.make_jaxpr(lambda v: v, **mode)(v),
    }.items(),
)
def test_an_argument_that_is_returned(name, run, mode):
    message = rf"Param comes into nnx\.{name} at v and goes out at the output, which needs graph"
    with pytest.raises(SharedReferenceError, match=message):
        run(param(), **mode)


@pytest.mark.parametrize(
    ("api", "run"),
    {
        "eval_shape": lambda f, v: nnx.eval_shape(f, v, v, graph_updates=False),
        "make_jaxpr": lambda f, v: nnx.make_jaxpr(f, graph_updates=False)(v, v),
    }.items(),
)
def test_without_updates_these_take_no_argument_twice(api, run):
    message = (
        rf"nnx.{api}: what stands at b was already seen at a, and without graph updates nothing "
        r"may stand twice\.\nFix: give each place its own, or pass graph=True, graph_updates=True"
    )
    with pytest.raises(SharedReferenceError, match=message):
        run(lambda a, b: a + b, param())


def test_the_jaxpr_without_updates_has_the_output_alone():
    def f(v, x):
        v[...] += x
        return v * 2, nnx.Param(x)

    counts = [
        len(nnx.make_jaxpr(f, graph_updates=updates)(param(), 1.0).jaxpr.outvars)
        for updates in (True, False)
    ]
    assert counts == [3, 2]


@MODES
def test_a_bound_method_given_to_eval_shape(mode):
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    message = (
        r"nnx.eval_shape does not support bound methods: Linear.__call__ would take the module as "
        r"a constant\.\nFix: nnx.eval_shape\(Linear.__call__, instance, \.\.\.\)"
    )
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(layer.__call__, jnp.ones((1, 2)), **mode)
    assert nnx.eval_shape(nnx.Linear.__call__, layer, jnp.ones((1, 2)), **mode).shape == (1, 3)


def test_shared_outputs_in_tree_mode_are_named():
    def make():
        v = param()
        return {"a": v, "b": [v]}

    with pytest.raises(SharedReferenceError, match=r"at the output\.b\[0\] was .* the output\.a\."):
        nnx.jit(make, graph=False)()


def test_one_new_variable_along_two_axes():
    def make(x):
        v = nnx.Param(x)
        return v, {"again": v}

    message = (
        r"One Param goes out of nnx.vmap at the output\[0\] along 0 and at the output\[1\]\.again "
        r"along 1\.\nFix: give both places the same axis"
    )
    with pytest.raises(SharedReferenceError, match=message):
        nnx.vmap(make, out_axes=(0, 1))(jnp.ones((3, 2)))
    one, other = nnx.vmap(make, out_axes=(1, -1))(jnp.ones((3, 2)))
    assert one is other["again"]
    assert one.shape == (2, 3)


# ---- prefixes -----------------------------------------------------------------------------------


def with_prefix(what, prefix, **mode):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model, make = Pair(param(XS)), lambda x: Pair(nnx.Param(x))
    first = lambda model: model.a[...]  # noqa: E731
    axes, shardings = (Pair(nnx.Param(value)) for value in (0, here))
    if prefix == "Param":
        model, make, first = param(XS), nnx.Param, lambda v: v[...]
        axes, shardings = nnx.Param(0), nnx.Param(here)
    runs = {
        "vmap: in_axes[0]": lambda: nnx.vmap(first, in_axes=(axes,), **mode)(model),
        "vmap: out_axes": lambda: nnx.vmap(make, out_axes=axes, **mode)(XS),
        "scan: in_axes[1]": lambda: nnx.scan(
            lambda c, m: (c, first(m)), in_axes=(nnx.Carry, axes), **mode
        )(0.0, model),
        "scan: out_axes[1]": lambda: nnx.scan(
            lambda c, x: (c, make(x)), out_axes=(nnx.Carry, axes), **mode
        )(0.0, XS),
        "jit: in_shardings[0]": lambda: nnx.jit(first, in_shardings=(shardings,), **mode)(model),
        "jit: out_shardings": lambda: nnx.jit(make, out_shardings=shardings, **mode)(XS),
    }
    return runs[what]()


PLACES = pytest.mark.parametrize(
    ("what", "by_filter"),
    [
        ("vmap: in_axes[0]", "StateAxes"),
        ("vmap: out_axes", "StateAxes"),
        ("scan: in_axes[1]", "StateAxes"),
        ("scan: out_axes[1]", "StateAxes"),
        ("jit: in_shardings[0]", "StateSharding"),
        ("jit: out_shardings", "StateSharding"),
    ],
)


@PLACES
def test_modules_are_prefixes_in_tree_mode_alone(what, by_filter):
    for mode in (GRAPH, WITHOUT_UPDATES):
        with pytest.raises(AxisError) as caught:
            with_prefix(what, "Pair", **mode)
        assert str(caught.value) == (
            f"nnx.{what} is a Pair, and in graph mode a module is no prefix.\n"
            f"Fix: give one value for the whole Pair, nnx.{by_filter}({{filter: value}}), or "
            "nnx.prefix(model, {filter: value})."
        )
    with_prefix(what, "Pair", **TREE)


@MODES
@PLACES
def test_variables_are_no_prefixes(what, by_filter, mode):
    with pytest.raises(AxisError) as caught:
        with_prefix(what, "Param", **mode)
    assert str(caught.value).startswith(f"nnx.{what} is a Param, and a Variable is no prefix.\nFix")


@MODES
def test_a_dict_of_filters_is_no_prefix(mode):
    with pytest.raises(AxisError, match=r"in_axes=\({Ellipsis: 0},\) does not fit the structure"):
        nnx.vmap(lambda m: m.a * 1, in_axes=({...: 0},), **mode)(Pair(param(XS)))


# ---- scan and loops -----------------------------------------------------------------------------


@MODES
def test_two_carries(mode):
    message = (
        r"nnx.scan: nnx.Carry stands in two places: in_axes\[0\] and in_axes\[2\]\.\n"
        r"Fix: carry one argument, such as a tuple of all that is handed from step to step\."
    )
    axes = {"in_axes": (nnx.Carry, 0, nnx.Carry), "out_axes": (nnx.Carry, nnx.Carry)}
    with pytest.raises(CarryError, match=message):
        nnx.scan(lambda a, x, b: (a, b), **axes, **mode)(0.0, XS, 1.0)


@pytest.mark.parametrize("changes", [True, False])
def test_an_object_that_scan_would_broadcast_out(changes):
    def step(c, v, x):
        if changes:
            v[...] += x
        return c, {"v": v}

    axes = {"in_axes": (nnx.Carry, None, 0), "out_axes": (nnx.Carry, None)}
    message = r"nnx.scan: out_axes=None for the output\[1\]\.v would keep one step's output"
    with pytest.raises(AxisError, match=message):
        nnx.scan(step, **axes)(0.0, param(), XS)


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "counts"),
    [((nnx.Carry, 0), (0, 0), "1 .* 0"), ((None, 0), (nnx.Carry, 0), "0 .* 1")],
)
@MODES
def test_a_carry_whose_out_axes_do_not_match(in_axes, out_axes, counts, mode):
    message = rf"nnx.scan: in_axes marks {counts.split()[0]} places .* out_axes {counts[-1]}"
    with pytest.raises(CarryError, match=message):
        nnx.scan(lambda c, x: (c, x), in_axes=in_axes, out_axes=out_axes, **mode)(0.0, XS)


def swap(pair):
    pair.a, pair.b = pair.b, pair.a


def add(pair):
    pair.new = param()


def loops(change, pair, **mode):
    def step(pair, x):
        change(pair)
        return pair, x

    def body(state):
        change(state[0])
        return state[0], state[1] + 1

    def each(i, pair):
        change(pair)
        return pair

    return {
        "scan": lambda: nnx.scan(step, **mode)(pair, XS),
        "while_loop": lambda: nnx.while_loop(lambda s: s[1] < 3, body, (pair, 0), **mode),
        "fori_loop": lambda: nnx.fori_loop(0, 3, each, pair, **mode),
    }


@AS_JAX
@pytest.mark.parametrize("name", ["scan", "while_loop", "fori_loop"])
def test_a_carry_keeps_its_variables(name, mode):
    pair = Pair(param(0.0), param(1.0))
    message = rf"nnx.{name}: the step puts a new Param in the place of the Param at .*\.a, which"
    with pytest.raises(CarryError, match=message):
        loops(swap, pair, **mode)[name]()
    assert [float(pair.a), float(pair.b)] == [0.0, 1.0]


@AS_JAX
@pytest.mark.parametrize("name", ["scan", "while_loop", "fori_loop"])
def test_a_carry_keeps_its_structure(name, mode):
    message = (
        rf"nnx.{name}: a step changes the structure of what is carried: .*\.new: new \(Param\)\.\n"
        r"Fix: change only the values of Variables in the loop"
    )
    with pytest.raises(CarryError, match=message):
        loops(add, Pair(param()), **mode)[name]()


@pytest.mark.parametrize("steps", [2, 3])
def test_fori_loop_swaps_with_graph_updates(steps):
    pair = Pair(param(0.0), param(1.0))

    def body(i, pair):
        swap(pair)
        return pair

    nnx.fori_loop(0, steps, body, pair)
    assert [float(pair.a), float(pair.b)] == [[0.0, 1.0], [1.0, 0.0]][steps % 2]
    with pytest.raises(CarryError, match=r"nnx.while_loop: the body changes the structure of its"):
        loops(swap, pair)["while_loop"]()


def test_fori_loop_takes_new_variables_with_graph_updates():
    def body(i, pair):
        pair.a = nnx.Param(pair.a[...] + i)
        return pair

    pair = Pair(param(0.0))
    assert nnx.fori_loop(0, 4, body, pair) is pair
    assert float(pair.a) == 6.0


@MODES
def test_scan_carries_variables_and_modules_in_every_mode(mode):
    v, pair = param(0.0), Pair(param(0.0))

    def step(c, x):
        c[0][...] += x
        c[1].a[...] += 2 * x
        return c, c[0] * 1

    (out, again), sums = nnx.scan(step, **mode)((v, pair), XS)
    assert out is v
    assert again.a is pair.a
    assert sums.tolist() == [0.0, 1.0, 3.0]
    assert [float(v), float(pair.a)] == [3.0, 6.0]


@MODES
def test_what_a_condition_writes_is_dropped(mode):
    def cond(pair):
        pair.a[...] += 1
        return pair.b[...] < 3

    def body(pair):
        pair.b[...] += 1
        return pair

    pair = Pair(param(0.0), param(0.0))
    message = r"nnx.while_loop drops what cond_fun writes to init_val\.a: .* Write in body_fun"
    with pytest.warns(DroppedWriteWarning, match=message):
        nnx.while_loop(cond, body, pair, **mode)
    assert [float(pair.a), float(pair.b)] == [0.0, 3.0]
    with pytest.raises(CarryError, match=r"cond_fun changes the structure of its value: .*\.new"):
        nnx.while_loop(lambda pair: add(pair) or pair.b < 3, body, pair)
