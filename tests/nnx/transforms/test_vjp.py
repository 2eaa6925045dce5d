"""vjp and jvp of functions of objects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Pair, Scale, counted, values


@pytest.fixture
def model():
    return Scale(2.0)


def test_vjp_value_gradients_and_updates(model):
    value, pull = nnx.vjp(lambda m, x: jnp.sin(m(x)), model, 3.0)
    want, plain = jax.vjp(lambda w, x: jnp.sin(w * x), jnp.float32(2), 3.0)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for cotangent in (1.0, 5.0):
        state, slope = pull(cotangent)
        assert isinstance(state, nnx.State)
        assert set(state) == {"w"}
        np.testing.assert_allclose((state.w.value, slope), plain(cotangent), rtol=1e-6)
    assert model.count.value == 1


def test_vjp_without_graph_updates_gives_the_arguments_own_types(model):
    value, pull = nnx.vjp(call, model, 3.0, graph_updates=False)
    grads, slope = pull(1.0)
    assert isinstance(grads, Scale)
    assert (float(value), float(grads.w.value), float(slope)) == (6.0, 3.0, 2.0)
    assert grads.count.value.dtype == jax.dtypes.float0
    assert model.count.value == 1


def test_decorated_vjp_takes_arguments_by_name(model):
    value, pull = nnx.vjp(lambda m, x, times: m(x) * times)(model, 3.0, times=2.0)
    grads, slope = pull(1.0)
    assert (float(value), float(grads.w.value), float(slope)) == (12.0, 6.0, 4.0)


@pytest.mark.parametrize("updates", [True, False])
def test_vjp_auxiliary_output(model, updates):
    def f(m, x):
        return m(x), Pair(nnx.Param(x * 10), "static")

    value, pull, aux = nnx.vjp(f, model, 3.0, has_aux=True, graph_updates=updates)
    grads, _ = pull(1.0)
    assert (float(value), float(aux.a.value), aux.b) == (6.0, 30.0, "static")
    assert grads.w.value == 3.0


@pytest.mark.parametrize("cotangent", [nnx.Param(jnp.float32(2)), jnp.float32(2)], ids=type)
def test_vjp_of_a_variable_in_the_output(model, cotangent):
    value, pull = nnx.vjp(lambda m: {"y": nnx.Param(m.w * 3)}, model)
    assert isinstance(value["y"], nnx.Param)
    assert pull({"y": cotangent})[0].w.value == 6.0


def test_vjp_counts_what_is_written_as_part_of_the_function():
    weight = nnx.Param(jnp.float32(2))

    def f(w, x):
        w[...] = w * x
        return w * 1.0

    value, pull = nnx.vjp(f, weight, 3.0)
    gradient, slope = pull(1.0)
    assert (float(value), float(gradient.value), float(slope)) == (6.0, 3.0, 2.0)
    assert weight.value == 6.0


@pytest.mark.parametrize("updates", [True, False])
def test_vjp_of_one_variable_passed_twice(updates):
    weight = nnx.Param(jnp.float32(2))
    _, pull = nnx.vjp(lambda a, b: a * b, weight, weight, graph_updates=updates)
    assert [float(g.value) for g in pull(1.0)] == [4.0, 4.0]


def test_jvp_moves_along_a_state_and_leaves_the_rest_in_place(model):
    def f(m, x):
        return jnp.sin(m(x)) * (1.0 + m.count)

    tangent = nnx.State({"w": nnx.Param(jnp.float32(5))})
    got = nnx.jvp(f, (model, 3.0), (tangent, 1.0))
    want = jax.jvp(lambda w, x: jnp.sin(w * x) * 2, (jnp.float32(2), 3.0), (jnp.float32(5), 1.0))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert model.count.value == 1


TANGENTS = {
    "state": lambda: nnx.State({"w": nnx.Param(jnp.float32(1))}),
    "dict": lambda: {"w": jnp.float32(1)},
    "gradient": lambda: nnx.grad(lambda m: m.w * 1.0)(Scale()),
    "module": lambda: Scale(1.0),
}


@pytest.mark.parametrize("name", TANGENTS)
@pytest.mark.parametrize("updates", [True, False])
def test_jvp_takes_tangents_of_several_forms(model, name, updates):
    options = {"graph_updates": updates}
    value, moved = nnx.jvp(call, (model, 3.0), (TANGENTS[name](), 0.0), **options)
    assert (float(value), float(moved)) == (6.0, 3.0)
    assert model.count.value == 1


def test_jvp_reaches_arrays_in_attributes():
    class WithArray(nnx.Module):
        def __init__(self, x):
            self.x = jnp.float32(x)

    value, moved = nnx.jvp(lambda m: m.x**2, (WithArray(3),), (WithArray(1),))
    assert (float(value), float(moved)) == (9.0, 6.0)


def test_jvp_gives_the_derivative_in_the_form_of_the_output(model):
    def f(m):
        return {"y": nnx.Param(m.w * 3, role="out"), "z": m.w * 1.0}

    value, moved = nnx.jvp(f, (model,), (Scale(1.0),))
    assert isinstance(moved["y"], nnx.Param)
    assert moved["y"].role == "out"
    assert float(moved["y"].value), float(moved["z"]) == (3.0, 1.0)
    assert value["y"].value == 6.0


def test_jvp_auxiliary_output_and_writes():
    weight = nnx.Param(jnp.float32(2))

    def f(w):
        w[...] = w * 4
        return w**2, Count(jnp.int32(7))

    value, moved, aux = nnx.jvp(f, (weight,), (nnx.Param(jnp.float32(1)),), has_aux=True)
    assert (float(value), float(moved), int(aux.value)) == (64.0, 64.0, 7)
    assert weight.value == 8.0


def test_decorators_with_and_without_parentheses(model):
    @nnx.vjp
    def pulled(m, x):
        return m(x)

    @nnx.vjp(has_aux=True)
    def with_aux(m, x):
        return m(x), x

    @nnx.jvp
    def pushed(m, x):
        return m(x)

    @nnx.jvp(has_aux=True)
    def pushed_aux(m, x):
        return m(x), x

    assert pulled.__name__ == "pulled"
    assert pulled(model, 3.0)[0] == with_aux(model, 3.0)[0] == 6.0
    assert with_aux(model, 3.0)[2] == 3.0
    tangents = (Scale(1.0), 0.0)
    assert pushed((model, 3.0), tangents) == (6.0, 3.0)
    assert pushed_aux((model, 3.0), tangents) == (6.0, 3.0, 3.0)


def test_one_run_for_each_call(model):
    f, runs = counted(call)
    _, pull = nnx.vjp(f, model, 3.0)
    pull(1.0)
    nnx.jvp(f, (model, 3.0), (Scale(1.0), 0.0))
    assert len(runs) == 2
    assert model.count.value == 2


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_refs_are_read_and_written(storage):
    model = nnx.with_vars(Scale(2.0), **storage)
    _, pull = nnx.vjp(call, model, 3.0)
    assert pull(1.0)[0].w.value == 3.0
    assert nnx.jvp(call, (model, 3.0), (Scale(1.0), 0.0)) == (6.0, 3.0)
    assert model.count.value == 2


def test_under_jit(model):
    @nnx.jit
    def both(m, x):
        _, pull = nnx.vjp(call, m, x)
        return pull(1.0)[0], nnx.jvp(call, (m, x), (Scale(1.0), 0.0))[1]

    state, moved = both(model, 3.0)
    assert (float(state.w.value), float(moved)) == (3.0, 3.0)
    assert model.count.value == 2


BAD = {
    "too few tangents": (
        lambda m: nnx.jvp(call, (m, 3.0), (Scale(),)),
        r"nnx.jvp got 2 primals and 1 tangents\.\nFix: give one tangent for each primal",
    ),
    "a tangent for nothing": (
        lambda m: nnx.jvp(call, (m, 3.0), ({"v": jnp.float32(1)}, 0.0)),
        r"nnx.jvp got a tangent for model\.v, but the primals have nothing there",
    ),
    "no pair from jvp": (
        lambda m: nnx.jvp(call, (m, 3.0), (Scale(), 0.0), has_aux=True),
        r"nnx.jvp with has_aux=True expects the function to return a pair \(output, aux\)",
    ),
    "no pair from vjp": (
        lambda m: nnx.vjp(call, m, 3.0, has_aux=True),
        r"nnx.vjp with has_aux=True expects the function to return a pair \(output, aux\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(model, name):
    run, message = BAD[name]
    with pytest.raises(TypeError, match=message):
        run(model)
    assert values(model) == values(Scale(2.0))


def test_reduce_axes_is_gone(model):
    with pytest.raises(NotImplementedError, match=r"nnx.vjp: reduce_axes is gone from JAX"):
        nnx.vjp(call, model, 3.0, reduce_axes=("batch",))


@pytest.mark.parametrize(
    "run", [lambda f: nnx.vjp(f, 3.0), lambda f: nnx.jvp(f, (3.0,), (1.0,))], ids=["vjp", "jvp"]
)
def test_bound_methods_are_refused(run, model):
    with pytest.raises(ValueError, match=r"nnx.(vjp|jvp) does not support bound methods: Scale.__"):
        run(model.__call__)


def test_tree_mode_refuses_sharing(model):
    with pytest.raises(SharedReferenceError, match="was already seen at"):
        nnx.vjp(lambda a, b: a.w * b.w, model, model, graph=False)
    with pytest.raises(SharedReferenceError, match="needs graph updates"):
        nnx.vjp(lambda m: m.w, model, graph_updates=False)


def test_after_an_error_objects_are_as_before(model):
    def fails(m, x):
        m(x)
        raise RuntimeError("stop")

    for run in (
        lambda: nnx.vjp(fails, model, 3.0),
        lambda: nnx.jvp(fails, (model, 3.0), (Scale(), 0.0)),
    ):
        with pytest.raises(RuntimeError, match="stop"):
            run()
    assert values(model) == values(Scale(2.0))
