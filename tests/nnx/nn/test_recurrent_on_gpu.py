"""RNN on a GPU: the loop with few products computes what the loop over the cell does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from linnet import nnx
from linnet.functional import activations, recurrent
from linnet.nnx.nn import recurrent_cells
from tests.compare import assert_alike

CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]
XS = jax.random.normal(jax.random.key(1), (2, 5, 2))
NORMAL = jax.nn.initializers.normal(1.0)
HALF = jnp.bfloat16


@pytest.fixture
def on_gpu(monkeypatch):
    """Sets whether layers believe that they run on a GPU; a loop of two steps an iteration."""
    monkeypatch.setattr(recurrent_cells, "_STEPS_AT_ONCE", 2)
    return lambda value: monkeypatch.setattr(activations, "on_gpu", lambda: value)


@pytest.fixture
def plain_runs(monkeypatch):
    """The calls of ``recurrence``."""
    runs, run = [], recurrent.recurrence

    @functools.wraps(run)
    def counting(*args, **options):
        runs.append(options)
        return run(*args, **options)

    monkeypatch.setattr(recurrent, "recurrence", counting)
    return runs


def make(cls=nnx.OptimizedLSTMCell, rnn=None, **options):
    cell = cls(2, 3, bias_init=NORMAL, **options, rngs=nnx.Rngs(0))
    return nnx.RNN(cell, return_carry=True, rngs=False, **(rnn or {}))


def everything(layer, x=XS, **call):
    """Carry, outputs, gradients with respect to parameters, inputs and carry, and tangents."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params, x, carry):
        return nnx.merge(graph, params, rest)(x, initial_carry=carry, **call)

    def loss(*primals):
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(run(*primals)))

    @jax.jit
    def compute(*primals):
        tangents = jax.tree.map(jnp.cos, primals)
        gradients = jax.grad(loss, (0, 1, 2))(*primals)
        return run(*primals), gradients, jax.jvp(run, primals, tangents)[1]

    return compute(params, x, layer.cell.initialize_carry((2, 2), nnx.Rngs(5), NORMAL))


def assert_gpu_changes_nothing(on_gpu, plain_runs, compute, *, tolerance=2e-6):
    on_gpu(False)
    want = compute()
    assert not plain_runs
    on_gpu(True)
    got = compute()
    assert plain_runs
    assert_alike(got, want, tolerance, tolerance, half=tolerance)


@pytest.mark.parametrize("cls", CELLS)
def test_values_and_derivatives(cls, on_gpu, plain_runs):
    assert_gpu_changes_nothing(on_gpu, plain_runs, lambda: everything(make(cls)))


