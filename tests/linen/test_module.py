"""Module: construction, binding, copies, and the errors with their places."""

import copy
import gc
import threading
import weakref
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import errors, linen as nn
from linnet.core import scope as scopes
from linnet.linen import module as linen_module

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


class Dense(nn.Module):
    features: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        return x @ self.param("kernel", jax.nn.initializers.ones, shape)


class Pair(nn.Module):
    size: int = 2

    def setup(self):
        self.a = Dense(self.size)
        self.rest = [Dense(1)]
        self.count = self.variable("counts", "n", lambda: 0)

    def __call__(self, x):
        return self.rest[0](self.a(x))

    def step(self):
        self.count.value += 1
        return self.count.value


# ---- binding and copies -------------------------------------------------------------------------


def test_bind_and_unbind():
    model = Pair()
    variables = model.init(KEY, X)
    bound = model.bind(variables)
    assert bound(X).tolist() == [[6], [6]] and bound.a(X).shape == (2, 2)
    assert (bound.path, bound.a.path, bound.rest[0].path) == ((), ("a",), ("rest_0",))
    assert bound.a.name == "a" and bound.a.parent is bound and bound.parent is bound.scope
    module, held = bound.unbind()
    assert module == model and held == variables and module.scope is None
    part, held = bound.a.unbind()
    assert part == Dense(2) and held == {"params": variables["params"]["a"]}
    assert bound.clone().scope is None and model.scope is None, "binding copies"
    assert not bound.is_initializing() and bound.has_variable("params", "a")
    assert bound.get_variable("counts", "n") == 0


def test_a_bound_module_can_be_written_where_it_is_mutable():
    model = Pair()
    variables = model.init(KEY, X)
    bound = model.bind(variables, mutable=["counts"])
    assert [bound.step(), bound.step()] == [1, 2]
    assert bound.variables["counts"] == {"n": 2} and variables["counts"] == {"n": 0}
    bound.put_variable("counts", "m", 7)
    assert bound.variables["counts"] == {"n": 2, "m": 7}
    with pytest.raises(errors.ModifyScopeVariableError, match='"n" in scope "/" cannot be written'):
        model.bind(variables).step()


def test_bound_modules_are_freed_without_a_garbage_collection():
    gc.disable()
    try:
        bound = Pair().bind(Pair().init(KEY, X))
        bound(X)
        reference, scope = weakref.ref(bound.a), weakref.ref(bound.scope)
        del bound
        assert reference() is None and scope() is None
    finally:
        gc.enable()


def test_clone_copy_and_pickle():
    class Holder(nn.Module):
        inner: Any
        n: int = 1

    dense = Dense(3, name="d")
    holder = Holder(dense)
    assert holder.clone() == holder and holder.clone().inner is dense
    assert holder.clone(_deep_clone=True).inner is not dense
    assert holder.copy().inner is not dense and holder.copy() == holder
    changed = holder.copy(name="w", n=2)
    assert (changed.name, changed.n, holder.n) == ("w", 2, 1)
    assert dense.clone().name == "d" and dense.copy().name is None
    for copied in (copy.copy(holder), copy.deepcopy(holder)):
        assert copied == holder
    assert type(cloudpickle.loads(cloudpickle.dumps(holder)).inner).__name__ == "Dense"
    with pytest.raises(TypeError, match="unexpected keyword argument 'zzz'"):
        dense.clone(zzz=1)


def test_hash_and_equality():
    assert {Dense(3): 1}[Dense(3)] == 1 and Dense(3) != Dense(4)
    with pytest.raises(TypeError, match="The Dense at a holds variables, and has no hash"):
        hash(Pair().bind(Pair().init(KEY, X)).a)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Dense([3]))


def test_modules_in_other_threads_do_not_meet():
    outer = []

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            thread = threading.Thread(target=lambda: outer.append(Dense(3).parent))
            thread.start()
            thread.join()
            return Dense(2)(x)

    assert list(Model().init(KEY, X)["params"]) == ["Dense_0"] and outer == [None]


