"""``nnx.transforms.iteration``, where users find the loops and maps."""

from linnet.nnx.transforms.axes import Carry, StateAxes
from linnet.nnx.transforms.loops import fori_loop, scan, while_loop
from linnet.nnx.transforms.partition import transform_metadata
from linnet.nnx.transforms.vmap import pmap, vmap

__all__ = [
    "Carry",
    "StateAxes",
    "fori_loop",
    "pmap",
    "scan",
    "transform_metadata",
    "vmap",
    "while_loop",
]
