"""Transforms inside transforms, three deep and more, with all kinds of state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError
from tests.nnx.transforms.stateful import Count, Noise, Norm, Scale, ScaleNormNoise, counted, values


def assert_same_state(got, want):
    assert values(got).keys() == values(want).keys()
    for path, value in values(want).items():
        np.testing.assert_allclose(values(got)[path], value, rtol=1e-5, err_msg=str(path))


def loss(net, x):
    return (net(x) ** 2).mean()


BY_KIND = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})


def scanned(f):
    """A scan over the rows of ``xs`` whose body runs ``f`` on the net and a row."""

    @nnx.scan(in_axes=(BY_KIND, 0), out_axes=0)
    def body(net, x):
        return f(net, x)

    return body


XS = jnp.arange(6.0).reshape(3, 2)


def eager_losses(net):
    return jnp.stack([loss(net, x) for x in XS])


WAYS = {
    "jit of scan of remat": nnx.jit(scanned(nnx.remat(loss))),
    "jit of jit of scan": nnx.jit(nnx.jit(scanned(loss))),
    "scan of jit of remat": scanned(nnx.jit(nnx.remat(loss))),
    "remat of scan of jit": nnx.remat(scanned(nnx.jit(loss))),
    "remat of remat of jit": lambda net, xs: jnp.stack(
        [nnx.remat(nnx.remat(nnx.jit(loss)))(net, x) for x in xs]
    ),
    "jit of cond of scan": nnx.jit(
        lambda net, xs: nnx.cond(xs[0, 0] < 1, scanned(loss), scanned(loss), net, xs)
    ),
    "cond inside scan inside jit": nnx.jit(
        scanned(lambda net, x: nnx.cond(x[0] < 3, loss, nnx.remat(loss), net, x))
    ),
    "switch inside scan inside remat": nnx.remat(
        scanned(lambda net, x: nnx.switch(jnp.int32(x[0]) % 2, [loss, loss], net, x))
    ),
    "checkify of jit of scan": lambda net, xs: nnx.checkify(nnx.jit(scanned(loss)))(net, xs)[1],
}


@pytest.mark.parametrize("name", WAYS)
def test_losses_and_state_are_those_of_the_eager_program(name):
    net, eager = ScaleNormNoise(), ScaleNormNoise()
    for _ in range(2):
        np.testing.assert_allclose(WAYS[name](net, XS), eager_losses(eager), rtol=1e-5)
    assert_same_state(net, eager)


def total(net, xs):
    return eager_losses(net).mean()


GRADIENTS = {
    "jit of grad of scan of remat": nnx.jit(
        nnx.grad(lambda net, xs: scanned(nnx.remat(loss))(net, xs).mean())
    ),
    "grad of jit of scan of remat": nnx.grad(
        nnx.jit(lambda net, xs: scanned(nnx.remat(loss))(net, xs).mean())
    ),
    "grad of remat of scan of jit": nnx.grad(
        nnx.remat(lambda net, xs: scanned(nnx.jit(loss))(net, xs).mean())
    ),
    "grad of cond of scan": nnx.grad(
        lambda net, xs: nnx.cond(True, lambda n, x: scanned(loss)(n, x).mean(), total, net, xs)
    ),
    "jit of value_and_grad of jit": nnx.jit(lambda *a: nnx.value_and_grad(nnx.jit(total))(*a)[1]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_and_state_are_those_of_the_eager_program(name):
    net, eager = ScaleNormNoise(), ScaleNormNoise()
    graphdef, params, rest = nnx.split(eager, nnx.Param, ...)
    want = jax.grad(lambda p: total(nnx.merge(graphdef, p, nnx.clone(rest)), XS))(params)
    got = GRADIENTS[name](net, XS)
    np.testing.assert_allclose(got.scale.w.value, want.scale.w.value, rtol=1e-5)
    eager_losses(eager)
    assert_same_state(net, eager)


def train(net, x):
    grads = nnx.grad(loss)(net, x)
    net.scale.w[...] -= 0.1 * grads.scale.w.value
    return net.scale.w.value


def test_grad_inside_scan_inside_jit_trains():
    net, eager = ScaleNormNoise(), ScaleNormNoise()
    run = nnx.jit(nnx.scan(lambda net, x: (net, train(net, x))))
    same, weights = run(net, XS)
    assert same is net
    np.testing.assert_allclose(weights, jnp.stack([train(eager, x) for x in XS]), rtol=1e-5)
    assert_same_state(net, eager)


def stack_of(make, n):
    return nnx.vmap(make)(jnp.arange(n))


def test_vmap_of_grad_gives_each_example_its_gradient():
    models = stack_of(lambda i: Scale(i + 1.0), 3)
    xs = jnp.array([1.0, 2.0, 3.0])

    @nnx.jit
    @nnx.vmap
    def grads(model, x):
        return nnx.grad(lambda model, x: model(x) ** 2)(model, x)

    np.testing.assert_allclose(grads(models, xs).w.value, 2 * xs**2 * models.w.value)
    assert models.count.value.tolist() == [1, 1, 1]


def test_vmap_of_grad_of_remat_with_shared_parameters():
    model = Scale(3.0)
    axes = nnx.StateAxes({nnx.Param: None, Count: None})

    @nnx.vmap(in_axes=(axes, 0))
    def grads(model, x):
        return nnx.grad(nnx.remat(lambda model: model(x) ** 2))(model)

    got = grads(model, jnp.array([1.0, 2.0]))
    assert got.w.value.tolist() == [6, 24]
    assert model.count.value == 1


def test_scan_of_vmap_over_layers_of_many_examples():
    layers = stack_of(lambda i: Scale(i + 1.0), 3)
    axes = nnx.StateAxes({nnx.Param: None, Count: None})

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x, layer):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, 0))(layer, x)

    assert through(jnp.array([1.0, 10.0]), layers).tolist() == [6, 60]
    assert layers.count.value.tolist() == [1, 1, 1]


def test_vmap_of_scan_of_cond():
    counters = nnx.vmap(lambda _: Count(jnp.zeros((), jnp.int32)))(jnp.arange(2))

    @nnx.vmap(in_axes=(0, 0))
    def count_positive(counter, xs):
        def step(counter, x):
            def add(counter):
                counter[...] += 1

            nnx.cond(x > 0, add, lambda counter: None, counter)
            return counter

        nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(counter, xs)

    count_positive(counters, jnp.array([[1.0, -1.0, 2.0], [-1.0, -1.0, 3.0]]))
    assert counters.value.tolist() == [2, 1]


def test_while_loop_inside_jit_inside_vmap():
    counters = nnx.Variable(jnp.array([0, 3]))

    def add(counter):
        counter[...] += 2
        return counter

    @nnx.vmap
    def up(counter):
        nnx.jit(lambda c: nnx.while_loop(lambda c: c[...] < 5, add, c))(counter)

    up(counters)
    assert counters.value.tolist() == [6, 5]


@nnx.custom_vjp
def clipped(model, x):
    return model(x)


def clipped_forward(model, x):
    return clipped(model, x), (model, x)


def clipped_backward(residuals, gradient):
    _, gradient = gradient
    model, x = residuals
    grads = jax.tree.map(jnp.zeros_like, nnx.clone(nnx.state(model)))
    grads.w.value = jnp.clip(gradient * x, -1, 1)
    return grads, gradient * model.w.value


clipped.defvjp(clipped_forward, clipped_backward)


def test_custom_vjp_inside_vmap_inside_jit():
    models = stack_of(lambda i: Scale(i + 1.0), 2)

    @nnx.jit
    @nnx.vmap
    def grads(model, x):
        return nnx.grad(clipped)(model, x)

    assert grads(models, jnp.array([0.5, 5.0])).w.value.tolist() == [0.5, 1.0]
    assert models.count.value.tolist() == [1, 1]


def test_jit_inside_jit_traces_once_and_keeps_sharing():
    inner, traces = counted(lambda a, b, x: a(x) + b(x))
    inner = nnx.jit(inner)

    @nnx.jit
    def outer(model, x):
        first = inner(model, model, x)
        model.label = "outer"
        return first + inner(model, model, x)

    model = Scale()
    assert [float(outer(model, 1.0)) for _ in range(3)] == [8, 8, 8]
    assert model.count.value == 12
    assert model.label == "outer"
    assert len(traces) == 2  # the label is part of the structure


def test_new_modules_come_out_of_any_depth():
    @nnx.jit
    @nnx.vmap
    def make(seed):
        return nnx.remat(ScaleNormNoise)(seed)

    nets = make(jnp.arange(3))
    assert nets.scale.w.shape == (3,)
    one = nnx.vmap(lambda net, x: net(x))(nets, jnp.ones((3, 2)))
    want = jnp.stack([ScaleNormNoise(i)(jnp.ones(2)) for i in range(3)])
    np.testing.assert_allclose(one, want, rtol=1e-5)


def test_structure_changed_three_deep_comes_out():
    @nnx.jit
    def outer(net):
        @nnx.jit
        def middle(net):
            @nnx.remat
            def inner(scale):
                scale.extra = nnx.Param(scale.w * 2)
                scale.label = "deep"

            inner(net.scale)

        middle(net)
        return net.scale.extra

    net = ScaleNormNoise()
    assert outer(net) is net.scale.extra
    assert net.scale.extra.value == 4
    assert net.scale.label == "deep"


def test_an_error_three_deep_leaves_everything_alone():
    net = ScaleNormNoise()
    before = values(net)

    def fail(net, x):
        net(x)
        net.label = "lost"
        raise RuntimeError("deep")

    with pytest.raises(RuntimeError, match="deep"):
        nnx.jit(nnx.grad(scanned(nnx.remat(fail))))(net, XS)
    assert values(net) == before
    assert not hasattr(net, "label")


def test_split_rngs_gives_each_example_its_noise_under_jit():
    noise = Noise(nnx.Rngs(0))
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})

    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(axes, None))
    def draw(noise, x):
        return noise(x)

    first, second = draw(noise, jnp.zeros(())), draw(noise, jnp.zeros(()))
    assert len({*first.tolist(), *second.tolist()}) == 6
    assert noise.rngs.count.shape == ()


def test_running_statistics_over_mapped_batches():
    norm = Norm()

    @nnx.jit
    @nnx.vmap(in_axes=(None, 0), axis_name="batch")
    def run(norm, x):
        norm.mean[...] = jax.lax.pmean(x, "batch")

    run(norm, jnp.array([1.0, 3.0]))
    assert norm.mean.value == 2


def test_tree_mode_has_no_graph_updates():
    norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

    def loss(norm):
        norm.new, norm.flag = nnx.Param(jnp.ones(2)), 3
        return norm(jnp.ones((2, 1))).sum()

    grads = nnx.grad(loss, graph=False)(norm)
    assert type(grads) is nnx.BatchNorm
    assert grads.bias[...].tolist() == [2.0]
    assert grads.mean[...].tolist() == [0.0]
    nnx.jit(loss, graph=False)(norm)
    assert not hasattr(norm, "new")
    assert not hasattr(norm, "flag")
    message = r"which needs graph updates\.\nFix: .* or pass graph=True, graph_updates=True"
    with pytest.raises(SharedReferenceError, match=message):
        nnx.jit(lambda norm: norm, graph=False)(norm)
    with pytest.raises(ValueError, match="DiffState needs graph mode and graph updates"):
        nnx.grad(loss, graph=False, argnums=nnx.DiffState(0, nnx.Param))(norm)
