"""Scans with axis None: every step begins with the values from before, and these are left.

Where a test says so, its numbers are those of Flax 0.12.8 for the same program.
"""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import DroppedWriteWarning, LostVariableWarning
from tests.compare import numbers
from tests.models import Bag
from tests.nnx.transforms.stateful import Count, Norm, Pair, Scale, counted, values

XS = jnp.arange(1.0, 4.0)
Point = collections.namedtuple("Point", "x y")


def over(f, axes=None, **options):
    """A scan of three steps of ``f(x, model)``, with the writes that it drops."""
    scanned = nnx.scan(f, in_axes=(nnx.Carry, axes), length=3, **options)

    def run(*args):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = scanned(*args)
        run.warnings = [str(w.message) for w in caught if w.category is DroppedWriteWarning]
        return numbers(out)

    return run


def step(x, m):
    return m(x), m.count * 1


def dropped(run):
    """The names in the one warning of a run."""
    (text,) = run.warnings
    return text.removeprefix("nnx.scan drops what its function writes to ").split(": with")[0]


# ---- Variables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [None, nnx.StateAxes({...: None})], ids=["None", "StateAxes"])
@pytest.mark.parametrize("traced", [False, True])
def test_each_step_sees_its_own_writes_only(axes, traced):
    """Numbers of Flax."""
    model = Scale(2.0)
    weight, count = model.w, model.count
    scanned = nnx.scan(step, in_axes=(nnx.Carry, axes), length=3)
    with pytest.warns(DroppedWriteWarning):
        out = (nnx.jit(scanned) if traced else scanned)(jnp.float32(1), model)
    assert numbers(out) == (8.0, [1, 1, 1])
    assert values(model) == values(Scale(2.0))
    assert (model.w is weight, model.count is count) == (True, True)


def test_without_graph_updates_writes_go_from_step_to_step():
    """Numbers of Flax."""
    model = Scale(2.0)
    run = over(step, graph_updates=False)
    assert run(1.0, model) == (8.0, [1, 2, 3])
    assert (model.count.value, run.warnings) == (3, [])
    with nnx.set_graph_updates(False):
        ambient = over(step)
        assert ambient(1.0, model) == (8.0, [4, 5, 6])
    assert ambient(1.0, model) == (8.0, [7, 7, 7])
    assert model.count.value == 6


def test_one_scan_with_several_filters():
    """Numbers of Flax."""
    model = Scale(2.0)
    model.mean = nnx.BatchStat(jnp.float32(0))
    model.bias = nnx.Cache(jnp.arange(3.0))

    def f(x, m):
        y = m(x)
        m.mean.value += 1
        m.bias.value = m.bias * 2 + m.mean
        m.w.value += 1
        return y + m.bias, (m.count * 1, m.mean * 1, m.w * 1)

    axes = nnx.StateAxes({nnx.Cache: 0, nnx.BatchStat: nnx.Carry, ...: None})
    run = over(f, axes)
    assert run(1.0, model) == (27.0, ([1, 1, 1], [1.0, 2.0, 3.0], [3.0, 3.0, 3.0]))
    kept = {("w",): 2.0, ("count",): 0, ("mean",): 3.0, ("bias",): [1.0, 4.0, 7.0]}
    assert values(model) == kept
    assert dropped(run) == "m.count, m.w"


def test_axes_of_objects_in_containers():
    """Numbers of Flax."""
    pair = {"a": Scale(2.0), "b": Scale(2.0)}

    def f(x, d):
        return d["a"](x) + d["b"](x), (d["a"].count * 1, d["b"].count * 1)

    run = over(f, {"a": None, "b": nnx.StateAxes({...: nnx.Carry})})
    assert run(1.0, pair) == (64.0, ([1, 1, 1], [1, 2, 3]))
    assert (pair["a"].count.value, pair["b"].count.value) == (0, 3)
    assert dropped(run) == "d.a.count"


