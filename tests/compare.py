"""Comparisons of arrays and of pytrees that tests of many folders use."""

import jax
import jax.numpy as jnp
import numpy as np


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def assert_equal(tree, want):
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, tree, want)


def assert_close(tree, want, rtol=1e-5, atol=1e-6, text=""):
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol, atol, err_msg=text)


def assert_alike(tree, want, rtol=1e-5, atol=1e-6, *, half=0.05, equal_nan=False):
    """Structures, shapes and dtypes are equal, and numbers close; ``half`` is for 16 bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
        dtype = jnp.result_type(b)
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), dtype)
        if is_key(b):
            np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))
        elif dtype in (jnp.bfloat16, jnp.float16):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, half, half, equal_nan=equal_nan)
        else:
            np.testing.assert_allclose(a, b, rtol, atol, equal_nan=equal_nan)


def identical(first, second):
    """Whether types, dtypes, shapes and bits are equal, through dicts, lists and tuples."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(identical(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(identical, first, second))
    if is_key(first):
        types = (first.dtype, first.shape) == (second.dtype, second.shape)
        return types and bool((first == second).all())
    if isinstance(first, jax.Array | np.ndarray | np.generic):
        first, second = np.asarray(first), np.asarray(second)
        types = (first.dtype, first.shape) == (second.dtype, second.shape)
        return types and first.tobytes() == second.tobytes()
    return repr(first) == repr(second)


def is_key(x):
    return jnp.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)


def numbers(tree):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), tree)
