"""Linnet: neural networks on JAX."""

from linnet import errors as errors
from linnet import nnx as nnx
from linnet import serialization as serialization
from linnet import struct as struct

__version__ = "0.1.0"
