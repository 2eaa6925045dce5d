"""Mapping functions of objects over an axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import AxisError, SharedNoiseWarning, SharedReferenceError, TraceContextError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Noise, Norm, Pair, Scale, counted, values

BY_KIND = nnx.StateAxes({nnx.Param: 0, ...: None})


@pytest.fixture
def stack():
    return nnx.vmap(Scale)(jnp.arange(3.0))


@pytest.mark.parametrize("updates", [True, False])
def test_new_objects_are_stacked_and_variables_updated_along_their_axes(updates):
    stack = nnx.vmap(Scale, graph_updates=updates)(jnp.arange(3.0))
    assert isinstance(stack, Scale)
    weight, count = stack.w, stack.count
    out = nnx.vmap(call, graph_updates=updates)(stack, jnp.arange(3.0) + 1)
    assert out.tolist() == [0.0, 2.0, 6.0]
    assert values(stack) == {("w",): [0.0, 1.0, 2.0], ("count",): [1, 1, 1]}
    assert stack.w is weight
    assert stack.count is count


def test_values_are_those_of_plain_jax(stack):
    f = lambda w, x: jnp.sin(w * x).sum()  # noqa: E731
    x = jnp.arange(6.0).reshape(2, 3)
    want = jax.vmap(f, in_axes=(0, 1), out_axes=0)(stack.w.value, x)
    got = nnx.vmap(lambda m, x: jnp.sin(m(x)).sum(), in_axes=(0, 1))(stack, x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(("in_axes", "shape"), [(1, (2, 3)), (-1, (2, 3)), (0, (3, 2))])
def test_a_variable_goes_back_where_it_came_from(in_axes, shape):
    start = jnp.arange(6.0).reshape(shape)
    w = nnx.Param(start)

    def double(w):
        w[...] *= 2
        return w.sum()

    out = nnx.vmap(double, in_axes=in_axes)(w)
    assert w.value.tolist() == (2 * start).tolist()
    assert out.tolist() == (2 * start).sum(0 if in_axes else 1).tolist()


def test_broadcast_variables_may_be_written_the_same_for_all(stack):
    model = Scale(2.0)
    out = nnx.vmap(call, in_axes=(None, 0))(model, jnp.arange(3.0))
    assert (out.tolist(), int(model.count.value)) == ([0.0, 2.0, 4.0], 1)
    stack.count.value = jnp.int32(0)
    nnx.vmap(call, in_axes=(BY_KIND, None))(stack, 5.0)
    assert values(stack) == {("w",): [0.0, 1.0, 2.0], ("count",): 1}


def test_broadcast_variables_may_be_written_with_what_differs_further_out():
    """The value depends on the outer axis alone, which the inner one cannot complain about."""
    stack = nnx.vmap(lambda x: Norm())(jnp.arange(2.0))

    def inner(norm, x, y):
        norm.mean[...] = x
        return y

    outer = nnx.vmap(nnx.vmap(inner, in_axes=(None, None, 0)))
    outer(stack, jnp.arange(2.0), jnp.zeros((2, 4)))
    assert stack.mean.value.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("updates", [True, False])
def test_a_broadcast_variable_given_what_differs_between_examples(updates):
    norm = Norm()

    def f(model, x):
        model.mean[...] = x

    message = r"nnx.vmap: model\.mean is broadcast, but was given a value that differs .*\nFix: map"
    with pytest.raises(AxisError, match=message):
        nnx.vmap(f, in_axes=(None, 0), graph_updates=updates)(norm, jnp.arange(3.0))
    assert norm.mean.value == 0.0


def test_collectives_make_it_the_same():
    norm = Norm()

    @nnx.vmap(in_axes=(None, 0), axis_name="batch")
    def f(norm, x):
        norm.mean[...] = jax.lax.pmean(x, "batch")

    f(norm, jnp.arange(3.0))
    assert norm.mean.value == 1.0


def test_axis_size_and_spmd_axis_name():
    assert nnx.vmap(lambda x: x * 2, in_axes=None, axis_size=3)(2.0).tolist() == [4, 4, 4]
    assert nnx.vmap(lambda x: x * 2, spmd_axis_name="i")(jnp.arange(3.0)).tolist() == [0, 2, 4]
    text = r"different sizes:\n  - axis_size: 4\n  - x: 3\n"
    with pytest.raises(AxisError, match=text):
        nnx.vmap(lambda x: x, axis_size=4)(jnp.arange(3.0))
    with pytest.raises(AxisError, match=r"nnx.vmap has nothing to map over: every .*\nFix: give"):
        nnx.vmap(lambda x: x, in_axes=None)(2.0)


def test_arguments_by_name_are_mapped_along_the_first_axis(stack):
    out = nnx.vmap(lambda x, model: model(x))(jnp.ones(3), model=stack)
    assert out.tolist() == [0.0, 1.0, 2.0]
    assert stack.count.value.tolist() == [1, 1, 1]


# ---- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [True, False])
def test_out_axes_of_new_objects(updates):
    def make(x):
        pair = Pair(nnx.Param(x * jnp.ones(2)), Count(x * jnp.ones(2)))
        return pair, nnx.BatchStat(jnp.ones(2)), x * jnp.ones(2), 5.0

    axes = (nnx.StateAxes({nnx.Param: 0, ...: 1}), None, -1, None)
    pair, stat, x, five = nnx.vmap(make, out_axes=axes, graph_updates=updates)(jnp.arange(3.0))
    rows, columns = [[0, 0], [1, 1], [2, 2]], [[0, 1, 2], [0, 1, 2]]
    assert values(pair) == {("a",): rows, ("b",): columns}
    assert (stat.value.tolist(), x.tolist(), five) == ([1, 1], columns, 5.0)


def test_plain_numbers_are_stacked():
    assert nnx.vmap(lambda x: 1)(jnp.arange(3.0)).tolist() == [1, 1, 1]


def test_objects_that_are_returned_keep_their_identity_and_sharing(stack):
    same, (weight, made) = nnx.vmap(lambda m, x: (m, (m.w, Pair(m.w, m))))(stack, jnp.ones(3))
    assert same is stack
    assert weight is stack.w
    assert made.a is stack.w
    assert made.b is stack


def test_a_variable_cannot_go_out_along_another_axis():
    w = nnx.Param(jnp.arange(6.0).reshape(2, 3))
    message = (
        r"Param comes into nnx.vmap at model\.a along 0 and goes out at the output\.y\.a along "
        r"1\.\nFix: give out_axes the same axis"
    )
    with pytest.raises(SharedReferenceError, match=message):
        nnx.vmap(lambda model: {"y": model}, out_axes=1)(Pair(w, None))
    same = nnx.vmap(lambda model: model, in_axes=1, out_axes=-1)(Pair(w, None))
    assert same.a is w


BAD_OUTPUTS = {
    "too many": ((0, 0), r"out_axes=\(0, 0\) does not fit the structure of what it is for"),
    "beyond": (3, r"out_axes 3 is out of range for the output\.y, which is float32\[\] for e"),
    "none": (None, r"the output\.y differs along the mapped axis, but its out_axes is None"),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
@pytest.mark.parametrize("wrap", [jnp.asarray, nnx.Param], ids=["array", "variable"])
def test_bad_out_axes(name, wrap, stack):
    out_axes, message = BAD_OUTPUTS[name]
    with pytest.raises(AxisError, match=f"nnx.vmap: {message}"):
        nnx.vmap(lambda m, x: {"y": wrap(m(x))}, out_axes=out_axes)(stack, jnp.ones(3))
    assert stack.count.value.tolist() == [0, 0, 0]


# ---- structure ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "w", "x", "want"),
    [
        (0, jnp.zeros((3, 2)), jnp.ones(2), (3, 2)),
        (1, jnp.zeros((2, 3)), jnp.ones(2), (2, 3)),
        (nnx.StateAxes({nnx.Param: 0, Count: -1}), jnp.zeros((3, 2)), jnp.ones(2), (2, 3)),
        (None, jnp.zeros(2), jnp.ones(2), (2,)),
    ],
    ids=str,
)
def test_new_attributes_go_along_the_axis_of_the_object(axes, w, x, want):
    def f(pair, i):
        pair.seen = Count(x)
        pair.array = pair.seen.value * 2
        pair.b = "changed"
        return i

    pair = Pair(nnx.Param(w), "static")
    if isinstance(axes, nnx.StateAxes):
        axes = nnx.StateAxes([*axes.items(), (..., -1)])
    nnx.vmap(f, in_axes=(axes, 0))(pair, jnp.arange(3.0))
    assert pair.seen.shape == pair.array.shape == want
    assert pair.b == "changed"


def test_new_attributes_of_a_broadcast_object_are_stacked_if_they_differ():
    pair = Pair(nnx.Param(jnp.float32(1)), None)

    def f(pair, x):
        pair.seen = Count(x)

    nnx.vmap(f, in_axes=(None, 0))(pair, jnp.arange(3.0))
    assert pair.seen.value.tolist() == [0.0, 1.0, 2.0]


def test_attributes_go_away_and_arrays_change(stack):
    stack.array = jnp.arange(3.0)

    def f(m):
        m.array = m.array + m.w
        del m.count

    nnx.vmap(f)(stack)
    assert stack.array.tolist() == [0.0, 2.0, 4.0]
    assert not hasattr(stack, "count")


def test_an_array_of_a_broadcast_object_given_what_differs():
    model = Scale()
    model.array = jnp.zeros(())

    def f(model, x):
        model.array = model.array + x

    with pytest.raises(AxisError, match=r"model\.array is broadcast, but was given a value that"):
        nnx.vmap(f, in_axes=(None, 0))(model, jnp.arange(3.0))
    assert model.array == 0.0


def test_without_graph_updates_structure_stays(stack):
    def f(m, x):
        m.extra = nnx.Param(x)
        return m(x)

    nnx.vmap(f, graph_updates=False)(stack, jnp.ones(3))
    assert not hasattr(stack, "extra")
    assert stack.count.value.tolist() == [1, 1, 1]
    with pytest.raises(SharedReferenceError, match="which needs graph updates"):
        nnx.vmap(lambda m: m.w, graph_updates=False)(stack)


def test_shared_variables_stay_shared():
    w = nnx.Param(jnp.arange(3.0))
    pair = Pair(w, w)

    def f(pair):
        pair.a[...] += 1
        return pair.b * 1, Pair(pair.a, nnx.Param(pair.b * 10))

    out, made = nnx.vmap(f)(pair)
    assert out.tolist() == [1.0, 2.0, 3.0]
    assert pair.a is pair.b is made.a
    assert made.b.value.tolist() == [10, 20, 30]
    with pytest.raises(
        SharedReferenceError, match=r"\.b was already seen at .*\.a\. tree-mode vmap"
    ):
        nnx.vmap(f, graph=False)(pair)


# ---- use ----------------------------------------------------------------------------------------


def test_as_decorator_and_method(stack):
    class Layer(Scale):
        @nnx.vmap
        def each(self, x):
            return self(x)

        @nnx.vmap(in_axes=(None, 0))
        def all(self, x):
            return self(x)

    assert Layer.each.__name__ == "each"
    assert nnx.vmap(Layer)(jnp.arange(3.0)).each(jnp.ones(3)).tolist() == [0.0, 1.0, 2.0]
    assert Layer(2.0).all(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_containers_of_modules_and_states(stack):
    other = nnx.vmap(Scale)(jnp.ones(3))
    f = lambda tree: tree["m"][0](2.0) + tree["s"].w * 10  # noqa: E731
    assert nnx.vmap(f)({"m": (stack,), "s": nnx.state(other)}).tolist() == [10.0, 12.0, 14.0]
    assert stack.count.value.tolist() == [1, 1, 1]


def test_one_trace_for_each_call(stack):
    f, runs = counted(call)
    nnx.vmap(f)(stack, jnp.ones(3))
    assert len(runs) == 1
    step = nnx.jit(nnx.vmap(f))
    for _ in range(2):
        step(stack, jnp.ones(3))
    assert len(runs) == 2
    assert stack.count.value.tolist() == [3, 3, 3]


LAYER_WEIGHTS = [-1.4629117250442505, -2.1361758708953857, -1.7108583450317383]


def test_split_keys_make_different_layers():
    """Numbers of Flax 0.12.8 for the same program."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return nnx.Param(jax.random.normal(rngs.params(), (2,)))

    rngs = nnx.Rngs(0)
    first, second = create(rngs), create(rngs)
    np.testing.assert_allclose(first.value[:, 0], LAYER_WEIGHTS, rtol=1e-6)
    want = [0.3190682828426361, -1.8768121004104614, 0.7226881980895996]
    np.testing.assert_allclose(second.value[:, 0], want, rtol=1e-6)
    assert rngs.default.count.value == 2


