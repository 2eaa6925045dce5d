"""Convolutions, against sums written out."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from linnet.functional import conv
from tests import compare
from tests.models import numpy_normal as normal

close = functools.partial(compare.close, tolerance=1e-5)


def sums(padded, kernel, strides, kernel_dilation):
    """The convolution of an image that is padded already, entry by entry."""
    spans = [d * (k - 1) + 1 for k, d in zip(kernel.shape, kernel_dilation, strict=False)]
    sizes = [(n - span) // s + 1 for n, span, s in zip(padded.shape, spans, strides, strict=False)]
    out = np.zeros((*sizes, kernel.shape[-1]), np.float32)
    for at in itertools.product(*map(range, sizes)):
        for entry in itertools.product(*map(range, kernel.shape[:-2])):
            place = tuple(
                a * s + e * d
                for a, s, e, d in zip(at, strides, entry, kernel_dilation, strict=True)
            )
            out[at] += padded[place] @ kernel[entry]
    return out


MODES = {"VALID": None, "CIRCULAR": "wrap", "REFLECT": "reflect", "CAUSAL": "constant"}
small = st.integers(1, 3)


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(MODES)),
    *(st.tuples(small, small) for _ in range(3)),
)
def test_padding_strides_and_dilation(padding, size, strides, dilation):
    axes = 1 if padding == "CAUSAL" else 2
    size, strides, dilation = size[:axes], strides[:axes], dilation[:axes]
    x, kernel, bias = normal(*(9, 8)[:axes], 2), normal(*size, 2, 3), normal(3)
    spans = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
    width = [(s // 2, s - s // 2) for s in spans]
    if padding == "CAUSAL":
        width = [(spans[0], 0)]
    padded = x
    if MODES[padding] is not None:
        padded = np.pad(x, [*width, (0, 0)], mode=MODES[padding])
    options = {"strides": strides, "kernel_dilation": dilation, "padding": padding}
    close(conv.conv(x, kernel, bias, **options), sums(padded, kernel, strides, dilation) + bias)


def spread(x, kernel, stride, dilation, start, flip):
    """The transposed convolution of a ring, entry by entry."""
    if flip:
        kernel = kernel[::-1].swapaxes(1, 2)
    ring = len(x) * stride
    out = np.zeros((ring, kernel.shape[-1]), np.float32)
    for n, entry in itertools.product(range(len(x)), range(len(kernel))):
        out[(n * stride - entry * dilation + start) % ring] += x[n] @ kernel[entry]
    return out


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_transposed_on_a_ring(size, stride, dilation, length, flip):
    x, kernel = normal(length, 2), normal(size, *((3, 2) if flip else (2, 3)))
    span = dilation * (size - 1)
    start = span if stride > span else (span + stride - (1 if flip else 0)) // 2
    got = conv.conv_transpose(
        x,
        kernel,
        strides=stride,
        kernel_dilation=dilation,
        padding="CIRCULAR",
        transpose_kernel=flip,
    )
    close(got, spread(x, kernel, stride, dilation, start, flip))


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1))])
def test_transposed_as_jax_has_it(padding):
    x, kernel = normal(2, 5, 4, 3), normal(3, 2, 3, 4)
    got = conv.conv_transpose(x, kernel, strides=(2, 3), padding=padding)
    close(got, lax.conv_transpose(x, kernel, (2, 3), padding))


@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["SAME", "VALID"]),
    st.booleans(),
)
def test_transposed_with_zeros_where_jax_places_them(size, strides, dilation, padding, flip):
    x, kernel = normal(2, 5, 4, 3), normal(*size, *((4, 3) if flip else (3, 4)))
    options = {"transpose_kernel": flip}
    got = conv.conv_transpose(
        x, kernel, strides=strides, padding=padding, kernel_dilation=dilation, **options
    )
    close(got, lax.conv_transpose(x, kernel, strides, padding, dilation, None, **options))


@pytest.mark.parametrize("function", [conv.conv, conv.conv_transpose])
def test_batch_axes_are_alike(function):
    x, kernel = normal(2, 3, 5, 4), normal(3, 4, 2)
    want = np.stack([[function(line, kernel) for line in block] for block in x])
    close(function(x, kernel), want)
    close(function(x[0], kernel), want[0])


@pytest.mark.parametrize("function", [conv.conv, conv.conv_transpose])
def test_four_axes(function):
    x, kernel = normal(1, 2, 3, 2, 2, 4), normal(1, 1, 1, 1, 4, 2)
    close(function(x, kernel), x @ kernel.reshape(4, 2))


def test_groups_see_their_own_features():
    x, kernel = normal(1, 5, 4), normal(3, 2, 6)
    parts = [conv.conv(x[..., i : i + 2], kernel[..., 3 * i // 2 :][..., :3]) for i in (0, 2)]
    close(conv.conv(x, kernel, feature_group_count=2), np.concatenate(parts, -1))


def test_input_dilation_puts_zeros_between():
    x, kernel = normal(1, 4, 2), normal(3, 2, 2)
    apart = np.zeros((1, 7, 2), np.float32)
    apart[:, ::2] = x
    want = conv.conv(apart, kernel, padding="VALID")
    close(conv.conv(x, kernel, padding="VALID", input_dilation=2), want)


def test_a_masked_kernel_is_zero_where_the_mask_is():
    kernel = jnp.ones((2, 1, 1))
    assert conv.mask_kernel(kernel, None) is kernel
    assert conv.mask_kernel(kernel, jnp.array([[[1.0]], [[0.0]]])).ravel().tolist() == [1, 0]
