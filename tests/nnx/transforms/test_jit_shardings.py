"""Shardings of objects for nnx.jit. What needs several devices runs in one process of its own."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from linnet import nnx
from tests.nnx.transforms import sharding_cases as cases
from tests.nnx.transforms.stateful import Count, Scale


@pytest.mark.parametrize("name", cases.CASES)
def test_on_four_devices(name, failures):
    assert failures.get(name, "") == ""


@pytest.fixture
def replicated():
    return NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec())


def test_state_sharding_is_a_mapping_from_filters():
    sharding = nnx.StateSharding({nnx.Param: "a", ...: "b"})
    assert sharding.filters == (nnx.Param, ...)
    assert sharding.shardings == ("a", "b")
    assert sharding == nnx.StateSharding([(nnx.Param, "a"), (..., "b")])
    assert sharding.map_prefix(("w",), nnx.Param(1.0)) == "a"
    assert sharding.map_prefix(("n",), Count(1.0)) == "b"


def test_a_variable_that_no_filter_selects(replicated):
    jitted = nnx.jit(lambda m: None, in_shardings=(nnx.StateSharding({nnx.Param: replicated}),))
    message = r"has no filter for .count \(Count\).\nFix: add `...: value` for everything"
    with pytest.raises(ValueError, match=message):
        jitted(Scale())


def test_too_few_shardings(replicated):
    jitted = nnx.jit(lambda m, x: x, in_shardings=(replicated,))
    message = "nnx.jit: in_shardings has 1 entries for 2 positional arguments"
    with pytest.raises(ValueError, match=message):
        jitted(Scale(), 1.0)


def test_out_shardings_that_do_not_fit(replicated):
    jitted = nnx.jit(lambda m: m.w * 1, out_shardings=(replicated, replicated))
    with pytest.raises(ValueError, match=r"nnx.jit: out_shardings=.* does not fit the structure"):
        jitted(Scale())


def test_one_variable_in_two_arguments_must_be_sharded_alike(replicated):
    model = Scale()
    other = NamedSharding(jax.make_mesh((1,), ("model",)), PartitionSpec("model"))
    jitted = nnx.jit(lambda a, b: None, in_shardings=(replicated, other))
    message = r"(?s)at b\.count was already seen at a\.count.*asked to treat it in two"
    with pytest.raises(ValueError, match=message):
        jitted(model, model)
    same = nnx.jit(lambda a, b: a.w + b.w, in_shardings=(replicated, replicated))
    assert same(model, model) == 4


def test_a_jitted_module_with_shardings_for_its_arguments(replicated):
    model = Scale()
    run = nnx.jit(model, in_shardings=(replicated,))
    assert run(jnp.ones(2)).tolist() == [2, 2]
    assert model.count.value == 1
