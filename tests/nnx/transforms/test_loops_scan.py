"""Scans over objects. Those over plain arrays are in test_loops_scan_arrays.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import (
    AxisError,
    CarryError,
    LostVariableWarning,
    SharedReferenceError,
    TraceContextError,
)
from tests.compare import numbers
from tests.nnx.transforms.stateful import Count, Noise, Norm, Pair, Scale, counted, values

XS = jnp.arange(1.0, 5.0)
BY_KIND = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})


@pytest.fixture
def stack():
    """Three layers with weights 1, 2 and 3."""
    return nnx.vmap(Scale)(jnp.arange(1.0, 4.0))


def through(x, layer):
    return layer(x)


def over_layers(f=through, **options):
    return nnx.scan(f, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **options)


# ---- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [True, False])
def test_scan_over_layers(stack, updates):
    weight = stack.w
    assert over_layers(graph_updates=updates)(2.0, stack) == 12.0
    assert values(stack) == {("w",): [1.0, 2.0, 3.0], ("count",): [1, 1, 1]}
    assert stack.w is weight


@pytest.mark.parametrize("axis", [1, -1])
def test_layers_along_another_axis(axis):
    pair = Pair(nnx.Param(jnp.arange(1.0, 7.0).reshape(2, 3)), Count(jnp.zeros((2, 3))))

    def f(x, pair):
        pair.b[...] += x
        return x * pair.a

    out = nnx.scan(f, in_axes=(nnx.Carry, axis), out_axes=nnx.Carry)(jnp.ones(2), pair)
    assert out.tolist() == [6.0, 120.0]
    assert pair.b.value.tolist() == [[1.0, 1.0, 2.0], [1.0, 4.0, 20.0]]


@pytest.mark.parametrize("updates", [True, False])
def test_an_object_as_carry_comes_back_itself(updates):
    model, bare = Scale(1.0), nnx.Param(jnp.float32(1))

    def f(carry, x):
        model, total = carry
        model.w[...] += x
        return (model, total + model(1.0)), model.w * 1

    (same, total), ys = nnx.scan(f, graph_updates=updates)((model, 0.0), XS)
    assert same is model
    assert (float(total), ys.tolist()) == (2.0 + 4.0 + 7.0 + 11.0, [2.0, 4.0, 7.0, 11.0])
    assert values(model) == {("w",): 11.0, ("count",): 4}

    def g(v, x):
        v[...] += x
        return v, None

    assert nnx.scan(g, graph_updates=updates)(bare, XS)[0] is bare
    assert bare.value == 11.0


def test_a_state_as_carry():
    state = nnx.state(Scale(1.0))

    def f(state, x):
        state.w[...] += x
        return state, None

    out, _ = nnx.scan(f)(state, XS)
    assert out.w is state.w
    assert state.w.value == 11.0


@pytest.mark.parametrize("length", [1, 2, 3])
def test_what_stands_in_the_place_of_a_carried_variable_goes_on(length):
    """Numbers of Flax 0.12.8, which leaves a new Variable there."""
    model = Pair(nnx.Param(jnp.float32(1)), Pair(nnx.Param(jnp.float32(2)), Scale(3.0)))
    weights = model.a, model.b.a

    def f(m, x):
        m.a, m.b.a = m.b.a, m.a
        m.b.b = Scale(m.b.b.w * 2)
        return m, (m.a * 1, m.b.b.w * 1)

    _, (seen, scales) = nnx.scan(f)(model, XS[:length])
    assert seen.tolist() == [2.0, 1.0, 2.0][:length]
    assert scales.tolist() == [6.0, 12.0, 24.0][:length]
    assert (model.a.value, model.b.a.value) == ((2.0, 1.0) if length % 2 else (1.0, 2.0))
    assert all(a is b for a, b in zip((model.a, model.b.a), weights, strict=True))
    assert model.b.b.w.value == 3.0 * 2**length


@pytest.mark.parametrize(
    ("kind", "name", "updates"),
    [(nnx.BatchStat, "new BatchStat", True), (nnx.Param, "new Param", False)],
)
def test_what_cannot_stand_in_the_place_of_a_carried_variable(kind, name, updates):
    def f(m, x):
        m.w = kind(m.w + 1)
        return m, None

    model = Scale(2.0)
    message = (
        rf"nnx.scan: the step puts a {name} in the place of the Param at m\.w, which is carried\."
        r"\nFix: write to the Variable that is there, m\.w\[\.\.\.\] = value"
    )
    with pytest.raises(CarryError, match=message):
        nnx.scan(f, graph_updates=updates)(model, XS)
    assert values(model) == values(Scale(2.0))


def test_an_array_in_the_place_of_a_carried_variable():
    def f(m, x):
        m.w = m.w + 1
        return m, None

    message = r"puts a plain array in the place of the Param at m\.w, which is carried"
    with pytest.warns(LostVariableWarning), pytest.raises(CarryError, match=message):
        nnx.scan(f)(Scale(2.0), XS)


def test_state_axes_with_carry(stack):
    stack.count.value = jnp.int32(0)
    stack.bias = nnx.BatchStat(jnp.float32(5))
    axes = nnx.StateAxes({nnx.Param: 0, Count: nnx.Carry, ...: None})
    f = nnx.scan(lambda x, m: (m(x) + m.bias, m.count * 1), in_axes=(nnx.Carry, axes))
    assert numbers(f(1.0, stack)) == (((1 + 5) * 2 + 5) * 3 + 5, [1, 2, 3])
    assert stack.count.value == 3
    alone = nnx.scan(lambda m: m(10.0), in_axes=axes, out_axes=0)
    assert alone(stack).tolist() == [10.0, 20.0, 30.0]
    assert stack.count.value == 6


def test_several_scanned_objects_in_reverse(stack):
    other = nnx.vmap(Scale)(jnp.arange(1.0, 4.0) * 10)

    def f(c, a, b):
        a.w[...] += c
        return c + b.w, c

    out = nnx.scan(f, in_axes=(nnx.Carry, 0, 0), reverse=True)(0.0, stack, other)
    assert numbers(out) == (60.0, [50.0, 30.0, 0.0])
    assert stack.w.value.tolist() == [51.0, 32.0, 3.0]


@pytest.mark.parametrize("axes", [0, BY_KIND], ids=["layers", "by kind"])
def test_one_trace_where_only_the_carried_and_the_scanned_change(axes, stack):
    f, runs = counted(lambda x, m: (m(x), None))
    length = None if axes == 0 else 3
    scanned = nnx.scan(f, in_axes=(nnx.Carry, axes), length=length)
    scanned(jnp.float32(1), stack if axes == 0 else Scale())
    assert len(runs) == 1
    f, runs = counted(lambda m, x: (m, m(x)))
    nnx.scan(f)(Scale(), XS)
    assert len(runs) == 1


def test_two_traces_at_most_where_broadcast_variables_are_written():
    f, runs = counted(lambda x, m, n: (n(m(x)), None))
    scanned = nnx.scan(f, in_axes=(nnx.Carry, None, None), length=3, graph_updates=False)
    scanned(jnp.float32(1), Scale(), Scale())
    assert len(runs) == 2
    read, runs = counted(lambda x, m: (x * m.w, None))
    nnx.scan(read, in_axes=(nnx.Carry, None), length=3)(jnp.float32(1), Scale())
    assert len(runs) == 1


# ---- outputs and structure ----------------------------------------------------------------------


def test_new_objects_are_stacked():
    def f(c, x):
        return c + x, Pair(nnx.Param(x * jnp.ones(2)), Count(x * jnp.ones(2)))

    axes = nnx.StateAxes({nnx.Param: 0, ...: 1})
    _, pair = nnx.scan(f, out_axes=(nnx.Carry, axes))(0.0, jnp.arange(3.0))
    assert values(pair) == {("a",): [[0, 0], [1, 1], [2, 2]], ("b",): [[0, 1, 2], [0, 1, 2]]}


def test_a_scanned_object_that_is_returned_keeps_its_identity(stack):
    _, same = nnx.scan(lambda c, m: (m(c), m))(1.0, stack)
    assert same is stack
    assert stack.count.value.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("axis", "shape"), [(0, (3, 2)), (1, (2, 3))])
def test_new_attributes_of_a_scanned_object_go_along_its_axis(axis, shape):
    pair = Pair(nnx.Param(jnp.arange(6.0).reshape(shape)), "static")

    def f(c, pair):
        pair.seen = Count(pair.a * 2)
        pair.b = "changed"
        return c, None

    nnx.scan(f, in_axes=(nnx.Carry, axis))(0.0, pair)
    assert pair.seen.value.tolist() == (2 * pair.a.value).tolist()
    assert pair.b == "changed"


@pytest.mark.parametrize("axes", [None, nnx.Carry, nnx.StateAxes({nnx.Param: None, ...: 0})])
def test_what_steps_sow_is_stacked(axes):
    class Sower(Scale):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return x * self.w

    model = Sower(2.0)
    if axes is nnx.Carry:
        (_, out), _ = nnx.scan(lambda c, _: ((c[0], c[0](c[1])), None))((model, 1.0), XS[:2])
    else:
        del model.count
        f = nnx.scan(lambda x, m: (m(x), None), in_axes=(nnx.Carry, axes), length=2)
        out, _ = f(1.0, model)
    assert out == 4.0
    assert [x.tolist() for x in nnx.pop(model, nnx.Intermediate)["x"].value] == [[1.0, 2.0]]


def test_capture_inside():
    class Sower(Scale):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return super().__call__(x)

    def f(x, m):
        out, sown = nnx.capture(m, nnx.Intermediate)(x)
        return out, sown

    stack = nnx.vmap(Sower)(jnp.arange(1.0, 4.0))
    out, sown = nnx.scan(f)(2.0, stack)
    assert (float(out), sown["x"].value[0].tolist()) == (12.0, [2.0, 2.0, 4.0])
    assert not hasattr(stack, "x")


def test_arrays_in_attributes_are_carried_or_scanned():
    class WithArrays(nnx.Module):
        def __init__(self, x):
            self.x = x

    def f(m, x):
        m.x = m.x + x
        return m, m.x

    model = WithArrays(jnp.float32(1))
    _, ys = nnx.scan(f)(model, XS)
    assert (float(model.x), ys.tolist()) == (11.0, [2.0, 4.0, 7.0, 11.0])
    carried = nnx.StateAxes({...: nnx.Carry})
    nnx.scan(lambda x, m: f(m, x)[1], in_axes=(0, carried), out_axes=0)(XS, model)
    assert model.x == 21.0
    stack = WithArrays(jnp.zeros(4))
    nnx.scan(lambda x, m: f(m, x)[1], in_axes=(0, 0), out_axes=0)(XS, stack)
    assert stack.x.tolist() == XS.tolist()


def test_shared_variables_stay_shared():
    w = nnx.Param(jnp.arange(1.0, 4.0))

    def f(c, pair):
        pair.a[...] += 1
        return c * pair.b, Pair(pair.a, pair)

    out, made = nnx.scan(f)(1.0, Pair(w, w))
    assert out == 24.0
    assert made.a is w
    assert made.b.a is made.b.b is w
    with pytest.raises(
        SharedReferenceError, match=r"\.b was already seen at .*\.a\. tree-mode scan"
    ):
        nnx.scan(f, graph=False)(1.0, Pair(w, w))


# ---- keys, refs, running means ------------------------------------------------------------------


def test_split_keys_over_layers():
    """Numbers of Flax 0.12.8 for the same program."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs.params(), ()))
            self.stream = rngs.dropout.fork()

        def __call__(self, x):
            return x * self.w + jax.random.normal(self.stream(), ())

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return Block(rngs)

    rngs = nnx.Rngs(0, dropout=1)
    blocks = create(rngs)
    forward = over_layers()
    outs = [float(forward(1.0, blocks)) for _ in range(2)]
    np.testing.assert_allclose(outs, [-9.995609283447266, -5.300451278686523], rtol=1e-5)
    assert blocks.stream.count.value.tolist() == [2, 2, 2]
    assert rngs.default.count.value == rngs.dropout.count.value == 1


