"""The short name of ``linnet.nnx.nn.initializers``."""

from linnet.nnx.nn.initializers import *
