"""Convolutions over any number of axes; the features come last.

Inputs are ``(*batch, *spatial, in)``: no batch axis, one or several. Kernels are
``(*spatial, in // groups, out)``. Strides and dilations are a number for all spatial axes, one for
each, or None for 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from linnet.errors import LayerArgumentError
from linnet.functional import fusing
from linnet.functional.fusing import compiled_unless_intercepted, fused
from linnet.functional.linear import add_bias, given_options
from linnet.functional.sharding import (
    entries_of,
    is_explicit,
    joined_entries,
    placed,
    sharding_along,
)
from linnet.typing import LaxPadding, PaddingLike

PerAxis = int | Sequence[int] | None
Pairs = tuple[tuple[int, int], ...]
Padding = str | int | Sequence[int | tuple[int, int]]

PADDINGS = ("SAME", "VALID", "SAME_LOWER", "CIRCULAR", "REFLECT", "CAUSAL")
TRANSPOSED_PADDINGS = ("SAME", "VALID", "SAME_LOWER", "CIRCULAR")


def per_axis(value: PerAxis, axes: int, name: str) -> tuple[int, ...]:
    """One number for each spatial axis, from the argument ``name``.

    Example:
      >>> per_axis(2, 3, "strides")
      (2, 2, 2)
    """
    if value is None:
        return (1,) * axes
    if isinstance(value, int):
        return (value,) * axes
    if len(value) != axes:
        raise LayerArgumentError(
            f"{name} must be a number or {_one_each(axes)}, but got {value!r}.\n"
            f"Fix: give one entry for each axis that the window moves over."
        )
    return tuple(value)


def canonical_padding(padding: Padding, axes: int, names: Sequence[str] = PADDINGS) -> str | Pairs:
    """A padding as one of ``names``, or as a pair of numbers for each spatial axis.

    Example:
      >>> canonical_padding("same", 2)
      'SAME'
      >>> canonical_padding([1, (0, 2)], 2)
      ((1, 1), (0, 2))
    """
    if isinstance(padding, str) and padding.upper() in names:
        name = padding.upper()
        if name == "CAUSAL" and axes != 1:
            raise LayerArgumentError(
                f"CAUSAL padding is for one axis, but the kernel moves over {axes}.\n"
                "Fix: give pairs, for example padding=((2, 0), (1, 1)) for a kernel of 3 by 3 that "
                "is causal on the first axis."
            )
        return name
    if isinstance(padding, int):
        return ((padding, padding),) * axes
    if not isinstance(padding, str) and isinstance(padding, Sequence) and len(padding) == axes:
        sides = [(p, p) if isinstance(p, int) else tuple(p) for p in padding]
        if all(len(side) == 2 for side in sides):
            return tuple((before, after) for before, after in sides)
    raise LayerArgumentError(
        f"padding must be one of {', '.join(names)}, a number, or {_one_each(axes)} that are "
        f"numbers or pairs (before, after), but got {padding!r}.\n"
        f"Fix: for one pixel of zeros on all sides, padding=1."
    )


def canonicalize_padding(padding: PaddingLike, rank: int) -> LaxPadding:
    """A padding in the form that ``jax.lax`` takes.

    Args:
      padding: a name, a number, or for each axis a number or a pair.
      rank: the number of spatial axes.

    Returns:
      The name as it is, or a list of pairs.

    Raises:
      LayerArgumentError: it is none of these.

    Example:
      >>> canonicalize_padding(1, 2), canonicalize_padding("SAME", 2)
      ([(1, 1), (1, 1)], 'SAME')
    """
    return padding if isinstance(padding, str) else list(canonical_padding(padding, rank))  # pyright: ignore[reportReturnType]


def check_dilated(padding: Padding, input_dilation: PerAxis) -> None:
    """Refuses a padding such as SAME, whose size is not defined for dilated inputs."""
    if not isinstance(padding, str) or padding.upper() in ("VALID", "CAUSAL"):
        return
    if not _is_one(input_dilation):
        raise LayerArgumentError(
            f"{padding.upper()} padding is not defined beside input_dilation={input_dilation}.\n"
            "Fix: give the padding in numbers, or use a transposed convolution."
        )


def check_transposed(padding: Padding, strides: PerAxis) -> None:
    """Refuses SAME_LOWER, whose size is not defined for a transposed convolution with strides."""
    if isinstance(padding, str) and padding.upper() == "SAME_LOWER" and not _is_one(strides):
        raise LayerArgumentError(
            f"SAME_LOWER padding is not defined for a transposed convolution with strides of "
            f"{strides}.\nFix: give the padding as pairs (before, after), or SAME."
        )


def _is_one(value: PerAxis) -> bool:
    return all(n == 1 for n in (value if isinstance(value, Sequence) else [value or 1]))


def _one_each(axes: int) -> str:
    return f"{axes} of them" if axes != 1 else "a sequence of 1"


@functools.cache
def _dimension_numbers(axes: int) -> jax.lax.ConvDimensionNumbers:
    channels_last = (0, axes + 1, *range(1, axes + 1))
    kernel = (axes + 1, axes, *range(axes))
    return jax.lax.ConvDimensionNumbers(channels_last, kernel, channels_last)


def mask_kernel(kernel: Array, mask: Array | None) -> Array:
    """Multiplies the kernel by a mask, if there is one."""
    return kernel if mask is None else kernel * mask


@compiled_unless_intercepted("conv_general_dilated")
def conv(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    strides: PerAxis = 1,
    padding: Padding = "SAME",
    input_dilation: PerAxis = 1,
    kernel_dilation: PerAxis = 1,
    feature_group_count: int = 1,
    conv_general_dilated: Callable[..., Array] = fusing.conv_general_dilated,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Convolves the inputs with a kernel and adds a bias.

    Args:
      inputs: ``(*batch, *spatial, in)``.
      kernel: ``(*spatial, in // feature_group_count, out)``.
      bias: ``(out,)``, or None.
      strides: how far the window moves, for each axis.
      padding: ``"SAME"``, ``"VALID"``, ``"SAME_LOWER"``, ``"CIRCULAR"``, ``"REFLECT"``,
        ``"CAUSAL"`` (one axis only), a number, or a number or pair for each axis.
      input_dilation: the distance between inputs, with zeros between them.
      kernel_dilation: the distance between kernel entries.
      feature_group_count: how many groups the features are divided into.
      conv_general_dilated: the operation, as ``jax.lax.conv_general_dilated``.
      precision, preferred_element_type, out_sharding: of the convolution.

    Returns:
      ``(*batch, *spatial, out)``.

    Raises:
      LayerArgumentError: an argument does not fit the number of spatial axes, or a named padding
        stands beside an input dilation.

    Example:
      >>> x = jnp.arange(5.0)[:, None]
      >>> conv(x, jnp.ones((2, 1, 1)), padding="causal").ravel()
      Array([0., 1., 3., 5., 7.], dtype=float32)
    """
    axes = kernel.ndim - 2
    batched, window = _windowed(
        inputs, kernel.shape[:axes], strides, padding, input_dilation, kernel_dilation
    )
    batched, out_sharding = _with_explicit_sharding(batched, kernel, out_sharding)
    out = conv_general_dilated(
        batched,
        kernel,
        **window,
        feature_group_count=feature_group_count,
        precision=precision,
        **given_options(preferred_element_type=preferred_element_type, out_sharding=out_sharding),
    )
    return _finished(out, bias, inputs.shape[: -axes - 1])