def test_split_keys_around_scan():
    """Numbers of Flax 0.12.8 for the same program."""
    model = Pair(nnx.Param(jnp.arange(1.0, 4.0)), nnx.Rngs(dropout=1).dropout.fork())

    @nnx.split_rngs(splits=3)
    @nnx.scan(in_axes=(nnx.Carry, 0))
    def forward(x, model):
        noise = jax.random.normal(model.b(), ())
        return x * model.a + noise, noise

    outs, noise = zip(*(forward(1.0, model) for _ in range(2)), strict=True)
    np.testing.assert_allclose(outs, [-1.0558586120605469, 6.342081546783447], rtol=1e-5)
    want = [-1.3036916255950928, 0.1178707405924797, 0.41267886757850647]
    np.testing.assert_allclose(noise[0], want, rtol=1e-5)
    assert model.b.count.value == 2


def test_carried_keys_move_on():
    """The number of Flax 0.12.8 for the same program."""
    rngs = nnx.Rngs(0)
    axes = nnx.StateAxes({...: nnx.Carry})
    f = nnx.scan(
        lambda c, r: (c + jax.random.normal(r(), ()), None), in_axes=(nnx.Carry, axes), length=3
    )
    np.testing.assert_allclose(f(0.0, rngs)[0], -0.14280539751052856, rtol=1e-5)
    assert rngs.default.count.value == 3


