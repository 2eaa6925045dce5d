"""nnx.jit: its options and the forms it comes in."""

import functools

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import DonatedBufferError
from tests.models import call
from tests.nnx.transforms.stateful import Pair, Scale, ScaleNormNoise, counted

# ---- arguments of jax.jit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"static_argnums": 2}, {"static_argnums": (-1,)}, {"static_argnames": "n"}],
    ids=str,
)
def test_static_arguments_by_number_and_name(options):
    def step(model, x, n=1):
        assert isinstance(n, int)
        return model(x) * n

    step, traces = counted(step)
    jitted, model = nnx.jit(step, **options), Scale()
    assert [float(jitted(model, 1.0, 3)), float(jitted(model, 1.0, n=4))] == [6, 8]
    assert float(jitted(model, 1.0)) == 2
    assert float(jitted(model, 2.0, 3)) == 12
    assert len(traces) == 3
    assert model.count.value == 4


def test_equal_static_arguments_of_different_types_differ():
    kind = nnx.jit(lambda x, n: x if n is True else -x, static_argnums=1)
    assert [float(kind(1.0, 1)), float(kind(1.0, True)), float(kind(1.0, 1.0))] == [-1, 1, -1]


def test_a_static_argument_must_be_hashable():
    message = r"Non-hashable static argument 1 of nnx.jit: list.\nFix: pass something hashable"
    with pytest.raises(ValueError, match=message):
        nnx.jit(lambda x, n: x, static_argnums=1)(1.0, [1])


def test_a_module_may_be_a_static_argument():
    model = Scale(3.0)
    assert nnx.jit(lambda model, x: x * model.w, static_argnums=0)(model, 2.0) == 6


@pytest.mark.parametrize("static", [lambda net: net.scale, lambda net: net], ids=["part", "whole"])
def test_an_object_cannot_be_static_and_not(static):
    net = ScaleNormNoise()
    message = "given as static argument 1 of nnx.jit is also part of another argument.*Fix: pass"
    with pytest.raises(ValueError, match=f"(?s){message}"):
        nnx.jit(lambda a, b: a(1.0), static_argnums=1)(net.scale, static(net))


@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, {"donate_argnames": ("model", "x")}], ids=str
)
def test_donated_arguments_by_number_and_name(options):
    model, x = Scale(jnp.ones(3)), jnp.ones(3)
    old = model.w.value

    @functools.partial(nnx.jit, **options)
    def step(model, x):
        model.w[...] += x
        return x + 1

    step(model, x)
    assert old.is_deleted()
    assert x.is_deleted() == ("donate_argnames" in options)
    assert model.w.value.tolist() == [2, 2, 2]
    assert model.count.value == 0
    step(model, jnp.ones(3))
    assert model.w.value.tolist() == [3, 3, 3]


def test_a_function_of_one_donated_argument():
    x = jnp.zeros(2)
    assert nnx.jit(lambda x: x + 1, donate_argnums=0)(x).tolist() == [1, 1]
    assert x.is_deleted()


@pytest.mark.parametrize("donate", [None, 0])
def test_use_of_a_donated_buffer_names_the_variable(donate):
    model = Scale()
    left_behind = nnx.clone(model)
    nnx.jit(lambda model: model(1.0), donate_argnums=0)(model)
    again = nnx.jit(lambda model: model(1.0), donate_argnums=donate)
    message = (
        r"The buffer of model.count, model.w was donated to an earlier call and is gone.\n"
        r"Fix: use the objects that the call updated; or, before donating, make a copy with arrays "
        r"of its own, nnx.clone\(model, arrays=True\): other clones share theirs with the original."
    )
    with pytest.raises(DonatedBufferError, match=message):
        again(left_behind)
    assert model.w.value == 2


def test_use_of_a_donated_buffer_outside_of_jit_names_the_variable():
    model = Pair(Scale(), Scale())
    left_behind = nnx.clone(model)
    nnx.jit(lambda model: model.a(1.0), donate_argnums=0)(model)
    message = "The buffer of left_behind.a.count, left_behind.a.w was donated to an earlier call"
    with pytest.raises(DonatedBufferError, match=message):
        left_behind.a(1.0)


