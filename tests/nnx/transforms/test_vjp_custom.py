"""Derivative rules of one's own for functions of objects, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import GradientRuleError, MissingRuleError
from tests.nnx.transforms.stateful import Count, Pair, Scale, counted, values


def ruled(bwd, fun=None, fwd=None, **options):
    """A function of a model and an array with a rule of its own."""
    f = nnx.custom_vjp(fun or (lambda m, x: m(x)), **options)
    f.defvjp(fwd or (lambda m, x: (f(m, x), (m, x))), bwd)
    return f


def tenfold(residuals, g):
    """Ten times the true gradient of the weight, seven times that of ``x``."""
    m, x = residuals
    (state, _), out = g
    state.w.value = 10 * out * x
    return state, 7 * out * m.w


@pytest.fixture
def model():
    return Scale(2.0)


def test_the_rule_takes_the_place_of_the_derivative(model):
    f = ruled(tenfold)
    assert f(model, 3.0) == 6.0
    state, slope = nnx.grad(f, argnums=(0, 1))(model, 3.0)
    assert (float(state.w.value), float(slope)) == (30.0, 14.0)
    assert model.count.value == 2


def test_the_rule_equals_plain_jax():
    @jax.custom_vjp
    def plain(w, x):
        return jnp.sin(w * x)

    plain.defvjp(
        lambda w, x: (plain(w, x), (w, x)),
        lambda r, g: (g * r[1] * jnp.cos(r[0] * r[1]) * 2, g * 3),
    )

    def bwd(residuals, g):
        m, x = residuals
        return {"w": g[1] * x * jnp.cos(m.w * x) * 2}, g[1] * 3

    f = ruled(bwd, lambda m, x: jnp.sin(m(x)))
    want = jax.value_and_grad(plain, argnums=(0, 1))(jnp.float32(2), 0.5)
    value, (state, slope) = nnx.value_and_grad(f, argnums=(0, 1))(Scale(2.0), 0.5)
    np.testing.assert_allclose((value, state.w.value, slope), (want[0], *want[1]), rtol=1e-6)


def test_the_incoming_gradient_is_a_pair_of_updates_and_output():
    seen = []

    def fun(v, x):
        v[...] = v * x
        return v * 1.0

    def bwd(x, g):
        seen.append(g)
        return nnx.Param(jnp.float32(10)), jnp.float32(1)

    f = nnx.custom_vjp(fun)
    f.defvjp(lambda v, x: (f(v, x), x), bwd)
    v = nnx.Param(jnp.float32(2))
    gradient = nnx.grad(lambda v, x: f(v, x) + v * 3)(v, 3.0)
    (((update, nothing), out),) = seen
    assert isinstance(update, nnx.Param)
    assert (float(update.value), nothing, float(out)) == (3.0, None, 1.0)
    assert (float(gradient.value), float(v.value)) == (10.0, 6.0)


def test_updates_hold_every_variable_of_an_object(model):
    seen = []

    def bwd(residuals, g):
        seen.append(g)
        return None, g[1]

    nnx.grad(ruled(bwd), argnums=(0, 1))(model, 3.0)
    (((state, _), _),) = seen
    assert isinstance(state, nnx.State)
    assert state.w.value == 0.0
    assert state["count"].value.dtype == jax.dtypes.float0


@pytest.mark.parametrize(
    "answer",
    [
        lambda g: nnx.State({"w": nnx.Param(g)}),
        lambda g: {"w": g},
        Scale,
    ],
    ids=["state", "dict", "module"],
)
def test_gradients_of_an_object_come_in_several_forms(model, answer):
    f = ruled(lambda r, g: (answer(4 * g[1]), None))
    state, slope = nnx.grad(f, argnums=(0, 1))(model, 3.0)
    assert (float(state.w.value), float(slope)) == (4.0, 0.0)


def test_what_is_left_out_has_no_gradient(model):
    for answer in (None, {}):
        f = ruled(lambda r, g, answer=answer: (answer, g[1]))
        state, slope = nnx.grad(f, argnums=(0, 1))(model, 3.0)
        assert (float(state.w.value), float(slope)) == (0.0, 1.0)


def test_without_graph_updates_gradients_have_the_inputs_own_types(model):
    seen = []

    def bwd(residuals, g):
        m, x = residuals
        seen.append((type(m), g))
        return Scale(10 * g * x), 7 * g

    f = ruled(bwd, graph_updates=False)
    options = {"graph_updates": False, "allow_int": True}
    grads, slope = nnx.grad(f, argnums=(0, 1), **options)(model, 3.0)
    assert isinstance(grads, Scale)
    assert (float(grads.w.value), float(slope)) == (30.0, 7.0)
    assert seen == [(Scale, 1.0)]
    assert model.count.value == 1


@pytest.mark.parametrize("answer", [nnx.Param(jnp.float32(30)), jnp.float32(30)], ids=type)
def test_without_graph_updates_a_variable_is_answered_by_one_or_by_an_array(answer):
    f = nnx.custom_vjp(lambda v, x: v * x, graph_updates=False)
    f.defvjp(lambda v, x: (f(v, x), None), lambda r, g: (answer, None))
    gradient = nnx.grad(f, graph_updates=False)(nnx.Param(jnp.float32(2)), 3.0)
    assert isinstance(gradient, nnx.Param)
    assert gradient.value == 30.0


@pytest.mark.parametrize("updates", [True, False])
def test_the_gradient_of_an_output_that_holds_objects(model, updates):
    seen = []

    def bwd(x, g):
        seen.append(g[1] if updates else g)
        return Scale(1.0), None

    f = ruled(
        bwd,
        lambda m, x: {"pair": Pair(nnx.Param(m.w * x), "static"), "one": nnx.Param(x)},
        fwd=lambda m, x: (f(m, x), x),
        graph_updates=updates,
    )

    def loss(m, x):
        out = f(m, x)
        return 5 * out["pair"].a + 3 * out["one"]

    nnx.grad(loss, graph_updates=updates, allow_int=True)(model, 2.0)
    (out,) = seen
    assert isinstance(out["pair"], nnx.State if updates else Pair)
    assert isinstance(out["one"], nnx.Param)
    assert (float(out["pair"].a.value), float(out["one"].value)) == (5.0, 3.0)


@pytest.mark.parametrize("nondiff", [(1,), (-2,)])
def test_static_arguments_are_passed_to_bwd_first(nondiff):
    f = nnx.custom_vjp(lambda x, name, y: x * y, nondiff_argnums=nondiff)

    def bwd(name, residuals, g):
        x, y = residuals
        return (g[1] * y * len(name), g[1] * x)

    f.defvjp(lambda x, name, y: (x * y, (x, y)), bwd)
    grads = nnx.grad(lambda x, y: f(x, "four", y), argnums=(0, 1))(2.0, 5.0)
    assert [float(g) for g in grads] == [20.0, 2.0]


@pytest.mark.parametrize("updates", [True, False])
def test_objects_and_arrays_that_are_not_differentiated(updates, model):
    def fun(m, factor, v):
        return m(v) * factor

    def bwd(m, factor, residuals, g):
        g = g[1] if updates else g
        return (g * m.w * factor * 10,)

    f = nnx.custom_vjp(fun, nondiff_argnums=(0, 1), graph_updates=updates)
    f.defvjp(lambda m, factor, v: (f(m, factor, v), None), bwd)
    loss = lambda m, v, factor: f(m, factor, v)  # noqa: E731
    grads = nnx.grad(loss, argnums=(0, 1))(model, jnp.float32(3), jnp.float32(4))
    assert (float(grads[0].w.value), float(grads[1])) == (0.0, 80.0)
    assert model.count.value == 1


def test_a_diff_state_says_what_is_differentiated():
    seen = []

    def bwd(residuals, g):
        m, x = residuals
        seen.append(g[0][0])
        return {"a": g[1] * 100 * x, "b": g[1] * 1000}, g[1] * m.a

    f = ruled(bwd, lambda m, x: m.a * m.b * x, nondiff_argnums=(nnx.DiffState(0, nnx.Param),))
    pair = Pair(nnx.Param(jnp.float32(2)), nnx.BatchStat(jnp.float32(5)))
    wanted = (nnx.DiffState(0, ...), 1)
    state, slope = nnx.grad(f, argnums=wanted)(pair, 3.0)
    assert (float(state.a.value), float(state.b.value), float(slope)) == (300.0, 0.0, 2.0)
    assert set(seen[0]) == {"a", "b"}


def test_arguments_by_name(model):
    assert nnx.grad(lambda m: ruled(tenfold)(x=3.0, m=m))(model).w.value == 30.0


def test_as_a_method():
    class Tenfold(Scale):
        @nnx.custom_vjp
        def scaled(self, x):
            return self(x)

        scaled.defvjp(lambda self, x: (self(x), (self, x)), tenfold)

    model = Tenfold(2.0)
    assert nnx.grad(lambda m: m.scaled(3.0))(model).w.value == 30.0
    assert Tenfold.scaled(model, 3.0) == 6.0
    assert model.count.value == 2


def test_decorator_keeps_the_name():
    @nnx.custom_vjp(nondiff_argnums=())
    def named(x):
        """Says."""
        return x

    assert (named.__name__, named.__doc__) == ("named", "Says.")


def test_structure_comes_out(model):
    def fun(m, x):
        m.seen = nnx.Intermediate(x)
        m.flag = "set"
        return m(x)

    f = ruled(tenfold, fun)
    nnx.grad(f)(model, 3.0)
    assert (model.flag, float(model.seen.value), int(model.count.value)) == ("set", 3.0, 1)


def test_objects_that_are_returned_keep_their_identity(model):
    f = ruled(lambda r, g: (None, None), lambda m, x: (m, m(x)))
    same, _ = f(model, 3.0)
    assert same is model


def test_under_vmap_scan_and_jit(model):
    f, runs = counted(lambda m, x: m(x))
    f = ruled(tenfold, f)
    stack = nnx.vmap(Scale)(jnp.arange(3.0))
    grads = nnx.vmap(nnx.grad(f))(stack, jnp.arange(1.0, 4.0))
    assert grads.w.value.tolist() == [10.0, 20.0, 30.0]
    assert stack.count.value.tolist() == [1, 1, 1]

    by_kind = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    steps = nnx.scan(f, in_axes=(by_kind, 0), out_axes=0)
    grads = nnx.grad(lambda m: steps(m, jnp.arange(1.0, 4.0)).sum())(model)
    assert (float(grads.w.value), int(model.count.value)) == (60.0, 3)

    runs.clear()
    step = nnx.jit(nnx.grad(f))
    assert [float(step(model, x).w.value) for x in (1.0, 2.0)] == [10.0, 20.0]
    assert len(runs) == 1


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_refs_are_read_and_written(storage):
    model = nnx.with_vars(Scale(2.0), **storage)
    assert nnx.grad(ruled(tenfold))(model, 3.0).w.value == 30.0
    assert model.count.value == 1


BAD = {
    "too few gradients": (
        ruled(lambda r, g: (None,)),
        TypeError,
        "bwd must return 2 gradients, one for each differentiable argument, but got 1",
    ),
    "no pair from fwd": (
        ruled(tenfold, fwd=lambda m, x: m(x)),
        TypeError,
        r"fwd must return a pair \(output, residuals\), but got .*\nFix: return both",
    ),
    "a gradient for nothing": (
        ruled(lambda r, g: ({"v": g[1]}, None), lambda m, x: m(x)),
        TypeError,
        r"bwd returned a gradient for m\.v, but the arguments have nothing there",
    ),
    "another shape": (
        ruled(lambda r, g: ({"w": jnp.ones(3)}, None), lambda m, x: m(x)),
        ValueError,
        r"bwd returned a gradient of shape \(3,\) for m\.w, which is float32\[\]",
    ),
    "the pair itself": (
        ruled(lambda r, g: ({"w": nnx.Param(g)}, None), lambda m, x: m(x)),
        GradientRuleError,
        r"bwd returned PyTreeDef\(.*\) as the gradient for m\.w, whose value is PyTreeDef\(\*\)\.\n"
        r"Fix: return a gradient of the form of the argument; with graph updates bwd gets a pair",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rules(name, model):
    f, error, message = BAD[name]
    with pytest.raises(error, match=f"custom_vjp: {message}"):
        nnx.grad(f)(model, 3.0)
    assert values(model) == values(Scale(2.0))


def test_bad_use(model):
    @nnx.custom_vjp
    def f(m, *, x=1.0):
        return m(x)

    with pytest.raises(
        MissingRuleError, match=r"No VJP defined .* f using defvjp.\nFix: call f.defv"
    ):
        f(model)
    with pytest.raises(NotImplementedError, match="symbolic_zeros=True is not supported"):
        f.defvjp(lambda m: None, lambda r, g: None, symbolic_zeros=True)
    f.defvjp(lambda m: None, lambda r, g: None)
    with pytest.raises(TypeError, match=r"nnx.custom_vjp takes arguments by position, and \['x'\]"):
        f(model, x=2.0)
    with pytest.raises(ValueError, match=r"nnx.custom_vjp does not support bound methods"):
        nnx.custom_vjp(model.__call__)


def test_counts_are_kept_in_residuals_as_they_were():
    f = ruled(
        lambda r, g: ({"w": g[1] * r.value}, None),
        fwd=lambda m, x: (m(x), Count(m.count.value)),
    )
    model = Scale(2.0)
    grads = [float(nnx.grad(f)(model, 3.0).w.value) for _ in range(2)]
    assert grads == [1.0, 2.0]


@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}], ids=str)
def test_gradients_of_what_was_written_in_a_parameter_of_its_own(mode):
    class Layer(nnx.Module):
        def __init__(self):
            self.w, self.total = nnx.Param(jnp.array(2.0)), nnx.BatchStat(jnp.array(1.0))

    seen = []
    f = nnx.custom_vjp(_add_to_both, **mode)

    def bwd(residuals, g, updates_g):
        seen.append(updates_g)
        w, _ = residuals
        return None, nnx.BatchStat(updates_g[1][...]), g * w

    f.defvjp(lambda layer, total, x: (f(layer, total, x), (layer.w[...], x)), bwd)

    def loss(layer, total, x):
        return f(layer, total, x) + 5.0 * total[...] + 7.0 * layer.total[...]

    total = nnx.BatchStat(jnp.array(1.0))
    grads = nnx.grad(loss, argnums=(1, 2), **mode)(Layer(), total, jnp.array(3.0))
    assert (float(grads[0][...]), float(grads[1]), float(total)) == (5.0, 2.0, 4.0)
    layer, other, plain = seen[0]
    assert type(layer) is Layer
    assert (layer.w, plain) == (None, None)
    assert (float(layer.total[...]), float(other[...])) == (7.0, 5.0)


def _add_to_both(layer, total, x):
    layer.total[...] += x
    total[...] += x
    return layer.w * x


def test_in_tree_mode_the_incoming_gradient_is_that_of_the_output():
    f = nnx.custom_vjp(lambda v, x: v * x, graph=False)
    f.defvjp(lambda v, x: (f(v, x), x), lambda x, g: (nnx.Param(g * x * 10), None))
    grads = nnx.grad(f, graph=False)(nnx.Param(jnp.array(2.0)), 3.0)
    assert float(grads[...]) == 30.0
