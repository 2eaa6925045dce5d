"""``nnx.transforms.compilation``, where users find ``jit`` and ``shard_map``."""

from linnet.nnx.transforms.axes import StateSharding
from linnet.nnx.transforms.jit import jit, jit_partial
from linnet.nnx.transforms.vmap import shard_map

__all__ = [
    "StateSharding",
    "jit",
    "jit_partial",
    "shard_map",
]