def test_the_running_module_is_the_last_of_the_stack():
    seen = []

    class Model(nn.Module):
        def __call__(self):
            seen.append(linen_module._context.module_stack[-1])
            return seen[0] is self

    assert Model().apply({}) and linen_module._context.module_stack == [None]


def test_operations_are_named_after_modules():
    class Model(nn.Module):
        def setup(self):
            self.part = Dense(2)

        def encode(self, x):
            return self.part(x)

        def __call__(self, x):
            return self.encode(x)

    def text(**kwargs):
        variables = Model().init(KEY, X)
        lowered = jax.jit(lambda x: Model().apply(variables, x, **kwargs)).lower(X)
        return lowered.as_text(debug_info=True)

    assert "Model/Model.encode/part/dot_general" in text()
    with nn.override_named_call(False):
        assert "Model/Model.encode" not in text()


def test_frozen_dicts_are_variables_too():
    variables = nn.FrozenDict(Pair().init(KEY, X))
    assert Pair().apply(variables, X).tolist() == [[6], [6]]
    _, updates = Pair().apply(variables, mutable=["counts"], method="step")
    assert updates == {"counts": {"n": 1}}


def test_merge_param():
    assert nn.merge_param("train", None, False) is False and nn.merge_param("train", 3, None) == 3
    with pytest.raises(ValueError, match="`train` must be passed to the constructor or at call"):
        nn.merge_param("train", None, None)
    with pytest.raises(
        ValueError, match=r"`train` was passed to the constructor \(1\) and at call"
    ):
        nn.merge_param("train", 1, 2)


def test_is_mutable_and_flags_during_init():
    class Model(nn.Module):
        def __call__(self):
            keys = self.has_rng("params"), self.has_rng("dropout")
            cols = [self.is_mutable_collection(c) for c in ("params", "intermediates")]
            return self.is_initializing(), keys, cols

    assert Model().init_with_output(KEY)[0] == (True, (True, False), [True, False])
    assert Model().apply({}) == (False, (False, False), [False, False])


# ---- errors -------------------------------------------------------------------------------------


def test_a_submodule_outside_of_setup_and_compact():
    class Model(nn.Module):
        def __call__(self, x):
            return Dense(3)(x)

    with pytest.raises(errors.AssignSubModuleError, match=r"Submodule Dense must be defined in"):
        Model().init(KEY, X)


def test_a_variable_outside_of_setup_and_compact():
    class Model(nn.Module):
        def setup(self):
            self.inner = Inner()

        def __call__(self):
            return self.inner()

    class Inner(nn.Module):
        def __call__(self):
            return self.param("w", lambda key: 1)

    text = 'The param "w" of Inner at inner was made outside of setup and of a compact method'
    with pytest.raises(ValueError, match=text):
        Model().init(KEY)


def test_names_in_use_are_told_with_the_place():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner(name="enc")(x)

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dense(3, name="d")(Dense(3, name="d")(x))

    with pytest.raises(errors.NameInUseError) as caught:
        Model().init(KEY, X)
    assert str(caught.value) == (
        'Could not create submodule "d" in module Inner at enc: the name is in use there.\n'
        "Fix: give it another name, or leave the name of a submodule out for an automatic one."
    )


def test_frozen_attributes():
    class InCall(nn.Module):
        def __call__(self):
            self.w = 3

    class FieldInSetup(nn.Module):
        n: int = 3

        def setup(self):
            self.n = 4

        def __call__(self):
            return self.n

    class OfAnother(nn.Module):
        def setup(self):
            self.d = Dense(3)
            self.d.features = 4

        def __call__(self):
            return self.d

    text = "The module InCall is frozen outside of setup: w = 3 cannot be set"
    with pytest.raises(errors.SetAttributeFrozenModuleError, match=text):
        InCall().apply({})
    with pytest.raises(errors.SetAttributeInModuleSetupError, match="cannot be set in setup"):
        FieldInSetup().apply({})
    with pytest.raises(
        errors.SetAttributeFrozenModuleError, match="The module Dense at d is frozen"
    ):
        OfAnother().apply({})
    free = Dense(3)
    free.features = 4  # before it is bound, a module is a plain dataclass
    assert free.features == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.variables,
        lambda m: m.path,
        lambda m: m.param("a", jnp.zeros),
        lambda m: m.variable("a", "b"),
        lambda m: m.make_rng(),
        lambda m: m.has_rng("a"),
        lambda m: m.is_initializing(),
        lambda m: m.get_variable("a", "b"),
        lambda m: m.put_variable("a", "b", 1),
        lambda m: m.has_variable("a", "b"),
        lambda m: m.is_mutable_collection("a"),
        lambda m: m.sow("a", "b", 1),
        lambda m: m.perturb("b", 1),
    ],
)
def test_an_unbound_module_has_no_variables(use):
    with pytest.raises(ValueError, match=r"Pair\.\w+ needs variables, but the module is not bound"):
        use(Pair())


