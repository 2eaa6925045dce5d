"""Precision policies: how they are written, and what is in force where."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import PrecisionError
from linnet.functional.dtypes import (
    Policy,
    as_policy,
    canonicalize_dtype,
    cast_floating,
    compute_dtype,
    default_param_dtype,
    precision,
    promote_dtype,
)

HALF, FULL = jnp.dtype("bfloat16"), jnp.dtype("float32")


def seen():
    """What a computation that asks for its dtype gets."""
    return promote_dtype((jnp.ones(2), None))[0].dtype


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (Policy(compute=jnp.bfloat16), (None, HALF, None)),
        ("params=float32,compute=bfloat16,output=float32", (FULL, HALF, FULL)),
        (" output = f32, compute = bf16 ", (None, HALF, FULL)),
        ("mixed_bfloat16", (FULL, HALF, FULL)),
        ("mixed_float16", (FULL, jnp.dtype("float16"), FULL)),
        ("bf16", (HALF, HALF, HALF)),
        (jnp.float32, (FULL, FULL, FULL)),
        (np.dtype("float16"), (jnp.dtype("float16"),) * 3),
    ],
)
def test_short_forms(given, want):
    policy = as_policy(given)
    assert (policy.params, policy.compute, policy.output) == want
    assert as_policy(policy) is policy
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), Policy(*want)):
        assert other == policy
        assert hash(other) == hash(policy)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "compute=bflaot16",
            "The precision policy has compute='bflaot16', which is no dtype. Did you mean "
            "'bfloat16'?\nFix: use a dtype such as jnp.bfloat16, or its name.",
        ),
        (
            "mixed_bfloat",
            "The precision policy has params='mixed_bfloat', which is no dtype. Did you mean "
            "'mixed_bfloat16'?\nFix: use a dtype such as jnp.bfloat16, or its name.",
        ),
        (
            "output=int8",
            "The precision policy has output=int8, which is not floating point.\n"
            "Fix: use one of bfloat16, float16, float32 and float64.",
        ),
        (
            "compute=bf16,weights=f32",
            "A precision policy was expected, but got 'compute=bf16,weights=f32': 'weights=f32' "
            "is not one of params=, compute=, output= and masters= with a dtype, each at most "
            "once.\n"
            "Fix: write it like 'params=float32,compute=bfloat16,output=float32'.",
        ),
        (
            "compute=bf16,compute=f32",
            "A precision policy was expected, but got 'compute=bf16,compute=f32': 'compute=f32' "
            "is not one of params=, compute=, output= and masters= with a dtype, each at most "
            "once.\n"
            "Fix: write it like 'params=float32,compute=bfloat16,output=float32'.",
        ),
    ],
)
def test_what_is_no_policy_is_refused(given, text):
    with pytest.raises(PrecisionError) as error:
        precision(given)
    assert str(error.value) == text


def test_things_that_are_no_dtype_are_refused():
    with pytest.raises(PrecisionError, match="compute=3, which is no dtype"):
        Policy(compute=3)
    with pytest.raises(PrecisionError, match=r"compute=\{'a': 'b'\}, which is no dtype"):
        Policy(compute={"a": "b"})
    assert issubclass(PrecisionError, (ValueError, TypeError))


def test_regions_nest_and_leave_open_what_they_do_not_say():
    assert (seen(), default_param_dtype()) == (FULL, jnp.float32)
    with precision("compute=bf16,params=f16"):
        assert (seen(), default_param_dtype()) == (HALF, "float16")
        with precision("compute=float16"):
            assert (seen(), default_param_dtype()) == ("float16", "float16")
            with precision(None):
                assert (seen(), default_param_dtype(), compute_dtype()) == (FULL, FULL, None)
        assert (seen(), default_param_dtype(HALF)) == (HALF, HALF)
    assert (seen(), compute_dtype()) == (FULL, None)


def test_a_region_ends_with_an_error_and_can_be_entered_again():
    region = precision("compute=bf16")
    for _ in range(2):
        with pytest.raises(RuntimeError), region, region:
            assert seen() == HALF
            raise RuntimeError
        assert seen() == FULL


@pytest.mark.parametrize(
    ("args", "options", "want"),
    [
        ((jnp.ones(2), jnp.ones(2, jnp.float16)), {}, "bfloat16"),
        ((jnp.ones(2, jnp.bfloat16), 1.0, None), {}, "bfloat16"),
        ((np.ones(2),), {}, "bfloat16"),
        ((jnp.ones(2, jnp.int8),), {}, "bfloat16"),
        ((jnp.ones(2, jnp.int8),), {"inexact": False}, "int8"),
        ((jnp.ones(2, jnp.complex64), jnp.ones(2)), {}, "complex64"),
        ((jnp.ones(2),), {"dtype": jnp.float16}, "float16"),
    ],
)
def test_what_computes_in_the_dtype_of_a_policy(args, options, want):
    with precision("compute=bf16"):
        assert jnp.dtype(canonicalize_dtype(*args, **options)) == want
        got = promote_dtype(args, **options)
    assert all(x.dtype == want for x in got if x is not None)


def test_a_decorated_function_returns_the_output_dtype():
    @precision("compute=bf16,output=f32")
    def run(x):
        """Docs."""
        (y,) = promote_dtype((x,))
        assert y.dtype == HALF
        return {"y": y, "count": jnp.ones((), jnp.int32), "name": "run", "z": 1.0}

    out = run(jnp.ones(2))
    assert (out["y"].dtype, out["count"].dtype, out["name"], out["z"]) == (FULL, "int32", "run", 1)
    assert (run.__name__, run.__doc__) == ("run", "Docs.")
    assert precision("compute=bf16")(seen)() == HALF
    with precision("compute=bf16"):
        assert precision(None)(seen)() == FULL


def test_compiled_functions_are_traced_for_each_policy_once():
    traces = []

    @jax.jit
    def run(x):
        traces.append(str(compute_dtype()))
        return promote_dtype((x,))[0]

    for _ in range(2):
        assert run(jnp.ones(2)).dtype == FULL
        for dtype in ("bfloat16", "float16"):
            with precision(f"compute={dtype}"):
                assert run(jnp.ones(2)).dtype == dtype
        with precision("compute=float16"), precision(Policy(compute=jnp.bfloat16)):
            assert run(jnp.ones(2)).dtype == HALF
    assert traces == ["None", "bfloat16", "float16"]


def test_each_thread_has_its_own():
    region, met, results = precision("compute=bf16"), threading.Barrier(3), {}

    def work(name, policy):
        with region if policy is None else precision(policy):
            met.wait()
            results[name] = seen()
            met.wait()
        results[name, "after"] = seen()

    threads = [
        threading.Thread(target=work, args=args) for args in [("a", None), ("b", "compute=float16")]
    ]
    for thread in threads:
        thread.start()
    with region:
        met.wait()
        met.wait()
    assert seen() == FULL
    for thread in threads:
        thread.join()
    wanted = {"a": HALF, "b": "float16", ("a", "after"): FULL, ("b", "after"): FULL}
    assert results == wanted


def test_casting_leaves_alone_what_is_not_floating_point():
    key, x = jax.random.key(0), jnp.ones(2, jnp.complex64)
    tree = {"x": x, "key": key, "n": np.ones(2, np.int8), "y": np.ones(2), "z": None}
    got = cast_floating(tree, HALF)
    assert got["x"] is x
    assert got["key"] is key
    assert got["n"] is tree["n"]
    assert (got["y"].dtype, got["z"]) == (HALF, None)
    assert cast_floating(tree, None) is tree
