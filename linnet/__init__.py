"""Linnet: neural networks on JAX."""

from linnet import config as config
from linnet import errors as errors
from linnet import ids as ids
from linnet import jax_utils as jax_utils
from linnet import nnx as nnx
from linnet import serialization as serialization
from linnet import struct as struct
from linnet import traverse_util as traverse_util
from linnet import typing as typing

__version__ = "0.1.0"
