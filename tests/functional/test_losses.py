"""Softmax cross-entropy, whole and in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from jax.extend.core import jaxprs_in_params

from linnet.errors import FeatureError, LayerArgumentError
from linnet.functional import losses as losses_module
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


def by_hand(hidden, kernel, bias, labels, weights):
    """The losses, and the gradients of their weighted sum, in float64."""
    hidden, kernel, bias = (np.asarray(x, np.float64) for x in (hidden, kernel, bias))
    logits = hidden @ kernel + bias
    softmax = np.exp(logits - logits.max(-1, keepdims=True))
    softmax /= softmax.sum(-1, keepdims=True)
    is_label = np.arange(len(bias)) == labels[:, None]
    is_class = is_label.any(-1)
    losses = -np.log(np.where(is_label, softmax, 0).sum(-1) + ~is_class)
    of_logits = (softmax - is_label) * np.where(is_class, weights, 0)[:, None]
    gradients = (of_logits @ kernel.T, hidden.T @ of_logits, of_logits.sum(0))
    return np.where(is_class, losses, np.nan), gradients


@st.composite
def problems(draw):
    """A last layer, labels of which some may be no classes, and weights of which some are 0."""
    tokens, classes = draw(st.sampled_from([(5, 2), (8, 7)]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    hidden, kernel, bias = (
        (random.normal(size=shape) * draw(st.sampled_from([0, 0.1, 1, 5]))).astype(np.float32)
        for shape in ((tokens, 3), (3, classes), (classes,))
    )
    low, high = draw(st.sampled_from([(0, classes), (-1, classes + 1)]))
    labels = random.integers(low, high, tokens).astype(np.int32)
    is_class = (labels >= 0) & (labels < classes)
    weights = random.normal(size=tokens) * random.integers(0, 2, tokens)
    weights = draw(st.sampled_from([weights, -0.7 + 0 * weights, 1.3 * is_class]))
    return (hidden, kernel, bias), labels, weights.astype(np.float32), is_class


@functools.partial(jax.jit, static_argnums=0)
def losses_and_gradients(chunk_size, arrays, labels, weights):
    """The losses of tokens, and the gradients for the weights as cotangents."""
    losses, pull_back = jax.vjp(
        lambda hidden, kernel, bias: chunked_softmax_cross_entropy(
            hidden, kernel, labels, bias, chunk_size=chunk_size
        ),
        *arrays,
    )
    return losses, pull_back(weights)


@functools.partial(jax.jit, static_argnums=0)
def reduced(reduction, arrays, labels, weights):
    """A weighted sum or mean, and its gradients."""
    options = {"weights": weights, "reduction": reduction, "chunk_size": 3}
    return jax.value_and_grad(
        lambda hidden, kernel, bias: chunked_softmax_cross_entropy(
            hidden, kernel.T, labels, bias, transposed=True, **options
        ),
        (0, 1, 2),
    )(*arrays)


def assert_near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.abs(b[np.isfinite(b)]).max(initial=1)
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5 * scale)


@given(problems(), st.sampled_from([None, 3]))
def test_losses_of_tokens_and_any_cotangents(problem, chunk_size):
    arrays, labels, weights, _ = problem
    got = losses_and_gradients(chunk_size, arrays, labels, weights)
    assert_near(got, by_hand(*arrays, labels, weights))


@given(problems(), st.sampled_from(["sum", "mean"]))
def test_weighted_sums_and_means(problem, reduction):
    arrays, labels, weights, is_class = problem
    weights = np.where(is_class, weights, 0)
    divisor = weights.sum() if reduction == "mean" else np.float32(1)
    assume(abs(divisor) > 0.1)
    losses, gradients = by_hand(*arrays, labels, weights / divisor)
    loss = np.asarray(np.sum(np.where(is_class, losses, 0) * weights) / divisor)
    got = reduced(reduction, arrays, labels, weights)
    assert_near(got, (loss, gradients))


def test_gradients_of_weights():
    labels = LABELS.at[0, 0].set(-100)
    weights = WEIGHTS.at[0, 0].set(0)

    def chunked(weights):
        options = {"weights": weights, "reduction": "mean", "chunk_size": 4}
        return chunked_softmax_cross_entropy(HIDDEN, KERNEL, labels, **options)

    def plain(weights):
        losses = softmax_cross_entropy(HIDDEN @ KERNEL, labels)
        return (jnp.where(labels < 0, 0, losses) * weights).sum() / weights.sum()

    np.testing.assert_allclose(jax.grad(chunked)(weights), jax.grad(plain)(weights), rtol=1e-5)


def test_weights_without_a_reduction():
    labels = LABELS.at[0, 0].set(-100)
    weights = jnp.arange(10.0).reshape(2, 5)
    got = chunked_softmax_cross_entropy(HIDDEN, KERNEL, labels, weights=weights, chunk_size=4)
    want = jnp.where(labels < 0, 0, softmax_cross_entropy(HIDDEN @ KERNEL, labels) * weights)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_means_without_weights():
    def mean(labels, **options):
        return chunked_softmax_cross_entropy(
            HIDDEN, KERNEL, labels, reduction="mean", chunk_size=4, **options
        )

    np.testing.assert_allclose(mean(LABELS), whole(HIDDEN, KERNEL).mean(), rtol=1e-6)
    without_class = LABELS.at[0, 0].set(7)
    assert jnp.isnan(mean(without_class))
    np.testing.assert_allclose(
        mean(without_class, weights=without_class < 7),
        whole(HIDDEN, KERNEL).ravel()[1:].mean(),
        rtol=1e-6,
    )
    assert jnp.isnan(mean(LABELS, weights=jnp.zeros((2, 5))))


def losses_of_rows(hidden, labels):
    return chunked_softmax_cross_entropy(hidden, KERNEL, labels, chunk_size=2).mean(-1)


def mean_of_rows(hidden, labels):
    options = {"reduction": "mean", "chunk_size": 2}
    return chunked_softmax_cross_entropy(hidden, KERNEL, labels, **options)


@pytest.mark.parametrize("loss", [losses_of_rows, mean_of_rows])
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_under_transforms(transform, loss):
    both = jax.value_and_grad(transform(lambda *xs: loss(*xs).sum()))(HIDDEN, LABELS)
    want = jax.value_and_grad(lambda *xs: loss(*xs).sum())(HIDDEN, LABELS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), both, want)


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_over_a_batch(reduction):
    """By vmap and by scan, gradients of the kernel included."""

    @jax.jit
    def gradients(hidden, labels):
        def loss(hidden, kernel):
            options = {"chunk_size": 2, "reduction": reduction}
            return chunked_softmax_cross_entropy(hidden, kernel, labels, **options).mean()

        return jax.grad(loss, (0, 1))(hidden, KERNEL)

    _, by_scan = jax.lax.scan(lambda _, x: (None, gradients(*x)), None, (HIDDEN, LABELS))
    by_vmap = jax.vmap(gradients)(HIDDEN, LABELS)
    one_by_one = map(gradients, HIDDEN, LABELS)
    want = jax.tree.map(lambda *xs: jnp.stack(xs), *one_by_one)
    for got in (by_scan, by_vmap):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_second_derivatives(reduction):
    def curvature(f):
        slope = jax.grad(lambda kernel: f(HIDDEN, kernel).sum())
        return jax.jit(jax.grad(lambda kernel: (slope(kernel) ** 2).sum()))(KERNEL)

    def chunked(hidden, kernel):
        options = {"chunk_size": 3, "reduction": reduction}
        return chunked_softmax_cross_entropy(hidden, kernel, LABELS, **options)

    np.testing.assert_allclose(curvature(chunked), curvature(whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("derivative", [jax.hessian, lambda f: jax.jacrev(jax.grad(f))])
def test_second_derivatives_where_equal_cotangents_vary(derivative):
    """With a kernel of zeros all losses are equal, and so are their cotangents in a square."""

    def square(f):
        curvature = derivative(lambda kernel: (f(HIDDEN, kernel) ** 2).sum())
        return jax.jit(curvature)(jnp.zeros_like(KERNEL))

    def chunked(hidden, kernel):
        return chunked_softmax_cross_entropy(hidden, kernel, LABELS, chunk_size=3)

    np.testing.assert_allclose(square(chunked), square(whole), rtol=1e-4, atol=1e-4)


def equations_in(jaxpr, skip=()):
    """The equations of a traced function, inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in skip:
            for inner in jaxprs_in_params(equation.params):
                yield from equations_in(inner, skip)


