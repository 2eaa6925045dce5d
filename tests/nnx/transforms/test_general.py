"""``split_inputs`` and ``merge_inputs``: JAX transforms of one's own over live objects."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.nnx.transforms.general import merge_inputs, split_inputs


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f, jax.checkpoint])
def test_changes_come_out(transform):
    traced = []

    @split_inputs
    @transform
    @merge_inputs
    def step(pair, by):
        first, second = pair
        traced.append(first is second)
        first.count.value += by
        first.calls = 1
        return second.count.value * 2, first, nnx.Variable(by * 1.0)

    counter = Counter()
    variable = counter.count
    out, same, made = step((counter, counter), 3.0)
    assert traced == [True]
    assert (float(out), float(counter.count.value), float(made.value)) == (6.0, 3.0, 3.0)
    assert same is counter and counter.count is variable and counter.calls == 1


def test_two_tags_nest():
    inner = split_inputs(ctxtag="inner")(
        jax.jit(merge_inputs(ctxtag="inner")(lambda v: v.set_value(v.value + 1)))
    )

    @split_inputs
    @jax.jit
    @merge_inputs
    def outer(variable):
        inner(variable)
        inner(variable)

    variable = nnx.Variable(jnp.zeros(()))
    outer(variable)
    assert float(variable.value) == 2.0


def test_a_merge_without_a_split():
    with pytest.raises(ValueError, match="No update context found for tag 'split_merge_inputs'"):
        merge_inputs(lambda x: x)(1.0)
