"""Live objects go into a jitted function, and their updates come out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError, TraceContextError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Pair, Scale, ScaleNormNoise, counted, values

# ---- updates come out ---------------------------------------------------------------------------


def test_jitted_steps_do_what_eager_steps_do():
    eager, compiled = ScaleNormNoise(), ScaleNormNoise()
    step = nnx.jit(call)
    for i in range(3):
        x = jnp.arange(3.0) + i
        np.testing.assert_allclose(step(compiled, x), eager(x), rtol=1e-6)
    for path, value in values(eager).items():
        np.testing.assert_allclose(values(compiled)[path], value, rtol=1e-6, err_msg=str(path))


def test_only_changed_variables_leave_the_compiled_function():
    net = Pair([Scale(i) for i in range(20)], Count(jnp.array(0)))

    @nnx.jit
    def count(net):
        net.b[...] += 1

    assert len(count.trace(net).jaxpr.out_avals) == 1
    assert len(jax.tree.leaves(count.lower(net).out_info)) == 1


def test_writing_a_value_back_unchanged_is_no_change():
    @nnx.jit
    def rewrite(model):
        model.w.value = model.w.value

    assert rewrite.trace(Scale()).jaxpr.out_avals == []


def test_references_keep_their_identity():
    net = ScaleNormNoise()
    before = [net.scale, net.scale.w, net.norm, net.noise.rngs.count]
    nnx.jit(call)(net, jnp.ones(2))
    after = [net.scale, net.scale.w, net.norm, net.noise.rngs.count]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert net.scale.count.value == 1


def test_shared_variables_stay_shared():
    shared = nnx.Param(jnp.array(1.0))
    pair = Pair(shared, shared)

    @nnx.jit
    def add(pair):
        pair.a[...] += 1
        pair.b[...] += 10
        return pair.a is pair.b

    assert add(pair)
    assert pair.a is shared
    assert pair.b is shared
    assert shared.value == 12


def test_an_object_in_two_arguments_is_one_object():
    shared = Scale()
    left, right = Pair(shared, 1), Pair(2, shared)

    @nnx.jit
    def use(left, right):
        left.a(1.0)
        right.b(1.0)
        return left.a is right.b

    for _ in range(2):
        assert use(left, right)
    assert shared.count.value == 4
    assert use(left, left.__class__(0, Scale())) == False  # noqa: E712


def test_the_same_argument_twice():
    model = Scale()

    @nnx.jit
    def use(a, b):
        a.count[...] += 1
        b.count[...] += 1

    for _ in range(3):
        use(model, model)
    assert model.count.value == 6


def test_cycles():
    child, parent = Scale(), Pair(None, None)
    parent.a, child.parent = child, parent

    @nnx.jit
    def use(parent):
        parent.a.parent.a.count[...] += 1
        return parent.a.parent

    assert use(parent) is parent
    assert child.count.value == 1


def test_structure_that_changes_inside_changes_outside():
    pair = Pair(Scale(1), [Scale(2)])
    pair.label, pair.old = "before", 3
    first, items, item = pair.a, pair.b, pair.b[0]

    @nnx.jit
    def rebuild(pair, x):
        pair.moved = pair.a
        pair.a = Scale(x)
        pair.b.append(Scale(9))
        pair.b[0].w[...] += 1
        pair.label = "after"
        pair.w2 = nnx.Param(x * 2)
        del pair.old

    rebuild(pair, 5.0)
    assert pair.moved is first
    assert pair.a.w.value == 5
    assert pair.b is items
    assert pair.b[0] is item
    assert [float(scale.w.value) for scale in pair.b] == [3, 9]
    assert pair.label == "after"
    assert pair.w2.value == 10
    assert not hasattr(pair, "old")


def test_a_static_value_that_counts_traces_again_with_each_value():
    @nnx.jit
    def step(model):
        model.calls = getattr(model, "calls", 0) + 1
        return model.w * model.calls

    model = Scale(1.0)
    assert [float(step(model)) for _ in range(3)] == [1, 2, 3]
    assert model.calls == 3


def test_metadata_that_changes_inside_changes_outside():
    @nnx.jit
    def name(model):
        model.w.set_metadata(role="weight")

    model = Scale()
    variable = model.w
    name(model)
    assert model.w is variable
    assert variable.role == "weight"


def test_variables_that_change_kind_of_value():
    cache = nnx.Variable({"k": jnp.zeros(2)})

    @nnx.jit
    def grow(cache):
        cache["k"] += 1
        cache.value = {**cache.value, "v": jnp.ones(1)}

    grow(cache)
    assert cache["k"].tolist() == [1, 1]
    assert cache["v"].tolist() == [1]


# ---- inputs and outputs -------------------------------------------------------------------------


def test_objects_come_in_any_container():
    model, variable = Scale(), Count(jnp.array(0))
    state = nnx.state(Scale(7))

    @nnx.jit
    def use(pair, named, state, *, by_name):
        pair[0](1.0)
        named["v"][...] += 1
        state.w[...] += 1
        by_name(1.0)
        return named["v"] + pair[1]

    other = Scale()
    assert use((model, 4), {"v": variable}, state, by_name=other) == 5
    assert model.count.value == variable.value == other.count.value == 1
    assert state.w.value == 8


def test_objects_go_out_in_any_container():
    model = Pair(Scale(), 1)

    @nnx.jit
    def give(model, x):
        new = Scale(x)
        return model, {"part": model.a}, nnx.state(model), [new, Pair(new, model.a.w)], x

    same, named, state, (new, pair), x = give(model, 3.0)
    assert same is model
    assert named["part"] is model.a
    assert state.a.w is model.a.w
    assert new.w.value == 3
    assert pair.a is new
    assert pair.b is model.a.w
    assert x == 3


def test_new_modules_are_ordinary_modules():
    made = nnx.jit(ScaleNormNoise)(7)
    assert values(made) == values(ScaleNormNoise(7))
    made.scale.w[...] += 1
    made.label = "mine"
    assert made.scale.w.value == 3


@pytest.mark.parametrize("output", [None, (), 3, [1.0, {"a": None}]], ids=str)
def test_plain_outputs_keep_their_form(output):
    got = nnx.jit(lambda model: output)(Scale())
    assert jax.tree.structure(got) == jax.tree.structure(output)
    assert jax.tree.leaves(got) == jax.tree.leaves(output)


def test_arrays_that_stand_directly_in_a_module_are_read_and_written():
    pair = Pair(jnp.array(0.0), np.ones(2))

    def step(pair):
        pair.a = pair.a + 1
        return pair.a + pair.b

    step, traces = counted(step)
    jitted = nnx.jit(step)
    for _ in range(3):
        jitted(pair)
    assert pair.a == 3
    pair.a, pair.b = jnp.array(10.0), np.zeros(2)
    assert jitted(pair).tolist() == [11, 11]
    assert len(traces) == 1


def test_fresh_rngs_are_drawn_from():
    model = Scale()
    draw = nnx.jit(lambda model, rngs: rngs.normal((2,)) * model.w)
    for seed in (0, 1, 2):
        rngs, eager = nnx.Rngs(seed), nnx.Rngs(seed)
        np.testing.assert_allclose(draw(model, rngs), eager.normal((2,)) * 2, rtol=1e-6)
        assert rngs.default.count.value == 1
    first = draw(model, rngs := nnx.Rngs(0))
    assert not np.allclose(first, draw(model, rngs))


# ---- errors leave everything as it was ----------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit()], ids=repr
)
@pytest.mark.parametrize("planned", [False, True])
def test_an_error_inside_leaves_the_objects_alone(error, planned):
    net = Pair(ScaleNormNoise(), [1])
    before = values(net)

    @nnx.jit
    def fail(net, x):
        net.a(x)
        net.b.append(2)
        net.label = "gone"
        if x.shape == (2,):
            raise error

    if planned:
        fail(net, jnp.ones(3))
        before = values(net)
    with pytest.raises(type(error)) as caught:
        fail(net, jnp.ones(2))
    assert caught.value is error
    assert error.__cause__ is None
    assert values(net) == before
    assert net.b == ([1, 2] if planned else [1])
    assert hasattr(net, "label") == planned


def test_a_captured_model_cannot_be_changed():
    model = Scale()

    def write(x):
        model(x)

    def rename(x):
        model.label = "new"

    with pytest.raises(
        TraceContextError, match=r"(?s)Cannot mutate Count at model.count .*Fix: pass"
    ):
        nnx.jit(write)(1.0)
    with pytest.raises(
        TraceContextError, match=r"(?s)Cannot mutate 'Scale' .*model.label.*Fix: pass"
    ):
        nnx.jit(rename)(1.0)
    assert model.count.value == 0
    assert not hasattr(model, "label")


def test_a_write_to_a_captured_constant_warns_once():
    model = Scale()
    run = nnx.jit(lambda x: x * model.w)
    assert run(1.0) == 2
    with pytest.warns(UserWarning, match="Param at model.w was changed, but the compiled function"):
        model.w[...] = 5.0
    model.w[...] = 6.0
    assert run(1.0) == 2


def test_an_update_of_a_captured_constant_warns():
    model = Scale()
    assert nnx.jit(lambda x: x * model.w)(1.0) == 2
    with pytest.warns(UserWarning, match="Param at model.w was changed, but the compiled function"):
        nnx.update(model, nnx.state(Scale()))


def test_no_warning_where_nothing_is_stale():
    model, ref = Scale(), nnx.Variable(jnp.array(2.0), hijax=True)
    run = nnx.jit(lambda x: x * ref)
    assert run(1.0) == 2
    ref[...] = 5.0
    assert run(1.0) == 5

    def fail(x):
        raise RuntimeError(str(model.w))

    with pytest.raises(RuntimeError, match="Param"):
        nnx.jit(fail)(1.0)
    model.w[...] = 5.0


def test_modules_are_named_scopes():
    text = nnx.jit(call).lower(ScaleNormNoise(), jnp.ones(2)).as_text(debug_info=True)
    assert "jit(call)/ScaleNormNoise/scale/mul" in text
    assert "jit(call)/ScaleNormNoise/norm/" in text


# ---- modes --------------------------------------------------------------------------------------


def in_tree_mode(f):
    return nnx.jit(f, graph=False, graph_updates=False)


def test_tree_mode_moves_values_only():
    @in_tree_mode
    def step(model):
        model(1.0)
        model.label = "lost"

    model = Scale()
    step(model)
    assert model.count.value == 1
    assert not hasattr(model, "label")


@pytest.mark.parametrize(
    "transform",
    [
        nnx.jit,
        nnx.jit(donate_argnums=0),
        nnx.remat,
        lambda f: nnx.vmap(f, in_axes=None, axis_size=2),
        lambda f: nnx.grad(lambda holder: f(holder) or 1.0, argnums=nnx.DiffState(0, nnx.Param)),
    ],
)
def test_numpy_attributes_stay_where_structure_changes(transform):
    def add_attributes(holder):
        holder.more = 5
        holder.again = holder.a

    holder = Pair(np.arange(3), np.arange(2.0))
    before = holder.a, holder.b
    transform(add_attributes)(holder)
    assert holder.a is before[0]
    assert holder.b is before[1]
    assert (holder.more, holder.again.tolist()) == (5, [0, 1, 2])


def test_tree_mode_refuses_sharing_with_both_paths():
    shared = nnx.Param(jnp.array(1.0))
    message = (
        r"Variable at pair\.b was already seen at pair\.a\. tree-mode jit .*does not "
        "support shared Variable references"
    )
    with pytest.raises(ValueError, match=message):
        in_tree_mode(lambda pair: None)(Pair(shared, shared))
    with pytest.raises(ValueError, match=r"Scale at b was already seen at a\. tree"):
        in_tree_mode(lambda a, b: None)(model := Scale(), model)


def test_graph_mode_allows_it_on_one_call():
    shared = nnx.Param(jnp.array(1.0))
    pair = Pair(shared, shared)
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        with pytest.raises(ValueError, match="tree-mode jit"):
            nnx.jit(lambda pair, x: None)(pair, 1.0)

        @nnx.jit(graph=True)
        def forward(pair, x):
            pair.a[...] += 1.0
            return pair.a * x + pair.b

        assert forward(pair, 1.0) == 4
    assert pair.b.value == 2


def test_without_graph_updates_a_variable_cannot_come_in_and_go_out():
    message = (
        r"Param comes into nnx.jit at model\.w and goes out at the output\.k\[0\], which needs "
        r"graph updates.\nFix: do not return it .*nnx.clone\(...\) of it, or pass graph=True, "
        r"graph_updates=True"
    )
    run = nnx.jit(lambda model: {"k": [model.w]}, graph_updates=False)
    with pytest.raises(SharedReferenceError, match=message):
        run(Scale())


def test_without_graph_updates_new_objects_come_out():
    made, copy = nnx.jit(lambda m: (Scale(3), nnx.clone(m)), graph_updates=False)(model := Scale())
    assert made.w.value == 3
    assert copy is not model


def test_settings_in_force_are_part_of_what_is_compiled():
    graph_mode, traces = counted(lambda model: nnx.set_graph_mode.current_value())
    jitted, model = nnx.jit(graph_mode, graph=True), Scale()
    answers = []
    for mode in (True, False, True):
        with nnx.set_graph_mode(mode):
            answers.append(bool(jitted(model)))
    assert answers == [True, False, True]
    assert len(traces) == 2


# ---- Variables stored as refs -------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["hijax", "ref"])
def test_refs_lack_the_limits_of_jax(storage):
    with nnx.var_defaults(**{storage: True}):
        model = Scale()
    ref = model.w.raw_value

    @nnx.jit
    def step(model, again, w):
        model(1.0)
        w[...] += 1
        return model, again.w

    for _ in range(3):
        same, w = step(model, model, model.w)
    assert same is model
    assert w is model.w
    assert model.w.raw_value is ref
    assert model.w[...] == 5
    assert model.count[...] == 3


def test_new_refs_come_out():
    made = nnx.jit(lambda x: nnx.Variable(x, hijax=True))(3.0)
    made[...] += 1
    assert isinstance(made.raw_value, jax.Ref)
    assert made[...] == 4


def test_remat_counts_a_write_to_a_ref_once():
    model = Scale()
    model.count.set_metadata(hijax=True)

    @nnx.jit
    def step(model, x):
        return nnx.grad(nnx.remat(lambda model, x: model(x)))(model, x)

    assert step(model, 3.0).w.value == 3
    assert model.count[...] == 1


def test_compilations_are_counted():
    step = nnx.jit(lambda m, x: m(x))
    assert step.jitted_fn._cache_size() == 0
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for rows in (1, 2, 2):
        step(model, jnp.ones((rows, 2)))
    step(nnx.Linear(2, 3, rngs=nnx.Rngs(1)), jnp.ones((1, 2)))  # the same structure
    assert step.jitted_fn._cache_size() == 2
    step(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(1)), jnp.ones((1, 2)))
    partial = nnx.cached_partial(step, model)
    partial(jnp.ones((5, 2)))
    assert partial.jitted_fn._cache_size() == step.jitted_fn._cache_size() == 4
    step.jitted_fn.clear_cache()
    assert step.jitted_fn._cache_size() == 0


def test_compilations_of_a_method_are_counted():
    class Net(nnx.Module):
        @nnx.jit
        def double(self, x):
            return 2 * x

    net = Net()
    net.double(1.0)
    assert Net.double.jitted_fn._cache_size() == net.double.jitted_fn._cache_size() == 1
    whole = nnx.jit(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    whole(jnp.ones((1, 2)))
    assert whole.jitted_fn._cache_size() == 1
