"""Activation functions: those of ``jax.nn``, and some that need more.

The derivative of ``gelu`` and ``silu`` needs an intermediate value, which XLA keeps beside the
input. In a transformer block these are the largest arrays, written in the forward pass and read in
the backward pass. On a GPU computing the value again from the input takes no extra time, since both
passes wait for memory, so there only the input is kept (``jax.checkpoint``). The outputs are the
same either way.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.nn import (
    celu as celu,
    elu as elu,
    glu as glu,
    hard_sigmoid as hard_sigmoid,
    hard_silu as hard_silu,
    hard_swish as hard_swish,
    hard_tanh as hard_tanh,
    leaky_relu as leaky_relu,
    log_sigmoid as log_sigmoid,
    log_softmax as log_softmax,
    logsumexp as logsumexp,
    relu as relu,
    relu6 as relu6,
    selu as selu,
    sigmoid as sigmoid,
    soft_sign as soft_sign,
    softmax as softmax,
    softplus as softplus,
    standardize as standardize,
)
from jax.numpy import tanh as tanh

from linnet.functional.fusing import fused
from linnet.functional.sharding import placed


def one_hot(
    x: Any, num_classes: int, *, dtype: Any = None, axis: int | str = -1, out_sharding: Any = None
) -> Array:
    """Vectors that are 1 at an index and 0 elsewhere.

    Args:
      x: the indices, integers; one that is no class gives zeros.
      num_classes: the size of the new axis.
      dtype: of the output; by default JAX's float.
      axis: where the new axis goes.
      out_sharding: the sharding of the output.

    Returns:
      The vectors.

    Example:
      >>> one_hot(jnp.array([1, 0]), 3)
      Array([[0., 1., 0.],
             [1., 0., 0.]], dtype=float32)
    """
    return placed(jax.nn.one_hot(x, num_classes, dtype=dtype, axis=axis), out_sharding)


def on_gpu() -> bool:
    """Whether computations run on a GPU unless they are told otherwise."""
    return jax.default_backend() == "gpu"


def _keeping_its_input(function: Callable[..., Array], x: Any, **options: Any) -> Array:
    """Calls a function whose derivative keeps ``x`` alone on a GPU."""
    call = functools.partial(function, **options)
    if isinstance(x, Tracer) and on_gpu():
        return jax.checkpoint(call)(x)
    return call(x)


def gelu(x: Any, approximate: bool = True) -> Array:
    """Gaussian error linear unit: ``x`` times the normal distribution function at ``x``.

    Args:
      x: the values.
      approximate: by tanh; otherwise by the error function.

    Returns:
      The values.

    Example:
      >>> gelu(jnp.array([-1.0, 1.0]))
      Array([-0.15880796,  0.841192  ], dtype=float32)
    """
    return _keeping_its_input(jax.nn.gelu, x, approximate=approximate)


def silu(x: Any) -> Array:
    """Sigmoid linear unit, also known as swish: ``x * sigmoid(x)``.

    Args:
      x: the values.

    Returns:
      The values.

    Example:
      >>> silu(jnp.array([-1.0, 1.0]))
      Array([-0.26894143,  0.7310586 ], dtype=float32)
    """
    return _keeping_its_input(jax.nn.silu, x)


swish = silu


def identity(x: Any) -> Any:
    """Returns its argument.

    Args:
      x: anything.

    Returns:
      The same.

    Example:
      >>> identity(3)
      3
    """
    return x


@fused
def prelu(x: Array, negative_slope: Array) -> Array:
    """Multiplies negative values by a slope: ``x if x >= 0 else negative_slope * x``.

    Args:
      x: the values.
      negative_slope: of the same dtype; a number, or an array that broadcasts.

    Returns:
      The values.

    Example:
      >>> prelu(jnp.array([-2.0, 3.0]), jnp.array(0.1))
      Array([-0.2,  3. ], dtype=float32)
    """
    return jnp.where(x >= 0, x, negative_slope * x)
