"""The quick reference, line by line.

One test a line, its words as the docstring, under the headings of the reference. The tests for
transforms, layers and the optimizer come with them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from tests.models import Count


class Linear(nnx.Module):
    def __init__(self, din, dout, *, rngs):
        self.weight = nnx.Param(rngs.uniform((din, dout)))
        self.bias = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.dropout_rate = 0.5

    def __call__(self, x):
        self.count.value += 1
        return x @ self.weight + self.bias[None]


class TwoLinears(nnx.Module):
    def __init__(self, rngs):
        self.first = Linear(2, 3, rngs=rngs)
        self.second = Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


X = jnp.ones((4, 2))


@pytest.fixture
def linear():
    return Linear(2, 3, rngs=nnx.Rngs(0))


@pytest.fixture
def net():
    return TwoLinears(nnx.Rngs(0))


# ---- Core Concepts & Philosophy -----------------------------------------------------------------


def test_pythonic_interface(linear):
    """Uses regular Python object semantics (classes, attributes, methods)."""

    class Bigger(Linear):
        def twice(self, x):
            return 2 * self(x)

    bigger = Bigger(2, 3, rngs=nnx.Rngs(0))
    assert (bigger.twice(X) == 2 * linear(X)).all()
    bigger.weight = linear.weight
    assert vars(bigger)["weight"] is linear.weight


def test_python_graphs(linear):
    """Enables standard Python reference sharing and mutability (in-place state changes)."""
    shared = nnx.List([linear, linear])
    shared[0](X)
    assert shared[1].count.value == 1
    copy = nnx.clone(shared)
    assert copy[0] is copy[1]
    copy[0](X)
    assert (copy[1].count.value, shared[1].count.value) == (2, 1)


def test_explicit_state_management(linear):
    """Clear separation between static config and dynamic state. Parameters initialized eagerly."""
    assert linear.weight.value.shape == (2, 3)
    assert [path for path, _ in nnx.state(linear).flat_state()] == [
        ("bias",),
        ("count",),
        ("weight",),
    ]
    before = nnx.graphdef(linear)
    linear.weight.value *= 2
    assert nnx.graphdef(linear) == before
    linear.dropout_rate = 0.1
    assert nnx.graphdef(linear) != before


def test_explicit_rng():
    """Random Number Generation requires explicit handling via `nnx.Rngs`."""
    with pytest.raises(TypeError, match="rngs"):
        Linear(2, 3)  # pyright: ignore[reportCallIssue]


# ---- Key NNX Classes & Objects ------------------------------------------------------------------


def test_module_defines_submodules_in_init(net):
    """Define submodules/parameters in `__init__`."""
    assert isinstance(net, nnx.Module)
    assert [path for path, _ in nnx.iter_modules(net)] == [("first",), ("second",), ()]


def test_module_defines_the_forward_pass_in_call(net):
    """Define forward pass logic in `__call__`."""
    out = net(X)
    assert out.shape == (4, 1)
    hidden = jnp.maximum(X @ net.first.weight[...], 0)
    np.testing.assert_allclose(out, hidden @ net.second.weight[...], rtol=1e-6)


def test_modules_hold_their_own_state(net):
    """Modules directly hold their own state (parameters, etc.)."""
    assert isinstance(net.first.weight, nnx.Param)
    net(X)
    assert net.second.count.value == 1


def test_variable():
    """General container for dynamic state (can be mutated). Access the array with `.value`."""
    variable = nnx.Variable(jnp.ones(2))
    assert isinstance(variable.value, jax.Array)
    variable.value = variable.value + 1
    assert variable.value.tolist() == [2, 2]


def test_param():
    """Subclass of `nnx.Variable`. Used specifically for trainable model parameters."""
    assert issubclass(nnx.Param, nnx.Variable)
    assert list(nnx.state(Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)) == ["bias", "weight"]


def test_state():
    """Container for other mutable state variables. Often used as a dictionary-like object."""
    state = nnx.State({"mean": nnx.BatchStat(jnp.zeros(2)), "nested": {"count": Count(0)}})
    state["extra"] = nnx.Cache(1)
    assert list(state) == ["mean", "nested", "extra"]
    assert (len(state), "mean" in state, "other" in state) == (3, True, False)
    assert state.mean is state["mean"]
    assert state["nested"]["count"].value == 0
    del state["extra"]
    assert dict(state.items()).keys() == {"mean", "nested"}


def test_rngs():
    """Object to manage JAX PRNG keys for reproducible randomness. Passed during initialization."""
    first, again = (Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(2))
    assert (first.weight.value == again.weight.value).all()
    other = Linear(2, 3, rngs=nnx.Rngs(1))
    assert (first.weight.value != other.weight.value).any()


# ---- State Management in NNX --------------------------------------------------------------------


def test_static_configuration(linear):
    """Regular Python attributes (e.g., `self.dropout_rate = 0.5`)."""
    assert linear.dropout_rate == 0.5
    assert len(jax.tree.leaves(linear)) == 3


def test_dynamic_state():
    """Stored in `nnx.Variable`, `nnx.Param`, or `nnx.State` objects."""

    class Stats(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(1))
            self.state = nnx.State({"mean": nnx.BatchStat(jnp.zeros(1))})

    assert len(jax.tree.leaves(Stats())) == 2
    assert [path for path, _ in nnx.state(Stats()).flat_state()] == [("state", "mean"), ("weight",)]


def test_accessing_values(linear):
    """Use `.value` on `Variable/Param` instances (e.g., `self.weight.value`)."""
    assert isinstance(linear.weight.value, jax.Array)
    assert linear.weight[...] is linear.weight.value


def test_updating_state():
    """Assignment to `.value` or modifying `nnx.State` contents is possible within methods."""

    class Stats(nnx.Module):
        def __init__(self):
            self.total = Count(jnp.zeros(()))
            self.state = nnx.State({"mean": nnx.BatchStat(jnp.zeros(()))})

        def add(self, x):
            self.total.value = self.total.value + x
            self.state["mean"].value += x / 2
            self.state["last"] = Count(x)

    stats = Stats()
    stats.add(4.0)
    assert (stats.total.value, stats.state["mean"].value) == (4, 2)
    out = jax.jit(lambda stats: (stats.add(6.0), stats)[1])(stats)
    assert (out.total.value, out.state["mean"].value, out.state["last"].value) == (10, 5, 6)


# ---- Functional API (Interfacing with JAX) ------------------------------------------------------


def test_split(net):
    """Decomposes an `nnx.Module` instance into `GraphDef` and `State`, for pure JAX functions."""
    graphdef, state = nnx.split(net)
    assert isinstance(graphdef, nnx.GraphDef)
    assert isinstance(state, nnx.State)
    assert jax.tree.leaves(graphdef) == []
    assert len(jax.tree.leaves(state)) == 6
    assert isinstance(hash(graphdef), int)


def test_merge(net):
    """Reconstructs an `nnx.Module` instance from its `GraphDef` and `State`."""
    merged = nnx.merge(*nnx.split(net))
    assert type(merged) is TwoLinears
    assert merged is not net
    assert (merged(X) == net(X)).all()


def test_update(net):
    """Updates an existing `nnx.Module` object in-place with the content of a `State`."""
    weight = net.first.weight
    nnx.update(net, jax.tree.map(jnp.zeros_like, nnx.state(net, nnx.Param)))
    assert net.first.weight is weight
    assert net(X).tolist() == [[0]] * 4


# ---- Transformations: JAX vs. NNX (the column of JAX) -------------------------------------------


def test_jax_works_on_pytrees(net):
    """Works On: Pure Functions, PyTrees (lists, dicts, tuples)."""
    out = jax.jit(lambda tree: tree["nets"][0](X))({"nets": [net]})
    assert jnp.allclose(out, net(X))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), net, TwoLinears(nnx.Rngs(1)))
    assert jax.vmap(lambda net: net(X))(stacked).shape == (2, 4, 1)


def test_jax_state_handling(net):
    """State Handling: Manual: Pass state in, get updated state back."""
    graphdef, state = nnx.split(net)

    @jax.jit
    def forward(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    _, updated = forward(state, X)
    assert net.first.count.value == 0
    nnx.update(net, updated)
    assert net.first.count.value == 1


def test_jax_gradients(net):
    """Style: Functional."""
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)

    def loss(params, rest):
        return nnx.merge(graphdef, params, nnx.clone(rest))(X).sum()

    grads = jax.grad(loss)(params, rest)
    assert grads["second"]["bias"].value.tolist() == [4]


def test_purity_requirement(net):
    """Purity Req.: Strict: Functions must be pure (no side effects)."""
    with pytest.raises(Exception, match=r"Cannot mutate Count at net\.first\.count"):
        jax.jit(net)(X)


def test_pure_function(net):
    """Returns same output for same input, no side effects. Required for `jax.jit`."""
    forward = jax.jit(lambda model, x: model(x))
    assert (forward(net, X) == forward(net, X)).all()
    assert net.first.count.value == 0


def test_caution_with_control_flow(linear):
    """Avoid JITting functions where control flow depends directly on values of JAX arrays."""

    @jax.jit
    def forward(model, x):
        return model(x) if model.count.value == 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        forward(linear, X)


# ---- Utilities ----------------------------------------------------------------------------------


def test_display(net, capsys):
    """Utility to visualize the structure of an NNX object in notebooks. Useful for debugging."""
    nnx.display(net)
    assert capsys.readouterr().out == f"{net!r}\n"