def test_split_keys_of_one_stream_and_broadcast_ones():
    @nnx.split_rngs(splits=3, only="params")
    @nnx.vmap(in_axes=(nnx.StateAxes({"params": 0, ...: None}),))
    def draw(rngs):
        return jax.random.normal(rngs.params(), ()), jax.random.normal(rngs.dropout(), ())

    rngs = nnx.Rngs(params=0, dropout=1)
    with pytest.warns(UserWarning, match="same"):
        weights, noise = draw(rngs)
    np.testing.assert_allclose(weights, LAYER_WEIGHTS, rtol=1e-6)
    np.testing.assert_allclose(noise, [0.5319373607635498] * 3, rtol=1e-6)
    assert rngs.params.count.value == rngs.dropout.count.value == 1


def test_sow_and_capture():
    class Sower(Scale):
        def __call__(self, x):
            y = super().__call__(x)
            self.sow(nnx.Intermediate, "y", y)
            return y

    stack = nnx.vmap(Sower)(jnp.arange(3.0))
    nnx.vmap(call)(stack, jnp.ones(3))
    assert nnx.pop(stack, nnx.Intermediate)["y"].value[0].tolist() == [0.0, 1.0, 2.0]
    f = lambda m, x: nnx.capture(m, nnx.Intermediate)(x)  # noqa: E731
    out, sown = nnx.vmap(f)(stack, jnp.ones(3))
    assert out.tolist() == sown["y"].value[0].tolist() == [0.0, 1.0, 2.0]
    assert not hasattr(stack, "y")
    model = Sower(2.0)
    nnx.vmap(call, in_axes=(None, 0))(model, jnp.arange(3.0))
    assert model.y.value[0].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_refs_are_read_and_written(storage):
    make = lambda x: nnx.with_vars(Scale(x), **storage)  # noqa: E731
    stack, model = nnx.vmap(make)(jnp.arange(3.0)), make(2.0)
    assert isinstance(stack.w.raw_value, jax.Ref)
    assert nnx.vmap(call)(stack, jnp.ones(3)).tolist() == [0.0, 1.0, 2.0]
    assert nnx.vmap(call, in_axes=(None, 0))(model, jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert (stack.count.value.tolist(), int(model.count.value)) == ([1, 1, 1], 1)
    assert isinstance(model.count.raw_value, jax.Ref)


def test_keys_and_running_means_of_a_stack():
    make = lambda key: Pair(Norm(), Noise(nnx.Rngs(key)))  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 3)
    stack = nnx.vmap(make)(keys)
    x = jnp.arange(6.0).reshape(3, 2)
    out = nnx.vmap(lambda m, x: m.b(m.a(x)))(stack, x)
    for i, key in enumerate(keys):
        one = make(key)
        np.testing.assert_allclose(out[i], one.b(one.a(x[i])), rtol=1e-6)
        assert stack.a.mean.value[i] == one.a.mean.value
    assert stack.b.rngs.count.value.tolist() == [1, 1, 1]


