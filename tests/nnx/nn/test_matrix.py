"""Every layer under every transform does what it does without."""

import collections
import inspect

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.compare import assert_alike
from tests.nnx.nn.catalogue import CATALOGUE

entries = pytest.mark.parametrize("entry", CATALOGUE, ids=str)


def run(layer, entry):
    return layer(*entry.inputs, **entry.kwargs)


def twins(entry):
    return entry.build(nnx.Rngs(0)), entry.build(nnx.Rngs(0))


def test_every_public_layer_is_in_the_catalogue_in_two_configurations():
    layers = {
        cls
        for name, cls in vars(nnx).items()
        if inspect.isclass(cls)
        and issubclass(cls, nnx.Module)
        and cls.__module__.startswith("linnet.nnx.nn.")
        and not inspect.isabstract(cls)
        and name not in ("RNNCellBase",)
    }
    found = collections.Counter(entry.layer for entry in CATALOGUE)
    assert {layer for layer in layers if found[layer] < 2} == set()
    assert len(set(map(str, CATALOGUE))) == len(CATALOGUE)


@entries
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_transform_matches_eager(entry, transform):
    eager, lifted = twins(entry)
    want = run(eager, entry)
    got = transform(lambda layer: run(layer, entry))(lifted)
    assert_alike(got, want)
    assert_alike(nnx.state(lifted), nnx.state(eager))


@entries
def test_split_and_merge_round_trip(entry):
    layer, other = twins(entry)
    merged = nnx.merge(*nnx.split(layer))
    assert_alike(run(merged, entry), run(other, entry))
    assert_alike(nnx.state(merged), nnx.state(other))


@entries
def test_pytree_round_trip(entry):
    layer, other = twins(entry)
    copied = jax.tree.map(lambda x: x, layer)
    assert_alike(run(copied, entry), run(other, entry))


@entries
def test_eval_shape_matches_the_output(entry):
    layer, other = twins(entry)
    abstract = nnx.eval_shape(lambda: run(entry.build(nnx.Rngs(0)), entry))
    want = run(other, entry)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert shapes == jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), want)
    del layer


@entries
def test_gradients_are_finite_and_reach_every_parameter(entry):
    layer, other = twins(entry)

    def loss(layer):
        leaves = jax.tree.leaves(run(layer, entry))
        return sum((jnp.asarray(x, jnp.float32) ** 2).sum() for x in leaves)

    grads = nnx.grad(loss)(layer)
    jitted = nnx.jit(nnx.grad(loss))(other)
    assert_alike(jitted, grads, 1e-4, 1e-4)
    assert nnx.to_flat_state(grads).paths == nnx.to_flat_state(nnx.state(layer, nnx.Param)).paths
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


@entries
def test_vmap_over_the_input_matches_one_by_one(entry):
    if not entry.mapped:
        return
    layer, other = twins(entry)
    x, *rest = entry.inputs
    stacked = jnp.stack([x, x + 1]) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.stack([x, x])
    params, others = nnx.split(layer, nnx.Param, ...)[1:]
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    doubled = jax.tree.map(lambda v: jnp.stack([v, v]), others)
    model = nnx.merge(nnx.graphdef(layer), params, doubled)
    got = nnx.vmap(lambda layer, x: layer(x, *rest, **entry.kwargs), in_axes=(axes, 0))(
        model, stacked
    )
    want = other(stacked[0], *rest, **entry.kwargs)
    assert_alike(jax.tree.map(lambda y: y[0], got), want)


@entries
def test_scan_carries_the_layer(entry):
    layer, other = twins(entry)

    def step(layer, _):
        return layer, run(layer, entry)

    _, outputs = nnx.scan(step)(layer, jnp.arange(2))
    want = [run(other, entry) for _ in range(2)]
    assert_alike(jax.tree.map(lambda y: y[1], outputs), want[1])
    assert_alike(nnx.state(layer), nnx.state(other))


@entries
def test_nothing_leaks(entry):
    layer, _ = twins(entry)
    with jax.checking_leaks():
        nnx.jit(lambda layer: run(layer, entry))(layer)