def test_methods_of_an_unbound_module():
    class Model(nn.Module):
        def setup(self):
            self.d = Dense(3)

        def __call__(self, x):
            return self.d(x)

        def plain(self):
            return 1

    model = Model()
    assert model.plain() == 1 and model.name is None and model.parent is None
    with pytest.raises(AttributeError, match=r'"Model" object has no attribute "d"\.\nFix: at'):
        model(X)
    with pytest.raises(AttributeError, match='"Model" object has no attribute "zz"'):
        model.zz  # noqa: B018
    with pytest.raises(errors.CallCompactUnboundModuleError, match=r"module\.apply"):
        Dense(3)(X)
    with pytest.raises(errors.CallSetupUnboundModuleError):
        model.setup()
    with pytest.raises(errors.CallUnbindOnUnboundModuleError):
        model.unbind()
    with pytest.raises(errors.CallShareScopeOnUnboundModuleError):
        nn.share_scope(model, model)


def test_what_method_can_be():
    model, variables = Pair(), Pair().init(KEY, X)
    with pytest.raises(errors.ApplyModuleInvalidMethodError, match="method=3"):
        model.apply(variables, X, method=3)
    with pytest.raises(errors.ApplyModuleInvalidMethodError, match="a function whose first param"):
        model.apply(variables, X, method=lambda: 1)
    with pytest.raises(AttributeError, match='has no attribute "nope"'):
        model.apply(variables, X, method="nope")
    with pytest.raises(TypeError, match=r"Pair\.size is no method, but int"):
        model.apply(variables, X, method="size")
    for call in (Pair.init, Pair.init_with_output, Pair.lazy_init):
        with pytest.raises(errors.InvalidInstanceModuleError, match="was called on the class"):
            call(KEY, X)
    with pytest.raises(errors.InvalidInstanceModuleError):
        Pair.apply(variables, X)


def test_classes_that_cannot_be():
    with pytest.raises(
        errors.ReservedModuleAttributeError, match="This class has the fields parent"
    ):

        class _WithParent(nn.Module):
            parent: Any = None

    class Named(nn.Module):
        name: str = "said again"
        size: int = 2

    assert Named(3).size == 3 and Named().name is None

    class Forgetful(nn.Module):
        def __post_init__(self):
            pass

        def __call__(self):
            return 1

    with pytest.raises(errors.IncorrectPostInitOverrideError, match="super"):
        Forgetful().apply({})
    with pytest.raises(ValueError, match="must be a module, a scope or None, but got 3"):
        Dense(1, parent=3)


def test_a_property_that_fails_says_why():
    class Model(nn.Module):
        @property
        def size(self):
            return self.missing

        def __call__(self):
            return self.size

    with pytest.raises(errors.DescriptorAttributeError) as caught:
        Model().apply({})
    assert 'has no attribute "missing"' in str(caught.value.__cause__)


def test_a_module_kept_beyond_its_call():
    kept = []

    class Model(nn.Module):
        def setup(self):
            self.d = Dense(2)

        def __call__(self, x):
            kept.append(self)
            return self.d(x)

    Model().init(KEY, X)
    for use in (kept[0].make_rng, lambda: kept[0].put_variable("params", "w", 1)):
        with pytest.raises(errors.InvalidScopeError, match='The scope "/" is no longer valid'):
            use()
    assert list(kept[0].variables["params"]) == ["d"], "what it made can be read"


