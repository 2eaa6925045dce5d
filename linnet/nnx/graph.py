"""The older name of ``linnet.nnx.graphlib``."""

from linnet.nnx.graphlib import *
from linnet.nnx.transforms.jit import cached_partial as cached_partial
from linnet.typing import Key as Key, PathParts as PathParts