KEPT = {"reverse": True, "keep_order": True}
LENGTHS = jnp.array([3, 5])
CASES = {
    "backwards": ({"rnn": KEPT}, {}),
    "time first": ({"rnn": {"time_major": True, "reverse": True}}, {}),
    "three steps an iteration": ({"rnn": {"unroll": 3}}, {}),
    "residual": ({"cls": nnx.SimpleCell, "residual": True, "activation_fn": jnp.sin}, {}),
    "bfloat16": ({"dtype": HALF}, {}),
    "bfloat16 parameters": ({"cls": nnx.GRUCell, "param_dtype": HALF}, {}),
    "lengths": ({}, {"seq_lengths": LENGTHS, "reverse": True, "return_carry": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name, on_gpu, plain_runs):
    options, call = CASES[name]
    x = XS.swapaxes(0, 1) if name == "time first" else XS
    tolerance = 0.06 if name.startswith("bfloat16") else 2e-6
    compute = lambda: everything(make(**options), x, **call)  # noqa: E731
    assert_gpu_changes_nothing(on_gpu, plain_runs, compute, tolerance=tolerance)


def test_a_precision_policy_counts(on_gpu, plain_runs):
    def compute():
        layer = make(nnx.LSTMCell)
        nnx.set_precision(layer, "mixed_bfloat16")
        return everything(layer)

    assert_gpu_changes_nothing(on_gpu, plain_runs, compute, tolerance=0.06)


def test_layers_of_an_ensemble(on_gpu, plain_runs):
    def compute():
        layers = nnx.vmap(lambda rngs: nnx.RNN(nnx.GRUCell(2, 3, rngs=rngs)))(
            nnx.Rngs(0).fork(split=3)
        )
        run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return nnx.jit(nnx.grad(lambda layers: (run(layers, XS) ** 2).sum()))(layers)

    assert_gpu_changes_nothing(on_gpu, plain_runs, compute)


def test_calls_outside_of_traces_take_it(on_gpu, plain_runs):
    on_gpu(True)
    layer = nnx.RNN(nnx.GRUCell(2, 7, rngs=nnx.Rngs(0)), rngs=False)
    outputs = layer(XS)
    assert len(plain_runs) == 1
    on_gpu(False)
    np.testing.assert_allclose(outputs, jax.jit(layer)(XS), atol=1e-6)


# Where it is not taken.


class OwnCell(nnx.GRUCell):
    """A cell of a user's."""


class OwnLinear(nnx.Linear):
    """A layer of a user's."""


def replaced(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer.cell.dense_h, name, value)
    return layer


def with_own_projection():
    layer = make(nnx.GRUCell)
    layer.cell.dense_h = OwnLinear(3, 9, rngs=nnx.Rngs(0))
    return layer


def with_mixed_kernels():
    layer = make(nnx.LSTMCell)
    layer.cell.hf.kernel = nnx.Param(layer.cell.hf.kernel[...].astype(HALF))
    return layer


def squash(x):
    return jnp.tanh(x)


OTHERWISE = {
    "own cell": lambda: make(OwnCell),
    "own projection": with_own_projection,
    "mixed kernels": with_mixed_kernels,
    "own product": lambda: replaced(make(), dot_general=lambda *a, **k: jax.lax.dot_general(*a)),
    "own promotion": lambda: make(promote_dtype=lambda args, dtype=None: args),
    "own activation": lambda: make(activation_fn=squash),
    "own state axes": lambda: make(rnn={"state_axes": nnx.StateAxes({...: None})}),
    "broadcast keys": lambda: make(rnn={"broadcast_rngs": "dropout"}),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_plain_runs_as_it_is(name, on_gpu, plain_runs):
    layer = OTHERWISE[name]()
    on_gpu(True)
    got = jax.jit(layer)(XS)
    assert not plain_runs
    assert jnp.isfinite(got[1]).all()


def test_lengths_of_carries_run_as_they_are(on_gpu, plain_runs):
    on_gpu(True)
    layer = make()
    jax.jit(lambda x: layer(x, seq_lengths=jnp.array([3, 5])))(XS)
    assert not plain_runs


def test_explicit_axes_run_as_they_are(on_gpu, plain_runs):
    on_gpu(True)
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        jax.jit(make())(XS)
    assert not plain_runs


def test_captured_outputs_are_those_of_each_part(on_gpu, plain_runs):
    on_gpu(True)
    layer = make(nnx.GRUCell)
    captured = nnx.capture(layer, nnx.Intermediate, method_outputs=nnx.Intermediate)
    _, sown = jax.jit(captured)(XS)
    assert not plain_runs
    assert "cell" in sown


# What is in the loops.


def loops(jaxpr):
    """The loops of a jaxpr, with the shapes of the products in each."""
    found = []
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            if eqn.primitive.name == "scan":
                found.append(products(inner))
            else:
                found.extend(loops(inner))
    return found


def products(jaxpr):
    shapes = [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            shapes += products(inner)
    return shapes


@pytest.mark.parametrize("cls", CELLS)
def test_one_product_a_step_and_direction(cls, on_gpu):
    on_gpu(True)
    layer = make(cls)
    gates = sum(getattr(layer.cell, name).kernel.shape[1] for name in layer.cell._of_hidden)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params, x):
        return nnx.merge(graph, params, rest)(x)[1].sum()

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, XS)
    assert loops(traced.jaxpr) == [[(2, gates)], [(2, 3)]]
