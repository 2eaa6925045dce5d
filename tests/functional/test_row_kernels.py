"""The kernels give what JAX computes in several passes; without a GPU they are interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from linnet.functional import row_kernels
from linnet.functional.row_kernels import _in_one_pass, max_and_exp_sum


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(2, 3, 1000), (4, 64), (1, 65), (3, 1)])
def test_rows_of_any_length(monkeypatch, shape, dtype):
    monkeypatch.setattr(row_kernels, "_CHUNK", 64)
    values = np.random.default_rng(0).normal(size=shape) * 5
    x = jnp.asarray(values, dtype)
    maximum, total = _in_one_pass(x, interpret=True)
    for one, other in zip(max_and_exp_sum(x), (maximum, total), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    wide = np.asarray(x, np.float64)
    np.testing.assert_array_equal(maximum, wide.max(-1))
    want = np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    assert maximum.dtype == total.dtype == jnp.float32


def test_infinities_and_what_is_no_number(monkeypatch):
    monkeypatch.setattr(row_kernels, "_CHUNK", 2)
    inf, nan = np.inf, np.nan
    rows = [[-inf, -inf, 1, 1], [-inf] * 4, [0, inf, inf, 1], [0, nan, 1, 1], [1, 1, -inf, -inf]]
    for maximum, total in (
        _in_one_pass(jnp.asarray(rows), interpret=True),
        max_and_exp_sum(jnp.asarray(rows)),
    ):
        for shift in (0.0, 2.5):
            found = np.asarray(total * jnp.exp(maximum - shift))
            with np.errstate(all="ignore"):
                want = np.exp(np.asarray(rows) - shift).sum(-1)
            np.testing.assert_allclose(found, want, rtol=1e-6)