def _with_explicit_sharding(inputs: Array, kernel: Array, out_sharding: Any) -> tuple[Array, Any]:
    """Inputs and the sharding of the output, which under explicit axes has to be given.

    The output is sharded along the batch as the inputs are, and along the features as the kernel
    is; the inputs lose their sharding along the axes that the kernel goes over.
    """
    if out_sharding is not None or not is_explicit(None):
        return inputs, out_sharding
    inputs = placed(inputs, sharding_along(inputs, tuple(range(1, inputs.ndim))))
    return inputs, joined_entries(entries_of(inputs)[:-1], entries_of(kernel)[-1])


def _windowed(
    inputs: Array,
    kernel_size: Sequence[int],
    strides: PerAxis,
    padding: Padding,
    input_dilation: PerAxis,
    kernel_dilation: PerAxis,
) -> tuple[Array, dict[str, Any]]:
    """Inputs with one batch axis, wrapped or reflected if asked for, and the window's options."""
    axes = len(kernel_size)
    strides = per_axis(strides, axes, "strides")
    input_dilation = per_axis(input_dilation, axes, "input_dilation")
    kernel_dilation = per_axis(kernel_dilation, axes, "kernel_dilation")
    padding = canonical_padding(padding, axes)
    if padding == "VALID":
        padding = ((0, 0),) * axes
    check_dilated(padding, input_dilation)
    continued, mode = None, "wrap"
    spans = [d * (k - 1) for k, d in zip(kernel_size, kernel_dilation, strict=True)]
    if padding == "CAUSAL":
        padding = ((spans[0], 0),)
    elif padding in ("CIRCULAR", "REFLECT"):
        continued = tuple((span // 2, span - span // 2) for span in spans)
        mode = "wrap" if padding == "CIRCULAR" else "reflect"
        padding = ((0, 0),) * axes
    return _with_one_batch_axis(inputs, axes, continued, mode), {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": input_dilation,
        "rhs_dilation": kernel_dilation,
        "dimension_numbers": _dimension_numbers(axes),
    }


def conv_shape(
    inputs: tuple[int, ...], features: int, kernel_size: Sequence[int], **options: Any
) -> tuple[int, ...]:
    """The shape of a convolution's output, from that of its inputs; options as for ``conv``.

    Example:
      >>> conv_shape((5, 4, 3), 2, (3, 3), padding="VALID")
      (3, 2, 2)
    """
    kernel = jax.ShapeDtypeStruct((*kernel_size, inputs[-1], features), jnp.float32)
    x = jax.ShapeDtypeStruct(inputs, jnp.float32)
    return jax.eval_shape(functools.partial(conv, **options), x, kernel).shape


def conv_local(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    kernel_size: Sequence[int],
    strides: PerAxis = 1,
    padding: Padding = "SAME",
    input_dilation: PerAxis = 1,
    kernel_dilation: PerAxis = 1,
    precision: Any = None,
) -> Array:
    """Convolves with a kernel of its own at each place of the output, and adds a bias.

    Args:
      kernel: ``(*places, in * window, out)``, where the window's entries vary fastest.
      bias: ``(*places, out)``, or None.
      kernel_size: the size of the window, for each axis.
      inputs, strides, padding, input_dilation, kernel_dilation, precision: as for ``conv``.

    Returns:
      ``(*batch, *places, out)``.

    Example:
      >>> kernel = jnp.arange(2.0).reshape(2, 1, 1)
      >>> conv_local(jnp.ones((2, 1)), kernel, kernel_size=(1,)).ravel()
      Array([0., 1.], dtype=float32)
    """
    batched, window = _windowed(
        inputs, kernel_size, strides, padding, input_dilation, kernel_dilation
    )
    out = jax.lax.conv_general_dilated_local(
        batched, kernel, filter_shape=tuple(kernel_size), precision=precision, **window
    )
    if bias is not None:
        out = add_bias(out, bias, shape=(1, *bias.shape))
    return _finished(out, None, inputs.shape[: -len(kernel_size) - 1])


@compiled_unless_intercepted("conv_general_dilated")
def conv_transpose(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    strides: PerAxis = None,
    padding: Padding = "SAME",
    kernel_dilation: PerAxis = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """Transposed convolution: the kernel spreads each input over the outputs around it.

    Args:
      inputs, bias: as for ``conv``.
      kernel: ``(*spatial, in, out)``, or ``(*spatial, out, in)`` with ``transpose_kernel``.
      strides: how many outputs there are for each input, for each axis.
      padding: ``"SAME"``, ``"VALID"``, ``"CIRCULAR"``, a number, or a number or pair for each axis:
        zeros around the inputs with the strides between them. ``"SAME_LOWER"`` is for strides of 1.
      transpose_kernel: flip the kernel and swap its features, so that this is the gradient of a
        convolution with that kernel.
      kernel_dilation, precision, preferred_element_type: as for ``conv``.

    Returns:
      ``(*batch, *spatial, out)``.

    Raises:
      LayerArgumentError: an argument does not fit the number of spatial axes, or the padding the
        strides.

    Example:
      >>> x = jnp.array([[1.0], [2.0]])
      >>> conv_transpose(x, jnp.ones((2, 1, 1)), strides=2).ravel()
      Array([1., 1., 2., 2.], dtype=float32)
    """
    axes = kernel.ndim - 2
    strides = per_axis(strides, axes, "strides")
    kernel_dilation = per_axis(kernel_dilation, axes, "kernel_dilation")
    zeros = canonical_padding(padding, axes, TRANSPOSED_PADDINGS)
    check_transposed(zeros, strides)
    spans = [d * (k - 1) for k, d in zip(kernel.shape[:axes], kernel_dilation, strict=True)]
    continued = None
    if zeros == "CIRCULAR":
        sizes = inputs.shape[-axes - 1 : -1]
        continued, zeros = _continuation(sizes, spans, strides, transpose_kernel)
    elif zeros in ("SAME", "VALID"):
        zeros = tuple(map(functools.partial(_zeros_around, str(zeros)), spans, strides))
    kernel = _flipped(kernel) if transpose_kernel else kernel
    batched = _with_one_batch_axis(inputs, axes, continued)
    batched, out_sharding = _with_explicit_sharding(batched, kernel, None)
    out = jax.lax.conv_general_dilated(
        batched,
        kernel,
        (1,) * axes,
        zeros,
        lhs_dilation=strides,
        rhs_dilation=kernel_dilation,
        dimension_numbers=_dimension_numbers(axes),
        precision=precision,
        **given_options(preferred_element_type=preferred_element_type, out_sharding=out_sharding),
    )
    return _finished(out, bias, inputs.shape[: -axes - 1])


def _zeros_around(padding: str, span: int, stride: int) -> tuple[int, int]:
    """The number of zeros before and after the inputs, as ``jax.lax.conv_transpose`` pads."""
    if padding == "VALID":
        return span, max(span, stride - 1)
    both = span + stride - 1
    before = span if stride > span else -(-both // 2)
    return before, both - before


def _continuation(
    sizes: Sequence[int], spans: Sequence[int], strides: Sequence[int], transpose_kernel: bool
) -> tuple[Pairs, Pairs]:
    """How far inputs are continued periodically on each side, and how much is cut off again.

    Output ``m`` is the sum over kernel entries ``j`` of the input at ``m + j - start``, where
    inputs are ``stride`` apart. SAME places ``start`` likewise.
    """
    continued, cuts = [], []
    for size, span, stride in zip(sizes, spans, strides, strict=True):
        both = span + stride - 1
        start = span if stride > span else both // 2 if transpose_kernel else -(-both // 2)
        before = math.ceil(start / stride)
        last = size * stride - 1 + span - start
        after = last // stride - (size - 1)
        continued.append((before, max(after, 0)))
        length = (before + size - 1 + max(after, 0)) * stride + 1
        cut = start - before * stride
        cuts.append((cut, size * stride + span - length - cut))
    return tuple(continued), tuple(cuts)


@fused
def _flipped(kernel: Array) -> Array:
    """Reverses a kernel along its spatial axes and swaps its feature axes."""
    return jnp.swapaxes(jax.lax.rev(kernel, tuple(range(kernel.ndim - 2))), -1, -2)


def _with_one_batch_axis(
    inputs: Array, axes: int, continued: Pairs | None, mode: str = "wrap"
) -> Array:
    """Inputs as ``(batch, *spatial, features)``, with the spatial axes continued if asked for."""
    if inputs.ndim == axes + 2 and continued is None:
        return inputs
    return _arranged(inputs, axes=axes, continued=continued, mode=mode)


@fused
def _arranged(inputs: Array, *, axes: int, continued: Pairs | None, mode: str) -> Array:
    if inputs.ndim != axes + 2:
        inputs = jnp.reshape(inputs, (-1, *inputs.shape[-axes - 1 :]))
    if continued is None:
        return inputs
    return jnp.pad(inputs, [(0, 0), *continued, (0, 0)], mode=mode)  # pyright: ignore[reportArgumentType]


def _finished(out: Array, bias: Array | None, batch: tuple[int, ...]) -> Array:
    if bias is not None:
        out = add_bias(out, bias)
    return out if len(batch) == 1 else jnp.reshape(out, (*batch, *out.shape[1:]))
