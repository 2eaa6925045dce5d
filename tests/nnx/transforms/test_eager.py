"""Functions that are compiled outside of traces, and run as they are inside."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import FeatureError
from linnet.nnx.transforms.eager import compiled_outside

X = jnp.ones((1, 2))


def recorded():
    """A function of a layer, and a list that grows when it runs in Python."""
    runs = []

    @compiled_outside
    def scaled(layer, x, *, times, shift=None):
        """Scales."""
        runs.append((times, isinstance(x, jax.core.Tracer)))
        layer.calls[...] += 1
        y = times * layer(x)
        return y if shift is None else y + shift

    return scaled, runs


def build():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    layer.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    return layer


def test_it_is_compiled_once_for_equal_options_and_structures():
    scaled, runs = recorded()
    layer, other = build(), build()
    want = 3 * layer(X)
    for which in (layer, layer, other):
        assert jnp.allclose(scaled(which, X, times=3), want)
    assert (int(layer.calls), int(other.calls)) == (2, 1)
    assert runs == [(3, True)]
    scaled(layer, X, times=3.0)
    scaled(layer, X, times=True)
    scaled(layer, X, times=1)
    assert [times for times, _ in runs] == [3, 3.0, True, 1]
    assert [type(times) for times, _ in runs] == [int, float, bool, int]


def test_arrays_are_traced_wherever_they_stand():
    scaled, runs = recorded()
    layer = build()
    for shift in (1.0, 2.0):
        got = scaled(layer, X, times=1, shift=jnp.full((1, 2), shift))
        assert jnp.allclose(got, layer(X) + shift)
    assert len(runs) == 1


def test_inside_a_trace_it_leaves_no_mark():
    scaled, runs = recorded()
    layer = build()
    jaxpr = nnx.make_jaxpr(lambda layer, x: scaled(layer, x, times=2))(layer, X)
    assert "pjit" not in str(jaxpr)
    nnx.jit(lambda layer, x: scaled(layer, x, times=2))(layer, X)
    assert int(layer.calls) == 1
    assert runs == [(2, True), (2, True)]


def test_errors_name_the_layer_outside():
    scaled, _ = recorded()
    model = nnx.List([build()])
    with pytest.raises(FeatureError) as error:
        scaled(model[0], jnp.ones((1, 3)), times=1)
    assert str(error.value).startswith("model[0] (Linear) expected inputs whose last axis")
    assert int(model[0].calls) == 0


def test_it_keeps_name_and_docstring():
    scaled, _ = recorded()
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Scales.")
