"""A program that is rewritten before it is compiled gives the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.extend.core import jaxpr_as_fun

from linnet import nnx
from linnet.functional import row_kernels
from linnet.functional.losses import softmax_cross_entropy
from linnet.nnx.transforms import donation, rewriting


def scatters(program):
    """How many scatters into rows of more than one element a program has."""
    found = 0
    for eqn in program.eqns:
        shape = eqn.invars[0].aval.shape if eqn.invars else ()
        found += eqn.primitive.name == "scatter-add" and shape[-1] > 1
        inner = [getattr(p, "jaxpr", p) for p in eqn.params.values()]
        found += sum(scatters(p) for p in inner if hasattr(p, "eqns"))
    return found


def loss(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


@settings(max_examples=20)
@given(dtype=st.sampled_from(["float32", "bfloat16"]), seed=st.integers(0, 1000))
def test_the_gradient_of_a_loss_over_labels_is_the_same(dtype, seed):
    shape, classes = (2, 3), 5
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(*shape, classes)), dtype)
    labels = jnp.asarray(rng.integers(-2 * classes, 2 * classes, shape), jnp.int32)
    program = jax.make_jaxpr(jax.value_and_grad(loss))(logits, labels)
    new = rewriting.with_fewer_passes(program)
    assert scatters(program.jaxpr) == 1
    assert scatters(new.jaxpr) == 0
    for found, expected in zip(
        jaxpr_as_fun(new)(logits, labels),
        jaxpr_as_fun(program)(logits, labels),
        strict=True,
    ):  # bit for bit while nothing is fused
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: jnp.zeros((3, 4)).at[:, 1].add(x),  # one index for all rows
        lambda x, i: jnp.ones((3, 4)).at[jnp.arange(3), i].add(x),  # not zeros
        lambda x, i: jax.grad(lambda y: jnp.take_along_axis(y, i[:, None], 1, mode="clip").sum())(
            jnp.ones((3, 4))
        ),
        lambda x, i: jax.grad(
            lambda y: jnp.take_along_axis(y, jnp.stack([i, i], 1), 1).sum()  # two in each row
        )(jnp.ones((3, 4))),
    ],
)
def test_another_scatter_is_left_alone(function):
    program = jax.make_jaxpr(function)(jnp.ones(3), jnp.arange(3))
    assert rewriting.with_fewer_passes(program) is program


def test_programs_inside_loops_are_rewritten():
    def accumulated(logits, labels):
        def body(total, x):
            return total + jax.grad(loss)(logits, x), None

        return jax.lax.scan(body, jnp.zeros_like(logits), labels)[0]

    logits, labels = jnp.ones((3, 4)), jnp.array([[0, 1, 2], [3, 3, 3]])
    program = jax.make_jaxpr(accumulated)(logits, labels)
    new = rewriting.with_fewer_passes(program)
    assert (scatters(program.jaxpr), scatters(new.jaxpr)) == (1, 0)
    [found], [expected] = jaxpr_as_fun(new)(logits, labels), jaxpr_as_fun(program)(logits, labels)
    np.testing.assert_array_equal(found, expected)


def test_a_training_step_is_rewritten_where_there_is_a_gpu(monkeypatch):
    def train():
        model = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x, y):
            value, grads = nnx.value_and_grad(lambda m: loss(m(x), y))(model)
            optimizer.update(model, grads)
            return value

        x, y = jnp.ones((3, 4)), jnp.array([0, 4, 2])
        values = [float(step(model, optimizer, x, y)) for _ in range(3)]
        return scatters(step.trace(model, optimizer, x, y).jaxpr.jaxpr), values, model.kernel[...]

    monkeypatch.setattr(rewriting, "rewrites", lambda: False)
    before, values, kernel = train()
    monkeypatch.setattr(rewriting, "rewrites", lambda: True)
    after, same_values, same_kernel = train()
    assert (before, after) == (1, 0)
    np.testing.assert_allclose(values, same_values, rtol=1e-6)
    np.testing.assert_allclose(kernel, same_kernel, rtol=1e-6)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of the GPU, interpreted here, for rows of any size; gives the rows they get.

    JAX keeps traces for all tests, so that only the first with a shape gets its rows.
    """
    monkeypatch.setattr(rewriting, "on_gpu", lambda: True)
    monkeypatch.setattr(rewriting, "_LEAST_ROW", 1)
    monkeypatch.setattr(rewriting, "_LEAST_SIZE", 1)
    rows_seen = []

    def interpreted(rows):
        rows_seen.append(rows)
        return row_kernels._in_one_pass(rows, interpret=True)

    monkeypatch.setattr(row_kernels, "_in_two_passes", interpreted)
    return rows_seen


