"""Contractions and tables, against the same sums written with numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from linnet.functional import linear
from tests import compare
from tests.models import numpy_normal as normal

close = functools.partial(compare.close, tolerance=1e-5)
X = normal(2, 3, 4)


def test_dense():
    kernel, bias = normal(4, 5), normal(5)
    close(linear.dense(X, kernel, bias), X @ kernel + bias)
    close(linear.dense(X[0, 0], kernel), X[0, 0] @ kernel)


@pytest.mark.parametrize(
    ("equation", "options", "kernel", "bias"),
    [
        ("abc,cd->abd", {}, (4, 5), (5,)),
        ("abc,bcde->ade", {"axis": (1, 2)}, (3, 4, 5, 2), (5, 2)),
        ("abc,cbd->ad", {"axis": (-1, 1)}, (4, 3, 5), (5,)),
        ("abc,acde->abde", {"batch_axis": (0,)}, (2, 4, 5, 2), (2, 5, 2)),
        ("abc,abcd->abd", {"batch_axis": (0, 1)}, (2, 3, 4, 5), (2, 3, 5)),
    ],
)
def test_dense_general(equation, options, kernel, bias):
    kernel, bias = normal(*kernel), normal(*bias)
    want = np.einsum(equation, X, kernel)
    close(linear.dense_general(X, kernel, **options), want)
    if "batch_axis" in options and want.ndim > bias.ndim:
        bias_there = bias[:, None]
    else:
        bias_there = bias
    close(linear.dense_general(X, kernel, bias, **options), want + bias_there)


@pytest.mark.parametrize(
    ("options", "kernel", "bias"),
    [
        ({}, (4, 5, 2), (5, 2)),
        ({}, (4, 5), (5,)),
        ({"axis": (1, 2)}, (3, 4, 5, 2), (5, 2)),
        ({"batch_axis": (0,)}, (2, 4, 2, 2), (2, 2, 2)),  # sizes that could be taken for others
    ],
)
def test_a_bias_is_the_same_where_a_gpu_adds_it_to_the_product(monkeypatch, options, kernel, bias):
    x, kernel, bias = (
        normal(2, 2 if "batch_axis" in options else 3, 4),
        normal(*kernel),
        normal(*bias),
    )

    def compute():
        call = functools.partial(linear.dense_general, **options)
        return jax.jit(lambda *args: jax.vjp(call, *args)[0])(x, kernel, bias)

    want = compute()
    monkeypatch.setattr(linear, "on_gpu", lambda: True)
    np.testing.assert_array_equal(compute(), want)


@pytest.mark.parametrize(
    ("equation", "kernel", "bias", "shape"),
    [
        ("abc,cd->abd", (4, 5), (5,), (1, 1, 5)),
        ("abc,cde->aebd", (4, 5, 2), (2, 5), (1, 2, 1, 5)),
        ("abc, bcd -> abd", (3, 4, 5), (3, 5), (1, 3, 5)),
        ("...c,cd->...d", (4, 5), (5,), (1, 1, 5)),
        ("...c,cd->d...", (4, 5), (5,), (5, 1, 1)),
        ("abc,abc->", (2, 3, 4), (), ()),
    ],
)
def test_einsum(equation, kernel, bias, shape):
    kernel, bias = normal(*kernel), normal(*bias)
    want = np.einsum(equation, X, kernel)
    assert linear.einsum_broadcast_shape(equation, kernel.shape, want.ndim) == shape
    close(linear.einsum(X, kernel, bias, equation=equation), want + bias.reshape(shape))


def test_options_that_were_not_given_are_not_passed_on():
    def bare(x, y, dimension_numbers, precision):
        return lax.dot_general(x, y, dimension_numbers, precision=precision)

    close(linear.dense(X, normal(4, 5), dot_general=bare), X @ normal(4, 5))
    with pytest.raises(TypeError, match="preferred_element_type"):
        linear.dense(X, normal(4, 5), dot_general=bare, preferred_element_type=jnp.float32)


def test_embed():
    table = normal(5, 3)
    indices = jnp.array([[0, 4], [-1, 7]])
    got = linear.embed(table, indices)
    assert (got[0] == table[[0, 4]]).all() and (got[1, 0] == table[-1]).all()
    assert jnp.isnan(got[1, 1]).all()
    assert (linear.embed(table[:1], indices) == table[None, :1]).all()


def test_attend():
    table = normal(5, 4)
    close(linear.attend(table, X), X @ table.T)


@pytest.mark.parametrize(
    ("equation", "lhs", "rhs"),
    [
        ("ab,bc->ac", (2, 3), (3, 4)),
        ("ab,bc->ca", (2, 3), (3, 4)),
        ("ab , bc", (2, 3), (3, 4)),
        ("...ij,...jk->...ik", (5, 2, 3), (3, 4)),
        ("...ij,jk", (5, 2, 3), (3, 4)),
        ("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
        ("ijk,kj->i", (2, 3, 4), (4, 3)),
        ("aab,cd->ac", (2, 2, 3), (3, 4)),
        ("ab,bc->ac", (2, 1), (3, 4)),
        ("ab,ab->ba", (2, 3), (2, 3)),
        ("a,a->", (3,), (3,)),
    ],
)
def test_einsum_by_a_contraction_is_that_of_jax(equation, lhs, rhs):
    lhs, rhs = (jax.random.normal(jax.random.key(len(s)), s) for s in (lhs, rhs))
    got, want = [], []

    def contraction(found):
        def contract(*args, **kwargs):
            found.append([args[2:], kwargs, args[0].shape, args[1].shape])
            return jax.lax.dot_general(*args, **kwargs)

        return contract

    out = linear.einsum_by(contraction(got), equation, lhs, rhs, precision="high")
    expected = jnp.einsum(equation, lhs, rhs, precision="high", _dot_general=contraction(want))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert got == want
