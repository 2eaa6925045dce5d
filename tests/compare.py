"""Comparisons of arrays and of pytrees that tests of many folders use."""

import jax
import numpy as np


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def assert_equal(tree, want):
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, tree, want)


def assert_close(tree, want, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(tree) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), tree, want)


def numbers(tree):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), tree)
