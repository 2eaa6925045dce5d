"""Optimizers: their forms, the kinds of their state, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import FilterError, StateMismatchError
from tests.compare import assert_close
from tests.models import Net, params_of

X = jnp.arange(12.0).reshape(4, 3) / 12
RATE = 0.1


def loss(model):
    return ((model(X) - 1) ** 2).mean()


def descended(steps=3):
    """The parameters after some steps of gradient descent by hand."""
    model = Net()
    for _ in range(steps):
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, params, nnx.grad(loss)(model)))
    return params_of(model)


# ---- forms --------------------------------------------------------------------------------------


def old_form(tx):
    model = Net()
    optimizer = nnx.Optimizer(model, tx)
    assert optimizer.model is model
    return model, optimizer


def keeping_its_model(tx):
    model = Net()
    optimizer = nnx.ModelAndOptimizer(model, tx)
    assert optimizer.model is model and isinstance(optimizer, nnx.Optimizer)
    return model, optimizer


@pytest.mark.parametrize("make", [old_form, keeping_its_model])
def test_optimizers_that_keep_their_model(make):
    model, optimizer = make(optax.sgd(RATE))

    @nnx.jit
    def step(optimizer):
        optimizer.update(nnx.grad(loss)(optimizer.model))

    for _ in range(3):
        step(optimizer)
    assert optimizer.model is model
    assert_close(params_of(model), descended())


def test_the_filter_may_stand_by_position_as_in_older_programs():
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), nnx.PathContains("hidden"))
    assert set(optimizer.opt_state[0].mu) == {"hidden"} and optimizer.model is None


def test_subclasses_that_keep_more():
    class TrainState(nnx.Optimizer):
        def __init__(self, model, tx, metrics):
            self.metrics = metrics
            super().__init__(model, tx)

        def update(self, *, grads, **updates):
            self.metrics.update(**updates)
            super().update(grads)

    state = TrainState(Net(), optax.sgd(0.1), nnx.metrics.Average())
    value, grads = nnx.value_and_grad(loss)(state.model)
    state.update(grads=grads, values=value)
    assert state.metrics.compute() == value and int(state.step.value) == 1


@pytest.mark.parametrize("form", ["state", "pure dict", "model", "arrays"])
def test_forms_of_gradients(form):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    grads = nnx.grad(loss)(model)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    want = jax.tree.map(jnp.subtract, params_of(model), grads.to_pure_dict())
    given = {
        "state": grads,
        "pure dict": grads.to_pure_dict(),
        "model": nnx.grad(loss, graph_updates=False)(model),
        "arrays": nnx.State(grads.to_pure_dict()),
    }
    optimizer.update(model, given[form])
    assert_close(params_of(model), want)


def test_several_models_in_a_tuple():
    models = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(models, optax.sgd(1.0), wrt=nnx.Param)
    grads = nnx.grad(lambda a, b: (b(a(X)) ** 2).sum(), argnums=(0, 1))(*models)
    want = [
        jax.tree.map(jnp.subtract, params_of(model), part.to_pure_dict())
        for model, part in zip(models, grads, strict=True)
    ]
    optimizer.update(models, grads)
    assert_close([params_of(model) for model in models], want)


def test_a_variable_as_the_model():
    weight = nnx.Param(jnp.array([1.0, 2.0]), role="gate")
    optimizer = nnx.Optimizer(weight, optax.adam(0.5), wrt=nnx.Param)
    assert optimizer.opt_state[0].mu.role == "gate"
    optimizer.update(weight, nnx.grad(lambda w: (w**2).sum())(weight))
    np.testing.assert_allclose(weight.value, [0.5, 1.5], rtol=1e-5)


def test_plain_arrays_are_optimized_where_the_filter_selects_them():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)), raw=jnp.ones(2))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=...)
    optimizer.update(model, {"w": jnp.ones(2), "raw": jnp.full(2, 2.0)})
    assert model.w.value.tolist() == [0.5, 0.5] and model.raw.tolist() == [0, 0]


def test_a_parameter_that_holds_a_dict():
    model = nnx.Dict(w=nnx.Param({"a": jnp.ones(2), "b": jnp.ones(3)}))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m.w["a"] ** 2).sum() + m.w["b"].sum())(model)
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.w["a"], [0.9, 0.9], rtol=1e-5)


def test_tied_parameters_are_updated_once():
    model = nnx.Dict(a=nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    model.b = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    model.b.kernel = model.a.kernel
    before = model.a.kernel.value
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m.b(m.a(X)) ** 2).sum())(model)
    optimizer.update(model, grads)
    assert model.a.kernel is model.b.kernel
    np.testing.assert_allclose(model.a.kernel.value, before - grads.a.kernel.value, rtol=1e-5)


def test_several_optimizers_on_disjoint_filters():
    model = Net()
    hidden = nnx.PathContains("hidden")
    filters = (nnx.All(nnx.Param, hidden), nnx.All(nnx.Param, nnx.Not(hidden)))
    optimizers = [nnx.Optimizer(model, optax.sgd(RATE), wrt=wrt) for wrt in filters]

    @nnx.jit
    def step(model, optimizers):
        grads = nnx.grad(loss)(model)
        for optimizer, part in zip(optimizers, nnx.split_state(grads, *filters), strict=True):
            optimizer.update(model, part)

    for _ in range(3):
        step(model, optimizers)
    assert_close(params_of(model), descended())
    assert [int(optimizer.step.value) for optimizer in optimizers] == [3, 3]


def test_steps_with_plain_jax_jit():
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

    @jax.jit
    def step(model, optimizer):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def pure_loss(params, rest):
            model = nnx.merge(graphdef, params, nnx.clone(rest))
            return loss(model), nnx.state(model, (nnx.BatchStat, nnx.RngState))

        grads, updates = jax.grad(pure_loss, has_aux=True)(params, rest)
        nnx.update(model, updates)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    for _ in range(3):
        nnx.update((model, optimizer), step(model, optimizer))
    assert_close(params_of(model), descended())


# ---- kinds, metadata, tracing -------------------------------------------------------------------


def test_kinds_and_metadata_of_the_state():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), kernel_metadata={"role": "weight"})
    model.kernel.set_metadata(on_set_value=lambda variable, value: value)
    optimizer = nnx.Optimizer(model, optax.adafactor(0.1, min_dim_size_to_factor=2), wrt=nnx.Param)
    state = optimizer.opt_state[0]
    assert type(state.count) is nnx.OptArray and type(state.v_row["kernel"]) is nnx.OptVariable
    assert state.v_row["kernel"].role == "weight"
    assert not state.v_row["kernel"].has_metadata("on_set_value")
    assert not state.v_row["bias"].has_metadata("role")
    kinds = (nnx.OptArray, nnx.OptVariable)
    assert all(issubclass(kind, nnx.OptState) for kind in kinds)
    assert set(nnx.state(optimizer, nnx.OptState)) == {"step", "opt_state"}


def test_axis_names_go_where_there_are_as_many_axes():
    names = {"out_sharding": ("rows", "columns"), "eager_sharding": False}
    model = nnx.State({"w": nnx.Param(jnp.ones((4, 8)), **names)})
    optimizer = nnx.Optimizer(model, optax.adafactor(0.1, min_dim_size_to_factor=2), wrt=nnx.Param)
    assert not optimizer.opt_state[0].v_row["w"].has_metadata("out_sharding")
    assert nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param).opt_state[0].mu[
        "w"
    ].out_sharding == ("rows", "columns")
    model.w.set_metadata(opt_sharding=("columns", None))
    moment = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param).opt_state[0].mu["w"]
    assert moment.out_sharding == ("columns", None) and not moment.has_metadata("opt_sharding")


def test_gradients_of_more_than_is_optimized():
    class Adapted(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.array([2.0, 3.0]))
            self.adapter = nnx.LoRAParam(jnp.array([1.0, 1.0]))

    model = Adapted()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    grads = nnx.grad(lambda model: (model.weight * model.adapter * 3).sum())(model)
    assert set(grads) == {"weight", "adapter"}
    optimizer.update(model, grads)
    # The gradient (6, 9) of the adapter has norm sqrt(117); that of the weight does not count.
    assert_close(params_of(model)["adapter"], 1 - np.array([6.0, 9.0]) / np.sqrt(117))
    assert_close(params_of(model)["weight"], np.array([2.0, 3.0]))
    assert int(optimizer.step.value) == 1


# ---- bad input ----------------------------------------------------------------------------------

WRONG_GRADIENTS = {
    "missing": (
        lambda g: {"kernel": g["kernel"]},
        "Missing:\n  - .bias\nFix: differentiate with respect to all that",
    ),
    "extra": (
        lambda g: {**g, "scale": g["bias"], "layers": {0: g["bias"]}},
        "Not optimized:\n  - .layers[0]\n  - .scale\nFix: ",
    ),
    "of another shape": (
        lambda g: {**g, "bias": jnp.ones(3)},
        "Of another shape:\n  - .bias: the gradient is (3,), the parameter (2,)\nFix: ",
    ),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_gradients_of_another_structure_are_refused(name):
    change, message = WRONG_GRADIENTS[name]
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    before = params_of(model)
    grads = change(nnx.grad(loss)(model).to_pure_dict())
    with pytest.raises(StateMismatchError) as caught:
        optimizer.update(model, grads)
    start = "The gradients are not those of the Variables that the optimizer was built for.\n"
    assert str(caught.value).startswith(start + message)
    assert_close(params_of(model), before)
    assert int(optimizer.step.value) == 0


def test_a_class_is_no_model():
    with pytest.raises(TypeError) as caught:
        nnx.Optimizer(Net, optax.sgd(0.1), wrt=nnx.Param)
    assert str(caught.value) == (
        "nnx.Optimizer takes a model, but got the class Net.\n"
        "Fix: make one first, model = Net(..., rngs=nnx.Rngs(0))."
    )


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_another_model_is_refused(tx):
    model, other = Net(), Net(sizes=(3, 5, 2))
    other.extra = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    del other.norm
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(StateMismatchError) as caught:
        optimizer.update(other, nnx.state(other, nnx.Param))
    assert str(caught.value) == (
        "This is not the model that the optimizer was built for.\n"
        "No longer there, or frozen since:\n  - .norm.bias\n  - .norm.scale\n"
        "New, or no longer frozen:\n  - .extra.bias\n  - .extra.kernel\n"
        "Of another shape:\n"
        "  - .heads[0].kernel: (5, 2), built for (4, 2)\n"
        "  - .hidden.bias: (5,), built for (4,)\n"
        "  - .hidden.kernel: (3, 5), built for (3, 4)\n"
        "Fix: build the optimizer after the model has taken its shape and what stays fixed is "
        "frozen, or pass the model that it was built for."
    )


def test_a_filter_that_selects_nothing_is_refused():
    with pytest.raises(FilterError) as caught:
        nnx.Optimizer(Net(), optax.sgd(0.1), wrt=nnx.Cache)
    assert str(caught.value) == (
        "wrt=Cache selects nothing in this Net, so there is nothing to optimize. It has "
        "BatchStat, Param, RngCount, RngKey.\n"
        "Fix: pass a filter for the Variables that shall train, such as wrt=nnx.Param."
    )
    model = Net()
    nnx.freeze(model)
    with pytest.raises(FilterError, match=r"All 6 Variables that wrt=Param selects are frozen"):
        nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def test_gradients_alone_are_refused_by_an_optimizer_without_a_model():
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError) as caught:
        optimizer.update(nnx.grad(loss)(model))
    assert str(caught.value) == (
        "Optimizer.update takes the model and the gradients, but got one argument.\n"
        "Fix: optimizer.update(model, grads); or build nnx.ModelAndOptimizer(model, tx), which "
        "keeps its model and takes update(grads)."
    )


def test_arguments_the_wrong_way_round_are_refused():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))  # its gradients have its own structure
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    with pytest.raises(TypeError) as caught:
        optimizer.update(grads, model)
    assert str(caught.value) == (
        "Optimizer.update takes the model first and the gradients second, but got a State first "
        "and then a Linear.\nFix: optimizer.update(model, grads)."
    )
    assert int(optimizer.step.value) == 0


def test_a_transformation_that_changes_the_structure_of_its_state_is_refused():
    model = Net()
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, (X,)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(StateMismatchError, match=r"a state of another structure than tx.init"):
        optimizer.update(model, nnx.grad(loss)(model))
    assert int(optimizer.step.value) == 0


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda model: nnx.Optimizer(model, optax.sgd, wrt=nnx.Param),
            "sgd.\nFix: call it, sgd(...), as in nnx.Optimizer(model, optax.adam(1e-3), ",
        ),
        (
            lambda model: nnx.Optimizer(optax.sgd(0.1), model, wrt=nnx.Param),
            "Linear.\nFix: the model comes first, nnx.Optimizer(model, optax.adam(1e-3), ",
        ),
        (
            lambda model: nnx.Optimizer(model, 1e-3, wrt=nnx.Param),
            "float.\nFix: nnx.Optimizer(model, optax.adam(1e-3), ",
        ),
    ],
    ids=["not called", "swapped", "a rate"],
)
def test_what_is_no_transformation(build, text):
    with pytest.raises(AttributeError) as caught:
        build(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert str(caught.value) == (
        "nnx.Optimizer takes an Optax transformation with init and update as tx, but got "
        f"{text}wrt=nnx.Param)."
    )
    assert isinstance(caught.value, TypeError)


def test_parameters_for_annotations():
    class Own(nnx.Optimizer[nnx.Linear]):
        pass

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    plain = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    subscripted = nnx.Optimizer[nnx.Linear](model, optax.sgd(0.1), wrt=nnx.Param)
    assert nnx.graphdef(subscripted) == nnx.graphdef(plain)
    assert nnx.ModelAndOptimizer[nnx.Linear](model, optax.sgd(0.1)).model is model
    assert Own(model, optax.sgd(0.1), wrt=nnx.Param).step.value == 0


class Doubled(nnx.Param):
    def get_value(self, **kwargs):
        return super().get_value(**kwargs) * 2

    def set_value(self, value, **kwargs):
        super().set_value(value / 2, **kwargs)


class Hooked(nnx.Param):
    def on_set_value(self, value):
        return value * 10


def tripled_when_set(x):
    return nnx.Param(x, on_set_value=lambda variable, value: value * 3)


@pytest.mark.parametrize(("optimize", "doubled"), [(optax.sgd, 2), (optax.adam, 1)])
@pytest.mark.parametrize("make", [Doubled, Hooked, tripled_when_set])
@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit])
def test_stored_values_are_optimized(transform, make, optimize, doubled):
    """Hooks are for users: Optax reads and writes what is stored, as in Flax."""
    model = nnx.Dict(v=make(jnp.ones(2)))
    optimizer = nnx.Optimizer(model, optimize(RATE), wrt=nnx.Param)
    before = model.v.raw_value

    @transform
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: model.v[...].sum())(model))

    step(model, optimizer)
    slope = doubled if make is Doubled else 1
    assert_close(model.v.raw_value, before - RATE * slope, 1e-5)
