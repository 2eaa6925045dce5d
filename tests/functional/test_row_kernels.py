"""The kernels give what JAX computes in several passes; without a GPU they are interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional import row_kernels
from linnet.functional.row_kernels import max_and_exp_sum


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2, 3, 1000), (4, 64), (1, 65), (3, 1)])
def test_rows_of_any_length(monkeypatch, shape, dtype):
    monkeypatch.setattr(row_kernels, "_CHUNK", 64)
    values = np.random.default_rng(0).normal(size=shape) * 5
    x = jnp.asarray(values, dtype)
    maximum, total = max_and_exp_sum(x, interpret=True)
    wide = np.asarray(x, np.float64)
    np.testing.assert_array_equal(maximum, wide.max(-1))
    want = np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    assert maximum.dtype == total.dtype == jnp.float32


def test_infinities_and_what_is_no_number(monkeypatch):
    monkeypatch.setattr(row_kernels, "_CHUNK", 2)
    inf, nan = np.inf, np.nan
    rows = [[-inf, -inf, 1, 1], [-inf] * 4, [0, inf, inf, 1], [0, nan, 1, 1], [1, 1, -inf, -inf]]
    maximum, total = max_and_exp_sum(jnp.asarray(rows), interpret=True)
    for shift in (0.0, 2.5):
        found = np.asarray(total * jnp.exp(maximum - shift))
        with np.errstate(all="ignore"):
            want = np.exp(np.asarray(rows) - shift).sum(-1)
        np.testing.assert_allclose(found, want, rtol=1e-6)
