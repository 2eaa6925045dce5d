"""What loops hand from step to step must come back as it went in, in every kind of loop."""

import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import CarryError
from tests.nnx.transforms.stateful import Pair, Scale, values


def scanned(f, start, **options):
    return nnx.scan(lambda carry, x: (f(carry), None), **options)(start, jnp.arange(3.0))[0]


def repeated(f, start, **options):
    return nnx.fori_loop(0, 3, lambda i, value: f(value), start, **options)


def until(f, start, **options):
    def body(state):
        i, value = state
        return i + 1, f(value)

    return nnx.while_loop(lambda state: state[0] < 3, body, (0, start), **options)[1]


# The loop, and what it calls the carry.
LOOPS = {
    "scan": (scanned, "carry"),
    "fori_loop": (repeated, "init_val"),
    "while_loop": (until, r"init_val\[1\]"),
}


@pytest.fixture(params=LOOPS)
def loop(request):
    return (request.param, *LOOPS[request.param])


def test_arrays_and_containers(loop):
    _, run, _ = loop
    out = run(lambda c: {"a": c["a"] + 1, "b": (c["b"][0] * 2, None)}, {"a": 0, "b": (1.0, None)})
    assert (int(out["a"]), float(out["b"][0]), out["b"][1]) == (3, 8.0, None)


@pytest.mark.parametrize("updates", [True, False])
def test_objects_come_back_themselves(loop, updates):
    _, run, _ = loop
    model, weight = Scale(2.0), nnx.Param(jnp.float32(1))

    def step(carry):
        model, (weight, x) = carry
        weight[...] *= 3
        return model, (weight, model(x))

    same, (bare, x) = run(step, (model, (weight, jnp.float32(1))), graph_updates=updates)
    assert same is model
    assert bare is weight
    assert (float(x), float(weight.value), int(model.count.value)) == (8.0, 27.0, 3)


def test_shared_variables_stay_shared(loop):
    _, run, _ = loop
    weight = nnx.Param(jnp.float32(1))

    def step(pair):
        pair.a[...] += 1
        pair.b[...] *= 2
        return pair

    pair = run(step, Pair(weight, weight))
    assert pair.a is pair.b is weight
    assert weight.value == 22.0
    with pytest.raises(ValueError, match=r"was already seen at .*\.a\. tree-mode"):
        run(step, Pair(weight, weight), graph=False)


def test_a_weakly_typed_start_takes_the_type_of_the_first_step(loop):
    _, run, _ = loop
    assert run(lambda c: c + jnp.float32(0.5), 0) == 1.5


def grow(model):
    model.w.value = jnp.stack([model.w.value] * 2)
    return model


def widen(model):
    model.w.value = {"w": model.w.value}
    return model


INT = jnp.int32(0)
BAD = {
    "shape": (
        lambda c: jnp.stack([c, c]),
        0.0,
        r"the carry {} changes from float32\[\] to float32",
    ),
    "dtype": (lambda c: c + 0.5, INT, r"the carry {} changes from int32\[\] to float32\[\]"),
    "weak dtype": (lambda c: jnp.int32(1), 0.5, r"the carry {} changes from float32\[\] to int32"),
    "inner": (
        lambda c: {"a": c["a"], "b": c["b"] + 0.5},
        {"a": 0.0, "b": INT},
        r"the carry {}\.b changes from int32\[\] to float32\[\]\.\nFix: keep shape and dtype",
    ),
    "structure": (
        lambda c: {"b": c["a"]},
        {"a": 0.0},
        r"carry {} changes its structure from PyTreeDef\({{'a': \*}}\) to PyTreeDef\({{'b': \*}}\)",
    ),
    "nothing": (lambda c: None, 0.0, r"carry {} changes its structure from PyTreeDef\(\*\) to Py"),
    "variable's shape": (grow, Scale, r"the carry {}\.w changes from float32\[\] to float32\[2\]"),
    "variable's structure": (widen, Scale, r"the carry {}\.w changes its structure from PyTreeDef"),
    "another object": (
        lambda model: Scale(),
        Scale,
        r"returns another Scale than the Scale that came in at {}\.\nFix: change the object in pla",
    ),
    "no object": (lambda model: 1.0, Scale, r"returns another float than the Scale that came in a"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("updates", [True, False])
def test_a_carry_that_changes(name, updates, loop):
    api, run, place = loop
    f, start, message = BAD[name]
    start = start() if start is Scale else start
    with pytest.raises(CarryError, match=f"nnx.{api}: .*{message.format(place)}"):
        run(f, start, graph_updates=updates)
    assert not isinstance(start, Scale) or values(start) == values(Scale())


def test_objects_that_change_places(loop):
    _, run, place = loop
    with pytest.raises(CarryError, match=rf"that came in at {place}\[0\]\."):
        run(lambda pair: (pair[1], pair[0]), (Scale(1.0), Scale(2.0)))


def test_a_broadcast_variable_that_changes_its_type_in_a_scan():
    f = nnx.scan(
        lambda model, x: grow(model) and x, in_axes=(None, 0), out_axes=0, graph_updates=False
    )
    with pytest.raises(CarryError, match=r"the carry model\.w changes from float32\[\] to float32"):
        f(Scale(), jnp.arange(3.0))


class Total(nnx.Pytree):
    def __init__(self):
        self.a = jnp.array(0.0)


def _add(total, x):
    total.a = total.a + x
    return total


@pytest.mark.parametrize("mode", [{}, {"graph": False}, {"graph_updates": False}], ids=str)
def test_arrays_of_a_carried_object_that_are_changed_in_place(mode):
    step = lambda total, x: (_add(total, x), total.a)  # noqa: E731
    total, sums = nnx.scan(step, **mode)(Total(), jnp.arange(3.0))
    assert (float(total.a), sums.tolist()) == (3.0, [0.0, 1.0, 3.0])
    assert float(nnx.fori_loop(0, 3, lambda i, t: _add(t, i), Total(), **mode).a) == 3.0
    below = lambda total: total.a < 3.0  # noqa: E731
    assert float(nnx.while_loop(below, lambda t: _add(t, 1.0), Total(), **mode).a) == 3.0


def test_a_carried_array_that_a_step_removes_without_graph_updates():
    def step(total, x):
        total.a = "gone"
        return total, x

    message = (
        r"nnx.scan: the step leaves no array at total\.a, which is carried\.\nFix: keep an array"
    )
    with pytest.raises(CarryError, match=message):
        nnx.scan(step, graph_updates=False)(Total(), jnp.arange(3.0))
