"""The older name of ``linnet.nnx.graphlib``."""

from linnet.nnx.graphlib import *
