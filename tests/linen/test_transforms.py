"""Lifted transforms of modules: Flax's trees, names and numbers, errors, and what is compiled."""

import functools
import gc
import json
import pathlib
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import linen as nn
from linnet.errors import (
    CallCompactUnboundModuleError,
    InvalidRngError,
    JaxTransformError,
    PartitioningUnspecifiedError,
    ScopeCollectionNotFound,
    TransformedMethodReturnValueError,
    TransformTargetError,
)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import transform_cases

EXPECTED = json.loads((pathlib.Path(__file__).parent / "transforms.json").read_text())
KEY = jax.random.key(0)
SPLIT = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
X = jnp.arange(1.0, 3.0)


def assert_like(found, wanted, path=""):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key, value in wanted.items():
            assert_like(found[key], value, f"{path}/{key}")
    elif isinstance(wanted, list) and any(isinstance(x, dict | list | str) for x in wanted):
        assert len(found) == len(wanted), path
        for number, value in enumerate(wanted):
            assert_like(found[number], value, f"{path}/{number}")
    elif isinstance(wanted, str) or wanted is None:
        assert found == wanted, path
    else:
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-6, err_msg=path)


@pytest.mark.parametrize("name", transform_cases.CASES)
def test_what_flax_gives(name):
    found = transform_cases.CASES[name](nn, transform_cases.modules(nn))
    assert_like(transform_cases.plain(found), EXPECTED[name])


class Layer(nn.Module):
    size: int = 2

    @nn.compact
    def __call__(self, x, scale=1.0):
        return x * self.param("w", jax.nn.initializers.ones, (self.size,)).sum() * scale


class Step(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        return Layer()(carry + x), x


def in_module(function):
    return transform_cases.in_module(nn, function)


# ---- names and classes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lifted", "name"),
    [
        (nn.vmap(Layer, **SPLIT), "VmapLayer"),
        (nn.scan(Layer, **SPLIT), "ScanLayer"),
        (nn.remat(Layer), "CheckpointLayer"),
        (nn.checkpoint(Layer), "CheckpointLayer"),
        (nn.jit(Layer), "JitLayer"),
        (nn.remat_scan(Layer, (2,)), "Remat_scanLayer"),
        (nn.map_variables(Layer), "Map_variablesLayer"),
        (nn.fold_rngs(Layer), "Fold_rngsLayer"),
        (nn.vmap(nn.remat(Layer), **SPLIT), "VmapCheckpointLayer"),
        (nn.add_metadata_axis(Layer), "Layer"),
    ],
)
def test_names_of_classes(lifted, name):
    assert lifted.__name__ == name
    assert isinstance(lifted(3), Layer)
    assert lifted(3).size == 3


def test_a_method_runs_on_the_original_class():
    seen = []

    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append((type(self).__name__, self.name, self.path))
            return x

    in_module(lambda self, x: nn.vmap(Named, **SPLIT)(name="own")(x)).init(KEY, X)
    assert seen == [("Named", "own", ("own",))]


def test_a_function_keeps_its_name():
    def double(module, x):
        return 2 * x

    assert nn.vmap(double, **SPLIT).__name__ == "double"


# ---- arguments ----------------------------------------------------------------------------------


def test_keyword_arguments():
    model = in_module(lambda self, x: nn.vmap(Layer, **SPLIT)()(x, scale=jnp.array([2.0, 3.0])))
    np.testing.assert_array_equal(model.init_with_output(KEY, X)[0], [4.0, 12.0])
    model = in_module(lambda self, x: nn.vmap(Layer, **SPLIT)()(x, scale=2.0))
    np.testing.assert_array_equal(model.init_with_output(KEY, X)[0], [4.0, 8.0])
    model = in_module(lambda self, x: nn.remat(Layer)()(x, scale=2.0))
    np.testing.assert_array_equal(model.init_with_output(KEY, X)[0], [4.0, 8.0])


def test_a_list_of_modules_is_a_target():
    def call(self, x, i):
        layers = [Layer(n, name=f"layer{n}") for n in (1, 2)]
        if self.is_initializing():
            return [layer(x) for layer in layers]
        return nn.switch(i, [lambda ls, x: ls[0](x), lambda ls, x: ls[1](x)], layers, x)

    variables = in_module(call).init(KEY, X, 0)
    for i in range(2):
        found = in_module(call).apply(variables, X, i)
        np.testing.assert_array_equal(found, (i + 1) * X)