def test_a_copy_with_its_own_arrays_outlives_donation():
    model = Scale()
    copy = nnx.clone(model, arrays=True)
    nnx.jit(lambda model: model(1.0), donate_argnums=0)(model)
    assert copy(1.0) == 2


@pytest.mark.parametrize("options", [{"inline": True}, {"keep_unused": True}], ids=str)
def test_other_options_reach_jax(options):
    model = Scale()
    assert nnx.jit(call, **options)(model, 3.0) == 6
    assert model.count.value == 1


@pytest.mark.parametrize("options", [{"device": jax.devices()[0]}, {"backend": "cpu"}], ids=str)
def test_device_and_backend_warn_as_in_jax(options):
    model = Scale()
    with pytest.warns(DeprecationWarning, match="backend and device argument on jit is deprecated"):
        assert nnx.jit(call, **options)(model, 3.0) == 6
    assert model.count.value == 1


# ---- forms --------------------------------------------------------------------------------------


def test_decorators_with_and_without_parentheses():
    @nnx.jit
    def plain(model, x):
        """Calls."""
        return model(x)

    @nnx.jit(static_argnames="times")
    def with_options(model, x, times):
        return model(x) * times

    assert plain(Scale(), 1.0) == 2
    assert with_options(Scale(), 1.0, times=3) == 6
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Calls."
    assert plain.__wrapped__(Scale(), 1.0) == 2


def test_methods():
    class Model(nnx.Module):
        def __init__(self):
            self.scale = Scale()

        @nnx.jit
        def __call__(self, x):
            return self.scale(x)

        @nnx.jit(static_argnums=2)
        def times(self, x, n):
            return self.scale(x) * n

    model = Model()
    assert model(1.0) == 2
    assert model.times(1.0, 3) == 6
    assert Model.times(model, 1.0, 4) == 8
    assert model.scale.count.value == 3


def test_a_jitted_function_is_an_ordinary_attribute():
    model = Scale()
    model.run = nnx.jit(call)
    copy = nnx.clone(model)
    assert copy.run is model.run
    assert copy.run(copy, 1.0) == 2


def test_a_jitted_module_sees_later_weights():
    model = Scale()
    run = nnx.jit(model)
    assert run(1.0) == 2
    model.w[...] = 5.0
    assert run(1.0) == 5
    assert model.count.value == 2


def test_options_of_a_jitted_module_count_without_the_module():
    class Power(nnx.Module):
        def __init__(self):
            self.base = nnx.Param(jnp.array(2.0))

        def __call__(self, x, n):
            return x * self.base**n if isinstance(n, int) else None

    by_name = nnx.jit(static_argnames="n")
    assert [float(by_name(Power())(1.0, n=3)) for _ in range(2)] == [8, 8]
    assert nnx.jit(Power(), static_argnums=1)(1.0, 3) == 8


def test_bound_methods_are_refused():
    message = (
        "nnx.jit does not support bound methods: Scale.__call__ would take the module as a "
        r"constant.\nFix: decorate the method with @nnx.jit, or call nnx.jit\(Scale.__call__\)"
    )
    with pytest.raises(ValueError, match=message):
        nnx.jit(Scale().__call__)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"nnx.jit takes a function or a module .* but got 3"):
        nnx.jit(3)


@pytest.mark.parametrize(
    "make", [nnx.jit_partial, lambda f, *a: nnx.cached_partial(nnx.jit(f), *a)]
)
def test_partials_of_jitted_functions(make):
    model = Scale()
    run = make(call, model)
    assert run(1.0) == 2
    model.w[...] = 3.0
    assert run(1.0) == 3
    assert run.eval_shape(1.0).shape == ()
    assert run.lower(1.0).compile()(2.0) == 6
    assert model.count.value == 3


def test_jit_partial_passes_options_on():
    run = nnx.jit_partial(lambda model, x, n: model(x) * n, Scale(), static_argnums=2)
    assert run(1.0, 3) == 6


def test_cached_partial_of_any_function():
    assert nnx.cached_partial(pow, 2)(3) == 8
