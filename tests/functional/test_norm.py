"""The maths of normalisation, against its definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional import norm
from tests.compare import close

X = np.asarray(3 * jax.random.normal(jax.random.key(0), (2, 3, 4)) + 1)
SCALE, BIAS = np.float32([1, 2, 3, 4]), np.float32([0, 1, -1, 5])


def standard(x, axes, epsilon=1e-6):
    x = np.float64(x)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


@pytest.mark.parametrize("axes", [-1, (0, 2), [0, 1, 2], (-2,)])
@pytest.mark.parametrize("fast", [True, False])
def test_moments(axes, fast):
    mean, variance = norm.moments(jnp.asarray(X), axes=axes, use_fast_variance=fast)
    listed = (axes,) if isinstance(axes, int) else tuple(axes)
    close(mean, X.mean(listed, keepdims=True))
    close(variance, X.var(listed, keepdims=True), tolerance=1e-5)


def test_the_slow_variance_is_exact_far_from_zero():
    x = jnp.asarray(X) + 10_000
    _, slow = norm.moments(x, axes=-1, use_fast_variance=False)
    _, fast = norm.moments(x, axes=-1)
    want = np.asarray(x, np.float64).var(-1, keepdims=True)
    assert np.abs(slow - want).max() < 1e-4 < np.abs(fast - want).max()
    assert (fast >= 0).all()


def test_moments_of_complex_numbers():
    x = X + 1j * X[::-1]
    for fast in (True, False):
        mean, variance = norm.moments(jnp.asarray(x), axes=-1, use_fast_variance=fast)
        assert not jnp.iscomplexobj(variance)
        close(mean, x.mean(-1, keepdims=True))
        close(variance, x.var(-1, keepdims=True), tolerance=1e-5)


def test_moments_where_a_mask_says():
    mask = np.arange(4) < 3
    mean, variance = norm.moments(jnp.asarray(X), jnp.asarray(mask), axes=-1)
    close(mean, X[..., :3].mean(-1, keepdims=True))
    close(variance, X[..., :3].var(-1, keepdims=True), tolerance=1e-5)


def test_layer_norm():
    close(norm.layer_norm(X), standard(X, -1))
    close(norm.layer_norm(X, SCALE, BIAS), standard(X, -1) * SCALE + BIAS, tolerance=1e-5)
    got = norm.layer_norm(X, SCALE[:3], reduction_axes=[0, 2], feature_axes=1, epsilon=0.5)
    close(got, standard(X, (0, 2), 0.5) * SCALE[:3, None])


def test_rms_norm():
    root = np.sqrt((X**2).mean(-1, keepdims=True) + 0.5)
    close(norm.rms_norm(X, SCALE, epsilon=0.5), X / root * SCALE)


def test_group_norm():
    grouped = X.reshape(2, 3, 2, 2)
    got = norm.group_norm(X, SCALE, BIAS, groups=2)
    close(got, standard(grouped, (1, 3)).reshape(X.shape) * SCALE + BIAS, tolerance=1e-5)
    got = norm.group_norm(X, groups=2, reduction_axes=[0, -1])
    close(got, standard(grouped, (0, 3)).reshape(X.shape))


def test_batch_norm():
    mean, variance = X.mean((0, 1)), X.var((0, 1))
    want = (X - mean) / np.sqrt(variance + 1e-5) * SCALE + BIAS
    close(norm.batch_norm(X, mean, variance, SCALE, BIAS), want, tolerance=1e-5)
    y, *statistics = norm.batch_norm_of_batch(X, SCALE, BIAS)
    close(y, want, tolerance=1e-5)
    close(statistics[0], mean)
    close(statistics[1], variance, tolerance=1e-5)


def test_batch_norm_of_another_axis():
    y, mean, variance = norm.batch_norm_of_batch(X, axis=1, epsilon=0.1)
    assert mean.shape == variance.shape == (3,)
    close(y, standard(X, (0, 2), 0.1))
    close(norm.batch_norm(X, mean, variance, axis=1, epsilon=0.1), y)


def test_integers_give_fractions():
    close(norm.layer_norm(jnp.array([1, 3]), epsilon=0.0), [-1, 1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_of_the_values_is_kept(dtype):
    y = norm.layer_norm(jnp.asarray(X, dtype), jnp.asarray(SCALE, dtype), jnp.asarray(BIAS, dtype))
    assert y.dtype == dtype
    close(np.float32(y), standard(X, -1) * SCALE + BIAS, tolerance=0.05)


def test_running_average():
    old, new = (jnp.zeros(2), jnp.ones(2, jnp.bfloat16)), (jnp.ones(2), jnp.zeros(2))
    mean, variance = norm.running_average(old, new, momentum=0.75)
    assert (mean.tolist(), variance.tolist()) == ([0.25, 0.25], [0.75, 0.75])
    assert variance.dtype == jnp.bfloat16


def test_spectral_norm():
    weight = X.reshape(6, 4)
    u = jnp.ones((1, 4))
    normalised, found, sigma = norm.spectral_norm(weight, u, steps=100)
    _, values, right = np.linalg.svd(weight)
    close(sigma, values[0], tolerance=1e-4)
    close(np.abs(found[0]), np.abs(right[0]), tolerance=1e-3)
    close(normalised, weight / values[0], tolerance=1e-4)
    tensor, _, _ = norm.spectral_norm(X, u, steps=100)
    close(tensor.reshape(6, 4), normalised)


@pytest.mark.parametrize(
    ("features", "axes"), [(-1, (0, 1)), ((0, 2), (1,)), ([1], (0, 2)), (None, (0, 1, 2))]
)
def test_weight_norm(features, axes):
    length = np.sqrt((X**2).sum(axes, keepdims=True) + 0.1)
    shape = tuple(n for axis, n in enumerate(X.shape) if axis not in axes)
    scale = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    close(norm.weight_norm(X, feature_axes=features, epsilon=0.1), X / length)
    got = norm.weight_norm(X, scale, feature_axes=features, epsilon=0.1)
    close(got, X / length * np.expand_dims(scale, axes))


@pytest.mark.parametrize("num_features", [None, 4])
@pytest.mark.parametrize("boolean_mask", [False, True])
def test_what_fits_is_normalized(num_features, boolean_mask):
    mask = jnp.ones((3, 1), bool)
    options = {"num_features": num_features, "boolean_mask": boolean_mask}
    assert norm.why_not_normalized(jnp.ones((2, 3, 4)), mask, -1, (1, 2), **options) is None


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((None, 3), {}, "works on axis 3, which float32[2,4] does not have.\n"),
        ((None, -1, (0, -3)), {}, "works on axis -3, which float32[2,4] does not have.\n"),
        (
            (None, (0, 1)),
            {"num_features": 4},
            "expected 4 features on axis (0, 1), but got 8 in float32[2,4].\n",
        ),
        (
            (np.ones(3), -1),
            {},
            "expected a mask that broadcasts to float32[2,4], but got float64[3].\nFix: give it",
        ),
        (
            (np.ones(4), -1),
            {"boolean_mask": True},
            "expected a boolean mask that broadcasts to float32[2,4], but got float64[4].\n"
            "Fix: make it a boolean array",
        ),
    ],
)
def test_what_does_not_fit_is_told(arguments, options, text):
    problem = norm.why_not_normalized(jnp.ones((2, 4)), *arguments, **options)
    assert problem is not None and problem.startswith(text)


def test_axes_come_before_features_and_features_before_the_mask():
    x, mask = jnp.ones((2, 4)), jnp.ones(3)
    assert "axis 5" in str(norm.why_not_normalized(x, mask, 5, num_features=3))
    assert "3 features" in str(norm.why_not_normalized(x, mask, -1, num_features=3))


def test_a_scale_has_the_feature_axes_in_their_order():
    weight = jnp.ones((2, 3, 4))
    axes = (-1, (-1, 0), 1, None)
    assert [norm.scale_shape(weight, each) for each in axes] == [(4,), (2, 4), (3,), ()]


def test_weights_without_the_feature_axes_are_told():
    assert norm.why_no_length("kernel", jnp.ones((2, 3)), (0, -1)) is None
    assert norm.why_no_length("kernel", jnp.ones(()), None) is None
    text = "expected weights with axes (0, 1), but bias is float32[2].\nFix: choose feature_axes"
    assert str(norm.why_no_length("bias", jnp.ones(2), (0, 1))).startswith(text)