def test_a_variable_is_an_argument():
    def call(self, x):
        n = self.variable("counts", "n", lambda: jnp.zeros(()))

        def add(module, n, x):
            n.value = n.value + x
            return n.value

        return nn.jit(add)(self, n, x), n.value

    found, variables = in_module(call).init_with_output(KEY, 2.0)
    assert (float(found[0]), float(found[1]), float(variables["counts"]["n"])) == (2.0, 2.0, 2.0)


def test_shared_modules_stay_shared():
    class Twice(nn.Module):
        a: nn.Module
        b: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.b(self.a(x))

    def call(self, x):
        layer = Layer(name="layer")
        return nn.jit(Twice)(layer, layer)(x)

    out, variables = in_module(call).init_with_output(KEY, X)
    assert list(variables["params"]) == ["layer"]
    np.testing.assert_array_equal(out, 4 * X)


def test_an_unbound_module_has_no_scope():
    assert float(nn.jit(lambda module, x: 2 * x)(Layer(), 2.0)) == 4.0
    with pytest.raises(CallCompactUnboundModuleError):
        nn.remat(Layer)()(X)


# ---- compiling ----------------------------------------------------------------------------------


def test_jit_traces_once_for_equal_modules():
    traces = []

    class Traced(nn.Module):
        size: int = 2

        @nn.compact
        def __call__(self, x):
            traces.append(self.size)
            self.make_rng("noise")
            return Layer(self.size)(x)

    compiled = nn.jit(Traced)
    model = lambda size: in_module(lambda self, x: compiled(size)(x))  # noqa: E731
    rngs = {"params": KEY, "noise": KEY}
    variables = model(2).init(rngs, X)
    first = model(2).apply(variables, X, rngs=rngs)
    for _ in range(3):
        np.testing.assert_array_equal(model(2).apply(variables, X, rngs=rngs), first)
    assert traces == [2, 2]  # initializing, and not
    model(2).apply(variables, jnp.ones(3), rngs=rngs)
    model(3).init(rngs, X)
    assert traces == [2, 2, 2, 3]


def test_a_class_is_lifted_once_with_the_same_options():
    assert nn.vmap(Layer, **SPLIT) is nn.vmap(Layer, variable_axes={"params": 0}, **rest)
    assert nn.vmap(Layer, {"params": 1}, **rest) is not nn.vmap(Layer, {"params": True}, **rest)
    assert nn.remat(Layer) is not nn.remat(Layer, prevent_cse=False)
    assert nn.remat(Layer, policy=len) is not nn.remat(Layer, policy=len)
    lifted = nn.remat(Layer)
    assert nn.remat(lifted) is not lifted


rest = {"split_rngs": {"params": True}}


def test_a_cached_trace_draws_and_names_as_the_first():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            inside = run(self, x)
            return inside, jax.random.key_data(self.make_rng("noise")), Layer()(x)

    run = nn.jit(
        lambda module, x: jax.random.key_data(module.make_rng("noise")) + 0 * Layer()(x)[0]
    )
    rngs = {"params": KEY, "noise": KEY}
    first, variables = Two().init_with_output(rngs, X)
    assert list(variables["params"]) == ["Layer_0", "Layer_1"]
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, Two().apply(variables, X, rngs=rngs), first)


def test_what_jit_was_called_with_is_freed():
    compiled = nn.jit(Layer)
    variables = compiled().init(KEY, X)
    held = weakref.ref(variables["params"]["w"])
    compiled().apply(variables, X)
    del variables
    gc.collect()
    assert held() is None


def test_static_fields_that_have_no_hash():
    class Listed(nn.Module):
        sizes: list

        @nn.compact
        def __call__(self, x):
            return x * len(self.sizes) * self.param("w", jax.nn.initializers.ones, ())

    compiled = nn.jit(Listed)
    variables = compiled([1]).init(KEY, X)
    np.testing.assert_array_equal(compiled([1]).apply(variables, X), X)
    np.testing.assert_array_equal(compiled([1, 2]).apply(variables, X), 2 * X)
    np.testing.assert_array_equal(compiled(np.ones(3)).apply(variables, X), 3 * X)


