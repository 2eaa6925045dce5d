"""The name under which users know ``jit`` and its kin."""

from linnet.nnx.transforms.axes import StateSharding as StateSharding
from linnet.nnx.transforms.devices import shard_map as shard_map
from linnet.nnx.transforms.jit import jit as jit
from linnet.nnx.transforms.jit import jit_partial as jit_partial
