"""``nnx.tracers``: the running trace."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx


def test_a_trace_state_is_valid_in_its_trace_alone():
    outside = nnx.tracers.TraceState()
    inside = []

    def f(x):
        inside.append((outside.is_valid(), outside == nnx.tracers.TraceState()))
        inside.append((nnx.tracers.TraceState().is_valid(), outside == 3))
        return x

    jax.jit(f)(0)
    jax.vmap(f)(jnp.ones(2))
    assert inside == [(False, False), (True, False)] * 2
    assert outside.is_valid() and outside == nnx.tracers.TraceState()
    assert outside.jax_trace == nnx.tracers.current_jax_trace()
    assert repr(outside).startswith("TraceState(\n  jax_trace=")
    with pytest.raises(TypeError, match="unhashable type: 'TraceState'"):
        hash(outside)