@pytest.mark.parametrize("options", [{"reverse": True}, {"unroll": True}, {"unroll": 2}])
def test_reversed_and_unrolled(options):
    """Numbers of Flax."""
    model = Scale(2.0)

    def f(x, m, y):
        m.w.value += y
        return x * m.w, m.w * 1

    scanned = nnx.scan(f, in_axes=(nnx.Carry, None, 0), **options)
    with pytest.warns(DroppedWriteWarning):
        out = scanned(1.0, model, jnp.arange(3.0))
    assert numbers(out) == (24.0, [2.0, 3.0, 4.0])
    assert model.w.value == 2.0


def test_nested_scans():
    """Numbers of Flax."""
    inner = nnx.scan(step, in_axes=(nnx.Carry, None), length=2)

    def f(x, m):
        y, counts = inner(x, m)
        m.count.value += 10
        return y, (counts, m.count * 1)

    model = Scale(2.0)
    run = over(f)
    assert run(1.0, model) == (64.0, ([[1, 1]] * 3, [10, 10, 10]))
    assert model.count.value == 0
    carried = over(f, nnx.StateAxes({...: nnx.Carry}))
    assert carried(1.0, model) == (64.0, ([[1, 1], [11, 11], [21, 21]], [10, 20, 30]))
    assert model.count.value == 30


def test_under_grad_and_vmap():
    """Numbers of Flax."""

    def loss(m):
        def f(x, m):
            m.w.value *= 2
            return x * m.w, None

        return nnx.scan(f, in_axes=(nnx.Carry, None), length=3)(1.0, m)[0]

    model = Scale(2.0)
    with pytest.warns(DroppedWriteWarning):
        assert nnx.grad(loss)(model).w.value == 96.0
    assert model.w.value == 2.0
    mapped = nnx.vmap(nnx.scan(step, in_axes=(nnx.Carry, None), length=2), in_axes=(0, None))
    with pytest.warns(DroppedWriteWarning):
        out = mapped(jnp.arange(3.0), model)
    assert numbers(out) == ([0.0, 4.0, 8.0], [[1, 1], [1, 1], [1, 1]])
    assert model.count.value == 0


