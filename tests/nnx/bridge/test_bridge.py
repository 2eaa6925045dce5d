"""The bridge beyond Flax: what it keeps, what it says, and what it costs."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import errors, linen as nn, nnx, struct
from linnet.core import meta
from linnet.nnx import bridge
from linnet.nnx.bridge import variables as bridge_variables, wrappers
from tests.subprocesses import run_program

X = jnp.arange(6.0).reshape(2, 3)
KEY = jax.random.key(0)


class Count(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones(3))
        self.n = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.n[...] += 1
        return x * self.w[None]


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))


def dense(features=2):
    return bridge.ToNNX(nn.Dense(features), rngs=nnx.Rngs(0)).lazy_init(X)


# ---- loading ------------------------------------------------------------------------------------


def test_linen_is_loaded_with_the_bridge_only():
    program = (
        "import sys, linnet.nnx as nnx; print('linnet.linen' in sys.modules);"
        "nnx.bridge.ToNNX; print('linnet.linen' in sys.modules)"
    )
    assert run_program(program).stdout.split() == ["False", "True"]


def test_unknown_names_of_nnx_are_still_unknown():
    with pytest.raises(AttributeError, match=r"module 'linnet.nnx' has no attribute 'brigde'"):
        nnx.brigde  # noqa: B018


# ---- ToNNX --------------------------------------------------------------------------------------


def test_variables_keep_their_identity():
    model = bridge.ToNNX(Norm(), rngs=nnx.Rngs(0)).lazy_init(X)
    before = dict(nnx.to_flat_state(nnx.state(model)))
    model(X, mutable=True)
    after = dict(nnx.to_flat_state(nnx.state(model)))
    assert before.keys() == after.keys()
    assert all(after[path] is before[path] for path in before)


def test_a_compiled_step_is_traced_once():
    model, traces = bridge.ToNNX(Norm(), rngs=nnx.Rngs(0)).lazy_init(X), []

    @nnx.jit
    def step(model, x):
        traces.append(1)
        return model(x, mutable=["batch_stats"])

    for _ in range(3):
        step(model, X)
    assert len(traces) == 1


@nnx.use_eager_sharding(False)
def test_metadata_is_not_lost_in_a_call():
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    model = bridge.ToNNX(nn.Dense(2, kernel_init=init), rngs=nnx.Rngs(0)).lazy_init(X)
    model(X, mutable=True)
    assert model.kernel.out_sharding == (None, "model")
    assert model.kernel.get_metadata("linen_meta_type") is nn.Partitioned


def test_a_dict_of_keys_is_used():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False))
    keys = {"dropout": jax.random.key(7)}
    want = nn.Dropout(0.5, deterministic=False).apply({}, X, rngs=keys)
    np.testing.assert_array_equal(model(X, rngs=keys), want)
    again = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=keys)
    assert list(again.rngs) == ["dropout"]


def test_a_precision_policy_reaches_linen_parameters():
    model = dense()
    nnx.set_precision(model, "bfloat16")
    assert model.kernel.dtype == jnp.bfloat16
    assert model(X).shape == (2, 2)


def test_variables_may_have_the_names_of_its_properties():
    class Model(nn.Module):
        def setup(self):
            self.module, self.rngs = nn.Dense(2), nn.Dense(2)

        def __call__(self, x):
            return self.rngs(self.module(x))

    model = bridge.ToNNX(Model(), rngs=nnx.Rngs(0)).lazy_init(X)
    out = model(X, mutable=True)
    assert out.shape == (2, 2)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    np.testing.assert_allclose(out, Model().apply({"params": params}, X), rtol=1e-6)
    assert {path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))} == {
        "module",
        "rngs",
    }
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, X), model(X), rtol=1e-6)


def test_a_broadcast_model_under_vmap_says_nothing_of_noise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = dense()
        out = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, jnp.stack([X, 2 * X]))
    assert out.shape == (2, 2, 2)
    np.testing.assert_allclose(out, jnp.stack([model(X), model(2 * X)]), rtol=1e-5)


def test_a_linen_module_of_a_running_method_is_not_part_of_it():
    class Inside(nnx.Module):
        def __init__(self, rngs):
            self.dense = bridge.ToNNX(nn.Dense(2), rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.to_linen(Inside)(x)

    variables = Model().init(KEY, X)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {"ToLinen_0": {"dense": {"kernel": (3, 2), "bias": (2,)}}}
    }
    assert Model().apply(variables, X).shape == (2, 2)


def test_errors_of_to_nnx():
    with pytest.raises(
        TypeError, match=r"ToNNX takes an instance of a Linen module, but got .*Dense"
    ):
        bridge.ToNNX(nn.Dense)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.ScopeCollectionNotFound) as caught:
        bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0))(X)
    assert "has no variables yet.\nFix: model.lazy_init(inputs)" in caught.value.__notes__[0]
    model = dense()
    with pytest.raises(AttributeError, match=r"has no attribute 'features' at model: the Linen"):
        model.features  # noqa: B018
    assert not hasattr(model, "param_dtype")  # a field, though its value can be called
    with pytest.raises(errors.BridgeError, match=r"needs to be a method of an NNX Module"):
        bridge.lazy_init(lambda x: x, X)
    object.__setattr__(model, "kernel", jnp.ones((3, 2)))
    with pytest.raises(errors.CollectionError, match=r"\.kernel is no Variable, but ArrayImpl"):
        model(X)


# ---- ToLinen ------------------------------------------------------------------------------------


def test_variables_that_a_linen_module_inside_makes_late_are_kept():
    class Late(nnx.Module):
        def __init__(self, *, rngs):
            self.norm = bridge.ToNNX(Norm(), rngs=rngs)
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.norm(x))

    model = bridge.to_linen(Late)
    variables = model.init(KEY, X)
    assert list(variables["params"]["norm"]) == ["BatchNorm_0", "Dense_0"]
    np.testing.assert_array_equal(variables["batch_stats"]["norm"]["BatchNorm_0"]["mean"], [0, 0])
    _, updates = model.apply(variables, X, mutable=["batch_stats"])
    assert float(abs(updates["batch_stats"]["norm"]["BatchNorm_0"]["mean"]).sum()) > 0


def test_sown_and_new_variables_go_round():
    class Sow(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param({"a": jnp.ones(1), "b": jnp.ones(2)})

        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x.sum() + self.w.value["a"])
            return x

    model = bridge.to_linen(Sow)
    variables = model.init(KEY, X)
    assert "intermediates" not in variables
    variables["params"]["w"]["a"] = jnp.full(1, 2.0)
    for calls in (1, 2):
        _, updates = model.apply(variables, X, mutable=["intermediates"])
        variables = {**variables, **updates}
        assert [float(h[0]) for h in variables["intermediates"]["h"]] == [17.0] * calls


def test_a_method_by_its_name():
    class Model(Count):
        def add(self, x):
            return x + self.w[None]

    model = bridge.to_linen(Model)
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(variables, X, method="add"), X + 1)


@pytest.mark.parametrize("stored", ["ref", "hijax"])
def test_variables_that_are_refs(stored):
    with nnx.var_defaults(**{stored: True}):
        model = bridge.to_linen(Count)
        variables = model.init(KEY, X)
        _, updates = model.apply(variables, X, mutable=["batch_stats"])
        norm = bridge.ToNNX(Norm(), rngs=nnx.Rngs(0)).lazy_init(X)
        norm(X, mutable=["batch_stats"])
    assert float(meta.unbox(updates)["batch_stats"]["n"]) == 1
    assert float(jnp.abs(norm.BatchNorm_0["mean"][...]).sum()) > 0


def test_keys_that_were_stored_as_text():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            return self.layers[1](self.layers[0](x))

    model = bridge.to_linen(Model)
    variables = model.init(KEY, X)
    layers = variables["params"]["layers"]
    stored = {"params": {"layers": {str(number): layer for number, layer in layers.items()}}}
    np.testing.assert_array_equal(model.apply(stored, X), model.apply(variables, X))


@nnx.use_eager_sharding(False)
def test_names_of_axes_follow_lifted_transforms():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            lifted = nn.vmap(
                bridge.ToLinen,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            init = nnx.with_partitioning(nnx.initializers.ones, ("in", "out"))
            return lifted(nnx.Linear, args=(3, 2), kwargs={"kernel_init": init})(x)

    x = jnp.stack([X, X])
    variables = Model().init(KEY, x)
    spec = nn.get_partition_spec(variables)["params"]["VmapToLinen_0"]["kernel"]
    assert tuple(spec) == ("layers", "in", "out")
    np.testing.assert_array_equal(Model().apply(variables, x)[1, 0], [3, 3])


@nnx.use_eager_sharding(False)
def test_nnx_meta():
    box = bridge.NNXMeta(nnx.Param, jnp.ones((2, 3)), {"out_sharding": ("a", "b"), "unit": "m"})
    assert box.add_axis(0, {"partition_name": "z"}).metadata["out_sharding"] == ("z", "a", "b")
    assert box.add_axis(-1, {"partition_name": "z"}).metadata["out_sharding"] == ("a", "b", "z")
    assert box.remove_axis(0, {"partition_name": "a"}).metadata["out_sharding"] == ("b",)
    assert box.add_axis(0, {}) is box
    with pytest.raises(errors.AxisError, match="should be named 'z'"):
        box.remove_axis(0, {"partition_name": "z"})
    assert tuple(box.get_partition_spec()) == ("a", "b")
    assert box.replace_boxed(3).unbox() == 3
    assert jax.jit(lambda b: b)(box).metadata == box.metadata  # it is hashable
    assert box.to_nnx_variable().unit == "m"


def test_a_box_of_ones_own_comes_back():
    class Box(struct.PyTreeNode, nn.meta.AxisMetadata):
        value: object
        note: str = struct.field(pytree_node=False)

        def unbox(self):
            return self.value

        def replace_boxed(self, val):
            return Box(val, self.note)

        def add_axis(self, index, params):
            return self

        remove_axis = add_axis

    variable = bridge_variables.to_nnx_var("params", Box(1.0, "mine"))
    assert variable.note == "mine"
    back = bridge_variables.to_linen_var(variable)
    assert (type(back), back.value, back.note) == (Box, 1.0, "mine")


def test_to_linen_class():
    Linear = wrappers.to_linen_class(nnx.Linear, use_bias=False)
    for layer in (Linear(3, 2), Linear(in_features=3, out_features=2), Linear(args=(3, 2))):
        assert jax.tree.map(jnp.shape, layer.init(KEY, X)) == {"params": {"kernel": (3, 2)}}
    assert isinstance(Linear(3, 2), bridge.ToLinen)
    assert Linear(3, 2, name="up").clone().args == (3, 2)


def test_warnings_of_to_linen():
    model = bridge.to_linen(Count)
    variables = model.init(KEY, X)
    with pytest.warns(
        errors.DroppedWriteWarning, match=r"dropped:\n  - \.n\nFix: apply\(\.\.\., mu"
    ):
        model.apply(variables, X)
    with pytest.warns(errors.UnknownVariableWarning, match=r"begin anew in every call:\n  - \.w\n"):
        model.apply({}, X, mutable=["batch_stats"])
    extra = {**variables, "params": {**variables["params"], "v": jnp.ones(1)}}
    with pytest.warns(errors.UnknownVariableWarning, match=r"no place in its Count for\n  - \.v\n"):
        model.apply(extra, X, mutable=["batch_stats"])
    model.apply(variables, X, mutable=["batch_stats"])  # without a warning


def test_errors_of_to_linen():
    with pytest.raises(
        TypeError, match=r"takes a class, but got an instance of Linear.*\nFix: give"
    ):
        bridge.to_linen(nnx.Linear(3, 2, rngs=nnx.Rngs(0))).init(KEY, X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.BridgeError, match=r"The Linear has no structure before init"):
        bridge.functional(nnx.Linear)(3, 2).apply({})


def test_errors_of_variables():
    both = {"params": {"a": jnp.ones(1)}, "batch_stats": {"a": {"b": jnp.ones(2)}}}
    with pytest.raises(
        errors.CollectionError, match=r"Two collections have something at \.a: .*\.a\.b"
    ):
        bridge_variables.linen_vars_to_nnx_attrs(both)
    with pytest.raises(errors.CollectionError, match=r"is no Variable, but ArrayImpl\.\nFix: put"):
        bridge_variables.nnx_attrs_to_linen_vars({"a": jnp.ones(1)})
    with pytest.raises(errors.CollectionError, match=r"'params' has Variables of the type Param"):
        bridge_variables.to_nnx_var("params", bridge.NNXMeta(nnx.BatchStat, 1.0, {}))
    with pytest.raises(errors.CollectionError, match=r"begins with its collection"):
        bridge_variables.get_col_name(["params"])


# ---- nnx.bridge.Module --------------------------------------------------------------------------


class Dense(bridge.Module):
    features: int

    @bridge.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), (x.shape[-1], self.features))[...]


def test_what_setup_sets_takes_given_variables():
    class Model(bridge.Module):
        def setup(self):
            self.n = nnx.BatchStat(jnp.zeros(()))
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.layers = nnx.List([Dense(2)])
            self.k = self.param("other", nn.initializers.normal(), (2,))

        def __call__(self, x):
            self.n[...] += 1
            return self.layers[0](self.linear(x)) * self.k[None]

    model = Model()
    variables = model.init(0, X)
    assert sorted(variables["params"]) == ["k", "layers", "linear"]
    variables["params"]["linear"]["bias"] = jnp.ones(2)
    out, after = model.apply(variables, X, rngs=5, mutable=["batch_stats"])
    again, _ = model.apply(variables, X, rngs=6, mutable=["batch_stats"])
    np.testing.assert_array_equal(out, again)  # nothing is drawn anew
    assert float(after["batch_stats"]["n"]) == 2
    np.testing.assert_array_equal(after["params"]["linear"]["bias"], [1, 1])


def test_bind():
    variables = Dense(2).init(0, X)
    bound = Dense(2).bind(variables)
    np.testing.assert_array_equal(bound(X), Dense(2).apply(variables, X))
    np.testing.assert_array_equal(bound.w[...], variables["params"]["w"])
    assert list(bound.variables) == ["params"]


def test_the_variables_of_a_compact_method_that_runs_twice():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            inner = Inner()
            return inner(inner(x))

    class Inner(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return Dense(3)(x)

    variables = Model().init(0, X)
    w = variables["params"]["Inner_0"]["Dense_0"]["w"]
    np.testing.assert_allclose(Model().apply(variables, X), X @ w @ w, rtol=1e-6)


@nnx.use_eager_sharding(False)
def test_boxes_become_metadata():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "a"))
            w = self.param("w", init, (3, 2))
            assert w.out_sharding == (None, "a")
            return x @ w[...]

    variables = Model().init(0, X)
    assert variables["params"]["w"].names == (None, "a")
    np.testing.assert_array_equal(Model().apply(variables, X)[0], [3, 3])


def test_priorities_decide_which_path_a_shared_thing_has():
    class Model(bridge.Module):
        def setup(self):
            self.a = self.b = nnx.Param(jnp.ones(1))
            self.set_attr_priority("b", bridge.AttrPriority.HIGH)

        def __call__(self, x):
            return x * self.a[None]

    assert list(Model().init(0, X)["params"]) == ["b"]


def test_a_module_inside_may_hold_itself():
    class Ring(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))
            self.next = {"ring": self}

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return x * bridge.nnx_in_bridge_mdl(lambda rngs: Ring()).w[None]

    variables = Model().init(0, X)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"Ring_0": {"w": (3,)}}}
    doubled = jax.tree.map(lambda x: 2 * x, variables)
    np.testing.assert_array_equal(Model().apply(doubled, X), 2 * X)


def test_keys_that_are_missing_in_apply():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 2, rngs=rngs))(x)
            return bridge.linen_in_bridge_mdl(nn.Dense(2))(x)

    variables = Model().init(0, X)
    out = Model().apply(variables, X)
    assert out.shape == (2, 2)
    first, second = (variables["params"][name] for name in ("Linear_0", "Dense_0"))
    np.testing.assert_allclose(out, X @ first["kernel"] @ second["kernel"], rtol=1e-5)


def test_errors_of_modules():
    with pytest.raises(
        errors.BridgeError, match=r'`@compact`: the params "w" of a Dense was asked'
    ):
        Dense(2)(X)
    with pytest.raises(errors.BridgeError, match=r"Can't use RNGs on unbound modules: a Dense has"):
        Dense(2).make_rng()
    with pytest.raises(
        errors.BridgeError, match=r"nnx_in_bridge_mdl\(\) only needed inside bridge"
    ):
        bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 2, rngs=rngs))

    class NoInit(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return self.variable("cache", "c")

    with pytest.raises(
        errors.BridgeError, match=r'The cache "c" of a NoInit was not given, and has'
    ):
        NoInit().init(0, X)
