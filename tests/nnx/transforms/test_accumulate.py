"""Gradients over micro-batches, against the loop by hand; on devices: tests/nnx/parallel_cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import AxisError
from tests.compare import assert_close
from tests.models import Net

PARTS = 3
X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = X[:, :1] ** 2


@pytest.fixture
def net():
    return Net(sizes=(4, 8, 1), momentum=0.5)


def loss_of(net, x, y):
    return ((net(x) - y) ** 2).mean()


def loss_and_outputs(net, x, y):
    out = net(x)
    return ((out - y) ** 2).mean(), out


def by_hand(f, net, *batch, parts=PARTS, **options):
    """The outputs of the parts, and the sum of their gradients."""
    outs, total = [], None
    for i in range(parts):
        out, grads = nnx.value_and_grad(f, **options)(net, *(x[i::parts] for x in batch))
        outs.append(out)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    return outs, total


def numbers(net):
    return nnx.state(net, (nnx.Param, nnx.BatchStat, nnx.RngCount))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_the_loop_by_hand_in_numbers_and_state(net, jit, reduction):
    other = nnx.clone(net)
    f = nnx.accumulate_gradients(loss_of, micro_batches=PARTS, reduction=reduction)
    loss, grads = (nnx.jit(f) if jit else f)(net, X, Y)
    losses, total = by_hand(loss_of, other, X, Y)
    share = PARTS if reduction == "mean" else 1
    np.testing.assert_allclose(loss, sum(losses) / share, rtol=1e-6)
    assert_close(grads, jax.tree.map(lambda x: x / share, total))
    assert_close(numbers(net), numbers(other))
    assert net.drop.rngs.count[...] == PARTS
    assert jax.tree.structure(grads) == jax.tree.structure(total)


def test_aux_is_stacked(net):
    other = nnx.clone(net)
    f = nnx.accumulate_gradients(loss_and_outputs, micro_batches=PARTS, has_aux=True)
    (loss, out), grads = f(net, X, Y)
    parts, total = by_hand(loss_and_outputs, other, X, Y, has_aux=True)
    np.testing.assert_allclose(loss, sum(loss for loss, _ in parts) / PARTS, rtol=1e-6)
    np.testing.assert_allclose(out, np.stack([out for _, out in parts]), rtol=1e-5)
    assert_close(grads, jax.tree.map(lambda x: x / PARTS, total))


def test_one_part_is_value_and_grad(net):
    net.eval()
    loss, grads = nnx.accumulate_gradients(loss_of, micro_batches=1)(net, X, Y)
    want, expected = nnx.value_and_grad(loss_of)(net, X, Y)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert_close(grads, expected)


def test_what_is_differentiated_is_chosen_as_for_grad():
    def loss(x, layer, other):
        return ((layer(x) + other.bias[None]) ** 2).mean()

    layer, other = (nnx.Linear(4, 2, rngs=nnx.Rngs(n)) for n in range(2))
    for options in [{"argnums": 1, "wrt": nnx.PathContains("bias")}, {"argnums": (1, 2)}]:
        f = nnx.accumulate_gradients(loss, micro_batches=4, **options)
        _, grads = f(X, layer, other=other)
        _, want = nnx.value_and_grad(loss, **options)(X, layer, other)
        assert jax.tree.structure(grads) == jax.tree.structure(want)
        for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_differentiated_arrays_are_whole():
    f = nnx.accumulate_gradients(lambda w, x: (x @ w).mean(), micro_batches=4)
    _, grads = f(jnp.ones((4,)), X)
    np.testing.assert_allclose(grads, X.mean(0), rtol=1e-6)


def test_frozen_parameters_have_no_gradient(net):
    nnx.freeze(net, nnx.PathContains("hidden"))
    _, grads = nnx.accumulate_gradients(loss_of, micro_batches=PARTS)(net, X, Y)
    assert set(grads) == {"norm", "heads"}


def test_in_axes_and_batches_as_pytrees(net):
    net.eval()

    def loss(net, batch, weights, scale):
        errors = (net(batch["x"].T) - batch["y"]) ** 2
        return (errors * weights).mean() * scale

    batch, weights = {"x": X.T, "y": Y}, jnp.full((1, 1), 3.0)
    axes = (None, {"x": 1, "y": -2}, None, 0)  # a number has no axis
    for _ in range(2):
        f = nnx.accumulate_gradients(loss, micro_batches=PARTS, in_axes=axes)
        got, grads = f(net, batch, weights, 0.5)
        want, expected = nnx.value_and_grad(loss)(net, batch, weights, 0.5)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert_close(grads, expected)


def test_as_a_decorator_with_objects_that_are_written_to(net):
    metric = nnx.metrics.Average()

    @nnx.jit
    @nnx.accumulate_gradients(micro_batches=PARTS, has_aux=True)
    def step(net, metric, x, *, y):
        loss = loss_of(net, x, y)
        metric.update(values=loss)
        return loss, {"largest": jnp.abs(x).max()}

    (loss, aux), _ = step(net, metric, X, y=Y)
    np.testing.assert_allclose(metric.compute(), loss, rtol=1e-6)
    np.testing.assert_allclose(aux["largest"], [np.abs(X[i::3]).max() for i in range(3)])


def test_gradients_can_be_added_in_another_dtype():
    layer = nnx.Linear(4, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    def loss(layer, x):
        return (layer.kernel[0, 0] * x).mean()

    x = jnp.asarray([256.0] + [1.0] * 15).astype(jnp.bfloat16)
    add = {"micro_batches": 16, "reduction": "sum"}
    _, own = nnx.accumulate_gradients(loss, **add)(layer, x)
    _, wide = nnx.accumulate_gradients(loss, dtype=jnp.float32, **add)(layer, x)
    assert own["kernel"].dtype == wide["kernel"].dtype == jnp.bfloat16
    assert own["kernel"][0, 0] == 256.0  # 256 + 1 is 256 in bfloat16
    assert wide["kernel"][0, 0] == 272.0


def test_in_tree_mode_the_gradient_has_the_type_of_the_argument():
    layer = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    f = nnx.accumulate_gradients(loss_of, micro_batches=PARTS, graph=False, graph_updates=False)
    _, grads = f(layer, X, Y)
    want = nnx.grad(loss_of)(layer, X, Y)
    assert isinstance(grads, nnx.Linear)
    np.testing.assert_allclose(grads.kernel[...], want["kernel"][...], rtol=1e-5)


def test_memory_is_that_of_one_part():
    layers = nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(n)) for n in range(4)))
    batch = jnp.ones((1024, 64))

    def loss(layers, x):
        return (layers(x) ** 2).mean()

    def temporary(f, x):
        return nnx.jit(f).lower(layers, x).compile().memory_analysis().temp_size_in_bytes

    whole = temporary(nnx.value_and_grad(loss), batch)
    part = temporary(nnx.value_and_grad(loss), batch[:128])
    accumulated = temporary(nnx.accumulate_gradients(loss, micro_batches=8), batch)
    gradients = sum(x.nbytes for x in jax.tree.leaves(nnx.state(layers)))
    assert accumulated < part + 2 * gradients
    assert accumulated < whole / 3


def test_a_call_outside_of_jit_compiles_once(net, compiled):
    weights = {"decay": 0.5}
    f = nnx.accumulate_gradients(
        lambda net, x, y: loss_of(net, x, y) * weights["decay"], micro_batches=PARTS
    )
    nets = [nnx.clone(net) for _ in range(3)]
    first, _ = f(nets[0], X, Y)
    compiled.clear()
    again, _ = f(nets[1], X, Y)
    assert not compiled
    assert again == first
    weights["decay"] = 1.0
    assert f(nets[2], X, Y)[0] == pytest.approx(2 * first)


def test_errors(net):
    def refused(*args, **options):
        with pytest.raises((ValueError, TypeError)) as found:
            nnx.accumulate_gradients(loss_of, **{"micro_batches": PARTS, **options})(net, *args)
        return found.value

    error = refused(X[:10], Y[:10])
    assert isinstance(error, AxisError)
    assert str(error) == (
        "nnx.accumulate_gradients: axis 0 of x has size 10, which does not go into 3 equal "
        "micro-batches: float32[10,4].\n"
        "Fix: choose micro_batches so that it divides 10, or a batch of 9."
    )
    error = refused(X, Y[:6])
    assert "the mapped axes have different sizes:\n  - x: 12\n  - y: 6\nFix:" in str(error)
    error = refused(X, Y, in_axes=(None, 2, 0))
    assert "axis 2 is out of range for x: float32[12,4]" in str(error)
    error = refused(X, Y, in_axes=(None, 0))
    assert "in_axes has 2 entries for 3 positional arguments" in str(error)
    error = refused(X, Y, in_axes=None)
    assert "found no array to cut into 3 micro-batches.\nFix: pass the batch" in str(error)
    error = refused(X, Y, micro_batches=0)
    assert "at least one micro-batch, but got micro_batches=0.\nFix:" in str(error)
    error = refused(X, Y, reduction="max")
    assert "got reduction='max'.\nFix: \"mean\" for" in str(error)
    error = refused(X, Y, has_aux=True)
    assert "nnx.accumulate_gradients with has_aux=True expects" in str(error)
