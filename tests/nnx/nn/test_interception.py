"""Whoever stands in for JAX's contractions while a layer runs sees every one of them."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.compare import assert_alike
from tests.functional.interceptors import contractions_in, in_their_code, under_their_names
from tests.nnx.nn.catalogue import CATALOGUE, SEQUENCE, Attends, Entry, X
from tests.nnx.nn.test_matrix import run

LOOPS = (nnx.RNN, nnx.Bidirectional, nnx.Stack)
NUMBERS = {}


def count(entry):
    """How many contractions a call of a layer makes."""
    if str(entry) not in NUMBERS:
        NUMBERS[str(entry)] = traced_count(entry)
    return NUMBERS[str(entry)]


def traced_count(entry):
    graphdef, state = nnx.split(entry.build(nnx.Rngs(0)))

    def call(state):
        return run(nnx.merge(graphdef, state), entry)

    return contractions_in(jax.make_jaxpr(call)(state).jaxpr)


NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm)
WITHOUT = (*NORMS, nnx.Dropout, nnx.PReLU, nnx.Embed, nnx.RoPE)
CASES = [
    *(entry for entry in CATALOGUE if entry.layer not in WITHOUT),
    Entry(nnx.Embed, "attends", lambda rngs: Attends(5, 4, rngs=rngs), (SEQUENCE,)),
]
FIRST = list({entry.layer: entry for entry in reversed(CASES)}.values())
STEPS = [entry for entry in FIRST if entry.layer not in LOOPS]


def test_every_layer_that_contracts_is_here():
    assert [str(entry) for entry in CASES if not count(entry)] == []
    rest = [entry for entry in CATALOGUE if entry.layer in WITHOUT]
    assert [str(entry) for entry in rest if count(entry)] == []


def eagerly(entry):
    return run(entry.build(nnx.Rngs(0)), entry)


def in_nnx_jit(entry):
    return nnx.jit(lambda layer: run(layer, entry))(entry.build(nnx.Rngs(0)))


def in_jax_jit(entry):
    graphdef, state = nnx.split(entry.build(nnx.Rngs(0)))
    return jax.jit(lambda state: run(nnx.merge(graphdef, state), entry))(state)


def in_vmap(entry):
    """Mapped over the state, of which there are two."""
    graphdef, state = nnx.split(entry.build(nnx.Rngs(0)))
    doubled = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    return jax.vmap(lambda state: run(nnx.merge(graphdef, state), entry))(doubled)


def differ(got, want):
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return any(not jnp.allclose(a, b, atol=1e-3) for a, b in leaves)


def check(entry, call, intercepted=under_their_names):
    """Calls with stand-ins, without and with them again, each time by a function that is new."""
    seen = []
    with intercepted(seen.append):
        first = call(entry)
    number = len(seen)
    plain = call(entry)
    assert len(seen) == number
    with intercepted(seen.append):
        second = call(entry)
    assert_alike(second, first)
    assert differ(first, plain)
    if entry.layer in LOOPS:  # what is in a loop may be traced more than once
        assert number >= count(entry)
    else:
        assert number == count(entry)
        assert len(seen) == 2 * number


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_all_are_seen_outside_of_traces(entry):
    if any(entry is first for first in FIRST):
        jax.clear_caches()  # so that the very first call is the one with stand-ins
    check(entry, eagerly)


@pytest.mark.parametrize("entry", FIRST, ids=str)
@pytest.mark.parametrize("call", [in_nnx_jit, in_jax_jit])
def test_all_are_seen_inside_of_traces(entry, call):
    check(entry, call)


def one_of(layer):
    return next(entry for entry in CASES if entry.layer is layer)


@pytest.mark.parametrize("layer", [nnx.Linear, nnx.MultiHeadAttention, nnx.GRUCell])
def test_all_are_seen_in_vmap(layer):
    check(one_of(layer), in_vmap)


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (nnx.Linear, eagerly),
        (nnx.Linear, in_nnx_jit),
        (nnx.MultiHeadAttention, eagerly),
        (nnx.Conv, eagerly),
        (nnx.RNN, eagerly),
        (nnx.RNN, in_nnx_jit),
    ],
)
def test_a_function_with_another_code_is_noticed(layer, call):
    check(one_of(layer), call, in_their_code)


@pytest.mark.parametrize("jits", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("entry", STEPS, ids=str)
def test_a_stand_in_may_write_to_the_module(entry, jits):
    layer = entry.build(nnx.Rngs(0))
    layer.seen, layer.total = 0, nnx.Variable(jnp.zeros((), jnp.int32))

    def call(layer):
        def note(_):
            layer.seen += 1
            layer.total[...] += 1

        with under_their_names(note):
            return run(layer, entry)

    (nnx.jit(call) if jits else call)(layer)
    assert layer.seen == int(layer.total) == count(entry)


def quantised(lhs, rhs, *args, original=jax.lax.dot_general, **kwargs):
    """A contraction of int8 numbers, with one scale an operand."""
    scales = [jnp.max(jnp.abs(x)) / 127 for x in (lhs, rhs)]
    lhs, rhs = (jnp.round(x / s).astype(jnp.int8) for x, s in zip((lhs, rhs), scales, strict=True))
    out = original(lhs, rhs, *args, **(kwargs | {"preferred_element_type": jnp.int32}))
    return out * scales[0] * scales[1]


@pytest.mark.parametrize("jits", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("order", ["plain first", "quantised first"])
def test_a_quantised_layer_and_a_plain_one(monkeypatch, order, jits):
    jax.clear_caches()
    layer = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    kernel, bias = layer.kernel[...], layer.bias[...]

    def call():
        function = nnx.jit(lambda layer, x: layer(x)) if jits else lambda layer, x: layer(x)
        return function(layer, X)

    def call_quantised():
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "dot_general", quantised)
            return call()

    calls = {"plain": call, "quantised": call_quantised}
    names = sorted(calls, reverse=order == "quantised first")
    got = {name: calls[name]() for name in names}
    contract = (((1,), (0,)), ((), ()))
    assert jnp.allclose(got["plain"], X @ kernel + bias[None], atol=1e-6)
    want = quantised(X, kernel, contract) + bias[None]
    assert jnp.allclose(got["quantised"], want, atol=1e-6)
    assert differ(got["plain"], got["quantised"])


def test_a_layer_calls_what_it_was_given():
    seen = []

    def mine(*args, **kwargs):
        seen.append(args[0].shape)
        return jax.lax.dot_general(*args, **kwargs)

    layer = nnx.Linear(3, 5, dot_general=mine, rngs=nnx.Rngs(0))
    want = layer(X)
    with under_their_names(seen.append):
        assert differ(layer(X), want)
    assert seen == [X.shape, X.shape, "dot_general"]


def test_the_default_can_be_called_by_a_layer_of_ones_own():
    layer = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    contract = (((1,), (0,)), ((), ()))
    assert jnp.allclose(
        layer.dot_general(X, layer.kernel[...], contract, precision=None), X @ layer.kernel[...]
    )
