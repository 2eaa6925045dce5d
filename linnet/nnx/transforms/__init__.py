"""Transforms over live objects."""

from linnet.nnx.transforms.axes import Carry, StateAxes, StateSharding
from linnet.nnx.transforms.control import cond, switch
from linnet.nnx.transforms.grad import DiffState, grad, remat, value_and_grad
from linnet.nnx.transforms.jit import cached_partial, jit, jit_partial
from linnet.nnx.transforms.loops import fori_loop, scan, while_loop
from linnet.nnx.transforms.partition import transform_metadata
from linnet.nnx.transforms.retrace import explain_retrace
from linnet.nnx.transforms.staging import checkify, eval_shape, make_jaxpr
from linnet.nnx.transforms.vjp import custom_vjp, jvp, vjp
from linnet.nnx.transforms.vmap import pmap, shard_map, vmap

__all__ = [
    "Carry",
    "DiffState",
    "StateAxes",
    "StateSharding",
    "cached_partial",
    "checkify",
    "cond",
    "custom_vjp",
    "eval_shape",
    "explain_retrace",
    "fori_loop",
    "grad",
    "jit",
    "jit_partial",
    "jvp",
    "make_jaxpr",
    "pmap",
    "remat",
    "scan",
    "shard_map",
    "switch",
    "transform_metadata",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
