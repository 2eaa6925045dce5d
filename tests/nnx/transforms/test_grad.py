"""Gradients of functions of objects, and rematerialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError, TraceContextError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Noise, Norm, Pair, Scale, counted, values


class Affine(nnx.Module):
    """Weights of two kinds, a counter, and something static."""

    def __init__(self, w=2.0, b=1.0):
        self.w = nnx.Param(jnp.float32(w))
        self.b = nnx.BatchStat(jnp.float32(b))
        self.count = Count(jnp.int32(0))
        self.power = 1

    def __call__(self, x):
        self.count[...] += 1
        return self.w * x + self.b


def numbers(tree):
    """The gradient with plain numbers for arrays; a State as a dict by dotted path."""
    if isinstance(tree, nnx.State):
        return {".".join(map(str, p)): numbers(v) for p, v in nnx.to_flat_state(tree)}
    if isinstance(tree, tuple | list):
        return type(tree)(map(numbers, tree))
    return np.asarray(tree.get_value() if isinstance(tree, nnx.Variable) else tree).tolist()


@pytest.fixture
def model():
    return Affine()


@pytest.mark.parametrize(
    ("argnums", "want"),
    [
        (0, {"w": 3.0}),
        (1, 2.0),
        (-1, 2.0),
        ((0, 1), ({"w": 3.0}, 2.0)),
        ([1, 0], (2.0, {"w": 3.0})),
        ((1,), (2.0,)),
        (nnx.DiffState(0, nnx.BatchStat), {"b": 1.0}),
        (nnx.DiffState(-2, (nnx.BatchStat, nnx.Param)), {"b": 1.0, "w": 3.0}),
        ((nnx.DiffState(0, nnx.PathContains("w")), 1), ({"w": 3.0}, 2.0)),
    ],
    ids=str,
)
def test_argnums(model, argnums, want):
    got = nnx.grad(call, argnums=argnums)(model, 3.0)
    assert numbers(got) == want
    value, again = nnx.value_and_grad(call, argnums=argnums)(model, 3.0)
    assert (float(value), numbers(again)) == (7.0, want)
    assert model.count.value == 2


def test_gradient_equals_that_of_plain_jax_and_is_a_state_of_params(model):
    plain = jax.grad(lambda w, x: jnp.sin(w * x + 1.0))(jnp.float32(2), 0.5)
    got = nnx.grad(lambda m, x: jnp.sin(m(x)))(model, 0.5)
    assert isinstance(got, nnx.State)
    assert isinstance(got.w, nnx.Param)
    np.testing.assert_allclose(got.w.value, plain, rtol=1e-6)
    assert values(model) == {("w",): 2.0, ("b",): 1.0, ("count",): 1}


def test_wrt_is_a_filter_for_the_argument(model):
    for transform in (nnx.grad, nnx.value_and_grad):
        got = transform(lambda x, m: m(x), argnums=1, wrt=nnx.BatchStat)(3.0, model)
        assert numbers(got if transform is nnx.grad else got[1]) == {"b": 1.0}


def test_wrt_with_several_arguments():
    with pytest.raises(ValueError, match=r"wrt=.* is for one argument, but argnums=\(0, 1\)"):
        nnx.grad(call, argnums=(0, 1), wrt=nnx.Param)


@pytest.mark.parametrize(
    ("arg", "want"),
    [
        (lambda: nnx.BatchStat(jnp.float32(2)), 4.0),
        (lambda: [nnx.BatchStat(jnp.float32(2)), Count(jnp.float32(3))], [4.0, 6.0]),
        (lambda: nnx.State({"a": Count(jnp.float32(5))}), {"a": 10.0}),
        (lambda: (Scale(2.0), Scale(3.0)), ({"w": 4.0}, {"w": 6.0})),
        (lambda: Pair(Scale(2.0), [Scale(3.0)]), {"a.w": 4.0, "b.0.w": 6.0}),
    ],
    ids=["variable", "list of variables", "state", "tuple of modules", "module of modules"],
)
def test_whole_variables_and_states_but_only_the_params_of_objects(arg, want):
    def squares(tree):
        floats = [x for x in jax.tree.leaves(tree) if x.dtype == jnp.float32]
        return sum(x**2 for x in floats)

    assert numbers(nnx.grad(squares)(arg())) == want


def test_a_filter_chooses_within_a_state(model):
    state = nnx.state(model)
    grads = nnx.grad(lambda s: s.w * s.b, argnums=nnx.DiffState(0, nnx.BatchStat))(state)
    assert numbers(grads) == {"b": 2.0}


def test_gradient_keeps_metadata_but_not_storage():
    weight = nnx.Param(jnp.float32(2), role="gate", ref=True)
    gradient = nnx.grad(lambda w: w * w)(weight)
    assert gradient.role == "gate"
    assert not gradient.get_metadata()["ref"]
    assert gradient.value == 4.0


class WithArray(nnx.Module):
    def __init__(self):
        self.x = jnp.float32(2)
        self.w = nnx.Param(jnp.float32(3))


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, {"w": 2.0}),
        ({"argnums": nnx.DiffState(0, ...)}, {"w": 2.0, "x": 3.0}),
    ],
)
def test_arrays_in_attributes_count_when_everything_is_asked_for(options, want):
    assert numbers(nnx.grad(lambda m: m.x * m.w, **options)(WithArray())) == want


def test_without_graph_updates_the_gradient_has_the_arguments_own_type():
    grads = nnx.grad(lambda m: m.x * m.w, graph_updates=False)(WithArray())
    assert isinstance(grads, WithArray)
    assert (float(grads.x), float(grads.w.value)) == (3.0, 2.0)


def test_without_graph_updates_everything_is_differentiated(model):
    value, grads = nnx.value_and_grad(call, graph_updates=False, allow_int=True)(model, 3.0)
    assert isinstance(grads, Affine)
    assert grads is not model
    assert grads.power == 1
    assert (float(value), numbers((grads.w, grads.b))) == (7.0, (3.0, 1.0))
    assert grads.count.value.dtype == jax.dtypes.float0
    assert model.count.value == 1


def test_without_graph_updates_integers_need_allow_int(model):
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        nnx.grad(call, graph_updates=False)(model, 3.0)
    assert values(model) == values(Affine())


@pytest.mark.parametrize("updates", [True, False])
def test_auxiliary_output_comes_along(model, updates):
    def f(m, x):
        y = m(x)
        return y, {"double": 2 * y, "made": Pair(nnx.Param(y), "static")}

    options = {"has_aux": True, "graph_updates": updates, "allow_int": True}
    grads, aux = nnx.grad(f, **options)(model, 3.0)
    (value, again), more = nnx.value_and_grad(f, **options)(model, 3.0)
    assert numbers([grads.w, more.w, aux["double"], value]) == [3.0, 3.0, 14.0, 7.0]
    assert aux["made"].a.value == again["made"].a.value == 7.0
    assert aux["made"].b == "static"
    assert model.count.value == 2


def test_objects_that_are_returned_keep_their_identity(model):
    _, aux = nnx.grad(lambda m, x: (m(x), (m, m.w)), has_aux=True)(model, 3.0)
    assert aux[0] is model
    assert aux[1] is model.w


def test_structure_and_static_values_come_out(model):
    def f(m, x):
        m.extra = nnx.Param(x * 2)
        m.power = 7
        del m.b
        return m.w * x

    grads = nnx.grad(f)(model, 3.0)
    assert numbers(grads) == {"w": 3.0}
    assert (model.power, float(model.extra.value), hasattr(model, "b")) == (7, 6.0, False)


def test_without_graph_updates_only_values_come_out(model):
    def f(m, x):
        m.extra = nnx.Param(x * 2)
        m.power = 7
        m.b[...] = 5.0
        return m.w * x

    nnx.grad(f, graph_updates=False, allow_int=True)(model, 3.0)
    assert (model.power, hasattr(model, "extra"), float(model.b.value)) == (1, False, 5.0)


def test_integers_and_complex_numbers(model):
    grads = nnx.grad(call, argnums=nnx.DiffState(0, Count), allow_int=True)(model, 3.0)
    assert grads["count"].value.dtype == jax.dtypes.float0
    square = nnx.grad(lambda v: v * v, holomorphic=True)(nnx.Param(jnp.complex64(1 + 2j)))
    assert square.value == 2 + 4j


def test_decorators_with_and_without_parentheses(model):
    @nnx.grad
    def plain(m, x):
        """Says."""
        return m(x)

    @nnx.value_and_grad(argnums=1)
    def other(m, *, x=0, y=1):
        return m(x)

    assert (plain.__name__, plain.__doc__) == ("plain", "Says.")
    assert numbers(plain(model, x=3.0)) == {"w": 3.0}
    with pytest.raises(TypeError, match="argnums=1 is out of range for a call with 1 positional"):
        other(model, x=3.0)


def test_as_a_method():
    class Model(Scale):
        @nnx.grad
        def slope(self, x):
            return self(x)

        @nnx.remat
        def again(self, x):
            return self(x)

    model = Model(2.0)
    assert numbers(model.slope(5.0)) == {"w": 5.0}
    assert model.again(5.0) == 10.0
    assert model.count.value == 2


def test_one_run_for_each_call(model):
    f, runs = counted(call)
    nnx.value_and_grad(f, has_aux=False)(model, 3.0)
    assert len(runs) == 1
    step = nnx.jit(nnx.grad(f))
    step(model, 3.0)
    step(model, 4.0)
    assert len(runs) == 2
    assert model.count.value == 3


def test_shared_variables_get_one_gradient():
    weight = nnx.Param(jnp.float32(3))
    assert numbers(nnx.grad(lambda m: m.a * m.b)(Pair(weight, weight))) == {"a": 6.0}
    own = nnx.grad(lambda m: m.a * m.b, graph_updates=False)(Pair(weight, weight))
    assert own.a is own.b
    assert own.a.value == 6.0


def test_one_object_in_two_differentiated_arguments(model):
    product = lambda a, b: a(1.0) * b(1.0)  # noqa: E731
    assert numbers(nnx.grad(product, argnums=(0, 1))(model, model)) == ({"w": 6.0}, {})
    weight = nnx.Param(jnp.float32(2))
    both = nnx.grad(lambda a, b: a * b, argnums=(0, 1), graph_updates=False)(weight, weight)
    assert numbers(both) == (4.0, 4.0)


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("argnums", [0, 1])
def test_one_variable_in_a_differentiated_argument_and_in_another(model, updates, argnums):
    names = ["first.w", "second.a"] if argnums == 0 else ["second.a", "first.w"]
    message = f"Param at {names[1]} was already seen at {names[0]}, and nnx.grad is asked to"
    grad = nnx.grad(
        lambda first, second: first.w * second.a,
        argnums=argnums,
        graph_updates=updates,
        allow_int=True,
    )
    with pytest.raises(SharedReferenceError, match=message):
        grad(model, Pair(model.w, None))


def test_other_variables_may_be_shared_with_other_arguments(model):
    grads = nnx.grad(lambda m, pair: m(1.0) + pair.a)(model, Pair(model.count, None))
    assert numbers(grads) == {"w": 1.0}


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad, nnx.remat])
def test_tree_mode_refuses_sharing_and_names_both_places(transform):
    weight = nnx.Param(jnp.float32(3))
    with pytest.raises(
        SharedReferenceError, match=r"at .*\.b was already seen at .*\.a\. tree-mode"
    ):
        transform(lambda m: m.a * m.b, graph=False)(Pair(weight, weight))


@pytest.mark.parametrize(
    "transform", [functools.partial(nnx.grad, has_aux=True), nnx.remat], ids=["grad", "remat"]
)
def test_without_graph_updates_inputs_do_not_go_out_again(transform):
    weight = nnx.Param(jnp.float32(2))
    message = "Param comes into .* and goes out at .*, which needs graph updates"
    with pytest.raises(SharedReferenceError, match=message):
        transform(lambda w: (w * 1.0, w), graph_updates=False)(weight)


BAD = {
    "beyond": ({"argnums": 5}, TypeError, "argnums=5 is out of range for a call with 2 positional"),
    "no number": ({"argnums": "x"}, TypeError, "argnums='x' is out of range"),
    "twice": ({"argnums": (0, -2)}, ValueError, "one argument is repeated in argnums"),
    "no aux": ({"has_aux": True}, TypeError, r"to return a pair \(output, aux\), but got"),
    "filter": (
        {"argnums": nnx.DiffState(0, nnx.Param), "graph_updates": False},
        ValueError,
        "DiffState needs graph mode and graph updates",
    ),
    "filter in tree mode": (
        {"argnums": nnx.DiffState(0, nnx.Param), "graph": False},
        ValueError,
        "DiffState needs graph mode and graph updates",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_bad_options(transform, name, model):
    options, error, message = BAD[name]
    with pytest.raises(error, match=f"nnx.{transform.__name__}.*{message}"):
        transform(call, **options)(model, 3.0)
    assert values(model) == values(Affine())


def test_reduce_axes_is_gone():
    with pytest.raises(NotImplementedError, match=r"nnx.grad: reduce_axes is gone.*\nFix: .*psum"):
        nnx.grad(call, reduce_axes=("batch",))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (lambda y: y, r"float32\[2\]\.\nFix: take the mean or the sum"),
        (
            lambda y: (y.sum(), y),
            r"a tuple\.\nFix: .*\(loss, aux\) with nnx\.grad\(.*has_aux=True\)",
        ),
        (lambda y: None, r"a NoneType\.\nFix: return the loss"),
    ],
)
def test_an_output_that_is_no_scalar(model, output, text):
    begin = (
        "nnx.grad: Gradient only defined for scalar-output functions, but the function returned "
    )
    with pytest.raises(TypeError, match=begin + text):
        nnx.grad(lambda m: output(m(jnp.ones(2))))(model)
    assert model.count.value == 0


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad, nnx.remat])
def test_bound_methods_are_refused(transform, model):
    name = transform.__name__
    message = rf"nnx.{name} does not support bound methods: Affine.__call__ .*\n.*@nnx.{name}"
    with pytest.raises(ValueError, match=message):
        transform(model.__call__)


@pytest.mark.parametrize("transform", [nnx.grad, nnx.remat])
def test_a_model_that_is_captured_cannot_be_written(transform, model):
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        transform(lambda x: 2 * model(x))(3.0)
    assert model.count.value == 0


def test_a_model_that_is_captured_can_be_read(model):
    assert nnx.grad(lambda x: model.w * x)(3.0) == 2.0


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad, nnx.remat])
def test_after_an_error_objects_are_as_before(transform, model):
    def fails(m, x):
        m(x)
        m.extra = nnx.Param(x)
        m.power = 9
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        transform(fails)(model, 3.0)
    assert values(model) == values(Affine())
    assert model.power == 1


class Sower(Scale):
    def __call__(self, x):
        y = self.perturb("seen", super().__call__(x))
        self.sow(nnx.Intermediate, "y", y)
        return y


def test_sow_perturb_and_capture():
    model = Sower(2.0)
    model.seen = nnx.Perturbation(jnp.float32(0))
    wrt = nnx.DiffState(0, nnx.Perturbation)
    grads, (y,) = nnx.grad(lambda m: (m(3.0) ** 2, m.y.value), argnums=wrt, has_aux=True)(model)
    assert (float(grads.seen.value), float(y)) == (12.0, 6.0)
    assert nnx.pop(model, nnx.Intermediate)["y"].value == (6.0,)

    def loss(m):
        out, sown = nnx.capture(m, nnx.Intermediate)(3.0)
        return out, sown

    grads, sown = nnx.grad(loss, has_aux=True)(model)
    assert numbers(grads) == {"w": 3.0}
    assert sown["y"].value == (6.0,)
    assert not hasattr(model, "y")


not_jax_11 = pytest.mark.xfail(
    jax.__version__.startswith("0.11."), reason="JAX 0.11 cannot make a ref of a constant there"
)


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, pytest.param(nnx.remat, marks=not_jax_11)], ids=["grad", "grad of remat"]
)
def test_refs_are_read_and_written_once(storage, wrap):
    model = nnx.with_vars(Scale(2.0), **storage)
    assert numbers(nnx.grad(wrap(call))(model, 3.0)) == {"w": 3.0}
    assert model.count.value == 1
    assert isinstance(model.count.raw_value, jax.Ref)


# ---- remat --------------------------------------------------------------------------------------


def test_remat_counts_once_and_gives_the_same_gradient(model):
    deep = lambda m, x: jnp.sin(jnp.sin(m(x)))  # noqa: E731
    plain = numbers(nnx.grad(deep)(Affine(), 3.0))
    assert numbers(nnx.grad(nnx.remat(deep))(model, 3.0)) == plain
    assert model.count.value == 1


def test_remat_keeps_running_means_and_keys():
    pair = Pair(Norm(), Noise(nnx.Rngs(0)))
    eager = nnx.clone(pair)
    f = lambda m, x: m.b(m.a(x))  # noqa: E731
    x = jnp.arange(3.0)
    for _ in range(2):
        np.testing.assert_allclose(nnx.remat(f)(pair, x), f(eager, x), rtol=1e-6)
    assert values(pair) == values(eager)


def remat_text(**options):
    def f(w, x):
        return jnp.sin(jnp.sin(w * x))

    grad = jax.grad(nnx.remat(f, **options))
    return str(jax.make_jaxpr(grad)(jnp.float32(2), jnp.float32(3)))


def test_policy_and_prevent_cse_reach_jax():
    everything = jax.checkpoint_policies.everything_saveable
    again, kept = remat_text(), remat_text(policy=everything)
    assert again.count("cos") == 2
    assert again.count(" sin ") > kept.count(" sin ")
    assert "prevent_cse=False" in remat_text(prevent_cse=False)
    assert "prevent_cse=True" in again


@pytest.mark.parametrize("static", [2, (2,), -1, (-1,)])
def test_remat_static_arguments(static, model):
    def f(m, x, negative):
        return -m(x) if negative else m(x)

    f = nnx.remat(f, static_argnums=static)
    assert (float(f(model, 3.0, True)), float(f(model, 3.0, False))) == (-7.0, 7.0)
    message = r"nnx.remat: static argument -?\d is out of range for a call with 1 positional"
    with pytest.raises(ValueError, match=message):
        nnx.remat(lambda m: m, static_argnums=2)(model)


def test_remat_returns_objects_and_carries_structure_out(model):
    def f(m, x):
        m.power = 4
        m.extra = nnx.Param(x)
        return m, Pair(m.w, nnx.Param(2 * x))

    same, made = nnx.remat(f)(model, 3.0)
    assert same is model
    assert made.a is model.w
    assert (model.power, float(model.extra.value), float(made.b.value)) == (4, 3.0, 6.0)


def test_gradients_of_tree_mode_have_the_type_of_the_model_and_go_into_tree_map():
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = jnp.full((1, 1), 3.0), jnp.zeros(1)

    @nnx.jit(graph=False)
    def step(layer, x):
        grads = nnx.grad(lambda layer: (layer(x) ** 2).sum(), graph=False)(layer)
        assert isinstance(grads, nnx.Linear)
        assert jax.tree.structure(grads) == jax.tree.structure(layer)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layer, grads)

    stepped = step(layer, jnp.ones((1, 1)))  # both gradients are 2 * 3
    np.testing.assert_allclose(stepped.kernel.value, [[2.4]], rtol=1e-6)
    np.testing.assert_allclose(stepped.bias.value, [-0.6], rtol=1e-6)
    assert float(layer.kernel.value[0, 0]) == 3


def test_gradients_of_tree_mode_cover_every_leaf():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.b = nnx.Param(jnp.full(2, 2.0)), nnx.BatchStat(jnp.full(2, 3.0))
            self.a, self.d, self.s = jnp.full(2, 5.0), nnx.data({"x": jnp.ones(2), "n": None}), 3

    grads = nnx.grad(lambda m: (m.w * m.b * m.a * m.d["x"]).sum(), graph=False)(Model())
    assert [g.tolist() for g in (grads.w.value, grads.b.value, grads.a, grads.d["x"])] == [
        [15, 15],
        [10, 10],
        [6, 6],
        [30, 30],
    ]
    assert (grads.s, grads.d["n"]) == (3, None)


def test_a_variable_in_two_places_of_a_dict_has_one_gradient():
    v = nnx.Param(jnp.array(3.0))
    product = lambda d: d["a"][...] * d["b"][...]  # noqa: E731
    grads = nnx.grad(product)({"a": v, "b": v})
    assert isinstance(grads["a"], nnx.Param)
    assert float(grads["a"][...]) == 6.0
    assert isinstance(grads["b"], nnx.State)
    assert not grads["b"]
    both = nnx.grad(product, graph_updates=False)({"a": v, "b": v})
    assert [float(both[key][...]) for key in "ab"] == [6.0, 6.0]
