"""Transforms over live objects."""

from linnet.nnx.transforms.shapes import eval_shape as eval_shape
