"""Layers that normalise the weights of another layer."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import LayerArgumentError
from tests.compare import close

X = jax.random.normal(jax.random.key(0), (2, 4))
NORMAL = jax.nn.initializers.normal(1.0)


def spectral(**options):
    rngs = nnx.Rngs(0)
    return nnx.SpectralNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs, **options)


def weight(**options):
    rngs = nnx.Rngs(0)
    return nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs, **options)


def largest(kernel):
    return jnp.linalg.svd(kernel, compute_uv=False)[0]


# SpectralNorm.


def test_statistics_are_named_by_the_path_of_their_weight():
    layer = spectral()
    flat = nnx.to_flat_state(nnx.state(layer, nnx.BatchStat))
    assert {path: leaf.shape for path, leaf in flat} == {
        ("batch_stats", ("kernel", "sigma")): (),
        ("batch_stats", ("kernel", "u")): (1, 3),
    }
    assert layer.use_running_average is False


def test_iteration_converges_over_calls():
    layer = spectral()
    kernel = layer.layer_instance.kernel[...]
    for _ in range(60):
        y = layer(X)
    close(y, X @ (kernel / largest(kernel)), tolerance=1e-4)
    close(layer.batch_stats[("kernel", "sigma")][...], 1.0, tolerance=1e-4)


def test_the_layer_keeps_the_normalised_weight():
    layer = spectral(n_steps=50)
    kernel = layer.layer_instance.kernel[...]
    y = layer(X)
    close(layer.batch_stats[("kernel", "sigma")][...], largest(kernel), tolerance=1e-4)
    close(largest(layer.layer_instance.kernel[...]), 1.0, tolerance=1e-4)
    close(y, layer.layer_instance(X))


def test_train_and_eval_switch_the_statistics():
    layer = spectral()
    u = layer.batch_stats[("kernel", "u")]
    start = u[...]
    layer.eval()
    layer(X)
    assert (u[...] == start).all()
    layer.train()
    layer(X)
    assert (u[...] != start).all()


def test_no_gradient_flows_through_the_iteration():
    layer = spectral()
    # Flax 0.12.8, for the same seed and a batch of ones.
    grads = nnx.grad(lambda layer: (layer(jnp.ones((1, 4))) ** 2).sum())(layer)
    want = [
        [-0.813530, -2.277409, 0.893473],
        [1.020083, -0.731558, 0.107012],
        [-0.001472, -1.592793, 0.545170],
        [1.630535, -0.216908, -0.154820],
    ]
    close(grads["layer_instance"]["kernel"][...], want, tolerance=1e-5)


def test_zero_weights_stay_zero():
    rngs = nnx.Rngs(0)
    inner = nnx.Linear(4, 3, kernel_init=jax.nn.initializers.zeros, rngs=rngs)
    assert (nnx.SpectralNorm(inner, rngs=rngs)(X) == 0).all()


def test_only_matrices_if_asked():
    class Tensor(nnx.Module):
        def __init__(self):
            self.weights = nnx.Dict(kernel=nnx.Param(jnp.ones((2, 3, 4))))

    with pytest.raises(LayerArgumentError) as caught:
        nnx.SpectralNorm(Tensor(), error_on_non_matrix=True, rngs=nnx.Rngs(0))
    assert str(caught.value) == (
        "Layer instance parameter is 3D but error_on_non_matrix is True: SpectralNorm was given a "
        "layer whose weights.kernel is float32[2,3,4].\n"
        "Fix: pass error_on_non_matrix=False to normalise it as a matrix (-1, features)."
    )


# WeightNorm.


def test_scales_are_named_by_the_path_of_their_weight():
    layer = weight()
    assert list(layer.scales) == [("kernel",)]
    assert (layer.scales[("kernel",)] == jnp.ones(3)).all()
    assert weight(use_scale=False).scales is None


def test_columns_get_the_length_of_their_scale():
    layer = weight()
    layer.scales[("kernel",)] = jnp.array([1.0, 2.0, 3.0])
    layer(X)
    close(jnp.linalg.norm(layer.layer_instance.kernel[...], axis=0), [1, 2, 3])


def test_a_scale_may_be_trained():
    layer = weight()
    layer.scales[("kernel",)] = nnx.Param(layer.scales[("kernel",)])
    grads = nnx.grad(lambda layer: layer(X).sum())(layer)
    direction = layer.layer_instance.kernel[...]
    close(grads["scales"][("kernel",)][...], (X @ direction).sum(0), tolerance=1e-5)


def test_scale_init_gets_a_key_of_its_own_and_no_key_is_spent():
    rngs = nnx.Rngs(0)
    inner = nnx.Linear(4, 3, rngs=rngs)
    first = nnx.WeightNorm(inner, scale_init=NORMAL, rngs=rngs).scales[("kernel",)]
    assert rngs.default.count[...] == 2
    following = NORMAL(rngs.params(), (3,))
    second = nnx.WeightNorm(inner, scale_init=NORMAL, rngs=rngs).scales[("kernel",)]
    assert len({float(x[0]) for x in (first, following, second)}) == 3


def test_param_dtype_is_that_of_the_scale():
    assert weight(param_dtype=jnp.bfloat16).scales[("kernel",)].dtype == jnp.bfloat16


def test_promote_dtype_is_asked():
    asked = []

    def promote(args, dtype=None, inexact=True):
        asked.append([x.shape for x in args])
        return args

    weight(promote_dtype=promote)(X)
    assert asked == [[(4, 3), (3,)]]


def test_arguments_are_passed_on():
    class Doubling(nnx.Linear):
        def __call__(self, x, factor=1, *, shift=0):
            return super().__call__(x) * factor + shift

    rngs = nnx.Rngs(0)
    layer = nnx.WeightNorm(Doubling(4, 3, rngs=rngs), rngs=rngs)
    close(layer(X, 2, shift=1), 2 * layer(X) + 1, tolerance=1e-5)


def test_only_floating_point_variables_are_normalised():
    class Counted(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((4, 3)))
            self.kernel_uses = nnx.Variable(jnp.array(3))

        def __call__(self, x):
            return x @ self.kernel[...]

    layer = nnx.WeightNorm(Counted(), variable_filter=..., rngs=nnx.Rngs(0))
    layer(X)
    assert list(layer.scales) == [("kernel",)]
    assert layer.layer_instance.kernel_uses[...] == 3
