"""Softmax cross-entropy, whole and in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional.losses import chunked_softmax_cross_entropy, softmax_cross_entropy

RANDOM = np.random.default_rng(0)
HIDDEN, KERNEL, BIAS, WEIGHTS = (
    jnp.asarray(RANDOM.normal(size=shape), jnp.float32)
    for shape in ((2, 5, 3), (3, 7), (7,), (2, 5))
)
LABELS = jnp.asarray(RANDOM.integers(0, 7, (2, 5)), jnp.int32)


def whole(hidden, kernel, bias=None):
    return softmax_cross_entropy(
        hidden @ kernel + (0 if bias is None else bias[None, None]), LABELS
    )


def test_the_loss_of_logits():
    logits = np.asarray(HIDDEN @ KERNEL, np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -np.take_along_axis(log_softmax, np.asarray(LABELS)[..., None], -1)[..., 0]
    np.testing.assert_allclose(softmax_cross_entropy(HIDDEN @ KERNEL, LABELS), want, atol=1e-6)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 1024])
def test_chunks_give_the_numbers_and_gradients_of_the_whole(chunk_size, transposed, bias):
    def chunked(hidden, kernel, bias):
        kernel = kernel.T if transposed else kernel
        options = {"chunk_size": chunk_size, "transposed": transposed}
        return chunked_softmax_cross_entropy(hidden, kernel, LABELS, bias, **options)

    arrays = (HIDDEN, KERNEL, bias)
    np.testing.assert_allclose(chunked(*arrays), whole(*arrays), atol=1e-6)
    argnums = (0, 1) if bias is None else (0, 1, 2)
    want, got = (
        jax.jit(jax.grad(lambda *xs, f=f: (f(*xs) * WEIGHTS).sum(), argnums))(*arrays)
        for f in (whole, chunked)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.vmap])
def test_under_transforms(transform):
    def loss(hidden, labels):
        losses = chunked_softmax_cross_entropy(hidden, KERNEL, labels, chunk_size=2)
        return losses.sum(-1)

    np.testing.assert_allclose(transform(loss)(HIDDEN, LABELS), loss(HIDDEN, LABELS), atol=1e-5)


def test_second_derivatives():
    def curvature(f):
        slope = jax.grad(lambda kernel: f(HIDDEN, kernel).sum())
        return jax.jit(jax.grad(lambda kernel: (slope(kernel) ** 2).sum()))(KERNEL)

    def chunked(hidden, kernel):
        return chunked_softmax_cross_entropy(hidden, kernel, LABELS, chunk_size=3)

    np.testing.assert_allclose(curvature(chunked), curvature(whole), rtol=1e-4, atol=1e-4)


def sizes_in(jaxpr):
    """The sizes of all arrays in a traced function, inner ones included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_in(inner)


def test_the_logits_are_never_held_whole():
    hidden, kernel = jnp.ones((64, 2)), jnp.ones((2, 50))
    labels = jnp.zeros(64, int)

    def loss(hidden, kernel):
        return chunked_softmax_cross_entropy(hidden, kernel, labels, chunk_size=8).sum()

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, kernel)
    assert max(sizes_in(traced.jaxpr)) == 8 * 50


def test_half_precision_sums_gradients_in_float32():
    tokens = 4096
    hidden, kernel = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    labels = jnp.zeros(tokens, int)

    def loss(kernel):
        return chunked_softmax_cross_entropy(hidden, kernel, labels, chunk_size=1).sum()

    losses = chunked_softmax_cross_entropy(hidden, kernel, labels)
    assert losses.dtype == jnp.float32
    # In bfloat16 a sum of halves would stop growing at 256 / 2.
    assert jax.jit(jax.grad(loss))(kernel).tolist() == [[-tokens / 2, tokens / 2]]


def test_a_label_that_is_no_class():
    labels = LABELS.at[0, 0].set(-100).at[1, 1].set(7)
    logits = HIDDEN @ KERNEL
    for losses in (
        softmax_cross_entropy(logits, labels),
        chunked_softmax_cross_entropy(HIDDEN, KERNEL, labels, chunk_size=4),
    ):
        assert np.argwhere(jnp.isnan(losses)).tolist() == [[0, 0], [1, 1]]

    def loss(hidden):
        losses = chunked_softmax_cross_entropy(hidden, KERNEL, labels, chunk_size=4)
        return jnp.where((labels >= 0) & (labels < 7), losses, 0).sum()

    gradient = jax.jit(jax.grad(loss))(HIDDEN)
    assert jnp.isfinite(gradient).all()
    assert (gradient[0, 0] == 0).all()


def test_no_tokens():
    losses = chunked_softmax_cross_entropy(HIDDEN[:, :0], KERNEL, LABELS[:, :0])
    assert losses.shape == (2, 0)


NAME = "chunked_softmax_cross_entropy"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"kernel": KERNEL.T},
            FeatureError,
            f"{NAME} expected a kernel (features, classes) with the features of hidden, but got "
            "(7, 3) for hidden (2, 5, 3).\nFix: pass transposed=True if the kernel has its axes "
            "the other way round.",
        ),
        ({"transposed": True}, FeatureError, "expected a kernel (classes, features)"),
        (
            {"labels": LABELS[0]},
            FeatureError,
            f"{NAME} expected labels that are integers of shape (2, 5), but got int32 of shape "
            "(5,).\nFix: give one class number a token, not one-hot rows.",
        ),
        ({"labels": WEIGHTS}, FeatureError, "but got float32 of shape (2, 5)"),
        ({"bias": BIAS[1:]}, FeatureError, f"{NAME} expected a bias of shape (7,), but got (6,)."),
        (
            {"chunk_size": 0},
            LayerArgumentError,
            f"{NAME} takes chunk_size tokens at a time, but got chunk_size=0.\nFix: choose 1",
        ),
    ],
)
def test_bad_input(change, error, text):
    arguments = {"hidden": HIDDEN, "kernel": KERNEL, "labels": LABELS, **change}
    with pytest.raises(error) as raised:
        chunked_softmax_cross_entropy(**arguments)
    assert text in str(raised.value)