def test_a_param_made_in_a_transform_inside_of_a_module():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.jit(lambda y: Dense(2)(1 * y))(x)

    text = '"kernel" of collection "params" in scope "/Dense_0" was made or written inside a JAX'
    with pytest.raises(errors.JaxTransformError, match=text):
        Model().init(KEY, X)


def test_shapes_that_do_not_fit_are_told_with_the_place():
    variables = Pair().init(KEY, X)
    text = (
        r'Parameter "kernel" in scope "/a" has shape \(3, 2\), but its initializer gives .*\(3, 4\)'
    )
    with pytest.raises(errors.ScopeParamShapeError, match=text):
        Pair(4).apply(variables, X)
    with pytest.raises(errors.ScopeParamNotFoundError, match='no parameter "kernel" in scope "/a"'):
        Pair().apply({"params": {"a": {"b": 1}}, "counts": {"n": 0}}, X)


def test_compact_name_scope_outside_of_a_call():
    class Model(nn.Module):
        @nn.compact_name_scope
        def up(self, x):
            return Dense(3)(x)

    class Sub(Model):
        @nn.compact_name_scope
        def up(self, x):
            return Dense(2)(super().up(x))

    class Around(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Model().up(Model().up(x))

    with pytest.raises(errors.UnboundModuleError, match=r"Model\.up was called on a module with"):
        Model().up(X)
    params = Sub().init(KEY, X, method="up")["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "up": {"Dense_0": {"kernel": (3, 2)}, "Dense_1": {"kernel": (3, 3)}}
    }
    assert sorted(Around().init(KEY, X)["params"]) == ["Model_0", "Model_1"]


def test_names_that_programs_import():
    assert linen_module.VariableDict is scopes.VariableDict
    assert linen_module.wrap_method_once(Dense.__call__) is Dense.__call__
    assert linen_module.tuple_reduce(linen_module.tuple_init(), 1) == (1,)


def test_interceptors_see_the_public_methods_of_layers():
    seen = []

    def note(next_fun, args, kwargs, context):
        seen.append((type(context.module).__name__, context.method_name))
        return next_fun(*args, **kwargs)

    layers = [
        nn.Conv(4, (1,)),
        nn.LayerNorm(),
        nn.BatchNorm(use_running_average=False),
        nn.Dropout(0.5, deterministic=False),
        nn.MultiHeadDotProductAttention(2),
        nn.RNN(nn.GRUCell(4)),
        nn.DenseGeneral(4),
    ]
    x, keys = jnp.ones((1, 3, 4)), {"params": KEY, "dropout": KEY}
    for layer in layers:
        variables = layer.init(keys, x)
        with nn.intercept_methods(note):
            layer.apply(variables, x, rngs=keys, mutable=True)
        captured = {"capture_intermediates": lambda m, n: True, "mutable": True}
        _, found = layer.apply(variables, x, rngs=keys, **captured)
        names = [
            step.key
            for path, _ in jax.tree_util.tree_leaves_with_path(found["intermediates"])
            for step in path[:-1]
        ]
        seen += [("captured", name) for name in names]
    assert not [name for _, name in seen if name.startswith("_") and not name.startswith("__")]


def test_sow_under_the_name_of_an_array():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("kept", "a", x)

    with pytest.raises(TypeError, match=r"sow adds to a tuple, but found a ArrayImpl .*\nFix: sow"):
        Sows().apply({"kept": {"a": jnp.ones(2)}}, X, mutable=["kept"])


def test_a_weight_norm_leaves_weights_that_can_be_written():
    layer = nn.WeightNorm(nn.Dense(3))
    variables = jax.tree.map(lambda x: x + 0.5, layer.init(KEY, X))
    for mutable in (True, ["params"]):
        _, new = layer.apply(variables, X, mutable=mutable)
        jax.tree.map(np.testing.assert_array_equal, new["params"], variables["params"])


def test_classes_print_their_names():
    text = repr(nn.Dense(2, dtype=jnp.bfloat16))
    assert "    dtype = bfloat16\n    param_dtype = float32\n" in text