def test_a_scan_is_traced_once_unless_it_draws():
    traces = []

    class Body(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            traces.append(1)
            return Layer()(carry + x), None

    scanned = nn.scan(Body, **SPLIT)
    variables = scanned().init(KEY, 0.0, X)
    assert len(traces) == 2
    scanned().apply(variables, 0.0, X)
    assert len(traces) == 3


def test_lazy_init_through_loops():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            w = self.param("w", jax.nn.initializers.normal(), (x.shape[-1],))
            return x * w[None], None

    scanned = nn.scan(nn.remat(Noisy), length=3, **SPLIT)
    x = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    found = scanned().lazy_init(KEY, x, None)
    wanted = scanned().init(KEY, jnp.ones(x.shape), None)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_under_jit_and_grad():
    model = in_module(lambda self, x: nn.scan(nn.remat(Step), **SPLIT)()(0.0, x)[0])
    variables = jax.jit(model.init)(KEY, X)
    eager = jax.grad(model.apply)(variables, X)
    jitted = jax.jit(jax.grad(model.apply))(variables, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), jitted, eager)


# ---- errors -------------------------------------------------------------------------------------


def test_targets():
    for target in (Layer(), 3, int):
        with pytest.raises(TransformTargetError, match="take a module class or a function"):
            nn.vmap(target, **SPLIT)


def test_modules_do_not_leave_a_transform():
    with pytest.raises(TransformedMethodReturnValueError, match="the_layer returned a module"):
        in_module(lambda self, x: nn.jit(the_layer)(Layer(name="layer"), x)).init(KEY, X)


def the_layer(layer, x):
    return [layer]


def test_collections_that_are_not_lifted():
    with pytest.raises(ScopeCollectionNotFound, match=r"\"/vmap\(VmapLayer_0\)\""):
        in_module(lambda self, x: nn.vmap(Layer)()(x)).init(KEY, X)


def test_streams_that_are_not_lifted():
    with pytest.raises(InvalidRngError, match=r'Scope "/vmap\(VmapLayer_0\)" needs a random key'):
        in_module(lambda self, x: nn.vmap(Layer, {"params": 0})()(x)).init(KEY, X)


def test_shared_variables_that_depend_on_a_step():
    class Depends(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            return carry, self.param("w", lambda key: x)

    scanned = nn.scan(Depends, variable_broadcast="params", split_rngs={"params": False})
    with pytest.raises(ValueError, match="variable params/w has a data dependency on the scan"):
        scanned().init(KEY, 0.0, X)


def test_shared_parameters_without_the_check_are_kept():
    scanned = nn.scan(
        Step,
        variable_broadcast="params",
        split_rngs={"params": False},
        check_constancy_invariants=False,
    )
    assert list(scanned().init(KEY, 0.0, X)["params"]) == ["Layer_0"]


def test_how_many_steps_and_entries():
    with pytest.raises(ValueError, match="scan cannot tell how many steps there are"):
        nn.scan(Step, **SPLIT)().init(KEY, 0.0, None)
    with pytest.raises(ValueError, match="vmap cannot tell how many entries there are"):
        nn.vmap(Layer, in_axes=None, **SPLIT)().init(KEY, X)


def test_boxes_want_the_name_of_the_axis():
    boxed = transform_cases.modules(nn).Boxed
    with pytest.raises(PartitioningUnspecifiedError):
        nn.vmap(boxed, **SPLIT)().init(KEY, X)


def test_modules_from_outside_cannot_keep_what_is_made_inside():
    def call(self, x):
        layer = Layer(name="layer")
        return nn.jit(lambda module, x: layer(x))(self, x)

    with pytest.raises(JaxTransformError, match='"w" of collection "params" in scope "/layer"'):
        in_module(call).init(KEY, X)


def test_reduce_axes_are_gone():
    with pytest.raises(ValueError, match="JAX has no reduce_axes any more, but got 'batch'"):
        in_module(lambda self, x: nn.vjp(lambda m, x: x, self, x, reduce_axes="batch")).init(KEY, X)
