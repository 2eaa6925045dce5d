"""The older name of ``linnet.nnx.pytreelib``."""

from linnet.nnx.pytreelib import *
