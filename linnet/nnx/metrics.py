"""The older home of the metrics."""

from linnet.nnx.training.metrics import *
