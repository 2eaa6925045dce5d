"""Linnet: neural networks on JAX."""

from linnet import (
    config as config,
    errors as errors,
    ids as ids,
    jax_utils as jax_utils,
    nnx as nnx,
    serialization as serialization,
    struct as struct,
    traverse_util as traverse_util,
    typing as typing,
)

__version__ = "0.1.0"
