"""Which options a program is compiled with, and that they reach the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.nnx.transforms import compiler_options
from linnet.nnx.transforms.compiler_options import FOR_LARGE_PRODUCTS, suited_to


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


LARGE, SMALL = (shaped(512, 512), shaped(512, 256)), (shaped(64, 512), shaped(512, 64))


def program_of(function, *args):
    return jax.make_jaxpr(function)(*args)


def test_large_products_of_16_bits_are_compiled_without_triton(monkeypatch):
    assert suited_to(program_of(jnp.dot, *LARGE)) == FOR_LARGE_PRODUCTS
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert suited_to(program_of(jnp.dot, *LARGE)) == {}


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (jnp.dot, SMALL),
        (jnp.dot, (shaped(512, 512, dtype=jnp.float32), shaped(512, 256, dtype=jnp.float32))),
        (jnp.dot, (shaped(512, 512, dtype=jnp.int16), shaped(512, 256, dtype=jnp.int16))),
        (jnp.matmul, (shaped(64, 512, 64), shaped(64, 64, 512))),  # as in attention
        (jnp.add, (shaped(512, 512), shaped(512, 512))),
        (jnp.dot, (shaped(512, 0), shaped(0, 512))),
    ],
)
def test_other_programs_are_compiled_as_ever(function, args):
    assert suited_to(program_of(function, *args)) == {}


def test_products_in_loops_count_as_often_as_they_run():
    def program(steps):
        def looped(a, b, c, d):
            def body(carry, _):
                return carry + jnp.dot(c, d), None

            small, _ = jax.lax.scan(body, jnp.zeros((64, 64), c.dtype), None, steps)
            return jnp.dot(a, b), small

        return program_of(looped, *LARGE, *SMALL)

    assert suited_to(program(1)) == FOR_LARGE_PRODUCTS
    assert suited_to(program(100)) == {}


def test_of_branches_the_one_with_the_fewest_products_counts():
    def branching(a, b, c, d):
        many = jax.lax.cond(
            a[0, 0] > 0, lambda: jnp.dot(c, d), lambda: jnp.zeros((64, 64), c.dtype)
        )
        return jnp.dot(a, b), many

    [total, large] = compiler_options._operations(program_of(branching, *LARGE, *SMALL).jaxpr)
    assert total == large == 512 * 512 * 256


def test_a_flag_of_the_user_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert suited_to(program_of(jnp.dot, *LARGE)) == {"xla_gpu_dot_merger_threshold_mb": 0}


def test_the_compiler_knows_the_options():
    double = jax.jit(lambda x: 2 * x, compiler_options=FOR_LARGE_PRODUCTS)
    assert double(1.0) == 2.0


def test_they_reach_the_compiler_behind_those_of_the_user(monkeypatch):
    seen = []
    original = jax.jit

    def jit(function, **options):
        seen.append(options.get("compiler_options"))
        return original(function, **options)

    monkeypatch.setattr(jax, "jit", jit)
    monkeypatch.setattr(compiler_options, "has_large_products", lambda jaxpr: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def trained(**options):
        model = nnx.Linear(128, 256, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit(**options)
        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(lambda m: m(x).sum())(model)
            optimizer.update(model, grads)
            return loss

        seen.clear()
        for _ in range(2):
            step(model, optimizer, jnp.ones((2, 128)))
        return model.kernel[...]

    kernel = trained()
    assert FOR_LARGE_PRODUCTS in seen
    np.testing.assert_array_equal(trained(donate_argnums=(0, 1)), kernel)
    assert FOR_LARGE_PRODUCTS in seen
    with nnx.use_state_donation(False):
        np.testing.assert_array_equal(trained(), kernel)
    assert FOR_LARGE_PRODUCTS in seen
    chosen = {"xla_gpu_enable_triton_gemm": True}
    np.testing.assert_array_equal(trained(compiler_options=chosen), kernel)
    assert {**FOR_LARGE_PRODUCTS, **chosen} in seen


def test_functions_compiled_ahead_of_time_get_them_too(monkeypatch):
    seen = []
    original = jax.stages.Lowered.compile

    def compile_(self, options=None, **kwargs):
        seen.append(options)
        return original(self, options, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    call = nnx.jit(lambda layer, x: layer(x))
    lowered = call.lower(layer, x)
    np.testing.assert_array_equal(lowered.compile()(layer, x), call(layer, x))
    monkeypatch.setattr(compiler_options, "has_large_products", lambda jaxpr: True)
    own = {"xla_gpu_enable_triton_gemm": True}
    call = nnx.jit(lambda layer, x: layer(x), compiler_options=own)
    call.lower(layer, x).compile()
    call.lower(layer, x).compile({"xla_gpu_dot_merger_threshold_mb": 5})
    of_both = {"xla_gpu_enable_triton_gemm": True, "xla_gpu_dot_merger_threshold_mb": 5}
    assert seen == [None, {**FOR_LARGE_PRODUCTS, **own}, of_both]


def test_functions_that_write_nothing_get_them_and_are_traced_once(monkeypatch):
    monkeypatch.setattr(compiler_options, "has_large_products", lambda jaxpr: True)
    layer, x, traces = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)), []

    @nnx.jit
    def call(layer, x):
        traces.append(x)
        return layer(x)

    want = layer(x)
    for _ in range(3):
        np.testing.assert_array_equal(call(layer, x), want)
    assert len(traces) == 1
    [entry] = call._entries.values()
    assert entry.jit.keywords.get("compiler_options") is None  # how it is made anew is unchanged
    call(nnx.Linear(2, 3, rngs=nnx.Rngs(1)), x)
    assert call.jitted_fn._cache_size() == 1
