"""A fused function is one operation outside of a trace, and its own operations inside one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional.fusing import fused
from tests.subprocesses import run_program


def recorded():
    """A fused function, and a list that grows when it is traced or run as it is."""
    seen = []

    @fused
    def scaled(x, shift=None, *, factors=(2,), rate=1.0):
        """Scales."""
        seen.append((factors, rate))
        y = x * sum(factors) * rate
        return y if shift is None else y + shift

    return scaled, seen


def test_it_is_compiled_once_for_equal_options():
    scaled, seen = recorded()
    for factors in ([1, 2], (1, 2), [1, 2]):
        assert scaled(jnp.ones(2), factors=factors).tolist() == [3, 3]
    assert seen == [((1, 2), 1.0)]
    assert scaled(jnp.ones(2), jnp.ones(2), factors=[4]).tolist() == [5, 5]
    assert len(seen) == 2


def test_nested_lists_are_constants_too():
    groups = []

    @fused
    def note(x, *, axes):
        groups.append(axes)
        return x

    note(jnp.ones(1), axes=[[0, 1], [2]])
    assert groups == [((0, 1), (2,))]


def test_it_leaves_no_mark_on_what_is_compiled():
    scaled, _ = recorded()
    text = jax.jit(lambda x: scaled(scaled(x))).lower(jnp.ones(2)).as_text()
    assert text.count("stablehlo.multiply") == 4
    assert "call" not in text


@pytest.mark.parametrize("traced", [False, True])
def test_an_array_among_the_options(traced):
    scaled, _ = recorded()

    def call(rate):
        return scaled(jnp.ones(2), rate=rate)

    assert (jax.jit(call) if traced else call)(jnp.float32(0.5)).tolist() == [1, 1]


def test_a_function_among_the_options_may_keep_state():
    calls = []

    @fused
    def apply(x, *, function):
        return function(x)

    def noted(x):
        calls.append(x)
        return jnp.sin(x)

    for function in (noted, jnp.sin, noted):
        assert (apply(jnp.ones(2), function=function) == jnp.sin(jnp.ones(2))).all()
    assert [isinstance(x, jax.core.Tracer) for x in calls] == [False, False]


def test_it_keeps_name_and_docstring():
    scaled, _ = recorded()
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Scales.")


def test_numbers_and_arrays_of_numpy_are_arrays_in_a_trace_too():
    seen = []

    @fused
    def note(x, shift, pair):
        seen.append([a.dtype for a in (x, shift, *pair)])
        return (x + shift + pair[0]).astype(x.dtype)

    args = np.ones(2), 1.0, (np.float64(2), jnp.ones(2))
    want = note(*args)
    assert jax.jit(lambda: note(*args))().dtype == want.dtype == jnp.float32
    assert seen == [[jnp.float32] * 4] * 2


def test_an_import_in_a_trace_is_as_good_as_any_other():
    run_program(
        """
        import jax, jax.numpy as jnp

        @jax.jit
        def first(x):
            from linnet import nnx
            return x + nnx.Linear(2, 2, rngs=nnx.Rngs(0))(x).sum()

        first(jnp.ones(2))
        from linnet import nnx
        from linnet.functional.fusing import is_tracing

        assert not is_tracing()
        model, traces = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), []

        @nnx.jit
        def step(model):
            traces.append(1)
            model.bias[...] += 1

        for _ in range(4):
            step(model)
        assert model.bias[...].tolist() == [4, 4] and len(traces) == 1
        assert step._tables, "no plan was made"
        """
    )
