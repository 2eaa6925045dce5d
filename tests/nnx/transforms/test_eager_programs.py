"""Branches and loops outside of all traces: traced at each call, compiled once."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from linnet import nnx
from linnet.nnx.transforms import eager
from tests.models import call
from tests.nnx.transforms.stateful import Pair, Scale, ScaleNormNoise, counted, values

ONE = jnp.float32(1)
FACTOR = 2.0
TABLE = {"factor": 2.0}


def by_cond(f, model, x):
    return nnx.cond(True, f, lambda model, x: x, model, x)


def by_switch(f, model, x):
    return nnx.switch(1, [lambda model, x: x, f], model, x)


def by_fori_loop(f, model, x):
    return nnx.fori_loop(0, 1, lambda i, c: (c[0], f(*c)), (model, x))[1]


def by_while_loop(f, model, x):
    body = lambda c: (c[0], f(c[0], c[1]), c[2] + 1)  # noqa: E731
    return nnx.while_loop(lambda c: c[2] < 1, body, (model, x, 0))[1]


def by_scan(f, model, x):
    in_axes = (nnx.StateAxes({...: nnx.Carry}), nnx.Carry)
    return nnx.scan(f, in_axes=in_axes, out_axes=nnx.Carry, length=1)(model, x)


# Each runs a function of a model and an array once.
WAYS = [by_cond, by_switch, by_fori_loop, by_while_loop, by_scan]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def doubling_compiled(model, x):
    return jax.jit(lambda x: x * 2)(model(x))


def scaled_by_global(model, x):
    return model(x) * FACTOR * TABLE["factor"]


# ---- compiled once ------------------------------------------------------------------------------


@every_way
def test_functions_made_anew_at_each_call_are_compiled_once(way, compiled):
    model = ScaleNormNoise()
    eager = nnx.clone(model)
    x = jnp.arange(3.0)
    for n in range(4):
        np.testing.assert_allclose(
            way(holding(3.0), model, x), holding(3.0)(eager, x), rtol=1e-5, atol=1e-5
        )
        if n == 1:
            compiled.clear()
    assert compiled == []
    for path, value in values(eager).items():
        np.testing.assert_allclose(values(model)[path], value, rtol=1e-5)


@every_way
def test_the_same_function_is_compiled_once_and_run_each_time(way, compiled):
    f, runs = counted(call)
    model = Scale(2.0)
    for n in range(1, 5):
        assert way(f, model, ONE) == 2.0
        assert model.count.value == n
        if n == 1:
            compiled.clear()
            runs.clear()
    assert (compiled, len(runs)) == ([], 3)


@every_way
def test_other_models_and_values_share_what_is_compiled(way, compiled):
    way(call, Scale(2.0), ONE)
    models = [Scale(w) for w in (3.0, 4.0, 5.0)]
    xs = [jnp.float32(n) for n in (6, 7, 8)]
    compiled.clear()
    assert [float(way(call, m, x)) for m, x in zip(models, xs, strict=True)] == [18, 28, 40]
    assert compiled == []


def test_predicates_and_indices(compiled):
    run = lambda number: nnx.switch(number, [lambda x: x, lambda x: -x, lambda x: 0 * x], ONE)  # noqa: E731
    choose = lambda pred: nnx.cond(pred, lambda x: x, lambda x: -x, ONE)  # noqa: E731
    run(0), choose(True), choose(jnp.array(True)), choose(np.True_), choose(1.0)
    compiled.clear()
    assert [float(run(n)) for n in (0, 1, 2, -3, 9)] == [1, -1, 0, 1, 0]
    preds = (True, False, jnp.array(True), jnp.array(False), np.True_, np.False_, 1.0, 0.0)
    assert [float(choose(pred)) for pred in preds] == [1, -1] * 4
    assert compiled == []


def test_bounds_of_loops(compiled):
    total = lambda lower, upper: nnx.fori_loop(lower, upper, lambda i, c: c + i, 0)  # noqa: E731
    bounds = [(0, 4), (1, 4), (0, 0), (jnp.int32(0), 4), (np.int32(0), np.int32(4))]
    until = lambda n: nnx.while_loop(lambda c: c < n, lambda c: c + 2, 0)  # noqa: E731
    for _ in range(2):
        compiled.clear()
        assert [int(total(*pair)) for pair in bounds] == [6, 6, 0, 6, 6]
        assert [int(until(n)) for n in (3, 8, 3)] == [4, 8, 4]
    assert compiled == []


@every_way
def test_each_shape_is_compiled_once(way, compiled):
    model = Scale(2.0)
    xs = [jnp.ones(shape) for shape in [(), (2,), (3, 2), (2,), ()]]
    assert [way(call, model, x).shape for x in xs] == [x.shape for x in xs]
    compiled.clear()
    for x in xs:
        np.testing.assert_array_equal(way(call, model, x), 2 * np.asarray(x))
    assert compiled == []


# ---- nothing is stale ---------------------------------------------------------------------------


def holding(number):
    return lambda model, x: number * model(x)


@every_way
@pytest.mark.parametrize("kind", [float, jnp.float32, np.float32, lambda x: nnx.Param(ONE * x)])
def test_what_a_closure_holds(way, kind):
    model = Scale(1.0)
    for number in (2, 2, 3, 0, -1, 2):
        assert way(holding(kind(number)), model, ONE) == number


@every_way
def test_the_signs_of_zero(way):
    for number in (0.0, -0.0, 0.0):
        assert np.signbit(way(holding(number), Scale(1.0), ONE)) == np.signbit(number)


def test_numbers_that_are_equal_to_each_other():
    made = [lambda x, n=n: x * n for n in (1, 1.0, True, 1)]
    kinds = [nnx.cond(True, f, f, jnp.int32(2)).dtype for f in made]
    assert kinds == [jnp.int32, jnp.float32, jnp.int32, jnp.int32]


# Functions that differ in one setting, by that setting.
FAMILIES = {
    "axis": lambda k: lambda x: x.sum(k % 2),
    "index": lambda k: lambda x: x[k],
    "roll": lambda k: lambda x: jnp.roll(x, k),
    "pad": lambda k: lambda x: jnp.pad(x, k),
    "dtype": lambda k: lambda x: x.astype((jnp.float16, jnp.int32, bool)[k]),
    "seed": lambda k: lambda x: jax.random.normal(jax.random.key(k), (2,)),
    "precision": lambda k: lambda x: jnp.dot(x, x.T, precision=("default", "high", "highest")[k]),
    "reversed": lambda k: lambda x: jax.lax.cumsum(x, reverse=k == 1),
    "length": lambda k: lambda x: jax.lax.scan(lambda c, _: (c + 1, c), x, length=k)[1],
    "direction": lambda k: lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x, reverse=k == 1),
    "descending": lambda k: lambda x: jnp.sort(x, descending=k == 1),
    "largest": lambda k: lambda x: jax.lax.top_k(x, k + 1),
    "constants": lambda k: lambda x: jnp.where(x > k, x, -1.0 * k),
    "limits": lambda k: lambda x: jnp.clip(x, 0, k),
    "function": lambda k: (jnp.sin, jnp.cos, jnp.tan)[k],
    "order": lambda k: lambda x: (x - 1) * 2 if k else (x * 2) - 1,
    "operands": lambda k: lambda x: x[0] - x[1] if k else x[1] - x[0],
    "outputs": lambda k: lambda x: (x + 1, x * 2)[:: 1 if k else -1],
    "structure": lambda k: lambda x: {"a": x} if k else [x],
    "inner": lambda k: jax.jit(lambda x: x**k),
    "branch": lambda k: lambda x: jax.lax.cond(x[0, 0] > k, jnp.sin, jnp.cos, x),
    "mapped": lambda k: jax.vmap(lambda r: r * k, in_axes=k % 2, out_axes=0),
    "derivative": lambda k: jax.grad(lambda x: (x**3).sum() * k),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_functions_that_differ_in_one_setting(name, compiled):
    x = jnp.linspace(-2.0, 2.0, 9).reshape(3, 3)

    def check(k):
        f = FAMILIES[name](k)
        got = nnx.cond(True, f, f, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, f(x))

    for k in (0, 1, 2, 0, 1, 2):
        check(k)
    f = FAMILIES[name](0)
    nnx.cond(True, f, f, x)
    compiled.clear()
    nnx.cond(True, f, f, x)
    assert compiled == []


@every_way
def test_arrays_around_are_arguments_of_what_is_compiled(way, compiled):
    model = Scale(1.0)
    arrays = [jnp.full((2,), n) for n in (1.0, 2.0, 3.0)]
    ones = jnp.ones(2)
    way(holding(arrays[0]), model, ones)
    compiled.clear()
    assert [way(holding(a), model, ones).tolist() for a in arrays] == [[1, 1], [2, 2], [3, 3]]
    assert compiled == []


@every_way
def test_modules_around(way, compiled):
    outer, model = Pair(Scale(2.0), ScaleNormNoise()), Scale(1.0)
    outer.b.norm.use_running_average = outer.b.noise.deterministic = True
    outer.b.scale.count = nnx.static(None)

    def f(model, x):
        y = x * outer.a.w + outer.b.norm.mean
        return model(y) if outer.b.noise.deterministic else y * 0

    assert way(f, model, ONE) == 2.0
    outer.a.w[...] = jnp.float32(5)
    outer.b.norm.mean[...] = jnp.float32(1)
    compiled.clear()
    assert way(f, model, ONE) == 6.0
    assert compiled == []
    outer.b.noise.deterministic = False
    assert way(f, model, ONE) == 0.0
    outer.a = Scale(7.0)
    outer.b.noise.deterministic = True
    assert way(f, model, ONE) == 8.0


@every_way
def test_globals_and_what_they_hold(way, monkeypatch):
    model = Scale(1.0)
    assert way(scaled_by_global, model, ONE) == 4.0
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert way(scaled_by_global, model, ONE) == 6.0
    monkeypatch.setitem(TABLE, "factor", 5.0)
    assert way(scaled_by_global, model, ONE) == 15.0


@every_way
def test_flags_and_methods_of_the_operands(way, monkeypatch):
    net, x = ScaleNormNoise(), jnp.arange(3.0)
    first = way(call, net, x)
    net.noise.deterministic = True
    assert not jnp.allclose(first, way(call, net, x))
    monkeypatch.setattr(ScaleNormNoise, "__call__", lambda self, x: x * 100)
    assert way(call, net, x).tolist() == [0, 100, 200]


@every_way
def test_settings_around(way):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2))
    before = way(lambda m, x: m(x).astype(jnp.float32), model, x)
    with nnx.precision("mixed_bfloat16"):
        within = way(lambda m, x: m(x).astype(jnp.float32), model, x)
    assert not jnp.array_equal(before, within)
    assert jnp.array_equal(before, way(lambda m, x: m(x).astype(jnp.float32), model, x))
    with jax.enable_x64(True):
        assert way(lambda m, x: x * jnp.ones(()), model, np.ones(2)).dtype == jnp.float64


def adding_compiled(array):
    inner = jax.jit(lambda x: x + array)
    return lambda model, x: inner(model(x))


@every_way
def test_compiled_functions_inside_with_arrays_of_their_own(way):
    for number in (1.0, 2.0, 3.0):
        f = adding_compiled(jnp.full((2,), number))
        assert way(f, Scale(1.0), jnp.zeros(2)).tolist() == [number] * 2
    assert way(doubling_compiled, Scale(1.0), ONE) == 2.0


def asking(n):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda model, x: jax.pure_callback(lambda x: np.float32(x + n), shape, x)


@every_way
def test_effects_take_place_at_each_call(way, capfd):
    model = Scale(2.0)

    def f(model, x):
        jax.debug.print("x is {}", x)
        return model(x)

    for n in (1, 2):
        assert way(f, model, jnp.float32(n)) == 2 * n
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["x is 1.0", "x is 2.0"]
    for n in (1, 2):
        assert way(asking(n), model, ONE) == 1 + n


@every_way
def test_refs_around(way):
    model, held = Scale(1.0), nnx.Variable(ONE, hijax=True)
    for n in (1, 2, 3):
        held[...] = jnp.float32(n)
        assert way(lambda model, x: model(x) * held, model, ONE) == n


def test_functions_that_write_to_other_variables_each_time(compiled):
    pair = Pair(Scale(2.0), Scale(3.0))
    first, second = pair.a.count.value, pair.b.count.value

    def step(choice):
        def f(pair, x):
            return getattr(pair, choice)(x) if choice else x

        return nnx.cond(True, f, lambda pair, x: x, pair, ONE)

    assert [float(step(choice)) for choice in ("a", "", "b", "", "a")] == [2, 1, 3, 1, 2]
    assert (pair.a.count.value, pair.b.count.value) == (2, 1)
    first, second = pair.a.count.value, pair.b.count.value
    step("")
    assert pair.a.count.value is first
    assert pair.b.count.value is second


@every_way
def test_after_the_first_call_one_trace_is_enough(way):
    f, runs = counted(lambda model, x: model(model(x)))
    model = Scale(2.0)
    for _ in range(3):
        runs.clear()
        way(f, model, ONE)
    assert len(runs) == 1


def test_a_scan_that_reads_variables_around_it(compiled):
    factor = nnx.Param(ONE)
    scanned = nnx.scan(lambda c, x: (c + x * factor, None))
    found = []
    for n in (1, 2, 3):
        compiled.clear()
        factor[...] = jnp.float32(n)
        found.append(float(scanned(ONE, jnp.ones(3))[0]))
    assert (found, compiled) == ([4.0, 7.0, 10.0], [])


# ---- where it does not matter -------------------------------------------------------------------


@every_way
def test_inside_a_trace_it_leaves_no_mark(way):
    jaxpr = nnx.make_jaxpr(lambda model, x: way(call, model, x))(Scale(), ONE)
    assert "jit" not in {equation.primitive.name for equation in jaxpr.eqns}
    known = len(eager._programs.by_key)
    jax.jit(lambda x: nnx.cond(x > 1, lambda x: x, lambda x: -x, x))(ONE)
    assert len(eager._programs.by_key) == known


@every_way
def test_without_jit(way):
    model = Scale(2.0)
    with jax.disable_jit():
        assert [float(way(call, model, ONE)) for _ in range(2)] == [2.0, 2.0]
    assert model.count.value == 2


@every_way
def test_in_eight_threads(way):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: float(way(holding(n), Scale(1.0), ONE)), range(16)))
    assert found == list(range(16))


# ---- memory -------------------------------------------------------------------------------------


def test_not_every_program_is_kept(monkeypatch, compiled):
    monkeypatch.setattr(eager, "_MOST_PROGRAMS", 3)
    monkeypatch.setattr(eager, "_programs", eager._Programs())
    run = lambda n: float(nnx.cond(True, lambda x: x * n, lambda x: x, ONE))  # noqa: E731
    for n in (1.0, 2.0, 3.0, 4.0, 2.0, 5.0, 2.0):
        assert run(n) == n
        assert len(eager._programs.by_key) <= 3
    compiled.clear()
    run(2.0)
    assert compiled == []
    run(1.0)
    assert len(compiled) == 1


@every_way
def test_models_are_let_go(way):
    class Big:
        pass

    def run():
        model, outer, held = Scale(2.0), ScaleNormNoise(), Big()
        outer.me = nnx.static(lambda: outer)
        doubled = jax.custom_vjp(lambda x: 2 * x)
        doubled.defvjp(lambda x: (2 * x, held), lambda _, g: (2 * g,))
        quadrupled = jax.custom_jvp(lambda x: 4 * x)
        quadrupled.defjvp(lambda p, t: (4 * p[0], 4 * t[0], held)[:2])
        f = lambda model, x: doubled(model(x)) + quadrupled(x) * outer.scale.w  # noqa: E731
        assert way(f, model, ONE) == 12.0
        return [weakref.ref(thing) for thing in (model, outer, held)]

    for _ in range(2):
        refs = run()
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3


def test_rules_for_derivatives_are_no_part_of_what_is_compiled(compiled):
    def run():
        doubled = jax.custom_vjp(lambda x: 2 * x)
        doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
        quadrupled = jax.custom_jvp(lambda x: 4 * x)
        quadrupled.defjvp(lambda p, t: (4 * p[0], 4 * t[0]))
        branch = lambda x: doubled(jax.nn.relu(x)) + jax.lax.map(quadrupled, x)  # noqa: E731
        return nnx.cond(True, branch, lambda x: x, jnp.ones(2)).tolist()

    assert run() == [6, 6]
    compiled.clear()
    assert run() == [6, 6]
    assert compiled == []


# ---- loops over objects are those under jit ------------------------------------------------------


def repeated(model, x):
    model, x = nnx.fori_loop(0, 3, lambda i, c: (c[0], c[0](c[1]) + i), (model, x))
    return model, x


def until_large(model, x):
    go_on = lambda c: (c[0].scale.count < 5) & (c[1].max() < 50)  # noqa: E731
    return nnx.while_loop(go_on, lambda c: (c[0], c[0](c[1])), (model, x))


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("loop", [repeated, until_large])
def test_loops_over_objects_do_the_same_outside_of_jit(loop, updates):
    with nnx.set_graph_updates(updates):
        outside, inside, eager = ScaleNormNoise(), ScaleNormNoise(), ScaleNormNoise()
        x = jnp.arange(3.0)
        jitted = nnx.jit(lambda model, x: loop(model, x)[1])
        for _ in range(3):
            same, got = loop(outside, x)
            assert same is outside
            np.testing.assert_allclose(got, jitted(inside, x), rtol=1e-5)
        state, want = values(outside), values(inside)
        assert state.keys() == want.keys() == values(eager).keys()
        for path in want:
            np.testing.assert_allclose(state[path], want[path], rtol=1e-5)
        assert state != values(eager)


# ---- random programs ----------------------------------------------------------------------------


class World:
    """What functions find around them."""

    def __init__(self):
        self.number = 1.0
        self.array = jnp.float32(1)
        self.module = Scale(1.0)
        self.is_on = True


OPERATIONS = {
    "number": lambda world, held, model, x: x * world.number + held,
    "array": lambda world, held, model, x: x + world.array,
    "module": lambda world, held, model, x: x * world.module.w,
    "flag": lambda world, held, model, x: x + 1 if world.is_on else x - 1,
    "call": lambda world, held, model, x: model(x),
    "write": lambda world, held, model, x: model.w.set_value(model.w + held) or x,
    "loop": lambda world, held, model, x: jax.lax.fori_loop(0, 2, lambda i, x: x + held, x),
    "jit": lambda world, held, model, x: jax.jit(jnp.tanh)(x),
    "relu": lambda world, held, model, x: jax.nn.relu(x),
}
numbers = st.sampled_from([0.0, 1.0, -1.0, 2.0])
CHANGES = {
    "number": lambda world, n: setattr(world, "number", n),
    "array": lambda world, n: setattr(world, "array", jnp.float32(n)),
    "weight": lambda world, n: world.module.w.set_value(jnp.float32(n)),
    "module": lambda world, n: setattr(world, "module", Scale(n)),
    "flag": lambda world, n: setattr(world, "is_on", n > 0),
}
bodies = st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=3).map(tuple)
changes = st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), numbers), max_size=2)
calls = st.tuples(
    changes,
    st.sampled_from(["cond", "switch", "fori_loop", "while_loop"]),
    st.integers(0, 1),  # which bodies
    numbers,  # what their closures hold
    st.integers(0, 2),  # which branch, or how many rounds
    st.sampled_from([2, 3]),  # how many numbers
)


def make(body, held, world):
    def f(model, x):
        for name in body:
            x = OPERATIONS[name](world, held, model, x)
        return x

    return f


def by_linnet(api, functions, which, model, x):
    if api == "cond":
        return nnx.cond(which > 0, functions[1], functions[0], model, x)
    if api == "switch":
        return nnx.switch(which, [*functions, lambda model, x: x], model, x)
    if api == "fori_loop":
        return nnx.fori_loop(0, which, lambda i, c: (c[0], functions[0](*c)), (model, x))[1]
    body = lambda c: (c[0], functions[0](c[0], c[1]), c[2] + 1)  # noqa: E731
    return nnx.while_loop(lambda c: c[2] < which, body, (model, x, 0))[1]


def by_python(api, functions, which, model, x):
    if api == "cond":
        return functions[which > 0](model, x)
    if api == "switch":
        return [*functions, lambda model, x: x][which](model, x)
    for _ in range(which):
        x = functions[0](model, x)
    return x


@settings(max_examples=max(10, settings.default.max_examples // 5))
@given(st.lists(bodies, min_size=2, max_size=2), st.lists(calls, min_size=2, max_size=5))
def test_random_programs_do_what_python_does(pool, program):
    world, model, plain = World(), Scale(0.5), Scale(0.5)
    for edits, api, which_bodies, held, which, size in program:
        for name, number in edits:
            CHANGES[name](world, number)
        chosen = pool if which_bodies else pool[::-1]
        functions = [make(body, held, world) for body in chosen]
        x = jnp.linspace(-1.0, 1.0, size)
        got = by_linnet(api, functions, which, model, x)
        want = by_python(api, functions, which, plain, x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(model.w.value, plain.w.value, rtol=1e-5)
        assert model.count.value == plain.count.value


def test_what_is_no_array_is_refused_by_jax():
    with pytest.raises(TypeError, match="Pred must be a scalar, got a of type <class 'str'>"):
        nnx.cond("a", lambda x: x, lambda x: x, ONE)
    with pytest.raises(TypeError, match=r"<built-in function print>.* is not a valid JAX type"):
        nnx.cond(True, lambda x: x, lambda x: x, print)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        nnx.cond(True, lambda x, y: x, lambda x, y: x, ONE)
