"""A pipeline of one stage, and what is refused. With several: tests/nnx/parallel_cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from linnet import nnx
from linnet.errors import AxisError, LayerArgumentError

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


@pytest.fixture
def stack():
    return nnx.Stack(functools.partial(nnx.Linear, 4, 4), 6, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("jit", [False, True])
def test_one_stage_is_the_stack(stack, jit):
    mesh = jax.make_mesh((1,), ("stage",), axis_types=(AxisType.Auto,))

    def apply(stack, x):
        return nnx.pipeline(stack, x, mesh=mesh, micro_batches=4)

    out = (nnx.jit(apply) if jit else apply)(stack, X)
    np.testing.assert_allclose(out, stack(jnp.asarray(X)), rtol=1e-5)


def test_errors(stack):
    def refused(x, *args, mesh, **options):
        with pytest.raises((AxisError, LayerArgumentError)) as found:
            nnx.pipeline(stack, x, *args, mesh=mesh, **{"micro_batches": 4, **options})
        return str(found.value)

    four, three = (AbstractMesh((n,), ("stage",)) for n in (4, 3))
    assert refused(X, mesh=four) == (
        "nnx.pipeline: the 6 layers of stack (Stack) cannot be divided among the 4 devices "
        "of 'stage'.\nFix: choose a number of layers that is a multiple."
    )
    text = refused(X, mesh=three, axis="model")
    assert "along the mesh axis 'model', but the mesh has ('stage',).\nFix: pass axis=" in text
    text = refused(X[:6], mesh=three)
    assert "float32[6,4], does not go into 4 equal micro-batches.\nFix:" in text
    text = refused(X, nnx.Rngs(0), mesh=three)
    assert "was given a Rngs beside its input" in text and "Fix: build the layers with it" in text
