"""The older home of the optimizers."""

from linnet.nnx.training.optimizer import *
