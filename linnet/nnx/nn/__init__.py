"""Layers, one file a family."""

from linnet.nnx.nn import dtypes as dtypes
