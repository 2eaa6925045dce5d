"""A fresh Rngs goes into a jitted function as its seeds; nobody can tell."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import TraceContextError
from tests.nnx.transforms.stateful import Noise, Scale, counted, values


def keep(model, rngs):
    model.kept = rngs


def keep_stream(model, rngs):
    model.kept = rngs.dropout
    rngs.dropout()


def keep_fork(model, rngs):
    model.noise = Noise(rngs)


def add_stream(model, rngs):
    rngs.extra = nnx.RngStream(5, tag="extra")


def add_note(model, rngs):
    rngs.note = "seen"


def reseed(model, rngs):
    nnx.reseed(rngs, default=5)


def rename(model, rngs):
    rngs.default.count.set_metadata(role="counter")


def draw(model, rngs):
    return rngs.normal(()) + rngs.dropout.uniform(())


def fork(model, rngs):
    return rngs.fork().normal(()) + rngs.normal(())


def draw_inside_grad(model, rngs):
    return nnx.grad(lambda model, rngs: model.w * rngs.normal(()))(model, rngs).w.value


def draw_inside_vmap(model, rngs):
    mapped = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: rngs.normal(())))
    return mapped(rngs).sum()


USES = [keep, keep_stream, keep_fork, add_stream, add_note, reseed, rename]
USES += [draw, fork, draw_inside_grad, draw_inside_vmap]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_what_is_done_to_a_fresh_rngs_is_done_to_it(use):
    jitted = nnx.jit(use)
    model, eager_model = Scale(), Scale()
    for seed in (1, 2, 3):
        rngs, eager = nnx.Rngs(seed, dropout=7), nnx.Rngs(seed, dropout=7)
        got, want = jitted(model, rngs), use(eager_model, eager)
        assert want is None or jnp.allclose(got, want)
        assert values((model, rngs)) == values((eager_model, eager))
        assert nnx.graphdef((model, rngs)) == nnx.graphdef((eager_model, eager))


def test_a_fresh_rngs_that_is_returned_is_itself():
    rngs = nnx.Rngs(0)
    assert nnx.jit(lambda model, rngs: (rngs(), rngs)[1])(Scale(), rngs) is rngs
    assert rngs.default.count.value == 1


def test_a_used_rngs_goes_on_where_it_was():
    step, traces = counted(lambda model, rngs: rngs.normal(()))
    jitted, model, rngs, eager = nnx.jit(step), Scale(), nnx.Rngs(0), nnx.Rngs(0)
    for _ in range(3):
        assert jitted(model, rngs) == eager.normal(())
    assert rngs.normal(()) == eager.normal(())
    assert jitted(model, rngs) == eager.normal(())
    assert len(traces) <= 2  # as seeds, and as keys once somebody looked


def test_an_rngs_without_a_model_beside_it():
    draw = nnx.jit(lambda rngs: rngs.normal(()))
    for seed in (0, 1, 2):
        assert draw(nnx.Rngs(seed)) == nnx.Rngs(seed).normal(())


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, nnx.grad, nnx.jit, jax.vmap])
def test_a_captured_fresh_rngs_survives_the_error(transform):
    rngs = nnx.Rngs(0)
    message = r"(?s)Cannot mutate RngCount at rngs.default.count from a different trace.*Fix: pass"
    with pytest.raises(TraceContextError, match=message):
        transform(lambda x: x * rngs.normal(()))(jnp.ones(1) if transform is jax.vmap else 1.0)
    assert rngs.normal(()) == nnx.Rngs(0).normal(())
