"""``nnx.transforms.transforms``, where users find the branches and checks."""

from linnet.nnx.transforms.control import cond, switch
from linnet.nnx.transforms.staging import checkify, eval_shape, make_jaxpr

__all__ = [
    "checkify",
    "cond",
    "eval_shape",
    "make_jaxpr",
    "switch",
]