def primitives_of(program):
    """The names of the operations of a program and of those inside, without branches."""
    for eqn in program.eqns:
        yield eqn.primitive.name
        for p in eqn.params.values():
            inner = getattr(p, "jaxpr", p)
            if hasattr(inner, "eqns"):
                yield from primitives_of(inner)


def own_loss(logits, labels):
    return softmax_cross_entropy(logits, labels).sum()


def entropies(logits, labels):
    return (jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) * labels).sum()


def unshifted(logits, labels):
    """A shift that is not the maximum, beside a maximum of the same rows."""
    rows = logits.astype(jnp.float32)
    largest = jax.lax.stop_gradient(rows.max(-1, keepdims=True))
    return (jnp.exp(rows - (largest - 1.0)).sum(-1) * labels).sum()


@pytest.mark.parametrize("function", [loss, own_loss, entropies, unshifted])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_exponentials_by_a_kernel(kernels, function, dtype):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 50)) * 9
    logits[0, 0], logits[0, 1, 3], logits[1, 0, :9] = -np.inf, np.inf, -np.inf
    logits = jnp.asarray(logits, dtype)
    labels = jnp.asarray(rng.integers(0, 50, (2, 3)), jnp.int32)
    step = jax.value_and_grad(function)
    program = jax.make_jaxpr(step)(logits, labels)
    new = rewriting.with_kernels(rewriting.with_fewer_passes(program))
    names = list(primitives_of(new.jaxpr))
    assert "platform_index" in names  # of the choice between the kernel and two passes
    assert "reduce_max" not in names
    finite = jnp.where(jnp.isfinite(logits), logits, 0)
    for rows in (finite, logits):
        found, want = jaxpr_as_fun(new)(rows, labels), jaxpr_as_fun(program)(rows, labels)
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-6
            )
        np.testing.assert_allclose(found[0], want[0], rtol=1e-6)


def test_a_training_step_runs_the_kernel_and_can_be_differentiated(kernels, monkeypatch):
    monkeypatch.setattr(donation, "LEAST_BYTES", 1)
    monkeypatch.setattr(donation, "callers", donation._Callers())
    x, labels = jnp.ones((4, 3)), jnp.array([0, 1, 2, 3])

    def step(model, x):
        loss_of = lambda model: loss(model(x), labels)  # noqa: E731
        value, grads = nnx.value_and_grad(loss_of)(model)
        model.kernel[...] = model.kernel[...] - 0.1 * grads.kernel[...]
        return value

    by_kernel, plain = (nnx.Linear(3, 50, rngs=nnx.Rngs(0)) for _ in range(2))
    compiled = nnx.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(compiled(by_kernel, x), step(plain, x), rtol=1e-6)
    np.testing.assert_allclose(by_kernel.kernel[...], plain.kernel[...], rtol=1e-5, atol=1e-7)
    [entry] = compiled._entries.values()
    assert entry.donating_function
    assert len(kernels) == 1
    # What a transform of JAX sees of the same compiled function has no kernel in it.
    slope = jax.grad(lambda x: compiled(nnx.clone(plain), x))(x)
    want = jax.grad(lambda x: step(nnx.clone(plain), x))(x)
    np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-5)


def test_several_devices_get_no_kernel(kernels, monkeypatch):
    logits, labels = jnp.ones((2, 50)), jnp.array([1, 2])
    program = jax.make_jaxpr(loss)(logits, labels)
    assert rewriting.with_kernels(program) is not program
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert rewriting.with_kernels(program) is program


def test_rows_of_8_bits_are_read_as_float32(kernels):
    codes = np.random.default_rng(0).normal(size=(2, 60))
    rows = jnp.asarray(codes, jnp.float8_e4m3fn)
    function = lambda x: jax.nn.logsumexp(x.astype(jnp.float32), axis=-1)  # noqa: E731
    new = rewriting.with_kernels(jax.make_jaxpr(function)(rows))
    np.testing.assert_allclose(jaxpr_as_fun(new)(rows)[0], function(rows), rtol=1e-6)
    assert [row.dtype for row in kernels] == [jnp.float32]


def test_a_program_for_the_cpu_beside_a_gpu_has_no_kernel(monkeypatch):
    monkeypatch.setattr(rewriting, "on_gpu", lambda: True)
    monkeypatch.setattr(rewriting, "_LEAST_SIZE", 1)
    monkeypatch.setattr(donation, "callers", donation._Callers())
    model = nnx.Linear(128, 4096, rngs=nnx.Rngs(0))
    labels, x = jnp.array([1, 2]), jnp.ones((2, 128))

    def step(model, x):
        value = loss(model(x), labels)
        model.kernel[...] = model.kernel[...] * 0.5
        return value

    plain = nnx.clone(model)
    compiled = nnx.jit(step)
    for _ in range(2):
        np.testing.assert_allclose(compiled(model, x), step(plain, x), rtol=1e-6)
    [entry] = compiled._entries.values()
    assert entry.donating_function