def test_bound_methods_and_captured_models(stack):
    with pytest.raises(
        ValueError, match=r"nnx.vmap does not support bound methods: Scale.__call__"
    ):
        nnx.vmap(stack.__call__)
    model = Scale()
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        nnx.vmap(lambda x: 2 * model(x))(jnp.ones(3))
    assert model.count.value == 0


def test_after_an_error_objects_are_as_before(stack):
    def fails(m, x):
        m(x)
        m.extra = nnx.Param(x)
        raise RuntimeError("stop")

    before = values(stack)
    with pytest.raises(RuntimeError, match="stop"):
        nnx.vmap(fails)(stack, jnp.ones(3))
    assert values(stack) == before


def test_a_model_that_is_not_stacked():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 1, 2))
    with pytest.raises(AxisError) as caught:
        nnx.vmap(lambda model, x: model(x))(model, x)
    assert str(caught.value).endswith(
        "Fix: make them equal, or broadcast the others with None, such as in_axes=(None, 0) for a "
        "model that is not stacked."
    )
    mapped = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
    assert mapped(model, x).shape == (3, 1, 2)
    dropping = nnx.Sequential(model, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(AxisError, match=r"count: uint32\[\]\.(.|\n)* in_axes=\(None, 0\)\.$"):
        nnx.vmap(lambda model, x: model(x))(dropping, x)
    with pytest.warns(SharedNoiseWarning):
        assert mapped(dropping, x).shape == (3, 1, 2)


def test_random_streams_that_were_not_split():
    create = nnx.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs))
    with pytest.raises(AxisError) as caught:
        create(nnx.Rngs(0))
    assert str(caught.value) == (
        "nnx.vmap: axis 0 is out of range for rngs.default.count: uint32[].\n"
        "Fix: decorate with @nnx.split_rngs(splits=...) above nnx.vmap, so that there is a key for "
        "each step along the axis; or None to use one key for all. A model that is not stacked is "
        "broadcast whole, beside mapped inputs: in_axes=(None, 0)."
    )
    assert nnx.split_rngs(splits=3)(create)(nnx.Rngs(0)).kernel.shape == (3, 2, 2)