def gradient_of_the_mean(argnums, **options):
    """The trace of the gradient of a mean over 64 tokens and 50 classes."""
    hidden, kernel, bias = jnp.ones((64, 2)), jnp.ones((2, 50)), jnp.ones(50)

    def loss(hidden, kernel, bias):
        labels = jnp.zeros(64, int)
        options_ = {"chunk_size": 8, **options}
        return chunked_softmax_cross_entropy(hidden, kernel, labels, bias, **options_).mean()

    return jax.make_jaxpr(jax.grad(loss, argnums))(hidden, kernel, bias).jaxpr


def test_the_logits_are_never_held_whole():
    for options in ({}, {"reduction": "mean"}):
        trace = gradient_of_the_mean((0, 1, 2), **options)
        sizes = [v.aval.size for equation in equations_in(trace) for v in equation.outvars]
        assert max(sizes) == 8 * 50


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize(
    ("argnums", "products"), [((0, 1, 2), 3), ((0, 1), 3), ((0,), 2), ((1,), 2), ((2,), 1)]
)
def test_logits_are_made_once_and_no_gradient_that_nobody_wants(argnums, products, reduction):
    trace = gradient_of_the_mean(argnums, reduction=reduction)
    names = [equation.primitive.name for equation in equations_in(trace, skip=["cond"])]
    assert names.count("dot_general") == products
    # Where cotangents may differ, a branch that does not run makes them again.
    assert names.count("cond") == (reduction is None and argnums != (0,))


