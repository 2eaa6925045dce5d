"""Layers on four devices, explicit axes. Run as a program; prints what went wrong, by case."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from linnet import nnx
from tests.subprocesses import Cases

CASES = case = Cases()
X = np.arange(32, dtype=np.float32).reshape(4, 8)


def mesh():
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def sharded(x, *spec):
    return jax.device_put(x, NamedSharding(mesh(), P(*spec)))


def dropped(x, transform, **options):
    return transform(lambda layer, x: layer(x))(nnx.Dropout(0.5, rngs=nnx.Rngs(0), **options), x)


@case
def a_dropout_mask_has_the_sharding_of_the_input():
    for options in ({}, {"broadcast_dims": (0,)}, {"broadcast_dims": (-1,)}):
        want = dropped(jnp.asarray(X), nnx.jit, **options)
        assert 0 < (want == 0).sum() < 32
        for spec in (("x", "y"), ("x",), (None, "y"), (("x", "y"),)):
            for transform in (nnx.jit, lambda f: f):
                with jax.set_mesh(mesh()):
                    got = dropped(sharded(X, *spec), transform, **options)
                np.testing.assert_array_equal(got, want)
                assert got.sharding.is_equivalent_to(sharded(X, *spec).sharding, 2), got.sharding


@case
def gradients_go_back_through_a_sharded_mask():
    def loss(layer, x):
        return (layer(x) * x).sum()

    def gradient(x):
        return nnx.jit(nnx.grad(loss, argnums=1))(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), x)

    want = gradient(jnp.asarray(X))
    with jax.set_mesh(mesh()):
        got = gradient(sharded(X, "x", "y"))
        np.testing.assert_array_equal(got, want)


@case
def vectors_of_classes_are_placed():
    classes = np.arange(4)
    with jax.set_mesh(mesh()):
        got = nnx.one_hot(sharded(classes, "x"), 4, out_sharding=P("x", "y"))
        inside = jax.jit(lambda c: nnx.one_hot(c, 4, out_sharding=P(None, "y")))(classes)
    np.testing.assert_array_equal(got, np.eye(4))
    np.testing.assert_array_equal(inside, np.eye(4))
    assert (got.sharding.spec, inside.sharding.spec) == (P("x", "y"), P(None, "y"))


@case
def layers_place_their_outputs():
    layers = [
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
        nnx.LinearGeneral(8, 4, rngs=nnx.Rngs(0)),
        nnx.Einsum("ab,bc->ac", (8, 4), (4,), rngs=nnx.Rngs(0)),
        nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0)),
    ]
    for layer in layers:
        want = layer(X)
        with jax.set_mesh(mesh()):
            parts = nnx.split(layer)
            copy = nnx.merge(parts[0], jax.tree.map(sharded, parts[1]))
            got = nnx.jit(lambda m, x: m(x, out_sharding=P("x", "y")))(copy, sharded(X, "x"))
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert got.sharding.spec == P("x", "y")


if __name__ == "__main__":
    case.run_on_four_devices()