def test_running_means_and_keys_as_in_a_python_loop():
    pair = Pair(Norm(), Noise(nnx.Rngs(0)))
    eager = nnx.clone(pair)
    xs = jnp.arange(6.0).reshape(3, 2)
    carried = nnx.StateAxes({...: nnx.Carry})
    out = nnx.scan(lambda x, m: m.b(m.a(x)), in_axes=(0, carried), out_axes=0)(xs, pair)
    np.testing.assert_allclose(out, [eager.b(eager.a(x)) for x in xs], rtol=1e-6)
    assert values(pair) == values(eager)


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
@pytest.mark.parametrize("axes", [BY_KIND, 0], ids=["by kind", "scanned"])
def test_refs_are_read_and_written(storage, axes, stack):
    model = nnx.with_vars(stack if axes == 0 else Scale(2.0), **storage)
    length = None if axes == 0 else 3
    f = nnx.scan(through, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, length=length)
    assert f(jnp.float32(1), model) == (6.0 if axes == 0 else 8.0)
    assert model.count.value.tolist() == ([1, 1, 1] if axes == 0 else 3)
    assert isinstance(model.count.raw_value, jax.Ref)


# ---- bad input ----------------------------------------------------------------------------------


BAD = {
    "carry only in": (
        {"out_axes": 0},
        CarryError,
        "in_axes marks 1 places with nnx.Carry, and out",
    ),
    "carry only out": ({"in_axes": (None, 0)}, CarryError, "marks 0 places with nnx.Carry, and"),
    "length": ({"length": 3}, AxisError, r"different sizes:\n  - length: 3\n  - x: 4\n"),
    "no length": (
        {"in_axes": (nnx.Carry, None), "length": None},
        AxisError,
        "nothing to scan over and no length",
    ),
    "range": (
        {"in_axes": (nnx.Carry, 1)},
        AxisError,
        r"axis 1 is out of range for x: float32\[4\]",
    ),
    "too many": (
        {"in_axes": (nnx.Carry, 0, 0)},
        AxisError,
        "in_axes has 3 entries for 2 positiona",
    ),
    "out none": ({"out_axes": (nnx.Carry, None)}, AxisError, r"out_axes=None for the output\[1\]"),
    "all carried": (
        {"in_axes": nnx.Carry, "out_axes": (nnx.Carry, 0)},
        CarryError,
        r"the carry of all arguments changes its structure from PyTreeDef\(\(\*, \*\)\) to",
    ),
    "out fit": ({"out_axes": (nnx.Carry, 0, 0)}, AxisError, "does not fit the structure of what"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=f"nnx.scan:? .*{message}"):
        nnx.scan(lambda c, x: (c, c), **{"length": 4, **options})(0.0, XS)


def test_what_cannot_come_in_or_go_out(stack):
    message = (
        r"comes into nnx.scan at m\.\w+ along None and goes out at the output\[1\]\.\w+ along 0"
    )
    with pytest.raises(SharedReferenceError, match=message):
        nnx.scan(lambda c, m: (c, m), in_axes=(nnx.Carry, None), length=2)(0.0, stack)
    with pytest.raises(AxisError, match=r"out_axes=None for the output\[1\] would keep one step's"):
        nnx.scan(lambda c, x: (c, nnx.Param(x)), out_axes=(nnx.Carry, None))(0.0, XS)
    with pytest.raises(SharedReferenceError, match="which needs graph updates"):
        nnx.scan(lambda c, m: (c, m.w), graph_updates=False)(0.0, stack)
    with pytest.raises(
        TypeError, match=r"nnx.scan takes arguments by position, and \['k'\] cannot"
    ):
        nnx.scan(lambda c, x, *, k: (c, x))(0.0, XS, k=1)


def test_decorators_methods_bound_methods_and_captured_models(stack):
    class Layers(Scale):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(self, x):
            return self(x)

    @nnx.scan
    def total(c, x):
        return c + x, None

    assert nnx.vmap(Layers)(jnp.arange(1.0, 4.0)).forward(2.0) == 12.0
    assert (float(total(0.0, XS)[0]), total.__name__) == (10.0, "total")
    with pytest.raises(
        ValueError, match=r"nnx.scan does not support bound methods: Scale.__call__"
    ):
        nnx.scan(stack.__call__)
    model = Scale()
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        nnx.scan(lambda c, x: (c, model(x)))(0.0, XS)
    assert model.count.value == 0
    assert nnx.scan(lambda c, x: (c + model.w * x, None))(0.0, XS)[0] == 20.0


def test_after_an_error_objects_are_as_before(stack):
    def fails(x, m):
        m(x)
        m.extra = nnx.Param(x)
        raise RuntimeError("stop")

    before = values(stack)
    with pytest.raises(RuntimeError, match="stop"):
        over_layers(fails)(2.0, stack)
    assert values(stack) == before