def test_an_optimizer_in_every_step_begins_anew():
    """Numbers of Flax."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    scanned = nnx.scan(train, in_axes=(None, None, 0), out_axes=0)
    with pytest.warns(DroppedWriteWarning, match=r"model\.bias, model\.kernel, optimizer\.step"):
        losses = scanned(model, optimizer, jnp.ones((3, 1, 2)))
    np.testing.assert_allclose(losses, [1.2367, 1.2367, 1.2367], atol=1e-4)
    assert optimizer.step.value == 0


# ---- streams and layers -------------------------------------------------------------------------


def test_a_broadcast_stream_gives_every_step_the_same_keys():
    """Numbers of Flax."""
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    scanned = nnx.scan(lambda d, x: d(x), in_axes=(None, 0), out_axes=0)
    with pytest.warns(DroppedWriteWarning, match="so that random streams give each step the same"):
        first = scanned(dropout, jnp.ones((3, 6)))
    assert first.tolist() == [[2, 0, 2, 0, 2, 2]] * 3
    assert dropout.rngs.count.value == 0
    dropout(jnp.ones(3))
    assert scanned(dropout, jnp.ones((3, 6))).tolist() == [[2, 2, 2, 0, 2, 0]] * 3
    assert dropout.rngs.count.value == 1


def test_running_statistics():
    """Numbers of Flax."""
    xs = jnp.arange(12.0).reshape(3, 2, 2)
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with pytest.warns(DroppedWriteWarning, match=r"norm\.mean, norm\.var"):
        nnx.scan(lambda norm, x: norm(x), in_axes=(None, 0), out_axes=0)(norm, xs)
    assert (norm.mean.value.tolist(), norm.var.value.tolist()) == ([0, 0], [1, 1])
    axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})
    nnx.scan(lambda norm, x: norm(x), in_axes=(axes, 0), out_axes=0)(norm, xs)
    np.testing.assert_allclose(norm.mean.value, [0.1493, 0.1790], atol=1e-4)


def test_a_cell_of_an_rnn():
    """Numbers of Flax."""

    class Cell(nnx.RNNCellBase):
        num_feature_axes = 1

        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.steps = nnx.BatchStat(jnp.float32(0))

        def __call__(self, carry, x):
            self.steps.value += 1
            y = self.dropout(x)
            return carry + y.sum(), y

        def initialize_carry(self, input_shape, rngs=None):
            return jnp.float32(0)

    def run(**options):
        cell = Cell(nnx.Rngs(0))
        out = nnx.RNN(cell, **options)(jnp.ones((3, 4)), initial_carry=jnp.float32(0))
        return out.tolist(), float(cell.steps.value), int(cell.dropout.rngs.count.value)

    moving = [[2, 0, 2, 0], [2, 2, 2, 0], [2, 0, 2, 2]]
    assert run() == (moving, 3, 3)
    with pytest.warns(DroppedWriteWarning):
        assert run(state_axes=nnx.StateAxes({...: None})) == ([[2, 0, 2, 0]] * 3, 0, 0)
    with pytest.warns(DroppedWriteWarning, match=r"writes to cell\.dropout\.rngs\.count:"):
        axes = nnx.StateAxes({nnx.RngState: None, ...: nnx.Carry})
        assert run(state_axes=axes) == ([[2, 0, 2, 0]] * 3, 3, 0)


def test_what_all_layers_of_a_stack_share_goes_from_layer_to_layer():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(rngs.normal(()))

        def __call__(self, x, shared, rngs):
            return shared(x) + rngs.normal(())

    stack = nnx.Stack(Layer, 3, rngs=nnx.Rngs(0))
    shared, rngs, eager = Scale(2.0), nnx.Rngs(1), nnx.Rngs(1)
    want = 1.0
    for _ in range(3):
        want = want * 2 + eager.normal(())
    np.testing.assert_allclose(stack(jnp.float32(1), shared, rngs), want, rtol=1e-6)
    assert (shared.count.value, rngs.default.count.value) == (3, 3)


# ---- arrays, replaced Variables, structure -------------------------------------------------------


def test_arrays_in_attributes():
    """Numbers of Flax."""
    array = np.float32([1, 2])
    model = Bag(held=array)

    def f(x, m):
        m.held = m.held + 1
        return x, m.held

    run = over(f)
    assert run(0.0, model)[1] == [[2.0, 3.0]] * 3
    assert model.held is array
    assert dropped(run) == "m.held"


def plus_one(held):
    """The same containers with other Variables and arrays in them."""
    if isinstance(held, nnx.Variable):
        return nnx.Param(held[...] + 1)
    if isinstance(held, dict):
        return {key: plus_one(value) for key, value in held.items()}
    if isinstance(held, Point):
        return Point(*map(plus_one, held))
    if isinstance(held, (list, tuple)):
        return type(held)(map(plus_one, held))
    if isinstance(held, (nnx.List, nnx.Dict)):
        return type(held)(plus_one(list(held) if isinstance(held, nnx.List) else dict(held)))
    return held + 1


HELD = {
    "Variable": lambda: nnx.Param(jnp.float32(1)),
    "List": lambda: nnx.List([nnx.Param(jnp.float32(1)), jnp.float32(2)]),
    "Dict": lambda: nnx.Dict(a=nnx.Param(jnp.float32(1)), b=jnp.float32(2)),
    "list": lambda: [nnx.Param(jnp.float32(1)), jnp.float32(2)],
    "dict": lambda: {"a": nnx.Param(jnp.float32(1)), "b": jnp.float32(2)},
    "tuple": lambda: (nnx.Param(jnp.float32(1)), (jnp.float32(2),)),
    "named tuple": lambda: Point(nnx.Param(jnp.float32(1)), jnp.float32(2)),
}


def leaves(held):
    return [float(x) for x in jax.tree.leaves(held)]


@pytest.mark.parametrize("name", HELD)
def test_what_takes_the_place_of_variables_is_dropped_too(name):
    """Numbers of Flax, which puts a new Variable with the old value there."""
    model = Bag(held=HELD[name]())
    before = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def f(x, m):
        m.held = plus_one(m.held)
        return x, [leaf * 1 for leaf in jax.tree.leaves(m.held)]

    run = over(f)
    seen = run(0.0, model)[1]
    assert seen == [[2.0] * 3, [3.0] * 3][: len(seen)]
    assert leaves(model.held) == [1.0, 2.0][: len(seen)]
    after = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert type(model.held) is type(HELD[name]())
    assert len(dropped(run).split(", ")) == len(seen)


def test_other_kinds_and_places():
    """Numbers of Flax."""
    model = Pair(nnx.Param(jnp.float32(1)), nnx.Param(jnp.float32(2)))

    def swap(x, m):
        m.a, m.b = m.b, m.a
        return x, m.a * 1

    assert over(swap)(0.0, model)[1] == [2.0] * 3
    assert values(model) == {("a",): 1.0, ("b",): 2.0}

    def other_kind(x, m):
        m.a = nnx.BatchStat(m.a[...] + 1)
        return x, m.a * 1

    assert over(other_kind)(0.0, model)[1] == [2.0] * 3
    assert (type(model.a), float(model.a.value)) == (nnx.Param, 1.0)


def test_an_array_in_the_place_of_a_variable():
    """Numbers of Flax."""
    model = Bag(held=nnx.Param(jnp.float32(2)))

    def f(x, m):
        m.held = m.held[...] + 1
        return x, m.held

    with pytest.warns(LostVariableWarning), pytest.warns(DroppedWriteWarning):
        out = nnx.scan(f, in_axes=(nnx.Carry, None), length=3)(0.0, model)
    assert numbers(out) == (0.0, [3.0] * 3)
    assert model.held.value == 2.0


def test_shapes_and_values_that_a_carry_could_not_have():
    """Numbers of Flax."""
    model = Scale(2.0)

    def f(x, m):
        m.w.value = jnp.stack([m.w.value, x])
        return x + 1, m.w * 1

    assert over(f)(1.0, model) == (4.0, [[2.0, 1.0], [2.0, 2.0], [2.0, 3.0]])
    assert model.w.value == 2.0
    number = nnx.Variable(1.0)

    def g(x, v):
        v.value = v.value + 1
        return x, v.value

    assert over(g)(0.0, number) == (0.0, [2.0] * 3)
    assert number.value == 1.0
    assert type(number.value) is float


def test_what_was_sown_before_stays():
    """Numbers of Flax."""

    class Sower(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x * 2

    model = Sower()
    model.sow(nnx.Intermediate, "seen", jnp.float32(9))
    run = over(lambda x, m: (m(x), None))
    assert run(1.0, model)[0] == 8.0
    assert numbers(model.seen.value) == (9.0,)
    assert dropped(run) == "m.seen"


def test_metadata_of_variables_is_dropped_and_static_attributes_stay():
    """Numbers of Flax."""
    model = Scale(2.0)
    model.mode = "first"

    def f(x, m):
        m.w.set_metadata(note=3)
        m.mode = "second"
        m.steps = getattr(m, "steps", 0) + 1
        return m(x), None

    run = over(f)
    run(1.0, model)
    assert (model.mode, model.steps, model.w.has_metadata("note")) == ("second", 1, False)
    assert dropped(run) == "m.count, m.w"


def test_what_a_step_adds_is_stacked():
    model = Scale(2.0)

    def f(x, m):
        m.seen = nnx.Intermediate(x * 1)
        return m(x), None

    assert over(f)(1.0, model)[0] == 8.0
    assert values(model) == {("w",): 2.0, ("count",): 0, ("seen",): [1.0, 2.0, 4.0]}


def test_shared_variables_and_plain_arguments():
    """Numbers of Flax."""
    model = Scale(2.0)

    def f(x, m, same, d):
        m.w.value += 1
        d["a"] = d["a"] + 1
        return x, (same.w * 1, d["a"])

    scanned = nnx.scan(f, in_axes=(nnx.Carry, None, None, None), length=3)
    given = {"a": jnp.float32(2)}
    with pytest.warns(DroppedWriteWarning, match=r"writes to m\.w:"):
        out = scanned(0.0, model, model, given)
    assert numbers(out) == (0.0, ([3.0] * 3, [3.0] * 3))
    assert (model.w.value, given["a"]) == (2.0, 2.0)


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_variables_stored_as_refs_give_the_same_numbers(storage):
    model = nnx.with_vars(Scale(2.0), **storage)
    assert over(step)(jnp.float32(1), model) == (8.0, [1, 1, 1])
    assert values(model) == values(Scale(2.0))
    assert isinstance(model.count.raw_value, jax.Ref)


def test_no_step_and_one_trace():
    model = Scale(2.0)
    model.mode = "first"

    def f(x, m):
        m.mode = "second"
        return m(x), None

    f, runs = counted(f)
    scanned = nnx.scan(f, in_axes=(nnx.Carry, None), length=0)
    with pytest.warns(DroppedWriteWarning):
        scanned(jnp.float32(1), model)
    assert (model.mode, model.count.value, len(runs)) == ("second", 0, 1)


# ---- the warning --------------------------------------------------------------------------------


def test_the_text_of_the_warning_and_where_it_points():
    model = Scale(2.0)
    with pytest.warns(DroppedWriteWarning) as caught:
        nnx.scan(step, in_axes=(nnx.Carry, None), length=3)(1.0, model)
    (warning,) = caught
    assert str(warning.message) == (
        "nnx.scan drops what its function writes to m.count: with axis None every step begins with "
        "the values from before the scan, and these are left after it. To hand writes from step to "
        "step give nnx.Carry instead, for an object nnx.StateAxes({nnx.Param: None, ...: "
        "nnx.Carry})."
    )
    assert warning.filename == __file__
    with pytest.warns(DroppedWriteWarning) as caught:
        nnx.jit(nnx.scan(step, in_axes=(nnx.Carry, None), length=3))(1.0, model)
    assert caught[0].filename == __file__


def test_each_write_is_told_once():
    def f(x, m):
        if x.shape:
            m.w.value += 1
        return m(x), None

    run = over(f)
    model = Scale(2.0)
    run(jnp.float32(1), model)
    assert dropped(run) == "m.count"
    for x in (1.0, 2, jnp.float32(1)):
        run(x, model)
        assert run.warnings == []
    run(jnp.ones(2), model)
    assert dropped(run) == "m.w"


def test_no_warning_where_nothing_is_written():
    model = Pair(Scale(2.0), Norm())
    model.b.use_running_average = True
    scanned = nnx.scan(lambda x, m: (m.b(x * m.a.w), None), in_axes=(nnx.Carry, None), length=3)
    assert scanned(1.0, model)[0] == 8.0
    count = Count(jnp.int32(0))

    def same(x, count):
        before = count.get_value()
        count.value = before + 1
        count.value = before
        return x, None

    nnx.scan(same, in_axes=(nnx.Carry, None), length=3)(1.0, count)


def test_as_an_error_the_warning_leaves_everything_as_it_was():
    stack = nnx.vmap(Scale)(jnp.arange(1.0, 4.0))
    model = Scale(2.0)
    scanned = nnx.scan(lambda x, s, m: (m(s(x)), None), in_axes=(nnx.Carry, 0, None))
    for _ in range(2):
        with pytest.raises(DroppedWriteWarning):
            scanned(1.0, stack, model)
    assert (stack.count.value.tolist(), model.count.value) == ([0, 0, 0], 0)