def test_the_gradient_of_the_whole_has_no_scatter():
    def loss(logits):
        return softmax_cross_entropy(logits, LABELS).sum()

    trace = jax.make_jaxpr(jax.grad(loss))(HIDDEN @ KERNEL).jaxpr
    assert not [e for e in equations_in(trace) if "scatter" in e.primitive.name]
    tangents = jnp.ones((2, 5, 7)) * WEIGHTS[..., None] * KERNEL[0, None, None]
    gradient = jax.grad(loss)(HIDDEN @ KERNEL)
    _, along = jax.jvp(loss, (HIDDEN @ KERNEL,), (tangents,))
    np.testing.assert_allclose(along, (gradient * tangents).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "classes", "size"),
    [
        (32 * 1024, 50304, 4096),
        (1000, 50304, 1000),  # one chunk
        (8 * 8191, 2**18, 1024),  # no number of chunks from 64 to 127 divides 65528
        (7, 2**30, 1),
        (0, 10, 1),
    ],
)
def test_the_size_of_chunks(tokens, classes, size):
    assert losses_module._chunk_size(tokens, classes) == size


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


@pytest.mark.parametrize("stored", [None, jnp.float32])
def test_bfloat16_logits_are_those_of_the_product_unless_wider_ones_are_asked_for(stored):
    hidden, kernel = (x.astype(jnp.bfloat16) for x in (HIDDEN, KERNEL))

    def loss(hidden):
        return chunked_softmax_cross_entropy(hidden, kernel, LABELS, logits_dtype=stored)

    trace = jax.make_jaxpr(loss)(hidden).jaxpr
    (product,) = [e for e in equations_in(trace) if e.primitive.name == "dot_general"]
    assert product.outvars[0].aval.dtype == (stored or jnp.bfloat16)
    np.testing.assert_allclose(loss(hidden), whole(HIDDEN, KERNEL), rtol=2e-2)


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_gradients_in_bfloat16(reduction):
    hidden, kernel = (x.astype(jnp.bfloat16) for x in (HIDDEN, KERNEL))

    def loss(hidden, kernel):
        options = {"chunk_size": 4, "reduction": reduction}
        return chunked_softmax_cross_entropy(hidden, kernel, LABELS, **options).mean()

    got = jax.jit(jax.grad(loss, (0, 1)))(hidden, kernel)
    assert [x.dtype for x in got] == [jnp.bfloat16] * 2
    wide = (x.astype(jnp.float32) for x in (hidden, kernel))
    want = jax.grad(lambda *xs: whole(*xs).mean(), (0, 1))(*wide)
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a.astype(jnp.float32) - b) < 1e-2 * np.linalg.norm(b)


def test_small_labels():
    labels = LABELS.astype(jnp.uint8).at[0, 0].set(255)
    got = chunked_softmax_cross_entropy(HIDDEN, KERNEL, labels, chunk_size=4)
    want = whole(HIDDEN, KERNEL).at[0, 0].set(jnp.nan)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"reduction": "mean", "weights": WEIGHTS}])
def test_strict_dtypes(options, strict_dtypes):
    def loss(hidden, kernel):
        losses = chunked_softmax_cross_entropy(hidden, kernel, LABELS, chunk_size=4, **options)
        return losses.mean()

    jax.grad(loss, (0, 1))(HIDDEN, KERNEL)
    jax.grad(lambda x: softmax_cross_entropy(x, LABELS).sum())(HIDDEN @ KERNEL)


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

    def loss(kernel, **options):
        return chunked_softmax_cross_entropy(HIDDEN[:, :0], kernel, LABELS[:, :0], **options).sum()

    for options in ({}, {"reduction": "sum"}):
        assert (jax.grad(loss)(KERNEL, **options) == 0).all()


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
            {"weights": WEIGHTS[0]},
            FeatureError,
            f"{NAME} expected weights of the labels' shape (2, 5), but got (5,).\n"
            "Fix: give one weight a token; jnp.broadcast_to spreads them.",
        ),
        (
            {"chunk_size": 0},
            LayerArgumentError,
            f"{NAME} takes chunk_size tokens at a time, but got chunk_size=0.\n"
            "Fix: choose 1 or more, or leave it None.",
        ),
        (
            {"reduction": "none"},
            LayerArgumentError,
            f"{NAME} has the reductions 'mean' and 'sum', but got 'none'.\n"
            "Fix: choose one of them, or None for the loss of each token.",
        ),
    ],
)
def test_bad_input(change, error, text):
    arguments = {"hidden": HIDDEN, "kernel": KERNEL, "labels": LABELS, **change}
    with pytest.raises(error) as raised:
        chunked_softmax_cross_entropy(**arguments)
    assert text in str(raised.value)
